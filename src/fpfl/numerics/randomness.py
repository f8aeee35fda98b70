"""Separate random streams, so that changing one thing does not reshuffle the others.

A seed gives every purpose a stream of its own. Without a seed a stream starts from the operating
system's randomness. Noise is not drawn from these streams: see `fpfl.aggregation.noise`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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


class RoundStreams:
    """A stream for every round of a run.

    With a seed, round t's numbers depend on the seed and t alone, so that a run that is resumed
    draws what it would have drawn. Without one, all rounds go on with one generator that started
    from the operating system's randomness.
    """

    def __init__(self, seed: int | None, purpose: Purpose) -> None:
        self._seed = None if seed is None else derived_seed(seed, purpose)
        self._one = stream(None, purpose)

    def of(self, round: int) -> np.random.Generator:
        """The stream of a round."""
        if self._seed is None:
            return self._one
        return np.random.Generator(np.random.Philox(key=[self._seed, round]))


def derived_seed(seed: int, purpose: Purpose) -> int:
    """A seed for one purpose, for generators that are not numpy's."""
    sequence = np.random.SeedSequence([_check(seed), _NUMBERS[purpose]])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def hashed(key: int, *numbers: int | NDArray[np.int64]) -> Any:
    """A number below 2⁶³ for every (key, numbers), as if drawn at random (SplitMix64's finaliser).

    Which user or sample gets which number depends on nothing else: not on the order in which they
    are computed, nor on which process does it.
    """
    if all(isinstance(number, int) for number in numbers):
        return _hashed(key, *numbers)  # type: ignore[arg-type]
    state = np.asarray(key, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = state + np.asarray(number).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    below = state >> np.uint64(1)
    return int(below) if below.ndim == 0 else below.astype(np.int64)


def _hashed(key: int, *numbers: int) -> int:
    """The same for single numbers, several times as fast."""
    state, most = key, 2**64 - 1
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & most
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & most
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & most
        state ^= state >> 31
    return state >> 1


def _check(seed: int) -> int:
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give a whole number that is 0 or more")
    return seed
