r"""Totals: a round's summed statistics, taken apart; and the weights that are broadcast in return.

They may be noisy: n'_a can be zero or negative, F_a can exceed n'_a. Every quotient is guarded
here, in one place.

Weights are what the server broadcasts beside w where users send one gradient. With β_{r,a} for
every rate r and group a, and β_r for the whole, a user's objective is

    L + N Σ_r (β_r F_r + Σ_a β_{r,a} F_{r,a})  =  Σ_i (ℓ_i + Σ_r b_{r,i} f_r(i)),
    b_{r,i} = N 1[i ∈ d'_r] (β_r + Σ_{a ∋ i} β_{r,a}):

a sample's weight is the sum over the groups that it is in. They are functions of totals that were
released, so sending them to everybody tells nothing new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SMALLEST_COUNT = 1.0
"""A released n' below one sample says nothing about a rate: its constraint is skipped that
round. With noise the limit is two of the noise's standard deviations, a public number."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a round counted, with R rates and G groups; several rounds' counts can be added.

    ``F`` and ``n`` (R, G) belong to the groups, ``overall_F`` and ``overall_n`` (R,) to everybody.
    ``hits`` and ``misses`` count right and wrong predictions, ``table`` (C, C) those of each class
    by the class that was predicted, and ``clipped`` the users who were clipped, where v carries
    them. Counts below ``smallest`` say nothing.
    """

    F: Tensor
    n: Tensor
    overall_F: Tensor
    overall_n: Tensor
    hits: Tensor | None = None
    misses: Tensor | None = None
    clipped: Tensor | None = None
    table: Tensor | None = None
    smallest: float = SMALLEST_COUNT

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            F=self.F + other.F,
            n=self.n + other.n,
            overall_F=self.overall_F + other.overall_F,
            overall_n=self.overall_n + other.overall_n,
            hits=_both(self.hits, other.hits),
            misses=_both(self.misses, other.misses),
            clipped=_both(self.clipped, other.clipped),
            table=_both(self.table, other.table),
            # Independent noise: variances add.
            smallest=_hypot(self.smallest, other.smallest),
        )

    def alone(self) -> Counts:
        """The counts without what a subclass adds to them."""
        names = [each.name for each in fields(Counts)]
        return Counts(**{name: getattr(self, name) for name in names})

    def overall(self) -> Tensor:
        """F/n' of every rate, as released; NaN where n' says nothing."""
        return self._overall

    def values(self) -> Tensor:
        """F_a/n'_a of every rate and group, as released; NaN where n'_a says nothing."""
        return self._values

    def differences(self) -> Tensor:
        """F/n' − F_a/n'_a of shape (R, G), kept in [−1, 1]; NaN where it is not known.

        The difference is bounded, not the rates: rates cut off at 1 would make a model that errs
        on everybody look perfectly fair, whatever the noise.
        """
        return self._differences

    def gap(self) -> Tensor:
        """The largest |F/n' − F_a/n'_a|; NaN where one is not known, or there are no rates."""
        differences = self.differences().abs()
        return differences.max() if differences.numel() else self.F.new_tensor(math.nan)

    def fair(self, tolerance: float | Tensor) -> Tensor:
        """Whether every group's rate is known and within the tolerance: silence is not fairness.

        Without rates there is nothing to violate.
        """
        return (self.differences().abs() <= tolerance).all()

    def accuracy(self) -> Tensor:
        """hits/(hits + misses), as released; NaN where v does not carry them."""
        if self.hits is None or self.misses is None:
            return self.F.new_tensor(math.nan)
        return self._quotient(self.hits, self.hits + self.misses)

    # A round asks several times: for the method, for its row in the history, for selection.

    @cached_property
    def _overall(self) -> Tensor:
        return self._quotient(self.overall_F, self.overall_n)

    @cached_property
    def _values(self) -> Tensor:
        return self._quotient(self.F, self.n)

    @cached_property
    def _differences(self) -> Tensor:
        return (self.overall().unsqueeze(-1) - self.values()).clamp(-1.0, 1.0)

    def _quotient(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        return (numerator / denominator).masked_fill(~(denominator >= self.smallest), math.nan)


@dataclass(frozen=True, kw_only=True)
class Totals(Counts):
    """Counts and gradients of a round, with p parameters.

    ``loss_gradient`` is ∇L of shape (p,) and ``normaliser`` the public constant N it is divided
    by; ``F_gradient`` (R, G, p) and ``overall_F_gradient`` (R, p) are the surrogates' gradients.
    ``noise`` is the standard deviation of the noise on every count, which is public.
    """

    loss_gradient: Tensor
    normaliser: float
    F_gradient: Tensor
    overall_F_gradient: Tensor
    noise: float = 0.0

    def divisors(self) -> tuple[Tensor, Tensor]:
        """n' (R,) and n'_a (R, G) to divide by: where they say nothing, any positive number."""
        return self.overall_n.clamp(min=self.smallest), self.n.clamp(min=self.smallest)


def _hypot(one: float | Tensor, other: float | Tensor) -> Any:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.hypot(torch.as_tensor(one), torch.as_tensor(other))
    return math.hypot(one, other)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Weights:
    """N β, and the public range that a sample's weight is kept in.

    Parameters
    ----------
    groups, overall
        N β_{r,a} of shape (R, G), and N β_r of shape (R,).
    low, high
        The least and the largest weight that a sample's loss may have.

    Of several runs all of them have one more dimension, in front (`of_rows`), or, for n samples
    each with the weights of its run, behind.
    """

    groups: Tensor
    overall: Tensor
    low: float | Tensor
    high: float | Tensor

    @classmethod
    def nothing(cls, groups: int, rates: int, like: Tensor) -> Weights:
        """β = 0: the objective is the loss."""
        return cls(like.new_zeros(rates, groups), like.new_zeros(rates), 1.0, 1.0)

    def of_rows(self, runs: Tensor) -> Weights:
        """The weights of several runs, for samples that belong to these."""
        return Weights(
            self.groups.movedim(0, -1).index_select(-1, runs),
            self.overall.movedim(0, -1).index_select(-1, runs),
            *(torch.as_tensor(end).index_select(0, runs) for end in (self.low, self.high)),
        )

    def of_samples(self, conditions: Tensor, member: Tensor) -> Tensor:
        """b_{r,i} of shape (R, n), for conditions met (R, n) and groups belonged to (n, G)."""
        # Group by group: the bits of a product would depend on the samples' places in it.
        overall, groups = self.overall.to(member.dtype), self.groups.to(member.dtype)
        if overall.ndim == 1:
            overall, groups = overall.unsqueeze(-1), groups.unsqueeze(-1)
        total = overall.expand(-1, len(member))
        for weights, own in zip(groups.unbind(1), member.T, strict=True):
            total = total + weights * own
        return conditions * total
