"""A search over an estimator's settings whose fits are one sweep: `FairGridSearchCV`."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.data.federated import FederatedDataset
from fpfl.estimator.base import (
    BaseEstimator,
    FairPrivateBase,
    FitFailedWarning,
    Fitting,
    GroupKFold,
    MetaEstimatorMixin,
    ParameterGrid,
    available_if,
    check_cv,
    check_is_fitted,
    check_scoring,
    clone,
    get_tags,
    indexable,
    is_classifier,
    notes_of,
)
from fpfl.estimator.data import check_order, codes_among
from fpfl.fairness.gaps import evaluate_predictions
from fpfl.privacy.budget import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.plan import PrivacyWarning
from fpfl.sweeps.batch import ALONE_TOO, Job, trained
from fpfl.sweeps.charges import Account, SweepCost, refusal
from fpfl.training import FpflWarning
from fpfl.training.inputs import Inputs
from fpfl.training.run import Run
from fpfl.training.spec import TrainingSpec, check_data, prepared
from fpfl.users import task

__all__ = ["FairGridSearchCV"]

Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]
Results = dict[str, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


Place = tuple[int, int]
"""Which candidate, and which fold."""


PASSED_OVER = (
    "{usual} was passed over, for a model of it has collapsed on held-out rows: it hardly tells "
    "labels apart"
)
COLLAPSED = (
    "{usual} is chosen, but a model of it has collapsed on held-out rows (it hardly tells labels "
    "apart), as has one of each other candidate that could be chosen. Try other settings"
)


@dataclass(frozen=True)
class Charge:
    """What one fit takes of a ledger: its rounds, each of a mechanism, and a measurement."""

    number: int
    rounds: int
    mechanism: Mechanism
    ledger: Any
    measurement: Mechanism | None = None

    def __str__(self) -> str:
        return f"fit {self.number}"


class Table:
    """What a search finds, candidate by candidate and fold by fold.

    Parameters
    ----------
    candidates
        Their settings.
    splits
        How many folds there are.
    error_score
        The score of a fit that fails, or ``"raise"``.
    """

    def __init__(self, candidates: Sequence[dict[str, Any]], splits: int, error_score: Any) -> None:
        self.candidates, self.error_score = candidates, error_score
        self.scores = np.full((len(candidates), splits), np.nan)
        self.gaps = np.full_like(self.scores, np.nan)
        self.collapsed = np.zeros(self.scores.shape, dtype=bool)
        self.tolerances = np.full(len(candidates), np.nan)
        self.failures: list[Exception] = []
        self._notes: dict[str, list[str]] = {}

    def failed(self, place: Place, error: Exception) -> None:
        """Take note of a fit that failed, or let it end the search."""
        if isinstance(self.error_score, str):
            raise error
        self.scores[place] = self.error_score
        self.failures.append(error)

    def noted(self, notes: Sequence[str]) -> None:
        """Take note of what there is to know about a fit; a search itself is no news."""
        for note in notes:
            if _kind(note) != _kind(ALONE_TOO.format(runs=2)):
                self._notes.setdefault(_kind(note), []).append(note)

    def check(self) -> None:
        """Refuse to choose where nothing was fitted."""
        if len(self.failures) == self.scores.size:
            raise ValueError(
                f"all {self.scores.size} fits failed, the first one with: {self.failures[0]}"
            ) from self.failures[0]

    def said(self) -> Iterator[tuple[type[Warning], str]]:
        """What the caller should know about the fits, each kind of thing once."""
        for notes in self._notes.values():
            same = "" if len(set(notes)) == 1 else ", with such numbers"
            yield FpflWarning, f"in {len(notes)} of {self.scores.size} fits{same}: {notes[0]}"
        if self.failures:
            yield (
                FitFailedWarning,
                f"{len(self.failures)} of {self.scores.size} fits failed and score "
                f"{self.error_score}, the first one with: {self.failures[0]}",
            )

    def results(self, tolerance: float | None) -> Results:
        """``cv_results_``."""
        results: Results = {**_settings(self.candidates), "params": list(self.candidates)}
        for name, values in (("score", self.scores), ("gap", self.gaps)):
            for split, column in enumerate(values.T):
                results[f"split{split}_test_{name}"] = column
            results[f"mean_test_{name}"] = values.mean(axis=1)
            results[f"std_test_{name}"] = values.std(axis=1)
        means = np.nan_to_num(results["mean_test_score"], nan=-np.inf)
        better = means[None, :] > means[:, None]
        results["rank_test_score"] = (1 + better.sum(axis=1)).astype(np.int32)
        results["collapsed_splits"] = self.collapsed.sum(axis=1)
        # Not a number is never within.
        most = self.tolerances if tolerance is None else tolerance
        results["within_tolerance"] = results["mean_test_gap"] <= most
        return results


def _refitted(search: FairGridSearchCV) -> bool:
    if not search.refit:
        raise AttributeError(
            f"{type(search).__name__}(refit=False) keeps no estimator; fit one with best_params_, "
            "or search with refit=True"
        )
    return True


def _available(check: Callable[[FairGridSearchCV], bool]) -> Callable[[Method], Method]:
    """A method that is there only where the check says so."""
    return cast(Callable[[Method], Method], available_if(check))


def _has(name: str) -> Callable[[FairGridSearchCV], bool]:
    def check(search: FairGridSearchCV) -> bool:
        getattr(getattr(search, "best_estimator_", search.estimator), name)
        return _refitted(search)

    return check


class FairGridSearchCV(MetaEstimatorMixin, BaseEstimator):
    """Choose an estimator's settings by cross-validation, with all fits computed as one sweep.

    What ``GridSearchCV`` does for `FairPrivateClassifier` and `FairPrivateRegressor`, with the same
    folds, seeds and scores. It is faster, since fits of one shape are one computation, and
    it looks at the gap on the held-out rows: by accuracy alone, the loosest tolerance always wins.

    Parameters
    ----------
    estimator
        A `FairPrivateClassifier` or a `FairPrivateRegressor`; in a pipeline, use ``GridSearchCV``.
    param_grid
        Lists of values by the names of settings, or several such grids.
    tolerance
        How large the mean gap on held-out rows may be. By default that is each candidate's own
        tolerance; give a number where tolerances are searched over.
    scoring
        A scorer's name, or a function of (estimator, X, y); by default the estimator's ``score``.
    cv
        Number of folds, a splitter, or an iterable of (train, test). Where ``users`` are given,
        a number (5 by default) means folds of users: nobody is on both sides. Splitters get
        ``groups``, which are the users where none were given.
    refit
        Whether the chosen settings are fitted once more to all rows, by themselves. A function
        of ``cv_results_`` that returns an index chooses in place of the rule below.
    error_score
        The score of a fit that fails, or ``"raise"``.
    verbose
        Where it is not 0, the error stream has what is going to be trained, and a progress bar.

    Attributes
    ----------
    cv_results_
        As ``GridSearchCV`` has it: ``params``, ``param_NAME``, ``split0_test_score`` and so on,
        ``mean_test_score``, ``std_test_score``, ``rank_test_score``. The same of
        the held-out gap (``split0_test_gap``, ``mean_test_gap``, ``std_test_gap``), and
        ``within_tolerance``. ``collapsed_splits``: in how many folds the model has collapsed
        (`fpfl.fairness.collapse_in_words`) on the held-out rows.
    best_index_, best_params_, best_score_
        Of the candidate with the best mean score among those whose mean gap is within the
        tolerance. Where none is, it is the one with the smallest gap, and a warning says so.
        Candidates without a constraint have no gap; they are chosen only if all are. One of which
        a model has collapsed is passed over while another is left, with a warning.
    best_estimator_
        Fitted to all rows with ``best_params_``, where ``refit`` is not False.
    n_splits_, scorer_
        As ``GridSearchCV`` has them.
    cost_
        What the fits take of the population's ledger, the last one included; None without one.
    sweep_time_, refit_time_
        Seconds for all fits together, and for the last one.

    Notes
    -----
    The runs of a sweep are a simulation on one machine. The estimator to be released is
    ``best_estimator_``, which is trained on its own.

    Each fit is charged to the estimator's ``ledger`` as a fit by itself would be, but before any is
    trained; the cost is printed first. A search that the rest of the budget cannot pay,
    last fit included, raises ``BudgetExhaustedError`` and charges nothing. Scores and gaps on
    people's rows, and the choice by them, are releases that no ε here covers.
    """

    def __init__(
        self,
        estimator: FairPrivateBase,
        param_grid: Grid,
        *,
        tolerance: float | None = None,
        scoring: Any = None,
        cv: Any = None,
        refit: bool | Callable[[Results], int] = True,
        error_score: Any = np.nan,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.tolerance = tolerance
        self.scoring = scoring
        self.cv = cv
        self.refit = refit
        self.error_score = error_score
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any,
        sensitive_features: Any = None,
        users: Any = None,
        groups: Any = None,
    ) -> Self:
        """Search.

        Parameters
        ----------
        X, y, sensitive_features, users
            As the estimator's ``fit`` takes them; folds take the same rows of all of them.
        groups
            For the splitter; by default the users.
        """
        self._check()
        for name, each in (("sensitive_features", sensitive_features), ("users", users)):
            check_order(X, each, name)
        given = X, y, *_ = indexable(X, y, sensitive_features, users)
        candidates = list(ParameterGrid(self.param_grid))
        splitter = self._splitter(y, users)
        splits = list(splitter.split(X, y, users if groups is None else groups))
        if not splits:
            raise ValueError("cv gives no folds; expected one or more")
        self.n_splits_, self.scorer_ = len(splits), check_scoring(self.estimator, self.scoring)
        table = Table(candidates, len(splits), self.error_score)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made, charges = self._made(table, splits, given)
        said: set[str] = set()
        for note, category in _once(caught, said):
            warnings.warn(note, category, stacklevel=2)
        table.check()
        said.update(note for *_, fitting in made for note in fitting.notes)
        self.cost_ = self._charged(charges, len(made))
        start = time.perf_counter()
        fittings = [fitting for *_, fitting in made]
        for number, run in _trained(fittings, show=bool(self.verbose)):
            place, estimator, fitting = made[number]
            try:
                estimator._take(fitting, run)
            except RuntimeError as error:  # it diverged
                table.failed(place, error)
                continue
            table.noted(notes_of(run))
            held, labels, groups_of, _ = (_rows(each, splits[place[1]][1]) for each in given)
            table.scores[place] = self.scorer_(estimator, held, labels)
            judged = _judged(estimator, held, labels, groups_of)
            table.gaps[place], table.collapsed[place] = judged
        self.sweep_time_ = time.perf_counter() - start
        table.check()
        for category, note in table.said():
            warnings.warn(note, category, stacklevel=2)
        self.cv_results_ = table.results(self.tolerance)
        self.best_index_, odd = self._chosen(self.cv_results_)
        if odd:
            warnings.warn(odd, FpflWarning, stacklevel=2)
        self.best_params_ = candidates[self.best_index_]
        self.best_score_ = float(self.cv_results_["mean_test_score"][self.best_index_])
        if self.refit:
            start = time.perf_counter()
            self.best_estimator_ = self._candidate(self.best_params_)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.best_estimator_.fit(X, y, sensitive_features=sensitive_features, users=users)
            self.refit_time_ = time.perf_counter() - start
            for note, category in _once(caught, said):
                warnings.warn(note, category, stacklevel=2)
        return self

    # --- before and after the sweep -----------------------------------------------------------

    def _made(
        self, table: Table, splits: Sequence[Any], given: Sequence[Any]
    ) -> tuple[list[tuple[Place, FairPrivateBase, Fitting]], list[Charge]]:
        """What is to be trained, and what of it costs a population's budget."""
        made: list[tuple[Place, FairPrivateBase, Fitting]] = []
        charges: list[Charge] = []
        shared: list[FederatedDataset] = []
        for place in np.ndindex(*table.scores.shape):
            candidate, split = place
            estimator = self._candidate(table.candidates[candidate])
            try:
                X, y, features, users = (_rows(each, splits[split][0]) for each in given)
                fitting = _sharing(estimator._prepared(X, y, features, users), shared)
                spec = _settled(fitting.job)
            except ValueError as error:
                table.failed((candidate, split), error)
                continue
            if estimator.ledger is not None:
                assert spec.plan is not None  # an estimator without ε refuses a ledger
                mechanism = Mechanism.of(spec.plan)
                before = Mechanism.measurement_of(spec.plan)
                charges.append(Charge(len(made), spec.rounds, mechanism, estimator.ledger, before))
            if spec.constraint is not None:
                table.tolerances[candidate] = spec.constraint.tolerance
            table.noted(fitting.notes)
            made.append(((candidate, split), estimator, fitting))
        return made, charges

    def _check(self) -> None:
        if not isinstance(self.estimator, FairPrivateBase):
            raise ValueError(
                f"estimator is a {type(self.estimator).__name__}; expected a FairPrivateClassifier "
                "or a FairPrivateRegressor. For others, and for pipelines, use GridSearchCV"
            )
        if not (self.scoring is None or isinstance(self.scoring, str) or callable(self.scoring)):
            raise ValueError(
                f"scoring is {self.scoring!r}; expected one scorer, by name or as a function. For "
                "several use GridSearchCV"
            )
        if not (isinstance(self.refit, bool) or callable(self.refit)):
            raise ValueError(
                f"refit is {self.refit!r}; expected True, False, or a function of cv_results_ that "
                "returns an index"
            )
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance!r}; expected 0 or more")
        if isinstance(self.error_score, str) and self.error_score != "raise":
            raise ValueError(f"error_score is {self.error_score!r}; expected 'raise' or a number")

    def _candidate(self, params: Mapping[str, Any]) -> FairPrivateBase:
        """The estimator with a candidate's settings, which a fit may not change."""
        fresh: FairPrivateBase = clone(self.estimator)
        fresh.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
        return fresh

    def _splitter(self, y: Any, users: Any) -> Any:
        if users is not None and (self.cv is None or isinstance(self.cv, Integral)):
            return GroupKFold(5 if self.cv is None else int(self.cv))
        return check_cv(self.cv, y, classifier=is_classifier(self.estimator))

    def _charged(self, charges: Sequence[Charge], fits: int) -> SweepCost | None:
        """Say what the fits cost, the last one included; then charge all but that one."""
        if not charges:
            if self.verbose:
                _print(f"{fits} fits in {self.n_splits_} folds, charged to no ledger.")
            return None
        ledgers = list(dict.fromkeys(charge.ledger for charge in charges))
        if len(ledgers) > 1:
            raise ValueError(
                f"the candidates have {len(ledgers)} ledgers; a search is about one population, so "
                "give the estimator one, and none in param_grid"
            )
        account = Account(
            ledgers[0],
            {each.number: each.mechanism for each in charges},
            {each.number: each.measurement for each in charges if each.measurement is not None},
        )
        asked = list(charges)
        if self.refit:
            # Which one will be chosen is not known; any of them has to be affordable.
            kinds = {(each.mechanism, each.measurement, each.rounds): each for each in charges}
            asked.append(max(kinds.values(), key=lambda each: account.cost([each]).share))
        cost = account.cost(asked)
        if not cost.fits:
            raise BudgetExhaustedError(refusal(cost))
        last = " The last of them, on all rows, is taken to be the dearest." if self.refit else ""
        _print(f"{cost}{last}")
        account.charge(charges)
        return cost

    def _chosen(self, results: Results) -> tuple[int, str | None]:
        """The index of the best candidate, and what is odd about it."""
        count = len(results["params"])
        if callable(self.refit):
            index = self.refit(results)
            if not isinstance(index, Integral) or not 0 <= index < count:
                raise ValueError(
                    f"refit returned {index!r}; expected an index of cv_results_, 0 to {count - 1}"
                )
            return int(index), None
        score = np.nan_to_num(results["mean_test_score"], nan=-np.inf)
        gap, within = results["mean_test_gap"], results["within_tolerance"]
        collapsed = results["collapsed_splits"] > 0

        def first(allowed: NDArray[np.bool_], merit: NDArray[np.float64]) -> tuple[int, str | None]:
            """The best of those allowed; one that has collapsed only where all of them have."""
            own = allowed & ~collapsed
            usual = int(np.where(allowed, merit, -np.inf).argmax())
            if not own.any():
                return usual, COLLAPSED.format(usual=results["params"][usual])
            best = int(np.where(own, merit, -np.inf).argmax())
            passed = PASSED_OVER.format(usual=results["params"][usual])
            return best, passed if collapsed[usual] else None

        if np.isnan(gap).all():
            return first(np.ones(count, dtype=bool), score)
        if within.any():
            return first(within, score)
        best, odd = first(~np.isnan(gap), -np.nan_to_num(gap))
        return best, ("" if odd is None else f"{odd}. And ") + (
            "no candidate's mean gap on held-out rows is within the tolerance; the smallest is "
            f"{gap[best]:.4f}, of {results['params'][best]}, which is chosen. Try smaller "
            "tolerances, other settings, or more rounds"
        )

    # --- as the best estimator ----------------------------------------------------------------

    @_available(_has("predict"))
    def predict(self, X: Any) -> NDArray[Any]:
        """What `best_estimator_` predicts."""
        check_is_fitted(self)
        return np.asarray(self.best_estimator_.predict(X))

    @_available(_has("predict_proba"))
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probabilities of `best_estimator_`."""
        check_is_fitted(self)
        return np.asarray(self.best_estimator_.predict_proba(X))

    @_available(_has("decision_function"))
    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """The logits of `best_estimator_`."""
        check_is_fitted(self)
        return np.asarray(self.best_estimator_.decision_function(X))

    @_available(_refitted)
    def score(self, X: Any, y: Any) -> float:
        """The score of `best_estimator_`, by ``scoring``."""
        check_is_fitted(self)
        return float(self.scorer_(self.best_estimator_, X, y))

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels, of a classifier."""
        return np.asarray(self.best_estimator_.classes_)

    @property
    def n_features_in_(self) -> int:
        """How many features there are."""
        return int(self.best_estimator_.n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """The features' names, where a frame had them."""
        return np.asarray(self.best_estimator_.feature_names_in_)

    def __sklearn_tags__(self) -> Any:
        tags, own = super().__sklearn_tags__(), get_tags(self.estimator)
        names = ("estimator_type", "classifier_tags", "regressor_tags", "target_tags")
        for name in (*names, "non_deterministic"):
            setattr(tags, name, getattr(own, name))
        return tags


def _kind(note: str) -> str:
    """A note without its numbers."""
    return re.sub(r"[0-9][0-9.,]*", "#", note)


def _once(
    caught: Sequence[warnings.WarningMessage], said: set[str]
) -> Iterator[tuple[str, type[Warning]]]:
    """Each warning that was not said yet; they are about the caller's line, not this file's."""
    for each in caught:
        note = str(each.message)
        if note not in said:
            said.add(note)
            yield note, each.category


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rows(values: Any, numbers: NDArray[np.int64]) -> Any:
    """Some rows of an array, a list, a frame or a series."""
    if values is None:
        return None
    if hasattr(values, "iloc"):
        return values.iloc[numbers]
    # What has a shape knows how to give rows; the estimator says what it thinks of a sparse matrix.
    return values[numbers] if hasattr(values, "shape") else np.asarray(values)[numbers]


def _settled(job: Job) -> TrainingSpec:
    """What `fpfl.train` makes of a job's settings: wrong ones are an error before any training."""
    flat, data = prepared(job.model, job.data, None)
    given = {n: v for n, v in job.settings.items() if n not in ("seed", "measure")}
    measure = bool(job.settings.get("measure", True))
    measurement = Inputs.measures(data, given.get("privacy"), measure=measure)
    spec = TrainingSpec.settle(
        flat, data.schema, population=data.K, measurement=measurement, **given
    )
    if spec.privacy is None:
        check_data(data, spec.constraint)
    return spec


def _sharing(fitting: Fitting, known: list[FederatedDataset]) -> Fitting:
    """The same, with the data of an earlier fit where it is equal: candidates share folds."""
    data = fitting.job.data
    for other in known:
        if (data.schema, data.columns) == (other.schema, other.columns) and all(
            torch.equal(getattr(data, name), getattr(other, name))
            for name in ("offsets", "labels", "attributes", "features")
        ):
            return replace(fitting, job=replace(fitting.job, data=other))
    known.append(data)
    return fitting


def _trained(fittings: Sequence[Fitting], *, show: bool) -> Iterator[tuple[int, Run]]:
    """Train, without the warnings that are said once for all fits."""
    jobs = [fitting.job for fitting in fittings]
    with ExitStack() as stack:
        watch = None
        if show:
            from fpfl.sweeps.progress import SweepProgress

            shown = SweepProgress({n: job.settings["rounds"] for n, job in enumerate(jobs)})
            stack.callback(shown.close)
            watch = shown.watch
        runs = trained(jobs, watch=watch)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FpflWarning)
                warnings.simplefilter("ignore", PrivacyWarning)
                found = next(runs, None)
            if found is None:
                return
            yield found


