r"""The third party: clips each user's vector, sums, adds noise, and lets nothing else out.

    v = g_b (round(Σ_k clip(v^k) / g_b) + z),    z ~ N_Z(0, 2⁴⁸),    in every number of block b

Both summands are whole numbers of steps g_b = s'_b/2²⁴, so what is released lies on a grid that
does not depend on the data, and nothing can be read from the low bits of floating point numbers.
`fpfl.thirdparty.noise` says what noise on a grid costs.

The standard deviation s'_b is a little more than the plan's s_b = C_b σ/√ρ_b, for what one user can
change is a little more than the bound: clipping and summing round (the `RESERVE` η), and rounding
to the grid moves each of the block's d_b numbers by up to one step more or less,

    Δ_b ≤ C_b (1 + η) + g_b √d_b.

The noise keeps Δ_b/s'_b at the plan's C_b/s_b:

    s'_b = s_b (1 + η) / (1 − s_b √d_b/(2²⁴ C_b))

Where a user is replaced by another, the plan has 2 C_b/s_b, and the sum changes by at most
2 C_b (1 + η) + g_b √d_b ≤ 2 (C_b (1 + η) + g_b √d_b): the same s'_b is enough there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.settings import CLIPPED
from fpfl.thirdparty.clipping import ClipRule, Rows, clip_rules, clipped_sum
from fpfl.thirdparty.discrete import GRID_BITS
from fpfl.thirdparty.noise import NoiseSource, SystemNoise

RESERVE = 2.0**-10
"""η: room for rounding in norms, scales and sums, as a part of the bound. It is measured and not
proved: in float32, with up to 50,000 users in a chunk, more or less alike, one of them changed a
sum by at most 1 + 10⁻⁴ bounds. Numbers made up so that all roundings add up could need more."""

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
    """

    places: dict[str, slice]
    blocks: tuple[Block, ...] = ()
    plan: PrivacyPlan | None = None
    source: NoiseSource = field(default_factory=SystemNoise)
    rules: tuple[ClipRule, ...] = field(init=False)
    _steps: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        object.__setattr__(self, "rules", rules)
        _ = self.noise_stddev  # what cannot be done is said before anything is computed

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
                stddev = grid_stddev(self.plan.noise_stddev(rule.name), rule.bound, rule.size)
                for place in rule.places:
                    scale[place] = stddev
        return scale

    def release(self, chunks: Iterable[Rows], like: Tensor, round: int) -> Tensor:
        """Clip and sum the users' vectors, add the noise; ``like`` gives type and device."""
        return self.noised(self.sum(chunks, like), round).to(like.dtype)

    def sum(self, chunks: Iterable[Rows], like: Tensor) -> Tensor:
        """Clip and sum the users' vectors; chunks are added up in double precision."""
        total = like.new_zeros(self.size, dtype=torch.float64)
        for rows in chunks:
            if self.rules:
                total += clipped_sum(rows, self.rules)
            else:
                for name, block in rows.totals(self.places, like.new_ones(len(rows))).items():
                    total[self.places[name]] += block
            del rows  # not kept while the next ones are computed
        return total

    def noised(self, total: Tensor, round: int) -> Tensor:
        """Add a round's noise to the sum of all users, in whole steps of the grid.

        The sum must be complete: what is added to a released number afterwards is not hidden.
        """
        if self.plan is None:
            return total
        steps = self._steps_on(total.device)
        # Users with bad numbers send zero, so all of this is finite. Were it not, an error would
        # tell something about them: what is no number counts as zero.
        whole = (total.double() / steps).nan_to_num_(nan=0.0).clamp_(-_LARGEST, _LARGEST).round_()
        noise = self.source.integers(self.size, round, device=total.device)
        return noise.add_(whole.long()).double() * steps

    def _steps_on(self, device: torch.device) -> Tensor:
        if device not in self._steps:
            self._steps[device] = (self.noise_stddev * 2.0**-GRID_BITS).to(device)
        return self._steps[device]


def grid_stddev(stddev: float, bound: float, numbers: int) -> float:
    """s'_b for the plan's s_b, on a block of ``numbers`` numbers clipped to ``bound``.

    The formula is the module's.
    """
    slack = stddev * math.sqrt(numbers) / (bound * 2.0**GRID_BITS)
    if slack >= 0.5:
        raise ValueError(
            f"noise of {stddev:.3g} on {numbers} numbers with the bound {bound:g} is so much that "
            "the bound gets lost between the steps of the noise's grid; use a smaller noise "
            "multiplier"
        )
    return stddev * (1.0 + RESERVE) / (1.0 - slack)
