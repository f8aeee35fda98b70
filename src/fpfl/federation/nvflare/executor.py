"""NVFlare's ``Executor``: one task in, one answer out.

A job names functions of the project; who the node is stands at its site alone, in its NVFlare
workspace, under the name that NVFlare knows the client by:

local/fpfl/NAME/identity            the file that the authority made for this node
local/fpfl/NAME/revoked.crl         a list of the revoked, once there is one
local/fpfl/NAME/node.toml           for the project's own loader, which gets all of it
local/fpfl/NAME/identity.state      what is kept between two tasks; written here
local/fpfl/NAME/identity.sessions   the sessions in which a vector was masked; written here
local/fpfl/NAME/node.log            what was refused or failed, and why; written here
"""

from __future__ import annotations

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

from fpfl.federation.answering import made_contribution, once
from fpfl.federation.enrolment import IDENTITY, ending, load_identity
from fpfl.federation.node import answered
from fpfl.federation.nvflare import PLACE, RECORD, TOKEN
from fpfl.federation.secagg import Message, Refused
from fpfl.store.files import held, write_whole

log = logging.getLogger("fpfl.federation")

LOG = "node.log"

PATIENCE = 5.0
"""Seconds that a second job at this site waits for the first one's answer."""


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

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """See NVFlare; a task that is refused, or fails, has an answer that says so."""
        request = dict(shareable.get(RECORD, {}))
        token = request.pop(TOKEN, b"")
        place = _place(fl_ctx)
        with _kept_here(place / LOG):
            said = self._answered(request, place)
        reply = Shareable()
        reply[RECORD] = {**said, TOKEN: token}
        return reply

    def _answered(self, request: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
        try:
            return self._said(request, place)
        except Refused as error:
            log.warning("refused: %s", error)
            return {"refused": str(error)}
        except Exception:
            log.exception("this node cannot answer")
            return {"refused": "it cannot answer; its own log says why"}

    def _said(self, request: Mapping[str, Any], place: Path) -> Message:
        path = place / IDENTITY
        if not path.is_file():
            raise ValueError(
                f"this node was not told who it is: {path} is not there; put the file there that "
                "fpfl federation keys made for it"
            )
        identity = load_identity(path)
        if request.get("step") == "advertise":
            for line in ending(identity.authority, identity.credential):
                log.warning("%s", line)
        kept = path.with_name(f"{IDENTITY}.state")
        with _alone(path):
            if request.get("step") == "mask":
                once(path, identity, request)
            state = kept.read_bytes() if kept.exists() else b""
            state, said = answered(
                request,
                state,
                identity,
                lambda: made_contribution(self.agreement, self.load, _told(place)),
            )
            # On the disk before the answer leaves: a node that is started anew goes on from here.
            write_whole(kept, state, mode=0o600)
        return said


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


def _told(place: Path) -> dict[str, Any]:
    path = place / "node.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One answer at a time, whatever else runs at this site in the node's name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with held(descriptor, path, "LOCK_EX", PATIENCE):
            yield
    finally:
        os.close(descriptor)
