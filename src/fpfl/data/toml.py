"""Plain values as TOML, which the standard library reads and does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable


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
