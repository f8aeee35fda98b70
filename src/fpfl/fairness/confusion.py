r"""A model judged while it trains: by the confusion tables that rounds release, added up.

T_{ij} samples of class i were taken for class j in the last W rounds, each number with noise of
variance W s². With L_k = Σ_j T_{kj}, P_k = Σ_i T_{ik} and N = ΣT, a model has collapsed
(`fpfl.fairness.collapse`) where for some class k

    P_k − N/100 < 0  and  P_k − L_k/4 < 0,    or    mean_k T_{kk}/L_k ≤ 1/C + 0.02.

A round's table is noisy, and of one cohort. So it is said only where it is clear: each of these
must lie z standard deviations beyond 0. A linear form Σ c_{ij} T_{ij} has the variance

    W s² Σ c²_{ij} + b Σ c²_{ij} E T_{ij}

at most, where a user counts b samples at most and Poisson cohorts are drawn (Cauchy-Schwarz; where
nobody is clipped, b is how many the largest user has). For the two of P_k it is taken at the edge,
P_k = N/100 and P_k = L_k/4. A recall T_{kk}/L_k is linear in T nearby, and L_k must be 5 of its own
deviations large.

The windows are the last 1, 2, 4, ... rounds. What the shortest of them that can tell says, holds.
With z = Φ⁻¹(1 − 1%/(T J (C + 1))), for T rounds, J windows and C + 1 conditions, a run whose models
have not collapsed is called collapsed in one of its rounds with probability 1% at most: the
false-alarm rate. "Not collapsed" is said where all of it is clear the other way, wrongly in 1% of
the rounds at most; in between one cannot tell. All of it follows from released totals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from fpfl.fairness.collapse import ABOVE_CHANCE, LEAST, QUARTER, collapse_in_words
from fpfl.fairness.metrics import ClassMetrics, Estimate
from fpfl.fairness.resampling import Floats

FALSE_ALARMS = 0.01
"""The probability that a run which never collapses is ever called collapsed, at most."""

CLEAR = 5.0
"""So many of its standard deviations a class's count must be large, for its recall to be known."""


@dataclass(frozen=True)
class Released:
    """What is public about the tables that a run's rounds release.

    Parameters
    ----------
    classes, rounds
        C and T.
    noise
        s: the noise's standard deviation on every number of a round's table.
    most
        b: how many samples of a user a table counts at most.
    """

    classes: int
    rounds: int
    noise: float = 0.0
    most: float = 1.0

    def z(self, looks: int) -> float:
        """How many deviations are clear, where a run is looked at so often."""
        windows = self.rounds.bit_length()
        return NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (looks * windows * (self.classes + 1)))

    @cached_property
    def alarm(self) -> float:
        """z for "collapsed"."""
        return self.z(self.rounds)

    @cached_property
    def sound(self) -> float:
        """z for "not collapsed"."""
        return self.z(1)


class Tables:
    """The tables of a run's rounds so far, added up: what each round's row says of balance.

    Parameters
    ----------
    known
        What is public about them.
    history
        The rows of rounds that have been run already.
    """

    def __init__(self, known: Released, history: Sequence[Mapping[str, Any]] = ()) -> None:
        self.known = known
        # The sum of the first t tables: a window's sum is the difference of two of them.
        self._sums = np.zeros((known.rounds + 1, known.classes, known.classes))
        self._done = 0
        for row in history:
            self.take(row.get("confusion"))

    def take(self, table: Sequence[Sequence[float | None]] | None) -> None:
        """Take in a round's table; one that is not known begins anew."""
        numbers = None if table is None else np.array(table, dtype=float)
        if numbers is None or not np.isfinite(numbers).all():
            self._done = 0
            return
        if self._done + 1 == len(self._sums):  # a run that goes on for more rounds
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)])
        self._sums[self._done + 1] = self._sums[self._done] + numbers
        self._done += 1

    def balance(self) -> dict[str, Any] | None:
        """The figures of the window that tells most, as plain values; None without a table.

        ``rounds`` (how many it has), ``accuracy``, ``balanced_accuracy``, ``f1``, the shares of
        classes among ``labels`` and ``predicted``, and whether the model has ``collapsed``: True,
        False, or None where one cannot tell.
        """
        if not self._done:
            return None
        widths = 2 ** np.arange(self._done.bit_length())
        tables = self._sums[self._done] - self._sums[self._done - widths]
        told = judged(tables, widths.astype(float), self.known)
        which = next((i for i, said in enumerate(told) if said is not None), len(told) - 1)
        metrics, accuracy = table_metrics(tables[which])
        return {
            "rounds": int(widths[which]),
            "accuracy": _known(accuracy),
            "balanced_accuracy": _known(metrics.balanced_accuracy.value),
            "f1": _known(metrics.f1.value),
            "labels": [_known(each.value) for each in metrics.labels],
            "predicted": [_known(each.value) for each in metrics.predicted],
            "collapsed": told[which],
        }


