r"""Which settings to take: by held-out users, averaged over seeds, within the tolerance.

Runs that differ in their seeds alone are one setting. Its accuracy and its gap are the means over
its runs. Among the settings whose mean gap is at most α the one with the best accuracy is chosen;
if there is none, the one with the smallest gap, and the choice says so.

A setting with a run whose model has collapsed (`fpfl.fairness.collapse`) comes after all that are
on the same side of the tolerance: its gap is closed for nothing, and its accuracy may be high.

An interval around a mean v of S runs is made of two parts, each at the same confidence:

    users    the bootstrap intervals [l_s, h_s] of the single runs, over held-out users. All runs of
             a setting are judged by the same users, so that more seeds do not narrow it: the mean
             of l_s and the mean of h_s are taken.
    seeds    ± t s/√S, with the runs' standard deviation s and Student's t for S − 1 degrees
             of freedom. With one seed it is not known, and left out; the choice says so.

They are of different randomness, so

    low = v − √((v − mean l_s)² + (t s/√S)²),   high likewise.

Whether two settings differ is asked without pairing their users, in whose favour these intervals
are too wide: what can be told apart by them can be told apart. The best of many settings looks a
little better than it is, since chance had a part in its being best: measure it on others.

Accuracies and gaps of held-out users are computed without noise. Choosing by them looks at these
users, and no ε covers that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

LOOKED = (
    "Held-out figures are computed without noise: choosing by them looks at the held-out users, "
    "which no ε covers."
)

FIGURES = (
    "run", "seed", "noise_seed", "accuracy", "accuracy_low", "accuracy_high",
    "error", "error_low", "error_high", "gap", "gap_low", "gap_high", "verdict", "tolerance",
    "confidence", "balanced_accuracy", "balanced_accuracy_low", "balanced_accuracy_high",
    "base_rate", "unbalanced", "collapsed",
    "released_accuracy", "released_gap", "epsilon", "delta", "rounds_run",
    "selected", "stopped", "simulated",
)  # fmt: skip
"""Columns of a sweep's table that are no settings."""

OVER = ("seed", "noise_seed")


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, in [low, high]; an end that is not known is NaN."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4f}"
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class Averaged:
    """One setting, averaged over its runs.

    Parameters
    ----------
    settings
        What it is, by name.
    runs
        The numbers of its runs.
    score
        Held-out accuracy, or the absolute error of a regression.
    gap
        The gap of the constraint; None where no run has one.
    within
        Whether the mean gap is at most the tolerance; None without a gap or a tolerance.
    sure
        Whether the whole interval of the gap lies on that side of the tolerance.
    collapsed
        How many of its runs ended with a collapsed model.
    """

    settings: dict[str, Any]
    runs: tuple[int, ...]
    score: Estimate
    gap: Estimate | None
    within: bool | None
    sure: bool
    collapsed: int = 0

    @property
    def name(self) -> str:
        """What it is, in words."""
        said = ", ".join(f"{name} = {shown(value)}" for name, value in self.settings.items())
        return said or "the only setting"


