"""ServerExecutes of Algorithm 1: the loop, on released totals and a flat vector of parameters.

UpdateMultiplier and UpdateParameters are the method's (`fpfl.methods`), and an optimiser's step.

It does not know who computed the totals. A simulation and a real federation are two things with a
``release`` method; the loop below serves both, private or not, constrained or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fpfl.fairness.totals import SMALLEST_COUNT, Totals, Weights
from fpfl.methods.base import Method, MethodState, ReweightingMethod
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.server.selection import Rule, Selection
from fpfl.server.state import Keeper, Row, ServerState, moved
from fpfl.users.layout import Layout

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Federation(Protocol):
    """Whoever turns a broadcast model into a released sum of users' statistics."""

    def release(self, round: int, w: Tensor, weights: Weights | None) -> Tensor:
        """Run one round at w and return the (noisy) summed vector v.

        ``weights`` are broadcast beside w by methods that have users send one gradient.
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
    the standard deviation of the noise on a count.
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


@dataclass(frozen=True)
class Outcome:
    """What the loop returns: the selected parameters, the history, and how it ended."""

    w: Tensor
    selected: str
    history: list[Row] = field(repr=False)
    stopped: str | None = None


def serve(
    federation: Federation,
    w: Tensor,
    settings: ServerSettings,
    callbacks: Sequence[Callback] = (),
    state: ServerState | None = None,
    keeper: Keeper | None = None,
) -> Outcome:
    """Run T rounds from w_0, or those that are left after a state that was kept.

    Each round: v_t released at w_{t−1}; multipliers and direction from its totals (the method);
    one step of the optimiser; selection. A direction or a model that is not finite stops the run
    and the last good model is kept; so does a budget that is spent, and a callback that raises
    `StopTraining`.
    """
    layout = settings.layout
    state = state or begin(w, settings)
    parameter = torch.nn.Parameter(state.w.to(w.device, copy=True))
    optimizer = settings.optimizer([parameter])
    if state.optimizer:
        asked = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state.optimizer)
        for group, given in zip(optimizer.param_groups, asked, strict=True):
            # Its state is the run's; its settings are what is asked for now.
            group.update({name: value for name, value in given.items() if name != "params"})
    method = moved(state.method, w.device)
    selection = moved(state.selection, w.device).under(_selection(settings), state.round)
    history = list(state.history)
    stopped = diverged = None
    for t in range(state.round + 1, settings.rounds + 1):
        before = parameter.detach().clone()
        try:
            v = federation.release(t, before, _weights(settings, method))
        except BudgetExhaustedError as error:
            stopped = str(error)
            break
        totals = layout.totals(
            v, settings.normaliser, settings.smallest_count, settings.count_noise
        )
        method, direction = settings.method.update(method, totals, settings.tolerance)
        parameter.grad = direction
        optimizer.step()
        after = parameter.detach()
        # A sum is finite only if all its terms are.
        if not bool((direction.sum() + after.sum()).isfinite()):
            stopped = (
                f"training diverged in round {t}: the update is not finite. The last good model "
                "is kept; use a smaller learning rate, or clip"
            )
            diverged = t
            parameter.data.copy_(before)
            break
        row = describe(t, totals, method, layout, settings.tolerance)
        history.append(row)
        after = after.clone()
        selection = selection.observe(t, before, totals, after)
        try:
            for callback in callbacks:
                callback(RoundEvent(row, after, settings.rounds, v))
        except StopTraining as stop:
            stopped = f"a callback ended training after round {t} of {settings.rounds}: {stop}"
            break
        if keeper is not None and keeper.due(t):
            rest = optimizer.state_dict()
            keeper.keep(ServerState(t, after, rest, method, selection, history))
    if keeper is not None and diverged is None and len(history) > state.round:
        # The end is a state like any other: a run that goes on later begins from it.
        rest = optimizer.state_dict()
        keeper.keep(ServerState(len(history), parameter.detach(), rest, method, selection, history))
    chosen, how = selection.choose(parameter.detach().clone(), len(history))
    return Outcome(chosen, how, history, stopped)


def begin(w: Tensor, settings: ServerSettings) -> ServerState:
    """The state before the first round: w_0 and λ_0 = 0."""
    layout, method = settings.layout, settings.method
    start = method.begin if isinstance(method, ReweightingMethod) else MethodState.zeros
    return ServerState(
        round=0,
        w=w,
        optimizer={},
        method=start(len(layout.rates), len(layout.groups), w.device),
        selection=_selection(settings),
        history=[],
    )


def _weights(settings: ServerSettings, state: MethodState) -> Weights | None:
    if not isinstance(settings.method, ReweightingMethod):
        return None
    return settings.method.weights(state, settings.normaliser, settings.tolerance)


def _selection(settings: ServerSettings) -> Selection:
    return Selection(
        settings.selection, settings.rounds, settings.tolerance, settings.selection_window
    )


def describe(t: int, totals: Totals, state: MethodState, layout: Layout, tolerance: float) -> Row:
    """A round's history row: functions of the released totals, nothing else."""
    constrained = bool(layout.rates)
    gap = totals.gap() if constrained else math.nan
    accuracy = totals.accuracy()
    row: Row = {
        "round": t,
        "accuracy": _known(accuracy),
        "gap": _known(gap),
        "fair": totals.fair(tolerance),
        # Of the released sum, noise included: with s√p beside it, it says what is left of a signal.
        "gradient_norm": _known(float(totals.loss_gradient.norm())),
    }
    if totals.clipped is not None:
        row["clipped"] = _known(float(totals.clipped))
    if constrained:
        row["overall"] = dict(zip(layout.rates, _plain(totals.overall()), strict=True))
        row["groups"] = _table(layout, totals.values())
        row["counts"] = _table(layout, totals.n)
        row["multipliers"] = _table(layout, state.multipliers)
        row |= {name: _known(value) for name, value in state.figures().items()}
    return row


def _table(layout: Layout, values: Tensor) -> dict[str, dict[str, float | None]]:
    return {
        rate: dict(zip(layout.groups, line, strict=True))
        for rate, line in zip(layout.rates, map(_plain, values), strict=True)
    }


def _plain(values: Tensor) -> list[float | None]:
    return [_known(value) for value in values.tolist()]


def _known(value: float) -> float | None:
    """A number as JSON has it; one that is not finite says nothing."""
    return value if math.isfinite(value) else None
