"""``reference=True`` at the estimators."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import fpfl
from fpfl.training.reference import reference_seed

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore::UserWarning")


def rows(n: int = 300, seed: int = 0):
    rng = np.random.default_rng(seed)
    X, sex = rng.normal(size=(n, 3)), rng.choice(["F", "M"], n)
    signal = X[:, 0] - 0.8 * (sex == "F") + 0.3 * rng.normal(size=n)
    return X, np.where(signal > 0, "yes", "no"), sex, signal


def test_a_classifier_and_its_reference(tmp_path: Path) -> None:
    X, y, sex, _ = rows()
    ledger = tmp_path / "people.jsonl"
    fpfl.PopulationLedger.create(ledger, population=300, epsilon=20.0).close()
    model = fpfl.FairPrivateClassifier(
        constraint="fnr_parity", epsilon=2.0, rounds=5, ledger=ledger, reference=True,
        feature_range=(-4, 4), random_state=1,
    ).fit(X, y, sensitive_features=sex)  # fmt: skip
    assert model.reference_run_.constraint is None
    assert model.reference_run_.privacy.epsilon == pytest.approx(model.privacy_.epsilon, rel=0.01)
    with fpfl.PopulationLedger.open(ledger, write=False) as kept:
        assert len(kept.as_dict()["runs"]) == 2
        assert sum(kept.charges().values()) == 2 * (5 + 1)
    Xt, yt, st, _ = rows(seed=1)
    found = model.against_reference(Xt, yt, st)
    own = {c.group: c.value for c in found.groups}
    for group in ("F", "M"):
        there = (st == group) & (yt == "yes")
        fnr = float((model.predict(Xt[there]) == "no").mean())
        assert own[f"sensitive_feature_0={group}"] == pytest.approx(fnr)
    again = pickle.loads(pickle.dumps(model))
    assert again.against_reference(Xt, yt, st) == found


def test_without_one_it_is_not_measured() -> None:
    X, y, sex, _ = rows(100)
    model = fpfl.FairPrivateClassifier(constraint="fnr_parity", rounds=2).fit(
        X, y, sensitive_features=sex
    )
    assert model.reference_run_ is None
    assert model.against_reference(X, y, sex) is None
    with pytest.raises(ValueError, match="constraint is None"):
        fpfl.FairPrivateClassifier(rounds=2, reference=True).fit(X, y)


def test_a_regressor() -> None:
    X, _, sex, signal = rows(200)
    model = fpfl.FairPrivateRegressor(constraint="equal_error", rounds=3, reference=True)
    model.fit(X, signal, sensitive_features=sex)
    found = model.against_reference(X, signal, sex)
    assert {c.good for c in found.changes} == {"less"}
    assert found.users == 200


def test_python_has_references_by_hand(tmp_path: Path) -> None:
    from conftest import make_population

    people = make_population(users=60)
    asked = {"cohort": 20, "rounds": 3, "constraint": fpfl.fnr_parity(), "seed": 4, "noise_seed": 5}
    asked |= {"method": fpfl.OneGradient(), "privacy": fpfl.Privacy(noise_multiplier=1.5)}
    run = fpfl.train(fpfl.mlp(5, seed=0), people, **asked, folder=tmp_path / "run")
    other = fpfl.train_reference(
        fpfl.mlp(5, seed=0), people, **asked, folder=tmp_path / "run/reference"
    )
    plain = fpfl.train(
        fpfl.mlp(5, seed=0), people, cohort=20, rounds=3, privacy=asked["privacy"],
        selection="average", seed=reference_seed(4), noise_seed=reference_seed(5),
    )  # fmt: skip
    assert plain.history == other.history
    found = run.against(other, people)
    assert {c.group for c in found.groups} == {"sex=Female", "sex=Male"}
    assert "There is a reference, and no evaluation of both" in fpfl.model_card(tmp_path / "run")
    with pytest.raises(ValueError, match="constraint is not given"):
        fpfl.train_reference(fpfl.mlp(5), people, cohort=20, rounds=3)
    with pytest.raises(ValueError, match="without a constraint"):
        other.against(run, people)
