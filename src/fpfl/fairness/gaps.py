r"""Gaps: how far groups are from the whole, with error bars.

F and n' of every rate of a task are counted in every group, for each user. How far a value measured
on these users may be from the population's is the bootstrap's to say: users are resampled, not
samples, since the samples of one user are not independent. Two things can go wrong: what
resampling shows (:func:`margins`), and what it cannot show, since nobody like that was among the
users (:func:`unseen`).

The gap of a rate is the largest distance of a group's value v from the overall one,

    gap = max_a |D_a|,   D_a = F(d')/n' − F(d'_a)/n'_a

(fairlearn: ``MetricFrame.difference(method="to_overall")``). A group without a sample in d' has
no value (NaN) and is left out. Each D_a has an interval I_a, all of which hold at once, and so

    low = max_a dist(0, I_a),   high = max_a max(|min I_a|, |max I_a|)

for the gap. Intervals are of the *signed* D_a, since the bootstrap of a maximum of absolute values
is biased upwards and never contains 0: a perfectly fair model would always look unfair.

A group differs from the whole as it does from the rest, with their value w and their share r of
n': D_a = r (w − v). Resampling the users shows a margin m of D_a. Users whom it cannot show, since
they stayed unseen, a share q of the group or s of the rest, move v or w by as much:

    I_a = [D_a − max(m, r q (1 − v), r s w),   D_a + max(m, r q v, r s (1 − w))]

(m, q and s are the bootstrap's). A group's own value, with a margin of its own, lies
in

    [v − max(m_v, q v),   v + max(m_v, q (1 − v))].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.fairness import rates
from fpfl.fairness.constraints import By, Constraint
from fpfl.fairness.evaluation import Difference, Evaluation, GapEstimate
from fpfl.fairness.groups import Attribute, Groups, groups_by
from fpfl.fairness.metrics import Sums, area, class_metrics
from fpfl.fairness.rates import Rate
from fpfl.fairness.resampling import (
    Floats,
    Ints,
    distinct,
    ends_of,
    margins,
    quotient,
    resample,
    unseen,
    users_behind,
)

__all__ = ["Difference", "Evaluation", "GapEstimate", "evaluate_predictions"]


def check_settings(
    classes: int | None,
    label_range: tuple[float, float] | None,
    constraint: Constraint | None,
    bootstrap: int,
    confidence: float,
) -> None:
    """Refuse settings that make no sense, or none together."""
    kind = "regression" if classes is None else "classification"
    if classes is None and label_range is None:
        raise ValueError("label_range is not given; a regression (classes=None) needs (low, high)")
    if classes is not None and classes < 2:
        raise ValueError(f"classes is {classes}; give at least 2, or None for a regression")
    if constraint is not None and constraint.kind != kind:
        raise ValueError(f"{constraint.name!r} is for {constraint.kind}; give one for {kind}")
    if bootstrap != 0 and bootstrap < 20:  # no quantile of fewer is worth reading
        raise ValueError(f"bootstrap is {bootstrap}; give at least 20 (1,000 is usual), or 0")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")


def check_samples(
    p: Tensor,
    y: Tensor,
    a: Tensor,
    users: Tensor | None,
    declared: Sequence[Attribute],
    classes: int | None,
) -> None:
    """Refuse predictions p, labels y, attribute codes a and users that are not what is declared."""
    n, names = y.numel(), [attribute.name for attribute in declared]
    if n == 0 or y.shape != (n,) or p.shape != (n,):
        raise ValueError(
            f"predictions have shape {tuple(p.shape)} and labels {tuple(y.shape)}; expected (n,) "
            "with n > 0 for both: one class a sample (scores.argmax(-1)), or one real number"
        )
    if a.shape != (n, len(names)) or a.is_floating_point():
        raise ValueError(
            f"attribute codes are {a.dtype} of shape {tuple(a.shape)}; expected ({n}, "
            f"{len(names)}), a row for each sample and whole numbers in the columns {names}"
        )
    if users is not None and (users.shape != (n,) or users.is_floating_point()):
        raise ValueError(
            f"users is {users.dtype} of shape {tuple(users.shape)}; expected ({n},), whole numbers"
        )
    for what, values in (("predictions", p), ("labels", y)):
        if classes is not None:
            hint = "give hard classes (scores.argmax(-1)), or classes=None for a regression"
            _check_classes(what, values, classes, hint)
        elif not bool(values.isfinite().all()):
            raise ValueError(f"some {what} are NaN or infinite; leave those samples out")
    for attribute, codes in zip(declared, a.unbind(-1), strict=True):
        attribute.check_codes(codes)


def _check_scores(
    scores: Tensor | None, names: Sequence[str] | None, n: int, classes: int | None
) -> None:
    if names is not None and len(names) != classes:
        raise ValueError(f"class_names is {tuple(names)}; expected a name for each of {classes}")
    if scores is None:
        return
    if classes is None:
        raise ValueError("scores were given for a regression, which has no AUC; leave them out")
    shape = (n,) if classes == 2 else (n, classes)
    if scores.shape != shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}; expected {shape}: for two classes a number "
            "a sample, which grows with class 1, and for more a probability for each class"
        )
    if bool(scores.isnan().any()):
        raise ValueError("some scores are NaN and have no rank; leave those samples or scores out")


def _check_classes(what: str, values: Tensor, classes: int, hint: str) -> None:
    if values.is_floating_point():
        raise ValueError(f"{what} are {values.dtype}; expected whole numbers; {hint}")
    if bool(((values < 0) | (values >= classes)).any()):
        raise ValueError(
            f"{what} run from {int(values.min())} to {int(values.max())}; "
            f"expected classes 0 to {classes - 1}; {hint}"
        )


Counted = tuple[str, Tensor, Tensor]  # a rate's name, and what each sample adds to F and to n'
Member = tuple[str, Tensor]  # a group's name, and whether each sample is in it


def count(rate: Rate, p: Tensor, y: Tensor, name: str | None = None) -> Counted:
    """Count f where the rate's condition holds, and where it does."""
    n = rate.condition(y).double()
    return name or rate.name, n * rate.evaluate(p, y), n


