"""The unamplified Gaussian mechanism and the bound on participations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from fpfl.privacy import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    participations_bound,
    participations_of_one,
)

dp_accounting = pytest.importorskip("dp_accounting")

MUS = st.floats(-3, 3).map(lambda x: 10**x)
DELTAS = st.floats(-12, -1).map(lambda x: 10**x)


@settings(derandomize=True, max_examples=200)
@given(mu=MUS, share=st.floats(0, 1.2))
def test_delta_matches_scipy_in_log_space(mu, share):
    epsilon = share * (mu * mu / 2 + 8 * mu)
    first = special.log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    reference = math.exp(first) * -math.expm1(min(second - first, 0.0))
    # The reference loses digits in `epsilon + log Φ`: an absolute error of 1e-16 times its size.
    lost = 1e-14 * (1 + epsilon) * math.exp(first)
    assert gaussian_delta(epsilon, mu) == pytest.approx(reference, rel=1e-9, abs=lost)


@settings(derandomize=True, max_examples=100)
@given(mu=MUS, delta=DELTAS)
def test_epsilon_matches_dp_accounting(mu, delta):
    theirs = dp_accounting.get_epsilon_gaussian(1 / mu, delta)
    ours = gaussian_epsilon(1 / mu, 1, delta)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("noise", "times"), [(1.006, 12), (1.006, 28), (4.0, 3), (0.7, 1)])
def test_epsilon_matches_the_pld_accountant(noise, times):
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise), times)
    assert gaussian_epsilon(noise, times, 5e-5) == pytest.approx(
        accountant.get_epsilon(5e-5), rel=1e-3
    )


@settings(derandomize=True, max_examples=100)
@given(mu=MUS, delta=DELTAS)
def test_epsilon_is_the_least_and_rounded_up(mu, delta):
    epsilon = gaussian_epsilon(1 / mu, 1, delta)
    assert gaussian_delta(epsilon, mu) <= delta
    assume(epsilon > 1e-6)
    assert gaussian_delta(epsilon * (1 - 1e-6), mu) > delta


@settings(derandomize=True, max_examples=100)
@given(
    epsilon=st.floats(-2, 3).map(lambda x: 10**x),
    times=st.integers(1, 10_000),
    delta=DELTAS,
    sensitivity=st.sampled_from([1, 2]),
)
def test_noise_inverts_epsilon(epsilon, times, delta, sensitivity):
    noise = gaussian_noise_multiplier(epsilon, times, delta, sensitivity=sensitivity)
    back = gaussian_epsilon(noise, times, delta, sensitivity=sensitivity)
    assert back <= epsilon
    assert back == pytest.approx(epsilon, rel=1e-6)


def test_known_figures():
    assert gaussian_epsilon(1.006, 12, 5e-5) == pytest.approx(19, rel=0.02)
    assert gaussian_epsilon(1.006, 28, 5e-5) == pytest.approx(34, rel=0.02)


def test_participations_and_sensitivity_enter_as_one_mu():
    assert gaussian_epsilon(1.0, 4, 1e-5) == gaussian_epsilon(1.0, 1, 1e-5, sensitivity=2)
    assert gaussian_epsilon(2.0, 4, 1e-5) == gaussian_epsilon(1.0, 1, 1e-5)
    assert gaussian_epsilon(1.0, 0, 1e-5) == 0.0
    assert gaussian_epsilon(1e9, 1, 1e-5) == 0.0


def test_large_mu_does_not_overflow():
    mu = 1e4
    epsilon = gaussian_epsilon(1 / mu, 1, 1e-6)
    # ε is close to μ²/2 + z·μ there, with Φ(−z) = δ.
    assert epsilon == pytest.approx(mu * mu / 2 + stats.norm.isf(1e-6) * mu, rel=1e-6)


@settings(derandomize=True, max_examples=100)
@given(
    population=st.integers(2, 10**6),
    data=st.data(),
    rounds=st.integers(1, 5000),
    delta=st.floats(-9, -1).map(lambda x: 10**x),
)
def test_participations_bound_matches_scipy(population, data, rounds, delta):
    cohort = data.draw(st.integers(1, population))
    bound = participations_bound(population, cohort, rounds, delta)
    chance = stats.binom(rounds, cohort / population)
    assert 0 <= bound <= rounds
    assert population * chance.sf(bound) <= delta * (1 + 1e-6)
    assert population * chance.sf(bound - 1) > delta * (1 - 1e-6)


def test_participations_in_numbers():
    assert participations_bound(16280, 200, 1000, 5e-5) == 37
    assert participations_bound(100, 100, 7, 1e-3) == 7
    assert participations_bound(10**9, 1, 10, 1e-6) == 1
    # One user against all of them.
    assert participations_of_one(200 / 16280, 1000, 2.5e-5) < 37
    assert participations_of_one(1.0, 9, 0.1) == 9


def test_nobody_exceeds_the_bound_in_a_simulation():
    # A false alarm has probability 1e-7 by construction of the bound.
    counts = np.random.default_rng(3).binomial(1000, 200 / 16280, size=16280)
    assert counts.max() <= participations_bound(16280, 200, 1000, 1e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_epsilon(0.0, 1, 1e-5), "noise_multiplier must be positive"),
        (lambda: gaussian_epsilon(math.inf, 1, 1e-5), "noise_multiplier must be positive"),
        (lambda: gaussian_epsilon(1.0, -1, 1e-5), "participations must be at least 0"),
        (lambda: gaussian_epsilon(1.0, 1.5, 1e-5), "participations must be a whole number"),
        (lambda: gaussian_epsilon(1.0, 1, 0.0), "delta must be positive"),
        (lambda: gaussian_epsilon(1.0, 1, 1.0), "delta must lie strictly between 0 and 1"),
        (lambda: gaussian_epsilon("1", 1, 1e-5), "noise_multiplier must be a number"),
        (lambda: gaussian_noise_multiplier(0.0, 1, 1e-5), "epsilon must be positive"),
        (lambda: participations_bound(10, 20, 5, 1e-5), "cohort must not exceed population"),
        (lambda: participations_of_one(1.5, 5, 1e-5), "q must be in"),
    ],
)
def test_refuses_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
