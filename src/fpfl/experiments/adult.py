"""Adult as a task of the tables: its users, constraints, networks; ablations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpfl.data.adult import RANGES, load_adult
from fpfl.data.federated import FederatedDataset, merge_values
from fpfl.experiments.tables import NETWORKS, Options, Row
from fpfl.fairness import rates
from fpfl.fairness.constraints import (
    Constraint,
    demographic_parity,
    equalized_odds,
    fnr_parity,
)
from fpfl.fairness.rates import Rate
from fpfl.fairness.totals import Totals
from fpfl.methods import MethodState, OneGradient
from fpfl.methods.onegradient import AveragedState
from fpfl.training.models import mlp

HOURS = RANGES["hours-per-week"]

CONSTRAINTS = {
    "fnr": lambda alpha: fnr_parity("sex", tolerance=alpha),
    "sex-race": lambda alpha: fnr_parity(("sex", "race"), tolerance=alpha),
    "sex-races": lambda alpha: fnr_parity(("sex", "race"), tolerance=alpha),
    "odds": lambda alpha: equalized_odds("sex", tolerance=alpha),
    "selection": lambda alpha: demographic_parity("sex", tolerance=alpha),
    "mean": lambda alpha: Constraint(
        (rates.mean_prediction(HOURS),), ("sex",), alpha, "equal mean prediction", HOURS
    ),
}
"""What a row measures, and enforces where it has a method, by α."""

KEPT = {"sex-race": ("White",), "sex-races": ("White", "Black")}
"""Races that are not merged. With a declared smallest n'_a of 100 people of the training population
all but White are, since black women with a positive label are 90; with one of 60, all but two."""


def title(options: Options) -> str:
    """What the data is called; Adult's tables have no other."""
    if options.data is not None or options.order != "lexicographic":
        raise ValueError(
            "Adult's tables bring their own data; --data and --order are for the table femnist"
        )
    return "adult"


def content(options: Options) -> str:
    """The data comes with the package."""
    return title(options)


def users(row: Row, options: Options) -> int:
    """K of a row: users of mean size, or single samples when the row is central."""
    return _population(row.mean_samples, row.constraint, 0).population


def training(row: Row, seed: int, options: Options) -> FederatedDataset:
    """The users of a row, dealt by the seed."""
    return _population(row.mean_samples, row.constraint, seed)


def testing(row: Row, options: Options) -> FederatedDataset:
    """The test set of a row."""
    return _samples("test", row.constraint)


def constraint(row: Row) -> Constraint:
    """What a row measures, and enforces where it has a method."""
    return CONSTRAINTS[row.constraint](row.tolerance)


def network(row: Row, data: FederatedDataset, seed: int) -> nn.Module:
    """The row's network, initialised by the seed."""
    return mlp(data.schema.shape[0], NETWORKS[row.model], initial=row.initial, seed=seed)


@lru_cache(maxsize=8)
def _samples(split: Literal["train", "test"], constraint: str) -> FederatedDataset:
    if constraint == "mean":
        return load_adult(split, normalise="paper", label="hours-per-week")
    if constraint not in KEPT:
        return load_adult(split, normalise="paper")
    data = load_adult(split, normalise="paper", attributes=("sex", "race"))
    values, kept = data.schema.attributes[1].values, KEPT[constraint]
    return merge_values(data, "race", {"other": [v for v in values if v not in kept]})


@lru_cache(maxsize=2)
def _population(mean_samples: float | None, constraint: str, seed: int) -> FederatedDataset:
    data = _samples("train", constraint)
    if mean_samples is None:
        return data.single_samples()
    return data.partition(mean=mean_samples, seed=seed)


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
    """The same rate with e(y) ℓ for its surrogate, as OneGradient has it."""
    slopes = rate.loss_slopes(classes)
    if slopes is None:
        raise ValueError(f"the rate {rate.name!r} does not move with the loss")
    moves = slopes

    def surrogate(scores: Tensor, labels: Tensor) -> Tensor:
        right = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        # Clamped: the loss of a sample that is surely wrong is not infinite.
        return -moves.to(scores)[labels] * right.clamp(min=1e-12).log()

    return replace(rate, surrogate=surrogate, slope=None)


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
    method = replace(settings["method"], ratchet=True, tolerance=None, decay=0.0)
    return {"method": method, "selection": "best", "selection_window": 10}


def _fixed(settings: Settings) -> Settings:
    privacy = replace(settings["privacy"], convention="replace-one")
    return {"privacy": privacy, "sampling": "without-replacement"}


CHANGES: dict[str, Callable[[Settings], Settings]] = {
    "separate": _separate,
    "joint": _clipping(counts=None),
    "rate": _method(surrogate="rate", low=0.0, high=1e6),
    "unsteady": _unsteady,
    "ratchet": _method(ratchet=True, tolerance=None),
    "no-averages": _method(decay=0.0),
    "last": lambda settings: {"selection": "last"},
    "fixed": _fixed,
    "two-counts": _clipping(counts=2.0),
    "alike": _method(spread=None),
    "wide": _method(high=1e6),
    "lift": _method(low=1.0),
    "half-lift": _method(low=0.4),
}
"""What each change of the ablation table does."""
