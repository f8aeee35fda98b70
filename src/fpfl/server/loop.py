"""ServerExecutes of Algorithm 1: the loop, on released totals and a flat vector of parameters.

UpdateMultiplier and UpdateParameters are the method's (`fpfl.methods`), and an optimiser's step.

It does not know who computed the totals. A simulation and a real federation are two things with a
``release`` method; the loop below serves both, private or not, constrained or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fpfl.fairness.confusion import Released, Tables
from fpfl.fairness.totals import SMALLEST_COUNT, Totals, Weights
from fpfl.methods.base import Method, MethodState, ReweightingMethod
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.server.bound import BoundControl
from fpfl.server.selection import Rule, Selection
from fpfl.server.state import Keeper, Row, ServerState, moved
from fpfl.users.layout import Layout

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Federation(Protocol):
    """Whoever turns a broadcast model into a released sum of users' statistics."""

    def release(
        self, round: int, w: Tensor, weights: Weights | None = None, level: Any = None
    ) -> Tensor:
        """Run one round at w and return the (noisy) summed vector v.

        ``weights`` are broadcast beside w by methods that have users send one gradient, ``level``
        says what users are clipped to where the bound adapts. Where it does not, it is not given.
        """
        ...


@dataclass(frozen=True)
class RoundEvent:
    """What a callback sees after a round: all of it was released, or follows from what was.

    The row of the history, the parameters w_t it led to, T, and the released totals v_t themselves.
    Whoever shows or keeps nothing else stays within the run's ε.
    """

    row: Row
    w: Tensor
    rounds: int
    v: Tensor


Callback = Callable[[RoundEvent], None]
"""Called after every round. It may also have ``begin(training)``, ``end(run)`` and
``failed(error)``: `fpfl.server.events` says when they are called."""


class StopTraining(Exception):  # noqa: N818 - it is a wish, not an error
    """Raised by a callback: end the training after this round, and keep what there is.

    ε stays that of all T rounds: whoever stops earlier has looked at what was released.
    """


@dataclass(frozen=True)
class ServerSettings:
    """What the server needs to know to run.

    ``normaliser`` is the public constant N that the summed loss gradient is divided by,
    ``tolerance`` is α, ``optimizer`` makes any ``torch.optim`` optimiser for [w];
    ``smallest_count`` is the public number below which a noisy count says nothing, ``count_noise``
    the standard deviation of the noise on a count. ``control`` moves the clip bound, where it
    adapts; the numbers of counts are then those at C₀. ``tables`` is what is public about released
    confusion tables, None where v has none.
    """

    layout: Layout
    method: Method
    optimizer: OptimizerFactory
    rounds: int
    normaliser: float
    tolerance: float = 0.0
    smallest_count: float = SMALLEST_COUNT
    count_noise: float = 0.0
    selection: Rule = "best"
    selection_window: int = 1
    control: BoundControl | None = None
    tables: Released | None = None


@dataclass(frozen=True)
class Outcome:
    """What the loop returns: the selected parameters, the history, and how it ended."""

    w: Tensor
    selected: str
    history: list[Row] = field(repr=False)
    stopped: str | None = None


