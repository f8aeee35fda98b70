r"""Gaps: how far groups are from the whole, with error bars.

The gap of a rate is the largest distance of a group's value from the overall one,

    gap = max_a |D_a|,   D_a = F(d')/n' − F(d'_a)/n'_a

(fairlearn: ``MetricFrame.difference(method="to_overall")``). A group without a sample in d' has
no value (NaN) and is left out of the gap.

Error bars. Users are resampled, not samples: the samples of one user are not independent. The
intervals are made for the *signed* D_a, because the bootstrap of a maximum of absolute values is
biased upwards and can never contain 0: a perfectly fair model would always look unfair. They hold
for all groups and rates of a gap at once (Bonferroni), so the gap's own interval follows:

    low = max_a dist(0, I_a),   high = max_a max(|min I_a|, |max I_a|).

Each I_a covers two things that can go wrong, with t = (1 − confidence)/(2 · comparisons):

- what resampling shows: the percentiles t and 1 − t of the replicates of D_a;
- what it cannot show: resampling never invents an error that nobody in the group made, and three
  samples that agree would make an interval of width 0. Among u users seen, others that make up a
  share q of the group stay unseen with probability (1 − q)^u = t, and they may be wrong (or right)
  about everything. They move the group's value v to anywhere in [v − q v, v + q (1 − v)], and
  D_a by 1 − n'_a/n' of that. No interval that makes no assumptions can be narrower than this. It is
  of the order 1/u ("rule of three") and matters only for small groups and rare errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.fairness import rates as _rates
from fpfl.fairness.constraints import By, Constraint
from fpfl.fairness.groups import UNKNOWN, Attribute, Groups, groups_by
from fpfl.fairness.rates import Rate

Verdict = Literal["within", "outside", "cannot tell"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

_NAN = float("nan")
_TAIL = 5
"""Replicates beyond a percentile that make it worth reading."""
_FEWEST = 20
"""Replicates below which no percentile is worth reading."""
_DRAWS = 2**20
"""How many counts of draws are held at once: 8 MiB, whatever the number of users."""
_SHOWN = 12
"""Gaps that are printed; a task of many classes has many."""


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
        plain: dict[str, Any] = _jsonable({**asdict(self), "worst_group": self.worst_group})
        return plain

    def __str__(self) -> str:
        where = "" if self.worst is None else f", the worst being {self.worst_group}"
        return f"{self.name} gap {_number(self.value)} {_interval(self.low, self.high)}{where}"


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
        ``"within"`` where the whole interval of the constraint's gap is at most α, ``"outside"``
        where its low end is above α, otherwise ``"cannot tell"``.
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
        if self.verdict is None:
            return None
        gap = self.gaps["constraint"]
        alpha = f"α = {self.tolerance:g}"
        if self.verdict != "cannot tell":
            words = f"{self.verdict} {alpha} at {100 * self.confidence:.4g}%"
        elif math.isnan(gap.value):
            words = "cannot tell: no group has a sample that counts"
        elif not self.bootstrap:
            words = f"cannot tell: the gap {_number(gap.value)} has no interval (bootstrap = 0)"
        else:
            words = (
                f"cannot tell: {alpha} lies in the interval {_interval(gap.low, gap.high)}; "
                "more users would narrow it"
            )
        if gap.unknown_groups:
            words += f" (not judged, having no sample: {', '.join(gap.unknown_groups)})"
        return words

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        plain = {name: value for name, value in vars(self).items() if name != "gaps"}
        plain["gaps"] = {name: gap.as_dict() for name, gap in self.gaps.items()}
        plain["verdict_in_words"] = self.verdict_in_words
        clean: dict[str, Any] = _jsonable(plain)
        return clean

    def __str__(self) -> str:
        return _describe(self)


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
        A percentile needs replicates beyond it: with G comparisons (rates × groups) at
        confidence 0.95 each end has ``bootstrap * 0.025 / G`` of them, 12 for two groups and
        1,000 replicates. Where they are fewer than five, the fifth from the end is read and
        stretched as a normal tail would be.
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
    _check_settings(classes, label_range, bootstrap, confidence, constraint)
    p, y, a = (values.detach().cpu() for values in (predictions, labels, attributes))
    _check_samples(p, y, a, declared, classes)
    metrics, names = _metrics(classes, label_range)
    groups = groups_by(declared, by) if declared or by is not None else None
    tables = [_Table(metrics, groups)]
    if constraint is not None:
        own = tuple(_metric(rate) for rate in constraint.rates)
        tables.append(_Table(own, constraint.bind(declared)))

    if classes is None:
        p, y = p.double(), y.double()
        kind = first = np.arange(len(y))
    else:
        p, y = p.long(), y.long()
        kind, first = _kinds(p, y, a, classes, declared)
    seen = torch.from_numpy(first)
    columns = np.hstack([table.columns(p[seen], y[seen], a[seen]) for table in tables])
    rows, copies = _users(columns, kind, _owners(users, len(y)))
    replicates = _replicates(rows, copies, bootstrap, np.random.default_rng(seed))
    measured = _measure(tables, rows, copies, replicates, confidence)

    main = measured[0]
    gaps = {} if groups is None else {n: main.gap(n, rates) for n, rates in names.items()}
    verdict: Verdict | None = None
    if constraint is not None:
        gap = measured[1].gap("constraint", [rate.name for rate in constraint.rates])
        gaps["constraint"] = gap
        verdict = _verdict(gap, constraint.tolerance)
    score, interval = main.overall("accuracy" if classes is not None else "absolute error")
    return Evaluation(
        samples=len(y),
        users=int(copies.sum()),
        accuracy=score if classes is not None else None,
        accuracy_interval=interval if classes is not None else None,
        error=score if classes is None else None,
        error_interval=interval if classes is None else None,
        rates=main.rates(),
        gaps=gaps,
        constraint=None if constraint is None else constraint.name,
        tolerance=None if constraint is None else constraint.tolerance,
        verdict=verdict,
        confidence=confidence,
        bootstrap=bootstrap,
    )


# What is measured: metrics × groups, as columns of numerators and denominators


@dataclass(frozen=True)
class _Metric:
    """A rate that may also condition on the prediction, as precision does."""

    name: str
    condition: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]


def _metric(rate: Rate) -> _Metric:
    return _Metric(rate.name, lambda p, y: rate.condition(y), rate.evaluate)


def _metrics(
    classes: int | None, label_range: tuple[float, float] | None
) -> tuple[tuple[_Metric, ...], dict[str, list[str]]]:
    """Make the metrics of a task, and say which of them each gap is the largest of."""
    if classes is None:
        assert label_range is not None  # checked by the caller
        makers = (_rates.squared_error, _rates.absolute_error, _rates.mean_prediction)
        found = tuple(_metric(make(label_range)) for make in makers)
        return found, {metric.name: [metric.name] for metric in found}
    if classes > 2:
        recalls = (_rates.class_recall(label) for label in range(classes))
        found = tuple(_metric(rate) for rate in (_rates.accuracy(), *recalls))
        return found, {metric.name: [metric.name] for metric in found}
    precision = _Metric("precision", lambda p, y: p == 1, lambda p, y: (y == 1).float())
    two = (
        _rates.accuracy(),
        _rates.false_negative_rate(),
        _rates.false_positive_rate(),
        _rates.selection_rate(),
    )
    return (*(_metric(rate) for rate in two), precision), {
        "fnr": ["FNR"],
        "eo": ["FNR", "FPR"],
        "demp": ["selection rate"],
        "pp": ["precision"],
        "accuracy": ["accuracy"],
    }


@dataclass(frozen=True)
class _Table:
    """R metrics × (everybody, then G groups)."""

    metrics: tuple[_Metric, ...]
    groups: Groups | None

    @property
    def group_names(self) -> tuple[str, ...]:
        return () if self.groups is None else self.groups.names

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numerators and denominators × metrics × (everybody and groups)."""
        return 2, len(self.metrics), 1 + len(self.group_names)

    def columns(self, p: Tensor, y: Tensor, a: Tensor) -> _Floats:
        """Give what each sample adds to every numerator F and denominator n', flattened."""
        counted = torch.stack([m.condition(p, y) for m in self.metrics], dim=-1).double()
        value = torch.stack([m.value(p, y).double() for m in self.metrics], dim=-1)
        member = torch.ones((len(y), 1), dtype=torch.float64)
        if self.groups is not None:
            member = torch.cat([member, self.groups.membership(a).double()], dim=-1)
        both = torch.stack([counted * value, counted], dim=1)
        each = both.unsqueeze(-1) * member[:, None, None, :]
        columns: _Floats = each.reshape(len(y), -1).numpy()
        return columns