def count_task(
    p: Tensor, y: Tensor, classes: int | None, label_range: tuple[float, float] | None
) -> list[Counted]:
    """Count the rates of a task; for two classes the precision P[Y = 1 | Ŷ = 1] as well."""
    if classes is None:
        assert label_range is not None  # checked before
        errors = (rates.squared_error, rates.absolute_error, rates.mean_prediction)
        return [count(make(label_range), p, y) for make in errors]
    if classes > 2:
        recalls = (rates.class_recall(label) for label in range(classes))
        return [count(rate, p, y) for rate in (rates.accuracy(), *recalls)]
    odds = (rates.false_negative_rate(), rates.false_positive_rate())
    # Precision is the true positive rate with labels and predictions in each other's place.
    precision = count(rates.true_positive_rate(), y, p, name="precision")
    return [*(count(r, p, y) for r in (rates.accuracy(), *odds, rates.selection_rate())), precision]


@dataclass(frozen=True)
class Table:
    """R rates × (everybody, then G groups): arrays of shape (R, 1 + G).

    ``value`` is F/n', ``n`` is n' and ``users`` how many users are behind them; ``rest`` is the
    value of all other samples, and ``rest_users`` how many users are behind that. ``drawn``, of
    shape (replicates, R, 1 + G), has the values of as many users as the ``population`` drawn again.
    ``whole`` has everybody's sums themselves: F of all rates, n' of all, and further columns.
    """

    rates: list[str]
    groups: list[str]
    population: int
    value: Floats
    n: Floats
    users: Floats
    rest: Floats
    rest_users: Floats
    drawn: Floats
    whole: Sums


def measure(
    counted: Sequence[Counted],
    members: Sequence[Member],
    owner: Ints,
    bootstrap: int,
    seed: int,
    extra: Floats | None = None,
) -> Table:
    """Sum what was counted over every user and group, everybody being the first, and resample.

    ``owner`` is the number of each sample's user, 0 ... users − 1. ``extra``, of shape (users,
    columns), is summed over everybody alone.
    """
    columns = (part * member for _, F, n in counted for _, member in members for part in (F, n))
    by_user = np.stack([np.bincount(owner, column.numpy()) for column in columns], axis=1)
    own = by_user.shape[1]  # the columns after are those of the extra
    if extra is not None:
        by_user = np.concatenate([by_user, extra], axis=1)
    rows, alike = distinct(by_user.astype(np.float64))
    totals, again = alike @ rows, resample(rows, alike, bootstrap, seed)
    shape = (len(counted), len(members), 2)
    F, n = np.moveaxis(totals[:own].reshape(shape), -1, 0)
    n_k = rows[:, :own].reshape(len(rows), *shape)[..., 1]
    drawn = again[:, :own].reshape(bootstrap, *shape)

    def whole(sums: Floats) -> Floats:
        """F and n' of each rate of everybody, and the extra."""
        everybody = sums[:, :own].reshape(len(sums), *shape)[:, :, 0]
        return np.concatenate([everybody[..., 0], everybody[..., 1], sums[:, own:]], axis=1)

    return Table(
        rates=[name for name, _, _ in counted],
        groups=[name for name, _ in members],
        population=len(by_user),
        value=quotient(F, n),
        n=n,
        users=users_behind(n_k, alike),
        rest=quotient(F[:, :1] - F, n[:, :1] - n),
        rest_users=users_behind(n_k[:, :, :1] - n_k, alike),
        drawn=quotient(drawn[..., 0], drawn[..., 1]),
        whole=Sums(whole(totals[None])[0], whole(rows), alike, whole(again)),
    )


