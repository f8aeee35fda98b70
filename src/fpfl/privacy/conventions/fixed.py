"""Cohorts of a fixed size, drawn without replacement; accounted for by Rényi DP.

The paper takes σ at face value, as if one user changed a total by C at most. For replacement it is
2C: ``paper`` is for reproduction, ``replace-one`` is the same with the sensitivity that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfl.privacy.accounting import calibrate_without_replacement, epsilon_without_replacement
from fpfl.privacy.conventions.base import Convention, Sampler, register, rounded_up
from fpfl.privacy.gaussian import gaussian_noise_multiplier
from fpfl.privacy.renyi import fixed_size_renyi
from fpfl.privacy.sampling import FixedSizeSampling

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism
    from fpfl.privacy.plan import PrivacyPlan


def _renyi(mechanism: Mechanism, order: int, unamplified: float) -> float:
    """Wang et al. (2019) at Δ = 2C."""
    noise = mechanism.noise_multiplier / mechanism.sensitivity
    amplified = fixed_size_renyi(order, noise, mechanism.population, mechanism.cohort)
    return rounded_up(amplified, unamplified)


def _epsilon(plan: PrivacyPlan, population: int, sensitivity: int) -> float:
    return epsilon_without_replacement(
        plan.noise_multiplier / sensitivity,
        population,
        plan.cohort,
        plan.rounds,
        plan.delta,
        None if plan.measurement is None else plan.measurement / sensitivity,
    )


def _calibrate(plan: PrivacyPlan, epsilon: float) -> float:
    # Refuses a measurement that costs too much in the plan's units: below it is in sensitivities.
    _ = gaussian_noise_multiplier(
        epsilon,
        plan.rounds,
        plan.delta,
        sensitivity=plan.sensitivity,
        measurement=plan.measurement,
    )
    return plan.sensitivity * calibrate_without_replacement(
        epsilon,
        plan.population,
        plan.cohort,
        plan.rounds,
        plan.delta,
        None if plan.measurement is None else plan.measurement / plan.sensitivity,
    )


_SAMPLER = Sampler("fixed", _renyi, fixed=True)

for _name, _sensitivity in (("paper", 1), ("replace-one", 2)):
    register(
        Convention(
            _name,
            sensitivity={"replace-one": _sensitivity},
            sampler=_SAMPLER,
            sampling=lambda users, cohort, cap: FixedSizeSampling(users, cohort),
            epsilon=_epsilon,
            calibrate=_calibrate,
            words="sampling without replacement: every cohort has the same size",
            # Orders that suit the rounds do not suit the measurement as well.
            measurement_share=0.022,
            accountant="Rényi DP for sampling without replacement (Wang et al. 2019), or no "
            "amplification at all where that gives less",
        )
    )
