"""What the arguments of ``fpfl.train`` mean: checks, defaults, and what follows from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.compat import written
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.totals import SMALLEST_COUNT
from fpfl.methods import MMDM, Method, ReweightingMethod, Unconstrained
from fpfl.methods.base import Surrogate
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling
from fpfl.privacy.settings import Clipping, Privacy, Sampling
from fpfl.server.selection import Rule
from fpfl.server.state import Row
from fpfl.training.defaults import with_counts
from fpfl.users.engine import MEMORY_BUDGET
from fpfl.users.flat import FlatModel
from fpfl.users.layout import Layout
from fpfl.users.local import FederatedAveraging
from fpfl.users.precision import Precision
from fpfl.users.task import check_model


class Noisy(Protocol):
    """Whoever adds noise to totals: the plan, and the noise's deviation on every number of v."""

    @property
    def plan(self) -> PrivacyPlan | None:
        """The privacy plan; None without noise."""
        ...

    @property
    def noise_stddev(self) -> Tensor:
        """The standard deviation of the noise on every number of v."""
        ...


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that this machine does not have."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {str(device)!r} cannot be used here: {reason}") from error


def check_types(
    constraint: object, method: object, privacy: object, optimizer: object, local: object
) -> None:
    """Refuse what cannot be a constraint, a method, privacy settings, and so on."""
    wanted = (
        ("constraint", constraint, isinstance(constraint, Constraint), "fpfl.fnr_parity('sex')"),
        ("method", method, callable(getattr(method, "update", None)), "fpfl.MMDM()"),
        ("privacy", privacy, isinstance(privacy, Privacy), "fpfl.Privacy(epsilon=2, clip=1)"),
        ("optimizer", optimizer, callable(optimizer), "lambda w: torch.optim.Adam(w, lr=0.01)"),
        ("local", local, isinstance(local, FederatedAveraging), "fpfl.FederatedAveraging(4, 0.1)"),
    )
    for name, given, good, example in wanted:
        if given is not None and (not good or (name == "method" and isinstance(given, type))):
            raise ValueError(f"{name} is {given!r}; expected something like {example}")


def check_broadcasting(method: Method) -> None:
    """Refuse a method of one's own that has some of what broadcasting takes, and not all of it."""
    names = ("begin", "weights", "surrogate")
    found = [name for name in names if hasattr(method, name)]
    if not found:
        return
    callables = all(callable(getattr(method, name, None)) for name in names[:2])
    if not callables or getattr(method, "surrogate", None) not in get_args(Surrogate):
        raise ValueError(
            f"the method {type(method).__name__} has {', '.join(found)}: a method that broadcasts "
            f"weights needs begin(...), weights(...) and a surrogate in {get_args(Surrogate)}; for "
            "any other choose other names"
        )


