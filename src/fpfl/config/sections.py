"""What a config may say: the sections of a TOML file, and which of their keys go together.

What they mean is in `fpfl.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fpfl.compat import todays
from fpfl.data.loaders import REGISTER as LOADERS
from fpfl.data.table_schema import TableSchema, declared_schema
from fpfl.methods import REGISTER
from fpfl.privacy.adaptive import RATIO
from fpfl.privacy.plan import Neighbours
from fpfl.privacy.settings import Sampling
from fpfl.server.selection import Rule
from fpfl.training.defaults import ROUNDS
from fpfl.training.models import SHALLOW
from fpfl.users.precision import Precision

VERSION = 1
"""Of the config's format: a newer fpfl may read keys that this one does not know."""


NO_CONSTRAINT = (
    "a reference is the same training without its constraint, and there is no constraint; add a "
    "[constraint] section (with a table: --groups), or leave the reference out"
)


def _sensible(value: float) -> float:
    """Refuse what leaves the range of 32-bit numbers, or whose square leaves that of 64 bits."""
    if value and not 1e-30 <= abs(value) <= 1e30:
        raise ValueError(f"{value:g} is out of range: give 0, or a size from 1e-30 to 1e30")
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
    class_weights: list[Number] | None = None


class DataConfig(_Section):
    """Where the data comes from: ``name = "adult"``, ``train`` (.npz), ``table`` or ``folder``.

    A name is one of `fpfl.data.loaders`, with that data set's own settings. An .npz file has the
    arrays ``features`` and ``labels``, and where they apply ``attributes`` (codes, one column for
    each declared attribute) and ``users``. A table is a CSV or Parquet file
    with a schema of its own (``schema_file``, or here). A population folder has its schema with it
    and is read lazily. ``test`` is of the same kind as the training data; of a table's users a
    share may be ``held_out`` instead. Its columns are scaled by what is declared and, where that is
    a range alone, found out, under ε where there is one; not with ``measure = false``.
    """

    name: str | None = None
    settings: dict[str, Any] = {}
    train: Path | None = None
    table: Path | None = None
    folder: Path | None = None
    test: Path | None = None
    held_out: Annotated[Number, Field(gt=0.0, lt=1.0)] | None = None
    schema_file: Path | None = None
    measure: Annotated[bool, Field(strict=True)] = True
    # Named so in the file; `schema` itself is taken in pydantic.
    declared: SchemaConfig | None = Field(default=None, alias="schema")
    # A table's, which is checked where tables are read.
    columns: SkipValidation[TableSchema] | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_schema(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = _named_data(values, {*cls.model_fields, "schema"})
        if "columns" in values:
            raise ValueError("there is no key 'columns'; a table's schema is [data.schema]")
        if "table" not in values or "schema" not in values:
            return values
        if not isinstance(values["schema"], dict):
            raise ValueError(f"schema is {values['schema']!r}; expected a section, [data.schema]")
        rest = {name: value for name, value in values.items() if name != "schema"}
        return rest | {"columns": declared_schema(values["schema"])}

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        sources = (self.name, self.train, self.table, self.folder)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(
                "give one of name = 'adult', train = 'FILE.npz', table = 'FILE.csv' (or .parquet) "
                "and folder = 'POPULATION'"
            )
        if self.train is not None and self.declared is None:
            raise ValueError("a file needs a declared [data.schema]: classes, attributes, ...")
        if self.table is not None and (self.schema_file is None) == (self.columns is None):
            raise ValueError(
                "a table needs its declared schema: schema_file = 'FILE.toml' or [data.schema], "
                "one of the two"
            )
        if self.test is not None and self.held_out is not None:
            raise ValueError("give test = 'FILE' or held_out, a share of the users; not both")
        others: set[str] = set()
        if self.name is not None:
            others = {"test", "declared"}
        elif self.folder is not None:
            others.add("declared")  # the schema is in the folder
        if self.table is None:
            others |= {"schema_file", "held_out", "measure"}
        lost = sorted(others & self.model_fields_set)
        if lost:
            raise ValueError(f"{lost} do not apply to this source of data; remove them")
        if self.declared is not None and set(self.declared.unknown) - set(self.declared.attributes):
            raise ValueError(f"unknown = {self.declared.unknown} names no declared attribute")
        return self


def _named_data(values: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The settings that are a named data set's own, in a key of theirs."""
    if "settings" in values:
        raise ValueError("there is no key 'settings'; remove it or correct its name")
    own = {name: value for name, value in values.items() if name not in known}
    name = values.get("name")
    if name is None:
        lost = sorted(own.keys() & {each for one in LOADERS.values() for each in one.settings})
        if lost:
            raise ValueError(f"{lost} do not apply to this source of data; remove them")
        return values
    if not isinstance(name, str) or name not in LOADERS:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(LOADERS)}")
    rest = {name: value for name, value in values.items() if name not in own}
    found = _own_settings(own, LOADERS[name].settings, f"name = '{name}'")
    return rest | ({"settings": found} if found else {})


class ModelConfig(_Section):
    """A perceptron's hidden layers."""

    hidden: list[Annotated[Whole, Field(ge=1)]] = list(SHALLOW)


class TrainingConfig(_Section):
    """How to train; see ``fpfl.train``.

    ``suggested`` fills in what is left out of rounds, learning rate, clip bounds and method by the
    rules of ``fpfl.suggest``. ``reference`` trains the same without the constraint besides, as a
    run of its own, to say who is better and who is worse off than by it.
    """

    cohort: Whole
    rounds: Whole
    suggested: Annotated[bool, Field(strict=True)] = False
    reference: Annotated[bool, Field(strict=True)] = False
    learning_rate: Number = 0.1
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    normaliser: Literal["users", "samples"] | Number = "users"
    samples_per_user: Whole | None = None
    local_steps: Annotated[Whole, Field(ge=1)] = 1
    local_learning_rate: Number | None = None
    sampling: Sampling | None = None
    selection: Rule | None = None
    selection_window: Whole = 1
    clip: Number | ClipConfig | None = None
    seed: int | None = None
    noise_seed: int | None = None
    memory: Whole | None = None
    precision: Precision = "float32"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]{1,3})?$")
    checkpoint_every: Whole = 200

    @model_validator(mode="before")
    @classmethod
    def _suggested_rounds(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("suggested") is True:
            return {"rounds": ROUNDS, **values}
        return values

    @model_validator(mode="after")
    def _local(self) -> TrainingConfig:
        steps, rate = self.local_steps, self.local_learning_rate
        if steps > 1 and rate is None:
            raise ValueError(
                f"local_steps = {steps} needs the step size of the users' own steps; add e.g. "
                "local_learning_rate = 0.1"
            )
        if steps == 1 and rate is not None:
            raise ValueError(
                f"local_learning_rate = {rate:g} is for users who take several steps of their own, "
                "and local_steps is 1; raise local_steps, or remove local_learning_rate"
            )
        return self


class AdaptsConfig(_Section):
    """How a clip bound finds itself; see ``AdaptiveBound``."""

    target: Number
    rate: Number = 0.2
    share: Number = 0.01
    least: Number | None = None
    most: Number | None = None
    ratio: Number = RATIO
    reference: Number | None = None


class ClipConfig(_Section):
    """Clip bounds in blocks; see ``Clipping``."""

    bound: Number
    counts: Number | None = None
    selection: Number = 2.0
    counts_share: Number = 0.15
    selection_share: Number = 0.05
    clipped_share: Number | None = None
    adapts: AdaptsConfig | None = None


class ConstraintConfig(_Section):
    """What must be equal between groups."""

    kind: str
    by: list[str | list[str]] = []
    tolerance: Number = 0.02


class MethodConfig(_Section):
    """How it is enforced: one of the methods that `fpfl.methods` has registered, and its settings.

    What is left out has the method's own default. TOML has no word for None: a method says which
    word it is (``tolerance = "constraint"`` is the constraint's own α).
    """

    kind: str = "mmdm"
    settings: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _own_settings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("kind", "mmdm")
        method = REGISTER.get(kind) if isinstance(kind, str) else None
        if method is None:
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(REGISTER)}")
        given = {name: value for name, value in values.items() if name != "kind"}
        try:
            given = todays(method.make.__name__, given)
        except TypeError as error:
            raise ValueError(str(error)) from error
        found = _own_settings(given, method.settings, f"kind = '{kind}'", method.words or {})
        return {"kind": kind, "settings": found}


