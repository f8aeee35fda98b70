"""Beginning a run's folder, or checking it and going on with it.

A run is begun with settings and fingerprints, a budget, and what it may promise.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.assumptions import ALONE, BEFORE_REFUSED, KERNELS, Aggregation, Beyond
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import Mechanism, Terms, good_order
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import Privacy
from fpfl.privacy.statement import PrivacyStatement, round_up
from fpfl.runs.fingerprints import (
    code_fingerprint,
    environment,
    model_fingerprint,
    settings_fingerprint,
)
from fpfl.runs.folder import (
    ABOUT,
    ENVIRONMENT,
    FINGERPRINTS,
    FIRST_CHECKPOINT,
    FORMAT,
    LEDGER,
    SCHEMA,
    WITHDRAWALS,
    Manifest,
    OpenRun,
    RunFolder,
    as_json,
)
from fpfl.runs.journal import (
    Journal,
    begin_state,
    check_charges,
    read_past,
    read_withdrawals,
)
from fpfl.runs.ledger import RunLedger
from fpfl.server.ranks import Ranks
from fpfl.server.state import CLASSES, Past, ServerState
from fpfl.store.files import explained, sync_folder, write_whole


@dataclass(frozen=True)
class Begun:
    """What a run is, apart from where it is written.

    ``settings`` are plain values; ``fingerprints`` are of data, settings and code. ``strict``:
    the run is computed from seeds alone, so it resumes only where all fingerprints agree.
    ``budget`` is fixed when a run begins; None for one that goes on.
    """

    settings: dict[str, Any]
    fingerprints: dict[str, str]
    schema: dict[str, Any]
    environment: dict[str, Any]
    plan: PrivacyPlan | None
    budget: float | None
    simulation: bool
    strict: bool

    @property
    def cap(self) -> int | None:
        """How often one user may take part, where that is limited."""
        return None if self.plan is None else self.plan.max_participations

    @property
    def terms(self) -> Terms | None:
        """What the run may cost, fixed before it begins; None without privacy."""
        if self.plan is None:
            return None
        budget, mechanism = self.budget, Mechanism.of(self.plan)
        return Terms(
            mechanism=mechanism,
            rounds=self.plan.rounds,
            delta=self.plan.delta,
            budget=budget,
            order=None if budget is None else good_order(budget, self.plan.delta, mechanism),
            cap=self.cap,
            measurement=Mechanism.measurement_of(self.plan),
        )

    def differing(self, fingerprints: dict[str, str]) -> list[str]:
        """Which of the fingerprints are not those of this beginning."""
        return [name for name, mine in self.fingerprints.items() if fingerprints.get(name) != mine]


def begun_with(
    folder: RunFolder,
    settings: dict[str, Any],
    seeds: tuple[Any, ...],
    model: nn.Module,
    data: str,
    schema: Schema,
    constraint: Constraint | None,
    optimizer: Any,
    plan: PrivacyPlan | None,
    privacy: Privacy | None,
) -> Begun:
    """What a training is begun with.

    ``seeds`` are its seeds and whatever else moves its bits, ``data`` is a fingerprint.
    """
    seed, noise_seed, *_ = seeds
    functions = [f for r in constraint.rates for f in (r.condition, r.true)] if constraint else []
    about = environment()
    bits = {"seeds": repr(seeds), "threads": about["threads"], "gpu": about["gpu"]}
    settings = json.loads(json.dumps(settings))  # as they are read from a file again
    return Begun(
        settings=settings,
        fingerprints={
            "data": data,
            "settings": settings_fingerprint(settings | bits),
            "model": model_fingerprint(model),
            "code": code_fingerprint(*functions, *([optimizer] if optimizer else [])),
        },
        schema=schema.as_dict(),
        environment=about,
        plan=plan,
        budget=_budget(plan, privacy, folder.resume),
        simulation=noise_seed is not None,
        strict=noise_seed is not None if plan is not None else seed is not None,
    )


def _budget(plan: PrivacyPlan | None, privacy: Privacy | None, resumed: bool) -> float | None:
    """ε that a new run may cost in the end: as given, or what the plan costs honestly."""
    if plan is None or privacy is None or resumed:
        return None
    try:
        planned = plan.epsilon_honest if plan.epsilon_real is None else plan.epsilon_real
    except MissingAccountantError:
        return privacy.budget
    if privacy.budget is None:
        return planned or None  # ε = 0 has room for nothing
    if privacy.budget < planned * (1 - 1e-9):
        raise ValueError(
            f"the budget is ε = {privacy.budget:g}, and the planned rounds alone cost "
            f"{round_up(planned)}: raise the budget, or plan less"
        )
    return privacy.budget


def noise_kept(folder: RunFolder, privacy: Privacy) -> Privacy:
    """The privacy settings of a run that goes on: with the noise multiplier that it has had.

    ε was turned into noise when the run began; another T must not change that behind one's back.
    """
    if not folder.resume:
        return privacy
    ledger, before = folder.run.ledger, folder.run.settings["privacy"] or {}
    if ledger.mechanism is None or privacy.epsilon is None:
        return privacy
    if before.get("epsilon") != privacy.epsilon:
        raise ValueError(
            f"the run was begun with epsilon={before.get('epsilon')} and cannot go on with "
            f"epsilon={privacy.epsilon}: that was spent as planned. Give noise_multiplier for "
            "other noise; the budget that was fixed at the beginning stays"
        )
    return replace(privacy, epsilon=None, noise_multiplier=ledger.mechanism.noise_multiplier)


def table_kept(folder: RunFolder) -> bool:
    """Whether v may have the confusion table: not where a run was begun with hits and misses."""
    layout = folder.run.settings.get("layout") if folder.resume else None
    return not isinstance(layout, dict) or layout.get("classes") is not None


def statement(
    plan: PrivacyPlan | None,
    ledger: RunLedger | None,
    seeded_noise: bool,
    seeded_cohorts: bool,
    aggregation: Aggregation | None = None,
    *,
    size: int,
    declared: bool | None,
    measured: int = 0,
) -> PrivacyStatement | None:
    """What a run promises: as planned, or what the filter of changed settings kept to.

    ``size`` is that of v, ``measured`` how many numbers are released before the first round,
    ``declared`` says whether K was.
    """
    if plan is None:
        return None
    limit = None if ledger is None else ledger.filter
    if ledger is not None and limit is None:
        # Whoever stops before T has chosen so after looking: ε is that of all T rounds.
        plan = plan.with_rounds(ledger.planned)
    said = plan.statement(seeded_noise=seeded_noise, seeded_cohorts=seeded_cohorts)
    said = replace(said, aggregation=aggregation)
    rounds = plan.rounds
    if ledger is not None and limit is not None and ledger.server is not None:
        said = said.filtered(limit, ledger.server, ledger.all_charges, len(ledger.changes))
        said = replace(said, rounds=ledger.spent)
        rounds = max(ledger.server.rounds, ledger.spent)
    said = said.of_run(
        Beyond(
            numbers=rounds * size + measured,
            declared=declared,
            contributions=ALONE if ledger is None else ledger.contributions,
            assumptions=(KERNELS,) if aggregation is None else (),
        )
    )
    if ledger is not None and ledger.population is not None:
        said = replace(said, population_ledger=ledger.population.summary())
    return said


_BEGINNING = (ABOUT, SCHEMA, ENVIRONMENT, FINGERPRINTS, FIRST_CHECKPOINT)
"""What is written before the ledger, with which a run has begun."""
_REPLAYED = (
    "learning_rate",
    "optimizer",
    "method",
    "tolerance",
    "normaliser",
    "selection",
    "selection_window",
)
"""Settings that say what follows from totals: those since a checkpoint need the ones they had."""

PATIENCE = 3.0
"""Seconds to wait for a run's file: a run that was killed leaves a small process behind, the one
that syncs, and it holds the file until it sees the end. On a busy machine that takes a moment."""


@dataclass(frozen=True)
class Kept:
    """A run that is kept in a folder: its past and, in the process that writes, its journal."""

    past: Past
    journal: Journal | None
    seeded_cohorts: bool


def opened(folder: RunFolder, begun: Begun, state: ServerState, ranks: Ranks) -> Kept:
    """Begin or resume a run; ``state`` is the one that a new run begins with.

    The first process writes. The others read what it has begun or found.
    """
    kind = type(state.method)
    if CLASSES.get(kind.__name__) is not kind:
        raise ValueError(
            f"a run folder cannot keep the method's state, a {kind.__name__}; train without a "
            f"folder, or use one of fpfl's own: {', '.join(sorted(CLASSES))}"
        )
    if not ranks.first:
        ranks.numbers_from_first([0])
        run = folder.run
        past = read_past(folder.path, begun.simulation, begun.cap)
        ranks.numbers_from_first([0])
        return Kept(past, None, run.seeded_cohorts or begun.settings["seeded_cohorts"])
    if folder.resume:
        return _resumed(folder, begun, state, ranks)
    ledger = _begin(folder, begun, state)
    past = Past(state, {}, {})
    return _going(folder, begun, past, ledger, ranks, seeded=begun.settings["seeded_cohorts"])


def _going(
    folder: RunFolder, begun: Begun, past: Past, ledger: RunLedger, ranks: Ranks, *, seeded: bool
) -> Kept:
    """Open the journal of a run whose ledger is held, and let the other processes read."""
    try:
        for part in folder.path.glob(".*.part"):  # files that a crash kept from becoming any
            part.unlink()
        every, capped = folder.checkpoint_every, begun.cap is not None
        journal = Journal(folder.path, past, ledger, every=every, capped=capped)
    except BaseException:
        ledger.close()
        raise
    ranks.numbers_from_first([0])  # the others may read now
    ranks.numbers_from_first([0])  # and have read, before anything is added
    return Kept(past, journal, seeded)


def _resumed(folder: RunFolder, begun: Begun, state: ServerState, ranks: Ranks) -> Kept:
    """Hold a run's ledger, check all that it goes on from, and only then write."""
    run = folder.run
    ledger = run.ledger
    if ledger.terms is not None and ledger.contributions is None:
        raise ValueError(BEFORE_REFUSED.format(path=folder.path))
    try:
        ledger.hold(moved=folder.moved, patience=PATIENCE)
        past = _checked(run, begun, state)
        ledger.go_on_writing(_population(folder))
        past = replace(past, notes=(*past.notes, *check_charges(folder.path, past, ledger)))
        _go_on(folder, begun, past, ledger)
    except BaseException:
        ledger.close()
        raise
    seeded = run.seeded_cohorts
    return _going(folder, begun, past, ledger, ranks, seeded=seeded)