def _kinds(
    p: Tensor, y: Tensor, a: Tensor, classes: int, declared: Sequence[Attribute]
) -> tuple[_Ints, _Ints]:
    """Which samples are alike in all that counts: each one's kind, and a sample of each kind."""
    code = (y * classes + p).numpy()
    span = classes * classes
    for column, attribute in enumerate(declared):
        size = len(attribute.values) + 1
        if span * size > 2**62:  # the code would not fit: number the kinds seen so far
            code = np.unique(code, return_inverse=True)[1]
            span = len(code)
        code = code * size + (a[:, column].long().numpy() - UNKNOWN)
        span *= size
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    return kind, first


# The bootstrap over users


def _owners(users: Tensor | None, n: int) -> _Ints | None:
    if users is None:
        return None
    if users.shape != (n,) or users.is_floating_point() or users.is_complex():
        raise ValueError(
            f"users is {users.dtype} of shape {tuple(users.shape)}; expected whole numbers of "
            f"shape ({n},), one for each sample: number the users first"
        )
    owner: _Ints = np.unique(users.detach().cpu().numpy(), return_inverse=True)[1]
    return owner


def _users(columns: _Floats, kind: _Ints, owner: _Ints | None) -> tuple[_Floats, _Ints]:
    """Sum each distinct user's samples in every column, and count the users that are alike.

    ``columns`` has a row for each kind of sample. Two users are alike who have equally many
    samples of every kind.
    """
    if owner is None:
        return columns, np.bincount(kind, minlength=len(columns))
    # A user's fingerprint is the sum (modulo 2⁶⁴) of random numbers, one for each kind. That two
    # of K unlike users share one has probability K²/2⁶⁵: 3e-8 for a million.
    numbers = np.random.default_rng(0).integers(0, 2**64, size=len(columns), dtype=np.uint64)
    fingerprints = np.zeros(int(owner.max()) + 1, dtype=np.uint64)
    np.add.at(fingerprints, owner, numbers[kind])
    _, first, copies = np.unique(fingerprints, return_index=True, return_counts=True)
    place = np.full(len(fingerprints), -1)
    place[first] = np.arange(len(first))
    kept = place[owner] >= 0
    place, kind = place[owner[kept]], kind[kept]
    sums = [np.bincount(place, column[kind], minlength=len(first)) for column in columns.T]
    return np.stack(sums, axis=1), copies


