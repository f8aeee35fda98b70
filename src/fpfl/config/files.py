"""Configs: a training written down as TOML, checked before anything runs.

The sections are those of ``fpfl.train`` (see `fpfl.config.sections`); an unknown key is an error,
not a silent default.
"""

from __future__ import annotations

import inspect
import math
import tomllib
import warnings
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fpfl.config.data import (
    Loaded,
    check_same_people,
    load_data,
    load_people,
    table_schema,
    with_kept_schema,
    with_schema,
)
from fpfl.config.sections import (
    VERSION,
    ClipConfig,
    Config,
    MethodConfig,
    PrivacyConfig,
    TrainingConfig,
)
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import BY_NAME, Constraint, equal_error
from fpfl.methods import REGISTER, Method
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.runs.folder import CONFIG, RunFolder
from fpfl.server.loop import Callback
from fpfl.training import train
from fpfl.training.defaults import (
    chosen_method,
    chosen_rate,
    parameters_of,
    suggested_clipping,
)
from fpfl.training.models import mlp
from fpfl.training.reference import without_constraint
from fpfl.training.run import Run
from fpfl.users.local import FederatedAveraging

__all__ = [
    "Config",
    "Loaded",
    "check_same_people",
    "config_of",
    "load_config",
    "load_data",
    "load_people",
    "load_run_config",
    "make_constraint",
    "make_method",
    "make_model",
    "run_config",
    "table_schema",
    "train_keywords",
    "with_schema",
]

MOST_PARAMETERS = 10**9
"""Of a perceptron: more are rejected as a likely typo, before any memory is."""

_SHOWN = 5
"""So many mistakes of a config are named at a time."""


def load_config(path: str | Path) -> Config:
    """Read a config; a ValueError of one line says what is wrong with it, and where."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no config {path}; docs/config.md says how to write one, and for a table "
            "fpfl train --data FILE.csv needs none"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return config_of(text, path)


def load_run_config(run: Path) -> Config:
    """Read the config that a run folder keeps, with the table's schema as it was."""
    return with_kept_schema(load_config(run / CONFIG), run)