_TWO_CLASSES: dict[str, tuple[str, ...]] = {
    "fnr": ("FNR",),
    "eo": ("FNR", "FPR"),
    "demp": ("selection rate",),
    "pp": ("precision",),
    "accuracy": ("accuracy",),
}
"""The gaps of a task of two classes: the rates that each is the largest difference in."""


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
    scores: Tensor | None = None,
    class_names: Sequence[str] | None = None,
) -> Evaluation:
    """Measure predictions: how good they are, and the gaps between groups, with intervals.

    Classes have balanced accuracy, F1, shares and, where there are scores, the AUC
    (`fpfl.fairness.metrics`) in ``metrics``.

    Two classes have the gaps of the paper's tables: ``fnr``, ``eo`` (equalised odds: the larger of
    the FNR and FPR gaps), ``demp`` (selection rate), ``pp`` (precision P[Y = 1 | Ŷ = 1]) and
    ``accuracy``; more classes have ``accuracy`` and ``recall[k]`` for each class; a regression has
    ``squared error``, ``absolute error`` and ``mean prediction``.

    Parameters
    ----------
    predictions, labels
        Shape (n,): hard classes, or real numbers for a regression.
    attributes, declared
        Codes of shape (n, number of attributes), -1 where unknown, and the declared attributes.
        Without any there are overall values only, and no gaps.
    classes, label_range
        None makes it a regression, with errors as fractions of the declared (low, high).
    users
        Shape (n,): the number of every sample's user. Without it every sample is a user. Users
        without samples change no rate and need not be known.
    by
        What to group by, as in :func:`~fpfl.fairness.groups_by`: every attribute when not given.
    constraint
        Its gap, on its own rates and groups, becomes ``gaps["constraint"]`` and the verdict.
    bootstrap, seed
        The number of replicates, and where their draws start. 0 leaves the intervals out, and the
        verdict is "cannot tell".
    confidence
        That each gap's interval contains the true gap, each gap by itself.
    scores
        For the AUC: logits or probabilities of class 1, of shape (n,), where there are two classes;
        with more, probabilities of shape (n, classes).
    class_names
        What the classes are called, for sentences about them.
    """
    check_settings(classes, label_range, constraint, bootstrap, confidence)
    p, y, a = (values.detach().cpu() for values in (predictions, labels, attributes))
    check_samples(p, y, a, users, declared, classes)
    _check_scores(scores, class_names, len(y), classes)
    p, y = (p.double(), y.double()) if classes is None else (p.long(), y.long())
    owner = np.arange(len(y))
    if users is not None:
        owner = np.unique(users.detach().cpu().numpy(), return_inverse=True)[1]

    counted = count_task(p, y, classes, label_range)
    members = [("overall", torch.ones_like(y, dtype=torch.bool))]
    if declared or by is not None:
        members += _members(groups_by(declared, by), a)
    R, G = len(counted), len(members)
    if constraint is not None:
        counted += [count(rate, p, y) for rate in constraint.rates]
        members += _members(constraint.bind(declared), a)
    # Of two classes the rates' own sums say how often each is predicted.
    several = classes is not None and classes > 2
    extra = _predicted(p.numpy(), owner, classes or 0) if several else None
    table = measure(counted, members, owner, bootstrap, seed, extra)
    metrics = None
    if classes is not None:
        ranked = None
        if scores is not None:
            level = confidence if bootstrap else None
            ranked = area(scores.detach().cpu().numpy(), y.numpy(), owner, classes, level)
        sums = table.whole.map(lambda whole: _by_class(whole, len(counted), classes))
        metrics = class_metrics(sums, ranked, class_names, confidence)

    gaps = _gaps(table, R, G, classes, confidence)
    main = table.rates.index("absolute error" if classes is None else "accuracy")
    score, ends = _overall(table, main, confidence)
    values = zip(table.rates, table.value[:R, :G].tolist(), strict=False)
    return Evaluation(
        samples=len(y),
        users=table.population,
        accuracy=None if classes is None else score,
        accuracy_interval=None if classes is None else ends,
        error=score if classes is None else None,
        error_interval=ends if classes is None else None,
        rates={rate: dict(zip(table.groups, row, strict=False)) for rate, row in values},
        gaps=gaps,
        constraint=None if constraint is None else constraint.name,
        tolerance=None if constraint is None else constraint.tolerance,
        verdict=None if constraint is None else gaps["constraint"].verdict(constraint.tolerance),
        confidence=confidence,
        bootstrap=bootstrap,
        metrics=metrics,
    )


