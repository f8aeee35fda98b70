r"""The public numbers that a plan is made from, and what follows from them for a cohort and rounds.

Three figures say whether these will do. Each is at most 1 where it does:

    gradient   s √p/(m C): the length of the noise on the mean of the gradients, over the most that
               the mean can be,
    step       η₀/(5 η): whether the rule for η leaves, in spite of noise, a fifth of a step,
    gap        2 (error of D_a)/α: twice the standard error of the worst group's difference over
               the second half of the run, over the tolerance.

The model is the mean of that half's iterates, and multipliers add up what they see: so far, and no
further, can they bring groups together. On Adult it is about the gap that training ended with
(``tests/planning/test_planning.py`` compares it with the runs of ``docs/robust.md``). The figures
are rules of thumb.

The noise follows from ε (`fpfl.PrivacyPlan.calibrate`) and the rules of `fpfl.suggest`; what it
does to counts is in `fpfl.planning.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import BY_NAME, Constraint, equal_error
from fpfl.fairness.groups import Attribute
from fpfl.methods import OneGradient
from fpfl.planning.errors import (
    Counted,
    effective_rounds,
    expected_count,
    gap_error,
    moments,
)
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import COUNTS, GRADIENTS, SELECTION, Clipping, Privacy
from fpfl.training.defaults import (
    full_rate,
    suggested_clipping,
    suggested_learning_rate,
)

SHORTENED = 5.0
"""How many times shorter than without noise steps may be."""


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
            "step": self.full_rate / (SHORTENED * self.learning_rate),
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


Share = float | tuple[float, float]
"""A group's share of the samples, or (share, its own base rate)."""

ROUNDING = 0.02
"""Shares that add up to 1 but for so much are taken for rounded ones."""

UNIT_RANGE = (0.0, 1.0)
_NOT_PLANNED = ("predictive_parity",)
CONSTRAINTS = (*(name for name in BY_NAME if name not in _NOT_PLANNED), "equal_error")


