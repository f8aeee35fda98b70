r"""Packing: how users of any size are laid side by side in one batch.

The unit is a *cell*: those samples of one user that are in the same groups (without a constraint,
all of the user's samples). A group that no sample of a user belongs to has no cell, and costs
nothing. A cell is padded to the next size of a public list, whatever the other cells are: the shape
of a kernel decides the last bits of what it computes, and nobody's numbers may depend on who else
is there. Cells of one padded size are a bucket, whose rows are one rectangle (units, size), so that
a gradient of every cell is one batched product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.users.steady import filled_rows

if TYPE_CHECKING:
    from fpfl.users.lanes import Lanes

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
class Cells:
    """U cells of B users, as runs in a list of samples.

    ``starts`` and ``sizes`` (U,) are the runs, ``owner`` (U,) is each cell's user among the B.
    """

    starts: Ints
    sizes: Ints
    owner: Ints
    users: int

    @classmethod
    def of_users(cls, starts: Ints, sizes: Ints) -> Cells:
        """Whole users as cells."""
        return cls(starts, sizes, np.arange(len(sizes)), len(sizes))


def cells_by_pattern(owner: Ints, patterns: Ints) -> tuple[Ints | None, Ints, Ints, Ints]:
    """Cut samples, one user after the other, into cells of equal patterns.

    Returns the order that brings a user's samples of a pattern together (None where they are),
    and every cell's start, size and owner.
    """
    width = int(patterns.max(initial=0)) + 1
    key = owner * width + patterns
    order = None
    if bool((key[1:] < key[:-1]).any()):
        order = np.argsort(key, kind="stable")
        key = key[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    return order, starts, np.diff(starts, append=len(key)), key[starts] // width


@dataclass(frozen=True)
class Packing:
    """Cells in the order of their sizes, cut into buckets; N rows, with padding."""

    starts: Ints
    sizes: Ints
    padded: Ints
    owner: Ints
    users: int
    buckets: tuple[Bucket, ...]

    @property
    def rows(self) -> int:
        """N."""
        return int(self.padded.sum())

    @property
    def one_cell_each(self) -> bool:
        """Whether every user has exactly one cell."""
        return len(self.owner) == self.users

    def first_rows(self) -> Ints:
        """The first row of every cell."""
        return np.cumsum(self.padded) - self.padded

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Every row's place in the list of samples, whether it is one or padding, and its cell."""
        table = np.stack([self.starts, self.sizes, self.first_rows(), self.padded])
        starts, sizes, first, padded = torch.from_numpy(table).to(device)
        cell = torch.repeat_interleave(padded, output_size=self.rows)
        within = torch.arange(self.rows, device=device) - first.index_select(0, cell)
        real = within < sizes.index_select(0, cell)
        # Padding repeats the cell's own first sample: somebody else's could leak through a model
        # that makes NaN of it.
        return starts.index_select(0, cell) + within * real, real, cell


@dataclass(frozen=True)
class Batch:
    """A packed batch's tensors: N rows, and R conditions as numbers, 0 for padding.

    ``keys`` are what a row's dropout is drawn from: its user's and its own; ``lanes`` say which
    run everything belongs to, where there are several.
    """

    packing: Packing
    samples: Tensor  # (N,)
    features: Tensor  # (N, ...)
    labels: Tensor  # (N,)
    real: Tensor  # (N,)
    conditions: Tensor  # (R, N)
    cell: Tensor  # (N,)
    keys: Tensor | None = None  # (N,)
    lanes: Lanes | None = None

    def part(self, rows: slice, count: int) -> Batch:
        """Some of its rows, filled up to ``count`` with rows of zeros."""

        def some(each: Tensor) -> Tensor:
            return filled_rows(each[rows], count)

        if rows == slice(0, count) and count == len(self.features):
            return self
        return Batch(
            self.packing,
            self.samples[rows],
            some(self.features),
            some(self.labels),
            some(self.real),
            filled_rows(self.conditions[:, rows].T, count).T,
            some(self.cell),
            None if self.keys is None else some(self.keys),
        )

    def chosen(self, rows: Tensor) -> Batch:
        """Some of its rows, in their order, in as many places."""
        return Batch(
            self.packing,
            self.samples,
            self.features[rows],
            self.labels[rows],
            self.real[rows],
            self.conditions[:, rows],
            self.cell[rows],
            None if self.keys is None else self.keys[rows],
        )

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        tensors = (self.features, self.labels, self.real, self.conditions, self.cell)
        features, labels, real, conditions, cell = (each.to(device) for each in tensors)
        return Batch(self.packing, self.samples, features, labels, real, conditions, cell)


def side_by_side(cells: Cells, runs: Ints | None = None, tile: int | None = None) -> Packing:
    """Cells in the order they come, for who needs no rectangles: no buckets, no padding.

    But for users of several runs, each with its users together: a run's last one is padded, so that
    the next run begins with a tile.
    """
    padded = cells.sizes
    if runs is not None and tile is not None and len(runs):
        last = np.flatnonzero(np.append(runs[1:] != runs[:-1], True))
        rows = np.diff(np.cumsum(padded)[last], prepend=0)
        padded = padded.copy()
        padded[last] += -rows % tile
    return Packing(cells.starts, cells.sizes, padded, cells.owner, cells.users, ())


def pack(cells: Cells, steps: int) -> Packing:
    """Pack cells, padded to sizes with so many steps from one power of two to the next."""
    padded = padded_sizes(cells.sizes, steps)
    order = np.argsort(padded, kind="stable")
    padded = padded[order]
    buckets = []
    row = cell = 0
    for size, units in zip(*np.unique(padded, return_counts=True), strict=True):
        buckets.append(Bucket(row, cell, int(units), int(size)))
        row += int(units) * int(size)
        cell += int(units)
    return Packing(
        cells.starts[order], cells.sizes[order], padded, cells.owner[order], cells.users,
        tuple(buckets),
    )  # fmt: skip


def padded_sizes(sizes: Ints, steps: int) -> Ints:
    """The next sizes of the public list: all up to 2 · steps, then so many an octave."""
    octaves = np.frexp(np.maximum(sizes - 1, 1).astype(np.float64))[1]  # 2^(o−1) <= size − 1 < 2^o
    step = np.left_shift(1, np.maximum(0, octaves - 1 - int(np.log2(steps))))
    padded: Ints = -(-sizes // step) * step
    return padded


def chunks(costs: NDArray[np.float64], memory: float) -> Iterator[slice]:
    """Cut users into runs of about equal cost (in bytes) that fit the memory."""
    if not len(costs):
        return
    total = np.cumsum(costs)
    parts = int(np.ceil(total[-1] / memory))
    if parts == 1:
        yield slice(0, len(costs))
        return
    bounds = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts)
    edges = np.unique(np.concatenate([[0], bounds, [len(costs)]]))
    for start, stop in pairwise(edges.tolist()):
        yield slice(start, stop)


def room(per_user: float, memory: float) -> float:
    """What is left for rows beside one user's gradients; a quarter where these take it all."""
    return max(memory - per_user, memory / 4)


def pieces(size: int, per_row: float, per_user: float, memory: float) -> Sequence[slice]:
    """Cut the samples of one user into runs that fit the memory."""
    rows = int(min(max(1.0, room(per_user, memory) / per_row), size))
    count = -(-size // rows)
    edges = np.linspace(0, size, count + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]
