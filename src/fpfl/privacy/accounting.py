"""CalculateNoiseScale(K, m, ε, δ, T) of Algorithm 1: the noise that an ε needs, and back.

ε is that of a whole run, for each sampler.

Two accountants, each for the sampler it was proved for:

- Poisson sampling: privacy loss distributions (PLD) by dp_accounting, numerically tight;
- sampling without replacement with replace-one neighbours: Rényi DP (Wang et al. 2019), an upper
  bound (`fpfl.privacy.renyi`; dp_accounting's own loses digits). No PLD is known for it.

Whoever also saw the cohorts would know more, not less. So what holds without amplification bounds
either of them, and is given where it is smaller: that happens to the Rényi bound when a cohort is
a large part of the population. ε is always rounded up: every grid and every choice of Rényi orders
below gives a valid upper bound, and only its tightness varies.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal

from fpfl.numerics.checks import cohort_of, positive_number, probability, whole_number
from fpfl.privacy.gaussian import (
    gaussian_epsilon,
    gaussian_noise_multiplier,
    participations_of_one,
)
from fpfl.privacy.renyi import fixed_size_renyi, renyi_epsilon

Neighbours = Literal["replace-one", "zero-out", "add-remove"]

#: dp_accounting's name of each relation. It has the factor 2 of REPLACE_ONE inside for Poisson
#: sampling (feed it s/C), but not for sampling without replacement (feed it s/(2C)).
_RELATIONS: dict[str, str] = {
    "replace-one": "REPLACE_ONE",
    "zero-out": "REPLACE_SPECIAL",
    "add-remove": "ADD_OR_REMOVE_ONE",
}

#: Largest ε that noise can be calibrated for; beyond it "private" would be a misnomer anyway.
LARGEST_EPSILON = 100.0

_MISSING = (
    "computing or calibrating ε needs the package dp-accounting, which is not installed: install "
    "it (pip install dp-accounting), or give a noise_multiplier and read ε where it is installed"
)


class MissingAccountantError(ImportError):
    """ε was asked for, but dp_accounting is not installed."""


def epsilon_poisson(
    noise_multiplier: float,
    q: float,
    rounds: int,
    delta: float,
    neighbours: Neighbours = "zero-out",
    measurement: float | None = None,
) -> float:
    """ε at δ of T rounds of the Gaussian mechanism on Poisson-sampled cohorts.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the clip bound, s/C, for every relation: with
        ``"replace-one"`` the sensitivity 2C is taken care of inside.
    q : float
        Chance of a user to be in a cohort, in (0, 1].
    rounds : int
        Number of rounds T.
    delta : float
        δ in (0, 1).
    neighbours : {"zero-out", "add-remove", "replace-one"}, default "zero-out"
        What one user may change.
    measurement : float, optional
        Noise multiplier of a further release, in which everybody takes part for certain.

    Returns
    -------
    float
        ε, rounded up; within a few parts in ten thousand of the exact value in usual settings.
    """
    return _epsilon_poisson(
        positive_number("noise_multiplier", noise_multiplier, hint="give s/C"),
        positive_number("q", q, most=1.0, hint="give cohort / population"),
        whole_number("rounds", rounds, hint="give the number of rounds"),
        probability("delta", delta, hint="give the δ of (ε, δ)-differential privacy"),
        _relation(neighbours),
        _measurement(measurement),
    )


def epsilon_without_replacement(
    noise_multiplier_in_sensitivities: float,
    population: int,
    cohort: int,
    rounds: int,
    delta: float,
    measurement_in_sensitivities: float | None = None,
) -> float:
    """ε at δ of T rounds on cohorts of a fixed size, for replace-one neighbours.

    Parameters
    ----------
    noise_multiplier_in_sensitivities : float
        Standard deviation of the noise over the *sensitivity*. One user changes a sum of clipped
        vectors by up to 2C, so honestly this is s/(2C); the paper feeds s/C.
    population, cohort, rounds : int
        K, m and T.
    delta : float
        δ in (0, 1).
    measurement_in_sensitivities : float, optional
        The noise of a further release over its sensitivity; everybody takes part for certain.

    Returns
    -------
    float
        ε, an upper bound.
    """
    users, size = cohort_of(population, cohort)
    return _epsilon_without_replacement(
        positive_number(
            "noise_multiplier_in_sensitivities",
            noise_multiplier_in_sensitivities,
            hint="give the noise's standard deviation over the sensitivity",
        ),
        users,
        size,
        whole_number("rounds", rounds, hint="give the number of rounds"),
        probability("delta", delta, hint="give the δ of (ε, δ)-differential privacy"),
        _measurement(measurement_in_sensitivities),
    )


def calibrate_poisson(
    epsilon: float,
    q: float,
    rounds: int,
    delta: float,
    neighbours: Neighbours = "zero-out",
    measurement: float | None = None,
) -> float:
    """Noise multiplier s/C at which :func:`epsilon_poisson` is ``epsilon`` or just below."""
    return _calibrate_poisson(
        _budget(epsilon),
        positive_number("q", q, most=1.0, hint="give cohort / population"),
        whole_number("rounds", rounds, hint="give the number of rounds"),
        probability("delta", delta, hint="give the δ of (ε, δ)-differential privacy"),
        _relation(neighbours),
        _measurement(measurement),
    )


def calibrate_without_replacement(
    epsilon: float,
    population: int,
    cohort: int,
    rounds: int,
    delta: float,
    measurement_in_sensitivities: float | None = None,
) -> float:
    """Noise in sensitivities at which :func:`epsilon_without_replacement` is ``epsilon``.

    Multiply it by the sensitivity in clip bounds to get a noise multiplier: by 2 honestly, by 1 to
    reproduce the paper.
    """
    users, size = cohort_of(population, cohort)
    return _calibrate_without_replacement(
        _budget(epsilon),
        users,
        size,
        whole_number("rounds", rounds, hint="give the number of rounds"),
        probability("delta", delta, hint="give the δ of (ε, δ)-differential privacy"),
        _measurement(measurement_in_sensitivities),
    )


def measurement_noise(
    epsilon: float | None,
    noise_multiplier: float | None,
    *,
    q: float,
    rounds: int,
    delta: float,
    sensitivity: float,
    share: float,
) -> float:
    """σ₀ of the release that training measures its inputs by: it costs a few hundredths of ε.

    With μ(ε) that of the Gaussian mechanism which is (ε, δ)-private, and a share a,

        μ₀² = μ(ε)² − μ((1 − a) ε)²,    σ₀ = Δ/μ₀:

    a Gaussian mechanism that costs (1 − a) ε, composed with this release, costs ε. Where σ is given
    in place of ε, T rounds are taken for the one Gaussian mechanism that they are close to (Bu et
    al. 2020), and μ₀² is a twentieth of its μ²:

        μ₀² = μ²/20,    μ = q √(T (exp(Δ²/σ²) − 1)).

    Both are rules by public numbers; what is promised is composed by the plan's own accountant.
    """
    if epsilon is not None:
        whole = 1 / gaussian_noise_multiplier(epsilon, 1, delta)
        rest = 1 / gaussian_noise_multiplier((1 - share) * epsilon, 1, delta)
        return sensitivity / math.sqrt(whole**2 - rest**2)
    noise = positive_number("noise_multiplier", noise_multiplier, hint="give s/C")
    ratio = min((sensitivity / noise) ** 2, 50.0)
    return sensitivity / (q * math.sqrt(rounds * math.expm1(ratio) / 20))


def _measurement(noise: float | None) -> float | None:
    if noise is None:
        return None
    return positive_number(
        "measurement", noise, hint="give the noise of the release over its bound"
    )


def _budget(epsilon: float) -> float:
    return positive_number(
        "epsilon", epsilon, most=LARGEST_EPSILON, hint="give the ε that the run may cost"
    )


def _relation(neighbours: str) -> str:
    if neighbours not in _RELATIONS:
        raise ValueError(
            f"neighbours must be one of {', '.join(map(repr, _RELATIONS))}, but got {neighbours!r}."
        )
    return neighbours


def _dp_accounting() -> Any:
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise MissingAccountantError(_MISSING) from error


def _unamplified(
    noise: float, q: float, rounds: int, delta: float, measurement: float | None = None
) -> float:
    """ε at δ against those who know the cohorts too; noise in sensitivities.

    Either for T participations, or for the R that the user exceeds with probability δ/2, at the
    other δ/2.
    """
    usual = participations_of_one(q, rounds, delta / 2)
    return min(
        gaussian_epsilon(noise, rounds, delta, measurement=measurement),
        gaussian_epsilon(noise, usual, delta / 2, measurement=measurement),
    )


def _over(measurement: float | None, factor: float) -> float | None:
    return None if measurement is None else measurement / factor


# --- Poisson sampling ---------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _epsilon_poisson(
    noise: float, q: float, rounds: int, delta: float, neighbours: str, measurement: float | None
) -> float:
    factor = _factor(neighbours)
    unamplified = _unamplified(noise / factor, q, rounds, delta, _over(measurement, factor))
    if q == 1.0:
        return unamplified  # everyone takes part in every round: exact
    dp = _dp_accounting()
    relation = getattr(dp.NeighboringRelation, _RELATIONS[neighbours])
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(noise))
    # T-fold convolution by FFT is good to about T·1e-17 in δ: leave a hundred times that out of
    # the δ that is spent. Where δ is too small for it, Rényi DP has no such limit (but it does not
    # know replace-one neighbours here).
    error = rounds * 1e-15
    if error < delta / 2:
        accountant = dp.pld.PLDAccountant(relation, _grid(noise, q, rounds, neighbours))
        accountant.compose(event, rounds)
        if measurement is not None:
            accountant.compose(dp.GaussianDpEvent(measurement))
        amplified = float(accountant.get_epsilon(delta - error))
    elif neighbours != "replace-one":
        amplified = _renyi(dp, relation, event, rounds, delta, measurement)
    else:
        return unamplified
    return min(amplified, unamplified)


def _renyi(
    dp: Any, relation: Any, event: Any, rounds: int, delta: float, measurement: float | None
) -> float:
    """ε at δ of ``rounds`` times ``event`` by Rényi DP, the least over dp_accounting's orders."""
    accountant = dp.rdp.RdpAccountant(None, relation)
    accountant.compose(event, rounds)
    # A divergence below float precision comes out as 0, or even negative, and dp_accounting then
    # claims ε = 0. This much more per round covers the error and changes nothing else.
    accountant.compose(dp.ZCDpEvent(rho=0.0, xi=1e-15), rounds)
    if measurement is not None:
        accountant.compose(dp.GaussianDpEvent(measurement))
    return float(accountant.get_epsilon(delta))


