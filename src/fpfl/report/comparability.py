"""Several runs side by side: like is compared with like, and the best trade-offs are marked.

Two runs are comparable where the same gap (the same rates of the same groups) was measured on the
same kind of people, in the same way. A run without a constraint, or with another, is judged by the
one of the comparison where every (rate, group) of it is in one of its evaluation's gaps. Why runs
are not compared is said, and what to do so that they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fpfl.fairness.evaluation import Verdict, verdict_of
from fpfl.report.evaluations import KINDS, SIMULATION_ONLY, Evaluated, Figure, Gap, Kind
from fpfl.report.reading import RunRecord
from fpfl.report.series import gap_of_means, rate_lines, running_mean, window
from fpfl.report.words import is_regression

Measures = frozenset[tuple[str, str]]
"""What a gap compares: every (rate, group)."""


def same_gap(evaluation: Evaluated, measures: Measures) -> Gap | None:
    """The gap of an evaluation in these rates and groups; None where some were not measured.

    The constraint's own comes first, then one that compares just these, then a part of the
    smallest that compares more.
    """
    own = evaluation.gaps.get("constraint")
    gaps = ([own] if own else []) + list(evaluation.gaps.values())
    equal = next((gap for gap in gaps if gap.measures == measures), None)
    if equal is not None:
        return equal
    wider = [gap for gap in gaps if gap.rows and gap.measures >= measures]
    return part(min(wider, key=lambda g: len(g.measures)), measures) if wider else None


def part(gap: Gap, measures: Measures) -> Gap:
    """The gap of some of the (rate, group) that a gap compares.

    With differences d ∈ [l, h] it is max |d| in [max(l, −h, 0), max(−l, h)], each the largest over
    the part. The intervals hold for all of the wider gap at once, so for these as well; they are
    somewhat wider than they would have to be.
    """
    rows = tuple(row for row in gap.rows if (row.rate, row.group) in measures)
    d = [row.difference for row in rows]
    value = Figure(
        _largest(abs(f.value) for f in d if f.value is not None),
        _largest(max(f.low, -f.high, 0.0) for f in d if f.low is not None and f.high is not None),
        _largest(max(-f.low, f.high) for f in d if f.low is not None and f.high is not None),
    )
    return replace(gap, value=value, rows=rows, worst_group=None, worst_pair=None)


def gap_verdict(gap: Gap, tolerance: float) -> Verdict:
    """A gap's verdict, by the rule of `fpfl.Evaluation`."""
    low, high = (math.nan if end is None else end for end in (gap.value.low, gap.value.high))
    known = all(row.value.value is not None for row in gap.rows)
    return verdict_of(low, high, tolerance, known=known)


def trained_for(record: RunRecord, measures: Measures) -> bool:
    """Whether a run's own constraint is about these rates and groups, be it among others."""
    own = {(rate, group) for rate in record.rates for group in record.groups}
    # A folder that does not say has at least the constraint's name.
    return own >= measures if own else record.constraint is not None


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


_WHERE: dict[Kind, str] = {
    "private": "held-out users, with noise",
    "test": f"a test set, {SIMULATION_ONLY}",
    "training": f"the training population, {SIMULATION_ONLY}",
}

_EVALUATE = (
    "evaluate both by one constraint, in Python: fpfl.evaluate_model(run.model, test, "
    "constraint=...)"
)


def why_not(
    records: Sequence[RunRecord], names: Sequence[str], missing: Collection[int]
) -> list[str]:
    """Who is missing from all comparisons, and for each the reason against its nearest other."""
    if not missing:
        return []
    lines = [f"Not compared: {', '.join(names[i] for i in missing)}."]
    said: set[frozenset[int]] = set()
    for i in missing:
        reasons = [(*_reason(records[i], records[j]), j) for j in range(len(records)) if j != i]
        if not reasons:
            continue
        _, why, j = max(reasons, key=lambda found: found[0])  # the nearest to being comparable
        pair = frozenset((i, j))
        if pair not in said:
            said.add(pair)
            first, second = sorted(pair)
            lines.append(f"{names[first]} and {names[second]}: {why}.")
    return lines


