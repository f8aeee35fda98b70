"""The user bootstrap: users drawn again, and what drawing them again cannot show."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_DRAWS = 2**20  # how many counts of draws are held at once: 8 MiB, whatever the number of users


def distinct(rows: Floats) -> tuple[Floats, Ints]:
    """Give the distinct rows of (K, columns), and how many of the K users are alike in each.

    They are sorted, so that draws do not depend on the order of the users.
    """
    alike = Counter(row.tobytes() for row in rows)
    found = sorted(alike)
    sums = np.frombuffer(b"".join(found), dtype=np.float64).reshape(len(found), -1)
    return sums, np.array([alike[row] for row in found])


def resample(rows: Floats, alike: Ints, replicates: int, seed: int) -> Floats:
    """Totals of K users drawn with replacement, ``replicates`` times: (replicates, columns).

    How often K draws hit each *distinct* user is multinomial with the probabilities alike/K:
    this is the user bootstrap itself, and cheap where many users are alike.
    """
    rng, population = np.random.default_rng(seed), int(alike.sum())
    totals = np.empty((replicates, rows.shape[1]))
    step = max(1, _DRAWS // len(rows))
    for start in range(0, replicates, step):
        part = totals[start : start + step]
        times = rng.multinomial(population, alike / population, size=len(part))
        part[:] = times.astype(np.float64) @ rows
    return totals


def quotient(F: Floats, n: Floats) -> Floats:
    """F/n, NaN where n = 0."""
    known: Floats = np.divide(F, n, out=np.full(F.shape, np.nan), where=n > 0)
    return known


def margins(value: Floats, replicates: Floats, confidence: float) -> Floats:
    """Margins m such that |D_j − true D_j| ≤ m_j for all j at once, with this confidence.

    With D* the ``replicates`` of the ``value`` D, and s_j their root mean square distance,

        m_j = c s_j,   c = the ``confidence`` quantile of max_j |D*_j − D_j|/s_j.

    The quantile of one maximum serves all: many comparisons need no more replicates than one, and
    those that move together (two groups of a whole) get no wider than one. A replicate in which a
    group has no sample (NaN) says nothing of it. Without replicates m is NaN.
    """
    distance = np.abs(replicates - value).reshape(len(replicates), value.size)
    known = np.maximum(np.isfinite(distance).sum(axis=0), 1)
    s = np.sqrt(np.nansum(distance**2, axis=0) / known)
    furthest = np.fmax.reduce(distance / np.where(s > 0.0, s, 1.0), axis=1, initial=0.0)
    c = np.quantile(furthest, confidence, method="higher") if len(furthest) else np.nan
    m: Floats = (c * s).reshape(value.shape)
    return m


def users_behind(n: Floats, alike: Ints) -> Floats:
    """u = (Σ_k n_k)²/Σ_k n_k²: how many users a value rests on, who have n_k samples each.

    One who has most of the samples makes it hardly more than 1; if all have one, it is K.
    """
    return quotient(np.tensordot(alike, n, 1) ** 2, np.tensordot(alike, n**2, 1))


def unseen(u: Floats, tail: float) -> Floats:
    """q: how large a share of the population may well have nobody among the u users seen.

        (1 − q)^u = tail,   so   q = 1 − tail^(1/u)

    Resampling never invents an error that nobody made: three users who agree have a margin of 0.
    But users who make up a share q stay unseen with probability (1 − q)^u, and may be wrong, or
    right, about everything: a value v is anywhere in [v − q v, v + q (1 − v)]. No interval free of
    assumptions is narrower. Being of the order 1/u (the "rule of three"), it matters for small
    groups and rare errors alone; there the margins are too small without it.
    """
    q: Floats = -np.expm1(math.log(tail) / u)
    return q


def ends_of(v: Floats, q: Floats, m: Floats) -> tuple[Floats, Floats]:
    """v − max(m, q v) and v + max(m, q (1 − v)), within [0, 1]."""
    low, high = v - np.maximum(m, q * v), v + np.maximum(m, q * (1.0 - v))
    return np.maximum(low, 0.0), np.minimum(high, 1.0)
