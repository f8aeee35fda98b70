r"""Constraints: rates × groups, with a tolerance.

    |F_r(d')/n'_r − F_r(d'_a)/n'_{r,a}| ≤ α   for every rate r and group a.

A constraint names attributes; ``bind`` resolves them against the declared ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fpfl.fairness import rates as _rates
from fpfl.fairness.groups import Attribute, Groups, groups_by
from fpfl.fairness.rates import Kind, Rate

By = str | tuple[str, ...]


@dataclass(frozen=True)
class Constraint:
    """What must be (nearly) equal between groups.

    Parameters
    ----------
    rates
        The rates that must be equal; several at once for equalised odds.
    by
        What to group by: attribute names, and tuples of names for intersections. All the
        schema's attributes, one by one, when it is empty.
    tolerance
        α: how far a group's value may be from the overall one.
    name
        How it is called in tables.
    label_range
        For regression: the range that its rates divide by, which must be the schema's.
    """

    rates: tuple[Rate, ...]
    by: tuple[By, ...] = ()
    tolerance: float = 0.02
    name: str = "constraint"
    label_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.by, str):
            object.__setattr__(self, "by", (self.by,))
        if not self.rates:
            raise ValueError("a constraint needs at least one rate; none was given")
        names = [rate.name for rate in self.rates]
        if len(set(names)) != len(names):
            raise ValueError(f"two rates of a constraint have one name: {names}; rename one")
        if len({rate.kind for rate in self.rates}) != 1:
            raise ValueError(f"the rates {names} mix classification and regression; use one kind")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"the tolerance is {self.tolerance}; it must be in [0, 1)")

    @property
    def kind(self) -> Kind:
        """The task that the rates are for."""
        return self.rates[0].kind

    def check(self, classes: int | None, label_range: tuple[float, float] | None) -> None:
        """Refuse a task that the rates are not for."""
        task = "regression" if classes is None else "classification"
        if self.kind != task:
            raise ValueError(f"{self.name} is for {self.kind}; the schema is a {task}")
        binary = [rate.name for rate in self.rates if rate.binary]
        if classes is not None and classes > 2 and binary:
            raise ValueError(
                f"{', '.join(binary)} are for two classes and the schema has {classes}; say which "
                "class is the positive one (positive=...), or use accuracy_parity"
            )
        if self.label_range is not None and tuple(self.label_range) != label_range:
            raise ValueError(
                f"{self.name} was made for the label range {self.label_range}, the schema declares "
                f"{label_range}; use the schema's"
            )

    def bind(self, attributes: Sequence[Attribute]) -> Groups:
        """The groups this constraint compares, among the declared attributes."""
        return groups_by(attributes, self.by or None)


def fnr_parity(*by: By, tolerance: float = 0.02, positive: int | None = None) -> Constraint:
    """Equal false negative rates (equal opportunity)."""
    return Constraint((_rates.false_negative_rate(positive),), by, tolerance, "FNR parity")


def accuracy_parity(*by: By, tolerance: float = 0.02) -> Constraint:
    """Equal accuracy, for any number of classes."""
    return Constraint((_rates.accuracy(),), by, tolerance, "accuracy parity")


def demographic_parity(*by: By, tolerance: float = 0.02, positive: int | None = None) -> Constraint:
    """Equal selection rates."""
    return Constraint((_rates.selection_rate(positive),), by, tolerance, "demographic parity")


def equalized_odds(*by: By, tolerance: float = 0.02, positive: int | None = None) -> Constraint:
    """Equal false negative and false positive rates, both at once."""
    both = (_rates.false_negative_rate(positive), _rates.false_positive_rate(positive))
    return Constraint(both, by, tolerance, "equalised odds")


def equal_error(
    *by: By, label_range: tuple[float, float], squared: bool = True, tolerance: float = 0.02
) -> Constraint:
    """Equal error in a regression; errors and α are fractions of the declared label range."""
    make = _rates.squared_error if squared else _rates.absolute_error
    low, high = label_range
    return Constraint((make(label_range),), by, tolerance, "equal error", (low, high))


def predictive_parity(*by: By, tolerance: float = 0.02, positive: int | None = None) -> Constraint:
    """Refuse: predictive parity can be measured, not enforced."""
    raise ValueError(
        "predictive parity cannot be enforced: it conditions on the prediction Ŷ, so the set d' "
        "changes with the model and F(d') is no sum over fixed samples. It is measured by "
        "evaluate() like the others; to train, use fnr_parity, equalized_odds, "
        "demographic_parity or accuracy_parity"
    )


BY_NAME = {
    "fnr_parity": fnr_parity,
    "equal_opportunity": fnr_parity,
    "accuracy_parity": accuracy_parity,
    "demographic_parity": demographic_parity,
    "equalized_odds": equalized_odds,
    "predictive_parity": predictive_parity,
}
"""The constraints that a config can name."""
