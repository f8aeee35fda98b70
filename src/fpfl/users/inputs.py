"""A population's inputs in whole numbers: made once, where every round would make them again.

What a first layer sees of a sample is the sample, whatever the model is by now. So its whole
numbers, their lengths and their products with the user's other samples (`fpfl.users.factored`) are
kept where they fit the memory. They are functions of the user's own samples, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.users.factored import INPUT_BITS, Pairs, Whole

AT_ONCE = 2**16
"""Pairs that are multiplied together."""


@dataclass(frozen=True)
class Inputs:
    """The whole numbers of n samples, with a last column of ones.

    Parameters
    ----------
    whole
        The samples, (n, in + 1).
    own
        Their lengths squared, (n,).
    products
        Of all pairs of samples of one user.
    place
        Where a sample's products with those before it would begin, had it sample 0 before it, (n,).
    buffer
        Memory for some rows.
    """

    whole: Whole
    own: Tensor
    products: Tensor
    place: Tensor
    buffer: Tensor

    @classmethod
    def of(cls, data: FederatedDataset, dtype: torch.dtype, memory: float) -> Inputs | None:
        """Those of a population; None where they do not fit the memory, or are no vectors."""
        sizes = np.diff(data.offsets.numpy())
        n, pairs = len(data), float((sizes.astype(np.float64) * (sizes - 1) / 2).sum())
        fitting = data.features.ndim == 2 and data.features.is_floating_point()
        if not fitting or 8.0 * (n * (data.features.shape[1] + 3) + pairs) > memory:
            return None
        whole = Whole.of(functional.pad(data.features.to(dtype), (0, 1), value=1.0), INPUT_BITS)
        device = data.features.device
        found = Pairs.of(sizes, device)
        products = [
            whole.numbers[one].mul_(whole.numbers[other]).sum(dim=-1)
            for one, other in zip(
                torch.split(found.one, AT_ONCE), torch.split(found.other, AT_ONCE), strict=True
            )
        ]
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        before = np.arange(n) - starts
        place = torch.from_numpy(np.cumsum(before) - before - starts).to(device)
        own = whole.numbers.square().sum(dim=-1)
        found_products = torch.cat(products) if products else own[:0]
        return cls(whole, own, found_products, place, own.new_empty(0, whole.width))

    def seen(self, x: Tensor, samples: Tensor) -> Seen:
        """The inputs of some samples, which a layer has seen as x."""
        return Seen(self, x, samples)


@dataclass(frozen=True)
class Seen:
    """The inputs of N samples, one user's after the other's."""

    inputs: Inputs
    x: Tensor
    samples: Tensor

    @cached_property
    def unit(self) -> Tensor:
        """See `Whole`."""
        return self.inputs.whole.unit.index_select(0, self.samples)

    @property
    def width(self) -> int:
        """See `Whole`."""
        return self.inputs.whole.width

    def rows(self, part: slice) -> Tensor:
        """See `Whole`: good until other rows are asked for."""
        samples = self.samples[part]
        # In one piece of memory: what is read next is in the processor's cache.
        if len(self.inputs.buffer) < len(samples):
            self.inputs.buffer.resize_(len(samples), self.width)
        rows = self.inputs.buffer[: len(samples)]
        return torch.index_select(self.inputs.whole.numbers, 0, samples, out=rows)

    def products(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """x_i · x_i, and x_i · x_j of the pairs: see `Whole.products`."""
        one, other = (self.samples.index_select(0, rows) for rows in (pairs.one, pairs.other))
        place = self.inputs.place.index_select(0, other).add_(one)
        own = self.inputs.own.index_select(0, self.samples)
        return own, self.inputs.products.index_select(0, place)
