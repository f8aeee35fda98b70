"""fpfl: group-fair, differentially private federated learning.

Importing this package imports torch and numpy alone; everything else is imported where it is used.
"""

from fpfl.data import (
    Attribute,
    FederatedDataset,
    Schema,
    load_adult,
    merge_values,
    scale_by_ranges,
)
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
from fpfl.suggest import suggest
from fpfl.train import FpflWarning, train
from fpfl.users.local import FederatedAveraging

__version__ = "0.1.0"

__all__ = [
    "BMDM",
    "MMDM",
    "Attribute",
    "Clipping",
    "Constraint",
    "Evaluation",
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
