r"""The privacy filter: a budget that holds even if settings are chosen after looking.

An accountant for a plan takes all of it as fixed before the first release. Where the noise, the
cohort or the number of rounds depends on what was released, a filter is needed: it adds up the
Rényi divergences of order α of what is really released and stops before their sum exceeds

    ρ = ε + log(α/(α − 1)) + (log δ + log α)/(α − 1).

Then all releases together are (ε, δ)-private (Feldman & Zrnic 2021; Lécuyer 2021), provided that
ε, δ and α were fixed before the first of them.

Against a server that knows the cohorts amplification by sampling does not hold, so a privacy filter
of its own adds up what is really released: a round with noise s_t on a change of Δ is a Gaussian
mechanism with μ_t = Δ/s_t, and where rounds and noise are chosen one after the other, those who
stop before

    Σ_t μ_t² > μ²

are together no worse than one Gaussian mechanism with μ (Smith and Thakurta 2022), provided that μ
was fixed before the first round. Nothing that was seen may move it, so it is made of a run's terms:

    μ² = R (Δ/s)²,    R = the cap on participations, or all rounds that the budget has room for,

with the noise s that the run began with. With a cap R the sum is over the R dearest rounds: nobody
is in more of them. Without one, every round counts as a participation of everybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, get_args

from fpfl.numerics.checks import cohort_of, positive_number, probability, whole_number
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.conventions.base import SAMPLERS
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.privacy.renyi import renyi_epsilon, renyi_gain

if TYPE_CHECKING:
    from fpfl.privacy.plan import PrivacyPlan

# Divergences are added up in whole units of 2⁻⁶⁰, rounded up: such sums are exact, whatever their
# order, and two processes that read the same charges agree to the last one.
_UNITS = 2**60
# No filter has room for one release of this divergence, amplified or not: sampling m of K users
# takes off less than 2·log K.
_LARGEST_EPSILON = 1e3
_HOPELESS = 1e4
_LARGEST_ORDER = 1_000_000

_ORDER_HINT = "give a whole Rényi order, e.g. good_order(epsilon, delta, mechanism)"
_DELTA_HINT = "give the δ of (ε, δ)-differential privacy, e.g. 1 / (10 * population)"


@dataclass(frozen=True)
class Mechanism:
    """One release as an accountant sees it: one round's noisy totals.

    Parameters
    ----------
    sampler : {"poisson", "fixed", "all", "coins"}
        How the cohort is drawn: every user independently, a fixed number of users, or everyone;
        with "coins" every user independently, and noise in shares (`fpfl.privacy.renyi`).
        Cohorts of a fixed size have replace-one neighbours only.
    population, cohort : int
        K and m; the same number where everyone takes part.
    noise_multiplier : float
        s/C with all blocks together, never over the sensitivity.
    neighbours : {"zero-out", "add-remove", "replace-one"}
        What one user may change. Replacing a user changes a total by up to 2C, always.
    """

    sampler: str
    population: int
    cohort: int
    noise_multiplier: float
    neighbours: Neighbours

    def __post_init__(self) -> None:
        relations = get_args(Neighbours)
        for name, known in (("sampler", tuple(SAMPLERS)), ("neighbours", relations)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                words = ", ".join(map(repr, known))
                raise ValueError(f"{name} must be one of {words}, but got {value!r}.")
        users, size = cohort_of(self.population, self.cohort)
        sampler = SAMPLERS[self.sampler]
        if sampler.fixed and self.neighbours != "replace-one":
            raise ValueError(
                f"cohorts of a fixed size cannot have {self.neighbours!r} neighbours: another user "
                "fills the slot, so use 'replace-one', or the sampler 'poisson'."
            )
        if sampler.everybody and size != users:
            raise ValueError(
                f"where everyone takes part, cohort is population = {users}, but got {size}: use "
                "the sampler 'poisson' or 'fixed' for a part of the users."
            )
        noise = positive_number(
            "noise_multiplier", self.noise_multiplier, hint="give the noise over the clip bound"
        )
        for name, number in (("population", users), ("cohort", size), ("noise_multiplier", noise)):
            object.__setattr__(self, name, number)

    @classmethod
    def of(cls, plan: PrivacyPlan) -> Mechanism:
        """One round of a plan, as it is and not as it is reported.

        For the users that the run really draws from, and with the true sensitivity: the paper's
        convention is sampling without replacement with replace-one neighbours. A cap on
        participations only lowers the divergence, and is not counted on. Where a server picks the
        cohort, everybody pays for every round; a person on several nodes is that many times as
        likely to be there.
        """
        users, sampler = plan.real_population or plan.population, plan.terms.sampler
        return cls(
            sampler=sampler.name,
            population=users,
            cohort=users if sampler.everybody else min(users, plan.copies * plan.cohort),
            noise_multiplier=plan.noise_multiplier,
            neighbours=plan.neighbours,
        )

    @classmethod
    def measurement_of(cls, plan: PrivacyPlan) -> Mechanism | None:
        """The release before the first round, where the plan has one."""
        if plan.measurement is None:
            return None
        users = plan.real_population or plan.population
        return cls("all", users, users, plan.measurement, plan.neighbours)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in types that JSON knows."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: object) -> Mechanism:
        """Undo :meth:`as_dict`; anything but exactly these fields is a ``ValueError``."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise ValueError(
                f"a mechanism must have exactly the fields {', '.join(sorted(names))}, but got "
                f"{values!r}."
            )
        return cls(**values)

    @property
    def sensitivity(self) -> int:
        """How much one user changes a total, in clip bounds."""
        return 2 if self.neighbours == "replace-one" else 1

    def renyi(self, order: int) -> float:
        """Bound ρ(α) on the Rényi divergence of one release, rounded up.

        Without amplification it is α·Δ²/(2s²), which is exact where everyone takes part, and never
        exceeded: whoever sees the cohorts too knows more. Below that it is the sampler's own bound
        (`fpfl.privacy.conventions`).
        """
        return _renyi(self, whole_number("order", order, least=2, hint=_ORDER_HINT))


