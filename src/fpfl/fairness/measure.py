"""Measuring: metrics × groups, counted for each user, and again for each replicate of the users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpfl.fairness import rates
from fpfl.fairness.bootstrap import Floats, resample
from fpfl.fairness.groups import Group, Groups
from fpfl.fairness.rates import Rate


@dataclass(frozen=True)
class Metric:
    """A rate that may also condition on the prediction, as precision does."""

    name: str
    condition: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, rate: Rate) -> Metric:
        """The metric that a rate is."""
        return cls(rate.name, lambda p, y: rate.condition(y), rate.evaluate)


def metrics_of(
    classes: int | None, label_range: tuple[float, float] | None
) -> tuple[list[Metric], dict[str, tuple[str, ...]]]:
    """The metrics of a task, and for each gap the metrics it is the largest difference in."""
    if classes == 2:
        makers = (rates.accuracy, rates.false_negative_rate, rates.false_positive_rate)
        found = [Metric.of(make()) for make in (*makers, rates.selection_rate)]
        found.append(Metric("precision", lambda p, y: p == 1, lambda p, y: (y == 1).double()))
        return found, {
            "fnr": ("FNR",),
            "eo": ("FNR", "FPR"),
            "demp": ("selection rate",),
            "pp": ("precision",),
            "accuracy": ("accuracy",),
        }
    if classes is not None:
        kinds = [rates.accuracy(), *(rates.class_recall(label) for label in range(classes))]
    else:
        assert label_range is not None  # checked before
        errors = (rates.squared_error, rates.absolute_error, rates.mean_prediction)
        kinds = [make(label_range) for make in errors]
    return [Metric.of(rate) for rate in kinds], {rate.name: (rate.name,) for rate in kinds}


def members_of(a: Tensor, *several: Groups | None) -> dict[Group, Tensor]:
    """Who is in a group, of shape (n,): everybody first, then every group of ``several`` once."""
    members = {Group(()): torch.ones(len(a), dtype=torch.bool)}  # no condition: everybody
    for groups in several:
        if groups is not None:
            members |= zip(groups.groups, groups.membership(a).unbind(-1), strict=True)
    return members


@dataclass(frozen=True)
class Measured:
    """R metrics × (everybody, then G groups).

    Parameters
    ----------
    metrics, groups
        The names of the R metrics, and the G groups.
    values, counts
        Shape (R, 1 + G): F/n', NaN where n' is 0, and n' itself.
    users
        Shape (R, 1 + G): n'²/Σ_k n'_k², the number of users that a value rests on.
    replicates
        Shape (B, R, 1 + G): the values again, for each draw of the users.
    """

    metrics: tuple[str, ...]
    groups: tuple[Group, ...]
    values: Floats
    counts: Floats
    users: Floats
    replicates: Floats

    def part(self, metrics: slice, groups: Groups | None) -> Measured:
        """The same for some of the metrics and groups, and everybody."""
        chosen = () if groups is None else groups.groups
        columns = [0, *(1 + self.groups.index(group) for group in chosen)]
        arrays = (self.values, self.counts, self.users, self.replicates)
        return Measured(
            self.metrics[metrics], chosen, *(array[..., metrics, columns] for array in arrays)
        )

    def as_dict(self) -> dict[str, dict[str, float]]:
        """The values: ``{metric: {"overall": value, group: value, ...}}``."""
        names = ("overall", *(group.name for group in self.groups))
        rows = (dict(zip(names, row, strict=True)) for row in self.values.tolist())
        return dict(zip(self.metrics, rows, strict=True))


def measure(
    metrics: Sequence[Metric],
    members: dict[Group, Tensor],
    p: Tensor,
    y: Tensor,
    owner: Tensor,
    bootstrap: int,
    seed: int,
) -> Measured:
    """Measure predictions p of labels y, in all metrics and groups.

    ``owner`` has every sample's user, numbered 0, 1, ... without a break.
    """
    sums = _sums(metrics, list(members.values()), p, y, owner)
    F, n = sums.sum(axis=0)
    again = resample(sums, bootstrap, np.random.default_rng(seed))
    return Measured(
        metrics=tuple(metric.name for metric in metrics),
        groups=tuple(members)[1:],
        values=_quotient(F, n),
        counts=n,
        users=_quotient(n**2, (sums[:, 1] ** 2).sum(axis=0)),
        replicates=_quotient(again[:, 0], again[:, 1]),
    )


def _sums(
    metrics: Sequence[Metric], members: Sequence[Tensor], p: Tensor, y: Tensor, owner: Tensor
) -> Floats:
    """F and n' of each user, of shape (K, 2, R, 1 + G)."""
    counted = [metric.condition(p, y).double() for metric in metrics]
    F = [n * metric.value(p, y) for metric, n in zip(metrics, counted, strict=True)]
    columns = (column * member for column in (*F, *counted) for member in members)
    sums = np.stack([np.bincount(owner, column) for column in columns], axis=-1)
    return sums.reshape(len(sums), 2, len(metrics), len(members))


def _quotient(numerator: Floats, denominator: Floats) -> Floats:
    quotient = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator > 0)
    return quotient
