"""The servers of several runs: one step of all their multipliers, models and selections.

The step is the single server's own (`fpfl.server.loop.step`), mapped over runs. What runs differ in
is a tensor with one number a run; what they share stays a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fpfl.fairness.confusion import Tables
from fpfl.fairness.totals import Counts, Weights
from fpfl.methods import MMDM, MethodState, OneGradient, Tran
from fpfl.methods.base import ReweightingMethod, Unconstrained
from fpfl.server.loop import (
    Outcome,
    RoundEvent,
    ServerSettings,
    at_bound,
    begin,
    descend,
    divergence,
    row,
    selection_of,
    step,
    weights_of,
)
from fpfl.server.selection import Candidate
from fpfl.server.state import ServerState
from fpfl.sweeps.alike import made_of

_OURS = (MMDM, OneGradient, Tran, Unconstrained)
"""Methods whose step is known to do for all runs what it does for one."""

NUMBERS = ("normaliser", "tolerance", "smallest_count", "count_noise")
"""What runs' servers may differ in, besides their methods' numbers."""


def shape(settings: ServerSettings) -> tuple[Any, ...]:
    """What servers must have in common to be computed as one."""
    method = settings.method
    return (
        settings.layout,
        settings.rounds,
        settings.selection,
        settings.selection_window,
        type(method),
        made_of(
            {name: value for name, value in vars(method).items() if not _is_number(value)}
            if _has_numbers(method)
            else method
        ),
        None if settings.control is None else settings.control.joint,
    )


def can_be_mapped(settings: Sequence[ServerSettings], like: Tensor) -> bool:
    """Whether the step of servers of one shape can be taken for all of them at once.

    A method of one's own may decide by what was measured, draw numbers, or remember something
    outside its state; so it is tried, on made-up totals.
    """
    if all(type(each.method) in _OURS for each in settings):
        return True
    own = [replace(each, method=copy.deepcopy(each.method)) for each in settings]
    first, before = own[0], made_of(own[0].method)
    w = like.new_zeros(len(own), first.layout.parameters)
    v = like.new_ones(len(own), first.layout.size)
    try:
        weights_of(first, step(first, begin(w[0], first).method, v[0])[0])
        if made_of(first.method) != before:
            return False
        servers = Servers(w, own, [0.0] * len(own))
        _ = servers.weights
        servers.take(1, v)
        _ = servers.weights
    except Exception:
        return False
    return True


def _has_numbers(method: Any) -> bool:
    """Whether a method's numbers may differ between runs (`_with` puts them in their places)."""
    return is_dataclass(method) and hasattr(method, "__dict__")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass
class _Best:
    """The best of the rounds so far, of every run."""

    w: Tensor
    last: Tensor
    accuracy: Tensor
    gap: Tensor
    fair: Tensor


