"""Progress: a bar on a terminal, plain lines elsewhere; released figures only, in a few words."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fpfl.callbacks import progress as released
from fpfl.fairness.collapse import LEAST
from fpfl.fairness.confusion import balance_of, collapsed_in_training
from fpfl.privacy.spending import Spent
from fpfl.privacy.statement import round_up
from fpfl.server.events import Training
from fpfl.server.loop import RoundEvent
from fpfl.server.state import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID
    from rich.progress import Progress as RichProgress


@dataclass(frozen=True)
class Worst:
    """The rate and the group that are furthest from the whole in a round, and how far."""

    rate: str
    group: str
    gap: float


def worst(row: Row) -> Worst | None:
    """The largest known |F/n' − F_a/n'_a| of a row, kept within 1; None where none is known."""
    found = [
        Worst(rate, group, min(abs(row["overall"][rate] - value), 1.0))
        for rate, groups in row.get("groups", {}).items()
        for group, value in groups.items()
        if value is not None and row["overall"][rate] is not None
    ]
    return max(found, key=lambda each: each.gap, default=None)


def accuracy_words(row: Row, score: str = "accuracy") -> str:
    """Empty where v has no counts for it, or noise dominates them."""
    return "" if row["accuracy"] is None else f"{score} {row['accuracy']:.3f}"


def gap_words(row: Row) -> str:
    """The gap, and where it is; empty without a constraint."""
    if "groups" not in row:
        return ""
    furthest = worst(row)
    if furthest is None:
        return "gap not known"
    where = f"({furthest.rate} {furthest.group})"
    if row["gap"] is None:
        # Some group is silent, and could be worse.
        return f"gap {furthest.gap:.3f} or more {where}"
    return f"gap {row['gap']:.3f} {where}"


def averaged_words(row: Row) -> str:
    """The gap by the method's averages over rounds, where it has one."""
    averaged = row.get("averaged_gap")
    return "" if averaged is None else f"averaged gap {averaged:.3f}"


def collapse_words(row: Row, names: Sequence[str] | None = None) -> str:
    """How the model has collapsed by released totals, briefly; empty where that is not clear."""
    if collapsed_in_training(row, names) is None:
        return ""
    metrics = balance_of(row, names)
    assert metrics is not None  # of it was spoken
    often = max(range(len(metrics.predicted)), key=lambda k: metrics.predicted[k].value)
    share = metrics.predicted[often].value
    if share > 1.0 - LEAST:
        return f"COLLAPSED: predicts {metrics.named(often)} for {100 * share:.1f}%"
    return f"COLLAPSED: balanced accuracy {metrics.balanced_accuracy.value:.3f}"


def spent_words(spent: Spent | None) -> str:
    """ε so far: a bound, of the ε that the run costs in the end."""
    if spent is None:
        return ""
    return f"ε ≤ {round_up(spent.epsilon)} of {round_up(spent.total)}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as clocks have it."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def pace(rounds_per_second: float) -> str:
    """Rounds a second, or seconds a round where that is more."""
    if rounds_per_second >= 10:
        return f"{rounds_per_second:,.0f} rounds/s"
    if rounds_per_second >= 1:
        return f"{rounds_per_second:.1f} rounds/s"
    return f"{1 / rounds_per_second:,.1f} s/round"


