"""What is public about a table: its label, attributes and features, declared in a small TOML file.

Nothing in it is to be read from the data: a range, a list of values or a number of users that
follows the data is a release that no accountant has seen. A draft that `fpfl.data.drafting` made
by looking says so (``source = "data"``), and training with privacy refuses it.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fpfl.data.schema import Attribute, Schema, Source


def toml_value(value: str | float | bool | Iterable[object]) -> str:
    """A text, a number, a truth value or a list of them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return toml_list(value)


def toml_list(values: Iterable[object]) -> str:
    """A list on one line."""
    return f"[{', '.join(toml_value(value) for value in values)}]"  # type: ignore[arg-type]


def toml_key(name: str) -> str:
    """A key: bare where TOML allows it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


Scalar = str | int | float | bool
Missing = Literal["refuse", "drop"]
Outside = Literal["refuse", "clamp"]
Tail = Literal["long"]
Transform = Literal["log", "quantile"]

SEPARATORS = (",", ";", "\t", "|")
OTHER, LACKING = "(other)", "(missing)"
"""How the columns for undeclared values and for missing numbers are called."""


@dataclass(frozen=True)
class Label:
    """The label's column.

    Parameters
    ----------
    column
        Its name.
    classes
        The classes as the table has them, in the order of their numbers: of two, the second is the
        positive one. None for a regression.
    range
        For a regression: the label's public range.
    missing
        What is done with a row that lacks it: an error, or it is left out. Its user stays one.
    outside
        For a regression: whether a label outside the range is an error, or moved to its end.
    merged
        The cells that mean a class, for classes that stand for others than themselves.
    weights
        What a sample's loss is multiplied by, by class; those that are not named weigh 1.
    centre, scale
        For a regression: where labels lie and how far they spread, where that is public.
    """

    column: str
    classes: tuple[Scalar, ...] | None = None
    range: tuple[float, float] | None = None
    missing: Missing = "refuse"
    outside: Outside = "refuse"
    merged: tuple[tuple[Scalar, tuple[Scalar, ...]], ...] = ()
    centre: float | None = None
    scale: float | None = None
    weights: tuple[tuple[str, float], ...] = ()

    @property
    def cells(self) -> tuple[tuple[Scalar, ...], ...]:
        """What the table has for each class: its own name, or what is merged into it."""
        merged = dict(self.merged)
        return tuple(merged.get(each, (each,)) for each in self.classes or ())

    def __post_init__(self) -> None:
        if (self.classes is None) == (self.range is None):
            raise ValueError(
                f"the label {self.column!r} needs its classes, e.g. classes = ['no', 'yes'], or, "
                "for a regression, its public range = [low, high]; give one of the two"
            )
        if self.classes is not None:
            _check_values(f"the label {self.column!r}", self.classes)
            self._check_merged(self.classes)
            if self.centre is not None or self.scale is not None:
                raise ValueError(
                    f"the label {self.column!r} has classes, and centre and scale are about the "
                    "numbers of a regression; leave them out"
                )
        elif self.range is not None:
            _check_range(f"the label {self.column!r}", self.range)
            if self.merged:
                raise ValueError(
                    f"the label {self.column!r} has a range, and label.merged is about classes; "
                    "give one of the two"
                )
            _check_spread(f"the label {self.column!r}", self.range, self.centre, self.scale)
        for name, given, known in (
            ("missing", self.missing, get_args(Missing)),
            ("outside", self.outside, get_args(Outside)),
        ):
            if given not in known:
                raise ValueError(f"label.{name} is {given!r}; expected {' or '.join(known)}")

    def _check_merged(self, classes: tuple[Scalar, ...]) -> None:
        strange = [name for name, _ in self.merged if name not in classes]
        if strange:
            raise ValueError(
                f"label.merged names {strange}, and the classes are {list(classes)}; give lists of "
                "cells for these"
            )
        where = f"the label {self.column!r} with label.merged"
        if not all(self.cells):
            raise ValueError(f"{where} has a class without cells; name one, or leave it out there")
        _check_values(where, tuple(cell for cells in self.cells for cell in cells))


@dataclass(frozen=True)
class NumberColumn:
    """A feature that is a number in a public range, which is mapped to [−3, 3].

    What is outside is moved to the range's end; a missing number to its middle, and with
    ``indicator`` a second feature says that it was missing.

    Where they are known, ``centre`` and ``scale`` say where the values lie and how far they spread:
    from public knowledge, or, with ``measured``, from a private measurement. ``tail`` is "long"
    where most values are near 0 and a few are far from it: then bins are finer near 0.
    ``transform`` is "log" where the network should see the value's logarithm, and "quantile" where
    it should see its rank (`fpfl.data.inputs`); then ``quantiles`` take the place of centre and
    scale: two or more at even shares, from the least value to the largest, e.g. the quartiles.
    """

    name: str
    range: tuple[float, float]
    indicator: bool = False
    centre: float | None = None
    scale: float | None = None
    measured: bool = False
    tail: Tail | None = None
    transform: Transform | None = None
    quantiles: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        where = f"the feature {self.name!r}"
        _check_range(where, self.range)
        for name, given, known in (
            ("tail", self.tail, get_args(Tail)),
            ("transform", self.transform, get_args(Transform)),
        ):
            if given is not None and given not in known:
                words = " or ".join(map(repr, known))
                raise ValueError(f"{where}: {name} is {given!r}; expected {words}, or leave it out")
        _check_spread(where, self.range, self.centre, self.scale)
        _check_quantiles(where, self)
        _check_measured(where, self.measured, self.given)

    @property
    def given(self) -> bool:
        """Whether its centre and scale are known, or its quantiles where it becomes ranks."""
        return self.scale is not None or self.quantiles is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the features that it gives."""
        return (self.name, f"{self.name} {LACKING}") if self.indicator else (self.name,)


