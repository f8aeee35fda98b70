"""What a convention is: a sampler, what one user may change, and the accountant that fits both.

Each convention, or family of them, has a file of its own in this folder and registers itself:
plans, filters and statements ask the register, and know no sampler by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism
    from fpfl.privacy.plan import PrivacyPlan
    from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling


@dataclass(frozen=True)
class Sampler:
    """How cohorts are drawn, as an accountant of single rounds sees it.

    Parameters
    ----------
    name
        What ledgers call it.
    renyi
        ρ(α) of one release by a `Mechanism`, rounded up, given what it is without amplification.
    fixed
        Whether cohorts have a fixed size: then there are replace-one neighbours only.
    everybody
        Whether all users take part.
    """

    name: str
    renyi: Callable[[Mechanism, int, float], float]
    fixed: bool = False
    everybody: bool = False


@dataclass(frozen=True)
class Convention:
    """A convention, by name.

    Parameters
    ----------
    name
        What settings call it.
    sensitivity
        How much one user changes a total, in clip bounds, for every relation of neighbours that has
        a proof, or (the paper's) a precedent. The first is the default.
    sampler
        How its rounds look to a privacy filter.
    sampling
        The sampler for (users, m, cap on participations).
    epsilon
        ε of a plan for a population and a sensitivity, against those who see what is released.
    calibrate
        The noise multiplier for an ε.
    words, accountant
        How cohorts are drawn, and who accounts for them, in words.
    shares
        Whether nodes of a federation add the noise in shares.
    secret
        Whether not even the server knows the cohorts.
    capped
        The relations with which a proof covers a cap on participations.
    measurement_share
        The part of ε that a measurement of the inputs is planned for, so that by this accountant it
        costs 3% at most.
    measured
        σ₀ of that by this accountant, for (ε or None, σ or None, chance, rounds, δ, share); None
        where a Gaussian mechanism stands for the rounds (`fpfl.privacy.accounting`).
    """

    name: str
    sensitivity: Mapping[str, int]
    sampler: Sampler
    sampling: Callable[[int, int, int | None], PoissonSampling | FixedSizeSampling]
    epsilon: Callable[[PrivacyPlan, int, int], float]
    calibrate: Callable[[PrivacyPlan, float], float]
    words: str
    accountant: str
    shares: bool = False
    secret: bool = False
    capped: tuple[str, ...] = ()
    measurement_share: float = 0.029
    measured: Callable[[float | None, float | None, float, int, float, float], float] | None = None


REGISTER: dict[str, Convention] = {}
"""All conventions, by name."""

SAMPLERS: dict[str, Sampler] = {}
"""All samplers, by name: those of the conventions, and one for releases that everybody is in."""


def register(convention: Convention) -> Convention:
    """Make a convention known by its name, and its sampler."""
    REGISTER[convention.name] = convention
    SAMPLERS.setdefault(convention.sampler.name, convention.sampler)
    return convention


def rounded_up(amplified: float, unamplified: float) -> float:
    """A divergence that was computed as a sum of logarithms, and never more than without sampling.

    Such sums err by a few units in the last place: a divergence below that can come out as 0, or
    even negative.
    """
    return min(max(amplified, 0.0) * (1 + 1e-9) + 1e-15, unamplified)


EVERYBODY = Sampler("all", lambda mechanism, order, unamplified: unamplified, everybody=True)
SAMPLERS[EVERYBODY.name] = EVERYBODY
