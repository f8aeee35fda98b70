r"""Layers whose gradients can be taken cell by cell from one pass over a whole batch.

Each layer that holds parameters remembers its input x while the batch goes forward, and the
gradient g of its output while it comes back. Nothing else is needed: for a cell (some samples of
one user) the parameter gradient is

    Linear       Σ_i g_i x_iᵀ
    convolution  the same with x_i the patches that the kernel saw
    Embedding    Σ_i g_i in the row that was looked up
    norm layers  Σ_i g_i ⊙ x̂_i

so that forward and backward run at the speed of a plain batch, and only the products above are
split by cell: as batched products over the rectangles of a packing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fpfl.numerics.summing import tree_sum
from fpfl.users import steady
from fpfl.users.lanes import Lanes
from fpfl.users.packing import Bucket


@dataclass
class Call:
    """One use of a layer in a pass: its input, and the output's gradient for every seed.

    ``seen`` is the input as the parameters saw it, where that takes work to find out.
    """

    x: Tensor
    g: list[Tensor] = field(default_factory=list)
    seen: Tensor | None = None


class LayerError(Exception):
    """A layer was used in a way that its recorder does not know."""


REGISTER: list[type[Recorder]] = []
"""All recorders; each has a file of its own in `fpfl.users.recorders`."""


class Recorder(ABC):
    """Stands in for one layer's ``forward``, remembers, and gives gradients of cells.

    Parameters
    ----------
    layer
        The layer.
    places
        Where its trainable parameters stand in w, by name.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The layers it is for. A recorder that names some is registered (`REGISTER`)."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.kinds:
            REGISTER.append(cls)

    def __init__(self, layer: Any, places: dict[str, slice]) -> None:
        self.layer = layer
        self.places = places
        self.calls: list[Call] = []
        self.samples = 0
        self.anchor: Tensor | None = None

    @property
    def laned(self) -> bool:
        """Whether it can compute tiles with parameters of their own (`enter`)."""
        return False

    def enter(self, w: Tensor | None, lanes: Lanes | None) -> None:
        """Compute with the parameters w (R, p) of runs, tile by tile; None: with the layer's."""
        raise NotImplementedError(f"{type(self).__name__} has one set of parameters")

    @classmethod
    def knows(cls, layer: Any) -> bool:
        """Whether this very layer, with its settings, can be recorded."""
        return type(layer) in cls.kinds

    def forward(self, x: Tensor) -> Tensor:
        """What the layer returns, with a record of what it saw."""
        if len(x) != self.samples:
            raise LayerError(
                f"{type(self.layer).__name__} was called with {len(x)} rows for {self.samples} "
                "samples"
            )
        x = self.prepare(x)
        call = Call(x.detach())
        self.calls.append(call)
        output: Tensor = _Recorded.apply(x, self.anchor, self, call)  # type: ignore[no-untyped-call]
        return output

    def prepare(self, x: Tensor) -> Tensor:
        """What happens before the parameters come in, differentiated by torch."""
        return x

    @abstractmethod
    def output(self, call: Call, x: Tensor) -> Tensor:
        """The layer's output."""

    @abstractmethod
    def input_gradient(self, call: Call, g: Tensor) -> Tensor | None:
        """The gradient with respect to the input."""

    @abstractmethod
    def inputs(self, call: Call) -> Tensor:
        """x as (N, positions, features): one row for every place where the weight was used."""

    def parts(
        self, call: Call, dtype: torch.dtype
    ) -> list[tuple[Tensor | None, Tensor, slice]] | None:
        """Each parameter's (x, g, place) for a product g xᵀ per sample, x None where it is 1.

        g has shape (seeds, N, out) and the given type. None where samples have several positions,
        whose products would have to be added up.
        """
        return None

    @abstractmethod
    def write(
        self, call: Call, seeds: list[Tensor], bucket: Bucket, out: Tensor, *, add: bool
    ) -> None:
        """Write the gradients of a bucket's cells to their places in ``out`` (units, seeds, p).

        ``seeds`` are the output's gradients; ``add`` to what is there, for a layer that the model
        uses several times.
        """