class Servers:
    """The servers of R runs.

    Parameters
    ----------
    w
        Their w_0, (R, p).
    settings
        Their settings, which differ in numbers alone (`shape`).
    learning_rates
        η of plain SGD for every run; None where they have optimisers of their own.
    """

    def __init__(
        self,
        w: Tensor,
        settings: Sequence[ServerSettings],
        learning_rates: Sequence[float] | None,
    ) -> None:
        self.settings, self.first, self.rounds = list(settings), 1, settings[0].rounds
        self.diverged: str | None = None
        self._w = w.clone()
        self._rates = learning_rates
        self._optimizers: list[tuple[torch.nn.Parameter, torch.optim.Optimizer]] = []
        if learning_rates is None:
            for own, each in zip(self._w, settings, strict=True):
                # A view of its row: what the optimiser changes is changed there.
                parameter = torch.nn.Parameter(own)
                self._optimizers.append((parameter, each.optimizer([parameter])))
        states = [begin(own, each).method for own, each in zip(w, settings, strict=True)]
        self._kind = type(states[0])
        self._state = {
            field.name: _stacked([getattr(state, field.name) for state in states], w)
            for field in fields(states[0])
        }
        common, own = _differing(settings, w)
        self._step = vmap(_step_of(common, self._kind), in_dims=(0, 0, 0))
        self._weights = vmap(_weights_of(common, self._kind), in_dims=(0, 0))
        self._numbers = own
        self._u = [0.0] * len(w)
        self._figures: list[list[dict[str, float]]] = []
        self._found: list[dict[str, Tensor]] = []
        self._alive = torch.ones(len(w), dtype=torch.bool, device=w.device)
        self._ended = torch.full((len(w),), self.rounds + 1, device=w.device)
        self._recent: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._best: _Best | None = None
        self._mean: Tensor | None = None
        self._averaged = 0

    @property
    def w(self) -> Tensor:
        """The parameters to broadcast, (R, p)."""
        return self._w.clone()

    @property
    def weights(self) -> Weights | None:
        """What is broadcast beside them, with one more dimension, in front."""
        if not isinstance(self.settings[0].method, ReweightingMethod):
            return None
        found = self._weights(self._state, self._numbers)
        return Weights(*found)

    @property
    def broadcast(self) -> tuple[Any, ...]:
        """What a round is run with: w, the weights and, where they adapt, the bounds' levels."""
        controls = [each.control for each in self.settings]
        levels = [
            control.grid.level(u)
            for control, u in zip(controls, self._u, strict=True)
            if control is not None
        ]
        return (self.w, self.weights, *([levels] if levels else []))

    def take(self, t: int, v: Tensor) -> RoundEvent | None:
        """Take in what round t released, (R, size).

        A run whose update is not finite stays as it was, whatever comes.
        """
        before = self.w
        state, direction, found, counts = self._step(self._state, v, self._numbers_now())
        factors = self._step_factors()
        for own, slope, rate, factor in zip(
            self._w, direction, self._rates or (), factors, strict=False
        ):
            own.add_(slope, alpha=-(rate * factor))  # as `torch.optim.SGD` does, to the last bit
        for row_of_w, (parameter, optimizer), own, factor in zip(
            self._w, self._optimizers, direction, factors, strict=False
        ):
            parameter.grad = own
            descend(optimizer, factor)
            if parameter.data_ptr() != row_of_w.data_ptr():  # it has put new numbers in its place
                row_of_w.copy_(parameter.detach())
        finite = (direction.sum(dim=1) + self._w.sum(dim=1)).isfinite()
        self._ended = torch.where(self._alive & ~finite, t, self._ended)
        self._alive = self._alive & finite
        self._w.copy_(torch.where(self._alive.unsqueeze(1), self._w, before))
        self._state = {
            name: torch.where(_like(self._alive, old), state[name].to(old.dtype), old)
            for name, old in self._state.items()
        }
        self._found.append(found)
        self._move_bounds(found)
        self._observe(t, before, counts)
        return RoundEvent({"round": t}, self._w, self.rounds, v)

    def _numbers_now(self) -> dict[str, Tensor]:
        """The numbers that the runs differ in, with the noise of counts at each run's bound."""
        control = self.settings[0].control
        if control is None or not control.joint:
            return self._numbers
        now = [at_bound(each, u) for each, u in zip(self.settings, self._u, strict=True)]
        return self._numbers | {
            name: torch.tensor(
                [getattr(each, name) for each in now], dtype=self._w.dtype, device=self._w.device
            )
            for name in ("smallest_count", "count_noise")
        }

    def _step_factors(self) -> list[float]:
        """What each run's learning rate is multiplied by in this round."""
        controls = zip((each.control for each in self.settings), self._u, strict=True)
        return [1.0 if control is None else control.step_factor(u) for control, u in controls]

    def _move_bounds(self, found: dict[str, Tensor]) -> None:
        """Each run's clip bound, where it adapts; what its row says of it."""
        if self.settings[0].control is None:
            return
        moved, figures = [], []
        for each, u, clipped in zip(self.settings, self._u, found["clipped"].tolist(), strict=True):
            assert each.control is not None  # of one shape with the first
            figures.append(each.control.figures(u, clipped))
            moved.append(each.control.moved(u, clipped))
        self._u = moved
        self._figures.append(figures)

    def state(self) -> ServerState:
        """Sweeps keep finished runs alone."""
        raise NotImplementedError("a sweep keeps no checkpoints")

    def outcomes(self) -> list[Outcome]:
        """What each run ends with."""
        ended = self._ended.tolist()
        found = {
            name: torch.stack([each[name] for each in self._found], dim=1).tolist()
            for name in (self._found[0] if self._found else ())
        }
        return [
            self._outcome(run, end, {name: values[run] for name, values in found.items()})
            for run, end in enumerate(ended)
        ]

    def _outcome(self, run: int, ended: int, found: dict[str, list[Any]]) -> Outcome:
        settings, done = self.settings[run], min(ended - 1, self.rounds)
        tables = None if settings.tables is None else Tables(settings.tables)
        figures = [each[run] for each in self._figures] or [{}] * done
        history = [
            row(
                t + 1,
                {name: values[t] for name, values in found.items()} | figures[t],
                settings.layout,
                tables,
            )
            for t in range(done)
        ]
        selection = selection_of(settings)
        if self._best is not None:
            best, window = self._best, min(settings.selection_window, self.rounds)
            last = int(best.last[run])
            if last:
                selection = replace(
                    selection,
                    best=Candidate(
                        best.w[run].clone(),
                        (last - window + 1, last),
                        float(best.accuracy[run]),
                        float(best.gap[run]),
                        bool(best.fair[run]),
                    ),
                )
        averaged = done - self.rounds // 2
        if self._mean is not None and averaged > 0:
            selection = replace(selection, mean=self._mean[run].clone(), averaged=averaged)
        chosen, how = selection.choose(self._w[run].clone(), done)
        return Outcome(chosen, how, history, divergence(ended) if ended <= self.rounds else None)

    def _observe(self, t: int, before: Tensor, counts: dict[str, Tensor]) -> None:
        """Selection's rule for all runs (`fpfl.server.selection`)."""
        rule, alive = self.settings[0].selection, self._alive.unsqueeze(1)
        if rule == "average" and t > self.rounds // 2:
            self._averaged += 1
            mean = self._w if self._mean is None else self._mean
            moved = mean + (self._w - mean) / self._averaged
            self._mean = torch.where(alive, moved, mean).clone()
        if rule != "best":
            return
        window = min(self.settings[0].selection_window, self.rounds)
        self._recent = [*self._recent, (before, counts)][-window:]
        if len(self._recent) < window:
            return
        tolerance = self._numbers.get("tolerance", self.settings[0].tolerance)
        judged = vmap(_judged, in_dims=(0, 0 if isinstance(tolerance, Tensor) else None))
        accuracy, gap, fair = judged([each for _, each in self._recent], tolerance)
        models = torch.stack([w for w, _ in self._recent])
        new = _Best(
            models.mean(dim=0) if window > 1 else models[0],
            torch.full_like(self._ended, t),
            accuracy,
            gap,
            fair,
        )
        if self._best is None:
            nothing = torch.zeros_like(new.last)
            self._best = replace(new, last=torch.where(self._alive, new.last, nothing))
            return
        better = self._alive & (_better(new, self._best) | (self._best.last == 0))
        self._best = _Best(
            *(
                torch.where(_like(better, getattr(new, field.name)), getattr(new, field.name),
                            getattr(self._best, field.name))
                for field in fields(_Best)
            )
        )  # fmt: skip


