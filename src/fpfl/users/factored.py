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
- a user whose samples cancel to less than M/64 is scaled as if it had that norm, so that the terms
  of its row add up to 64 bounds at most, and those of `AT_ONCE` users to less than 2⁵³ steps;
- rounding to â moves the row by at most E = ½ n_k √(Q Σ_l out_l in_l 2³⁶) steps for Q weights a
  sample: that part of the bound is left free (`FactoredGradients.unrounded`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fpfl.summing import STEP_BITS, tree_sum, weighted_sum
from fpfl.users.packing import Ints
from fpfl.users.rows import LOSS, OVERALL

INPUT_BITS, GRADIENT_BITS = 18, 20
"""How many bits whole numbers of inputs and of output gradients have."""

WIDEST = 2**12
"""Layers up to so wide have products below 2⁵³."""

CANCELLED = 64.0
"""A user counts as having at least this part of the length of its samples."""

AT_ONCE = 128
"""Users whose rows are added up in one product: 128 · 64 · 2³⁸ is 2⁵¹."""


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
class _Whole:
    """Rows (..., N, width) as whole numbers times a power of two of each row's own (..., N)."""

    numbers: Tensor
    unit: Tensor

    @classmethod
    def of(cls, rows: Tensor, bits: int) -> _Whole:
        """Round rows to whole numbers up to 2^bits."""
        rows = rows.double()
        largest = rows.abs().amax(dim=-1)
        _, exponent = torch.frexp(largest)
        unit = torch.ldexp(torch.ones_like(largest), exponent - bits)
        return cls((rows / unit.unsqueeze(-1)).round_(), unit)

    def products(self, part: slice, users: int) -> Tensor:
        """r_i · r_j of the samples of users with equally many each: (..., users, n, n)."""
        numbers = self.numbers[..., part, :]
        shape = numbers.shape[:-2]
        numbers = numbers.reshape(-1, numbers.shape[-2] // users, numbers.shape[-1])
        exact = torch.bmm(numbers, numbers.transpose(1, 2))
        exact = exact.reshape(*shape, users, *exact.shape[1:])
        unit = self.unit[..., part].reshape(*shape, users, -1)
        return exact * unit.unsqueeze(-1) * unit.unsqueeze(-2)


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
        How many samples each user has, one user's after the other's, in rising order.
    parameters
        p.
    """

    factors: Sequence[Factor]
    weights: Tensor
    member: Tensor
    sizes: Ints
    parameters: int

    @property
    def users(self) -> int:
        """B."""
        return len(self.sizes)

    def norms(self, names: Collection[str]) -> Tensor:
        """See `Gradients`; never less than the truth, nor than M/64."""
        weights, seeds = self._weights(names)
        found = []
        for part, users, kernel in self._kernels:
            c = weights[:, part].double().reshape(len(weights), users, -1)
            each = kernel if len(kernel) == 1 else kernel[seeds]
            table = tree_sum(each * c.unsqueeze(-1) * c.unsqueeze(-2), 0)
            lengths = tree_sum(table.diagonal(dim1=1, dim2=2).sqrt(), 1).square()
            squares = tree_sum(table.flatten(1), 1).clamp(min=0.0) + 2.0**-40 * lengths
            found.append(torch.maximum(squares, lengths / CANCELLED**2).sqrt())
        return torch.cat(found)

    def unrounded(self, names: Collection[str]) -> Tensor | None:
        """See `Gradients`: E, as a part of the bound."""
        lengths = sum(
            g.shape[2] * (1 if x is None else 4**INPUT_BITS * x.shape[1])
            for x, g in ((factor.x, factor.g) for factor in self.factors)
        )
        rows = len(self._weights(names)[0])
        sizes = torch.from_numpy(self.sizes).to(self.weights.device, torch.float64)
        return sizes * (0.5 * math.sqrt(rows * lengths) * 2.0**-STEP_BITS)

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """See `Gradients`."""
        weights, seeds = self._weights(names)
        weights = weights * scale.index_select(0, self.owner)
        total = scale.new_zeros(len(weights), self.parameters, dtype=torch.int64)
        for part in self._parts:
            for x, g, place in self._whole:
                unit = g.unit if x is None else g.unit * x.unit
                for seed, rows in _selections(seeds, len(g.numbers)):
                    c = weights[rows, part] * unit[seed, part]
                    numbers = g.numbers[seed, part]
                    # (Q, N) weights on (N, out) gradients, in whole steps.
                    steps = (c.unsqueeze(2) * numbers).round_()
                    if x is None:
                        product = steps.sum(dim=1)
                    else:
                        steps = steps.transpose(1, 2).reshape(-1, steps.shape[1])
                        product = (steps @ x.numbers[part]).reshape(len(c), -1)
                    total[rows, place] += product.long()
        counts = [len(self._block_weights(name)[0]) for name in names]
        found = torch.split(total, counts)
        return {n: t.reshape(-1) for n, t in zip(names, found, strict=True)}, None

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Gradients`."""
        weights, seeds = self._weights(names)
        weights = weights * scale.index_select(0, self.owner)
        total = scale.new_zeros(len(weights), self.parameters, dtype=torch.float64)
        for factor in self.factors:
            for seed, rows in _selections(seeds, len(factor.g)):
                part, g = weights[rows], factor.g[seed]
                if factor.x is None:
                    total[rows, factor.place] = weighted_sum(part, g).to(total.dtype)
                    continue
                # (Q, N) weights on (N, out) gradients, against (N, in) inputs: one product where
                # there are not too many samples for its precision.
                scaled = (part.unsqueeze(1) * g.T).reshape(-1, len(g))
                product = weighted_sum(scaled, factor.x).reshape(len(part), -1)
                total[rows, factor.place] = product.to(total.dtype)
        counts = [len(self._block_weights(name)[0]) for name in names]
        return {n: t.reshape(-1) for n, t in zip(names, torch.split(total, counts), strict=True)}

    def block(self, name: str) -> Tensor:
        """See `Gradients`: user by user, for whoever wants to look."""
        each = torch.eye(self.users, dtype=self.weights.dtype, device=self.weights.device)
        return torch.stack([self.totals([name], one)[name] for one in each]).to(each.dtype)

    def without(self, bad: Tensor) -> Self:
        """See `Gradients`."""
        rows = bad[self.owner].unsqueeze(1)
        return replace(
            self,
            factors=[
                replace(
                    factor,
                    x=None if factor.x is None else factor.x.masked_fill(rows, 0.0),
                    g=factor.g.masked_fill(rows, 0.0),
                )
                for factor in self.factors
            ],
            weights=self.weights.masked_fill(rows.T, 0.0),
        )

    def joined(self, more: Self) -> Self:
        """See `Gradients`."""
        raise NotImplementedError("users with so many samples are computed as cells")

    @cached_property
    def owner(self) -> Tensor:
        """Shape (N,): the samples' users."""
        owner = np.repeat(np.arange(self.users), self.sizes)
        return torch.from_numpy(owner).to(self.weights.device)

    @cached_property
    def _runs(self) -> list[tuple[slice, int, int]]:
        """Runs of users with equally many samples: their rows, how many users, how many samples."""
        runs, row = [], 0
        for size, users in zip(*np.unique(self.sizes, return_counts=True), strict=True):
            rows = int(size) * int(users)
            runs.append((slice(row, row + rows), int(users), int(size)))
            row += rows
        return runs

    @cached_property
    def _parts(self) -> list[slice]:
        """Rows of `AT_ONCE` users each."""
        edges = np.concatenate([[0], np.cumsum(self.sizes)])
        bounds = [*range(0, self.users, AT_ONCE), self.users]
        return [slice(int(edges[a]), int(edges[b])) for a, b in pairwise(bounds)]

    @cached_property
    def _whole(self) -> list[tuple[_Whole | None, _Whole, slice]]:
        """The factors in whole numbers; a layer's weight and bias share g."""
        shared: dict[int, _Whole] = {}
        found = []
        for factor in self.factors:
            if id(factor.g) not in shared:
                shared[id(factor.g)] = _Whole.of(factor.g, GRADIENT_BITS)
            x = None if factor.x is None else _Whole.of(factor.x, INPUT_BITS)
            found.append((x, shared[id(factor.g)], factor.place))
        return found

    @cached_property
    def _kernels(self) -> list[tuple[slice, int, Tensor]]:
        """K (seeds, users, n, n) of every run of users."""
        layers: dict[int, tuple[_Whole, list[_Whole | None]]] = {}
        for x, g, _ in self._whole:
            layers.setdefault(id(g), (g, []))[1].append(x)
        found = []
        for part, users, _ in self._runs:
            kernel: Tensor | None = None
            for g, inputs in layers.values():
                own = g.products(part, users)
                both = tree_sum(
                    torch.stack(
                        [
                            torch.ones_like(own[0]) if x is None else x.products(part, users)
                            for x in inputs
                        ]
                    ),
                    0,
                )
                kernel = own * both if kernel is None else kernel + own * both
            assert kernel is not None  # a model has parameters
            found.append((part, users, kernel))
        return found

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
