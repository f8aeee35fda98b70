"""The scikit-learn estimators: conventions, who is whose, what is private, what is charged."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn", reason="it is not installed: pip install 'fpfl[sklearn]'")
pytest.importorskip("fairlearn", reason="it is not installed: pip install 'fpfl[sklearn]'")

import pandas as pd
from fairlearn.metrics import MetricFrame, selection_rate
from sklearn.base import clone
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    get_scorer,
    roc_auc_score,
)
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fpfl
from fpfl import FpflWarning, OneGradient, PopulationLedger
from fpfl.estimator import FairPrivateClassifier, FairPrivateRegressor
from fpfl.estimator.data import LIMIT, Scaling, labels_within
from fpfl.privacy.budget import BudgetExhaustedError
from fpfl.privacy.statement import round_up

RANGE = (-4.0, 4.0)
dominated = pytest.mark.filterwarnings("ignore:the noise dominates:fpfl.FpflWarning")


@parametrize_with_checks([FairPrivateClassifier(rounds=100), FairPrivateRegressor(rounds=100)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks that fit nonsense on purpose
        check(estimator)


def people(n: int = 400, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Features in a frame, string labels, two sensitive features, and users in no order."""
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(rng.normal(size=(n, 4)), columns=["a", "b", "c", "d"])
    s = pd.DataFrame(
        {"sex": rng.choice(["f", "m"], n, p=[0.4, 0.6]), "area": rng.choice([10, 20, 30], n)}
    )
    signal = X["a"] + 0.5 * X["b"] - 0.8 * (s["sex"] == "f") + 0.3 * rng.normal(size=n)
    y = pd.Series(np.where(signal > 0, "yes", "no"))
    return X, y, s, rng.integers(0, n // 2, n)


def same(one: Any, other: Any, X: Any) -> bool:
    return bool(np.array_equal(one.decision_function(X), other.decision_function(X)))


# --- What was learned -----------------------------------------------------------------------------


def test_it_learns_string_labels_and_is_a_frame_or_an_array() -> None:
    X, y, _, _ = people()
    fitted = FairPrivateClassifier(random_state=0).fit(X, y)
    assert list(fitted.classes_) == ["no", "yes"]
    assert fitted.score(X, y) > 0.85
    assert list(fitted.feature_names_in_) == list("abcd")
    assert fitted.n_features_in_ == 4
    assert fitted.n_iter_ == 300 == len(fitted.run_.history)
    assert fitted.privacy_ is None
    plain = FairPrivateClassifier(random_state=0).fit(X.to_numpy(), y.to_numpy())
    assert np.array_equal(fitted.predict_proba(X), plain.predict_proba(X.to_numpy()))


def test_probabilities_and_logits_belong_to_the_labels() -> None:
    X, _, _, _ = people()
    y = np.where(X["a"] > 0.6, "high", np.where(X["a"] < -0.6, "low", "middle"))
    fitted = FairPrivateClassifier(random_state=0, rounds=200).fit(X, y)
    assert list(fitted.classes_) == ["high", "low", "middle"]
    proba = fitted.predict_proba(X)
    assert proba.shape == (400, 3)
    assert np.allclose(proba.sum(axis=1), 1)
    assert fitted.score(X, y) > 0.8
    assert np.mean(fitted.classes_[proba.argmax(axis=1)] == y) > 0.8
    assert np.array_equal(fitted.decision_function(X).argmax(axis=1), proba.argmax(axis=1))


def test_a_regression_has_labels_in_their_own_unit() -> None:
    X, _, _, _ = people()
    y = 1e4 + 500 * X["a"].to_numpy()
    fitted = FairPrivateRegressor(random_state=0, rounds=200).fit(X, y)
    assert fitted.score(X, y) > 0.85
    assert fitted.schema_.label_range == (y.min(), y.max())
    declared = FairPrivateRegressor(label_range=(9900, 10100), rounds=5, random_state=0).fit(X, y)
    found = declared.predict(X)
    assert 9900 <= found.min() <= found.max() <= 10100


def test_float32_labels_stay_in_a_range_that_float32_does_not_have() -> None:
    bounds = (0.1, 0.7)  # 0.1 rounds up and 0.7 down; their negatives the other way round
    for low, high in (bounds, (-bounds[1], -bounds[0])):
        found = labels_within(np.array([low, high, -9.0, 9.0]), (low, high)).astype(np.float64)
        assert low <= found.min() <= found.max() <= high
        assert np.allclose(found, [low, high, low, high], rtol=1e-6)


def gap_of(constraint: str | None, X: Any, y: Any, s: Any) -> tuple[float, Any]:
    fitted = FairPrivateClassifier(constraint=constraint, rounds=300, random_state=0)
    fitted.fit(X, y, sensitive_features=s)
    frame = MetricFrame(
        metrics=selection_rate,
        y_true=y == "yes",
        y_pred=fitted.predict(X) == "yes",
        sensitive_features=s,
    )
    return float(frame.difference()), fitted


def test_a_collapsed_fit_is_a_warning_where_the_rows_are_no_secret() -> None:
    X, y, *_ = people()
    y = pd.Series(np.where(np.arange(len(X)) % 9 == 0, "yes", "no"))  # nothing to learn
    with pytest.warns(FpflWarning, match="predicts 'no' for everybody") as said:
        fitted = FairPrivateClassifier(random_state=0, rounds=30, hidden=()).fit(X, y)
    assert set(fitted.predict(X)) == {"no"}
    assert said[0].filename == __file__
    # With privacy what the model predicts for its own rows is a secret of theirs.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private = FairPrivateClassifier(
            epsilon=2.0, rounds=3, hidden=(), feature_range=RANGE, random_state=0
        ).fit(X, y)
    assert private.privacy_ is not None
    assert not any("predicts" in str(w.message) for w in caught)
    assert not any("collapsed" in str(w.message) for w in caught)
    # What can be learned is no warning, and a regression has no classes.
    X, y, *_ = people()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FpflWarning)
        FairPrivateClassifier(random_state=0).fit(X, y)
        FairPrivateRegressor(random_state=0, rounds=3).fit(X, np.full(len(X), 0.5) + 0 * X["a"])