def config_of(text: str, where: str | Path) -> Config:
    """The config of a text; ``where`` says in errors whose it is."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise ValueError(f"{where} is not a TOML file: {error}") from error
    checked_version(content, where)
    if "sweep" in content:
        raise ValueError(
            f"{where} has a [sweep] section, so it is many trainings: fpfl sweep {where} --out "
            "DIR. For one training remove the section"
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{where}: {one_line(error)}") from error


def checked_version(content: dict[str, Any], where: str | Path) -> None:
    """Refuse a config that is for a newer fpfl."""
    version = content.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{where} is of version {version}, for a newer fpfl; this one reads version {VERSION}: "
            "upgrade fpfl"
        )


def run_config(
    config: Config,
    *,
    folder: Path = Path(),
    device: str | None = None,
    partition_seed: int | None = None,
    keep: RunFolder | None = None,
    callbacks: tuple[Callback, ...] = (),
    loaded: Loaded | None = None,
    unconstrained: bool = False,
) -> tuple[Run, FederatedDataset, FederatedDataset | None]:
    """Train what a config says; also return the training and the test data.

    ``device`` replaces the config's, for one process of several; ``partition_seed`` its seed for
    dealing samples to made-up users and for holding users out; ``keep`` is the folder that the run
    is kept in; ``loaded`` is the config's data, where it has been read already; ``unconstrained``
    leaves the constraint out, for the run's reference (which is not trained here by itself).
    """
    data, test = load_data(config, folder, partition_seed) if loaded is None else loaded
    if keep is not None and keep.resume:
        check_same_people(config, data, keep.run)
    given = train_keywords(config, data, keep) | ({"device": device} if device else {})
    given = without_constraint(given) if unconstrained else given
    run = train(make_model(config, data.schema), data, **given, folder=keep, callbacks=callbacks)
    return run, data, test


def train_keywords(
    config: Config, data: FederatedDataset, keep: RunFolder | None = None
) -> dict[str, Any]:
    """What a config says, as keywords of ``fpfl.train``; what it leaves open is suggested."""
    config = _completed(config, data, keep)
    t = config.training
    known = inspect.signature(train).parameters  # what a section calls as `fpfl.train` does
    given = {name: getattr(t, name) for name in type(t).model_fields if name in known}
    return given | {
        "measure": config.data.measure,
        "constraint": make_constraint(config, data.schema),
        "method": make_method(config),
        "privacy": _privacy(config.privacy),
        "clip": _clip(t.clip),
        "optimizer": _optimizer(t),
        "local": _local(t),
        "device": t.device,
    }


def make_model(config: Config, schema: Schema) -> nn.Module:
    """The network that a config describes, with its initial parameters."""
    outputs = 1 if schema.classes in (None, 2) else int(schema.classes or 0)
    inputs = math.prod(schema.shape)
    sizes = [inputs, *config.model.hidden, outputs]
    parameters = sum((before + 1) * after for before, after in pairwise(sizes))
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"a perceptron with layers of {sizes} units has {parameters} parameters; a config may "
            f"ask for {MOST_PARAMETERS}. Use smaller layers (model.hidden), or fpfl.train with a "
            "model of your own"
        )
    return mlp(inputs, config.model.hidden, outputs, seed=config.training.seed)


def make_constraint(config: Config, schema: Schema) -> Constraint | None:
    """The constraint that a config names."""
    c = config.constraint
    if c is None:
        return None
    by = tuple(item if isinstance(item, str) else tuple(item) for item in c.by)
    if c.kind == "equal_error":
        if schema.label_range is None:
            raise ValueError("constraint.kind = 'equal_error' is for regression (label_range)")
        return equal_error(*by, label_range=schema.label_range, tolerance=c.tolerance)
    if c.kind not in BY_NAME:
        known = sorted([*BY_NAME, "equal_error"])
        raise ValueError(f"constraint.kind is {c.kind!r}; expected one of {known}")
    return BY_NAME[c.kind](*by, tolerance=c.tolerance)


def make_method(config: Config) -> Method | None:
    """The method that a config names; what it leaves out has the method's own defaults."""
    m = config.method
    if m is None:
        return None
    return REGISTER[m.kind].make(**m.settings)


def _completed(config: Config, data: FederatedDataset, keep: RunFolder | None) -> Config:
    """The config with what it leaves to be suggested, as if somebody had written that down."""
    t, p = config.training, config.privacy
    if not t.suggested or p is None:
        return config
    # What a run that goes on has had stays, like its noise, whatever T or the rules are now.
    kept = keep.run.settings if keep is not None and keep.resume else None
    constraint = make_constraint(config, data.schema)
    if "clip" not in p.model_fields_set:
        clip = kept["clip"] if kept else asdict(_suggested_clipping(config, p, data, constraint))
        p = p.model_copy(update={"clip": ClipConfig(**_given(clip))})
    if "learning_rate" not in t.model_fields_set:
        rate = kept["learning_rate"] if kept else _learning_rate(t, p, data, constraint)
        t = t.model_copy(update={"learning_rate": rate})
    assert constraint is not None  # a config that is suggested has one
    method = config.method or MethodConfig(kind="one-gradient")
    if "patience" not in method.settings:
        usual = chosen_method(constraint, data.schema, private=True, rounds=t.rounds).patience
        patience = kept["method"].get("patience") if kept else usual
        own = {**method.settings, "patience": "none" if patience is None else patience}
        method = MethodConfig(kind=method.kind, **own)
    return config.model_copy(update={"training": t, "privacy": p, "method": method})


