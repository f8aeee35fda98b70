"""The AUC of a private evaluation, from counts of scores, and what else two classes have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fpfl import Attribute, FederatedDataset, Schema
from fpfl.aggregation import SeededNoise
from fpfl.fairness import evaluate_predictions, fnr_parity
from fpfl.fairness.metrics import ClassMetrics
from fpfl.heldout import PrivateEvaluation, evaluate_privately, plan_heldout
from fpfl.heldout.intervals import Floats
from fpfl.heldout.plan import user_counts
from fpfl.heldout.result import IN_DOUBT
from fpfl.heldout.scores import BINS, DEARER, SHARE, ReleasedScores, bin_ends, count_scores, unit
from fpfl.privacy import participations_of_one
from fpfl.report.evaluations import of_private
from fpfl.report.words import balance_lines

SEX = Attribute("sex", ("Female", "Male"))
SAMPLE = Path(__file__).parents[1] / "samples" / "0.1.0" / "evaluated" / "run"

Make = Callable[..., FederatedDataset]


class Silence:
    """No noise: to see what is counted."""

    seeded = True

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 1)


def identity(bias: float = 0.0, weight: float = 1.0) -> nn.Module:
    """The feature is the logit."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, weight)
    nn.init.constant_(model.bias, bias)
    return model


def people(population: int, positives: float, apart: float, seed: int = 0) -> FederatedDataset:
    """One sample a user; the logits of class 1 are higher by so many standard deviations."""
    rng = np.random.default_rng(seed)
    y = (rng.random(population) < positives).astype(np.int64)
    logits = rng.normal(size=population) + apart * y - 2.0
    schema = Schema(shape=(1,), attributes=(SEX,), class_names=("no", "yes"), samples_per_user=1.0)
    sex = rng.integers(0, 2, population)
    return FederatedDataset.from_samples(logits[:, None], y, sex, schema, np.arange(population))


def exact(model: nn.Module, data: FederatedDataset) -> ClassMetrics:
    with torch.no_grad():
        logits = model(data.features.float()).squeeze(-1)
    found = evaluate_predictions(
        (logits > 0).long(), data.labels, data.attributes, data.schema.attributes,
        scores=logits, bootstrap=0,
    ).metrics  # fmt: skip
    assert found is not None
    return found


def evaluated(data: FederatedDataset, model: nn.Module, **changes: object) -> PrivateEvaluation:
    settings = {"constraint": fnr_parity("sex"), "epsilon": 2.0, "noise": SeededNoise(0)}
    return evaluate_privately(model, data, **(settings | changes))  # type: ignore[arg-type]


# What is counted


