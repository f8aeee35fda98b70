"""The search over estimators' settings: GridSearchCV's figures, held-out gaps, what it charges."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="it is not installed: pip install 'fpfl[sklearn]'")
pytest.importorskip("fairlearn", reason="it is not installed: pip install 'fpfl[sklearn]'")

import pandas as pd
from fairlearn.metrics import MetricFrame, true_positive_rate
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import FitFailedWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, PredefinedSplit
from sklearn.utils.estimator_checks import parametrize_with_checks

import fpfl
from fpfl import FpflWarning, PopulationLedger
from fpfl.estimator import FairGridSearchCV, FairPrivateClassifier, FairPrivateRegressor
from fpfl.estimator import search as searching
from fpfl.estimator.data import codes_among, sensitive_columns
from fpfl.privacy.budget import BudgetExhaustedError

RANGE = (-4.0, 4.0)
dominated = pytest.mark.filterwarnings("ignore:.*noise dominates:fpfl.FpflWarning")
loose = pytest.mark.filterwarnings("ignore:no candidate's mean gap:fpfl.FpflWarning")


def people(n: int = 240, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Features in a frame, string labels, two sensitive features, and users in no order."""
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(rng.normal(size=(n, 3)), columns=["a", "b", "c"])
    s = pd.DataFrame({"sex": rng.choice(["f", "m"], n), "area": rng.choice([10, 20], n)})
    signal = X["a"] + 0.5 * X["b"] - 0.8 * (s["sex"] == "f") + 0.3 * rng.normal(size=n)
    return X, pd.Series(np.where(signal > 0, "yes", "no")), s, rng.integers(0, n // 2, n)


def sure(model: Any, X: Any, y: Any) -> float:
    """A score that moves with every bit of the model."""
    return float(model.decision_function(X).mean())


# --- The same as GridSearchCV ---------------------------------------------------------------------

GRIDS: dict[str, tuple[Any, Any]] = {
    "constraint": (
        FairPrivateClassifier(constraint="equalized_odds", rounds=12, cohort=40, random_state=1),
        {"tolerance": [0.02, 0.3], "learning_rate": [0.1, 0.5]},
    ),
    "several grids": (
        FairPrivateClassifier(rounds=6, random_state=2),
        [
            {"constraint": ["fnr_parity"], "method": [fpfl.MMDM(), fpfl.OneGradient()]},
            {"hidden": [(), (4, 3)], "rounds": [3, 9]},
        ],
    ),
    "regression": (
        FairPrivateRegressor(constraint="equal_error", rounds=8, random_state=3),
        {"clip": [None, 1.0], "random_state": [3, 4]},
    ),
}


@pytest.mark.parametrize("scoring", [None, "balanced_accuracy", sure])
@pytest.mark.parametrize("case", GRIDS)
@loose
def test_figures_are_those_of_grid_search_cv(case: str, scoring: Any) -> None:
    estimator, grid = GRIDS[case]
    X, y, s, users = people()
    if case == "regression":
        y = X["a"] + 0.1 * X["b"]
        scoring = scoring and "neg_mean_absolute_error"
    given: dict[str, Any] = {"sensitive_features": s, "users": users}
    settings: dict[str, Any] = {"scoring": scoring, "cv": GroupKFold(3)}
    theirs = GridSearchCV(estimator, grid, **settings, refit=False).fit(X, y, groups=users, **given)
    ours = FairGridSearchCV(estimator, grid, **settings, refit=False).fit(X, y, **given)
    for name, values in theirs.cv_results_.items():
        if name.endswith("_time"):
            continue
        mine = ours.cv_results_[name]
        if name.startswith(("split", "mean", "std")):
            assert np.allclose(mine, values, rtol=1e-4, atol=1e-4), name
        elif name.startswith("param_"):
            assert mine.dtype == values.dtype, name
            assert np.array_equal(np.ma.getmaskarray(mine), np.ma.getmaskarray(values))
            assert [*map(str, mine.filled(0))] == [*map(str, values.filled(0))]
        elif name != "params":
            assert np.array_equal(mine, values), name
    assert [*map(str, ours.cv_results_["params"])] == [*map(str, theirs.cv_results_["params"])]
    assert ours.n_splits_ == 3


@loose
def test_the_chosen_estimator_is_fitted_by_itself() -> None:
    X, y, s, users = people()
    estimator = FairPrivateClassifier(constraint="fnr_parity", rounds=10, random_state=0)
    search = FairGridSearchCV(estimator, {"learning_rate": [0.1, 0.4]}, cv=2)
    search.fit(X, y, sensitive_features=s["sex"], users=users)
    alone = clone(estimator).set_params(**search.best_params_)
    alone.fit(X, y, sensitive_features=s["sex"], users=users)
    assert np.array_equal(search.decision_function(X), alone.decision_function(X))
    assert np.array_equal(search.predict(X), alone.predict(X))
    assert np.array_equal(search.predict_proba(X), alone.predict_proba(X))
    assert search.score(X, y) == alone.score(X, y)
    assert list(search.classes_) == ["no", "yes"]
    assert (search.n_features_in_, list(search.feature_names_in_)) == (3, ["a", "b", "c"])
    assert search.best_score_ == search.cv_results_["mean_test_score"][search.best_index_]
    assert search.cost_ is None
    back = pickle.loads(pickle.dumps(search))
    assert np.array_equal(back.predict(X), search.predict(X))


def test_it_is_an_estimator_itself() -> None:
    inner = FairPrivateClassifier(rounds=2, random_state=0)
    search = FairGridSearchCV(inner, {"rounds": [1, 2]}, cv=2, tolerance=0.1)
    assert is_classifier(search)
    assert is_regressor(FairGridSearchCV(FairPrivateRegressor(), {}))
    other = clone(search).set_params(estimator__hidden=(3,), cv=3)
    assert (other.estimator.hidden, other.cv, other.tolerance) == ((3,), 3, 0.1)
    assert search.estimator.hidden != (3,)
    assert search.get_params()["estimator__random_state"] == 0
    assert "FairGridSearchCV(" in repr(search)
    X, y, _, _ = people(60)
    kept = search.set_params(refit=False).fit(X, y)
    assert not hasattr(kept, "predict")
    with pytest.raises(AttributeError, match="no attribute 'predict'") as caught:
        _ = kept.predict
    assert "keeps no estimator" in str(caught.value.__cause__)
    assert not hasattr(FairGridSearchCV(FairPrivateRegressor(), {}), "predict_proba")


@parametrize_with_checks(
    [FairGridSearchCV(FairPrivateClassifier(rounds=60, random_state=0), {}, cv=2)]
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks that fit nonsense on purpose
        check(estimator)


# --- Held-out gaps, and the choice ----------------------------------------------------------------


@loose
def test_gaps_are_those_of_held_out_rows() -> None:
    X, y, s, _ = people(400)
    cv = KFold(3, shuffle=True, random_state=0)
    estimator = FairPrivateClassifier(constraint="fnr_parity", rounds=20, random_state=0)
    search = FairGridSearchCV(estimator, {"tolerance": [0.02, 0.3]}, cv=cv, refit=False)
    search.fit(X, y, sensitive_features=s)
    found = search.cv_results_
    for split, (train, test) in enumerate(cv.split(X)):
        for candidate, params in enumerate(found["params"]):
            alone = clone(estimator).set_params(**params)
            alone.fit(X.iloc[train], y.iloc[train], sensitive_features=s.iloc[train])
            gaps = [
                MetricFrame(
                    metrics=lambda true, guess: true_positive_rate(true, guess, pos_label="yes"),
                    y_true=y.iloc[test],
                    y_pred=alone.predict(X.iloc[test]),
                    sensitive_features=s[name].iloc[test],
                ).difference(method="to_overall")
                for name in ("sex", "area")
            ]
            assert found[f"split{split}_test_gap"][candidate] == pytest.approx(max(gaps))
    splits = np.stack([found[f"split{n}_test_gap"] for n in range(3)])
    assert np.allclose(found["mean_test_gap"], splits.mean(axis=0))
    assert np.allclose(found["std_test_gap"], splits.std(axis=0))
    assert np.array_equal(found["within_tolerance"], found["mean_test_gap"] <= [0.02, 0.3])


def results(scores: Any, gaps: Any, tolerance: Any, collapsed: Any = ()) -> Any:
    gaps = np.array(gaps, dtype=float)
    return {
        "params": [{"n": n} for n in range(len(gaps))],
        "mean_test_score": np.array(scores, dtype=float),
        "mean_test_gap": gaps,
        "within_tolerance": gaps <= tolerance,
        "collapsed_splits": np.isin(np.arange(len(gaps)), collapsed).astype(int),
    }


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "gaps", "index", "odd"),
    [
        ([0.9, 0.8, 0.7], [0.3, 0.1, 0.1], 1, False),  # within, and the best of those
        ([0.9, 0.8, 0.7], [0.3, 0.2, 0.4], 1, True),  # none is within: the smallest gap
        ([0.9, 0.8, 0.7], [NAN, 0.1, 0.05], 1, False),  # without a constraint there is no gap
        ([0.7, 0.9, 0.8], [NAN, NAN, NAN], 1, False),
        ([NAN, 0.6, 0.5], [NAN, 0.1, 0.1], 1, False),  # a fit that failed
    ],
)
def test_the_choice(scores: Any, gaps: Any, index: int, odd: bool) -> None:
    search = FairGridSearchCV(FairPrivateClassifier(), {})
    found, said = search._chosen(results(scores, gaps, 0.1))
    assert (found, said is not None) == (index, odd)


