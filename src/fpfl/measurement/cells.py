"""Cells: what a measurement counts of every column; all of it public, before data is touched.

A column of numbers is cut into bins over its declared range. Linear bins are all equally wide.
Symmetric-log bins, for long tails, are equally wide in

    T(x) = sign(x) log(1 + |x|/t),

which is linear near 0 and logarithmic beyond the threshold t. A column of categories has a cell for
each declared value. Nothing about which cells there are is read from data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOWHERE = -1
"""The code of a row that counts in no cell of a column."""

MOST_BINS = 4096


@dataclass(frozen=True)
class NumberCells:
    """A column of numbers: bins over a declared range.

    Parameters
    ----------
    name
        The column.
    low, high
        The declared range; a value outside is counted at its end.
    bins
        How many.
    threshold
        t of symmetric-log bins; None for linear ones.
    missing
        Whether one more cell counts the rows without a value. Otherwise they count nowhere.
    """

    name: str
    low: float
    high: float
    bins: int = 64
    threshold: float | None = None
    missing: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"the column {self.name!r} has the range [{self.low:g}, {self.high:g}]; expected "
                "two finite numbers, low < high, that are public"
            )
        if not 2 <= self.bins <= MOST_BINS:
            raise ValueError(
                f"bins is {self.bins}; expected 2 to {MOST_BINS:,}, e.g. 64: every bin has noise "
                "of its own, so more of them show less"
            )
        if self.threshold is not None and not (
            math.isfinite(self.threshold) and self.threshold > 0
        ):
            raise ValueError(
                f"the symlog threshold of {self.name!r} is {self.threshold}; it must be positive: "
                "below it bins are about equally wide"
            )
        if not bool((np.diff(self.edges) > 0).all()):
            raise ValueError(
                f"{self.bins} bins over [{self.low:g}, {self.high:g}] are narrower than a double's "
                f"last digit (the column {self.name!r}); use fewer, or a range nearer to 0"
            )

    @property
    def size(self) -> int:
        """How many cells the column has."""
        return self.bins + self.missing

    @property
    def labels(self) -> tuple[str, ...]:
        """What the cells are called."""
        ends = [f"{edge:g}" for edge in self.edges]
        named = [f"{low} to {high}" for low, high in itertools.pairwise(ends)]
        return (*named, *(["(missing)"] if self.missing else []))

    @cached_property
    def edges(self) -> Floats:
        """The bins' edges, from low to high: (bins + 1,)."""
        if self.threshold is None:
            edges = np.linspace(self.low, self.high, self.bins + 1)
        else:
            t = self.threshold
            low, high = (math.copysign(math.log1p(abs(x) / t), x) for x in (self.low, self.high))
            y = np.linspace(low, high, self.bins + 1)
            edges = np.sign(y) * t * np.expm1(np.abs(y))
        edges[0], edges[-1] = self.low, self.high
        return edges

    def codes(self, values: Floats) -> Ints:
        """Each value's cell: (n,). NaN is a missing value, and what is infinite is no number."""
        inner = self.edges[1:-1]
        found = np.searchsorted(inner, values, side="right").astype(np.int64)
        found[~np.isfinite(values)] = NOWHERE
        if self.missing:
            found[np.isnan(values)] = self.bins
        return found


@dataclass(frozen=True)
class CategoryCells:
    """A column of categories: a cell for each declared value.

    Parameters
    ----------
    name
        The column.
    values
        The declared values, and with ``other`` a last cell for any other.
    other
        Whether undeclared values have a cell together. Otherwise they count nowhere.
    """

    name: str
    values: tuple[str, ...]
    other: bool = False

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ValueError(
                f"the column {self.name!r} has the values {list(self.values)}; expected at least "
                "one, and each once"
            )

    @property
    def size(self) -> int:
        """How many cells the column has."""
        return len(self.values) + self.other

    @property
    def labels(self) -> tuple[str, ...]:
        """What the cells are called."""
        return (*self.values, *(["(other)"] if self.other else []))


Cells = NumberCells | CategoryCells


def places(columns: Sequence[Cells]) -> tuple[slice, ...]:
    """Where each column's cells stand in the released vector."""
    ends = np.cumsum([0, *(each.size for each in columns)]).tolist()
    return tuple(slice(a, b) for a, b in itertools.pairwise(ends))


def checked_columns(columns: Sequence[Cells]) -> tuple[Cells, ...]:
    """The columns, at least one and each once."""
    names = [each.name for each in columns]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"the columns to measure are {names}; expected at least one, and each once: every "
            "further column takes more noise on all of them"
        )
    return tuple(columns)
