"""What one attempt at one sum is, the form of its messages, and how it can fail.

A message is a flat dictionary of numbers, strings, bytes and lists of these. Each one says which
step and which session it belongs to. The session's id is a hash of all its settings; it is in
every signature, every derived key and every sealed message, so that nothing from another round or
attempt holds in this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fpfl.federation.secagg.primitives import Invalid, digest, join, split

Value = int | float | str | bytes | list[int] | list[str] | list[bytes]
Message = dict[str, Value]
"""A request or an answer."""
Request = Mapping[str, Value]
"""One that was received."""

STEPS = ("advertise", "share", "mask", "consent", "unmask")

_SESSION = b"fpfl secagg session 1"
_NUMBERS = ("round", "attempt", "size", "threshold", "least", "degree")
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
    """A session ends without a sum.

    Parameters
    ----------
    reason
        What was missing.
    unmask_sent
        Whether any request for shares had left. If not, nothing about any vector is known to
        anybody: masked vectors alone are uniform.
    shares_received
        From how many nodes an answer with shares came, right or wrong: at most so many shares of
        any one secret came back.
    culprit
        The node that provably broke the protocol, where that is the reason.
    """

    def __init__(
        self,
        reason: str,
        unmask_sent: bool,
        shares_received: int,
        culprit: str | None = None,
    ):
        super().__init__(reason, unmask_sent, shares_received, culprit)
        self.reason = reason
        self.unmask_sent = unmask_sent
        self.shares_received = shares_received
        self.culprit = culprit

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Session:
    """One attempt at one sum.

    Parameters
    ----------
    run : bytes
        Whatever tells one training from all others.
    round, attempt : int
        Which round of it, and which attempt at the round.
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
    round: int
    attempt: int
    size: int
    threshold: int
    least: int
    degree: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.run, bytes):
            raise ValueError(
                f"run must be bytes, but got {self.run!r}: give an id of the training."
            )
        limits = {"round": 0, "attempt": 0, "size": 1, "threshold": 1, "least": 1}
        for name, fewest in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not fewest <= value < _LARGEST:
                raise ValueError(f"{name} must be a whole number from {fewest}, but got {value!r}.")
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
        return digest(_SESSION, self.to_bytes())

    def _numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) or 0 for name in _NUMBERS}

    def to_bytes(self) -> bytes:
        """For storing."""
        return join(self.run, *(value.to_bytes(8, "big") for value in self._numbers().values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Session:
        """Undo :meth:`to_bytes`."""
        run, *numbers = split(data, 1 + len(_NUMBERS))
        values = (int.from_bytes(number, "big") for number in numbers)
        return cls._of(run, dict(zip(_NUMBERS, values, strict=True)))

    @classmethod
    def _of(cls, run: bytes, numbers: Mapping[str, Any]) -> Session:
        try:
            return cls(run, **{**numbers, "degree": numbers["degree"] or None})
        except ValueError as error:
            raise Invalid(str(error)) from None

    def to_message(self) -> Message:
        """The first request: all settings."""
        return {**self.header("advertise"), "run": self.run, **self._numbers()}

    @classmethod
    def from_message(cls, message: Request) -> Session:
        """The session that a first request is for.

        A node should look at its settings before it answers: whether `least`, `threshold` and
        `degree` are what was agreed, and whether round and attempt are new.
        """
        numbers = {name: _field(message, name, int) for name in _NUMBERS}
        session = cls._of(_field(message, "run", bytes), numbers)
        session.expect(message, "advertise")
        return session

    def header(self, step: str) -> Message:
        """What every message begins with."""
        return {"step": step, "session": self.id}

    def expect(self, message: Request, step: str) -> None:
        """Check that a message is of this session and of ``step``; else :class:`Invalid`."""
        if not isinstance(message, Mapping) or not all(type(key) is str for key in message):
            raise Invalid(f"a message must be a dictionary, but got {type(message).__name__}.")
        if _field(message, "session", bytes) != self.id:
            raise Invalid("the message is of another session: another round, attempt or setting.")
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


def fingerprint(message: Request) -> bytes:
    """A hash of a whole message: equal for equal messages alone."""
    found = hashlib.sha256()
    for key in sorted(message):
        value = message[key]
        many = value if isinstance(value, list) else [value]
        parts = [one if isinstance(one, bytes) else repr(one).encode() for one in many]
        # The name, all types and lengths, then all bytes in a row: no two lists agree in both.
        kinds = [type(one).__name__ for one in many]
        shape = repr((key, type(value).__name__, kinds, [len(part) for part in parts]))
        found.update(join(shape.encode()))
        for part in parts if len(parts) < 3 else [b"".join(parts)]:
            found.update(part)  # a long vector as it is, many short strings at once
    return found.digest()
