"""How far a sweep is: a bar over the rounds of all runs on a terminal, a line a run elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fpfl.callbacks import progress as shown
from fpfl.sweeps.asked import Asked
from fpfl.sweeps.table import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_EVERY = 0.1
"""Seconds between two pictures of the bar."""


class SweepProgress:
    """Shows all runs of a sweep as one, on stderr.

    Parameters
    ----------
    rounds
        T of every run that is to be trained, by its number.
    kept
        How many more were finished before.
    where
        The console to write to; by default stderr.
    """

    def __init__(
        self, rounds: Mapping[int, int], kept: int = 0, where: Console | None = None
    ) -> None:
        self._rounds, self._kept = dict(rounds), kept
        self._out = where or shown.console()
        self._reached = dict.fromkeys(rounds, 0)
        self._sum, self._total = 0, sum(rounds.values())
        self._finished = 0
        self._first: tuple[float, int] | None = None
        self._next = 0.0
        self._bar: tuple[RichProgress, TaskID] | None = None
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            self._open()

    def watch(self, numbers: Sequence[int], round: int) -> None:
        """Take in that runs have reached a round."""
        if self._first is None:  # processes start and accountants compute before it
            self._first = time.monotonic(), len(numbers)
        for number in numbers:
            self._sum += max(0, round - self._reached[number])
            self._reached[number] = max(round, self._reached[number])
        self._draw()

    def finished(self, asked: Asked, row: Row) -> None:
        """Take in a finished run."""
        self._finished += 1
        self.watch([asked.number], self._rounds[asked.number])
        if self._bar is None:
            self._print(f"[{self._kept + self._finished}/{self._all}] {asked}: {summary(row)}")
        self._draw(at_once=True)

    def close(self) -> None:
        """Leave the last picture."""
        if self._bar is not None:
            self._draw(at_once=True)
            self._bar[0].stop()
            self._bar = None

    @property
    def _all(self) -> int:
        return self._kept + len(self._rounds)

    def _words(self) -> str:
        words = [f"{self._kept + self._finished}/{self._all} runs"]
        start, before = self._first or (math.inf, 0)
        elapsed = time.monotonic() - start
        if self._sum > before and elapsed > 0:
            pace = (self._sum - before) / elapsed
            words.append(shown.pace(pace))
            words.append(f"{shown.duration((self._total - self._sum) / pace)} left")
        return "  ".join(words)

    def _open(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("sweep"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[shown]}", markup=False),
            console=self._out,
        )
        task = bar.add_task("sweep", total=max(self._total, 1), shown=self._words())
        bar.start()
        self._bar = bar, task

    def _draw(self, at_once: bool = False) -> None:
        if self._bar is None:
            return
        now = time.monotonic()
        if at_once or now >= self._next:
            self._next = now + _EVERY
            bar, task = self._bar
            bar.update(task, completed=self._sum, shown=self._words())

    def _print(self, line: str) -> None:
        text = shown.printable(line, self._out.encoding)
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(row: Row) -> str:
    """A finished run in a few words."""
    words = []
    for name in ("accuracy", "error", "gap"):
        value = row.get(name)
        if value is not None and not math.isnan(value):
            words.append(f"held-out {name} {value:.3f}" if name != "gap" else f"gap {value:.3f}")
    if not words and row.get("released_accuracy") is not None:
        words.append(f"released accuracy {row['released_accuracy']:.3f}")
    if row.get("epsilon") is not None:
        words.append(f"ε {row['epsilon']:.2f}")
    if row.get("stopped"):
        words.append(f"stopped after {row['rounds_run']} rounds: {row['stopped']}")
    return ", ".join(words)
