"""Gaps equal fairlearn's, their intervals cover, and the verdict follows from the interval.

Where a test draws at random its seed is fixed, and its limit is set for a false alarm of the
stated probability had the seed been any other.
"""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.fairness import resampling as user_bootstrap
from fpfl.fairness.constraints import (
    Constraint,
    accuracy_parity,
    demographic_parity,
    equal_error,
    equalized_odds,
    fnr_parity,
)
from fpfl.fairness.gaps import Difference, GapEstimate, evaluate_predictions
from fpfl.fairness.groups import Attribute
from fpfl.fairness.rates import Rate, false_negative_rate

SEX = Attribute("sex", ("Female", "Male"))
FALSE_ALARM = 1e-6
Z = 4.9  # of a normal number to be further out: 1e-6


def as_tensors(*arrays):
    return tuple(torch.as_tensor(np.asarray(array)) for array in arrays)


def draw(rng, n, share=(0.3, 0.7), base=(0.2, 0.4), fnr=(0.4, 0.3), fpr=(0.1, 0.1)):
    """Samples of several groups of one attribute, with known rates in the population."""
    group = rng.choice(len(share), n, p=share)
    y = (rng.random(n) < np.asarray(base)[group]).astype(np.int64)
    wrong = rng.random(n) < np.where(y == 1, np.asarray(fnr)[group], np.asarray(fpr)[group])
    return as_tensors(np.where(wrong, 1 - y, y), y, group[:, None])


def true_gaps(share, base, fnr, fpr):
    share, base, fnr, fpr = (np.asarray(x) for x in (share, base, fnr, fpr))

    def gap(rate, weight):
        return np.abs((rate * weight).sum() / weight.sum() - rate).max()

    hit, false = base * (1 - fnr), (1 - base) * fpr
    fnr_gap = gap(fnr, share * base)
    return {
        "fnr": fnr_gap,
        "eo": max(fnr_gap, gap(fpr, share * (1 - base))),
        "demp": gap(hit + false, share),
        "pp": gap(hit / (hit + false), share * (hit + false)),
        "accuracy": gap(1 - base * fnr - false, share),
    }


def most_misses(trials, probability):
    """The smallest k that Bin(trials, probability) exceeds with probability FALSE_ALARM or less."""
    tail, k = 1.0, -1
    while tail > FALSE_ALARM:
        k += 1
        tail -= math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k)
    return k


def within(evaluation, truth):
    return {
        name: evaluation.gaps[name].low <= value <= evaluation.gaps[name].high
        for name, value in truth.items()
    }


# The values


def fairlearn_metrics():
    metrics = pytest.importorskip("fairlearn.metrics")
    sklearn = pytest.importorskip("sklearn.metrics")
    return {
        "accuracy": sklearn.accuracy_score,
        "FNR": metrics.false_negative_rate,
        "FPR": metrics.false_positive_rate,
        "selection rate": metrics.selection_rate,
        "precision": sklearn.precision_score,
    }


GAP_OF = {
    "accuracy": "accuracy",
    "FNR": "fnr",
    "selection rate": "demp",
    "precision": "pp",
}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 200),
    first=st.integers(2, 5),
    second=st.integers(2, 3),
    grouping=st.sampled_from(["first", "second", "intersection"]),
)
def test_equals_fairlearn(seed, n, first, second, grouping):
    metrics = fairlearn_metrics()
    rng = np.random.default_rng(seed)
    # One sample of each sort in each cell: a rate that nobody counts in, fairlearn calls 0.
    cells = np.array(list(np.ndindex(2, 2, first, second)))
    drawn = np.stack([rng.integers(0, k, n) for k in (2, 2, first, second)], axis=1)
    p, y, a, b = np.concatenate([cells, drawn]).T
    declared = [
        Attribute("a", tuple("vwxyz"[:first])),
        Attribute("b", tuple("rst"[:second])),
    ]
    by = {"first": ["a"], "second": ["b"], "intersection": [("a", "b")]}[grouping]
    column = {"first": a, "second": b, "intersection": a * second + b}[grouping]
    frame = pytest.importorskip("fairlearn.metrics").MetricFrame(
        metrics=metrics, y_true=y, y_pred=p, sensitive_features=column
    )
    difference = frame.difference(method="to_overall")

    ours = evaluate_predictions(
        *as_tensors(p, y, np.stack([a, b], axis=1)), declared, by=by, bootstrap=0
    )
    for metric in metrics:
        names = [name for name in ours.rates[metric] if name != "overall"]
        assert ours.rates[metric]["overall"] == pytest.approx(frame.overall[metric], abs=1e-12)
        for code, name in enumerate(names):
            expected = frame.by_group[metric][code]
            assert ours.rates[metric][name] == pytest.approx(expected, abs=1e-12)
    for metric, gap in GAP_OF.items():
        assert ours.gaps[gap].value == pytest.approx(difference[metric], abs=1e-12)
    odds = max(difference["FNR"], difference["FPR"])
    assert ours.gaps["eo"].value == pytest.approx(odds, abs=1e-12)


