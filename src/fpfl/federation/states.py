"""What a node keeps between two messages: files that it alone may read, one for each run.

The new state is on the disk before an answer leaves, and one message at a time is answered,
whatever process does it: so a node that is killed at any point, or two processes at once, never
mask two vectors in one session. The state says which sessions were played, and what was played is
gone from it. Whoever can put an older file back can undo that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fpfl.store.files import held, write_whole

MOST = 8
"""The states of so many runs are kept: of those that were not written for longest, none."""

_LOCK = "lock"


class UnsafeFolderError(OSError):
    """A folder or a file that is for this user alone is somebody else's, or open to others."""


def private_folder(path: Path) -> Path:
    """A folder of this user's that nobody else can enter; made where it is not there."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _own(found) or stat.S_IMODE(found.st_mode) & 0o077:
        raise UnsafeFolderError(
            f"{path} must be a folder of this user's that nobody else can enter, but it is "
            f"{stat.filemode(found.st_mode)} and belongs to user {found.st_uid}: find out who put "
            "it there, and remove it"
        )
    return path


def _own(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


@dataclass(frozen=True)
class States:
    """A node's states, in a folder.

    Parameters
    ----------
    folder
        Where; it is made where it is not there.
    """

    folder: Path

    @classmethod
    def beside(cls, identity: Path) -> States:
        """In the folder that belongs to a node's identity."""
        return cls(identity.with_name(f"{identity.name}.states"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other process answers a message of this node."""
        path = private_folder(self.folder) / _LOCK
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            with held(descriptor, path, "LOCK_EX"):
                yield
        finally:
            os.close(descriptor)

    def read(self, run: str) -> bytes:
        """What was kept of a run; empty at first."""
        try:
            return self._path(run).read_bytes()
        except FileNotFoundError:
            return b""

    def write(self, run: str, state: bytes) -> None:
        """Keep a run's state; when this returns, it is on the disk."""
        path = self._path(run)
        new = not path.exists()
        write_whole(path, state, mode=0o600)
        if new:
            self._forget()

    def _forget(self) -> None:
        found = sorted(self.folder.glob("*.state"), key=lambda path: path.stat().st_mtime_ns)
        for path in found[:-MOST]:
            path.unlink(missing_ok=True)

    def _path(self, run: str) -> Path:
        if not run.isalnum():
            raise ValueError(f"a run is known by letters and digits, but got {run!r}")
        return self.folder / f"{run}.state"
