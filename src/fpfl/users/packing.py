r"""Packing: how users of any size are laid side by side in one batch.

The unit is a *cell*: those samples of one user that are in the same groups (without a constraint,
all of the user's samples). A group that no sample of a user belongs to has no cell, and costs
nothing. Cells are sorted by size and cut into buckets; in a bucket every cell is padded to the
largest, so that its rows are one rectangle (units, size) and a gradient of every cell is one
batched product. The cuts minimise

    Σ_buckets (units · largest size + overhead),

the overhead of one more bucket being given in rows: few buckets where rows are cheap, hardly any
padding where they are dear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bucket:
    """Cells of like size: ``units`` of them, each with ``size`` rows, from row ``start`` on."""

    start: int
    first: int
    units: int
    size: int

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.start, self.start + self.units * self.size)

    @property
    def cells(self) -> slice:
        """Its cells among all."""
        return slice(self.first, self.first + self.units)


@dataclass(frozen=True)
class Packing:
    """A batch of N rows with U cells of B users.

    ``samples`` (N,) is the sample in each row and ``real`` (N,) whether it is one or padding;
    ``cell`` (N,) is the row's cell, ``owner`` (U,) the cell's user among the B, ``pattern`` (U,)
    the code of its groups.
    """

    samples: Ints
    real: NDArray[np.bool_]
    cell: Ints
    owner: Ints
    pattern: Ints
    users: int
    buckets: tuple[Bucket, ...]

    @property
    def padded(self) -> bool:
        """Whether any row is padding."""
        return len(self.samples) != int(np.count_nonzero(self.real))

    @property
    def one_cell_each(self) -> bool:
        """Whether every user has exactly one cell."""
        return len(self.owner) == self.users


def pack(samples: Ints, sizes: Ints, patterns: Ints | None, overhead: float) -> Packing:
    """Pack users' samples.

    Parameters
    ----------
    samples
        The users' samples, one user after the other.
    sizes
        How many of them each user has, at least one.
    patterns
        Each sample's code of the groups it is in; None without a constraint.
    overhead
        What one more bucket costs, in rows.
    """
    users = len(sizes)
    owner = np.arange(users)
    if patterns is None:
        pattern = np.zeros(users, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
    else:
        samples, starts, sizes, owner, pattern = _cells(samples, sizes, patterns)
    order = np.argsort(sizes, kind="stable")
    sizes, starts = sizes[order], starts[order]
    padded, buckets = _buckets(sizes, overhead)
    first_row = np.cumsum(padded) - padded
    cell = np.repeat(np.arange(len(sizes)), padded)
    within = np.arange(len(cell)) - first_row[cell]
    real = within < sizes[cell]
    # Padding repeats the cell's own first sample: somebody else's could leak through a model that
    # makes NaN of it.
    rows = samples[starts[cell] + np.where(real, within, 0)]
    return Packing(rows, real, cell, owner[order], pattern[order], users, buckets)


def _cells(samples: Ints, sizes: Ints, patterns: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Sort each user's samples by pattern: samples, then every cell's start, size, user, code."""
    key = np.repeat(np.arange(len(sizes)), sizes) * (int(patterns.max(initial=0)) + 1) + patterns
    if bool((key[1:] < key[:-1]).any()):
        order = np.argsort(key, kind="stable")
        key, samples = key[order], samples[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    counts = np.diff(np.append(starts, len(key)))
    owner, pattern = np.divmod(key[starts], int(patterns.max(initial=0)) + 1)
    return samples, starts, counts, owner, pattern


def _buckets(sizes: Ints, overhead: float) -> tuple[Ints, tuple[Bucket, ...]]:
    """Cut cells, sorted by size, into buckets; also every cell's padded size."""
    starts = np.flatnonzero(np.concatenate([[True], sizes[1:] != sizes[:-1]]))
    distinct = sizes[starts]
    counts = np.diff(np.append(starts, len(sizes)))
    buckets: list[Bucket] = []
    row = cell = 0
    for group in _cuts(distinct, counts, overhead):
        units, largest = int(counts[group].sum()), int(distinct[group][-1])
        buckets.append(Bucket(row, cell, units, largest))
        row += units * largest
        cell += units
    padded = np.repeat([b.size for b in buckets], [b.units for b in buckets])
    return padded, tuple(buckets)


def _cuts(distinct: Ints, counts: Ints, overhead: float) -> list[slice]:
    """The cheapest cuts of rising sizes: best[j] = min_i best[i] + overhead + n_{i..j} · size_j."""
    below = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    best = np.zeros(len(distinct) + 1)
    origin = np.zeros(len(distinct) + 1, dtype=np.int64)
    for j, size in enumerate(distinct.tolist(), start=1):
        costs = best[:j] + (below[j] - below[:j]) * size
        origin[j] = i = int(costs.argmin())
        best[j] = costs[i] + overhead
    cuts, stop = [], len(distinct)
    while stop > 0:
        cuts.append(slice(int(origin[stop]), stop))
        stop = int(origin[stop])
    return cuts[::-1]


def chunks(sizes: Ints, per_row: float, per_user: float, memory: float) -> Iterator[slice]:
    """Cut users, sorted by size, into runs of about equal cost that fit the memory.

    A user too large for it comes alone; `pieces` cuts it further.
    """
    if not len(sizes):
        return
    cost = np.cumsum(sizes * per_row + per_user)
    parts = int(np.ceil(cost[-1] / memory))
    bounds = np.searchsorted(cost, cost[-1] * np.arange(1, parts) / parts)
    edges = np.unique(np.concatenate([[0], bounds, [len(sizes)]]))
    for start, stop in pairwise(edges.tolist()):
        yield slice(start, stop)


def pieces(size: int, per_row: float, per_user: float, memory: float) -> Sequence[slice]:
    """Cut the samples of one user into runs that fit the memory."""
    rows = max(1, int((memory - per_user) / per_row))
    count = -(-size // rows)
    edges = np.linspace(0, size, count + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]
