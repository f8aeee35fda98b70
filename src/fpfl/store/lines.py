"""Lines of a chain: what makes a line the right one after those before it.

Nothing here touches a file: bytes in, records and errors out.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, TypeGuard

#: The format that is written, and the newest that is read.
FORMAT = 1

Record = dict[str, Any]

#: The names of every record's own fields, and the kinds that only the chain itself writes.
ENVELOPE = ("n", "time", "kind", "previous")
OWN_KINDS = ("open", "torn")

_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
#: Where the next record begins inside a line, the newline before it has become something else.
_BEGINS = re.compile(rb'\{"n":(\d+),"time":"\d{4}-\d\d-\d\dT[\d:.]+Z","kind":"')
#: Clocks of several machines differ by seconds, and are set right by as much.
_CLOCK_SLACK = timedelta(seconds=60)


class ChainError(ValueError):
    """The file is not what was once written to it. Nothing was changed on disk."""


class Head(NamedTuple):
    """The last line so far: its number, hash and time, and where the file goes on after it."""

    n: int = -1
    hash: str = "0" * 64
    time: str = ""
    offset: int = 0

    def past(self, lost: list[bytes]) -> Head:
        """The head after lines that are no records."""
        if not lost:
            return self
        joined = b"\n".join(lost)
        return Head(self.n + len(lost), digest(joined), self.time, self.offset + len(joined) + 1)


class Lines(NamedTuple):
    """What :func:`follow` finds."""

    records: list[Record]
    head: Head
    #: After the last record: whole lines that are no records, and a last one without its newline.
    lost: list[bytes]
    tail: bytes

    @property
    def torn(self) -> bytes | None:
        """All that follows the last record, or None."""
        return b"\n".join([*self.lost, self.tail]) or None

    def mending(self, size: int) -> tuple[list[Record], Record, Head]:
        """How to go on at the end of the file, which has ``size`` bytes.

        The last line, where it lacks its newline alone; the fields of the record of kind "torn";
        and the head that this record follows.
        """
        whole = parsed(self.tail)
        if whole is not None and not wrong_with(whole, self.head, self.lost):
            head = Head(whole["n"], digest(self.tail), whole["time"], size)
            return [whole], {"lines": 0, "after": head.hash}, head
        lost = [*self.lost, self.tail] if self.tail else self.lost
        fields = {"lines": len(lost), "after": self.head.hash}
        return [], fields, self.head.past(lost)._replace(offset=size)


class Clock:
    """The time at which the file was opened, and what has passed since: never set back."""

    def __init__(self) -> None:
        self._opened = datetime.now(UTC).replace(tzinfo=None)
        self._started = monotonic_ns()

    def now(self, last: str) -> str:
        """The time as a record has it, and not before ``last``."""
        elapsed = timedelta(microseconds=(monotonic_ns() - self._started) // 1000)
        return max(stamp(self._opened + elapsed), last)

    def check(self, path: Path, last: str) -> None:
        """Raise where the last record of a file is from the future."""
        if self._opened < datetime.fromisoformat(last).replace(tzinfo=None) - _CLOCK_SLACK:
            raise ChainError(
                f"{path}: the clock shows {stamp(self._opened)}, but the last record was written "
                f"at {last}: the clock was set back. Correct it, then open the file again."
            )


def refuse(fields: Record, reserved: tuple[str, ...]) -> None:
    """Raise where fields have names that the chain needs itself."""
    taken = [name for name in fields if name in reserved]
    if taken:
        raise ValueError(
            f"a record's fields must not be named {', '.join(map(repr, taken))}: these names are "
            "the chain's own. Choose others."
        )


def digest(line: bytes) -> str:
    """SHA-256 of a line without its newline, in hexadecimal digits."""
    return sha256(line).hexdigest()


def stamp(moment: datetime) -> str:
    """A time in UTC with microseconds: such strings sort like the times."""
    return moment.isoformat(timespec="microseconds") + "Z"


def encoded(record: Record) -> bytes:
    """The line of a record, without its newline; ASCII only."""
    try:
        return _ENCODE(record).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a record of kind {record['kind']!r} must hold what JSON knows, but got something "
            f"else ({error}): give finite numbers, strings, lists and dicts."
        ) from error


def parsed(line: bytes) -> Record | None:
    """The JSON object that a line holds, or None."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def follow(path: Path, data: bytes, head: Head) -> Lines:
    """Verify the lines that follow ``head``.

    A line that is no record is accepted where the next record is of kind "torn" and has its hash;
    and at the end, where it may be a torn line whose mending was cut short, if it is not a JSON
    object. Several in a row count as one with newlines inside. Anything else is a
    :class:`ChainError` that names the file, the line and what is wrong with it.
    """
    *lines, tail = data.split(b"\n")
    records: list[Record] = []
    lost: list[bytes] = []
    why, looked_whole = "", False
    for line in lines:
        record = parsed(line)
        wrong = wrong_with(record, head, lost)
        if record is not None and not wrong:
            end = head.past(lost).offset + len(line) + 1
            head = Head(record["n"], digest(line), record["time"], end)
            records.append(record)
            lost, why, looked_whole = [], "", False
            continue
        why = why or f"{path}, line {head.n + 2}: {wrong}"
        if looked_whole:
            raise damaged(why)
        looked_whole = record is not None
        lost.append(line)
    if looked_whole:
        raise damaged(why)
    for number, line in enumerate([*lost, tail], start=head.n + 1):
        if any(int(begun[1]) == number + 1 for begun in _BEGINS.finditer(line)):
            raise damaged(f"{path}, line {number + 1}: it holds two records, no end between them")
    return Lines(records, head, lost, tail)


def wrong_with(record: Record | None, last: Head, lost: list[bytes]) -> str:
    """What keeps ``record`` from following ``last`` and the ``lost`` lines; "" if nothing."""
    if record is None:
        return "it is not a JSON object"
    head = last.past(lost)
    kind, time, number = record.get("kind"), record.get("time"), record.get("n")
    if head.n < 0:
        form = record.get("format")
        if kind != "open" or type(form) is not int or form < 1:
            return "it is not the first record (kind 'open', with a format) of a file of fpfl's"
        if form > FORMAT:
            return (
                f"the file was written by a newer fpfl (format {form}; this one knows {FORMAT}): "
                "upgrade fpfl"
            )
    if type(number) is not int or number != head.n + 1:
        return f"it has number {number!r}, but {head.n + 1} comes next"
    if record.get("previous") != head.hash:
        return "its hash of the line before does not match that line"
    if not _is_time(time):
        return f"its time {time!r} does not look like {stamp(datetime(1970, 1, 1))}"
    if time < head.time:
        return f"its time {time} is before that of the record before it, {head.time}"
    if not isinstance(kind, str) or (kind == "open" and number > 0):
        return f"its kind is {kind!r}"
    if lost and kind != "torn":
        return "it follows a line that is no record, and does not say so (kind 'torn')"
    if kind == "torn" and (record.get("lines"), record.get("after")) != (len(lost), last.hash):
        return "what it says about the lines before it does not match those lines"
    return ""


def damaged(why: str) -> ChainError:
    """The error for a file that is not in order."""
    if "newer fpfl" in why:
        return ChainError(f"{why}.")
    return ChainError(
        f"{why}. The file was edited or damaged; it was left as it is. Restore it from a backup, "
        "and do not mend it by hand."
    )


def _is_time(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True