def judged(tables: Floats, widths: Floats, known: Released) -> list[bool | None]:
    """Whether models have collapsed, by tables (J, C, C) of so many rounds each; see the module."""
    with np.errstate(invalid="ignore", divide="ignore"):  # where there are no samples
        return _judged(tables, widths, known)


def _judged(tables: Floats, widths: Floats, known: Released) -> list[bool | None]:
    C, b = known.classes, known.most
    noise = widths * known.noise**2  # the variance of every number
    N, L, P = tables.sum((1, 2)), tables.sum(2), tables.sum(1)
    right = np.diagonal(tables, axis1=1, axis2=2)
    there = (L != 0.0) | (noise > 0.0)[:, None]  # without noise a class may be known to be absent
    several = there.sum(1) > 1

    # Hardly ever predicted: P_k − N/100 and P_k − L_k/4, and their deviations.
    column, rest = (1.0 - LEAST) ** 2, LEAST**2
    few = P - LEAST * N[:, None]
    rare = P - QUARTER * L
    few_noise = (noise * (C * column + C * (C - 1) * rest))[:, None]
    own = (1.0 - QUARTER) ** 2 + (C - 1) * (1.0 + QUARTER**2)
    rare_noise = (noise * own)[:, None]
    total, labels, predicted = (np.maximum(each, 0.0) for each in (N, L, P))
    few_edge = np.sqrt(few_noise + b * LEAST * (1.0 - LEAST) * total[:, None])
    rare_edge = np.sqrt(rare_noise + b * (QUARTER + QUARTER**2) * labels)
    missed = (few < -known.alarm * few_edge) & (rare < -known.alarm * rare_edge) & there
    few_now = np.sqrt(few_noise + b * (column * predicted + rest * total[:, None]))
    rare_now = np.sqrt(rare_noise + b * (predicted + QUARTER**2 * labels))
    found = (few > known.sound * few_now) | (rare > known.sound * rare_now)

    # The balanced accuracy, and its deviation.
    enough = CLEAR * np.sqrt(noise[:, None] * C + b * labels) < L
    n = np.where(enough, L, 1.0)
    r = right / n
    kept = r.clip(0.0, 1.0)

    def deviation(z: float) -> Floats:
        # A share near 0 or 1 is not known to be that (Agresti and Coull 1998).
        near = (kept * n + b * z**2 / 2) / (n + b * z**2)
        of_noise = noise[:, None] * ((1.0 - kept) ** 2 + (C - 1) * kept**2) / n**2
        variance = np.where(there, of_noise + b * near * (1.0 - near) / n, 0.0).sum(1)
        return np.asarray(np.sqrt(variance) / there.sum(1))

    known_recalls = (enough | ~there).all(1) & several
    above = [
        np.where(there, each, 0.0).sum(1) / there.sum(1) - 1.0 / there.sum(1) - ABOVE_CHANCE
        for each in (kept, r)
    ]
    by_chance = known_recalls & (above[0] < -known.alarm * deviation(known.alarm))
    better = known_recalls & (np.minimum(*above) > known.sound * deviation(known.sound))

    collapsed = several & (missed.any(1) | by_chance)
    sound = several & (found | ~there).all(1) & better
    return [True if c else False if s else None for c, s in zip(collapsed, sound, strict=True)]


