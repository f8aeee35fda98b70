"""fpfl: group-fair, differentially private federated learning.

Importing this package imports nothing; its names are imported when they are used. A federation's
node starts anew for every message, and needs torch for one in five. Which names there are, and
where from, stands in ``__init__.pyi``, once.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from fpfl import compat

__version__ = "0.2.0.dev0"

compat.install()


_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")


def _homes(stub: str) -> dict[str, str]:
    """The module of every name that a stub imports."""
    return {
        name.name: found.module or ""
        for found in ast.parse(stub).body
        if isinstance(found, ast.ImportFrom)
        for name in found.names
    }


_HOMES = _homes(_STUB)

__all__ = sorted(_homes(_STUB.partition("# Not advertised")[0]))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