def _replicates(rows: _Floats, copies: _Ints, bootstrap: int, rng: np.random.Generator) -> _Floats:
    """Totals of ``bootstrap`` draws of K users with replacement, one row for each draw.

    How often K draws with replacement hit each *distinct* user is multinomial with the
    probabilities copies/K. So that is drawn, which is the user bootstrap itself and no
    approximation, and far cheaper where users are alike.
    """
    population, distinct = int(copies.sum()), len(rows)
    which = np.repeat(np.arange(distinct), copies)

    def times(size: int) -> NDArray[Any]:
        # A multinomial costs ten times as much a distinct user as a plain draw costs a user.
        if 10 * distinct < population:
            return rng.multinomial(population, copies / population, size=size)
        draws = (which[rng.integers(0, population, size=population)] for _ in range(size))
        return np.stack([np.bincount(drawn, minlength=distinct) for drawn in draws])

    found = np.empty((bootstrap, rows.shape[1]))
    step = max(1, _DRAWS // distinct)
    for start in range(0, bootstrap, step):
        part = found[start : start + step]
        part[:] = times(len(part)).astype(np.float64) @ rows
    return found


# From totals to intervals


@dataclass(frozen=True)
class _Measured:
    """A table's values: (R, 1 + G), everybody first.

    ``ordered`` are the sorted replicates of D_a, and of the overall value itself in the place of
    everybody; ``users`` the number of users that each value rests on.
    """

    table: _Table
    values: _Floats
    counts: _Floats
    users: _Floats
    ordered: _Floats
    confidence: float

    def rates(self) -> dict[str, dict[str, float]]:
        names = ("overall", *self.table.group_names)
        return {
            metric.name: dict(zip(names, row.tolist(), strict=True))
            for metric, row in zip(self.table.metrics, self.values, strict=True)
        }

    def overall(self, name: str) -> tuple[float, tuple[float, float]]:
        """Give a metric's overall value and its interval."""
        row = [metric.name for metric in self.table.metrics].index(name)
        value, tail = self.values[[row], 0], (1.0 - self.confidence) / 2
        low, high = _ends(self.ordered[:, [row], 0], value, tail)
        if len(self.ordered):
            q = _unseen(self.users[[row], 0], tail)
            low = np.fmin(low, value - q * value)
            high = np.fmax(high, value + q * (1.0 - value))
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
        return float(value[0]), (float(low[0]), float(high[0]))

    def gap(self, name: str, rates: Sequence[str]) -> GapEstimate:
        """Take the largest difference over some of the metrics and all groups."""
        rows = [i for i, metric in enumerate(self.table.metrics) if metric.name in rates]
        overall, values = self.values[rows, :1], self.values[rows, 1:]
        difference = overall - values
        tail = (1.0 - self.confidence) / (2 * max(1, int(np.isfinite(difference).sum())))
        low, high = _ends(self.ordered[:, rows, 1:], difference, tail)
        if len(self.ordered):
            counts = self.counts[rows]
            rest = 1.0 - counts[:, 1:] / np.maximum(counts[:, :1], 1.0)
            q = rest * _unseen(self.users[rows, 1:], tail)
            low = np.fmin(low, difference - q * (1.0 - values))
            high = np.fmax(high, difference + q * values)
            low, high = np.clip(low, -1.0, 1.0), np.clip(high, -1.0, 1.0)
        return GapEstimate(
            name,
            _largest(np.abs(difference)),
            _largest(np.maximum(np.maximum(low, -high), 0.0)),
            _largest(np.maximum(np.abs(low), np.abs(high))),
            tuple(
                Difference(
                    self.table.metrics[row].name,
                    group,
                    float(overall[i, 0]),
                    float(values[i, j]),
                    int(self.counts[row, 1 + j]),
                    float(difference[i, j]),
                    float(low[i, j]),
                    float(high[i, j]),
                )
                for i, row in enumerate(rows)
                for j, group in enumerate(self.table.group_names)
            ),
        )


def _measure(
    tables: Sequence[_Table],
    rows: _Floats,
    copies: _Ints,
    replicates: _Floats,
    confidence: float,
) -> list[_Measured]:
    totals, squares = copies @ rows, copies @ rows**2
    measured, start = [], 0
    for table in tables:
        stop = start + math.prod(table.shape)
        F, n = totals[start:stop].reshape(table.shape)
        values = _quotient(F, n)
        # As many users as make equally sure: one who has most of the samples is hardly more
        # than one. For single-sample users it is n'_a.
        users = _quotient(n**2, squares[start:stop].reshape(table.shape)[1])
        again = replicates[:, start:stop].reshape(-1, *table.shape)
        drawn = _quotient(again[:, 0], again[:, 1])
        drawn[..., 1:] = drawn[..., :1] - drawn[..., 1:]
        drawn.sort(axis=0)  # NaN last
        measured.append(_Measured(table, values, n, users, drawn, confidence))
        start = stop
    return measured


def _quotient(numerator: _Floats, denominator: _Floats) -> _Floats:
    quotient = np.full(numerator.shape, _NAN)
    np.divide(numerator, denominator, out=quotient, where=denominator > 0)
    return quotient


def _unseen(users: _Floats, tail: float) -> _Floats:
    """Solve (1 − q)^u = tail: q is the largest share of users that may well have been missed."""
    q: _Floats = -np.expm1(math.log(tail) / users)
    return q


def _ends(ordered: _Floats, value: _Floats, tail: float) -> tuple[_Floats, _Floats]:
    """Read the percentiles ``tail`` and ``1 − tail`` off sorted replicates.

    Where fewer than five replicates lie beyond, the percentile at s > tail that has five is read
    and its distance from the value stretched by z(tail)/z(s). Replicates in which a group got no
    sample (NaN) do not count.
    """
    if not len(ordered):
        return np.full_like(value, _NAN), np.full_like(value, _NAN)
    read = max(tail, min(_TAIL / len(ordered), 0.25))
    stretch = NormalDist().inv_cdf(tail) / NormalDist().inv_cdf(read)
    low, high = _percentile(ordered, read), _percentile(ordered, 1.0 - read)
    return value + stretch * (low - value), value + stretch * (high - value)


def _percentile(ordered: _Floats, level: float) -> _Floats:
    last = np.maximum((~np.isnan(ordered)).sum(axis=0) - 1, 0)
    position = level * last
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, last)
    lower = np.take_along_axis(ordered, below[None], axis=0)[0]
    upper = np.take_along_axis(ordered, above[None], axis=0)[0]
    percentile: _Floats = lower + (position - below) * (upper - lower)
    return percentile


