"""Training: what was asked for, settled once, and conducted to a finished run.

Its names are imported when they are used: `fpfl.training.models`, say, needs none of the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.training.session import FpflWarning, RunNote, train

_NAMES = ("FpflWarning", "RunNote", "train")

__all__ = ["FpflWarning", "RunNote", "train"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("fpfl.training.session"), name)
    return value