def groups_in_words(measures: Measures) -> str:
    """The rates and the groups that a gap is about."""
    rates = sorted({rate for rate, _ in measures})
    groups = sorted({group for _, group in measures})
    many = "group" if len(groups) == 1 else "groups"
    return f"{' and '.join(rates)} of {len(groups)} {many} ({', '.join(groups)})"


def _reason(one: RunRecord, other: RunRecord) -> tuple[int, str]:
    """How near two runs are to being comparable, and what is in the way."""
    shared = [kind for kind in KINDS if kind in one.evaluations and kind in other.evaluations]
    if not shared:
        return 0, _nothing_shared(one, other)
    return max(_of_kind(one.evaluations[kind], other.evaluations[kind]) for kind in shared)


def _nothing_shared(one: RunRecord, other: RunRecord) -> str:
    return (
        f"no evaluation of the same kind (one has {_kinds(one)}, the other {_kinds(other)}); "
        "evaluate both alike: fpfl evaluate, or in a simulation --test when training"
    )


def _kinds(record: RunRecord) -> str:
    return " and ".join(_WHERE[kind] for kind in KINDS if kind in record.evaluations) or "none"


def _of_kind(one: Evaluated, other: Evaluated) -> tuple[int, str]:
    if one.score_name != other.score_name:
        return 1, f"different tasks: one measures {one.score_name}, the other {other.score_name}"
    if (one.users, one.samples) != (other.users, other.samples):
        return 3, _people(one, other)
    return 2, _gaps(one, other)


def _people(one: Evaluated, other: Evaluated) -> str:
    def counts(e: Evaluated) -> tuple[int, str]:
        return (e.users, "users") if e.samples is None else (e.samples, "samples")

    (a, what), (b, _) = counts(one), counts(other)
    if a == b:
        a, b, what = one.users, other.users, "users"
    if one.kind == "training":
        return (
            f"trained on different people: {a:,} and {b:,} {what}; give both runs the same "
            "held-out people (--test) to compare them on"
        )
    remedy = (
        "evaluate both on the same users (fpfl evaluate --data)"
        if one.released
        else "give both runs the same --test file"
    )
    return f"different held-out people: {a:,} and {b:,} {what}; {remedy}"


def _gaps(one: Evaluated, other: Evaluated) -> str:
    mine, theirs = one.gaps.get("constraint"), other.gaps.get("constraint")
    if mine is None and theirs is None:
        return (
            "neither has a constraint, so nothing says which gap to compare them by; add a run "
            f"that has one, or {_EVALUATE}"
        )
    if mine is None or theirs is None:
        asked = other if mine is None else one
        gap = asked.gaps["constraint"]
        return (
            f"the constraint ({asked.constraint}) is about {groups_in_words(gap.measures)}, and "
            f"not all of them are in the other's evaluation; {_EVALUATE}"
        )
    return (
        f"different constraints: {one.constraint} is about {groups_in_words(mine.measures)}, "
        f"{other.constraint} about {groups_in_words(theirs.measures)}; {_EVALUATE}"
    )


Source = Literal["private", "test", "training", "released"]

WHERE: dict[Source, str] = {
    "private": "on held-out users, released with noise",
    "test": f"on the test set ({SIMULATION_ONLY})",
    "training": f"on the training population ({SIMULATION_ONLY})",
    "released": "by the last rounds' released totals, not the kept model",
}


BALANCED = "balanced accuracy"
"""What runs are ranked by where classes are unbalanced: of two, a base rate outside [¼, ¾]."""


