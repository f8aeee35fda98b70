"""The unfair digits as a task of the tables: whose digits, the constraint, three networks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_args

from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.data.femnist.finding import BUNDLED, named_digits
from fpfl.data.femnist.source import CLASSES, Part, Source
from fpfl.data.femnist.unfair import Order, unfair_digits
from fpfl.experiments.tables import Options, Row
from fpfl.fairness.constraints import Constraint, accuracy_parity
from fpfl.training.models import cnn, mlp

BUNDLED_SCALE = 0.015
"""Of the rounds, on the digits that need no file: a minute or two on a CPU."""

SEED = 0
"""Who has which pen, and the blackboards' noise, are one data set's for all runs."""

HIDDEN = (64,)
"""The hidden units on oriented gradients: 25,802 parameters in all."""

FEATURES = {"cnn": "pixels", "cnn-standardised": "standardised", "oriented": "both ways"}
"""What each network is shown of an image (`fpfl.data.femnist.unfair`)."""


def default_scale(data: str | None) -> float:
    """Of the rounds, where no scale is given."""
    return BUNDLED_SCALE if data in (None, BUNDLED) else 1.0


def title(options: Options) -> str:
    """What the data is called in every output."""
    return f"{_source(options.data).title}; pens in {options.order} order"


def content(options: Options) -> str:
    """A hash of who wrote which labels: titles may be the same for several files."""
    return _content(options.data)


def users(row: Row, options: Options) -> int:
    """K: the writers that there are."""
    return len(_source(options.data).names())


def training(row: Row, seed: int, options: Options) -> FederatedDataset:
    """The writers with their training digits; the same for every seed."""
    return _people(options.data, "train", options.order, FEATURES[row.model])


def testing(row: Row, options: Options) -> FederatedDataset:
    """The same writers' test digits."""
    return _people(options.data, "test", options.order, FEATURES[row.model])


def constraint(row: Row) -> Constraint:
    """Accuracy parity between pens."""
    return accuracy_parity("pen", tolerance=row.tolerance)


def network(row: Row, data: FederatedDataset, seed: int) -> nn.Module:
    """The paper's convolutional network, or a perceptron on oriented gradients.

    The perceptron is shown an image both ways, and the larger of its two logits for a class counts.
    """
    if row.model != "oriented":
        return cnn(initial=row.initial, seed=seed)
    ways, inputs = data.schema.shape
    perceptron = mlp(inputs, HIDDEN, CLASSES, initial=row.initial, seed=seed)
    return nn.Sequential(*perceptron, nn.MaxPool2d((ways, 1)), nn.Flatten())


@lru_cache(maxsize=1)
def _source(data: str | None) -> Source:
    return named_digits(data)


@lru_cache(maxsize=1)
def _content(data: str | None) -> str:
    digest, parts = hashlib.sha256(), get_args(Part)
    for part in parts:
        for writer in sorted(_source(data).read(part), key=lambda each: each.name):
            digest.update(repr((part, writer.name)).encode())
            digest.update(writer.labels.tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _people(
    data: str | None, part: Literal["train", "test"], order: Order, features: str
) -> FederatedDataset:
    found = unfair_digits(_source(data), part, order=order, seed=SEED, features=features)
    # C and η follow from it. For these data sets it is a published number; a private population's
    # would have to be declared, not counted.
    mean = max(1.0, round(len(found) / found.population))
    return replace(found, schema=replace(found.schema, samples_per_user=mean))
