"""One piece of work at a time in a thread of its own, such as waiting for a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs ``work`` in a thread each time it is started; `wait` waits for it and gives its error.

    Two locks are all there is between the threads. An executor's queue and futures cost a tenth of
    a millisecond a round, most of it time in which the other thread cannot compute.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._running = self._over = False
        self._error: BaseException | None = None
        # A daemon: a process that ends with an error does not wait for it.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Do the work once more; what was started before must have been waited for."""
        self._running = True
        self._go.release()

    def wait(self) -> None:
        """Return when the work that was started is done, or raise what it raised."""
        if self._running:
            self._done.acquire()
            self._running = False
            error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread, after the work that was started."""
        if self._over:
            return
        self._over = True
        try:
            self.wait()
        finally:
            self._go.release()
            self._thread.join()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._over and not self._running:
                return
            try:
                self._work()
            except BaseException as error:  # for whoever waits
                self._error = error
            self._done.release()
