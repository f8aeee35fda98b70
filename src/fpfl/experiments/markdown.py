"""Results beside the paper's, as Markdown, with what every private run costs.

A run remembers what its ε follows from; that is worked out here, so that runs from machines without
dp-accounting get theirs on one that has it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev
from typing import Any

from fpfl.data.femnist.unfair import GROUPS
from fpfl.experiments.tables import KEY, Row
from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.plan import Block, PrivacyPlan, PrivacyWarning
from fpfl.privacy.statement import round_up


def with_epsilon(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its ε: None where there is no noise, or no accountant.

    ``epsilon`` is by the row's convention and for the population that it is calibrated for,
    ``epsilon_honest`` the same with the true sensitivity; ``epsilon_real`` is what holds for the
    users it ran on, with the cohort that there really was.
    """
    if result["noise_multiplier"] is None or result["epsilon_real"] is not None:
        return result
    try:
        calibrated, real = _plan_of(result, real=False), _plan_of(result, real=True)
        return result | {
            "epsilon": calibrated.epsilon,
            "epsilon_honest": calibrated.epsilon_honest,
            "epsilon_real": real.epsilon_honest,
        }
    except MissingAccountantError:
        return result


def statement(result: dict[str, Any]) -> str | None:
    """What a private run promises the users it ran on; None where it promises nothing."""
    if result["noise_multiplier"] is None:
        return None
    return _said(_plan_of(result, real=True))


def _plan_of(result: dict[str, Any], *, real: bool) -> PrivacyPlan:
    users, cohort = result["population"], result["real_cohort"]
    noise = result["noise_multiplier"]
    if not real:
        asked = result["cohort"] or cohort
        noise *= asked / cohort
        users, cohort = result["accounted_population"] or users, asked
    return _plan(
        users,
        cohort,
        result["rounds"],
        result["delta"],
        noise,
        result["convention"],
        tuple(tuple(block) for block in result["blocks"]),
    )


# A plan computes its ε once: one object for all seeds of a row.
@lru_cache(maxsize=256)
def _plan(
    users: int,
    cohort: int,
    rounds: int,
    delta: float,
    noise: float,
    convention: str,
    blocks: tuple[Any, ...],
) -> PrivacyPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return PrivacyPlan(
            population=users,
            cohort=cohort,
            rounds=rounds,
            delta=delta,
            noise_multiplier=noise,
            convention=convention,
            blocks=[Block(*block) for block in blocks],
        )


@lru_cache(maxsize=256)
def _said(plan: PrivacyPlan) -> str:
    return str(plan.statement(seeded_noise=True, seeded_cohorts=True))


Results = Sequence[dict[str, Any]]

ERRORS = ("FNR", "FPR", "squared error", "absolute error")
"""Rates of which more is worse."""


def summarise(values: Sequence[float | None]) -> str:
    """Mean ± standard deviation over seeds."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    if not known:
        return "–"
    spread = f" ± {stdev(known):.3f}" if len(known) > 1 else ""
    return f"{mean(known):.3f}{spread}"


def worst(result: dict[str, Any], rate: str, where: str) -> float:
    """A rate of the group that is worst off in a run, on ``"test"`` or ``"train"``.

    The largest of the groups' values for errors, the smallest for everything else.
    """
    values = result["rates"][where][rate].items()
    groups: list[float] = [
        value
        for name, value in values
        if name not in ("overall", "gap") and value is not None and not math.isnan(value)
    ]
    if not groups:
        return math.nan
    return max(groups) if rate in ERRORS else min(groups)


def weakest(results: Sequence[dict[str, Any]], where: str = "train") -> dict[str, str]:
    """Every constrained rate of the group that is worst off: mean ± standard deviation."""
    found: dict[str, list[float | None]] = {}
    for result in results:
        for rate in result["rates"][where]:
            found.setdefault(rate, []).append(worst(result, rate, where))
    return {rate: summarise(values) for rate, values in found.items()}


@dataclass(frozen=True)
class Shape:
    """How a task's tables look: what stands above them, and columns from (row, its results)."""

    intro: str
    columns: dict[str, Callable[[Row, Results], str]]


def markdown_table(results: Results, rows: Sequence[Row], about: dict[str, Any]) -> str:
    """The table of a reproduction: every row's mean and spread, the paper's figure in brackets."""
    shape = SHAPES[rows[0].task]
    lines = [
        f"# {results[0]['table']}",
        "",
        f"Data: {results[0]['data']}. Mean ± standard deviation over seeds, the paper's single run "
        f"in brackets. {shape.intro}",
        "",
        *(_made(each) for each in (about, *about.get("earlier", ()))),
        "",
        f"| {' | '.join(shape.columns)} |",
        "| --- " * len(shape.columns) + "|",
    ]  # fmt: skip
    for row in rows:
        mine = [result for result in results if _key(result) == row.key]
        if mine:
            cells = [column(row, mine) for column in shape.columns.values()]
            lines.append(f"| {' | '.join(cells)} |")
    for number, said in enumerate(dict.fromkeys(filter(None, map(statement, results))), start=1):
        lines += ["", f"## Privacy statement {number}", ""]
        lines += [f"- {line}" for line in said.splitlines()]
    return "\n".join(lines) + "\n"


