"""What the scikit-learn estimators have in common: from rows to a training, and back."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import InputColumn
from fpfl.data.schema import ClassWeights, Schema
from fpfl.estimator.data import (
    LIMIT,
    Network,
    Scaling,
    check_columns,
    check_order,
    chosen_constraint,
    codes_among,
    ledger_of,
    named_constraint,
    network,
    sensitive_columns,
    user_numbers,
    whole,
)
from fpfl.fairness.against import Against, compare_predictions
from fpfl.fairness.constraints import Constraint
from fpfl.methods import Method
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.sweeps.batch import Job
from fpfl.training import FpflWarning, train
from fpfl.training.defaults import (
    PLAIN_ROUNDS,
    ROUNDS,
    chosen_clip,
    chosen_cohort,
    chosen_method,
    chosen_rate,
    parameters_of,
)
from fpfl.training.models import SHALLOW
from fpfl.training.reference import without_constraint
from fpfl.training.run import Run, evaluate_model
from fpfl.training.spec import check_numbers, public_normaliser
from fpfl.users import task

try:
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        MetaEstimatorMixin,
        RegressorMixin,
        clone,
        is_classifier,
    )
    from sklearn.exceptions import FitFailedWarning
    from sklearn.metrics import balanced_accuracy_score, check_scoring
    from sklearn.model_selection import GroupKFold, ParameterGrid, check_cv
    from sklearn.utils import check_random_state, get_tags, indexable
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "FairPrivateClassifier and FairPrivateRegressor need scikit-learn 1.6 or later, which is "
        "not installed: pip install 'fpfl[sklearn]'"
    ) from error

# What is scikit-learn's comes from here, where its absence is explained.
__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "FairPrivateBase",
    "FitFailedWarning",
    "Fitting",
    "GroupKFold",
    "MetaEstimatorMixin",
    "ParameterGrid",
    "RegressorMixin",
    "available_if",
    "balanced_accuracy_score",
    "check_classification_targets",
    "check_cv",
    "check_is_fitted",
    "check_scoring",
    "clone",
    "get_tags",
    "indexable",
    "is_classifier",
    "notes_of",
    "validate_data",
]


UNSCALED = (
    "epsilon was given without feature_range: features are used as they are, clamped "
    f"to [-{LIMIT:g}, {LIMIT:g}], for scaling them by what the data shows would cost "
    "privacy that nobody counts. Give feature_range, public (low, high) pairs"
)


LABEL = "(label)"
"""What a regression's label is called among the columns: no feature has that name by chance."""


@dataclass(frozen=True)
class Fitting:
    """A fit before its training: alone and in a search it is the same one.

    Parameters
    ----------
    job
        What is to be trained.
    scaling
        What was done to the features.
    notes
        What the caller should know beforehand.
    """

    job: Job
    scaling: Scaling
    notes: tuple[str, ...] = ()


def notes_of(run: Run) -> tuple[str, ...]:
    """What the user of a run should know."""
    return (*run.warnings, *([run.stopped] if run.stopped else []))


def _collapsed(fitting: Fitting, run: Run) -> tuple[str, ...]:
    """How the model has collapsed on the rows it was fitted to, where they are no secret.

    With privacy they are: what a model predicts for them, counted without noise, would be a release
    that no ε covers. Then nothing is said.
    """
    if run.privacy is not None or fitting.job.data.schema.classes is None:
        return ()
    said = evaluate_model(run.model, fitting.job.data, bootstrap=0).collapsed
    advice = "other settings (learning_rate, rounds, feature_range), or look at the features"
    return (
        () if said is None else (f"collapsed on the rows it was fitted to: {said}. Try {advice}",)
    )