@pytest.mark.parametrize(
    ("scores", "gaps", "collapsed", "index", "words"),
    [
        ([0.9, 0.8, 0.7], [0.0, 0.1, 0.1], [0], 1, "'n': 0} was passed over"),
        ([0.9, 0.8, 0.7], [0.0, 0.1, 0.1], [1], 0, None),
        ([0.9, 0.8, 0.7], [0.0, 0.3, 0.3], [0], 0, "is chosen, but a model of it has collapsed"),
        ([0.9, 0.8, 0.7], [0.2, 0.4, 0.3], [0], 2, "'n': 0} was passed over"),
        ([0.9, 0.8, 0.7], [NAN, NAN, NAN], [0], 1, "'n': 0} was passed over"),
        ([0.9, 0.8, 0.7], [NAN, NAN, NAN], [0, 1, 2], 0, "as has one of each other"),
    ],
)
def test_a_collapsed_candidate_is_passed_over(
    scores: Any, gaps: Any, collapsed: list[int], index: int, words: str | None
) -> None:
    search = FairGridSearchCV(FairPrivateClassifier(), {})
    found, said = search._chosen(results(scores, gaps, 0.1, collapsed))
    assert found == index
    assert (said is None) if words is None else (words in str(said))


def test_a_search_counts_in_which_folds_a_model_has_collapsed() -> None:
    X, y, s, _ = people()
    estimator = FairPrivateClassifier(constraint="fnr_parity", random_state=0, rounds=60)
    # A learning rate of nearly 0 leaves the model as it was made.
    search = FairGridSearchCV(estimator, {"learning_rate": [1e-9, 0.5]}, cv=2, tolerance=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.fit(X, np.where(y == "yes", 1, 0), sensitive_features=s["sex"])
    one, other = search.cv_results_["collapsed_splits"]
    assert (one > 0, other, search.best_index_) == (one > 0, 0, 1)
    constant = np.where(np.arange(len(X)) % 12 == 0, "yes", "no")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.set_params(param_grid={}).fit(X, constant, sensitive_features=s["sex"])
    assert search.cv_results_["collapsed_splits"].tolist() == [2]
    assert any("has collapsed on held-out rows" in str(w.message) for w in caught)


def test_a_function_may_choose() -> None:
    X, y, s, _ = people()
    seen = []

    def choose(table: Any) -> int:
        seen.append(table)
        return 1

    estimator = FairPrivateClassifier(constraint="fnr_parity", rounds=2, random_state=0)
    search = FairGridSearchCV(estimator, {"tolerance": [0.3, 0.01]}, cv=2, refit=choose)
    search.fit(X, y, sensitive_features=s["sex"])
    assert search.best_params_ == {"tolerance": 0.01}
    assert seen == [search.cv_results_]
    assert search.best_estimator_.tolerance == 0.01
    with pytest.raises(ValueError, match="refit returned 7"):
        search.set_params(refit=lambda table: 7).fit(X, y, sensitive_features=s["sex"])


def test_a_warning_where_none_is_within() -> None:
    X, y, s, _ = people()
    estimator = FairPrivateClassifier(constraint="fnr_parity", rounds=2, random_state=0)
    search = FairGridSearchCV(estimator, {"learning_rate": [0.1]}, cv=2, tolerance=0.0)
    with pytest.warns(FpflWarning, match="no candidate's mean gap") as caught:
        search.fit(X, y, sensitive_features=s["sex"])
    assert {Path(each.filename).name for each in caught} == {"test_search.py"}


def test_codes_of_held_out_rows_are_those_of_training() -> None:
    """Rows with fewer values, other ones, or none have the codes that training gave them."""
    given = pd.DataFrame({"sex": ["m", "f", None, "m"], "area": [30, 10, 20, 10]})
    attributes, codes = sensitive_columns(given, 4, wanted=True)
    assert np.array_equal(codes_among(attributes, given, 4), codes)
    some = pd.DataFrame({"sex": ["m", "x"], "area": [30, 40]})
    assert codes_among(attributes, some, 2).tolist() == [[1, 2], [-1, -1]]


@loose
def test_warnings_are_said_once_and_about_the_callers_line() -> None:
    """What all fits, and the last one, have to say; how many there were is in it."""
    X, y, s, _ = people(120)
    estimator = FairPrivateClassifier(
        constraint="fnr_parity", rounds=4, cohort=30, epsilon=1.0, delta=5e-3
    )
    search = FairGridSearchCV(estimator, {"tolerance": [0.1, 0.2]}, cv=2)
    with pytest.warns() as caught:
        search.fit(X, y, sensitive_features=s["sex"])
    ours = [each for each in caught if "fpfl" in each.category.__module__]
    assert {Path(each.filename).name for each in ours} == {"test_search.py"}
    texts = [str(each.message) for each in ours]
    assert len(set(texts)) == len(texts)
    assert sum("in 4 of 4 fits: epsilon was given without feature_range" in t for t in texts) == 1
    assert sum("noise dominates" in t for t in texts) <= 4
    assert not any("side by side" in t for t in texts)


# --- Folds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [None, 3])
def test_nobody_is_on_both_sides_of_a_fold(cv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _, users = people()
    calls = []
    inner = FairPrivateClassifier._prepared

    def prepared(self: Any, X: Any, y: Any, features: Any, users: Any) -> Any:
        calls.append(X.index)
        return inner(self, X, y, features, users)

    monkeypatch.setattr(FairPrivateClassifier, "_prepared", prepared)
    estimator = FairPrivateClassifier(rounds=1, random_state=0)
    FairGridSearchCV(estimator, {}, cv=cv, refit=False).fit(X, y, users=users)
    assert len(calls) == (cv or 5)
    for rows in calls:
        held = np.setdiff1d(np.arange(len(X)), rows)
        assert len(held)
        assert not set(users[rows]) & set(users[held])


@loose
def test_candidates_share_the_data_of_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, s, _ = people(100)
    seen: list[Any] = []
    inner = searching.trained

    def trained(jobs: Any, **how: Any) -> Iterator[Any]:
        seen.extend(jobs)
        return inner(jobs, **how)

    monkeypatch.setattr(searching, "trained", trained)
    grid = {"learning_rate": [0.1, 0.2, 0.3], "constraint": [None, "fnr_parity"]}
    search = FairGridSearchCV(FairPrivateClassifier(rounds=1), grid, cv=2, refit=False)
    search.fit(X, y, sensitive_features=s["sex"])
    assert len(seen) == 12
    assert len({id(job.data) for job in seen}) == 4


# --- What goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": LogisticRegression()}, "LogisticRegression; expected a FairPrivate"),
        ({"scoring": ["accuracy", "f1"]}, "expected one scorer"),
        ({"refit": "accuracy"}, "refit is 'accuracy'"),
        ({"tolerance": -1}, "tolerance is -1"),
        ({"error_score": "nan"}, "error_score is 'nan'"),
        ({"cv": iter([])}, "no folds"),
        ({"param_grid": {"clip": ["x"]}}, "all 2 fits failed"),
        ({"param_grid": {"speed": [1]}}, "speed"),
    ],
)
def test_what_is_wrong_is_said(settings: dict[str, Any], message: str) -> None:
    X, y, _, _ = people(60)
    asked: dict[str, Any] = {"estimator": FairPrivateClassifier(rounds=1), "param_grid": {}}
    with pytest.raises(ValueError, match=message):
        FairGridSearchCV(**asked | {"cv": 2} | settings).fit(X, y)


