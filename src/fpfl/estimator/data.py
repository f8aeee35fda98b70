"""From scikit-learn's arguments to those of `fpfl.train`: the population, constraint and network.

Frames and series are looked at by what they have (columns, names, an index), so that nothing here
needs pandas. Rows go together by their position, as everywhere in scikit-learn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fpfl.data.schema import Schema, scale_by_ranges
from fpfl.fairness.constraints import BY_NAME, Constraint, equal_error
from fpfl.fairness.groups import UNKNOWN, Attribute
from fpfl.numerics.randomness import derived_seed
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.budget import PopulationLedger
from fpfl.training.models import mlp

Network = nn.Module | Callable[[int, int], nn.Module]

DEFAULT_TOLERANCE = 0.02

LIMIT = 5.0
"""With privacy and no declared ranges: where features are clamped."""

MOST_GROUPS = 100
"""A sensitive feature with more values is taken for a number that should be binned."""


@dataclass(frozen=True)
class Scaling:
    """What is done to features before the network sees them.

    Parameters
    ----------
    ranges
        Public ranges, mapped to [−3, 3]; the rest is not used then.
    centre, width, limit
        (x − centre)/width, clamped to ±limit.
    """

    ranges: tuple[tuple[float, float], ...] | None
    centre: NDArray[np.float64]
    width: NDArray[np.float64]
    limit: float

    @classmethod
    def of(cls, X: NDArray[np.float64], feature_range: Any, *, private: bool) -> Scaling:
        """By the declared ranges; else by the data's mean and deviation, unless it is private."""
        features = X.shape[1]
        zeros, ones = np.zeros(features), np.ones(features)
        if feature_range is not None:
            return cls(_ranges(feature_range, features), zeros, ones, math.inf)
        if private:
            return cls(None, zeros, ones, LIMIT)
        centre, width = X.mean(axis=0), X.std(axis=0)
        # The deviation of a constant is rounding, and must not be divided by.
        varies = width > 1e-12 * np.abs(X).max(axis=0)
        return cls(None, centre, np.where(varies, width, 1.0), math.inf)

    def __call__(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scale rows."""
        if self.ranges is not None:
            return scale_by_ranges(X, self.ranges)
        scaled: NDArray[np.float64] = (X - self.centre) / self.width
        return scaled.clip(-self.limit, self.limit)


def _ranges(given: Any, features: int) -> tuple[tuple[float, float], ...]:
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape == (2,):
        array = np.tile(array, (features, 1))
    good = array.shape == (features, 2) and bool(np.isfinite(array).all())
    if not good or not bool((array[:, 0] < array[:, 1]).all()):
        raise ValueError(
            f"feature_range is {given!r}; expected a public (low, high) with low < high for each "
            f"of {features} features, or one pair for all of them"
        )
    return tuple((float(low), float(high)) for low, high in array)


def check_columns(X: Any) -> None:
    """Refuse a frame's columns that are not numbers, by name."""
    columns, kinds = getattr(X, "columns", None), getattr(X, "dtypes", None)
    if columns is None or kinds is None:
        return
    wrong = [
        f"{name!r} ({kind})"
        for name, kind in zip(columns, kinds, strict=True)
        if getattr(kind, "kind", "f") not in "biuf"
    ]
    if wrong:
        raise ValueError(
            f"the columns {', '.join(wrong)} do not hold numbers; encode them first, e.g. with "
            "sklearn.preprocessing.OneHotEncoder and the categories declared"
        )


def check_order(X: Any, given: Any, name: str) -> None:
    """Refuse rows whose index is that of X in another order: positions would mix people up."""
    mine: Any = getattr(X, "index", None)
    others: Any = getattr(given, "index", None)
    if not hasattr(mine, "equals") or not hasattr(others, "equals") or mine.equals(others):
        return
    try:
        same = bool(mine.sort_values().equals(others.sort_values()))
    except TypeError:  # labels that have no order
        return
    if same:
        raise ValueError(
            f"{name} has the index of X in another order, and rows go together by position; "
            f"give {name}.loc[X.index], or reset both indices if the positions are right"
        )


def sensitive_columns(
    given: Any, rows: int, *, wanted: bool
) -> tuple[tuple[Attribute, ...], NDArray[np.int64] | None]:
    """Attributes and codes of sensitive features, where they are wanted and not just checked.

    Who lacks a value has the code of unknown ones.
    """
    if given is None:
        return (), None
    names, columns = _columns(given, rows)
    if not wanted:
        return (), None
    found = [_attribute(name, column) for name, column in zip(names, columns, strict=True)]
    return tuple(a for a, _ in found), np.stack([codes for _, codes in found], axis=1)


def codes_among(attributes: Sequence[Attribute], given: Any, rows: int) -> NDArray[np.int64]:
    """Codes of sensitive features by attributes that are known already: of held-out rows.

    A value that no attribute has is unknown.
    """
    _, columns = _columns(given, rows)
    codes = np.full((rows, len(attributes)), UNKNOWN, dtype=np.int64)
    for place, (attribute, column) in enumerate(zip(attributes, columns, strict=True)):
        known = {value: code for code, value in enumerate(attribute.values)}
        there = ~_missing(column)
        texts = map(str, column[there].tolist())
        codes[there, place] = [known.get(text, UNKNOWN) for text in texts]
    return codes


def _columns(given: Any, rows: int) -> tuple[list[str], list[NDArray[Any]]]:
    """The names and columns of sensitive features."""
    if hasattr(given, "columns"):
        names = [str(name) for name in given.columns]
        columns = [np.asarray(given[name]) for name in given.columns]
        shape: tuple[int, ...] = (len(given), len(columns))
    else:
        array = np.asarray(given)
        shape = array.shape
        table = array[:, None] if array.ndim == 1 else array
        columns = list(table.T) if table.ndim == 2 else []
        names = [f"sensitive_feature_{number}" for number in range(len(columns))]
        if array.ndim == 1 and getattr(given, "name", None) is not None:
            names = [str(given.name)]
    if not columns or shape[0] != rows:
        raise ValueError(
            f"sensitive_features has shape {shape}; expected one row for each of {rows} rows of "
            "X, and a column for each attribute"
        )
    return names, columns


def _attribute(name: str, column: NDArray[Any]) -> tuple[Attribute, NDArray[np.int64]]:
    missing = _missing(column)
    known = column[~missing]
    if known.dtype.kind == "O":
        known = np.array([str(value) for value in known], dtype=str)
    values, numbers = np.unique(known, return_inverse=True)
    if not 2 <= len(values) <= MOST_GROUPS:
        raise ValueError(
            f"the sensitive feature {name!r} has {len(values)} values in these rows; expected 2 to "
            f"{MOST_GROUPS}, of which each is a group. Bin a number that has more, and leave out "
            "a feature that has one"
        )
    codes = np.full(len(column), UNKNOWN, dtype=np.int64)
    codes[~missing] = numbers
    texts = tuple(str(value) for value in values.tolist())
    return Attribute(name, texts, unknown=bool(missing.any())), codes


def user_numbers(given: Any, rows: int, population: int | None) -> NDArray[np.int64]:
    """A number for every row's user; every row is one where no ids were given."""
    numbers = np.arange(rows) if given is None else _numbers(given, rows)
    seen = int(numbers.max()) + 1
    if population is not None and seen > population:
        raise ValueError(
            f"there are {seen} users and the ledger is of {population}; give the ledger of these "
            "users (without users=, every row is one)"
        )
    return numbers


def _numbers(given: Any, rows: int) -> NDArray[np.int64]:
    """Numbers for ids, in the ids' order where they have one: rows may come in any."""
    ids = np.asarray(given)
    if ids.shape != (rows,):
        raise ValueError(f"users has shape {ids.shape}; expected one id for each of {rows} rows")
    if bool(_missing(ids).any()):
        raise ValueError(
            "users has missing ids; give each row one: whose rows they are decides what is "
            "protected together"
        )
    try:
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)
    except TypeError:  # ids of several types
        known: dict[Any, int] = {}
        return np.array([known.setdefault(value, len(known)) for value in ids], dtype=np.int64)


