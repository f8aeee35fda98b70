"""Noise in shares: bounds against exact distributions, the other accountants, and the plan."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.privacy.assumptions import Aggregation
from fpfl.privacy.filter import Mechanism, PrivacyFilter, ServerLimit, good_order
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.renyi import (
    BETA,
    ORDERS,
    calibrate_shares,
    coins_epsilon,
    coins_renyi,
    not_a_gaussian,
    renyi_epsilon,
    rounded_norm,
    scale_for,
    shares_epsilon,
    shares_multiplier,
)
from fpfl.privacy.settings import Privacy

BLOCKS = (Block("gradients", 1.0, 0.7), Block("counts", 2.0, 0.3))


def plan(**changes) -> PrivacyPlan:
    given = {"population": 16_280, "cohort": 200, "rounds": 250, "noise_multiplier": 1.0}
    return PrivacyPlan(**given | {"blocks": BLOCKS, "convention": "coins"} | changes)


def sum_of_shares(deviation: float, adders: int) -> np.ndarray:
    """The exact distribution of a sum of discrete Gaussians, far into its tails."""
    reach = math.ceil(12 * deviation)
    x = np.arange(-reach, reach + 1)
    one = np.exp(-(x**2) / (2 * deviation**2))
    total = one / one.sum()
    for _ in range(adders - 1):
        total = np.convolve(total, one / one.sum())
    return total


def divergence(p: np.ndarray, q: np.ndarray, order: int) -> float:
    both = (p > 1e-280) & (q > 1e-280)  # what is left out is far in the tails of either
    terms = np.exp(order * np.log(p[both]) + (1 - order) * np.log(q[both]))
    return math.log(terms.sum()) / (order - 1)


@pytest.mark.parametrize(("deviation", "adders"), [(0.5, 4), (0.7, 2), (1.0, 3), (2.0, 5)])
@pytest.mark.parametrize("change", [1, 3])
def test_the_divergence_of_a_sum_of_shares_is_below_its_bound(deviation, adders, change):
    total = sum_of_shares(deviation, adders)
    here, there = np.pad(total, (0, change)), np.pad(total, (change, 0))
    ratio = change / (math.sqrt(adders) * deviation) + not_a_gaussian(deviation, adders)
    for order in (2, 4, 8):
        assert divergence(here, there, order) <= order / 2 * ratio**2 * (1 + 1e-9)


@pytest.mark.parametrize("chance", [0.01, 0.2, 0.7])
@pytest.mark.parametrize("order", [2, 3, 5, 9])
def test_secret_coins_are_below_their_bound_both_ways(chance, order):
    total = sum_of_shares(2.0, 3)
    change = 3
    without, present = np.pad(total, (0, change)), np.pad(total, (change, 0))
    mixed = (1 - chance) * without + chance * present
    noise = 1 / (change / (math.sqrt(3) * 2.0) + not_a_gaussian(2.0, 3))
    bound = coins_renyi(order, noise, chance) * (1 + 1e-9)
    assert divergence(mixed, without, order) <= bound
    assert divergence(without, mixed, order) <= bound


@given(
    order=st.integers(2, 64),
    noise=st.floats(0.4, 20.0),
    chance=st.floats(1e-4, 0.99),
)
@settings(max_examples=60)
def test_the_general_bound_is_above_what_is_known_of_the_gaussian(order, noise, chance):
    """What holds for any mechanism with that curve holds for the Gaussian, whose own is known."""
    accountant = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.PoissonSampledDpEvent(chance, dp.GaussianDpEvent(noise)))
    bound = coins_renyi(order, noise, chance)
    assert bound >= accountant.rdp[0] * (1 - 1e-6) - 1e-12
    assert bound <= order / (2 * noise**2) * (1 + 1e-12)
    if order == 2:  # there is nothing general about two
        assert bound == pytest.approx(min(accountant.rdp[0], 1 / noise**2), rel=1e-5, abs=1e-12)


@given(
    scale=st.floats(1.0, 1e6),
    size=st.integers(1, 2**18),
    adders=st.integers(1, 200),
    bits=st.integers(1, 20),
    copies=st.integers(1, 4),
)
@settings(max_examples=100)
def test_the_scale_gives_the_noise_that_was_asked_for(scale, size, adders, bits, copies):
    noise = shares_multiplier(scale, size, 2.0**bits, adders, copies)
    found = scale_for(noise, size, 2.0**bits, adders, copies)
    assert shares_multiplier(found, size, 2.0**bits, adders, copies) >= noise * (1 - 1e-12)
    assert found == pytest.approx(scale, rel=1e-6)


def test_rounding_is_in_the_norm():
    assert rounded_norm(10.0, 4) == pytest.approx(math.sqrt(min(144, 100 + 1 + 1.0 * 11)))
    assert math.sqrt(2 * math.log(1 / BETA)) == pytest.approx(1.0)
    assert rounded_norm(1e6, 4096) == pytest.approx(1e6, rel=1e-5)
    assert rounded_norm(2.0, 10**6) > 500  # rounding is all there is
    with pytest.raises(ValueError, match="rounded to nothing"):
        scale_for(50.0, 10**6, 16.0, 3)
    with pytest.raises(ValueError, match="at least 1/2"):
        not_a_gaussian(0.4, 3)


def test_calibration_and_what_it_costs():
    """About a sixth more noise than an accountant of the Gaussian would ask for."""
    q, T, delta = 200 / 16_280, 1000, 5e-5
    noise = calibrate_shares(2.0, q, T, delta)
    assert coins_epsilon(noise, q, T, delta) <= 2.0
    assert coins_epsilon(noise * 0.999, q, T, delta) > 2.0
    assert noise == pytest.approx(1.1724, rel=1e-3)
    assert coins_epsilon(1.0, 1.0, 12, delta) == shares_epsilon(1.0, 12, delta)
    with pytest.raises(ValueError, match="no noise is enough"):
        calibrate_shares(1e-9, 1.0, 10**6, 1e-300)
    assert max(ORDERS) <= 1024


@given(
    noise=st.floats(0.5, 20.0),
    chance=st.floats(1e-3, 1.0),
    rounds=st.integers(1, 300),
    measurement=st.floats(0.5, 100.0),
)
@settings(max_examples=40, deadline=None)
def test_a_measurement_is_composed_with_the_rounds(noise, chance, rounds, measurement):
    """ε of both is that of either at least, and of their sum at most; far off it is nothing."""
    delta = 1e-5
    both = coins_epsilon(noise, chance, rounds, delta, measurement)
    bare, alone = coins_epsilon(noise, chance, rounds, delta), shares_epsilon(measurement, 1, delta)
    assert both >= max(bare, alone)
    assert both <= coins_epsilon(noise, 1.0, rounds, delta, measurement)
    assert coins_epsilon(noise, chance, rounds, delta, 1e9) == pytest.approx(bare, rel=1e-9)
    # Each order by itself: at no order is the sum of the two divergences below what is claimed.
    for order in (2, 8, 64):
        rho = rounds * coins_renyi(order, noise, chance) + order / (2 * measurement**2)
        assert both <= renyi_epsilon(rho, order, delta) * (1 + 1e-12)


@pytest.mark.parametrize("times", [1, 12, 200])
@pytest.mark.parametrize("measurement", [0.7, 3.0, 40.0])
def test_without_coins_it_is_the_gaussian_s_up_to_renyi(times, measurement):
    """Two Gaussians are one with 1/σ² added up: the same formula, and above the exact one."""
    noise, delta = 4.0, 1e-5
    both = shares_epsilon(noise, times, delta, measurement)
    one = (times / noise**2 + 1 / measurement**2) ** -0.5
    assert both == pytest.approx(shares_epsilon(one, 1, delta), rel=1e-12)
    exact = gaussian_epsilon(noise, times, delta, measurement=measurement)
    assert exact <= both <= 1.12 * exact + 0.02


@pytest.mark.parametrize("convention", ["coins", "picked"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_measurement_by_rule_costs_three_hundredths(convention, epsilon, copies):
    """In coins the best order may be far from the measurement's: its noise goes by the rounds'."""
    asked = Privacy(epsilon, convention=convention, copies=copies)
    bare = asked.plan(population=5000, cohort=250, rounds=200)
    found = asked.plan(population=5000, cohort=250, rounds=200, measurement=True)
    assert 0.999 * epsilon < found.epsilon <= epsilon
    assert found.epsilon_server == found.epsilon == found.epsilon_honest
    assert 1.0 < found.noise_multiplier / bare.noise_multiplier < 1.07
    alone = replace_plan(found, measurement=None)
    assert 0.97 * epsilon <= alone.epsilon < epsilon
    release = Mechanism.measurement_of(found)
    assert release == Mechanism("all", 5000, 5000, found.measurement, "zero-out")
    assert release.renyi(8) == pytest.approx(8 / (2 * found.measurement**2))
    # Whoever gives σ gets about as dear a measurement.
    given = Privacy(noise_multiplier=bare.noise_multiplier, convention=convention, copies=copies)
    dearer = given.plan(population=5000, cohort=250, rounds=200, measurement=True)
    assert 1.0 < dearer.epsilon / epsilon < 1.032
    assert dearer.statement(False, False).epsilon_measurement == shares_epsilon(
        dearer.measurement, 1, dearer.delta
    )


def replace_plan(found: PrivacyPlan, **changes) -> PrivacyPlan:
    return PrivacyPlan(**{f.name: getattr(found, f.name) for f in fields(found)} | changes)


def test_a_measurement_that_is_too_dear_is_refused():
    with pytest.raises(ValueError, match="the measurement alone"):
        Privacy(1.0, convention="coins").plan(
            population=5000, cohort=250, rounds=200, measurement=0.5
        )


def test_plans_of_federations():
    here = plan()
    assert here.neighbours == "zero-out"
    assert here.epsilon == coins_epsilon(1.0, 200 / 16_280, 250, here.delta)
    assert here.epsilon_server == here.epsilon  # it knows no cohorts
    assert Mechanism.of(here).sampler == "coins"
    assert Mechanism.of(here).renyi(8) == coins_renyi(8, 1.0, 200 / 16_280)
    twice = plan(copies=2)
    assert twice.epsilon == coins_epsilon(1.0, 400 / 16_280, 250, here.delta)
    assert Mechanism.of(twice).cohort == 400
    picked = plan(convention="picked")
    assert picked.epsilon == picked.epsilon_server == shares_epsilon(1.0, 250, here.delta)
    assert Mechanism.of(picked).sampler == "all"
    assert Mechanism.of(picked).cohort == 16_280
    for convention in ("coins", "picked"):
        asked = Privacy(epsilon=2.0, convention=convention)
        made = asked.plan(population=1000, cohort=50, rounds=20, blocks=(Block("a", 1.0),))
        assert 1.999 < made.epsilon <= 2.0
    larger = plan(population=32_560, real_population=16_280, delta=here.delta / 2)
    assert larger.epsilon_real == coins_epsilon(1.0, 200 / 16_280, 250, here.delta / 2)
    assert larger.epsilon < larger.epsilon_real == larger.epsilon_server_real


def test_what_plans_of_federations_refuse():
    for convention, relation in (("coins", "replace-one"), ("picked", "replace-one"),
                                 ("picked", "add-remove")):  # fmt: skip
        with pytest.raises(ValueError, match="users who are left out"):
            plan(convention=convention, neighbours=relation)
    for convention in ("coins", "picked"):  # nobody counts, and nothing would keep to it
        with pytest.raises(ValueError, match="max_participations"):
            plan(convention=convention, max_participations=3)
    with pytest.raises(ValueError, match="copies=2 goes with"):
        plan(convention="poisson", copies=2)
    with pytest.raises(ValueError, match="copies"):
        plan(copies=0)


def test_what_a_filter_says_of_federations():
    """Rounds that were added count against the server, too, and with the filter's δ."""
    said = plan(convention="picked", noise_multiplier=5.0, rounds=5).statement(False, False)
    limit = PrivacyFilter(3.0, said.delta, good_order(3.0, said.delta))
    mechanism = Mechanism.of(plan(convention="picked", noise_multiplier=5.0, rounds=5))
    changed = said.filtered(limit, ServerLimit(mechanism, 12, said.delta), {mechanism: 12}, 1)
    assert changed.participations == 12
    assert changed.epsilon_server == 3.0
    assert changed.delta_server == 2 * limit.delta


def test_statements_of_federations():
    said = str(plan().statement(False, False))
    assert "secret coins" in said
    assert "Kairouz" in said
    assert "Zhu and Wang" in said
    picked = str(plan(convention="picked").statement(False, False))
    assert "Against a server that knows the cohorts" in picked
    assert "250 rounds. Nobody takes part more often" in picked
    assert "without amplification" in picked
    assert "at most 3 nodes" in str(plan(copies=3).statement(False, False))
    assert "on at most" not in said
    here = Aggregation(nodes=5, least=4, colluders=1, shares=True)
    both = plan(neighbours="add-remove").statement(False, False)
    assert "takes part at all is not" in str(replace(both, aggregation=here))
    assert "How long answers take is not hidden" in str(replace(both, aggregation=here))
    held = replace(both, aggregation=replace(here, held=True))
    assert "agreed to take at least" in str(held)
    assert "equally long" not in str(held)
