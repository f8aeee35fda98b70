"""The user bootstrap: how far a value measured on these users may be from the population's.

Users are resampled, not samples: the samples of one user are not independent. Two things can go
wrong, and each has a function: what resampling shows (:func:`margins`), and what it cannot show
because nobody like that was among the users (:func:`unseen`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DRAWS = 2**20
"""How many counts of draws are held at once: 8 MiB, whatever the number of users."""


def resample(sums: Floats, replicates: int, rng: np.random.Generator) -> Floats:
    """Totals of K users drawn with replacement, ``replicates`` times.

    How often K draws hit each *distinct* user is multinomial with the probabilities
    (users like this one)/K. That is the user bootstrap itself, no approximation, and far cheaper
    where many users are alike.

    Parameters
    ----------
    sums
        Shape (K, ...): what each user adds to the totals.
    replicates
        How often K users are drawn.
    rng
        Where the draws come from.

    Returns
    -------
    Floats
        Shape (replicates, ...).
    """
    population = len(sums)
    flat = np.ascontiguousarray(sums.reshape(population, -1))
    as_bytes = flat.view(np.dtype((np.void, flat.itemsize * flat.shape[1])))[:, 0]
    _, first, alike = np.unique(as_bytes, return_index=True, return_counts=True)
    distinct = flat[first]
    totals = np.empty((replicates, flat.shape[1]))
    step = max(1, _DRAWS // len(distinct))
    for start in range(0, replicates, step):
        part = totals[start : start + step]
        times = rng.multinomial(population, alike / population, size=len(part))
        part[:] = times.astype(np.float64) @ distinct
    return totals.reshape(replicates, *sums.shape[1:])


def margins(value: Floats, replicates: Floats, confidence: float) -> Floats:
    r"""Margins m_j such that |D_j − true D_j| ≤ m_j for all j at once, with this confidence.

    With D*_j the replicates of D_j and s_j their root mean square distance from it,

        m_j = c s_j,   c = the ``confidence`` quantile of max_j |D*_j − D_j| / s_j.

    One quantile of one maximum serves all comparisons: many of them need no more replicates than
    one, and those that move together (two groups of a whole) cost no more than one. Replicates in
    which a group got no sample (NaN) do not count. Without replicates the margins are NaN.

    Parameters
    ----------
    value
        Any shape: the D_j.
    replicates
        Shape (replicates, \*shape of ``value``): the D*_j.
    confidence
        That all margins hold.
    """
    distance = np.abs(replicates - value).reshape(len(replicates), value.size)
    known = np.maximum((~np.isnan(distance)).sum(axis=0), 1)
    s = np.sqrt(np.nansum(distance**2, axis=0) / known)
    furthest = np.fmax.reduce(distance / np.where(s > 0.0, s, 1.0), axis=1, initial=0.0)
    c = np.quantile(furthest, confidence, method="higher") if len(furthest) else math.nan
    return (c * s).reshape(value.shape)


def unseen(users: Floats, tail: float) -> Floats:
    """q: the largest share of a group that may well have no user among the u that were seen.

        (1 − q)^u = tail,   so   q = 1 − tail^(1/u)

    Resampling never invents an error that nobody made: three users who agree would have a margin
    of 0. But users who make up a share q of the group stay unseen with probability (1 − q)^u, and
    they may be wrong, or right, about everything: the group's value v is anywhere in
    [v − q v, v + q (1 − v)]. No interval free of assumptions is narrower than this. It is of the
    order 1/u (the "rule of three"), and matters for small groups and rare errors only.

    ``users`` may be fractional: u = n'²/Σ_k n'_k² counts one who has most of the samples as hardly
    more than one user, and is n' where everybody has one sample.
    """
    q: Floats = -np.expm1(math.log(tail) / users)
    return q