def _missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind in "fc":
        return np.asarray(np.isnan(values))
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    return np.array([_is_missing(value) for value in values], dtype=bool)


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return True
    return type(value).__name__ in ("NAType", "NaTType")  # pandas', which equals nothing


def checked_label_range(given: Any) -> tuple[float, float]:
    """A declared range of labels as (low, high)."""
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"label_range is {given!r}; expected the public (low, high), low < high")
    return low, high


def observed_label_range(y: NDArray[np.float64]) -> tuple[float, float]:
    """The range of the labels themselves; that of a constant is widened to be one."""
    low, high = float(y.min()), float(y.max())
    room = 0.0 if low < high else max(0.5, 1e-3 * abs(low))
    return low - room, high + room


def standardised_unit(y: NDArray[Any]) -> tuple[float, float] | None:
    """(c, w), the labels' mean and deviation; None where they are all the same."""
    centre, width = float(np.mean(y, dtype=np.float64)), float(np.std(y, dtype=np.float64))
    return (centre, width) if width > 1e-6 * float(np.abs(y).max()) else None


def labels_within(y: NDArray[np.float64], label_range: tuple[float, float]) -> NDArray[np.float32]:
    """Labels clamped to their range, and still within it when they are single precision."""
    low, high = np.float32(label_range[0]), np.float32(label_range[1])
    if float(low) < label_range[0]:
        low = np.nextafter(low, np.float32(np.inf))
    if float(high) > label_range[1]:
        high = np.nextafter(high, np.float32(-np.inf))
    return y.astype(np.float32).clip(low, high)


