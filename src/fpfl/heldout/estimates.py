"""From released cells to rates, the constraint's gap, the verdict, and what a better one takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from fpfl.fairness.evaluation import Difference, GapEstimate
from fpfl.heldout.cells import Cells
from fpfl.heldout.intervals import Floats, Sums, difference_interval, rate_interval
from fpfl.heldout.result import RateEstimate


@dataclass(frozen=True)
class Judge:
    """Judges released cells; all it knows besides them is public.

    Parameters
    ----------
    cells
        What was counted.
    bound
        B: how many samples a user weighs at most.
    confidence
        Of the intervals.
    """

    cells: Cells
    bound: float
    confidence: float

    def rates(self, released: Floats, stddev: float) -> dict[str, dict[str, RateEstimate]]:
        """Every rate of the whole and of each group, with an interval of its own."""
        cells = self.cells
        parts = cells.sums(released, stddev, cells.rates)
        whole = _columns(cells.wholes(parts), [cells.smallest_way])
        groups = _columns(parts, range(len(cells.groups)))
        sums = Sums(
            *(np.hstack(pair) for pair in zip(_arrays(whole), _arrays(groups), strict=True))
        )
        low, high = rate_interval(sums, 1.0 - self.confidence, self.bound)
        numbers = np.stack([sums.value(), low, high, sums.n], axis=-1).tolist()
        names = ("overall", *cells.groups.names)
        return {
            rate.name: {name: RateEstimate(*four) for name, four in zip(names, row, strict=True)}
            for rate, row in zip(cells.rates, numbers, strict=True)
        }

    def gap(self, released: Floats, stddev: float) -> GapEstimate:
        """The constraint's gap; the intervals of all differences hold at once (Bonferroni)."""
        cells = self.cells
        parts = cells.sums(released, stddev, cells.constraint.rates)
        groups = _columns(parts, range(len(cells.groups)))
        whole = _columns(cells.wholes(parts), cells.way_of)
        error = (1.0 - self.confidence) / cells.comparisons
        low, high = difference_interval(groups, whole - groups, error, self.bound)
        overall, value = whole.value(), groups.value()
        ends = rate_interval(groups, error, self.bound)
        D = overall - value
        count = np.where(np.isnan(D), 0, np.maximum(groups.n, 1.0)).round()
        names = product([rate.name for rate in cells.constraint.rates], cells.groups.names)
        numbers = np.stack([overall, value, count, D, low, high, *ends], axis=-1)
        return GapEstimate(
            cells.constraint.name,
            value=float(np.fmax.reduce(np.abs(D), axis=None, initial=np.nan)),
            low=float(np.maximum(np.maximum(low, -high), 0.0).max()),
            high=float(np.maximum(-low, high).max()),
            differences=tuple(
                Difference(*each, o, v, int(n), *d)
                for each, (o, v, n, *d) in zip(names, numbers.reshape(-1, 8).tolist(), strict=True)
            ),
        )

    def advice(
        self, released: Floats, stddev: float, population: int, noise: Callable[[float], float]
    ) -> str:
        """What it takes for intervals of ± α, with groups and rates as they were released.

        Such intervals mostly tell a fair model, and one whose gap is twice the tolerance. What it
        takes to tell a gap that is nearly α itself nobody can say. ``noise`` gives the noise that
        there would be if ε were so many times as large.
        """
        tolerance = self.cells.constraint.tolerance

        def narrow(times: float, noise: float) -> bool:
            gap = self.gap(times * released, noise)
            widest = max(d.high - d.low for d in gap.differences)
            return widest <= 2 * tolerance and not gap.unknown_groups

        if narrow(1.0, stddev):
            return "The intervals are narrow: the gap may be close to α itself"
        users = _first(lambda times: narrow(times, stddev), 20)
        if users is None:
            return f"No number of users is in sight that would give intervals of ± {tolerance:g}"
        needed = f"about {_two_digits(population * users)} users like these"
        budget = _first(lambda times: narrow(1.0, noise(times)), 6)
        other = (
            "; a larger ε alone is not enough"
            if budget is None
            else f", or about {budget:.2g} times the ε"
        )
        return f"For intervals of ± {tolerance:g} it takes {needed}{other}"


def _first(enough: Callable[[float], bool], powers: int) -> float | None:
    """About the least factor that is enough, up to 2 to the given power."""
    steps = [2.0 ** (step / 4) for step in range(1, 4 * powers + 1)]
    found = bisect_left(steps, True, key=enough)
    return steps[found] if found < len(steps) else None


def _arrays(sums: Sums) -> tuple[Floats, ...]:
    return sums.F, sums.M, sums.noise_F, sums.noise_M


def _columns(sums: Sums, which: object) -> Sums:
    return Sums(*(each[:, np.asarray(which)] for each in _arrays(sums)))


def _two_digits(number: float) -> str:
    unit = 10.0 ** max(math.floor(math.log10(number)) - 1, 0)
    return f"{math.ceil(number / unit) * unit:,.0f}"
