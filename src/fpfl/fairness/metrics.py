r"""How good a classifier is where classes are not equally frequent.

Accuracy is high for a model that always names the most frequent class. With n_k samples of class k,
p_k predictions of it and h_k hits among both (all by label, of N samples),

    balanced accuracy   mean_k h_k/n_k
    F1                  mean_k h_k/((n_k + p_k)/2);  of class 1 alone where there are two classes
    shares              n_k/N of the labels, p_k/N of the predictions; n_1/N is the base rate

over the classes with a denominator, as in scikit-learn. The area under the ROC curve (AUC) of a
class is the probability that one of its samples has a higher score than one of another class,

    A = Σ_{i in the class, j not} s_ij/(n_1 n_0),   s_ij = 1, ½ (a tie) or 0,

for two classes that of class 1, for more the mean over the classes, each against the rest.

All but the AUC are means of ratios ΣF/ΣD with 0 ≤ F ≤ D, and have the interval that the accuracy
has: a margin m from users drawn again, and an allowance for users whom nobody has seen,

    [v − max(m, mean_k q_k v_k),   v + max(m, mean_k q_k (1 − v_k))].

A draw in which one of the classes does not occur says nothing. To draw the users again for the AUC
one would have to rank all samples for each draw. Its margin is the limit of that instead (the
infinitesimal jackknife over users; DeLong et al. 1988, for clusters Obuchowski 1997): by how much A
moves with the weight of each user k,

    m = z √Σ_k ψ_k²,   ψ_k = W_k/(n_1 n_0) − A (n_1k/n_1 + n_0k/n_0),

where W_k is the sum of s_ij over all pairs that one of k's samples is in, counted once for each of
the two that is k's. If shares q_1 and q_0 of the people are unseen, A is within
[(1 − Q) A, A + Q (1 − A)], Q = 1 − (1 − q_1)(1 − q_0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fpfl.fairness.resampling import Floats, Ints, margins, quotient, unseen, users_behind


@dataclass(frozen=True)
class Estimate:
    """A value in [low, high]. What is not known is NaN; without a bootstrap the ends are."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        ends = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{ends}"


@dataclass(frozen=True)
class ClassMetrics:
    """What accuracy does not say: by this module's formulas.

    Parameters
    ----------
    balanced_accuracy, f1
        Means over the classes; F1 of class 1 where there are two.
    auc
        The area under the ROC curve; None where there were no scores, only hard predictions.
    labels, predicted
        The share of each class among the labels and among the predictions.
    class_names
        What the classes are called, where it is known.
    """

    balanced_accuracy: Estimate
    f1: Estimate
    auc: Estimate | None
    labels: tuple[Estimate, ...]
    predicted: tuple[Estimate, ...]
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        named = len(self.labels) if self.class_names is None else len(self.class_names)
        if not len(self.labels) == len(self.predicted) == named:
            raise ValueError(
                f"there are shares of {len(self.labels)} classes among the labels, of "
                f"{len(self.predicted)} among the predictions, and {named} names; expected one of "
                "each for every class"
            )

    @property
    def base_rate(self) -> Estimate | None:
        """The share of class 1 of two among the labels; None with more classes."""
        return self.labels[1] if len(self.labels) == 2 else None

    @property
    def unbalanced(self) -> bool:
        """Whether accuracy alone misleads: a class has less than half of its equal share.

        With two classes: the base rate is outside [0.25, 0.75].
        """
        return min(each.value for each in self.labels) < 1 / (2 * len(self.labels))

    def named(self, k: int) -> str:
        """A class as it is spoken of."""
        return f"class {k}" if self.class_names is None else f"'{self.class_names[k]}'"

    def lines(self) -> list[str]:
        """The figures in two lines, for people."""
        area = "" if self.auc is None else f", AUC {self.auc}"
        first = f"balanced accuracy {self.balanced_accuracy}, F1 {self.f1}{area}"
        k = 1
        if self.base_rate is None:
            k = min(range(len(self.labels)), key=lambda each: self.predicted[each].value)
        least = "" if k == 1 and self.base_rate is not None else ", predicted least"
        of = f"{self.labels[k].value:.3f} of labels, {self.predicted[k].value:.3f} of predictions"
        return [first, f"{self.named(k)}{least}: {of}"]


@dataclass(frozen=True)
class Sums:
    """Sums of a few columns over everybody, and over users drawn again.

    ``by_user`` has the distinct rows of users, ``alike`` how many there are of each; ``total`` has
    the columns' sums and ``drawn``, of shape (replicates, columns), those of the draws.
    """

    total: Floats
    by_user: Floats
    alike: Ints
    drawn: Floats

    def map(self, columns: Callable[[Floats], Floats]) -> Sums:
        """Other columns, made of these."""
        return Sums(columns(self.total), columns(self.by_user), self.alike, columns(self.drawn))


