"""The tables of docs/robust.md, from docs/results/adult-{robust,ablation,chosen,lift}."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from fpfl.experiments.markdown import summarise, worst

RESULTS = Path(__file__).parents[1] / "docs" / "results"

Result = dict[str, Any]
Rows = dict[tuple[Any, ...], list[Result]]

NAMES = {"sex x race": "FNR, sex × race (4 groups)",
         "sex x three races": "FNR, sex × race (6 groups)",
         "sex x three races, no end of multipliers": "the same, no end of multipliers",
         "equalised odds": "equalised odds, sex",
         "demographic parity": "demographic parity, sex",
         "regression": "mean prediction of hours, sex"}  # fmt: skip


def runs(table: str) -> list[Result]:
    """All runs of a results file."""
    found: list[Result] = json.loads((RESULTS / table / "results.json").read_text(encoding="utf-8"))
    return found


def by(results: Iterable[Result], *fields: str) -> Rows:
    """Runs that agree in some fields."""
    rows: Rows = {}
    for run in results:
        rows.setdefault(tuple(run[field] for field in fields), []).append(run)
    return rows


def figure(values: Iterable[float]) -> str:
    """Mean ± standard deviation over seeds."""
    return summarise(list(values))


def robust_table() -> str:
    """PFL, FPFL and FPFL-1G at small cohorts and small ε."""
    lines = [
        "| model | m | ε | σ | algorithm | accuracy | test gap | training gap "
        "| weakest group's FNR, test | training |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, found in by(runs("adult-robust"), "model", "cohort", "variant", "algorithm").items():
        model, cohort, variant, algorithm = key
        lines.append(
            f"| {model} | {cohort} | {variant.removeprefix('ε=')} "
            f"| {found[0]['noise_multiplier']:.3f} | {algorithm} "
            f"| {figure(run['accuracy'] for run in found)} | {figure(run['gap'] for run in found)} "
            f"| {figure(run['train_gap'] for run in found)} "
            f"| {figure(worst(run, 'FNR', 'test') for run in found)} "
            f"| {figure(worst(run, 'FNR', 'train') for run in found)} |"
        )
    return "\n".join([*lines, "", source("adult-robust")]) + "\n"


def ablation_table() -> str:
    """FPFL-1G without each of its parts."""
    lines = [
        "| m = 200, ε = 2 | shallow: accuracy / test gap (training gap) | deep "
        "| weakest group's FNR, training: shallow, deep |",
        "| --- | --- | --- | --- |",
    ]
    parts = [run for run in runs("adult-ablation") if not special(run)]
    for (variant,), found in by(parts, "variant").items():
        models = by(found, "model")
        cells = [short(models[model,]) for model in ("shallow", "deep")]
        rates = [mean(worst(run, "FNR", "train") for run in models[model,])
                 for model in ("shallow", "deep")]  # fmt: skip
        lines.append(f"| {variant} | {' | '.join(cells)} | {rates[0]:.2f}, {rates[1]:.2f} |")
    return "\n".join([*lines, "", source("adult-ablation")]) + "\n"


def constraints_table() -> str:
    """Other constraints: PFL and FPFL-1G."""
    lines = [
        "| constraint | model | algorithm | accuracy or error | rate | test gap | training gap "
        "| of PFL's | weakest group, training |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    chosen = [run for run in runs("adult-ablation") if run["variant"] in NAMES]
    rows = by(chosen, "variant", "model", "algorithm")
    for (variant, model, algorithm), found in rows.items():
        for rate in found[0]["rates"]["train"]:
            train = mean(run["rates"]["train"][rate]["gap"] for run in found)
            twin = rows[variant.split(",")[0], model, "PFL"]
            plain = mean(run["rates"]["train"][rate]["gap"] for run in twin)
            field = "error" if found[0]["accuracy"] is None else "accuracy"
            lines.append(
                f"| {NAMES[variant]} | {model} | {algorithm} "
                f"| {figure(run[field] for run in found)} | {rate} "
                f"| {figure(run['rates']['test'][rate]['gap'] for run in found)} "
                f"| {figure(run['rates']['train'][rate]['gap'] for run in found)} "
                f"| {train / plain:.2f} "
                f"| {mean(worst(run, rate, 'train') for run in found):.3f} |"
            )
    return "\n".join([*lines, "", source("adult-ablation")]) + "\n"


def sizes_table() -> str:
    """What a user sends in a round."""
    lines = ["| model | FPFL: numbers, bytes | FPFL-1G | of FPFL's |", "| --- | --- | --- | --- |"]
    found = by(runs("adult-robust"), "model", "algorithm")
    for model in ("shallow", "deep"):
        paper, one = (found[model, name][0]["numbers_sent"] for name in ("FPFL", "FPFL-1G"))
        lines.append(
            f"| {model} | {paper:,}, {4 * paper:,} | {one:,}, {4 * one:,} | {one / paper:.0%} |"
        )
    return "\n".join([*lines, "", source("adult-robust")]) + "\n"


def chosen_table() -> str:
    """Alternatives to the suggested settings, on held-out training users."""
    found = by(runs("adult-chosen"), "epsilon", "model", "alternative")
    columns = list(dict.fromkeys((epsilon, model) for epsilon, model, _ in found))
    names = list(dict.fromkeys(name for _, _, name in found))
    heads = [f"{model}, ε = {epsilon:g}" for epsilon, model in columns]
    lines = [f"| m = 200 | {' | '.join(heads)} |", "| --- " * (1 + len(columns)) + "|"]
    for name in names:
        cells = []
        for column in columns:
            some = found[*column, name]
            accuracy, gap = (
                mean(run[field] for run in some) for field in ("accuracy", "train_gap")
            )
            cells.append(f"{accuracy:.4f} ({gap:.4f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source("adult-chosen")]) + "\n"


def lift_table() -> str:
    """FPFL-1G that never weighs down, beside PFL and FPFL-1G: weakest groups."""
    lines = [
        "| | model | rate | PFL: accuracy, gap, weakest group | FPFL-1G | never weighing down |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    others = by(
        [run for run in runs("adult-robust") + runs("adult-ablation") if run["cohort"] == 200],
        "variant", "model", "algorithm",
    )  # fmt: skip
    for (variant, model), found in by(runs("adult-lift"), "variant", "model").items():
        for rate in found[0]["rates"]["train"]:
            columns = [others[variant, model, name] for name in ("PFL", "FPFL-1G")]
            cells = [
                f"{mean(run['accuracy'] for run in some):.3f}, "
                f"{mean(run['rates']['train'][rate]['gap'] for run in some):.3f}, "
                f"{mean(worst(run, rate, 'train') for run in some):.3f}"
                for some in (*columns, found)
            ]
            name = NAMES.get(variant, f"FNR, sex, {variant}")
            lines.append(f"| {name} | {model} | {rate} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source("adult-lift")]) + "\n"


def special(run: Result) -> bool:
    """Whether a run of the ablation's file belongs to its other tables."""
    return run["variant"] in NAMES or run["variant"].startswith("ε=")


def short(found: list[Result]) -> str:
    """Accuracy / test gap (training gap)."""
    fields = ("accuracy", "gap", "train_gap")
    return "{:.3f} / {:.3f} ({:.3f})".format(*(mean(run[f] for run in found) for f in fields))


def source(table: str) -> str:
    """Command, seeds, machine and date."""
    about = json.loads((RESULTS / table / "about.json").read_text(encoding="utf-8"))
    seeds = sorted({run["seed"] for run in runs(table)})
    return (
        f"`{about['command']}`, {about['date']}, {about['hardware']}, "
        f"seeds {seeds[0]} to {seeds[-1]}, {about['wall_seconds']:.0f} s."
    )


TABLES: dict[str, Callable[[], str]] = {
    "table": robust_table,
    "ablation": ablation_table,
    "constraints": constraints_table,
    "sizes": sizes_table,
    "chosen": chosen_table,
    "lift": lift_table,
}
