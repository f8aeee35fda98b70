"""Collapse, judged by released tables: its figures, its false alarms, and what it finds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import nn

import fpfl
from fpfl.fairness.confusion import (
    FALSE_ALARMS,
    Released,
    Tables,
    balance_of,
    collapsed_in_training,
    judged,
    table_metrics,
    training_verdict,
)
from fpfl.training.session import prepare

NAMES = ("no", "yes")


def samples(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(i, j) for (i, j), n in np.ndenumerate(table) for _ in range(int(n))]
    y, p = np.array(pairs).T
    return y, p


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_figures_are_scikit_learns(classes: int) -> None:
    table = np.random.default_rng(classes).integers(1, 30, (classes, classes)).astype(float)
    metrics, accuracy = table_metrics(table)
    y, p = samples(table)
    assert accuracy == pytest.approx(np.mean(y == p))
    assert metrics.balanced_accuracy.value == pytest.approx(balanced_accuracy_score(y, p))
    average = "binary" if classes == 2 else "macro"
    assert metrics.f1.value == pytest.approx(f1_score(y, p, average=average))
    for k in range(classes):
        assert metrics.labels[k].value == pytest.approx(np.mean(y == k))
        assert metrics.predicted[k].value == pytest.approx(np.mean(p == k))


def test_noise_leaves_figures_in_range() -> None:
    metrics, accuracy = table_metrics(np.array([[120.0, -7.0], [9.0, -3.0]]))
    assert metrics.predicted[1].value == 0.0
    assert metrics.balanced_accuracy.value == pytest.approx(0.5)
    assert 0.0 <= accuracy <= 1.0


def say(table: list[list[float]], known: Released, rounds: int = 1) -> bool | None:
    (said,) = judged(np.array([table], dtype=float), np.array([rounds]), known)
    return said


def test_without_noise_it_is_the_rule_of_evaluations_where_many_were_seen() -> None:
    known = Released(2, 10)
    assert say([[8900, 0], [1100, 0]], known) is True  # nobody
    assert say([[8850, 50], [1090, 10]], known) is True  # 0.6%
    assert say([[8600, 300], [500, 600]], known) is False
    # A rare class that is found: 0.5% of labels, nearly all of them found.
    assert say([[995000, 0], [300, 4700]], known) is False
    # Chance: right about the classes no more often than a coin.
    assert say([[44500, 44500], [5500, 5500]], known) is True
    # Few were seen: nothing is clear.
    assert say([[89, 0], [11, 0]], known) is None
    # One class alone cannot be told apart from nothing.
    assert say([[5000, 0], [0, 0]], known) is None
    assert say([[0, 0], [0, 0]], known) is None


def run_of(probabilities: np.ndarray, n: float, T: int, s: float, seed: int) -> list[dict]:
    """Rows of a run whose models do this, with Poisson cohorts and noise."""
    rng = np.random.default_rng(seed)
    C = len(probabilities)
    tables = Tables(Released(C, T, s))
    rows = []
    for t in range(1, T + 1):
        table = rng.poisson(n * probabilities) + s * rng.normal(size=(C, C))
        tables.take(table.tolist())
        rows.append({"round": t, "balance": tables.balance()})
    return rows


# At the edge of collapse by each of the rules: as many false alarms as there can be.
EDGES = {
    "1% of predictions": np.array([[0.885, 0.005], [0.105, 0.005]]),
    "balanced accuracy 0.52": np.array([[0.6, 0.29], [0.07, 0.04]]),
    "three classes": np.array([[0.5, 0.095, 0.005], [0.1, 0.195, 0.005], [0.05, 0.05, 0.0]]),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("s", [0.0, 5.0])
def test_false_alarms_are_as_stated(edge: str, s: float) -> None:
    probabilities = EDGES[edge]
    if edge == "balanced accuracy 0.52":
        # h_0/n_0 + h_1/n_1 = 1.04 exactly.
        probabilities = np.array([[0.89 * 0.68, 0.89 * 0.32], [0.11 * 0.64, 0.11 * 0.36]])
    runs = 100
    alarms = sum(
        any(row["balance"]["collapsed"] is True for row in run_of(probabilities, 400, 100, s, seed))
        for seed in range(runs)
    )
    # No more than a rate of 1% gives in all but one of a million tests.
    assert alarms <= binom.ppf(1 - 1e-6, runs, FALSE_ALARMS)


@pytest.mark.parametrize("declared", [None, 4.0])
def test_users_whose_samples_are_all_alike_raise_no_more_alarms(declared: float | None) -> None:
    """Where nobody is clipped, it is the largest user's samples that one cohort may have alike."""
    most, labels = 20, np.arange(30) % 2
    schema = fpfl.Schema(
        shape=(2,), attributes=(fpfl.Attribute("sex", ("f", "m")),), samples_per_user=declared
    )
    sizes = np.where(np.arange(30) < 20, most, 1)
    owner = np.repeat(np.arange(30), sizes)
    data = fpfl.FederatedDataset.from_samples(
        np.zeros((len(owner), 2), np.float32), labels[owner], owner % 2, schema, owner
    )
    made = prepare(nn.Linear(2, 1), data, cohort=10, rounds=30)
    known = made.spec.server(made.third_party).tables
    assert known is not None
    probabilities = np.array([[0.3, 0.2], [0.2, 0.3]])  # no good model, but none that collapsed
    rng, runs, alarms = np.random.default_rng(0), 100, 0
    for _ in range(runs):
        tables, said = Tables(known), set()
        for _ in range(30):
            tables.take((most * rng.poisson(10 * probabilities)).tolist())
            said.add((tables.balance() or {})["collapsed"])
        alarms += True in said
    assert alarms <= binom.ppf(1 - 1e-6, runs, FALSE_ALARMS)