def _predicted(p: NDArray[np.int64], owner: Ints, classes: int) -> Floats:
    """How often each class is predicted for each user's samples: (users, classes)."""
    users = int(owner.max()) + 1
    counts = np.bincount(owner * classes + p, minlength=users * classes)
    return counts.reshape(users, classes).astype(np.float64)


def _by_class(whole: Floats, R: int, classes: int) -> Floats:
    """n_k, h_k and p_k of all classes, from what `count_task` counts first of R rates."""
    F, n, p = whole[..., :R], whole[..., R : 2 * R], whole[..., 2 * R :]
    if classes > 2:  # accuracy, the recall of each class; and what was counted beside them
        return np.concatenate([n[..., 1 : 1 + classes], F[..., 1 : 1 + classes], p], axis=-1)
    # Accuracy, FNR, FPR, selection rate.
    n_1, n_0, p_1 = n[..., 1], n[..., 2], F[..., 3]
    hits = n_0 - F[..., 2], n_1 - F[..., 1]
    return np.stack([n_0, n_1, *hits, n[..., 3] - p_1, p_1], axis=-1)


def _gaps(
    table: Table, R: int, G: int, classes: int | None, confidence: float
) -> dict[str, GapEstimate]:
    """The task's gaps, from the table's first R rows and G columns, and the constraint's."""
    gaps = {}
    compared = _TWO_CLASSES if classes == 2 else {rate: (rate,) for rate in table.rates[:R]}
    for name, those in compared.items() if G > 1 else ():
        rows = [table.rates.index(rate) for rate in those]
        gaps[name] = _gap(name, table, rows, range(1, G), confidence)
    if len(table.rates) > R:
        own = range(R, len(table.rates)), range(G, len(table.groups))
        gaps["constraint"] = _gap("constraint", table, *own, confidence)
    return gaps


def _members(groups: Groups, a: Tensor) -> list[Member]:
    return list(zip(groups.names, groups.membership(a).unbind(-1), strict=True))


def _gap(
    name: str, table: Table, rows: Sequence[int], columns: Sequence[int], confidence: float
) -> GapEstimate:
    """The largest difference in some rates and groups of the table: this module's formulas."""
    part = np.ix_(rows, columns)
    overall, v, n = table.value[rows, :1], table.value[part], table.n[part]
    w, r, drawn = table.rest[part], 1.0 - quotient(n, table.n[rows, :1]), table.drawn[:, rows]
    D = overall - v
    m = margins(D, drawn[:, :, :1] - drawn[:, :, columns], confidence)
    tail = (1.0 - confidence) / (2 * max(1, int(np.isfinite(D).sum())))
    q, s = unseen(table.users[part], tail), unseen(table.rest_users[part], tail)
    low = np.maximum(D - np.maximum(m, r * np.fmax(q * (1.0 - v), s * w)), -1.0)
    high = np.minimum(D + np.maximum(m, r * np.fmax(q * v, s * (1.0 - w))), 1.0)
    names = product([table.rates[i] for i in rows], [table.groups[j] for j in columns])
    ends = ends_of(v, q, margins(v, drawn[:, :, columns], confidence))
    fields = np.broadcast_arrays(overall, v, n, D, low, high, *ends)
    numbers = np.stack(fields, axis=-1).reshape(-1, len(fields))
    cells = zip(names, numbers.tolist(), strict=True)
    return GapEstimate(
        name,
        value=_largest(np.abs(D)),
        low=_largest(np.maximum(np.maximum(low, -high), 0.0)),
        high=_largest(np.maximum(-low, high)),
        differences=tuple(Difference(*names, o, v, int(n), *d) for names, (o, v, n, *d) in cells),
    )


def _overall(table: Table, row: int, confidence: float) -> tuple[float, tuple[float, float]]:
    """The overall value v of a rate, and [v − max(m, q v), v + max(m, q (1 − v))]."""
    v, q = table.value[row, :1], unseen(table.users[row, :1], (1.0 - confidence) / 2)
    low, high = ends_of(v, q, margins(v, table.drawn[:, row, :1], confidence))
    return float(v[0]), (float(low[0]), float(high[0]))


def _largest(values: Floats) -> float:
    return float(np.fmax.reduce(values, axis=None, initial=np.nan))