def prepared(
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
    parameter = next(iter(model.parameters()), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    flat = flat_model(model, data.schema, data.input_dtype(dtype), device)
    w = flat.vector()
    return flat, data.to(w.device, w.dtype)


def flat_model(
    model: nn.Module, schema: Schema, inputs: torch.dtype, device: torch.device | str | None = None
) -> FlatModel:
    """A copy of the model as a function of w, checked; ``inputs`` is what its features are in."""
    model = copy.deepcopy(model).train()
    if device is not None:
        model = model.to(device)
    if next(iter(model.parameters()), None) is None:
        raise ValueError("the model has no parameters; give one that can be trained")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameters; give one that has")
    check_model(model, schema, inputs)
    flat = FlatModel.of(model)
    if not bool(flat.vector().isfinite().all()):
        raise ValueError("the model's initial parameters are not finite; initialise it first")
    return flat


def chosen_method(method: Method | None, constraint: Constraint | None) -> Method:
    """The method, by default MMDM with a constraint and plain SGD without."""
    if constraint is None:
        if method is not None and not isinstance(method, Unconstrained):
            raise ValueError(
                f"the method {type(method).__name__} enforces a constraint and none was given; "
                "give e.g. constraint=fpfl.fnr_parity('sex')"
            )
        return Unconstrained()
    return method or MMDM()


def chosen_clipping(
    privacy: Privacy | None,
    clip: float | Clipping | None,
    method: Method,
    constraint: Constraint | None,
    schema: Schema,
) -> Clipping | None:
    """The clip bounds: the privacy plan's, or those of clipping without noise.

    A number bounds the paper's whole vector; with one gradient it bounds that, and the counts
    have a block of their own. Whoever wants it otherwise gives a `Clipping`.
    """
    if privacy is not None:
        if clip is not None:
            raise ValueError(
                "clip was given beside privacy; the clip bounds belong to the privacy plan: "
                "give Privacy(clip=...)"
            )
        clip = privacy.clip
    if clip is None or isinstance(clip, Clipping):
        return clip
    if isinstance(method, ReweightingMethod):
        return with_counts(float(clip), constraint, schema)
    return Clipping(float(clip))


def check_numbers(
    population: int,
    cohort: int,
    rounds: int,
    samples_per_user: int | None,
    learning_rate: float,
) -> None:
    """Refuse numbers out of range."""
    for name, number in (("cohort", cohort), ("rounds", rounds)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            raise ValueError(f"{name} is {number!r}; give a whole number")
    if cohort < 1 or cohort > population:
        raise ValueError(
            f"the cohort is {cohort}; it must be between 1 and the population {population}"
        )
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    if samples_per_user is not None and samples_per_user < 1:
        raise ValueError(f"samples_per_user is {samples_per_user}; it must be at least 1")
    if not learning_rate > 0:
        raise ValueError(f"the learning rate is {learning_rate}; it must be positive")


def check_settings(
    data: FederatedDataset,
    constraint: Constraint | None,
    cohort: int,
    rounds: int,
    samples_per_user: int | None,
    learning_rate: float,
    look: bool = True,
) -> None:
    """Refuse numbers out of range, and a constraint that this data cannot say anything about.

    The latter looks at data, where that is allowed.
    """
    check_numbers(data.K, cohort, rounds, samples_per_user, learning_rate)
    if constraint is None:
        return
    schema = data.schema
    constraint.check(schema.classes, schema.label_range)
    groups = constraint.bind(schema.attributes)
    # A deployment, whose server has no data, cannot make this check; nor is a population read from
    # disk for it, and a part of one could not tell that a group is empty.
    if data.lazy or not look:
        return
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


def check_words(selection: str, sampling: str | None, window: int, precision: str) -> None:
    """Refuse words that are no rule of selection or sampling, and no precision."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; expected one of {get_args(Precision)}")
    if selection not in get_args(Rule):
        raise ValueError(f"selection is {selection!r}; expected one of {get_args(Rule)}")
    if sampling is not None and sampling not in get_args(Sampling):
        raise ValueError(f"sampling is {sampling!r}; expected one of {get_args(Sampling)}")
    if window < 1:
        raise ValueError(f"selection_window is {window}; it must be at least 1")


def fingerprint(data: FederatedDataset) -> bytes:
    """What tells two populations apart: who has which labels and groups; of files, their shapes."""
    if data.lazy:
        return repr((data.population, len(data), data.schema)).encode()
    parts = (data.offsets, data.labels, data.attributes)
    return b"".join(part.cpu().numpy().tobytes() for part in parts) + repr(data.schema).encode()


def memory_budget(memory: int | None, device: torch.device) -> int:
    """Bytes that a chunk may take: what was asked for, or what suits the device."""
    if memory is None:
        return MEMORY_BUDGET * (16 if device.type == "cuda" else 1)
    if memory < 1:
        raise ValueError(f"memory is {memory}; give a positive number of bytes")
    return memory


def count_noise(third_party: Noisy, layout: Layout) -> float:
    """The standard deviation of the noise on F_a and its like."""
    if third_party.plan is None or not layout.rates:
        return 0.0
    return float(third_party.noise_stddev[layout.slices["n"].start])


def smallest_count(third_party: Noisy, layout: Layout) -> float:
    """Two standard deviations of the noise on n'_a, and no less than one sample."""
    noise = count_noise(third_party, layout)
    # In the split basis n' is the sum of two noisy numbers.
    return max(SMALLEST_COUNT, 2.0 * noise * (2.0**0.5 if layout.basis == "split" else 1.0))


def chosen_sampling(
    sampling: Sampling | None, plan: PrivacyPlan | None, data: FederatedDataset, cohort: int
) -> PoissonSampling | FixedSizeSampling:
    """How cohorts are drawn: as the plan's accountant assumes, or as asked, or Poisson.

    Over all users that there are. Where K is declared these may be more: Poisson cohorts draw
    each of them with probability m/K; for cohorts of a fixed size K must be right.
    """
    chosen = _kind_of_sampling(sampling, plan, data.K, cohort)
    if data.population == data.K:
        return chosen
    if isinstance(chosen, PoissonSampling):
        return replace(chosen, listed=data.population)
    raise ValueError(
        f"there are {data.population} users, and the schema declares {data.K}; cohorts of a fixed "
        "size are drawn from exactly K. Correct the number, or use Poisson cohorts"
    )


def _kind_of_sampling(
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


def public_normaliser(
    normaliser: Literal["users", "samples"] | float, cohort: int, schema: Schema
) -> float:
    """N, from public constants alone."""
    if normaliser == "users":
        return float(cohort)
    if normaliser == "samples":
        mean = schema.samples_per_user
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


def noise_notes(
    history: Sequence[Row], third_party: Noisy, layout: Layout, selection: Rule = "best"
) -> tuple[str, ...]:
    """Name the constraints whose counts are small against their own noise."""
    if third_party.plan is None or not history:
        return ()
    notes = []
    accuracies = [row["accuracy"] for row in history]
    unlikely = [a for a in accuracies if a is None or not 0.0 <= a <= 1.0]
    # Only where a round is chosen by it does it matter that the accuracy is mostly noise.
    if selection == "best" and len(unlikely) > 0.05 * len(accuracies):
        notes.append(
            f"DP noise dominates the released accuracy: {len(unlikely)} of {len(accuracies)} "
            "rounds gave none or one outside [0, 1], so selection would pick noise. Use "
            "selection='average' or 'last', a selection_window, or larger cohorts"
        )
    if not layout.rates:
        return tuple(notes)
    stddev = count_noise(third_party, layout)
    apart = layout.basis == "split"
    stddev *= 2.0**0.5 if apart else 1.0  # n' is the sum of two noisy numbers there
    dominated = []
    for rate in layout.rates:
        means = {
            group: sum(row["counts"][rate][group] or 0.0 for row in history) / len(history)
            for group in layout.groups
        }
        small = [f"{group} (about {max(n, 0):.0f})" for group, n in means.items() if n < 2 * stddev]
        dominated += [f"{rate} in {', '.join(small)}"] if small else []
    if dominated:
        notes.append(
            f"DP noise dominates the signal of {'; '.join(dominated)}: a cohort counts fewer "
            f"samples there than twice the noise of {stddev:.1f}. Take larger cohorts, "
            f"{'' if apart else 'give counts a block of their own (Clipping(counts=...)), '}"
            "or merge groups"
        )
    return tuple(notes)


def plain_optimizer(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> dict[str, Any]:
    """The kind of an optimiser and its numbers: a function's own name says neither."""
    made = optimizer([nn.Parameter(torch.zeros(1))])
    group = {name: plain_value(v) for name, v in made.param_groups[0].items() if name != "params"}
    return {"kind": type(made).__name__, **group}


def plain_value(value: Any) -> Any:
    """A setting as JSON can hold it."""
    if value is None or isinstance(value, int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        return {"kind": kind, **written(kind, asdict(value))}
    return repr(value)