def _largest(values: _Floats) -> float:
    return float(np.fmax.reduce(values, axis=None, initial=_NAN))


def _verdict(gap: GapEstimate, tolerance: float) -> Verdict:
    if gap.high <= tolerance:
        return "within"
    return "outside" if gap.low > tolerance else "cannot tell"


# Checks and text


def _check_settings(
    classes: int | None,
    label_range: tuple[float, float] | None,
    bootstrap: int,
    confidence: float,
    constraint: Constraint | None,
) -> None:
    if classes is None and label_range is None:
        raise ValueError(
            "classes is None, which means a regression, and label_range is not given; give the "
            "declared (low, high) of the labels, or the number of classes"
        )
    if classes is not None and classes < 2:
        raise ValueError(f"classes is {classes}; give at least 2, or None for a regression")
    if bootstrap != 0 and bootstrap < _FEWEST:
        raise ValueError(
            f"bootstrap is {bootstrap}; give at least {_FEWEST} replicates (1,000 is usual), or 0 "
            "for no intervals"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")
    kind = "regression" if classes is None else "classification"
    if constraint is not None and constraint.kind != kind:
        raise ValueError(
            f"the constraint {constraint.name!r} is for {constraint.kind}, but classes is "
            f"{classes}, which means {kind}; give a constraint on rates for {kind}"
        )


def _check_samples(
    p: Tensor, y: Tensor, a: Tensor, declared: Sequence[Attribute], classes: int | None
) -> None:
    n = len(y) if y.ndim else 0
    if y.shape != (n,) or p.shape != (n,) or n == 0:
        raise ValueError(
            f"predictions have shape {tuple(p.shape)} and labels {tuple(y.shape)}; expected (n,) "
            "for both with n > 0: one class for each sample (scores.argmax(-1)), or one real number"
        )
    if a.shape != (n, len(declared)):
        raise ValueError(
            f"attribute codes have shape {tuple(a.shape)}; expected ({n}, {len(declared)}): one "
            f"row for each sample, one column for each of {[x.name for x in declared]}"
        )
    for what, values in (("predictions", p), ("labels", y)):
        if classes is None:
            if not bool(values.isfinite().all()):
                raise ValueError(f"some {what} are NaN or infinite; leave those samples out")
        elif values.is_floating_point():
            raise ValueError(
                f"{what} are {values.dtype}, but classes is {classes}; give hard classes as whole "
                "numbers (scores.argmax(-1)), or classes=None for a regression"
            )
        elif bool(((values < 0) | (values >= classes)).any()):
            raise ValueError(
                f"{what} run from {int(values.min())} to {int(values.max())}; expected classes "
                f"0 to {classes - 1}: recode them, or give the right number of classes"
            )
    if a.is_floating_point():
        raise ValueError(f"attribute codes are {a.dtype}; expected whole numbers: call .long()")
    for column, attribute in enumerate(declared):
        codes = a[:, column]
        lowest = UNKNOWN if attribute.unknown else 0
        if bool(((codes < lowest) | (codes >= len(attribute.values))).any()):
            raise ValueError(
                f"codes of attribute {attribute.name!r} run from {int(codes.min())} to "
                f"{int(codes.max())}; expected {lowest} to {len(attribute.values) - 1}"
                + ("" if attribute.unknown else " (declare unknown=True to allow -1)")
            )


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def _describe(evaluation: Evaluation) -> str:
    """Write a plain text table: the accuracy beside every gap, for the trivial answer is fair."""
    if evaluation.accuracy is not None:
        what, score, interval = "accuracy", evaluation.accuracy, evaluation.accuracy_interval
    else:
        what, score, interval = "absolute error", evaluation.error or 0.0, evaluation.error_interval
    assert interval is not None  # one of the two is always there
    lines = [f"{evaluation.samples:,} samples of {evaluation.users:,} users"]
    if evaluation.bootstrap:
        lines[0] += (
            f"; intervals at {100 * evaluation.confidence:.4g}% from {evaluation.bootstrap:,} "
            "bootstrap replicates of the users"
        )
    lines.append(f"{what} {_number(score)} {_interval(*interval)}".rstrip())
    gaps = sorted(evaluation.gaps.values(), key=lambda g: g.value, reverse=True)
    always = [g for g in gaps if g.name in ("accuracy", "constraint")]
    others = [g for g in gaps if g not in always]
    listed = {g.name for g in always + others[: _SHOWN - len(always)]}
    table = [("gap", "value", "interval", what, "worst group", "its value", "overall", "n'")]
    for gap in (g for g in evaluation.gaps.values() if g.name in listed):
        row = (gap.name, _number(gap.value), _interval(gap.low, gap.high), _number(score))
        d = gap.worst
        if d is None:
            table.append((*row, "-", "-", "-", "-"))
        else:
            group = d.group if len(gap.overall) == 1 else f"{d.group}, {d.rate}"
            table.append((*row, group, _number(d.value), _number(d.overall), f"{d.count:,}"))
    if len(table) > 1:
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines.append("")
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        if len(listed) < len(gaps):
            lines.append(f"(the largest; {len(gaps) - len(listed)} more in .gaps)")
    if evaluation.verdict is not None:
        lines += ["", f"{evaluation.constraint}: {evaluation.verdict_in_words}"]
    return "\n".join(lines)
