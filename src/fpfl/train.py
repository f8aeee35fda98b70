"""``fpfl.train``: one call from a model and a population to a fair, private model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.totals import SMALLEST_COUNT
from fpfl.methods import MMDM, Method, Unconstrained
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling
from fpfl.privacy.settings import Clipping, Privacy, Sampling
from fpfl.randomness import stream
from fpfl.run import Run, with_parameters
from fpfl.server.round import Callback, OptimizerFactory, Row, ServerSettings, serve
from fpfl.server.selection import Rule
from fpfl.server.simulation import Simulation
from fpfl.thirdparty.noise import SeededNoise, SystemNoise
from fpfl.thirdparty.sums import ThirdParty
from fpfl.users.engine import MEMORY_BUDGET, CohortEngine, FlatModel
from fpfl.users.layout import Layout
from fpfl.users.task import check_model


class FpflWarning(UserWarning):
    """Something about a run that its user should know."""


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
    selection: Rule = "best",
    selection_window: int = 1,
    seed: int | None = None,
    noise_seed: int | None = None,
    memory: int = MEMORY_BUDGET,
    device: torch.device | str | None = None,
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
    selection
        ``"best"``, ``"last"`` or ``"average"``.
    selection_window
        With ``"best"``: judge by the counts of so many rounds together and keep the mean of their
        models; 1 is the paper's rule, about 10 is steadier where cohorts are small or noisy.
    seed
        Seeds cohorts; without it they come from the operating system's randomness.
    noise_seed
        Seeds the noise, for simulations only: the privacy statement then says that there is no
        guarantee against anyone who has the seed.
    memory
        Bytes that a chunk of users may take.
    device
        Where to compute; the model's own device when it is not given.
    callbacks
        Called with a `RoundEvent` after each round.

    Returns
    -------
    Run
        The selected model, the history, the privacy statement.
    """
    _check_types(constraint, method, privacy, optimizer)
    flat, data = _prepare(model, data, device)
    method = _method(method, constraint)
    clipping = _clipping(privacy, clip)
    _check(data, constraint, cohort, rounds, samples_per_user, learning_rate)
    _check_words(selection, sampling, selection_window)
    basis: Literal["paper", "split"] = "split" if clipping and clipping.counts else "paper"
    engine = CohortEngine(
        flat,
        data,
        constraint,
        basis=basis,
        samples_per_user=samples_per_user,
        memory=memory,
    )
    blocks = clipping.blocks(constrained=constraint is not None, selection=True) if clipping else ()
    plan = None
    if privacy is not None:
        plan = privacy.plan(population=data.population, cohort=cohort, rounds=rounds, blocks=blocks)
    source = SystemNoise() if noise_seed is None else SeededNoise(noise_seed)
    third_party = ThirdParty(engine.layout.slices, blocks, plan, source)
    federation = Simulation(
        engine,
        third_party,
        _sampling(sampling, plan, data.population, cohort),
        stream(seed, "cohorts"),
        stream(seed, "samples"),
    )
    settings = ServerSettings(
        layout=engine.layout,
        method=method,
        optimizer=optimizer or (lambda w: torch.optim.SGD(w, lr=learning_rate)),
        rounds=rounds,
        normaliser=_normaliser(normaliser, cohort, data),
        tolerance=constraint.tolerance if constraint else 0.0,
        smallest_count=_smallest_count(third_party, engine.layout),
        selection=selection,
        selection_window=selection_window,
    )
    outcome = serve(federation, flat.vector(), settings, callbacks)
    notes = _drowned(outcome.history, third_party, engine.layout)
    for note in (*notes, *([outcome.stopped] if outcome.stopped else [])):
        warnings.warn(note, FpflWarning, stacklevel=2)
    return Run(
        model=with_parameters(flat, outcome.w),
        history=outcome.history,
        privacy=plan.statement(seeded_noise=source.seeded, seeded_cohorts=seed is not None)
        if plan
        else None,
        selected=outcome.selected,
        constraint=constraint,
        stopped=outcome.stopped,
        warnings=notes,
        settings={
            "cohort": cohort,
            "rounds": rounds,
            "population": data.population,
            "constraint": constraint.name if constraint else None,
            "tolerance": constraint.tolerance if constraint else None,
            "method": _plain(method),
            "privacy": _plain(privacy),
            "clip": _plain(clipping),
            "learning_rate": learning_rate if optimizer is None else None,
            "normaliser": settings.normaliser,
            "optimizer": None if optimizer is None else repr(optimizer),
            "sampling": type(federation.sampling).__name__,
            "samples_per_user": samples_per_user,
            "selection": selection,
            "selection_window": selection_window,
            "seeded_cohorts": seed is not None,
            "seeded_noise": noise_seed is not None,
        },
    )


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that this machine does not have."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {str(device)!r} cannot be used here: {reason}") from error


