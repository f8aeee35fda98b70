"""The clip bound of the round that comes next, from what was released (`fpfl.privacy.adaptive`).

Pure functions of u = log₂(C/C₀), in Python's own numbers: a sweep's server and a single one's give
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from fpfl.fairness.totals import SMALLEST_COUNT
from fpfl.privacy.adaptive import BoundGrid


@dataclass(frozen=True)
class BoundControl:
    """What a server needs to know to move a clip bound.

    Parameters
    ----------
    grid
        The bounds that there may be.
    cohort
        m: what the released sum is divided by.
    joint
        Whether counts are clipped with the gradients, so that their noise follows C_t.
    """

    grid: BoundGrid
    cohort: int
    joint: bool

    def bound(self, u: float) -> float:
        """C_t."""
        return self.grid.at(self.grid.level(u))

    def fraction(self, clipped: float) -> float:
        """f̃: the fraction of clipped users, by the released Σ (b − ½)."""
        return min(1.0, max(0.0, clipped / self.cohort + 0.5))

    def moved(self, u: float, clipped: float) -> float:
        """u of the round after one that released so much."""
        return self.grid.moved(u, self.fraction(clipped))

    def figures(self, u: float, clipped: float) -> dict[str, float]:
        """What a row of the history says of it: how many were clipped, as released, and to what."""
        return {
            "clipped": clipped + 0.5 * self.cohort,
            "clipped_fraction": self.fraction(clipped),
            "clip_bound": self.bound(u),
        }

    def step_factor(self, u: float) -> float:
        """min(1, C_ref/C_t): what a round's learning rate is multiplied by."""
        reference = self.grid.adapts.reference
        return 1.0 if reference is None else min(1.0, reference / self.bound(u))

    def counts(self, u: float, noise: float, smallest: float) -> tuple[float, float]:
        """The noise on a count, and the count below which it says nothing, at C_t.

        ``noise`` and ``smallest`` are those at C₀.
        """
        if not self.joint or not noise:
            return noise, smallest
        now = noise * (self.bound(u) / self.grid.start)
        # The joint vector has the paper's basis: n' is one number (`fpfl.training.spec`).
        return now, max(SMALLEST_COUNT, 2.0 * now)
