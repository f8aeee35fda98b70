"""What a sweep is asked for: its populations, and for every run all that it is trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from fpfl.compat import as_before
from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint
from fpfl.sweeps.choice import shown
from fpfl.sweeps.grid import keywords, plain_number, setting_name, with_settings
from fpfl.training.inputs import Inputs
from fpfl.training.spec import TrainingSpec, check_device, flat_model, plain_optimizer

SIMULATION = "a sweep is a simulation: a run that is to be released is trained on its own"
"""What every sweep says of itself, wherever it is shown."""

ONE = "data"
"""The name of a population, or of a model, where there is one."""

SEEDS = ("seed", "noise_seed")


@dataclass(frozen=True)
class Population:
    """Users to train on, and users to choose by, who are others; None where nobody is held out."""

    training: FederatedDataset
    held_out: FederatedDataset | None


@dataclass(frozen=True)
class Asked:
    """One run of a sweep.

    Parameters
    ----------
    number
        Its place in the sweep, from 0.
    settings
        What was asked for of this run, by dotted names, as plain values.
    model, data
        The names of its model and of its population.
    seed
        Of its initial parameters, and in a simulation of its cohorts.
    keywords
        What `fpfl.train` is called with.
    make
        Makes the initial model.
    """

    number: int
    settings: dict[str, Any]
    model: str
    data: str
    seed: int
    keywords: dict[str, Any]
    make: Callable[[], nn.Module]

    @property
    def rounds(self) -> int:
        """T."""
        return int(self.keywords["rounds"])

    @property
    def private(self) -> bool:
        """Whether ε is claimed for it."""
        return self.keywords.get("privacy") is not None

    @property
    def plain(self) -> dict[str, Any]:
        """All that it is trained with, as JSON can hold it."""
        return {
            "model": self.model,
            "data": self.data,
            "seed": self.seed,
            **{name: described(name, value) for name, value in self.keywords.items()},
        }

    @property
    def shape(self) -> str:
        """What runs have in common that can be computed together: all but seeds and numbers."""
        own = {
            name: "number" if isinstance(value, float) else _without_numbers(value)
            for name, value in self.plain.items()
            if name not in SEEDS
        }
        return json.dumps(own, sort_keys=True)

    def __str__(self) -> str:
        said = {"seed": self.seed, **self.settings}
        return f"run {self.number} ({', '.join(f'{n} = {shown(v)}' for n, v in said.items())})"


def described(name: str, value: Any) -> Any:
    """A setting as JSON can hold it: an object by its kind and its fields."""
    value = plain_number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Constraint):
        return {
            "kind": value.name,
            "rates": [rate.name for rate in value.rates],
            "by": [each if isinstance(each, str) else list(each) for each in value.by],
            "tolerance": value.tolerance,
        }
    if is_dataclass(value) and not isinstance(value, type) and name != "optimizer":
        inner = as_before(
            (field.name, getattr(value, field.name)) for field in fields(value) if field.init
        )
        return {
            "kind": type(value).__name__,
            **{each: described(each, found) for each, found in inner.items()},
        }
    if name == "optimizer":
        return plain_optimizer(value)
    if isinstance(value, Mapping):
        return {str(each): described(str(each), found) for each, found in value.items()}
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Iterable):
        return [described(name, each) for each in value]
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        # Its text is where it is in memory: another session would never ask for the same.
        own = getattr(value, "__dict__", {})
        return {
            "kind": kind.__name__,
            **{each: described(each, found) for each, found in own.items()},
        }
    return str(value)


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    numbers = (int, float)
    return {
        name: "number" if isinstance(each, numbers) else _without_numbers(each)
        for name, each in value.items()
    }


def populations(
    data: FederatedDataset | Mapping[str, Any],
    held_out: float | FederatedDataset | None,
    seed: int = 0,
) -> dict[str, Population]:
    """The populations of a sweep by name; the same users are held out for all runs on one."""
    if held_out is not None and not isinstance(held_out, FederatedDataset):
        _check_share(held_out)
    many = data if isinstance(data, Mapping) else {ONE: data}
    if not many:
        raise ValueError("data is an empty dict; give populations by name, or one population")
    return {str(name): _population(name, found, held_out, seed) for name, found in many.items()}


def _check_share(held_out: object) -> None:
    share = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if not share or not 0.0 < float(held_out) < 1.0:  # type: ignore[arg-type]
        raise ValueError(
            f"held_out is {held_out!r}; give a share of the users like 0.25, a FederatedDataset of "
            "other users, or None to choose by what training releases alone"
        )


def _population(
    name: object, found: Any, held_out: float | FederatedDataset | None, seed: int
) -> Population:
    if isinstance(found, tuple) and len(found) == 2:
        training, others = found
        if not isinstance(others, FederatedDataset | None):
            raise ValueError(
                f"the held-out users of {name!r} are a {type(others).__name__}; give a "
                "FederatedDataset or None"
            )
    elif isinstance(found, FederatedDataset):
        training, others = found, held_out
        if held_out is not None and not isinstance(held_out, FederatedDataset):
            training, others = split(found, held_out, seed)
    else:
        training, others = found, None
    if not isinstance(training, FederatedDataset):
        raise ValueError(
            f"data {name!r} is a {type(training).__name__}; give a FederatedDataset, or a pair of "
            "two: users to train on, users held out"
        )
    if isinstance(others, FederatedDataset):
        differ = training.schema.difference(others.schema)
        if differ:
            raise ValueError(f"the users of {name!r} and those held out differ in kind: {differ}")
    return Population(training, others)


def split(
    data: FederatedDataset, share: float, seed: int
) -> tuple[FederatedDataset, FederatedDataset]:
    """Hold out a share of the users. What is declared of all is declared of those who are left."""
    training, others = data.split(share, seed=seed)
    declared = data.schema.population
    if declared is None:
        return training, others
    return training.declared(max(1, declared - round(share * declared))), others


class Models:
    """The initial models of a sweep: one for all, one a seed, or by name."""

    def __init__(self, model: Any) -> None:
        many = model if isinstance(model, Mapping) else {ONE: model}
        if not many:
            raise ValueError("model is an empty dict; give models by name, or one model")
        for name, found in many.items():
            if not isinstance(found, nn.Module) and (
                isinstance(found, type) or not callable(found)
            ):
                raise ValueError(
                    f"model {name!r} is {found!r}; give a torch.nn.Module, or a function from a "
                    "seed to one: lambda seed: fpfl.mlp(92, seed=seed)"
                )
        self._many: dict[str, Any] = {str(name): found for name, found in many.items()}
        self._made: dict[tuple[str, int], nn.Module] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called."""
        return tuple(self._many)

    def made(self, name: str, seed: int) -> nn.Module:
        """The model of a name; where a function makes it, the seed's own."""
        found = self._many[name]
        if isinstance(found, nn.Module):
            return found
        if (name, seed) not in self._made:
            model = found(seed)
            if not isinstance(model, nn.Module):
                raise ValueError(
                    f"the function for model {name!r} returned a {type(model).__name__}; it must "
                    "return a torch.nn.Module"
                )
            self._made[name, seed] = model
        return self._made[name, seed]


