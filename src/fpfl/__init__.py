"""fpfl: group-fair, differentially private federated learning.

Importing this package imports nothing; its names are imported when they are used. A federation's
node starts anew for every message, and needs torch for one in five.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.data import (
        Attribute,
        FederatedDataset,
        Schema,
        TableSchema,
        load_adult,
        merge_values,
        read_table,
        scale_by_ranges,
    )
    from fpfl.estimator import FairPrivateClassifier, FairPrivateRegressor
    from fpfl.exporting import Predictor, export_onnx, export_torch
    from fpfl.fairness import (
        Constraint,
        Evaluation,
        Rate,
        accuracy_parity,
        demographic_parity,
        equal_error,
        equalized_odds,
        fnr_parity,
        predictive_parity,
    )
    from fpfl.folder import RunFolder
    from fpfl.heldout import evaluate_privately
    from fpfl.methods import BMDM, MMDM, OneGradient, Tran
    from fpfl.models import mlp
    from fpfl.planning import plan_training
    from fpfl.privacy import PrivacyPlan
    from fpfl.privacy.population import PopulationLedger, tuning_cost
    from fpfl.privacy.settings import Clipping, Privacy
    from fpfl.report.card import model_card
    from fpfl.report.described import run_facts
    from fpfl.report.explaining import Explain
    from fpfl.report.page import write_report
    from fpfl.report.progress import Progress
    from fpfl.report.tracking import MLflowCallback, TensorBoardCallback
    from fpfl.run import Run, evaluate_model
    from fpfl.server.round import RoundEvent, StopTraining
    from fpfl.server.watching import Training
    from fpfl.suggesting import suggest
    from fpfl.training import FpflWarning, train
    from fpfl.users.local import FederatedAveraging

__version__ = "0.2.0.dev0"

_HOMES = {
    "fpfl.data": (
        "Attribute",
        "FederatedDataset",
        "Schema",
        "TableSchema",
        "load_adult",
        "merge_values",
        "read_table",
        "scale_by_ranges",
    ),
    "fpfl.estimator": ("FairPrivateClassifier", "FairPrivateRegressor"),
    "fpfl.exporting": ("Predictor", "export_onnx", "export_torch"),
    "fpfl.fairness": (
        "Constraint",
        "Evaluation",
        "Rate",
        "accuracy_parity",
        "demographic_parity",
        "equal_error",
        "equalized_odds",
        "fnr_parity",
        "predictive_parity",
    ),
    "fpfl.folder": ("RunFolder",),
    "fpfl.heldout": ("evaluate_privately",),
    "fpfl.methods": (
        "BMDM",
        "MMDM",
        "OneGradient",
        "Tran",
    ),
    "fpfl.models": ("mlp",),
    "fpfl.planning": ("plan_training",),
    "fpfl.privacy": ("PrivacyPlan",),
    "fpfl.privacy.population": ("PopulationLedger", "tuning_cost"),
    "fpfl.privacy.settings": (
        "Clipping",
        "Privacy",
    ),
    "fpfl.report.card": ("model_card",),
    "fpfl.report.described": ("run_facts",),
    "fpfl.report.explaining": ("Explain",),
    "fpfl.report.page": ("write_report",),
    "fpfl.report.progress": ("Progress",),
    "fpfl.report.tracking": ("MLflowCallback", "TensorBoardCallback"),
    "fpfl.run": (
        "Run",
        "evaluate_model",
    ),
    "fpfl.server.round": ("RoundEvent", "StopTraining"),
    "fpfl.server.watching": ("Training",),
    "fpfl.suggesting": ("suggest",),
    "fpfl.training": (
        "FpflWarning",
        "train",
    ),
    "fpfl.users.local": ("FederatedAveraging",),
}
"""The modules that the names below are from."""

__all__ = [
    "BMDM",
    "MMDM",
    "Attribute",
    "Clipping",
    "Constraint",
    "Evaluation",
    "Explain",
    "FairPrivateClassifier",
    "FairPrivateRegressor",
    "FederatedAveraging",
    "FederatedDataset",
    "FpflWarning",
    "MLflowCallback",
    "OneGradient",
    "PopulationLedger",
    "Predictor",
    "Privacy",
    "PrivacyPlan",
    "Progress",
    "Rate",
    "RoundEvent",
    "Run",
    "RunFolder",
    "Schema",
    "StopTraining",
    "TableSchema",
    "TensorBoardCallback",
    "Training",
    "Tran",
    "accuracy_parity",
    "demographic_parity",
    "equal_error",
    "equalized_odds",
    "evaluate_model",
    "evaluate_privately",
    "export_onnx",
    "export_torch",
    "fnr_parity",
    "load_adult",
    "merge_values",
    "mlp",
    "model_card",
    "plan_training",
    "predictive_parity",
    "read_table",
    "run_facts",
    "scale_by_ranges",
    "suggest",
    "train",
    "tuning_cost",
    "write_report",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
