"""Dropout whose masks belong to samples: drawn from a row's own key, not for a batch.

torch draws one mask for all rows of a batch, so that everybody's depends on how many others are
there, and whoever has the seed has all masks. Here a mask follows from (seed, round, user, sample)
and the number of the layer's call.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's, as signed numbers
_BITS = 24


def keyed(module: nn.Module) -> bool:
    """Whether all of a model's dropout is of layers that `Keyed` replaces."""
    for layer in module.modules():
        inside = getattr(layer, "dropout", 0.0)
        if isinstance(inside, float) and inside > 0.0:
            return False
        if isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) is not nn.Dropout:
            return False
    return True


class Keyed:
    """Stands in for the dropout layers of a model, which is changed for it."""

    def __init__(self, module: nn.Module) -> None:
        self.keys: Tensor | None = None
        self.calls = 0
        for layer in module.modules():
            if type(layer) is nn.Dropout:
                layer.forward = partial(self._dropped, layer)  # type: ignore[method-assign]

    def begin(self, keys: Tensor | None) -> None:
        """The keys (N,) of the rows that come next; None where nothing is to be dropped."""
        self.keys, self.calls = keys, 0

    def _dropped(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        if not layer.training or self.keys is None or layer.p == 0.0:
            return x
        self.calls += 1
        numbers = torch.arange(x[0].numel(), device=x.device) + (self.calls << 40)
        bits = _mixed(self.keys.unsqueeze(1) + _mixed(numbers))
        kept = (bits & (2**_BITS - 1)) >= round(layer.p * 2**_BITS)
        scale = 0.0 if layer.p == 1.0 else 1.0 / (1.0 - layer.p)
        mask: Tensor = (kept.reshape(x.shape) * scale).to(x.dtype)
        return x * mask


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's finaliser; whole numbers of 64 bits wrap around."""
    for shift, factor in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & ((1 << (64 - by)) - 1)
