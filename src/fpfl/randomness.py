"""Separate random streams, so that changing one thing does not reshuffle the others.

A seed gives every purpose a stream of its own. Without a seed a stream starts from the operating
system's randomness. Noise is not drawn from these streams: see `fpfl.thirdparty.noise`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["initialisation", "partition", "cohorts", "noise", "samples"]

_NUMBERS: dict[Purpose, int] = {
    "initialisation": 1,
    "partition": 2,
    "cohorts": 3,
    "noise": 4,
    "samples": 5,
}


def stream(seed: int | None, purpose: Purpose) -> np.random.Generator:
    """A generator for one purpose; the same seed and purpose give the same numbers."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng([_check(seed), _NUMBERS[purpose]])


def derived_seed(seed: int, purpose: Purpose) -> int:
    """A seed for one purpose, for generators that are not numpy's."""
    sequence = np.random.SeedSequence([_check(seed), _NUMBERS[purpose]])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _check(seed: int) -> int:
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give a whole number that is 0 or more")
    return seed
