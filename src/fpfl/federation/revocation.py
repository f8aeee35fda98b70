"""The list of the revoked, as nodes and server read it: a file beside who they are.

A node reads ``revoked.crl`` beside its identity, the server beside ``authority.key``. Where there
was never a list, nobody was revoked. Where there was one, a list that is gone, older than the last
one that was read, not the authority's, or past its end is refused, and so is everybody: whoever can
keep a list from a node could otherwise bring a stolen key back. FILE.numbers remembers the newest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from fpfl.federation.secagg import Invalid, Trust
from fpfl.federation.secagg.certificates import now, read_list
from fpfl.federation.secagg.identity import AHEAD
from fpfl.store.files import held

REVOKED = "revoked.crl"

log = logging.getLogger("fpfl.federation")


@dataclass(frozen=True)
class Revocations:
    """What a list says.

    Parameters
    ----------
    number
        Of the list: a newer one has a higher one.
    signed, ends
        When it was signed; until when it can be relied on.
    serials
        Which certificates count no longer, and since when.
    """

    number: int
    signed: datetime
    ends: datetime
    serials: dict[int, datetime]

    @classmethod
    def read(cls, data: bytes, authority: Trust) -> Revocations:
        """A list; :class:`Invalid` unless the authority signed it."""
        return cls(*read_list(data, authority.key))


@dataclass(frozen=True)
class RevocationFile:
    """Calling it gives the serial numbers that are revoked: what `Trust` asks for.

    Parameters
    ----------
    path
        Of the list; it is read again when it has changed.
    authority
        Whose list it must be.
    clock
        Gives the time.
    """

    path: Path
    authority: Trust
    clock: Callable[[], datetime] = now

    def __call__(self) -> Container[int]:
        """Which certificates count no longer."""
        found = self.read()
        return frozenset() if found is None else found.serials

    def read(self) -> Revocations | None:
        """The list, where there is one; :class:`Invalid` where it cannot be relied on."""
        try:
            state = self.path.stat()
        except FileNotFoundError:
            if newest(self.path):
                raise Invalid(
                    f"the list {self.path.name} is gone, and there was one: get it from the "
                    "authority again (fpfl federation revoke signs a new one)."
                ) from None
            return None
        mark = (state.st_mtime_ns, state.st_size, state.st_ino)
        found = _read(self.path, mark, self.authority.certificate)
        # Asked each time: a file that is put back can look as it did when it was read before.
        last = newest(self.path)
        if found.number < last:
            raise Invalid(
                f"the list {self.path.name} has the number {found.number}, and number {last} was "
                "read before: an older list would bring back who was revoked since."
            )
        if self.clock() > found.ends:
            raise Invalid(
                f"the list {self.path.name} ended on {found.ends:%Y-%m-%d}, so that nobody knows "
                "who was revoked since: get a new one from the authority (fpfl federation revoke)."
            )
        return found

    def soon(self) -> str:
        """A line for the log where the list ends within a month; empty otherwise."""
        found = self.read()
        left = None if found is None else found.ends - self.clock()
        if found is None or left is None or left > AHEAD:
            return ""
        return (
            f"the list {self.path} ends on {found.ends:%Y-%m-%d}, in {left.days} days: get a new "
            "one from the authority (fpfl federation revoke)"
        )


@lru_cache(maxsize=64)
def _read(path: Path, mark: tuple[int, int, int], certificate: bytes) -> Revocations:
    """A list of which ``mark`` tells the versions apart."""
    try:
        found = Revocations.read(path.read_bytes(), Trust(certificate))
    except Invalid as error:
        raise Invalid(f"{path.name}: {error}") from None
    if found.number > newest(path):
        remember(path, found.number)
    return found


def newest(path: Path) -> int:
    """The highest number of a list that was read from here; 0 where there was none."""
    try:
        lines = _numbers(path).read_bytes().split()
    except FileNotFoundError:
        return 0
    return max((int(line) for line in lines if line.isdigit()), default=0)


def remember(path: Path, number: int) -> None:
    """Write down that a list was read. Lines are added only: a torn one is a lower number."""
    numbers = _numbers(path)
    try:
        with numbers.open("ab") as file, held(file.fileno(), numbers, "LOCK_EX", patience=10.0):
            file.write(b"%d\n" % number)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): an older list would not be noticed here", numbers, error
        )


def _numbers(path: Path) -> Path:
    return path.with_name(f"{path.name}.numbers")
