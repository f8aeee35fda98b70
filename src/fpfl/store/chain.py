"""An append-only file of JSON lines, each with the hash of the line before it.

A line is a record:

    {"n": 7, "time": "2030-01-31T12:00:00.000000Z", "kind": "round", …, "previous": "9f86d0…"}

``n`` counts the file's lines from 0, ``time`` never runs back, and ``previous`` is the SHA-256 of
the line before, without its newline (64 zeros in the first). So whatever is changed, taken out or
put in between is seen by everyone who reads the file later. Two things are not: a change of the
last line, and a cut at a line's end, which leaves a shorter file in good order. Both change
:attr:`Chain.head`; whoever has to see them keeps a head elsewhere and compares.

Power loss or a full disk can leave a last line without its end. Nothing is ever removed: the next
writer ends that line and appends a record of kind ``"torn"``. Its ``previous`` is the hash of the
torn line, and since that one vouches for nothing, ``after`` is the hash of the record before it.
Its ``lines`` says how many lines before it are no records: one, or more where this mending was cut
short itself, or none where the torn line lacked its newline alone and so is a record after all. A
torn line takes a number like any other: ``n`` is always the line's number. What a torn line means
(something may have been charged) is for the caller to say.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from fpfl.store.files import BusyError, flock, flock_within, held
from fpfl.store.lines import (
    ENVELOPE,
    FORMAT,
    OWN_KINDS,
    ChainError,
    Clock,
    Head,
    Lines,
    Record,
    digest,
    encoded,
    follow,
    refuse,
)

__all__ = ["FORMAT", "BusyError", "Chain", "ChainError", "Record"]

_BYTES = getattr(os, "O_BINARY", 0)  # Windows would translate newlines
_WRITE = os.O_RDWR | os.O_APPEND | _BYTES
#: Seconds that opening waits for others who hold the file for a moment.
_PATIENCE = 10.0


class Chain:
    """One open file: made by :meth:`create` or :meth:`open`, closed by ``with`` or :meth:`close`.

    A file that one process writes is opened with ``lock=True``; one that several write is appended
    to inside :meth:`shared` only. Threads may use one Chain together, processes may not: after a
    fork, open the file again.

    Attributes
    ----------
    path : Path
        The file.
    records : list of dict
        What was read and appended so far. The chain itself needs only its head: whoever has no
        more use for them may clear the list.
    torn : bytes or None
        What follows the last record where the file was opened to look and ends within a line. In
        a file that is being written to it may be a line on its way: look again.
    """

    def __init__(self, path: Path, fd: int, *, write: bool) -> None:
        self.path = path
        self.records: list[Record] = []
        self.torn: bytes | None = None
        self._fd = fd
        self._write = write
        self._pid = os.getpid()
        self._head = Head()
        self._held: Literal["", "moment", "life"] = ""
        self._unsynced = False
        self._broken = ""
        self._mutex = threading.RLock()
        self._syncing = threading.Lock()
        self._clock = Clock()
        self._file = _identity(fd)

    @classmethod
    def create(cls, path: str | os.PathLike[str], /, **fields: Any) -> Self:
        """Make the file, for its owner's eyes alone, with ``fields`` in its first record.

        The record and the file's entry in its folder are on disk when this returns. Raises
        ``FileExistsError`` where there is such a file: what was written is never begun anew.
        """
        refuse(fields, (*ENVELOPE, "format"))
        target = Path(path)
        chain = cls(target, os.open(target, _WRITE | os.O_CREAT | os.O_EXCL, 0o600), write=True)
        try:
            chain._put("open", {"format": FORMAT, **fields}, Head())
            os.fsync(chain._fd)
            _sync_folder(target.parent)
        except BaseException:
            os.close(chain._fd)
            target.unlink(missing_ok=True)  # this call made it, and nothing was promised yet
            raise
        chain._unsynced = False
        return chain

    @classmethod
    def open(cls, path: str | os.PathLike[str], write: bool = True, *, lock: bool = False) -> Self:
        """Read the whole file and verify it; any damage is a :class:`ChainError`.

        Parameters
        ----------
        path : path
            A file made by :meth:`create`.
        write : bool, default True
            Open it for appending: a torn last line is mended as the module says, and it is an error
            if the clock shows more than a minute before the last record. With False nothing is
            written.
        lock : bool, default False
            Hold the file until it is closed; :class:`BusyError` where another does.
        """
        target = Path(path)
        flags = _WRITE if write else os.O_RDONLY | _BYTES
        chain = cls(target, os.open(target, flags), write=write)
        try:
            if lock:
                chain.lock()
            if write:
                with chain._holding(_PATIENCE):
                    chain._catch_up()
            else:  # without a lock: the file may be held for as long as a run takes
                chain._catch_up()
        except BaseException:
            chain.close()
            raise
        return chain

    @property
    def descriptor(self) -> int:
        """The open file, for whoever syncs it elsewhere."""
        return self._fd

    @property
    def head(self) -> tuple[int, str]:
        """(n, hash) of the last record. Kept elsewhere, it shows a cut or changed tail later."""
        return self._head.n, self._head.hash

    def append(self, kind: str, /, **fields: Any) -> Record:
        """Write one record in one piece, and return it as it will be read.

        It survives the end of the process at once, and the loss of power after :meth:`sync`.
        Fields are what JSON knows (no NaN) and have names other than the envelope's. After a write
        that failed or was cut short nobody knows what is on disk: then the Chain refuses to go on,
        and the file has to be opened again.
        """
        refuse(fields, ENVELOPE)
        if kind in OWN_KINDS:
            raise ValueError(f"records of kind {kind!r} are the chain's own: choose another kind.")
        with self._mutex:
            self._usable(write=True)
            if (size := self._size()) != self._head.offset:
                raise ChainError(
                    f"{self.path} has {size} bytes, but had {self._head.offset} when it was read "
                    "last: somebody else wrote to it. Append to a file that several processes "
                    "share inside `with chain.shared():`, and open any other with lock=True."
                )
            return self._put(kind, fields, self._head)

    def sync(self) -> None:
        """Return when all that was appended is on disk. For any thread, at any time."""
        with self._syncing:
            if self._fd < 0 or not self._unsynced:
                return
            self._usable(write=True)
            self._unsynced = False  # first: what is appended from now on needs another sync
            try:
                getattr(os, "fdatasync", os.fsync)(self._fd)
            except OSError as error:
                # The kernel may have dropped what it could not write: a second try proves nothing.
                self._unsynced = True
                raise self._break(
                    f"could not be brought to disk: {error.strerror}", error
                ) from error

    def close(self) -> None:
        """Sync, let go of the lock and close. Closing twice is fine."""
        try:
            if not self._broken:  # that was said when it happened
                self.sync()
        finally:
            with self._syncing:
                if self._fd >= 0:
                    os.close(self._fd)
                self._fd = -1

    def lock(self) -> None:
        """Hold the file until it is closed, or raise :class:`BusyError` at once."""
        with self._mutex:
            self._usable()
            if self._held == "moment":
                raise ValueError(f"{self.path} is held for a moment only: lock it before.")
            flock(self._fd, self.path, "LOCK_EX", "LOCK_NB")
            self._held = "life"

    def hold(self, patience: float) -> list[Record]:
        """Hold a file that was opened to look, to write to it later; what was appended since.

        What was read is not read again. Nothing is written before :meth:`mend`: whoever finds
        something wrong leaves the file as it was found.
        """
        with self._mutex:
            fd = os.open(self.path, _WRITE)
            if _identity(fd) != self._file:
                os.close(fd)
                raise ChainError(f"{self.path} was replaced while it was looked at: open it again.")
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            flock_within(fd, self.path, "LOCK_EX", patience)
            self._held = "life"
            self._clock.check(self.path, self._head.time)
            return self._catch_up()

    def mend(self) -> list[Record]:
        """Begin to write to a file that is held: first a torn last line is ended."""
        with self._mutex:
            self._usable()
            self._write = True
            return self._catch_up()

    @contextmanager
    def shared(self) -> Iterator[list[Record]]:
        """Hold the file for a moment: read what others appended, then append to it.

        Yields the records that are new since the file was read last, verified. The work is
        proportional to them, not to the file. Raises :class:`ChainError` where the file became
        shorter. For a file opened to look, the lock is one that others who look may share.
        """
        with self._mutex:
            self._usable(write=self._write)
            with self._holding():
                yield self._catch_up()

    def changed(self) -> bool:
        """Whether the file's size is another than what was read: one ``fstat``, no lock."""
        with self._mutex:
            self._usable()
            return self._size() != self._head.offset

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _catch_up(self) -> list[Record]:
        """Take in what follows the head, and mend a torn tail where this may write."""
        size, before = self._size(), self._head
        if size < before.offset:
            raise ChainError(
                f"{self.path} has {size} bytes, but had {before.offset} when it was read last: it "
                "was cut. Restore it from a backup: what is missing was written and counts."
            )
        if size == before.offset and before.n >= 0:
            return []
        data = b""
        while len(data) < size - before.offset:  # one read gives 2 GiB at most
            at = before.offset + len(data)
            os.lseek(self._fd, at, os.SEEK_SET)
            part = os.read(self._fd, size - at)
            if not part:  # cut this very moment
                break
            data += part
        found = follow(self.path, data, before)
        if found.head.n < 0:
            raise ChainError(
                f"{self.path}, line 1: there is no complete first record. If its making was cut "
                "short and it was never in use, remove it and create it again; otherwise restore "
                "it from a backup."
            )
        if self._write and before.n < 0:
            self._clock.check(self.path, found.head.time)
        self._head = found.head
        self.records += found.records
        self.torn = found.torn
        if self._write and self.torn is not None:
            known = len(self.records)
            self._mend(found, size)
            return found.records + self.records[known:]
        return found.records

    def _mend(self, found: Lines, size: int) -> None:
        """End a torn line and say so in a record, in one write."""
        whole, fields, after = found.mending(size)
        self.records += whole
        self._put("torn", fields, after, end=b"\n" if found.tail else b"")
        self.torn = None

    def _put(self, kind: str, fields: Record, after: Head, *, end: bytes = b"") -> Record:
        number, now = after.n + 1, self._clock.now(after.time)
        line = encoded({"n": number, "time": now, "kind": kind, **fields, "previous": after.hash})
        record: Record = json.loads(line)
        piece = end + line + b"\n"
        try:
            written = os.write(self._fd, piece)
        except OSError as error:
            raise self._break(f"could not be written to: {error.strerror}", error) from error
        if written != len(piece):
            raise self._break(
                f"took {written} of {len(piece)} bytes, so that its last line is torn (is the disk "
                "full?)"
            )
        # An interrupt after the first of these leaves a head that does not fit the file, and the
        # record is read again; the other way round it would be missed.
        self.records.append(record)
        self._head = Head(number, digest(line), now, after.offset + written)
        self._unsynced = True
        return record

    def _break(self, why: str, error: OSError | None = None) -> OSError:
        self._broken = f"{why}. What is on disk is unknown: see to the disk, then open it again"
        code = errno.ENOSPC if error is None or error.errno is None else error.errno
        return OSError(code, f"the file {self._broken}", str(self.path))

    def _size(self) -> int:
        found = os.fstat(self._fd)
        if found.st_nlink == 0:
            raise ChainError(
                f"{self.path} was removed or replaced while it was open: what is written to it now "
                "would be lost. Put it back, then open it again."
            )
        return found.st_size

    def _usable(self, *, write: bool = False) -> None:
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed: open it again.")
        if os.getpid() != self._pid:
            raise ChainError(
                f"{self.path} was opened by process {self._pid} and this is process {os.getpid()}: "
                "locks would not keep the two apart. Open the file in every process."
            )
        if write and not self._write:
            raise ValueError(f"{self.path} was opened to look: open it with write=True to append.")
        if write and self._broken:
            raise OSError(errno.EIO, f"the file {self._broken}", str(self.path))

    @contextmanager
    def _holding(self, patience: float | None = None) -> Iterator[None]:
        if self._held:
            yield
            return
        with held(self._fd, self.path, "LOCK_EX" if self._write else "LOCK_SH", patience):
            self._held = "moment"
            try:
                yield
            finally:
                self._held = ""


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):  # where there is none, a folder cannot be synced either
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
