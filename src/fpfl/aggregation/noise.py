r"""Noise in whole numbers: from the operating system's randomness, or seeded for simulations.

It is the discrete Gaussian, drawn exactly: P(x) ∝ exp(−x²/2σ²), σ = 2²⁴. Normal numbers in floating
point are no Gaussian: which of them can occur at all depends on what they are added to, and their
low bits give that away (Mironov 2012). Whole numbers have no low bits to look at, as long as they
are drawn from the distribution itself and not from one near it. The construction is Karney's
(2016), for a σ that is a power of two:

1. draw k ≥ 0 with P(k) ∝ exp(−k²/2), j uniform on 0, ..., σ − 1, and a sign;
2. accept ±(kσ + j) with probability exp(−y(2k + y)/2), where y = j/σ; reject −0.

    P(x = kσ + j) ∝ exp(−k²/2 − ky − y²/2) = exp(−(k + y)²/2) = exp(−x²/2σ²)

About √(π/2)/Σ_k exp(−k²/2) = 71 % of the attempts are accepted, and each takes 64 random bits.

Both random decisions compare a uniform number with one that has no finite expansion. Nearly always
its first bits decide, and they are compared for many attempts at once. Where they do not, because
the two agree as far as they are known, the uniform number gets more bits and the other is computed
to more digits until they differ (as in Ducas and Nguyen 2012). So nothing is rounded, and k has no
largest value.

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
  a billion numbers at ε = 2. A statement's δ has that term (`fpfl.privacy.assumptions`).
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import cached_property, lru_cache
from itertools import accumulate
from math import isqrt
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.numerics.randomness import derived_seed, hashed

ByteSource = Callable[[int], bytes]
"""Gives so many bytes that nobody can guess."""

GRID_BITS = 24
"""The standard deviation is 2 to this power."""

# The fields of the 64 random bits of an attempt, from the low end.
_SIGN = GRID_BITS
_CHOICE, _CHOICE_BITS = _SIGN + 1, 16
_ACCEPTANCE, _ACCEPTANCE_BITS = _CHOICE + _CHOICE_BITS, 23
_MORE = 64

_UNDECIDED = 127
_AT_ONCE = 2**15
"""So many attempts fit a processor's cache."""

_SLACK = 2.0**-10
"""How far, in units of 2⁻²³, the probability in double precision may be off. It is off by less than
2⁻²⁰: that leaves a thousandfold for whatever library computes the exponential."""


def discrete_gaussian(
    size: int, source: ByteSource = os.urandom, bits: int = GRID_BITS
) -> NDArray[np.int64]:
    """Draw independent whole numbers x with P(x) ∝ exp(−x²/2σ²).

    Parameters
    ----------
    size
        How many.
    source
        Where random bytes come from; by default the operating system's cryptographic generator.
    bits
        σ = 2 to this power, up to `GRID_BITS`.
    """
    numbers = np.empty(size, dtype=np.int64)
    done = 0
    while done < size:
        missing = size - done
        # Four standard deviations more than it takes on average: mostly one go is enough.
        attempts = int(1.4 * missing + 3.5 * missing**0.5) + 8
        some = _attempts(min(attempts, _AT_ONCE), source, bits)[:missing]
        numbers[done : done + len(some)] = some
        done += len(some)
    return numbers


def _attempts(count: int, source: ByteSource, bits: int) -> NDArray[np.int64]:
    """The numbers that so many attempts give."""
    words = np.frombuffer(source(8 * count), dtype="<i8")
    j = words & (2**bits - 1)
    choice = (words >> _CHOICE) & (2**_CHOICE_BITS - 1)
    k = _choices()[choice].astype(np.int64)
    for i in np.flatnonzero(k == _UNDECIDED):
        k[i] = _chosen(int(choice[i]), _CHOICE_BITS, source)
    uniform = (words >> _ACCEPTANCE) & (2**_ACCEPTANCE_BITS - 1)
    y = j * 2.0**-bits
    probability = np.exp(-y * (k + 0.5 * y))
    # Of the uniform number u is known that 2²³ u is in [uniform, uniform + 1).
    above = probability * 2.0**_ACCEPTANCE_BITS - uniform
    accepted = above > 0.5
    for i in np.flatnonzero(np.abs(above - 0.5) < 0.5 + _SLACK):
        accepted[i] = _is_below(
            int(uniform[i]), _ACCEPTANCE_BITS, int(k[i]), int(j[i]), bits, source
        )
    negative = (words >> _SIGN) & 1
    x = (k << bits) + j
    accepted &= (x | (negative ^ 1)) != 0  # zero has one sign
    kept = np.flatnonzero(accepted)
    x, negative = x[kept], negative[kept]
    signed: NDArray[np.int64] = (x ^ -negative) + negative
    return signed


def _is_below(value: int, known: int, k: int, j: int, bits: int, source: ByteSource) -> bool:
    """Whether a uniform number that begins with the ``known`` bits of ``value`` accepts (k, j)."""
    if j == 0:
        return True  # with certainty, which digits would never tell
    while True:
        limit = _exponential(j * ((2 * k << bits) + j), 2 * bits + 1, known)
        if value + 1 <= limit - 1:
            return True
        if value >= limit + 1:
            return False
        value, known = _extended(value, known, source)


def _chosen(value: int, known: int, source: ByteSource) -> int:
    """The k that a uniform number chooses which begins with the ``known`` bits of ``value``."""
    while True:
        limits = _cumulative(known)
        least = bisect_right(limits, value - 1)
        most = bisect_left(limits, value + 2)
        if least == most:
            return least
        value, known = _extended(value, known, source)


def _extended(value: int, known: int, source: ByteSource) -> tuple[int, int]:
    more = int.from_bytes(source(_MORE // 8), "little")
    return value << _MORE | more, known + _MORE


@lru_cache(maxsize=1)
def _choices() -> NDArray[np.int8]:
    """The k that each possible beginning of a uniform number chooses, where that is decided."""
    table = np.full(2**_CHOICE_BITS, _UNDECIDED, dtype=np.int8)
    start = 0
    for k, limit in enumerate(_cumulative(_CHOICE_BITS + _MORE)):
        stop = (limit - 1) >> _MORE
        if stop <= start:
            break
        table[start:stop] = k
        start = ((limit + 1) >> _MORE) + 1
    return table


@lru_cache(maxsize=8)
def _cumulative(bits: int) -> tuple[int, ...]:
    """P(0) + ... + P(k) for k = 0, 1, ..., in units of 2^−bits and each off by less than one.

    The last one stands for all that follow, which are as near to 2^bits as it is.
    """
    # All further weights together are below 2^−(bits + 63), since e^−x < 2^−x.
    last = isqrt(2 * (bits + _MORE)) + 1
    weights = [_exponential(k * k, 1, bits + _MORE) for k in range(last + 1)]
    total = sum(weights)
    # To the nearest: half a unit from rounding, and far less from the weights.
    return tuple(((part << bits + 1) // total + 1) >> 1 for part in accumulate(weights))


def _exponential(numerator: int, shift: int, bits: int) -> int:
    """exp(−numerator/2^shift) in units of 2^−bits, off by less than one."""
    # Half a unit is from rounding to the nearest at the end. Each operation before it rounds
    # correctly, with thirty digits more than the result has.
    context = Context(
        prec=30 + bits // 3, rounding=ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, traps=[]
    )
    exponent = context.divide(Decimal(-numerator), Decimal(2**shift))
    scaled = context.multiply(context.exp(exponent), Decimal(2**bits))
    return int(scaled.to_integral_value(ROUND_HALF_EVEN))


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
