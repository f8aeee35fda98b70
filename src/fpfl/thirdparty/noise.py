r"""Noise in whole numbers: from the operating system's randomness, or seeded for simulations.

The noise's seed is a key: whoever has it can subtract the noise. A seeded source is for
simulations and says so.

What noise in whole numbers costs, compared with the Gaussian N(0, σ²) that accountants know, where
whole numbers are changed by a whole vector of length at most Δ and σ = 2²⁴:

- Rényi divergences of every order are at most the Gaussian's, α Δ²/2σ² (Canonne, Kamath and
  Steinke 2020: Theorem 4, and its form for vectors). What is derived from them alone, without
  sampling, holds as it stands.
- Accountants of sampled cohorts, by PLD and by Rényi DP, speak of the Gaussian itself. Rounding its
  noise to whole numbers is post-processing, so they are right for round(N(0, σ²)). A number of the
  discrete Gaussian has a Kullback-Leibler divergence of 1/(576 σ⁴) from that one, up to a relative
  error of the order σ⁻². So all N numbers that a run releases are within √(N/1152)/σ² < √N · 2⁻⁵³
  of it in total variation (Pinsker), and δ grows by (1 + e^ε) √N · 2⁻⁵³ at most: by 3 · 10⁻¹¹ for
  a billion numbers at ε = 2. A statement's δ has that term (`fpfl.privacy.remarks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fpfl.randomness import derived_seed, hashed
from fpfl.thirdparty.discrete import GRID_BITS, discrete_gaussian


class NoiseSource(Protocol):
    """Where the noise comes from."""

    @property
    def seeded(self) -> bool:
        """Whether somebody with a seed could draw the same noise again."""
        ...

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        """Draw independent whole numbers (int64) with mean 0 and standard deviation 2²⁴."""
        ...


@dataclass(frozen=True)
class SystemNoise:
    """Noise from the operating system's randomness: the discrete Gaussian, exactly."""

    seeded: bool = field(default=False, init=False)

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        """Draw new noise, whatever the round."""
        return torch.from_numpy(discrete_gaussian(size)).to(device)


@dataclass(frozen=True)
class SeededNoise:
    """Noise that the same seed draws again: for simulations, no guarantee to anyone.

    A round's noise depends on the seed and the round alone, not on the rounds drawn before: a
    simulation that is resumed goes on with the same. It is a rounded normal number and not exactly
    the discrete Gaussian: there is nobody to hide from.
    """

    seed: int
    seeded: bool = field(default=True, init=False)
    _generators: dict[torch.device, torch.Generator] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        """Draw the round's noise."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        generator.manual_seed(hashed(self._key, round))
        normal = torch.randn(size, generator=generator, dtype=torch.float64, device=device)
        return normal.mul_(2.0**GRID_BITS).round_().long()

    @cached_property
    def _key(self) -> int:
        return derived_seed(self.seed, "noise")
