"""The ``ClientApp``: one message in, one answer out. Flower starts a process for every message.

What a node is told when it is started (``flower-supernode --node-config``):

identity        the file that the authority made for this node; FILE.sessions is written beside it,
                and a list of the revoked is read there, revoked.crl
anything else   for the project's own loader, which gets all of it
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fpfl.federation.enrolment import IDENTITY, ending, load_identity
from fpfl.federation.flower import RECORD, TOKEN
from fpfl.federation.flower.logs import show
from fpfl.federation.node import answered
from fpfl.federation.secagg import Identity, Refused

if TYPE_CHECKING:
    from fpfl.federation.contribution import Contribution

log = logging.getLogger("fpfl.federation")


def client_app(agreement: str, load: str) -> ClientApp:
    """A node's app.

    Parameters
    ----------
    agreement
        ``"module:function"`` that makes the `fpfl.federation.Agreement`. A name, not the function:
        four of five messages are answered without importing it, or torch.
    load
        ``"module:function"`` from the node's configuration to its users, a
        ``fpfl.FederatedDataset``.
    """
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator]
    def answer(message: Message, context: Context) -> Message:
        show()
        request = dict(message.content.config_records[RECORD])
        token = request.pop(TOKEN, b"")
        said: Mapping[str, Any]
        try:
            path = _identity(context)
            identity = load_identity(path)
            if request.get("step") == "advertise":
                for line in ending(identity.authority, identity.credential):
                    log.warning("%s", line)
            if request.get("step") == "mask":
                _once(path, identity, request)
            state = context.state.config_records.get(RECORD, {}).get("state", b"")
            kept, said = answered(
                request, state, identity, lambda: _contribution(agreement, load, context)
            )
            context.state[RECORD] = ConfigRecord({"state": kept})
        except Refused as error:
            log.warning("refused: %s", error)
            said = {"refused": str(error)}
        except Exception:
            # Flower would send the text of an exception to the server; it may be about data.
            log.exception("this node cannot answer")
            said = {"refused": "it cannot answer; its own log says why"}
        # Only who got the request knows its token: a reply's metadata can be made up.
        reply = RecordDict({RECORD: ConfigRecord({**said, TOKEN: token})})
        return Message(reply, reply_to=message)

    return app


def _once(path: Path, identity: Identity, request: Mapping[str, Any]) -> None:
    """Refuse to mask a second vector in a session, whatever became of the node's state.

    Flower keeps the state only after a reply has left: a process that dies in between would mask
    another vector with the same masks, and the difference of two of them has next to no noise.
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


def _identity(context: Context) -> Path:
    path = context.node_config.get("identity")
    keys = context.run_config.get("simulation-keys", "")
    number = context.node_config.get("partition-id")
    if path is None and keys and number is not None:  # Flower's simulation: all is in one place
        path = str(Path(str(keys)) / f"node-{int(number) + 1}" / IDENTITY)
    if not isinstance(path, str):
        raise ValueError(
            "this node was not told who it is: start flower-supernode with "
            "--node-config 'identity=\"FILE\"', a file that fpfl federation keys made"
        )
    return Path(path)


def _contribution(agreement: str, load: str, context: Context) -> Contribution:
    """What computes the node's vector; torch is imported here."""
    from fpfl.federation.contribution import Contribution, SystemChance, TestChance

    agreed = resolved(agreement)()
    config = dict(context.node_config)
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
