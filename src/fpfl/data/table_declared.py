"""Reading the schema of a table: from TOML to a `TableSchema`, or to what is wrong with it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpfl.data.table_schema import (
    AttributeColumn,
    CategoryColumn,
    Label,
    NumberColumn,
    Scalar,
    TableSchema,
)

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
    _known(content, "the schema", {*_TOP, "label", "attributes", "features"})
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
        **values,
    )


def _label(given: Mapping[str, Any]) -> Label:
    _known(given, "[label]", {"column", "classes", "positive", "range", "missing", "outside"})
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
        _known(given, where, {"range", "indicator"})
        return NumberColumn(name, _range(given["range"], where), _flag(given, "indicator", where))
    _known(given, where, {"values"})
    return CategoryColumn(name, _scalars(given.get("values"), where))


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