@dataclass(frozen=True)
class Question:
    """The public numbers that a plan is made from; guesses of whoever asks, not read from data.

    Parameters
    ----------
    population, samples_per_user
        K, and how many samples a user has on average.
    groups
        ``{attribute: {value: share}}``: the shares of the samples, or (share, base rate).
    parameters
        p, of the model.
    epsilon, delta
        The budget; δ is 1/(10 K) when it is not given.
    constraint, tolerance
        A name as configs have it, and α.
    base_rate
        The share of positive samples, where a rate needs one and a group has none of its own.
    rate
        p: about what the constrained rate will be. None: whatever is worst.
    """

    population: int
    groups: Mapping[str, Mapping[str, Share]]
    parameters: int
    epsilon: float
    samples_per_user: float = 1.0
    delta: float | None = None
    constraint: str = "fnr_parity"
    tolerance: float = 0.02
    base_rate: float | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.constraint not in CONSTRAINTS:
            raise ValueError(
                f"constraint is {self.constraint!r}; expected one of {', '.join(CONSTRAINTS)}"
            )
        if self.population < 2 or self.parameters < 1:
            raise ValueError(
                f"population is {self.population} and parameters {self.parameters}; expected "
                "whole numbers, at least 2 users and 1 parameter"
            )
        if not (math.isfinite(self.samples_per_user) and self.samples_per_user > 0):
            raise ValueError(f"samples_per_user is {self.samples_per_user}; it must be positive")
        for name in ("tolerance", "base_rate", "rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ValueError(f"{name} is {value}; it must be between 0 and 1")
        if not self.groups:
            raise ValueError("no groups were given; e.g. groups={'sex': {'F': 0.4, 'M': 0.6}}")
        _ = self.counted  # checks the shares

    @cached_property
    def schema(self) -> Schema:
        """The groups and samples per user, as training would have them declared."""
        attributes = tuple(
            Attribute(name, tuple(values), unknown=self._shares(name)[1])
            for name, values in self.groups.items()
        )
        regression = self.constraint == "equal_error"
        return Schema(
            shape=(1,),
            classes=None if regression else 2,
            label_range=UNIT_RANGE if regression else None,
            attributes=attributes,
            samples_per_user=self.samples_per_user,
        )

    @cached_property
    def asked(self) -> Constraint:
        """The constraint itself."""
        if self.constraint == "equal_error":
            return equal_error(label_range=UNIT_RANGE, tolerance=self.tolerance)
        return BY_NAME[self.constraint](tolerance=self.tolerance)

    @cached_property
    def relevant(self) -> float:
        """Which share of samples the constraint counts, once or more."""
        return sum(self._whole(rate.name) for rate in self.asked.rates)

    @cached_property
    def counted(self) -> tuple[Counted, ...]:
        """Every rate × group with its share of what is counted."""
        partition = len(self.groups) == 1 and not self._shares(next(iter(self.groups)))[1]
        found = []
        for rate in self.asked.rates:
            for name, values in self.groups.items():
                shares, _ = self._shares(name)
                for value, share in shares.items():
                    own = share * self._condition(rate.name, self._base(name, value))
                    whole = self._whole(rate.name) / self.relevant
                    others = len(values) - 1 if partition else None
                    found.append(
                        Counted(rate.name, f"{name}={value}", own / self.relevant, whole, others)
                    )
        return tuple(found)

    def setting(self, cohort: int, rounds: int) -> Setting:
        """What follows from a cohort and rounds."""
        privacy = Privacy(epsilon=self.epsilon, delta=self.delta)
        clipping = suggested_clipping(
            privacy, self.schema, self.asked, population=self.population, cohort=cohort,
            rounds=rounds, parameters=self.parameters,
        )  # fmt: skip
        privacy = replace(privacy, clip=clipping)
        plan = privacy.plan(population=self.population, cohort=cohort, rounds=rounds)
        noise = plan.noise_stddev(GRADIENTS)
        return Setting(
            cohort=cohort,
            rounds=rounds,
            noise_multiplier=plan.noise_multiplier,
            clipping=clipping,
            learning_rate=self._first_rate(plan, clipping),
            full_rate=full_rate(self.schema),
            gradient_noise=noise,
            gradient_length=noise * math.sqrt(self.parameters) / cohort,
            count_noise=plan.noise_stddev(COUNTS),
            accuracy_error=self._accuracy_error(plan, clipping.selection),
            groups=self._noises(plan, clipping),
            tolerance=self.tolerance,
            epsilon_server=plan.epsilon_server,
            delta_server=2.0 * plan.delta,
            participations=plan.participations,
        )

    def _first_rate(self, plan: PrivacyPlan, clipping: Clipping) -> float:
        """η of the first round."""
        rate = suggested_learning_rate(plan, clipping, self.schema)
        reference = None if clipping.adapts is None else clipping.adapts.reference
        return rate if reference is None else rate * min(1.0, reference / clipping.bound)

    def _noises(self, plan: PrivacyPlan, clipping: Clipping) -> tuple[GroupNoise, ...]:
        times = 1 if self.counted[0].others is not None else 1 + len(self.groups)
        A, B = moments(self.samples_per_user, self.relevant, (clipping.counts or 1.0) / times)
        noise, found = plan.noise_stddev(COUNTS), []
        averaging = math.sqrt(effective_rounds(OneGradient().decay, plan.rounds))
        for each in self.counted:
            error = gap_error(
                each,
                cohort=plan.cohort,
                population=self.population,
                noise=noise,
                A=A,
                B=B,
                rate=self.rate,
            )
            found.append(
                GroupNoise(
                    each.rate,
                    each.group,
                    expected_count(plan.cohort, each.share, A),
                    noise,
                    error,
                    error / averaging,
                    error / math.sqrt(max(1.0, plan.rounds / 2.0)),
                )
            )
        return tuple(found)

    def _accuracy_error(self, plan: PrivacyPlan, most: float) -> float:
        """The noise alone, at an accuracy that makes most of it."""
        A, _ = moments(self.samples_per_user, 1.0, most)
        # hits/(hits + misses) is off by what misses are where it is near 1: with the confusion
        # table of C classes the sum of C² − C numbers, in a regression one.
        C = self.schema.classes
        numbers = 1 if C is None else C**2 - C
        return (
            math.sqrt(numbers)
            * plan.noise_stddev(SELECTION)
            / (expected_count(plan.cohort, 1.0, A))
        )

    def _shares(self, name: str) -> tuple[dict[str, float], bool]:
        """An attribute's shares, made to add up where they were rounded; and whether some lack."""
        given = {
            value: float(share[0] if isinstance(share, tuple) else share)
            for value, share in self.groups[name].items()
        }
        total = sum(given.values())
        if len(given) < 2 or min(given.values()) <= 0.0 or total > 1.0 + ROUNDING:
            raise ValueError(
                f"the groups of {name!r} have the shares {given}; expected two or more, each "
                "above 0, that add up to 1 (or less, where some samples have no known group)"
            )
        lacking = total < 1.0 - ROUNDING
        scale = 1.0 if lacking else 1.0 / total
        return {value: scale * share for value, share in given.items()}, lacking

    def _base(self, name: str, value: str) -> float | None:
        given = self.groups[name][value]
        base = given[1] if isinstance(given, tuple) else self.base_rate
        if base is not None and not 0.0 < base < 1.0:
            raise ValueError(f"the base rate of {name}={value} is {base}; it is between 0 and 1")
        return base

    def _whole(self, rate: str) -> float:
        """The share of samples that a rate counts: the declared one, or the first attribute's."""
        name = next(iter(self.groups))
        shares, lacking = self._shares(name)
        own = sum(s * self._condition(rate, self._base(name, v)) for v, s in shares.items())
        if not lacking:
            return own
        if self.base_rate is None:
            return own / sum(shares.values())
        return self._condition(rate, self.base_rate)

    def _condition(self, rate: str, base: float | None) -> float:
        """Which share of samples is in d'."""
        if rate not in ("FNR", "FPR"):
            return 1.0
        if base is None:
            raise ValueError(
                f"{self.constraint} compares positive samples; give base_rate, a public guess of "
                "their share (or one for each group)"
            )
        return base if rate == "FNR" else 1.0 - base
