"""Sessions: ``fpfl.train``, and from settled settings to a finished run.

A simulation (`fpfl.train`) and a federation over a network (`fpfl.federation`) come here with the
same things settled, and with something that can ``release`` a round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpfl.aggregation.noise import SeededNoise, SystemNoise
from fpfl.aggregation.sums import ThirdParty
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import ScaledModel, Scaling
from fpfl.data.schema import ClassWeights
from fpfl.fairness.confusion import training_verdict
from fpfl.fairness.constraints import Constraint
from fpfl.methods import Method
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy.assumptions import Aggregation, check_declared
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling
from fpfl.privacy.settings import Clipping, Privacy, Sampling
from fpfl.privacy.spending import Spending
from fpfl.privacy.statement import PrivacyStatement
from fpfl.runs.fingerprints import data_fingerprint
from fpfl.runs.folder import OpenRun, RunFolder, as_run_folder
from fpfl.runs.journal import PopulationJournal
from fpfl.runs.ledger import NO_MEASUREMENT
from fpfl.runs.resume import Kept, begun_with, noise_kept, opened, statement, table_kept
from fpfl.server.events import Training, Watching, parts_of
from fpfl.server.loop import Callback, Federation, OptimizerFactory, Outcome, Server, begin, serve
from fpfl.server.ranks import Ranks
from fpfl.server.selection import Rule
from fpfl.server.simulation import Simulation
from fpfl.training.inputs import Inputs, from_first, scaled
from fpfl.training.run import Run, with_parameters
from fpfl.training.spec import (
    Noisy,
    TrainingSpec,
    check_data,
    check_words,
    chosen_sampling,
    collapse_notes,
    fingerprint,
    memory_budget,
    noise_notes,
    prepared,
)
from fpfl.users import isolation
from fpfl.users.engine import CohortEngine
from fpfl.users.local import FederatedAveraging
from fpfl.users.precision import Precision

__all__ = ["FpflWarning", "train"]


class FpflWarning(UserWarning):
    """Something about a run that its user should know."""


class RunNote(FpflWarning):
    """What is also in the finished run's ``warnings``, or why it stopped."""


def conduct(
    spec: TrainingSpec,
    noisy: Noisy,
    w: Tensor,
    federation: Callable[[Kept | None], Federation],
    *,
    more: dict[str, Any],
    where: RunFolder | None,
    data: str,
    seeds: tuple[Any, ...],
    ranks: Ranks,
    aggregation: Aggregation | None = None,
    charging: PopulationJournal | None = None,
    callbacks: Sequence[Callback] = (),
    notes: Sequence[str] = (),
    scale: Callable[[Kept | None], Scaling | None] = lambda kept: None,
    measured: int = 0,
) -> Run:
    """Open or go on with the run's folder, run all rounds, and say what came out.

    Parameters
    ----------
    spec
        What was settled.
    noisy
        Who adds the noise.
    w
        The initial parameters.
    federation
        Makes what releases rounds, given what is kept of the run.
    more
        Settings of the door, beside the spec's own, as plain values.
    where
        The run folder, if there is one.
    data
        A fingerprint of the data; empty where nobody has it all.
    seeds
        (seed of the cohorts, seed of the noise, whatever else moves a seeded run's bits).
    ranks
        The processes that share the work.
    aggregation
        How a federation adds up; None for a simulation.
    charging
        What charges a population where there is no folder.
    callbacks
        Told of the beginning, of every round and of the end, in the first process.
    notes
        What is to be said about the run besides; ``federation`` may add to it.
    scale
        Settles how inputs are scaled, given what is kept of the run; before ``federation``.
    measured
        How many numbers that may release.
    """
    seed, noise_seed, *_ = seeds
    plan, server, settings = noisy.plan, spec.server(noisy), spec.settings | more
    kept = None
    if where is not None:
        begun = begun_with(
            where, settings, seeds, spec.flat.module, data, spec.schema, spec.constraint,
            spec.optimizer, plan, spec.privacy,
        )  # fmt: skip
        kept = opened(where, begun, begin(w, server), ranks)
    watching = Watching(callbacks if ranks.first else (), ranks)
    with ExitStack() as stack:
        stack.enter_context(watching)
        if charging:
            stack.callback(charging.close)
        if kept and kept.journal:
            # Closed before anybody is told how it went.
            stack.callback(kept.journal.close)
        if ranks.first:
            watching.begin(_training(spec, noisy, settings, kept))
        running, scaling = Server(w, server, kept.past.state if kept else None), None
        try:
            scaling = scale(kept)
        except BudgetExhaustedError as error:
            stopped: str | None = str(error)
        else:
            stopped = serve(federation(kept), running, (watching,), kept.journal if kept else None)
        outcome = running.outcome(stopped)
        notes = (*notes, *noise_notes(outcome.history, noisy, spec.layout, server.selection))
        notes += collapse_notes(outcome.history, spec.schema)
        notes += kept.past.notes if kept else ()
        for note in (*notes, *([outcome.stopped] if outcome.stopped else [])):
            warnings.warn(note, RunNote, stacklevel=3)
        ledger = None
        if kept and where:
            journal = kept.journal
            ledger = journal.ledger if journal else OpenRun(where.path).ledger
        seeded_cohorts = seed is not None or (kept is not None and kept.seeded_cohorts)
        said = statement(
            plan,
            ledger,
            noise_seed is not None,
            seeded_cohorts,
            aggregation,
            size=spec.layout.size,
            # A federation's K is in its agreement, before there is any data.
            declared=settings.get("population_declared", aggregation and True),
            measured=measured,
        )
        if said is not None and charging is not None:
            said = replace(said, population_ledger=charging.population.summary())
        run = finished(spec, outcome, said, settings, notes, scaling)
        if kept and kept.journal:
            run.save(kept.journal.folder)
            kept.journal.ledger.finish(len(outcome.history), outcome.stopped)
    watching.end(run)
    return run


