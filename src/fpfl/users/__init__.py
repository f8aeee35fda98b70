"""What a user computes: the layout of v, the statistics, the cohort engine."""

from fpfl.users.engine import CohortEngine, make_layout, predict
from fpfl.users.flat import FlatModel
from fpfl.users.layout import Layout
from fpfl.users.rows import UserRows
from fpfl.users.task import check_model

__all__ = [
    "CohortEngine",
    "FlatModel",
    "Layout",
    "UserRows",
    "check_model",
    "make_layout",
    "predict",
]
