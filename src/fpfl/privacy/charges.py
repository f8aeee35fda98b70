"""What the records of a population's ledger add up to."""

from __future__ import annotations

from typing import Any

from fpfl.privacy.filter import Mechanism, PrivacyFilter
from fpfl.privacy.remarks import ALONE, BEFORE_CHARGED
from fpfl.privacy.statement import round_up
from fpfl.privacy.tuning import TuningCost


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
