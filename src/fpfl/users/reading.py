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
from numpy.typing import NDArray
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.prefetch import prefetch, settle
from fpfl.data.schema import Schema
from fpfl.fairness.groups import Groups
from fpfl.fairness.rates import Rate
from fpfl.numerics.randomness import hashed
from fpfl.users.dispatch import Costs
from fpfl.users.lanes import Lanes
from fpfl.users.packing import (
    Batch,
    Cells,
    Ints,
    Packing,
    cells_by_pattern,
    chunks,
    pack,
    pieces,
    room,
    side_by_side,
)


@dataclass(frozen=True)
class Runs:
    """Of which runs users are, where several are computed side by side.

    Parameters
    ----------
    of_users
        Each user's run, (B,).
    keys
        What is random on a device is drawn from, by run, (R,).
    first
        Where each run's population begins among all users, (R,): a user's own number is what is
        left.
    """

    of_users: Ints
    keys: Ints
    first: Ints


@dataclass(frozen=True)
class Members:
    """Users to be read: their rows among the samples, and what their randomness is drawn from.

    ``numbers`` are the users' own in their population, ``keys`` one for all or one for each.
    """

    users: Ints
    starts: Ints
    sizes: Ints
    keys: int | Ints
    numbers: Ints
    runs: Ints | None = None

    def some(self, which: slice | Ints) -> Members:
        """Some of them."""
        return Members(
            self.users[which],
            self.starts[which],
            self.sizes[which],
            self.keys if isinstance(self.keys, int) else self.keys[which],
            self.numbers[which],
            None if self.runs is None else self.runs[which],
        )

    def hashed(self, of: Ints, within: Ints) -> Ints:
        """A number for every sample, given its user among these and its place in that user."""
        keys = self.keys if isinstance(self.keys, int) else self.keys[of]
        found: Ints = hashed(keys, self.numbers[of], within)  # type: ignore[arg-type]
        return found


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
    members
        The users as they were asked for, in the same order.
    broken
        Which users have a sample that is not what the schema declares, (B,); None where nobody
        looked. They send zero.
    """

    users: Ints
    batch: Batch
    owner: Tensor
    member: Tensor
    whole: bool
    factored: bool
    unfinished: bool
    members: Members
    broken: Tensor | None = None


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
    steps
        Of the public list of sizes that cells are padded to.
    seeded
        Whether rows need keys, for dropout.
    factoring
        Whether gradients may be factored.
    alone
        Whether every user is a chunk of its own.
    looking
        Whether to look for samples that are not what the schema declares: of data that nobody has
        looked at, and where an error would tell.
    whole
        Whether users are not to be cut into cells of groups: they send one gradient.
    pieces
        Whether a user that does not fit the memory may be read in pieces.
    tile
        How many rows are computed together.
    """

    data: FederatedDataset
    groups: Groups | None
    rates: tuple[Rate, ...]
    like: Tensor
    costs: Costs
    memory: int
    samples_per_user: int | None
    steps: int
    seeded: bool = False
    factoring: bool = True
    whole: bool = False
    pieces: bool = True
    alone: bool = False
    looking: bool = False
    tile: int | None = None

    def chunks(
        self, users: Ints, key: int, share: tuple[int, int], runs: Runs | None = None
    ) -> Iterator[Chunk]:
        """Read a share of a cohort; see `CohortEngine.statistics`."""
        starts, sizes = self.data.rows(users, strict=not self.looking)
        members = Members(users, starts, sizes, key, users)
        if runs is not None:
            of = runs.of_users
            members = Members(users, starts, sizes, runs.keys[of], users - runs.first[of], of)
        order = np.argsort(sizes, kind="stable")
        order = order[int(np.count_nonzero(sizes == 0)) :]
        # Dealt out one by one in the order of their sizes, every share gets the same of all.
        which, of_shares = share
        yield from self._share(
            members.some(order[which::of_shares]), 0 if runs is None else len(runs.keys)
        )

    def again(self, members: Members, runs: int) -> Iterator[Chunk]:
        """Read users once more, each of whom has samples."""
        yield from self._share(members, runs)

    def _share(self, members: Members, runs: int) -> Iterator[Chunk]:
        """Read users, sorted by size, in chunks.

        What becomes of a user goes by its own size: factored, cells, or cells in pieces.
        """
        per_row, per_cell, memory = self.costs.row_bytes, self.costs.cell_bytes, self.memory
        used = np.minimum(members.sizes, self._most)
        large = int(np.searchsorted(used, room(per_cell, memory) / per_row, side="right"))
        few = int(np.searchsorted(used, self.costs.few, side="right")) if self.factoring else 0
        few = min(few, large)
        for begin, end in ((0, few), (few, large)):
            part, factored = members.some(slice(begin, end)), begin == 0 and few > 0
            if part.runs is not None and factored:
                part = part.some(np.argsort(part.runs, kind="stable"))
            small = np.minimum(part.sizes, self._most)
            if factored:
                costs = small * per_row + small * (small - 1) / 2 * self.costs.pair_bytes
            else:
                costs = small * per_row + self._cell_counts(part.users, small) * per_cell
            for cut in self._cuts(costs):
                some = part.some(cut)
                source = self._source(some, cut=not factored)
                yield self._chunk(some, *source, runs, factored=factored)
            if few == large:
                break
        for k in range(large, len(used)):
            one = members.some(slice(k, k + 1))
            samples, _ = self._samples(one)
            cuts = pieces(len(samples), per_row, per_cell, memory if self.pieces else math.inf)
            for cut in cuts:
                owner = np.zeros(cut.stop - cut.start, dtype=np.int64)
                source = self._cut(samples[cut], owner, users=1)
                yield self._chunk(one, *source, runs, unfinished=cut is not cuts[-1])

    def _cuts(self, costs: NDArray[np.float64]) -> Iterator[slice]:
        if self.alone:
            return (slice(k, k + 1) for k in range(len(costs)))
        return chunks(costs, self.memory)

    @property
    def _most(self) -> int:
        """The most samples of a user that are used: as declared, or what fits the memory.

        A user that cannot be computed in pieces and does not fit would end the run.
        """
        fits = 2**62 if self.pieces or not self.looking else int(self.memory / self.costs.row_bytes)
        declared = 2**62 if self.samples_per_user is None else self.samples_per_user
        return max(1, min(fits, declared))

    def repacked(self, chunk: Chunk) -> Chunk:
        """The same users and samples, packed in cells: for who cannot do without rectangles."""
        packed, kept = chunk.batch.packing, chunk.batch.real.cpu().numpy() > 0
        cell = chunk.batch.cell.cpu().numpy()[kept]
        owner = cell if packed.one_cell_each else packed.owner[cell]
        order = np.argsort(owner, kind="stable")
        samples = chunk.batch.samples.cpu().numpy()[kept][order]
        source = self._cut(samples, owner[order], users=len(chunk.users))
        lanes = chunk.batch.lanes
        runs = 0 if lanes is None else lanes.runs
        return self._chunk(chunk.members, *source, runs, unfinished=chunk.unfinished)

    def _cell_counts(self, users: Ints, sizes: Ints) -> Ints:
        """How many cells each user has, or may have at most."""
        if self.groups is None or self.whole:
            return np.ones(len(users), dtype=np.int64)
        if not self.data.lazy and self._most == 2**62:
            counts: Ints = self._table.first[users + 1] - self._table.first[users]
            return counts
        columns = {c for pairs in self.groups.codes for c, _ in pairs}
        values = [len(self.data.schema.attributes[column].values) + 1 for column in columns]
        return np.minimum(sizes, math.prod(values))

    def _source(self, members: Members, *, cut: bool) -> tuple[Tensor | None, Cells]:
        """The users' cells, as runs in a list of samples (None: in the population itself)."""
        users, starts, sizes = members.users, members.starts, members.sizes
        limited = int(sizes.max()) > self._most
        cut = cut and self.groups is not None and not self.whole
        if not limited and not cut:
            return None, Cells.of_users(starts, sizes)
        if not limited and not self.data.lazy:
            return self._table.order, self._table.cells(users)
        samples, kept = self._samples(members)
        if cut:
            return self._cut(samples, np.repeat(np.arange(len(users)), kept), users=len(users))
        return torch.from_numpy(samples), Cells.of_users(np.cumsum(kept) - kept, kept)

    def _samples(self, members: Members) -> tuple[Ints, Ints]:
        """The sample numbers of the users, one after the other, and how many each user has.

        Of large users a random part; a sample's ticket does not depend on who else is read.
        """
        starts, sizes = members.starts, members.sizes
        ends = np.cumsum(sizes)
        samples: Ints = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        limit = self._most
        if int(sizes.max()) <= limit:
            return samples, sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(ends[-1]) - (ends - sizes)[owner]
        order = np.lexsort((members.hashed(owner, within), owner))
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
        members: Members,
        source: Tensor | None,
        cells: Cells,
        runs: int = 0,
        *,
        factored: bool = False,
        unfinished: bool = False,
    ) -> Chunk:
        if factored:
            packed = side_by_side(cells, members.runs, self.tile)
        else:
            packed = pack(cells, self.steps)
        if packed.one_cell_each:
            members = members.some(packed.owner)  # in the order of their cells
        device, dtype = self.like.device, self.like.dtype
        samples, real, cell = packed.places(self.data.features.device)
        if source is not None:
            samples = source.to(samples.device).index_select(0, samples)
        owners = np.arange(packed.users) if packed.one_cell_each else packed.owner
        owner = torch.from_numpy(owners).to(device)
        features, labels, marks, sound = self._gathered(samples)
        number, cell = real.to(device, dtype), cell.to(device)
        broken = None
        if sound is not None:
            broken = torch.zeros(len(members.users), dtype=torch.bool, device=device)
            # Where every user has one cell, they are in the order of the cells.
            broken[(cell if packed.one_cell_each else owner[cell])[~sound]] = True
        keys = None
        if self.seeded:
            # By a sample's number among its user's: how many the users before have is theirs.
            place = _users_of(packed, cell)
            within = samples.cpu().numpy() - members.starts[place]
            keys = torch.from_numpy(members.hashed(place, within)).to(device)
        rates = len(self.rates)
        member = marks[:, rates:]
        whole = factored or self.whole
        if not whole:
            member = member[torch.from_numpy(packed.first_rows()).to(device)]
        conditions = marks[:, :rates].T * number
        lanes = None
        if members.runs is not None:
            of_cells = members.runs if packed.one_cell_each else members.runs[packed.owner]
            lanes = Lanes(runs, of_cells, packed, self.tile, factored, device)
        batch = Batch(packed, samples, features, labels, number, conditions, cell, keys, lanes)
        return Chunk(
            members.users, batch, owner, member, whole, factored, unfinished, members, broken
        )

    def _gathered(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Features, labels and marks of samples, on the device, and which of them are sound.

        None where the data was looked at when it was made.
        """
        if self.data.lazy or not self.data.checked:
            features, labels, attributes = map(self._moved, self.data.gather(samples))
            sound = None
            if self.looking:
                sound = sound_samples(features, labels, attributes, self.data.schema)
                # Before a kernel sees them: a label that there is not would be an error there.
                features, labels, attributes = (
                    values.masked_fill(~sound.reshape(-1, *[1] * (values.ndim - 1)), 0)
                    for values in (features, labels, attributes)
                )
            return features, labels, self._marks_of(labels, attributes), sound
        features = self.data.features.index_select(0, samples)
        marks = self._marks.index_select(0, samples)
        # In one table with the marks: rows of a large population are far apart in memory.
        labels = marks[:, 0].to(self.data.labels.dtype)
        return features, labels, marks[:, 1:], None

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
            # What is no code at all is a broken sample, in whatever cell.
            codes = codes * width + np.clip(values[:, column], -1, width - 2) + 1
        return codes


def _users_of(packed: Packing, cell: Tensor) -> Ints:
    """Each row's user, as a place among the chunk's users."""
    cells = cell.cpu().numpy()
    return cells if packed.one_cell_each else packed.owner[cells]


def sound_samples(features: Tensor, labels: Tensor, attributes: Tensor, schema: Schema) -> Tensor:
    """Which samples are what the schema declares, (n,)."""
    if schema.classes is None:
        low, high = schema.label_range or (-math.inf, math.inf)
    else:
        low, high = 0, schema.classes - 1
    sound = (labels >= low) & (labels <= high)
    for column, attribute in enumerate(schema.attributes):
        codes = attributes[:, column]
        sound &= (codes >= (-1 if attribute.unknown else 0)) & (codes < len(attribute.values))
    if features.is_floating_point():
        sound &= features.isfinite().flatten(1).all(dim=1)
    return sound


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
