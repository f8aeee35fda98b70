"""The budget of a population: one file that all runs on the same users charge.

Every further run on the same users adds to what was released about them: another seed, a search
for settings, next year's training. A :class:`PopulationLedger` adds them up with a privacy filter
that is fixed when the file is made, refuses what would exceed it, and never refunds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, get_args

from fpfl.numerics.checks import whole_number
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.assumptions import ALONE, BEFORE_CHARGED
from fpfl.privacy.conventions import BudgetExhaustedError, checked_delta
from fpfl.privacy.filter import Mechanism, PrivacyFilter, good_order
from fpfl.privacy.renyi import renyi_epsilon
from fpfl.privacy.statement import PrivacyStatement, round_up
from fpfl.privacy.tuning import TuningCost
from fpfl.store.chain import Chain, ChainError

__all__ = ["BudgetExhaustedError", "PopulationLedger", "tuning_cost"]


class Charges:
    """A running account: takes records one after the other, in constant time each.

    Parameters
    ----------
    limit : PrivacyFilter
        The budget.
    population : int
        Number of users K that every mechanism has to be about.
    neighbours : str
        The relation that every mechanism has to be about.

    Attributes
    ----------
    runs : dict of str to dict of Mechanism to int
        How often each run charged each mechanism.
    before : set of str
        Runs of versions whose charges are not established.
    withdrawn : set of int
        Who withdrew.
    torn : int
        Number of lines that are no records.
    torn_tail : bool
        Whether one more such line is the file's last, in a file that is only looked at.
    """

    def __init__(self, limit: PrivacyFilter, population: int, neighbours: str) -> None:
        self.limit, self.population, self.neighbours = limit, population, neighbours
        self.runs: dict[str, dict[Mechanism, int]] = {}
        self.before: set[str] = set()
        self.withdrawn: set[int] = set()
        self.torn = 0
        self.torn_tail = False
        # The sum, the dearest mechanism in it, and what is still to be added: that takes an
        # accountant, and who only asks for withdrawals may do without.
        self._units = self._dearest = 0
        self._unsummed: list[Mechanism] = []
        self._known: dict[tuple[Any, ...], Mechanism] = {}

    def take(self, record: dict[str, Any]) -> None:
        """Take one record in; KeyError, TypeError or ValueError where it is none of a ledger's."""
        kind = record["kind"]
        if kind == "charge":
            mechanism = self._mechanism(record["mechanism"])
            if not isinstance(record["run"], str):
                raise TypeError(f"a charge of the run {record['run']!r}")
            counts = self.runs.setdefault(record["run"], {})
            counts[mechanism] = counts.get(mechanism, 0) + 1
            self._unsummed.append(mechanism)
            if record.get("contributions") != ALONE:
                self.before.add(record["run"])
        elif kind == "withdrawal":
            self.withdrawn.update(record["users"])
        elif kind == "torn":
            self.torn += record["lines"]
        else:
            raise ValueError(f"a record of kind {kind!r}")

    def by_mechanism(self) -> dict[Mechanism, int]:
        """How often each mechanism was charged, by all runs."""
        total: dict[Mechanism, int] = {}
        for counts in self.runs.values():
            for mechanism, times in counts.items():
                total[mechanism] = total.get(mechanism, 0) + times
        return total

    def spare(self, cost: int = 0) -> int:
        """What is left of the budget, in the filter's units, for something of this cost.

        A torn line counts as a charge of the dearest mechanism, this one included.
        """
        while self._unsummed:
            price = self.limit.cost(self._unsummed[-1])
            self._units += price
            self._dearest = max(self._dearest, price)
            self._unsummed.pop()  # last: an interrupt before it makes the sum too large
        lines = self.torn + self.torn_tail
        return self.limit.units - self._units - lines * max(self._dearest, cost)

    def check(self, mechanism: Mechanism) -> None:
        """Raise where a mechanism is about other users, or compares other neighbours."""
        if (mechanism.population, mechanism.neighbours) != (self.population, self.neighbours):
            raise ValueError(
                f"the ledger is about {self.population:,} users with {self.neighbours!r} "
                f"neighbours, but the mechanism is about {mechanism.population:,} with "
                f"{mechanism.neighbours!r}: only what is said about the same users in the same way "
                "can be added up. Change the run's settings, or use a ledger of its own."
            )

    def _mechanism(self, values: dict[str, Any]) -> Mechanism:
        key = tuple(values.items())
        found = self._known.get(key)
        if found is None:  # a run charges the same thing thousands of times: check it once
            found = Mechanism.from_dict(values)
            self.check(found)
            self._known[key] = found
        return found


