"""A run's gap in the rates and groups of a constraint, though it may not have been trained for it.

An evaluation has the gaps of all declared groups. Where every (rate, group) of a constraint is in
one of them, the run can be judged by that constraint as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fpfl.fairness.evaluation import Verdict, verdict_of
from fpfl.report.evaluated import Evaluated, Figure, Gap
from fpfl.report.reading import RunRecord

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
