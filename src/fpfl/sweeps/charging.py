"""What the private trainings of a sweep cost a population: charged before the first one begins.

A single run charges round by round, and a spent budget ends it early. A sweep that does not fit in
what is left of the budget is refused whole, before anything is charged: half of the trainings say
little about which one is best, and what they cost would be lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from os import PathLike

from fpfl.privacy.budget import BudgetExhaustedError, PopulationLedger
from fpfl.privacy.filter import Mechanism, PrivacyFilter
from fpfl.privacy.renyi import renyi_epsilon
from fpfl.privacy.statement import round_up
from fpfl.sweeps.batch import Job
from fpfl.training.spec import TrainingSpec, check_data, prepared


@dataclass(frozen=True)
class Charge:
    """What one training takes of its population's budget: its rounds, each of a mechanism."""

    mechanism: Mechanism
    rounds: int


@dataclass(frozen=True)
class SweepCost:
    """What a sweep takes of a population's budget; ``print`` says it in words.

    Parameters
    ----------
    limit
        The budget.
    runs, rounds
        How many trainings, and charges, there are.
    share
        Their part of the budget.
    later
        The part that another training takes, which there is to be room for afterwards.
    left
        The part that nobody has used before them.
    """

    limit: PrivacyFilter
    runs: int
    rounds: int
    share: float
    later: float
    left: float

    @property
    def epsilon(self) -> float:
        """ε of the trainings together, for orientation: what is promised is the budget."""
        return renyi_epsilon(self.share * self.limit.budget, self.limit.order, self.limit.delta)

    def __str__(self) -> str:
        text = (
            f"{self.runs:,} private trainings, {self.rounds:,} rounds: together "
            f"ε = {round_up(self.epsilon)} at δ = {self.limit.delta:g}, {self.share:.1%} of the "
            f"budget of ε = {self.limit.epsilon:g}, of which {self.left:.1%} is left"
        )
        return f"{text}. The one after them takes {self.later:.1%} at most" if self.later else text


def settled(job: Job) -> TrainingSpec:
    """What `fpfl.train` makes of a job's settings: wrong ones are an error before any training."""
    settings = job.settings
    flat, data = prepared(job.model, job.data, settings.get("device"))
    names = signature(TrainingSpec.settle).parameters
    given = {name: value for name, value in settings.items() if name in names}
    spec = TrainingSpec.settle(flat, data.schema, population=data.K, **given)
    if spec.privacy is None or settings.get("noise_seed") is not None:
        check_data(data, spec.constraint)
    return spec


def charge_of(spec: TrainingSpec) -> Charge:
    """What a private training takes."""
    if spec.plan is None:
        raise ValueError(
            "a population's budget is charged by private trainings: give privacy=, or leave the "
            "ledger out"
        )
    return Charge(Mechanism.of(spec.plan), spec.rounds)


def cost_of(
    ledger: str | PathLike[str], charges: Sequence[Charge], *, one_more: bool = False
) -> SweepCost:
    """What trainings would take of a population's budget; nothing is charged.

    Parameters
    ----------
    ledger
        The population's file.
    charges
        One for each training.
    one_more
        Whether there has to be room afterwards for another one like the dearest of them.

    Raises
    ------
    BudgetExhaustedError
        Together they would exceed what is left.
    """
    with PopulationLedger.open(ledger, write=False) as opened:
        limit = opened.filter

        def share(some: Sequence[Charge]) -> float:
            return limit.rho(_counted(some)) / limit.budget

        later = [max(charges, key=lambda each: share([each]))] if one_more and charges else []
        rounds = sum(each.rounds for each in charges)
        cost = SweepCost(
            limit, len(charges), rounds, share(charges), share(later), 1.0 - opened.share
        )
        if not opened.fits(_counted([*charges, *later])):
            raise BudgetExhaustedError(
                f"the budget in {ledger} has no room for all of it: {cost}. Nothing was charged or "
                "trained; try fewer settings, fewer folds or seeds, fewer rounds, or a smaller ε "
                "for each"
            )
    return cost


def charge(ledger: str | PathLike[str], charges: Sequence[Charge]) -> list[str]:
    """Charge all trainings, each under a name of its own; on disk when this returns.

    Returns
    -------
    list of str
        The names.
    """
    names = [secrets.token_hex(16) for _ in charges]
    with PopulationLedger.open(ledger) as opened:
        for name, each in zip(names, charges, strict=True):
            for round in range(1, each.rounds + 1):
                opened.charge(name, each.mechanism, round)
        opened.sync()
    return names


def _counted(charges: Sequence[Charge]) -> dict[Mechanism, int]:
    counts: dict[Mechanism, int] = {}
    for each in charges:
        counts[each.mechanism] = counts.get(each.mechanism, 0) + each.rounds
    return counts
