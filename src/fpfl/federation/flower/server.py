"""The ``ServerApp``: the simulation's own server, with messages by Flower's grid.

What Flower says about a reply (who sent it, and in answer to what) is copied from what the sender
uploaded, and a registered node could make it up. So every request has a random token that its node
alone is sent: a reply is told by it, and with it the message's id cannot be guessed.

The long fields that all nodes are sent alike, the model, are a record of their own. Flower keeps
records by a hash of what is in them: whatever the number of nodes, the SuperLink has one model in
its memory, and is sent one.

What it is told when a run is started (``flwr run --run-config``, or the project's file):

folder       where the run is written down, on the server; one that has begun goes on
authority    the file with the certificate of the authority that enrolled the nodes; a list of the
             revoked is read beside it, revoked.crl
ledger       a population's ledger that is charged as well; empty for none
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fpfl.federation.flower import COMMON, RECORD, TOKEN
from fpfl.federation.flower.logs import show
from fpfl.federation.serving import serve

log = logging.getLogger("fpfl.federation")

NODES_POLL, REPLIES_POLL, GONE_POLL = 1.0, 0.2, 5.0
"""Seconds between two questions: who is there, who has answered, who of those is gone."""

LONGEST = 200
"""So much of what a node says goes into the log."""

TOKEN_BYTES = 16

LONG = 2**10
"""From so many bytes on, what all nodes are sent alike is in a record of its own."""


@dataclass(frozen=True)
class FlowerCourier:
    """Carries messages to SuperNodes and back.

    Parameters
    ----------
    grid
        What Flower gives a ``ServerApp``.
    """

    grid: Grid

    def nodes(self, enough: int, timeout: float) -> list[int]:
        """See `fpfl.federation.rounds.Courier`."""
        end = time.monotonic() + timeout
        while True:
            found = sorted(self.grid.get_node_ids())
            if len(found) >= enough or time.monotonic() >= end:
                return found
            time.sleep(NODES_POLL)

    def exchange(
        self, requests: Mapping[int, Mapping[str, Any]], timeout: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `fpfl.federation.rounds.Courier`."""
        tokens = {secrets.token_bytes(TOKEN_BYTES): node for node in requests}
        alike = _common(list(requests.values()))
        shared = ConfigRecord(alike)
        messages = [
            Message(
                _content(shared, _own(requests[node], alike, token)),
                dst_node_id=node,
                message_type="query",
                # What nobody has fetched when the step is over, nobody shall answer later.
                ttl=timeout,
            )
            for token, node in tokens.items()
        ]
        asked = {
            message: node
            for message, node in zip(
                self.grid.push_messages(messages), tokens.values(), strict=True
            )
            if message
        }
        waiting = set(asked)
        end = time.monotonic() + timeout
        look = time.monotonic() + GONE_POLL
        while waiting:
            for reply in self.grid.pull_messages(sorted(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                node = asked.get(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    log.warning("node %s failed: %s", node, _short(reply.error.reason))
                    continue
                said = dict(reply.content.config_records.get(RECORD, {}))
                token = said.pop(TOKEN, b"")
                sender = tokens.get(token) if isinstance(token, bytes) else None
                if sender is None:
                    log.warning("a reply in the name of node %s is not its own: left out", node)
                elif "refused" in said:
                    log.warning("node %d refuses: %s", sender, _short(said["refused"]))
                else:
                    yield sender, said
            now = time.monotonic()
            if now >= end:
                break
            if now >= look:  # who is gone will not answer
                there, look = set(self.grid.get_node_ids()), now + GONE_POLL
                waiting = {message for message in waiting if asked[message] in there}
            if waiting:
                time.sleep(REPLIES_POLL + len(waiting) / 1000)


def _common(requests: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The long fields that all of several requests have alike."""
    if not requests:
        return {}
    first, *others = requests
    # A model is the very same object mostly, which Python sees before it reads it through.
    return {
        name: value
        for name, value in first.items()
        if isinstance(value, bytes)
        and len(value) >= LONG
        and all(other.get(name) == value for other in others)
    }


def _own(request: Mapping[str, Any], alike: Mapping[str, Any], token: bytes) -> dict[str, Any]:
    """What is left of a request, and its node's token."""
    return {**{name: value for name, value in request.items() if name not in alike}, TOKEN: token}


def _content(shared: ConfigRecord, request: dict[str, Any]) -> RecordDict:
    return RecordDict({COMMON: shared, RECORD: ConfigRecord(request)})


def _short(said: object) -> str:
    """What a node says, on one line: it could say anything."""
    return repr(said)[:LONGEST]


log = logging.getLogger("fpfl.federation")


def server_app(agreement: str) -> ServerApp:
    """A server's app.

    Parameters
    ----------
    agreement
        ``"module:function"`` that makes the `fpfl.federation.Agreement`.
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        show()
        config = context.run_config
        serve(
            agreement,
            FlowerCourier(grid),
            authority=str(config["authority"]),
            folder=str(config["folder"]),
            ledger=str(config.get("ledger", "")),
        )

    return app
