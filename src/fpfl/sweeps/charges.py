"""What a sweep costs the people of a ledger: said before it starts, charged before training."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fpfl.data.federated import FederatedDataset
from fpfl.privacy.assumptions import check_declared
from fpfl.privacy.budget import BudgetExhaustedError, PopulationLedger
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.statement import round_up
from fpfl.privacy.tuning import FitCost, TuningCost
from fpfl.sweeps.asked import Asked, Population
from fpfl.training.spec import TrainingSpec, chosen_sampling


@dataclass(frozen=True)
class SweepCost:
    """What the private runs of a sweep will cost a population together; ``print`` says it.

    Parameters
    ----------
    ledger
        The population's file.
    runs, rounds
        How many runs are charged, and their rounds together.
    tuning
        The same as a search's cost: ``epsilon`` of all together, ``share`` of the budget,
        ``before``, ``left``, by the ledger's privacy filter.
    fits
        Whether there is room for all of them.
    """

    ledger: str
    runs: int
    rounds: int
    tuning: TuningCost
    fits: bool

    @property
    def epsilon(self) -> float:
        """ε of all the runs together, by the ledger's filter; what is promised is the budget."""
        return self.tuning.epsilon

    @property
    def share(self) -> float:
        """The part of the budget that they take."""
        return self.tuning.share

    @property
    def left(self) -> float:
        """The part of the budget that is left after them."""
        return self.tuning.left

    def as_dict(self) -> dict[str, Any]:
        """All figures, in types that JSON knows."""
        return {
            "ledger": self.ledger,
            "runs": self.runs,
            "rounds": self.rounds,
            "epsilon": self.epsilon,
            "alone": sorted({fit.epsilon for fit in self.tuning.fits}),
            "share": self.share,
            "before": self.tuning.before,
            "left": self.left,
            "budget": self.tuning.limit.epsilon,
            "delta": self.tuning.limit.delta,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        tuning = self.tuning
        if not self.runs:
            return (
                f"Nothing will be charged to {self.ledger}: no private run is left to be trained."
            )
        ends = [round_up(pick(fit.epsilon for fit in tuning.fits)) for pick in (min, max)]
        return (
            f"{self.runs:,} {_runs(self.runs)}, {self.rounds:,} rounds, will be charged to "
            f"{self.ledger}: together ε = {round_up(self.epsilon)} at δ = {tuning.limit.delta:g}; "
            f"one of them alone ε = {' to '.join(dict.fromkeys(ends))} by the same filter. They "
            f"take {self.share:.1%} of the budget of ε = {tuning.limit.epsilon:g}, of which "
            f"{tuning.before:.1%} was used before; {self.left:.1%} is left after them. What is "
            "promised is the budget, and nothing is refunded."
        )


def _runs(number: int) -> str:
    return "run" if number == 1 else "runs"


class Due(Protocol):
    """A run that is charged: its number, by which what a round costs is known, and its rounds."""

    @property
    def number(self) -> int:
        """Which run it is."""
        ...

    @property
    def rounds(self) -> int:
        """How many charges it makes."""
        ...


class Account:
    """Charges the runs of a sweep to a ledger, each under a name of its own.

    Parameters
    ----------
    ledger
        The file of a `PopulationLedger`.
    mechanisms
        What one round costs, by the number of the run.
    measurements
        The release before the first round, of those runs that have one.
    """

    def __init__(
        self,
        ledger: str | os.PathLike[str],
        mechanisms: Mapping[int, Mechanism],
        measurements: Mapping[int, Mechanism] | None = None,
    ) -> None:
        self.ledger, self.mechanisms = os.fspath(ledger), mechanisms
        self.measurements = measurements or {}
        self._sweep = secrets.token_hex(8)
        self._times = dict.fromkeys(mechanisms, 0)

    @classmethod
    def of(
        cls,
        ledger: str | os.PathLike[str],
        runs: Sequence[Asked],
        specs: Mapping[int, TrainingSpec],
        people: Mapping[str, Population],
    ) -> Account:
        """The account of all private runs; what training would refuse is refused here already."""
        private = [run for run in runs if run.private]
        if not private:
            raise ValueError(
                "ledger is charged by private runs, and no run of the sweep has privacy; give "
                "privacy=, or leave the ledger out"
            )
        if len(people) > 1:
            raise ValueError(
                f"a ledger is about one population, and the sweep has {len(people)} "
                f"({', '.join(people)}); give one, or leave the ledger out"
            )
        mechanisms, measurements = {}, {}
        for run in private:
            plan = specs[run.number].plan
            assert plan is not None  # the run is private
            data = people[run.data].training
            try:
                check_declared(plan.neighbours, data.schema.population is not None)
                chosen_sampling(run.keywords.get("sampling"), plan, data, specs[run.number].cohort)
            except ValueError as error:
                raise ValueError(f"{run}: {error}") from error
            mechanisms[run.number] = Mechanism.of(plan)
            before = Mechanism.measurement_of(plan)
            if before is not None:
                measurements[run.number] = before
        return cls(ledger, mechanisms, measurements)

    def _counts(self, run: Due) -> dict[Mechanism, int]:
        """All releases of a run."""
        counts = {self.mechanisms[run.number]: run.rounds}
        before = self.measurements.get(run.number)
        return counts if before is None else counts | {before: counts.get(before, 0) + 1}

    def cost(self, runs: Sequence[Due]) -> SweepCost:
        """What these runs would cost, all of them together; charges nothing."""
        due = [run for run in runs if run.number in self.mechanisms]
        with PopulationLedger.open(self.ledger, write=False) as opened:
            limit, before = opened.filter, opened.share
            wanted: dict[Mechanism, int] = {}
            fits = []
            for run in due:
                counts = self._counts(run)
                for mechanism, times in counts.items():
                    _check(opened, mechanism)
                    wanted[mechanism] = wanted.get(mechanism, 0) + times
                alone = FitCost(
                    str(run.number),
                    run.rounds,
                    limit.spent(counts),
                    limit.rho(counts) / limit.budget,
                )
                fits.append(alone)
            room = opened.has_room(wanted)
        share = limit.rho(wanted) / limit.budget if wanted else 0.0
        tuning = TuningCost(limit, tuple(fits), share, before)
        return SweepCost(self.ledger, len(due), sum(run.rounds for run in due), tuning, room)

    def charge(self, runs: Sequence[Due]) -> None:
        """Charge all rounds of these runs; on the disk when this returns."""
        due = [run for run in runs if run.number in self.mechanisms]
        if not due:
            return
        with PopulationLedger.open(self.ledger) as opened:
            for run in due:
                mechanism = self.mechanisms[run.number]
                if not opened.has_room(self._counts(run)):
                    raise BudgetExhaustedError(
                        f"somebody else charged {self.ledger} meanwhile: {run} takes "
                        f"{run.rounds:,} rounds, and there is room for "
                        f"{opened.left(mechanism):,}. It was not charged or trained; what is "
                        "finished is kept"
                    )
                self._times[run.number] += 1  # one that was cut off is another training
                name = f"{self._sweep}-{run.number:04d}-{self._times[run.number]}"
                before = self.measurements.get(run.number)
                if before is not None:
                    opened.charge(name, before, None, "measurement")
                for round in range(1, run.rounds + 1):
                    opened.charge(name, mechanism, round)
            opened.sync()

    def summary(self) -> str:
        """What the population's ledger says now."""
        with PopulationLedger.open(self.ledger, write=False) as opened:
            return opened.summary()

    def without_withdrawn(self, data: FederatedDataset) -> FederatedDataset:
        """The population without the samples of users who withdrew; they keep their places."""
        with PopulationLedger.open(self.ledger, write=False) as opened:
            return without(data, sorted(opened.withdrawn()))


def without(data: FederatedDataset, users: Sequence[int]) -> FederatedDataset:
    """The same population in which these users have no samples: they send zero."""
    gone = [user for user in users if user < data.population]
    if not gone:
        return data
    if data.lazy:
        raise ValueError(
            f"{len(gone)} users withdrew, and the population is read from disk as it is; write it "
            "again without their samples (fpfl.data.PopulationWriter)"
        )
    sizes = data.sizes()
    out = torch.zeros(data.population, dtype=torch.bool)
    out[gone] = True
    stay = ~torch.repeat_interleave(out, sizes)
    rows = stay.nonzero().squeeze(-1)
    offsets = torch.cat([torch.zeros(1, dtype=sizes.dtype), sizes.masked_fill(out, 0).cumsum(0)])
    features, labels, attributes = data.gather(rows)
    return replace(data, features=features, labels=labels, attributes=attributes, offsets=offsets)


def _check(ledger: PopulationLedger, mechanism: Mechanism) -> None:
    if mechanism.population != ledger.population:
        raise ValueError(
            f"the ledger is about {ledger.population:,} users, and the sweep trains on "
            f"{mechanism.population:,} (those held out are not among them). Make a ledger for "
            f"these: fpfl budget create FILE --population {mechanism.population} --epsilon E; or "
            "give the users yourself: data=training, held_out=others"
        )
    ledger.left(mechanism)


def refusal(cost: SweepCost) -> str:
    """Why a sweep is not started, and what to do."""
    room = 1.0 - cost.tuning.before
    dearest = max(fit.share for fit in cost.tuning.fits)
    return (
        f"the sweep was not started and nothing was charged: its {cost.runs:,} {_runs(cost.runs)} "
        f"with {cost.rounds:,} rounds take {cost.share:.1%} of the budget of ε = "
        f"{cost.tuning.limit.epsilon:g} in {cost.ledger}, and {room:.1%} of it is left, enough for "
        f"{int(room / dearest):,} {_runs(int(room / dearest))} like the dearest. Try fewer values "
        "or seeds, or fewer rounds, or more noise; or choose the settings on public or made-up "
        "data (without a ledger) and spend the budget on the run that is released"
    )
