"""Reading a cohort: from users' numbers to packed batches, in chunks that fit the memory.

Everything here costs O(cohort), whatever the population, and nothing depends on w: the next chunk
can be read while this one is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.prefetch import prefetch
from fpfl.fairness.groups import Groups
from fpfl.fairness.rates import Rate
from fpfl.randomness import hashed
from fpfl.users.choice import Costs
from fpfl.users.packing import Ints, chunks, pack, pieces
from fpfl.users.passes import Batch


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
        Each cell's user among these, (U,), and groups, (U, G). Where gradients are ``factored``
        users are not cut into cells, and ``member`` (N, G) is the rows'.
    factored
        Whether gradients are to be kept as factors.
    unfinished
        Whether the next chunk has more samples of its (one, large) user.
    seed
        For dropout.
    """

    users: Ints
    batch: Batch
    owner: Tensor
    member: Tensor
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
    """

    data: FederatedDataset
    groups: Groups | None
    rates: tuple[Rate, ...]
    like: Tensor
    costs: Costs
    memory: int
    samples_per_user: int | None

    def chunks(self, users: Ints, key: int, numbers: range, shares: int) -> Iterator[Chunk]:
        """Read the given shares of a cohort; see `CohortEngine.statistics`."""
        starts, sizes = self.data.rows(users)
        order = np.argsort(sizes, kind="stable")
        order = order[int(np.count_nonzero(sizes == 0)) :]
        for number in numbers:
            # Dealt out one by one in the order of their sizes, every share gets the same of all.
            mine = order[number::shares]
            yield from self._share(users[mine], starts[mine], sizes[mine], key, number)

    def _share(
        self, users: Ints, starts: Ints, sizes: Ints, key: int, number: int
    ) -> Iterator[Chunk]:
        per_row, per_user, memory = self.costs.row_bytes, self.costs.user_bytes, self.memory
        used = sizes
        if self.samples_per_user is not None:
            used = np.minimum(sizes, self.samples_per_user)
        large = int(np.searchsorted(used, (memory - per_user) / per_row, side="right"))
        factored = self.costs.factored(used[:large])
        seed = hashed(key, number)
        for part in chunks(used[:large], per_row, 0.0 if factored else per_user, memory):
            samples = self._samples(users[part], starts[part], sizes[part], key)
            yield self._chunk(
                users[part], samples, used[part], hashed(seed, part.start), factored=factored
            )
        for k in range(large, len(users)):
            one = slice(k, k + 1)
            samples = self._samples(users[one], starts[one], sizes[one], key)
            cuts = pieces(len(samples), per_row, per_user, memory)
            for cut in cuts:
                size = np.array([cut.stop - cut.start])
                yield self._chunk(
                    users[one], samples[cut], size, hashed(seed, k, cut.start),
                    unfinished=cut is not cuts[-1],
                )  # fmt: skip

    def _samples(self, users: Ints, starts: Ints, sizes: Ints, key: int) -> Ints:
        """The sample numbers of the users, one after the other; of large ones a random part."""
        ends = np.cumsum(sizes)
        samples: Ints = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        limit = self.samples_per_user
        if limit is None or int(sizes.max()) <= limit:
            return samples
        # A sample's ticket does not depend on who else is computed here.
        owner = np.repeat(np.arange(len(users)), sizes)
        within = np.arange(ends[-1]) - (ends - sizes)[owner]
        order = np.lexsort((hashed(key, users[owner], within), owner))
        picked: Ints = samples[np.sort(order[within < limit])]  # by owner: `within` is the rank
        return picked

    def _chunk(
        self,
        users: Ints,
        samples: Ints,
        sizes: Ints,
        seed: int,
        *,
        factored: bool = False,
        unfinished: bool = False,
    ) -> Chunk:
        patterns = None if factored else self._patterns(samples)
        packed = pack(samples, sizes, patterns, self.costs.bucket_rows)
        if packed.one_cell_each:
            users = users[packed.owner]  # in the order of their cells
        features, labels, attributes = self._gathered(packed.samples)
        device, dtype = self.like.device, self.like.dtype
        real = torch.from_numpy(packed.real).to(device)
        conditions = [(rate.condition(labels) & real).to(dtype) for rate in self.rates]
        batch = Batch(
            packed,
            features,
            labels,
            real.to(dtype),
            torch.stack(conditions) if conditions else self.like.new_zeros(0, len(real)),
        )
        if self.groups is None:
            member = self.like.new_zeros(len(real) if factored else len(packed.owner), 0)
        else:
            if not factored:
                first = np.flatnonzero(np.diff(packed.cell, prepend=-1))
                attributes = attributes[torch.from_numpy(first).to(device)]
            member = self.groups.membership(attributes).to(dtype)
        owner = torch.from_numpy(packed.owner).to(device)
        return Chunk(users, batch, owner, member, factored, unfinished, seed)

    def _gathered(self, samples: Ints) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and attributes of samples, on the device."""
        gathered = self.data.gather(samples)
        if not self.data.lazy:
            return gathered
        features, labels, attributes = (self._moved(each) for each in gathered)
        return features, labels, attributes

    def _moved(self, values: Tensor) -> Tensor:
        device = self.like.device
        if values.is_floating_point():
            values = values.to(self.like.dtype)
        if device.type == "cuda":
            return values.pin_memory().to(device, non_blocking=True)
        return values

    def _patterns(self, samples: Ints) -> Ints | None:
        """A code of the groups each sample is in; None without groups."""
        if self.groups is None:
            return None
        if self.data.lazy:
            prefetch(self.data.attributes, samples)
            return self._codes_of(self.data.attributes[torch.from_numpy(samples)])
        return self._codes[samples]

    @cached_property
    def _codes(self) -> Ints:
        return self._codes_of(self.data.attributes)

    def _codes_of(self, attributes: Tensor) -> Ints:
        assert self.groups is not None  # whoever has none does not ask
        codes = np.zeros(len(attributes), dtype=np.int64)
        values = attributes.cpu().numpy()
        for column in sorted({c for pairs in self.groups.codes for c, _ in pairs}):
            # −1 stands for an unknown value.
            width = len(self.data.schema.attributes[column].values) + 1
            codes = codes * width + values[:, column] + 1
        return codes
