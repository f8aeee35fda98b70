"""scikit-learn estimators around `fpfl.train`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fpfl.data.schema import ClassWeights
from fpfl.estimator.base import (
    ClassifierMixin,
    FairPrivateBase,
    Fitting,
    RegressorMixin,
    balanced_accuracy_score,
    check_classification_targets,
    validate_data,
)
from fpfl.estimator.data import (
    Network,
    check_columns,
    checked_label_range,
    labels_within,
    observed_label_range,
)
from fpfl.fairness.constraints import Constraint
from fpfl.methods import Method
from fpfl.privacy.settings import Clipping
from fpfl.training.models import SHALLOW
from fpfl.users import task

__all__ = ["FairPrivateClassifier", "FairPrivateRegressor"]


class FairPrivateClassifier(ClassifierMixin, FairPrivateBase):
    """A classifier with equal rates between groups, trained with differential privacy.

    It calls `fpfl.train`. Without ``constraint`` and ``epsilon`` it is a small neural network.

    Parameters
    ----------
    constraint
        What must be equal between the groups of the sensitive features: ``"equalized_odds"``,
        ``"demographic_parity"``, ``"fnr_parity"``, ``"accuracy_parity"``, or a `fpfl.Constraint`.
        With two classes the second of ``classes_`` is the positive one; with more, rates of a
        positive class need a `fpfl.Constraint` that names its number. Estimators with a name can
        be pickled, those with a `fpfl.Constraint` cannot.
    tolerance
        α: how far a group's rate may be from everybody's; 0.02 by default, or what a given
        `fpfl.Constraint` has.
    epsilon, delta
        The privacy of a whole fit; δ is 1/(10 × users) by default. Without ε there is none.
    hidden
        The sizes of the hidden layers of the network.
    model
        Another network in its place: a ``torch.nn.Module`` that returns logits (one for two
        classes), or a function from (n_features, n_outputs) to one.
    cohort
        Users expected in a round; by default a tenth of them, but no fewer than 100 (or all of
        them) and no more than 5,000.
    rounds
        Number of rounds; by default 300, and with a constraint or with privacy the 1,000 of
        `fpfl.suggest`: what evens rates out follows averages over rounds, and takes its time.
    learning_rate, clip
        By default those of `fpfl.suggest`'s rules: with privacy a bound that begins at 3, or at 1.5
        times the rows that a user has, and adapts; without, there is no clipping. The learning rate
        is for gradients that are divided by m.
    method
        How a constraint is enforced; `fpfl.OneGradient` by default, without privacy one that
        answers counts at once and steers towards three quarters of the tolerance.
    normaliser
        As in `fpfl.train`.
    class_weight
        What a row's loss is multiplied by, by label, e.g. ``{"yes": 4}`` (others 1). ``"balanced"``
        counts the labels in y: without privacy alone, for it would be a release of its own.
    feature_range
        The public (low, high) of each feature, or one pair for all: features are clamped to it
        and scaled, see ``measure``. Without it they are standardised by the data's means and
        deviations; with ``epsilon``, where that would be a release without noise, they are used as
        they are and clamped to [-5, 5], with a warning.
    measure
        With ``feature_range``: also find out where in their ranges features lie, and scale them by
        their medians and spreads. With ``epsilon`` that is a private release before the first
        round, within the same ε. False: ranges are mapped as they are.
    reference
        Also train the same without the constraint, as a run of its own that costs as much again:
        `against_reference` then says who is better and who is worse off than by it.
    ledger
        The file of a `fpfl.PopulationLedger` that every fit is charged to, so that a search over
        settings adds up. Its population is the number of users: those who have no rows in a fold
        are users without samples. A fit that the budget ends early warns and keeps its model;
        one that gets no round raises ``BudgetExhaustedError``.
    random_state
        Seeds the initial weights and the cohorts. The noise is never seeded: two private fits
        differ. Cohorts that can be foretold hide nobody, so keep the seed of a private fit to
        yourself, or leave it out.
    verbose
        Show progress, where it is not 0.

    Attributes
    ----------
    classes_
        The labels.
    n_features_in_, feature_names_in_
        Of the features.
    run_
        The `fpfl.Run`: the model, the released history, settings.
    reference_run_
        The run without the constraint, where one was asked for.
    privacy_
        The privacy statement; None without privacy.
    n_iter_
        Number of rounds that were run.
    schema_
        What the training took as public.

    Notes
    -----
    With privacy, these are read from the data and taken as public: the number of users and of
    rows, the labels that there are, the values of the sensitive features that there are, and
    whether some are missing. What runs before the estimator, such as a ``StandardScaler`` in a
    pipeline, is not covered by ε, and neither is a score on data that is not public.

    Without privacy ``fit`` warns of a collapsed model (`fpfl.fairness.collapse_in_words`): one that
    hardly tells the labels apart. With privacy the rows are a secret; then, by released totals, it
    warns where that is clear (``run_.collapse``). On public rows ``scoring="balanced_accuracy"``
    says it.
    """

    classes_: NDArray[Any]

    def __init__(
        self,
        *,
        constraint: str | Constraint | None = None,
        tolerance: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        hidden: Sequence[int] = SHALLOW,
        model: Network | None = None,
        cohort: int | None = None,
        rounds: int | None = None,
        learning_rate: float | None = None,
        clip: float | Clipping | None = None,
        method: Method | None = None,
        normaliser: Literal["users", "samples"] | float = "users",
        feature_range: Any = None,
        measure: bool = True,
        reference: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            constraint=constraint, tolerance=tolerance, epsilon=epsilon, delta=delta, hidden=hidden,
            model=model, cohort=cohort, rounds=rounds, learning_rate=learning_rate, clip=clip,
            method=method, normaliser=normaliser, feature_range=feature_range, measure=measure,
            reference=reference, ledger=ledger, random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.class_weight = class_weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Written by a version whose losses all weighed the same.
        self.__dict__.setdefault("class_weight", None)

    def _class_weights(self, labels: NDArray[Any]) -> ClassWeights | None:
        given = self.class_weight
        if given == "balanced" and self.epsilon is None:  # then shares are no secret
            count = np.bincount(labels, minlength=len(self.classes_))
            return [float(weight) for weight in len(labels) / (len(count) * count)]
        if not isinstance(given, Mapping):
            return given  # type: ignore[return-value]  # a text is refused, with a reason
        ours = self.classes_.tolist()
        strange = [label for label in given if label not in ours]
        if strange:
            raise ValueError(f"class_weight names {strange}; the labels in y are {ours}")
        return [float(given.get(label, 1.0)) for label in ours]

    def fit(self, X: Any, y: Any, sensitive_features: Any = None, users: Any = None) -> Self:
        """Train.

        Parameters
        ----------
        X, y
            Numbers (arrays, or a frame of numeric columns), and labels of any type.
        sensitive_features
            The groups of each row: one column or several, whose names a frame or a series gives.
            A missing value counts in everybody's rate and in no group's. Used by constraints
            alone.
        users
            Whose each row is: the privacy is that of all of a user's rows together. Without it
            every row is a user of its own, and single rows are protected, not people who have
            several.
        """
        return self._fit(self._prepared(X, y, sensitive_features, users))

    def _prepared(self, X: Any, y: Any, sensitive_features: Any, users: Any) -> Fitting:
        check_columns(X)
        rows, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}; expected two or more to tell apart"
            )
        names = tuple(map(str, self.classes_.tolist()))
        return self._fitting(X, rows, codes, sensitive_features, users, classes=names)

    def _codes(self, y: Any) -> NDArray[Any] | None:
        labels = np.asarray(y)
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        return codes if bool((self.classes_[codes] == labels).all()) else None

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Logits: of the second class where there are two, else one for each class."""
        return np.asarray(self._outputs(X))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The classes' probabilities, in the order of ``classes_``."""
        return np.asarray(task.scores(self._outputs(X), self.schema_))

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest label of each row."""
        outputs = self._outputs(X)
        return np.asarray(self.classes_[task.predictions(outputs, self.schema_).numpy()])

    def balanced_score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The balanced accuracy: the mean of the classes' recalls, over those that are in y.

        ``score`` is the accuracy, which is high for a model that always names the most frequent
        label. This is then 1/C, for C classes. Read it where labels are not equally frequent. It is
        a release like any other: where the rows are not public, no ε covers it.

        Parameters
        ----------
        X, y
            Rows, and their labels.
        sample_weight
            What each row weighs; 1 by default.
        """
        return float(balanced_accuracy_score(y, self.predict(X), sample_weight=sample_weight))