@lru_cache(maxsize=4096)
def _renyi(mechanism: Mechanism, order: int) -> float:
    ratio = mechanism.sensitivity / mechanism.noise_multiplier
    unamplified = order * ratio * ratio / 2
    if mechanism.cohort == mechanism.population or not unamplified < _HOPELESS:
        return unamplified
    return SAMPLERS[mechanism.sampler].renyi(mechanism, order, unamplified)


def renyi_budget(epsilon: float, order: int, delta: float) -> float:
    """Largest ρ of order α whose :func:`renyi_epsilon` at δ is ``epsilon``, rounded down.

    0 where not even the smallest release fits: with a small ε the order has to be large.
    """
    budget = positive_number("epsilon", epsilon, hint="give the ε to be kept")
    # Far more than the rounding of every sum here.
    return max(0.0, budget + renyi_gain(order, delta) - 1e-12 * max(1.0, budget))


def good_order(epsilon: float, delta: float, mechanism: Mechanism | None = None) -> int:
    """The Rényi order at which a filter has room for most releases.

    An order is fixed before anything is released, so it is chosen from public numbers alone. By
    default it is the best one for a Gaussian mechanism without amplification, ρ(α) = α·x. With
    sampled cohorts and little noise (s/C near 1) that one is too large: there, from some order on,
    amplification vanishes all at once, and with it nearly all of the room. Give the mechanism
    that will be released most.

    Parameters
    ----------
    epsilon, delta : float
        The budget.
    mechanism : Mechanism, optional
        What will be released most.

    Returns
    -------
    int
        The order α ≥ 2 with the largest :func:`renyi_budget` over ρ(α).
    """

    def best(rho: Callable[[int], float], most: int) -> int:
        # The budget is concave in α up to 1/δ, where it is positive, and ρ(α)/α does not fall: so
        # room rises to its largest value and falls then. Were it otherwise, any order is valid.
        def room(order: int) -> float:
            budget = epsilon + renyi_gain(order, delta)
            return budget / rho(order) if budget > 0 else budget

        low, high = 2, most
        while low < high:
            middle = (low + high) // 2
            if room(middle + 1) > room(middle):
                low = middle + 1
            else:
                high = middle
        return low

    renyi_budget(epsilon, 2, delta)  # says what is wrong with the two
    order = best(float, min(math.ceil(1 / delta) + 1, _LARGEST_ORDER))
    return order if mechanism is None else best(mechanism.renyi, order)


class OneRelease:
    """What is planned to be released once, with everybody taking part.

    Attributes
    ----------
    privacy
        The same as a privacy plan: one round.
    """

    privacy: PrivacyPlan

    @property
    def mechanism(self) -> Mechanism:
        """What a ledger charges, or an accountant composes."""
        users = self.population
        return Mechanism("all", users, users, self.noise_multiplier, self.neighbours)

    @property
    def population(self) -> int:
        """K: how many users there are."""
        return self.privacy.population

    @property
    def neighbours(self) -> Neighbours:
        """Which populations count as neighbours."""
        return self.privacy.neighbours

    @property
    def delta(self) -> float:
        """δ."""
        return self.privacy.delta

    @property
    def noise_multiplier(self) -> float:
        """σ = s/C."""
        return self.privacy.noise_multiplier


