"""The ``ClientApp``: one message in, one answer out. Flower starts a process for every message.

What a node is told when it is started (``flower-supernode --node-config``):

identity        the file that the authority made for this node; beside it FILE.ledger is written,
                site.toml is read, what the site allows (`fpfl.federation.site`), and a list of
                the revoked, revoked.crl
anything else   for the project's own loader, which gets all of it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fpfl.federation.enrolment import IDENTITY, ending
from fpfl.federation.flower import RECORD, TOKEN
from fpfl.federation.flower.logs import show
from fpfl.federation.secagg import Refused
from fpfl.federation.site import SiteNode

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
            with closing(_node(context)) as node:
                if request.get("step") == "advertise":
                    for line in ending(node.identity.authority, node.identity.credential):
                        log.warning("%s", line)
                state = context.state.config_records.get(RECORD, {}).get("state", b"")
                kept, said = node.answered(
                    request,
                    state,
                    lambda: node.contribution(
                        context.node_config, lambda: (resolved(agreement), resolved(load))
                    ),
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


def _node(context: Context) -> SiteNode:
    """Who answers, as its site allows; in Flower's simulation there is no site."""
    return SiteNode.beside(_identity(context), simulated="identity" not in context.node_config)


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


def resolved(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    module, _, function = name.partition(":")
    found = getattr(import_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"{name!r} names no function; expected 'module:function'")
    return found  # type: ignore[no-any-return]