def test_unknown_counts_overall_and_is_no_group():
    rng = np.random.default_rng(0)
    p, y, a = draw(rng, 300)
    a[:60] = -1
    sex = Attribute("sex", SEX.values, unknown=True)
    found = evaluate_predictions(p, y, a, [sex], bootstrap=0)
    assert list(found.rates["FNR"]) == ["overall", "sex=Female", "sex=Male"]
    positive = y == 1
    overall = float((p[positive] == 0).double().mean())
    assert found.rates["FNR"]["overall"] == pytest.approx(overall, abs=1e-12)
    worst = 0.0
    for code, name in enumerate(("sex=Female", "sex=Male")):
        chosen = positive & (a[:, 0] == code)
        value = float((p[chosen] == 0).double().mean())
        assert found.rates["FNR"][name] == pytest.approx(value, abs=1e-12)
        assert found.gaps["fnr"].counts["FNR"][name] == int(chosen.sum())
        worst = max(worst, abs(overall - value))
    assert found.gaps["fnr"].value == pytest.approx(worst, abs=1e-12)


def test_a_group_without_samples_is_left_out():
    race = Attribute("race", ("A", "B", "C"))
    p, y, a = as_tensors([0, 1, 1, 0], [1, 1, 1, 0], [[0], [0], [1], [2]])
    found = evaluate_predictions(p, y, a, [race], constraint=fnr_parity())
    gap = found.gaps["fnr"]
    assert math.isnan(found.rates["FNR"]["race=C"])
    assert gap.counts["FNR"] == {"race=A": 2, "race=B": 1, "race=C": 0}
    assert gap.value == pytest.approx(1 / 3)
    assert gap.worst_group == "race=B"
    assert gap.unknown_groups == ("race=C",)
    assert 0 <= gap.low <= gap.value <= gap.high
    assert "not judged, having no sample: race=C" in found.verdict_in_words


def test_a_rate_without_samples_is_nan():
    p, y, a = as_tensors([0, 1, 1], [0, 0, 0], [[0], [0], [1]])
    found = evaluate_predictions(p, y, a, [SEX], constraint=fnr_parity())
    gap = found.gaps["fnr"]
    assert math.isnan(found.rates["FNR"]["overall"])
    assert math.isnan(gap.value)
    assert math.isnan(gap.low)
    assert gap.worst is None
    assert found.verdict == "cannot tell"
    assert "no group has a sample" in str(found)
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_trivial_classifier_is_fair_and_its_accuracy_is_beside_it():
    _, y, a = draw(np.random.default_rng(0), 2000)
    found = evaluate_predictions(torch.zeros_like(y), y, a, [SEX], constraint=fnr_parity())
    gap = found.gaps["fnr"]
    assert gap.overall == {"FNR": 1.0}
    assert gap.value == gap.low == 0.0
    assert 0.0 < gap.high < 0.05  # nobody was predicted positive among so many, not: nobody can be
    line = next(line for line in str(found).splitlines() if line.startswith("fnr"))
    assert f"{found.accuracy:.3f}" in line


