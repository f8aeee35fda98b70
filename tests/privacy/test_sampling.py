"""Samplers draw what their accountants assume.

Every statistical threshold is derived from a false-alarm rate of 1e-7 per test; seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fpfl.privacy import FixedSizeSampling, Participation, PoissonSampling

FALSE_ALARM = 1e-7
SAMPLERS = [PoissonSampling, FixedSizeSampling]


def indicators(sampler, draws, seed):
    """One row per draw, one column per user: 1 where the user is in the cohort."""
    rng = np.random.default_rng(seed)
    table = np.zeros((draws, sampler.population))
    for row in table:
        row[sampler.draw(rng)] = 1
    return table


@settings(derandomize=True, max_examples=60)
@given(
    sampler=st.sampled_from(SAMPLERS),
    population=st.integers(1, 100_000),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_a_cohort_is_distinct_sorted_int64_users(sampler, population, data, seed):
    cohort = data.draw(st.integers(1, population))
    drawn = sampler(population, cohort).draw(np.random.default_rng(seed))
    assert drawn.dtype == np.int64
    assert np.all(np.diff(drawn) > 0)
    assert len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < population)
    if sampler is FixedSizeSampling or cohort == population:
        assert len(drawn) == cohort


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_probability_and_reproducibility(sampler):
    cohorts = sampler(population=1000, cohort=100)
    assert cohorts.probability == 0.1
    first, second = (cohorts.draw(np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# numpy draws by three different routes, depending on population and size: check each.
@pytest.mark.parametrize(("population", "cohort"), [(50, 10), (20_000, 1000), (100_000, 1000)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_user_is_equally_likely(sampler, population, cohort):
    bins, draws = 50, 400
    width = population // bins
    cohorts = sampler(population, cohort)
    rng = np.random.default_rng(11)
    counts = np.zeros(bins)
    for _ in range(draws):
        counts += np.bincount(cohorts.draw(rng) // width, minlength=bins)
    q = cohorts.probability
    if sampler is PoissonSampling:
        # Bins are independent Binomial(draws · width, q).
        statistic = np.sum((counts - draws * width * q) ** 2) / (draws * width * q * (1 - q))
        freedom = bins
    else:
        # Multivariate hypergeometric: one degree of freedom less, since the sizes are fixed.
        scale = draws * cohort / bins * (population - cohort) / (population - 1)
        statistic = np.sum((counts - draws * cohort / bins) ** 2) / scale
        freedom = bins - 1
    assert statistic < stats.chi2.isf(FALSE_ALARM, freedom)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_covariance_of_two_users(sampler):
    population, cohort, draws = 6, 2, 20_000
    cohorts = sampler(population, cohort)
    q = cohorts.probability
    centred = indicators(cohorts, draws, seed=13) - q
    covariance = centred.T @ centred / draws
    fixed_size = -q * (1 - q) / (population - 1)
    expected = 0.0 if sampler is PoissonSampling else fixed_size
    # Bernstein's inequality for a mean of terms of size below 1 and second moment `second`, which
    # needs no normal approximation; the rate is split between all pairs.
    pairs = list(itertools.combinations(range(population), 2))
    log_rate = math.log(2 * len(pairs) / FALSE_ALARM)
    second = (q * (1 - q)) ** 2 * 2
    margin = log_rate / (3 * draws) + math.sqrt(
        (log_rate / (3 * draws)) ** 2 + 2 * second * log_rate / draws
    )
    assert margin < abs(fixed_size) / 2  # so the test can tell the two samplers apart
    for i, j in pairs:
        assert abs(covariance[i, j] - expected) < margin


def test_cohort_size_varies_as_a_binomial_under_poisson_sampling():
    cohorts = PoissonSampling(population=500, cohort=50)
    draws = 20_000
    rng = np.random.default_rng(17)
    sizes = np.array([len(cohorts.draw(rng)) for _ in range(draws)])
    q = cohorts.probability
    variance = cohorts.population * q * (1 - q)
    z = stats.norm.isf(FALSE_ALARM / 4)  # two sides, two statements
    assert abs(sizes.mean() - 50) < z * math.sqrt(variance / draws)
    excess_kurtosis = (1 - 6 * q * (1 - q)) / variance
    spread = variance * math.sqrt(2 / (draws - 1) + excess_kurtosis / draws)
    assert abs(sizes.var(ddof=1) - variance) < z * spread


def test_cohort_size_is_exact_without_replacement():
    cohorts = FixedSizeSampling(population=500, cohort=50)
    rng = np.random.default_rng(19)
    assert {len(cohorts.draw(rng)) for _ in range(500)} == {50}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cost_of_a_draw_does_not_depend_on_the_population(sampler):
    peaks = []
    for population in (10**5, 10**9, 10**15):
        cohorts = sampler(population, 200)
        rng = np.random.default_rng(23)
        cohorts.draw(rng)
        tracemalloc.start()
        drawn = cohorts.draw(rng)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert 0 < len(drawn) < 400
    assert max(peaks) < 50_000  # bytes; an array over 10^5 users alone would take 800,000


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("population", "cohort", "message"),
    [
        (10, 11, "must not exceed population"),
        (0, 1, "at least 1"),
        (10, 0, "at least 1"),
        (10.5, 1, "whole number"),
        (10, True, "whole number"),
        ("10", 1, "whole number"),
    ],
)
def test_refuses_what_cannot_be_sampled(sampler, population, cohort, message):
    with pytest.raises(ValueError, match=message):
        sampler(population, cohort)


def test_only_poisson_sampling_has_a_cap():
    assert PoissonSampling(10, 5, max_participations=3).participation().cap == 3
    assert FixedSizeSampling(10, 5).participation().cap is None
    with pytest.raises(TypeError):
        FixedSizeSampling(10, 5, 3)
    with pytest.raises(ValueError, match="max_participations must be at least 1"):
        PoissonSampling(10, 5, max_participations=0)


@settings(derandomize=True, max_examples=40)
@given(cap=st.integers(1, 6), rounds=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_cap_drops_users_who_have_reached_it_and_nobody_else(cap, rounds, seed):
    cohorts = PoissonSampling(40, 12, max_participations=cap)
    counter, rng = cohorts.participation(), np.random.default_rng(seed)
    drawn_so_far = np.zeros(40, dtype=int)
    for _ in range(rounds):
        drawn = cohorts.draw(rng)
        admitted = counter.admit(drawn)
        np.testing.assert_array_equal(admitted, drawn[drawn_so_far[drawn] < cap])
        drawn_so_far[drawn] += 1
    expected = {u: min(int(n), cap) for u, n in enumerate(drawn_so_far) if n}
    assert counter.counts == expected


def test_participation_resumes_and_is_sparse():
    counter = Participation(2, {3: 2, 10**12: 1})
    users = np.array([3, 7, 10**12], dtype=np.int64)
    np.testing.assert_array_equal(counter.admit(users), [7, 10**12])
    np.testing.assert_array_equal(counter.admit(users), [7])
    assert counter.counts == {3: 2, 7: 2, 10**12: 2}
    again = Participation(2, counter.counts)
    assert len(again.admit(users)) == 0
    with pytest.raises(ValueError, match="more than cap=1"):
        Participation(1, counter.counts)
    with pytest.raises(ValueError, match="cap must be at least 1"):
        Participation(0)
    uncapped = Participation()
    np.testing.assert_array_equal(uncapped.admit(users), users)


def release_distribution(q, cap, rounds, present, absent):
    """P(outputs) of a mechanism with bits as outputs, for every sequence of ``rounds`` bits.

    ``present`` and ``absent`` are P(bit = 1) with and without the user in the cohort.
    """
    result = {}
    for bits in itertools.product((0, 1), repeat=rounds):
        states = {0: 1.0}  # participations so far -> joint probability with the bits so far
        for bit in bits:
            following: dict[int, float] = {}
            for count, chance in states.items():
                takes_part = q if count < cap else 0.0
                for step, weight, one in ((1, takes_part, present), (0, 1 - takes_part, absent)):
                    probability = chance * weight * (one if bit else 1 - one)
                    following[count + step] = following.get(count + step, 0.0) + probability
            states = following
        result[bits] = sum(states.values())
    return result


def hockey_stick(p, q, epsilon):
    return sum(max(0.0, p[key] - math.exp(epsilon) * q[key]) for key in p)


@settings(derandomize=True, max_examples=60)
@given(
    q=st.floats(0.05, 0.95),
    cap=st.integers(1, 3),
    present=st.floats(0.01, 0.99),
    absent=st.floats(0.01, 0.99),
    epsilon=st.floats(0.0, 3.0),
)
def test_a_cap_never_costs_privacy_for_zero_out_neighbours(q, cap, present, absent, epsilon):
    rounds = 4
    without = release_distribution(q, 0, rounds, present, absent)
    capped = release_distribution(q, cap, rounds, present, absent)
    uncapped = release_distribution(q, rounds, rounds, present, absent)
    for left, right in (("user", "zero"), ("zero", "user")):
        worlds = {"user": capped, "zero": without}
        open_worlds = {"user": uncapped, "zero": without}
        with_cap = hockey_stick(worlds[left], worlds[right], epsilon)
        assert with_cap <= hockey_stick(open_worlds[left], open_worlds[right], epsilon) + 1e-12