def asked(
    model: Any,
    people: Mapping[str, Population],
    runs: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
) -> list[Asked]:
    """The runs of a sweep, each with all that it is trained with; seeds of noise are still open."""
    if isinstance(runs, Mapping) or not isinstance(runs, Iterable):
        raise ValueError(
            f"runs is a {type(runs).__name__}; give a list of dicts, one a run: fpfl.grid(...)"
        )
    models, found = Models(model), []
    for number, run in enumerate(runs):
        if not isinstance(run, Mapping):
            raise ValueError(f"run {number} is {run!r}; give a dict of settings")
        own = {setting_name(name): plain_number(value) for name, value in run.items()}
        try:
            found.append(_asked(number, own, models, people, common))
        except (ValueError, TypeError) as error:
            raise ValueError(f"run {number}: {error}") from error
    if not found:
        raise ValueError("runs is empty; give at least one dict of settings, or fpfl.grid(...)")
    return found


def _asked(
    number: int,
    own: dict[str, Any],
    models: Models,
    people: Mapping[str, Population],
    common: Mapping[str, Any],
) -> Asked:
    kind = _named("model", own, models.names)
    where = _named("data", own, tuple(people))
    given = with_settings(common, own)
    seed = given.pop("seed", None)
    seed = 0 if seed is None else seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed is {seed!r}; give a whole number")
    settings = {name: described(name.split(".")[-1], value) for name, value in own.items()}
    return Asked(number, settings, kind, where, seed, given, lambda: models.made(kind, seed))


