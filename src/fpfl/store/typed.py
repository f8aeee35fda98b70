"""Values that were written down, read back as what they were: one way for all files.

Dataclasses are written as mappings of their fields, tuples as lists, numbers that are none as null.
What is read is held against the type hints: whatever does not fit them is an error that says where
it stands and what was expected there. Fields that a type does not have are left alone: a later
version may have written them.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

HUGE = 1e100
"""So large that its square is no number any more: nothing that was written here."""

_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false",
          type(None): "null", dict: "a mapping", list: "a list"}  # fmt: skip


class TypedError(ValueError):
    """Something else stands where a type says what there should be."""


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.init}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if isinstance(value, Path) else value


def typed(kind: type[T], value: Any, where: str = "it", *, nan: bool = False) -> T:
    """A value of a type, from what `plain` made of it.

    ``nan``: a number that is null was NaN.
    """
    found: T = _typed(kind, value, where, nan)
    return found


def read_json(file: Path, kind: type[T], *, nan: bool = False) -> T:
    """What a file of JSON holds; an error names the file and what to do."""
    try:
        return typed(kind, json.loads(file.read_text(encoding="utf-8")), nan=nan)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what a run writes ({error}); put an intact copy in its place"
        ) from error


def _typed(kind: Any, value: Any, where: str, nan: bool) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _record(kind, value, where, nan)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value in parts and not isinstance(value, bool):
            return value
        raise _odd(where, f"one of {', '.join(map(repr, parts))}", value)
    if origin in (Union, types.UnionType):
        return _one_of(parts, value, where, nan)
    if origin in (list, tuple) or kind in (list, tuple):
        return _several(kind, parts, value, where, nan)
    if origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise _odd(where, "a mapping", value)
        each = parts[1] if parts else Any
        return {str(n): _typed(each, v, f"{where}: {n!s:.60}", nan) for n, v in value.items()}
    return _single(kind, value, where, nan)


def _single(kind: Any, value: Any, where: str, nan: bool) -> Any:
    # A truth value is a whole number to Python, and no number to a reader.
    if kind is float and value is None and nan:
        return math.nan
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise _odd(where, _NAMES.get(kind, str(kind)), value)
    if isinstance(value, int | float) and not abs(value) <= HUGE:
        raise _odd(where, "a number that was written here", value)
    return float(value) if kind is float else value


def _one_of(parts: tuple[Any, ...], value: Any, where: str, nan: bool) -> Any:
    errors = []
    if value is None and type(None) in parts:
        return None
    for part in parts:
        try:
            return _typed(part, value, where, nan)
        except TypedError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 or value is not None else _odd(where, "something", value)


def _several(kind: Any, parts: tuple[Any, ...], value: Any, where: str, nan: bool) -> Any:
    if not isinstance(value, list | tuple):
        raise _odd(where, "a list", value)
    made = list if get_origin(kind) is list or kind is list else tuple
    if not parts:
        return made(value)
    if made is tuple and parts[-1] is not Ellipsis:
        if len(value) != len(parts):
            raise _odd(where, f"{len(parts)} values", value)
        kinds = parts
    else:
        kinds = (parts[0],) * len(value)
    found = (
        _typed(each, v, f"{where}[{i}]", nan)
        for i, (each, v) in enumerate(zip(kinds, value, strict=True))
    )
    return made(found)


def _record(kind: Any, value: Any, where: str, nan: bool) -> Any:
    if not isinstance(value, dict):
        raise _odd(where, "a mapping", value)
    given = {}
    for field in fields(kind):
        if not field.init:
            continue
        if field.name in value:
            hint = _hints(kind)[field.name]
            given[field.name] = _typed(hint, value[field.name], f"{where}: {field.name}", nan)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise TypedError(f"{where} has no {field.name!r}")
    try:
        return kind(**given)
    except TypedError:
        raise
    except (ValueError, TypeError) as error:  # what the class itself refuses
        raise TypedError(f"{where}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _odd(where: str, wanted: str, value: Any) -> TypedError:
    return TypedError(f"{where} is {value!r:.80}; expected {wanted}")
