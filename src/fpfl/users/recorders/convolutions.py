"""Convolutions: products of the weight with the patches that the kernel saw."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fpfl.users import steady
from fpfl.users.layers import Call, Product, put
from fpfl.users.packing import Bucket


class ConvRecorder(Product):
    """``nn.Conv1d`` and ``nn.Conv2d`` with zero padding and one group."""

    kinds = (nn.Conv1d, nn.Conv2d)

    @classmethod
    def knows(cls, layer: Any) -> bool:
        return (
            type(layer) in cls.kinds
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    in_order = False

    def output(self, call: Call, x: Tensor) -> Tensor:
        layer = self.layer
        if x.device.type != "cuda":
            output: Tensor = layer._conv_forward(x, layer.weight, layer.bias)
            return output
        # The patches are needed for the gradients anyway, and a product with them is faster than
        # cuDNN's convolution. Channels come last: the output is what the next layer wants.
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        call.seen, shape = self.patches(x.to(dtype))
        weight = functional.pad(_channels_last(layer.weight.to(dtype)), (0, self._missing(dtype)))
        channels = layer.out_channels
        strides = [channels * shape[dim + 1 :].numel() for dim in range(len(shape))]
        output = torch.empty_strided(
            (len(x), channels, *shape), (channels * shape.numel(), 1, *strides),
            dtype=dtype, device=x.device,
        )  # fmt: skip
        rows, seen = _channels_last(output).view(-1, channels), call.seen.flatten(0, 1)
        if layer.bias is None:
            torch.mm(seen, weight.flatten(1).T, out=rows)
        else:
            torch.addmm(layer.bias.to(dtype), seen, weight.flatten(1).T, out=rows)
        return output

    def _missing(self, dtype: torch.dtype) -> int:
        """How many channels of zeros make a position's channels 16 bytes or a multiple."""
        return int(-self.layer.in_channels % (16 // dtype.itemsize))

    def ordered(self, product: Tensor) -> Tensor:
        layer = self.layer
        product = product.reshape(*product.shape[:3], *layer.kernel_size, -1)
        return product[..., : layer.in_channels].movedim(-1, 3)

    def input_gradient(self, call: Call, g: Tensor) -> Tensor | None:
        return self._backward(call.x, g, (True, False, False))[0]

    def _backward(
        self, x: Tensor, g: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias that are wanted."""
        layer = self.layer
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None]
        gradients = torch.ops.aten.convolution_backward(
            g, x.to(g.dtype), layer.weight.to(g.dtype), [layer.out_channels], layer.stride,
            layer.padding, layer.dilation, False, [0] * len(layer.stride), 1, wanted,
        )  # fmt: skip
        return gradients

    def write(
        self, call: Call, seeds: list[Tensor], bucket: Bucket, out: Tensor, *, add: bool
    ) -> None:
        if call.x.device.type == "cuda":
            return super().write(call, seeds, bucket, out, add=add)
        # Writing patches down costs a CPU more than one call of its own convolution for each cell.
        wanted = (False, "weight" in self.places, "bias" in self.places)
        for unit in range(bucket.units):
            start = bucket.start + unit * bucket.size
            rows = slice(start, start + bucket.size)
            x = steady.aligned(call.x[rows])
            for m, seed in enumerate(seeds):
                _, weight, bias = self._backward(x, steady.aligned(seed[rows]), wanted)
                for name, value in (("weight", weight), ("bias", bias)):
                    if name in self.places and value is not None:
                        put(out[unit, m, self.places[name]], value.flatten(), add)

    def inputs(self, call: Call) -> Tensor:
        return call.x if call.seen is None else call.seen

    def by_position(self, g: Tensor) -> Tensor:
        return _channels_last(g).reshape(len(g), -1, g.shape[1])

    def patches(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        """What the kernel saw, (N, positions, kernel · channels), and the shape of positions.

        The channels, filled up with zeros, are copied 16 bytes at a time.
        """
        layer = self.layer
        around = [each for pad in reversed(layer.padding) for each in (pad, pad)]
        x = functional.pad(_channels_last(x), (0, self._missing(x.dtype), *around)).contiguous()
        wide = x.view(torch.complex128)
        for dim, (kernel, stride, dilation) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=1
        ):
            wide = wide.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        dims = len(layer.kernel_size)
        shape = wide.shape[1 : 1 + dims]
        # (N, positions..., C, kernel...) -> (N, positions, kernel..., C)
        wide = wide.movedim(1 + dims, -1).contiguous().view(len(x), shape.numel(), -1)
        return wide.view(x.dtype), shape


def _channels_last(x: Tensor) -> Tensor:
    """(N, C, ...) seen as (N, ..., C)."""
    return x.movedim(1, -1)
