"""How an evaluation reads: in words, as a plain text table, and as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.fairness.gaps import Evaluation, GapEstimate

_SHOWN = 12
"""Gaps that are printed; a task of many classes has many."""


def number(value: float) -> str:
    """For example ``"0.012"``; ``"-"`` where there is none."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def interval(low: float, high: float) -> str:
    """For example ``"[0.001, 0.042]"``; nothing where there is none."""
    return "" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def jsonable(value: Any) -> Any:
    """The same as JSON can hold it: NaN becomes None."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def verdict_in_words(e: Evaluation) -> str:
    """The verdict on the constraint as a sentence, with its reason."""
    gap = e.gaps["constraint"]
    assert e.tolerance is not None  # there is a constraint
    alpha, ends = f"α = {e.tolerance:g}", interval(gap.low, gap.high)
    if e.verdict != "cannot tell":
        words = f"{e.verdict} {alpha} at {100 * e.confidence:.4g}%"
    elif math.isnan(gap.value):
        words = "cannot tell: no group has a sample that counts"
    elif not e.bootstrap:
        words = f"cannot tell: the gap {number(gap.value)} has no interval (bootstrap = 0)"
    elif gap.high > e.tolerance:
        words = f"cannot tell: {alpha} lies in the interval {ends}; more users would narrow it"
    else:
        words = f"cannot tell: the interval {ends} of the other groups is within {alpha}"
    if gap.unknown_groups:
        words += f" (not judged, having no sample: {', '.join(gap.unknown_groups)})"
    return words


def describe(e: Evaluation) -> str:
    """A plain text table: the accuracy beside every gap, for the trivial answer is fair."""
    what, score, ends = "accuracy", e.accuracy, e.accuracy_interval
    if score is None:
        what, score, ends = "absolute error", e.error, e.error_interval
    assert score is not None and ends is not None  # one of the two is always there
    lines = [f"{e.samples:,} samples of {e.users:,} users"]
    if e.bootstrap:
        lines[0] += f"; intervals at {100 * e.confidence:.4g}% from {e.bootstrap:,} "
        lines[0] += "bootstrap replicates of the users"
    lines.append(f"{what} {number(score)} {interval(*ends)}".rstrip())
    if e.gaps:
        head = ("gap", "value", "interval", what, "worst group", "its value", "overall", "n'")
        rows = [head, *(_row(gap, number(score)) for gap in _shown(e.gaps))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append("")
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(e.gaps) > _SHOWN:
        lines.append(f"(the largest; {len(e.gaps) - _SHOWN} more in .gaps)")
    if e.verdict is not None:
        lines += ["", f"{e.constraint}: {e.verdict_in_words}"]
    return "\n".join(lines)


def _shown(gaps: dict[str, GapEstimate]) -> list[GapEstimate]:
    """The gaps to print, in their order: accuracy, the constraint, and the largest others."""

    def rank(gap: GapEstimate) -> tuple[bool, float]:
        size = 0.0 if math.isnan(gap.value) else gap.value
        return gap.name not in ("accuracy", "constraint"), -size

    shown = [gap.name for gap in sorted(gaps.values(), key=rank)[:_SHOWN]]
    return [gap for name, gap in gaps.items() if name in shown]


def _row(gap: GapEstimate, score: str) -> tuple[str, ...]:
    first = (gap.name, number(gap.value), interval(gap.low, gap.high), score)
    d = gap.worst
    if d is None:
        return (*first, "-", "-", "-", "-")
    group = d.group if len(gap.overall) == 1 else f"{d.group}, {d.rate}"
    return (*first, group, number(d.value), number(d.overall), f"{d.count:,}")