def _begin(folder: RunFolder, begun: Begun, state: ServerState) -> RunLedger:
    """Make the folder of a new run."""
    path = folder.path
    with explained(path, "Nothing was begun; name a folder that can be written to"):
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
        there = {item.name for item in path.iterdir()}
    # What a crash left of a beginning, before the ledger: nothing had been computed yet.
    names = (*_BEGINNING, *folder.files)
    if there - {*names, *(f".{name}.part" for name in (*names, LEDGER))}:
        raise ValueError(
            f"{path} is there already and not empty; name another folder, or go on with the run "
            "in it: fpfl resume (RunFolder(..., resume=True))"
        )
    population = None if folder.ledger is None else PopulationLedger.open(folder.ledger)
    run = secrets.token_hex(16)
    about = Manifest(
        FORMAT,
        run,
        begun.simulation,
        begun.strict,
        begun.settings,
        None if folder.ledger is None else str(folder.ledger.resolve()),
        None if begun.plan is None else begun.plan.as_dict(),
    )
    for name, content in folder.files.items():
        write_whole(path / name, content.encode(), mode=0o600)  # seeds may be in it
    write_whole(path / FINGERPRINTS, as_json(begun.fingerprints), mode=0o600)
    for name, values in ((SCHEMA, begun.schema), (ENVIRONMENT, begun.environment)):
        write_whole(path / name, as_json(values))
    begin_state(path, state)
    write_whole(path / ABOUT, as_json(about.as_dict()))
    return RunLedger.create(
        path / LEDGER,
        run=run,
        terms=begun.terms,
        simulation=begun.simulation,
        population=population,
    )


