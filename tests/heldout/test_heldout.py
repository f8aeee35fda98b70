"""Private evaluation: what is counted, what it costs, and whether its intervals hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fpfl import Attribute, FederatedDataset, Schema
from fpfl.aggregation import SeededNoise
from fpfl.fairness import (
    Constraint,
    Rate,
    accuracy_parity,
    demographic_parity,
    equal_error,
    equalized_odds,
    evaluate_predictions,
    fnr_parity,
)
from fpfl.heldout import HeldoutPlan, PrivateEvaluation, evaluate_privately, plan_heldout
from fpfl.heldout import plan as counting_module
from fpfl.heldout.estimates import Cells, Judge
from fpfl.heldout.intervals import Floats, Sums, difference_interval, rate_interval
from fpfl.privacy import gaussian_delta, gaussian_epsilon, participations_of_one
from fpfl.users.engine import predict

SEX = Attribute("sex", ("Female", "Male"))
RACE = Attribute("race", ("A", "B", "C"), unknown=True)

Make = Callable[..., FederatedDataset]


@dataclass(frozen=True)
class Silence:
    """No noise: to see what is counted."""

    seeded: bool = True

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Given:
    """Noise that was chosen before."""

    numbers: Tensor
    seeded: bool = True

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        assert self.numbers.shape == (size,)
        return self.numbers.round().long()


def linear(outputs: int = 1, features: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(features, outputs)


def flat(result: PrivateEvaluation) -> Floats:
    return np.array([list(kinds.values()) for kinds in result.released.values()])


def counted(
    data: FederatedDataset, constraint: Constraint, model: nn.Module, bound: float
) -> PrivateEvaluation:
    return evaluate_privately(
        model, data, constraint=constraint, epsilon=100.0, bound=bound, noise=Silence()
    )


# What is counted


def test_without_noise_and_scaling_the_figures_are_the_plain_ones(population: Make) -> None:
    data, model = population(users=200), linear()
    result = counted(data, equalized_odds("sex"), model, bound=20.0)
    plain = evaluate_predictions(
        predict(model, data.features, data.schema),
        data.labels,
        data.attributes,
        data.schema.attributes,
        constraint=equalized_odds("sex"),
        bootstrap=0,
    )
    assert flat(result).sum() == pytest.approx(len(data), abs=1e-3)
    gap = plain.gaps["constraint"]
    for d, mine in zip(gap.differences, result.gap.differences, strict=True):
        assert (d.rate, d.group) == (mine.rate, mine.group)
        assert mine.value == pytest.approx(d.value, abs=1e-4)
        assert mine.difference == pytest.approx(d.difference, abs=1e-4)
        assert result.rates[d.rate][d.group].value == pytest.approx(d.value, abs=1e-4)
    assert result.gap.worst_group == gap.worst_group == result.worst_group
    for group in ("overall", "sex=Female", "sex=Male"):
        accuracy = result.rates["accuracy"][group].value
        assert accuracy == pytest.approx(plain.rates["accuracy"][group], abs=1e-4)


def test_several_attributes_and_unknown_values_share_the_samples_out(population: Make) -> None:
    data = population(users=200, attributes=(SEX, RACE))
    constraint = fnr_parity("sex", "race", ("sex", "race"))
    result = counted(data, constraint, linear(), bound=20.0)
    released = {name: sum(kinds.values()) for name, kinds in result.released.items()}
    sex, race = data.attributes.T
    assert released["race not known"] == pytest.approx(int((race == -1).sum()), abs=1e-3)
    assert released["sex & race not known"] == pytest.approx(int((race == -1).sum()), abs=1e-3)
    both = int(((sex == 1) & (race == 2)).sum())
    assert released["sex=Male & race=C"] == pytest.approx(both, abs=1e-3)
    assert sum(released.values()) == pytest.approx(3 * len(data), abs=1e-2)
    overall = {d.overall for d in result.gap.differences}
    assert max(overall) - min(overall) < 1e-4, "every way of grouping has the same whole"


@pytest.mark.parametrize(
    ("classes", "constraint", "score"),
    [
        (4, accuracy_parity("sex"), "accuracy"),
        (4, fnr_parity("sex", positive=2), "accuracy"),
        (None, equal_error("sex", label_range=(-5.0, 5.0)), "squared error"),
    ],
)
def test_other_tasks_count_f_and_its_rest(
    population: Make, classes: int | None, constraint: Constraint, score: str
) -> None:
    data, model = population(users=150, classes=classes), linear(classes or 1)
    result = counted(data, constraint, model, bound=20.0)
    rate = constraint.rates[0]
    p = predict(model, data.features, data.schema)
    for number, group in enumerate(("sex=Female", "sex=Male")):
        here = (data.attributes[:, 0] == number) & rate.condition(data.labels)
        expected = float(rate.evaluate(p[here], data.labels[here]).mean())
        assert result.rates[rate.name][group].value == pytest.approx(expected, abs=1e-4)
    assert result.score == score
    assert not math.isnan(result.rates[score]["sex=Male"].value)


def test_a_rate_of_ones_own_follows_from_the_confusion_matrix(population: Make) -> None:
    """It is any function of prediction and label, with values between 0 and 1 too."""
    own = Rate(
        "regret",
        condition=lambda y: y >= 0,
        true=lambda p, y: torch.where(y == 1, 0.25, 1.0) * (p != y),
        surrogate=lambda s, y: s[..., 0],
    )
    data, model = population(users=150), linear()
    result = counted(data, Constraint((own,), ("sex",)), model, bound=20.0)
    p = predict(model, data.features, data.schema)
    value = own.evaluate(p, data.labels).mean()
    assert result.rates["regret"]["overall"].value == pytest.approx(float(value), abs=1e-4)
    assert set(result.released["sex=Male"]) == {"TP", "FN", "FP", "TN"}


def test_users_weigh_no_more_than_the_bound_and_move_the_counts_by_no_more_than_c(
    population: Make,
) -> None:
    data = population(users=40, mean=6.0, attributes=(SEX, RACE))
    model, constraint = linear(), fnr_parity()
    everyone = flat(counted(data, constraint, model, bound=2.0))
    furthest = 0.0
    for user in range(data.population):
        keep = np.delete(np.arange(data.population), user)
        moved = everyone - flat(counted(data.subset(keep), constraint, model, bound=2.0))
        size = int(data.sizes()[user])
        assert moved.sum() == pytest.approx(2 * min(size, 2.0), abs=1e-3)
        furthest = max(furthest, float(np.linalg.norm(moved)))
    plan = plan_heldout(data.schema, population=40, constraint=constraint, epsilon=1.0, bound=2.0)
    assert furthest <= plan.clip * (1 + 1e-4)
    assert plan.clip == pytest.approx(2.0 * math.sqrt(2 / 0.9)), "a tenth is the scores'"


# What must not depend on data


def test_lazy_populations_are_read_in_pieces(
    population: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = population(users=300), linear()
    data.save(tmp_path / "users")
    lazy = FederatedDataset.open(tmp_path / "users")
    constraint = fnr_parity("sex")
    once = counted(data, constraint, model, bound=2.0)
    for at_once, batch in ((7, 3), (10**6, 10**6)):
        monkeypatch.setattr(counting_module, "_AT_ONCE", at_once)
        monkeypatch.setattr(counting_module, "_BATCH", batch)
        assert np.allclose(flat(counted(lazy, constraint, model, bound=2.0)), flat(once))
    assert model.training, "left as it was"


@pytest.mark.parametrize("what", ["features", "labels", "attributes"])
def test_a_broken_user_sends_zero(population: Make, tmp_path: Path, what: str) -> None:
    data, model, constraint = population(users=50), linear(), fnr_parity("sex")
    user = int(data.sizes().argmax())
    data.save(tmp_path / "users")
    values = np.load(tmp_path / "users" / f"{what}.npy", mmap_mode="r+")
    first = int(data.offsets[user])
    if what == "features":
        values[first, 0] = np.inf
    else:
        values[first] = 9
    values.flush()
    broken = counted(FederatedDataset.open(tmp_path / "users"), constraint, model, bound=2.0)
    others = data.subset(np.delete(np.arange(50), user))
    assert np.allclose(flat(broken), flat(counted(others, constraint, model, 2.0)), atol=1e-3)


def test_a_sample_that_the_model_cannot_take_is_nobodys_business() -> None:
    """An index that an embedding does not have: that user sends zero, the others as before."""
    schema = Schema(shape=(1,), attributes=(SEX,), samples_per_user=2.0)
    rng = np.random.default_rng(0)
    x, y, a = rng.integers(0, 4, (60, 1)), rng.integers(0, 2, 60), rng.integers(0, 2, 60)
    users = np.repeat(np.arange(30), 2)
    model = nn.Sequential(nn.Embedding(4, 1), nn.Flatten())
    good = FederatedDataset.from_samples(x, y, a, schema, users)
    expected = counted(good.subset(np.arange(1, 30)), fnr_parity("sex"), model, 2.0)
    x[1] = 99
    bad = FederatedDataset.from_samples(x, y, a, schema, users)
    found = counted(bad, fnr_parity("sex"), model, 2.0)
    assert np.allclose(flat(found), flat(expected), atol=1e-3)


def test_nothing_but_the_noisy_counts_gets_out(population: Make) -> None:
    """Two populations, with noise that makes their counts equal, give the same word for word."""
    model, constraint = linear(), fnr_parity("sex")
    one, other = population(users=80, seed=1), population(users=80, seed=2)
    plan = plan_heldout(one.schema, population=80, constraint=constraint, epsilon=1.0)
    step = plan.noise_stddev / 2**24
    differ = flat(plan.release(model, one, Silence())) - flat(plan.release(model, other, Silence()))
    assert np.abs(differ).max() > 1.0
    apart = [np.array(plan.release(model, each, Silence()).scores) for each in (one, other)]
    differ = np.concatenate([differ.flatten(), plan.scores * (apart[0] - apart[1]).flatten()])
    noise = SeededNoise(3).integers(plan.size, 0, device=torch.device("cpu"))
    first = plan.release(model, one, Given(noise))
    second = plan.release(model, other, Given(noise + torch.from_numpy(differ / step)))
    assert first.as_dict() == second.as_dict()
    assert str(first) == str(second)


# What it costs


def make_plan(**changes: object) -> HeldoutPlan:
    settings = {
        "population": 1000,
        "constraint": fnr_parity("sex"),
        "epsilon": 1.5,
        "bound": 3.0,
    }
    schema = Schema(shape=(1,), attributes=(SEX,))
    return plan_heldout(schema, **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("neighbours", ["zero-out", "add-remove", "replace-one"])
def test_epsilon_is_exact(neighbours: str) -> None:
    plan = make_plan(neighbours=neighbours)
    reach = 2 if neighbours == "replace-one" else 1
    assert plan.delta == pytest.approx(1e-4)
    assert plan.epsilon <= 1.5
    assert plan.epsilon == pytest.approx(1.5, rel=1e-6)
    assert plan.epsilon == gaussian_epsilon(plan.noise_multiplier, 1, 1e-4, sensitivity=reach)
    assert gaussian_delta(1.5, reach / plan.noise_multiplier) == pytest.approx(1e-4, rel=1e-6)
    assert plan.clip == pytest.approx(3.0 / math.sqrt(0.9))
    assert make_plan(neighbours=neighbours, auc=False).clip == 3.0
    # A little more than C σ, for the grid that the noise is on.
    assert 1.0 <= plan.noise_stddev / (plan.clip * plan.noise_multiplier) < 1.01
    assert plan.sensitivity == plan.mechanism.sensitivity == reach
    assert plan.mechanism.noise_multiplier == plan.noise_multiplier


def test_the_noise_is_as_large_as_is_said(population: Make) -> None:
    data = population(users=60, attributes=(SEX, RACE))
    model, constraint = linear(), equalized_odds()
    plan = plan_heldout(data.schema, population=60, constraint=constraint, epsilon=1.0, bound=2.0)
    quiet = flat(plan.release(model, data, Silence()))
    noise = np.stack(
        [flat(plan.release(model, data, SeededNoise(seed))) - quiet for seed in range(40)]
    )
    # 960 numbers: their standard deviation is within 10 % but for a chance of 1e-5.
    assert noise.std() == pytest.approx(plan.noise_stddev, rel=0.1)
    assert abs(noise.mean()) < 0.15 * plan.noise_stddev
    # The system's noise is another one each time.
    once, twice = (flat(plan.release(model, data)) for _ in range(2))
    assert not np.allclose(once, twice)


def test_the_statement_says_what_is_protected_and_what_adds_up(population: Make) -> None:
    plan = make_plan(neighbours="replace-one")
    text = "\n".join(plan.statement(seeded=False))
    assert "1.500 at δ = 0.0001" in text
    assert "any other data in its place" in text
    assert "by 2C at most" in text
    assert "other people than the training users" in text
    assert "3 samples at most" in text
    assert "simulation" not in text
    assert "simulation" in plan.statement(seeded=True)[0]
    result = counted(population(users=30), fnr_parity("sex"), linear(), 2.0)
    assert result.seeded
    assert result.statement()[0].startswith("Seeded noise")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound": None}, "bound is None and the schema declares samples_per_user = None"),
        ({"bound": -1.0}, "bound is -1.0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"population": 0}, "population is 0"),
        ({"delta": 0.01}, "delta must be below"),
        ({"neighbours": "friends"}, "neighbours must be one of"),
        ({"constraint": equal_error("sex", label_range=(0.0, 1.0))}, "is for regression"),
        ({"constraint": fnr_parity("age")}, "there is no attribute 'age'"),
    ],
)
def test_bad_settings_are_refused_before_data_is_touched(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**changes)


def test_a_plan_is_for_its_own_users_and_schema(population: Make) -> None:
    data = population(users=30)
    plan = plan_heldout(data.schema, population=31, constraint=fnr_parity("sex"), epsilon=1.0)
    with pytest.raises(ValueError, match=r"the data has 30 users; the plan was made for 31"):
        plan.check(linear(), data)
    with pytest.raises(ValueError, match="different schemas: one declares classes"):
        plan.release(linear(4), population(users=31, classes=4))
    with pytest.raises(ValueError, match="expects"):
        plan.release(linear(3), population(users=31))


# Whether the intervals hold. Fixed seeds; with others, a true coverage of exactly 95 % would fail
# one of these tests with a chance of 1e-6 for each population.

REPETITIONS = 4000


def totals_of(
    users: Floats, chances: Floats, population: int, stddev: float, rng: np.random.Generator
) -> Floats:
    """Released (F_a, M_a, F_b, M_b) of K users drawn from some kinds of users, many times."""
    drawn = rng.multinomial(population, chances, size=REPETITIONS).astype(np.float64) @ users
    return drawn + stddev * rng.normal(size=drawn.shape)


def missed(released: Floats, truth: Floats, stddev: float, bound: float) -> tuple[int, int]:
    """How often a difference's interval, and a rate's, miss the truth at 95 %."""
    Fa, Ma, Fb, _ = truth
    v, overall = Fa / (Fa + Ma), (Fa + Fb) / truth.sum()
    noise = np.full(len(released), stddev**2)
    group = Sums(released[:, 0], released[:, 1], noise, noise)
    rest = Sums(released[:, 2], released[:, 3], noise, noise)
    low, high = difference_interval(group, rest, 0.05, bound)
    differences = (low > overall - v) | (high < overall - v)
    low, high = rate_interval(group, 0.05, bound)
    return int(differences.sum()), int(((low > v) | (high < v)).sum())


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5, 4.0])
@pytest.mark.parametrize("population", [12, 60, 400, 5000])
def test_intervals_cover_the_truth_where_it_is_hardest(population: int, noise: float) -> None:
    """Users whose B samples are all alike: the variance is what the formula bounds it by."""
    rng = np.random.default_rng(population)
    most = participations_of_one(0.05, REPETITIONS, 1e-6)
    for share in (0.03, 0.3, 0.8):
        for v, w in ((0.0, 0.02), (0.01, 0.01), (0.1, 0.1), (0.5, 0.5), (0.95, 0.7)):
            chances = np.array([share * v, share * (1 - v), (1 - share) * w, (1 - share) * (1 - w)])
            users, s = 2.0 * np.eye(4), 2.0 * noise
            released = totals_of(users, chances, population, s, rng)
            differences, rates = missed(released, chances @ users, s, 2.0)
            assert differences <= most, (share, v, w)
            assert rates <= most, (share, v, w)


@pytest.mark.parametrize("seed", range(12))
def test_intervals_cover_the_truth_for_users_of_all_kinds(seed: int) -> None:
    """Many samples or few, scaled or not, in one group or both, alike or not."""
    rng = np.random.default_rng(seed)
    most = participations_of_one(0.05, REPETITIONS, 1e-6)
    for population, noise in ((20, 0.3), (150, 2.0), (2000, 0.8)):
        bound = float(rng.choice([1, 2, 5]))
        v, w, share = rng.choice([0.02, 0.2, 0.5, 0.9], 3)
        kinds = []
        for _ in range(30):
            size = rng.choice([1, 2, 3, 20])
            here = rng.random(size) < (share if rng.random() < 0.5 else rng.integers(2))
            alike = rng.random() < 0.5
            draws = np.full(size, rng.random()) if alike else rng.random(size)
            wrong = draws < np.where(here, v, w)
            cells = [here & wrong, here & ~wrong, ~here & wrong, ~here & ~wrong]
            kinds.append(np.array([cell.sum() for cell in cells]) * min(1.0, bound / size))
        users = np.array([*kinds, np.zeros(4)])
        chances = rng.dirichlet(np.full(len(users), 0.5))
        released = totals_of(users, chances, population, noise * bound, rng)
        differences, rates = missed(released, chances @ users, noise * bound, bound)
        assert differences <= most
        assert rates <= most


def people(
    population: int,
    wrong: tuple[float, float],
    seed: int,
    sizes: tuple[int, int] = (1, 1),
    large: float = 0.0,
) -> FederatedDataset:
    """Users whose samples are all positive and alike; three in ten are women.

    ``wrong`` is how many of the women, and of the men, are told wrongly; those with many samples
    (the second size) are so with ``large`` more.
    """
    rng = np.random.default_rng(seed)
    men, many = rng.random(population) < 0.7, rng.random(population) < 0.5
    errs = rng.random(population) < np.where(men, wrong[1], wrong[0]) + large * many
    n = np.where(many, sizes[1], sizes[0])
    return FederatedDataset.from_samples(
        np.repeat(np.where(errs, -1.0, 1.0), n)[:, None],
        np.ones(n.sum()),
        np.repeat(men.astype(np.int64), n),
        Schema(shape=(1,), attributes=(SEX,), population=population),
        np.repeat(np.arange(population), n),
    )


def sign() -> nn.Module:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_the_whole_path_covers_the_rates_of_scaled_counts() -> None:
    """Users with four samples weigh two, and err more often: the rate is neither the plain one nor
    that of users who weigh one each."""
    model, misses, runs = sign(), 0, 150
    # Half of the users weigh 1, the other half 2 and err with 0.3 more: 0.3 · 2/3 on average.
    women, men = 0.3 + 0.2, 0.1 + 0.2
    D = 0.7 * (men - women)
    for seed in range(runs):
        data = people(400, (0.3, 0.1), seed, sizes=(1, 4), large=0.3)
        result = evaluate_privately(
            model,
            data,
            constraint=fnr_parity("sex"),
            epsilon=4.0,
            bound=2.0,
            noise=SeededNoise(seed),
        )
        first = result.gap.differences[0]
        assert first.group == "sex=Female"
        misses += not first.low <= D <= first.high
    assert misses <= participations_of_one(0.05, runs, 1e-6)


def test_all_intervals_hold_at_once() -> None:
    """Two rates and five groups of two attributes: seldom is any of the ten missed."""
    rng, runs, users = np.random.default_rng(0), 500, 6000
    cells = Cells(Schema(shape=(1,), attributes=(SEX, RACE)), equalized_odds())
    assert cells.parts[-1] == "race not known"
    assert cells.comparisons == 2 * (1 + 3)
    judge, misses = Judge(cells, 1.0, 0.95), 0
    kinds = np.array([0.3, 0.1, 0.15, 0.45])  # of everyone alike: every difference is 0
    for _ in range(runs):
        people = rng.multinomial(users, np.outer(np.full(8, 1 / 8), kinds).ravel())
        sex_race = people.reshape(2, 4, 4)
        released = np.concatenate([sex_race.sum(axis=1), sex_race.sum(axis=0)])
        gap = judge.gap(released + rng.normal(size=released.shape), 1.0)
        assert len(gap.differences) == 10
        assert all(d.low <= d.difference <= d.high for d in gap.differences)
        misses += gap.low > 0.0
    assert misses <= participations_of_one(0.05, runs, 1e-6)


def test_rare_errors_do_not_break_small_error_probabilities() -> None:
    """With many groups each interval may miss rarely, and a handful of errors is skewed."""
    rng, error, draws = np.random.default_rng(0), 0.002, 200_000
    for v in (0.001, 0.003, 0.01):
        F = rng.binomial(150, v, draws)
        noise = np.full(draws, 0.1**2)
        F_hat, M_hat = (n + 0.1 * rng.normal(size=draws) for n in (F, 150 - F))
        low, high = rate_interval(Sums(F_hat, M_hat, noise, noise), error, 1.0)
        missed = int(((low > v) | (high < v)).sum())
        assert missed <= participations_of_one(error, draws, 1e-6), v


def width(population: int, epsilon: float, bound: float = 1.0) -> float:
    results = [
        evaluate_privately(
            sign(),
            people(population, (0.2, 0.2), seed),
            constraint=fnr_parity("sex"),
            epsilon=epsilon,
            delta=1e-5,
            bound=bound,
            noise=SeededNoise(seed),
        )
        for seed in range(3)
    ]
    return float(np.mean([d.high - d.low for r in results for d in r.gap.differences]))


def test_intervals_narrow_with_users_and_with_epsilon() -> None:
    by_users = [width(users, 1.0) for users in (300, 1200, 4800)]
    assert by_users[0] > 1.5 * by_users[1] > 1.5 * 1.5 * by_users[2]
    by_epsilon = [width(1200, epsilon) for epsilon in (0.2, 1.0, 5.0)]
    assert by_epsilon[0] > by_epsilon[1] > by_epsilon[2]
    assert width(1200, 1.0, bound=4.0) > by_users[1], "a larger bound than needed costs"


# The verdict


def judged(
    population: int, wrong: tuple[float, float], epsilon: float = 2.0, tolerance: float = 0.05
) -> PrivateEvaluation:
    return evaluate_privately(
        sign(),
        people(population, wrong, 5),
        constraint=fnr_parity("sex", tolerance=tolerance),
        epsilon=epsilon,
        bound=1.0,
        noise=SeededNoise(0),
    )


def test_verdicts() -> None:
    assert judged(20_000, (0.2, 0.2)).verdict == "within"
    unfair = judged(20_000, (0.4, 0.1))
    assert unfair.verdict == "outside"
    assert unfair.worst_group == "sex=Female"
    assert unfair.gap.low > 0.05
    assert unfair.advice is None
    assert unfair.verdict_in_words == "outside α = 0.05 at 95%"


def test_where_it_cannot_tell_it_says_what_would() -> None:
    few = judged(400, (0.2, 0.2))
    assert few.verdict == "cannot tell"
    assert few.advice is not None
    assert "a larger ε alone is not enough" in few.advice
    needed = int(few.advice.split("about ")[1].split(" ")[0].replace(",", ""))
    assert judged(2 * needed, (0.2, 0.2)).verdict == "within"
    noisy = judged(3000, (0.2, 0.2), epsilon=0.02, tolerance=0.15)
    assert noisy.verdict == "cannot tell"
    assert "times the ε" in str(noisy.advice)
    close = judged(40_000, (0.2714, 0.2))
    assert close.verdict == "cannot tell"
    assert "close to α" in str(close.advice)
    assert "No number of users" in str(judged(400, (0.2, 0.2), tolerance=0.0).advice)


def test_silence_is_not_fairness() -> None:
    """A group that hardly anybody is in has no value, the whole of [0, 1] and stops "within"."""
    data = people(5000, (0.2, 0.2), 0)
    attribute = Attribute("sex", ("Female", "Male", "Other"))
    schema = Schema(shape=(1,), attributes=(attribute,), population=5000)
    data = FederatedDataset(data.features, data.labels, data.attributes, data.offsets, schema)
    result = evaluate_privately(
        sign(),
        data,
        constraint=fnr_parity("sex", tolerance=0.9),
        epsilon=1.0,
        bound=1.0,
        noise=SeededNoise(1),
    )
    assert result.gap.unknown_groups == ("sex=Other",)
    assert result.verdict == "cannot tell"
    estimate = result.rates["FNR"]["sex=Other"]
    assert math.isnan(estimate.value)
    assert (estimate.low, estimate.high) == (0.0, 1.0)
    assert "not known" in result.verdict_in_words
    assert result.as_dict()["rates"]["FNR"]["sex=Other"]["value"] is None


@pytest.mark.parametrize("counts", [(0, 0), (-40, -3), (-40, 30), (1e9, 0), (0, 1e9), (3, 1e9)])
def test_any_released_numbers_give_intervals_that_make_sense(counts: tuple[float, float]) -> None:
    F, M = (np.array([float(value)]) for value in counts)
    noise = np.array([100.0])
    rest = Sums(np.array([50.0]), np.array([500.0]), noise, noise)
    for error in (0.5, 0.05, 1e-6):
        low, high = rate_interval(Sums(F, M, noise, noise), error, 2.0)
        assert 0.0 <= low[0] <= high[0] <= 1.0
        low, high = difference_interval(Sums(F, M, noise, noise), rest, error, 2.0)
        assert -1.0 <= low[0] <= high[0] <= 1.0


def test_results_read_well_and_are_json(population: Make) -> None:
    data = population(users=2000)
    result = evaluate_privately(
        linear(), data, constraint=demographic_parity("sex"), epsilon=1.0, noise=SeededNoise(0)
    )
    text = str(result)
    assert text.startswith("2,000 held-out users, evaluated under ε = 1.0000, δ = 5e-05")
    assert "accuracy 0." in text
    assert "demographic parity: " in text
    content = json.loads(json.dumps(result.as_dict()))
    assert content["epsilon"] == pytest.approx(1.0)
    assert content["mechanism"] == {
        "sampler": "all",
        "population": 2000,
        "cohort": 2000,
        "noise_multiplier": result.noise_multiplier,
        "neighbours": "zero-out",
    }
    assert content["gap"]["worst_group"] in ("sex=Female", "sex=Male")
    assert content["statement"] == result.statement()
