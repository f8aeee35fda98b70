"""Adult as a task of the tables: its users, constraints and networks."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from torch import nn

from fpfl.data.adult import RANGES, load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.merging import merge_values
from fpfl.experiments.options import Options
from fpfl.experiments.tables import NETWORKS, Row
from fpfl.fairness import rates
from fpfl.fairness.constraints import (
    Constraint,
    demographic_parity,
    equalized_odds,
    fnr_parity,
)
from fpfl.models import mlp

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