def finished(
    spec: TrainingSpec,
    outcome: Outcome,
    said: PrivacyStatement | None,
    settings: dict[str, Any],
    notes: tuple[str, ...],
    scaling: Scaling | None = None,
) -> Run:
    """What came out of a training, with its privacy statement."""
    model = with_parameters(spec.flat, outcome.w)
    if scaling is not None:
        model = ScaledModel(scaling, model).to(outcome.w.device).eval()
    return Run(
        model=model,
        history=outcome.history,
        privacy=said,
        selected=outcome.selected,
        constraint=spec.constraint,
        stopped=outcome.stopped,
        warnings=notes,
        settings=settings,
        collapse=training_verdict(outcome.history, spec.schema.class_names),
        scaling=scaling,
    )


def _training(
    spec: TrainingSpec, noisy: Noisy, settings: dict[str, Any], kept: Kept | None
) -> Training:
    """What callbacks are told before the first round."""
    plan, rounds = noisy.plan, spec.rounds
    ledger = kept.journal.ledger if kept and kept.journal else None
    return Training(
        settings=settings,
        schema=spec.schema,
        layout=spec.layout,
        parts=parts_of(spec.layout, plan, noisy.noise_stddev),
        plan=plan,
        spending=None if plan is None else Spending(plan, ledger),
        first=kept.past.state.round + 1 if kept else 1,
        rounds=rounds,
        fresh=kept.past.next_round if kept else 1,
    )


