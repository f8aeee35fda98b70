"""The tables of the unfair digits in docs/reproduction.md, from docs/results/femnist*."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean
from typing import Any

from robust_tables import RESULTS, Result, by, figure, runs, source

from fpfl.experiments.tables import KEY, Row, load_table
from fpfl.privacy.statement import round_up


def digits_table(names: list[str]) -> str:
    """The rows beside the paper's: test digits, then the digits trained on."""
    (name,) = names
    paper = {row.key: row for row in load_table("femnist")}
    lines = [
        "| network | algorithm | noise of K = | seeds | accuracy (paper) | gap (paper) "
        "| black, blue, chalk | training: accuracy, gap, chalk |",
        "| --- " * 8 + "|",
    ]
    for key, found in by(runs(name), *KEY).items():
        row = paper[key]
        cells = [
            row.model,
            f"{row.algorithm}{', ' * bool(row.variant)}{row.variant}",
            f"{row.population:,}" if row.private else "–",
            str(len(found)),
            _beside(row, found, "accuracy"),
            _beside(row, found, "gap"),
            ", ".join(f"{_mean(found, 'test', pen):.3f}" for pen in ("black", "blue", "chalk")),
            f"{mean(run['train_accuracy'] for run in found):.3f}, "
            f"{mean(run['train_gap'] for run in found):.3f}, "
            f"{_mean(found, 'train', 'chalk'):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _source(name)]) + "\n"


def cost_table(names: list[str]) -> str:
    """What every private row costs, and how long every row takes."""
    lines = [
        "| network | algorithm | m | seeds | σ | ε at K = | | real ε at K = | "
        "| seconds for T rounds | T |",
        "| --- " * 11 + "|",
    ]
    for name in names:
        for (model, algorithm, cohort, accounted, variant), found in by(runs(name), *KEY).items():
            first = found[0]
            private = first["noise_multiplier"] is not None
            slowest = max(run["training_seconds"] for run in found)
            together = max(run.get("together", 1) for run in found)
            shared = f" (of {together} together)" if together > 1 else ""
            cells = [
                model,
                f"{algorithm}{', ' * bool(variant)}{variant}",
                str(cohort),
                str(len(found)),
                f"{first['noise_multiplier']:.3f}" if private else "–",
                *((f"{accounted:,}", round_up(first["epsilon_honest"])) if private else "––"),
                *((f"{first['population']:,}", round_up(first["epsilon_real"])) if private
                  else "––"),
                f"{slowest:.0f}{shared}",
                f"{first['rounds']:,}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def chosen_table(names: list[str]) -> str:
    """What was tried on held-out training writers."""
    lines = [
        "| oriented, m = 100, ε = 2 | set otherwise | held-out writers: accuracy / gap (chalk) "
        "| their like that were trained on |",
        "| --- | --- | --- | --- |",
    ]
    found = [run | {"other": _otherwise(run["changes"])} for run in runs(names[0])]
    for (algorithm, variant, other), some in by(found, "algorithm", "variant", "other").items():
        cells = [
            f"{algorithm}{', ' * bool(variant)}{variant}",
            other or "– (the table's row)",
            *(
                "{} / {} ({})".format(
                    *(f"{sum(run[f'{where}_{what}'] for run in some) / len(some):.3f}"
                      for what in ("accuracy", "gap", "chalk"))
                )
                for where in ("held_out", "train")
            ),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(names[0])]) + "\n"


def _otherwise(changes: dict[str, Any]) -> str:
    words: dict[str, Callable[[float], str]] = {
        "samples_bound": lambda value: f"C = {value:g} n̄",
        "pace": lambda value: f"η at {value:g} of the rule's",
        "target": lambda value: f"towards α = {value:g}",
        "gamma": lambda value: f"γ = {value:g}",
    }
    return ", ".join(words[name](value) for name, value in changes.items())


def _beside(row: Row, found: list[Result], field: str) -> str:
    paper = f" ({row.paper[field]:.3f})" if field in row.paper else ""
    return figure(run[field] for run in found) + paper


def _mean(found: list[Result], where: str, pen: str) -> float:
    group = "pen=chalk" if pen == "chalk" else f"pen={pen} pen"
    return float(mean(run["rates"][where]["accuracy"][group] for run in found))


def _source(name: str) -> str:
    """The data, and every call that made some of the rows."""
    about = json.loads((RESULTS / name / "about.json").read_text(encoding="utf-8"))
    calls = [
        f"- `{each['command']}`, {each['date']}, {each['hardware']}, "
        + ("cut off." if each["wall_seconds"] is None else f"{each['wall_seconds']:.0f} s.")
        for each in (about, *about.get("earlier", []))
    ]
    return "\n".join([f"Data: {runs(name)[0]['data']}.", "", *calls])


TABLES: dict[str, Callable[[list[str]], str]] = {
    "table": digits_table,
    "cost": cost_table,
    "chosen": chosen_table,
}
