"""How the cohort of a round is drawn, and how often one user may take part.

A sampler is only half of a privacy guarantee: amplification by sampling holds for the sampler that
the accountant assumed, and for no other. Samplers are therefore made by a
:class:`~fpfl.privacy.PrivacyPlan`, which knows the accountant that belongs to each.

Who is in a cohort must stay secret for the amplification to hold, so outside a simulation the
generator is one seeded by the operating system (``numpy.random.default_rng()``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fpfl.numerics.checks import cohort_of, whole_number


@dataclass(frozen=True)
class PoissonSampling:
    """Every user takes part in a round with probability ``cohort / population``, independently.

    The size of a cohort is random, Binomial(K, m/K), and private: whoever divides by it, or cuts a
    cohort to fit into memory, leaves the guarantee behind. Divide by ``cohort``.

    A cap on participations is sound with add-remove or zero-out neighbours, and only there. Take
    every other user's draws as given: they are independent of this user's, and distributed alike
    for both neighbours. Given them and what was released so far, the chance that this user takes
    part in the next round is

        q · P(cap not reached | past) ≤ q,

    and the neighbour without the user (or with zeros in the user's place) does not depend on the
    cap at all. So each round is dominated by the uncapped one, and adaptive composition holds.
    With replace-one neighbours the past tells the cap's state apart under *both* neighbours, and
    differently; with cohorts of a fixed size one user's cap also moves the others' chances. That
    argument fails there, so :class:`~fpfl.privacy.PrivacyPlan` refuses such a cap.

    Parameters
    ----------
    population : int
        Number of users K.
    cohort : int
        Expected number of users per round m.
    max_participations : int, optional
        A user who has taken part this often contributes nothing any more (see
        :meth:`participation`).
    listed : int, optional
        How many users there are to draw from, where K is a declared number and that is another
        one. Each is drawn with probability m/K, whoever else there is.
    """

    population: int
    cohort: int
    max_participations: int | None = None
    listed: int | None = None

    def __post_init__(self) -> None:
        population, cohort = cohort_of(self.population, self.cohort)
        object.__setattr__(self, "population", population)
        object.__setattr__(self, "cohort", cohort)
        if self.max_participations is not None:
            cap = whole_number("max_participations", self.max_participations, hint=_CAP_HINT)
            object.__setattr__(self, "max_participations", cap)
        if self.listed is not None:
            listed = whole_number("listed", self.listed, hint="give the number of users there are")
            object.__setattr__(self, "listed", listed)

    @property
    def probability(self) -> float:
        """Chance q = m/K of one user to be in one cohort (before any cap)."""
        return self.cohort / self.population

    def draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one cohort: distinct user indices in rising order.

        Given how many users take part, all sets of that many are equally likely. So the number
        comes first, then that many distinct users: O(cohort), whatever the population.
        """
        users = self.listed or self.population
        return _distinct(rng, users, int(rng.binomial(users, self.probability)))

    def participation(self, past: Mapping[int, int] | None = None) -> Participation:
        """Return a counter that applies this sampler's cap, fresh or with past participations."""
        return Participation(self.max_participations, past)


@dataclass(frozen=True)
class FixedSizeSampling:
    """Every cohort is a uniformly random set of exactly ``cohort`` users (without replacement).

    There is no cap here: see :class:`PoissonSampling` for why it would not be sound.

    Parameters
    ----------
    population : int
        Number of users K.
    cohort : int
        Number of users per round m.
    """

    population: int
    cohort: int

    def __post_init__(self) -> None:
        population, cohort = cohort_of(self.population, self.cohort)
        object.__setattr__(self, "population", population)
        object.__setattr__(self, "cohort", cohort)

    @property
    def probability(self) -> float:
        """Chance q = m/K of one user to be in one cohort."""
        return self.cohort / self.population

    def draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one cohort: ``cohort`` distinct user indices in rising order, in O(cohort)."""
        return _distinct(rng, self.population, self.cohort)

    def participation(self, past: Mapping[int, int] | None = None) -> Participation:
        """Return a counter without a cap, fresh or with past participations."""
        return Participation(None, past)


class Participation:
    """Counts how often each user has taken part, and drops those who have reached the cap.

    Only users who were drawn at least once are stored, and a round costs O(cohort). The counts say
    who was in which cohort: they are as secret as the cohorts.

    Parameters
    ----------
    cap : int or None
        Most participations of one user; None counts without dropping anyone.
    counts : mapping of int to int, optional
        Participations so far, to resume a run.
    """

    def __init__(self, cap: int | None = None, counts: Mapping[int, int] | None = None) -> None:
        self.cap = None if cap is None else whole_number("cap", cap, hint=_CAP_HINT)
        self._counts: dict[int, int] = {}
        self._uncounted: list[NDArray[np.int64]] = []
        self._withdrawn: NDArray[np.int64] | None = None
        for user, count in (counts or {}).items():
            key = whole_number("a user's index", user, least=0, hint="give what .counts returned")
            number = whole_number("a user's count", count, least=0, hint="give what .counts gave")
            if self.cap is not None and number > self.cap:
                raise ValueError(
                    f"user {key} has taken part {number} times already, more than cap={self.cap}: "
                    "resume with the cap that the run was started with."
                )
            self._counts[key] = number

    @property
    def counts(self) -> dict[int, int]:
        """Participations of every user drawn so far, by index (a copy)."""
        for users in self._uncounted:
            for user in users.tolist():
                self._counts[user] = self._counts.get(user, 0) + 1
        self._uncounted.clear()
        return dict(self._counts)

    def withdraw(self, users: Collection[int]) -> None:
        """From the next call of :meth:`admit` on these users contribute nothing.

        A user decides so without looking at any other's data, and sends nothing afterwards, which
        is what the neighbour without the user does, too. The cohorts of the others stay what they
        are: with a fixed size the slot of a user who withdrew stays empty.
        """
        self._withdrawn = np.fromiter(users, dtype=np.int64) if users else None

    def admit(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of ``users`` who may still take part, and count them.

        Parameters
        ----------
        users : ndarray of int64
            A cohort as drawn: distinct user indices.

        Returns
        -------
        ndarray of int64
            Those who did not withdraw and whose count was below the cap, in the same order.
        """
        if self._withdrawn is not None:
            users = users[~np.isin(users, self._withdrawn)]
        if self.cap is None:
            self._uncounted.append(users)  # counted when somebody asks
            return users
        admitted = np.zeros(len(users), dtype=np.bool_)
        for position, user in enumerate(users.tolist()):
            count = self._counts.get(user, 0)
            if count < self.cap:
                self._counts[user] = count + 1
                admitted[position] = True
        return users[admitted]


_CAP_HINT = "give the most rounds that one user may take part in"


def _distinct(rng: np.random.Generator, population: int, size: int) -> NDArray[np.int64]:
    # For populations beyond 50 times the size (and for small ones) numpy uses Floyd's algorithm,
    # which touches `size` numbers; otherwise it shuffles the tail of an array no longer than 50
    # times the size. Either way the cost is O(size).
    users = rng.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(users).astype(np.int64, copy=False)
