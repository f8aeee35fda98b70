"""Evaluations as a report shows them, whether released under ε or for simulations only.

Before anything is drawn there must be numbers where numbers belong: what is none would be drawn as
nothing, without a word. Better to say which file is damaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from fpfl.fairness.evaluation import Evaluation, GapEstimate
from fpfl.fairness.metrics import ClassMetrics
from fpfl.heldout.result import PrivateEvaluation
from fpfl.privacy.assumptions import ALONE, BEFORE_EVALUATED
from fpfl.privacy.statement import PrivacyStatement
from fpfl.store.typed import TypedError, typed

T = TypeVar("T")


@dataclass(frozen=True)
class _Laid:
    """What a report asks of a layout."""

    rates: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    parameters: int | None = None
    basis: str | None = None


@dataclass(frozen=True)
class _Settings:
    """What a report asks of a run's settings."""

    cohort: int | None = None
    rounds: int | None = None
    population: int | None = None
    constraint: str | None = None
    tolerance: float | None = None
    layout: _Laid | None = None
    clip: dict[str, Any] | None = None
    privacy: dict[str, Any] | None = None


_Table = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class _Balance:
    """What a report asks of a row's figures of balance."""

    balanced_accuracy: float | None
    f1: float | None
    labels: tuple[float | None, ...]
    predicted: tuple[float | None, ...]
    rounds: int
    accuracy: float | None
    collapsed: bool | None


@dataclass(frozen=True)
class _Round:
    """What a report asks of a row of a history."""

    round: int
    accuracy: float | None = None
    gap: float | None = None
    gradient_norm: float | None = None
    clip_bound: float | None = None
    clipped_fraction: float | None = None
    averaged_gap: float | None = None
    least_weight: float | None = None
    balance: _Balance | None = None
    overall: dict[str, float | None] | None = None
    groups: _Table | None = None
    counts: _Table | None = None
    multipliers: _Table | None = None


def damaged(file: Path, what: object) -> ValueError:
    """The error for a file that is not what a run writes."""
    return ValueError(
        f"{file} is not what a run writes ({what}); put an intact copy in its place, or leave this "
        "run out"
    )


def read(file: Path, kind: type[T], values: Any, where: str) -> T:
    """What a file holds, as it was written; an error names the file."""
    try:
        return typed(kind, values, where)
    except TypedError as error:
        raise damaged(file, error) from error


def check_settings(file: Path, settings: Any) -> dict[str, Any]:
    """A run's settings, as far as a report uses them."""
    read(file, _Settings, settings, "settings")
    return dict(settings)


def check_privacy(file: Path, statement: Any) -> dict[str, Any] | None:
    """A privacy statement's figures; None without privacy."""
    if statement is None:
        return None
    read(file, PrivacyStatement, statement, "privacy")
    missing = {"contributions": None, "filter_order": None, "aggregation": None}
    return missing | dict(statement)


def check_history(file: Path, history: list[Any]) -> list[dict[str, Any]]:
    """The rows of a history: one for each round, in order, with numbers."""
    last = 0
    for row in history:
        found = read(file, _Round, row, f"the round after {last}")
        if found.round <= last:
            raise damaged(file, f"round {found.round} follows round {last}")
        last = found.round
    return history