@dataclass(frozen=True)
class CategoryColumn:
    """A feature with public values: a 0/1 feature for each, and one for any other value.

    A missing value has 0 in all of them. ``shares`` says how common each value is, where that is
    known: from public knowledge, or, with ``measured``, from a private measurement. What they lack
    to 1 are other values.
    """

    name: str
    values: tuple[Scalar, ...]
    shares: tuple[float, ...] | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        where = f"the feature {self.name!r}"
        _check_values(where, self.values, least=1)
        if self.shares is not None:
            good = len(self.shares) == len(self.values) and all(
                0.0 <= share <= 1.0 for share in self.shares
            )
            if not good or sum(self.shares) > 1.0 + 1e-9:
                raise ValueError(
                    f"{where} has the shares {list(self.shares)}; expected one for each of its "
                    f"{len(self.values)} values, from 0 to 1, that add up to 1 at most"
                )
        _check_measured(where, self.measured, self.given)

    @property
    def given(self) -> bool:
        """Whether its shares are known."""
        return self.shares is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the features that it gives."""
        return tuple(f"{self.name}={_text(value)}" for value in (*self.values, OTHER))


@dataclass(frozen=True)
class AttributeColumn:
    """A sensitive attribute with public values; with ``unknown``, a cell may be empty."""

    name: str
    values: tuple[Scalar, ...]
    unknown: bool = False

    def __post_init__(self) -> None:
        _check_values(f"the attribute {self.name!r}", self.values)


@dataclass(frozen=True)
class MeasuredAt:
    """What the private measurement cost that a schema's figures are from.

    Parameters
    ----------
    epsilon, delta
        Of that one release.
    neighbours
        What one user may change.
    seeded
        Whether its noise came from a seed: a simulation, which protects nobody.
    """

    epsilon: float
    delta: float
    neighbours: str = "zero-out"
    seeded: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < sys.float_info.max and 0 < self.delta < 1):
            raise ValueError(
                f"measured: ε = {self.epsilon} at δ = {self.delta}; expected a positive ε, and δ "
                "between 0 and 1"
            )


@dataclass(frozen=True)
class TableSchema:
    """What is public about a table. Columns that it does not name are not used.

    Parameters
    ----------
    label, features, attributes
        See the classes of this module. An attribute is a feature only where it is listed as one.
    user
        User id column (the unit of privacy). None: every row is a user, and what is protected is a
        row, not all that a person has in the table.
    population, samples_per_user
        K, and how many rows a user is expected to have.
    missing
        The texts that mean "no value", beside an empty cell.
    separator
        Of a CSV file; None: the one of comma, semicolon, tab and bar that its header has most.
    source
        "declared", or "data" for a draft that was made by looking.
    measured
        What the measurement cost that centres, scales and shares are from, where there was one.
    """

    label: Label
    features: tuple[NumberColumn | CategoryColumn, ...]
    attributes: tuple[AttributeColumn, ...] = ()
    user: str | None = None
    population: int | None = None
    samples_per_user: float | None = None
    missing: tuple[str, ...] = ()
    separator: str | None = None
    source: Source = "declared"
    measured: MeasuredAt | None = None

    def __post_init__(self) -> None:
        if self.measured is None and any(feature.measured for feature in self.features):
            names = [feature.name for feature in self.features if feature.measured]
            raise ValueError(
                f"the features {names} are marked as measured, and there is no [measured]: say "
                "what it cost (epsilon, delta), or remove source = 'measured' if they are public"
            )
        if not self.features:
            raise ValueError(
                "no features are declared; name the columns to predict from under [features], "
                "e.g. age = [0, 120] for a number or job = ['clerk', 'cook'] for categories"
            )
        if self.separator is not None and self.separator not in SEPARATORS:
            known = ", ".join(map(repr, SEPARATORS))
            raise ValueError(f"separator is {self.separator!r}; expected one of {known}")
        if self.source not in get_args(Source):
            raise ValueError(f"source is {self.source!r}; expected 'declared' or 'data'")
        groups = [attribute.name for attribute in self.attributes]
        features = [feature.name for feature in self.features]
        alone = [self.label.column, *([] if self.user is None else [self.user])]
        for names in (groups + alone, features + alone):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(
                    f"the columns {twice} are named for two things; a column is the label, the "
                    "user, or an attribute or a feature or both of these, and each once"
                )
        self.schema()  # checks what is left: the numbers of users and of samples

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are used, each once."""
        names = [self.label.column, *(c.name for c in (*self.attributes, *self.features))]
        return tuple(dict.fromkeys([*names, *([] if self.user is None else [self.user])]))

    def schema(self) -> Schema:
        """The schema of the samples that the table's rows become."""
        names = [name for feature in self.features for name in feature.outputs]
        ranges: list[tuple[float, float]] = []
        for feature in self.features:
            own = [feature.range] if isinstance(feature, NumberColumn) else []
            ranges += own + [(0.0, 1.0)] * (len(feature.outputs) - len(own))
        samples, classes = self.samples_per_user, self.label.classes
        if samples is None and self.user is None:
            samples = 1.0
        found = Schema(
            shape=(len(names),),
            classes=None if classes is None else len(classes),
            class_names=None if classes is None else tuple(map(_text, classes)),
            label_range=self.label.range,
            attributes=tuple(
                Attribute(a.name, tuple(map(_text, a.values)), unknown=a.unknown)
                for a in self.attributes
            ),
            feature_names=tuple(names),
            feature_ranges=tuple(ranges),
            population=self.population,
            samples_per_user=samples,
            source=self.source,
        )
        return found.weighing(dict(self.label.weights) or None)

    def toml(self, section: str = "") -> str:
        """As TOML, under a section of another file where one is named."""
        given = {name: getattr(self, name) for name in ("user", "population", "samples_per_user")}
        lines = [f'source = "{self.source}"']
        lines += [f"{name} = {toml_value(v)}" for name, v in given.items() if v is not None]
        if self.separator is not None:
            lines.append(f"separator = {toml_value(self.separator)}")
        if self.missing:
            lines.append(f"missing = {toml_list(self.missing)}")
        if section:
            lines.insert(0, f"[{section}]")
        dot = f"{section}." if section else ""
        lines += ["", f"[{dot}label]", f"column = {toml_value(self.label.column)}"]
        if self.label.classes is not None:
            lines.append(f"classes = {toml_list(self.label.classes)}")
            if len(self.label.classes) == 2:
                lines.append(f"positive = {toml_value(self.label.classes[1])}")
        if self.label.range is not None:
            lines.append(f"range = {toml_list(map(_plain, self.label.range))}")
        if self.label.centre is not None and self.label.scale is not None:
            lines += [
                f"centre = {_plain(self.label.centre)}",
                f"scale = {_plain(self.label.scale)}",
            ]
        for name, value in (("missing", self.label.missing), ("outside", self.label.outside)):
            if value != "refuse":
                lines.append(f'{name} = "{value}"')
        if self.label.weights:
            lines += ["", f"[{dot}label.weights]"]
            lines += [f"{toml_key(n)} = {toml_value(w)}" for n, w in self.label.weights]
        if self.label.merged:
            lines += ["", f"[{dot}label.merged]"]
            lines += [f"{toml_key(_text(n))} = {toml_list(c)}" for n, c in self.label.merged]
        if self.attributes:
            lines += ["", f"[{dot}attributes]"]
        for a in self.attributes:
            values = toml_list(a.values)
            whole = f"{{ values = {values}, unknown = true }}" if a.unknown else values
            lines.append(f"{toml_key(a.name)} = {whole}")
        lines += ["", f"[{dot}features]"]
        for f in self.features:
            if isinstance(f, CategoryColumn):
                parts = [f"values = {toml_list(f.values)}"]
                if f.shares is not None:
                    parts.append(f"shares = {toml_list(f.shares)}")
            else:
                parts = [f"range = {toml_list(map(_plain, f.range))}"]
                if f.indicator:
                    parts.append("indicator = true")
                if f.centre is not None and f.scale is not None:
                    parts += [f"centre = {_plain(f.centre)}", f"scale = {_plain(f.scale)}"]
                words = (("tail", f.tail), ("transform", f.transform))
                parts += [f"{name} = {toml_value(word)}" for name, word in words if word]
                if f.quantiles is not None:
                    parts.append(f"quantiles = {toml_list(map(_plain, f.quantiles))}")
            if f.measured:
                parts.append('source = "measured"')
            lines.append(f"{toml_key(f.name)} = {{ {', '.join(parts)} }}")
        if self.measured is not None:
            cost = self.measured
            lines += ["", f"[{dot}measured]", f"epsilon = {cost.epsilon}", f"delta = {cost.delta}"]
            lines.append(f"neighbours = {toml_value(cost.neighbours)}")
            lines += ["seeded = true"] if cost.seeded else []
        return "\n".join(lines) + "\n"


