"""UpdateMultiplier of Algorithm 1, and the direction of its UpdateParameters.

A method is a pure function from (state, released totals) to (state, direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fpfl.fairness.totals import Totals, Weights


@dataclass(frozen=True)
class MethodState:
    """What a method remembers between rounds: the multipliers λ of shape (R, G)."""

    multipliers: Tensor

    @classmethod
    def zeros(cls, rates: int, groups: int, device: torch.device | str = "cpu") -> MethodState:
        """λ₀ = 0."""
        return cls(torch.zeros(rates, groups, device=device))

    def figures(self) -> dict[str, float]:
        """What else a history row should tell of a method: functions of what was released."""
        return {}


class Method(Protocol):
    """How a constraint is enforced."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Map the state and a round's totals to the next state and the direction to descend."""
        ...


Standin = Literal["loss", "rate"]
"""What stands in for a rate where users send one gradient: the loss, or the rate's own."""


@runtime_checkable
class Broadcasting(Method, Protocol):
    """A method whose users send one gradient, of an objective with weights that it broadcasts."""

    standin: Standin

    def begin(self, rates: int, groups: int, device: torch.device) -> MethodState:
        """The state before the first round."""
        ...

    def weights(self, state: MethodState, normaliser: float, tolerance: float) -> Weights:
        """What to broadcast beside w, given what was released so far."""
        ...


@dataclass(frozen=True)
class Unconstrained:
    """Plain (federated) SGD: the direction is ∇L/N."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Leave the state alone and follow the loss."""
        return state, totals.loss_gradient / totals.normaliser
