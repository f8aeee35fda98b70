"""Linear layers: y = W x + b."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpfl.users import steady
from fpfl.users.lanes import Lanes
from fpfl.users.layers import Call, Product


class LinearRecorder(Product):
    """``nn.Linear``, at any number of positions per sample."""

    kinds = (nn.Linear,)
    tiles: tuple[int, ...] | None = None
    weights: Tensor
    biases: Tensor
    of_tiles: Tensor

    def parts(
        self, call: Call, dtype: torch.dtype
    ) -> list[tuple[Tensor | None, Tensor, slice]] | None:
        if call.x.ndim != 2:
            return None
        g = (torch.stack(call.g) if len(call.g) > 1 else call.g[0].unsqueeze(0)).to(dtype)
        inputs = {"weight": call.x, "bias": None}
        return [(inputs[name], g, place) for name, place in self.places.items()]

    def output(self, call: Call, x: Tensor) -> Tensor:
        if self.tiles is None:
            return steady.linear(x, self.layer.weight, self.layer.bias)
        output = steady.product_in_tiles(x, self.weights.mT, self.tiles, _at_once(x))
        if self.layer.bias is None:
            return output
        apart = output.reshape(len(self.tiles), -1, *output.shape[1:])
        bias = self.biases[self.of_tiles].to(output.dtype)
        return (apart + bias.reshape(len(bias), *[1] * (apart.ndim - 2), -1)).flatten(0, 1)

    def input_gradient(self, call: Call, g: Tensor) -> Tensor:
        weight: Tensor = self.layer.weight
        if self.tiles is None:
            return steady.product(g, weight.to(g.dtype))
        return steady.product_in_tiles(g, self.weights.to(g.dtype), self.tiles, _at_once(g))

    @property
    def laned(self) -> bool:
        return True

    def enter(self, w: Tensor | None, lanes: Lanes | None) -> None:
        if w is None or lanes is None:
            self.tiles = None
            return
        self.tiles, layer = lanes.tiles, self.layer
        own = dict(layer.named_parameters(recurse=False))
        # A parameter that is not trained is the same in all runs.
        found = {
            name: w[:, self.places[name]].reshape(len(w), *value.shape)
            if name in self.places
            else value.expand(len(w), *value.shape)
            for name, value in own.items()
        }
        self.weights = found["weight"]
        if "bias" in found:
            self.biases = found["bias"]
            self.of_tiles = torch.tensor(self.tiles, device=w.device)

    def inputs(self, call: Call) -> Tensor:
        return call.x.reshape(len(call.x), -1, call.x.shape[-1])

    def by_position(self, g: Tensor) -> Tensor:
        return g.reshape(len(g), -1, g.shape[-1])


def _at_once(rows: Tensor) -> int | None:
    """How many tiles are in one product: a GPU would have to be told of each."""
    return steady.TILES_AT_ONCE if rows.is_cuda else None