class Server:
    """A run's server between two rounds.

    Parameters
    ----------
    w
        w_0.
    settings
        What it needs to know.
    state
        Where a run that was kept goes on; None for one that begins.
    """

    def __init__(self, w: Tensor, settings: ServerSettings, state: ServerState | None) -> None:
        state = state or begin(w, settings)
        self.settings, self.rounds, self.first = settings, settings.rounds, state.round + 1
        self._parameter = torch.nn.Parameter(state.w.to(w.device, copy=True))
        self._optimizer = settings.optimizer([self._parameter])
        if state.optimizer:
            asked = [dict(group) for group in self._optimizer.param_groups]
            self._optimizer.load_state_dict(state.optimizer)
            for group, given in zip(self._optimizer.param_groups, asked, strict=True):
                # Its state is the run's; its settings are what is asked for now.
                group.update({name: value for name, value in given.items() if name != "params"})
        self._method = moved(state.method, w.device)
        selection = moved(state.selection, w.device)
        self._selection = selection.under(selection_of(settings), state.round)
        self.history = list(state.history)
        self._u = state.log_bound
        self._tables = None if settings.tables is None else Tables(settings.tables, self.history)
        self.diverged: str | None = None

    @property
    def w(self) -> Tensor:
        """The parameters to broadcast."""
        return self._parameter.detach().clone()

    @property
    def weights(self) -> Weights | None:
        """What is broadcast beside them."""
        return weights_of(self.settings, self._method)

    @property
    def broadcast(self) -> tuple[Any, ...]:
        """What a round is run with: w, the weights and, where it adapts, the bound's level."""
        control = self.settings.control
        level = () if control is None else (control.grid.level(self._u),)
        return (self.w, self.weights, *level)

    def take(self, t: int, v: Tensor) -> RoundEvent | None:
        """Take in what round t released; None where the model diverged, and stays what it was."""
        before, control = self.w, self.settings.control
        settings = at_bound(self.settings, self._u)
        self._method, direction, found, counts = step(settings, self._method, v)
        self._parameter.grad = direction
        descend(self._optimizer, 1.0 if control is None else control.step_factor(self._u))
        after = self.w
        # A sum is finite only if all its terms are.
        if not bool((direction.sum() + after.sum()).isfinite()):
            self.diverged = divergence(t)
            self._parameter.data.copy_(before)
            return None
        numbers: dict[str, Any] = {name: value.tolist() for name, value in found.items()}
        if control is not None:
            clipped = numbers["clipped"]
            numbers |= control.figures(self._u, clipped)
            self._u = control.moved(self._u, clipped)
        self.history.append(row(t, numbers, self.settings.layout, self._tables))
        self._selection = self._selection.observe(t, before, counts, after)
        return RoundEvent(self.history[-1], after, self.rounds, v)

    def state(self) -> ServerState:
        """All that it takes to go on."""
        return ServerState(
            len(self.history),
            self.w,
            self._optimizer.state_dict(),
            self._method,
            self._selection,
            self.history,
            self._u,
        )

    def outcome(self, stopped: str | None) -> Outcome:
        """The selected model, and how it went."""
        chosen, how = self._selection.choose(self.w, len(self.history))
        return Outcome(chosen, how, self.history, stopped)


class Serving(Protocol):
    """A server, or those of several runs."""

    first: int
    rounds: int
    diverged: str | None

    @property
    def w(self) -> Tensor:
        """The parameters to broadcast."""
        ...

    @property
    def broadcast(self) -> tuple[Any, ...]:
        """What a round is run with: w, what is broadcast beside it."""
        ...

    def take(self, t: int, v: Tensor) -> RoundEvent | None:
        """Take in what round t released."""
        ...

    def state(self) -> ServerState:
        """All that it takes to go on."""
        ...


def serve(
    federation: Federation,
    server: Serving,
    callbacks: Sequence[Callback] = (),
    keeper: Keeper | None = None,
) -> str | None:
    """Run T rounds, or those that are left after a state that was kept; why it stopped, if it did.

    Each round: v_t released at w_{t−1}; multipliers and direction from its totals (the method);
    one step of the optimiser; selection. A direction or a model that is not finite stops the run
    and the last good model is kept; so does a budget that is spent, and a callback that raises
    `StopTraining`.
    """
    stopped, done = None, server.first - 1
    for t in range(server.first, server.rounds + 1):
        try:
            v = federation.release(t, *server.broadcast)
        except BudgetExhaustedError as error:
            stopped = str(error)
            break
        event = server.take(t, v)
        if event is None:
            return server.diverged
        done = t
        try:
            for callback in callbacks:
                callback(event)
        except StopTraining as stop:
            stopped = f"a callback ended training after round {t} of {server.rounds}: {stop}"
            break
        if keeper is not None and keeper.due(t):
            keeper.keep(server.state())
    if keeper is not None and done >= server.first:
        # The end is a state like any other: a run that goes on later begins from it.
        keeper.keep(server.state())
    return stopped