def title(name: str, population: int) -> str:
    """What a population is called in messages."""
    named = f"{name!r} ({population:,} users)"
    return named if name else f"a population of {population:,} users"


def summary(values: dict[str, Any]) -> str:
    """Put a ledger's figures, ``PopulationLedger.as_dict()``, in plain words."""
    lines = [
        f"Budget of {title(values['name'], values['population'])}: ε = {values['epsilon']:g} at "
        f"δ = {values['delta']:g} for all runs together ({values['neighbours']} neighbours; "
        f"privacy filter, Rényi order {values['order']}).",
        f"Used: {values['share']:.1%} of it in {values['charges']:,} charges. For orientation, "
        f"that is ε = {round_up(values['spent'])}; what is promised is the budget. Nothing is ever "
        "refunded.",
    ]
    if values["torn"]:
        lines.append(
            f"Torn lines in the file: {values['torn']}; each counts as one charge, the dearest."
        )
    lines += [
        f"Run {run}: {counts['rounds']:,} charges, {counts['share']:.2%} of the budget; alone "
        f"ε = {round_up(counts['epsilon'])}."
        for run, counts in values["runs"].items()
    ]
    before = [run for run, counts in values["runs"].items() if not counts["established"]]
    if before:
        lines.append(BEFORE_CHARGED.format(runs=", ".join(before)))
    if len(values["runs"]) > 1:
        lines.append(str(TuningCost.of(values)))
    return "\n".join(
        [
            *lines,
            f"Users who withdrew: {values['withdrawn']:,}.",
            "The budget holds against those who see what the runs release, not against a server "
            "that knows who took part when: see each run's privacy statement. Small terms of δ are "
            "there, too, and add to the one above.",
        ]
    )


_HOLDS = "population ledger"


