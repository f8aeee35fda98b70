"""Private evaluation: counts of held-out users, released once under a budget of their own."""

from fpfl.heldout.against import evaluate_with_reference
from fpfl.heldout.evaluation import evaluate_privately, evaluate_run, plan_heldout
from fpfl.heldout.plan import HeldoutPlan
from fpfl.heldout.result import PrivateEvaluation, RateEstimate

__all__ = [
    "HeldoutPlan",
    "PrivateEvaluation",
    "RateEstimate",
    "evaluate_privately",
    "evaluate_run",
    "evaluate_with_reference",
    "plan_heldout",
]