def _judged(
    estimator: FairPrivateBase, X: Any, y: Any, sensitive_features: Any
) -> tuple[float, bool]:
    """The gap of the estimator's constraint on rows, and whether its model has collapsed on them.

    The gap is not a number without a constraint; where a label is of no known class, nothing is
    known.
    """
    constraint, schema = estimator.run_.constraint, estimator.schema_
    labels = estimator._codes(y)
    if labels is None:
        return float("nan"), False
    labels = labels.reshape(-1)  # a column is taken, too, with scikit-learn's warning
    declared = () if constraint is None else schema.attributes
    codes = np.zeros((len(labels), 0), dtype=np.int64)
    if constraint is not None:
        codes = codes_among(declared, sensitive_features, len(labels))
    found = evaluate_predictions(
        task.predictions(estimator._outputs(X), schema),
        torch.from_numpy(labels),
        torch.from_numpy(codes),
        declared,
        classes=schema.classes,
        label_range=schema.label_range,
        constraint=constraint,
        bootstrap=0,
    )
    gap = float("nan") if constraint is None else float(found.gaps["constraint"].value)
    return gap, found.collapsed is not None


def _settings(candidates: Sequence[dict[str, Any]]) -> dict[str, np.ma.MaskedArray[Any, Any]]:
    """A column for each setting, masked where a candidate leaves it as it was."""
    columns = {}
    for name in dict.fromkeys(name for params in candidates for name in params):
        given = {n: params[name] for n, params in enumerate(candidates) if name in params}
        plain = all(isinstance(value, bool | int | float | np.number) for value in given.values())
        kind = np.array(list(given.values())).dtype if plain else np.dtype(object)
        column = np.ma.MaskedArray(np.zeros(len(candidates), dtype=kind), mask=True)
        for number, value in given.items():
            column[number] = value
        columns[f"param_{name}"] = column
    return columns
