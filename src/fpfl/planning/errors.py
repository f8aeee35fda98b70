r"""How sure a gap is that was counted with noise: from public numbers, before anything is trained.

A user of a cohort has N relevant samples and its counts are scaled to weigh x = C_s/j of them at
most (`fpfl.aggregation.clipping`; j is how often a sample is counted). With

    A = E min(N, x),    B = E N min(1, x/N)²,

a cohort of m users counts n'_a = m A h_a for a group with the share h_a of the relevant samples,
and with everybody's rate at p the errors e_a = F_a − p n'_a have the variance

    m B h_a p (1 − p) (1 − q)    from drawing a cohort, q = m/K (every user: nothing is drawn),
    s² ((1 − p)² + p²)           from noise of standard deviation s on F_a and on n'_a − F_a.

D_a = F/n' − F_a/n'_a moves by (Σ_b e_b)/n' − e_a/n'_a, so where groups partition the samples

    Var D_a = Var e_a (1/n'_a − 1/n')² + Σ_{b≠a} Var e_b/n'²;

otherwise the whole's counts have noise of their own, and the second noise term is one Var e/n'².
Without a guess of p both factors are taken as large as they can be, 1/4 and 1.

This is the error of the *training population's* gap, to first order: it is good where n'_a is
several times s, and too small below. N is Poisson; one sample for each user is exactly one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LARGEST_MEAN = 700.0
"""Of a Poisson number whose probabilities are added up one by one: e^−mean must not be 0."""


@dataclass(frozen=True)
class Counted:
    """What a cohort counts for one group in one rate.

    Parameters
    ----------
    rate, group
        Their names.
    share
        h_a: of all relevant samples, those of this group in this rate.
    whole
        h: those of everybody in this rate.
    others
        How many more groups the whole is added up from; None where it is counted by itself.
    """

    rate: str
    group: str
    share: float
    whole: float
    others: int | None


def moments(samples: float, relevant: float, most: float) -> tuple[float, float]:
    """A = E min(N, x) and B = E N min(1, x/N)² of a user's relevant samples.

    Parameters
    ----------
    samples
        How many samples a user has on average; 1 means exactly one.
    relevant
        Which share of samples is counted at all.
    most
        x: how many samples a user weighs at most.
    """
    if samples == 1.0:
        return relevant * min(1.0, most), relevant * min(1.0, most) ** 2
    mean = samples * relevant
    if mean > LARGEST_MEAN:  # N is its mean, nearly
        return min(mean, most), mean * min(1.0, most / mean) ** 2
    chance, A, B = math.exp(-mean), 0.0, 0.0
    for n in range(1, math.ceil(mean + 12.0 * math.sqrt(mean) + 30.0)):
        chance *= mean / n
        A += chance * min(float(n), most)
        B += chance * n * min(1.0, most / n) ** 2
    return A, B


def expected_count(cohort: int, share: float, A: float) -> float:
    """n'_a of a cohort, as counted."""
    return cohort * A * share


def gap_error(
    counted: Counted,
    *,
    cohort: int,
    population: int,
    noise: float,
    A: float,
    B: float,
    rate: float | None,
) -> float:
    """The standard deviation of one round's D_a; see the module.

    Parameters
    ----------
    counted
        The group.
    cohort, population
        m and K.
    noise
        s on every count.
    A, B
        `moments`.
    rate
        p, where there is a guess.
    """
    n, n_a = (expected_count(cohort, h, A) for h in (counted.whole, counted.share))
    drawn = 0.25 if rate is None else rate * (1.0 - rate)
    noisy = 1.0 if rate is None else (1.0 - rate) ** 2 + rate**2
    each = cohort * B * drawn * (1.0 - cohort / population)
    own, rest = 1.0 / n_a - 1.0 / n, 1.0 / n
    variance = each * (counted.share * own**2 + (counted.whole - counted.share) * rest**2)
    if counted.others is None:
        variance += noise**2 * noisy * (1.0 / n_a**2 + rest**2)
    else:
        variance += noise**2 * noisy * (own**2 + counted.others * rest**2)
    return math.sqrt(variance)


def effective_rounds(memory: float, rounds: int) -> float:
    """How many rounds a moving average that keeps b of itself is worth: (1 + b)/(1 − b), or T."""
    return min(float(rounds), (1.0 + memory) / (1.0 - memory))


def heldout_users(
    counted: Sequence[Counted],
    *,
    samples: float,
    relevant: float,
    tolerance: float,
    rate: float | None,
    confidence: float = 0.95,
) -> int:
    r"""How many held-out users a verdict takes where groups are alike: z · (error of D_a) ≤ α.

    Without noise, with every sample counted: D_a has the variance p(1 − p) (1/n'_a − 1/n'), and

        users = max_a z² p (1 − p) (1/h_a − 1/h)/(α² n̄ h_total),

    z for all groups and rates at once (Bonferroni).
    """
    z = NormalDist().inv_cdf(1.0 - (1.0 - confidence) / (2.0 * len(counted)))
    drawn = 0.25 if rate is None else rate * (1.0 - rate)
    worst = max(1.0 / each.share - 1.0 / each.whole for each in counted)
    return math.ceil(z**2 * drawn * worst / (tolerance**2 * samples * relevant))
