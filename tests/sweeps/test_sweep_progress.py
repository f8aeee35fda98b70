"""The bar over all runs on a terminal, and lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import fpfl
from fpfl.sweeps import progress
from fpfl.sweeps.asked import Asked
from fpfl.sweeps.progress import SweepProgress, summary


def run(number: int, rounds: int = 10) -> Asked:
    settings = {"learning_rate": 0.1 * number}
    return Asked(number, settings, "data", "data", 3, {"rounds": rounds}, lambda: fpfl.mlp(2))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


ROW = {"accuracy": 0.8123, "gap": 0.0456, "epsilon": 2.0, "stopped": None}


def test_elsewhere_each_finished_run_is_a_line(clock: Callable[[float], None]) -> None:
    out = Console(file=io.StringIO(), width=40)
    shown = SweepProgress({1: 10, 2: 10}, kept=1, where=out)
    shown.watch([1, 2], 5)
    shown.finished(run(1), ROW)
    shown.finished(run(2), ROW | {"stopped": "not finite", "rounds_run": 4})
    shown.close()
    first, second = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == (
        "[2/3] run 1 (seed = 3, learning_rate = 0.1): held-out accuracy 0.812, gap 0.046, ε 2.00"
    )
    assert second.startswith("[3/3] run 2")
    assert "stopped after 4 rounds: not finite" in second


def test_on_a_terminal_there_is_one_bar_of_all_rounds(clock: Callable[[float], None]) -> None:
    out = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    shown = SweepProgress(dict.fromkeys(range(4), 50), where=out)
    clock(60.0)  # processes start
    shown.watch([0, 1], 1)
    assert shown._words() == "0/4 runs"
    clock(2.0)
    shown.watch([0, 1], 25)  # 48 of 198 rounds in two seconds
    assert shown._words() == "0/4 runs  24 rounds/s  0:06 left"
    shown.watch([0, 1], 25)
    assert shown._sum == 50, "told twice, counted once"
    shown.finished(run(0, 50), ROW)  # stopped early: its other rounds are not to come
    assert shown._sum == 75
    shown.close()
    drawn = out.file.getvalue()  # type: ignore[attr-defined]
    assert "1/4 runs" in drawn
    assert "held-out" not in drawn, "lines would break the bar"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"accuracy": None, "error": 0.2, "gap": None}, "held-out error 0.200"),
        ({"accuracy": None, "released_accuracy": 0.7}, "released accuracy 0.700"),
        ({"accuracy": 0.8, "gap": float("nan")}, "held-out accuracy 0.800"),
    ],
)
def test_what_there_is_not_is_left_out(row: dict[str, Any], words: str) -> None:
    assert summary(row) == words
