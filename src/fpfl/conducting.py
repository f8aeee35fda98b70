"""From settled settings to a finished run, whoever computes the users' vectors and adds them up.

A simulation (`fpfl.train`) and a federation over a network (`fpfl.federation`) come here with the
same things settled, and with something that can ``release`` a round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpfl.arguments import (
    Noisy,
    count_noise,
    drowned_notes,
    plain_optimizer,
    plain_value,
    public_normaliser,
    smallest_count,
)
from fpfl.begun import begun_with, statement
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.folder import RunFolder, look
from fpfl.keeping import Kept, opened
from fpfl.methods import Method
from fpfl.privacy.aggregation import Aggregation
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.privacy.spending import Spending
from fpfl.run import Run, with_parameters
from fpfl.server.ranks import Ranks
from fpfl.server.round import Callback, Federation, OptimizerFactory, ServerSettings, begin, serve
from fpfl.server.selection import Rule
from fpfl.server.watching import Training, Watching, parts_of
from fpfl.users.flat import FlatModel
from fpfl.users.layout import Layout


class FpflWarning(UserWarning):
    """Something about a run that its user should know."""


class RunNote(FpflWarning):
    """What is also in the finished run's ``warnings``, or why it stopped."""


@dataclass(frozen=True)
class Settled:
    """What is settled before the first round.

    Parameters
    ----------
    flat, schema
        The model, and what its data looks like.
    layout, noisy
        What is released, and with how much noise.
    constraint, method, clipping, privacy, optimizer
        As given, or chosen.
    server
        What the server's loop needs.
    settings
        All that was asked for, as plain values.
    aggregation
        How a federation adds up; None for a simulation.
    """

    flat: FlatModel
    schema: Schema
    layout: Layout
    noisy: Noisy
    constraint: Constraint | None
    privacy: Privacy | None
    optimizer: OptimizerFactory | None
    server: ServerSettings
    settings: dict[str, Any]
    aggregation: Aggregation | None = None

    @classmethod
    def of(
        cls,
        flat: FlatModel,
        schema: Schema,
        layout: Layout,
        noisy: Noisy,
        *,
        population: int,
        cohort: int,
        rounds: int,
        constraint: Constraint | None,
        method: Method,
        privacy: Privacy | None,
        clipping: Clipping | None,
        learning_rate: float,
        optimizer: OptimizerFactory | None,
        normaliser: Any,
        selection: Rule,
        selection_window: int,
        aggregation: Aggregation | None = None,
        **more: Any,
    ) -> Settled:
        """Settle what follows from arguments that were checked; ``more`` are further settings."""
        if privacy is not None:
            schema.check_declared()
        server = ServerSettings(
            layout=layout,
            method=method,
            optimizer=optimizer or (lambda w: torch.optim.SGD(w, lr=learning_rate)),
            rounds=rounds,
            normaliser=public_normaliser(normaliser, cohort, schema),
            tolerance=constraint.tolerance if constraint else 0.0,
            smallest_count=smallest_count(noisy, layout),
            count_noise=count_noise(noisy, layout),
            selection=selection,
            selection_window=selection_window,
        )
        settings = {
            "cohort": cohort,
            "rounds": rounds,
            "population": population,
            "constraint": constraint.name if constraint else None,
            "tolerance": constraint.tolerance if constraint else None,
            "method": plain_value(method),
            "privacy": plain_value(privacy),
            "clip": plain_value(clipping),
            "learning_rate": learning_rate if optimizer is None else None,
            "normaliser": server.normaliser,
            "optimizer": None if optimizer is None else plain_optimizer(optimizer),
            "selection": selection,
            "selection_window": selection_window,
            "layout": plain_value(layout),
            **more,
        }
        return cls(
            flat, schema, layout, noisy, constraint, privacy, optimizer, server, settings,
            aggregation,
        )  # fmt: skip


def conduct(
    settled: Settled,
    w: Tensor,
    federation: Callable[[Kept | None], Federation],
    *,
    where: RunFolder | None,
    data: str,
    seeds: tuple[Any, ...],
    ranks: Ranks,
    callbacks: Sequence[Callback] = (),
    notes: tuple[str, ...] = (),
) -> Run:
    """Open or go on with the run's folder, run all rounds, and say what came out.

    Parameters
    ----------
    settled
        What was settled.
    w
        The initial parameters.
    federation
        Makes what releases rounds, given what is kept of the run.
    where
        The run folder, if there is one.
    data
        A fingerprint of the data; empty where nobody has it all.
    seeds
        (seed of the cohorts, seed of the noise, whatever else moves a seeded run's bits).
    ranks
        The processes that share the work.
    callbacks
        Told of the beginning, of every round and of the end, in the first process.
    notes
        What is to be said about the run besides.
    """
    seed, noise_seed, *_ = seeds
    plan, server = settled.noisy.plan, settled.server
    kept = None
    if where is not None:
        begun = begun_with(
            where, settled.settings, seeds, settled.flat.module, data, settled.schema,
            settled.constraint, settled.optimizer, plan, settled.privacy,
        )  # fmt: skip
        kept = opened(where, begun, begin(w, server), ranks)
    watching = Watching(callbacks if ranks.first else (), ranks)
    with ExitStack() as stack:
        stack.enter_context(watching)
        if kept and kept.journal:
            # Closed before anybody is told how it went.
            stack.callback(kept.journal.close)
        if ranks.first:
            watching.begin(_training(settled, kept))
        outcome = serve(
            federation(kept),
            w,
            server,
            (watching,),
            kept.past.state if kept else None,
            kept.journal if kept else None,
        )
        notes += drowned_notes(outcome.history, settled.noisy, settled.layout, server.selection)
        notes += kept.past.notes if kept else ()
        for note in (*notes, *([outcome.stopped] if outcome.stopped else [])):
            warnings.warn(note, RunNote, stacklevel=3)
        ledger = None
        if kept and where:
            ledger = kept.journal.ledger if kept.journal else look(where.path)
        seeded_cohorts = seed is not None or (kept is not None and kept.seeded_cohorts)
        run = Run(
            model=with_parameters(settled.flat, outcome.w),
            history=outcome.history,
            privacy=statement(
                plan,
                ledger,
                noise_seed is not None,
                seeded_cohorts,
                settled.aggregation,
                size=settled.layout.size,
                # A federation's K is in its agreement, before there is any data.
                declared=settled.settings.get("population_declared", settled.aggregation and True),
            ),
            selected=outcome.selected,
            constraint=settled.constraint,
            stopped=outcome.stopped,
            warnings=notes,
            settings=settled.settings,
        )
        if kept and kept.journal:
            run.save(kept.journal.folder)
            kept.journal.ledger.finish(len(outcome.history), outcome.stopped)
    watching.end(run)
    return run


def _training(settled: Settled, kept: Kept | None) -> Training:
    """What callbacks are told before the first round."""
    plan, rounds = settled.noisy.plan, settled.server.rounds
    ledger = kept.journal.ledger if kept and kept.journal else None
    return Training(
        settings=settled.settings,
        schema=settled.schema,
        layout=settled.layout,
        parts=parts_of(settled.layout, plan, settled.noisy.noise_stddev),
        plan=plan,
        spending=None if plan is None else Spending(plan, ledger),
        first=kept.past.state.round + 1 if kept else 1,
        rounds=rounds,
        fresh=kept.past.next_round if kept else 1,
    )