def _check_range(where: str, given: tuple[float, float]) -> None:
    low, high = given
    if not (abs(low) <= 1e30 and abs(high) <= 1e30 and low < high):
        raise ValueError(
            f"{where} has the range [{low:g}, {high:g}]; expected low < high, within ±1e30"
        )


def _check_spread(
    where: str, range: tuple[float, float], centre: float | None, scale: float | None
) -> None:
    if (centre is None) != (scale is None):
        raise ValueError(f"{where} has centre = {centre} and scale = {scale}; give both or neither")
    if centre is not None and scale is not None:
        low, high = range
        if not (low <= centre <= high and 0 < scale <= high - low):
            raise ValueError(
                f"{where} has centre = {centre:g} and scale = {scale:g}; expected a centre in its "
                f"range [{low:g}, {high:g}], and a scale that is positive and no wider than it"
            )


def _check_quantiles(where: str, column: NumberColumn) -> None:
    ranks, given = column.transform == "quantile", column.quantiles
    if ranks and column.scale is not None:
        raise ValueError(
            f"{where}: transform = 'quantile' has no use for centre and scale; give quantiles, or "
            "leave them out"
        )
    if given is None:
        return
    if not ranks:
        raise ValueError(f"{where}: quantiles go with transform = 'quantile'; add it")
    low, high = column.range
    if not (
        len(given) > 1
        and low <= given[0] < given[-1] <= high
        and all(a <= b for a, b in itertools.pairwise(given))
    ):
        raise ValueError(
            f"{where} has the quantiles {list(given)}; expected two or more at even shares that "
            f"ascend within its range [{low:g}, {high:g}], from the least value to the largest"
        )


