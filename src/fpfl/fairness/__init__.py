"""What fair means: groups, rates, constraints, and the gaps that are measured."""

from fpfl.fairness.collapse import collapse_in_words
from fpfl.fairness.constraints import (
    Constraint,
    accuracy_parity,
    demographic_parity,
    equal_error,
    equalized_odds,
    fnr_parity,
    predictive_parity,
)
from fpfl.fairness.gaps import Evaluation, GapEstimate, evaluate_predictions
from fpfl.fairness.groups import UNKNOWN, Attribute, Group, Groups, groups_by
from fpfl.fairness.metrics import ClassMetrics, Estimate
from fpfl.fairness.rates import (
    Rate,
    absolute_error,
    accuracy,
    class_recall,
    false_negative_rate,
    false_positive_rate,
    mean_prediction,
    selection_rate,
    squared_error,
    true_positive_rate,
)
from fpfl.fairness.totals import Counts, Totals

__all__ = [
    "UNKNOWN",
    "Attribute",
    "ClassMetrics",
    "Constraint",
    "Counts",
    "Estimate",
    "Evaluation",
    "GapEstimate",
    "Group",
    "Groups",
    "Rate",
    "Totals",
    "absolute_error",
    "accuracy",
    "accuracy_parity",
    "class_recall",
    "collapse_in_words",
    "demographic_parity",
    "equal_error",
    "equalized_odds",
    "evaluate_predictions",
    "false_negative_rate",
    "false_positive_rate",
    "fnr_parity",
    "groups_by",
    "mean_prediction",
    "predictive_parity",
    "selection_rate",
    "squared_error",
    "true_positive_rate",
]
