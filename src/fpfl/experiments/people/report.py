"""The tables in words: what they must show, and the figures behind it, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fpfl.experiments.people.bars import (
    Bar,
    Rows,
    bars,
    by_row,
    constraints_of,
    fair_without_privacy,
    gap,
    is_balanced,
    score,
)
from fpfl.experiments.people.measured import RATES, weakest
from fpfl.experiments.people.rows import (
    EPSILONS,
    FL,
    LEAST_SQUARES,
    LOGISTIC,
    MEAN,
    OURS,
    PFL,
    REDUCTION,
    TUNED,
    Row,
    Selection,
    parsed_epsilons,
)
from fpfl.experiments.people.runner import read_results, reproduce_tables, results_file
from fpfl.experiments.people.tables import HOURS, tables
from fpfl.experiments.runner import json_text

Result = dict[str, Any]

NAMES = {"fnr": "FNR", "odds": "equalised odds", "parity": "demographic parity"}


def run_tables(
    data: str | None,
    out: Path | None,
    *,
    seeds: int | None,
    rows: str,
    chosen: Mapping[str, str | None],
    prepare: Path | None = None,
    jobs: int | None,
    as_json: bool,
    words: Sequence[str],
) -> str:
    """Run the rows that were asked for, and return what is to be printed."""
    if data is None:
        raise ValueError("fpfl reproduce tables needs the folder of the tables' files: --data DIR")
    selection = Selection(
        _words(chosen["--tables"]),
        _words(chosen["--constraints"]),
        parsed_epsilons(chosen["--epsilons"] or ""),
        rows,
        seeds,
    )
    if prepare is not None:
        from fpfl.experiments.people import prepared

        count = prepared.prepare(selection, Path(data), prepare, print)
        return (
            f"{count} trainings are in {prepare}. Next, where torch and numpy are: "
            f"python -m fpfl.experiments.people {prepare} --out RESULTS.json --device cuda"
        )
    results = reproduce_tables(selection, Path(data), out, jobs=jobs, words=words)
    if as_json:
        return json_text(results).rstrip()
    about = [] if out is None else read_results(results_file(out))["about"]
    return "\n".join(part(results, about) for part in PARTS.values())


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def bars_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """What must be shown, with what was measured."""
    lines = [
        "| measure | tables | must reach | aim | measured | held | aim reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {bar.measure} | {bar.role} | {bar.bar} | {bar.aim} | {bar.measured or 'not run'} "
        f"| {_yes(bar.held, bar)} | {_yes(bar.aimed, bar)} |"
        for bar in bars(results)
    ]
    return "\n".join(lines) + "\n"


def _yes(value: bool | None, bar: Bar) -> str:
    if value is None:
        return "–" if bar.measured else "not run"
    return "yes" if value else "**no**"


def cells_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """Every table and constraint at ε = 2, beside the fair model without privacy and PFL."""
    rows = by_row(result for result in results if "rmse" not in result["test"])
    lines = [
        "| table, K | role | constraint | fair without privacy | FPFL-1G without privacy "
        "| PFL, ε = 2 | FPFL-1G, ε = 2 | tuned, ε = 2 | weakest group: PFL, FPFL-1G |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for table in tables():
        for constraint in constraints_of(rows):
            ours = Row(table.name, OURS, constraint, 2.0)
            if ours not in rows:
                continue
            runs = rows[ours]
            fair = fair_without_privacy(rows, ours)
            figures = [
                "–" if fair is None else f"{_figures(rows[fair], constraint)} {_who(fair)}",
                *(
                    _figures(rows.get(row), constraint)
                    for row in (
                        Row(table.name, OURS, constraint),
                        Row(table.name, PFL, None, 2.0),
                        ours,
                        Row(table.name, TUNED, constraint, 2.0),
                    )
                ),
            ]
            balanced = ", balanced" if is_balanced(runs) else ""
            lines.append(
                f"| {table.name}, {runs[0]['K']:,}{balanced} | {table.role} | {NAMES[constraint]} "
                f"| {' | '.join(figures)} | {_weakest(rows, table.name, constraint)} |"
            )
    return "\n".join(lines) + "\n"


def _who(row: Row) -> str:
    return f"(reduction, {row.bound:g})" if row.algorithm == REDUCTION else f"({row.algorithm})"


def _figures(runs: Sequence[Result] | None, constraint: str) -> str:
    """Accuracy / gap on the training population (on test users)."""
    if not runs:
        return "–"
    spread = f" ± {stdev([score([run]) for run in runs]):.3f}" if len(runs) > 1 else ""
    collapsed = sum(bool(run["test"].get("collapsed")) for run in runs)
    return (
        f"{score(runs):.3f}{spread} / {gap(runs, constraint):.3f} "
        f"({gap(runs, constraint, 'test'):.3f})"
        + (f", {collapsed} of {len(runs)} collapsed" if collapsed else "")
    )


def _weakest(rows: Rows, table: str, constraint: str) -> str:
    parts = []
    for rate in RATES[constraint]:
        both = (Row(table, PFL, None, 2.0), Row(table, OURS, constraint, 2.0))
        found = [
            f"{mean(weakest(run['test'], rate) for run in rows[row]):.3f}" if row in rows else "–"
            for row in both
        ]
        parts.append(f"{rate} {', '.join(found)}")
    return "; ".join(parts)


def epsilons_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """FPFL-1G and PFL at every ε."""
    rows = by_row(result for result in results if "rmse" not in result["test"])
    heads = " | ".join("no privacy" if e is None else f"ε = {e:g}" for e in EPSILONS)
    lines = [f"| table | model | {heads} |", "| --- " * (2 + len(EPSILONS)) + "|"]
    for table in tables():
        kinds = [("FL, PFL", None), *((f"FPFL-1G, {NAMES[c]}", c) for c in constraints_of(rows))]
        for name, constraint in kinds:
            cells = []
            for epsilon in EPSILONS:
                plain = PFL if epsilon else FL
                row = Row(table.name, OURS if constraint else plain, constraint, epsilon)
                cells.append(_figures(rows.get(row), constraint or "fnr"))
            if set(cells) != {"–"}:
                lines.append(f"| {table.name} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plain_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """Logistic regression and its reductions, without privacy."""
    rows = by_row(result for result in results if "rmse" not in result["test"])
    lines = ["| table | constraint | bound | accuracy / training gap (test gap) |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for row, runs in rows.items():
        if row.algorithm in (REDUCTION, LOGISTIC):
            bound = "" if row.bound is None else f"{row.bound:g}"
            constraint = NAMES[row.constraint] if row.constraint else "none (FNR gap)"
            figures = _figures(runs, row.constraint or "fnr")
            lines.append(f"| {row.table} | {constraint} | {bound} | {figures} |")
    return "\n".join(lines) + "\n"


def regression_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """The regression: RMSE."""
    rows = by_row(result for result in results if "rmse" in result["test"])
    names = {MEAN: "the mean", LEAST_SQUARES: "least squares", FL: "network, no privacy"}
    lines = [f"| {HOURS.name}: hours per week | RMSE, training | RMSE, test |",
             "| --- | --- | --- |"]  # fmt: skip
    for row, runs in rows.items():
        name = names.get(row.algorithm) or f"network, ε = {row.epsilon:g}"
        cells = [_spread([run[part]["rmse"] for run in runs]) for part in ("train", "test")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    more = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{more}"


def settings_table(results: Sequence[Result], about: Sequence[Result]) -> str:
    """What each table was trained with at ε = 2; C at the start, and at the end where it adapts."""
    rows = by_row(result for result in results if result.get("settings"))
    lines = ["| table | model | C | counts' share | η | m | T | seconds a run |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row, runs in rows.items():
        if row.epsilon != 2.0 or row.constraint not in (None, "fnr"):
            continue
        s = runs[0]["settings"]
        ends = [run["settings"]["clip_at_end"] for run in runs]
        moved = "" if None in ends else f" to {mean(ends):.3g}"
        cells = [_number(s["clip"]) + moved]
        cells += [_number(s[name]) for name in ("counts_share", "learning_rate", "cohort")]
        seconds = mean(run["seconds"] for run in runs)
        lines.append(
            f"| {row.table} | {row.algorithm} | {' | '.join(cells)} | {s['rounds']} "
            f"| {seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def provenance(results: Sequence[Result], about: Sequence[Result]) -> str:
    """How the runs were made: a line for each call."""
    seeds = sorted({result["seed"] for result in results})
    codes = len({result.get("code") for result in results})
    lines = [
        f"{len(results):,} runs, seeds {seeds[0]} to {seeds[-1]}"
        + (f", by {codes} versions of code and packages." if codes > 1 else "."),
        "",
    ]
    for each in about:
        seconds = each["wall_seconds"]
        took = "cut off" if seconds is None else f"{seconds:.0f} s"
        lines.append(
            f"- `{each['command']}`, {each['runs']} runs, {each['date']}, {each['hardware']}, "
            f"{took}."
        )
    return "\n".join(lines) + "\n"


PARTS = {
    "bars": bars_table,
    "cells": cells_table,
    "epsilons": epsilons_table,
    "plain": plain_table,
    "regression": regression_table,
    "settings": settings_table,
    "provenance": provenance,
}
"""What the page is made of, by the names that its markers have."""
