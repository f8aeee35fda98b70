"""Waiting for a disk without standing in the way: a small process syncs while this one computes.

A thread would do, were it not for Python's lock: each time it wakes up, whoever computes waits for
it, and on small rounds that costs more than the disk does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Knows nothing but files: a line in ("s" to sync, "a" to sync the further file, too, or that file's
# name in hexadecimal), for a sync a byte out, the error's number.
_LOOP = """
import os, sys
sync = getattr(os, "fdatasync", os.fsync)
files, last = [int(file) for file in sys.argv[1:]], None
for line in sys.stdin.buffer:
    if line not in (b"s\\n", b"a\\n"):
        if last is not None:
            os.close(last)
        last = os.open(bytes.fromhex(line.decode()), os.O_RDONLY)
        continue
    error = 0
    for file in files + ([] if last is None or line == b"s\\n" else [last]):
        try:
            sync(file)
        except OSError as problem:
            error = min(problem.errno or 255, 255)
    os.write(1, bytes([error]))
"""


class SyncProcess:
    """Syncs open files in a process of its own, one request at a time.

    Parameters
    ----------
    files
        Descriptors of the files; they must stay open here.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self._waiting = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LOOP, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=tuple(files),
            start_new_session=True,  # an interrupt at the terminal is for this process
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    def start(self, everything: bool = False) -> None:
        """Begin to sync what was written so far; ``everything``: the file that is followed, too."""
        self._waiting = True
        try:
            os.write(self._in, b"a\n" if everything else b"s\n")
        except OSError as error:
            raise OSError(error.errno, "the process that syncs the ledger is gone") from error

    def follow(self, path: Path) -> None:
        """Sync this file, too, where everything is to be synced, in place of the last one named."""
        os.write(self._in, os.fsencode(path.resolve()).hex().encode() + b"\n")

    def wait(self) -> None:
        """Return when what was begun is on the disk; an error of the disk is raised here."""
        if not self._waiting:
            return
        answer = os.read(self._out, 1)
        self._waiting = False
        if not answer:
            raise OSError("the process that syncs the ledger is gone; resume the run")
        if answer[0]:
            raise OSError(answer[0], f"the ledger cannot be synced: {os.strerror(answer[0])}")

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
