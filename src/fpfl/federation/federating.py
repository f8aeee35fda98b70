"""``federate``: from an agreement and a courier to a finished run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from fpfl.conducting import conduct
from fpfl.federation.agreement import Agreement
from fpfl.federation.node import RUN_BYTES
from fpfl.federation.rounds import Courier, Federated
from fpfl.folder import LEDGER, RunFolder
from fpfl.keeping import Kept
from fpfl.run import Run
from fpfl.server.ranks import Ranks
from fpfl.server.round import Callback


def federate(
    agreement: Agreement,
    courier: Courier,
    authority: bytes,
    *,
    folder: str | Path | None = None,
    ledger: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train with users who are elsewhere.

    Parameters
    ----------
    agreement
        What all parties have agreed on.
    courier
        Carries messages to nodes and back.
    authority
        The public key of the authority that enrolled the nodes.
    folder
        Where the run is written down. One that has begun there goes on from its last finished
        round; what was charged stays charged.
    ledger
        A population's ledger that is charged as well.
    callbacks
        Called with a `RoundEvent` after every round, and told of the beginning and the end, as in
        `fpfl.train`.
    """
    where = None
    if folder is not None:
        path = Path(folder)
        where = RunFolder(
            path,
            resume=(path / LEDGER).is_file(),
            ledger=None if ledger is None else Path(ledger),
        )

    def federation(kept: Kept | None) -> Federated:
        journal = kept.journal if kept else None
        run = secrets.token_bytes(RUN_BYTES) if journal is None else bytes.fromhex(
            journal.ledger.run
        )  # fmt: skip
        return Federated(agreement, courier, authority, run, kept.past if kept else None, journal)

    seed = agreement.test_seed
    return conduct(
        agreement.settled,
        agreement.flat.vector(),
        federation,
        where=where,
        data="",
        seeds=(seed, seed),
        ranks=Ranks(),
        callbacks=callbacks,
    )
