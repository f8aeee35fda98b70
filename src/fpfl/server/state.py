"""The server's state between two rounds: all that it takes to go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fpfl.fairness.totals import Counts
from fpfl.methods.base import MethodState
from fpfl.methods.onegradient import AveragedState
from fpfl.server.selection import Candidate, Selection
from fpfl.store.tree import decode, encode

Row = dict[str, Any]
"""What one round released, as plain numbers: a row of the history."""


@dataclass(frozen=True)
class ServerState:
    """After ``round`` rounds: w_t, the optimiser's own state, λ, selection, and the history."""

    round: int
    w: Tensor
    optimizer: dict[str, Any] = field(repr=False)
    method: MethodState
    selection: Selection
    history: list[Row] = field(repr=False)


CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (ServerState, MethodState, AveragedState, Selection, Candidate, Counts)
}
"""What a checkpoint may hold."""


T = TypeVar("T")


def moved(state: T, device: torch.device) -> T:
    """The same state with its tensors on a device."""
    tensors: list[Tensor] = []
    tree = encode(state, tensors)
    # A method's own state may be of a class that no checkpoint knows.
    known = CLASSES | {type(state).__name__: type(state)}
    there: T = decode(tree, [tensor.to(device) for tensor in tensors], known)
    return there


class Keeper(Protocol):
    """Whoever keeps checkpoints."""

    def due(self, round: int) -> bool:
        """Whether one is wanted after this round."""
        ...

    def keep(self, state: ServerState) -> None:
        """Keep one."""
        ...
