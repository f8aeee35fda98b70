"""NVFlare's ``Controller``: the simulation's own server, with messages by NVFlare's tasks.

A job's server configuration says, all of them paths in the server's workspace unless they begin at
the root:

agreement    "module:function" that makes the `fpfl.federation.Agreement`
authority    the file with the certificate of the authority that enrolled the nodes; a list of the
             revoked is read beside it, revoked.crl
folder       where the run is written down; one that has begun goes on
ledger       a population's ledger that is charged as well; empty for none
"""

from __future__ import annotations

import logging
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from fpfl.federation.nvflare import PLACE
from fpfl.federation.nvflare.courier import TaskCourier
from fpfl.federation.serving import serve

log = logging.getLogger("fpfl.federation")


class FederationController(Controller):
    """Trains a federation's model in one job; see the module for what it is told."""

    def __init__(
        self,
        agreement: str,
        folder: str,
        authority: str = f"{PLACE}/authority.key",
        ledger: str = "",
    ) -> None:
        super().__init__()
        self.agreement, self.folder = agreement, folder
        self.authority, self.ledger = authority, ledger

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: all is done in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: what was released is on the disk."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The run."""
        root = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        ledger = str(root / self.ledger) if self.ledger else ""
        try:
            serve(
                self.agreement,
                TaskCourier(self, fl_ctx, abort_signal),
                authority=str(root / self.authority),
                folder=str(root / self.folder),
                ledger=ledger,
            )
        except Exception as error:
            log.exception("the run has ended")
            self.system_panic(f"{type(error).__name__}: {error}", fl_ctx)
