"""What an evaluation finds, and how it reads: in words, as a plain text table, and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fpfl.fairness.collapse import collapse_in_words
from fpfl.fairness.metrics import ClassMetrics
from fpfl.store.typed import plain, typed

Verdict = Literal["within", "outside", "cannot tell"]

MARK = "measured without noise"
"""What every evaluation says of itself: it is for simulations and public data, and under no ε."""

_SHOWN = 12  # gaps that are printed; a task of many classes has many


def verdict_of(low: float, high: float, tolerance: float, *, known: bool) -> Verdict:
    """The verdict on a gap in [low, high]; ``known``: every group has a value for every rate.

    Silence is not fairness: a group that nothing is known of may be treated in any way.
    """
    if low > tolerance:
        return "outside"
    return "within" if high <= tolerance and known else "cannot tell"


@dataclass(frozen=True)
class Difference:
    """One group against the whole, in one rate: D_a = overall − value, in [low, high].

    ``count`` is n'_a. ``value_low`` and ``value_high`` are the ends of the group's own value. What
    is not known is NaN.
    """

    rate: str
    group: str
    overall: float
    value: float
    count: int
    difference: float
    low: float
    high: float
    value_low: float = math.nan
    value_high: float = math.nan


@dataclass(frozen=True)
class Pair:
    """Two groups and how far apart they are in one rate: ``difference`` = the larger − the smaller.

    The intervals of all D_a hold at once, and the difference is D_smaller − D_larger: so does
    [low, high], which is therefore wide.
    """

    rate: str
    larger: str
    smaller: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class GapEstimate:
    """A gap, in [low, high], and the difference of every rate × group that it is the largest of.

    ``value`` is NaN where no group has a value, ``low`` and ``high`` also without a bootstrap.
    """

    name: str
    value: float
    low: float
    high: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> Difference | None:
        """The difference that makes the gap; None where no group has a value."""
        known = [d for d in self.differences if not math.isnan(d.difference)]
        return max(known, key=lambda d: abs(d.difference), default=None)

    @property
    def worst_group(self) -> str | None:
        """The name of the group that is furthest from the whole."""
        return None if self.worst is None else self.worst.group

    @property
    def worst_pair(self) -> Pair | None:
        """The two groups that are furthest apart; None where fewer than two have a value.

        Groups of two attributes overlap; they are compared all the same.
        """
        pairs = []
        for rate in self.overall:
            known = [d for d in self.differences if d.rate == rate and not math.isnan(d.difference)]
            if len(known) > 1:
                b, a = min(known, key=lambda d: d.value), max(known, key=lambda d: d.value)
                ends = max(b.low - a.high, -1.0), min(b.high - a.low, 1.0)
                pairs.append(Pair(rate, a.group, b.group, a.value - b.value, *ends))
        return max(pairs, key=lambda pair: pair.difference, default=None)

    @property
    def unknown_groups(self) -> tuple[str, ...]:
        """The groups that some rate says nothing about, since they have no sample for it."""
        return tuple(dict.fromkeys(d.group for d in self.differences if d.count == 0))

    def verdict(self, tolerance: float) -> Verdict:
        """Whether the gap is within the tolerance, outside, or cannot be told."""
        return verdict_of(self.low, self.high, tolerance, known=not self.unknown_groups)

    @property
    def overall(self) -> dict[str, float]:
        """F(d')/n': ``{rate: value}``."""
        return {d.rate: d.overall for d in self.differences}

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """F(d'_a)/n'_a: ``{rate: {group: value}}``."""
        return {
            r: {d.group: d.value for d in self.differences if d.rate == r} for r in self.overall
        }

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """n'_a: ``{rate: {group: samples}}``."""
        return {
            r: {d.group: d.count for d in self.differences if d.rate == r} for r in self.overall
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        pair = None if self.worst_pair is None else asdict(self.worst_pair)
        found: dict[str, Any] = plain(
            {**asdict(self), "worst_group": self.worst_group, "worst_pair": pair}
        )
        return found

    def __str__(self) -> str:
        where = "" if self.worst is None else f", the worst being {self.worst_group}"
        return f"{self.name} gap {_number(self.value)} {_interval(self.low, self.high)}{where}"


@dataclass(frozen=True)
class Evaluation:
    """What a model's predictions are worth: how good, and how even between groups.

    ``accuracy`` P[Ŷ = Y] is None for a regression, ``error`` (mean absolute, as a fraction of the
    label range) for classes. ``rates`` is ``{rate: {"overall": value, group: value, ...}}``, NaN
    where there is no sample. ``constraint`` and ``tolerance`` are the given one's name and α, and
    ``gaps["constraint"]`` is its own gap. ``confidence`` is that of the intervals, ``bootstrap``
    the number of replicates they are made of.

    ``verdict`` is "outside" where the low end of the constraint's gap is above α, "within" where
    the high end is not and every group has a sample for every rate, else "cannot tell".

    ``metrics`` are what accuracy does not say of classes that are not equally frequent: None for a
    regression, and in files of versions that did not have them.
    """

    samples: int
    users: int
    accuracy: float | None
    accuracy_interval: tuple[float, float] | None
    error: float | None
    error_interval: tuple[float, float] | None
    rates: dict[str, dict[str, float]]
    gaps: dict[str, GapEstimate]
    constraint: str | None
    tolerance: float | None
    verdict: Verdict | None
    confidence: float
    bootstrap: int
    metrics: ClassMetrics | None = None

    @property
    def balanced_accuracy(self) -> float | None:
        """The mean of the classes' recalls; ``metrics`` has its interval, and those below."""
        return None if self.metrics is None else self.metrics.balanced_accuracy.value

    @property
    def f1(self) -> float | None:
        """F1 of class 1 where there are two, else the mean of the classes'."""
        return None if self.metrics is None else self.metrics.f1.value

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve; None where there were hard predictions alone."""
        found = None if self.metrics is None else self.metrics.auc
        return None if found is None else found.value

    @property
    def base_rate(self) -> float | None:
        """The share of class 1 of two among the labels."""
        found = None if self.metrics is None else self.metrics.base_rate
        return None if found is None else found.value

    @property
    def collapsed(self) -> str | None:
        """How the model has collapsed, in words (`fpfl.fairness.collapse`); None if it has not."""
        people = self.samples == self.users
        return collapse_in_words(self.metrics, self.accuracy, people=people)

    @property
    def verdict_in_words(self) -> str | None:
        """The verdict as a sentence with its reason; None without a constraint.

        That of a collapsed model says so first: its groups are treated alike for nothing.
        """
        words, collapsed = self._judged, self.collapsed
        if words is None or collapsed is None:
            return words
        return f"collapsed, so that its gap says nothing: {collapsed} (the gap by itself: {words})"

    @property
    def _judged(self) -> str | None:
        if self.verdict is None or self.tolerance is None:
            return None
        gap, alpha = self.gaps["constraint"], f"α = {self.tolerance:g}"
        ends = _interval(gap.low, gap.high)
        if self.verdict != "cannot tell":
            words = f"{self.verdict} {alpha} at {100 * self.confidence:.4g}%"
        elif math.isnan(gap.value):
            words = "cannot tell: no group has a sample that counts"
        elif not self.bootstrap:
            words = f"cannot tell: the gap {_number(gap.value)} has no interval (bootstrap = 0)"
        elif gap.high > self.tolerance:
            words = f"cannot tell: {alpha} lies in the interval {ends}; more users would narrow it"
        else:
            words = f"cannot tell: the interval {ends} of the other groups is within {alpha}"
        silent = ", ".join(gap.unknown_groups)
        return f"{words} (not judged, having no sample: {silent})" if silent else words

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        gaps = {name: gap.as_dict() for name, gap in self.gaps.items()}
        said = {"verdict_in_words": self.verdict_in_words, "collapsed": self.collapsed}
        found: dict[str, Any] = plain({**vars(self), "gaps": gaps, **said, "mark": MARK})
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        """What `as_dict` wrote."""
        return typed(cls, values, "the evaluation", nan=True)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def _lines(e: Evaluation) -> list[str]:
    """A plain text table: the accuracy beside every gap, for the trivial answer is fair."""
    what = "absolute error" if e.accuracy is None else "accuracy"
    score = _number(e.error or 0.0 if e.accuracy is None else e.accuracy)
    ends = e.accuracy_interval or e.error_interval or (math.nan, math.nan)
    lines = [
        f"{e.samples:,} samples of {e.users:,} users, {MARK}",
        f"{what} {score} {_interval(*ends)}",
    ]
    if e.bootstrap:
        lines[0] += f"; intervals at {100 * e.confidence:.4g}% from {e.bootstrap:,} draws of them"
    lines += [] if e.metrics is None else e.metrics.lines()
    lines += [] if e.collapsed is None else [f"COLLAPSED: {e.collapsed}"]
    if e.gaps:
        head = ("gap", "value", "interval", what, "worst group", "its value", "overall", "n'")
        rows = [head, *(_row(gap, score) for gap in _shown(e.gaps))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", *("  ".join(map(str.ljust, row, widths)) for row in rows)]
    if len(e.gaps) > _SHOWN:
        lines.append(f"(the largest; {len(e.gaps) - _SHOWN} more in .gaps)")
    if e.verdict is not None:
        # The reason stands above, beside the accuracy.
        words = e._judged if e.collapsed is None else f"says nothing, collapsed ({e._judged})"
        lines += ["", f"{e.constraint}: {words}"]
    return [line.rstrip() for line in lines]


def _shown(gaps: dict[str, GapEstimate]) -> list[GapEstimate]:
    """The gaps to print, in their order: accuracy, the constraint, and the largest others."""
    by_size = sorted(gaps, key=lambda name: (math.isnan(gaps[name].value), -gaps[name].value))
    first = sorted(by_size, key=lambda name: name not in ("accuracy", "constraint"))[:_SHOWN]
    return [gap for name, gap in gaps.items() if name in first]


def _row(gap: GapEstimate, score: str) -> tuple[str, ...]:
    row = (gap.name, _number(gap.value), _interval(gap.low, gap.high), score)
    d = gap.worst
    if d is None:
        return (*row, "-", "-", "-", "-")
    group = d.group if len(gap.overall) == 1 else f"{d.group}, {d.rate}"
    return (*row, group, _number(d.value), _number(d.overall), f"{d.count:,}")