def _own_settings(
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    whose: str,
    words: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The settings of something that has a name, each as its type asks for."""
    lost = sorted(given.keys() - settings.keys())
    if lost:
        raise ValueError(
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} no setting of {whose}, which "
            f"has {', '.join(settings)}; remove what does not belong to it, or choose another"
        )
    words = words or {}
    return {
        name: None
        if value == words.get(name, ...)
        else _checked(name, value, settings[name], words.get(name))
        for name, value in given.items()
    }


def _checked(name: str, value: Any, hint: Any, word: str | None) -> Any:
    """A setting as its type asks for."""
    united = get_origin(hint) in (Union, UnionType)
    parts = list(get_args(hint)) if united else [hint]
    kinds = tuple(Number if part is float else part for part in parts if part is not type(None))
    try:
        kind: Any = reduce(or_, kinds)
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        more = f", or {word!r}" if word else ""
        raise ValueError(f"{name} is {value!r}: {message}{more}") from error


class PrivacyConfig(_Section):
    """How private it is to be; see ``Privacy``."""

    epsilon: Number | None = None
    # With less noise than that the accountants run out of numbers for ε.
    noise_multiplier: Annotated[Number, Field(ge=1e-3)] | None = None
    delta: Number | None = None
    clip: Number | ClipConfig = 1.0
    convention: str = "poisson"
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

    @model_validator(mode="after")
    def _together(self) -> Config:
        t = self.training
        kind = self.method.kind if self.method else ("one-gradient" if t.suggested else "mmdm")
        reweights = REGISTER[kind].reweights
        if t.local_steps > 1 and self.constraint is not None and not reweights:
            raise ValueError(
                f"training.local_steps = {t.local_steps} does not go with method.kind = '{kind}', "
                "whose users send gradients at the model that they are given; use kind = "
                "'one-gradient', or remove local_steps"
            )
        if t.reference and self.constraint is None:
            raise ValueError(NO_CONSTRAINT)
        if t.suggested:
            self._check_suggested(kind)
        return self

    def _check_suggested(self, kind: str) -> None:
        """Refuse what the rules for settings do not cover."""
        said = "training.suggested = true"
        t, p = self.training, self.privacy
        if self.constraint is None:
            raise ValueError(
                f"{said} is for training under a constraint, and there is none; add a [constraint] "
                "section, or give the settings yourself"
            )
        if p is None:
            raise ValueError(
                f"{said} chooses settings by the noise, and there is none; add a [privacy] section "
                "with epsilon or noise_multiplier, or give the settings yourself"
            )
        if kind != "one-gradient":
            raise ValueError(
                f"{said} is for method.kind = 'one-gradient', and it is '{kind}'; leave [method] "
                "out, or give the settings yourself"
            )
        if "learning_rate" in t.model_fields_set:
            return
        for name, given, expected in (
            ("training.optimizer", t.optimizer, "sgd"),
            ("training.normaliser", t.normaliser, "users"),
        ):
            if given != expected:
                raise ValueError(
                    f"{said} knows a learning rate for {name} = '{expected}', and it is "
                    f"{given!r}; give learning_rate, or leave {name} out"
                )
        if "clip" in p.model_fields_set and not (isinstance(p.clip, ClipConfig) and p.clip.counts):
            raise ValueError(
                f"{said} knows a learning rate where counts have a clip bound of their own, and "
                "privacy.clip has none; leave clip out, give clip = { bound = ..., counts = ... }, "
                "or give learning_rate"
            )
