"""Evaluations as a report shows them, whether released under ε or for simulations only.

Before anything is drawn there must be numbers where numbers belong: what is none would be drawn as
nothing, without a word. Better to say which file is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fpfl.privacy.assumptions import ALONE, BEFORE_EVALUATED

_SETTINGS: dict[str, Any] = {
    "cohort": int | None,
    "rounds": int | None,
    "population": int | None,
    "constraint": str | None,
    "tolerance": int | float | None,
    "layout": dict | None,
    "clip": dict | None,
    "privacy": dict | None,
}
_STATEMENT: dict[str, Any] = {
    "convention": str,
    "neighbours": str,
    "population": int,
    "real_population": int | None,
    "cohort": int,
    "rounds": int,
    "noise_multiplier": int | float,
    "blocks": list,
    "delta": int | float,
    "epsilon": int | float | None,
    "epsilon_honest": int | float | None,
    "epsilon_real": int | float | None,
    "participations": int,
    "participations_capped": bool,
    "delta_server": int | float,
    "epsilon_server": int | float,
    "epsilon_server_real": int | float | None,
    "seeded_noise": bool,
    "seeded_cohorts": bool,
    "aggregation": dict | None,
    "filter_order": int | float | None,
    "contributions": str | None,
}
_BLOCK: dict[str, Any] = {
    "name": str,
    "bound": int | float,
    "share": int | float,
    "noise_stddev": int | float,
}
_ROW: dict[str, Any] = {
    "accuracy": int | float | None,
    "gap": int | float | None,
    "gradient_norm": int | float | None,
    "averaged_gap": int | float | None,
}
_TABLES = ("groups", "counts", "multipliers")


def damaged(file: Path, what: str) -> ValueError:
    """The error for a file that is not what a run writes."""
    return ValueError(
        f"{file} is not what a run writes ({what}); put an intact copy in its place, or leave this "
        "run out"
    )


HUGE = 1e100


def check_kinds(file: Path, found: Any, kinds: Mapping[str, Any], where: str = "it") -> None:
    """Refuse a mapping that has something else in the place of what is asked for."""
    if not isinstance(found, dict):
        raise damaged(file, f"{where} is {found!r:.80}")
    for name, kind in kinds.items():
        value = found.get(name)
        # A truth value is a whole number to Python, and no number to a reader.
        odd = isinstance(value, bool) and kind is not bool
        # So large that its square is no number any more: nothing that a run writes.
        huge = isinstance(value, int | float) and not abs(value) <= HUGE
        if odd or huge or not isinstance(value, kind):
            raise damaged(file, f"{where} has {name} = {value!r:.80}")


def check_settings(file: Path, settings: Any) -> dict[str, Any]:
    """A run's settings, as far as a report uses them."""
    check_kinds(file, settings, _SETTINGS, "settings")
    layout = settings.get("layout") or {}
    for name in ("rates", "groups"):
        names = layout.get(name) or []
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(file, f"the layout's {name} are {names!r:.80}")
    check_kinds(file, layout, {"parameters": int | None, "basis": str | None}, "the layout")
    return dict(settings)


def check_privacy(file: Path, statement: Any) -> dict[str, Any] | None:
    """A privacy statement's figures; None without privacy."""
    if statement is None:
        return None
    check_kinds(file, statement, _STATEMENT, "privacy")
    for block in statement["blocks"]:
        check_kinds(file, block, _BLOCK, "a block of the noise")
    return dict(statement)


def check_history(file: Path, history: list[Any]) -> list[dict[str, Any]]:
    """The rows of a history: one for each round, in order, with numbers."""
    last = 0
    for row in history:
        check_kinds(file, row, {"round": int, **_ROW}, "a round")
        if row["round"] <= last:
            raise damaged(file, f"round {row['round']} follows round {last}")
        last = row["round"]
        where = f"round {last}"
        overall = {} if row.get("overall") is None else row["overall"]
        _check_numbers(file, overall, f"overall in {where}")
        for name in _TABLES:
            table = {} if row.get(name) is None else row[name]
            check_kinds(file, table, {}, f"{name} in {where}")
            for rate, line in table.items():
                _check_numbers(file, line, f"{rate!r:.40} of {name} in {where}")
    return history


def _check_numbers(file: Path, line: Any, where: str) -> None:
    check_kinds(file, line, {}, where)
    check_kinds(file, line, dict.fromkeys(line, int | float | None), where)


