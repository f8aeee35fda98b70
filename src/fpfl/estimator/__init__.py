"""scikit-learn estimators around `fpfl.train`."""

from fpfl.estimator.estimators import FairPrivateClassifier, FairPrivateRegressor

__all__ = ["FairPrivateClassifier", "FairPrivateRegressor"]
