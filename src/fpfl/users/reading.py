"""Reading a cohort: from users' numbers to packed batches, in chunks that fit the memory.

Everything here costs O(cohort), whatever the population, and nothing depends on w: the next chunk
can be read while this one is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.prefetch import prefetch, settle
from fpfl.fairness.groups import Groups
from fpfl.fairness.rates import Rate
from fpfl.randomness import hashed
from fpfl.users.choice import Costs
from fpfl.users.packing import (
    Batch,
    Cells,
    Ints,
    cells_by_pattern,
    chunks,
    pack,
    pieces,
    room,
    side_by_side,
)


@dataclass(frozen=True)
class Chunk:
    """Some users of a cohort, read and packed.

    Parameters
    ----------
    users
        Their numbers, in the order of what is computed.
    batch
        Their samples.
    owner, member
        Each cell's user among these, (U,), and groups, (U, G). Where users are ``whole``, not cut
        into cells, ``member`` (N, G) is the rows'.
    whole
        Whether every user is one cell.
    factored
        Whether gradients are to be kept as factors; users are whole then.
    unfinished
        Whether the next chunk has more samples of its (one, large) user.
    seed
        For dropout.
    """

    users: Ints
    batch: Batch
    owner: Tensor
    member: Tensor
    whole: bool
    factored: bool
    unfinished: bool
    seed: int


@dataclass(frozen=True)
class Reader:
    """Reads users of a population.

    Parameters
    ----------
    data
        The population.
    groups, rates
        The constraint's; None and empty without one.
    like
        A tensor on the device, of the type, that batches are wanted in.
    costs
        What rows and users cost.
    memory
        Bytes that a chunk may take.
    samples_per_user
        The most samples of a user to read; all of them when it is None.
    seeded
        Whether chunks need seeds, for dropout.
    factoring
        Whether gradients may be factored.
    whole
        Whether users are not to be cut into cells of groups: they send one gradient.
    pieces
        Whether a user that does not fit the memory may be read in pieces.
    """

    data: FederatedDataset
    groups: Groups | None
    rates: tuple[Rate, ...]
    like: Tensor
    costs: Costs
    memory: int
    samples_per_user: int | None
    seeded: bool = False
    factoring: bool = True
    whole: bool = False
    pieces: bool = True

    def chunks(self, users: Ints, key: int, numbers: range, shares: int) -> Iterator[Chunk]:
        """Read the given shares of a cohort; see `CohortEngine.statistics`."""
        starts, sizes = self.data.rows(users)
        order = np.argsort(sizes, kind="stable")
        order = order[int(np.count_nonzero(sizes == 0)) :]
        for number in numbers:
            # Dealt out one by one in the order of their sizes, every share gets the same of all.
            mine = order[number::shares]
            if len(mine):
                seed = hashed(key, number) if self.seeded else 0
                yield from self._share(users[mine], starts[mine], sizes[mine], key, seed)

    def _share(
        self, users: Ints, starts: Ints, sizes: Ints, key: int, seed: int
    ) -> Iterator[Chunk]:
        """Read users, sorted by size, in chunks."""
        per_row, per_cell, memory = self.costs.row_bytes, self.costs.cell_bytes, self.memory
        used = sizes
        if self.samples_per_user is not None:
            used = np.minimum(sizes, self.samples_per_user)
        large = int(np.searchsorted(used, room(per_cell, memory) / per_row, side="right"))
        small = used[:large]
        factored = self.factoring and self.costs.factored(small)
        if factored:
            costs = small * per_row + small * (small - 1) / 2 * self.costs.pair_bytes
        else:
            costs = small * per_row + self._cell_counts(users[:large], small) * per_cell
        for part in chunks(costs, memory):
            source = self._source(users[part], starts[part], sizes[part], key, cut=not factored)
            own = hashed(seed, part.start) if self.seeded else 0
            yield self._chunk(users[part], *source, own, factored=factored)
        for k in range(large, len(users)):
            one = slice(k, k + 1)
            samples, _ = self._samples(users[one], starts[one], sizes[one], key)
            cuts = pieces(len(samples), per_row, per_cell, memory if self.pieces else math.inf)
            for cut in cuts:
                owner = np.zeros(cut.stop - cut.start, dtype=np.int64)
                source = self._cut(samples[cut], owner, users=1)
                own = hashed(seed, k, cut.start) if self.seeded else 0
                yield self._chunk(users[one], *source, own, unfinished=cut is not cuts[-1])

    def repacked(self, chunk: Chunk) -> Chunk:
        """The same users and samples, packed in cells: for who cannot do without rectangles."""
        packed, kept = chunk.batch.packing, chunk.batch.real.cpu().numpy() > 0
        cell = chunk.batch.cell.cpu().numpy()[kept]
        owner = cell if packed.one_cell_each else packed.owner[cell]
        order = np.argsort(owner, kind="stable")
        samples = chunk.batch.samples.cpu().numpy()[kept][order]
        source = self._cut(samples, owner[order], users=len(chunk.users))
        return self._chunk(chunk.users, *source, chunk.seed, unfinished=chunk.unfinished)

    def _cell_counts(self, users: Ints, sizes: Ints) -> Ints:
        """How many cells each user has, or may have at most."""
        if self.groups is None or self.whole:
            return np.ones(len(users), dtype=np.int64)
        if not self.data.lazy and self.samples_per_user is None:
            counts: Ints = self._table.first[users + 1] - self._table.first[users]
            return counts
        columns = {c for pairs in self.groups.codes for c, _ in pairs}
        values = [len(self.data.schema.attributes[column].values) + 1 for column in columns]
        return np.minimum(sizes, math.prod(values))

    def _source(
        self, users: Ints, starts: Ints, sizes: Ints, key: int, *, cut: bool
    ) -> tuple[Tensor | None, Cells]:
        """The users' cells, as runs in a list of samples (None: in the population itself)."""
        limited = self.samples_per_user is not None and int(sizes.max()) > self.samples_per_user
        cut = cut and self.groups is not None and not self.whole
        if not limited and not cut:
            return None, Cells.of_users(starts, sizes)
        if not limited and not self.data.lazy:
            return self._table.order, self._table.cells(users)
        samples, kept = self._samples(users, starts, sizes, key)
        if cut:
            return self._cut(samples, np.repeat(np.arange(len(users)), kept), users=len(users))
        return torch.from_numpy(samples), Cells.of_users(np.cumsum(kept) - kept, kept)

    def _samples(self, users: Ints, starts: Ints, sizes: Ints, key: int) -> tuple[Ints, Ints]:
        """The sample numbers of the users, one after the other, and how many each user has.

        Of large users a random part; a sample's ticket does not depend on who else is read.
        """
        ends = np.cumsum(sizes)
        samples: Ints = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        limit = self.samples_per_user
        if limit is None or int(sizes.max()) <= limit:
            return samples, sizes
        owner = np.repeat(np.arange(len(users)), sizes)
        within = np.arange(ends[-1]) - (ends - sizes)[owner]
        order = np.lexsort((hashed(key, users[owner], within), owner))
        # Sorted by owner, so that `within` is the rank there too.
        return samples[np.sort(order[within < limit])], np.minimum(sizes, limit)

    def _cut(self, samples: Ints, owner: Ints, *, users: int) -> tuple[Tensor, Cells]:
        """Cut users into cells, given their samples."""
        if self.groups is None or self.whole:
            sizes = np.bincount(owner, minlength=users)
            return torch.from_numpy(samples), Cells.of_users(np.cumsum(sizes) - sizes, sizes)
        if self.data.lazy:
            prefetch(self.data.attributes, samples)
        patterns = self._patterns(self.data.attributes[torch.from_numpy(samples)])
        order, starts, sizes, owner = cells_by_pattern(owner, patterns)
        ordered = samples if order is None else samples[order]
        return torch.from_numpy(ordered), Cells(starts, sizes, owner, users)

    def _chunk(
        self,
        users: Ints,
        source: Tensor | None,
        cells: Cells,
        seed: int,
        *,
        factored: bool = False,
        unfinished: bool = False,
    ) -> Chunk:
        packed = side_by_side(cells) if factored else pack(cells, self.costs.bucket_rows)
        if packed.one_cell_each:
            users = users[packed.owner]  # in the order of their cells
        device, dtype = self.like.device, self.like.dtype
        samples, real, cell = packed.places(self.data.features.device)
        if source is not None:
            samples = source.to(samples.device).index_select(0, samples)
        features, labels, marks = self._gathered(samples)
        number, cell = real.to(device, dtype), cell.to(device)
        rates = len(self.rates)
        member = marks[:, rates:]
        whole = factored or self.whole
        if not whole:
            member = member[torch.from_numpy(packed.first_rows()).to(device)]
        batch = Batch(packed, samples, features, labels, number, marks[:, :rates].T * number, cell)
        owner = torch.from_numpy(packed.owner).to(device)
        return Chunk(users, batch, owner, member, whole, factored, unfinished, seed)

    def _gathered(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and marks of samples, on the device."""
        if self.data.lazy:
            features, labels, attributes = map(self._moved, self.data.gather(samples))
            return features, labels, self._marks_of(labels, attributes)
        features = self.data.features.index_select(0, samples)
        marks = self._marks.index_select(0, samples)
        # In one table with the marks: rows of a large population are far apart in memory.
        labels = marks[:, 0].to(self.data.labels.dtype)
        return features, labels, marks[:, 1:]

    def _moved(self, values: Tensor) -> Tensor:
        device = self.like.device
        if values.is_floating_point():
            values = values.to(self.like.dtype)
        if device.type == "cuda":
            return values.pin_memory().to(device, non_blocking=True)
        return values

    @cached_property
    def _marks(self) -> Tensor:
        """Label and marks of all samples, where they are in memory."""
        data = self.data
        labels = data.labels.to(self.like.dtype).unsqueeze(1)
        marks = torch.cat([labels, self._marks_of(data.labels, data.attributes)], dim=1)
        for each in (data.features, marks, data.offsets):
            settle(each)
        return marks

    def _marks_of(self, labels: Tensor, attributes: Tensor) -> Tensor:
        """Conditions met and groups belonged to, as numbers: (n, R + G)."""
        if self.groups is None:
            return self.like.new_zeros(len(labels), 0)
        conditions = [rate.condition(labels) for rate in self.rates]
        member = self.groups.membership(attributes)
        return torch.cat([torch.stack(conditions, dim=1), member], dim=1).to(self.like.dtype)

    @cached_property
    def _table(self) -> _CellTable:
        """The cells of all users, where the population is in memory."""
        sizes = np.diff(self.data.offsets.numpy())
        owner = np.repeat(np.arange(len(sizes)), sizes)
        order, starts, sizes, owner = cells_by_pattern(owner, self._patterns(self.data.attributes))
        first = np.searchsorted(owner, np.arange(self.data.population + 1))
        ordered = None if order is None else torch.from_numpy(order).to(self.data.features.device)
        return _CellTable(ordered, starts, sizes, first)

    def _patterns(self, attributes: Tensor) -> Ints:
        """A code of the groups each sample is in."""
        assert self.groups is not None  # whoever has none does not ask
        codes = np.zeros(len(attributes), dtype=np.int64)
        values = attributes.cpu().numpy()
        for column in sorted({c for pairs in self.groups.codes for c, _ in pairs}):
            # −1 stands for an unknown value.
            width = len(self.data.schema.attributes[column].values) + 1
            codes = codes * width + values[:, column] + 1
        return codes


@dataclass(frozen=True)
class _CellTable:
    """Cells of a whole population: user k has the cells ``first[k]:first[k + 1]``."""

    order: Tensor | None
    starts: Ints
    sizes: Ints
    first: Ints

    def cells(self, users: Ints) -> Cells:
        """The cells of some users."""
        counts = self.first[users + 1] - self.first[users]
        ends = np.cumsum(counts)
        which = np.arange(ends[-1]) + np.repeat(self.first[users] - (ends - counts), counts)
        owner = np.repeat(np.arange(len(users)), counts)
        return Cells(self.starts[which], self.sizes[which], owner, len(users))
