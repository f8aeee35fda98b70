r"""What follows from a noisy histogram: quantiles, means, shares, and how far off they may be.

h is a column's true histogram of B cells with the sum N, h̃ = h + w the released one, w independent
Gaussian noise with standard deviation s (on a grid, which changes nothing that can be seen here).

*Quantiles.* H_i = h_1 + ... + h_i is what lies below the edge e_i. The q-quantile lies in bin j,
between e_j and e_{j+1}, where H_j ≤ qN ≤ H_{j+1}. For every edge

    H̃_i − q Ñ = (H_i − q N) + noise,    noise ~ N(0, s² ((1 − q)² i + q² (B − i))),

exactly, whatever N is. A bin j is kept unless H̃_j − qÑ is above z times that deviation or
H̃_{j+1} − qÑ below −z times: the right bin is lost with probability 2 (1 − Φ(z)) at most, so with
z = Φ⁻¹(1 − β/2) the interval from the first kept bin to the last has the quantile with probability
1 − β. In shares of the population that is known beforehand: about z s √B max(q, 1 − q)/K.

The estimate itself is read from H̃/Ñ made monotone: the mean of its running maximum from the left
and its running minimum from the right. Neither is further from the true curve, anywhere, than H̃/Ñ
is at its worst.

*Means and shares* are ratios Σ m_j h_j / N. For every μ

    Σ (m_j − μ) h̃_j = (Σ m_j h_j − μ N) + noise,    noise ~ N(0, s² Σ (m_j − μ)²),

and μ is kept where that is within z times its deviation (Fieller): a quadratic inequality, whose
solutions are an interval as long as Ñ > z s √B. Otherwise noise dominates, and nothing is known.
A mean lies between that of the bins' left edges and that of their right ones.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from fpfl.measurement.cells import Floats


def normal_quantile(confidence: float) -> float:
    """z = Φ⁻¹(1 − β/2) for the confidence 1 − β."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def rank_error(q: float, bins: int, stddev: float, population: float, confidence: float) -> float:
    """How far off, as a share of the users, a quantile's rank is: z s √B max(q, 1 − q)/K."""
    z = normal_quantile(confidence)
    return z * stddev * math.sqrt(bins) * max(q, 1.0 - q) / population


def distribution(released: Floats) -> Floats:
    """The share below every edge, (B + 1,): monotone, from 0 to 1.

    Where the released sum is not positive nothing is known, and all bins are taken for alike.
    """
    total = float(released.sum())
    if not total > 0:
        return np.linspace(0.0, 1.0, len(released) + 1)
    below = np.concatenate([[0.0], np.cumsum(released)]) / total
    low = np.minimum.accumulate(below[::-1])[::-1]
    high = np.maximum.accumulate(below)
    shares: Floats = np.clip((low + high) / 2, 0.0, 1.0)
    shares[0], shares[-1] = 0.0, 1.0
    return shares


def quantile(released: Floats, edges: Floats, q: float) -> float:
    """The q-quantile, linear within a bin."""
    shares = distribution(released)
    # Of bins that are empty, the first edge at which the share is reached.
    after = int(np.clip(np.searchsorted(shares, q, side="left"), 1, len(shares) - 1))
    low, high = shares[after - 1], shares[after]
    part = 1.0 if high <= low else (q - low) / (high - low)
    return float(edges[after - 1] + part * (edges[after] - edges[after - 1]))


def quantile_interval(
    released: Floats, edges: Floats, q: float, stddev: float, z: float
) -> tuple[float, float]:
    """From the first to the last bin that the q-quantile may be in."""
    bins = len(released)
    excess = np.concatenate([[0.0], np.cumsum(released)]) - q * released.sum()
    i = np.arange(bins + 1)
    reach = z * stddev * np.sqrt((1.0 - q) ** 2 * i + q**2 * (bins - i))
    kept = np.flatnonzero((excess[:-1] <= reach[:-1]) & (excess[1:] >= -reach[1:]))
    if not len(kept):
        return float(edges[0]), float(edges[-1])
    return float(edges[kept[0]]), float(edges[kept[-1] + 1])


def ratio(released: Floats, values: Floats) -> float:
    """Σ m_j h̃_j / Ñ; NaN where Ñ is not positive."""
    total = float(released.sum())
    return float(values @ released) / total if total > 0 else math.nan


def ratio_interval(
    released: Floats, values: Floats, stddev: float, z: float
) -> tuple[float, float] | None:
    """All μ that the noise allows for; None where it dominates."""
    reach, total = (z * stddev) ** 2, float(released.sum())
    # In units of the values' spread, so that nothing is lost where they are far from 0.
    middle, width = float(values.mean()), max(float(np.ptp(values)), 1e-300)
    m = (values - middle) / width
    square = total**2 - reach * len(m)
    if not (total > 0 and square > 0):
        return None
    A = float(m @ released)
    linear = A * total - reach * float(m.sum())
    constant = A**2 - reach * float(m @ m)
    root = math.sqrt(max(0.0, linear**2 - square * constant))
    low, high = (linear - root) / square, (linear + root) / square
    return middle + width * low, middle + width * high