@dataclass(frozen=True)
class Prepared:
    """A training by simulation that is settled, but for who computes the users' vectors.

    Parameters
    ----------
    spec
        What was settled.
    data
        The population, beside the model.
    third_party, sampling
        Who clips, adds up and adds noise; how cohorts are drawn.
    seed
        Of cohorts.
    precision
        See `Precision`.
    more
        Settings of a simulation, beside the spec's own, as plain values.
    inputs
        How inputs are to be scaled; None where nothing is left to be done.
    scaling
        How they were scaled.
    numbers
        How many numbers are released for that, before the first round.
    """

    spec: TrainingSpec
    data: FederatedDataset
    third_party: ThirdParty
    sampling: PoissonSampling | FixedSizeSampling
    seed: int | None
    precision: Precision
    more: dict[str, Any]
    inputs: Inputs | None = None
    scaling: Scaling | None = None
    numbers: int = 0

    def scaled(self, scaling: Scaling | None) -> Prepared:
        """The same with its inputs scaled; nothing is left to be found out about them."""
        if scaling is None:
            return self
        data = scaled(self.data, scaling)
        return replace(self, data=data, inputs=None, scaling=scaling)

    def engine(self, memory: int | None) -> tuple[CohortEngine, str | None]:
        """What computes v^k; and why it computes every user alone, where it does."""
        spec, schema = self.spec, self.data.schema
        engine = spec.engine(
            self.data,
            memory=memory_budget(memory, spec.flat.vector().device),
            precision=self.precision,
            private=spec.privacy is not None,
            expected=spec.cohort * (schema.samples_per_user or 1.0),
        )
        return isolation.checked(engine) if spec.privacy is not None else (engine, None)


def prepare(
    model: nn.Module,
    data: FederatedDataset,
    *,
    privacy: Privacy | None = None,
    sampling: Sampling | None = None,
    seed: int | None = None,
    noise_seed: int | None = None,
    precision: Precision = "float32",
    device: torch.device | str | None = None,
    where: RunFolder | None = None,
    measure: bool = True,
    class_weights: ClassWeights | None = None,
    **settings: Any,
) -> Prepared:
    """Check and settle what `train` was asked for; ``settings`` are those of a `TrainingSpec`."""
    if privacy is not None and getattr(privacy, "copies", 1) != 1:
        raise ValueError(
            f"copies={privacy.copies} is for federations: in a simulation all of a person's data "
            "is one user's. Leave it out"
        )
    check_words("best", sampling, 1, precision)
    flat, data = prepared(model, data, device)
    data = replace(data, schema=data.schema.weighing(class_weights))
    inputs = Inputs.of(data, privacy, measure=measure)
    measurement: bool | float = Inputs.measures(data, privacy, measure=measure)
    if where is not None and where.resume:
        inputs, measurement = _inputs_kept(where.run, inputs)
    spec = TrainingSpec.settle(
        flat,
        data.schema,
        population=data.K,
        privacy=privacy,
        measurement=measurement,
        **settings,
    )
    if spec.clipping is None:
        # Nothing else bounds what one user's samples, which may all be alike, do to the tables.
        spec = replace(spec, largest=float(data.offsets.diff().max()))
    if where is not None:
        spec = replace(spec, table=table_kept(where))
    if privacy is None or noise_seed is not None:
        # A real private run says nothing about its data but through noise.
        check_data(data, spec.constraint)
    declared: dict[str, Any] = {}
    if privacy is not None:
        # A run that goes on keeps its noise, whatever T is now.
        if where is not None:
            spec = replace(spec, noise=noise_kept(where, privacy))
        declared = {"population_declared": data.schema.population is not None}
    plan = spec.plan
    if plan is not None:
        check_declared(plan.neighbours, declared["population_declared"])
    source = SystemNoise() if noise_seed is None else SeededNoise(noise_seed)
    grid = None if spec.clipping is None else spec.clipping.grid
    third_party = ThirdParty(spec.layout.slices, spec.blocks, plan, source, grid=grid)
    chosen = chosen_sampling(sampling, plan, data, spec.cohort)
    more = {
        "sampling": type(chosen).__name__,
        "precision": precision,
        "processes": 1,
        "seeded_cohorts": seed is not None,
        "seeded_noise": noise_seed is not None,
        **declared,
        **({} if inputs is None else {"scaling": inputs.source}),
    }
    numbers = 0 if inputs is None else inputs.numbers
    return Prepared(spec, data, third_party, chosen, seed, precision, more, inputs, None, numbers)