def _better(new: _Best, old: _Best) -> Tensor:
    """Fair before unfair; among fair ones the more accurate; among unfair ones the smaller gap."""
    lowest, highest = -torch.inf, torch.inf
    more = new.accuracy.nan_to_num(lowest, highest, lowest) > old.accuracy.nan_to_num(
        lowest, highest, lowest
    )
    less = new.gap.nan_to_num(highest, highest, lowest) < old.gap.nan_to_num(
        highest, highest, lowest
    )
    return torch.where(new.fair == old.fair, torch.where(new.fair, more, less), new.fair)


def _judged(counted: list[dict[str, Tensor]], tolerance: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The accuracy, gap and verdict of some rounds' counts together."""
    seen: Counts = reduce(add, (Counts(**each) for each in counted))  # type: ignore[arg-type]
    return seen.accuracy(), seen.gap(), seen.fair(tolerance)


def _step_of(common: ServerSettings, kind: type[MethodState]) -> Callable[..., Any]:
    def one(
        state: dict[str, Tensor], v: Tensor, numbers: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor], dict[str, Tensor]]:
        method, direction, found, totals = step(_with(common, numbers), kind(**state), v)
        counts = totals.alone()
        plain = {
            each.name: value
            for each in fields(counts)
            if (value := getattr(counts, each.name)) is not None
        }
        return _plain(method, v), direction, found, _tensors(plain, v)

    return one


