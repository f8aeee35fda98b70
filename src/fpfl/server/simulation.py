"""A simulated federation: all users are here, the sampler picks them, the engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from fpfl.aggregation.sums import ThirdParty
from fpfl.fairness.totals import Weights
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.server.ranks import Ranks
from fpfl.server.state import Past, RoundJournal
from fpfl.users.engine import CohortEngine
from fpfl.users.reading import Chunk

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; a thread makes the next one meanwhile, and never more than one."""
    done = object()
    thread = ThreadPoolExecutor(1, "fpfl-ahead")
    try:
        coming: Future[object] = thread.submit(next, items, done)
        while (item := coming.result()) is not done:
            coming = thread.submit(next, items, done)
            yield item  # type: ignore[misc]
    finally:
        # Not waited for: the thread itself may be the last one that holds on to this.
        thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Simulation:
    """Samples cohorts, computes their statistics, and hands them to the third party.

    Parameters
    ----------
    engine
        Computes v^k for the users it is asked for.
    third_party
        Clips, sums, adds noise.
    sampling
        How cohorts are drawn; with privacy it must be the plan's own.
    cohorts, samples
        The random streams of every round: who is drawn; and which samples of a user, with
        dropout's masks. What happens on a device does not change who is drawn.
    rounds
        How many rounds there will be: nobody is drawn ahead for a round that does not come.
    ranks
        The processes that share the work; their streams must be seeded alike.
    past
        What a run that is kept in a folder has written down so far; None for one that is not.
    journal
        Writes down charges and released totals of a kept run, in its first process.
    charged
        Whether rounds are charged though nothing is kept.
    """

    engine: CohortEngine
    third_party: ThirdParty
    sampling: PoissonSampling | FixedSizeSampling
    cohorts: RoundStreams
    samples: RoundStreams
    rounds: int
    ranks: Ranks = field(default_factory=Ranks)
    past: Past | None = None
    journal: RoundJournal | None = None
    charged: bool = False
    participation: Participation = field(init=False)
    _withdrawn: list[tuple[int, frozenset[int]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        plan = self.third_party.plan
        sampling = self.sampling
        if isinstance(sampling, PoissonSampling):
            sampling = replace(sampling, listed=None)  # chances are those of the declared K
        if plan is not None and plan.sampling != sampling:
            raise ValueError(
                f"the plan accounts for {plan.sampling}, the simulation draws by {self.sampling}; "
                "use plan.sampling"
            )
        counts = self.past.participations if self.past is not None else None
        object.__setattr__(self, "participation", self.sampling.participation(counts))

    def release(
        self, round: int, w: Tensor, weights: Weights | None = None, level: int | None = None
    ) -> Tensor:
        """Run one round at w; one that was released before a run was resumed is not run again."""
        if self.past is not None:
            known = self.past.totals.get(round)
            if known is not None:
                return known.to(w.device, w.dtype)
        if self.past is not None or self.charged:
            self._open(round)
        third_party = self.third_party.at(level)
        total = third_party.sum(self.engine.computed(w, self._one_round(), weights), like=w)
        # The noise goes on the sum of all processes: it hides what is added before it.
        total = self.ranks.sum(total)
        if self.ranks.first:
            total = third_party.noised(total, round)
            if self.journal is not None:
                self.journal.wait()
        # Elsewhere it is still the sum in whole steps: what comes is a number of double precision.
        v = self.ranks.from_first(total.double()).to(w.dtype)
        if self.journal is not None:
            self.journal.log(round, v)
        return v

    def _open(self, round: int) -> None:
        """Charge for a round and ask who has withdrawn; all processes learn the answers."""
        # A lazy population's next cohort may be drawn, and read, already.
        first = round + 1 if self.engine.data.lazy and round > self._begun + 1 else round
        spent: BudgetExhaustedError | None = None
        users: frozenset[int] | None = None
        if self.journal is not None:
            users = self.journal.withdrawn(first)
            try:
                self.journal.charge(round)
            except BudgetExhaustedError as error:
                spent = error
        if self.ranks.size > 1:
            spent, users = self._agreed(spent, users)
        if spent is not None:
            raise spent
        if users is not None:
            self._withdrawn.append((first, users))

    def _agreed(
        self, spent: BudgetExhaustedError | None, users: frozenset[int] | None
    ) -> tuple[BudgetExhaustedError | None, frozenset[int] | None]:
        """The first process's answers."""
        size = -1 if users is None else len(users)
        stop, size = self.ranks.numbers_from_first([int(spent is not None), size])
        if stop and spent is None:
            spent = BudgetExhaustedError("the budget is spent; the first process says which")
        if size < 0:
            return spent, None
        return spent, frozenset(self.ranks.numbers_from_first(sorted(users or ()) or [0] * size))

    def _one_round(self) -> Iterator[Chunk]:
        """The chunks of the round that comes next."""
        for chunk in self._reading:
            if chunk is None:
                return
            yield chunk
        raise ValueError(f"all {self.rounds} rounds have been run; make a Simulation with more")

    @cached_property
    def _reading(self) -> Iterator[Chunk | None]:
        # Files are waited for by a thread. From memory it is not worth one: threads of Python
        # stand in each other's way.
        return ahead(self._rounds()) if self.engine.data.lazy else self._rounds()

    def _rounds(self) -> Iterator[Chunk | None]:
        """The chunks of all rounds, with None at the end of each."""
        share = (self.ranks.rank, self.ranks.size)
        for round in range(self._begun + 1, self.rounds + 1):
            for first, withdrawn in self._withdrawn:
                if first == round:
                    self.participation.withdraw(withdrawn)
            users = self.participation.admit(self.sampling.draw(self.cohorts.of(round)))
            if self.journal is not None:
                self.journal.drawn(round, users)
            key = int(self.samples.of(round).integers(2**63))
            yield from self.engine.chunks(users, key, share)
            yield None

    @property
    def _begun(self) -> int:
        """How many rounds were over before this process began."""
        return 0 if self.past is None else self.past.next_round - 1
