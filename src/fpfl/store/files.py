"""Files that are whole or not there, and errors that say what became of the data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StorageError(OSError):
    """Something could not be written; the message says what is safe and what to do."""


@contextmanager
def explained(path: Path, advice: str) -> Iterator[None]:
    """Turn the system's error about a file into one that says what to do about it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{path} cannot be written: {reason}. {advice}") from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write every byte. A write that takes less (a full disk) is tried again, and then fails."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that it is there in full or not at all, whatever happens meanwhile."""
    part = path.with_name(f".{path.name}.part")
    before = (
        "The file as it was before is still there"
        if os.path.exists(path)
        else "Nothing was written"
    )
    with explained(path, f"{before}; free space or mend the folder"):
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a new file is lost with them otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
