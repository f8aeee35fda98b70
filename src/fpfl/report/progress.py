"""While it runs: a progress bar on a terminal, plain lines elsewhere; released figures only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fpfl.server.round import Callback, RoundEvent
from fpfl.server.state import Row


def released(row: Row) -> str:
    """What a round released, in a few words."""
    accuracy, averaged = row["accuracy"], row.get("averaged_gap")
    gap, word = (row["gap"], "gap") if averaged is None else (averaged, "averaged gap")
    parts = [] if accuracy is None else [f"accuracy {accuracy:.3f}"]
    if gap is not None:
        parts.append(f"{word} {gap:.3f}")
    return ", ".join(parts)


@contextmanager
def progress(name: str, rounds: int) -> Iterator[Callback]:
    """Yield a callback that shows how far a run is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(name)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[released]}"),
        console=console,
    )
    with bar:
        task = bar.add_task(name, total=rounds, released="")
        yield lambda event: bar.update(task, advance=1, released=released(event.row))


def _lines(name: str) -> Callback:
    def line(event: RoundEvent) -> None:
        t = event.row["round"]
        if t % max(1, event.rounds // 4) == 0:
            print(
                f"{name}: round {t} of {event.rounds}, {released(event.row)}",
                file=sys.stderr,
                flush=True,
            )

    return line
