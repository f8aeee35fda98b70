r"""Gradients that are never written down: norms and sums from layers' inputs and output gradients.

For a model of linear and norm layers, each used once and at one position per sample, the gradient
of sample i in layer l is g_{l,i} x_{l,i}ᵀ, so that with per-sample weights c (the loss's, a rate's,
zero outside a group)

    ‖Σ_i c_i ∇_i‖² = cᵀ K c,    K_ij = Σ_l (x_{l,i} · x_{l,j}) (g_{l,i} · g_{l,j}),
    Σ_k s_k Σ_{i∈k} c_i ∇_i = Σ_i (s_{k(i)} c_i g_{l,i}) x_{l,i}ᵀ    in layer l.

K is computed for pairs of samples of the same user only; the sum is one matrix product, as in plain
training. It pays where users have few samples and layers are wide: n_k² (in + out) numbers against
in · out for every user.

Nothing here rounds by the company that a user is in, whatever the kernels do:

- A sample's x is written as x̂ 2^e, x̂ in whole numbers up to 2¹⁸, and its g as ĝ 2^f, ĝ up to 2²⁰,
  e and f being the sample's own. Products x̂_i · x̂_j and ĝ_i · ĝ_j are whole numbers below 2⁵³:
  exact in double precision, in any order. What follows is computed number by number.
- In the sum, s c ĝ 2^(f+e), in steps, is rounded to whole numbers â, sample by sample; â x̂ᵀ added
  up over users is a product of whole numbers below 2⁵³ again.

So a user's row is z^k = Σ_i â_i x̂_iᵀ, a vector of whole numbers that depends on that user alone,
and a sum of users is the sum of theirs. With M = Σ_i √(cᵢ² K_ii), the length of a user's samples
without any cancelling,

- cᵀ K c, rounded, is off by less than 2⁻⁴⁰ M²: that is added;
- a user whose samples cancel to less than M/16 is scaled as if it had that norm, so that the terms
  of its row add up to 16 bounds at most, and those of `AT_ONCE` users to less than 2⁵³ steps;
- rounding to â moves the row by at most E = ½ n_k √(Q Σ_l out_l in_l 2³⁶) steps for Q weights a
  sample: that part of the bound is left free (`FactoredGradients.unrounded`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from fpfl.numerics.summing import STEP_BITS, ByRun, tree_sum, weighted_sum
from fpfl.users.packing import Ints
from fpfl.users.precision import repeatable_sums
from fpfl.users.rows import LOSS, OVERALL

if TYPE_CHECKING:
    from fpfl.users.inputs import Seen

INPUT_BITS, GRADIENT_BITS = 18, 20
"""How many bits whole numbers of inputs and of output gradients have."""

WIDEST, WIDEST_INPUT = 2**12, 2**16
"""Layers with up to so many outputs and inputs have products below 2⁵³."""

CANCELLED = 16.0
"""A user counts as having at least this part of the length of its samples."""

AT_ONCE = 512
"""Users whose rows are added up in one product: 512 · 16 · 2³⁸ is 2⁵¹."""


@dataclass(frozen=True)
class Factor:
    """One parameter's gradients: g_i x_iᵀ of sample i, or g_i alone where x is None.

    ``g`` has shape (S, N, out), for S seeds that were sent back; ``place`` is where the parameter
    stands in w.
    """

    x: Tensor | None
    g: Tensor
    place: slice


@dataclass(frozen=True)
class Whole:
    """Rows (..., N, width) as whole numbers times a power of two of each row's own (..., N)."""

    numbers: Tensor
    unit: Tensor

    @classmethod
    def of(cls, rows: Tensor, bits: int) -> Whole:
        """Round rows to whole numbers up to 2^bits."""
        # 2^(e − bits) by its bits, for 2^e that no number of the row reaches: a power function
        # need not be exact.
        exponent = torch.frexp(rows.abs().amax(dim=-1)).exponent.long()
        unit = ((exponent + (1023 - bits)).clamp_(1, 2046) << 52).view(torch.float64)
        return cls((rows / unit.unsqueeze(-1)).round_(), unit)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self.numbers.shape[-1]

    def rows(self, part: slice) -> Tensor:
        """Some of the rows."""
        return self.numbers[part]

    def products(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """r_i · r_i of all rows and r_i · r_j of the pairs, in squares of units: exact."""
        own = self.numbers.square().sum(dim=-1)
        one, other = (self.numbers.index_select(-2, rows) for rows in (pairs.one, pairs.other))
        return own, one.mul_(other).sum(dim=-1)


@dataclass(frozen=True)
class Pairs:
    """The pairs of samples i < j of the same user.

    ``one`` and ``other`` (P,) are their rows, ``owner`` (P,) is their user.
    """

    one: Tensor
    other: Tensor
    owner: Tensor

    @classmethod
    def of(cls, sizes: Ints, device: torch.device) -> Pairs:
        """The pairs of users with the given numbers of samples, one user after the other."""
        starts = np.cumsum(sizes) - sizes
        left = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)  # samples before this one
        later = np.repeat(np.arange(len(left)), left)
        # The first, second, ... of the samples before each.
        first = np.repeat(starts, sizes) - (np.cumsum(left) - left)
        earlier = first[later] + np.arange(len(later))
        user = np.repeat(np.arange(len(sizes)), sizes)[later]
        one, other, owner = torch.from_numpy(np.stack([earlier, later, user])).to(device)
        return cls(one, other, owner)


