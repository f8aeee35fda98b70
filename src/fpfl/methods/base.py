"""UpdateMultiplier of Algorithm 1, and the direction of its UpdateParameters.

A method is a pure function from (state, released totals) to (state, direction). Each has a file of
its own in this folder, and registers itself: configs, reports, tables and checkpoints know it by
that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, TypeVar, get_type_hints, runtime_checkable

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

    def figures(self) -> dict[str, Tensor]:
        """What else a history row should tell of a method: functions of what was released."""
        return {}


class Method(Protocol):
    """How a constraint is enforced."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Map the state and a round's totals to the next state and the direction to descend."""
        ...


Surrogate = Literal["loss", "rate"]
"""What is differentiated for a rate where users send one gradient: the loss, or the rate's own."""


@runtime_checkable
class ReweightingMethod(Method, Protocol):
    """A method whose users send one gradient, of an objective with weights that it broadcasts."""

    surrogate: Surrogate

    def begin(self, rates: int, groups: int, device: torch.device) -> MethodState:
        """The state before the first round."""
        ...

    def weights(self, state: MethodState, normaliser: float, tolerance: float) -> Weights:
        """What to broadcast beside w, given what was released so far."""
        ...


Broadcasting = ReweightingMethod
"""Its name in 0.1.0."""


@dataclass(frozen=True)
class Unconstrained:
    """Plain (federated) SGD: the direction is ∇L/N."""

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """Leave the state alone and follow the loss."""
        return state, totals.loss_gradient / totals.normaliser


@dataclass(frozen=True)
class Registered:
    """A method as it is known by name.

    Parameters
    ----------
    name
        What configs and tables call it.
    about
        What it is, in a line.
    make
        The class, or a function that makes one.
    states
        Classes of its state that checkpoints hold, besides `MethodState`.
    words
        For TOML, which has no word for None: the one that stands for it, by setting.
    """

    name: str
    about: str
    make: Callable[..., Method]
    states: tuple[type[MethodState], ...] = ()
    words: Mapping[str, str] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The types of its settings by name."""
        if is_dataclass(self.make):
            hints = get_type_hints(self.make)
            return {field.name: hints[field.name] for field in fields(self.make) if field.init}
        hints = get_type_hints(self.make)
        return {name: hints[name] for name in inspect.signature(self.make).parameters}

    @property
    def reweights(self) -> bool:
        """Whether its users send one gradient, of an objective with weights that it broadcasts."""
        return all(hasattr(self.make, name) for name in ("begin", "weights"))


REGISTER: dict[str, Registered] = {}
"""All methods, by name."""

T = TypeVar("T", bound=Callable[..., Method])


def register(
    name: str,
    about: str,
    *,
    states: tuple[type[MethodState], ...] = (),
    words: Mapping[str, str] | None = None,
) -> Callable[[T], T]:
    """Make a method known by name; see `Registered`."""

    def registered(make: T) -> T:
        if name in REGISTER:
            raise ValueError(f"there is a method {name!r} already; choose another name")
        REGISTER[name] = Registered(name, about, make, states, words)
        return make

    return registered


def about(made: str) -> str | None:
    """What a method is, by the name of its class; None for one that is not registered."""
    found = (entry.about for entry in REGISTER.values() if entry.make.__name__ == made)
    return next(found, None)
