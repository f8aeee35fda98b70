r"""The AUC from counts: how many samples of either class have a score in each of 32 bins.

The bins are public. With p the predicted probability of class 1 they are even in

    u = √p/(√p + √(1 − p)),    so that bin j begins at p = j²/(j² + (32 − j)²):

finer near 0 and 1 than bins even in p, for rare classes have small probabilities.

A sample of weight w adds w to one of 64 counts. In the released vector they stand in units of λ:
beside the other counts' √t (`fpfl.heldout.estimates`), a sample is then √(t + λ²) long. With

    λ² = t ρ/(1 − ρ),    ρ = 1/10,

the counts of scores have the part ρ of the budget 1/σ². All other counts have noise that is
1/√(1 − ρ) − 1 = 5.4% larger than without them, so the gap's interval is at most 5.4% wider.

Let N¹_b and N⁰_b be the classes' counts, in all n_1 and n_0. What happens inside a bin is not seen:

    L = Σ_b N¹_b Σ_{a<b} N⁰_a/(n_1 n_0) ≤ AUC ≤ U = Σ_b N¹_b Σ_{a≤b} N⁰_a/(n_1 n_0),

from all ties lost to all of them won. Reported is the middle, (L + U)/2, and the lower end of L's
interval to the upper end of U's: noise, sampling and ties are in it.

**The lower end.** 1 − U is the same as L with the classes exchanged, so one will do. At the
true L = θ, with noise z of variance s² and K_ba = [a < b] − θ,

    X = N̂¹ᵀ K N̂⁰,   E X = 0 (but for pairs of one user's own samples: B/n of the whole),
    Var X ≤ B θ (1 − θ) n_1 n_0 (n_1 + n_0) + s² (‖K N⁰‖² + ‖Kᵀ N¹‖² + s² ‖K‖²).

For the first term: a user adds Σ_j w_j g_j, with Σ w_j ≤ B, to X's linear part. That squared is at
most B Σ_j w_j g_j² (convexity), and g is n_0 (or n_1) times what lies in [−θ, 1 − θ] and has mean
0. So it covers samples of a user that go together in any way. In the second term the noisy counts
stand for the true ones: ‖K N̂⁰‖² has s² ‖K‖² in it already. As in `fpfl.heldout.intervals`, θ is
admitted if

    X ≤ √(c Var X) + κ (1 − θ) max(n_0, n_1),   c = z²,   κ = c B/6,

with upper limits of n_1 and n_0 on the right, on which a tenth of the error is spent. The lower end
is the least θ that is admitted, of a grid; a step is taken off for what lies between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpfl.fairness.metrics import Estimate
from fpfl.heldout.intervals import FOR_COUNTS, Floats, Sums, count_limits, squared_quantile

BINS = 32
"""Bins of the score."""

SHARE = 0.1
"""ρ: the part of the budget 1/σ² that the counts of scores have."""

DEARER = 1.0 / math.sqrt(1.0 - SHARE) - 1.0
"""By how much all other counts have more noise than without them, as a part of it."""

_INNER = torch.tensor(
    [2.0 * math.log(j / (BINS - j)) for j in range(1, BINS)], dtype=torch.float64
)  # as logits, log p/(1 − p)
_GRID = np.linspace(0.0, 1.0, 2001)


def unit(ways: float) -> float:
    """λ: what one sample adds to a count of scores, beside vectors of length √t."""
    return math.sqrt(ways * SHARE / (1.0 - SHARE))


def bin_ends() -> list[float]:
    """The 33 ends of the bins, as probabilities of class 1."""
    return [j**2 / (j**2 + (BINS - j) ** 2) for j in range(BINS + 1)]


def count_scores(logits: Tensor, labels: Tensor, owner: Tensor) -> Tensor:
    """Count each user's samples by class and bin, (users, 64): class 0 first.

    Parameters
    ----------
    logits, labels
        Of the samples: what the model returns for class 1 of two, and 0 or 1.
    owner
        Each sample's user, rising from 0.
    """
    users, width = int(owner[-1]) + 1, 2 * BINS
    places = labels * BINS + torch.bucketize(logits.double(), _INNER, right=True)
    found = torch.bincount(owner * width + places, minlength=users * width)
    return found.reshape(users, width).double()


@dataclass(frozen=True)
class ReleasedScores:
    """The released counts of scores, in samples.

    Parameters
    ----------
    counts
        Of class 0 and of class 1, (2, 32). They may be negative.
    noise_stddev
        s: the standard deviation of the noise on each.
    bound
        B: how many samples a user weighs at most.
    """

    counts: Floats
    noise_stddev: float
    bound: float

    @property
    def totals(self) -> Sums:
        """n_0 and n_1, as released."""
        n, noise = self.counts.sum(axis=1), np.full(2, BINS * self.noise_stddev**2)
        return Sums(n, np.zeros(2), noise, np.zeros(2))

    def area(self, confidence: float) -> Estimate:
        """The AUC, in an interval that misses it with probability 1 − ``confidence`` at most.

        NaN where noise dominates one of the classes; the interval is wide there, not wrong.
        """
        zeros, ones = self.counts
        error = 1.0 - confidence
        _, most = count_limits(self.totals, FOR_COUNTS * error / 2, self.bound)
        c = squared_quantile((1.0 - FOR_COUNTS) * error / 2)
        low = self._least(ones, zeros, float(most[1]), float(most[0]), c)
        # What class 1 does not win in spite of all ties, class 0 does without them.
        high = 1.0 - self._least(zeros, ones, float(most[0]), float(most[1]), c)
        low, high = min(low, high), max(low, high)  # noise may turn ties into less than none
        if not self.totals.known().all():
            return Estimate(math.nan, low, high)
        below = np.cumsum(zeros) - zeros / 2
        value = float(ones @ below / (ones.sum() * zeros.sum()))
        return Estimate(min(max(value, 0.0), 1.0), low, high)

    def _least(
        self, winners: Floats, losers: Floats, n_winners: float, n_losers: float, c: float
    ) -> float:
        """The least θ that is admitted for L; 1 where none is."""
        theta, s2, B = _GRID, self.noise_stddev**2, self.bound
        lost = np.cumsum(losers) - losers  # Σ_{a<b}, for each b
        won = winners.sum() - np.cumsum(winners)  # Σ_{b>a}, for each a
        m, n = winners.sum(), losers.sum()
        X = lost @ winners - theta * (m * n)
        # ‖K N⁰‖² and ‖Kᵀ N¹‖², as polynomials of θ.
        by_winner = lost @ lost - 2.0 * theta * n * lost.sum() + BINS * (theta * n) ** 2
        by_loser = won @ won - 2.0 * theta * m * won.sum() + BINS * (theta * m) ** 2
        sampling = B * theta * (1.0 - theta) * n_winners * n_losers * (n_winners + n_losers)
        noise = s2 * np.maximum(by_winner + by_loser, 0.0)
        skew = c * B / 6.0 * (1.0 - theta) * max(n_winners, n_losers)
        admitted = np.sqrt(c * (sampling + noise)) + skew >= X
        least = float(theta[admitted.argmax()]) if admitted.any() else 1.0
        return max(least - float(_GRID[1]), 0.0)