def _check_measured(where: str, measured: bool, given: bool) -> None:
    if measured and not given:
        raise ValueError(f"{where} is marked as measured, and no figures are given; measure it")


def _check_values(where: str, values: tuple[Scalar, ...], least: int = 2) -> None:
    texts = [_text(value) for value in values]
    # 1 and 1.0 are met by the same cells.
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    once = len(set(texts)) == len(texts) and len(set(numbers)) == len(numbers)
    if len(texts) < least or not once or "" in texts or not all(abs(v) <= 1e30 for v in numbers):
        raise ValueError(
            f"{where} has the values {list(values)}; expected at least {least}, each once, none of "
            "them empty, and numbers within ±1e30"
        )


def _plain(value: float) -> float:
    """17 for 17.0, as a person would write it."""
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def _text(value: Scalar) -> str:
    """A declared value as groups and features are called by it."""
    return value.strip() if isinstance(value, str) else str(value)


_TOP = ("source", "user", "population", "samples_per_user", "missing", "separator")


def read_table_schema(path: str | Path) -> TableSchema:
    """Read a schema file; a ValueError of one line says what is wrong with it."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    try:
        return declared_schema(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def declared_schema(content: Mapping[str, Any]) -> TableSchema:
    """The schema of a TOML file's content."""
    _known(content, "the schema", {*_TOP, "label", "attributes", "features", "measured"})
    label = _section(content, "label")
    if not label:
        raise ValueError("there is no [label]; give its column, and its classes or its range")
    values: dict[str, Any] = {name: content[name] for name in _TOP if name in content}
    for name in ("user", "separator"):
        _expect(content, name, str, "a text")
    if "missing" in values:
        values["missing"] = _texts(values["missing"], "missing")
    return TableSchema(
        label=_label(label),
        attributes=tuple(
            _attribute(name, given) for name, given in _section(content, "attributes").items()
        ),
        features=tuple(
            _feature(name, given) for name, given in _section(content, "features").items()
        ),
        measured=_measured_at(_section(content, "measured")),
        **values,
    )


