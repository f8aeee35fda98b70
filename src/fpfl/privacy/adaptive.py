r"""A clip bound that finds itself.

(Andrew et al. 2021, "Differentially private learning with adaptive clipping": the geometric update,
on a public grid.)

In round t users are clipped to a bound C_t that everybody knows. Each of them sends, beside its
vector, b − ½, where b is 1 if it was clipped: a number of size ½, in a block with a share of the
budget of its own. Of m users the released sum gives the fraction that was clipped,

    f̃_t = Σ (b − ½)/m + ½ + noise,    kept within [0, 1],

and the server, which keeps u = log₂(C/C₀), moves it towards the bound that clips the fraction τ:

    u ← u + rate · (f̃_t − τ),    C_{t+1} = C₀ · ratio^j,    j = round(u / log₂ ratio).

Where too many are clipped C grows, by 2^{rate (1 − τ)} a round at most. Only the level j is
broadcast. All parties look C up in the same table, made by multiplications and divisions alone,
which round alike on every machine.

C_{t+1} follows from what was released, and the noise of every round is in proportion to its C_t:
it is the same Gaussian mechanism in every round, in units of C_t, whatever the bound. What is
accounted for are the blocks' shares of the budget, which do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

RATIO = 1.189207115002721
"""2^¼: four levels for a factor of two."""

REACH = 1024.0
"""How far a bound may go from C₀, up or down, where nothing else is said."""

MOST_LEVELS = 4096


@dataclass(frozen=True)
class AdaptiveBound:
    """How a clip bound follows the fraction of users that it clips: ``Clipping(adapts=...)``.

    Parameters
    ----------
    target
        τ: the fraction of a cohort's users that is to be clipped.
    rate
        By how much log₂ C moves for each unit of f̃ − τ.
    share
        The part of the privacy budget 1/σ² that the count of clipped users gets.
    least, most
        The range that C is kept in; by default C₀/1024 and 1024 C₀.
    ratio
        The grid's: C is always C₀ · ratio^j for a whole number j.
    reference
        C_ref: where it is given, the learning rate of a round is η · min(1, C_ref/C_t), so that the
        noise of a step does not grow with the bound.
    """

    target: float
    rate: float = 0.2
    share: float = 0.01
    least: float | None = None
    most: float | None = None
    ratio: float = RATIO
    reference: float | None = None

    def __post_init__(self) -> None:
        for name in ("target", "share"):
            value = getattr(self, name)
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} is {value}; it must be between 0 and 1")
        for name in ("rate", "least", "most", "reference"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be positive")
        if not (math.isfinite(self.ratio) and self.ratio > 1.0):
            raise ValueError(f"ratio is {self.ratio}; it must be above 1, e.g. 2**0.25")


@dataclass(frozen=True)
class BoundGrid:
    """The bounds C₀ · ratio^j within [least, most], and how a run moves on them.

    Parameters
    ----------
    start
        C₀.
    adapts
        What it follows.
    """

    start: float
    adapts: AdaptiveBound

    def __post_init__(self) -> None:
        least, most = self.ends
        if not least <= self.start <= most:
            raise ValueError(
                f"the clip bound begins with {self.start:g}, outside [{least:g}, {most:g}]; give "
                "a bound within least and most"
            )
        levels = math.log(most / least) / math.log(self.adapts.ratio)
        if levels > MOST_LEVELS:
            raise ValueError(
                f"ratio = {self.adapts.ratio} makes {levels:.0f} bounds from {least:g} to "
                f"{most:g}; give a larger ratio, e.g. 2**0.25, or a smaller range"
            )

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest bound that there may be."""
        given = self.adapts
        least = self.start / REACH if given.least is None else given.least
        most = self.start * REACH if given.most is None else given.most
        return least, most

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """All bounds, from the least on; `lowest` is the level of the first."""
        least, most = self.ends
        # No powers: their last bits are the machine's. Products and quotients round alike on all.
        up, down = [self.start], [self.start]
        while up[-1] * self.adapts.ratio <= most:
            up.append(up[-1] * self.adapts.ratio)
        while down[-1] / self.adapts.ratio >= least:
            down.append(down[-1] / self.adapts.ratio)
        return (*reversed(down[1:]), *up)

    @cached_property
    def lowest(self) -> int:
        """The lowest level; 0 is that of C₀."""
        return -self.bounds.index(self.start)

    @property
    def highest(self) -> int:
        """The highest level."""
        return self.lowest + len(self.bounds) - 1

    def at(self, level: int) -> float:
        """C₀ · ratio^level, the same bits for everybody."""
        whole = isinstance(level, int) and not isinstance(level, bool)
        if not whole or not self.lowest <= level <= self.highest:
            raise ValueError(
                f"the level of the clip bound is {level!r}; this grid has the whole numbers from "
                f"{self.lowest} to {self.highest}"
            )
        return self.bounds[level - self.lowest]

    def level(self, u: float) -> int:
        """The level nearest to C₀ · 2^u."""
        return round(self._kept(u) / self._width)

    def moved(self, u: float, fraction: float) -> float:
        """u after a round in which this fraction of the users was clipped."""
        return self._kept(u + self.adapts.rate * (fraction - self.adapts.target))

    def _kept(self, u: float) -> float:
        """Within the grid: beyond its end u would have a way back to go, and C would not follow."""
        return min(max(u, self.lowest * self._width), self.highest * self._width)

    @cached_property
    def _width(self) -> float:
        """log₂ ratio."""
        return math.log2(self.adapts.ratio)