def test_a_fit_that_fails_has_the_error_score() -> None:
    X, y, _, _ = people(60)
    estimator = FairPrivateClassifier(rounds=3, random_state=0)
    grid = {"learning_rate": [0.1, -1.0], "rounds": [3, 0]}
    search = FairGridSearchCV(estimator, grid, cv=2, refit=False)
    with pytest.warns(FitFailedWarning, match="6 of 8 fits failed and score nan"):
        search.fit(X, y)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [False, True, True, True]
    assert search.cv_results_["rank_test_score"].tolist() == [1, 2, 2, 2]
    assert search.best_index_ == 0
    with pytest.raises(ValueError, match="rounds is 0"):
        search.set_params(error_score="raise").fit(X, y)


def test_what_is_going_to_be_trained_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    X, y, _, _ = people(60)
    search = FairGridSearchCV(FairPrivateClassifier(rounds=2), {"hidden": [(), (3,)]}, cv=3)
    search.set_params(verbose=1).fit(X, y)
    assert "6 fits in 3 folds, charged to no ledger." in capsys.readouterr().err
    search.set_params(verbose=0).fit(X, y)
    assert not capsys.readouterr().err


# --- The ledger -----------------------------------------------------------------------------------


def charged(file: Path) -> list[tuple[int, float]]:
    with PopulationLedger.open(file, write=False) as ledger:
        return sorted((run["rounds"], round(run["share"], 9)) for run in ledger.by_run().values())


