"""Configs: a training written down as TOML, checked before anything runs.

The sections are those of ``fpfl.train``; an unknown key is an error, not a silent default.
"""

from __future__ import annotations

import math
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from fpfl.data.adult import load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.files import open_population
from fpfl.data.scaling import scale_by_ranges
from fpfl.data.schema import Attribute, Schema
from fpfl.fairness.constraints import BY_NAME, Constraint, equal_error
from fpfl.folder import RunFolder
from fpfl.methods import MMDM, Method, Tran
from fpfl.models import SHALLOW, mlp
from fpfl.privacy.plan import Convention, Neighbours
from fpfl.privacy.settings import Clipping, Privacy, Sampling
from fpfl.run import Run
from fpfl.server.ranks import Ranks
from fpfl.server.round import Callback
from fpfl.server.selection import Rule
from fpfl.train import train
from fpfl.users.precision import Precision

VERSION = 1
"""Of the config's format: a newer fpfl may read keys that this one does not know."""


MOST_PARAMETERS = 10**9
"""Of a perceptron: more are taken for a slip of the pen, before any memory is."""

_COLUMNS = ("features", "labels", "attributes", "users")
"""What an .npz file may hold; anything else in it is left alone."""

_SHOWN = 5
"""So many mistakes of a config are named at a time."""


def _sensible(value: float) -> float:
    """Refuse what leaves the range of 32-bit numbers, or whose square leaves that of 64 bits."""
    if value and not 1e-30 <= abs(value) <= 1e30:
        raise ValueError(f"{value:g} is beyond all sense; give 0, or a size from 1e-30 to 1e30")
    return value


Number = Annotated[float, AfterValidator(_sensible)]
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""What a float holds exactly."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SchemaConfig(_Section):
    """The declared public schema of a file of one's own."""

    classes: Whole | None = 2
    label_range: tuple[Number, Number] | None = None
    attributes: dict[str, list[str]] = {}
    unknown: list[str] = []
    samples_per_user: Number | None = None
    population: Whole | None = None
    feature_ranges: list[tuple[Number, Number]] | None = None


class DataConfig(_Section):
    """Where the data comes from: ``name = "adult"``, ``train`` (an .npz file) or ``folder``.

    A file has the arrays ``features`` and ``labels``, and where they apply ``attributes`` (codes,
    one column for each declared attribute) and ``users``. A population folder has its schema with
    it and is read lazily. ``test`` is of the same kind as the training data.
    """

    name: Literal["adult"] | None = None
    normalise: Literal["paper", "ranges"] = "ranges"
    attributes: list[Literal["sex", "race"]] = ["sex"]
    users: Literal["poisson", "single"] = "poisson"
    mean_samples: Number = Field(default=2.0, gt=0)
    train: Path | None = None
    folder: Path | None = None
    test: Path | None = None
    # Named so in the file; `schema` itself is taken in pydantic.
    declared: SchemaConfig | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if sum(source is not None for source in (self.name, self.train, self.folder)) != 1:
            raise ValueError(
                "give one of name = 'adult', train = 'FILE.npz' and folder = 'POPULATION'"
            )
        if self.train is not None and self.declared is None:
            raise ValueError("a file needs a declared [data.schema]: classes, attributes, ...")
        others = {"normalise", "attributes", "mean_samples", "users"}
        if self.name is not None:
            others = {"test", "declared"}
        elif self.folder is not None:
            others.add("declared")  # the schema is in the folder
        lost = sorted(others & self.model_fields_set)
        if lost:
            raise ValueError(f"{lost} do not apply to this source of data; remove them")
        if self.declared is not None and set(self.declared.unknown) - set(self.declared.attributes):
            raise ValueError(f"unknown = {self.declared.unknown} names no declared attribute")
        return self


class ModelConfig(_Section):
    """A perceptron's hidden layers."""

    hidden: list[Annotated[Whole, Field(ge=1)]] = list(SHALLOW)


class TrainingConfig(_Section):
    """How to train; see ``fpfl.train``."""

    cohort: Whole
    rounds: Whole
    learning_rate: Number = 0.1
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    normaliser: Literal["users", "samples"] | Number = "users"
    samples_per_user: Whole | None = None
    sampling: Sampling | None = None
    selection: Rule = "best"
    selection_window: Whole = 1
    clip: Number | ClipConfig | None = None
    seed: int | None = None
    noise_seed: int | None = None
    memory: Whole | None = None
    precision: Precision = "float32"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]{1,3})?$")
    checkpoint_every: Whole = 200


class ClipConfig(_Section):
    """Clip bounds in blocks; see ``Clipping``."""

    bound: Number
    counts: Number | None = None
    selection: Number = 2.0
    counts_share: Number = 0.15
    selection_share: Number = 0.05
    clipped_share: Number | None = None


class ConstraintConfig(_Section):
    """What must be equal between groups."""

    kind: str
    by: list[str | list[str]] = []
    tolerance: Number = 0.02


class MethodConfig(_Section):
    """How it is enforced."""

    kind: Literal["mmdm", "bmdm", "tran"] = "mmdm"
    damping: Number = 2.0
    rate: Number = 0.01
    tolerance: Number | None = None
    max_multiplier: Number = 0.05


class PrivacyConfig(_Section):
    """How private it is to be; see ``Privacy``."""

    epsilon: Number | None = None
    # With less noise than that the accountants run out of numbers for ε.
    noise_multiplier: Annotated[Number, Field(ge=1e-3)] | None = None
    delta: Number | None = None
    clip: Number | ClipConfig = 1.0
    convention: Convention = "poisson"
    neighbours: Neighbours | None = None
    population: Whole | None = None
    max_participations: Whole | None = None
    budget: Number | None = None
    ledger: Path | None = None


class Config(_Section):
    """A whole training."""

    version: int = VERSION
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    constraint: ConstraintConfig | None = None
    method: MethodConfig | None = None
    privacy: PrivacyConfig | None = None


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
    t = config.training
    run = train(
        make_model(config, data.schema),
        data,
        cohort=t.cohort,
        rounds=t.rounds,
        constraint=make_constraint(config, data.schema),
        method=_method(config.method),
        privacy=_privacy(config.privacy),
        clip=_clip(t.clip),
        sampling=t.sampling,
        learning_rate=t.learning_rate,
        optimizer=_optimizer(t),
        normaliser=t.normaliser,
        samples_per_user=t.samples_per_user,
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


def _method(config: MethodConfig | None) -> Method | None:
    if config is None:
        return None
    if config.kind == "tran":
        return Tran(rate=config.rate, max_multiplier=config.max_multiplier)
    damping = 0.0 if config.kind == "bmdm" else config.damping
    return MMDM(damping=damping, rate=config.rate, tolerance=config.tolerance)


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