def at_bound(settings: ServerSettings, u: float) -> ServerSettings:
    """The settings at C₀ · 2^u: counts that are clipped with the gradients have its noise."""
    control = settings.control
    if control is None:
        return settings
    noise, smallest = control.counts(u, settings.count_noise, settings.smallest_count)
    return replace(settings, count_noise=noise, smallest_count=smallest)


def descend(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """One step with the learning rates times a factor; its state keeps the rates themselves."""
    rates = [group["lr"] for group in optimizer.param_groups] if factor != 1.0 else []
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


def divergence(t: int) -> str:
    """Why a run stopped whose update was not finite."""
    return (
        f"training diverged in round {t}: the update is not finite. The last good model "
        "is kept; use a smaller learning rate, or clip"
    )


def begin(w: Tensor, settings: ServerSettings) -> ServerState:
    """The state before the first round: w_0 and λ_0 = 0."""
    layout, method = settings.layout, settings.method
    start = method.begin if isinstance(method, ReweightingMethod) else MethodState.zeros
    return ServerState(
        round=0,
        w=w,
        optimizer={},
        method=start(len(layout.rates), len(layout.groups), w.device),
        selection=selection_of(settings),
        history=[],
    )


def weights_of(settings: ServerSettings, state: MethodState) -> Weights | None:
    """What the method broadcasts after these rounds; None for methods that do not."""
    if not isinstance(settings.method, ReweightingMethod):
        return None
    return settings.method.weights(state, settings.normaliser, settings.tolerance)


def selection_of(settings: ServerSettings) -> Selection:
    """Selection before the first round."""
    return Selection(
        settings.selection, settings.rounds, settings.tolerance, settings.selection_window
    )


def step(
    settings: ServerSettings, method: MethodState, v: Tensor
) -> tuple[MethodState, Tensor, dict[str, Tensor], Totals]:
    """UpdateMultiplier and the direction of UpdateParameters: a pure function of released totals.

    Also what the round measured, for its row, and the totals. Of several runs it is mapped by
    ``vmap`` (`fpfl.sweeps.server`).
    """
    totals = settings.layout.totals(
        v, settings.normaliser, settings.smallest_count, settings.count_noise
    )
    method, direction = settings.method.update(method, totals, settings.tolerance)
    return method, direction, measured(totals, method, settings.layout, settings.tolerance), totals


def measured(
    totals: Totals, state: MethodState, layout: Layout, tolerance: float
) -> dict[str, Tensor]:
    """What a round says about itself: functions of the released totals, nothing else."""
    found = {
        "accuracy": totals.accuracy(),
        "gap": totals.gap(),
        "fair": totals.fair(tolerance),
        # Of the released sum, noise included: with s√p beside it, it says what is left of a signal.
        "gradient_norm": totals.loss_gradient.norm(),
    }
    if totals.table is not None:
        found["confusion"] = totals.table
    if totals.clipped is not None:
        found["clipped"] = totals.clipped
    if layout.rates:
        found |= {
            "overall": totals.overall(),
            "groups": totals.values(),
            "counts": totals.n,
            "multipliers": state.multipliers,
        }
        found |= state.figures()
    return found


def row(t: int, found: Mapping[str, Any], layout: Layout, tables: Tables | None = None) -> Row:
    """A round's row of the history, of what it measured as plain numbers and lists of them.

    ``tables`` are those of the rounds before; it takes in this round's.
    """
    described: Row = {"round": t}
    for name, value in found.items():
        if name == "fair":
            described[name] = value
        elif name == "confusion":
            described[name] = [[_known(number) for number in line] for line in value]
        elif name == "overall":
            described[name] = dict(zip(layout.rates, map(_known, value), strict=True))
        elif isinstance(value, list):
            described[name] = {
                rate: dict(zip(layout.groups, map(_known, line), strict=True))
                for rate, line in zip(layout.rates, value, strict=True)
            }
        else:
            described[name] = _known(value)
    if tables is not None:
        tables.take(described["confusion"])
        described["balance"] = tables.balance()
    return described


def _known(value: float) -> float | None:
    """A number as JSON has it; one that is not finite says nothing."""
    return value if math.isfinite(value) else None
