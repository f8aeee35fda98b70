"""What a dealing and one attempt at one sum are, the form of their messages, and how they can fail.

A *dealing* hands out the keys and shares of many sessions ahead; a *session* is one attempt at one
sum. A message is a flat dictionary of numbers, strings, bytes and lists of these. Each one says
which step and which dealing or session it belongs to. A dealing's id is a hash of all its settings,
a session's of its dealing's and its place there; they are in every signature, every derived key and
every sealed message, so that nothing from another dealing or attempt holds in this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fpfl.federation.encoding import Invalid, decode, encode, hashed

Value = int | float | str | bytes | list[int] | list[str] | list[bytes]
Message = dict[str, Value]
"""A request or an answer."""
Request = Mapping[str, Value]
"""One that was received."""

DEALING_STEPS = ("advertise", "share")
"""Once for many sessions."""
SESSION_STEPS = ("mask", "unmask")
"""For every session."""
STEPS = (*DEALING_STEPS, *SESSION_STEPS)

MOST_SESSIONS = 4096
"""So many can be dealt at once: more would keep a node busy to no end."""

_DEALING = b"fpfl secagg dealing 2"
_SESSION = b"fpfl secagg session 2"
_NUMBERS = ("number", "sessions", "size", "threshold", "least", "degree")
_LARGEST = 2**62


class Refused(Exception):  # noqa: N818 - it is an answer of the protocol
    """A node refuses a request, or the server a node's answer.

    Parameters
    ----------
    name
        The node: the one that refuses, or the one whose answer is refused.
    why
        What was wrong.
    """

    def __init__(self, name: str, why: str):
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class Abandoned(Exception):  # noqa: N818 - as above
    """A dealing or a session ends without a sum.

    Parameters
    ----------
    reason
        What was missing.
    unmask_sent
        Whether any request for shares had left. If not, nothing about any vector is known to
        anybody: masked vectors alone are uniform.
    shares_received
        From how many nodes an answer with shares came, right or wrong.
    culprit
        The node that provably broke the protocol, where that is the reason.
    suspect
        The node whose shares most others said they could not read: it lies, or they do.
    """

    def __init__(
        self,
        reason: str,
        unmask_sent: bool,
        shares_received: int,
        culprit: str | None = None,
        suspect: str | None = None,
    ):
        super().__init__(reason, unmask_sent, shares_received, culprit, suspect)
        self.reason = reason
        self.unmask_sent = unmask_sent
        self.shares_received = shares_received
        self.culprit = culprit
        self.suspect = suspect

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Dealing:
    """The settings of many sessions whose keys and shares are dealt together.

    Parameters
    ----------
    run : bytes
        Whatever tells one training from all others.
    number : int
        Which dealing of it: never the same again.
    sessions : int
        For how many sessions.
    size : int
        Length of the vectors.
    threshold : int
        t: so many of a node's neighbours and itself can recover its secrets together.
    least : int
        The fewest survivors whose sum may be released.
    degree : int, optional
        Neighbours of each node, an even number; None where all nodes are each other's neighbours.
        See :func:`~fpfl.federation.secagg.graph.choose_graph`.
    """

    run: bytes
    number: int
    sessions: int
    size: int
    threshold: int
    least: int
    degree: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.run, bytes):
            raise ValueError(
                f"run must be bytes, but got {self.run!r}: give an id of the training."
            )
        limits = {"number": 0, "sessions": 1, "size": 1, "threshold": 1, "least": 1}
        for name, fewest in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not fewest <= value < _LARGEST:
                raise ValueError(f"{name} must be a whole number from {fewest}, but got {value!r}.")
        if self.sessions > MOST_SESSIONS:
            raise ValueError(
                f"sessions must be at most {MOST_SESSIONS}, but got {self.sessions}: deal again."
            )
        degree = self.degree
        if degree is not None and (type(degree) is not int or degree < 2 or degree % 2):
            raise ValueError(
                f"degree must be an even number from 2, or None for all, but got {degree!r}."
            )
        if degree is not None and self.threshold > degree:
            raise ValueError(
                f"threshold must be at most degree = {degree}, but got {self.threshold}: a node "
                "that dropped out is recovered by its neighbours alone."
            )

    @cached_property
    def id(self) -> bytes:
        """A hash of everything above."""
        return hashed(_DEALING, [self.run, self._numbers()])

    def session(self, place: int) -> Session:
        """One of its sessions, counted from 0."""
        return Session(self, place)

    def _numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) or 0 for name in _NUMBERS}

    def to_bytes(self) -> bytes:
        """For storing."""
        return encode([self.run, self._numbers()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Dealing:
        """Undo :meth:`to_bytes`."""
        try:
            run, numbers = decode(data)
            return cls._of(run, numbers)
        except (TypeError, KeyError, ValueError):
            raise Invalid("these bytes are no dealing.") from None

    @classmethod
    def _of(cls, run: bytes, numbers: Mapping[str, Any]) -> Dealing:
        try:
            return cls(run, **{**numbers, "degree": numbers["degree"] or None})
        except ValueError as error:
            raise Invalid(str(error)) from None

    def to_message(self) -> Message:
        """The first request: all settings."""
        return {**self.header("advertise"), "run": self.run, **self._numbers()}

    @classmethod
    def from_message(cls, message: Request) -> Dealing:
        """The dealing that a first request is for.

        A node should look at its settings before it masks: whether `least`, `threshold` and
        `degree` are what was agreed.
        """
        numbers = {name: _field(message, name, int) for name in _NUMBERS}
        dealing = cls._of(_field(message, "run", bytes), numbers)
        dealing.expect(message, "advertise")
        return dealing

    def header(self, step: str) -> Message:
        """What every message of the dealing begins with."""
        return {"step": step, "session": self.id}

    def expect(self, message: Request, step: str) -> None:
        """Check that a message is of this dealing and of ``step``; else :class:`Invalid`."""
        _expect(self.id, message, step)

    def place(self, message: Request) -> int:
        """The place of the session that a message is of; :class:`Invalid` where it is of none."""
        place = _field(message, "place", int)
        if not 0 <= place < self.sessions:
            raise Invalid(f"there are {self.sessions} sessions, and none at {place}.")
        return int(place)


@dataclass(frozen=True)
class Session:
    """One attempt at one sum.

    Parameters
    ----------
    dealing : Dealing
        What it was dealt in, with all settings.
    place : int
        Its place there, from 0.
    """

    dealing: Dealing
    place: int

    def __post_init__(self) -> None:
        if type(self.place) is not int or not 0 <= self.place < self.dealing.sessions:
            raise ValueError(
                f"place must be a whole number below {self.dealing.sessions}, but got "
                f"{self.place!r}."
            )

    @cached_property
    def id(self) -> bytes:
        """A hash of everything above."""
        return hashed(_SESSION, [self.dealing.id, self.place])

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return self.dealing.size

    @property
    def threshold(self) -> int:
        """t, see `Dealing`."""
        return self.dealing.threshold

    @property
    def least(self) -> int:
        """The fewest survivors, see `Dealing`."""
        return self.dealing.least

    @property
    def degree(self) -> int | None:
        """Neighbours of each node, see `Dealing`."""
        return self.dealing.degree

    def header(self, step: str) -> Message:
        """What every message of the session begins with."""
        return {"step": step, "session": self.id, "place": self.place}

    def expect(self, message: Request, step: str) -> None:
        """Check that a message is of this session and of ``step``; else :class:`Invalid`."""
        _expect(self.id, message, step)


def _expect(id: bytes, message: Request, step: str) -> None:
    if not isinstance(message, Mapping) or not all(type(key) is str for key in message):
        raise Invalid(f"a message must be a dictionary, but got {type(message).__name__}.")
    if _field(message, "session", bytes) != id:
        raise Invalid("the message is of another session: another run, attempt or setting.")
    if (given := _field(message, "step", str)) != step:
        raise Invalid(f"the message must be of the step {step!r}, but is of {given[:20]!r}.")


def _field(message: Request, name: str, kind: type) -> Any:
    value = message.get(name)
    if type(value) is not kind:
        raise Invalid(f"{name!r} must be {kind.__name__}, but got {type(value).__name__}.")
    return value


def read_bytes(message: Request, name: str, length: int) -> bytes:
    """A field of so many bytes."""
    value: bytes = _field(message, name, bytes)
    if len(value) != length:
        raise Invalid(f"{name!r} must have {length} bytes, but got {len(value)}.")
    return value


def read_many(message: Request, name: str, lengths: set[int], count: int) -> list[bytes]:
    """A field of ``count`` byte strings, each of one of these lengths."""
    values: list[bytes] = _field(message, name, list)
    if len(values) != count:
        raise Invalid(f"{name!r} must have {count} entries, but got {len(values)}.")
    for value in values:
        if type(value) is not bytes or len(value) not in lengths:
            raise Invalid(f"{name!r} must hold byte strings of {sorted(lengths)} bytes each.")
    return values


def read_names(message: Request, name: str) -> list[str]:
    """A field of different strings."""
    values: list[str] = _field(message, name, list)
    if not all(type(value) is str for value in values) or len(set(values)) != len(values):
        raise Invalid(f"{name!r} must hold different names.")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise Invalid(f"{name!r} must hold names that can be encoded.") from None
    return values
