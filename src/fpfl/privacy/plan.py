"""The privacy plan: sampler, sensitivity, noise and accountant in one object.

Each of the four is right only together with the other three, so they are made together and cannot
be exchanged one by one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fpfl.numerics.checks import cohort_of, positive_number, whole_number
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.conventions import (
    Block,
    PrivacyWarning,
    checked_blocks,
    checked_cap,
    checked_delta,
    checked_pair,
)
from fpfl.privacy.conventions.base import REGISTER, Convention
from fpfl.privacy.gaussian import gaussian_epsilon, participations_bound
from fpfl.privacy.renyi import shares_epsilon
from fpfl.privacy.sampling import FixedSizeSampling, PoissonSampling
from fpfl.privacy.statement import BlockNoise, PrivacyStatement
from fpfl.store.typed import plain, typed

__all__ = ["Block", "Neighbours", "PrivacyPlan", "PrivacyWarning"]


@dataclass(frozen=True, init=False)
class PrivacyPlan:
    """What a run promises, and all that has to be done to keep it. Keyword arguments only.

    A user's statistics are clipped block by block to norms C_b and get Gaussian noise of

        s_b = C_b · σ / √ρ_b,    so that    Σ_b (C_b / s_b)² = 1/σ²:

    all blocks together are one Gaussian mechanism with noise multiplier σ.

    =============  ===================  ===========================  ===========  ==============
    convention     cohorts              neighbours                   sensitivity  accountant
    =============  ===================  ===========================  ===========  ==============
    poisson        Poisson              zero-out (default),          C            PLD
                                        add-remove
    poisson        Poisson              replace-one                  2C           PLD
    replace-one    fixed size           replace-one                  2C           RDP
    paper          fixed size           replace-one                  C (!)        RDP
    coins          Poisson, by secret   zero-out (default),          C            RDP, for noise
                   coins of the users   add-remove                                in shares
    picked         picked by a server   zero-out                     C            the same, not
                   that knows them                                                amplified
    =============  ===================  ===========================  ===========  ==============

    The paper takes σ at face value, as if one user changed a total by C at most. For
    replacement it is 2C, so its ε is too small: :attr:`epsilon_honest` gives the true one. Use this
    convention to reproduce the paper, and no other time.

    The last two are for federations whose nodes add the noise in shares (`fpfl.privacy.renyi`):
    σ is what at least so many honest nodes add together, and rounding is in it.

    Parameters
    ----------
    population : int
        Number of users K that ε is computed for.
    cohort : int
        Number of users per round m (expected, for Poisson).
    rounds : int
        Number of rounds T.
    noise_multiplier : float
        σ: the standard deviation of the noise over the clip bound, s/C, of a single block. Never
        over the sensitivity: at the same ε, ``replace-one`` has twice the paper's.
    blocks : iterable of Block
        Parts of the statistics, with different names and shares that add up to 1.
    convention : {"poisson", "replace-one", "paper"}, default "poisson"
        Fixes sampler, sensitivity and accountant.
    neighbours : {"zero-out", "add-remove", "replace-one"}, optional
        What one user may change; by default the convention's first in the table.
    delta : float, optional
        δ; by default 1 / (10 K). Above that there is a warning, from 1 / K on an error.
    max_participations : int, optional
        Cap on the rounds that one user takes part in. Poisson sampling with zero-out or add-remove
        neighbours only; :class:`PoissonSampling` says why.
    real_population : int, optional
        Number of users that the run draws its cohorts from, where that is not ``population``:
        then ε is hypothetical, and :attr:`epsilon_real` is what holds.
    copies : int, default 1
        A person may be on so many nodes of a federation. Conventions ``coins`` and ``picked``.
    measurement : float, optional
        σ₀: before the first round there is one more release, in which everybody takes part for
        certain, with noise of σ₀ of its own bounds; every ε here has it in. In a federation whose
        nodes add the noise σ₀ is what the honest ones add together.

    See Also
    --------
    PrivacyPlan.calibrate : the same with an ε in place of the noise multiplier.
    """

    convention: str
    neighbours: Neighbours
    population: int
    cohort: int
    rounds: int
    delta: float
    noise_multiplier: float
    blocks: tuple[Block, ...]
    max_participations: int | None
    real_population: int | None
    copies: int
    measurement: float | None

    def __init__(
        self,
        *,
        population: int,
        cohort: int,
        rounds: int,
        noise_multiplier: float,
        blocks: Iterable[Block],
        convention: str = "poisson",
        neighbours: Neighbours | None = None,
        delta: float | None = None,
        max_participations: int | None = None,
        real_population: int | None = None,
        copies: int = 1,
        measurement: float | None = None,
    ) -> None:
        users, size = cohort_of(population, cohort)
        real = None
        if real_population is not None:
            real, _ = cohort_of(real_population, size, of="real_population")
        relation = checked_pair(convention, neighbours)
        if copies != 1 and not REGISTER[convention].shares:
            shared = tuple(name for name, each in REGISTER.items() if each.shares)
            raise ValueError(
                f"copies={copies} goes with the conventions of federations, {shared}, and not with "
                f"{convention!r}"
            )
        fields = {
            "convention": convention,
            "neighbours": relation,
            "population": users,
            "cohort": size,
            "rounds": whole_number("rounds", rounds, hint="give the number of rounds"),
            "delta": checked_delta(delta, users, real),
            "noise_multiplier": positive_number(
                "noise_multiplier",
                noise_multiplier,
                hint="give the noise's standard deviation over the clip bound, or use "
                "PrivacyPlan.calibrate(epsilon=...) to have it computed",
            ),
            "blocks": checked_blocks(blocks),
            "max_participations": checked_cap(max_participations, convention, relation),
            "real_population": real,
            "copies": whole_number("copies", copies, hint="on how many nodes a person may be"),
            "measurement": None
            if measurement is None
            else positive_number("measurement", measurement, hint="give σ₀, or leave it out"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        population: int,
        cohort: int,
        rounds: int,
        blocks: Iterable[Block],
        convention: str = "poisson",
        neighbours: Neighbours | None = None,
        delta: float | None = None,
        max_participations: int | None = None,
        real_population: int | None = None,
        copies: int = 1,
        measurement: float | None = None,
    ) -> PrivacyPlan:
        """Return the plan with the least noise whose :attr:`epsilon` is at most ``epsilon``.

        Parameters
        ----------
        epsilon : float
            ε in (0, 100], by the plan's own convention and for ``population``.
        population, cohort, rounds, blocks, convention, neighbours, delta, max_participations, \
