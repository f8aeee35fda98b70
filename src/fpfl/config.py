"""Configs: a training written down as TOML, checked before anything runs.

The sections are those of ``fpfl.train`` (see `fpfl.config_sections`); an unknown key is an error,
not a silent default.
"""

from __future__ import annotations

import math
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from fpfl.config_sections import (
    VERSION,
    ClipConfig,
    Config,
    Kind,
    MethodConfig,
    PrivacyConfig,
    SchemaConfig,
    TrainingConfig,
)
from fpfl.data.adult import load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.files import open_population
from fpfl.data.scaling import scale_by_ranges
from fpfl.data.schema import Attribute, Schema
from fpfl.fairness.constraints import BY_NAME, Constraint, equal_error
from fpfl.folder import RunFolder, look, read_about
from fpfl.methods import BMDM, MMDM, Method, OneGradient, Tran
from fpfl.models import mlp
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.run import Run
from fpfl.server.ranks import Ranks
from fpfl.server.round import Callback
from fpfl.suggesting import suggested_clipping, suggested_learning_rate
from fpfl.training import train
from fpfl.users.local import FederatedAveraging

__all__ = [
    "Config",
    "load_config",
    "load_data",
    "load_people",
    "make_constraint",
    "make_method",
    "make_model",
    "run_config",
]

_METHODS: dict[Kind, Callable[..., Method]] = {
    "mmdm": MMDM,
    "bmdm": BMDM,
    "tran": Tran,
    "one-gradient": OneGradient,
}

MOST_PARAMETERS = 10**9
"""Of a perceptron: more are taken for a slip of the pen, before any memory is."""

_COLUMNS = ("features", "labels", "attributes", "users")
"""What an .npz file may hold; anything else in it is left alone."""

_SHOWN = 5
"""So many mistakes of a config are named at a time."""


