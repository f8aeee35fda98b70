"""Gaussian noise: from the operating system's randomness, or seeded for simulations.

The noise's seed is a key: whoever has it can subtract the noise. A seeded source is for
simulations and says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fpfl.randomness import derived_seed


class NoiseSource(Protocol):
    """Where standard normal numbers come from."""

    @property
    def seeded(self) -> bool:
        """Whether somebody with a seed could draw the same noise again."""
        ...

    def normal(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw independent standard normal numbers."""
        ...


@dataclass(frozen=True)
class SystemNoise:
    """Noise from the operating system's randomness, 53 bits a number, by the inverse of Φ."""

    seeded: bool = field(default=False, init=False)

    def normal(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw z = Φ⁻¹((u + ½)/2⁵³), u uniform on the integers below 2⁵³."""
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
        normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
        return normal.to(device, dtype)


@dataclass(frozen=True)
class SeededNoise:
    """Noise that the same seed draws again: for simulations, no guarantee to anyone."""

    seed: int
    seeded: bool = field(default=True, init=False)
    _generators: dict[str, torch.Generator] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def normal(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw from the seed's noise stream."""
        generator = self._generators.get(str(device))
        if generator is None:
            generator = torch.Generator(device).manual_seed(derived_seed(self.seed, "noise"))
            self._generators[str(device)] = generator
        return torch.randn(size, generator=generator, dtype=dtype, device=device)
