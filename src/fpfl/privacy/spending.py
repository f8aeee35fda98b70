r"""ε so far: what the rounds until now would cost, had no more of them been planned.

An accountant takes long for one ε, and a round may take a millisecond. So ε is computed on a grid,

    t_i = ⌈T (i/n)²⌉,    i = 1, ..., n,

when it is first asked for, and a round shows the ε of the next t_i. ε grows with the number of
rounds, so that is a bound; it grows about as √t, so the grid's steps are about even in it.

It is for orientation. A run that was planned for T rounds and is stopped earlier costs what T
rounds cost: whoever stopped it had seen what was released.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfl.privacy.filter import Mechanism, PrivacyFilter

_POINTS = (8, 20)
"""The fewest and the most points of a grid; between them, one for twenty rounds."""


class Charges(Protocol):
    """What a run's ledger knows of its charges."""

    @property
    def planned(self) -> int:
        """T as it was planned, or last changed to."""
        ...

    @property
    def spent(self) -> int:
        """How many rounds have been charged, lost ones included."""
        ...

    @property
    def filter(self) -> PrivacyFilter | None:
        """The privacy filter, once settings were changed."""
        ...

    @property
    def all_charges(self) -> Mapping[Mechanism, int]:
        """How often each mechanism was charged, a measurement before the first round included."""
        ...


@dataclass(frozen=True)
class Spent:
    """ε so far, at most ``epsilon``, of the ``total`` that the run costs in the end."""

    epsilon: float
    total: float


@dataclass(frozen=True)
class Spending:
    """What a private run has cost after a round.

    Parameters
    ----------
    plan
        The run's plan.
    ledger
        Its ledger, where it is kept: rounds that were charged and lost count, and where settings
        were changed after looking the filter's own figure is taken.
    """

    plan: PrivacyPlan
    ledger: Charges | None = None
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def after(self, rounds: int) -> Spent | None:
        """ε after so many rounds; None where dp-accounting is missing and it takes that to know.

        It is the one that holds: with the true sensitivity, and for the users that there are.
        """
        limit = None if self.ledger is None else self.ledger.filter
        try:
            if self.ledger is not None and limit is not None:
                # Little of it is for one round, and much for the first: the filter is of one order.
                spent = limit.spent(self.ledger.all_charges)
                return Spent(min(spent, limit.epsilon), limit.epsilon)
            charged = rounds if self.ledger is None else max(rounds, self.ledger.spent)
            last = self.grid[-1]
            point = self.grid[bisect_left(self.grid, min(charged, last))]
            total = self._at(last)
            return Spent(min(self._at(point), total), total)
        except MissingAccountantError:
            return None

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """t_1 < ... < t_n = T (the module's formula)."""
        T = self.plan.rounds if self.ledger is None else self.ledger.planned
        fewest, most = _POINTS
        n = min(max(T // 20, fewest), most)
        return tuple(sorted({-(-T * i * i // (n * n)) for i in range(1, n + 1)}))

    def _at(self, rounds: int) -> float:
        if rounds not in self._known:
            plan = self.plan.with_rounds(rounds)
            real = plan.epsilon_real
            self._known[rounds] = plan.epsilon_honest if real is None else real
        return self._known[rounds]
