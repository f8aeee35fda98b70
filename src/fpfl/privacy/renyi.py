r"""Rényi divergences of sampled cohorts and of noise in shares, and what ε they come to.

**Cohorts of a fixed size** (Wang et al. 2019). With noise σ in sensitivities and q = m/K, their
Theorem 27 bounds the divergence of a Gaussian mechanism at whole orders α by

    (α − 1)·ρ(α) ≤ log(1 + C(α,2)·q²·min{4(f₂ − 1), 2f₂}
                         + Σ_{j=3…α} C(α,j)·q^j·min{4√(b_{2⌊j/2⌋}·b_{2⌈j/2⌉}), 2f_j}),

where f_j = exp(j(j − 1)/(2σ²)) is a moment of the likelihood ratio L, and b_i = E[(L − 1)^i] its
central moment, the i-th forward difference of f at 0. These differences cancel: in floating point
they are noise from i ≈ 10 on, and dp_accounting 0.6, which computes them so, can come out 0.7 %
too low where cohorts are a large part of the population (q = 0.64, σ = 6.9, α = 79) and three times
too high elsewhere. Here they are computed with as many digits as they lose.

**A sum to which every node adds a share of the noise** (Kairouz, Liu and Steinke 2021). A user's
clipped vector, all of its blocks in units of their bounds so that its norm is at most 1, is
multiplied by a scale S, rotated, rounded to D whole numbers and summed; each of n honest nodes adds
a share of discrete Gaussian noise of standard deviation s to every number. Three things are dearer
than with noise that one party adds:

- rounding. Randomised, and repeated until the norm is at most Δ, where (their conditional rounding,
  with β = e^{−1/2})

      Δ² = min{(S + √D)², S² + D/4 + √(2 log(1/β)) (S + √D/2)};

- a sum of discrete Gaussians is no discrete Gaussian. By their Proposition 14, for s ≥ 1/2, the
  Rényi divergence of every order α is at most

      ρ(α) = α/2 (r Δ/(√n s) + τ √D)²,    τ = 10 Σ_{k=1}^{n−1} exp(−2π² s² k/(k + 1)),

  where a person is on at most r nodes: that of a Gaussian mechanism with the noise multiplier
  σ = 1/(rΔ/(√n s) + τ√D);
- accountants that know the Gaussian itself do not apply. Where every user is sampled with
  probability q and nobody else knows whether, Theorem 5 of Zhu and Wang (2019), which asks for no
  more than ρ, bounds the divergence at whole orders by

      (α − 1) ρ'(α) ≤ log{(1 − q)^{α−1} (1 + (α − 1) q) + C(α,2) q² (1 − q)^{α−2} e^{ρ(2)}
                          + 3 Σ_{l=3}^{α} C(α,l) q^l (1 − q)^{α−l} e^{(l−1) ρ(l)}}.

  A person on r nodes is sampled on one of them at least with probability 1 − (1 − q)^r ≤ rq, and
  what it sends then is a mixture of vectors within r bounds: divergences are jointly quasi-convex,
  so rq stands for q.

Sums modulo 2³², and the masks of secure aggregation, are post-processing of the noisy sum.

A measurement before the first round is one more sum, in which everybody may be for certain: with
honest shares that come to the noise multiplier σ₀ of its own encoding, each order has

    α/(2σ₀²)

more. That is the curve above without coins, and divergences of one order add up, whatever the
later releases take from the earlier ones.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise
from math import comb, log, log1p

from fpfl.numerics.checks import positive_number, probability, whole_number

#: Beyond it differences take too long, and the bound does without them (as dp_accounting does).
LARGEST_EXACT_ORDER = 256


@lru_cache(maxsize=4096)
def fixed_size_renyi(order: int, noise: float, population: int, cohort: int) -> float:
    """Bound on the Rényi divergence of one release, for replace-one neighbours.

    Parameters
    ----------
    order : int
        Whole order α ≥ 2.
    noise : float
        Standard deviation of the noise over the *sensitivity*: honestly s/(2C).
    population, cohort : int
        K and m.
    """
    exact = order <= LARGEST_EXACT_ORDER
    with localcontext() as context:
        # Differences of order i lose a factor of 2^i: fewer digits than i.
        context.prec = 60 + (order if exact else 0)
        context.Emax, context.Emin = MAX_EMAX, MIN_EMIN
        half = 1 / (2 * Decimal(noise) ** 2)
        f = [(j * (j - 1) * half).exp() for j in range(order + 2)]
        b = _differences(f) if exact else []
        q = Decimal(cohort) / population
        total = 1 + comb(order, 2) * q**2 * min(4 * (f[2] - 1), 2 * f[2])
        for j in range(3, order + 1):
            term = 2 * f[j]
            if exact:
                term = min(term, 4 * (b[j // 2 * 2] * b[(j + 1) // 2 * 2]).sqrt())
            total += comb(order, j) * q**j * term
        return float(total.ln() / (order - 1))


def _differences(values: list[Decimal]) -> list[Decimal]:
    """The absolute forward differences at 0, of every order from 0 on."""
    found = []
    while values:
        found.append(abs(values[0]))
        values = [after - before for before, after in pairwise(values)]
    return found


def renyi_epsilon(rho: float, order: int, delta: float) -> float:
    """ε at δ of a Rényi divergence ρ of order α (Canonne, Kamath & Steinke 2020, Prop. 12).

    ε = ρ + log((α − 1)/α) − (log δ + log α)/(α − 1), and never below 0. With ρ = 0, where nothing
    was released, ε is 0.
    """
    if not rho >= 0:
        raise ValueError(f"rho must not be negative, but got {rho!r}.")
    if rho == 0:
        return 0.0
    return max(0.0, rho - renyi_gain(order, delta))


def renyi_gain(order: int, delta: float) -> float:
    """How much ε at δ is below ρ (mostly negative): ε = ρ − gain."""
    alpha = whole_number("order", order, least=2, hint="give a whole Rényi order")
    target = probability("delta", delta, hint="give the δ of (ε, δ)-differential privacy")
    return (log(target) + log(alpha)) / (alpha - 1) - log1p(-1 / alpha)


BETA = math.exp(-0.5)
"""β of the conditional rounding: a try succeeds with probability 1 − β at least."""

ORDERS = (*range(2, 65), *range(72, 257, 8), 320, 384, 512, 768, 1024)
"""Rényi orders that are tried. Fixed in advance, any of them would do."""

_NOISE = (1e-3, 1e6)
"""Noise multipliers between which is searched."""


def rounded_norm(scale: float, size: int) -> float:
    """Δ: the norm that a vector of norm ``scale`` and ``size`` numbers is rounded within."""
    root = math.sqrt(size)
    likely = scale**2 + size / 4 + math.sqrt(2 * math.log(1 / BETA)) * (scale + root / 2)
    return math.sqrt(min((scale + root) ** 2, likely))


def not_a_gaussian(share: float, adders: int) -> float:
    """τ: how far a sum of ``adders`` discrete Gaussians of this deviation is from being one."""
    if share < 0.5:
        raise ValueError(f"a share of noise has the deviation {share}; it must be at least 1/2")
    return 10 * math.fsum(
        math.exp(-2 * math.pi**2 * share**2 * k / (k + 1)) for k in range(1, adders)
    )


def shares_multiplier(scale: float, size: int, share: float, adders: int, copies: int = 1) -> float:
    """σ of a sum with noise in shares: the module's formula."""
    change = copies * rounded_norm(scale, size) / (math.sqrt(adders) * share)
    return 1 / (change + not_a_gaussian(share, adders) * math.sqrt(size))


