"""The Gaussian mechanism without amplification, exactly and with ``math`` alone.

This is what holds against a server that knows the cohorts: a user who took part R times has been
seen through R Gaussian mechanisms, which together are one Gaussian mechanism with

    μ = √R · Δ / s,    δ(ε) = Φ(μ/2 − ε/μ) − e^ε · Φ(−μ/2 − ε/μ)

(Balle & Wang 2018, Theorem 8), where Δ is the sensitivity and s the noise's standard deviation.
"""

from __future__ import annotations

import math

from fpfl.numerics.checks import cohort_of, positive_number, probability, whole_number

# Bisections stop at a relative width of 1e-13, and δ(ε) itself is good to about 1e-12: this much
# on top makes sure that a solution errs on the safe side.
_SAFETY = 1e-9

_NOISE_HINT = "give the noise's standard deviation over the clip bound"
_DELTA_HINT = "give the δ of (ε, δ)-differential privacy, e.g. 1 / (10 * population)"


def gaussian_delta(epsilon: float, mu: float) -> float:
    r"""Smallest δ for which a Gaussian mechanism with Δ/s = μ is (ε, δ)-private.

    With a = μ/2 − ε/μ and b = μ/2 + ε/μ the density obeys φ(a) = e^ε · φ(b), so that

        δ(ε) = Φ(a) − e^ε Φ(−b) = Φ(a) − φ(a) · M(b),    M(t) = Φ(−t) / φ(t),

    in which e^ε, and its overflow, no longer appears.

    Parameters
    ----------
    epsilon : float
        ε ≥ 0.
    mu : float
        μ > 0.

    Returns
    -------
    float
        δ in [0, 1].
    """
    a = mu / 2 - epsilon / mu
    b = mu / 2 + epsilon / mu
    density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    if a <= 0:
        # Φ(a) = φ(a) · M(−a): both terms share the small factor, so nothing is lost in the tail.
        return max(0.0, density * (_mills(-a) - _mills(b)))
    return max(0.0, 0.5 * math.erfc(-a / math.sqrt(2)) - density * _mills(b))


def gaussian_epsilon(
    noise_multiplier: float,
    participations: int,
    delta: float,
    *,
    sensitivity: float = 1.0,
    measurement: float | None = None,
) -> float:
    """ε at δ of R Gaussian mechanisms on the same user, without amplification.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the clip bound, s/C.
    participations : int
        Number of mechanisms R ≥ 0.
    delta : float
        δ in (0, 1).
    sensitivity : float, default 1.0
        Sensitivity in clip bounds, Δ/C.
    measurement : float, optional
        Noise multiplier of one more Gaussian mechanism on everybody: μ² has (Δ/s₀)² more.

    Returns
    -------
    float
        The smallest ε, rounded up.
    """
    noise = positive_number("noise_multiplier", noise_multiplier, hint=_NOISE_HINT)
    times = whole_number("participations", participations, least=0, hint="count rounds per user")
    target = probability("delta", delta, hint=_DELTA_HINT)
    size = positive_number("sensitivity", sensitivity, hint="give it in clip bounds: 1 or 2")
    mu = math.hypot(
        math.sqrt(times) * size / noise, 0.0 if measurement is None else size / measurement
    )
    if mu == 0 or gaussian_delta(0.0, mu) <= target:
        return 0.0
    # Concentrated DP (Bun & Steinke 2016) gives an ε that is certainly large enough.
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / target))
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if gaussian_delta(middle, mu) <= target:
            high = middle
        else:
            low = middle
    return high * (1 + _SAFETY)


