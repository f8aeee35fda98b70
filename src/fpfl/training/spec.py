"""The settled training: what was asked for, checked, and all that follows from it.

Every door (`fpfl.train`, configs, the command line, estimators, tables, audits, federations) makes
a `TrainingSpec`, once. What it cannot know is who computes the users' vectors and adds them up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.aggregation.clipping import ClipRule, clip_rules
from fpfl.compat import as_before, written
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.confusion import Released, collapsed_in_training, training_verdict
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.totals import SMALLEST_COUNT
from fpfl.methods import MMDM, Method, ReweightingMethod, Unconstrained
from fpfl.methods.base import Surrogate
from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling
from fpfl.privacy.settings import JOINT, Clipping, Privacy, Sampling
from fpfl.server.bound import BoundControl
from fpfl.server.loop import OptimizerFactory, ServerSettings
from fpfl.server.selection import Rule
from fpfl.server.state import Row
from fpfl.training.defaults import with_counts
from fpfl.users.engine import MEMORY_BUDGET, CohortEngine, make_layout
from fpfl.users.flat import FlatModel
from fpfl.users.layout import Layout, table_classes
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


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A training that is settled; made by `settle`.

    Parameters
    ----------
    flat, schema
        The model as a function of w, and what its samples look like.
    population, cohort, rounds
        K, m and T.
    constraint, method
        What must be equal between groups, and how it is enforced.
    privacy, clipping
        As asked for, and the clip bounds; None for none.
    learning_rate, optimizer
        η of plain SGD, or what makes another optimiser.
    normaliser
        N: the public constant that summed gradients are divided by.
    selection, selection_window
        Which iterate is kept.
    samples_per_user, local
        The most samples a user uses in a round; local steps.
    noise
        What the plan's noise follows from, where that is not ``privacy``: a run that goes on keeps
        the noise it had.
    table
        Whether v has the confusion table where classes are few: a run that was begun before there
        was one goes on with hits and misses.
    measurement
        Whether inputs are measured before the first round, with noise by rule; or σ₀ of that.
    largest
        How many samples a user has at most, where nobody is clipped and the users are at hand.
    """

    flat: FlatModel
    schema: Schema
    population: int
    cohort: int
    rounds: int
    constraint: Constraint | None
    method: Method
    privacy: Privacy | None
    clipping: Clipping | None
    learning_rate: float
    optimizer: OptimizerFactory | None
    normaliser: float
    selection: Rule
    selection_window: int
    samples_per_user: int | None
    local: FederatedAveraging | None
    noise: Privacy | None = None
    table: bool = True
    measurement: bool | float = False
    largest: float | None = None

    @classmethod
    def settle(
        cls,
        flat: FlatModel,
        schema: Schema,
        *,
        population: int,
        cohort: int,
        rounds: int,
        constraint: Constraint | None = None,
        method: Method | None = None,
        privacy: Privacy | None = None,
        clip: float | Clipping | None = None,
        learning_rate: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        normaliser: Literal["users", "samples"] | float = "users",
        selection: Rule | None = None,
        selection_window: int = 1,
        samples_per_user: int | None = None,
        local: FederatedAveraging | None = None,
        measurement: bool | float = False,
    ) -> Self:
        """Check the arguments of `fpfl.train`, and choose what was left open."""
        check_types(constraint, method, privacy, optimizer, local)
        check_numbers(population, cohort, rounds, samples_per_user, learning_rate)
        method = chosen_method(method, constraint)
        check_reweighting(method)
        rule = selection or ("average" if isinstance(method, ReweightingMethod) else "best")
        check_words(rule, None, selection_window, "float32")
        clipping = chosen_clipping(privacy, clip, method, constraint, schema)
        if constraint is not None:
            constraint.check(schema.classes, schema.label_range)
            constraint.bind(schema.attributes)
        if privacy is not None:
            schema.check_declared()
        return cls(
            flat=flat,
            schema=schema,
            population=population,
            cohort=cohort,
            rounds=rounds,
            constraint=constraint,
            method=method,
            privacy=privacy,
            clipping=clipping,
            learning_rate=learning_rate,
            optimizer=optimizer,
            normaliser=public_normaliser(normaliser, cohort, schema),
            selection=rule,
            selection_window=selection_window,
            samples_per_user=samples_per_user,
            local=local,
            measurement=measurement,
        )

    # --- what is released ---------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """What is where in v."""
        return layout_of(
            self.flat.size, self.schema, self.constraint, self.method, self.clipping, self.table
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that v is clipped in; empty without clipping."""
        if self.clipping is None:
            return ()
        return self.clipping.blocks(constrained=self.constraint is not None, selection=True)

    @property
    def rules(self) -> tuple[ClipRule, ...]:
        """How v is clipped, block by block."""
        return clip_rules(self.blocks, self.layout.slices)

    @cached_property
    def plan(self) -> PrivacyPlan | None:
        """The privacy plan, for the users that there are; None without privacy."""
        privacy = self.noise or self.privacy
        if privacy is None:
            return None
        return privacy.plan(
            population=self.population,
            cohort=self.cohort,
            rounds=self.rounds,
            constrained=self.constraint is not None,
            clipping=self.clipping,
            measurement=self.measurement,
        )

    # --- who computes and serves --------------------------------------------------------------

    def engine(self, data: FederatedDataset, **how: Any) -> CohortEngine:
        """What computes v^k on data; ``how`` says with which memory, precision and so on."""
        method, reweighting = self.method, isinstance(self.method, ReweightingMethod)
        return CohortEngine(
            self.flat,
            data,
            self.constraint,
            basis=self.layout.basis,
            clipped=self.layout.clipped,
            samples_per_user=self.samples_per_user,
            form=self.layout.form,
            surrogate=method.surrogate if reweighting else "loss",  # type: ignore[attr-defined]
            local=self.local,
            table=self.table,
            **how,
        )

    def server(self, noisy: Noisy) -> ServerSettings:
        """What the server's loop needs to know."""
        rate = self.learning_rate
        return ServerSettings(
            layout=self.layout,
            method=self.method,
            optimizer=self.optimizer or (lambda w: torch.optim.SGD(w, lr=rate)),
            rounds=self.rounds,
            normaliser=self.normaliser,
            tolerance=self.constraint.tolerance if self.constraint else 0.0,
            smallest_count=smallest_count(noisy, self.layout),
            count_noise=count_noise(noisy, self.layout),
            selection=self.selection,
            selection_window=self.selection_window,
            control=self._control,
            tables=self._tables(noisy),
        )

    @property
    def _control(self) -> BoundControl | None:
        """What moves the clip bound, where it adapts."""
        if self.clipping is None or self.clipping.grid is None:
            return None
        return BoundControl(self.clipping.grid, self.cohort, joint=self.clipping.counts is None)

    def _tables(self, noisy: Noisy) -> Released | None:
        """What is public about the confusion tables that are released."""
        classes, where = self.layout.classes, self.layout.slices.get("table")
        if classes is None or where is None:
            return None
        noise = 0.0 if noisy.plan is None else float(noisy.noise_stddev[where.start])
        clipped = None if self.clipping is None else self.clipping.selection
        bounds = [self.samples_per_user, clipped, self.largest]
        known = [float(each) for each in bounds if each is not None]
        most = min(known) if known else self.schema.samples_per_user or 1.0
        return Released(classes, self.rounds, noise, max(1.0, most))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that was asked for and chosen, as plain values."""
        weights = self.schema.class_weights
        return {
            "cohort": self.cohort,
            "rounds": self.rounds,
            "population": self.population,
            "constraint": self.constraint.name if self.constraint else None,
            "tolerance": self.constraint.tolerance if self.constraint else None,
            "method": plain_value(self.method),
            "privacy": plain_value(self.privacy),
            "clip": plain_value(self.clipping),
            "learning_rate": self.learning_rate if self.optimizer is None else None,
            "normaliser": self.normaliser,
            "optimizer": None if self.optimizer is None else plain_optimizer(self.optimizer),
            "selection": self.selection,
            "selection_window": self.selection_window,
            "layout": plain_layout(self.layout),
            "samples_per_user": self.samples_per_user,
            "local": plain_value(self.local),
            # Where there are none, settings are what they were before there could be any.
            **({} if weights is None else {"class_weights": [*weights]}),
        }


def layout_of(
    parameters: int,
    schema: Schema,
    constraint: Constraint | None,
    method: Method,
    clipping: Clipping | None,
    table: bool = True,
) -> Layout:
    """What is where in the v of a model with so many parameters."""
    return make_layout(
        parameters,
        constraint,
        constraint.bind(schema.attributes) if constraint else None,
        basis="split" if clipping is not None and clipping.counts else "paper",
        clipped=clipping is not None and clipping.counting_share is not None,
        form="one-gradient" if isinstance(method, ReweightingMethod) else "paper",
        classes=table_classes(schema.classes) if table else None,
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


def check_reweighting(method: Method) -> None:
    """Refuse a method of one's own that has some of what reweighting takes, and not all of it."""
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


def check_data(data: FederatedDataset, constraint: Constraint | None) -> None:
    """Refuse a constraint that this data cannot say anything about.

    It looks at data: where that is not allowed (a real private run, a deployment, whose server has
    none), nor for a population that would be read from disk for it, it is not called.
    """
    if constraint is None or data.lazy:
        return
    groups = constraint.bind(data.schema.attributes)
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
    joint = next((b.bound for b in third_party.plan.blocks if b.name == JOINT), None)
    if joint is not None:  # a bound that adapts takes the noise of counts with it
        stddev *= sum(row.get("clip_bound", joint) for row in history) / (len(history) * joint)
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


def collapse_notes(history: Sequence[Row], schema: Schema) -> tuple[str, ...]:
    """Name a model that has clearly collapsed, by the totals of the last rounds."""
    if not history or collapsed_in_training(history[-1]) is None:
        return ()
    said = training_verdict(history, schema.class_names)
    assert said is not None  # there is a last row
    return (said.rstrip("."),)


def plain_optimizer(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> dict[str, Any]:
    """The kind of an optimiser and its numbers: a function's own name says neither."""
    made = optimizer([nn.Parameter(torch.zeros(1))])
    group = {name: plain_value(v) for name, v in made.param_groups[0].items() if name != "params"}
    return {"kind": type(made).__name__, **group}


def plain_layout(layout: Layout) -> dict[str, Any]:
    """A layout as files have it: without a confusion table as they were before there was one."""
    found: dict[str, Any] = plain_value(layout)
    if layout.classes is None:
        del found["classes"]
    return found


def plain_value(value: Any) -> Any:
    """A setting as JSON can hold it."""
    if value is None or isinstance(value, int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        found = asdict(value, dict_factory=as_before).items()
        numbers = {n: v.tolist() if isinstance(v, Tensor | np.ndarray) else v for n, v in found}
        return {"kind": kind, **written(kind, numbers)}
    return repr(value)
