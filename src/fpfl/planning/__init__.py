"""Help with choosing: the noise to expect, and what cohort and rounds to take."""

from fpfl.planning.choosing import plan_training
from fpfl.planning.figures import GroupNoise, Setting
from fpfl.planning.levers import Lever
from fpfl.planning.question import Question, Share
from fpfl.planning.result import TrainingPlan

__all__ = [
    "GroupNoise",
    "Lever",
    "Question",
    "Setting",
    "Share",
    "TrainingPlan",
    "plan_training",
]
