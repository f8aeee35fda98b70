"""scikit-learn estimators around `fpfl.train`, and a search over their settings."""

from fpfl.estimator.estimators import FairPrivateClassifier, FairPrivateRegressor
from fpfl.estimator.search import FairGridSearchCV

__all__ = ["FairGridSearchCV", "FairPrivateClassifier", "FairPrivateRegressor"]