def gaussian_noise_multiplier(
    epsilon: float,
    participations: int,
    delta: float,
    *,
    sensitivity: float = 1.0,
    measurement: float | None = None,
) -> float:
    """Noise multiplier s/C at which R unamplified Gaussian mechanisms are (ε, δ)-private.

    The inverse of :func:`gaussian_epsilon`, rounded up.
    """
    budget = positive_number("epsilon", epsilon, hint="give the ε to be kept")
    times = whole_number("participations", participations, hint="count rounds per user")
    target = probability("delta", delta, hint=_DELTA_HINT)
    size = positive_number("sensitivity", sensitivity, hint="give it in clip bounds: 1 or 2")
    low, high = 0.0, 1.0
    while gaussian_delta(budget, high) <= target:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if gaussian_delta(budget, middle) <= target:
            low = middle
        else:
            high = middle
    # ε grows at least as fast as μ: three times the margin keeps the rounded-up ε within budget.
    mu = low * (1 - 3 * _SAFETY)
    if measurement is not None:
        rest = mu * mu - (size / measurement) ** 2
        if not rest > 0:
            raise ValueError(
                f"the measurement alone, with the noise multiplier {measurement:g}, costs more "
                f"than ε = {budget:g} at δ = {target:g}; give it more noise, or leave it out"
            )
        mu = math.sqrt(rest)
    return math.sqrt(times) * size / mu


def participations_bound(population: int, cohort: int, rounds: int, delta: float) -> int:
    """Smallest R that no user exceeds, but with probability δ.

    By the union bound over users, R is the smallest number with

        K · P[Binomial(T, m/K) > R] ≤ δ.

    A user's rounds are independent draws with probability m/K under Poisson sampling and under
    sampling without replacement alike, so the bound holds for both.

    Parameters
    ----------
    population, cohort, rounds : int
        K, m and T.
    delta : float
        δ in (0, 1).

    Returns
    -------
    int
        R, at most T.
    """
    users, size = cohort_of(population, cohort)
    times = whole_number("rounds", rounds, hint="give the number of rounds")
    target = probability("delta", delta, hint=_DELTA_HINT)
    return _binomial_bound(times, size / users, math.log(target) - math.log(users))


def participations_of_one(q: float, rounds: int, delta: float) -> int:
    """Smallest R with P[Binomial(T, q) > R] ≤ δ: one given user exceeds it with probability δ.

    Smaller than :func:`participations_bound`, which is about all users at once. ε is about one
    user at a time, so for a proof this one is enough.
    """
    chance = positive_number("q", q, most=1.0, hint="give cohort / population")
    times = whole_number("rounds", rounds, hint="give the number of rounds")
    return _binomial_bound(times, chance, math.log(probability("delta", delta, hint=_DELTA_HINT)))


def _mills(t: float) -> float:
    """Mills ratio M(t) = Φ(−t) / φ(t) for t ≥ 0."""
    if t < 25:
        x = t / math.sqrt(2)
        return math.sqrt(math.pi / 2) * math.exp(x * x) * math.erfc(x)
    # (1/t) · (1 − 1/t² + 1·3/t⁴ − 1·3·5/t⁶ …): at t ≥ 25 its terms fall below 1e-17 long before
    # they start to grow again.
    term = total = 1.0
    order = 1
    while abs(term) > 1e-17:
        term *= -order / (t * t)
        total += term
        order += 2
    return total / t


def _binomial_bound(trials: int, chance: float, log_target: float) -> int:
    """Smallest R with log P[Binomial(trials, chance) > R] ≤ ``log_target``."""
    if chance == 1.0:
        return trials
    low, high = -1, trials  # P[> −1] = 1 is too much; P[> trials] = 0 is fine
    while high - low > 1:
        middle = (low + high) // 2
        if _log_binomial_tail(trials, chance, middle) <= log_target:
            high = middle
        else:
            low = middle
    return high


def _log_binomial_tail(trials: int, chance: float, above: int) -> float:
    """log P[Binomial(trials, chance) > above], summed in log space, for 0 < chance < 1."""
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    log_trials = math.lgamma(trials + 1)
    total = -math.inf
    for hits in range(above + 1, trials + 1):
        term = (
            log_trials
            - math.lgamma(hits + 1)
            - math.lgamma(trials - hits + 1)
            + hits * log_hit
            + (trials - hits) * log_miss
        )
        top = max(total, term)
        total = top + math.log(math.exp(total - top) + math.exp(term - top))
        # Beyond the mean the terms fall ever faster: what follows is below float precision.
        if hits > trials * chance and term < total - 45:
            break
    return total