def scale_for(noise: float, size: int, share: float, adders: int, copies: int = 1) -> float:
    """The largest S with which a sum has the noise multiplier ``noise``.

    Parameters
    ----------
    noise
        σ that the plan asks for.
    size
        D.
    share, adders
        s and n: each of at least n honest nodes adds noise of deviation s.
    copies
        r: a person is on at most so many nodes.
    """
    low, high = 1.0, math.sqrt(adders) * share / (copies * noise)
    if not high > low or shares_multiplier(low, size, share, adders, copies) < noise:
        raise ValueError(
            f"with noise of {noise:.4g} bounds, {adders} nodes that add shares of deviation "
            f"{share:g}, and {size} numbers, a vector is rounded to nothing: use more bits for a "
            "share, or a smaller noise multiplier"
        )
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if shares_multiplier(middle, size, share, adders, copies) >= noise:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=8192)
def coins_renyi(order: int, noise: float, chance: float) -> float:
    """ρ'(α) of one release, where every user is sampled with this chance and nobody sees whether.

    Never more than without sampling, ρ(α) = α/(2σ²): whoever knows the coins knows more.
    """
    whole_number("order", order, least=2, hint="give a whole Rényi order")
    half = 1 / (2 * noise**2)
    if chance >= 1.0:
        return order * half
    keep, draw = math.log1p(-chance), math.log(chance)
    terms = [(order - 1) * keep + math.log1p((order - 1) * chance)]
    for taken in range(2, order + 1):
        binomial = math.lgamma(order + 1) - math.lgamma(taken + 1) - math.lgamma(order - taken + 1)
        weight = 0.0 if taken == 2 else math.log(3)
        exponent = taken * (taken - 1) * half
        terms.append(weight + binomial + taken * draw + (order - taken) * keep + exponent)
    most = max(terms)
    total = most + math.log(math.fsum(math.exp(term - most) for term in terms))
    # Sums of logarithms err in their last digits, and a small divergence is one of those.
    return min(max(total, 0.0) / (order - 1) * (1 + 1e-9) + 1e-13, order * half)


