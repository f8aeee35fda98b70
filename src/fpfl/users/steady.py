r"""Products whose rows keep their bits, whoever stands beside them.

A kernel's result for a row may depend, in its last bits, on the number of rows, on the row's place
and on where it lies in memory. What was seen on CPUs and GPUs: at one fixed number of rows, with
widths that are multiples of 16 numbers, it depends on the row alone. So rows go through a model in
tiles of one fixed size, and here both widths of a product are filled up with zeros.

That a kernel behaves like this is an assumption; `fpfl.users.isolation` tries it on the device of a
run before the run begins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

WIDTH = 16
"""Widths are filled up to a multiple of so many numbers."""

ALIGNMENT = 64
"""Bytes: memory that torch gets on a CPU begins at a multiple of it."""

SPARE = 1.125
"""How many rows a tile has for each that is expected, where one tile is enough."""

TILES = (256, 2304)
"""The least and the most rows of a model's inputs that are computed together, where they are
vectors; a tile is a multiple of the least."""

SMALL_TILE = 64
"""The least where a row is more than a vector: an image, a text; on a CPU the most, too, where
larger ones would not stay in its caches."""

LARGE_TILE = (512, 2**20)
"""The most rows of images or texts on a GPU, and the most numbers in them: there every tile costs
its launches and copies."""


TILES_AT_ONCE = 64
"""Tiles of several runs that a GPU multiplies in one call."""


def filled(rows: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of `WIDTH`."""
    missing = -rows.shape[-1] % WIDTH
    return functional.pad(rows, (0, missing)) if missing else rows


def filled_rows(rows: Tensor, count: int) -> Tensor:
    """The first dimension filled up with zeros to ``count``."""
    missing = count - len(rows)
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def aligned(rows: Tensor) -> Tensor:
    """The same numbers, lying in memory as a copy would.

    How rows lie in memory decides how a kernel begins, and with it the bits.
    """
    if rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight`` for rows (..., in) and a weight (in, out)."""
    out = weight.shape[1]
    flat = filled(rows.reshape(-1, rows.shape[-1]))
    weight = filled(filled(weight).T).T
    return (flat @ weight)[:, :out].reshape(*rows.shape[:-1], out)


def product_in_tiles(
    rows: Tensor, weights: Tensor, tiles: Sequence[int], at_once: int | None
) -> Tensor:
    """The same tile by tile, each with a weight of its own out of (R, in, out).

    The rows are cut into as many tiles as there are in ``tiles``, which says whose weight each
    has. Always ``at_once`` of them in a call, the last ones filled up; None for one at a time: then
    a tile's numbers are those of `product` with that tile and that weight.
    """
    width, out = weights.shape[1:]
    flat = rows.reshape(-1, width)
    weights = filled(filled(weights).mT).mT
    count = len(flat) // len(tiles)
    if at_once is not None:
        each = weights[torch.tensor(tiles, device=flat.device)]
        apart = filled(flat).reshape(len(tiles), count, -1)
        found = [
            torch.bmm(filled_rows(a, at_once), filled_rows(b, at_once))[: len(a)]
            for a, b in zip(torch.split(apart, at_once), torch.split(each, at_once), strict=True)
        ]
        product = torch.cat(found).flatten(0, 1)[:, :out]
    else:
        # In one piece of memory each, which stays in the processor's cache.
        tile = flat.new_zeros(count, weights.shape[1])
        result = flat.new_empty(count, weights.shape[2])
        product = flat.new_empty(len(flat), out)
        parts = zip(torch.split(flat, count), torch.split(product, count), tiles, strict=True)
        for part, place, run in parts:
            tile[:, :width] = part
            place.copy_(torch.mm(tile, weights[run], out=result)[:, :out])
    return product.reshape(*rows.shape[:-1], out)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What ``nn.Linear`` computes."""
    output = product(rows, weight.T)
    return output if bias is None else output + bias.to(output.dtype)


def products(left: Tensor, right: Tensor, at_once: int | None) -> Tensor:
    """Batched products leftᵀ right, always with ``at_once`` of them in a call.

    The last ones are filled up. None: all in one call, for devices that take them one after the
    other.
    """
    if at_once is None:
        return torch.bmm(left.mT, right)
    found = [
        torch.bmm(filled_rows(a, at_once).mT, filled_rows(b, at_once))[: len(a)]
        for a, b in zip(torch.split(left, at_once), torch.split(right, at_once), strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def looked_up(tokens: Tensor, table: Tensor) -> Tensor:
    """What ``nn.Embedding`` computes; NaN for a token that the table does not have.

    An error would tell that somebody has such a token, and would end a GPU's process. What comes
    of NaN is that this user sends zero.
    """
    bad = (tokens < 0) | (tokens >= len(table))
    found = functional.embedding(tokens.masked_fill(bad, 0), table)
    return found.masked_fill(bad.unsqueeze(-1), torch.nan)


def steady(module: nn.Module) -> nn.Module:
    """A copy of a model with these products and look-ups in its linear and embedding layers."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        plain = "forward" not in vars(layer)
        if type(layer) is nn.Linear and plain:
            layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
        if type(layer) is nn.Embedding and plain and layer.max_norm is None:
            layer.forward = partial(_embedding, layer)  # type: ignore[method-assign]
    return module


def _linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    return linear(rows, layer.weight, layer.bias)


def _embedding(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    weight = layer.weight
    if layer.padding_idx is not None:  # its row gets no gradient
        kept = torch.arange(len(weight), device=weight.device) != layer.padding_idx
        weight = torch.where(kept.unsqueeze(1), weight, weight.detach())
    return looked_up(tokens, weight)


def in_tiles(call: Callable[[Tensor], Tensor], rows: Tensor, tile: int) -> Tensor:
    """``call`` of rows, always with ``tile`` of them: the last ones are filled up with zeros."""
    found = [call(filled_rows(part, tile))[: len(part)] for part in torch.split(rows, tile)]
    return found[0] if len(found) == 1 else torch.cat(found)


def tile_for(shape: tuple[int, ...], expected: float = 0.0, *, gpu: bool = False) -> int:
    """How many samples of a shape make a tile, where so many are expected in a cohort.

    From public numbers alone: what a cohort really has would change everybody's last bits.
    """
    least, most = TILES
    if len(shape) != 1:
        rows, numbers = LARGE_TILE
        fitting = numbers // max(1, math.prod(shape)) if gpu else 0
        least, most = SMALL_TILE, max(SMALL_TILE, min(rows, fitting // SMALL_TILE * SMALL_TILE))
    # A little more than expected: a cohort that just does not fit would cost a second tile.
    wanted = math.ceil(SPARE * expected / least) * least
    return min(most, max(least, wanted))
