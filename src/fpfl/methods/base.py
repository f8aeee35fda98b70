"""What a method is: a pure function from (state, released totals) to (state, direction)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fpfl.fairness.totals import Totals


@dataclass(frozen=True)
class MethodState:
    """What a method remembers between rounds: the multipliers λ of shape (R, G)."""

    multipliers: Tensor

    @classmethod
    def zeros(cls, rates: int, groups: int, device: torch.device | str = "cpu") -> MethodState:
        """λ₀ = 0."""
        return cls(torch.zeros(rates, groups, device=device))


class Method(Protocol):
    """How a constraint is enforced."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Map the state and a round's totals to the next state and the direction to descend."""
        ...


@dataclass(frozen=True)
class Unconstrained:
    """Plain (federated) SGD: the direction is ∇L/N."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Leave the state alone and follow the loss."""
        return state, totals.loss_gradient / totals.normaliser
