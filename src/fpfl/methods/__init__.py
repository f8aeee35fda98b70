"""How fairness is enforced: pure functions from (state, released totals) to (state, direction)."""

from fpfl.methods.base import Broadcasting, Method, MethodState, Unconstrained
from fpfl.methods.mmdm import BMDM, MMDM
from fpfl.methods.onegradient import OneGradient
from fpfl.methods.tran import Tran

__all__ = [
    "BMDM",
    "MMDM",
    "Broadcasting",
    "Method",
    "MethodState",
    "OneGradient",
    "Tran",
    "Unconstrained",
]
