r"""Intervals for rates and differences of rates, from released sums with noise in them.

Known are F̂ = F + noise and M̂ = M + noise, M = n' − F: sums over independent users, each of whom
adds F_k ≥ 0 and M_k ≥ 0 with F_k + M_k ≤ B. How alike the samples of a user are is not known.

**One rate**, v = E F/E n'. At the true v the sum X = (1 − v) F̂ − v M̂ has mean 0, and

    Var X ≤ B v (1 − v) N + (1 − v)² s_F² + v² s_M²,   N = E n',                             (1)

where s_F² and s_M² are the variances of the noise. For the first term, let x = (1 − v) F_k − v M_k:
x² is convex in (F_k, M_k), so it is below its interpolation between the corners (0, 0), (B, 0) and
(0, B), which gives E Σ x² ≤ B (1 − v)² E F + B v² E M = B v (1 − v) N. Users whose samples are all
alike reach this. So it covers samples of a user that go together in any way.

A value v is in the interval if X is as near to 0 as it may well be at v (a test, inverted):

    −√(c Var X) − κ v ≤ X ≤ √(c Var X) + κ (1 − v),   c = z²,   κ = c B/6.                   (2)

κ is for rare errors, whose sum is skewed: it is what Bernstein's inequality has, too (by which (2)
holds with probability 1 − p on either side, without approximation, for c = 2 log(1/p)). The lower
end is the least v that the right half admits, the root of a quadratic; the upper end is the lower
one with F̂ and M̂ in each other's place. Negative sums are set to 0 before, which can only bring X
nearer to 0. Since Var X is taken at the v in question, a count of no errors leaves about z² B of
them possible (the rule of three), and counts that their noise dominates admit all of [0, 1].

**A group and the whole.** With the rest's value w and the group's share π of n',

    D = F/n' − F_a/n'_a = (1 − π)(w − v).

The noise of group and rest is independent, and for any weights α and β, Var(α X_a + β X_b) is at
most α² (1) + β² (1), by the same corners: users with samples in both do not make it worse. So
(v, w) is admitted if c_a + c_b ≤ c, with the least c_a and c_b at which (2) admits v and w, and the
interval of w − v is what is admitted (a profile; Newcombe's "square and add" approximates it).
Limits of N_a and N_b give those of π.

A tenth of the error probability is spent on N, for (1) and π.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FOR_COUNTS = 0.1
"""The part of an error probability that is spent on N."""

_ANGLES = np.linspace(0.0, np.pi / 2, 33)  # c_a = c sin²: the largest of these is 0.03 % too small


@dataclass(frozen=True)
class Sums:
    """Released F and M = n' − F, and the variances of their noise: arrays of one shape."""

    F: Floats
    M: Floats
    noise_F: Floats
    noise_M: Floats

    @property
    def n(self) -> Floats:
        """n', as released."""
        return self.F + self.M

    @property
    def noise_n(self) -> Floats:
        """The variance of its noise."""
        return self.noise_F + self.noise_M

    def __sub__(self, part: Sums) -> Sums:
        """The rest of a sum that ``part`` is in, noise and all."""
        return Sums(
            self.F - part.F,
            self.M - part.M,
            self.noise_F - part.noise_F,
            self.noise_M - part.noise_M,
        )

    def exchanged(self) -> Sums:
        """The same with F and M in each other's place."""
        return Sums(self.M, self.F, self.noise_M, self.noise_F)

    def positive(self) -> Sums:
        """The same without negative sums."""
        F, M = np.maximum(self.F, 0.0), np.maximum(self.M, 0.0)
        return Sums(F, M, self.noise_F, self.noise_M)

    def known(self) -> NDArray[np.bool_]:
        """Where n' is one sample at least, and twice its noise: else it says nothing of a rate."""
        found: NDArray[np.bool_] = self.n >= np.maximum(1.0, 2.0 * np.sqrt(self.noise_n))
        return found

    def value(self) -> Floats:
        """F/n' in [0, 1], NaN where it is not known."""
        sums = self.positive()
        value: Floats = np.divide(
            sums.F, sums.n, out=np.full(self.F.shape, np.nan), where=self.known()
        )
        return value


