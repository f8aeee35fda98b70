"""A simulated federation: all users are here, the sampler picks them, the engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.server.ahead import ahead
from fpfl.server.ranks import Ranks
from fpfl.thirdparty.sums import ThirdParty
from fpfl.users.engine import CohortEngine
from fpfl.users.reading import Chunk


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
    rng
        The cohorts' random stream.
    samples_rng
        The stream that picks samples of a user, and dropout's masks: what happens on a device
        does not change who is drawn next.
    rounds
        How many rounds there will be: nobody is drawn ahead for a round that does not come.
    ranks
        The processes that share the work; their streams must be seeded alike.
    """

    engine: CohortEngine
    third_party: ThirdParty
    sampling: PoissonSampling | FixedSizeSampling
    rng: np.random.Generator
    samples_rng: np.random.Generator
    rounds: int
    ranks: Ranks = field(default_factory=Ranks)
    participation: Participation = field(init=False)

    def __post_init__(self) -> None:
        plan = self.third_party.plan
        if plan is not None and plan.sampling != self.sampling:
            raise ValueError(
                f"the plan accounts for {plan.sampling}, the simulation draws by {self.sampling}; "
                "use plan.sampling"
            )
        object.__setattr__(self, "participation", self.sampling.participation())

    def release(self, round: int, w: Tensor) -> Tensor:
        """Run one round at w."""
        total = self.third_party.sum(self.engine.computed(w, self._one_round()), like=w).double()
        if self.ranks.first:
            total = self.third_party.noised(total)
        return self.ranks.sum(total).to(w.dtype)

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
        for _ in range(self.rounds):
            users = self.participation.admit(self.sampling.draw(self.rng))
            key = int(self.samples_rng.integers(2**63))
            yield from self.engine.chunks(users, key, share)
            yield None
