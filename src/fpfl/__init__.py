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
        load_adult,
        merge_values,
        scale_by_ranges,
    )
    from fpfl.estimator import FairPrivateClassifier, FairPrivateRegressor
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
    from fpfl.privacy import PrivacyPlan
    from fpfl.privacy.population import PopulationLedger
    from fpfl.privacy.settings import Clipping, Privacy
    from fpfl.run import Run, evaluate_model
    from fpfl.server.round import RoundEvent
    from fpfl.suggesting import suggest
    from fpfl.training import FpflWarning, train
    from fpfl.users.local import FederatedAveraging

__version__ = "0.1.0"

_HOMES = {
    "fpfl.data": (
        "Attribute",
        "FederatedDataset",
        "Schema",
        "load_adult",
        "merge_values",
        "scale_by_ranges",
    ),
    "fpfl.estimator": ("FairPrivateClassifier", "FairPrivateRegressor"),
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
    "fpfl.privacy": ("PrivacyPlan",),
    "fpfl.privacy.population": ("PopulationLedger",),
    "fpfl.privacy.settings": (
        "Clipping",
        "Privacy",
    ),
    "fpfl.run": (
        "Run",
        "evaluate_model",
    ),
    "fpfl.server.round": ("RoundEvent",),
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
    "FairPrivateClassifier",
    "FairPrivateRegressor",
    "FederatedAveraging",
    "FederatedDataset",
    "FpflWarning",
    "OneGradient",
    "PopulationLedger",
    "Privacy",
    "PrivacyPlan",
    "Rate",
    "RoundEvent",
    "Run",
    "RunFolder",
    "Schema",
    "Tran",
    "accuracy_parity",
    "demographic_parity",
    "equal_error",
    "equalized_odds",
    "evaluate_model",
    "evaluate_privately",
    "fnr_parity",
    "load_adult",
    "merge_values",
    "mlp",
    "predictive_parity",
    "scale_by_ranges",
    "suggest",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
