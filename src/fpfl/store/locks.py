"""Locks on open files: one holder at a time, whichever process it is in.

These are the operating system's ``flock`` locks. They belong to an open file, end with the process
whatever ends it, and bind only those who ask for them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(OSError):
    """Another process (or another opening of the file in this one) holds the file."""


def flock(fd: int, path: Path, *flags: str) -> None:
    """Call ``fcntl.flock`` with flags by name; :class:`BusyError` where it would have to wait."""
    try:
        import fcntl  # not on Windows, where reading still works
    except ImportError as error:
        raise OSError(
            errno.ENOSYS,
            "this system has no file locks that fpfl knows (fcntl), and without them two runs "
            "could write to one file at the same time: use Linux or macOS",
            str(path),
        ) from error
    try:
        fcntl.flock(fd, sum(getattr(fcntl, flag) for flag in flags))
    except BlockingIOError as error:
        raise BusyError(
            errno.EAGAIN,
            "another process is using this file: wait until it ends, or give this run a file of "
            "its own",
            str(path),
        ) from error


@contextmanager
def held(fd: int, path: Path, flag: str, patience: float | None = None) -> Iterator[None]:
    """Hold the lock inside the block.

    Parameters
    ----------
    fd, path
        The open file, and its name for messages.
    flag : {"LOCK_EX", "LOCK_SH"}
        Alone, or together with others who only read.
    patience : float, optional
        Seconds to wait for others before :class:`BusyError`; by default as long as it takes.
    """
    if patience is None:
        flock(fd, path, flag)
    else:
        deadline = time.monotonic() + patience
        while True:
            try:
                flock(fd, path, flag, "LOCK_NB")
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)  # others hold it for less than that
    try:
        yield
    finally:
        flock(fd, path, "LOCK_UN")
