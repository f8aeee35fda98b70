"""Federations whose nodes add the noise in shares: σ is what the honest ones add together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfl.privacy.conventions.base import EVERYBODY, Convention, Sampler, register
from fpfl.privacy.renyi import (
    calibrate_shares,
    coins_epsilon,
    coins_renyi,
    measured_shares,
)
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism
    from fpfl.privacy.plan import PrivacyPlan


def _renyi(mechanism: Mechanism, order: int, unamplified: float) -> float:
    """Zhu and Wang (2019)."""
    noise = mechanism.noise_multiplier / mechanism.sensitivity
    return coins_renyi(order, noise, mechanism.cohort / mechanism.population)


def _epsilon(plan: PrivacyPlan, population: int, sensitivity: int) -> float:
    chance = plan.chance(population)
    times = plan.participations
    return coins_epsilon(plan.noise_multiplier, chance, times, plan.delta, plan.measurement)


def _calibrate(plan: PrivacyPlan, epsilon: float) -> float:
    chance = plan.chance(plan.population)
    return calibrate_shares(epsilon, chance, plan.participations, plan.delta, plan.measurement)


def _measured(
    epsilon: float | None,
    noise: float | None,
    chance: float,
    rounds: int,
    delta: float,
    share: float,
) -> float:
    return measured_shares(epsilon, noise, chance=chance, rounds=rounds, delta=delta, share=share)


_RENYI = "Rényi DP of noise in shares (Kairouz, Liu and Steinke 2021)"

register(
    Convention(
        "coins",
        sensitivity={"zero-out": 1, "add-remove": 1},
        sampler=Sampler("coins", _renyi),
        sampling=PoissonSampling,
        epsilon=_epsilon,
        calibrate=_calibrate,
        words="secret coins: every user's node tosses for it, and tells nobody",
        accountant=f"{_RENYI}, amplified for any such mechanism by secret coins (Zhu and Wang "
        "2019)",
        shares=True,
        secret=True,
        measured=_measured,
    )
)
register(
    Convention(
        "picked",
        sensitivity={"zero-out": 1},
        sampler=EVERYBODY,
        sampling=lambda users, cohort, cap: FixedSizeSampling(users, cohort),
        epsilon=_epsilon,
        calibrate=_calibrate,
        words="picked by the server",
        accountant=f"{_RENYI}, without amplification",
        shares=True,
        measured=_measured,
    )
)
