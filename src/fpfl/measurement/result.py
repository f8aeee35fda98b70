"""What a measurement gives: noisy histograms, what follows from them, what they cost and mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpfl.measurement.cells import CategoryCells, Floats, NumberCells, places
from fpfl.measurement.intervals import (
    distribution,
    normal_quantile,
    quantile,
    quantile_interval,
    rank_error,
    ratio,
    ratio_interval,
)
from fpfl.privacy.assumptions import ALONE, who_is_public, whole_numbers
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.statement import SEEDED_NOISE, round_up
from fpfl.store.typed import plain, read_json, typed

if TYPE_CHECKING:
    from fpfl.measurement.plan import MeasurementPlan

_WORLDS = {
    "zero-out": "with this user's data, or with nothing in its place",
    "add-remove": "with this user among the users, or without",
    "replace-one": "with this user's data, or with any other data in its place",
}

QUARTILES = (0.25, 0.5, 0.75)

_LARGEST = 1e30
"""No release has such numbers."""

_QUARTILE_RANGE = 1.3489795003921634
"""Of a normal distribution: how many standard deviations lie between its quartiles."""

_TAIL = 0.05
"""The share of users beyond each end of the wider range that a spread falls back to."""


@dataclass(frozen=True)
class Figure:
    """A figure with its interval, for the noise alone; NaN where noise dominates."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value = "not known" if math.isnan(self.value) else f"{self.value:.4g}"
        return f"{value} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class MeasuredNumber:
    """A column of numbers.

    Parameters
    ----------
    cells
        Its bins.
    released
        The noisy histogram: how many users are in each cell. It may be negative.
    noise_stddev
        The standard deviation of the noise on each.
    population
        K.
    confidence
        Of each interval by itself.
    """

    cells: NumberCells
    released: tuple[float, ...]
    noise_stddev: float
    population: int
    confidence: float

    def __post_init__(self) -> None:
        _check_released(self)

    @property
    def name(self) -> str:
        """The column."""
        return self.cells.name

    @cached_property
    def histogram(self) -> Floats:
        """The bins alone, without the cell of missing values."""
        return np.array(self.released[: self.cells.bins])

    @cached_property
    def distribution(self) -> Floats:
        """The share of users below each edge, monotone from 0 to 1: (bins + 1,)."""
        return distribution(self.histogram)

    def quantile(self, q: float) -> Figure:
        """The q-quantile of values, users' rows weighing 1/n_k each; clipped to the range."""
        if not 0.0 < q < 1.0:
            raise ValueError(f"q is {q}; expected a number between 0 and 1, e.g. 0.5")
        low, high = quantile_interval(
            self.histogram, self.cells.edges, q, self.noise_stddev, self._z
        )
        known = self.histogram.sum() > self._least
        value = quantile(self.histogram, self.cells.edges, q) if known else math.nan
        return Figure(value, low, high)

    def rank_error(self, q: float) -> float:
        """How far off a quantile's rank is, as a share of the users, by public numbers alone."""
        bins = self.cells.bins
        return rank_error(q, bins, self.noise_stddev, self.population, self.confidence)

    @property
    def median(self) -> Figure:
        """The 0.5-quantile."""
        return self.quantile(0.5)

    @property
    def quartiles(self) -> tuple[Figure, Figure, Figure]:
        """The quantiles 0.25, 0.5, 0.75."""
        return self.quantile(0.25), self.quantile(0.5), self.quantile(0.75)

    @property
    def mean(self) -> Figure:
        """Of values clipped to the range; the interval allows for noise and the bins' widths."""
        edges, low, high = self.cells.edges, self.cells.low, self.cells.high
        centres = (edges[:-1] + edges[1:]) / 2
        first = ratio_interval(self.histogram, edges[:-1], self.noise_stddev, self._z)
        last = ratio_interval(self.histogram, edges[1:], self.noise_stddev, self._z)
        if first is None or last is None:
            return Figure(math.nan, low, high)
        ends = (min(max(end, low), high) for end in (first[0], last[1]))
        value = min(max(ratio(self.histogram, centres), low), high)
        return Figure(value, *ends)

    @property
    def spread(self) -> float:
        """A robust standard deviation: the interquartile range/1.349, never less than a bin.

        Where half of all users are in one bin the quartiles show nothing but that, and the range
        from q to 1 − q takes their place, over the standard deviations that it has in a normal
        distribution; then the width of the median's bin. q is 5%, or twice the error of such a
        rank where that is more: a tail that noise covers may be anywhere in the range. NaN where
        noise dominates.
        """
        edges = self.cells.edges
        low, median, high = (self.quantile(q).value for q in QUARTILES)
        if math.isnan(median):
            return math.nan
        place = int(np.clip(np.searchsorted(edges, median, side="right") - 1, 0, len(edges) - 2))
        width = float(edges[place + 1] - edges[place])
        spread = (high - low) / _QUARTILE_RANGE
        tail = max(_TAIL, 2 * self.rank_error(_TAIL))
        if high - low <= width and tail < QUARTILES[0]:
            ends = [self.quantile(q).value for q in (tail, 1 - tail)]
            spread = max(spread, (ends[1] - ends[0]) / (2 * normal_quantile(1 - 2 * tail)))
        return max(spread, width)

    @property
    def missing(self) -> Figure | None:
        """The share of users' rows without a value; None where that was not counted."""
        if not self.cells.missing:
            return None
        values = np.zeros(self.cells.size)
        values[-1] = 1.0
        return _share(np.array(self.released), values, self.noise_stddev, self._z)

    @property
    def _z(self) -> float:
        return normal_quantile(self.confidence)

    @property
    def _least(self) -> float:
        """Sums up to this may be noise alone."""
        return self._z * self.noise_stddev * math.sqrt(self.cells.bins)