@dataclass(frozen=True)
class PrivacyFilter:
    """A budget of ε at δ, kept at one Rényi order, for releases chosen one after the other.

    All three have to be fixed before the first release, and what is promised is ε itself, the
    budget, however little of it was used when somebody decided to stop. Charges are counted
    by mechanism: their order does not matter.

    Parameters
    ----------
    epsilon, delta : float
        The budget.
    order : int
        Rényi order α ≥ 2, see :func:`good_order`.
    """

    epsilon: float
    delta: float
    order: int

    def __post_init__(self) -> None:
        epsilon = positive_number(
            "epsilon", self.epsilon, most=_LARGEST_EPSILON, hint="give the ε that may be spent"
        )
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", probability("delta", self.delta, hint=_DELTA_HINT))
        order = whole_number("order", self.order, least=2, hint=_ORDER_HINT)
        object.__setattr__(self, "order", order)
        if self.units < 1:
            raise ValueError(
                f"at the Rényi order {order} a budget of ε = {epsilon:g} at δ = {self.delta:g} has "
                f"no room for any release: use good_order(epsilon, delta), which is "
                f"{good_order(epsilon, self.delta)}."
            )

    @property
    def budget(self) -> float:
        """ρ: the sum of divergences that ε at δ has room for."""
        return renyi_budget(self.epsilon, self.order, self.delta)

    @cached_property
    def units(self) -> int:
        """The budget in units of 2⁻⁶⁰, rounded down."""
        return math.floor(self.budget * _UNITS)

    def cost(self, mechanism: Mechanism) -> int:
        """One release in units of 2⁻⁶⁰, rounded up: sums of these are exact."""
        return math.ceil(min(mechanism.renyi(self.order), _HOPELESS) * _UNITS)

    def rho(self, charges: Mapping[Mechanism, int]) -> float:
        """The sum of divergences of what was charged."""
        return self._sum(charges) / _UNITS

    def fits(self, charges: Mapping[Mechanism, int]) -> bool:
        """Whether all of these together keep to the budget."""
        return self._sum(charges) <= self.units

    def spent(self, charges: Mapping[Mechanism, int]) -> float:
        """ε of what was charged so far, for orientation.

        The promise is the budget. Its use so far depends on what was released, and no ε that is
        read off on the way is a guarantee; the first charge alone shows as a good part of ε.
        """
        return renyi_epsilon(self.rho(charges), self.order, self.delta)

    def room(self, charges: Mapping[Mechanism, int], mechanism: Mechanism) -> int:
        """How many more releases of ``mechanism`` fit after ``charges``."""
        return max(0, self.units - self._sum(charges)) // self.cost(mechanism)

    def _sum(self, charges: Mapping[Mechanism, int]) -> int:
        for mechanism, times in charges.items():
            whole_number(f"charges[{mechanism!r}]", times, least=0, hint="count the releases")
        return sum(times * self.cost(mechanism) for mechanism, times in charges.items())


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
    measurement : Mechanism, optional
        The release before the first round, which everybody is in: μ² has its own besides, and no
        cap is about it.
    """

    mechanism: Mechanism
    rounds: int
    delta: float
    cap: int | None = None
    measurement: Mechanism | None = None

    @classmethod
    def of(cls, terms: Terms, limit: PrivacyFilter) -> ServerLimit:
        """The filter of a run's terms; ``limit`` is the one against everybody else.

        Never less than the planned rounds: as long as nothing is changed, all of them may be used.
        """
        before = {} if terms.measurement is None else {terms.measurement: 1}
        rounds = max(terms.rounds, limit.room(before, terms.mechanism))
        return cls(terms.mechanism, rounds, terms.delta, terms.cap, terms.measurement)

    @property
    def participations(self) -> int:
        """R."""
        return self.rounds if self.cap is None else min(self.cap, self.rounds)

    @property
    def epsilon(self) -> float:
        """ε at δ of the whole budget μ², which is what is promised."""
        m, before = self.mechanism, self.measurement
        return gaussian_epsilon(
            m.noise_multiplier,
            self.participations,
            self.delta,
            sensitivity=m.sensitivity,
            measurement=None if before is None else before.noise_multiplier,
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


@dataclass(frozen=True)
class Terms:
    """What a private run may cost, fixed before it begins.

    ``measurement`` is the release before the first round, where there is one. ``budget`` is ε of
    the filter at ``delta`` and ``order``, in case settings are changed later; None where no
    accountant was there to compute it. ``cap`` is on participations.
    """

    mechanism: Mechanism
    rounds: int
    delta: float
    budget: float | None
    order: int | None
    cap: int | None = None
    measurement: Mechanism | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        before = self.measurement
        return {
            "mechanism": self.mechanism.as_dict(),
            "rounds": self.rounds,
            "delta": self.delta,
            "budget": self.budget,
            "order": self.order,
            "cap": self.cap,
            **({} if before is None else {"measurement": before.as_dict()}),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Terms:
        """The terms of plain values."""
        named = {n: Mechanism.from_dict(content[n]) for n in _MECHANISMS if n in content}
        return cls(**content | named)


_MECHANISMS = ("mechanism", "measurement")