def printable(text: str, encoding: str) -> str:
    """The text as a terminal of this encoding can show it."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        plain = text.replace("ε", "eps").replace("≤", "<=").replace("√", "sqrt ")
        plain = plain.replace("σ", "sigma")
        return plain.encode("ascii", "replace").decode("ascii")
    return text


LINES = 8
"""About so many lines are written where there is no terminal."""
_BAR = (6, 24)
"""Widths of the bar itself: what is left, between these two."""
_WINDOW = 200
"""The pace is that of so many rounds at most."""
_EVERY = 0.1
"""Seconds between two pictures of a bar."""
MISSING = "ε so far is not shown: dp-accounting is not installed (pip install dp-accounting)"


@lru_cache(maxsize=1)
def console() -> Console:
    """The one console on stderr: what others print goes above the bar, not into it."""
    from rich.console import Console

    # FORCE_COLOR, which many CI systems set, makes no terminal of a log file.
    terminal = None if sys.stderr.isatty() else False
    return Console(stderr=True, highlight=False, force_terminal=terminal)


class Progress:
    """Shows how far a training is: ``fpfl.train(..., callbacks=[fpfl.Progress()])``.

    Released accuracy, the worst gap and where it is, ε so far, rounds a second, the time left: a
    bar on a terminal, about eight lines elsewhere, on stderr. All of it was released, or is public.

    "ε ≤ 0.61 of 2.00" is what the rounds until now would cost, had no more been planned (a bound:
    it is computed at up to twenty rounds, and a round shows the next of them), and what the run
    costs in the end, also where it is stopped early.

    Parameters
    ----------
    name
        What to call the training.
    rounds
        T, where the callback is to be used without a training that says so.
    where
        The console to write to; by default stderr.
    """

    def __init__(
        self, name: str = "training", rounds: int | None = None, where: Console | None = None
    ) -> None:
        self.name, self.rounds, self.where = name, rounds, where
        self._training: Training | None = None
        self._bar: tuple[RichProgress, BarColumn, TaskID] | None = None
        self._pace = _Pace()
        self._next = 0.0

    def begin(self, training: Training) -> None:
        """Show an empty bar."""
        self._training, self.rounds = training, training.rounds
        self._pace = _Pace()
        spending = training.spending
        if spending is not None and spending.after(training.first) is None:
            self._print(f"{self.name}: {MISSING}")
        self._open(training.first - 1)

    def __call__(self, event: RoundEvent) -> None:
        """Show a round."""
        t, T = int(event.row["round"]), event.rounds
        if self._training is not None and t < self._training.fresh:
            return  # released before the run was cut off
        self.rounds = T
        now = time.monotonic()
        self._pace.round(t, now)
        if self._live:
            self._draw(event, now)
        elif t == T or t % math.ceil(T / LINES) == 0:
            # The last one is worth a line in any case: its figures are what is left.
            words = [part for part in self._parts(event, now)[1:] if part]
            elapsed = f"{released.duration(self._pace.elapsed(now))} elapsed"
            self._print(f"{self.name}: {', '.join([f'round {t} of {T}', *words, elapsed])}")

    def end(self, run: object) -> None:
        """Leave the last picture."""
        self.close()

    def failed(self, error: BaseException) -> None:
        """Leave the last picture."""
        self.close()

    def close(self) -> None:
        """Stop drawing."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    @property
    def _out(self) -> Console:
        return self.where or console()

    @property
    def _live(self) -> bool:
        """Whether this is a terminal that a bar can be drawn on."""
        return self._out.is_terminal and not self._out.is_dumb_terminal

    def _draw(self, event: RoundEvent, now: float) -> None:
        from rich.cells import cell_len

        t, out = int(event.row["round"]), self._out
        self._open(t - 1)
        assert self._bar is not None
        bar, column, task = self._bar
        if now < self._next and t < event.rounds:
            bar.update(task, completed=t)
            return
        self._next = now + _EVERY
        parts = [released.printable(part, out.encoding) for part in self._parts(event, now)]
        room = out.width - cell_len(self.name) - 2
        text = fitting(parts, room - _BAR[0])
        column.bar_width = min(_BAR[1], max(_BAR[0], room - cell_len(text)))
        bar.update(task, completed=t, total=event.rounds, shown=text)

    def _parts(self, event: RoundEvent, now: float) -> list[str]:
        """What there is to show, in the order of a bar; empty where there is nothing to say."""
        t, T, training = int(event.row["round"]), event.rounds, self._training
        score = "accuracy" if training is None else training.score
        spent = None
        if training is not None and training.spending is not None:
            spent = training.spending.after(t)
        per_second = self._pace.per_second()
        return [
            f"{t}/{T}",
            released.accuracy_words(event.row, score),
            released.gap_words(event.row),
            released.averaged_words(event.row),
            released.spent_words(spent),
            released.pace(per_second) if per_second else "",
            f"{released.duration((T - t) / per_second)} left" if per_second else "",
            released.collapse_words(
                event.row, None if training is None else training.schema.class_names
            ),
        ]

    def _open(self, done: int) -> None:
        if self._bar is not None or not self._live:
            return
        from rich.progress import BarColumn, Progress, TextColumn

        out, column = self._out, BarColumn(bar_width=_BAR[0])
        texts = [
            TextColumn(f"{{task.{field}}}", markup=False)
            for field in ("description", "fields[shown]")
        ]
        bar = Progress(texts[0], column, texts[1], console=out)
        task = bar.add_task(
            released.printable(self.name, out.encoding),
            total=self.rounds,
            completed=done,
            shown=f"{done}/{self.rounds}",
        )
        bar.start()
        self._bar = bar, column, task

    def _print(self, line: str) -> None:
        text = released.printable(line, self._out.encoding)
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(name: str, rounds: int, where: Console | None = None) -> Iterator[Progress]:
    """Yield a callback that shows how far a run is; it is closed whatever happens."""
    shown = Progress(name, rounds, where)
    try:
        yield shown
    finally:
        shown.close()


# Which of a bar's parts are left out first, where a terminal is narrow: where the gap is, the pace,
# the averaged gap, time left, accuracy, ε, gap, how the model has collapsed. How far it is stays.
_LEFT_OUT = ("where", 5, 3, 6, 1, 4, 2, 7)


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of a bar's parts as there is room for, the most important ones first."""
    from rich.cells import cell_len, set_cell_size

    shown = list(parts)
    for which in _LEFT_OUT:
        text = "  ".join(part for part in shown if part)
        if cell_len(text) <= room:
            return text
        if which == "where":
            shown[2] = shown[2].split(" (")[0]
        elif int(which) < len(shown):
            shown[int(which)] = ""
    text = "  ".join(part for part in shown if part)
    return set_cell_size(text, max(0, min(room, cell_len(text))))


class _Pace:
    """Rounds a second, by the last rounds; the first, which warms up, counts while it is alone."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def round(self, t: int, now: float) -> None:
        if not self.seen:
            self.seen.append((t - 1, self.start))
        elif self.seen[0][1] == self.start:
            self.seen.popleft()
        self.seen.append((t, now))

    def per_second(self) -> float | None:
        (first, begun), (last, now) = self.seen[0], self.seen[-1]
        return (last - first) / (now - begun) if now > begun else None

    def elapsed(self, now: float) -> float:
        return now - self.start