def class_metrics(
    sums: Sums, auc: Estimate | None, names: Sequence[str] | None, confidence: float
) -> ClassMetrics:
    """The figures of sums of 3C columns: n_k of all classes, then h_k, then p_k."""
    C = len(sums.total) // 3

    def share(column: int) -> Estimate:
        return _mean_of_ratios(
            sums, lambda c: (c[..., column, None], c[..., :C].sum(-1, keepdims=True)), confidence
        )

    def f1(c: Floats) -> tuple[Floats, Floats]:
        hits, both = c[..., C : 2 * C], (c[..., :C] + c[..., 2 * C :]) / 2
        return (hits[..., 1:], both[..., 1:]) if C == 2 else (hits, both)

    return ClassMetrics(
        balanced_accuracy=_mean_of_ratios(
            sums, lambda c: (c[..., C : 2 * C], c[..., :C]), confidence
        ),
        f1=_mean_of_ratios(sums, f1, confidence),
        auc=auc,
        labels=tuple(share(k) for k in range(C)),
        predicted=tuple(share(2 * C + k) for k in range(C)),
        class_names=None if names is None else tuple(names),
    )


def _mean_of_ratios(
    sums: Sums, ratio: Callable[[Floats], tuple[Floats, Floats]], confidence: float
) -> Estimate:
    """mean_k F_k/D_k over those with D_k > 0, where ``ratio`` makes F and D of the columns."""
    F, D = ratio(sums.total)
    there = D > 0
    v = quotient(F[there], D[there])
    if not len(v):
        return Estimate(math.nan, math.nan, math.nan)
    value = float(v.mean())
    if not len(sums.drawn):
        return Estimate(value, math.nan, math.nan)
    F, D = ratio(sums.drawn)
    drawn = quotient(F[:, there], D[:, there]).mean(axis=-1)
    drawn = drawn[np.isfinite(drawn)]
    m = float(margins(np.array(value), drawn[:, None], confidence)) if len(drawn) else 0.0
    u = users_behind(ratio(sums.by_user)[1][:, there], sums.alike)
    q = unseen(u, (1.0 - confidence) / (2 * len(v)))
    return _within(value, m, float((q * v).mean()), float((q * (1.0 - v)).mean()))


def area(
    scores: Floats, y: NDArray[np.int64], owner: Ints, classes: int, confidence: float | None
) -> Estimate:
    """The AUC of scores of shape (n,) for two classes, (n, classes) for more.

    ``owner`` is the number of each sample's user, 0 ... users − 1; without a ``confidence`` there
    is no interval. It is not known (NaN) where all samples are of one class.
    """
    ranked = [(scores, y == 1)] if classes == 2 else list(_against_the_rest(scores, y))
    known = [(s, ours) for s, ours in ranked if 0 < ours.sum() < len(ours)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan)
    areas, moves, allowed = [], np.zeros(int(owner.max()) + 1), []
    for s, ours in known:
        # All that follows is in units of pairs: n_1 n_0 of them are won at most.
        pairs = ours.sum() * float((~ours).sum())
        won = _won(s, ours)
        A = float(won[ours].sum() / pairs)
        areas.append(A)
        if confidence is None:
            continue
        n = np.stack([np.bincount(owner, each).astype(float) for each in (ours, ~ours)], axis=1)
        moves += np.bincount(owner, won) / pairs - A * (n / n.sum(axis=0)).sum(axis=1)
        u = users_behind(n, np.ones(len(n), dtype=np.int64))
        seen = 1.0 - unseen(u, (1.0 - confidence) / (4 * len(known)))
        allowed.append(1.0 - float(seen.prod()))
    value = float(np.mean(areas))
    if confidence is None:
        return Estimate(value, math.nan, math.nan)
    z = NormalDist().inv_cdf((1.0 + confidence) / 2)
    m = z * float(np.linalg.norm(moves / len(known)))
    a, Q = np.array(areas), np.array(allowed)
    return _within(value, m, float((Q * a).mean()), float((Q * (1.0 - a)).mean()))


def _against_the_rest(
    scores: Floats, y: NDArray[np.int64]
) -> list[tuple[Floats, NDArray[np.bool_]]]:
    return [(scores[:, k], y == k) for k in range(scores.shape[1])]


def _won(scores: Floats, ours: NDArray[np.bool_]) -> Floats:
    """Σ_j s_ij for samples i of the class, and Σ_i s_ij for the others: by ranks."""
    order = np.argsort(scores)
    ordered, hits = scores[order], ours[order]
    # As if nothing were tied: others before a sample, and ours after it.
    ones = np.cumsum(hits)
    below, above = np.arange(1, len(order) + 1) - ones, ones[-1] - ones
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if not starts.all():  # each of those that are tied is in the middle of them
        first = np.flatnonzero(starts)
        sizes = np.diff(first, append=len(order))
        last = first + sizes - 1
        before = np.where(first > 0, ones[first - 1], 0)
        zeros = (first - before) + (last + 1 - ones[last])
        below = np.repeat(zeros / 2, sizes)
        above = np.repeat(ones[-1] - (before + ones[last]) / 2, sizes)
    won = np.empty(len(order))
    won[order] = np.where(hits, below, above)
    return won


def _within(value: float, m: float, down: float, up: float) -> Estimate:
    return Estimate(value, max(value - max(m, down), 0.0), min(value + max(m, up), 1.0))