real_population, copies, measurement
            As in :class:`PrivacyPlan`.

        Returns
        -------
        PrivacyPlan
            ε is met to about one part in ten thousand, from below.
        """
        plan = cls(
            population=population,
            cohort=cohort,
            rounds=rounds,
            noise_multiplier=1.0,  # so that all the rest is checked before a long computation
            blocks=blocks,
            convention=convention,
            neighbours=neighbours,
            delta=delta,
            max_participations=max_participations,
            real_population=real_population,
            copies=copies,
            measurement=measurement,
        )
        noise = plan.terms.calibrate(plan, epsilon)
        # Nobody has seen this plan yet. Making a second one would warn twice about the same δ.
        object.__setattr__(plan, "noise_multiplier", noise)
        return plan

    def as_dict(self) -> dict[str, Any]:
        """All fields in types that JSON knows."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivacyPlan:
        """What :meth:`as_dict` wrote, or the plan that a statement's figures are of.

        (A statement says how often a user takes part; where that is no cap, it follows.)
        """
        said = {"max_participations": None, "copies": 1, "measurement": None, **values}
        if "participations_capped" in values:
            # Where noise comes in shares all rounds count, and no other number can be set.
            capped = values["participations_capped"] and values.get("convention") == "poisson"
            said["max_participations"] = values.get("participations") if capped else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # it was said when the plan was made
            return typed(cls, said, "the privacy plan")

    def with_rounds(self, rounds: int) -> PrivacyPlan:
        """The same plan for another T."""
        if rounds == self.rounds:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # it was said of this plan already
            return PrivacyPlan(**values | {"rounds": rounds})

    def noise_stddev(self, name: str) -> float:
        """Standard deviation of the noise on a block, s_b = C_b · σ / √ρ_b."""
        for block in self.blocks:
            if block.name == name:
                return block.bound * self.noise_multiplier / math.sqrt(block.share)
        known = ", ".join(repr(block.name) for block in self.blocks)
        raise ValueError(f"there is no block {name!r} in this plan: its blocks are {known}.")

    @property
    def sensitivity(self) -> int:
        """How much one user changes a total, in clip bounds, as the convention has it."""
        return self.terms.sensitivity[self.neighbours]

    @property
    def sensitivity_honest(self) -> int:
        """How much one user really changes a total, in clip bounds: 2 if replaced, otherwise 1."""
        return 2 if self.neighbours == "replace-one" else 1

    @property
    def sampling(self) -> PoissonSampling | FixedSizeSampling:
        """The sampler of the cohorts, over the users that the run really has."""
        users = self.real_population or self.population
        return self.terms.sampling(users, self.cohort, self.max_participations)

    @cached_property
    def epsilon(self) -> float:
        """ε by the plan's own convention, against those who see only what is released."""
        return self._amplified(self.population, self.sensitivity)

    @cached_property
    def epsilon_honest(self) -> float:
        """ε with the true sensitivity: other than :attr:`epsilon` for the paper's convention."""
        return self._amplified(self.population, self.sensitivity_honest)

    @cached_property
    def epsilon_real(self) -> float | None:
        """Honest ε at the same δ for the real population, or None where there is no other."""
        real = self._other_population
        return None if real is None else self._amplified(real, self.sensitivity_honest)

    @cached_property
    def participations(self) -> int:
        """Most rounds that one user takes part in: the cap, or what is exceeded with chance δ.

        Where noise comes in shares: the cap, or all.
        """
        if self.max_participations is not None:
            return min(self.max_participations, self.rounds)
        if self.terms.shares:
            return self.rounds
        return participations_bound(self.population, self.cohort, self.rounds, self.delta)

    @cached_property
    def participations_real(self) -> int | None:
        """:attr:`participations` in the real population, or None where there is no other."""
        real = self._other_population
        capped = self.max_participations is not None or self.terms.shares
        if real is None or capped:
            return None if real is None else self.participations
        return participations_bound(real, self.cohort, self.rounds, self.delta)

    @cached_property
    def epsilon_server(self) -> float:
        """ε against a server that knows the cohorts: unamplified, honest sensitivity.

        For a user who takes part :attr:`participations` times. Needs no accountant. With secret
        coins a server knows no cohorts: then it is :attr:`epsilon`.
        """
        if self.terms.secret:
            return self.epsilon
        return self.unamplified(self.participations)

    @cached_property
    def epsilon_server_real(self) -> float | None:
        """:attr:`epsilon_server` in the real population, or None where there is no other."""
        times = self.participations_real
        if times is not None and self.terms.secret:
            return self.epsilon_real
        return None if times is None else self.unamplified(times)

    def statement(self, seeded_noise: bool, seeded_cohorts: bool) -> PrivacyStatement:
        """Say in plain words what this plan promises, to whom, and what it does not.

        Parameters
        ----------
        seeded_noise : bool
            Whether the noise comes from a seed (a simulation) and not the operating system.
        seeded_cohorts : bool
            Whether the cohorts do.
        """
        return PrivacyStatement.of(
            self,
            tuple(
                BlockNoise(block.name, block.bound, block.share, self.noise_stddev(block.name))
                for block in self.blocks
            ),
            seeded_noise=seeded_noise,
            seeded_cohorts=seeded_cohorts,
        )

    @property
    def _other_population(self) -> int | None:
        return None if self.real_population == self.population else self.real_population

    @property
    def terms(self) -> Convention:
        """The convention itself: its sampler, sensitivities and accountant."""
        return REGISTER[self.convention]

    def chance(self, population: int) -> float:
        """How likely a person is in a round, as far as others cannot tell."""
        if self.terms.sampler.everybody:
            return 1.0
        return min(1.0, self.copies * self.cohort / population)

    def unamplified(self, participations: int) -> float:
        """ε of so many rounds against who knows the cohorts, with the honest sensitivity."""
        if self.terms.shares:
            return shares_epsilon(
                self.noise_multiplier, participations, self.delta, self.measurement
            )
        return gaussian_epsilon(
            self.noise_multiplier,
            participations,
            self.delta,
            sensitivity=self.sensitivity_honest,
            measurement=self.measurement,
        )

    def _amplified(self, population: int, sensitivity: int) -> float:
        return self.terms.epsilon(self, population, sensitivity)