class FairPrivateRegressor(RegressorMixin, FairPrivateBase):
    """A regression with equal errors between groups, trained with differential privacy.

    Parameters
    ----------
    constraint
        ``"equal_error"`` (the mean squared error, in units of the squared label range), or a
        `fpfl.Constraint`.
    label_range
        The public (low, high) of the label: labels and predictions are clamped to it. Without it
        it is read from y, and then it is no secret; with ``epsilon`` it must be given.
    tolerance, epsilon, delta, hidden, model, cohort, rounds, learning_rate, clip, method, \
normaliser, feature_range, measure, reference, ledger, random_state, verbose
        As in `FairPrivateClassifier`; a network has one output, in units of the label range.

    Attributes
    ----------
    n_features_in_, feature_names_in_, run_, privacy_, n_iter_, schema_
        As in `FairPrivateClassifier`, whose notes on what is public hold here too.
    """

    def __init__(
        self,
        *,
        constraint: str | Constraint | None = None,
        tolerance: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        label_range: tuple[float, float] | None = None,
        hidden: Sequence[int] = SHALLOW,
        model: Network | None = None,
        cohort: int | None = None,
        rounds: int | None = None,
        learning_rate: float | None = None,
        clip: float | Clipping | None = None,
        method: Method | None = None,
        normaliser: Literal["users", "samples"] | float = "users",
        feature_range: Any = None,
        measure: bool = True,
        reference: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            constraint=constraint, tolerance=tolerance, epsilon=epsilon, delta=delta, hidden=hidden,
            model=model, cohort=cohort, rounds=rounds, learning_rate=learning_rate, clip=clip,
            method=method, normaliser=normaliser, feature_range=feature_range, measure=measure,
            reference=reference, ledger=ledger, random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.label_range = label_range

    def fit(self, X: Any, y: Any, sensitive_features: Any = None, users: Any = None) -> Self:
        """Train; the arguments are those of `FairPrivateClassifier.fit`, y are numbers."""
        return self._fit(self._prepared(X, y, sensitive_features, users))

    def _prepared(self, X: Any, y: Any, sensitive_features: Any, users: Any) -> Fitting:
        check_columns(X)
        rows, labels = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        if self.label_range is not None:
            bounds = checked_label_range(self.label_range)
        elif self.epsilon is None:
            bounds = observed_label_range(labels)
        else:
            raise ValueError(
                "epsilon was given without label_range: the labels' range bounds what one of them "
                "can do, and must not be read from them. Give a public label_range=(low, high)"
            )
        numbers = labels_within(np.asarray(labels, dtype=np.float64), bounds)
        return self._fitting(X, rows, numbers, sensitive_features, users, label_range=bounds)

    def _codes(self, y: Any) -> NDArray[Any] | None:
        assert self.schema_.label_range is not None  # every regression has one
        return labels_within(np.asarray(y, dtype=np.float64), self.schema_.label_range)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The prediction for each row, within the label range."""
        return np.asarray(task.predictions(self._outputs(X), self.schema_))
