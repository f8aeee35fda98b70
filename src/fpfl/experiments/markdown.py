"""Results beside the paper's, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from fpfl.experiments.tables import Row
from fpfl.privacy.statement import round_up

GAPS = ("fnr_gap", "eo_gap", "demp_gap", "pp_gap")
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
    groups: list[float] = [value for name, value in values if name not in ("overall", "gap")]
    return max(groups) if rate in ERRORS else min(groups)


def weakest(results: Sequence[dict[str, Any]], where: str = "train") -> dict[str, str]:
    """Every constrained rate of the group that is worst off: mean ± standard deviation."""
    found: dict[str, list[float | None]] = {}
    for result in results:
        for rate in result["rates"][where]:
            found.setdefault(rate, []).append(worst(result, rate, where))
    return {rate: summarise(values) for rate, values in found.items()}


def markdown_table(
    results: Sequence[dict[str, Any]], rows: Sequence[Row], about: dict[str, Any]
) -> str:
    """The table of a reproduction: every row's mean and spread, the paper's figure in brackets."""
    seeds = sorted({result["seed"] for result in results})
    lines = [
        f"# {results[0]['table']}",
        "",
        f"Mean ± standard deviation over {len(seeds)} seed{'s' * (len(seeds) > 1)} "
        f"({', '.join(map(str, seeds))}), the paper's single run in brackets. Accuracy and gaps "
        "are of the test set; the training gap is the constrained rate's on the training "
        "population, and the weakest group's own rate there stands beside it. Numerical features "
        "are normalised with the training mean and variance, as in the paper: what reading those "
        "costs (its ε₀) is in no figure here.",
        "",
        "Made by `{command}` on {date} ({hardware}; Python {python}, torch {torch}; "
        "{wall_seconds} s).".format(**about),
        "",
        "| model | algorithm | m | variant | accuracy | FNR gap | training gap | weakest group "
        "| EO gap | DemP gap | PP gap | convention | σ | ε | honest ε |",
        "| --- " * 15 + "|",
    ]
    for row in rows:
        mine = [
            r for r in results
            if (r["model"], r["algorithm"], r["cohort"], r["variant"]) == row.key
        ]  # fmt: skip
        if mine:
            lines.append(_line(row, mine))
    statements = dict.fromkeys(r["statement"] for r in results if r.get("statement"))
    for number, statement in enumerate(statements, start=1):
        lines += ["", f"## Privacy statement {number}", ""]
        lines += [f"- {line}" for line in statement.splitlines()]
    return "\n".join(lines) + "\n"


def _line(row: Row, mine: Sequence[dict[str, Any]]) -> str:
    def cell(key: str) -> str:
        figure = summarise([r[key] for r in mine])
        return f"{figure} ({row.paper[key]:.3f})" if key in row.paper else figure

    first = mine[0]
    cells = [
        row.model,
        row.algorithm,
        "–" if row.cohort is None else str(row.cohort),
        row.variant or "–",
        cell("accuracy"),
        cell("fnr_gap"),
        cell("train_gap"),
        "; ".join(f"{rate} {value}" for rate, value in weakest(mine).items()),
        *(cell(gap) for gap in GAPS[1:]),
        first["convention"] or "–",
        "–" if first["noise_multiplier"] is None else f"{first['noise_multiplier']:.3f}",
        *("–" if first[e] is None else round_up(first[e]) for e in ("epsilon", "epsilon_honest")),
    ]
    return "| " + " | ".join(cells) + " |"