def test_class_weights_are_by_label_and_counted_only_where_nothing_is_secret() -> None:
    X, *_ = people()
    labels = np.where(np.arange(len(X)) % 9 == 0, "yes", "no")
    how: dict[str, Any] = {"random_state": 0, "rounds": 3, "hidden": ()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = FairPrivateClassifier(class_weight={"yes": 4}, **how).fit(X, labels)
        counted = FairPrivateClassifier(class_weight="balanced", **how).fit(X, labels)
    assert ours.schema_.class_weights == (1.0, 4.0)
    share = np.mean(labels == "yes")
    assert counted.schema_.class_weights == pytest.approx((0.5 / (1 - share), 0.5 / share))
    private = FairPrivateClassifier(
        class_weight="balanced", epsilon=2.0, feature_range=RANGE, **how
    )
    with pytest.raises(ValueError, match="no ε covers"):
        private.fit(X, labels)
    with pytest.raises(ValueError, match="labels in y are"):
        FairPrivateClassifier(class_weight={"maybe": 2}, **how).fit(X, labels)


def test_the_balanced_score_stands_beside_the_score() -> None:
    X, y, *_ = people()
    labels = np.where(np.arange(len(X)) % 9 == 0, "yes", "no")  # noise: nothing to be learnt
    fitted = FairPrivateClassifier(random_state=0, rounds=60).fit(X, y)
    told = fitted.predict(X)
    assert fitted.balanced_score(X, y) == balanced_accuracy_score(y, told)
    weights = np.where(y == "yes", 3.0, 1.0) + (X["a"] > 0)
    assert fitted.balanced_score(X, y, weights) == pytest.approx(
        balanced_accuracy_score(y, told, sample_weight=weights)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has collapsed
        silent = FairPrivateClassifier(random_state=0, rounds=20, hidden=()).fit(X, labels)
    assert (silent.predict(X) == "no").all()
    assert silent.score(X, labels) > 0.88
    assert silent.balanced_score(X, labels) == 0.5


@pytest.mark.parametrize("scoring", ["balanced_accuracy", "f1", "roc_auc", "average_precision"])
def test_scikit_learns_scores_for_unbalanced_labels_work(scoring: str) -> None:
    X, y, *_ = people()
    codes = (y == "yes").astype(int)
    estimator = FairPrivateClassifier(random_state=0, rounds=60)
    scores = cross_val_score(estimator, X, codes, scoring=scoring, cv=3)
    assert scores.min() > 0.7
    fitted = estimator.fit(X, codes)
    scorer = get_scorer(scoring)
    told = {
        "balanced_accuracy": lambda: balanced_accuracy_score(codes, fitted.predict(X)),
        "f1": lambda: f1_score(codes, fitted.predict(X)),
        "roc_auc": lambda: roc_auc_score(codes, fitted.decision_function(X)),
        "average_precision": lambda: average_precision_score(codes, fitted.decision_function(X)),
    }
    assert scorer(fitted, X, codes) == pytest.approx(told[scoring]())


def test_a_constraint_evens_out_what_fairlearn_measures() -> None:
    X, y, s, _ = people(2000)
    X["d"] = s["sex"] == "f"  # what the group can be told by
    without, _ = gap_of(None, X, y, s["sex"])
    fair, fitted = gap_of("demographic_parity", X, y, s["sex"])
    assert without > 0.2
    assert fair < 0.5 * without
    assert fitted.score(X, y) > 0.75
    assert fitted.run_.constraint.tolerance == 0.02
    assert isinstance(fitted.run_.settings["method"], dict | str)
    assert set(fitted.run_.history[-1]["groups"]["selection rate"]) == {"sex=f", "sex=m"}


# --- Who is whose ---------------------------------------------------------------------------------


def test_rows_in_another_order_are_the_same_users_and_groups() -> None:
    """Users' rows are sorted together: features, labels and groups must go along."""
    X, y, s, users = people()
    settings: dict[str, Any] = {"constraint": "fnr_parity", "rounds": 10, "random_state": 3}
    one = FairPrivateClassifier(**settings).fit(X, y, sensitive_features=s, users=users)
    order = np.argsort(users, kind="stable")
    named = np.array([f"user {u:04d}" for u in users], dtype=object)
    for ids in (users, named):
        other = FairPrivateClassifier(**settings).fit(
            X.iloc[order], y.iloc[order], sensitive_features=s.iloc[order], users=ids[order]
        )
        assert np.allclose(one.decision_function(X), other.decision_function(X), atol=1e-6)
    assert one.schema_.population is None  # it was counted, and nobody declared it
    assert one.run_.settings["population"] == len(np.unique(users))
    assert one.schema_.samples_per_user == 400 / len(np.unique(users))
    alone = FairPrivateClassifier(**settings).fit(X, y, sensitive_features=s)
    assert alone.run_.settings["population"] == 400


def test_groups_are_those_of_the_rows() -> None:
    """All users in every round, so that a round counts everybody: n' must be the truth."""
    X, y, s, users = people()
    fitted = FairPrivateClassifier(
        constraint="fnr_parity", rounds=1, cohort=len(np.unique(users)), random_state=0
    ).fit(X, y, sensitive_features=s, users=users)
    counts = fitted.run_.history[0]["counts"]["FNR"]
    for name in ("sex", "area"):
        for value in s[name].unique():
            truth = int(((s[name] == value) & (y == "yes")).sum())
            assert counts[f"{name}={value}"] == truth, (name, value)


def test_names_of_sensitive_features() -> None:
    X, y, s, _ = people(100)
    fitted = FairPrivateClassifier(constraint="accuracy_parity", rounds=1)

    def names(given: Any) -> list[str]:
        return [a.name for a in fitted.fit(X, y, sensitive_features=given).schema_.attributes]

    assert names(s) == ["sex", "area"]
    assert names(s["area"]) == ["area"]
    assert names(s.to_numpy()) == ["sensitive_feature_0", "sensitive_feature_1"]
    assert names(list(s["sex"])) == ["sensitive_feature_0"]
    assert fitted.schema_.attributes[0].values == ("f", "m")


@pytest.mark.parametrize("nothing", [None, float("nan"), pd.NA])
def test_a_missing_group_is_unknown(nothing: Any) -> None:
    X, y, s, _ = people(100)
    given = s["sex"].astype(object)
    given.iloc[:7] = nothing
    fitted = FairPrivateClassifier(constraint="accuracy_parity", rounds=1, cohort=100)
    fitted.fit(X, y, sensitive_features=given)
    assert fitted.schema_.attributes[0].unknown
    counts = next(iter(fitted.run_.history[0]["counts"].values()))
    assert counts["sex=f"] == (given.iloc[7:] == "f").sum()


def test_an_index_in_another_order_is_refused() -> None:
    X, y, s, users = people(60)
    estimator = FairPrivateClassifier(constraint="fnr_parity", rounds=1)
    with pytest.raises(ValueError, match="sensitive_features has the index of X in another order"):
        estimator.fit(X, y, sensitive_features=s.iloc[::-1])
    with pytest.raises(ValueError, match="users has the index"):
        estimator.fit(X, y, sensitive_features=s, users=pd.Series(users).iloc[::-1])
    estimator.fit(X.iloc[::-1], y.iloc[::-1], sensitive_features=s.iloc[::-1])


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fitting", "message"),
    [
        ({"constraint": "fnr_parity"}, {}, "no sensitive_features"),
        ({"constraint": "fnr"}, {"sensitive_features": True}, "expected one of 'fnr_parity'"),
        ({"constraint": 3}, {"sensitive_features": True}, "constraint is 3"),
        ({"constraint": "equal_error"}, {"sensitive_features": True}, "FairPrivateRegressor"),
        ({"constraint": "predictive_parity"}, {"sensitive_features": True}, "cannot be enforced"),
        ({"method": OneGradient()}, {}, "none was given"),
        ({"model": 3}, {}, "model is 3"),
        ({"cohort": 0}, {}, "cohort is 0"),
        ({"rounds": 2.5}, {}, "rounds is 2.5"),
        ({"feature_range": (3, 1)}, {}, r"feature_range is \(3, 1\)"),
        ({"feature_range": [(0, 1)] * 3}, {}, "each of 4 features"),
        ({"ledger": "people.jsonl"}, {}, "epsilon was not"),
        ({}, {"users": np.arange(59)}, "one id for each of 60"),
        ({}, {"users": [None] * 60}, "missing ids"),
        ({}, {"sensitive_features": np.zeros(59)}, "each of 60 rows"),
        (
            {"constraint": "fnr_parity"},
            {"sensitive_features": np.zeros(60)},
            "'sensitive_feature_0' has 1 values",
        ),
        (
            {"constraint": "fnr_parity"},
            {"sensitive_features": np.arange(61)},
            "each of 60 rows",
        ),
    ],
)
def test_what_is_wrong_is_said(
    settings: dict[str, Any], fitting: dict[str, Any], message: str
) -> None:
    X, y, s, _ = people(60)
    if fitting.get("sensitive_features") is True:
        fitting = {"sensitive_features": s}
    with pytest.raises(ValueError, match=message):
        FairPrivateClassifier(**settings).fit(X, y, **fitting)


def test_a_number_is_no_group() -> None:
    X, y, _, _ = people(240)
    with pytest.raises(ValueError, match="'a' has 240 values"):
        FairPrivateClassifier(constraint="fnr_parity").fit(X, y, sensitive_features=X["a"])


@pytest.mark.parametrize("kind", ["category", "object", "str", "datetime64[s]"])
def test_columns_of_text_are_named(kind: str) -> None:
    X, y, _, _ = people(60)
    X["job"] = pd.Series(["2001", "2002", "2003"] * 20).astype(kind)
    with pytest.raises(ValueError, match=r"'job' .* encode"):
        FairPrivateClassifier().fit(X, y)


def test_private_regression_needs_a_declared_range() -> None:
    X, _, _, _ = people(60)
    with pytest.raises(ValueError, match="label_range"):
        FairPrivateRegressor(epsilon=1.0).fit(X, X["a"])
    with pytest.raises(ValueError, match="low < high"):
        FairPrivateRegressor(label_range=(1, 0)).fit(X, X["a"])


# --- Randomness and privacy -----------------------------------------------------------------------


@dominated
def test_random_state_seeds_all_but_the_noise() -> None:
    X, y, _, _ = people()
    plain = FairPrivateClassifier(rounds=5, random_state=7)
    assert same(clone(plain).fit(X, y), clone(plain).fit(X, y), X)
    assert not same(plain.fit(X, y), clone(plain).set_params(random_state=8).fit(X, y), X)
    private = clone(plain).set_params(epsilon=50.0, feature_range=RANGE, cohort=400)
    one, other = clone(private).fit(X, y), clone(private).fit(X, y)
    assert not same(one, other, X)
    assert one.__sklearn_tags__().non_deterministic
    assert "seed" not in str(one.run_.settings["privacy"])
    assert one.run_.settings["seeded_noise"] is False


def test_without_a_seed_two_fits_differ() -> None:
    """Also in their initial weights, and torch's own generator is left alone."""
    X, y, _, _ = people(60)
    estimator = FairPrivateClassifier(rounds=1, learning_rate=1e-9)
    before = torch.get_rng_state()
    one, other = clone(estimator).fit(X, y), clone(estimator).fit(X, y)
    assert not np.allclose(one.decision_function(X), other.decision_function(X), atol=1e-3)
    assert torch.equal(before, torch.get_rng_state())


@dominated
def test_the_statement_has_the_epsilon_asked_for() -> None:
    X, y, s, users = people()
    fitted = FairPrivateClassifier(
        epsilon=3.0, delta=1e-4, constraint="fnr_parity", rounds=20, feature_range=RANGE
    ).fit(X, y, sensitive_features=s["sex"], users=users)
    assert fitted.privacy_ is not None
    about = fitted.run_.settings["privacy"]
    assert (about["epsilon"], about["delta"]) == (3.0, 1e-4)
    assert fitted.run_.settings["population"] == len(np.unique(users))
    bound = fitted.run_.settings["clip"]["bound"]
    assert bound == pytest.approx(1.5 * 400 / len(np.unique(users)))


def test_private_features_are_not_scaled_by_the_data() -> None:
    """Another person's row must not move anybody else's features."""
    X = np.random.default_rng(0).normal(size=(50, 2)) * [1, 30]
    moved = np.vstack([X, [[1e6, -1e6]]])
    for ranges in (None, ((-1, 1), (-30, 30))):
        one, other = (Scaling.of(rows, ranges, private=True) for rows in (X, moved))
        assert np.array_equal(one(X), other(X))
        assert np.abs(other(moved)).max() <= LIMIT
    assert np.allclose(Scaling.of(X, None, private=False)(X).std(axis=0), 1)
    with pytest.warns(FpflWarning, match="without feature_range"):
        FairPrivateClassifier(epsilon=5.0, rounds=1).fit(X, X[:, 0] > 0)


def test_warnings_are_about_the_callers_line() -> None:
    X, y, _, _ = people(60)
    with pytest.warns(FpflWarning) as caught:
        FairPrivateClassifier(epsilon=0.5, rounds=30).fit(X, y)
    assert {Path(warning.filename).name for warning in caught} == {"test_estimator.py"}


# --- Models, pickles, tools of scikit-learn -------------------------------------------------------


def linear(features: int, outputs: int) -> nn.Module:
    return nn.Linear(features, outputs)


def test_other_networks() -> None:
    X, y, _, _ = people()
    made = FairPrivateClassifier(model=linear, random_state=0).fit(X, y)
    assert same(made, FairPrivateClassifier(model=linear, random_state=0).fit(X, y), X)
    assert isinstance(made.run_.model, nn.Linear)
    module = nn.Linear(4, 1)
    start = module.weight.detach().clone()
    given = FairPrivateClassifier(model=module, random_state=0).fit(X, y)
    assert torch.equal(module.weight, start)  # it is copied
    assert min(made.score(X, y), given.score(X, y)) > 0.85
    deep = FairPrivateClassifier(hidden=(8, 4), rounds=1).fit(X, y)
    assert [m.out_features for m in deep.run_.model if isinstance(m, nn.Linear)] == [8, 4, 1]


@dominated
def test_a_pickle_holds_a_fair_private_model() -> None:
    X, y, s, _ = people(100)
    fitted = FairPrivateClassifier(
        constraint="equalized_odds", tolerance=0.1, epsilon=5.0, rounds=3, feature_range=RANGE
    ).fit(X, y, sensitive_features=s)
    back = pickle.loads(pickle.dumps(fitted))
    assert same(fitted, back, X)
    assert str(back.privacy_) == str(fitted.privacy_)
    assert back.run_.constraint.tolerance == 0.1
    assert fitted.run_.constraint is not None


def test_a_given_constraint_keeps_its_tolerance_unless_told() -> None:
    X, y, s, _ = people(100)
    constraint = fpfl.fnr_parity(("sex", "area"), tolerance=0.3)
    estimator = FairPrivateClassifier(constraint=constraint, rounds=1, random_state=0)
    run = estimator.fit(X, y, sensitive_features=s).run_
    assert run.constraint.tolerance == 0.3
    assert len(run.history[0]["counts"]["FNR"]) == 6
    estimator.set_params(tolerance=0.1, method=fpfl.MMDM())
    assert estimator.fit(X, y, sensitive_features=s).run_.constraint.tolerance == 0.1


@dominated
def test_regression_with_equal_errors() -> None:
    X, _, s, users = people()
    fitted = FairPrivateRegressor(
        constraint="equal_error", epsilon=5.0, label_range=(-3, 3), rounds=10, feature_range=RANGE
    ).fit(X, X["a"], sensitive_features=s["sex"], users=users)
    assert set(fitted.run_.history[0]["groups"]["squared error"]) == {"sex=f", "sex=m"}
    assert np.isfinite(fitted.predict(X)).all()


def test_pipelines_and_cross_validation_pass_rows_on() -> None:
    X, y, s, users = people(200)
    pipeline = Pipeline(
        [
            ("scale", StandardScaler()),
            ("model", FairPrivateClassifier(constraint="fnr_parity", rounds=30, random_state=0)),
        ]
    )
    pipeline.fit(X, y, model__sensitive_features=s["sex"], model__users=users)
    assert pipeline.predict(X).shape == (200,)
    scores = cross_val_score(
        pipeline,
        X,
        y,
        cv=GroupKFold(3),
        groups=users,
        params={"model__sensitive_features": s["sex"], "model__users": users},
        error_score="raise",
    )
    assert len(scores) == 3
    assert scores.min() > 0.6


def test_settings_of_numpys_types_are_kept_as_given() -> None:
    X, y, s, _ = people(100)
    settings = {"rounds": np.int64(2), "cohort": np.int32(50), "tolerance": np.float64(0.1)}
    estimator = FairPrivateClassifier(constraint="fnr_parity", **settings)  # type: ignore[arg-type]
    assert estimator.get_params()["rounds"] is settings["rounds"]
    assert json.dumps(estimator.fit(X, y, sensitive_features=s).run_.settings)


# --- The ledger -----------------------------------------------------------------------------------


@dominated
@dominated
def test_a_clip_bound_may_find_itself() -> None:
    """Cloned, fitted and pickled like any other setting."""
    X, y, s, users = people()
    clip = fpfl.Clipping(0.05, counts=1.0, adapts=fpfl.AdaptiveBound(0.1, rate=0.5))
    estimator = clone(FairPrivateClassifier(epsilon=4.0, clip=clip, rounds=30))
    assert estimator.get_params()["clip"] == clip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few users
        estimator.fit(X, y, sensitive_features=s["sex"], users=users)
    history = estimator.run_.history
    assert history[0]["clip_bound"] == 0.05
    assert history[-1]["clip_bound"] > 0.05  # everybody was clipped
    assert same(pickle.loads(pickle.dumps(estimator)), estimator, X)


def test_a_weighted_row_has_room_below_the_clip_bound() -> None:
    """The bound begins at that of two rows and adapts; a number that was given stays."""
    X, y, s, _ = people(100)
    estimator = FairPrivateClassifier(epsilon=3.0, rounds=2, feature_range=RANGE)
    plain = estimator.fit(X, y).run_.settings["clip"]
    estimator.set_params(constraint="fnr_parity").fit(X, y, sensitive_features=s["sex"])
    fair = estimator.run_.settings["clip"]
    assert plain["bound"] == fair["bound"] == 3.0
    assert plain["adapts"]["target"] > 0.02  # so few users: noise is long against their gradients
    assert fair["adapts"]["target"] > 0.02
    estimator.set_params(clip=7.0).fit(X, y, sensitive_features=s["sex"])
    assert estimator.run_.settings["clip"]["bound"] == 7.0
    assert "adapts" not in estimator.run_.settings["clip"]
    assert {row["clip_bound"] for row in estimator.run_.history if "clip_bound" in row} == set()


@dominated
def test_a_search_over_epsilon_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    X, y, s, users = people(200)
    known = len(np.unique(users))
    file = tmp_path / "people.jsonl"
    PopulationLedger.create(file, population=known, epsilon=100.0).close()
    search = GridSearchCV(
        FairPrivateClassifier(
            constraint="fnr_parity", rounds=4, feature_range=RANGE, ledger=file, cohort=20
        ),
        {"epsilon": [2.0, 4.0], "tolerance": [0.02, 0.2]},
        cv=2,
        error_score="raise",
    )
    search.fit(X, y, sensitive_features=s["sex"], users=users)
    with PopulationLedger.open(file, write=False) as ledger:
        runs = ledger.by_run()
        assert len(runs) == 2 * 2 * 2 + 1
        assert {run["rounds"] for run in runs.values()} == {1 + 4}  # the inputs are measured first
        # A fit by itself is far from what all of them cost.
        assert ledger.spent > 1.5 * max(run["epsilon"] for run in runs.values())
        spent, charges, budget = ledger.spent, ledger.charges(), ledger.filter
        summary = ledger.summary()
    assert search.best_estimator_.schema_.population == known
    assert not list((tmp_path / "temporary").glob("fpfl-*"))

    kept = search.best_estimator_.privacy_
    cost = fpfl.tuning_cost(file, chosen=kept)
    assert (len(cost.fits), cost.rounds) == (9, 45)
    # What every mechanism costs, added up from the charges themselves.
    assert cost.epsilon == pytest.approx(spent) == pytest.approx(budget.spent(charges))
    assert cost.share == pytest.approx(sum(fit.share for fit in cost.fits))
    dearest = max(fit.epsilon for fit in cost.fits)
    for text in (str(cost), summary):
        assert f"together ε = {round_up(spent)} at δ" in text
        assert f"to {round_up(dearest)} by the same filter" in text
    chosen = search.best_params_["epsilon"]
    assert kept.epsilon == pytest.approx(chosen, rel=1e-3)
    assert f"by its own statement: ε = {round_up(kept.epsilon)}." in str(cost)

    # One more fit is one more charge, and told apart from what was before it.
    clone(search.best_estimator_).fit(X, y, sensitive_features=s["sex"], users=users)
    after = fpfl.tuning_cost(file, since=cost)
    assert (len(after.fits), after.rounds) == (1, 5)
    assert after.epsilon == pytest.approx(after.fits[0].epsilon)
    assert after.before == pytest.approx(cost.share)
    assert after.left == pytest.approx(1 - cost.share - after.share)
    assert fpfl.tuning_cost(file).epsilon > cost.epsilon


@dominated
@pytest.mark.filterwarnings("ignore:the population's budget is spent:fpfl.FpflWarning")
def test_a_search_that_spends_its_budget(tmp_path: Path) -> None:
    """Fits that got no round fail as scikit-learn's users know it; what was charged is told."""
    X, y, _, _ = people(100)
    file = tmp_path / "people.jsonl"
    PopulationLedger.create(file, population=100, epsilon=6.0).close()
    assert "Nothing was charged" in str(fpfl.tuning_cost(file))
    search = GridSearchCV(
        FairPrivateClassifier(rounds=3, cohort=50, feature_range=RANGE, ledger=file),
        {"epsilon": [3.0, 5.0, 5.5]},
        cv=2,
        refit=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.fit(X, y)
    said = " ".join(str(warning.message) for warning in caught)
    assert "budget is spent" in said  # a fit that ended early, and kept its model
    assert "not one round was run" in said  # in scikit-learn's FitFailedWarning
    means = search.cv_results_["mean_test_score"]
    assert np.isfinite(means[0])
    assert np.isnan(means[-1])
    cost = fpfl.tuning_cost(file)
    assert 1 <= len(cost.fits) < 6
    assert cost.more == 0
    assert cost.epsilon <= 6.0
    with pytest.raises(BudgetExhaustedError, match="not one round"):
        search.set_params(error_score="raise").fit(X, y)


@dominated
def test_a_budget_that_is_too_small_warns_and_then_raises(tmp_path: Path) -> None:
    X, y, _, _ = people(100)
    file = tmp_path / "people.jsonl"
    PopulationLedger.create(file, population=100, epsilon=2.0).close()
    estimator = FairPrivateClassifier(
        epsilon=3.0, rounds=10, cohort=50, feature_range=RANGE, ledger=file
    )
    with pytest.warns(FpflWarning, match="budget is spent"):
        estimator.fit(X, y)
    assert 1 <= estimator.n_iter_ < 10
    assert estimator.predict(X).shape == (100,)
    with pytest.raises(BudgetExhaustedError, match="not one round"):
        clone(estimator).fit(X, y)
    with pytest.raises(ValueError, match="there are 150 users and the ledger is of 100"):
        clone(estimator).fit(*people(150)[:2])


@dominated
def test_the_page_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a search costs follows from its settings, so the page can be held to it."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "estimator.md"
    text = page.read_text(encoding="utf-8")
    found = re.search(
        r"```python\n((?:(?!```).)*tuning_cost.*?)```.*?```text\n(.*?)```", text, re.S
    )
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(found[1], "page", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.startswith(found[2])


def test_a_ledger_with_withdrawals_is_refused(tmp_path: Path) -> None:
    X, y, _, _ = people(100)
    file = tmp_path / "people.jsonl"
    with PopulationLedger.create(file, population=100, epsilon=2.0) as ledger:
        ledger.withdraw([3])
    with pytest.raises(ValueError, match="users withdrew"):
        FairPrivateClassifier(epsilon=1.0, ledger=file, feature_range=RANGE).fit(X, y)


def test_without_scikit_learn_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['sklearn.base'] = None; sys.modules['sklearn'] = None\n"
        "import fpfl.estimator"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'fpfl[sklearn]'" in out.stderr
