"""Several runs side by side: like is compared with like, and the best trade-offs are marked.

Two runs are comparable where the same gap (the same rates of the same groups) was measured on the
same kind of people, in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fpfl.report.evaluated import SIMULATION_ONLY, Evaluated, Figure, Gap
from fpfl.report.reading import RunRecord
from fpfl.report.series import gap_of_means, rate_lines, running_mean, window
from fpfl.report.words import is_regression

Source = Literal["private", "test", "training", "released"]

WHERE: dict[Source, str] = {
    "private": "on held-out users, released with noise",
    "test": f"on the test set ({SIMULATION_ONLY})",
    "training": f"on the training population ({SIMULATION_ONLY})",
    "released": "by the last rounds' released totals, not the kept model",
}


@dataclass(frozen=True)
class Entry:
    """A run in a comparison.

    ``epsilon`` is infinite without privacy, and None where nobody computed it; ``best`` says that
    no other run of the comparison is at least as good in all three and better in one.
    """

    index: int
    score: Figure
    gap: Figure
    epsilon: float | None
    tolerance: float | None
    verdict: str
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """Runs that were measured alike.

    ``what`` names the gap, ``measures`` is what it compares; ``lower`` says that a smaller score is
    the better one.
    """

    source: Source
    what: str
    measures: frozenset[tuple[str, str]]
    people: tuple[int, int | None]
    score_name: str
    lower: bool
    entries: tuple[Entry, ...]


def told_apart(folders: Sequence[Path]) -> list[str]:
    """Short names: the last parts of the paths, as many as it takes to tell them apart."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) != len(resolved):
        twice = next(str(f) for i, f in enumerate(folders) if resolved[i] in resolved[:i])
        raise ValueError(f"the run {twice} was given twice; name every folder once")
    names = []
    for path in resolved:
        parts, others = path.parts, [other.parts for other in resolved if other != path]
        depth = next(
            (n for n in range(1, len(parts) + 1) if all(o[-n:] != parts[-n:] for o in others)),
            len(parts),
        )
        names.append(str(Path(*parts[-depth:])))
    return names


def best_tradeoffs(points: Sequence[tuple[float, float, float]]) -> list[bool]:
    """Which (score, gap, ε) no other is better than: score up, gap down, ε down.

    A point is beaten by one that is at least as good in all three and better in one; equal points
    do not beat each other.
    """
    return [
        not any(
            other != mine and other[0] >= mine[0] and other[1] <= mine[1] and other[2] <= mine[2]
            for other in points
        )
        for mine in points
    ]


def compare(records: Sequence[RunRecord]) -> tuple[list[Comparison], list[str]]:
    """All comparisons of two runs or more, and sentences on what is not compared."""
    found: list[Comparison] = []
    covered: set[int] = set()
    for source in WHERE:
        if source == "released" and len(covered) == len(records):
            continue  # it is the poorest measure, for runs that have no other in common
        for comparison in _of_source(source, records):
            found.append(comparison)
            covered |= {entry.index for entry in comparison.entries}
    return found, _left_out(records, covered)


def _of_source(source: Source, records: Sequence[RunRecord]) -> list[Comparison]:
    measured = [_released(r) if source == "released" else r.evaluations.get(source)
                for r in records]  # fmt: skip
    kinds: list[tuple[frozenset[tuple[str, str]], tuple[int, int | None], str]] = []
    for evaluation in measured:
        gap = None if evaluation is None else evaluation.gaps.get("constraint")
        if evaluation is not None and gap is not None:
            kinds.append((gap.measures, (evaluation.users, evaluation.samples),
                          evaluation.score_name))  # fmt: skip
    comparisons = []
    for measures, people, score in dict.fromkeys(kinds):
        rows = [
            (i, evaluation, gap)
            for i, evaluation in enumerate(measured)
            if evaluation is not None
            and (evaluation.users, evaluation.samples) == people
            and evaluation.score_name == score
            and (gap := _same(evaluation, measures)) is not None
        ]
        if len(rows) > 1:
            comparisons.append(_comparison(source, records, rows, measures))
    return comparisons