def _checked(run: OpenRun, begun: Begun, state: ServerState) -> Past:
    """Read all that a run goes on from, and write nothing: what is wrong is left as it was found.

    Writing to a ledger ends a line that was cut off, and so changes the file.
    """
    path, ledger = run.path, run.ledger
    changed = begun.differing(run.fingerprints)
    if run.manifest.strict and changed:
        raise ValueError(
            f"the seeded run in {path} was begun with other {' and '.join(changed)}: "
            "drawing the same random numbers again with these would not give the same run, and "
            "where noise is seeded it would reveal the difference. Resume it as it was begun, or "
            "start a new run"
        )
    past = read_past(path, begun.simulation, begun.cap)
    check_charges(path, past, ledger)
    if ledger.run != run.manifest.run:
        raise ValueError(
            f"{path / ABOUT} and {path / LEDGER} are of two different runs; put back the one "
            "that belongs to the other"
        )
    _check_same_kind(path, begun, ledger)
    _check_settings(path, run.settings, begun.settings, past)
    _check_state(path, past.state, state)
    if past.state.optimizer:
        given = (_part(settings, "optimizer") for settings in (run.settings, begun.settings))
        kinds = [optimizer.get("kind", "SGD") for optimizer in given]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the run in {path} has the state of the optimiser {kinds[0]}, which "
                f"{kinds[1]} cannot go on with: resume it with {kinds[0]}"
            )
    users, population = read_withdrawals(path / WITHDRAWALS), begun.settings["population"]
    declared = begun.settings.get("population_declared")  # there may be more users than that
    if users and max(users) >= population and not declared:
        raise ValueError(
            f"{path / WITHDRAWALS} names user {max(users)}; indices run from 0 to "
            f"{population - 1}. Correct it"
        )
    return past


