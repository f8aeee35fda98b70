"""Poisson cohorts: every user takes part independently; accounted for by PLD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfl.privacy.accounting import _dp_accounting, calibrate_poisson, epsilon_poisson
from fpfl.privacy.conventions.base import Convention, Sampler, register, rounded_up
from fpfl.privacy.gaussian import gaussian_noise_multiplier
from fpfl.privacy.sampling import PoissonSampling

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism
    from fpfl.privacy.plan import PrivacyPlan


def _renyi(mechanism: Mechanism, order: int, unamplified: float) -> float:
    """Mironov et al. (2019), by dp_accounting; none is known to it for replace-one neighbours."""
    if mechanism.neighbours == "replace-one":
        return unamplified
    dp = _dp_accounting()
    # Zero-out neighbours have the same divergence as add-remove: REPLACE_SPECIAL would do, too.
    accountant = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    q = mechanism.cohort / mechanism.population
    noise = mechanism.noise_multiplier / mechanism.sensitivity
    accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(noise)))
    return rounded_up(float(accountant.rdp[0]), unamplified)


def _epsilon(plan: PrivacyPlan, population: int, sensitivity: int) -> float:
    q = plan.cohort / population
    epsilon = epsilon_poisson(
        plan.noise_multiplier, q, plan.rounds, plan.delta, plan.neighbours, plan.measurement
    )
    if plan.max_participations is None:
        return epsilon
    # With a cap, what holds even against the server holds against everyone else too.
    return min(epsilon, plan.unamplified(plan.participations))


def _calibrate(plan: PrivacyPlan, epsilon: float) -> float:
    q = plan.cohort / plan.population
    noise = calibrate_poisson(
        epsilon, q, plan.rounds, plan.delta, plan.neighbours, plan.measurement
    )
    if plan.max_participations is None:
        return noise
    capped = gaussian_noise_multiplier(
        epsilon,
        plan.participations,
        plan.delta,
        sensitivity=plan.sensitivity,
        measurement=plan.measurement,
    )
    return min(noise, capped)


register(
    Convention(
        "poisson",
        sensitivity={"zero-out": 1, "add-remove": 1, "replace-one": 2},
        sampler=Sampler("poisson", _renyi),
        sampling=PoissonSampling,
        epsilon=_epsilon,
        calibrate=_calibrate,
        words="Poisson sampling: every user takes part in a round independently",
        accountant="privacy loss distributions (PLD) for Poisson sampling",
        capped=("zero-out", "add-remove"),
    )
)