def test_many_classes():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 500)
    p = np.where(rng.random(500) < 0.7, y, rng.integers(0, 4, 500))
    a = rng.integers(0, 2, (500, 1))
    found = evaluate_predictions(*as_tensors(p, y, a), [SEX], classes=4, bootstrap=50)
    assert list(found.gaps) == ["accuracy", *(f"recall[{k}]" for k in range(4))]
    assert found.accuracy == pytest.approx((p == y).mean(), abs=1e-12)
    for k in range(4):
        overall = (p[y == k] == k).mean()
        group = [(p[(y == k) & (a[:, 0] == code)] == k).mean() for code in (0, 1)]
        expected = max(abs(overall - value) for value in group)
        assert found.gaps[f"recall[{k}]"].value == pytest.approx(expected, abs=1e-12)


def test_the_text_of_very_many_classes_stays_short():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 62, 3000)
    p = np.where(rng.random(3000) < 0.7, y, rng.integers(0, 62, 3000))
    a = rng.integers(0, 2, (3000, 1))
    found = evaluate_predictions(*as_tensors(p, y, a), [SEX], classes=62, bootstrap=20)
    assert len(found.gaps) == 63
    assert len(str(found).splitlines()) < 20
    assert "51 more in .gaps" in str(found)


def test_regression_in_fractions_of_the_range():
    rng = np.random.default_rng(0)
    y = rng.uniform(-5, 15, 400)
    p = np.clip(y + rng.normal(size=400), -5, 15)
    a = rng.integers(0, 2, (400, 1))
    found = evaluate_predictions(
        *as_tensors(p, y, a),
        [SEX],
        classes=None,
        label_range=(-5, 15),
        constraint=equal_error("sex", label_range=(-5, 15)),
        bootstrap=200,
    )
    of = {
        "squared error": ((p - y) / 20) ** 2,
        "absolute error": np.abs(p - y) / 20,
        "mean prediction": (p + 5) / 20,
    }
    assert found.accuracy is None
    assert found.error == pytest.approx(of["absolute error"].mean(), abs=1e-12)
    assert found.error_interval[0] < found.error < found.error_interval[1]
    for name, f in of.items():
        gap = max(abs(f.mean() - f[a[:, 0] == code].mean()) for code in (0, 1))
        assert found.gaps[name].value == pytest.approx(gap, abs=1e-12)
    assert found.gaps["constraint"].value == found.gaps["squared error"].value
    assert "absolute error" in str(found)
    json.dumps(found.as_dict(), allow_nan=False)


def test_without_attributes_there_are_no_gaps():
    p, y, a = draw(np.random.default_rng(0), 100)
    found = evaluate_predictions(p, y, a[:, :0], [])
    assert found.gaps == {}
    assert list(found.rates["FNR"]) == ["overall"]
    assert found.accuracy == pytest.approx(float((p == y).double().mean()))
    assert found.accuracy_interval[0] < found.accuracy < found.accuracy_interval[1]
    assert "accuracy" in str(found)


def test_the_constraint_has_groups_and_rates_of_its_own():
    rng = np.random.default_rng(0)
    p, y, a = draw(rng, 500)
    a = torch.cat([a, torch.as_tensor(rng.integers(0, 3, (500, 1)))], dim=1)
    declared = [SEX, Attribute("race", ("A", "B", "C"))]
    swapped = Constraint((false_negative_rate(positive=0),), by=(("sex", "race"),))
    found = evaluate_predictions(p, y, a, declared, by=["race"], constraint=swapped, bootstrap=100)
    gap = found.gaps["constraint"]
    assert len(gap.differences) == 6
    assert gap.overall["FNR"] == found.rates["FPR"]["overall"] != found.rates["FNR"]["overall"]
    assert set(found.gaps["fnr"].values["FNR"]) == {"race=A", "race=B", "race=C"}

    odds = evaluate_predictions(p, y, a, declared, constraint=equalized_odds(), bootstrap=100)
    assert odds.gaps["constraint"].differences == odds.gaps["eo"].differences


def test_a_rate_of_ones_own():
    p, y, a = draw(np.random.default_rng(0), 500)
    half = Rate("half", lambda y: y >= 0, lambda p, y: 0.5 * p, lambda s, y: 0.5 * s[..., 1])
    found = evaluate_predictions(p, y, a, [SEX], constraint=Constraint((half,)), bootstrap=0)
    assert found.gaps["constraint"].value == pytest.approx(found.gaps["demp"].value / 2)


