r"""What follows from a cohort and rounds, and three figures that say whether they will do.

Each is at most 1 where it does:

    gradient   s √p/(m C): the length of the noise on the mean of the gradients, over the most that
               the mean can be,
    step       η₀/η: by how much the rule for η had to shorten steps because of noise,
    gap        2 (error of D_a)/α: twice the standard error of the worst group's difference over
               the second half of the run, over the tolerance.

The model is the mean of that half's iterates, and multipliers add up what they see: so far, and no
further, can they bring groups together. On Adult it is about the gap that training ended with
(``tests/test_planning.py`` compares it with the runs of ``docs/robust.md``). The figures are rules
of thumb.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fpfl.privacy.settings import Clipping


@dataclass(frozen=True)
class GroupNoise:
    """One group in one rate: what a round counts, and how far D_a is off.

    ``count`` is n'_a, ``noise`` the standard deviation on F_a and on n'_a − F_a; then the standard
    errors of D_a from one round, from the method's moving average, and from half of the run.
    """

    rate: str
    group: str
    count: float
    noise: float
    one_round: float
    averaged: float
    run: float


@dataclass(frozen=True)
class Setting:
    """A cohort and rounds, with all that follows from them.

    ``gradient_noise`` is s on each number of the summed gradient, ``gradient_length`` s √p/m.
    ``accuracy_error`` is the noise in one round's released accuracy. ``uploads`` is m T.
    """

    cohort: int
    rounds: int
    noise_multiplier: float
    clipping: Clipping
    learning_rate: float
    full_rate: float
    gradient_noise: float
    gradient_length: float
    count_noise: float
    accuracy_error: float
    groups: tuple[GroupNoise, ...] = field(repr=False)
    tolerance: float
    epsilon_server: float
    delta_server: float
    participations: int

    @property
    def uploads(self) -> int:
        """How many vectors users send in all."""
        return self.cohort * self.rounds

    @property
    def worst(self) -> GroupNoise:
        """The group whose difference is least sure."""
        return max(self.groups, key=lambda group: group.run)

    @property
    def figures(self) -> dict[str, float]:
        """What must be at most 1: see the module."""
        return {
            "gradient": self.gradient_length / self.clipping.bound,
            "step": self.full_rate / self.learning_rate,
            "gap": 2.0 * self.worst.run / self.tolerance,
        }

    @property
    def score(self) -> float:
        """The largest of the figures."""
        return max(self.figures.values())

    @property
    def good(self) -> bool:
        """Whether noise leaves enough of everything."""
        return self.score <= 1.0 + 1e-9

    def told(self, error: float) -> str:
        """Whether α can be told from a standard error: twice it fits, once it does, or neither."""
        if 2.0 * error <= self.tolerance:
            return "yes"
        return "barely" if error <= self.tolerance else "no"
