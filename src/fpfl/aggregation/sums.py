r"""SecureAggregation of Algorithm 1: the third party, which lets nothing but noisy sums out.

It clips each user's vector, adds them up and adds noise. The paper's line 15,

    v = Σ_k v^k · min(1, C/‖v^k‖) + N(0, C²σ²),

in whole numbers is

    v = g_b (round(h_b Σ_k z^k / g_b) + z),    z ~ N_Z(0, 2⁴⁸),    in every number of block b

z^k are a user's whole numbers in steps h_b = 2⁻³⁸ C_b (`fpfl.aggregation.clipping`), and their sum
is exact. The noise comes in whole steps of g_b = s'_b/2²⁴, so what is released lies on a grid that
does not depend on the data, and nothing can be read from the low bits of floating point numbers.
`fpfl.aggregation.noise` says what noise on a grid costs.

The standard deviation s'_b is a little more than the plan's s_b = C_b σ/√ρ_b, for what one user can
change is a little more than the bound. With d numbers in the block and K users (2²⁴ at least),

    ‖h z^k‖ ≤ C (1 + 2⁻²¹) + h √d/2                          its own rounding, to the nearest
    Δ ≤ ‖h z^k‖ + g √d + √d K C 2⁻⁵⁰                         the sum's, to the noise's grid
      ≤ C (1 + η) + g √d,    η = 2⁻²¹ + √d (2⁻³⁹ + K 2⁻⁵⁰):

round(x + y) and round(x) differ from y by less than one step, and from double precision by 2⁻⁵²
of the sum each. None of it depends on the other users. The noise keeps Δ_b/s'_b at C_b/s_b:

    s'_b = s_b (1 + η) / (1 − s_b √d_b/(2²⁴ C_b))

Where a user is replaced by another, the plan has 2 C_b/s_b, and the sum changes by at most
2 C_b (1 + η) + g_b √d_b ≤ 2 (C_b (1 + η) + g_b √d_b): the same s'_b is enough there.

Where the bound of the gradients (or of the joint vector) adapts (`fpfl.privacy.adaptive`), h_b, s_b
and s'_b are those of the round's C_t: all of them in proportion to it, so Δ_b/s'_b is what it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fpfl.aggregation.clipping import (
    ROUNDING,
    ClipRule,
    Rows,
    at_bound,
    clip_rules,
    steps_of,
    whole_total,
)
from fpfl.aggregation.noise import GRID_BITS, NoiseSource, SystemNoise
from fpfl.numerics.summing import STEP_BITS
from fpfl.privacy.adaptive import BoundGrid
from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.settings import CLIPPED, GRADIENTS, JOINT

MANY = 2**24
"""So many users are allowed for, whatever K is."""

_LARGEST = 2.0**62
"""Steps beyond which a sum is cut off, so that the noise cannot carry it out of 64 bits."""


@dataclass(frozen=True)
class ThirdParty:
    """What stands between the users and the server.

    Parameters
    ----------
    places
        The layout's named slices.
    blocks
        The blocks to clip in; empty for no clipping.
    plan
        The privacy plan whose noise is added; None for no noise.
    source
        Where the noise comes from.
    room
        How much more than its bound a user may add, as a part of it, where sums come from
        somebody else who rounds (a federation's ring).
    grid, level
        Where the bound of the gradients (or of the joint vector) adapts: the bounds that there may
        be, and which of them holds. The blocks' own is that of level 0.
    """

    places: dict[str, slice]
    blocks: tuple[Block, ...] = ()
    plan: PrivacyPlan | None = None
    source: NoiseSource = field(default_factory=SystemNoise)
    room: float = 0.0
    grid: BoundGrid | None = None
    level: int = 0
    rules: tuple[ClipRule, ...] = field(init=False)
    _steps: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _other: list[Self] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.blocks != self.blocks:
            raise ValueError(
                f"the plan was made for the blocks {self.plan.blocks}, the third party clips "
                f"{self.blocks}; use the plan's own"
            )
        if CLIPPED in self.places and not self.blocks:
            raise ValueError(
                "the layout counts clipped users, and nobody is clipped; give blocks to clip in, "
                "or make the layout without clipped=True"
            )
        rules = clip_rules(self.blocks, self.places) if self.blocks else ()
        if self.level and self.grid is not None:
            rules = at_bound(rules, self.grid.at(self.level))
        object.__setattr__(self, "rules", rules)
        _ = self.noise_stddev  # what cannot be done is said before anything is computed

    def at(self, level: int | None) -> Self:
        """The same with the bound of a level of the grid; None where the bound is fixed."""
        if level is None or level == self.level:
            return self
        if self.grid is None:
            raise ValueError(
                f"level {level} of a clip bound was asked for, and the bound is fixed; give "
                "Clipping(adapts=...)"
            )
        # The level moves now and then: its steps, as long as v, are kept until it does.
        if not self._other or self._other[0].level != level:
            self._other[:] = [replace(self, level=level)]
        return self._other[0]

    @property
    def size(self) -> int:
        """The length of v."""
        return max(int(place.stop) for place in self.places.values())

    @cached_property
    def noise_stddev(self) -> Tensor:
        """The standard deviation s'_b of the noise on every number of v."""
        scale = torch.zeros(self.size, dtype=torch.float64)
        if self.plan is not None:
            for rule in self.rules:
                planned = self.plan.noise_stddev(rule.name)
                if self.grid is not None and rule.name in (JOINT, GRADIENTS):
                    planned *= self.grid.at(self.level) / self.grid.start
                stddev = (1.0 + self.room) * grid_stddev(
                    planned, rule.bound, rule.size, self._most_users
                )
                for place in rule.places:
                    scale[place] = stddev
        return scale

    @property
    def _most_users(self) -> int:
        """K, or `MANY`: a declared K may be less than those who are there."""
        assert self.plan is not None  # whoever has none adds no noise
        return max(MANY, self.plan.population, self.plan.real_population or 0)

    def release(self, chunks: Iterable[Rows], like: Tensor, round: int) -> Tensor:
        """Clip and sum the users' vectors, add the noise; ``like`` gives type and device."""
        return self.noised(self.sum(chunks, like), round).to(like.dtype)

    def sum(self, chunks: Iterable[Rows], like: Tensor) -> Tensor:
        """Clip and sum the users' vectors: whole steps (int64) where they are clipped.

        Where they are not, in v's own units, added up in double precision.
        """
        kind = torch.int64 if self.rules else torch.float64
        total = like.new_zeros(self.size, dtype=kind)
        for rows in chunks:
            if self.rules:
                total += whole_total(rows, self.rules)
            else:
                for name, block in rows.totals(self.places, like.new_ones(len(rows))).items():
                    total[self.places[name]] += block
            del rows  # not kept while the next ones are computed
        return total

    def noised(self, total: Tensor, round: int) -> Tensor:
        """Add a round's noise to the sum of all users, in whole steps of the noise's grid.

        The sum must be complete: what is added to a released number afterwards is not hidden.
        """
        if not total.is_floating_point():
            total = total * self._on(total.device, "step")
        if self.plan is None:
            return total
        noise = self.source.integers(self.size, round, device=total.device)
        return on_grid(total, self._on(total.device, "noise"), noise)

    def steps(self, device: torch.device) -> Tensor:
        """The users' steps h, of every number of v."""
        return self._on(device, "step")

    def _on(self, device: torch.device, what: str) -> Tensor:
        """The users' steps h, or the noise's steps g, of every number of v."""
        if (what, device) not in self._steps:
            steps = self.noise_stddev * 2.0**-GRID_BITS
            if what == "step":
                steps = steps_of(self.rules, self.size, device)
            self._steps[what, device] = steps.to(device)
        return self._steps[what, device]


def on_grid(total: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
    """A sum on the noise's grid, with the noise, in whole steps, added."""
    # Users with bad numbers send zero, so all of this is finite. Were it not, an error would
    # tell something about them: what is no number counts as zero.
    whole = (total / steps).nan_to_num_(nan=0.0).clamp_(-_LARGEST, _LARGEST).round_()
    return noise.add_(whole.long()).double() * steps


def grid_stddev(stddev: float, bound: float, numbers: int, population: int = MANY) -> float:
    """s'_b for the plan's s_b, on a block of ``numbers`` numbers clipped to ``bound``.

    The formula is the module's; ``population`` is K, or a number that is not smaller.
    """
    slack = stddev * math.sqrt(numbers) / (bound * 2.0**GRID_BITS)
    if slack >= 0.5:
        raise ValueError(
            f"noise of {stddev:.3g} on {numbers} numbers with the bound {bound:g} is so much that "
            "the bound gets lost between the steps of the noise's grid; use a smaller noise "
            "multiplier"
        )
    return stddev * (1.0 + reserve(numbers, population)) / (1.0 - slack)


def reserve(numbers: int, population: int) -> float:
    """η: what rounding may add to a user's bound, as a part of it (the module's formula)."""
    return ROUNDING + math.sqrt(numbers) * (0.5 * 2.0**-STEP_BITS + population * 2.0**-50)
