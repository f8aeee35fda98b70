r"""Against a reference: who is better and who is worse off than without the constraint.

A constraint can be met by treating everybody worse. A run's own totals cannot say so: what the
groups would have had without it is another model's, a *reference* (plain private federated learning
with the same settings), measured on the same held-out users. With a rate's value v of the
constrained model and u of the reference, in each group,

    D = v − u,   I = [D − max(m, q (1 + D)), D + max(m, q (1 − D))].

Users are drawn again for both models at once, and m is the bootstrap's margin of D
(`fpfl.fairness.resampling`): what makes both models err moves both values, and cancels. Users who
stayed unseen, a share q of the group, may be anything from 1 better to 1 worse off. All I hold at
once.

Where errors are counted less is better, where hits are counted more is. A selection rate is neither
good nor bad; under a constraint on such rates alone the error (or accuracy) is compared as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fpfl.fairness import rates as _rates
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import MARK
from fpfl.fairness.gaps import check_samples, check_settings, count, measure
from fpfl.fairness.groups import Attribute
from fpfl.fairness.rates import Rate
from fpfl.fairness.resampling import margins, unseen
from fpfl.store.typed import plain, typed

NOT_MEASURED = (
    "Against training without the constraint: not measured. Who is worse off for it cannot be "
    "told from a run's own totals; train a reference beside it (fpfl train --reference)."
)
"""What is said of a run that has no reference."""

Good = Literal["less", "more", "neither"]
Outcome = Literal["better", "worse", "less", "more", "cannot tell"]


def good_end(rate: Rate, classes: int | None) -> Good:
    """Whether less or more of a rate is better for those whom it is about."""
    slopes = rate.loss_slopes(classes)
    if slopes is None or not bool(slopes.any()):
        return "neither"
    if bool((slopes >= 0).all()):
        return "less"
    return "more" if bool((slopes <= 0).all()) else "neither"


def compared_rates(
    constraint: Constraint, classes: int | None, label_range: tuple[float, float] | None
) -> tuple[Rate, ...]:
    """The constraint's rates; and the error, where none of them says who is better off."""
    if any(good_end(rate, classes) != "neither" for rate in constraint.rates):
        return constraint.rates
    if classes is not None:
        return (*constraint.rates, _rates.accuracy())
    assert label_range is not None  # a regression has one
    return (*constraint.rates, _rates.absolute_error(label_range))


@dataclass(frozen=True)
class Change:
    """A rate of a group with the constraint and without, and their difference in [low, high].

    NaN where nothing is known. ``good`` says which end of the rate is better.
    """

    rate: str
    group: str
    value: float
    reference: float
    difference: float
    low: float
    high: float
    good: Good

    @property
    def outcome(self) -> Outcome:
        """What is sure of it."""
        if not (self.low > 0.0 or self.high < 0.0):
            return "cannot tell"
        moved: Literal["less", "more"] = "more" if self.low > 0.0 else "less"
        if self.good == "neither":
            return moved
        return "better" if moved == self.good else "worse"

    def __str__(self) -> str:
        if math.isnan(self.low) or math.isnan(self.difference):
            return f"{self.group} ({self.rate}: not known)"
        return (
            f"{self.group} ({self.rate} {_number(self.value)} against "
            f"{_number(self.reference)}, {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
            ")"
        )


