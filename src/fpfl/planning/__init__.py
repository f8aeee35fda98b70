"""Help with choosing: the noise to expect, and what cohort and rounds to take."""

from fpfl.planning.plan import Lever, TrainingPlan, plan_training
from fpfl.planning.question import GroupNoise, Question, Setting, Share

__all__ = [
    "GroupNoise",
    "Lever",
    "Question",
    "Setting",
    "Share",
    "TrainingPlan",
    "plan_training",
]