def load_config(path: str | Path) -> Config:
    """Read a config; a ValueError of one line says what is wrong with it, and where."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    version = content.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{path} is of version {version}, for a newer fpfl; this one reads version {VERSION}: "
            "upgrade fpfl"
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {_one_line(error)}") from error


def run_config(
    config: Config,
    *,
    folder: Path = Path(),
    device: str | None = None,
    partition_seed: int | None = None,
    keep: RunFolder | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[Run, FederatedDataset, FederatedDataset | None]:
    """Train what a config says; also return the training and the test data.

    ``device`` replaces the config's, for one process of several; ``partition_seed`` its seed for
    dealing samples to made-up users; ``keep`` is the folder that the run is kept in.
    """
    data, test = load_data(config, folder, partition_seed)
    config = _completed(config, data, keep)
    t = config.training
    run = train(
        make_model(config, data.schema),
        data,
        cohort=t.cohort,
        rounds=t.rounds,
        constraint=make_constraint(config, data.schema),
        method=make_method(config),
        privacy=_privacy(config.privacy),
        clip=_clip(t.clip),
        sampling=t.sampling,
        learning_rate=t.learning_rate,
        optimizer=_optimizer(t),
        normaliser=t.normaliser,
        samples_per_user=t.samples_per_user,
        local=_local(t),
        selection=t.selection,
        selection_window=t.selection_window,
        seed=t.seed,
        noise_seed=t.noise_seed,
        memory=t.memory,
        precision=t.precision,
        device=device or t.device,
        folder=keep,
        callbacks=callbacks,
    )
    return run, data, test


def load_data(
    config: Config, folder: Path, partition_seed: int | None = None
) -> tuple[FederatedDataset, FederatedDataset | None]:
    """The training and the test data of a config whose paths are relative to a folder."""
    d = config.data
    if d.train is not None:
        assert d.declared is not None  # the section checked it
        test = _load_file(folder / d.test, d.declared, None) if d.test else None
        return _load_file(folder / d.train, d.declared, d.declared.population), test
    if d.folder is not None:
        people = open_population(folder / d.folder)
        test = open_population(folder / d.test) if d.test else None
        differ = people.schema.difference(test.schema) if test is not None else None
        if differ:
            raise ValueError(f"{d.folder} and {d.test} are not of the same kind: {differ}")
        return people, test
    attributes = tuple(d.attributes)
    train_data = load_adult("train", normalise=d.normalise, attributes=attributes)
    if d.users == "poisson":
        # Unseeded, but the same for all processes of one training.
        given = config.training.seed if partition_seed is None else partition_seed
        train_data = train_data.partition(
            mean=d.mean_samples, seed=Ranks.current().agreed_seed(given)
        )
    return train_data, load_adult("test", normalise=d.normalise, attributes=attributes)


def load_people(config: Config, path: Path) -> FederatedDataset:
    """Further data of the kind that a config trains on: an .npz file, or a population folder."""
    if path.is_dir():
        return open_population(path)
    if config.data.declared is None:
        raise ValueError(
            f"{path} is a file, and its schema is not in the config; give a population folder"
        )
    return _load_file(path, config.data.declared, None)


def _load_file(path: Path, declared: SchemaConfig, population: int | None) -> FederatedDataset:
    try:
        # Mapped, so that a bare array, which is refused, is not read first.
        file = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one bare array")
        with file:
            found = sorted(file.files)
            arrays = {name: file[name] for name in _COLUMNS if name in file.files}
    except Exception as error:  # there is no telling what a damaged archive raises
        raise ValueError(f"{path} cannot be read as an .npz file: {_reason(error)}") from error
    # An entry that is no array is handed out as bytes.
    arrays = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    missing = {"features", "labels"} - set(arrays)
    if missing:
        raise ValueError(f"{path} lacks the arrays {sorted(missing)}; it has {found}")
    try:
        return _dataset(arrays, declared, population)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {_reason(error)}") from error


def _dataset(
    arrays: dict[str, NDArray[Any]], declared: SchemaConfig, population: int | None
) -> FederatedDataset:
    schema = Schema(
        shape=tuple(arrays["features"].shape[1:]),
        classes=declared.classes if declared.label_range is None else None,
        label_range=declared.label_range,
        attributes=tuple(
            Attribute(name, tuple(values), unknown=name in declared.unknown)
            for name, values in declared.attributes.items()
        ),
        population=population,
        samples_per_user=declared.samples_per_user,
        feature_ranges=tuple(declared.feature_ranges) if declared.feature_ranges else None,
    )
    features = arrays["features"]
    if declared.feature_ranges is not None:
        features = scale_by_ranges(features, declared.feature_ranges)
    return FederatedDataset.from_samples(
        features,
        arrays["labels"],
        arrays.get("attributes"),
        schema,
        users=arrays.get("users"),
    )


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
    given = m.model_dump(exclude_none=True, exclude={"kind"})
    none = {"tolerance": "constraint", "spread": "none"}
    given = {name: None if none.get(name) == value else value for name, value in given.items()}
    return _METHODS[m.kind](**given)


def _completed(config: Config, data: FederatedDataset, keep: RunFolder | None) -> Config:
    """The config with what it leaves to be suggested, as if somebody had written that down."""
    t, p = config.training, config.privacy
    if not t.suggested or p is None:
        return config
    if "clip" not in p.model_fields_set:
        schema = _public(data.schema, t.samples_per_user)
        clipping = suggested_clipping(schema, make_constraint(config, schema))
        p = p.model_copy(update={"clip": ClipConfig(**asdict(clipping))})
    if "learning_rate" not in t.model_fields_set:
        rate = _kept_learning_rate(keep) or _learning_rate(t, p, data)
        t = t.model_copy(update={"learning_rate": rate})
    method = config.method or MethodConfig(kind="one-gradient")
    return config.model_copy(update={"training": t, "privacy": p, "method": method})


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


def _learning_rate(t: TrainingConfig, p: PrivacyConfig, data: FederatedDataset) -> float:
    privacy = _privacy(p)
    assert privacy is not None  # there is a section
    clipping = privacy.clipping
    blocks = clipping.blocks(constrained=True, selection=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training itself will say what there is to say
        plan = privacy.plan(
            population=data.population, cohort=t.cohort, rounds=t.rounds, blocks=blocks
        )
    declared = data.schema.samples_per_user
    samples = declared and min(declared, t.samples_per_user or declared)
    return suggested_learning_rate(clipping, plan.noise_multiplier, t.cohort, t.rounds, samples)


def _kept_learning_rate(keep: RunFolder | None) -> float | None:
    """What a run that goes on has had: like its noise it stays, whatever T is now."""
    if keep is None or not keep.resume:
        return None
    about = read_about(keep.path)
    rate: float | None = (look(keep.path).settings or about["settings"])["learning_rate"]
    return rate


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
    return Clipping(**clip.model_dump()) if isinstance(clip, ClipConfig) else clip


def _optimizer(t: TrainingConfig) -> Any:
    import torch

    if t.optimizer == "sgd":
        return None
    if t.optimizer == "momentum":
        return lambda w: torch.optim.SGD(w, lr=t.learning_rate, momentum=0.9)
    return lambda w: torch.optim.Adam(w, lr=t.learning_rate)


def _one_line(error: ValidationError) -> str:
    parts = []
    for item in error.errors()[:_SHOWN]:
        # Where several types would do, pydantic also says which of them it tried.
        pieces = [piece for piece in item["loc"] if "[" not in str(piece)]
        where = ".".join(map(_shown, pieces)) or "config"
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


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