@dataclass(frozen=True)
class Against:
    """A model under a constraint against its reference, on the same users.

    Parameters
    ----------
    changes
        Of every rate: the whole's ("overall") and each group's.
    constraint
        Its name.
    users
        How many users both were evaluated on.
    confidence
        That all intervals contain what they are about.
    epsilon, delta
        What both evaluations cost together; None where there was no noise.
    """

    changes: tuple[Change, ...]
    constraint: str
    users: int
    confidence: float
    epsilon: float | None = None
    delta: float | None = None

    @property
    def groups(self) -> tuple[Change, ...]:
        """Those of groups."""
        return tuple(change for change in self.changes if change.group != "overall")

    @property
    def levelled_down(self) -> bool:
        """Whether some group is worse off than without the constraint, and none better."""
        found = {change.outcome for change in self.groups}
        return "worse" in found and "better" not in found

    @property
    def in_words(self) -> tuple[str, ...]:
        """Who is better off, who worse, and the warning of levelling down; a sentence each."""
        said = {
            "Worse off than without the constraint": "worse",
            "Better off": "better",
            "More than without the constraint": "more",
            "Less than without the constraint": "less",
            "Cannot tell": "cannot tell",
        }
        lines = [self.warning] if self.warning is not None else []
        for words, outcome in said.items():
            found = [str(change) for change in self.groups if change.outcome == outcome]
            lines += [f"{words}: {'; '.join(found)}."] if found else []
        return tuple(lines)

    @property
    def price(self) -> str | None:
        """What both evaluations cost together; None where there was no noise."""
        if self.epsilon is None or self.delta is None:
            return None
        return (
            f"Two models were evaluated on these users, this one and its reference: together for "
            f"ε = {math.ceil(1e4 * self.epsilon - 1e-6) / 1e4:.4f} at δ = {self.delta:g}."
        )

    @property
    def warning(self) -> str | None:
        """What a verdict has to say besides; None where it is not clear."""
        if not self.levelled_down:
            return None
        worse = dict.fromkeys(c.group for c in self.groups if c.outcome == "worse")
        return (
            f"LEVELLED DOWN: worse off than without the constraint: {', '.join(worse)}; and no "
            "group is better off for it."
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        changes = [vars(change) | {"outcome": change.outcome} for change in self.changes]
        more = {"in_words": list(self.in_words), "levelled_down": self.levelled_down}
        mark = {} if self.epsilon is not None else {"mark": MARK}
        found: dict[str, Any] = plain(vars(self) | {"changes": changes} | more | mark)
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Against:
        """What `as_dict` wrote."""
        return typed(cls, values, "the comparison with a reference", nan=True)

    def __str__(self) -> str:
        head = (
            f"Against training without the constraint ({self.users:,} users, intervals at "
            f"{100 * self.confidence:.4g}%, all at once):"
        )
        return "\n".join([head, *self.in_words])


def compare_predictions(
    predictions: Tensor,
    reference: Tensor,
    labels: Tensor,
    attributes: Tensor,
    declared: Sequence[Attribute],
    *,
    constraint: Constraint,
    classes: int | None = 2,
    label_range: tuple[float, float] | None = None,
    users: Tensor | None = None,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Against:
    """Compare two models' predictions for the same samples, group by group (the module's formula).

    Parameters
    ----------
    predictions, reference
        Of the model under the constraint, and of the one without.
    labels, attributes, declared, classes, label_range, users, bootstrap, confidence, seed
        As in `fpfl.fairness.evaluate_predictions`.
    constraint
        Whose rates and groups are compared.
    """
    check_settings(classes, label_range, constraint, bootstrap, confidence)
    p, u, y, a = (x.detach().cpu() for x in (predictions, reference, labels, attributes))
    for given in (p, u):
        check_samples(given, y, a, users, declared, classes)
    kind = torch.float64 if classes is None else torch.int64
    p, u, y = p.to(kind), u.to(kind), y.to(kind)
    owner = np.arange(len(y))
    if users is not None:
        owner = np.unique(users.detach().cpu().numpy(), return_inverse=True)[1]
    rates = compared_rates(constraint, classes, label_range)
    groups = constraint.bind(declared)
    members = [("overall", torch.ones(len(y), dtype=torch.bool))]
    members += zip(groups.names, groups.membership(a).unbind(-1), strict=True)
    counted = [count(rate, given, y) for given in (p, u) for rate in rates]
    table, R = measure(counted, members, owner, bootstrap, seed), len(rates)

    v, w = table.value[:R], table.value[R:]
    D = v - w
    m = margins(D, table.drawn[:, :R] - table.drawn[:, R:], confidence)
    tail = (1.0 - confidence) / (2 * max(1, int(np.isfinite(D).sum())))
    q = unseen(table.users[:R], tail)
    low = np.maximum(D - np.fmax(m, q * (1.0 + D)), -1.0)
    high = np.minimum(D + np.fmax(m, q * (1.0 - D)), 1.0)
    if not bootstrap:
        low, high = np.full(D.shape, math.nan), np.full(D.shape, math.nan)
    names = [(rate.name, group) for rate in rates for group, _ in members]
    return Against(
        changes_of(names, [v, w, D, low, high], [good_end(rate, classes) for rate in rates]),
        constraint.name,
        table.population,
        confidence,
    )


def changes_of(
    names: Sequence[tuple[str, str]], fields: Iterable[Any], good: Sequence[Good]
) -> tuple[Change, ...]:
    """Changes from arrays of shape (R, groups): values, the reference's, differences and ends."""
    numbers = np.stack(list(fields), axis=-1).reshape(len(names), 5).tolist()
    each = len(names) // len(good)
    found = []
    for i, ((rate, group), row) in enumerate(zip(names, numbers, strict=True)):
        value, reference, difference, low, high = row
        end = good[i // each]
        found.append(Change(rate, group, value, reference, difference, low, high, end))
    return tuple(found)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
