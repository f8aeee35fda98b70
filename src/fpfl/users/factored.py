r"""Gradients that are never written down: norms and sums from layers' inputs and output gradients.

For a model of linear and norm layers, each used once and at one position per sample, the gradient
of sample i in layer l is g_{l,i} x_{l,i}ᵀ, so that with per-sample weights c (the loss's, a rate's,
zero outside a group)

    ‖Σ_i c_i ∇_i‖² = cᵀ K c,    K_ij = Σ_l (x_{l,i} · x_{l,j}) (g_{l,i} · g_{l,j}),
    Σ_k s_k Σ_{i∈k} c_i ∇_i = Σ_i (s_{k(i)} c_i g_{l,i}) x_{l,i}ᵀ    in layer l.

K is computed per user; the sum is one matrix product, as in plain training. It pays where users
have few samples and layers are wide: n_k² (in + out) against in · out numbers per user.

K is in double precision: where gradients of a user's samples cancel, cᵀ K c in single precision
could be far below the truth, and a norm that is too small breaks the bound that privacy rests on.
The sum's own rounding, at most ε Σ_i |c_i| √K_ii, is allowed for on K's diagonal likewise:
(‖·‖ + ε Σ_i |c_i| √K_ii)² ≤ cᵀ (K + 3 n_k ε diag K) c.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fpfl.users.packing import Bucket
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
    buckets
        How the rows are packed; cells are users here.
    users, parameters
        B and p.
    """

    factors: Sequence[Factor]
    weights: Tensor
    member: Tensor
    owner: Tensor
    buckets: tuple[Bucket, ...]
    users: int
    parameters: int

    def norms(self, names: Collection[str]) -> Tensor:
        """See `Gradients`; with what the sum's rounding may add."""
        weights, seeds = self._weights(names)
        squares = []
        exact = weights.double()
        for bucket, kernels in zip(self.buckets, self._kernels, strict=True):
            forms = []
            for seed, rows in _selections(seeds, len(kernels)):
                c = exact[rows, bucket.rows].reshape(-1, bucket.units, bucket.size).transpose(0, 1)
                forms.append((torch.bmm(c, kernels[seed]) * c).sum(dim=(1, 2)))
            squares.append(sum(forms[1:], forms[0]))
        total = squares[0] if len(squares) == 1 else torch.cat(squares)
        return total.clamp_(min=0.0).sqrt_().to(self.weights.dtype)

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Gradients`."""
        weights, seeds = self._weights(names)
        weights = weights * scale.index_select(0, self.owner)
        total = scale.new_empty(len(weights), self.parameters)
        for factor in self.factors:
            for seed, rows in _selections(seeds, len(factor.g)):
                part, g = weights[rows], factor.g[seed]
                if factor.x is None:
                    total[rows, factor.place] = part @ g
                    continue
                # (Q, N) weights on (N, out) gradients, against (N, in) inputs: one product.
                scaled = (part.unsqueeze(1) * g.T).reshape(-1, len(g))
                total[rows, factor.place] = (scaled @ factor.x).reshape(len(part), -1)
        counts = [len(self._block_weights(name)[0]) for name in names]
        return {n: t.reshape(-1) for n, t in zip(names, torch.split(total, counts), strict=True)}

    def block(self, name: str) -> Tensor:
        """See `Gradients`: user by user, for whoever wants to look."""
        each = torch.eye(self.users, dtype=self.weights.dtype, device=self.weights.device)
        return torch.stack([self.totals([name], one)[name] for one in each])

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
    def _kernels(self) -> list[list[Tensor]]:
        """K of every user, (units, size, size) for every seed, bucket by bucket."""
        layers: dict[int, list[Factor]] = {}
        for factor in self.factors:  # a layer's weight and bias share g
            layers.setdefault(id(factor.g), []).append(factor)
        grams = [_Grams.of(factors) for factors in layers.values()]
        slack = 3 * 4 * torch.finfo(self.weights.dtype).eps
        kernels = []
        for bucket in self.buckets:
            each = [_added([gram.kernel(bucket, seed) for gram in grams])
                    for seed in range(len(self.factors[0].g))]  # fmt: skip
            for kernel in each:
                kernel.diagonal(dim1=1, dim2=2).mul_(1.0 + slack * bucket.size)
            kernels.append(each)
        return kernels


@dataclass(frozen=True)
class _Grams:
    """One layer's g and x in double precision; ``ones`` counts the parameters whose x is 1."""

    g: Tensor
    x: Tensor | None
    ones: int

    @classmethod
    def of(cls, factors: Sequence[Factor]) -> _Grams:
        inputs = [factor.x for factor in factors if factor.x is not None]
        x = inputs[0].double() if inputs else None  # a layer has one weight
        return cls(factors[0].g.double(), x, len(factors) - len(inputs))

    def kernel(self, bucket: Bucket, seed: int) -> Tensor:
        """(x_i · x_j) (g_i · g_j) of every user's samples."""
        shape = (bucket.units, bucket.size, -1)
        g = self.g[seed, bucket.rows].reshape(shape)
        kernel = torch.bmm(g, g.transpose(1, 2))
        if self.x is None:
            return kernel
        x = self.x[bucket.rows].reshape(shape)
        if not self.ones:
            return kernel.mul_(torch.bmm(x, x.transpose(1, 2)))
        return kernel.mul_(torch.bmm(x, x.transpose(1, 2)).add_(float(self.ones)))


def _added(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total


def _selections(seeds: list[int], kinds: int) -> list[tuple[int, slice | list[int]]]:
    """Which weights belong to which seed: all to the one there is, or each to its own."""
    if kinds == 1:
        return [(0, slice(None))]
    return [(m, [q for q, own in enumerate(seeds) if own == m]) for m in sorted(set(seeds))]
