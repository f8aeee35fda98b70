"""A simulated federation: all users are here, the sampler picks them, the engine computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.thirdparty.sums import ThirdParty
from fpfl.users.engine import CohortEngine


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
    """

    engine: CohortEngine
    third_party: ThirdParty
    sampling: PoissonSampling | FixedSizeSampling
    rng: np.random.Generator
    samples_rng: np.random.Generator
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
        users = self.participation.admit(self.sampling.draw(self.rng))
        key = int(self.samples_rng.integers(2**63))
        return self.third_party.release(self.engine.statistics(w, users, key), like=w)
