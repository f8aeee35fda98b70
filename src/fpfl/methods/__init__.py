"""How fairness is enforced: pure functions from (state, released totals) to (state, direction)."""

from fpfl.methods.base import Method, MethodState, Unconstrained
from fpfl.methods.mmdm import BMDM, MMDM
from fpfl.methods.tran import Tran

__all__ = ["BMDM", "MMDM", "Method", "MethodState", "Tran", "Unconstrained"]