@dominated
@loose
def test_fits_are_charged_as_by_themselves_and_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, s, users = people(200)
    files = [tmp_path / name for name in ("ours.jsonl", "theirs.jsonl")]
    known = len(np.unique(users))
    for file in files:
        PopulationLedger.create(file, population=known, epsilon=100.0).close()
    estimator = FairPrivateClassifier(
        constraint="fnr_parity", rounds=4, feature_range=RANGE, ledger=files[0], cohort=20
    )
    grid, given = {"epsilon": [2.0, 4.0]}, {"sensitive_features": s["sex"], "users": users}
    inner, before = searching.trained, []

    def trained(jobs: Any, **how: Any) -> Iterator[Any]:
        before.append((charged(files[0]), capsys.readouterr().err))
        return inner(jobs, **how)

    monkeypatch.setattr(searching, "trained", trained)
    ours = FairGridSearchCV(estimator, grid, cv=GroupKFold(2), tolerance=1.0).fit(X, y, **given)
    theirs = GridSearchCV(
        estimator.set_params(ledger=files[1]), grid, cv=GroupKFold(2), refit=False
    ).fit(X, y, groups=users, **given)
    assert before[0][0] == charged(files[1])
    assert len(before[0][0]) == 4
    assert before[0][1].startswith(f"{ours.cost_} The last of them")
    assert "5 runs, 20 rounds, will be charged to" in str(ours.cost_)
    # The last fit is one more, by itself.
    theirs.estimator.set_params(**ours.best_params_).fit(X, y, **given)
    assert charged(files[0]) == charged(files[1])
    shares = [share for _, share in before[0][0]]
    assert ours.cost_.share == pytest.approx(sum(shares) + max(shares))
    assert ours.best_estimator_.privacy_.epsilon == pytest.approx(
        ours.best_params_["epsilon"], rel=1e-3
    )
    assert fpfl.tuning_cost(files[0]).share == pytest.approx(
        fpfl.tuning_cost(files[1]).share, rel=1e-6
    )