def named_constraint(name: str, tolerance: float, schema: Schema) -> Constraint:
    """The constraint of a name, between all the sensitive features' groups."""
    if name == "equal_error":
        if schema.label_range is None:
            raise ValueError(
                "constraint='equal_error' is for regression: use FairPrivateRegressor, or "
                "'accuracy_parity'"
            )
        return equal_error(label_range=schema.label_range, tolerance=tolerance)
    make = BY_NAME.get(name)
    if make is None:
        known = ", ".join(map(repr, (*BY_NAME, "equal_error")))
        raise ValueError(f"constraint is {name!r}; expected one of {known}, or a fpfl.Constraint")
    return make(tolerance=tolerance)


def chosen_constraint(
    given: str | Constraint | None, tolerance: float | None, schema: Schema
) -> Constraint | None:
    """The constraint that was named or given, with the tolerance that was."""
    if given is None:
        return None
    if isinstance(given, str):
        made = named_constraint(
            given, DEFAULT_TOLERANCE if tolerance is None else tolerance, schema
        )
    elif isinstance(given, Constraint):
        made = given if tolerance is None else replace(given, tolerance=tolerance)
    else:
        raise ValueError(
            f"constraint is {given!r}; expected a name like 'fnr_parity', or a fpfl.Constraint"
        )
    if not schema.attributes:
        raise ValueError(
            f"the constraint {made.name} compares groups and no sensitive_features were given; "
            "give fit(X, y, sensitive_features=...) a value for each row"
        )
    made.check(schema.classes, schema.label_range)
    return made


def network(
    given: Network | None, hidden: Sequence[int], schema: Schema, seed: int | None
) -> nn.Module:
    """The network that was given or is made, with initial weights by the seed."""
    if isinstance(given, nn.Module):
        return given
    features = schema.shape[0]
    outputs = schema.classes if schema.classes is not None and schema.classes > 2 else 1
    # Without a seed still a draw of its own: torch's generator is left as it is.
    initial = secrets.randbits(31) if seed is None else seed
    if given is None:
        return mlp(features, hidden, outputs, seed=initial)
    if not callable(given):
        raise ValueError(
            f"model is {given!r}; expected a torch.nn.Module, or a function from "
            "(n_features, n_outputs) to one"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(initial, "initialisation"))
        return given(features, outputs)


def ledger_of(path: Any, *, private: bool) -> tuple[int | None, Neighbours | None]:
    """The population and the neighbours that a ledger is about, where there is one."""
    if path is None:
        return None, None
    if not private:
        raise ValueError(
            "a ledger was given and epsilon was not: a fit without privacy is a release that no "
            "budget covers. Give epsilon, or leave the ledger out"
        )
    with PopulationLedger.open(path, write=False) as ledger:
        if ledger.withdrawn():
            raise ValueError(
                f"users withdrew from the ledger {path}, by number, and an estimator numbers the "
                "users that it is given itself; use fpfl.train with a FederatedDataset, whose "
                "numbers are yours"
            )
        return ledger.population, ledger.neighbours


def whole(value: Any) -> Any:
    """A whole number as Python's own, which JSON knows; anything else as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
