r"""What a server that knows the cohorts may see of a run that is changed after looking.

Amplification by sampling does not hold against it, so a privacy filter of its own adds up what is
really released: a round with noise s_t on a change of Δ is a Gaussian mechanism with μ_t = Δ/s_t,
and where rounds and noise are chosen one after the other, those who stop before

    Σ_t μ_t² > μ²

are together no worse than one Gaussian mechanism with μ (Smith and Thakurta 2022), provided that μ
was fixed before the first round. Nothing that was seen may move it, so it is made of a run's terms:

    μ² = R (Δ/s)²,    R = the cap on participations, or all rounds that the budget has room for,

with the noise s that the run began with. With a cap R the sum is over the R dearest rounds: nobody
is in more of them. Without one, every round counts as a participation of everybody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fpfl.privacy.filter import Mechanism, PrivacyFilter
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.privacy.terms import Terms


@dataclass(frozen=True)
class ServerLimit:
    """The filter on unamplified rounds.

    Parameters
    ----------
    mechanism : Mechanism
        A round as the run was begun.
    rounds : int
        The most rounds that it can come to as it was begun, changed or not.
    delta : float
        δ.
    cap : int, optional
        On participations, fixed at the start.
    """

    mechanism: Mechanism
    rounds: int
    delta: float
    cap: int | None = None

    @classmethod
    def of(cls, terms: Terms, limit: PrivacyFilter) -> ServerLimit:
        """The filter of a run's terms; ``limit`` is the one against everybody else.

        Never less than the planned rounds: as long as nothing is changed, all of them may be used.
        """
        rounds = max(terms.rounds, limit.room({}, terms.mechanism))
        return cls(terms.mechanism, rounds, terms.delta, terms.cap)

    @property
    def participations(self) -> int:
        """R."""
        return self.rounds if self.cap is None else min(self.cap, self.rounds)

    @property
    def epsilon(self) -> float:
        """ε at δ of the whole budget μ², which is what is promised."""
        m = self.mechanism
        return gaussian_epsilon(
            m.noise_multiplier, self.participations, self.delta, sensitivity=m.sensitivity
        )

    def fits(self, charges: Mapping[Mechanism, int]) -> bool:
        """Whether all of these together keep to μ²."""
        left, used = self.cap, []
        for mechanism, times in sorted(charges.items(), key=lambda item: -_square(item[0])):
            counted = times if left is None else min(times, left)
            used.append(counted * _square(mechanism))
            left = None if left is None else left - counted
        # The tolerance is for rounding; ε has a thousand times as much room.
        return math.fsum(used) <= self.participations * _square(self.mechanism) * (1 + 1e-12)


def _square(mechanism: Mechanism) -> float:
    """μ² of one release."""
    return (mechanism.sensitivity / mechanism.noise_multiplier) ** 2
