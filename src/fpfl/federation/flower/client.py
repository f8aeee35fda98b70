"""The ``ClientApp``: one message in, one answer out. Flower starts a process for every message.

What a node is told when it is started (``flower-supernode --node-config``):

identity        the file that the authority made for this node
anything else   for the project's own loader, which gets all of it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fpfl.federation.node import answered
from fpfl.federation.secagg import Identity, Refused

if TYPE_CHECKING:
    from fpfl.federation.contributing import Contribution

log = logging.getLogger("fpfl.federation")

RECORD = "fpfl"
"""The record of a message, and of a node's state."""


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
        identity = Identity.from_bytes(_identity(context.node_config))
        state = context.state.config_records.get(RECORD, {}).get("state", b"")
        request = dict(message.content.config_records[RECORD])
        try:
            kept, said = answered(
                request, state, identity, lambda: _contribution(agreement, load, context)
            )
        except Refused as error:
            log.warning("refused: %s", error)
            return _reply({"refused": str(error)}, message)
        context.state[RECORD] = ConfigRecord({"state": kept})
        return _reply(said, message)

    return app


def _reply(said: Mapping[str, Any], message: Message) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord(dict(said))}), reply_to=message)


def _identity(config: Mapping[str, Any]) -> bytes:
    path = config.get("identity")
    if not isinstance(path, str):
        raise ValueError(
            "this node was not told who it is: start flower-supernode with "
            "--node-config 'identity=\"FILE\"', a file that fpfl federation enrol made"
        )
    return Path(path).read_bytes()


def _contribution(agreement: str, load: str, context: Context) -> Contribution:
    """What computes the node's vector; torch is imported here."""
    from fpfl.federation.contributing import Contribution, SystemChance, TestChance

    agreed = resolved(agreement)()
    config = dict(context.node_config)
    chance: SystemChance | TestChance = SystemChance()
    if agreed.test_seed is not None:
        numbers = (config.get(name) for name in ("node", "first-user"))
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError(
                "with a test_seed a node must be told node=... and first-user=..., whole numbers"
            )
        chance = TestChance(agreed.test_seed, int(config["node"]), int(config["first-user"]))
    return Contribution(agreed, lambda: resolved(load)(config), chance)


def resolved(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    module, _, function = name.partition(":")
    found = getattr(import_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"{name!r} names no function; expected 'module:function'")
    return found  # type: ignore[no-any-return]
