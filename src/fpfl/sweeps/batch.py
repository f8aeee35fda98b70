"""Trainings side by side: those of one shape are one computation.

A group of trainings that differ in seeds, noise, learning rates, bounds, tolerances, multipliers'
settings, initial weights or populations is run with the run as one more dimension
(`fpfl.sweeps.release`, `fpfl.sweeps.servers`), by the same loop as a single one. What cannot be
grouped is trained one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fpfl.aggregation.sums import ThirdParty
from fpfl.data.federated import FederatedDataset
from fpfl.numerics.randomness import RoundStreams
from fpfl.runs.resume import statement
from fpfl.server.loop import serve
from fpfl.server.ranks import Ranks
from fpfl.sweeps.alike import made_of
from fpfl.sweeps.release import Sampled, SideBySide
from fpfl.sweeps.servers import Servers, can_be_mapped, shape
from fpfl.training.run import Run
from fpfl.training.session import Prepared, finished, prepare, train
from fpfl.training.spec import collapse_notes, noise_notes
from fpfl.users.engine import CohortEngine
from fpfl.users.task import has_dropout

ALONE_TOO = (
    "one of {runs} trainings that were computed side by side: a simulation. A model that is to be "
    "released is trained on its own"
)
"""What a run of a group says."""

MEMORY = 4 * 2**30
"""Bytes that a group's models, sums and histories may take, by default."""

COPIES = 12
"""About how many numbers of eight bytes a run keeps for each of v's."""

FIGURES = 16
"""About how many bytes a run keeps of each number of a round's history."""


@dataclass(frozen=True)
class Job:
    """One training: what ``fpfl.train`` would be called with.

    Parameters
    ----------
    model, data
        The initial model and the population.
    settings
        Keywords of `fpfl.train`; not folder, ledger and callbacks, which belong to one run.
    """

    model: nn.Module
    data: FederatedDataset
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        own = sorted({"folder", "ledger", "callbacks"} & self.settings.keys())
        if own:
            raise ValueError(
                f"{', '.join(own)} belong to a run that is trained on its own; leave them out"
            )


@dataclass
class _Group:
    """Trainings of one shape, by their numbers."""

    numbers: list[int] = field(default_factory=list)
    trainings: list[Prepared] = field(default_factory=list)
    memory: int | None = None


def trained(
    jobs: Sequence[Job],
    *,
    memory: int | None = None,
    watch: Callable[[Sequence[int], int], None] | None = None,
) -> Iterator[tuple[int, Run]]:
    """Train all of them; yields (its number, the finished run) as groups finish.

    Parameters
    ----------
    jobs
        The trainings.
    memory
        Bytes that a group may take besides the cohorts that are computed; by default 4 GiB. More
        trainings than fit are cut into groups.
    watch
        Called after every round of a group with the numbers of its runs and the round.
    """
    groups: dict[Any, _Group] = {}
    alone: list[int] = []
    moved: dict[Any, FederatedDataset] = {}
    scaled: dict[Any, Prepared] = {}
    for number, job in enumerate(jobs):
        given = dict(job.settings)
        budget = given.pop("memory", None)
        if not _can_be_grouped(job):
            alone.append(number)
            continue
        source = _beside(job, moved)
        made = _scaled(prepare(job.model, source, **given), source, scaled)
        if not tried_before_a_run(made.spec.flat.vector().device, made.third_party):
            alone.append(number)
            continue
        group = groups.setdefault((_shape(made), budget), _Group(memory=budget))
        group.numbers.append(number)
        group.trainings.append(made)
    for group in groups.values():
        if len(group.numbers) == 1:
            alone += group.numbers
            continue
        settings = [each.spec.server(each.third_party) for each in group.trainings]
        if not can_be_mapped(settings, group.trainings[0].spec.flat.vector()):
            alone += group.numbers
            continue
        engine, refused = _engine(group.trainings, group.memory)
        if refused:
            alone += group.numbers
            continue
        for part in _fitting(group, memory or MEMORY):
            yield from zip(part.numbers, _run(part, engine, watch), strict=True)
    for number in sorted(alone):
        job = jobs[number]
        run = train(job.model, job.data, **job.settings)
        if watch is not None:
            watch([number], len(run.history))
        yield number, run


def _can_be_grouped(job: Job) -> bool:
    # Processes that share the work of one run have cohorts of their own to agree on, and lazy
    # data is read for one run.
    return Ranks.current().size == 1 and not getattr(job.data, "lazy", True)


def tried_before_a_run(device: torch.device, third_party: ThirdParty) -> bool:
    """Whether all kernels of a group are those that are tried before a private run begins.

    On a GPU the products of several runs are another kernel (`fpfl.users.steady`), which nothing
    has tried: where the noise is real, so is what it has to hide.
    """
    real = third_party.plan is not None and not third_party.source.seeded
    return device.type == "cpu" or not real


def _beside(job: Job, moved: dict[Any, FederatedDataset]) -> FederatedDataset:
    """The job's population on its device; one that several jobs share is moved and checked once."""
    parameter = next(iter(job.model.parameters()), torch.zeros(()))
    device = job.settings.get("device") or parameter.device
    key = (id(job.data), str(device), parameter.dtype)
    if key not in moved:
        try:
            moved[key] = job.data.to(torch.device(device), parameter.dtype)
        except (RuntimeError, AssertionError):
            return job.data  # `prepare` says what is wrong with the device
    return moved[key]