def _check_types(constraint: object, method: object, privacy: object, optimizer: object) -> None:
    wanted = (
        ("constraint", constraint, isinstance(constraint, Constraint), "fpfl.fnr_parity('sex')"),
        ("method", method, callable(getattr(method, "update", None)), "fpfl.MMDM()"),
        ("privacy", privacy, isinstance(privacy, Privacy), "fpfl.Privacy(epsilon=2, clip=1)"),
        ("optimizer", optimizer, callable(optimizer), "lambda w: torch.optim.Adam(w, lr=0.01)"),
    )
    for name, given, good, example in wanted:
        if given is not None and (not good or (name == "method" and isinstance(given, type))):
            raise ValueError(f"{name} is {given!r}; expected something like {example}")


def _prepare(
    model: nn.Module, data: FederatedDataset, device: torch.device | str | None
) -> tuple[FlatModel, FederatedDataset]:
    """Copy the model, so that the caller's is not changed, and put the data beside it."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(data, FederatedDataset):
        raise ValueError(
            f"data is a {type(data).__name__}; expected a FederatedDataset "
            "(FederatedDataset.from_samples makes one from arrays)"
        )
    check_device(device)
    model = copy.deepcopy(model).train()
    if device is not None:
        model = model.to(device)
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise ValueError("the model has no parameters; give one that can be trained")
    data = data.to(parameter.device, parameter.dtype)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameters; give one that has")
    check_model(model, data.schema, data.features.dtype)
    flat = FlatModel.of(model)
    if not bool(flat.vector().isfinite().all()):
        raise ValueError("the model's initial parameters are not finite; initialise it first")
    return flat, data


def _method(method: Method | None, constraint: Constraint | None) -> Method:
    if constraint is None:
        if method is not None and not isinstance(method, Unconstrained):
            raise ValueError(
                f"the method {type(method).__name__} enforces a constraint and none was given; "
                "give e.g. constraint=fpfl.fnr_parity('sex')"
            )
        return Unconstrained()
    return method or MMDM()


def _clipping(privacy: Privacy | None, clip: float | Clipping | None) -> Clipping | None:
    if privacy is not None:
        if clip is not None:
            raise ValueError(
                "clip was given beside privacy; the clip bounds belong to the privacy plan: "
                "give Privacy(clip=...)"
            )
        return privacy.clipping
    return clip if clip is None or isinstance(clip, Clipping) else Clipping(float(clip))


def _check(
    data: FederatedDataset,
    constraint: Constraint | None,
    cohort: int,
    rounds: int,
    samples_per_user: int | None,
    learning_rate: float,
) -> None:
    for name, number in (("cohort", cohort), ("rounds", rounds)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            raise ValueError(f"{name} is {number!r}; give a whole number")
    if cohort < 1 or cohort > data.population:
        raise ValueError(
            f"the cohort is {cohort}; it must be between 1 and the population {data.population}"
        )
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    if samples_per_user is not None and samples_per_user < 1:
        raise ValueError(f"samples_per_user is {samples_per_user}; it must be at least 1")
    if not learning_rate > 0:
        raise ValueError(f"the learning rate is {learning_rate}; it must be positive")
    if constraint is None:
        return
    schema = data.schema
    constraint.check(schema.classes, schema.label_range)
    # This looks at data: whoever has it all in one place sees the message, before anything is
    # released. A deployment, whose server has no data, cannot make this check.
    groups = constraint.bind(schema.attributes)
    member, names = groups.membership(data.attributes), groups.names
    for rate in constraint.rates:
        condition = rate.condition(data.labels)
        if not bool(condition.any()):
            raise ValueError(
                f"no sample meets the condition of the rate {rate.name!r}, so {constraint.name} "
                "cannot be enforced; check the labels, or choose another constraint"
            )
        counts = (member & condition.unsqueeze(-1)).sum(dim=0).tolist()
        empty = [name for name, count in zip(names, counts, strict=True) if count == 0]
        if empty:
            raise ValueError(
                f"no sample of {empty} meets the condition of the rate {rate.name!r}; drop the "
                "group from the constraint, or merge it with another"
            )


def _check_words(selection: str, sampling: str | None, window: int) -> None:
    if selection not in get_args(Rule):
        raise ValueError(f"selection is {selection!r}; expected one of {get_args(Rule)}")
    if sampling is not None and sampling not in get_args(Sampling):
        raise ValueError(f"sampling is {sampling!r}; expected one of {get_args(Sampling)}")
    if window < 1:
        raise ValueError(f"selection_window is {window}; it must be at least 1")


def _smallest_count(third_party: ThirdParty, layout: Layout) -> float:
    """Two standard deviations of the noise on n'_a, and no less than one sample."""
    if third_party.plan is None or not layout.rates:
        return SMALLEST_COUNT
    noise = float(third_party.noise_stddev[layout.slices["n"].start])
    # In the split basis n' is the sum of two noisy numbers.
    return max(SMALLEST_COUNT, 2.0 * noise * (2.0**0.5 if layout.basis == "split" else 1.0))