def _named(what: str, own: Mapping[str, Any], names: tuple[str, ...]) -> str:
    name = own.get(what)
    if name is None:
        if len(names) > 1:
            raise ValueError(f"it does not say which {what}; there are {', '.join(names)}")
        return names[0]
    if name not in names:
        raise ValueError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return str(name)


def seeded(runs: Sequence[Asked], simulate: bool | None, *, charged: bool) -> list[Asked]:
    """The runs with the seeds of their noise settled.

    Simulated: private runs draw cohorts and noise from their seeds, and none of them says anything
    about people to anyone who does not know the seed, or protects anybody from who does.
    Charged: private runs draw both from the operating system, and a seed is of initial parameters.
    """
    private = [run for run in runs if run.private]
    own = [run for run in private if run.keywords.get("noise_seed") is not None]
    if charged and (own or simulate):
        what = "simulate=True" if simulate else f"noise_seed={own[0].keywords['noise_seed']}"
        raise ValueError(
            f"{what} was given beside a ledger: a ledger is charged for runs on real people, whose "
            "noise nobody may know. Leave the ledger out for a simulation, or the seeds of noise"
        )
    if simulate is False and not charged and len(own) < len(private):
        raise ValueError(
            "simulate=False was given without a ledger: a sweep on real people adds up over its "
            "runs, and somebody has to keep the account. Give ledger= "
            "(fpfl.PopulationLedger.create makes one), or leave simulate out: noise is then "
            "seeded, and the runs are simulations"
        )
    return [_seeded(run, charged=charged) for run in runs]


def _seeded(run: Asked, *, charged: bool) -> Asked:
    seeds: dict[str, Any] = {"seed": run.seed}
    if run.private:
        given = run.keywords.get("noise_seed")
        seeds["noise_seed"] = run.seed if given is None else given
        if charged:  # known cohorts would take the amplification by sampling away
            seeds = {"seed": None, "noise_seed": None}
    return replace(run, keywords=run.keywords | seeds)


def settled(runs: Sequence[Asked], people: Mapping[str, Population]) -> dict[int, TrainingSpec]:
    """Check every run as training will, before anything is trained; the specs by number.

    Runs that differ in seeds alone are checked once.
    """
    known: dict[str, TrainingSpec] = {}
    found = {}
    names = set(keywords())
    for run in runs:
        key = json.dumps({n: v for n, v in run.plain.items() if n not in SEEDS}, sort_keys=True)
        if key not in known:
            try:
                known[key] = _settle(run, people[run.data].training, names)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{run}: {error}") from error
        found[run.number] = known[key]
    return found


_LATER = ("seed", "noise_seed", "sampling", "precision", "device", "measure")


def _settle(run: Asked, data: FederatedDataset, names: set[str]) -> TrainingSpec:
    lost = [name for name in ("cohort", "rounds") if run.keywords.get(name) is None]
    if lost:
        raise ValueError(f"{' and '.join(lost)} must be given, for all runs or for this one")
    check_device(run.keywords.get("device"))
    given = {n: v for n, v in run.keywords.items() if n in names and n not in _LATER}
    model = run.make()
    parameter = next(iter(model.parameters()), None)
    inputs = data.input_dtype(data.features.dtype if parameter is None else parameter.dtype)
    flat = flat_model(model, data.schema, inputs)
    measure = bool(run.keywords.get("measure", True))
    measurement = Inputs.measures(data, given.get("privacy"), measure=measure)
    return TrainingSpec.settle(
        flat, data.schema, population=data.K, measurement=measurement, **given
    )


def digest(values: Any) -> str:
    """A digest of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def differing(runs: Sequence[Asked]) -> tuple[str, ...]:
    """The settings that were asked for and are not the same in all runs, in their order."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return tuple(
        name
        for name in names
        if len({json.dumps(setting(run, name), sort_keys=True) for run in runs}) > 1
    )


def setting(run: Asked, name: str) -> Any:
    """A setting of a run: as it was asked for, or as all runs have it."""
    if name in run.settings:
        return run.settings[name]
    value: Any = run.plain
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
