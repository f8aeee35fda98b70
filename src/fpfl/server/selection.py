"""Model selection: which of the trained models is kept.

The totals of round t measured w_{t−1}, the model that was broadcast; so that is the model which
their accuracy and gap speak for, and which the paper's rule keeps. Selection reads released totals
only, hence it costs no privacy beyond the counts in v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from fpfl.fairness.totals import Counts

Rule = Literal["best", "last", "average"]
"""``best``: the best released accuracy among rounds whose totals meet the tolerance (the paper's).
``last``: w_T. ``average``: the mean of the second half of the iterates."""


@dataclass(frozen=True)
class Candidate:
    """A model, the (first, last) rounds that measured it, and what they released about it."""

    w: Tensor
    rounds: tuple[int, int]
    accuracy: float
    gap: float
    fair: bool


@dataclass(frozen=True)
class Selection:
    """What selection remembers between rounds; ``observe`` returns the next state.

    Parameters
    ----------
    rule, rounds, tolerance
        How to select, T and α.
    window
        With ``best``: judge by the counts of so many rounds together, and keep the mean of the
        models that they measured. One cohort's rates are noisy (with 15 positive women an FNR has
        a standard error of 0.13), and the best of many noisy rounds is mostly noise. 1 is
        the paper's rule.
    """

    rule: Rule
    rounds: int
    tolerance: float = 0.0
    window: int = 1
    recent: tuple[tuple[Tensor, Counts], ...] = ()
    best: Candidate | None = None
    mean: Tensor | None = None
    averaged: int = 0

    def observe(self, t: int, measured: Tensor, counts: Counts, after: Tensor) -> Selection:
        """Take in round t: what it counted about w_{t−1}, and the model w_t it led to."""
        if self.rule == "best":
            # The counts alone: what else a round released is as long as v.
            recent = (*self.recent, (measured, counts.alone()))[-self.window :]
            if len(recent) < min(self.window, self.rounds):
                return replace(self, recent=recent)  # a shorter window would be a luckier one
            models = torch.stack([w for w, _ in recent])
            seen = reduce(add, (counted for _, counted in recent))
            new = Candidate(
                models.mean(dim=0) if len(recent) > 1 else measured,
                (t - len(recent) + 1, t),
                float(seen.accuracy()),
                float(seen.gap()),
                bool(seen.fair(self.tolerance)),
            )
            better = self.best is None or _better(new, self.best)
            return replace(self, recent=recent, best=new if better else self.best)
        if self.rule == "average" and t > self.rounds // 2:
            count = self.averaged + 1
            mean = after if self.mean is None else self.mean + (after - self.mean) / count
            return replace(self, mean=mean, averaged=count)
        return self

    def under(self, new: Selection, done: int) -> Selection:
        """What is remembered after ``done`` rounds, for a run that goes on with a new rule or T."""
        if (self.rule, self.tolerance, self.window) != (new.rule, new.tolerance, new.window):
            return new
        # A mean that began before the second half of the new T begins anew.
        early = self.mean is not None and done - self.averaged < new.rounds // 2
        if early and new.rounds != self.rounds:
            return new
        return replace(self, rounds=new.rounds)

    def choose(self, last: Tensor, rounds_done: int) -> tuple[Tensor, str]:
        """Return the selected parameters and, in words, which model they are."""
        if self.rule == "best" and self.best is not None:
            first, final = self.best.rounds
            what = f"measured in round {final}"
            if first != final:
                what = f"rounds {first} to {final} together; the mean of the models they measured"
            how = "" if self.best.fair else "; none met the tolerance, this came nearest"
            return self.best.w, f"best cohort accuracy, {what}{how}"
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
