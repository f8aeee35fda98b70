"""Why runs are not compared, and what to do so that they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fpfl.report.evaluated import KINDS, SIMULATION_ONLY, Evaluated, Kind
from fpfl.report.judging import Measures
from fpfl.report.reading import RunRecord

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