def _given(clip: dict[str, Any]) -> dict[str, Any]:
    """Clip bounds as a config has them: what is not there is left out.

    So is ``kind``, which a run's own settings have.
    """
    found = {n: value for n, value in clip.items() if n != "kind" and value is not None}
    if "adapts" in found:
        found["adapts"] = _given(found["adapts"])
    return found


def _suggested_clipping(
    config: Config, p: PrivacyConfig, data: FederatedDataset, constraint: Constraint | None
) -> Clipping:
    t = config.training
    asked = _privacy(p.model_copy(update={"clip": 1.0}))
    assert asked is not None  # there is a section
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training itself will say what there is to say
        return suggested_clipping(
            asked,
            _public(data.schema, t.samples_per_user),
            constraint,
            population=data.K,
            cohort=t.cohort,
            rounds=t.rounds,
            parameters=parameters_of(make_model(config, data.schema)),
        )


def _public(schema: Schema, most: int | None) -> Schema:
    """A schema that says how many samples a user sends, where no more than ``most`` are used."""
    declared = schema.samples_per_user
    if declared is None:
        raise ValueError(
            "training.suggested = true chooses the clip bound by how many samples a user is "
            "expected to have, and the schema does not say; declare samples_per_user, or give "
            "privacy.clip"
        )
    return replace(schema, samples_per_user=min(declared, most or declared))


def _learning_rate(
    t: TrainingConfig, p: PrivacyConfig, data: FederatedDataset, constraint: Constraint | None
) -> float:
    privacy, schema = _privacy(p), data.schema
    if schema.samples_per_user is not None:
        schema = _public(schema, t.samples_per_user)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training itself will say what there is to say
        return chosen_rate(privacy, constraint, schema, data.K, t.cohort, t.rounds)


def _local(t: TrainingConfig) -> FederatedAveraging | None:
    if t.local_learning_rate is None:
        return None
    return FederatedAveraging(t.local_steps, t.local_learning_rate)


def _privacy(config: PrivacyConfig | None) -> Privacy | None:
    if config is None:
        return None
    values = config.model_dump(exclude={"ledger"}) | {"clip": _clip(config.clip)}
    return Privacy(**values)


def _clip(clip: float | ClipConfig | None) -> float | Clipping | None:
    if not isinstance(clip, ClipConfig):
        return clip
    adapts = None if clip.adapts is None else AdaptiveBound(**clip.adapts.model_dump())
    return Clipping(**clip.model_dump() | {"adapts": adapts})


@dataclass(frozen=True)
class _Optimizer:
    """Makes an optimiser by name; other processes can be sent it, as they cannot a lambda."""

    name: str
    learning_rate: float

    def __call__(self, w: list[Tensor]) -> torch.optim.Optimizer:
        if self.name == "momentum":
            return torch.optim.SGD(w, lr=self.learning_rate, momentum=0.9)
        return torch.optim.Adam(w, lr=self.learning_rate)


def _optimizer(t: TrainingConfig) -> _Optimizer | None:
    return None if t.optimizer == "sgd" else _Optimizer(t.optimizer, t.learning_rate)


def one_line(error: ValidationError, section: str | None = None) -> str:
    """What is wrong with a config, or with one section of it, in a line."""
    parts = []
    for item in error.errors()[:_SHOWN]:
        # Where several types would do, pydantic also says which of them it tried.
        pieces = [piece for piece in item["loc"] if "[" not in str(piece)]
        named = [section, *pieces] if section else pieces
        where = ".".join(map(_shown, named)) or "config"
        what = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            what = "there is no such key; remove it or correct its name"
        parts.append(f"{where}: {what}")
    more = error.error_count() - _SHOWN
    return "; ".join([*parts, *([f"and {more} more"] if more > 0 else [])])


def _shown(piece: int | str) -> str:
    """A key as a message can hold it: TOML allows newlines in one, and a whole book."""
    text = str(piece)
    return text if text.isprintable() and len(text) < 80 else repr(text[:80])