def _factor(neighbours: str) -> float:
    """Sensitivity in clip bounds under Poisson sampling."""
    return 2.0 if neighbours == "replace-one" else 1.0


def _grid(noise: float, q: float, rounds: int, neighbours: str) -> float:
    """Step h of the PLD's grid: fine enough to be tight, coarse enough to be fast.

    One round's privacy loss has a standard deviation of about d = q · √(exp(Δ²/s²) − 1), and a
    grid of step h adds about h²/12 to its square: h = d/20 costs some 2e-4 of ε. Never coarser
    than 1e-3. A step below 1/30000 of one round's range of losses, or 1/10⁶ of the whole run's,
    takes seconds and gains nothing that one could read.
    """
    ratio = _factor(neighbours) / noise
    deviation = q * math.sqrt(math.expm1(min(ratio * ratio, 50.0)))
    # Gaussian tails are cut at 10 standard deviations (a mass of e^-50).
    one_round = _log1p_scaled_exp(q, 10 * ratio + ratio * ratio / 2)
    busiest = participations_of_one(q, rounds, 1e-22)
    whole_run = gaussian_epsilon(1 / ratio, busiest, 1e-22)
    return max(min(1e-3, deviation / 20), one_round / 30_000, whole_run / 1_000_000)


def _log1p_scaled_exp(q: float, x: float) -> float:
    """log(1 − q + q·e^x), the largest privacy loss of a sampled round, without overflow."""
    return x + math.log(q + (1 - q) * math.exp(-x))


