r"""Rényi divergences: of cohorts of a fixed size (Wang et al. 2019), and what ε they come to.

With noise σ in sensitivities and q = m/K, their Theorem 27 bounds the divergence of a Gaussian
mechanism at whole orders α by

    (α − 1)·ρ(α) ≤ log(1 + C(α,2)·q²·min{4(f₂ − 1), 2f₂}
                         + Σ_{j=3…α} C(α,j)·q^j·min{4√(b_{2⌊j/2⌋}·b_{2⌈j/2⌉}), 2f_j}),

where f_j = exp(j(j − 1)/(2σ²)) is a moment of the likelihood ratio L, and b_i = E[(L − 1)^i] its
central moment, the i-th forward difference of f at 0. These differences cancel: in floating point
they are noise from i ≈ 10 on, and dp_accounting 0.6, which computes them so, can come out 0.7 %
too low where cohorts are a large part of the population (q = 0.64, σ = 6.9, α = 79) and three times
too high elsewhere. Here they are computed with as many digits as they lose.
"""

from __future__ import annotations

from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise
from math import comb, log, log1p

from fpfl.privacy._checks import probability, whole_number

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