Kind = Literal["private", "test", "training"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SIMULATION_ONLY = "simulation only"
"""The mark of whatever was not released."""

_ERRORS = ("absolute error", "squared error")
"""The scores of a private evaluation that are better when they are less."""
_USUAL = ("eo", "demp")
"""Gaps that two classes have, constraint or not: FNR and FPR; selection rate."""
TITLES: dict[Kind, str] = {
    "private": "Held-out users, released with noise",
    "test": "Test set",
    "training": "Training population",
}


@dataclass(frozen=True)
class Figure:
    """A number in [low, high]; what is not known is None."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class GroupFigure:
    """A group in one rate: its own value, n'_a behind it, and overall − value."""

    rate: str
    group: str
    overall: float | None
    value: Figure
    count: float | None
    difference: Figure
    score: float | None


@dataclass(frozen=True)
class PairFigure:
    """The two groups that are furthest apart in a rate."""

    rate: str
    larger: str
    smaller: str
    difference: Figure


@dataclass(frozen=True)
class Gap:
    """A gap with the differences that it is the largest of."""

    name: str
    value: Figure
    rows: tuple[GroupFigure, ...]
    worst_group: str | None
    worst_pair: PairFigure | None

    @property
    def measures(self) -> frozenset[tuple[str, str]]:
        """What it compares: every (rate, group)."""
        return frozenset((row.rate, row.group) for row in self.rows)


@dataclass(frozen=True)
class Evaluated:
    """One evaluation file.

    Parameters
    ----------
    kind
        On what.
    score_name, score, lower
        What says how good the model is (accuracy, or an error), for the whole; whether less of it
        is better.
    gaps
        By name; ``"constraint"`` is the one that the verdict is about.
    constraint, tolerance, verdict, verdict_in_words, confidence
        As the evaluation has them; None where it judged nothing.
    users, samples
        How many; samples are not known where only noisy counts were released.
    epsilon, delta, seeded
        What a private evaluation cost.
    statement
        What a private evaluation says of itself.
    established
        Whether its ε is: versions up to 0.1.0 did not keep what it was computed for.
    metrics, collapsed
        What accuracy does not say, and how the model has collapsed; None where it is not known, as
        in files of earlier versions.
    collapse_in_doubt
        Whether noisy figures cannot tell if it has collapsed.
    """

    kind: Kind
    score_name: str
    score: Figure
    gaps: dict[str, Gap]
    constraint: str | None
    tolerance: float | None
    verdict: str | None
    verdict_in_words: str | None
    confidence: float
    users: int
    samples: int | None
    epsilon: float | None = None
    delta: float | None = None
    seeded: bool = False
    statement: tuple[str, ...] = ()
    established: bool = True
    lower: bool = False
    metrics: ClassMetrics | None = None
    collapsed: str | None = None
    collapse_in_doubt: bool = False

    @property
    def released(self) -> bool:
        """Whether it was released under an ε; otherwise it is for simulations only."""
        return self.kind == "private"

    @property
    def title(self) -> str:
        """On what it was measured."""
        return TITLES[self.kind]

    @property
    def main(self) -> Gap | None:
        """The constraint's gap, or the largest where there is no constraint."""
        if "constraint" in self.gaps:
            return self.gaps["constraint"]
        known = [gap for gap in self.gaps.values() if gap.value.value is not None]
        return max(known, key=lambda gap: gap.value.value or 0.0, default=None)

    @property
    def tabled(self) -> tuple[Gap, ...]:
        """The gaps whose groups are shown one by one.

        The constraint's; without one those of FNR, FPR and selection rate, and where there are no
        such rates (more classes, a regression) the largest.
        """
        if "constraint" not in self.gaps:
            usual = tuple(self.gaps[name] for name in _USUAL if name in self.gaps)
            if usual:
                return usual
        return () if self.main is None else (self.main,)


def read_evaluation(file: Path, kind: Kind, content: dict[str, Any]) -> Evaluated:
    """An evaluation from what its file holds."""
    try:
        if kind == "private":
            return of_private(PrivateEvaluation.from_dict(content))
        return of_open(Evaluation.from_dict(content), kind)
    except (TypedError, KeyError) as error:
        raise damaged(file, error) from error


def of_open(found: Evaluation, kind: Kind) -> Evaluated:
    """Measured without noise."""
    name = "error" if found.accuracy is None else "accuracy"
    value, ends = getattr(found, name), getattr(found, f"{name}_interval") or (None, None)
    scores = found.rates.get(name, {})
    return Evaluated(
        kind=kind,
        score_name="absolute error" if name == "error" else name,
        score=Figure(_known(value), *ends),
        gaps={name: _gap(name, gap, scores) for name, gap in found.gaps.items()},
        constraint=found.constraint,
        tolerance=found.tolerance,
        verdict=found.verdict,
        verdict_in_words=found.verdict_in_words,
        confidence=found.confidence,
        users=found.users,
        samples=found.samples,
        lower=name == "error",
        metrics=found.metrics,
        collapsed=found.collapsed,
    )


def of_private(found: PrivateEvaluation) -> Evaluated:
    """Released with noise."""
    scores = {group: estimate.value for group, estimate in found.rates[found.score].items()}
    overall = found.rates[found.score]["overall"]
    rows = []
    for d in found.gap.differences:
        own = found.rates[d.rate][d.group]
        rows.append(replace(d, value_low=own.low, value_high=own.high))
    gap = _gap("constraint", replace(found.gap, differences=tuple(rows)), scores)
    counts = {(d.rate, d.group): found.rates[d.rate][d.group].count for d in rows}
    counted = [replace(row, count=_known(counts[row.rate, row.group])) for row in gap.rows]
    established = found.contributions == ALONE
    return Evaluated(
        kind="private",
        score_name=found.score,
        score=_figure(overall.value, overall.low, overall.high),
        gaps={"constraint": replace(gap, rows=tuple(counted))},
        constraint=found.constraint,
        tolerance=found.tolerance,
        verdict=found.verdict,
        verdict_in_words=found.verdict_in_words,
        confidence=found.confidence,
        users=found.population,
        samples=None,
        epsilon=found.epsilon,
        delta=found.delta,
        seeded=found.seeded,
        statement=(*(() if established else (BEFORE_EVALUATED,)), *found.lines),
        established=established,
        lower=found.score in _ERRORS,
        metrics=found.metrics,
        collapsed=found.collapsed,
        collapse_in_doubt=found.collapse_in_doubt,
    )


def _gap(name: str, gap: GapEstimate, scores: dict[str, float]) -> Gap:
    pair = gap.worst_pair
    return Gap(
        name=name,
        value=_figure(gap.value, gap.low, gap.high),
        rows=tuple(
            GroupFigure(
                rate=d.rate,
                group=d.group,
                overall=_known(d.overall),
                value=_figure(d.value, d.value_low, d.value_high),
                count=_known(d.count),
                difference=_figure(d.difference, d.low, d.high),
                score=_known(scores.get(d.group)),
            )
            for d in gap.differences
        ),
        worst_group=gap.worst_group,
        worst_pair=None
        if pair is None
        else PairFigure(
            pair.rate, pair.larger, pair.smaller, _figure(pair.difference, pair.low, pair.high)
        ),
    )


def _figure(value: float, low: float, high: float) -> Figure:
    return Figure(_known(value), _known(low), _known(high))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
