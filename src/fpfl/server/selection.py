"""Model selection: which of the trained models is kept.

The totals of round t measured w_{t−1}, the model that was broadcast; so that is the model which
their accuracy and gap speak for, and which the paper's rule keeps. Selection reads released totals
only, hence it costs no privacy beyond the counts in v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Rule = Literal["best", "last", "average"]
"""``best``: the best released accuracy among rounds whose totals meet the tolerance (the paper's).
``last``: w_T. ``average``: the mean of the second half of the iterates."""


@dataclass(frozen=True)
class Candidate:
    """A model and what was released about it."""

    w: Tensor
    round: int
    accuracy: float
    gap: float
    fair: bool


@dataclass(frozen=True)
class Selection:
    """What selection remembers between rounds; ``observe`` returns the next state."""

    rule: Rule
    rounds: int
    best: Candidate | None = None
    mean: Tensor | None = None
    averaged: int = 0

    def observe(self, candidate: Candidate, after: Tensor) -> Selection:
        """Take in round t: what its totals say about w_{t−1}, and the model w_t it led to."""
        if self.rule == "best" and (self.best is None or _better(candidate, self.best)):
            return replace(self, best=candidate)
        if self.rule == "average" and candidate.round > self.rounds // 2:
            count = self.averaged + 1
            mean = after if self.mean is None else self.mean + (after - self.mean) / count
            return replace(self, mean=mean, averaged=count)
        return self

    def choose(self, last: Tensor, rounds_done: int) -> tuple[Tensor, str]:
        """Return the selected parameters and, in words, which model they are."""
        if self.rule == "best" and self.best is not None:
            best = self.best
            how = "" if best.fair else "; no round met the tolerance, this one came nearest"
            return best.w, f"best cohort accuracy, measured in round {best.round}{how}"
        if self.rule == "average" and self.mean is not None:
            return self.mean, f"average of the last {self.averaged} iterates"
        return last, f"last iterate, after round {rounds_done}"


def _better(new: Candidate, old: Candidate) -> bool:
    """Fair before unfair; among fair ones the more accurate; among unfair ones the smaller gap."""
    if new.fair != old.fair:
        return new.fair
    if new.fair:
        return _number(new.accuracy, -math.inf) > _number(old.accuracy, -math.inf)
    return _number(new.gap, math.inf) < _number(old.gap, math.inf)


def _number(value: float, instead: float) -> float:
    return instead if math.isnan(value) else value
