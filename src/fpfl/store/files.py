"""Files that are whole or not there, locks on them, and waiting for the disk.

Locks are the operating system's ``flock`` locks: one holder at a time, whichever process it is in.
They belong to an open file, end with the process whatever ends it, and bind only those who ask for
them.

A small process syncs while this one computes. A thread would do, were it not for Python's lock:
each time it wakes up, whoever computes waits for it, and on small rounds that costs more than the
disk does.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Write a file so that it is there in full or not at all, whatever happens meanwhile.

    It is made under a name that anybody can guess, so it is made anew: a link that somebody else
    put there is removed and not followed.
    """
    part = path.with_name(f".{path.name}.part")
    before = (
        "The file as it was before is still there"
        if os.path.exists(path)
        else "Nothing was written"
    )
    with explained(path, f"{before}; free space or mend the folder"):
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder so that it is there with all its files or not at all.

    Waiting for the disk takes longest, and it is waited for all files at once. What a crash leaves
    behind is called ``.NAME.part``.
    """
    part = path.with_name(f".{path.name}.part")
    with explained(path, "Nothing was written; free space or mend the folder"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            for name, content in files.items():
                (part / name).write_bytes(content)
            with ThreadPoolExecutor(len(files) + 1) as pool:
                list(pool.map(sync_folder, [part, *(part / name for name in files)]))
            os.replace(part, path)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a new file is lost with them otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def flock_within(fd: int, path: Path, flag: str, patience: float) -> None:
    """Take a lock, waiting so many seconds for others before :class:`BusyError`."""
    deadline = time.monotonic() + patience
    while True:
        try:
            flock(fd, path, flag, "LOCK_NB")
            return
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)  # others hold it for less than that


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
        flock_within(fd, path, flag, patience)
    try:
        yield
    finally:
        flock(fd, path, "LOCK_UN")


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
