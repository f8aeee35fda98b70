"""Ctrl-C in the middle of a training: the round is finished first, and not paid for in vain.

A round's charge is on the disk before it is released. Cut off in between, it has cost the users
something and taught nobody anything.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fpfl.server.loop import Callback, RoundEvent


@contextmanager
def finishing_rounds(run: Path) -> Iterator[Callback]:
    """Yield a callback that ends training after the round in which Ctrl-C was pressed.

    A second Ctrl-C ends it at once. Either way it says how to go on with the run in the folder.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nInterrupted: finishing this round (again to stop at once)", file=sys.stderr)

    def end(event: RoundEvent) -> None:
        if asked and event.row["round"] < event.rounds:
            raise KeyboardInterrupt

    # Only the main thread may handle signals; elsewhere an interruption is what it always was.
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if main else None
    try:
        yield end
    except KeyboardInterrupt:
        print(f"Interrupted; go on with it: fpfl resume {run}", file=sys.stderr)
        raise
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