COMPARED: tuple[str, ...] = ("paper", "replace-one", "poisson")
"""Those of one aggregator; noise that nodes add in shares is another setting."""


def compare_conventions(
    *,
    population: int,
    cohort: int,
    rounds: int,
    delta: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_participations: int | None = None,
) -> list[dict[str, Any]]:
    """What each convention makes of the same settings.

    Parameters
    ----------
    population, cohort, rounds : int
        K, m and T.
    delta : float, optional
        δ; by default 1 / (10 K).
    epsilon : float, optional
        ε to calibrate the noise of each convention for. Give this or ``noise_multiplier``.
    noise_multiplier : float, optional
        The same s/C for all conventions.
    max_participations : int, optional
        Cap for Poisson sampling; conventions with cohorts of a fixed size cannot have one and
        give the uncapped number.

    Returns
    -------
    list of dict
        One for each of ``paper``, ``replace-one`` and ``poisson``, with the keys ``convention``,
        ``noise_multiplier``, ``sensitivity``, ``epsilon``, ``epsilon_honest``,
        ``epsilon_server``, ``delta``, ``delta_server`` (with the chance δ that somebody takes part
        more often, where there is no cap) and ``participations``.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"give either epsilon or noise_multiplier, but got epsilon={epsilon!r} and "
            f"noise_multiplier={noise_multiplier!r}."
        )
    plans: list[PrivacyPlan] = []
    for convention in COMPARED:
        settings: dict[str, Any] = {
            "population": population,
            "cohort": cohort,
            "rounds": rounds,
            "delta": delta,
            "blocks": (Block("statistics", bound=1.0),),
            "convention": convention,
            "max_participations": max_participations if convention == "poisson" else None,
        }
        with warnings.catch_warnings():
            if plans:  # the first has said all that there is to say about δ
                warnings.simplefilter("ignore", PrivacyWarning)
            if noise_multiplier is not None:
                plans.append(PrivacyPlan(noise_multiplier=noise_multiplier, **settings))
            elif epsilon is not None:
                # The noise in sensitivities is cached: replace-one costs no second calibration.
                plans.append(PrivacyPlan.calibrate(epsilon=epsilon, **settings))
    return [
        {
            "convention": plan.convention,
            "noise_multiplier": plan.noise_multiplier,
            "sensitivity": plan.sensitivity,
            "epsilon": plan.epsilon,
            "epsilon_honest": plan.epsilon_honest,
            "epsilon_server": plan.epsilon_server,
            "delta": plan.delta,
            "delta_server": plan.delta * (1 if plan.max_participations is not None else 2),
            "participations": plan.participations,
        }
        for plan in plans
    ]