def test_so_many_attributes_that_their_codes_do_not_fit():
    rng = np.random.default_rng(0)
    p, y, _ = draw(rng, 200)
    declared = [Attribute(f"a{i}", tuple(map(str, range(9)))) for i in range(25)]
    a = torch.as_tensor(rng.integers(0, 9, (200, 25)))
    found = evaluate_predictions(p, y, a, declared, bootstrap=0)
    for column, code in ((0, 0), (24, 8)):
        value = float(p[a[:, column] == code].double().mean())
        assert found.rates["selection rate"][f"a{column}={code}"] == pytest.approx(value)


# The intervals

SCENARIOS = {
    "unfair": (
        {"share": (0.3, 0.7), "base": (0.2, 0.4), "fnr": (0.4, 0.3), "fpr": (0.1, 0.2)},
        1500,
    ),
    "fair": ({"share": (0.3, 0.7), "base": (0.3, 0.3), "fnr": (0.3, 0.3), "fpr": (0.1, 0.1)}, 1500),
    # Five positives in the small group, and mostly no error among them.
    "tiny group": (
        {"share": (0.04, 0.96), "base": (0.3, 0.3), "fnr": (0.15, 0.1), "fpr": (0.05, 0.1)},
        400,
    ),
    "rare errors": (
        {"share": (0.3, 0.7), "base": (0.3, 0.3), "fnr": (0.01, 0.001), "fpr": (0.002, 0.002)},
        1000,
    ),
    # Eighteen positives in the small group: often no error among them, and the others' interval
    # must still allow for those that nobody saw.
    "small group": (
        {"share": (0.1, 0.9), "base": (0.3, 0.3), "fnr": (0.1, 0.1), "fpr": (0.1, 0.1)},
        600,
    ),
    # Ten comparisons (twenty for eo), of which 300 replicates have too few in each tail.
    "many groups": (
        {
            "share": (0.1,) * 10,
            "base": (0.4,) * 10,
            "fnr": tuple(np.linspace(0.2, 0.4, 10)),
            "fpr": (0.2,) * 10,
        },
        3000,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_coverage(scenario):
    population, n = SCENARIOS[scenario]
    truth = true_gaps(**population)
    declared = [Attribute("g", tuple(map(str, range(len(population["share"])))))]
    rng = np.random.default_rng(1)
    trials = 200
    missed = dict.fromkeys([*truth, "accuracy itself"], 0)
    share, base, fnr, fpr = (np.asarray(population[x]) for x in ("share", "base", "fnr", "fpr"))
    exact = 1 - share @ (base * fnr + (1 - base) * fpr)
    for trial in range(trials):
        found = evaluate_predictions(
            *draw(rng, n, **population), declared, bootstrap=300, seed=trial
        )
        for name, covered in within(found, truth).items():
            missed[name] += not covered
        low, high = found.accuracy_interval
        missed["accuracy itself"] += not low <= exact <= high
    limit = most_misses(trials, 0.05)
    assert limit < 0.15 * trials  # the limit itself must be worth something
    assert max(missed.values()) <= limit, missed


def test_coverage_when_samples_of_a_user_are_alike():
    population, n = SCENARIOS["unfair"]
    truth = true_gaps(**population)
    rng = np.random.default_rng(2)
    users = torch.arange(n).repeat_interleave(4)
    trials, missed, missed_without = 200, 0, 0
    for trial in range(trials):
        data = [x.repeat_interleave(4, dim=0) for x in draw(rng, n, **population)]
        with_users = evaluate_predictions(*data, [SEX], users=users, bootstrap=200, seed=trial)
        without = evaluate_predictions(*data, [SEX], bootstrap=200, seed=trial)
        missed += not within(with_users, truth)["fnr"]
        missed_without += not within(without, truth)["fnr"]
    assert missed <= most_misses(trials, 0.05)
    assert missed_without > most_misses(trials, 0.05)


def test_copies_widen_the_interval():
    p, y, a = draw(np.random.default_rng(0), 500)
    once = evaluate_predictions(p, y, a, [SEX])
    copies = [x.repeat_interleave(9, dim=0) for x in (p, y, a)]
    as_samples = evaluate_predictions(*copies, [SEX])
    as_users = evaluate_predictions(*copies, [SEX], users=torch.arange(500).repeat_interleave(9))
    for name in once.gaps:
        assert as_samples.gaps[name].value == pytest.approx(once.gaps[name].value)
        widths = [
            [d.high - d.low for d in found.gaps[name].differences]
            for found in (as_users, as_samples, once)
        ]
        # Nine copies would make the intervals three times too narrow. A percentile of 1,000
        # replicates is within a few per cent of its limit: 2 and 1.5 leave room.
        for with_users, with_samples, single in zip(*widths, strict=True):
            assert with_users > 2 * with_samples
            assert single / 1.5 < with_users < 1.5 * single
    assert as_users.users == 500
    assert as_users.samples == 4500


def test_one_user_with_nearly_all_samples_is_one_user():
    _, y, a = draw(np.random.default_rng(0), 1000, share=(0.5, 0.5))
    users = torch.where(a[:, 0] == 0, 0, torch.arange(1000) + 1)
    found = evaluate_predictions(y, y, a, [SEX], users=users, constraint=fnr_parity())
    assert found.gaps["fnr"].value == 0.0
    assert found.gaps["fnr"].high > 0.4  # all women's samples are one person's
    assert found.verdict == "cannot tell"


def test_agreement_of_a_few_proves_nothing():
    y = torch.ones(504, dtype=torch.int64)
    a = torch.cat([torch.zeros(4), torch.ones(500)]).long().unsqueeze(1)
    found = evaluate_predictions(y, y, a, [SEX], constraint=fnr_parity())
    (women, men) = found.gaps["fnr"].differences
    # Four right answers: t = 0.0125 = (1 − q)⁴ gives q = 0.666, and 500/504 of it is the rest's.
    unseen_women, unseen_men = 1 - 0.0125 ** (1 / 4), 1 - 0.0125 ** (1 / 500)
    assert women.low == pytest.approx(-unseen_women * 500 / 504)
    assert women.high == pytest.approx(unseen_men * 500 / 504)
    assert men.low == pytest.approx(-unseen_men * 4 / 504)
    assert men.high == pytest.approx(unseen_women * 4 / 504)
    assert found.verdict == "cannot tell"


def test_the_interval_contains_the_value():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 30, 300):
        p, y, a = draw(rng, n)
        for bootstrap in (20, 21, 100):
            found = evaluate_predictions(p, y, a, [SEX], bootstrap=bootstrap)
            for gap in found.gaps.values():
                if not math.isnan(gap.value):
                    assert 0 <= gap.low <= gap.value <= gap.high <= 1
                for d in gap.differences:
                    if d.count:
                        assert d.low <= d.difference <= d.high


def test_seeds():
    data = draw(np.random.default_rng(0), 300)
    users = torch.as_tensor(np.random.default_rng(1).integers(0, 100, 300))
    for owners in (None, users):
        same = [
            evaluate_predictions(*data, [SEX], users=owners, bootstrap=100, seed=seed)
            for seed in (3, 3, 4)
        ]
        assert same[0].as_dict() == same[1].as_dict()
        assert same[0].gaps["fnr"] != same[2].gaps["fnr"]
        assert same[0].gaps["fnr"].value == same[2].gaps["fnr"].value


def test_user_numbers_and_the_order_of_samples_do_not_matter():
    p, y, a = draw(np.random.default_rng(0), 300)
    rng = np.random.default_rng(1)
    users = torch.as_tensor(rng.integers(0, 100, 300))
    plain = evaluate_predictions(p, y, a, [SEX], users=users, bootstrap=100)
    order = torch.as_tensor(rng.permutation(300))
    other = evaluate_predictions(
        p[order], y[order], a[order], [SEX], users=1000 - 7 * users[order], bootstrap=100
    )
    assert plain.as_dict() == other.as_dict()
    assert plain.users == len(users.unique())


@pytest.mark.parametrize("users", [40, 4000])
def test_drawing_distinct_users_is_the_user_bootstrap(users):
    """Means and covariances of the replicates against a loop that resamples users."""
    rng = np.random.default_rng(0)
    n = 3 * users
    owner = rng.integers(0, users, n)
    _, owner = np.unique(owner, return_inverse=True)
    kind = rng.integers(0, 3, n)
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    population = owner.max() + 1
    by_user = np.zeros((population, 2))
    np.add.at(by_user, owner, columns[kind])
    rows, copies = user_bootstrap.distinct(by_user)
    assert copies.sum() == population
    assert len(np.unique(rows, axis=0)) == len(rows) < population
    assert copies @ rows == pytest.approx(by_user.sum(axis=0))
    expanded = np.repeat(rows, copies, axis=0)
    assert sorted(map(tuple, expanded)) == sorted(map(tuple, by_user))

    replicates = 2000
    ours = user_bootstrap.resample(rows, copies, replicates, seed=1)
    direct = np.stack(
        [by_user[rng.integers(0, population, population)].sum(axis=0) for _ in range(replicates)]
    )
    covariance = np.cov(direct.T)
    spread = np.sqrt(np.diag(covariance))
    # Six numbers are compared, two means, two variances and a covariance (Z for each). The mean
    # of B replicates has standard error s/√B, their (co)variance one of at most s₁s₂√(2/B).
    error = spread * math.sqrt(2 / replicates)
    assert np.all(np.abs(ours.mean(axis=0) - direct.mean(axis=0)) < Z * error)
    error = np.outer(spread, spread) * math.sqrt(2 * 2 / replicates)
    assert np.all(np.abs(np.cov(ours.T) - covariance) < Z * error)


def test_margins_hold_for_all_comparisons_at_once():
    """c is the quantile of the largest of ten normal numbers, and of one where all ten are one."""
    normal = NormalDist()
    rng = np.random.default_rng(0)
    spread = np.linspace(0.1, 2.0, 10)
    apart = rng.normal(size=(20_000, 10))
    together = np.repeat(rng.normal(size=(20_000, 1)), 10, axis=1)
    # P[|Z| ≤ c]^10 = 0.95 for ten, and P[|Z| ≤ c] = 0.95 for one. The quantile of 20,000 numbers
    # has standard error 0.014 or less, s one of half a per cent: 0.1 leaves room.
    for drawn, level in ((apart, 0.95 ** (1 / 10)), (together, 0.95)):
        margins = user_bootstrap.margins(np.zeros(10), drawn * spread, 0.95)
        assert margins / spread == pytest.approx(normal.inv_cdf((1 + level) / 2), abs=0.1)


def test_margins_leave_replicates_without_numbers_out():
    rng = np.random.default_rng(0)
    value = np.array([1.0, 0.5, np.nan])
    drawn = value + rng.normal(size=(1000, 3))
    full = user_bootstrap.margins(value, drawn, 0.9)
    drawn[rng.random(1000) < 0.3, 1] = np.nan
    some = user_bootstrap.margins(value, drawn, 0.9)
    assert some[:2] == pytest.approx(full[:2], rel=0.1)
    one = np.abs(drawn[:, :1] - 1.0)
    expected = np.quantile(one, 0.9, method="higher")
    assert user_bootstrap.margins(value[:1], drawn[:, :1], 0.9) == pytest.approx(expected)
    assert np.all(np.isnan(user_bootstrap.margins(value, drawn[:0], 0.9)))


@pytest.mark.parametrize("users", [None, 200])
def test_memory_is_bounded_without_changing_the_draws(users, monkeypatch):
    data = draw(np.random.default_rng(0), 300)
    owner = None if users is None else torch.arange(300) % users
    whole = evaluate_predictions(*data, [SEX], users=owner, bootstrap=100)
    monkeypatch.setattr(user_bootstrap, "_DRAWS", 50)
    assert evaluate_predictions(*data, [SEX], users=owner, bootstrap=100) == whole


# The verdict


def test_verdicts():
    rng = np.random.default_rng(0)
    fair = draw(rng, 60_000, fnr=(0.3, 0.3))
    unfair = draw(rng, 60_000, fnr=(0.5, 0.3))
    few = draw(np.random.default_rng(1), 300, fnr=(0.3, 0.3))
    for data, verdict, words in (
        (fair, "within", "within α = 0.02 at 95%"),
        (unfair, "outside", "outside α = 0.02 at 95%"),
        (few, "cannot tell", "cannot tell: α = 0.02 lies in the interval"),
    ):
        found = evaluate_predictions(*data, [SEX], constraint=fnr_parity("sex", tolerance=0.02))
        assert found.verdict == verdict
        assert found.verdict_in_words.startswith(words)
        assert f"FNR parity: {words}" in str(found)
        gap = found.gaps["constraint"]
        assert (gap.high <= 0.02) == (verdict == "within")
        assert (gap.low > 0.02) == (verdict == "outside")
        assert found.as_dict()["verdict"] == verdict
        json.dumps(found.as_dict(), allow_nan=False)

    without = evaluate_predictions(*fair, [SEX], constraint=fnr_parity(), bootstrap=0)
    assert without.verdict == "cannot tell"
    assert "bootstrap = 0" in without.verdict_in_words
    assert math.isnan(without.gaps["fnr"].low)
    assert math.isnan(without.accuracy_interval[0])
    assert without.gaps["fnr"].value == pytest.approx(0.0, abs=0.02)

    no_constraint = evaluate_predictions(*few, [SEX])
    assert no_constraint.verdict is None
    assert no_constraint.tolerance is None
    assert "constraint" not in no_constraint.gaps


def test_silence_is_not_fairness():
    """A group without a sample for one of the rates: within becomes cannot tell, outside stays."""
    race = Attribute("race", ("A", "B", "C"))
    rng = np.random.default_rng(0)
    fair = draw(rng, 60_000, fnr=(0.3, 0.3))
    unfair = draw(rng, 60_000, fnr=(0.5, 0.3))
    negative = [
        torch.cat([x, torch.full_like(x[:500], code)])
        for x, code in zip(fair, (0, 0, 2), strict=True)
    ]
    for data, declared, verdict in (
        (fair, SEX, "within"),
        (fair, race, "cannot tell"),  # nobody in group C
        (negative, race, "cannot tell"),  # nobody in group C who counts in the FNR
        (unfair, SEX, "outside"),
        (unfair, race, "outside"),
    ):
        found = evaluate_predictions(*data, [declared], constraint=fnr_parity(tolerance=0.02))
        gap = found.gaps["constraint"]
        assert found.verdict == verdict
        assert gap.unknown_groups == (("race=C",) if declared is race else ())
        assert (gap.low > 0.02) == (verdict == "outside")
        assert (gap.high <= 0.02) == (verdict != "outside")
        told = "not judged, having no sample: race=C" in found.verdict_in_words
        assert told == (declared is race)
        if verdict == "cannot tell":
            assert "of the other groups is within α = 0.02" in str(found)

    # One of two rates is enough: group C has negatives, and so an FPR, but no FNR.
    odds = evaluate_predictions(*negative, [race], constraint=equalized_odds(tolerance=0.2))
    assert odds.gaps["constraint"].counts["FPR"]["race=C"] == 500
    assert odds.gaps["constraint"].high <= 0.2
    assert odds.verdict == "cannot tell"


def test_confidence_is_named_and_widens():
    data = draw(np.random.default_rng(0), 1000)
    narrow, wide = (
        evaluate_predictions(*data, [SEX], constraint=demographic_parity(), confidence=c)
        for c in (0.8, 0.995)
    )
    assert wide.gaps["demp"].high > narrow.gaps["demp"].high
    assert wide.gaps["demp"].low <= narrow.gaps["demp"].low
    assert "99.5%" in str(wide)


def test_gap_in_words():
    data = draw(np.random.default_rng(0), 1000)
    gap = evaluate_predictions(*data, [SEX]).gaps["fnr"]
    assert str(gap).startswith(f"fnr gap {gap.value:.3f} [")
    assert gap.worst_group in str(gap)


# What is refused


def test_bad_input():
    p, y, a = draw(np.random.default_rng(0), 50)

    def refused(message, *data, declared=(SEX,), **keywords):
        with pytest.raises(ValueError, match=message):
            evaluate_predictions(*data, declared, **keywords)

    refused(r"predictions have shape \(49,\) and labels \(50,\)", p[:-1], y, a)
    refused(r"predictions have shape \(50, 2\).*argmax", torch.zeros(50, 2), y, a)
    refused(r"n > 0", p[:0], y[:0], a[:0])
    refused(r"shape \(50,\); expected \(50, 1\)", p, y, a[:, 0])
    refused(r"attribute codes are torch.float32", p, y, a.float())
    refused(r"no attribute 'age'.*\['sex'\]", p, y, a, by=["age"])
    refused(r"no attribute 'age'", p, y, a, constraint=fnr_parity("age"))
    refused(r"declares no attributes", p, y, a[:, :0], declared=(), constraint=fnr_parity())
    refused(r"declares no attributes", p, y, a[:, :0], declared=(), by=["sex"])
    refused(r"predictions run from 0 to 2; expected classes 0 to 1", p + (p == 1), y, a)
    refused(r"labels run from -1", p, y - 1, a)
    refused(r"predictions are torch.float32.*argmax", p.float(), y, a)
    refused(r"classes is 1", p, y, a, classes=1)
    refused(r"label_range is not given", p.float(), y.float(), a, classes=None)
    refused(
        r"predictions are NaN",
        p / 0.0,
        y.float(),
        a,
        classes=None,
        label_range=(0.0, 1.0),
    )
    refused(r"bootstrap is -1", p, y, a, bootstrap=-1)
    refused(r"bootstrap is 19; give at least 20", p, y, a, bootstrap=19)
    refused(r"confidence is 95", p, y, a, confidence=95)
    refused(r"'sex' run from -1 to 1.*unknown=True", p, y, torch.where(a == 0, -1, a))
    refused(r"users is torch.int64 of shape \(49,\)", p, y, a, users=torch.arange(49))
    refused(r"users is torch.float32", p, y, a, users=torch.zeros(50))
    refused(
        r"'equal error' is for regression",
        p,
        y,
        a,
        constraint=equal_error(label_range=(0.0, 1.0)),
    )
    refused(
        r"'accuracy parity' is for classification",
        p.float(),
        y.float(),
        a,
        classes=None,
        label_range=(0.0, 1.0),
        constraint=accuracy_parity(),
    )


def test_the_worst_pair_is_the_two_groups_furthest_apart() -> None:
    values = {"a": 0.2, "b": 0.5, "c": 0.45}
    differences = [
        Difference("FNR", name, 0.4, v, 10, 0.4 - v, 0.4 - v - 0.1, 0.4 - v + 0.1)
        for name, v in values.items()
    ]
    silent = Difference("FNR", "d", 0.4, math.nan, 0, math.nan, math.nan, math.nan)
    gap = GapEstimate("fnr", 0.2, 0.1, 0.3, (*differences, silent))
    pair = gap.worst_pair
    assert pair is not None
    assert (pair.larger, pair.smaller, pair.rate) == ("b", "a", "FNR")
    assert pair.difference == pytest.approx(0.3)
    assert (pair.low, pair.high) == pytest.approx((0.1, 0.5))
    assert gap.as_dict()["worst_pair"]["larger"] == "b"
    assert GapEstimate("fnr", 0.2, 0.1, 0.3, (differences[0], silent)).worst_pair is None


def test_intervals_of_a_groups_own_rate_hold_as_often_as_they_say() -> None:
    """True rates of two groups are in both intervals at once in 95% of surveys, at least.

    More than 24 of 200 surveys miss by chance alone once in 40,000 times (binomial).
    """
    rng, missed = np.random.default_rng(0), 0
    truth = {"sex=female": 0.15, "sex=male": 0.4}
    for survey in range(200):
        sex = rng.integers(0, 2, 300)
        wrong = rng.random(300) < np.where(sex == 0, *truth.values())
        found = evaluate_predictions(
            torch.tensor(~wrong).long(),
            torch.ones(300, dtype=torch.long),
            torch.tensor(sex)[:, None],
            (Attribute("sex", ("female", "male")),),
            bootstrap=200,
            seed=survey,
        )
        cells = found.gaps["fnr"].differences
        missed += not all(d.value_low <= truth[d.group] <= d.value_high for d in cells)
        assert all(0.0 <= d.value_low <= d.value <= d.value_high <= 1.0 for d in cells)
    assert missed <= 24
