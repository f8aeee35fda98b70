"""A log with one binary record a round: released totals, or who took part where that is capped.

A record is ``FPR1``, the round, the element type, the count, a 16-byte BLAKE2b of the numbers, and
the numbers. What a crash leaves of the last record is seen by its length or its digest.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.store.checkpoints import DamagedError
from fpfl.store.files import explained, sync_folder, write_all

_HEAD = struct.Struct("<4sQ4sQ16s")
_MAGIC = b"FPR1"
_TYPES = (b"<f4\0", b"<f8\0", b"<i8\0")

Record = tuple[int, NDArray[Any]]


class RoundLog:
    """A new file, open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        with explained(path, "Nothing was released; free space or mend the folder, and resume"):
            # Its owner's alone: who took part is as secret as the data.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            sync_folder(path.parent)

    def append(self, round: int, numbers: NDArray[Any]) -> None:
        """Write a round's numbers. They survive the process at once, a power cut once synced."""
        numbers = np.ascontiguousarray(numbers)
        body = numbers.tobytes()
        kind = numbers.dtype.str.encode()
        head = _HEAD.pack(_MAGIC, round, kind, numbers.size, _digest(body))
        advice = f"Round {round} is charged; its totals were not used. Free space, then resume"
        with explained(self.path, advice):
            write_all(self._file, head + body)
        self.bytes += len(head) + len(body)

    def sync(self) -> None:
        """Wait until all that was appended is on the disk."""
        with explained(self.path, "Its totals were not used. Mend the disk, then resume the run"):
            os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_rounds(path: Path) -> tuple[list[Record], bool]:
    """(round, numbers) of every whole record, and whether a torn one follows.

    Damage before the last record is an error: no crash leaves that.
    """
    content = path.read_bytes()
    records: list[Record] = []
    place = 0
    while place < len(content):
        found = _record(content, place)
        if found is None:
            later = place
            while (later := content.find(_MAGIC, later + 1)) >= 0:
                if _record(content, later) is not None:
                    raise DamagedError(
                        f"{path} is damaged at byte {place}, before its last record, and no crash "
                        "does that. Put an intact copy in its place; nothing was changed"
                    )
            return records, True
        record, place = found
        records.append(record)
    return records, False


def _record(content: bytes, place: int) -> tuple[Record, int] | None:
    """The record that begins at a place and where it ends; None where there is no whole one."""
    head = content[place : place + _HEAD.size]
    if len(head) < _HEAD.size:
        return None
    magic, round, kind, count, digest = _HEAD.unpack(head)
    if magic != _MAGIC or kind not in _TYPES:
        return None
    dtype = np.dtype(kind.rstrip(b"\0").decode())
    start = place + _HEAD.size
    body = content[start : start + count * dtype.itemsize]
    if len(body) < count * dtype.itemsize or _digest(body) != digest:
        return None
    return (round, np.frombuffer(body, dtype=dtype).copy()), start + len(body)


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
