"""The figures of docs/howto/estimator.md: the estimator beside fairlearn's reduction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "python -m benchmarks.fairlearn_peer --out docs/results/estimator"
OURS = "FairPrivateClassifier"


def fairlearn() -> str:
    """Everybody's accuracy, gap and time, then ours against the reduction's with intervals."""
    found = _results()
    lines = [
        "| constraint | who | accuracy | gap | held-out accuracy, gap | training gap | fit, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (constraint, who), rows in _grouped(found["rows"]).items():
        test, held, train = (
            {what: mean(row[where][what] for row in rows) for what in ("accuracy", "gap")}
            for where in ("test", "held out", "train")
        )
        seeds = "" if len(rows) > 1 else " (one seed)"
        lines.append(
            f"| {constraint} | {_named(who)}{seeds} | {test['accuracy']:.4f} | {test['gap']:.4f} "
            f"| {held['accuracy']:.4f}, {held['gap']:.4f} | {train['gap']:.4f} "
            f"| {mean(row['seconds'] for row in rows):.1f} |"
        )
    lines += ["", *_compared(found), "", _source(found)]
    return "\n".join(lines) + "\n"


def plain() -> str:
    """The same learners without a constraint."""
    found = _results()
    rows = [row for row in found["rows"] if row["constraint"] is None]
    lines = ["| no constraint | accuracy | equalized odds | selection | FNR | fit, s |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for who in dict.fromkeys(row["who"] for row in rows):
        mine = [row for row in rows if row["who"] == who]
        gaps = [
            mean(row["test"]["gap"] for row in mine if row["measured"] == name)
            for name in dict.fromkeys(row["measured"] for row in mine)
        ]
        seeds = " (one seed)" if len({row["seed"] for row in mine}) == 1 else ""
        lines.append(
            f"| {who}{seeds} | {mean(row['test']['accuracy'] for row in mine):.4f} | "
            + " | ".join(f"{gap:.4f}" for gap in gaps)
            + f" | {mean(row['seconds'] for row in mine):.1f} |"
        )
    return "\n".join(lines) + "\n"


def _compared(found: dict[str, Any]) -> list[str]:
    percent = round(100 * found["about"]["confidence"])
    lines = [
        f"| ours − reduction, test split [{percent}%] | learner of the reduction | accuracy | gap "
        "| time, ours/its |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in found["compared"]:
        cells = [
            f"{row[what]['value']:+.4f} [{row[what]['low']:+.4f}, {row[what]['high']:+.4f}]"
            for what in ("accuracy", "gap")
        ]
        lines.append(
            f"| {row['constraint']} | {row['peer']} | {cells[0]} | {cells[1]} "
            f"| {row['seconds']['ratio']:.2f} |"
        )
    return lines


def _grouped(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows with a constraint by (constraint, who), ours first."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    fair = [row for row in rows if row["constraint"] is not None]
    constraints = list(dict.fromkeys(row["constraint"] for row in fair))
    whos = sorted({row["who"] for row in fair}, key=lambda who: (who != OURS, who))
    for constraint in constraints:
        for who in whos:  # boosted trees: one seed, for information
            mine = [row for row in fair if (row["constraint"], row["who"]) == (constraint, who)]
            if mine:
                grouped[constraint, who] = mine
    return grouped


def _named(who: str) -> str:
    return f"`{who}`" if who == OURS else f"`ExponentiatedGradient`, {who}"


def _source(found: dict[str, Any]) -> str:
    about = found["about"]
    return (
        f"`{about['command']}`, {about['date']}, {about['hardware']}, seeds: {about['seeds']}, "
        f"{about['wall_seconds']:.0f} s, load average {about['load']}; fairlearn "
        f"{about['fairlearn']}, scikit-learn {about['scikit-learn']}, torch "
        f"{about['torch']}, one thread each."
    )


def _results() -> Any:
    path = ROOT / "docs" / "results" / "estimator" / "results.json"
    if not path.exists():
        raise SystemExit(f"{path.name} of the estimator is missing: run {COMMAND}")
    return json.loads(path.read_text(encoding="utf-8"))


TABLES: dict[str, Callable[[], str]] = {"fairlearn": fairlearn, "plain": plain}
"""What ``<!-- estimator: NAME -->`` stands for."""
