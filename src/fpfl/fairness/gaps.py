r"""Gaps: how far groups are from the whole, with error bars.

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

(:mod:`fpfl.fairness.bootstrap` has m, q and s). A group's own value, with a margin of its own, lies
in

    [v − max(m_v, q v),   v + max(m_v, q (1 − v))].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fpfl.fairness._checks import check_samples, check_settings
from fpfl.fairness.bootstrap import Floats, margins, quotient, unseen
from fpfl.fairness.constraints import By, Constraint
from fpfl.fairness.evaluation import Difference, Evaluation, GapEstimate
from fpfl.fairness.groups import Attribute, Groups, groups_by
from fpfl.fairness.measure import Member, Table, count, count_task, measure

__all__ = ["Difference", "Evaluation", "GapEstimate", "evaluate_predictions"]

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
) -> Evaluation:
    """Measure predictions: how good they are, and the gaps between groups, with intervals.

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
    """
    check_settings(classes, label_range, constraint, bootstrap, confidence)
    p, y, a = (values.detach().cpu() for values in (predictions, labels, attributes))
    check_samples(p, y, a, users, declared, classes)
    p, y = (p.double(), y.double()) if classes is None else (p.long(), y.long())
    owners = torch.arange(len(y)) if users is None else users.detach().cpu()

    counted = count_task(p, y, classes, label_range)
    members = [("overall", torch.ones_like(y, dtype=torch.bool))]
    if declared or by is not None:
        members += _members(groups_by(declared, by), a)
    R, G = len(counted), len(members)
    if constraint is not None:
        counted += [count(rate, p, y) for rate in constraint.rates]
        members += _members(constraint.bind(declared), a)
    table = measure(counted, members, owners, bootstrap, seed)

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
    )


def _gaps(
    table: Table, R: int, G: int, classes: int | None, confidence: float
) -> dict[str, GapEstimate]:
    """The task's gaps, from the table's first R rows and G columns, and the constraint's."""
    gaps = {}
    compared = _TWO_CLASSES if classes == 2 else {rate: (rate,) for rate in table.rates[:R]}
    for name, rates in compared.items() if G > 1 else ():
        rows = [table.rates.index(rate) for rate in rates]
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
    ends = _ends(v, q, margins(v, drawn[:, :, columns], confidence))
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
    low, high = _ends(v, q, margins(v, table.drawn[:, row, :1], confidence))
    return float(v[0]), (float(low[0]), float(high[0]))


def _ends(v: Floats, q: Floats, m: Floats) -> tuple[Floats, Floats]:
    """v − max(m, q v) and v + max(m, q (1 − v)), within [0, 1]."""
    low, high = v - np.maximum(m, q * v), v + np.maximum(m, q * (1.0 - v))
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def _largest(values: Floats) -> float:
    return float(np.fmax.reduce(values, axis=None, initial=np.nan))