def _inputs_kept(run: OpenRun, inputs: Inputs | None) -> tuple[Inputs | None, bool | float]:
    """How a run that goes on scales its inputs, as it was begun; and σ₀ of its measurement.

    One that was begun without (by an earlier version, or ``measure=False``) goes on without.
    """
    source, terms = run.settings.get("scaling"), run.ledger.terms
    if source is None:
        return None, False
    if inputs is None:
        raise ValueError(
            f"the run in {run.path} scales the columns of a table ({source}), and this data has "
            "none: resume it with the table that it was begun with (fpfl.read_table), and with "
            "measure=True"
        )
    before = None if terms is None else terms.measurement
    noise = False if before is None else before.noise_multiplier
    return replace(inputs, source=source), noise


def train(
    model: nn.Module,
    data: FederatedDataset,
    *,
    cohort: int,
    rounds: int,
    constraint: Constraint | None = None,
    method: Method | None = None,
    privacy: Privacy | None = None,
    clip: float | Clipping | None = None,
    sampling: Sampling | None = None,
    learning_rate: float = 0.1,
    optimizer: OptimizerFactory | None = None,
    normaliser: Literal["users", "samples"] | float = "users",
    samples_per_user: int | None = None,
    local: FederatedAveraging | None = None,
    selection: Rule | None = None,
    selection_window: int = 1,
    measure: bool = True,
    class_weights: ClassWeights | None = None,
    seed: int | None = None,
    noise_seed: int | None = None,
    memory: int | None = None,
    precision: Precision = "float32",
    device: torch.device | str | None = None,
    folder: str | Path | RunFolder | None = None,
    ledger: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a model on a population of users, fairly and privately as asked.

    Parameters
    ----------
    model
        Any ``nn.Module`` without layers that mix samples, returning logits. It is not changed.
    data
        The population; with single-sample users this is central training.
    cohort, rounds
        m users in each of T rounds.
    constraint
        What must be equal between groups, e.g. ``fpfl.fnr_parity("sex", tolerance=0.02)``.
    method
        How it is enforced; ``MMDM()`` where a constraint is given.
    privacy
        ``Privacy(epsilon=2, clip=1.0)``; None for no noise.
    clip
        Clip without noise (the paper's "+ Clip" rows); with ``privacy`` its own bounds hold.
    sampling
        ``"poisson"`` or ``"without-replacement"``; with ``privacy`` the convention decides.
    learning_rate, optimizer
        η of plain SGD; or any function from [w] to a ``torch.optim`` optimiser, which then has its
        own learning rate.
    normaliser
        What the summed loss gradient is divided by, always a public constant: ``"users"`` for m,
        ``"samples"`` for m times the schema's declared samples per user, or a number.
    samples_per_user
        Use at most so many of a user's samples a round.
    class_weights
        What a sample's loss is multiplied by: a number for each class, or ``{"yes": 4.0}`` by
        class name (others 1). Declared, never counted in the data; rates count samples as they are.
    local
        ``FederatedAveraging(steps=4, learning_rate=0.1)``: users take local steps, and send their
        model difference. Without a constraint, or with ``method=OneGradient()``.
    selection
        ``"best"``, ``"last"`` or ``"average"``; by default the best, and with ``OneGradient`` the
        average.
    selection_window
        With ``"best"``: judge by the counts of so many rounds together and keep the mean of their
        models; 1 is the paper's rule, about 10 is steadier where cohorts are small or noisy.
    measure
        Scale the columns of a table (`fpfl.read_table`) by what its schema declares, and where it
        says nothing but a range or values, by what is found out about the users: under the same ε,
        where there is privacy (``docs/howto/measuring.md``). False: features are used as they are.
    seed
        Seeds cohorts; without it they come from the operating system's randomness.
    noise_seed
        Seeds the noise, for simulations only: the privacy statement then says that there is no
        guarantee against anyone who has the seed.
    memory
        Bytes that a chunk of users may take while it is computed; by default 512 MiB, and 8 GiB
        on a GPU. Cohorts that need more are computed in several chunks. With local steps a single
        user whose samples take more is computed all the same.
    precision
        ``"float32"``: as the model is. ``"tf32"`` and ``"bf16"``: faster and coarser products on
        hardware that has them; norms, clipping and sums stay as they are.
    device
        Where to compute; the model's own device when it is not given.
    folder
        A new folder for the run: its ledger, what it released, checkpoints and in the end the
        model. Without one nothing is written, and a crash loses the run but not what it cost.
        ``RunFolder(path, resume=True)`` goes on with a run; see `RunFolder` for more.
    ledger
        The file of a `PopulationLedger` that every round is charged to before it is released, with
        a folder or without one.
    callbacks
        Called with a `RoundEvent` after each round, in the first process. One that has
        ``begin(training)`` is told once before the first round what is trained (a `Training`); one
        that has ``end(run)`` gets the finished run, and one that has ``failed(error)`` learns that
        training was cut off. `StopTraining`, raised after a round, ends the training there.
        `Progress`, `Explain`, `TensorBoardCallback` and `MLflowCallback` are such callbacks.

    Returns
    -------
    Run
        The selected model, the history, the privacy statement.
    """
    ranks = Ranks.current()
    where = None if folder is None else as_run_folder(folder).once()
    if where is not None and ledger is not None:
        where = replace(where, ledger=Path(ledger))
    made = prepare(
        model,
        data,
        cohort=cohort,
        rounds=rounds,
        constraint=constraint,
        method=method,
        privacy=privacy,
        clip=clip,
        sampling=sampling,
        learning_rate=learning_rate,
        optimizer=optimizer,
        normaliser=normaliser,
        samples_per_user=samples_per_user,
        local=local,
        selection=selection,
        selection_window=selection_window,
        seed=seed,
        noise_seed=noise_seed,
        precision=precision,
        device=device,
        where=where,
        class_weights=class_weights,
        measure=measure,
    )
    spec, data, third_party, plan = made.spec, made.data, made.third_party, made.spec.plan
    inputs = made.inputs
    # Processes of one simulation start from the first one's parameters and draw the same cohorts.
    w = ranks.from_first(spec.flat.vector())
    common = ranks.agreed_seed(seed)
    # Nothing is begun where the engine refuses; with scaled inputs it has to wait for them.
    computing = made.engine(memory) if inputs is None else None
    more = made.more | {"processes": ranks.size}
    alike = (spec.settings | more, plan, spec.blocks, spec.layout, seed)
    # Who computes a user goes by the sizes of all: other kernels would make other last bits of it.
    kernels = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__
    ranks.check_same(
        {
            "data": fingerprint(data),
            "settings": repr(alike).encode(),
            "kernels": repr(kernels if privacy is not None else None).encode(),
        }
    )

    charging = None
    if ledger is not None and where is None and ranks.first:
        if plan is None:
            raise ValueError("ledger is charged by private runs: give privacy=, or leave it out")
        charging = PopulationJournal(PopulationLedger.open(ledger), Mechanism.of(plan))

    notes: list[str] = []
    beside: list[Prepared] = [made]

    def scale(kept: Kept | None) -> Scaling | None:
        if inputs is None:
            return None
        scaling, refused = None, None
        if ranks.first:
            journal = kept.journal if kept else charging
            try:
                scaling = inputs.found(data, plan, third_party.source, journal)
            except BudgetExhaustedError as error:
                refused = error
        # All processes end here, or none.
        if ranks.numbers_from_first([int(refused is not None)])[0]:
            raise refused or BudgetExhaustedError(NO_MEASUREMENT)
        scaling = from_first(inputs, scaling, ranks)
        beside[0] = made.scaled(scaling)
        return scaling

    def simulation(kept: Kept | None) -> Simulation:
        engine, refused = computing or beside[0].engine(memory)
        if refused is not None:
            notes.append(refused)
        return Simulation(
            engine,
            third_party,
            made.sampling,
            RoundStreams(common, "cohorts"),
            RoundStreams(common, "samples"),
            rounds,
            ranks,
            kept.past if kept else None,
            kept.journal if kept else charging,
            charged=ledger is not None,
        )

    return conduct(
        spec,
        third_party,
        w,
        simulation,
        more=more,
        where=where,
        data="" if where is None else data_fingerprint(data),
        seeds=(seed, noise_seed, memory, str(w.device)),
        ranks=ranks,
        charging=charging,
        callbacks=callbacks,
        notes=notes,
        scale=scale,
        measured=made.numbers,
    )