@dominated
def test_a_search_that_cannot_be_paid_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, _, _ = people(100)
    file = tmp_path / "people.jsonl"
    PopulationLedger.create(file, population=100, epsilon=6.0).close()
    estimator = FairPrivateClassifier(
        epsilon=2.0, rounds=3, cohort=50, feature_range=RANGE, ledger=file
    )
    monkeypatch.setattr(searching, "trained", lambda *_, **how: pytest.fail("it trained"))
    search = FairGridSearchCV(estimator, {"epsilon": [3.0, 5.0]}, cv=2)
    with pytest.raises(BudgetExhaustedError, match="nothing was charged: its 5 runs"):
        search.fit(X, y)
    assert charged(file) == []
    monkeypatch.undo()
    # Room for two fits, and not for two and the last one.
    split = PredefinedSplit([-1] * 80 + [0] * 20)
    PopulationLedger.create(tmp_path / "other.jsonl", population=100, epsilon=3.0).close()
    estimator.set_params(ledger=tmp_path / "other.jsonl", epsilon=1.5)
    search = FairGridSearchCV(estimator, {"learning_rate": [0.1, 0.2]}, cv=split)
    with pytest.raises(BudgetExhaustedError, match="its 3 runs"):
        search.fit(X, y)
    search.set_params(refit=False).fit(X, y)
    assert len(charged(tmp_path / "other.jsonl")) == 2
    with pytest.raises(ValueError, match="2 ledgers"):
        FairGridSearchCV(
            estimator, {"ledger": [file, tmp_path / "other.jsonl"]}, cv=split, refit=False
        ).fit(X, y)