@lru_cache(maxsize=256)
def _calibrate_poisson(
    epsilon: float, q: float, rounds: int, delta: float, neighbours: str, measurement: float | None
) -> float:
    factor = _factor(neighbours)
    enough = gaussian_noise_multiplier(
        epsilon, rounds, delta, sensitivity=factor, measurement=measurement
    )
    if q == 1.0:
        return enough
    return _calibrate(
        lambda noise: _epsilon_poisson(noise, q, rounds, delta, neighbours, measurement),
        epsilon,
        factor * _first_guess(epsilon, q, rounds, delta, _over(measurement, factor)),
        enough,
    )


# --- Sampling without replacement ---------------------------------------------------------------

# Rényi orders, and those of a first pass over them. Below 2 the bound interpolates a CGF that is 0
# at order 1, so its divergence is the one of order 2 and the orders there never win.
_ORDERS = (*range(2, 64), *range(64, 128, 4), *range(128, 257, 16), 512, 1024)
_FIRST = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


@lru_cache(maxsize=1024)
def _epsilon_without_replacement(
    noise: float,
    population: int,
    cohort: int,
    rounds: int,
    delta: float,
    measurement: float | None,
) -> float:
    unamplified = _unamplified(noise, cohort / population, rounds, delta, measurement)
    if cohort == population:
        return unamplified

    def at(orders: Iterable[int]) -> float:
        # Sums of logarithms err by a few units in the last place; this much more covers them.
        rho = {a: rounds * (fixed_size_renyi(a, noise, population, cohort) + 1e-15) for a in orders}
        if measurement is not None:
            rho = {a: value + a / (2 * measurement**2) for a, value in rho.items()}
        return min(renyi_epsilon(rho[order], order, delta) for order in rho)

    return min(_least_over_orders(at), unamplified)


