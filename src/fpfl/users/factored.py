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
The sum's own rounding is added to the norm for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def norms(self, name: str) -> Tensor:
        """See `Gradients`; rounded up by what the sum's rounding may add."""
        forms, slack = self._forms(name)
        return (forms.clamp(min=0.0).sqrt() + slack).square().sum(dim=1).sqrt().to(self.weights)

    def total(self, name: str, scale: Tensor) -> Tensor:
        """See `Gradients`."""
        weights, seeds = self._weights(name)
        weights = weights * scale[self.owner]
        total = weights.new_empty(len(weights), self.parameters)
        for factor in self.factors:
            shared = len(factor.g) == 1
            for seed in {0} if shared else set(seeds):
                which = [q for q, own in enumerate(seeds) if shared or own == seed]
                part = weights[which] if len(which) < len(weights) else weights
                if factor.x is None:
                    total[which, factor.place] = part @ factor.g[seed]
                    continue
                # (Q, N) weights on (N, out) gradients, against (N, in) inputs: one product.
                scaled = (part.unsqueeze(2) * factor.g[seed]).permute(0, 2, 1).flatten(0, 1)
                product = scaled @ factor.x
                total[which, factor.place] = product.reshape(len(which), -1)
        return total.reshape(-1)

    def block(self, name: str) -> Tensor:
        """See `Gradients`: user by user, for whoever wants to look."""
        each = torch.eye(self.users, dtype=self.weights.dtype, device=self.weights.device)
        return torch.stack([self.total(name, one) for one in each])

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

    def _weights(self, name: str) -> tuple[Tensor, list[int]]:
        """A block's gradients as weights of samples (Q, N), and the seed that each belongs to."""
        rates = range(1, len(self.weights))
        if name == LOSS:
            return self.weights[:1], [0]
        if name == OVERALL:
            return self.weights[1:], list(rates)
        groups = self.member.shape[1]
        pairs = self.weights[1:].unsqueeze(1) * self.member.T
        return pairs.flatten(0, 1), [r for r in rates for _ in range(groups)]

    def _forms(self, name: str) -> tuple[Tensor, Tensor]:
        """cᵀ K c of every user and weight vector (B, Q), and the rounding of the sum."""
        weights, seeds = self._weights(name)
        forms, slack = [], []
        eps = 8 * torch.finfo(self.weights.dtype).eps
        for bucket, kernels in zip(self.buckets, self._kernels, strict=True):
            c = weights[:, bucket.rows].double().reshape(-1, bucket.units, bucket.size)
            kernel = kernels[seeds] if len(kernels) > 1 else kernels
            forms.append(((kernel @ c.unsqueeze(3)).squeeze(3) * c).sum(dim=2))
            lengths = kernel.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt()
            slack.append(eps * (c.abs() * lengths).sum(dim=2))
        return torch.cat(forms, dim=1).T, torch.cat(slack, dim=1).T

    @cached_property
    def _kernels(self) -> list[Tensor]:
        """K of every user, (seeds, units, size, size), bucket by bucket."""
        kernels = []
        for bucket in self.buckets:
            total: Tensor | float = 0.0
            grams: dict[int, Tensor] = {}
            for factor in self.factors:
                key = id(factor.g)
                if key not in grams:  # a layer's weight and bias share it
                    g = factor.g[:, bucket.rows].double()
                    g = g.reshape(len(g), bucket.units, bucket.size, -1)
                    grams[key] = g @ g.transpose(2, 3)
                gram = grams[key]
                if factor.x is not None:
                    x = factor.x[bucket.rows].double().reshape(bucket.units, bucket.size, -1)
                    gram = gram * (x @ x.transpose(1, 2))
                total = total + gram
            assert isinstance(total, Tensor)
            kernels.append(total)
        return kernels
