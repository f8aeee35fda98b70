"""A run on the server, whichever engine carries its messages."""

from __future__ import annotations

import logging
from pathlib import Path

from fpfl.federation.enrolment import ending, load_trust
from fpfl.federation.flower.worker import resolved
from fpfl.federation.rounds import Courier, federate
from fpfl.server.loop import RoundEvent

log = logging.getLogger("fpfl.federation")


def serve(agreement: str, courier: Courier, *, authority: str, folder: str, ledger: str) -> None:
    """Train, and log what was released.

    Parameters
    ----------
    agreement
        ``"module:function"`` that makes the `fpfl.federation.Agreement`.
    courier
        Carries messages to nodes and back.
    authority
        The file with the certificate of the authority that enrolled the nodes; a list of the
        revoked is read beside it.
    folder
        Where the run is written down; one that has begun goes on.
    ledger
        A population's ledger that is charged as well; empty for none.
    """
    trust = load_trust(Path(authority))
    for line in ending(trust):
        log.warning("%s", line)
    run = federate(
        resolved(agreement)(),
        courier,
        trust,
        folder=folder,
        ledger=ledger or None,
        callbacks=[_said],
    )
    for line in str(run).splitlines():
        log.info("%s", line)


def _said(event: RoundEvent) -> None:
    """A line for every round: of what was released, nothing else."""
    row = event.row
    figures = {"accuracy": row["accuracy"], "gap": row["gap"]}
    said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if value is not None)
    log.info("round %d of %d: %s (released, with noise)", row["round"], event.rounds, said)
