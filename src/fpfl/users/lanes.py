"""Lanes: users of several runs in one batch, each computed with its own run's parameters.

The run is one more dimension of a batch, and a ragged one: a cohort has as many users as it has.
So a lane is a run's rows, cut into tiles like those that the run alone would be computed in; what
is a product with parameters goes tile by tile, everything else goes over all rows at once. What a
user sends does not depend on who else is in the batch, nor on which other runs there are
(`fpfl.users.steady`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fpfl.numerics.summing import ByRun
from fpfl.users.packing import Ints, Packing


@dataclass(frozen=True)
class Lanes:
    """Which run everything in a batch belongs to.

    Parameters
    ----------
    runs
        R, all runs that there are.
    cells
        Each cell's run, (U,).
    packing
        Where the cells' rows are.
    tile
        How many rows are computed together; None where cells are.
    in_tiles
        Whether the rows lie in tiles of one run already (`fpfl.users.packing.side_by_side`).
    device
        Where the batch is.
    """

    runs: int
    cells: Ints
    packing: Packing
    tile: int | None
    in_tiles: bool
    device: torch.device

    @cached_property
    def of_cells(self) -> Tensor:
        """The run of every cell, (U,)."""
        return torch.from_numpy(self.cells).to(self.device)

    @cached_property
    def of_users(self) -> ByRun:
        """The run of every user."""
        users = self.cells
        if not self.packing.one_cell_each:  # then users are in the order of their cells
            users = np.zeros(self.packing.users, dtype=np.int64)
            users[self.packing.owner] = self.cells
        return ByRun(self.runs, torch.from_numpy(users).to(self.device), users)

    @cached_property
    def samples(self) -> Tensor:
        """Which rows are samples: not those that fill up a tile."""
        packed = self.packing
        shift = packed.first_rows() - (np.cumsum(packed.sizes) - packed.sizes)
        found = np.arange(int(packed.sizes.sum())) + np.repeat(shift, packed.sizes)
        return torch.from_numpy(found).to(self.device)

    @cached_property
    def _rows(self) -> Ints:
        """The run of every row."""
        return np.repeat(self.cells, self.packing.padded)

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """The run of every tile, those of a run one after the other."""
        size = self.tile or 1
        if self.in_tiles:
            return tuple(self._rows[::size].tolist())
        rows = np.bincount(self._rows, minlength=self.runs)
        return tuple(np.repeat(np.arange(self.runs), -(-rows // size)).tolist())

    @cached_property
    def spans(self) -> list[tuple[int, slice]]:
        """Every run that has tiles, and where its rows are in these."""
        spans, start = [], 0
        for run, same in groupby(self.tiles):
            stop = start + len(list(same)) * (self.tile or 1)
            spans.append((run, slice(start, stop)))
            start = stop
        return spans

    @cached_property
    def _places(self) -> Ints:
        """Where in the tiles every row is."""
        order = np.argsort(self._rows, kind="stable")
        counts = np.bincount(self._rows, minlength=self.runs)
        first = np.zeros(self.runs, dtype=np.int64)
        for run, span in self.spans:
            first[run] = span.start
        places = np.empty(len(order), dtype=np.int64)
        before = np.cumsum(counts) - counts
        places[order] = np.arange(len(order)) + np.repeat(first - before, counts)
        return places

    @cached_property
    def place(self) -> Tensor | None:
        """Where in the tiles every row is, (N,); None where rows lie in tiles."""
        return None if self.in_tiles else torch.from_numpy(self._places).to(self.device)

    @cached_property
    def order(self) -> Tensor | None:
        """The row in each place of the tiles; None where rows lie in tiles.

        Places that are left over repeat some row: what comes of it goes nowhere.
        """
        if self.in_tiles:
            return None
        order = np.zeros(len(self.tiles) * (self.tile or 1), dtype=np.int64)
        order[self._places] = np.arange(len(self._places))
        return torch.from_numpy(order).to(self.device)