def _scaled(made: Prepared, source: FederatedDataset, known: dict[Any, Prepared]) -> Prepared:
    """The training with its inputs scaled; runs that scale alike share one population.

    ``source`` is the population as it was asked for: it outlives ``known``, so its identity does,
    too. What `prepare` makes of it does not: another one may come to lie in its place.

    Each private run measures for itself, with its own noise: runs of one seed and one ε draw the
    same noise and have the same scaling.
    """
    if made.inputs is None:
        return made
    plan, noise = made.spec.plan, made.third_party.source
    key: Any = (id(source), made.data.schema.class_weights, made.inputs)
    if made.inputs.measured and plan is not None:
        own = noise if noise.seeded else object()  # noise of the system's is everyone's own
        key = (*key, plan.measurement, plan.neighbours, own)
    if key not in known:
        known[key] = made.scaled(made.inputs.found(made.data, plan, noise))
    found = known[key]
    return replace(made, data=found.data, inputs=None, scaling=found.scaling)


def _shape(made: Prepared) -> tuple[Any, ...]:
    """What trainings must have in common to be computed as one."""
    spec = made.spec
    w, constraint = spec.flat.vector(), spec.constraint
    return (
        made_of(spec.flat.module),
        spec.flat.names,
        spec.flat.shapes,
        (w.dtype, str(w.device), made.data.features.dtype, made.data.labels.dtype),
        (replace(spec.schema, population=None), made.data.schema.label_unit),
        None if constraint is None else made_of(replace(constraint, tolerance=0.5)),
        shape(spec.server(made.third_party)),
        tuple((rule.name, tuple(rule.parts), rule.order) for rule in made.third_party.rules),
        spec.plan is None,
        spec.optimizer is None,
        (spec.cohort, spec.samples_per_user, spec.local, made.precision),
    )


def _engine(trainings: Sequence[Prepared], memory: int | None) -> tuple[CohortEngine, str | None]:
    """What computes the users of all these, and why it cannot, where that is so."""
    joint = replace(trainings[0], data=_joined(trainings))
    engine, refused = joint.engine(memory)
    if refused is None and engine.tile is None:
        refused = "every user is computed alone"
    return engine, refused


def _populations(trainings: Sequence[Prepared]) -> list[FederatedDataset]:
    """The populations that there are, each once."""
    return list({id(each.data): each.data for each in trainings}.values())


def _joined(trainings: Sequence[Prepared]) -> FederatedDataset:
    """All users of all populations, those of a population together."""
    different = _populations(trainings)
    if len(different) == 1:
        return different[0]
    counts = torch.tensor([len(each) for each in different])
    before = torch.cumsum(counts, 0) - counts
    offsets = [each.offsets[:-1] + first for each, first in zip(different, before, strict=True)]
    return FederatedDataset(
        torch.cat([each.features for each in different]),
        torch.cat([each.labels for each in different]),
        torch.cat([each.attributes for each in different]),
        torch.cat([*offsets, counts.sum().reshape(1)]),
        replace(different[0].schema, population=None),
        checked=all(each.checked for each in different),
    )


def _fitting(group: _Group, memory: int) -> Iterator[_Group]:
    """The group in parts that fit the memory."""
    spec = group.trainings[0].spec
    layout = spec.layout
    counted = 4 * len(layout.rates) * max(1, len(layout.groups)) + (layout.classes or 0) ** 2
    history = spec.rounds * FIGURES * (counted + 4)
    each = 8 * COPIES * layout.size + history
    most = max(1, int(memory // each))
    parts = -(-len(group.numbers) // most)
    size = -(-len(group.numbers) // parts)
    for start in range(0, len(group.numbers), size):
        some = slice(start, start + size)
        yield _Group(group.numbers[some], group.trainings[some], group.memory)


def _run(
    group: _Group,
    engine: CohortEngine,
    watch: Callable[[Sequence[int], int], None] | None,
) -> Iterator[Run]:
    """Train a group, and say of each run what `fpfl.train` would."""
    trainings = group.trainings
    different = _populations(trainings)
    first, start = {}, 0
    for data in different:
        first[id(data)] = start
        start += data.population

    def watched(round: int) -> None:
        if watch is not None:
            watch(group.numbers, round)

    side_by_side = SideBySide(
        engine,
        [each.third_party for each in trainings],
        [_sampled(each, first[id(each.data)]) for each in trainings],
        trainings[0].spec.rounds,
        watched,
    )
    w = torch.stack([each.spec.flat.vector() for each in trainings])
    servers = Servers(w, [each.spec.server(each.third_party) for each in trainings], _rates(group))
    serve(side_by_side, servers)
    for made, outcome in zip(trainings, servers.outcomes(), strict=True):
        spec, settings = made.spec, made.spec.settings | made.more
        notes = noise_notes(outcome.history, made.third_party, spec.layout, spec.selection)
        said = statement(
            spec.plan,
            None,
            made.third_party.source.seeded,
            made.seed is not None,
            None,
            size=spec.layout.size,
            declared=settings.get("population_declared"),
            measured=made.numbers,
        )
        notes += collapse_notes(outcome.history, spec.schema)
        notes = (ALONE_TOO.format(runs=len(trainings)), *notes)
        yield finished(spec, outcome, said, settings, notes, made.scaling)


def _sampled(made: Prepared, first: int) -> Sampled:
    seed, sampling = made.seed, made.sampling
    common = Ranks.current().agreed_seed(seed)
    participation = sampling.participation()
    # With a cap each run counts for itself.
    same = None if seed is None or participation.cap is not None else (seed, sampling)
    streams = RoundStreams(common, "cohorts"), RoundStreams(common, "samples")
    spec = made.spec
    limited = spec.samples_per_user is not None or spec.local is not None
    random = limited or has_dropout(spec.flat.module)
    return Sampled(sampling, *streams, same, first, participation, random)


def _rates(group: _Group) -> list[float] | None:
    """Each run's η, where all take plain steps."""
    specs = [each.spec for each in group.trainings]
    if any(spec.optimizer is not None for spec in specs):
        return None
    return [spec.learning_rate for spec in specs]