def test_bins_are_public_and_finer_for_small_probabilities() -> None:
    ends = bin_ends()
    assert len(ends) == BINS + 1
    assert (ends[0], ends[16], ends[-1]) == (0.0, 0.5, 1.0)
    assert ends == sorted(ends)
    assert ends[1] < 0.0015 < 1 / BINS, "where rare classes have their scores"
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(ends)])
    labels = torch.tensor([0] * 16 + [1] * 16)
    found = count_scores(middle.logit(), labels, torch.zeros(BINS, dtype=torch.int64))
    assert found.shape == (1, 2 * BINS)
    assert found.nonzero()[:, 1].tolist() == [*range(16), *range(BINS + 16, 2 * BINS)]
    extreme = torch.tensor([-math.inf, math.inf])
    beyond = count_scores(extreme, torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert beyond.nonzero().tolist() == [[0, 0], [1, 2 * BINS - 1]]


def test_one_user_changes_its_own_cells_alone_and_no_more_than_the_bound(population: Make) -> None:
    data, model = population(users=40, mean=6.0), linear()
    plan = plan_heldout(
        data.schema, population=40, constraint=fnr_parity("sex"), epsilon=1.0, bound=2.0
    )
    assert plan.clip == pytest.approx(2.0 * math.sqrt(1.0 + plan.scores**2))

    def rows(some: FederatedDataset) -> Floats:
        found = torch.cat(list(user_counts(model, some, plan.cells, 2.0, plan.scores)))
        return found.numpy()

    everyone = rows(data)
    assert everyone.shape == (40, plan.size)
    assert np.linalg.norm(everyone, axis=1).max() <= plan.clip * (1 + 1e-12)
    cells = plan.size - 2 * BINS
    for user in range(40):
        weight = min(int(data.sizes()[user]), 2.0)
        scores = everyone[user, cells:]
        assert scores.sum() == pytest.approx(plan.scores * weight), "each sample in one bin"
        assert scores.min() >= 0.0
    # Who a user is beside, and what they answer, changes nothing of what it sends.
    for user in (0, 7, 39):
        keep = np.delete(np.arange(40), user)
        assert np.array_equal(rows(data.subset(keep)), everyone[keep])


def test_the_release_moves_by_one_users_vector_and_no_more(population: Make) -> None:
    data, model = population(users=40, mean=6.0), linear()

    def flat(some: FederatedDataset) -> Floats:
        found = evaluated(some, model, epsilon=100.0, bound=2.0, noise=Silence())
        cells = [list(kinds.values()) for kinds in found.released.values()]
        assert found.scores is not None
        return np.concatenate([np.ravel(cells), unit(1.0) * np.ravel(found.scores)])

    plan = plan_heldout(
        data.schema, population=40, constraint=fnr_parity("sex"), epsilon=100.0, bound=2.0
    )
    own = torch.cat(list(user_counts(model, data, plan.cells, 2.0, plan.scores))).numpy()
    everyone = flat(data)
    for user in range(0, 40, 5):
        moved = everyone - flat(data.subset(np.delete(np.arange(40), user)))
        assert np.allclose(moved, own[user], atol=1e-3)
        assert np.linalg.norm(moved) <= plan.clip * (1 + 1e-4)


def test_a_broken_user_sends_no_scores(population: Make, tmp_path: Path) -> None:
    data, model = population(users=50), linear()
    user = int(data.sizes().argmax())
    data.save(tmp_path / "users")
    values = np.load(tmp_path / "users" / "features.npy", mmap_mode="r+")
    values[int(data.offsets[user]), 0] = np.inf
    values.flush()
    broken = evaluated(FederatedDataset.open(tmp_path / "users"), model, bound=2.0, noise=Silence())
    others = data.subset(np.delete(np.arange(50), user))
    intact = evaluated(others, model, bound=2.0, noise=Silence())
    assert np.allclose(broken.scores or 0.0, intact.scores or 1.0, atol=1e-3)


def test_its_part_of_the_budget_is_what_is_said(population: Make) -> None:
    """The same ε, one mechanism: the other counts have 5.4% more noise, the scores a tenth."""
    schema = population(users=10).schema
    how = {"population": 1000, "constraint": fnr_parity("sex"), "epsilon": 1.0, "bound": 3.0}
    plan = plan_heldout(schema, **how)  # type: ignore[arg-type]
    without = plan_heldout(schema, **how, auc=False)  # type: ignore[arg-type]
    assert plan.mechanism == without.mechanism
    assert plan.epsilon == without.epsilon
    assert plan.noise_stddev == pytest.approx(without.noise_stddev * (1 + DEARER), rel=1e-4)
    assert DEARER < 0.055
    assert plan.scores_stddev is not None
    sigma = plan.noise_multiplier
    assert plan.scores_stddev == pytest.approx(3.0 * sigma / math.sqrt(SHARE), rel=1e-4)
    parts = [(3.0 / plan.noise_stddev) ** 2, (3.0 / plan.scores_stddev) ** 2]
    assert sum(parts) == pytest.approx(1 / sigma**2, rel=1e-4)
    text = "\n".join(plan.statement(seeded=False))
    assert "10% of the budget" in text
    assert "5.4% more noise" in text
    assert "AUC" not in "\n".join(without.statement(seeded=False))
    assert (without.size, without.scores_stddev) == (8, None)


def test_the_gaps_interval_is_hardly_wider() -> None:
    data = people(3000, 0.5, 2.0)
    wide, narrow = (
        [
            d.high - d.low
            for seed in range(20)
            for d in evaluated(
                data, identity(1.0), epsilon=0.5, noise=SeededNoise(seed), auc=auc
            ).gap.differences
        ]
        for auc in (True, False)
    )
    assert 1.0 < np.mean(wide) / np.mean(narrow) < 1.06


# The AUC


@pytest.mark.parametrize("apart", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("positives", [0.1, 0.5])
def test_without_noise_it_is_the_exact_auc_but_for_ties(positives: float, apart: float) -> None:
    data, model = people(5000, positives, apart), identity()
    found = evaluated(data, model, epsilon=100.0, noise=Silence()).metrics
    truth = exact(model, data)
    assert found is not None
    assert found.auc is not None
    assert truth.auc is not None
    assert found.auc.value == pytest.approx(truth.auc.value, abs=0.01)
    assert found.auc.low < truth.auc.value < found.auc.high


def test_other_figures_are_those_of_an_evaluation_without_noise() -> None:
    data, model = people(3000, 0.2, 2.0), identity(1.5)
    found = evaluated(data, model, epsilon=100.0, noise=Silence()).metrics
    truth = exact(model, data)
    assert found is not None
    assert found.class_names == ("no", "yes")
    pairs = [(found.balanced_accuracy, truth.balanced_accuracy), (found.f1, truth.f1)]
    pairs += zip(found.labels + found.predicted, truth.labels + truth.predicted, strict=True)
    for mine, plain in pairs:
        assert mine.value == pytest.approx(plain.value, abs=1e-4)
        assert mine.low < plain.value < mine.high


def test_without_the_counts_there_is_no_auc_and_for_other_tasks_nothing(population: Make) -> None:
    found = evaluated(people(500, 0.5, 1.0), identity(), auc=False)
    assert found.metrics is not None
    assert (found.metrics.auc, found.scores) == (None, None)
    data = population(users=100, classes=4)
    torch.manual_seed(0)
    many = evaluated(data, nn.Linear(5, 4), constraint=fnr_parity("sex", positive=2))
    assert (many.metrics, many.scores, many.scores_stddev) == (None, None, None)
    assert many.collapsed is None
    assert not many.collapse_in_doubt


REPETITIONS = 400


def area_of(ones: Floats, zeros: Floats) -> tuple[float, float]:
    """L and U of expected counts: all that the AUC may be."""
    m, n = ones.sum(), zeros.sum()
    below = np.cumsum(zeros)
    return float(ones @ (below - zeros) / (m * n)), float(ones @ below / (m * n))


def misses(kinds: Floats, chances: Floats, K: int, s: float, bound: float, seed: int) -> int:
    """How often the interval at 95% is without some AUC that the bins allow.

    Users are drawn from kinds of users; the AUC may be anything from L to U.
    """
    rng = np.random.default_rng(seed)
    truth = (chances @ kinds).reshape(2, BINS)
    low, high = area_of(truth[1], truth[0])
    drawn = rng.multinomial(K, chances, size=REPETITIONS).astype(np.float64) @ kinds
    released = drawn + s * rng.normal(size=drawn.shape)
    missed = 0
    for row in released:
        found = ReleasedScores(row.reshape(2, BINS), s, bound).area(0.95)
        missed += found.low > low or found.high < high
    return missed


@pytest.mark.parametrize("noise", [0.05, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("population", [30, 300, 3000])
def test_the_interval_covers_where_samples_of_a_user_are_all_alike(
    population: int, noise: float
) -> None:
    """Whichever AUC the bins allow for: L and U both lie in it.

    Fixed seeds; with others, a true coverage of exactly 95% would fail this with a chance of 1e-6
    for each of the shapes.
    """
    most = participations_of_one(0.05, REPETITIONS, 1e-6)
    place = np.arange(BINS)
    for positives in (0.05, 0.5):
        for apart, width in ((0.0, 6.0), (3.0, 3.0), (10.0, 3.0), (20.0, 2.0), (1.0, 0.3)):
            zeros = np.exp(-(((place - 8) / width) ** 2) / 2)
            ones = np.exp(-(((place - 8 - apart) / width) ** 2) / 2)
            chances = np.concatenate(
                [(1 - positives) * zeros / zeros.sum(), positives * ones / ones.sum()]
            )
            found = misses(2.0 * np.eye(2 * BINS), chances, population, 2.0 * noise, 2.0, 1)
            assert found <= most, (positives, apart, width)


@pytest.mark.parametrize("seed", range(6))
def test_the_interval_covers_for_users_of_all_kinds(seed: int) -> None:
    """Many samples or few, scaled or not, of both classes or one, alike or not."""
    rng = np.random.default_rng(seed)
    most = participations_of_one(0.05, REPETITIONS, 1e-6)
    for population, noise in ((40, 0.3), (400, 2.0), (4000, 0.8)):
        bound = float(rng.choice([1, 2, 5]))
        positives, apart = rng.choice([0.1, 0.5]), rng.choice([0.0, 4.0, 12.0])
        kinds = []
        for _ in range(40):
            size = int(rng.choice([1, 2, 3, 20]))
            y = rng.random(size) < positives
            shift = 4.0 * rng.normal() + (
                0.0 if rng.random() < 0.5 else 4.0 * rng.normal(size=size)
            )
            bins = np.clip(np.round(10 + apart * y + shift), 0, BINS - 1).astype(int)
            cells = np.bincount(y * BINS + bins, minlength=2 * BINS)
            kinds.append(cells * min(1.0, bound / size))
        chances = rng.dirichlet(np.full(len(kinds), 0.5))
        found = misses(np.array(kinds), chances, population, noise * bound, bound, seed)
        assert found <= most, (population, bound, positives, apart)


def test_the_whole_path_covers_the_auc_of_the_people_that_users_are_from() -> None:
    """P[N(√2, 1) > N(0, 1)] = Φ(√2/√2) = Φ(1)."""
    truth = NormalDist().cdf(1.0)
    model, runs, missed, widths = identity(), 100, 0, []
    for seed in range(runs):
        data = people(2000, 0.3, math.sqrt(2.0), seed)
        found = evaluated(data, model, epsilon=4.0, noise=SeededNoise(seed)).metrics
        assert found is not None
        assert found.auc is not None
        missed += not found.auc.low <= truth <= found.auc.high
        widths.append(found.auc.high - found.auc.low)
    assert missed <= participations_of_one(0.05, runs, 1e-6)
    assert np.mean(widths) < 0.2, "narrow enough to be of use"


def test_it_narrows_with_users_and_with_epsilon() -> None:
    def width(users: int, epsilon: float) -> float:
        found = evaluated(people(users, 0.3, 1.5), identity(), epsilon=epsilon).metrics
        assert found is not None
        assert found.auc is not None
        return found.auc.high - found.auc.low

    assert width(500, 1.0) > width(4000, 1.0) > width(32_000, 1.0)
    assert width(4000, 0.2) > width(4000, 1.0) > width(4000, 8.0)
    assert width(32_000, 8.0) < 0.08


@pytest.mark.parametrize("fill", [0.0, -5.0, 1e9])
def test_any_released_numbers_give_an_interval_that_makes_sense(fill: float) -> None:
    rng = np.random.default_rng(0)
    for counts in (np.full((2, BINS), fill), fill + 30.0 * rng.normal(size=(2, BINS))):
        found = ReleasedScores(counts, 10.0, 2.0).area(0.95)
        assert 0.0 <= found.low <= found.high <= 1.0
        assert math.isnan(found.value) or 0.0 <= found.value <= 1.0
    silent = ReleasedScores(np.zeros((2, BINS)), 10.0, 2.0).area(0.95)
    assert math.isnan(silent.value)
    assert (silent.low, silent.high) == (0.0, 1.0)


# Where it is shown


def test_it_is_said_in_words_and_json_and_read_back() -> None:
    found = evaluated(people(20_000, 0.11, 1.5), identity(1.0))
    assert found.metrics is not None
    assert f"AUC {found.metrics.auc}" in str(found)
    content = json.loads(json.dumps(found.as_dict()))
    assert content["metrics"]["auc"]["low"] == found.metrics.auc.low  # type: ignore[union-attr]
    assert content["score_bins"] == bin_ends()
    assert np.shape(content["scores"]) == (2, BINS)
    assert PrivateEvaluation.from_dict(content) == found
    shown = of_private(found)
    assert shown.metrics == found.metrics
    assert any("AUC 0." in line for line in balance_lines(shown))


def test_files_of_earlier_versions_have_none() -> None:
    old = PrivateEvaluation.from_dict(
        json.loads((SAMPLE / "evaluation-private.json").read_text(encoding="utf-8"))
    )
    assert (old.metrics, old.scores, old.collapsed) == (None, None, None)
    assert not old.collapse_in_doubt
    assert balance_lines(of_private(old)) == []


def test_a_model_that_says_the_same_of_everybody_is_named() -> None:
    data = people(20_000, 0.11, 1.0)
    silent = evaluated(data, identity(-4.0, 0.01))
    assert silent.collapsed is not None
    assert "predicts 'no' for" in silent.collapsed
    assert "COLLAPSED" in str(silent)
    assert silent.verdict_in_words.startswith("collapsed, so that its gap says nothing")
    assert silent.as_dict()["collapsed"] == silent.collapsed
    assert of_private(silent).collapsed == silent.collapsed
    blind = evaluated(people(20_000, 0.11, 0.0), identity(2.0), epsilon=8.0)
    assert blind.collapsed is not None
    assert "no better than chance" in blind.collapsed
    useful = evaluated(people(20_000, 0.11, 3.0), identity(0.5))
    assert useful.collapsed is None
    assert not useful.collapse_in_doubt


def test_that_it_cannot_be_told_is_said() -> None:
    found = evaluated(people(200, 0.11, 1.0), identity(-4.0, 0.01), epsilon=0.5)
    assert found.collapsed is None
    assert found.collapse_in_doubt
    assert IN_DOUBT in str(found)
    assert IN_DOUBT in balance_lines(of_private(found))