@pytest.mark.parametrize("s", [0.0, 5.0])
def test_a_constant_model_is_found_and_a_good_one_is_not(s: float) -> None:
    constant = np.array([[0.89, 0.0], [0.11, 0.0]])
    good = np.array([[0.85, 0.04], [0.04, 0.07]])
    for seed in range(20):
        found = run_of(constant, 1500, 200, s, seed)[-1]
        assert found["balance"]["collapsed"] is True
        assert collapsed_in_training(found, NAMES).count("predicts 'no' for") == 1
        sound = run_of(good, 1500, 200, s, seed)[-1]
        assert sound["balance"]["collapsed"] is False
        assert training_verdict([sound], NAMES).startswith("Not collapsed while training")


def test_not_to_know_is_said() -> None:
    row = run_of(np.array([[0.89, 0.0], [0.11, 0.0]]), 50, 20, 30.0, 0)[-1]
    assert row["balance"]["collapsed"] is None
    assert collapsed_in_training(row) is None
    assert "one cannot tell" in training_verdict([row])
    assert training_verdict([{"round": 3, "accuracy": 0.9}]) is None
    assert training_verdict([]) is None


def test_a_model_that_collapses_late_is_found_and_one_that_recovers_is_not() -> None:
    good, bad = np.array([[850.0, 40.0], [40.0, 70.0]]), np.array([[890.0, 0.0], [110.0, 0.0]])
    for order, said in (([good] * 40 + [bad] * 20, True), ([bad] * 40 + [good] * 20, False)):
        tables = Tables(Released(2, 60, 1.0))
        for table in order:
            tables.take((10 * table).tolist())
        assert tables.balance()["collapsed"] is said


def test_a_run_that_goes_on_has_the_tables_it_had() -> None:
    rng, known = np.random.default_rng(0), Released(2, 12, 1.0)
    made = rng.normal(100.0, 10.0, (20, 2, 2)).tolist()
    whole = Tables(known)
    for table in made[:9]:
        whole.take(table)
    again = Tables(known, [{"confusion": table} for table in made[:6]])
    for table in made[6:9]:
        again.take(table)
    assert again.balance() == whole.balance()
    for table in made[9:]:  # more rounds than were planned
        again.take(table)
    # Rows of an earlier version have no table: what there is begins after them.
    later = Tables(known, [{"accuracy": 0.5}, {"confusion": made[0]}])
    alone = Tables(known, [{"confusion": made[0]}])
    assert later.balance() == alone.balance()
    later.take([[None, 1.0], [2.0, 3.0]])
    assert later.balance() is None


def test_a_rows_figures_are_read_back() -> None:
    row = run_of(np.array([[0.85, 0.04], [0.04, 0.07]]), 1000, 8, 1.0, 1)[-1]
    metrics = balance_of(row, NAMES)
    assert metrics.balanced_accuracy.value == row["balance"]["balanced_accuracy"]
    assert metrics.named(1) == "'yes'"
    assert balance_of({"round": 1}) is None
