"""What privacy costs: the plan, its samplers and noise, the accountants and the statement."""

from fpfl.privacy.accounting import (
    MissingAccountantError,
    Neighbours,
    calibrate_poisson,
    calibrate_without_replacement,
    epsilon_poisson,
    epsilon_without_replacement,
)
from fpfl.privacy.conventions.base import Convention
from fpfl.privacy.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    participations_bound,
    participations_of_one,
)
from fpfl.privacy.plan import Block, PrivacyPlan, PrivacyWarning, compare_conventions
from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.privacy.statement import PrivacyStatement, round_up

__all__ = [
    "Block",
    "Convention",
    "FixedSizeSampling",
    "MissingAccountantError",
    "Neighbours",
    "Participation",
    "PoissonSampling",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivacyWarning",
    "calibrate_poisson",
    "calibrate_without_replacement",
    "compare_conventions",
    "epsilon_poisson",
    "epsilon_without_replacement",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "participations_bound",
    "participations_of_one",
    "round_up",
]