@dataclass(frozen=True)
class _Layer:
    """A layer's gradients ĝ_i x̂_iᵀ, x̂ with a last column of ones for the bias where it has one.

    ``places`` are where the columns of the product go: the weight's, then the bias's.
    """

    x: Whole | Seen | None
    g: Whole
    places: tuple[slice, ...]

    @property
    def unit(self) -> Tensor:
        """What a whole number of ĝ x̂ᵀ stands for, (S, N)."""
        return self.g.unit if self.x is None else self.g.unit * self.x.unit

    @property
    def widths(self) -> int:
        """out · in 2³⁶, or out: the largest square of Σ over the outputs of ‖x̂‖²."""
        out = self.g.numbers.shape[-1]
        return int(out if self.x is None else out * self.x.width * 4**INPUT_BITS)

    def put(self, total: Tensor, rows: slice | list[int], product: Tensor) -> None:
        """Add a product (R, Q, out, in), or (R, Q, out), to where it belongs."""
        if self.x is None:
            total[:, rows, self.places[0]] += product
            return
        first, *rest = self.places
        columns = (first.stop - first.start) // product.shape[2]
        total[:, rows, first] += product[..., :columns].flatten(2)
        for place in rest:
            total[:, rows, place] += product[..., columns]


@dataclass(frozen=True)
class FactoredGradients:
    """Gradients of B users as factors of N samples.

    Parameters
    ----------
    factors
        Of every parameter.
    weights
        Shape (1 + R, N): what sample i's gradients count for in the loss and in each rate.
    member
        Shape (N, G): the samples' groups, as numbers.
    sizes
        How many samples each user has, one user's after the other's; in rising order, but for
        users of several runs.
    parameters
        p.
    rows
        Which rows of the factors are samples, (N,), where some are not.
    runs
        Of which runs the users are, where there are several; a run's are together.
    seen
        What is known of a layer's inputs already.
    """

    factors: Sequence[Factor]
    weights: Tensor
    member: Tensor
    sizes: Ints
    parameters: int
    rows: Tensor | None = None
    runs: ByRun | None = None
    seen: Seen | None = None

    @property
    def users(self) -> int:
        """B."""
        return len(self.sizes)

    def norms(self, names: Collection[str]) -> Tensor:
        """See `Gradients`; never less than the truth, nor than M/16."""
        weights, seeds = self._weights(names)
        c = weights.double()
        own, both = self._kernel
        if len(own) > 1:
            own, both = own[seeds], both[seeds]
        pairs = [c.index_select(1, rows) for rows in (self._pairs.one, self._pairs.other)]
        lengths = tree_sum(c.square() * own, 0)
        products = tree_sum(pairs[0].mul_(pairs[1]) * both, 0)
        with repeatable_sums(c.device):  # in the order of each user's samples
            squares, masses = c.new_zeros(2, self.users).unbind()
            squares.index_add_(0, self.owner, lengths).index_add_(0, self._pairs.owner, products)
            masses.index_add_(0, self.owner, lengths.sqrt())
        masses = masses.square_()
        squares = squares.clamp_(min=0.0) + 2.0**-40 * masses
        return torch.maximum(squares, masses / CANCELLED**2).sqrt_()

    def unrounded(self, names: Collection[str]) -> Tensor | None:
        """See `Gradients`: E, as a part of the bound."""
        rows = len(self._weights(names)[0])
        sizes = torch.from_numpy(self.sizes).to(self.weights.device, torch.float64)
        widths = sum(layer.widths for layer in self._layers)
        return sizes * (0.5 * math.sqrt(rows * widths) * 2.0**-STEP_BITS)

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """See `Gradients`."""
        weights, seeds = self._weights(names)
        weights = weights * scale.index_select(0, self.owner)
        total = scale.new_zeros(self._count, len(weights), self.parameters, dtype=torch.int64)
        for layer in self._layers:
            unit = layer.unit
            for seed, rows in _selections(seeds, len(unit)):
                # (Q, N) weights on (N, out) gradients, in whole steps.
                c = (weights[rows] * unit[seed]).unsqueeze(2)
                steps = (c * layer.g.numbers[seed]).round_().transpose(1, 2)
                if layer.x is None:
                    found = [steps[..., part].sum(dim=2) for _, part in self._parts]
                    products = torch.stack(found)
                else:
                    flat = steps.shape[0] * steps.shape[1]
                    products = steps.new_empty(len(self._parts), flat, layer.x.width)
                    for product, (_, part) in zip(products, self._parts, strict=True):
                        torch.mm(
                            steps[..., part].reshape(flat, -1), layer.x.rows(part), out=product
                        )
                    products = products.reshape(len(products), *steps.shape[:2], -1)
                layer.put(total, rows, self._by_run(products.long()))
        counts = [len(self._block_weights(name)[0]) for name in names]
        blocks = torch.split(total[0] if self.runs is None else total, counts, dim=-2)
        return {n: t.flatten(-2) for n, t in zip(names, blocks, strict=True)}, None

    @property
    def _count(self) -> int:
        return 1 if self.runs is None else self.runs.count

    def _by_run(self, parts: Tensor) -> Tensor:
        """Add up parts (P, ...) of the same run: (R, ...)."""
        runs = [run for run, _ in self._parts]
        if runs == list(range(self._count)):
            return parts
        total = parts.new_zeros(self._count, *parts.shape[1:])
        return total.index_add_(0, torch.tensor(runs, device=parts.device), parts)

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Gradients`."""
        weights, seeds = self._weights(names)
        weights = weights * scale.index_select(0, self.owner)
        total = scale.new_zeros(self._count, len(weights), self.parameters, dtype=torch.float64)
        for factor in self.factors:
            for seed, rows in _selections(seeds, len(factor.g)):
                part, g = weights[rows], self._samples(factor.g[seed])
                # (Q, N) weights on (N, out) gradients, against (N, in) inputs: one product where
                # there are not too many samples for its precision.
                x = None if factor.x is None else self._samples(factor.x)
                scaled = part if x is None else (part.unsqueeze(1) * g.T).reshape(-1, len(g))
                other = g if x is None else x
                for run, some in self._spans:
                    product = weighted_sum(scaled[:, some], other[some]).reshape(len(part), -1)
                    total[run, rows, factor.place] = product.to(total.dtype)
        counts = [len(self._block_weights(name)[0]) for name in names]
        blocks = torch.split(total[0] if self.runs is None else total, counts, dim=-2)
        return {n: t.flatten(-2) for n, t in zip(names, blocks, strict=True)}

    def block(self, name: str) -> Tensor:
        """See `Gradients`: user by user, for whoever wants to look."""
        each = torch.eye(self.users, dtype=self.weights.dtype, device=self.weights.device)
        return torch.stack([self.totals([name], one)[name] for one in each]).to(each.dtype)

    def without(self, bad: Tensor) -> Self:
        """See `Gradients`."""
        rows = bad[self.owner]
        marked = rows if self.rows is None else self._marked(rows)
        marked = marked.unsqueeze(1)
        # A weight and a bias go on sharing their g: by that they are known as one layer.
        shared = {id(f.g): f.g.masked_fill(marked, 0.0) for f in self.factors}
        return replace(
            self,
            factors=[
                Factor(
                    None if factor.x is None else factor.x.masked_fill(marked, 0.0),
                    shared[id(factor.g)],
                    factor.place,
                )
                for factor in self.factors
            ],
            weights=self.weights.masked_fill(rows, 0.0),
        )

    def _marked(self, samples: Tensor) -> Tensor:
        """Which rows are samples that are marked."""
        assert self.rows is not None  # asked where rows are more than samples
        marked = samples.new_zeros(self.factors[0].g.shape[1])
        return marked.index_copy_(0, self.rows, samples)

    def joined(self, more: Self) -> Self:
        """See `Gradients`."""
        raise NotImplementedError("users with so many samples are computed as cells")

    @cached_property
    def owner(self) -> Tensor:
        """Shape (N,): the samples' users."""
        owner = np.repeat(np.arange(self.users), self.sizes)
        return torch.from_numpy(owner).to(self.weights.device)

    def _samples(self, values: Tensor) -> Tensor:
        """Those of the rows (..., N, width) that are samples."""
        return values if self.rows is None else values.index_select(-2, self.rows)

    @cached_property
    def _pairs(self) -> Pairs:
        return Pairs.of(self.sizes, self.weights.device)

    @cached_property
    def _spans(self) -> list[tuple[int, slice]]:
        """Each run that there is, and its rows."""
        return self._cut(self.users)

    @cached_property
    def _parts(self) -> list[tuple[int, slice]]:
        """Runs, and rows of up to `AT_ONCE` users of them."""
        return self._cut(AT_ONCE)

    def _cut(self, most: int) -> list[tuple[int, slice]]:
        edges = np.concatenate([[0], np.cumsum(self.sizes)])
        runs = np.zeros(self.users, dtype=np.int64)
        if self.runs is not None:
            known = self.runs.numbers
            runs = self.runs.of_rows.cpu().numpy() if known is None else known
        first = np.flatnonzero(np.diff(runs, prepend=-1))
        bounds = [*first.tolist(), self.users]
        return [
            (int(runs[begin]), slice(int(edges[a]), int(edges[min(a + most, end)])))
            for begin, end in pairwise(bounds)
            for a in range(begin, end, most)
        ]

    @cached_property
    def _layers(self) -> list[_Layer]:
        """The layers in whole numbers; a weight and a bias share g."""
        shared: dict[int, list[Factor]] = {}
        for factor in self.factors:
            shared.setdefault(id(factor.g), []).append(factor)
        layers = []
        for factors in shared.values():
            g = Whole.of(self._samples(factors[0].g), GRADIENT_BITS)
            weights = [factor for factor in factors if factor.x is not None]
            rest = [factor for factor in factors if factor.x is None]
            if not weights:
                layers += [_Layer(None, g, (factor.place,)) for factor in rest]
                continue
            (weight,) = weights
            places = (weight.place, *(factor.place for factor in rest))
            if rest and self.seen is not None and weight.x is self.seen.x:
                layers.append(_Layer(self.seen, g, places))
                continue
            assert weight.x is not None  # chosen for it
            x = self._samples(weight.x)
            if rest:
                x = functional.pad(x, (0, 1), value=1.0)
            layers.append(_Layer(Whole.of(x, INPUT_BITS), g, places))
        return layers

    @cached_property
    def _kernel(self) -> tuple[Tensor, Tensor]:
        """K_ii (seeds, N) and 2 K_ij (seeds, P) of the pairs."""
        lengths = products = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        for layer in self._layers:
            own, both = layer.g.products(self._pairs)
            if layer.x is not None:
                lone, pairs = layer.x.products(self._pairs)
                own, both = own * lone, both * pairs
            # Of both sides together before it is squared: a gradient's alone may be so small that
            # its square is zero, beside an input so large that their product is not.
            unit = layer.unit
            one, other = (unit.index_select(-1, r) for r in (self._pairs.one, self._pairs.other))
            lengths, products = lengths + own * unit.square(), products + both * (one * other)
        return lengths, products * 2.0

    def _weights(self, names: Collection[str]) -> tuple[Tensor, list[int]]:
        """Blocks' gradients as weights of samples (Q, N), and the seed each belongs to."""
        parts = [self._block_weights(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part for part, _ in parts]), [m for _, seeds in parts for m in seeds]

    def _block_weights(self, name: str) -> tuple[Tensor, list[int]]:
        rates = range(1, len(self.weights))
        if name == LOSS:
            return self.weights[:1], [0]
        if name == OVERALL:
            return self.weights[1:], list(rates)
        groups = self.member.shape[1]
        pairs = self.weights[1:].unsqueeze(1) * self.member.T
        return pairs.flatten(0, 1), [r for r in rates for _ in range(groups)]


def _selections(seeds: list[int], kinds: int) -> list[tuple[int, slice | list[int]]]:
    """Which weights belong to which seed: all to the one there is, or each to its own."""
    if kinds == 1:
        return [(0, slice(None))]
    return [(m, [q for q, own in enumerate(seeds) if own == m]) for m in sorted(set(seeds))]