def _measured_at(given: Mapping[str, Any]) -> MeasuredAt | None:
    if not given:
        return None
    _known(given, "[measured]", {"epsilon", "delta", "neighbours", "seeded"})
    _expect(given, "neighbours", str, "a text")
    numbers = [_finite(given, name, "[measured]") for name in ("epsilon", "delta")]
    if numbers[0] is None or numbers[1] is None:
        raise ValueError("[measured] needs epsilon and delta: what the measurement cost")
    seeded = _flag(given, "seeded", "[measured]")
    return MeasuredAt(numbers[0], numbers[1], given.get("neighbours", "zero-out"), seeded)


def _label(given: Mapping[str, Any]) -> Label:
    known = {"column", "classes", "positive", "range", "missing", "outside", "merged"}
    _known(given, "[label]", known | {"centre", "scale", "weights"})
    column = given.get("column")
    if not isinstance(column, str):
        raise ValueError(f"label.column is {column!r}; expected the name of the label's column")
    classes = _scalars(given["classes"], "label.classes") if "classes" in given else None
    if "positive" in given:
        one = given["positive"]
        if classes is None or len(classes) != 2 or one not in classes:
            raise ValueError(
                f"label.positive is {one!r}; expected one of two classes, and the classes are "
                f"{list(classes or ())}"
            )
        classes = (*(c for c in classes if c != one), one)
    return Label(
        column,
        classes,
        _range(given["range"], "label.range") if "range" in given else None,
        given.get("missing", "refuse"),
        given.get("outside", "refuse"),
        _merged(given, classes or ()),
        _finite(given, "centre", "[label]"),
        _finite(given, "scale", "[label]"),
        _weights(given),
    )


def _weights(given: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """What samples of a class weigh: ``weights = { yes = 4 }``."""
    weights = given.get("weights", {})
    where = "label.weights"
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"{where} is {weights!r}; expected numbers by class, e.g. weights = {{ yes = 4 }}. "
            "They are declared: shares counted in the data would be a release of their own"
        )
    return tuple((name, _finite(weights, name, where) or 0.0) for name in weights)


