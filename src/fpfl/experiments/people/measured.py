"""What a model is worth on some users: accuracy, rates, gaps, whether it has collapsed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.experiments.people.rows import CONSTRAINTS
from fpfl.fairness.collapse import collapse_in_words
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.metrics import ClassMetrics, Estimate
from fpfl.training.run import evaluate_model
from fpfl.users import task
from fpfl.users.engine import outputs

Floats = NDArray[np.float64]

RATES = {"fnr": ("FNR",), "odds": ("FNR", "FPR"), "parity": ("selection rate",)}
"""The rates of each constraint, as evaluations call them."""

LOWEST = ("selection rate",)
"""Rates of which the weakest group has the lowest; of the others it has the highest."""


@dataclass(frozen=True)
class Cells:
    """Labels, and the groups of samples that are in one."""

    y: NDArray[np.int64]
    groups: dict[str, NDArray[np.bool_]]

    @classmethod
    def of(cls, data: FederatedDataset) -> Cells:
        """Of a population with one attribute."""
        (attribute,) = data.schema.attributes
        codes = data.attributes[:, 0].numpy()
        groups = {f"{attribute.name}={v}": codes == k for k, v in enumerate(attribute.values)}
        return cls(data.labels.numpy(), groups)


def of_probabilities(p: Floats, cells: Cells) -> dict[str, Any]:
    """What a classifier is worth that says 1 with probability p: expected over its coin tosses.

    A hard prediction is a p of 0 or 1. The gap of a rate is the largest difference between a
    group's and everybody's, as in `fpfl.fairness.gaps`.
    """
    y = cells.y
    recalls = [float((p if k else 1.0 - p)[y == k].mean()) for k in (0, 1)]
    rates = {}
    for name, where, values in (
        ("FNR", y == 1, 1.0 - p),
        ("FPR", y == 0, p),
        ("selection rate", np.ones(len(y), dtype=bool), p),
    ):
        own = {"overall": values[where].mean()}
        own |= {group: values[where & inside].mean() for group, inside in cells.groups.items()}
        rates[name] = {group: float(value) for group, value in own.items()}
    accuracy, balanced = float(np.where(y == 1, p, 1.0 - p).mean()), sum(recalls) / 2
    base_rate, predicted = float((y == 1).mean()), float(p.mean())
    said = ClassMetrics(
        balanced_accuracy=_known(balanced),
        f1=_known(math.nan),
        auc=None,
        labels=(_known(1.0 - base_rate), _known(base_rate)),
        predicted=(_known(1.0 - predicted), _known(predicted)),
    )
    return {
        "accuracy": accuracy,
        "balanced_accuracy": balanced,
        "base_rate": base_rate,
        "predicted": predicted,
        "rates": rates,
        "gaps": {name: max(_gap(rates[rate]) for rate in RATES[name]) for name in CONSTRAINTS},
        "collapsed": collapse_in_words(said, accuracy),
    }


def _known(value: float) -> Estimate:
    return Estimate(value, math.nan, math.nan)


def of_model(
    model: nn.Module, data: FederatedDataset, constraint: Constraint | None = None
) -> dict[str, Any]:
    """The same of a network, by `fpfl`'s own evaluation.

    ``collapsed`` says in words how it has collapsed, and ``named`` whether the evaluation's own
    words, which a user reads, say so: the verdict on the constraint, or all of them without one.
    """
    found = evaluate_model(model, data, constraint=constraint, bootstrap=0)
    words = str(found) if constraint is None else str(found.verdict_in_words)
    metrics = found.metrics
    assert metrics is not None  # these tables have two classes
    rates = {
        name: {group: found.rates[name][group] for group in ("overall", *_groups(data))}
        for names in RATES.values()
        for name in names
    }
    return {
        "accuracy": found.accuracy,
        "balanced_accuracy": found.balanced_accuracy,
        "base_rate": found.base_rate,
        "predicted": metrics.predicted[1].value,
        "rates": rates,
        "gaps": {name: max(_gap(rates[rate]) for rate in RATES[name]) for name in CONSTRAINTS},
        "f1": found.f1,
        "auc": found.auc,
        "collapsed": found.collapsed,
        "named": "collapsed" in words.lower(),
    }


def errors(model: nn.Module, data: FederatedDataset) -> Floats:
    """What a regression's predictions are off by, in units of the label."""
    parameter = next(model.parameters())
    data = data.to(parameter.device, parameter.dtype)
    found: Floats = (predicted_numbers(model, data) - data.labels.cpu().double()).numpy()
    return found


def predicted_numbers(model: nn.Module, data: FederatedDataset) -> torch.Tensor:
    """A regression's predictions."""
    model.eval()
    with torch.no_grad():
        found = task.predictions(outputs(model, data.features, data.schema), data.schema)
        return found.cpu().double()


def rmse(errors: Floats) -> float:
    """√mean e²."""
    return math.sqrt(float(np.mean(np.square(errors))))


def weakest(part: dict[str, Any], rate: str) -> float:
    """The rate of the group that it is worst for."""
    values = [value for group, value in part["rates"][rate].items() if group != "overall"]
    return float(min(values) if rate in LOWEST else max(values))


def _groups(data: FederatedDataset) -> list[str]:
    (attribute,) = data.schema.attributes
    return [f"{attribute.name}={value}" for value in attribute.values]


def _gap(rates: dict[str, float]) -> float:
    values = [abs(value - rates["overall"]) for value in rates.values()]
    return max(value for value in values if not math.isnan(value))