@dataclass(frozen=True)
class MeasuredCategories:
    """A column of categories; the parameters are those of `MeasuredNumber`."""

    cells: CategoryCells
    released: tuple[float, ...]
    noise_stddev: float
    population: int
    confidence: float

    def __post_init__(self) -> None:
        _check_released(self)

    @property
    def name(self) -> str:
        """The column."""
        return self.cells.name

    @property
    def counts(self) -> dict[str, float]:
        """How many users each value has, a user's rows weighing 1/n_k each; noisy."""
        return dict(zip(self.cells.labels, self.released, strict=True))

    @property
    def shares(self) -> dict[str, Figure]:
        """Each value's share of those rows that have one."""
        released = np.array(self.released)
        ones = np.eye(self.cells.size)
        z = normal_quantile(self.confidence)
        return {
            label: _share(released, ones[number], self.noise_stddev, z)
            for number, label in enumerate(self.cells.labels)
        }


Measured = MeasuredNumber | MeasuredCategories


@dataclass(frozen=True)
class Measurement:
    """What was released about a population, and what follows from it: nothing else was looked at.

    Parameters
    ----------
    columns
        What was measured, in the order that was asked for.
    mechanism, epsilon, delta, noise_stddev
        What it cost: one release in which everyone took part; ε at δ of that; the noise on every
        released number.
    declared
        Whether K was declared.
    confidence
        Of each interval by itself, for the noise alone.
    seeded
        Whether the noise came from a seed: a simulation.
    lines
        The statement.
    charged
        The run that a population's ledger was charged for; None where none was.
    contributions
        What its ε rests on.
    """

    columns: tuple[Measured, ...]
    mechanism: Mechanism
    epsilon: float
    delta: float
    noise_stddev: float
    declared: bool
    confidence: float
    seeded: bool
    lines: tuple[str, ...] = field(repr=False)
    charged: str | None = None
    contributions: str | None = ALONE

    @classmethod
    def of(
        cls, plan: MeasurementPlan, released: Floats, *, seeded: bool, charged: str | None
    ) -> Measurement:
        """What a plan released."""
        columns: list[Measured] = []
        for cells, place in zip(plan.columns, places(plan.columns), strict=True):
            numbers = tuple(released[place].tolist())
            more = (plan.noise_stddev, plan.population, plan.confidence)
            if isinstance(cells, NumberCells):
                columns.append(MeasuredNumber(cells, numbers, *more))
            else:
                columns.append(MeasuredCategories(cells, numbers, *more))
        return cls(
            columns=tuple(columns),
            mechanism=plan.mechanism,
            epsilon=plan.epsilon,
            delta=plan.delta,
            noise_stddev=plan.noise_stddev,
            declared=plan.declared,
            confidence=plan.confidence,
            seeded=seeded,
            lines=tuple(statement(plan, seeded=seeded)),
            charged=charged,
        )

    @property
    def population(self) -> int:
        """K."""
        return self.mechanism.population

    @property
    def neighbours(self) -> str:
        """Which populations count as neighbours."""
        return self.mechanism.neighbours

    def __getitem__(self, name: str) -> Measured:
        for each in self.columns:
            if each.name == name:
                return each
        known = [each.name for each in self.columns]
        raise KeyError(f"{name!r} was not measured; measured are {known}")

    def number(self, name: str) -> MeasuredNumber:
        """A column of numbers."""
        found = self[name]
        if not isinstance(found, MeasuredNumber):
            raise ValueError(f"{name!r} has categories; use categories({name!r}).shares")
        return found

    def categories(self, name: str) -> MeasuredCategories:
        """A column of categories."""
        found = self[name]
        if not isinstance(found, MeasuredCategories):
            raise ValueError(f"{name!r} has numbers; use number({name!r}).median")
        return found

    def statement(self) -> list[str]:
        """What is protected, what it cost and what the figures mean, one point a line."""
        return list(self.lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: what was released, and the figures that follow."""
        figures = {
            each.name: {"mean": each.mean, "spread": each.spread, "missing": each.missing}
            | {f"{q:g}": each.quantile(q) for q in QUARTILES}
            if isinstance(each, MeasuredNumber)
            else {"shares": each.shares}
            for each in self.columns
        }
        record = plain(self) | {"figures": plain(figures), "statement": self.statement()}
        del record["lines"]
        found: dict[str, Any] = record
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """What `as_dict` wrote."""
        said = {"lines": values.get("statement")} if isinstance(values, dict) else {}
        return typed(cls, values | said, "the measurement")

    @classmethod
    def read(cls, path: str | Path) -> Measurement:
        """What was written to a file."""
        content = read_json(Path(path), dict)
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(
                f"{path} is not a measurement ({error}); name a file that fpfl measure wrote"
            ) from error

    def plot(self) -> bytes:
        """Draw every column's histogram as a PNG."""
        from fpfl.measurement.picture import picture

        return picture(self)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """The figures as texts: column, figure, value with its interval."""
        for each in self.columns:
            if isinstance(each, MeasuredNumber):
                words = ("25%", "median", "75%")
                for word, figure in zip(words, each.quartiles, strict=True):
                    yield each.name, word, str(figure)
                yield each.name, "mean", str(each.mean)
                spread = each.spread
                yield each.name, "spread", "not known" if math.isnan(spread) else f"{spread:.4g}"
                if each.missing is not None:
                    yield each.name, "missing", str(each.missing)
            else:
                for label, share in each.shares.items():
                    yield each.name, label, str(share)

    def __str__(self) -> str:
        rows = [("column", "", "value, interval"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            [
                f"{self.population:,} users, measured under ε = {round_up(self.epsilon)}, "
                f"δ = {self.delta:.3g} ({self.neighbours})",
                f"intervals at {100 * self.confidence:.4g}% each, for the noise (standard "
                f"deviation {self.noise_stddev:.3g} users a count)",
                "",
                *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            ]
        )


def statement(plan: MeasurementPlan, *, seeded: bool) -> list[str]:
    """What is protected, what it costs and what the figures mean, one point a line."""
    columns = len(plan.columns)
    reach = "2C" if plan.privacy.sensitivity == 2 else "C"
    names = ", ".join(f"{each.name} ({each.size})" for each in plan.columns)
    more, term = whole_numbers(plan.epsilon, plan.delta, plan.size)
    small = f"To δ adds noise in whole numbers: {term:.2g}" + (
        f", and to ε {more:.2g}." if more else "."
    )
    lines = [
        f"Unit of privacy: user (all samples of one together). Adjacency: {plan.neighbours}. In "
        f"words: {_WORLDS[plan.neighbours]}.",
        f"Price: ε = {round_up(plan.epsilon)} at δ = {plan.delta:g}, for one release. Everyone "
        "takes part for certain, so nothing is amplified. (One Gaussian mechanism with noise "
        f"multiplier {plan.noise_multiplier:.4g}, by its exact formula.)",
        f"Released: {plan.size:,} numbers, histograms over public bins and counts of declared "
        f"categories of {columns} column{'s'[: columns > 1]}: {names}. A user's rows weigh 1/n "
        f"each, so one user changes all of them together by {reach} at most, C = √{columns} (ℓ2); "
        f"each has Gaussian noise of {plan.noise_stddev:.4g} users (standard deviation). Every "
        "figure is computed from them; nothing else was looked at.",
        who_is_public(plan.neighbours, plan.declared),
        small,
        "Whatever else is released about these users adds to this price: another measurement, a "
        "training. A population's ledger adds them up.",
        f"Intervals, at {100 * plan.confidence:.4g}% each: they allow for the noise on these "
        "users' own figures, not for these users being a sample of others. Values are clipped to "
        "their ranges; rows without a value that was declared count nowhere.",
    ]
    if any(isinstance(each, NumberCells) for each in plan.columns):
        lines.append(
            f"A median's rank is known within ± {100 * plan.rank_error():.2g}% of the users, a "
            f"quartile's within ± {100 * plan.rank_error(0.25):.2g}%: more bins, more columns and "
            "fewer users make it worse."
        )
    if seeded:
        lines.insert(0, f"Seeded noise, {SEEDED_NOISE}.")
    return lines


def _share(released: Floats, values: Floats, stddev: float, z: float) -> Figure:
    ends = ratio_interval(released, values, stddev, z)
    if ends is None:
        return Figure(math.nan, 0.0, 1.0)
    low, high, value = (min(max(x, 0.0), 1.0) for x in (*ends, ratio(released, values)))
    return Figure(value, low, high)


def _check_released(column: MeasuredNumber | MeasuredCategories) -> None:
    numbers, size = column.released, column.cells.size
    if len(numbers) != size or not all(abs(each) <= _LARGEST for each in numbers):
        raise ValueError(
            f"the column {column.name!r} has {len(numbers)} numbers; expected {size}, none of them "
            f"beyond ±{_LARGEST:g}"
        )
    if not (0.0 < column.noise_stddev <= _LARGEST and 0.0 < column.confidence < 1.0):
        raise ValueError(
            f"the column {column.name!r} has noise of {column.noise_stddev} and the confidence "
            f"{column.confidence}; expected positive noise, and a confidence between 0 and 1"
        )
    if column.population < 1:
        raise ValueError(f"the population is {column.population}; it must be at least 1")
