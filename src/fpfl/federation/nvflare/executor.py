"""NVFlare's ``Executor``: one task in, one answer out, in a process that stays for the whole job.

A job names functions of the project; who the node is stands at its site alone, in its NVFlare
workspace, under the name that NVFlare knows the client by:

local/fpfl/NAME/identity            the file that the authority made for this node
local/fpfl/NAME/revoked.crl         a list of the revoked, once there is one
local/fpfl/NAME/site.toml           what the site allows, if it says so (`fpfl.federation.site`)
local/fpfl/NAME/node.toml           for the project's own loader, which gets all of it
local/fpfl/NAME/identity.ledger     what was agreed to and answered; written here
local/fpfl/NAME/identity.states     what is kept between two tasks; written here
local/fpfl/NAME/node.log            what was refused or failed, and why; written here
"""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fpfl.federation.enrolment import IDENTITY
from fpfl.federation.flower.worker import Node
from fpfl.federation.nvflare import PLACE, RECORD, TOKEN

log = logging.getLogger("fpfl.federation")

LOG = "node.log"


class FederationExecutor(Executor):
    """Answers the server's requests.

    Parameters
    ----------
    agreement
        ``"module:function"`` that makes the `fpfl.federation.Agreement`.
    load
        ``"module:function"`` from what the site tells its node to the node's users.
    """

    def __init__(self, agreement: str, load: str) -> None:
        super().__init__()
        self.agreement, self.load = agreement, load
        self._nodes: dict[Path, Node] = {}

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """See NVFlare; a task that is refused, or fails, has an answer that says so."""
        request = dict(shareable.get(RECORD, {}))
        token = request.pop(TOKEN, b"")
        place = _place(fl_ctx)
        with _kept_here(place / LOG):
            said = self._answered(str(fl_ctx.get_job_id()), request, place)
        reply = Shareable()
        reply[RECORD] = {**said, TOKEN: token}
        return reply

    def _answered(self, job: str, request: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
        try:
            if place not in self._nodes:
                self._nodes[place] = self._node(place)
            # A job's name is NVFlare's; a run's has letters and digits alone.
            return self._nodes[place].answer(hashlib.sha256(job.encode()).hexdigest(), request)
        except Exception:
            log.exception("this node cannot answer")
            return {"refused": "it cannot answer; its own log says why"}

    def _node(self, place: Path) -> Node:
        identity, told = place / IDENTITY, place / "node.toml"
        if not identity.is_file():
            raise ValueError(
                f"this node was not told who it is: {identity} is not there; put the file there "
                "that fpfl federation keys made for it"
            )
        config = tomllib.loads(told.read_text(encoding="utf-8")) if told.is_file() else {}
        return Node(str(identity), self.agreement, self.load, config)


def _place(fl_ctx: FLContext) -> Path:
    """The folder of the node's own files."""
    root = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
    return root / PLACE / str(fl_ctx.get_identity_name())


@contextmanager
def _kept_here(path: Path) -> Iterator[None]:
    """Write our own lines into a file at the site, and nowhere else.

    They may be about data, and NVFlare sends a site's error log to the server unless it was told
    not to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        before = log.propagate
        log.addHandler(handler)
        log.propagate = False
        try:
            yield
        finally:
            log.propagate = before
            log.removeHandler(handler)