def coins_epsilon(
    noise: float, chance: float, rounds: int, delta: float, measurement: float | None = None
) -> float:
    """ε of ``rounds`` releases with secret coins and noise in shares.

    ``measurement`` is σ₀ of one more, which everybody is in for certain.
    """
    before = 0.0 if measurement is None else 1 / (2 * measurement**2)
    return min(
        renyi_epsilon(
            rounds * coins_renyi(order, noise, min(chance, 1.0)) + order * before, order, delta
        )
        for order in ORDERS
    )


def shares_epsilon(
    noise: float, times: int, delta: float, measurement: float | None = None
) -> float:
    """ε for somebody who is known to have taken part ``times`` times: no amplification."""
    return coins_epsilon(noise, 1.0, times, delta, measurement)


def measured_shares(
    epsilon: float | None,
    noise_multiplier: float | None,
    *,
    chance: float,
    rounds: int,
    delta: float,
    share: float,
) -> float:
    """σ₀ by rule: of rounds that cost (1 − a) ε, and a measurement, which together cost ε.

    The least σ₀ at the best order, with a the ``share``. Where σ is given in place of ε, its rounds
    are those that cost (1 − a) ε. All of it is public.
    """
    if epsilon is not None:
        noise = calibrate_shares((1 - share) * epsilon, chance, rounds, delta)
    else:
        noise = positive_number("noise_multiplier", noise_multiplier, hint="give s/C")
        epsilon = coins_epsilon(noise, chance, rounds, delta) / (1 - share)
    found = math.inf
    for order in ORDERS:
        rho = rounds * coins_renyi(order, noise, min(chance, 1.0))
        room = epsilon + renyi_gain(order, delta) - rho
        if room > 0:
            found = min(found, math.sqrt(order / (2 * room)))
    return found * (1 + 1e-9)


def calibrate_shares(
    epsilon: float, chance: float, rounds: int, delta: float, measurement: float | None = None
) -> float:
    """The least σ, to a part in ten thousand, whose ε is at most ``epsilon``.

    A chance of 1 is no amplification. ``measurement`` is σ₀ of a release that is in ε, too.
    """
    target = positive_number("epsilon", epsilon, most=100.0, hint="give the ε to calibrate to")
    probability("delta", delta, hint="leave it out for 1 / (10 * population)")
    low, high = _NOISE
    if measurement is not None and shares_epsilon(measurement, 1, delta) >= target:
        raise ValueError(
            f"the measurement alone, with the noise multiplier {measurement:g}, costs more than "
            f"ε = {target:g} at δ = {delta:g}; give it more noise, or leave it out"
        )
    if coins_epsilon(high, chance, rounds, delta, measurement) > target:
        raise ValueError(f"no noise is enough for ε = {epsilon:g} at δ = {delta:g}: allow for more")
    while high > low * (1 + 1e-5):
        middle = math.sqrt(low * high)
        if coins_epsilon(middle, chance, rounds, delta, measurement) <= target:
            high = middle
        else:
            low = middle
    return high
