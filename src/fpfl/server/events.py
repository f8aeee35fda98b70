"""Whoever watches a training: callbacks, what they are told, and in which order.

A callback is any function of a `RoundEvent`. One that has more to do is an object that can be
called and has some of these as well, all optional:

``begin(training)``
    once, before the first round, with a `Training`: what is trained.
``end(run)``
    once, with the finished `fpfl.Run`, after its folder (if any) is written and closed.
``failed(error)``
    once, in place of ``end``, where training was cut off: by an error, by an interruption, or by
    a callback. Whoever was told of the beginning is told of one of the two.

    begin ──► round 1 ──► ... ──► round T ──► the run is saved ──► end
                 └────────── an error ──► the folder is closed ──► failed

What a callback raises is not swallowed: it cuts the training off like any other error. What was
charged stays charged, the run's folder can be resumed, and a finished run is saved before ``end``.
`StopTraining` is the exception: it ends the training after the round, as if all had been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fpfl.aggregation.clipping import clip_rules
from fpfl.data.schema import Schema
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.spending import Spending
from fpfl.server.loop import Callback, RoundEvent, StopTraining
from fpfl.server.ranks import Ranks
from fpfl.users.layout import Layout


@dataclass(frozen=True)
class Part:
    """A named part of the released totals v, and the noise on it.

    ``size`` is how many numbers it has; ``block`` the one that it is clipped in, to ``bound``, and
    ``noise`` the standard deviation of the noise on every number. Without privacy the last three
    are None, None and 0.
    """

    name: str
    size: int
    block: str | None = None
    bound: float | None = None
    noise: float = 0.0


@dataclass(frozen=True)
class Training:
    """What callbacks are told before the first round: public numbers, nothing of the data.

    Parameters
    ----------
    settings
        All that was asked for, as plain values.
    schema
        What was declared about the samples.
    layout, parts
        What is where in v; and the clip bound and the noise of each of its parts, in the same
        order.
    plan
        The privacy plan; None without privacy.
    spending
        Says what the rounds so far have cost; None without privacy.
    first, rounds
        The first round that callbacks will see, and T. A run that is resumed begins after its
        last checkpoint.
    fresh
        The first round that will really be run: those before it were released before the run was
        cut off, and are only gone through again.
    """

    settings: dict[str, Any]
    schema: Schema
    layout: Layout
    parts: tuple[Part, ...]
    plan: PrivacyPlan | None
    spending: Spending | None
    first: int
    rounds: int
    fresh: int

    @property
    def score(self) -> str:
        """What a row's ``accuracy`` is: in regression, one less the squared error."""
        return "score" if self.schema.classes is None else "accuracy"

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on an n'_a: in the split basis a sum of two numbers."""
        noise = {part.name: part.noise for part in self.parts}.get("n", 0.0)
        return float(noise * (2.0**0.5 if self.layout.basis == "split" else 1.0))


def parts_of(layout: Layout, plan: PrivacyPlan | None, stddev: Tensor) -> tuple[Part, ...]:
    """The parts of v with their bounds and noise; ``stddev`` is that of every number of v."""
    rules = clip_rules(plan.blocks, layout.slices) if plan is not None else ()
    blocks = {name: rule for rule in rules for name in rule.parts}
    return tuple(
        Part(
            name,
            place.stop - place.start,
            blocks[name].name if name in blocks else None,
            blocks[name].bound if name in blocks else None,
            float(stddev[place.start]) if name in blocks else 0.0,
        )
        for name, place in layout.slices.items()
    )


@dataclass
class Watching:
    """The callbacks of one training, as one.

    Entered before ``begin``, left with the error if there is one: then ``failed`` is called.
    ``end`` is called after it was left. With several processes the first has the callbacks, and
    the others learn from it that training is to stop.
    """

    callbacks: Sequence[Callback] = ()
    ranks: Ranks = field(default_factory=Ranks)
    _told: list[Callback] = field(default_factory=list, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for callback in self._told:
                try:
                    _call(callback, "failed", error)
                except Exception as another:  # the first error is the one to tell of
                    error.add_note(f"{_name(callback)}.failed raised {another!r} besides")

    def begin(self, training: Training) -> None:
        """Tell everybody what is trained."""
        for callback in self.callbacks:
            # One that fails here has begun in part, and should be able to clean up.
            self._told.append(callback)
            _call(callback, "begin", training)

    def __call__(self, event: RoundEvent) -> None:
        """Show a round to everybody; stop where one of them asks for it."""
        reasons = []
        for callback in self.callbacks:
            try:
                callback(event)
            except StopTraining as stop:  # the others see the round all the same
                reasons.append(str(stop) or f"{_name(callback)} asked for it")
        if self.ranks.size > 1 and self.ranks.numbers_from_first([int(bool(reasons))])[0]:
            reasons = reasons or ["the first process stops"]
        if reasons:
            raise StopTraining("; ".join(reasons))

    def end(self, run: Any) -> None:
        """Hand everybody the finished run; what one of them raises does not keep it from others."""
        errors = []
        for callback in self._told:
            try:
                _call(callback, "end", run)
            except Exception as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another callback's end raised {other!r} besides")
            raise errors[0]


def _call(callback: Callback, name: str, value: Any) -> None:
    method: Callable[[Any], None] | None = getattr(callback, name, None)
    if callable(method):
        method(value)


def _name(callback: Callback) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