def _made(about: dict[str, Any]) -> str:
    seconds = about["wall_seconds"]
    ended = "cut off" if seconds is None else f"{seconds} s"
    where = "{hardware}; Python {python}, torch {torch}".format(**about)
    return f"Made by `{about['command']}` on {about['date']} ({where}; {ended})."


def _key(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in KEY)


def _algorithm(row: Row, mine: Results) -> str:
    stopped = sum(result["stopped"] is not None for result in mine)
    return f"{row.algorithm} ({stopped} of {len(mine)} diverged)" if stopped else row.algorithm


def _figure(key: str) -> Callable[[Row, Results], str]:
    """Mean ± deviation of a figure, the paper's beside it."""

    def column(row: Row, mine: Results) -> str:
        figure = summarise([r[key] for r in mine])
        return f"{figure} ({row.paper[key]:.3f})" if key in row.paper else figure

    return column


def _group(rate: str, group: str, where: str) -> Callable[[Row, Results], str]:
    return lambda row, mine: summarise([r["rates"][where][rate][group] for r in mine])


def _seconds(row: Row, mine: Results) -> str:
    """Of training, of the slowest seed; runs that were trained together shared their time."""
    together = max(result.get("together", 1) for result in mine)
    shared = f" (of {together} together)" if together > 1 else ""
    return f"{max(result['training_seconds'] for result in mine):.0f}{shared}"


def _epsilon(key: str) -> Callable[[Row, Results], str]:
    return lambda row, mine: "–" if mine[0][key] is None else round_up(mine[0][key])


def _sigma(row: Row, mine: Results) -> str:
    noise = mine[0]["noise_multiplier"]
    return "–" if noise is None else f"{noise:.3f}"


def _weakest(row: Row, mine: Results) -> str:
    return "; ".join(f"{rate} {value}" for rate, value in weakest(mine).items())


def _cohort(row: Row, mine: Results) -> str:
    real = mine[0]["real_cohort"]
    if row.cohort is None or real == row.cohort:
        return str(row.cohort or "–")
    return f"{row.cohort} (here {real})"


_FIRST: dict[str, Callable[[Row, Results], str]] = {
    "model": lambda row, mine: row.model,
    "algorithm": _algorithm,
    "m": _cohort,
    "variant": lambda row, mine: row.variant or "–",
    "seeds": lambda row, mine: ", ".join(str(r["seed"]) for r in mine),
    "accuracy": _figure("accuracy"),
}
_LAST: dict[str, Callable[[Row, Results], str]] = {
    "convention": lambda row, mine: mine[0]["convention"] or "–",
    "σ": _sigma,
    "ε": _epsilon("epsilon"),
    "honest ε": _epsilon("epsilon_honest"),
}

SHAPES = {
    "adult": Shape(
        "Accuracy and gaps are of the test set; the training gap is the constrained rate's on the "
        "training population, and the weakest group's own rate there stands beside it. Numerical "
        "features are normalised with the training mean and variance, as in the paper: what "
        "reading those costs (its ε₀) is in no figure here.",
        _FIRST
        | {
            "FNR gap": _figure("fnr_gap"),
            "training gap": _figure("train_gap"),
            "weakest group": _weakest,
            "EO gap": _figure("eo_gap"),
            "DemP gap": _figure("demp_gap"),
            "PP gap": _figure("pp_gap"),
        }
        | _LAST,
    ),
    "femnist": Shape(
        "Accuracy, its gap and every group's accuracy are of the writers' test digits; training "
        "gap and training accuracies are of the digits that were trained on. ε is for the "
        "population that the noise is calibrated for, the real ε for the users that it ran on.",
        _FIRST
        | {
            "accuracy gap": _figure("gap"),
            **{name: _group("accuracy", f"pen={name}", "test") for name in GROUPS},
            "training accuracy": _figure("train_accuracy"),
            "training gap": _figure("train_gap"),
            "training chalk": _group("accuracy", f"pen={GROUPS[-1]}", "train"),
            "T": lambda row, mine: str(mine[0]["rounds"]),
            "calibrated for": lambda row, mine: f"{row.population:,}" if row.private else "–",
        }
        | _LAST
        | {
            "real ε": _epsilon("epsilon_real"),
            "seconds": _seconds,
            "precision": lambda row, mine: ", ".join(sorted({r["precision"] for r in mine})),
        },
    ),
}
