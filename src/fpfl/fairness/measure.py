"""What an evaluation counts: F and n' of every rate of a task, in every group, for each user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fpfl.fairness import rates
from fpfl.fairness.bootstrap import Floats, distinct, quotient, resample, users_behind
from fpfl.fairness.rates import Rate

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


def measure(
    counted: Sequence[Counted], members: Sequence[Member], users: Tensor, bootstrap: int, seed: int
) -> Table:
    """Sum what was counted over every user and group, everybody being the first, and resample."""
    owner = np.unique(users.numpy(), return_inverse=True)[1]
    columns = (part * member for _, F, n in counted for _, member in members for part in (F, n))
    by_user = np.stack([np.bincount(owner, column.numpy()) for column in columns], axis=1)
    rows, alike = distinct(by_user.astype(np.float64))
    shape = (len(counted), len(members), 2)
    F, n = np.moveaxis((alike @ rows).reshape(shape), -1, 0)
    n_k = rows.reshape(len(rows), *shape)[..., 1]
    drawn = resample(rows, alike, bootstrap, seed).reshape(bootstrap, *shape)
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
    )
