"""Linear layers: y = W x + b."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fpfl.users import steady
from fpfl.users.layers import Call, Product


class LinearRecorder(Product):
    """``nn.Linear``, at any number of positions per sample."""

    kinds = (nn.Linear,)

    def parts(
        self, call: Call, dtype: torch.dtype
    ) -> list[tuple[Tensor | None, Tensor, slice]] | None:
        if call.x.ndim != 2:
            return None
        g = (torch.stack(call.g) if len(call.g) > 1 else call.g[0].unsqueeze(0)).to(dtype)
        inputs = {"weight": call.x, "bias": None}
        return [(inputs[name], g, place) for name, place in self.places.items()]

    def output(self, call: Call, x: Tensor) -> Tensor:
        return steady.linear(x, self.layer.weight, self.layer.bias)

    def input_gradient(self, call: Call, g: Tensor) -> Tensor:
        weight: Tensor = self.layer.weight
        return steady.product(g, weight.to(g.dtype))

    def inputs(self, call: Call) -> Tensor:
        return call.x.reshape(len(call.x), -1, call.x.shape[-1])

    def by_position(self, g: Tensor) -> Tensor:
        return g.reshape(len(g), -1, g.shape[-1])