class _Recorded(torch.autograd.Function):
    """A layer whose parameters need no gradient: only the input's flows back.

    ``anchor`` makes the output of the first layer, whose input needs no gradient, need one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, recorder: Recorder, call: Call) -> Tensor:
        ctx.recorder, ctx.call = recorder, call
        output = recorder.output(call, x)
        # What comes next may write in place, which torch forbids on a view from in here.
        return output.clone() if output._is_view() or output is x else output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.call.g.append(g)
        dx = ctx.recorder.input_gradient(ctx.call, g) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


WIDE = 2**14
"""Weights of so many numbers have a product of their own for each cell, on a CPU."""


def put(place: Tensor, value: Tensor, add: bool) -> None:
    """Write a value to its place, or add it to what is there."""
    if add:
        place += value
    else:
        place.copy_(value)


class Product(Recorder):
    """Layers with y = W x + b at every position."""

    in_order = True
    """Whether `inputs` has the features in the weight's order."""

    def ordered(self, product: Tensor) -> Tensor:
        """Gradients (units, seeds, out, features) with the features in the weight's order."""
        return product

    @abstractmethod
    def by_position(self, g: Tensor) -> Tensor:
        """An output's gradient as (N, positions, out)."""

    def write(
        self, call: Call, seeds: list[Tensor], bucket: Bucket, out: Tensor, *, add: bool
    ) -> None:
        x, units, count = self.inputs(call), bucket.units, len(seeds)
        parts = [self.by_position(g[bucket.rows]) for g in seeds]
        # Side by side: the inputs are read once for all seeds.
        g = parts[0] if count == 1 else torch.cat(parts, dim=2)
        width = g.shape[2] // count
        if "weight" in self.places:
            splits = _splits(bucket, g.device)
            rows = x[bucket.rows].to(g.dtype).reshape(units * splits, -1, x.shape[2])
            columns = g.reshape(units * splits, -1, g.shape[2])
            inside, outside = rows.shape[2], columns.shape[2]
            rows, columns = steady.filled(rows), steady.filled(columns)
            place = out[:, :, self.places["weight"]]
            whole = rows.shape[2] == inside and columns.shape[2] == outside
            direct = self.in_order and whole and count == splits == 1 and not g.is_cuda
            if direct and g.dtype == out.dtype:
                place = place.view(units, width, x.shape[2])
                torch.baddbmm(place, columns.mT, rows, beta=int(add), out=place)
            elif inside * outside >= WIDE and not g.is_cuda and splits == 1:
                # Cell by cell in one piece of memory: getting it for all of them costs more.
                buffer = g.new_empty(columns.shape[2], rows.shape[2])
                for one, left, right in zip(place, columns.mT, rows, strict=True):
                    product = torch.mm(left, right, out=buffer)[:outside, :inside]
                    product = self.ordered(product.reshape(1, count, width, -1))
                    put(one, product.reshape(count, -1), add)
            else:
                at_once = splits * _units_at_once(bucket.size) if g.is_cuda else None
                product = steady.products(columns, rows, at_once)[:, :outside, :inside]
                if splits > 1:
                    product = tree_sum(product.reshape(units, splits, *product.shape[1:]), 1)
                product = product.reshape(units, count, width, -1)
                put(place, self.ordered(product).reshape(units, count, -1), add)
        if "bias" in self.places:
            total = tree_sum(g.reshape(units, -1, g.shape[2]), 1).reshape(units, count, width)
            put(out[:, :, self.places["bias"]], total, add)


def _splits(bucket: Bucket, device: torch.device) -> int:
    """In how many parts to add up a cell's rows: a GPU needs more products than a few cells are.

    By the cell's own size: how many other cells there are must not change what comes out.
    """
    splits = 1
    if device.type == "cuda":
        while bucket.size % (2 * splits) == 0 and bucket.size // splits > 16:
            splits *= 2
    return splits


AT_ONCE = 2048
"""About so many rows of cells are in one call of a GPU's batched product."""


def _units_at_once(size: int) -> int:
    """How many cells of a size are in one batched product: a power of two, by the size alone.

    A GPU's kernel, and with it the bits, is chosen by how many products there are.
    """
    return 1 << max(0, (AT_ONCE // size).bit_length() - 1)
