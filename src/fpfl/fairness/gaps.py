r"""Gaps: how far groups are from the whole, with error bars.

The gap of a rate is the largest distance of a group's value from the overall one,

    gap = max_a |D_a|,   D_a = F(d')/n' − F(d'_a)/n'_a

(fairlearn: ``MetricFrame.difference(method="to_overall")``). A group without a sample in d' has
no value (NaN) and is left out of the gap.

The intervals are made for the *signed* D_a, because the bootstrap of a maximum of absolute values
is biased upwards and can never contain 0: a perfectly fair model would always look unfair. They
hold for all groups and rates of a gap at once, so the gap's own interval follows:

    low = max_a dist(0, I_a),   high = max_a max(|min I_a|, |max I_a|).

With v the group's value, m_a the margin that resampling the users shows, and q the share of users
that may have stayed unseen (:mod:`fpfl.fairness.bootstrap`),

    I_a = [D_a − max(m_a, r q (1 − v)),  D_a + max(m_a, r q v)],   r = 1 − n'_a/n',

for what moves v by x moves D_a by −r x: the group is itself a part of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fpfl.fairness._checks import check_attributes, check_samples, check_settings
from fpfl.fairness._text import describe, interval, jsonable, number, verdict_in_words
from fpfl.fairness.bootstrap import Floats, margins, unseen
from fpfl.fairness.constraints import By, Constraint
from fpfl.fairness.groups import Attribute, groups_by
from fpfl.fairness.measure import Measured, Metric, measure, members_of, metrics_of

Verdict = Literal["within", "outside", "cannot tell"]


@dataclass(frozen=True)
class Difference:
    """One group against the whole, in one rate: D_a = overall − value, in [low, high].

    ``count`` is n'_a. What is not known is NaN.
    """

    rate: str
    group: str
    overall: float
    value: float
    count: int
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class GapEstimate:
    """A gap and its interval.

    Parameters
    ----------
    name
        ``"fnr"``, ``"eo"``, ``"demp"``, ``"pp"``, ``"accuracy"``, ...
    value
        max |D_a| over the rates and groups of ``differences``; NaN where no group has a value.
    low, high
        Its interval, from the simultaneous intervals of the differences. NaN without a bootstrap.
    differences
        Every rate × group, the worst of them being the one that ``value`` comes from.
    """

    name: str
    value: float
    low: float
    high: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> Difference | None:
        """The difference that makes the gap; None where no group has a value."""
        known = [d for d in self.differences if not math.isnan(d.difference)]
        return max(known, key=lambda d: abs(d.difference)) if known else None

    @property
    def worst_group(self) -> str | None:
        """The name of the group that is furthest from the whole."""
        return None if self.worst is None else self.worst.group

    @property
    def unknown_groups(self) -> tuple[str, ...]:
        """The groups that some rate says nothing about, since they have no sample for it."""
        return tuple(dict.fromkeys(d.group for d in self.differences if d.count == 0))

    @property
    def overall(self) -> dict[str, float]:
        """F(d')/n': ``{rate: value}``."""
        return {d.rate: d.overall for d in self.differences}

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """F(d'_a)/n'_a: ``{rate: {group: value}}``."""
        return {
            r: {d.group: d.value for d in self.differences if d.rate == r} for r in self.overall
        }

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """n'_a: ``{rate: {group: samples}}``."""
        return {
            r: {d.group: d.count for d in self.differences if d.rate == r} for r in self.overall
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        plain: dict[str, Any] = jsonable({**asdict(self), "worst_group": self.worst_group})
        return plain

    def __str__(self) -> str:
        where = "" if self.worst is None else f", the worst being {self.worst_group}"
        return f"{self.name} gap {number(self.value)} {interval(self.low, self.high)}{where}"


@dataclass(frozen=True)
class Evaluation:
    """What a model's predictions are worth: how good, and how even between groups.

    Parameters
    ----------
    samples, users
        How many were evaluated.
    accuracy, accuracy_interval
        P[Ŷ = Y] and its interval; None for a regression.
    error, error_interval
        The mean absolute error as a fraction of the label range; None for classes.
    rates
        ``{metric: {"overall": value, group: value, ...}}``, NaN where there is no sample.
    gaps
        By name. The constraint's own is ``gaps["constraint"]``.
    constraint, tolerance
        The constraint's name and α, where one was given.
    verdict
        ``"outside"`` where the low end of the constraint's gap is above α, ``"within"`` where its
        high end is at most α and every group has a sample for every rate (silence is not
        fairness), otherwise ``"cannot tell"``.
    confidence, bootstrap
        Of the intervals, and the number of replicates they are made of.
    """

    samples: int
    users: int
    accuracy: float | None
    accuracy_interval: tuple[float, float] | None
    error: float | None
    error_interval: tuple[float, float] | None
    rates: dict[str, dict[str, float]]
    gaps: dict[str, GapEstimate]
    constraint: str | None
    tolerance: float | None
    verdict: Verdict | None
    confidence: float
    bootstrap: int

    @property
    def verdict_in_words(self) -> str | None:
        """The verdict as a sentence; None without a constraint."""
        return None if self.verdict is None else verdict_in_words(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        gaps = {name: gap.as_dict() for name, gap in self.gaps.items()}
        words = {"gaps": gaps, "verdict_in_words": self.verdict_in_words}
        plain: dict[str, Any] = jsonable({**vars(self), **words})
        return plain

    def __str__(self) -> str:
        return describe(self)


def evaluate_predictions(
    predictions: Tensor,
    labels: Tensor,
    attributes: Tensor,
    declared: Sequence[Attribute],
    *,
    classes: int | None = 2,
    label_range: tuple[float, float] | None = None,
    users: Tensor | None = None,
    by: Sequence[By] | None = None,
    constraint: Constraint | None = None,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Evaluation:
    """Measure predictions: how good they are, and the gaps between groups, with intervals.

    Parameters
    ----------
    predictions
        Shape (n,): hard classes, or real numbers for a regression, within ``label_range``.
    labels
        Shape (n,), of the same kind.
    attributes
        Shape (n, number of declared attributes): codes, -1 where unknown.
    declared
        The declared attributes. Without any there are overall values only, and no gaps.
    classes
        The number of classes; None for a regression.
    label_range
        For a regression: the declared (low, high), of which errors are fractions.
    users
        Shape (n,): the number of every sample's user. Without it every sample is a user. Users
        without samples change no rate and need not be known.
    by
        What to group by, as in :func:`~fpfl.fairness.groups_by`: every declared attribute on its
        own when it is not given.
    constraint
        Its gap, on its own rates and groups, becomes ``gaps["constraint"]`` and the verdict.
    bootstrap
        The number of replicates; 0 leaves the intervals out, and the verdict is "cannot tell".
    confidence
        That each gap's interval contains the true gap, each gap by itself.
    seed
        Of the resampling.

    Notes
    -----
    Two classes have the gaps of the paper's tables: ``fnr``, ``eo`` (equalised odds: the larger of
    the FNR and FPR gaps), ``demp`` (selection rate), ``pp`` (precision P[Y = 1 | Ŷ = 1]) and
    ``accuracy``; more classes have ``accuracy`` and ``recall[k]`` for each class; a regression has
    ``squared error``, ``absolute error`` and ``mean prediction``.
    """
    check_settings(classes, label_range, constraint, bootstrap, confidence)
    p, y, a = (values.detach().cpu() for values in (predictions, labels, attributes))
    check_samples(p, y, users, classes)
    check_attributes(a, declared, len(y))
    p, y = (p.double(), y.double()) if classes is None else (p.long(), y.long())
    numbers = torch.arange(len(y)) if users is None else users.detach().cpu().long()
    owner = numbers.unique(return_inverse=True)[1]

    metrics, rates_of = metrics_of(classes, label_range)
    shown = groups_by(declared, by) if declared or by is not None else None
    bound = None if constraint is None else constraint.bind(declared)
    own = [] if constraint is None else [Metric.of(rate) for rate in constraint.rates]
    members = members_of(a, shown, bound)
    measured = measure([*metrics, *own], members, p, y, owner, bootstrap, seed)

    main = measured.part(slice(0, len(metrics)), shown)
    gaps = {} if shown is None else {n: _gap(n, main, r, confidence) for n, r in rates_of.items()}
    verdict: Verdict | None = None
    if constraint is not None:
        constrained = measured.part(slice(len(metrics), None), bound)
        gaps["constraint"] = _gap("constraint", constrained, constrained.metrics, confidence)
        verdict = _verdict(gaps["constraint"], constraint.tolerance)
    score, ends = _overall(main, "absolute error" if classes is None else "accuracy", confidence)
    return Evaluation(
        samples=len(y),
        users=int(owner.max()) + 1,
        accuracy=None if classes is None else score,
        accuracy_interval=None if classes is None else ends,
        error=score if classes is None else None,
        error_interval=ends if classes is None else None,
        rates=main.as_dict(),
        gaps=gaps,
        constraint=None if constraint is None else constraint.name,
        tolerance=None if constraint is None else constraint.tolerance,
        verdict=verdict,
        confidence=confidence,
        bootstrap=bootstrap,
    )


def _gap(name: str, measured: Measured, rates: Sequence[str], confidence: float) -> GapEstimate:
    """The largest difference over some of the metrics and all groups: see the module's formulas."""
    rows = [measured.metrics.index(rate) for rate in rates]
    overall, v = measured.values[rows, :1], measured.values[rows, 1:]
    drawn = measured.replicates[:, rows]
    D = overall - v
    m = margins(D, drawn[..., :1] - drawn[..., 1:], confidence)
    tail = (1.0 - confidence) / (2 * max(1, int(np.isfinite(D).sum())))
    n = measured.counts[rows]
    r = 1.0 - n[:, 1:] / np.maximum(n[:, :1], 1.0)
    q = unseen(measured.users[rows, 1:], tail)
    low = np.maximum(D - np.maximum(m, r * q * (1.0 - v)), -1.0)
    high = np.minimum(D + np.maximum(m, r * q * v), 1.0)
    return GapEstimate(
        name,
        value=_largest(np.abs(D)),
        low=_largest(np.maximum(np.maximum(low, -high), 0.0)),
        high=_largest(np.maximum(-low, high)),
        differences=tuple(
            Difference(
                rate,
                group.name,
                overall=float(overall[i, 0]),
                value=float(v[i, j]),
                count=int(n[i, 1 + j]),
                difference=float(D[i, j]),
                low=float(low[i, j]),
                high=float(high[i, j]),
            )
            for i, rate in enumerate(rates)
            for j, group in enumerate(measured.groups)
        ),
    )


def _overall(measured: Measured, name: str, confidence: float) -> tuple[float, tuple[float, float]]:
    """The overall value v of a metric, in [v − max(m, q v), v + max(m, q (1 − v))]."""
    row = measured.metrics.index(name)
    v = measured.values[row, :1]
    m = margins(v, measured.replicates[:, row, :1], confidence)
    q = unseen(measured.users[row, :1], (1.0 - confidence) / 2)
    low = np.maximum(v - np.maximum(m, q * v), 0.0)
    high = np.minimum(v + np.maximum(m, q * (1.0 - v)), 1.0)
    return float(v[0]), (float(low[0]), float(high[0]))


def _largest(values: Floats) -> float:
    return float(np.fmax.reduce(values, axis=None, initial=math.nan))


def _verdict(gap: GapEstimate, tolerance: float) -> Verdict:
    if gap.low > tolerance:
        return "outside"
    # Silence is not fairness: a group that no sample speaks for may be treated in any way.
    return "within" if gap.high <= tolerance and not gap.unknown_groups else "cannot tell"
