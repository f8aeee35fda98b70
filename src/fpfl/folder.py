"""The run folder: begun once, written by one process at a time, resumed after anything.

run.json schema.json environment.json    what was begun, with fingerprints
ledger.jsonl                             every charge, before what it pays for is used
checkpoint-*.safetensors totals-*.bin    the server's state, and the totals released since
cohorts-*.bin withdrawals.txt            who took part (with a cap), who withdrew: confidential
model.safetensors history.json result.json privacy.txt    the finished run
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint
from fpfl.fingerprint import (
    code_fingerprint,
    data_fingerprint,
    environment,
    model_fingerprint,
    settings_fingerprint,
)
from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.filter import Mechanism, good_order
from fpfl.privacy.ledger import RunLedger, Terms
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.population import PopulationLedger
from fpfl.privacy.settings import Privacy
from fpfl.privacy.statement import PrivacyStatement, round_up
from fpfl.server.journal import Journal, Past, begin_state, check_charges, read_past
from fpfl.server.ranks import Ranks
from fpfl.server.state import ServerState
from fpfl.server.withdrawals import WITHDRAWALS, read_withdrawals
from fpfl.store.chain import ChainError
from fpfl.store.files import explained, write_whole
from fpfl.store.locks import held

FORMAT = 1
LEDGER = "ledger.jsonl"
_BEGINNING = ("run.json", "schema.json", "environment.json", "checkpoint-00000000.safetensors")
"""What is written before the ledger, with which a run has begun."""
_ABOUT = {
    "run": str,
    "simulation": bool,
    "strict": bool,
    "settings": dict,
    "fingerprints": dict,
    "population_ledger": str | None,
}
"""What ``run.json`` has besides its format."""
_RECORDS = {
    "open": ("folder", "population"),
    "resume": ("folder", "settings"),
    "finish": ("rounds",),
    "evaluation": ("epsilon", "delta"),
}
"""What is asked of a ledger's records after they were read."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written down, and how it is resumed.

    Parameters
    ----------
    path
        The folder; for a new run it must not be there, or be empty.
    resume
        Go on with the run in the folder.
    ledger
        A population ledger that the run's charges go to as well (`fpfl.PopulationLedger`).
    checkpoint_every
        Rounds between two checkpoints. What was released since the last one is logged, so nothing
        is lost between them.
    moved
        When resuming: the folder was moved or restored, and no other copy of it will be resumed.
    files
        Further texts to write into a new folder, by name.
    """

    path: Path
    resume: bool = False
    ledger: Path | None = None
    checkpoint_every: int = 200
    moved: bool = False
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.ledger is not None:
            object.__setattr__(self, "ledger", Path(self.ledger))
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every}; it must be at least 1")


def as_run_folder(folder: str | Path | RunFolder) -> RunFolder:
    """A folder with its settings, where just its path was given."""
    return folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))


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


def begun_with(
    folder: RunFolder,
    settings: dict[str, Any],
    seeds: tuple[Any, ...],
    model: nn.Module,
    data: FederatedDataset,
    constraint: Constraint | None,
    optimizer: Any,
    plan: PrivacyPlan | None,
    privacy: Privacy | None,
) -> Begun:
    """What a training is begun with; ``seeds`` are its seeds and whatever else moves its bits."""
    seed, noise_seed, *_ = seeds
    functions = [f for r in constraint.rates for f in (r.condition, r.true)] if constraint else []
    about = environment()
    bits = {"seeds": repr(seeds), "threads": about["threads"], "gpu": about["gpu"]}
    return Begun(
        settings=settings,
        fingerprints={
            "data": data_fingerprint(data),
            "settings": settings_fingerprint(settings | bits),
            "model": model_fingerprint(model),
            "code": code_fingerprint(*functions, *([optimizer] if optimizer else [])),
        },
        schema=data.schema.as_dict(),
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
        return planned
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
    about = read_about(folder.path)
    ledger = look(folder.path)
    before = (ledger.settings or about["settings"])["privacy"] or {}
    if ledger.mechanism is None or privacy.epsilon is None:
        return privacy
    if before.get("epsilon") != privacy.epsilon:
        raise ValueError(
            f"the run was begun with epsilon={before.get('epsilon')} and cannot go on with "
            f"epsilon={privacy.epsilon}: that was spent as planned. Give noise_multiplier for "
            "other noise; the budget that was fixed at the beginning stays"
        )
    return replace(privacy, epsilon=None, noise_multiplier=ledger.mechanism.noise_multiplier)


def statement(
    plan: PrivacyPlan | None, ledger: RunLedger | None, seeded_noise: bool, seeded_cohorts: bool
) -> PrivacyStatement | None:
    """What a run promises: as planned, or what the filter of changed settings kept to."""
    if plan is None:
        return None
    said = plan.statement(seeded_noise=seeded_noise, seeded_cohorts=seeded_cohorts)
    if ledger is None:
        return said
    limit = ledger.filter
    if limit is not None:
        said = said.filtered(limit, ledger.charges, len(ledger.changes))
    if ledger.population is not None:
        said = replace(said, population_ledger=ledger.population.summary())
    return said


@dataclass(frozen=True)
class Kept:
    """A run that is kept in a folder: its past and, in the process that writes, its journal."""

    past: Past
    journal: Journal | None


def opened(folder: RunFolder, begun: Begun, state: ServerState, ranks: Ranks) -> Kept:
    """Begin or resume a run; ``state`` is the one that a new run begins with.

    The first process writes. The others read what it has begun or found.
    """
    if not ranks.first:
        ranks.numbers_from_first([0])
        return Kept(read_past(folder.path, begun.simulation, begun.cap), None)
    if folder.resume:
        _check_first(folder, begun, state)
    ledger = _resume(folder) if folder.resume else _begin(folder, begun, state)
    try:
        past = read_past(folder.path, begun.simulation, begun.cap)
        past = replace(past, notes=(*past.notes, *check_charges(folder.path, past, ledger)))
        for part in folder.path.glob(".*.part"):  # files that a crash kept from becoming any
            part.unlink()
        if folder.resume:
            _go_on(folder, begun, past, ledger)
        every, capped = folder.checkpoint_every, begun.cap is not None
        journal = Journal(folder.path, past, ledger, every=every, capped=capped)
    except BaseException:
        ledger.close()
        raise
    ranks.numbers_from_first([0])  # the others may read now
    return Kept(past, journal)


def _begin(folder: RunFolder, begun: Begun, state: ServerState) -> RunLedger:
    """Make the folder of a new run."""
    path = folder.path
    with explained(path, "Nothing was begun; name a folder that can be written to"):
        path.mkdir(parents=True, exist_ok=True)
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
    about = {
        "format": FORMAT,
        "run": run,
        "simulation": begun.simulation,
        "strict": begun.strict,
        "settings": begun.settings,
        "fingerprints": begun.fingerprints,
        "population_ledger": None if folder.ledger is None else str(folder.ledger.resolve()),
    }
    for name, content in folder.files.items():
        write_whole(path / name, content.encode())
    for name, values in (("schema", begun.schema), ("environment", begun.environment)):
        write_whole(path / f"{name}.json", as_json(values))
    begin_state(path, state)
    write_whole(path / "run.json", as_json(about))
    return RunLedger.create(
        path / LEDGER,
        run=run,
        terms=_terms(begun),
        simulation=begun.simulation,
        population=population,
    )


def _check_first(folder: RunFolder, begun: Begun, state: ServerState) -> None:
    """Read all that a run goes on from, and write nothing: what is wrong is left as it was found.

    Opening a ledger to write ends a line that was cut off, and so changes the file.
    """
    path = folder.path
    about = read_about(path)
    changed = _changed(about, begun)
    if about["strict"] and changed:
        raise ValueError(
            f"the seeded run in {path} was begun with other {' and '.join(changed)}: "
            "drawing the same random numbers again with these would not give the same run, and "
            "where noise is seeded it would reveal the difference. Resume it as it was begun, or "
            "start a new run"
        )
    file = os.open(path / LEDGER, os.O_RDONLY)
    try:
        with held(file, path / LEDGER, "LOCK_SH", 0.0):
            ledger = look(path)
            past = read_past(path, begun.simulation, begun.cap)
            check_charges(path, past, ledger)
    finally:
        os.close(file)
    if ledger.run != about["run"]:
        raise ValueError(
            f"{path / 'run.json'} and {path / LEDGER} are of two different runs; put back the one "
            "that belongs to the other"
        )
    _check_same_kind(path, begun, ledger)
    _check_state(path, past.state, state)
    if past.state.optimizer:
        old = (ledger.settings or about["settings"]).get("optimizer")
        kinds = [(given or {"kind": "SGD"})["kind"] for given in (old, begun.settings["optimizer"])]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the run in {path} has the state of the optimiser {kinds[0]}, which "
                f"{kinds[1]} cannot go on with: resume it with {kinds[0]}"
            )
    users, population = read_withdrawals(path / WITHDRAWALS), begun.settings["population"]
    if users and max(users) >= population:
        raise ValueError(
            f"{path / WITHDRAWALS} names user {max(users)}; indices run from 0 to "
            f"{population - 1}. Correct it"
        )


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


def _resume(folder: RunFolder) -> RunLedger:
    """Open the ledger of a run that goes on."""
    given = folder.ledger or read_about(folder.path)["population_ledger"]
    population = None if given is None else PopulationLedger.open(Path(given))
    try:
        return RunLedger.open(folder.path / LEDGER, population=population, moved=folder.moved)
    except BaseException:
        if population is not None:
            population.close()
        raise


def _go_on(folder: RunFolder, begun: Begun, past: Past, ledger: RunLedger) -> None:
    """Record that the run goes on, and with what; what costs other than planned is filtered."""
    about = read_about(folder.path)
    old = ledger.settings or about["settings"]
    what = [
        f"{name}: {old.get(name)} -> {value}"
        for name, value in begun.settings.items()
        if old.get(name) != value
    ]
    notes = [f"{n} differ from the beginning" for n in _changed(about, begun) if n != "settings"]
    if begun.plan is not None:
        ledger.go_on(Mechanism.of(begun.plan), begun.plan.rounds, what)
    ledger.resume(
        folder.path / LEDGER, past.next_round, [*notes, *what, *past.notes], begun.settings
    )


def _changed(about: dict[str, Any], begun: Begun) -> list[str]:
    old, new = about["fingerprints"], begun.fingerprints
    return [name for name in new if old.get(name) != new[name]]


def read_about(path: Path) -> dict[str, Any]:
    """What a run folder says about its run."""
    _check_begun(path)
    file = path / "run.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        version = about["format"]
        if type(version) is not int:
            raise TypeError(f"its format is {version!r}")
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what a run writes ({error!r}); put an intact copy in its place"
        ) from error
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer fpfl (format {version}; this one reads up to {FORMAT}):"
            " upgrade fpfl to resume it"
        )
    wrong = [name for name, kind in _ABOUT.items() if not isinstance(about.get(name, ...), kind)]
    if not wrong:
        settings = about["settings"]
        good = isinstance(settings.get("privacy", ...), dict | None)
        wrong = [] if good and type(settings.get("population")) is int else ["settings"]
    if wrong:
        raise ValueError(
            f"{file} lacks {wrong}, or has something else in their places; put an intact copy in "
            "its place"
        )
    return dict(about)


def _check_begun(path: Path) -> None:
    if not (path / LEDGER).is_file():
        raise ValueError(f"{path} has no run that was begun (no {LEDGER}); start one: fpfl train")


def look(path: Path) -> RunLedger:
    """The ledger in a run folder as it is now; one that is in order and not a run's is refused."""
    _check_begun(path)
    try:
        with RunLedger.look(path / LEDGER) as ledger:
            # Every record but the last is vouched for by the one after it.
            for record in ledger.chain.records:
                for name in _RECORDS.get(record["kind"], ()):
                    record[name]
            return ledger
    except (KeyError, TypeError, AttributeError) as error:
        raise ChainError(
            f"{path / LEDGER} is not the ledger of a run ({error!r}); put an intact copy in its "
            "place"
        ) from error


def finished(path: Path) -> bool:
    """Whether the run in a folder is finished: it ended, and was not resumed since."""
    return look(path).finished


def _terms(begun: Begun) -> Terms | None:
    if begun.plan is None:
        return None
    budget, mechanism = begun.budget, Mechanism.of(begun.plan)
    return Terms(
        mechanism=mechanism,
        rounds=begun.plan.rounds,
        delta=begun.plan.delta,
        budget=budget,
        order=None if budget is None else good_order(budget, begun.plan.delta, mechanism),
    )


def as_json(values: Any) -> bytes:
    """Plain values as the text of a file."""
    return (json.dumps(values, indent=1) + "\n").encode()
