# Which names `fpfl` has, and where each is from. `__init__.py` reads this file, and so do
# type checkers.
# ruff: noqa: I001
from fpfl.callbacks.progress import Progress as Progress
from fpfl.data.adult import load_adult as load_adult
from fpfl.data.federated import FederatedDataset as FederatedDataset
from fpfl.data.schema import Attribute as Attribute
from fpfl.data.schema import Schema as Schema
from fpfl.data.tables import read_table as read_table
from fpfl.estimator import FairGridSearchCV as FairGridSearchCV
from fpfl.estimator import FairPrivateClassifier as FairPrivateClassifier
from fpfl.estimator import FairPrivateRegressor as FairPrivateRegressor
from fpfl.fairness.constraints import Constraint as Constraint
from fpfl.fairness.constraints import accuracy_parity as accuracy_parity
from fpfl.fairness.constraints import demographic_parity as demographic_parity
from fpfl.fairness.constraints import equal_error as equal_error
from fpfl.fairness.constraints import equalized_odds as equalized_odds
from fpfl.fairness.constraints import fnr_parity as fnr_parity
from fpfl.fairness.rates import Rate as Rate
from fpfl.heldout import evaluate_privately as evaluate_privately
from fpfl.heldout import evaluate_run as evaluate_run
from fpfl.measurement import measure as measure
from fpfl.methods import BMDM as BMDM
from fpfl.methods import MMDM as MMDM
from fpfl.methods import OneGradient as OneGradient
from fpfl.methods import Tran as Tran
from fpfl.planning import plan_training as plan_training
from fpfl.privacy.budget import PopulationLedger as PopulationLedger
from fpfl.privacy.settings import Clipping as Clipping
from fpfl.privacy.settings import Privacy as Privacy
from fpfl.report.page import write_report as write_report
from fpfl.runs.folder import RunFolder as RunFolder
from fpfl.sweeps.choice import choose as choose
from fpfl.sweeps.grid import grid as grid
from fpfl.sweeps.sweep import sweep as sweep
from fpfl.training.defaults import suggest as suggest
from fpfl.training.models import mlp as mlp
from fpfl.training.run import Run as Run
from fpfl.training.session import train as train
from fpfl.users.local import FederatedAveraging as FederatedAveraging

# Not advertised: for whoever knows them from their rooms.
from fpfl.callbacks.explain import Explain as Explain
from fpfl.callbacks.tracking import MLflowCallback as MLflowCallback
from fpfl.callbacks.tracking import TensorBoardCallback as TensorBoardCallback
from fpfl.data.federated import merge_values as merge_values
from fpfl.data.schema import scale_by_ranges as scale_by_ranges
from fpfl.data.table_schema import TableSchema as TableSchema
from fpfl.exporting import Predictor as Predictor
from fpfl.exporting import export_onnx as export_onnx
from fpfl.exporting import export_torch as export_torch
from fpfl.fairness.constraints import predictive_parity as predictive_parity
from fpfl.fairness.evaluation import Evaluation as Evaluation
from fpfl.measurement import Measurement as Measurement
from fpfl.privacy.adaptive import AdaptiveBound as AdaptiveBound
from fpfl.privacy.budget import tuning_cost as tuning_cost
from fpfl.privacy.plan import PrivacyPlan as PrivacyPlan
from fpfl.report.card import model_card as model_card
from fpfl.report.facts import run_facts as run_facts
from fpfl.server.events import Training as Training
from fpfl.server.loop import RoundEvent as RoundEvent
from fpfl.server.loop import StopTraining as StopTraining
from fpfl.sweeps.choice import Choice as Choice
from fpfl.sweeps.sweep import Sweep as Sweep
from fpfl.sweeps.sweep import SweepRun as SweepRun
from fpfl.training.run import evaluate_model as evaluate_model
from fpfl.training.reference import train_reference as train_reference
from fpfl.training.session import FpflWarning as FpflWarning

__version__: str
__all__: list[str]
