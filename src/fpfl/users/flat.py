"""A model as a function of one flat vector of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat vector of its trainable parameters."""

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> FlatModel:
        """See a module so; the module itself is left alone."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return cls(module, tuple(n for n, _ in named), tuple(p.shape for _, p in named))

    @cached_property
    def size(self) -> int:
        """p."""
        return sum(shape.numel() for shape in self.shapes)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each parameter stands in w."""
        places, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            places[name] = slice(start, start + shape.numel())
            start += shape.numel()
        return places

    def vector(self) -> Tensor:
        """The module's current parameters as w."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Take w apart into named parameters."""
        return {
            name: w[place].reshape(shape)
            for (name, place), shape in zip(self.places.items(), self.shapes, strict=True)
        }

    def __call__(self, w: Tensor, inputs: Tensor) -> Tensor:
        """The module's output with parameters w."""
        output: Tensor = functional_call(self.module, self.parameters(w), (inputs,))
        return output
