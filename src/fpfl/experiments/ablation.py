"""FPFL-1G with one of its parts taken out, for the ablation table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpfl.fairness.constraints import Constraint
from fpfl.fairness.rates import Rate
from fpfl.fairness.totals import Totals
from fpfl.methods import MethodState, OneGradient
from fpfl.methods.onegradient import AveragedState

Settings = dict[str, Any]


def changed(change: str, settings: Settings) -> Settings:
    """The settings of ``fpfl.train`` that a change replaces."""
    if change not in CHANGES:
        raise ValueError(f"there is no change {change!r}; expected one of {sorted(CHANGES)}")
    return CHANGES[change](settings)


@dataclass(frozen=True)
class SeparateGradients:
    """OneGradient's multipliers on the paper's vector: |A| + 1 gradients, combined after the noise.

    direction = ∇L/N + Σ_r (β_r ∇F_r + Σ_a β_{r,a} ∇F_{r,a}),    β from this very round's counts
    """

    inner: OneGradient

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """See `Method`."""
        if not isinstance(state, AveragedState):
            rates, groups = totals.F.shape
            state = self.inner.begin(rates, groups, totals.F.device)
        state, direction = self.inner.update(state, totals, tolerance)
        weights = self.inner.weights(state, totals.normaliser, tolerance)
        combined = weights.overall @ totals.overall_F_gradient
        combined = combined + torch.einsum("rg,rgp->p", weights.groups, totals.F_gradient)
        return state, direction + combined / totals.normaliser


def with_loss(rate: Rate, classes: int = 2) -> Rate:
    """The same rate with e(y) ℓ for its stand-in, as OneGradient has it."""
    slopes = rate.loss_slopes(classes)
    if slopes is None:
        raise ValueError(f"the rate {rate.name!r} does not move with the loss")
    moves = slopes

    def standin(scores: Tensor, labels: Tensor) -> Tensor:
        right = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        # Clamped: the loss of a sample that is surely wrong is not infinite.
        return -moves.to(scores)[labels] * right.clamp(min=1e-12).log()

    return replace(rate, standin=standin, slope=None)


def _separate(settings: Settings) -> Settings:
    constraint: Constraint = settings["constraint"]
    rates = tuple(with_loss(rate) for rate in constraint.rates)
    return {
        "method": SeparateGradients(settings["method"]),
        "constraint": replace(constraint, rates=rates),
    }


def _clipping(**values: Any) -> Callable[[Settings], Settings]:
    def change(settings: Settings) -> Settings:
        privacy = settings["privacy"]
        return {"privacy": replace(privacy, clip=replace(privacy.clipping, **values))}

    return change


def _method(**values: Any) -> Callable[[Settings], Settings]:
    return lambda settings: {"method": replace(settings["method"], **values)}


def _unsteady(settings: Settings) -> Settings:
    method = replace(settings["method"], ratchet=True, tolerance=None, memory=0.0)
    return {"method": method, "selection": "best", "selection_window": 10}


def _fixed(settings: Settings) -> Settings:
    privacy = replace(settings["privacy"], convention="replace-one")
    return {"privacy": privacy, "sampling": "without-replacement"}


CHANGES: dict[str, Callable[[Settings], Settings]] = {
    "separate": _separate,
    "joint": _clipping(counts=None),
    "rate": _method(standin="rate", low=0.0, high=1e6),
    "unsteady": _unsteady,
    "ratchet": _method(ratchet=True, tolerance=None),
    "no-averages": _method(memory=0.0),
    "last": lambda settings: {"selection": "last"},
    "fixed": _fixed,
    "two-counts": _clipping(counts=2.0),
    "alike": _method(spread=None),
    "wide": _method(high=1e6),
    "lift": _method(low=1.0),
    "half-lift": _method(low=0.4),
}
"""What each change of the ablation table does."""