@dataclass(frozen=True)
class Choice:
    """What was chosen, among what, and how sure that is; ``print`` says it.

    Parameters
    ----------
    best
        The chosen setting.
    alike
        Others that cannot be told apart from it: in accuracy among those within the tolerance, or
        in the gap where none is.
    doubtful
        Settings that were left out for their gap, though its interval reaches below the tolerance.
    settings
        All of them, the best first.
    tolerance
        α; None where nothing was asked of the gap.
    met
        Whether the best is within the tolerance; None without one.
    measure
        "accuracy" or "error".
    seeds
        The fewest runs that a setting has: with one, nothing is known of chance between seeds.
    confidence
        Of the intervals.
    """

    best: Averaged
    alike: tuple[Averaged, ...]
    doubtful: tuple[Averaged, ...]
    settings: tuple[Averaged, ...]
    tolerance: float | None
    met: bool | None
    measure: str
    seeds: int
    confidence: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        found: dict[str, Any] = _plain(asdict(self))
        return found | {"words": self.lines()}

    def lines(self) -> list[str]:
        """The choice in sentences."""
        best, alpha = self.best, self.tolerance
        said = f"{self.measure} {best.score}" + (f", gap {best.gap}" if best.gap else "")
        lines = []
        if self.met is False:
            assert alpha is not None
            lines.append(
                f"No setting has a held-out gap within α = {alpha:g}: this one has the smallest."
            )
        lines.append(f"Chosen of {len(self.settings)}: {best.name} ({said}).")
        lines += self._collapsed()
        if self.met and not best.sure:
            lines.append(
                f"Its gap is within α = {alpha:g}, but the interval reaches above it: more "
                "held-out users would tell."
            )
        if self.alike:
            names = "; ".join(each.name for each in self.alike[:_NAMED])
            more = len(self.alike) - _NAMED
            names += f"; and {more} more" if more > 0 else ""
            what = "gap" if self.met is False else self.measure
            lines.append(f"Cannot be told apart from it by {what}: {names}.")
        elif any(each is not best and each.within == best.within for each in self.settings):
            where = {None: "", True: " within α", False: " beyond α"}[self.met]
            lines.append(f"No other setting{where} can be taken for it by chance.")
        if self.doubtful:
            names = "; ".join(each.name for each in self.doubtful[:_NAMED])
            lines.append(f"Left out by a gap that chance may have put above α: {names}.")
        lines.append(self.intervals())
        lines.append(LOOKED)
        return lines

    def _collapsed(self) -> list[str]:
        """Which settings ended with a collapsed model: the chosen one, or others for that."""
        best = self.best
        if best.collapsed:
            others = [e for e in self.settings if not e.collapsed]
            what = ", and settings without one are outside α" if others else ""
            what = what if others or len(self.settings) == 1 else ", and so did all others"
            return [
                f"COLLAPSED: {best.collapsed} of its {len(best.runs)} runs ended with a model that "
                f"hardly tells classes apart{what}. Do not use it: try another clip bound, "
                "learning rate or number of rounds."
            ]
        passed = [e for e in self.settings if e.collapsed and e.within == best.within]
        if not passed:
            return []
        names = "; ".join(each.name for each in passed[:_NAMED])
        more = len(passed) - _NAMED
        names += f"; and {more} more" if more > 0 else ""
        return [f"Passed over, for a model of theirs has collapsed: {names}."]

    def markdown(self) -> str:
        """All settings as a table, the best first."""
        names = list(self.best.settings)
        heads = ["", *names, "runs", f"held-out {self.measure}", "gap", "within"]
        lines = [f"| {' | '.join(heads)} |", "| --- " + "| ---: " * (len(heads) - 2) + "| --- |"]
        for each in self.settings:
            within = {None: "-", True: "yes", False: "no"}[each.within]
            mark = "**chosen**" if each is self.best else ("alike" if each in self.alike else "")
            if each.collapsed:
                mark = f"{mark} (collapsed)" if mark else "collapsed"
            cells = [
                mark,
                *(shown(each.settings.get(name)) for name in names),
                str(len(each.runs)),
                str(each.score),
                "-" if each.gap is None or math.isnan(each.gap.value) else str(each.gap),
                within if each.sure else f"{within}, cannot tell",
            ]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        return "\n".join([*lines, ""])

    def intervals(self) -> str:
        """What the intervals are of."""
        if math.isnan(self.best.score.low):
            return "There are no intervals: held-out users were not resampled."
        seeds = (
            "with one seed, so that chance between seeds is not in them"
            if self.seeds < 2
            else f"and for chance between {self.seeds} seeds"
        )
        return (
            f"Intervals are at {100 * self.confidence:.4g}%, for the draw of held-out users "
            f"(bootstrap) {seeds}."
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


_NAMED = 6


def choose(
    rows: Sequence[Mapping[str, Any]],
    *,
    tolerance: float | None = None,
    over: Sequence[str] = OVER,
) -> Choice:
    """Choose a setting by held-out users: the best accuracy among those within the tolerance.

    One whose model has collapsed is not chosen while another one on its side is not.

    Parameters
    ----------
    rows
        Rows of a sweep's table (``Sweep.table()``, or the rows of its ``results.json``): settings,
        and ``accuracy`` (or ``error``) and ``gap`` with their ends, one row a run.
    tolerance
        α; by default the rows' own, which must then be the same.
    over
        Columns that runs of one setting may differ in: they are averaged over. Add ``"data"`` for
        folds.

    Returns
    -------
    Choice
        The best setting, others that cannot be told apart from it, and all of them.
    """
    judged = [row for row in rows if _measure(row) is not None]
    if not judged:
        raise ValueError(
            f"none of {len(rows)} rows has held-out figures, so there is nothing to choose by; "
            "hold users out (held_out=0.25), and let runs finish"
        )
    measures = {_measure(row) for row in judged}
    if len(measures) > 1:
        raise ValueError(
            "some rows have an accuracy and others an error; choose among runs of one task"
        )
    measure = str(measures.pop())
    alpha = _tolerance(judged, tolerance)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in judged:
        own = _own(row, over)
        groups.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(row)
    # Where other runs have a gap, a run without one has a group that nothing is known of.
    gaps = any(row.get("gap") is not None for row in judged)
    found = [_averaged(runs, measure, over, alpha, gaps=gaps) for runs in groups.values()]
    sign = 1.0 if measure == "accuracy" else -1.0
    within = [each for each in found if each.within is not False]
    met = None if alpha is None or all(each.within is None for each in found) else bool(within)

    def rank(each: Averaged) -> tuple[bool, bool, float, float]:
        gap = math.inf if each.gap is None or math.isnan(each.gap.value) else each.gap.value
        score = -sign * each.score.value
        order = (gap, score) if each.within is False else (score, gap)
        return each.within is False, each.collapsed > 0, *order

    ordered = sorted(found, key=rank)
    best = ordered[0]
    if met is False:
        assert best.gap is not None
        alike = [e for e in ordered[1:] if e.gap is not None and _alike(e.gap, best.gap)]
    else:
        alike = [e for e in ordered[1:] if e.within is not False and _alike(e.score, best.score)]
    alike = [e for e in alike if bool(e.collapsed) == bool(best.collapsed)]
    doubtful = [] if not met else [e for e in ordered if e.within is False and not e.sure]
    return Choice(
        best=best,
        alike=tuple(alike),
        doubtful=tuple(doubtful),
        settings=tuple(ordered),
        tolerance=alpha,
        met=met,
        measure=measure,
        seeds=min(len(each.runs) for each in found),
        confidence=_confidence(judged),
    )


def _own(row: Mapping[str, Any], over: Sequence[str]) -> dict[str, Any]:
    """The settings of a row: what is no figure, and not averaged over."""
    figures = {*FIGURES, *over} - ({*OVER} - {*over})
    return {name: value for name, value in row.items() if name not in figures}


def _measure(row: Mapping[str, Any]) -> str | None:
    return next((name for name in ("accuracy", "error") if _number(row.get(name))), None)


def _tolerance(rows: Sequence[Mapping[str, Any]], given: float | None) -> float | None:
    if given is not None:
        if not 0.0 <= given < 1.0:
            raise ValueError(f"the tolerance is {given}; it must be in [0, 1)")
        return given
    own = {row.get("tolerance") for row in rows}
    if len(own) > 1:
        known = ", ".join(map(str, sorted(own, key=str)))
        raise ValueError(
            f"the rows have different tolerances ({known}), and settings can only be compared by "
            "one; give tolerance="
        )
    (alpha,) = own
    return None if alpha is None else float(alpha)


def _confidence(rows: Sequence[Mapping[str, Any]]) -> float:
    known = [row["confidence"] for row in rows if _number(row.get("confidence"))]
    return float(known[0]) if known else 0.95


def _averaged(
    rows: Sequence[Mapping[str, Any]],
    measure: str,
    over: Sequence[str],
    alpha: float | None,
    *,
    gaps: bool,
) -> Averaged:
    confidence = _confidence(rows)
    score = averaged([_ends(row, measure) for row in rows], confidence)
    gap = None
    if gaps:
        gap = averaged([_ends(row, "gap") for row in rows], confidence)
    within, sure = None, True
    if alpha is not None and gap is not None:
        within = bool(gap.value <= alpha)  # NaN, a group without a sample, is not within
        sure = bool(gap.high <= alpha if within else gap.low > alpha)
    return Averaged(
        _own(rows[0], over), tuple(int(row["run"]) for row in rows), score, gap, within, sure,
        collapsed=sum(bool(row.get("collapsed")) for row in rows),
    )  # fmt: skip


def _ends(row: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    names = (name, f"{name}_low", f"{name}_high")
    value, low, high = (float(row[n]) if _number(row.get(n)) else math.nan for n in names)
    return value, low, high


def averaged(
    ends: Sequence[tuple[float, float, float]],
    confidence: float,
    *,
    least: float = 0.0,
    most: float = 1.0,
) -> Estimate:
    """The mean of (value, low, high) of runs on the same users, with users' and seeds' chance."""
    S = len(ends)
    value, low, high = (math.fsum(each) / S for each in zip(*ends, strict=True))
    spread = 0.0
    if S > 1:
        variance = math.fsum((v - value) ** 2 for v, _, _ in ends) / (S - 1)
        spread = students_t(confidence, S - 1) * math.sqrt(variance / S)
    return Estimate(
        value,
        max(value - math.hypot(value - low, spread), min(least, value)),
        min(value + math.hypot(high - value, spread), max(most, value)),
    )


def _alike(a: Estimate, b: Estimate) -> bool:
    """Whether chance may have made the difference of two means."""
    upper, lower = (a, b) if a.value >= b.value else (b, a)
    if math.isnan(upper.low) or math.isnan(lower.high):
        return bool(a.value == b.value)
    return upper.value - lower.value <= math.hypot(
        upper.value - upper.low, lower.high - lower.value
    )


@cache
def students_t(confidence: float, degrees: int) -> float:
    """The t with P(|T| ≤ t) = confidence."""
    low, high = 0.0, 1.0
    while _within_t(high, degrees) < confidence:
        low, high = high, 2.0 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within_t(middle, degrees) < confidence else (low, middle)
    return high


def _within_t(t: float, degrees: int) -> float:
    """P(|T| ≤ t) for a whole number of degrees of freedom: finite sums in θ = atan(t/√ν)."""
    theta = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):  # 1, 3, ... (even ν), or 2, 4, ... (odd ν)
        total += term
        term *= k / (k + 1) * cosine**2
    return (theta + sine * total) * 2 / math.pi if odd else sine * total


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def shown(value: Any) -> str:
    """A plain setting in few characters: an object by its kind and its numbers."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{n}={shown(v)}" for n, v in value.items() if n != "kind")
        return f"{value.get('kind', '')}({inner})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return "none" if value is None else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
