"""What a node does with a request, whichever engine brought it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpfl.federation.secagg import Identity, Refused

if TYPE_CHECKING:
    from fpfl.federation.contribution import Contribution


def once(path: Path, identity: Identity, request: Mapping[str, Any]) -> None:
    """Refuse to mask a second vector in a session, whatever became of the node's state.

    A process that dies before its state is kept would mask another vector with the same masks, and
    the difference of two of them has next to no noise.

    Parameters
    ----------
    path
        The node's identity file; FILE.sessions is written beside it.
    identity
        What is in it.
    request
        What came.
    """
    session = request.get("session", b"")
    if not isinstance(session, bytes):
        raise Refused(identity.name, "the session is no bytes.")
    with path.with_name(f"{path.name}.sessions").open("a+b") as file:
        file.seek(0)
        if session.hex().encode() in file.read().split():
            raise Refused(identity.name, "a vector was masked in this session before.")
        file.write(session.hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def made_contribution(agreement: str, load: str, config: Mapping[str, Any]) -> Contribution:
    """What computes a node's vector; torch is imported here.

    Parameters
    ----------
    agreement, load
        ``"module:function"`` of the project.
    config
        What the node was told when it was started; the loader gets all of it.
    """
    from fpfl.federation.contribution import Contribution, SystemChance, TestChance

    agreed = resolved(agreement)()
    config = dict(config)
    chance: SystemChance | TestChance = SystemChance()
    if agreed.test_seed is not None:
        numbers = [config.get(name) for name in ("partition-id", "first-user")]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(
                "with a test_seed a node must be told partition-id=... and first-user=..., whole "
                "numbers"
            )
        node, first = (int(number) for number in numbers if number is not None)
        chance = TestChance(agreed.test_seed, node, first)
    return Contribution(agreed, lambda: resolved(load)(config), chance)


def resolved(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    module, _, function = name.partition(":")
    found = getattr(import_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"{name!r} names no function; expected 'module:function'")
    return found  # type: ignore[no-any-return]