def table_metrics(table: Floats, names: Sequence[str] | None = None) -> tuple[ClassMetrics, float]:
    """The figures of a confusion table, without intervals, and its accuracy.

    Noise may leave a count below 0: shares and recalls are kept in [0, 1].
    """
    N, L, P, right = table.sum(), table.sum(1), table.sum(0), np.diagonal(table)

    def share(part: float, whole: float) -> float:
        return min(max(part / whole, 0.0), 1.0) if whole > 0.0 else math.nan

    recalls = [share(h, n) for h, n in zip(right, L, strict=True)]
    each_f1 = [share(h, (n + p) / 2) for h, n, p in zip(right, L, P, strict=True)]
    metrics = ClassMetrics(
        balanced_accuracy=_mean(recalls),
        f1=_mean(each_f1[1:] if len(each_f1) == 2 else each_f1),
        auc=None,
        labels=tuple(_exactly(share(n, N)) for n in L),
        predicted=tuple(_exactly(share(p, N)) for p in P),
        class_names=None if names is None else tuple(names),
    )
    return metrics, share(float(right.sum()), N)


def balance_of(row: Mapping[str, Any], names: Sequence[str] | None = None) -> ClassMetrics | None:
    """The figures of a row of the history; None where it has none."""
    found = row.get("balance")
    if not found:
        return None
    balanced, f1 = (_exactly(_number(found[name])) for name in ("balanced_accuracy", "f1"))
    labels, predicted = (
        tuple(_exactly(_number(each)) for each in found[name]) for name in ("labels", "predicted")
    )
    return ClassMetrics(
        balanced, f1, None, labels, predicted, None if names is None else tuple(names)
    )


def collapsed_in_training(row: Mapping[str, Any], names: Sequence[str] | None = None) -> str | None:
    """How the models of the rounds up to a row's have collapsed, in words; None if not clearly."""
    found, metrics = row.get("balance"), balance_of(row, names)
    if metrics is None or not found or found["collapsed"] is not True:
        return None
    said = collapse_in_words(metrics, found["accuracy"])
    what = f"by the totals released in {_rounds(row)}"
    return f"{what} {said}" if said else f"{what} the model tells the classes apart by chance alone"


def training_verdict(
    history: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
) -> str | None:
    """What the last row says of collapse, in a sentence; None where rows say nothing of it.

    Not to know is said, too: silence would read as "not collapsed".
    """
    row = history[-1] if history else {}
    found = row.get("balance")
    if not found:
        return None
    rate = f"(false alarms: at most {FALSE_ALARMS:.0%} of runs)"
    said = collapsed_in_training(row, names)
    if said is not None:
        return f"Collapsed while training: {said} {rate}."
    if found["collapsed"] is False:
        balanced = _number(found["balanced_accuracy"])
        return (
            f"Not collapsed while training, by the totals released in {_rounds(row)}: balanced "
            f"accuracy {balanced:.3f}."
        )
    return (
        "Whether the model collapsed while training one cannot tell: the totals released in "
        f"{_rounds(row)} are too few, or too noisy, to see a class that is not predicted. Larger "
        "cohorts, more rounds or more ε would tell."
    )


def _rounds(row: Mapping[str, Any]) -> str:
    last, window = int(row["round"]), int(row["balance"]["rounds"])
    return f"round {last}" if window == 1 else f"rounds {last - window + 1} to {last}"


def _mean(values: Sequence[float]) -> Estimate:
    known = [value for value in values if not math.isnan(value)]
    return _exactly(sum(known) / len(known) if known else math.nan)


def _exactly(value: float) -> Estimate:
    return Estimate(value, math.nan, math.nan)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