Kind = Literal["private", "test", "training"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SIMULATION_ONLY = "simulation only"
"""The mark of whatever was not released."""

_NUMBER = int | float | None
_ERRORS = ("absolute error", "squared error")
"""The scores of a private evaluation that are better when they are less."""
_USUAL = ("eo", "demp")
"""Gaps that two classes have, constraint or not: FNR and FPR; selection rate."""
_TITLES: dict[Kind, str] = {
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

    @property
    def released(self) -> bool:
        """Whether it was released under an ε; otherwise it is for simulations only."""
        return self.kind == "private"

    @property
    def title(self) -> str:
        """On what it was measured."""
        return _TITLES[self.kind]

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
    wanted = {"constraint": str | None, "tolerance": _NUMBER, "verdict": str | None}
    check_kinds(file, content, {**wanted, "verdict_in_words": str | None, "confidence": float})
    try:
        return _private(file, content) if kind == "private" else _open(file, kind, content)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(file, repr(error)) from error


def _judged(content: dict[str, Any]) -> dict[str, Any]:
    names = ("constraint", "tolerance", "verdict", "verdict_in_words")
    return {name: content.get(name) for name in names} | {"confidence": content["confidence"]}


def _open(file: Path, kind: Kind, content: dict[str, Any]) -> Evaluated:
    """Measured without noise: `fpfl.Evaluation.as_dict`."""
    check_kinds(file, content, {"users": int, "samples": int, "accuracy": _NUMBER, "gaps": dict})
    name = "error" if content["accuracy"] is None else "accuracy"
    ends = content[f"{name}_interval"] or (None, None)
    score = _figure(file, content[name], *ends)
    scores = content["rates"].get(name, {})
    return Evaluated(
        kind=kind,
        score_name="absolute error" if name == "error" else name,
        score=score,
        gaps={str(n): _gap(file, str(n), gap, scores) for n, gap in content["gaps"].items()},
        users=content["users"],
        samples=content["samples"],
        lower=name == "error",
        **_judged(content),
    )


def _private(file: Path, content: dict[str, Any]) -> Evaluated:
    """Released with noise: `fpfl.heldout.PrivateEvaluation.as_dict`."""
    needed = {"score": str, "epsilon": int | float, "delta": int | float, "seeded": bool}
    check_kinds(file, content, {**needed, "rates": dict, "gap": dict, "statement": list})
    rates = content["rates"]
    scores = {group: line["value"] for group, line in rates[content["score"]].items()}
    gap = content["gap"] | {"differences": [_with_ends(d, rates) for d in _rows(content["gap"])]}
    overall = rates[content["score"]]["overall"]
    established = content.get("contributions") == ALONE
    return Evaluated(
        kind="private",
        score_name=content["score"],
        score=_figure(file, overall["value"], overall["low"], overall["high"]),
        gaps={"constraint": _gap(file, "constraint", gap, scores)},
        users=int(content["mechanism"]["population"]),
        samples=None,
        epsilon=content["epsilon"],
        delta=content["delta"],
        seeded=content["seeded"],
        statement=(
            *(() if established else (BEFORE_EVALUATED,)),
            *map(str, content["statement"]),
        ),
        established=established,
        lower=content["score"] in _ERRORS,
        **_judged(content),
    )


def _with_ends(difference: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """A difference with the ends of the group's own rate and its released count."""
    own = rates[difference["rate"]][difference["group"]]
    ends = {"value_low": own["low"], "value_high": own["high"], "count": own["count"]}
    return difference | ends


def _rows(gap: dict[str, Any]) -> list[dict[str, Any]]:
    return list(gap["differences"])


def _gap(file: Path, name: str, gap: dict[str, Any], scores: dict[str, Any]) -> Gap:
    pair = gap.get("worst_pair")
    worst = gap.get("worst_group")
    rows = [
        GroupFigure(
            rate=str(d["rate"]),
            group=str(d["group"]),
            overall=_figure(file, d["overall"]).value,
            value=_figure(file, d["value"], d.get("value_low"), d.get("value_high")),
            count=_figure(file, d["count"]).value,
            difference=_figure(file, d["difference"], d["low"], d["high"]),
            score=_figure(file, scores.get(d["group"])).value,
        )
        for d in _rows(gap)
    ]
    return Gap(
        name=name,
        value=_figure(file, gap["value"], gap["low"], gap["high"]),
        rows=tuple(rows),
        worst_group=None if worst is None else str(worst),
        worst_pair=None if pair is None else _pair(file, pair),
    )


def _pair(file: Path, pair: dict[str, Any]) -> PairFigure:
    difference = _figure(file, pair["difference"], pair["low"], pair["high"])
    return PairFigure(str(pair["rate"]), str(pair["larger"]), str(pair["smaller"]), difference)


def _figure(file: Path, value: Any, low: Any = None, high: Any = None) -> Figure:
    found = {"value": value, "low": low, "high": high}
    check_kinds(file, found, dict.fromkeys(found, _NUMBER), "a figure")
    return Figure(**found)
