"""The server's state between two rounds: all that it takes to go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.fairness.totals import Counts
from fpfl.methods import REGISTER, MethodState
from fpfl.server.selection import Candidate, Selection
from fpfl.store.checkpoints import decode, encode

Row = dict[str, Any]
"""What one round released, as plain numbers: a row of the history."""


@dataclass(frozen=True)
class ServerState:
    """After ``round`` rounds: w_t, the optimiser's own state, λ, selection, and the history.

    ``log_bound`` is u = log₂(C/C₀), where the clip bound adapts.
    """

    round: int
    w: Tensor
    optimizer: dict[str, Any] = field(repr=False)
    method: MethodState
    selection: Selection
    history: list[Row] = field(repr=False)
    log_bound: float = 0.0


CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(ServerState, MethodState, Selection, Candidate, Counts),
        *(state for method in REGISTER.values() for state in method.states),
    )
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


@dataclass(frozen=True)
class Past:
    """What a run's folder has written down of the past.

    ``state`` is the last one that was kept, ``totals`` were released since, by round;
    ``participations`` are by user, where they are capped; ``notes`` say what a crash left.
    """

    state: ServerState
    totals: dict[int, Tensor] = field(repr=False)
    participations: dict[int, int] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def next_round(self) -> int:
        """The first round that is still to be run."""
        return self.state.round + len(self.totals) + 1


class RoundJournal(Protocol):
    """Whoever writes down what a round costs and releases (`fpfl.runs.journal`)."""

    def charge(self, round: int) -> None:
        """Write a round's charge; a spent budget is an error."""
        ...

    def drawn(self, round: int, users: NDArray[np.int64]) -> None:
        """Write down who takes part, where that is counted."""
        ...

    def wait(self) -> None:
        """Wait until the charge is on the disk."""
        ...

    def log(self, round: int, v: Tensor) -> None:
        """Write down the released totals, before the server uses them."""
        ...

    def withdrawn(self, round: int) -> frozenset[int] | None:
        """Who has withdrawn, where that changed since it was last asked."""
        ...


class Keeper(Protocol):
    """Whoever keeps checkpoints."""

    def due(self, round: int) -> bool:
        """Whether one is wanted after this round."""
        ...

    def keep(self, state: ServerState) -> None:
        """Keep one."""
        ...
