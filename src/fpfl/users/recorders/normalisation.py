"""Norm layers: normalised by torch, then scaled and shifted."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fpfl.numerics.summing import tree_sum
from fpfl.users.layers import Call, Recorder, put
from fpfl.users.packing import Bucket


class ScaleRecorder(Recorder):
    """``nn.LayerNorm`` and ``nn.GroupNorm``: normalised by torch, then y = w ⊙ x̂ + b."""

    kinds = (nn.LayerNorm, nn.GroupNorm)

    def prepare(self, x: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.GroupNorm):
            return functional.group_norm(x, layer.num_groups, None, None, layer.eps)
        return functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)

    def parts(
        self, call: Call, dtype: torch.dtype
    ) -> list[tuple[Tensor | None, Tensor, slice]] | None:
        if call.x.ndim != 2:
            return None
        g = torch.stack(call.g).to(dtype)
        values = {"weight": g * call.x.to(dtype), "bias": g}
        return [(None, values[name], place) for name, place in self.places.items()]

    def _fit(self, parameter: Tensor, x: Tensor) -> Tensor:
        """A parameter in a shape that multiplies x."""
        if isinstance(self.layer, nn.GroupNorm):
            parameter = parameter.reshape(-1, *[1] * (x.ndim - 2))
        return parameter.to(x.dtype)

    def output(self, call: Call, x: Tensor) -> Tensor:
        if self.layer.weight is not None:
            x = x * self._fit(self.layer.weight, x)
        return x if self.layer.bias is None else x + self._fit(self.layer.bias, x)

    def input_gradient(self, call: Call, g: Tensor) -> Tensor:
        return g if self.layer.weight is None else g * self._fit(self.layer.weight, g)

    def inputs(self, call: Call) -> Tensor:
        return self._by_position(call.x)

    def _by_position(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.GroupNorm):
            return x.reshape(len(x), x.shape[1], -1).transpose(1, 2)
        return x.reshape(len(x), -1, self.layer.weight.numel())

    def write(
        self, call: Call, seeds: list[Tensor], bucket: Bucket, out: Tensor, *, add: bool
    ) -> None:
        x = self.inputs(call)[bucket.rows]
        for m, seed in enumerate(seeds):
            g = self._by_position(seed[bucket.rows])
            for name, place in self.places.items():
                rows = x * g if name == "weight" else g
                cells = rows.reshape(bucket.units, -1, rows.shape[-1])
                put(out[:, m, place], tree_sum(cells, 1), add)