class PopulationLedger:
    """The open ledger of a population; made by :meth:`create` or :meth:`open`.

    The budget holds against those who see what all the runs release, and not against a server that
    knows the cohorts: each run's privacy statement gives that figure.

    A line of the file that was torn (power loss, a full disk) may have been a charge. It counts as
    one, at the price of the dearest mechanism that the file names anywhere.

    The file also names the users who withdrew: it is as confidential as the list of users, and
    made readable to its owner alone. Only :meth:`summary` and :meth:`as_dict` are for others.

    Attributes
    ----------
    name : str
        What the population is called.
    population : int
        Number of users K.
    neighbours : {"zero-out", "add-remove", "replace-one"}
        What one user may change, in every run.
    filter : PrivacyFilter
        The budget: ε, δ and the Rényi order.
    """

    def __init__(self, chain: Chain) -> None:
        first = chain.records[0]
        try:
            if first["holds"] != _HOLDS:
                raise ValueError(f"it holds a {first['holds']!r}")
            self.name = str(first["name"])
            self.population = whole_number("population", first["population"], hint="see the file")
            self.neighbours: Neighbours = first["neighbours"]
            self.filter = PrivacyFilter(first["epsilon"], first["delta"], first["order"])
        except (KeyError, ValueError) as error:
            raise ChainError(
                f"{chain.path} is not the ledger of a population ({error!r}): name a file that "
                "PopulationLedger.create (fpfl budget create) made."
            ) from error
        self._chain = chain
        self._charges = Charges(self.filter, self.population, self.neighbours)
        self._listed: frozenset[int] = frozenset()
        del chain.records[0]
        self._take()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        population: int,
        epsilon: float,
        delta: float | None = None,
        neighbours: Neighbours = "zero-out",
        order: int | None = None,
        mechanism: Mechanism | None = None,
        name: str = "",
    ) -> Self:
        """Make the file, before anything is released about these users.

        Parameters
        ----------
        path : path
            The new file.
        population : int
            Number of users K.
        epsilon : float
            ε that all runs together may cost.
        delta : float, optional
            δ; by default 1 / (10 K).
        neighbours : {"zero-out", "add-remove", "replace-one"}, default "zero-out"
            What one user may change. Only runs with the same relation can be added up.
        order : int, optional
            Rényi order of the filter; by default :func:`~fpfl.privacy.filter.good_order`.
        mechanism : Mechanism, optional
            What will be released most, for the choice of the order. With s/C near 1 it makes a
            large difference.
        name : str, optional
            What the population is called.
        """
        users = whole_number("population", population, hint="give the number of users")
        if neighbours not in get_args(Neighbours):
            known = ", ".join(map(repr, get_args(Neighbours)))
            raise ValueError(f"neighbours must be one of {known}, but got {neighbours!r}.")
        chance = checked_delta(delta, users, None)
        if order is None:
            order = good_order(epsilon, chance, mechanism)
        limit = PrivacyFilter(epsilon, chance, order)
        if mechanism is not None:
            Charges(limit, users, neighbours).check(mechanism)
        chain = Chain.create(
            path,
            holds=_HOLDS,
            name=name,
            population=users,
            epsilon=limit.epsilon,
            delta=limit.delta,
            neighbours=neighbours,
            order=limit.order,
        )
        return cls(chain)

    @classmethod
    def open(cls, path: str | os.PathLike[str], write: bool = True) -> Self:
        """Read and verify the file, to charge it, or with ``write=False`` only to look."""
        chain = Chain.open(path, write)
        try:
            return cls(chain)
        except BaseException:
            chain.close()
            raise

    def charge(
        self, run: str, mechanism: Mechanism, round: int | None, what: str = "round"
    ) -> None:
        """Write down a release before it is made, or refuse it and write nothing.

        Parameters
        ----------
        run : str
            Name of the run, the same for all its charges.
        mechanism : Mechanism
            What is released.
        round : int or None
            The run's round, where it is one.
        what : str, default "round"
            What it is, in words.

        Raises
        ------
        BudgetExhaustedError
            The release would exceed the budget: do not make it.
        """
        if not isinstance(run, str) or not run:
            raise ValueError(f"a run's name must be a non-empty string, but got {run!r}.")
        if round is not None:
            round = whole_number("round", round, least=0, hint="give the run's round, or None")
        self._charges.check(mechanism)
        cost = self.filter.cost(mechanism)
        with self._chain.shared():
            self._take()
            if cost > self._charges.spare(cost):
                raise BudgetExhaustedError(self._refusal(run, mechanism, what))
            fields = {
                "run": run,
                "what": what,
                "round": round,
                "mechanism": mechanism.as_dict(),
                "contributions": ALONE,
            }
            self._chain.append("charge", **fields)
            self._take()

    @property
    def descriptor(self) -> int:
        """The open file, for whoever syncs it elsewhere."""
        return self._chain.descriptor

    def sync(self) -> None:
        """Return when all charges are on disk. For any thread, at any time."""
        self._chain.sync()

    def withdraw(self, users: Iterable[int]) -> None:
        """Write down that users withdrew, by index; on disk when this returns.

        Who withdrew contributes nothing from then on, but keeps the place in the sampling: K and
        the others' chances stay what they are. What was charged stays charged. Withdrawing twice
        is fine.
        """
        indices = []
        for user in users:
            index = whole_number("a user", user, least=0, hint="give indices of users")
            # Where it is hidden who takes part, there may be more users than were declared.
            if index >= self.population and self.neighbours != "add-remove":
                raise ValueError(
                    f"there is no user {index} among {self.population}: indices run from 0 to "
                    f"{self.population - 1}. Nothing was recorded."
                )
            indices.append(index)
        if indices:
            with self._chain.shared():
                self._chain.append("withdrawal", users=sorted(set(indices)))
                self._take()
            self.sync()

    def withdrawn(self) -> frozenset[int]:
        """Who has withdrawn up to now; one ``fstat`` where nothing was written since."""
        self._refresh()
        if len(self._listed) != len(self._charges.withdrawn):
            self._listed = frozenset(self._charges.withdrawn)
        return self._listed

    def charges(self) -> dict[Mechanism, int]:
        """How often each mechanism was charged, by all runs; without torn lines."""
        self._refresh()
        return self._charges.by_mechanism()

    def by_run(self) -> dict[str, dict[str, Any]]:
        """What each run has charged: ``rounds`` (all its charges), ``epsilon`` and ``share``.

        ``established`` is False for runs of versions in which one user's data could change what
        others send: they may have cost more than they charged.
        ε is that of the run alone, at the filter's order, for orientation: figures of several runs
        do not add up. Their shares of the budget do.
        """
        self._refresh()
        return {
            run: {
                "rounds": sum(counts.values()),
                "epsilon": self.filter.spent(counts),
                "share": self.filter.rho(counts) / self.filter.budget,
                "established": run not in self._charges.before,
            }
            for run, counts in self._charges.runs.items()
        }

    def charged_rounds(self, run: str) -> int:
        """How many charges a run has made, whatever for."""
        self._refresh()
        return sum(self._charges.runs.get(run, {}).values())

    def charged(self, run: str, mechanism: Mechanism) -> int:
        """How often a run was charged for this very mechanism."""
        self._refresh()
        return self._charges.runs.get(run, {}).get(mechanism, 0)

    @property
    def spent(self) -> float:
        """ε of all that was charged so far, for orientation: what is promised is the budget."""
        return renyi_epsilon(self.share * self.filter.budget, self.filter.order, self.filter.delta)

    @property
    def share(self) -> float:
        """Used part of the budget, from 0 to 1: equal releases use equal parts."""
        self._refresh()
        return self._share()

    def left(self, mechanism: Mechanism) -> int:
        """How many more releases of ``mechanism`` fit, if nobody charges anything else."""
        self._charges.check(mechanism)
        self._refresh()
        cost = self.filter.cost(mechanism)
        return max(0, self._charges.spare(cost)) // cost

    def has_room(self, releases: Mapping[Mechanism, int]) -> bool:
        """Whether so many releases of each mechanism fit together, if nobody charges anything."""
        for mechanism in releases:
            self._charges.check(mechanism)
        self._refresh()
        costs = {mechanism: self.filter.cost(mechanism) for mechanism in releases}
        asked = sum(costs[mechanism] * times for mechanism, times in releases.items())
        return asked <= self._charges.spare(max(costs.values(), default=0))

    def summary(self) -> str:
        """Say in plain words what the runs have cost; names no user."""
        return summary(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return all figures in types that JSON knows; how many withdrew, not who."""
        counts = self.charges()
        return {
            "name": self.name,
            "population": self.population,
            "neighbours": self.neighbours,
            "epsilon": self.filter.epsilon,
            "delta": self.filter.delta,
            "order": self.filter.order,
            "share": self.share,
            "spent": self.spent,
            "charges": sum(counts.values()),
            "torn": self._charges.torn + self._charges.torn_tail,
            "mechanisms": [
                {**mechanism.as_dict(), "charges": times} for mechanism, times in counts.items()
            ],
            "runs": self.by_run(),
            "withdrawn": len(self._charges.withdrawn),
        }

    def close(self) -> None:
        """Sync and close."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refresh(self) -> None:
        if self._chain.changed():
            with self._chain.shared():
                self._take()

    def _take(self) -> None:
        for record in self._chain.records:
            try:
                self._charges.take(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ChainError(
                    f"{self._chain.path}, line {record['n'] + 1}: it is not what a population's "
                    f"ledger holds ({error!r}). Restore the file from a backup, or upgrade fpfl."
                ) from error
        self._chain.records.clear()  # all that matters of them is kept here
        self._charges.torn_tail = self._chain.torn is not None

    def _share(self) -> float:
        return (self.filter.units - self._charges.spare()) / self.filter.units

    def _refusal(self, run: str, mechanism: Mechanism, what: str) -> str:
        limit = self.filter
        return (
            f"the budget of {title(self.name, self.population)} is ε = {limit.epsilon:g} at "
            f"δ = {limit.delta:g}, and {self._share():.2%} of it is used. Run {run!r} asked for "
            f"one more {what} ({mechanism.sampler} cohorts of {mechanism.cohort:,}, noise "
            f"multiplier {mechanism.noise_multiplier:.4g}), which takes "
            f"{limit.cost(mechanism) / limit.units:.2%}: it was not charged and must not be "
            "released. Nothing that was charged can be refunded: use the models that there are, or "
            "release something smaller (more noise, smaller cohorts)."
        )


def tuning_cost(
    ledger: str | os.PathLike[str],
    *,
    since: TuningCost | None = None,
    chosen: PrivacyStatement | None = None,
) -> TuningCost:
    """Say what the fits of a search have cost, from the ledger that they were charged to.

    Parameters
    ----------
    ledger : path
        The population's file, as given to the estimators.
    since : TuningCost, optional
        What this returned before the search; its runs are not counted again.
    chosen : PrivacyStatement, optional
        Of the fit that is kept (``best_estimator_.privacy_``), to stand beside the search's ε.

    Returns
    -------
    TuningCost
        ``print`` it, or see its ``epsilon``, ``fits``, ``share`` and ``left``.
    """
    with PopulationLedger.open(ledger, write=False) as opened:
        values = opened.as_dict()
    return TuningCost.of(values, since, None if chosen is None else chosen.epsilon)