def _check_settings(path: Path, old: dict[str, Any], new: dict[str, Any], past: Past) -> None:
    """Refuse settings under which what was released would mean something else."""
    layout = old.get("layout")
    if isinstance(layout, dict):
        layout = {"form": "paper", **layout}  # runs from before there was another form
    if layout != new["layout"]:
        raise ValueError(
            f"the run in {path} releases other totals: v is laid out as {layout}, with these "
            f"settings it would be {new['layout']}. Resume it with the constraint, the method, the "
            "counts and the model that it was begun with"
        )
    if "federation" in (old.get("sampling"), new.get("sampling")):
        before, now = _promised(old), _promised(new)
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            raise ValueError(
                f"the run in {path} was begun with another {' and '.join(changed)}, which its "
                "statement is about: resume it as it was, or start a new run"
            )
    if new["rounds"] < past.next_round - 1:
        raise ValueError(
            f"the run in {path} has released {past.next_round - 1} rounds, and T = {new['rounds']} "
            "is less; leave it as it is"
        )
    different = [name for name in _REPLAYED if old.get(name) != new[name]]
    if _adapting(old) != _adapting(new):
        different.append("clip bound that adapts")
    if different and past.totals:
        raise ValueError(
            f"the run in {path} has {len(past.totals)} rounds since its last checkpoint, which "
            f"were computed with another {' and '.join(different)}: resume it as it was, and "
            "change settings when it has ended"
        )


def _adapting(settings: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a clip bound that adapts follows from, besides totals; None for one that is fixed."""
    clip = _part(settings, "clip")
    return (clip, settings.get("cohort")) if clip.get("adapts") else None


def _promised(settings: dict[str, Any]) -> dict[str, Any]:
    """What a federation's promise rests on besides its noise."""
    names = ("sampling", "nodes", "least", "colluders", "held")
    privacy = _part(settings, "privacy")
    found = {name: settings.get(name) for name in names}
    return found | {name: privacy.get(name) for name in ("convention", "copies")}


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a run's settings, which a forged ledger can give as anything."""
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _check_same_kind(path: Path, begun: Begun, ledger: RunLedger) -> None:
    """Refuse to go on with less privacy than is charged for."""
    if ledger.terms is not None and begun.plan is None:
        raise ValueError(
            f"the run in {path} is private and cannot go on without privacy: what it would release "
            "has no noise, and no charge would be enough for it. Start a new run"
        )
    if begun.simulation and not ledger.simulation:
        raise ValueError(
            f"the run in {path} has noise from the system's randomness and cannot go on with a "
            "noise_seed: whoever has the seed takes the noise off. Leave it out, or start a new run"
        )


def _check_state(path: Path, old: ServerState, new: ServerState) -> None:
    """Refuse a model or a constraint that the state of the run does not go with."""
    for what, one, other in (
        ("parameters", old.w, new.w),
        ("multipliers", old.method.multipliers, new.method.multipliers),
    ):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"the run in {path} has {what} of shape {tuple(one.shape)} ({one.dtype}); with "
                f"this model and constraint they have {tuple(other.shape)} ({other.dtype}). Resume "
                "it with those that it was begun with"
            )


def _population(folder: RunFolder) -> PopulationLedger | None:
    """The population's ledger that a run goes on to charge."""
    given = folder.ledger or folder.run.manifest.population_ledger
    return None if given is None else PopulationLedger.open(Path(given))


def _go_on(folder: RunFolder, begun: Begun, past: Past, ledger: RunLedger) -> None:
    """Record that the run goes on, and with what; what costs other than planned is filtered."""
    old = folder.run.settings
    what = [
        f"{name}: {old.get(name)} -> {value}"
        for name, value in begun.settings.items()
        if old.get(name) != value
    ]
    notes = [
        f"{n} differ from the beginning"
        for n in begun.differing(folder.run.fingerprints)
        if n != "settings"
    ]
    if begun.plan is not None:
        ledger.go_on(Mechanism.of(begun.plan), begun.plan.rounds, begun.cap, what)
    for name, content in folder.files.items():
        write_whole(folder.path / name, content.encode(), mode=0o600)
    ledger.resume(
        folder.path / LEDGER, past.next_round, [*notes, *what, *past.notes], begun.settings
    )
