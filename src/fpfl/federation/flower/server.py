"""The ``ServerApp``: the simulation's own server, with a federation in place of the simulation.

What it is told when a run is started (``flwr run --run-config``, or the project's file):

folder       where the run is written down, on the server; one that has begun goes on
authority    the file with the public key of the authority that enrolled the nodes
ledger       a population's ledger that is charged as well; empty for none
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fpfl.federation.federating import federate
from fpfl.federation.flower.client import resolved
from fpfl.federation.flower.courier import FlowerCourier
from fpfl.federation.flower.logs import show
from fpfl.server.round import RoundEvent

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
        ledger = str(config.get("ledger", ""))
        run = federate(
            resolved(agreement)(),
            FlowerCourier(grid),
            Path(str(config["authority"])).read_bytes(),
            folder=str(config["folder"]),
            ledger=ledger or None,
            callbacks=[_said],
        )
        for line in str(run).splitlines():
            log.info("%s", line)

    return app


def _said(event: RoundEvent) -> None:
    """A line for every round: of what was released, nothing else."""
    row = event.row
    figures = {"accuracy": row["accuracy"], "gap": row["gap"]}
    said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if value is not None)
    log.info("round %d of %d: %s (released, with noise)", row["round"], event.rounds, said)