def rate_interval(sums: Sums, error: float, bound: float) -> tuple[Floats, Floats]:
    """Ends of each rate's interval, which misses the rate with probability ``error`` at most.

    Parameters
    ----------
    sums
        What was released.
    error
        1 − confidence, for each rate by itself.
    bound
        B.
    """
    c = np.asarray(squared_quantile((1.0 - FOR_COUNTS) * error / 2))
    _, most = count_limits(sums, FOR_COUNTS * error, bound)
    return _ends(sums.positive(), most, c, bound)


def difference_interval(
    group: Sums, rest: Sums, error: float, bound: float
) -> tuple[Floats, Floats]:
    """Ends of the interval of D = (1 − π)(w − v), for every group and the rest beside it.

    Parameters
    ----------
    group, rest
        What was released, of the same shape (...), with independent noise.
    error
        1 − confidence, for each difference by itself.
    bound
        B.
    """
    c = squared_quantile((1.0 - FOR_COUNTS) * error / 2)
    least_a, most_a = count_limits(group, FOR_COUNTS * error / 4, bound)
    least_b, most_b = count_limits(rest, FOR_COUNTS * error / 4, bound)
    angles = _ANGLES.reshape(-1, *(1,) * group.F.ndim)
    v_low, v_high = _ends(group.positive(), most_a, c * np.sin(angles) ** 2, bound)
    w_low, w_high = _ends(rest.positive(), most_b, c * np.cos(angles) ** 2, bound)
    low, high = (w_low - v_high).min(axis=0), (w_high - v_low).max(axis=0)
    largest, smallest = 1.0 - _share(least_a, most_b), 1.0 - _share(most_a, least_b)
    return (
        np.where(low < 0.0, largest, smallest) * low,
        np.where(high > 0.0, largest, smallest) * high,
    )


def count_limits(sums: Sums, error: float, bound: float) -> tuple[Floats, Floats]:
    """Limits of N = E n', each of which is wrong with probability ``error`` at most.

    By the same corners Var n' ≤ B N, so they solve (N − n̂')² = c (B N + s²); κ is taken off for
    the lower one.
    """
    c = squared_quantile(error)
    half = c * bound / 2

    def spread(n: Floats) -> Floats:
        root: Floats = np.sqrt(half**2 + c * np.maximum(bound * n + sums.noise_n, 0.0))
        return root

    fewer = sums.n - c * bound / 6
    least, most = fewer + half - spread(fewer), sums.n + half + spread(sums.n)
    return np.maximum(least, 0.0), np.maximum(most, 0.0)


def _ends(sums: Sums, N: Floats, c: Floats, bound: float) -> tuple[Floats, Floats]:
    return _lower_end(sums, N, c, bound), 1.0 - _lower_end(sums.exchanged(), N, c, bound)


def _lower_end(sums: Sums, N: Floats, c: Floats, bound: float) -> Floats:
    """The least v in [0, 1] with (1 − v) F − v M − κ (1 − v) ≤ √(c Var X).

    With f = max(F − κ, 0) it is 0, or else the smaller positive root of q₀ + q₁ v + q₂ v²,

        q(v) = (f − v (f + M))² − c (B N v (1 − v) + (1 − v)² s_F² + v² s_M²),

    which is positive at 0 and not at f/(f + M).
    """
    f = np.maximum(sums.F - c * bound / 6, 0.0)
    n, sampling = f + sums.M, bound * N
    q0 = f**2 - c * sums.noise_F
    q1 = -2.0 * f * n - c * (sampling - 2.0 * sums.noise_F)
    q2 = n**2 + c * (sampling - sums.noise_n)
    # This form of the root divides by a positive number wherever q0 > 0.
    divisor = -q1 + np.sqrt(np.maximum(q1**2 - 4.0 * q2 * q0, 0.0))
    end: Floats = np.divide(2.0 * q0, divisor, out=np.zeros_like(divisor), where=q0 > 0.0)
    return end


def _share(part: Floats, rest: Floats) -> Floats:
    """part/(part + rest); 0 of nothing, the share that makes a difference largest."""
    whole = part + rest
    share: Floats = np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0.0)
    return share


def squared_quantile(tail: float) -> float:
    """z² of a normal distribution, for a tail of that probability."""
    return NormalDist().inv_cdf(1.0 - tail) ** 2
