r"""Gradients that are never written down: norms and sums from layers' inputs and output gradients.

For a model of linear and norm layers, each used once and at one position per sample, the gradient
of sample i in layer l is g_{l,i} x_{l,i}ᵀ, so that with per-sample weights c (the loss's, a rate's,
zero outside a group)

    ‖Σ_i c_i ∇_i‖² = cᵀ K c,    K_ij = Σ_l (x_{l,i} · x_{l,j}) (g_{l,i} · g_{l,j}),
    Σ_k s_k Σ_{i∈k} c_i ∇_i = Σ_i (s_{k(i)} c_i g_{l,i}) x_{l,i}ᵀ    in layer l.

K is computed for pairs of samples of the same user only; the sum is one matrix product, as in plain
training. It pays where users have few samples and layers are wide: n_k² (in + out) numbers against
in · out for every user.

K is in double precision: where gradients of a user's samples cancel, cᵀ K c in single precision
could be far below the truth, and a norm that is too small breaks the bound that privacy rests on.
The sum's own rounding, at most ε Σ_i |c_i| √K_ii, is allowed for on K's diagonal likewise:
(‖·‖ + ε Σ_i |c_i| √K_ii)² ≤ cᵀ (K + 3 n ε diag K) c for n ≥ n_k; here n is the largest n_k, and ε
four units of the sum's precision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fpfl.summing import weighted_sum
from fpfl.users.packing import Ints
from fpfl.users.rows import LOSS, OVERALL


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
class Pairs:
    """The pairs of samples i < j of the same user.

    ``one`` and ``other`` (P,) are their rows, ``owner`` (P,) is their user; ``most`` is the largest
    number of samples that a user has.
    """

    one: Tensor
    other: Tensor
    owner: Tensor
    most: int

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
        return cls(one, other, owner, int(sizes.max(initial=0)))


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
    owner
        Shape (N,): the samples' users.
    pairs
        The pairs of samples of the same user.
    users, parameters
        B and p.
    """

    factors: Sequence[Factor]
    weights: Tensor
    member: Tensor
    owner: Tensor
    pairs: Pairs
    users: int
    parameters: int

    def norms(self, names: Collection[str]) -> Tensor:
        """See `Gradients`; with what the sum's rounding may add."""
        weights, seeds = self._weights(names)
        exact = weights.double()
        one, other = (exact.index_select(1, rows) for rows in (self.pairs.one, self.pairs.other))
        lengths, products = self._kernel
        if len(lengths) > 1:
            lengths, products = lengths[seeds], products[seeds]
        squares = exact.new_zeros(self.users)
        squares.index_add_(0, self.owner, (exact.square() * lengths).sum(dim=0))
        squares.index_add_(0, self.pairs.owner, (one.mul_(other) * products).sum(dim=0))
        return squares.clamp_(min=0.0).sqrt_().to(self.weights.dtype)

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

    @cached_property
    def _kernel(self) -> tuple[Tensor, Tensor]:
        """K_ii (seeds, N), with the allowance for rounding, and 2 K_ij (seeds, P) of the pairs."""
        layers: dict[int, list[Factor]] = {}
        for factor in self.factors:  # a layer's weight and bias share g
            layers.setdefault(id(factor.g), []).append(factor)
        lengths = products = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        for factors in layers.values():
            own, pairs = self._products(factors[0].g)
            inputs = [factor.x for factor in factors if factor.x is not None]
            if inputs:  # a layer has one weight; its bias, if any, has x = 1
                lone, both = self._products(inputs[0].unsqueeze(0))
                ones = float(len(factors) - 1)
                own, pairs = own * lone.add_(ones), pairs * both.add_(ones)
            lengths, products = lengths + own, products + pairs
        slack = 3 * 4 * torch.finfo(self.weights.dtype).eps * self.pairs.most
        return lengths * (1.0 + slack), products * 2.0

    def _products(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """r_i · r_i of all samples and r_i · r_j of the pairs, for every seed's rows (N, width)."""
        exact = rows.double()
        one, other = (exact.index_select(1, side) for side in (self.pairs.one, self.pairs.other))
        return exact.square().sum(dim=2), one.mul_(other).sum(dim=2)


def _selections(seeds: list[int], kinds: int) -> list[tuple[int, slice | list[int]]]:
    """Which weights belong to which seed: all to the one there is, or each to its own."""
    if kinds == 1:
        return [(0, slice(None))]
    return [(m, [q for q, own in enumerate(seeds) if own == m]) for m in sorted(set(seeds))]