def _merged(
    given: Mapping[str, Any], classes: tuple[Scalar, ...]
) -> tuple[tuple[Scalar, tuple[Scalar, ...]], ...]:
    """Which cells mean a class; keys of TOML are texts, whatever the class is."""
    named = {_text(each): each for each in classes}
    return tuple(
        (named.get(name, name), _scalars(cells, f"label.merged.{name}"))
        for name, cells in _section(given, "merged").items()
    )


def _attribute(name: str, given: Any) -> AttributeColumn:
    where = f"the attribute {name!r}"
    if isinstance(given, Mapping):
        _known(given, where, {"values", "unknown"})
        values = _scalars(given.get("values"), where)
        return AttributeColumn(name, values, _flag(given, "unknown", where))
    return AttributeColumn(name, _scalars(given, where))


def _feature(name: str, given: Any) -> NumberColumn | CategoryColumn:
    where = f"the feature {name!r}"
    if not isinstance(given, Mapping):
        numbers = isinstance(given, list) and all(map(_number, given))
        given = {"range" if numbers else "values": given}
    if "range" in given:
        known = {"range", "indicator", "centre", "scale", "source", "tail", "transform"}
        _known(given, where, known | {"quantiles"})
        return NumberColumn(
            name,
            _range(given["range"], where),
            _flag(given, "indicator", where),
            _finite(given, "centre", where),
            _finite(given, "scale", where),
            _is_measured(given, where),
            given.get("tail"),
            given.get("transform"),
            _numbers(given, "quantiles", where, "share"),
        )
    _known(given, where, {"values", "shares", "source"})
    values = _scalars(given.get("values"), where)
    shares = _numbers(given, "shares", where, "value")
    return CategoryColumn(name, values, shares, _is_measured(given, where))


def _numbers(
    given: Mapping[str, Any], name: str, where: str, each: str
) -> tuple[float, ...] | None:
    values = given.get(name)
    if values is None:
        return None
    if not (isinstance(values, list) and all(map(_number, values))):
        raise ValueError(f"{where}: {name} is {values!r}; expected a number for each {each}")
    return tuple(map(float, values))


def _is_measured(given: Mapping[str, Any], where: str) -> bool:
    source = given.get("source", "declared")
    if source not in ("declared", "measured"):
        raise ValueError(f"{where}: source is {source!r}; expected 'declared' or 'measured'")
    return bool(source == "measured")


def _finite(given: Mapping[str, Any], name: str, where: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if not _number(value):
        raise ValueError(f"{where}: {name} is {value!r}; expected a number")
    return float(value)


def _known(given: Mapping[str, Any], where: str, keys: set[str]) -> None:
    strange = sorted(set(given) - keys)
    if strange:
        raise ValueError(f"{where} has the unknown keys {strange}; it may have {sorted(keys)}")


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    given = content.get(name, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {given!r}; expected a section, [{name}]")
    return given


def _expect(content: Mapping[str, Any], name: str, kind: type, what: str) -> None:
    if name in content and not isinstance(content[name], kind):
        raise ValueError(f"{name} is {content[name]!r}; expected {what}")


def _flag(given: Mapping[str, Any], name: str, where: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {name} is {value!r}; expected true or false")
    return value


def _range(given: Any, where: str) -> tuple[float, float]:
    if not (isinstance(given, list | tuple) and len(given) == 2 and all(map(_number, given))):
        raise ValueError(f"{where}: the range is {given!r}; expected [low, high], two numbers")
    return float(given[0]), float(given[1])


def _scalars(given: Any, where: str) -> tuple[Scalar, ...]:
    if not (isinstance(given, list | tuple) and all(map(_scalar, given))):
        raise ValueError(
            f"{where}: the values are {given!r}; expected a list, e.g. ['a', 'b'], or for a "
            "number its public range, [low, high]"
        )
    return tuple(given)


def _texts(given: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(given, list | tuple) and all(isinstance(v, str) for v in given)):
        raise ValueError(f"{where} is {given!r}; expected a list of texts, e.g. ['?', 'NA']")
    return tuple(text.strip() for text in given)


def _scalar(value: Any) -> bool:
    return isinstance(value, str | bool) or _number(value)


def _number(value: Any) -> bool:
    # A whole number of TOML may be too large for a float.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max