def _sampling(
    sampling: Sampling | None, plan: PrivacyPlan | None, population: int, cohort: int
) -> PoissonSampling | FixedSizeSampling:
    if plan is not None:
        chosen = plan.sampling
        wanted = {"poisson": PoissonSampling, "without-replacement": FixedSizeSampling}
        if sampling is not None and not isinstance(chosen, wanted[sampling]):
            raise ValueError(
                f"sampling={sampling!r} does not go with the convention {plan.convention!r}, whose "
                "accountant assumes another sampler; leave sampling out, or change the convention"
            )
        return chosen
    if sampling == "without-replacement":
        return FixedSizeSampling(population, cohort)
    return PoissonSampling(population, cohort)


def _normaliser(
    normaliser: Literal["users", "samples"] | float, cohort: int, data: FederatedDataset
) -> float:
    if normaliser == "users":
        return float(cohort)
    if normaliser == "samples":
        mean = data.schema.samples_per_user
        if mean is None:
            raise ValueError(
                "normaliser='samples' needs a public constant: declare samples_per_user (the "
                "expected number a user has) in the schema, or give the number itself"
            )
        return cohort * mean
    if isinstance(normaliser, str) or not normaliser > 0:
        raise ValueError(
            f"normaliser is {normaliser!r}; give 'users', 'samples' or a positive public constant"
        )
    return float(normaliser)


def _drowned(history: Sequence[Row], third_party: ThirdParty, layout: Layout) -> tuple[str, ...]:
    """Name the constraints whose counts are small against their own noise."""
    if third_party.plan is None or not history:
        return ()
    notes = []
    accuracies = [row["accuracy"] for row in history]
    unlikely = [a for a in accuracies if a is None or not 0.0 <= a <= 1.0]
    if len(unlikely) > 0.05 * len(accuracies):
        notes.append(
            f"the noise drowns the released accuracy: {len(unlikely)} of {len(accuracies)} rounds "
            "gave none or one outside [0, 1], so the best round is a lucky one. Use "
            "selection='average' or 'last', a selection_window, or larger cohorts"
        )
    if not layout.rates:
        return tuple(notes)
    stddev = float(third_party.noise_stddev[layout.slices["F"].start])
    drowned = []
    for rate in layout.rates:
        means = {
            group: sum(row["counts"][rate][group] or 0.0 for row in history) / len(history)
            for group in layout.groups
        }
        small = [f"{group} (about {max(n, 0):.0f})" for group, n in means.items() if n < 2 * stddev]
        drowned += [f"{rate} in {', '.join(small)}"] if small else []
    if drowned:
        notes.append(
            f"the noise drowns the signal of {'; '.join(drowned)}: a cohort counts fewer samples "
            f"there than twice the noise of {stddev:.1f}. Take larger cohorts, give counts a block "
            "of their own (Clipping(counts=...)), or merge groups"
        )
    return tuple(notes)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **asdict(value)}
    return repr(value)
