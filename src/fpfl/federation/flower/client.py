"""The ``ClientApp``: one message in, one answer out. Flower starts a process for every message.

What a node is told when it is started (``fpfl-supernode --node-config``):

identity        the file that the authority made for this node; FILE.states and FILE.worker, two
                folders, and FILE.ledger are made beside it, and two files are read there: a list of
                the revoked, revoked.crl, and what the site allows, site.toml (`federation.site`)
worker          false: every message's own process does the work (`fpfl.federation.flower.worker`)
anything else   for the project's own loader, which gets all of it
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fpfl.federation.flower import COMMON, RECORD, TOKEN
from fpfl.federation.flower.logs import show
from fpfl.federation.flower.worker import Node, handed_over
from fpfl.federation.flower.worker import resolved as resolved

log = logging.getLogger("fpfl.federation")

SIMULATED = "flwr.simulation.ray_transport.ray_actor"
"""What is imported where Flower simulates nodes, and nowhere else."""


def client_app(agreement: str, load: str) -> ClientApp:
    """A node's app.

    Parameters
    ----------
    agreement
        ``"module:function"`` that makes the `fpfl.federation.Agreement`. A name, not the function:
        the process of a message does without importing it, or torch.
    load
        ``"module:function"`` from the node's configuration to its users, a
        ``fpfl.FederatedDataset``.
    """
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator]
    def answer(message: Message, context: Context) -> Message:
        show()
        records = message.content.config_records
        request = {**records.get(COMMON, {}), **records[RECORD]}
        token = request.pop(TOKEN, b"")
        said = _answered(agreement, load, request, context)
        # Only who got the request knows its token: a reply's metadata can be made up.
        reply = RecordDict({RECORD: ConfigRecord({**said, TOKEN: token})})
        return Message(reply, reply_to=message)

    return app


def _answered(
    agreement: str, load: str, request: Mapping[str, Any], context: Context
) -> Mapping[str, Any]:
    try:
        path = _identity(context)
        config = dict(context.node_config)
        # `_identity` finds one that the node was not told in Flower's simulation alone.
        node = Node(str(path), agreement, load, config, simulated="identity" not in config)
        run = f"{context.run_id:x}"
        if _alone() and context.node_config.get("worker") is not False:
            try:
                return handed_over(node, run, request, os.getppid())
            except Exception as error:
                log.warning("no worker: %s: this process does the work", error)
        return node.answer(run, request)
    except Exception:
        log.exception("this node cannot answer")
        return {"refused": "it cannot answer; its own log says why"}


def _alone() -> bool:
    """Whether this process is there for one message: then another one shall do the work."""
    return os.name == "posix" and Path(sys.argv[0]).name == "flwr-clientapp"


def _identity(context: Context) -> Path:
    path = context.node_config.get("identity")
    number = context.node_config.get("partition-id")
    if path is None and number is not None and SIMULATED in sys.modules:  # all is in one place
        from fpfl.federation.enrolment import IDENTITY

        keys = context.run_config.get("simulation-keys", "")
        if keys:
            path = str(Path(str(keys)) / f"node-{int(number) + 1}" / IDENTITY)
    if not isinstance(path, str):
        raise ValueError(
            "this node was not told who it is: start fpfl-supernode with "
            "--node-config 'identity=\"FILE\"', a file that fpfl federation keys made"
        )
    return Path(path)
