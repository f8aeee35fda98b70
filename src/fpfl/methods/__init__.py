"""How fairness is enforced: pure functions from (state, released totals) to (state, direction).

A method is added as a file of this folder that registers it (`fpfl.methods.base.register`).
"""

from importlib import import_module
from pkgutil import iter_modules

from fpfl.methods.base import (
    REGISTER,
    Broadcasting,
    Method,
    MethodState,
    Registered,
    ReweightingMethod,
    Unconstrained,
)
from fpfl.methods.mmdm import BMDM, MMDM
from fpfl.methods.onegradient import OneGradient
from fpfl.methods.tran import Tran

for _found in iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")

__all__ = [
    "BMDM",
    "MMDM",
    "REGISTER",
    "Broadcasting",
    "Method",
    "MethodState",
    "OneGradient",
    "Registered",
    "ReweightingMethod",
    "Tran",
    "Unconstrained",
]
