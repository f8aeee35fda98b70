"""The Adult data set of the UCI Machine Learning Repository, with its original split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import InputColumn
from fpfl.data.schema import Attribute, Schema, scale_by_ranges
from fpfl.data.table_schema import NumberColumn
from fpfl.data.tables import number_input

__all__ = ["RANGES", "load_adult"]

RANGES: dict[str, tuple[float, float]] = {
    "age": (17, 90),
    "fnlwgt": (1e4, 1.5e6),
    "education-num": (1, 16),
    "capital-gain": (0, 99_999),
    "capital-loss": (0, 4_500),
    "hours-per-week": (1, 99),
}
"""The numerical variables and the public ranges that ``normalise="ranges"`` scales them by."""

_CATEGORICAL = (
    "workclass",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
_ATTRIBUTES = ("sex", "race")
_LONG = ("fnlwgt", "capital-gain", "capital-loss")
"""Amounts: with ranges that few come near."""


def load_adult(
    split: Literal["train", "test"] = "train",
    *,
    normalise: Literal["paper", "ranges", "measured"] = "ranges",
    attributes: tuple[str, ...] = ("sex",),
    label: Literal["income", "hours-per-week"] = "income",
) -> FederatedDataset:
    """Load Adult: who in the US census of 1994 earned more than 50,000 dollars a year.

    The features are 6 numerical variables and 7 categorical ones, one-hot encoded: 92 columns.
    ``education`` is left out, because ``education-num`` numbers its 16 values one to one.
    A missing category is the category ``Unknown``. The categories are those that the data set's
    own description lists, whether or not a split has them.

    Parameters
    ----------
    split
        The 32,561 training rows or the 16,281 test rows.
    normalise
        ``"paper"``: numerical variables have mean 0 and variance 1 over the *training* rows.
        These means and variances are read from the private data: what is trained on them is
        (ε₀ + ε)-differentially private for an ε₀ that the paper leaves unstated and no
        accountant here knows of. ``"ranges"``: they are scaled to [−3, 3] by the declared
        public `RANGES` (values outside are clamped), which costs no privacy. ``"measured"``: they
        come as ``"ranges"`` has them, and training finds out what to scale inputs by itself, once,
        within its ε (`fpfl.measure`): nothing but the ranges and categories is declared.
    attributes
        The sensitive attributes, among ``"sex"`` and ``"race"``. Both are features in any case.
    label
        ``"income"``, above 50,000 dollars or not; or ``"hours-per-week"``, a regression: then the
        hours are not among the features, and the income is neither.

    Returns
    -------
    FederatedDataset
        Every row a user of its own, labelled 1 where the income is above 50,000 dollars.
        ``load_adult().partition()`` deals them to the paper's users.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    if normalise not in ("paper", "ranges", "measured"):
        raise ValueError(f"normalise is {normalise!r}; expected 'paper', 'ranges' or 'measured'")
    strange = [name for name in attributes if name not in _ATTRIBUTES]
    if strange:
        raise ValueError(f"attributes has {strange}; choose among {list(_ATTRIBUTES)}")

    with np.load(Path(__file__).with_name("adult.npz"), allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    values = {
        name: tuple(data[f"{name}.values"].tolist()) for name in (*_CATEGORICAL, *_ATTRIBUTES)
    }
    train_rows = int(data["train-rows"])
    rows = slice(train_rows) if split == "train" else slice(train_rows, None)

    if label not in ("income", "hours-per-week"):
        raise ValueError(f"label is {label!r}; expected 'income' or 'hours-per-week'")
    used = {name: ends for name, ends in RANGES.items() if name != label}
    numbers = np.column_stack([data[name].astype(np.float64) for name in used])
    if normalise == "paper":
        train = numbers[:train_rows]
        numbers = (numbers - train.mean(axis=0)) / train.std(axis=0)
    else:
        numbers = scale_by_ranges(numbers, list(used.values()))
    one_hot = [_one_hot(data[name], len(values[name])) for name in _CATEGORICAL]

    features = np.concatenate([numbers, *one_hot], axis=1)[rows].astype(np.float32)
    names = [*used, *(f"{name}={value}" for name in _CATEGORICAL for value in values[name])]
    ranges = [*used.values(), *[(0.0, 1.0)] * (len(names) - len(used))]
    codes = np.zeros((len(features), len(attributes)), dtype=np.int64)
    for column, name in enumerate(attributes):
        codes[:, column] = data[name][rows]
    schema = Schema(
        shape=(len(names),),
        classes=2 if label == "income" else None,
        class_names=("<=50K", ">50K") if label == "income" else None,
        label_range=None if label == "income" else RANGES[label],
        attributes=tuple(Attribute(name, values[name]) for name in attributes),
        feature_names=tuple(names),
        feature_ranges=None if normalise == "paper" else tuple(ranges),
    )
    labels = data["label"] if label == "income" else data[label].astype(np.float32)
    found = FederatedDataset.from_samples(features, labels[rows], codes, schema)
    if normalise != "measured":
        return found
    sizes = {name: len(values[name]) for name in _CATEGORICAL}
    return replace(found, columns=_columns(used, sizes, RANGES.get(label)))


def _columns(
    numbers: Mapping[str, tuple[float, float]],
    categories: Mapping[str, int],
    label: tuple[float, float] | None,
) -> tuple[InputColumn, ...]:
    """What is public about the columns: no more than their ranges and how many values they have."""
    found = [
        number_input(NumberColumn(name, ends, tail="long" if name in _LONG else None), n)
        for n, (name, ends) in enumerate(numbers.items())
    ]
    first = len(found)
    for name, size in categories.items():
        found.append(InputColumn(name, first, size, number=False))
        first += size
    if label is not None:
        found.append(number_input(NumberColumn("label", label), first))
    return tuple(found)


def _one_hot(codes: NDArray[np.uint8], size: int) -> NDArray[np.float64]:
    return np.eye(size)[codes]