def _same(evaluation: Evaluated, measures: frozenset[tuple[str, str]]) -> Gap | None:
    """The gap of an evaluation that compares the same, the constraint's own before others."""
    own = evaluation.gaps.get("constraint")
    gaps = ([own] if own else []) + list(evaluation.gaps.values())
    return next((gap for gap in gaps if gap.measures == measures), None)


def _comparison(
    source: Source,
    records: Sequence[RunRecord],
    rows: list[tuple[int, Evaluated, Gap]],
    measures: frozenset[tuple[str, str]],
) -> Comparison:
    first = rows[0][1]
    lower = first.lower
    entries = []
    for i, evaluation, gap in rows:
        judged = gap is evaluation.gaps.get("constraint") and evaluation.verdict is not None
        entries.append(
            Entry(
                index=i,
                score=evaluation.score,
                gap=gap.value,
                epsilon=math.inf if records[i].privacy is None else records[i].epsilon,
                tolerance=evaluation.tolerance if judged else None,
                verdict=str(evaluation.verdict) if judged else "not judged",
            )
        )
    figures = [(e.score.value, e.gap.value, e.epsilon) for e in entries]
    known = [i for i, values in enumerate(figures) if None not in values]
    points = [_point(entries[i], lower) for i in known]
    best = {i for i, good in zip(known, best_tradeoffs(points), strict=True) if good}
    marked = [
        Entry(e.index, e.score, e.gap, e.epsilon, e.tolerance, e.verdict, i in best)
        for i, e in enumerate(entries)
    ]
    names = dict.fromkeys(str(e.constraint) for _, e, _ in rows if e.constraint)
    return Comparison(
        source, " / ".join(names), measures, (first.users, first.samples), first.score_name, lower,
        tuple(marked),
    )  # fmt: skip


def _point(entry: Entry, lower: bool) -> tuple[float, float, float]:
    score, gap, epsilon = entry.score.value, entry.gap.value, entry.epsilon
    assert score is not None
    assert gap is not None
    assert epsilon is not None
    return (-score if lower else score, gap, _as_asked(epsilon))


def _as_asked(epsilon: float) -> float:
    """ε in three digits, rounded up.

    The noise for an ε is searched for, and ends a little below it: two runs that were asked for
    the same one differ in the fifth digit, which says nothing about either.
    """
    if epsilon <= 0 or math.isinf(epsilon):
        return epsilon
    unit = math.floor(math.log10(epsilon)) - 2
    steps = math.ceil(epsilon * 10.0**-unit * (1 - 1e-12))
    return float(f"{steps}e{unit}")


def _released(record: RunRecord) -> Evaluated | None:
    """The last rounds' released totals, as if they were an evaluation without intervals."""
    if not record.rates or not record.history:
        return None
    lines, W = rate_lines(record), window(len(record.history))
    score = running_mean([row.get("accuracy") for row in record.history], W)[-1]
    cells = frozenset((rate, group) for rate in record.rates for group in record.groups)
    gap = _ReleasedGap("constraint", Figure(gap_of_means(lines)[-1]), (), None, None, cells)
    return Evaluated(
        kind="private",
        score_name="1 − squared error" if is_regression(record) else "accuracy",
        score=Figure(score),
        gaps={"constraint": gap},
        constraint=record.constraint,
        tolerance=record.tolerance,
        verdict=None,
        verdict_in_words=None,
        confidence=0.0,
        users=record.settings.get("population") or 0,
        samples=None,
    )


@dataclass(frozen=True)
class _ReleasedGap(Gap):
    """A gap of released totals, which come without rows of their own."""

    cells: frozenset[tuple[str, str]] = frozenset()

    @property
    def measures(self) -> frozenset[tuple[str, str]]:
        return self.cells


def _left_out(records: Sequence[RunRecord], covered: set[int]) -> list[str]:
    missing = [i for i in range(len(records)) if i not in covered]
    if not missing:
        return []
    names = told_apart([record.folder for record in records])
    which = ", ".join(names[i] for i in missing)
    return [
        f"Not compared: {which}. Nothing was measured there in the same way as in another run: "
        "the same rates of the same groups, on the same kind of people. Evaluate the runs alike "
        "(fpfl evaluate; or a test set in the config) to compare them."
    ]
