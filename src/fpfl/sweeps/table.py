"""The table of a sweep: one row a finished run, plain values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fpfl.fairness.evaluation import Evaluation
from fpfl.sweeps.asked import SIMULATION, Asked, setting
from fpfl.sweeps.choice import FIGURES, LOOKED, shown
from fpfl.training.run import Run

Row = dict[str, Any]


class Table(list[Row]):
    """Rows of a sweep: a list of dicts, and `markdown` for people.

    Columns are the settings that differ, by their names, and figures: ``accuracy`` (or ``error``)
    and ``gap`` on held-out users, each with ``..._low`` and ``..._high``, the ``verdict`` by
    ``tolerance``; ``released_accuracy`` and ``released_gap``, the last that training released;
    ``epsilon`` and ``delta`` of the single run; ``rounds_run``, ``selected``, ``stopped``;
    ``simulated``: whether its noise is seeded. What there is not is None.
    """

    @property
    def settings(self) -> tuple[str, ...]:
        """The columns that are settings."""
        names = dict.fromkeys(name for row in self for name in row)
        return tuple(name for name in names if name not in FIGURES)

    def markdown(self) -> str:
        """The table in Markdown, in the order of the runs."""
        if not self:
            return "No run is finished yet.\n"
        measure = "error" if any(row.get("error") is not None for row in self) else "accuracy"
        heads = [*self.settings, "seed", f"held-out {measure}", "gap", "verdict",
                 "released accuracy, gap", "ε", "model kept"]  # fmt: skip
        settings = len(self.settings)
        lines = ["| run | " + " | ".join(heads) + " |"]
        lines.append("| ---: " * (settings + 2) + "| --- " * (len(heads) - settings - 1) + "|")
        lines += [f"| {' | '.join(_cells(row, self.settings, measure))} |" for row in self]
        return "\n".join([*lines, "", _under(self), ""])


def _cells(row: Row, settings: Sequence[str], measure: str) -> list[str]:
    kept = row.get("selected") or ""
    if row.get("stopped"):
        kept += f"; stopped after {row['rounds_run']} rounds"
    released = [_figure(row.get("released_accuracy")), _figure(row.get("released_gap"))]
    cells = [
        str(row["run"]),
        *(shown(row.get(name)) for name in settings),
        shown(row.get("seed")),
        _figure(row.get(measure), row.get(f"{measure}_low"), row.get(f"{measure}_high")),
        _figure(row.get("gap"), row.get("gap_low"), row.get("gap_high")),
        row.get("verdict") or "-",
        ", ".join(released),
        "none" if row.get("epsilon") is None else f"{row['epsilon']:.2f}",
        kept,
    ]
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]


def _under(rows: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{SIMULATION[0].upper()}{SIMULATION[1:]}."]
    if any(row.get("simulated") for row in rows):
        said.append("Noise is seeded: there is no guarantee against anyone who has the seeds.")
    if any(row.get("epsilon") is not None for row in rows):
        said.append("ε is that of a run alone; runs on the same users add up.")
    if any(row.get("accuracy") is not None or row.get("error") is not None for row in rows):
        said.append(LOOKED)
    return " ".join(said)


def _figure(value: Any, low: Any = None, high: Any = None) -> str:
    if value is None or math.isnan(value):
        return "-"
    ends = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{ends}"


def row_of(
    asked: Asked,
    run: Run,
    held_out: Evaluation | None,
    names: Sequence[str],
    tolerance: float | None,
) -> Row:
    """The row of one run; ``names`` are the settings that differ in the sweep."""
    row: Row = {"run": asked.number}
    row |= {name: setting(asked, name) for name in names if name not in ("seed", "noise_seed")}
    row["seed"] = asked.seed
    if "noise_seed" in names:
        row["noise_seed"] = asked.keywords.get("noise_seed")
    row |= _held_out(held_out, tolerance)
    row["released_accuracy"], row["released_gap"] = _released(run)
    row["epsilon"] = run.privacy.epsilon if run.privacy else None
    row["delta"] = run.privacy.delta if run.privacy else None
    row |= {
        "rounds_run": len(run.history),
        "selected": run.selected,
        "stopped": run.stopped,
        "simulated": asked.private and asked.keywords.get("noise_seed") is not None,
    }
    return row


def _held_out(held_out: Evaluation | None, tolerance: float | None) -> Row:
    names = ("accuracy", "accuracy_low", "accuracy_high", "error", "error_low", "error_high",
             "gap", "gap_low", "gap_high")  # fmt: skip
    row: Row = {**dict.fromkeys(names), "verdict": None, "tolerance": tolerance, "confidence": None}
    if held_out is None:
        return row
    row["confidence"] = held_out.confidence
    for name in ("accuracy", "error"):
        low, high = getattr(held_out, f"{name}_interval") or (None, None)
        row |= {name: getattr(held_out, name), f"{name}_low": low, f"{name}_high": high}
    gap = held_out.gaps.get("constraint")
    if gap is not None:
        row["gap"], row["gap_low"], row["gap_high"] = gap.value, gap.low, gap.high
        row["verdict"] = None if tolerance is None else gap.verdict(tolerance)
    return {name: None if value != value else value for name, value in row.items()}


def _released(run: Run) -> tuple[float | None, float | None]:
    """The last accuracy and gap that training released; the gap by averages where there are."""
    accuracy = next(
        (r["accuracy"] for r in reversed(run.history) if r["accuracy"] is not None), None
    )
    for row in reversed(run.history):
        gap = row.get("averaged_gap")
        gap = row.get("gap") if gap is None else gap
        if gap is not None:
            return accuracy, gap
    return accuracy, None
