r"""The third party: clips each user's vector, sums, adds noise, and lets nothing else out.

v = Σ_k clip(v^k) + N(0, s_b²) in every block b,   s_b = C_b σ/√ρ_b
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.thirdparty.clipping import ClipRule, Rows, clip_rules, clipped_sum
from fpfl.thirdparty.noise import NoiseSource, SystemNoise


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
    _stddevs: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.blocks != self.blocks:
            raise ValueError(
                f"the plan was made for the blocks {self.plan.blocks}, the third party clips "
                f"{self.blocks}; use the plan's own"
            )
        rules = clip_rules(self.blocks, self.places) if self.blocks else ()
        object.__setattr__(self, "rules", rules)

    @property
    def size(self) -> int:
        """The length of v."""
        return max(int(place.stop) for place in self.places.values())

    @cached_property
    def noise_stddev(self) -> Tensor:
        """The standard deviation of the noise on every number of v."""
        scale = torch.zeros(self.size, dtype=torch.float64)
        if self.plan is not None:
            for rule in self.rules:
                for place in rule.places:
                    scale[place] = self.plan.noise_stddev(rule.name)
        return scale

    def release(self, chunks: Iterable[Rows], like: Tensor) -> Tensor:
        """Clip and sum the users' vectors, add the noise; ``like`` gives type and device."""
        return self.noised(self.sum(chunks, like).double()).to(like.dtype)

    def sum(self, chunks: Iterable[Rows], like: Tensor) -> Tensor:
        """Clip and sum the users' vectors."""
        total = like.new_zeros(self.size)
        for rows in chunks:
            if self.rules:
                total += clipped_sum(rows, self.rules)
            else:
                for name, block in rows.totals(self.places, like.new_ones(len(rows))).items():
                    total[self.places[name]] += block
            del rows  # not kept while the next ones are computed
        return total

    def noised(self, total: Tensor) -> Tensor:
        """Add the noise to a sum, in double precision.

        The noise's low bits are part of what hides a user: whoever adds more to it, or rounds it,
        does so afterwards.
        """
        if self.plan is None:
            return total
        noise = self.source.normal(self.size, dtype=torch.float64, device=total.device)
        return total + noise.mul_(self._stddev_on(total.device))

    def _stddev_on(self, device: torch.device) -> Tensor:
        if device not in self._stddevs:
            self._stddevs[device] = self.noise_stddev.to(device)
        return self._stddevs[device]
