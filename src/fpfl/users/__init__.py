"""What a user computes: the layout of v, the statistics, the cohort engine."""

from fpfl.users.engine import CohortEngine, FlatModel, make_layout, predict
from fpfl.users.layout import Layout, Statistics
from fpfl.users.task import check_model

__all__ = [
    "CohortEngine",
    "FlatModel",
    "Layout",
    "Statistics",
    "check_model",
    "make_layout",
    "predict",
]