def _weights_of(common: ServerSettings, kind: type[MethodState]) -> Callable[..., Any]:
    def one(state: dict[str, Tensor], numbers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        like = next(iter(state.values()))
        found = weights_of(_with(common, numbers), kind(**state))
        assert found is not None  # asked of reweighting methods alone
        return found.groups, found.overall, *(torch.as_tensor(each).to(like) for each in
                                              (found.low, found.high))  # fmt: skip

    return one


def _with(common: ServerSettings, numbers: dict[str, Tensor]) -> ServerSettings:
    """The settings of one of the runs, whose own numbers are tensors."""
    method = copy.copy(common.method)
    for name, value in numbers.items():
        if name.startswith("method."):
            # Checked when each run's method was made: what is known of a tensor here is its shape.
            object.__setattr__(method, name.removeprefix("method."), value)
    own = {name: value for name, value in numbers.items() if name in NUMBERS}
    return replace(common, method=method, **own)  # type: ignore[arg-type]


def _differing(
    settings: Sequence[ServerSettings], like: Tensor
) -> tuple[ServerSettings, dict[str, Tensor]]:
    """What the runs have in common, and by name the numbers that they differ in, (R,)."""
    first = settings[0]
    values = {name: [getattr(each, name) for each in settings] for name in NUMBERS}
    if _has_numbers(first.method):
        for name, value in vars(first.method).items():
            if _is_number(value):
                values[f"method.{name}"] = [getattr(each.method, name) for each in settings]
    # A method's own in double precision, as Python's numbers are: what is computed with them before
    # they meet a tensor is rounded once, as it is in a single run.
    return first, {
        name: torch.tensor(
            each, dtype=like.dtype if name in NUMBERS else torch.float64, device=like.device
        )
        for name, each in values.items()
        if len(set(each)) > 1
    }


def _stacked(values: list[Any], like: Tensor) -> Tensor:
    return torch.stack([_as_tensor(each, like) for each in values])


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    """A number of a state as a tensor; what is no fraction (a count, a mark) stays what it is."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value.to(like.device)
    return torch.as_tensor(value).to(like)


def _plain(state: MethodState, like: Tensor) -> dict[str, Tensor]:
    return _tensors({each.name: getattr(state, each.name) for each in fields(state)}, like)


def _tensors(values: dict[str, Any], like: Tensor) -> dict[str, Tensor]:
    return {
        name: value if isinstance(value, Tensor) else torch.as_tensor(value).to(like)
        for name, value in values.items()
    }


def _like(runs: Tensor, value: Tensor) -> Tensor:
    """(R,) as wide as (R, ...)."""
    return runs.reshape(-1, *[1] * (value.ndim - 1))