def _least_over_orders(at: Callable[[Iterable[int]], float]) -> float:
    """Least ε over Rényi orders, where the cost of an order grows with its square.

    ε falls and then rises with the order, so the first pass stops after two rises, and a second
    looks at the orders between the neighbours of the best. Whatever order is used, ε is valid.
    """
    best, place = math.inf, 0
    for index, order in enumerate(_FIRST):
        value = at([order])
        if value < best:
            best, place = value, index
        if index >= place + 2:
            break
    low, high = _FIRST[max(place - 1, 0)], _FIRST[min(place + 1, len(_FIRST) - 1)]
    between = [order for order in _ORDERS if low < order < high and order not in _FIRST]
    return min(best, at(between)) if between else best


@lru_cache(maxsize=256)
def _calibrate_without_replacement(
    epsilon: float,
    population: int,
    cohort: int,
    rounds: int,
    delta: float,
    measurement: float | None,
) -> float:
    enough = gaussian_noise_multiplier(epsilon, rounds, delta, measurement=measurement)
    if cohort == population:
        return enough
    return _calibrate(
        lambda noise: _epsilon_without_replacement(
            noise, population, cohort, rounds, delta, measurement
        ),
        epsilon,
        _first_guess(epsilon, cohort / population, rounds, delta, measurement),
        enough,
    )


# --- Calibration --------------------------------------------------------------------------------


def _first_guess(
    epsilon: float, q: float, rounds: int, delta: float, measurement: float | None
) -> float:
    """Noise in sensitivities by the central limit theorem for sampled Gaussians.

    T rounds are close to one Gaussian mechanism with μ = q·√(T·(exp(1/σ²) − 1)) (Bu et al. 2020):
    solve for σ.
    """
    mu = 1 / gaussian_noise_multiplier(epsilon, 1, delta, measurement=measurement)
    return 1 / math.sqrt(math.log1p((mu / q) ** 2 / rounds))


def _calibrate(
    epsilon_of: Callable[[float], float], epsilon: float, guess: float, enough: float
) -> float:
    """Smallest noise with ``epsilon_of(noise) ≤ epsilon``, to about 1e-4, rounded up.

    An explicit bracket around a guess and below ``enough`` (the noise that suffices without
    amplification), then false position (Illinois) on log ε against log noise, which is nearly a
    straight line. dp_accounting's own calibration starts its bracket at no noise at all, which
    divides by zero for sampling without replacement.
    """

    def excess(x: float) -> float:
        # ε can be 0, or fall to it in one step: below 1/e of the target it only has to be too low.
        return math.log(max(epsilon_of(math.exp(x)) / epsilon, math.exp(-1)))

    # Too little noise (excess > 0) on the left, enough of it on the right.
    end = math.log(enough) - 1e-4
    x = min(math.log(guess), end)
    left = right = (x, excess(x))
    stride = 0.02
    while left[1] <= 0:
        x = left[0] - max(stride, -left[1] / 2)
        right, left = left, (x, excess(x))
        stride *= 2
    while right[1] > 0:
        if right[0] >= end:
            # Where Rényi orders end, so does the amplification that they can show: nothing below
            # `enough` will do.
            return enough
        x = min(right[0] + max(stride, right[1] / 2), end)
        left, right = right, (x, excess(x))
        stride *= 2

    low, high, same = left[1], right[1], 0
    while right[1] < -1e-4 and right[0] - left[0] > 1e-6:
        # Aim a little below the target, so that the answer comes from the safe side. After four
        # steps from one side (a jump in ε), halve.
        x = left[0] + (right[0] - left[0]) * (low + 5e-5) / (low - high)
        if not left[0] < x < right[0] or abs(same) > 3:
            x = (left[0] + right[0]) / 2
        value = excess(x)
        if value > 0:
            left, low = (x, value), value
            same = max(same, 0) + 1
            high = high / 2 if same > 1 else high
        else:
            right, high = (x, value), value
            same = min(same, 0) - 1
            low = low / 2 if same < -1 else low
    return math.exp(right[0])