class FairPrivateBase(BaseEstimator):
    """What both estimators share: from arguments to one call of `fpfl.train`, and back."""

    def __init__(
        self,
        *,
        constraint: str | Constraint | None = None,
        tolerance: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
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
        self.constraint = constraint
        self.tolerance = tolerance
        self.epsilon = epsilon
        self.delta = delta
        self.hidden = hidden
        self.model = model
        self.cohort = cohort
        self.rounds = rounds
        self.learning_rate = learning_rate
        self.clip = clip
        self.method = method
        self.normaliser = normaliser
        self.feature_range = feature_range
        self.measure = measure
        self.reference = reference
        self.ledger = ledger
        self.random_state = random_state
        self.verbose = verbose

    def _prepared(self, X: Any, y: Any, sensitive_features: Any, users: Any) -> Fitting:
        """Check the rows, and settle what is to be trained."""
        raise NotImplementedError

    def _codes(self, y: Any) -> NDArray[Any] | None:
        """Labels of held-out rows as training has them; None where one is of no known class."""
        raise NotImplementedError

    def _class_weights(self, labels: NDArray[Any]) -> ClassWeights | None:
        """What samples of each class weigh; None for all the same."""
        return None

    def _fit(self, fitting: Fitting) -> Self:
        """Train by itself; called by ``fit``, about whose caller the warnings are."""
        for note in fitting.notes:
            warnings.warn(note, FpflWarning, stacklevel=3)
        with warnings.catch_warnings():
            # They are the caller's to see, not about a line of this file: repeated below.
            warnings.simplefilter("ignore", FpflWarning)
            run = self._train(fitting.job)
        if run.history:
            for note in (*notes_of(run), *_collapsed(fitting, run)):
                warnings.warn(note, FpflWarning, stacklevel=3)
        self._take(fitting, run)
        self.reference_run_ = self._reference(fitting.job) if self.reference else None
        return self

    def _reference(self, job: Job) -> Run:
        """Train the same without the constraint, charged as a run of its own."""
        if job.settings["constraint"] is None:
            raise ValueError(
                "reference=True trains the same without the constraint, and constraint is None; "
                "give a constraint, or leave reference out"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FpflWarning)
            run = self._train(replace(job, settings=without_constraint(job.settings)))
        for note in notes_of(run):
            warnings.warn(f"the reference: {note}", FpflWarning, stacklevel=4)
        return run

    def against_reference(
        self, X: Any, y: Any, sensitive_features: Any, users: Any = None
    ) -> Against | None:
        """Who is better and who is worse off than without the constraint, on held-out rows.

        Needs ``reference=True``; without it None: it is not measured. It looks at rows without any
        noise, as a score does.

        Parameters
        ----------
        X, y, sensitive_features, users
            As `fit` takes them, of other people.
        """
        check_is_fitted(self)
        if self.reference_run_ is None:
            return None
        labels = self._codes(y)
        if labels is None:
            raise ValueError("y has labels that the estimator was not fitted to; leave those out")
        labels, known = labels.reshape(-1), self.schema_.attributes
        codes = codes_among(known, sensitive_features, len(labels))
        constraint = self.run_.constraint
        assert constraint is not None  # or there would be no reference
        found = [
            task.predictions(self._outputs(X, run), self.schema_)
            for run in (self.run_, self.reference_run_)
        ]
        return compare_predictions(
            found[0],
            found[1],
            torch.from_numpy(labels),
            torch.from_numpy(codes),
            known,
            constraint=constraint,
            classes=self.schema_.classes,
            label_range=self.schema_.label_range,
            users=torch.from_numpy(user_numbers(users, len(labels), None)),
        )

    def _fitting(
        self,
        rows: Any,
        X: NDArray[np.float64],
        labels: NDArray[Any],
        sensitive_features: Any,
        users: Any,
        *,
        classes: tuple[str, ...] | None = None,
        label_range: tuple[float, float] | None = None,
    ) -> Fitting:
        """From checked rows to a training; ``rows`` are those given, which may have an index."""
        population, neighbours = ledger_of(self.ledger, private=self.epsilon is not None)
        for name, given in (("sensitive_features", sensitive_features), ("users", users)):
            check_order(rows, given, name)
        attributes, codes = sensitive_columns(
            sensitive_features, len(X), wanted=self.constraint is not None
        )
        # Where it is hidden who takes part, nobody is told that there are more than declared.
        most = None if neighbours == "add-remove" else population
        numbers = user_numbers(users, len(X), most)
        seen = int(numbers.max()) + 1
        names = getattr(self, "feature_names_in_", None)
        schema = Schema(
            shape=(X.shape[1],),
            classes=None if classes is None else len(classes),
            class_names=classes,
            label_range=label_range,
            attributes=attributes,
            feature_names=None if names is None else tuple(map(str, names)),
            population=population,
            samples_per_user=len(X) / (population or seen),
        )
        schema = schema.weighing(self._class_weights(labels))
        constraint = chosen_constraint(self.constraint, self.tolerance, schema)
        scaling = Scaling.of(X, self.feature_range, private=self.epsilon is not None)
        unscaled = self.epsilon is not None and scaling.ranges is None
        data = FederatedDataset.from_samples(scaling(X), labels, codes, schema, numbers)
        # What training is to find out: of the label, and of features nothing is known but ranges.
        columns: tuple[InputColumn, ...] = ()
        if scaling.ranges is not None:
            found = schema.feature_names or tuple(f"feature {n}" for n in range(X.shape[1]))
            columns = tuple(InputColumn(name, n) for n, name in enumerate(found))
        if label_range is not None and (scaling.ranges is not None or self.epsilon is None):
            columns = (*columns, InputColumn(LABEL, X.shape[1]))
        data = replace(data, columns=columns)
        with warnings.catch_warnings():
            # Training itself will say what there is to say.
            warnings.simplefilter("ignore", FpflWarning)
            job = self._job(data, constraint, neighbours)
        return Fitting(job, scaling, (UNSCALED,) if unscaled else ())

    def _job(
        self, data: FederatedDataset, constraint: Constraint | None, neighbours: Neighbours | None
    ) -> Job:
        """Settle what was left open."""
        schema, seed = data.schema, None
        rounds = whole(self.rounds)
        if rounds is None:
            rounds = PLAIN_ROUNDS if self.epsilon is None and constraint is None else ROUNDS
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        cohort = chosen_cohort(data.K) if self.cohort is None else whole(self.cohort)
        check_numbers(data.K, cohort, rounds, None, 1.0)
        model, privacy = network(self.model, self.hidden, schema, seed), None
        if self.epsilon is not None:
            privacy = Privacy(self.epsilon, None, 1.0, self.delta, neighbours=neighbours)
            clip = chosen_clip(
                self.clip, privacy, constraint, schema, population=data.K, cohort=cohort,
                rounds=rounds, parameters=parameters_of(model),
            )  # fmt: skip
            privacy = replace(privacy, clip=clip)
        rate = self.learning_rate
        if rate is None:
            rate = chosen_rate(privacy, constraint, schema, data.K, cohort, rounds)
            # The rules are for gradients divided by m; this is the same step for any divisor.
            rate *= public_normaliser(self.normaliser, cohort, schema) / cohort
        method = self.method
        if constraint is not None and method is None:
            method = chosen_method(constraint, schema, private=privacy is not None, rounds=rounds)
        settings = {
            "cohort": cohort,
            "rounds": rounds,
            "constraint": constraint,
            "method": method,
            "privacy": privacy,
            "clip": None if privacy else self.clip,
            "learning_rate": rate,
            "normaliser": self.normaliser,
            "measure": bool(self.measure),
            # The best of many cohorts is chance where there is nothing else to judge by.
            "selection": "average" if constraint is None else None,
            "seed": seed,
        }
        return Job(model, data, settings)

    def _train(self, job: Job) -> Run:
        """Train, shown and charged as asked."""
        with ExitStack() as stack:
            callbacks = []
            if self.verbose:
                from fpfl.callbacks.progress import progress

                shown = progress(type(self).__name__, job.settings["rounds"])
                callbacks.append(stack.enter_context(shown))
            return train(
                job.model,
                job.data,
                **job.settings,
                ledger=None if self.ledger is None else Path(self.ledger),
                callbacks=callbacks,
            )

    def _take(self, fitting: Fitting, run: Run) -> Self:
        """Become the estimator that a finished run makes."""
        if not run.history:
            spent = self.ledger is not None and "diverged" not in str(run.stopped)
            kind = BudgetExhaustedError if spent else RuntimeError
            raise kind(f"not one round was run, so there is no model: {run.stopped}")
        constraint = fitting.job.settings["constraint"]
        self.run_, self.privacy_, self.n_iter_ = run, run.privacy, len(run.history)
        self.schema_ = fitting.job.data.schema
        self._scaling, self._own = fitting.scaling, self.model is None
        self._named: Any = None
        if isinstance(self.constraint, str) and constraint is not None:
            self._named = (self.constraint, constraint.tolerance)
        return self

    def _outputs(self, X: Any, run: Run | None = None) -> Tensor:
        """What the network returns for rows, as `fpfl.users.task` takes it."""
        check_is_fitted(self)
        check_columns(X)
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        module = (run or self.run_).model
        if self._own:
            # In double precision, a row's outcome does not depend on the rows beside it.
            module = copy.deepcopy(module).double()
        parameter = next(module.parameters())
        features = torch.from_numpy(self._scaling(rows)).to(parameter.device, parameter.dtype)
        with torch.no_grad():
            pieces = [module(piece) for piece in torch.split(features, 8192)]
        return task.flatten_output(torch.cat(pieces), self.schema_).double().cpu()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.epsilon is not None
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if state.get("_named"):
            # Its rates are functions that no pickle holds; it is made anew from its name.
            state["run_"] = replace(state["run_"], constraint=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What the version that wrote it did not have; it mapped ranges as they are.
        for name, value in (type(self)().get_params(deep=False) | {"measure": False}).items():
            self.__dict__.setdefault(name, value)
        if "run_" in self.__dict__:
            self.__dict__.setdefault("reference_run_", None)
        if self.__dict__.get("_named"):
            name, tolerance = self._named
            made = named_constraint(name, tolerance, self.schema_)
            self.run_ = replace(self.run_, constraint=made)