@dataclass(frozen=True)
class Entry:
    """A run in a comparison.

    ``epsilon`` is infinite without privacy, and None where nobody computed it; ``best`` says that
    no other run of the comparison is at least as good in all three and better in one. ``trained``
    says that the run's own constraint is about this gap. A ``collapsed`` model is never the best,
    and better than no other: its gap is closed for nothing.
    """

    index: int
    score: Figure
    gap: Figure
    epsilon: float | None
    tolerance: float | None
    verdict: str
    trained: bool
    best: bool = False
    collapsed: bool = False

    @property
    def recommended(self) -> bool:
        """Whether it is called a best trade-off: what is outside α is none, beaten or not."""
        return self.best and self.verdict != "outside"


@dataclass(frozen=True)
class Comparison:
    """Runs that were measured alike.

    ``what`` names the gap, ``measures`` is what it compares; ``lower`` says that a smaller score is
    the better one.
    """

    source: Source
    what: str
    measures: Measures
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
    names = told_apart([record.folder for record in records])
    return found, why_not(records, names, [i for i in range(len(records)) if i not in covered])


def _of_source(source: Source, records: Sequence[RunRecord]) -> list[Comparison]:
    measured = [_released(r) if source == "released" else r.evaluations.get(source)
                for r in records]  # fmt: skip
    kinds: list[tuple[Measures, tuple[int, int | None], str]] = []
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
            and (gap := same_gap(evaluation, measures)) is not None
        ]
        if len(rows) > 1:
            comparisons.append(_comparison(source, records, rows, measures))
    return comparisons


def _balanced(evaluation: Evaluated) -> Figure:
    assert evaluation.metrics is not None  # all that are compared have them
    found = evaluation.metrics.balanced_accuracy
    ends = (None if math.isnan(end) else end for end in (found.value, found.low, found.high))
    return Figure(*ends)


def _comparison(
    source: Source,
    records: Sequence[RunRecord],
    rows: list[tuple[int, Evaluated, Gap]],
    measures: Measures,
) -> Comparison:
    first = rows[0][1]
    lower = first.lower
    own = [gap is e.gaps.get("constraint") and e.verdict is not None for _, e, gap in rows]
    alphas = {e.tolerance for (_, e, _), judged in zip(rows, own, strict=True) if judged}
    # Runs that were not judged by this constraint are, where there is one α to judge them by.
    shared = alphas.pop() if len(alphas) == 1 else None
    # Where classes are unbalanced, a model that says the same to everybody has the accuracy.
    unbalanced = all(e.metrics is not None and e.metrics.unbalanced for _, e, _ in rows)
    score_name = BALANCED if unbalanced else first.score_name
    entries = []
    for (i, evaluation, gap), judged in zip(rows, own, strict=True):
        verdict = "not judged" if shared is None else gap_verdict(gap, shared)
        entries.append(
            Entry(
                index=i,
                score=_balanced(evaluation) if unbalanced else evaluation.score,
                gap=gap.value,
                epsilon=math.inf if records[i].privacy is None else records[i].epsilon,
                tolerance=evaluation.tolerance if judged else shared,
                verdict=str(evaluation.verdict) if judged else verdict,
                trained=trained_for(records[i], measures),
                collapsed=evaluation.collapsed is not None,
            )
        )
    figures = [(e.score.value, e.gap.value, e.epsilon) for e in entries]
    known = [
        i for i, values in enumerate(figures) if None not in values and not entries[i].collapsed
    ]
    points = [_point(entries[i], lower) for i in known]
    best = {i for i, good in zip(known, best_tradeoffs(points), strict=True) if good}
    marked = [replace(e, best=i in best) for i, e in enumerate(entries)]
    asked = [e for _, e, gap in rows if gap is e.gaps.get("constraint")]  # one at least
    names = dict.fromkeys(str(e.constraint) for e in asked if e.constraint)
    return Comparison(
        source, " / ".join(names), measures, (first.users, first.samples), score_name, lower,
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

    cells: Measures = frozenset()

    @property
    def measures(self) -> Measures:
        return self.cells
