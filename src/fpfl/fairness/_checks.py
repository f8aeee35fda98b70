"""Checks of what an evaluation is given: each says what came, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fpfl.fairness.constraints import Constraint
from fpfl.fairness.groups import UNKNOWN, Attribute

_FEWEST = 20
"""Replicates below which no quantile of them is worth reading."""


def check_settings(
    classes: int | None,
    label_range: tuple[float, float] | None,
    constraint: Constraint | None,
    bootstrap: int,
    confidence: float,
) -> None:
    """Refuse settings that contradict each other or make no sense."""
    if classes is None and label_range is None:
        raise ValueError(
            "classes is None, which means a regression, and label_range is not given; give the "
            "declared (low, high) of the labels, or the number of classes"
        )
    if classes is not None and classes < 2:
        raise ValueError(f"classes is {classes}; give at least 2, or None for a regression")
    kind = "regression" if classes is None else "classification"
    if constraint is not None and constraint.kind != kind:
        raise ValueError(
            f"the constraint {constraint.name!r} is for {constraint.kind}, but classes is "
            f"{classes}, which means {kind}; give a constraint on rates for {kind}"
        )
    if bootstrap != 0 and bootstrap < _FEWEST:
        raise ValueError(
            f"bootstrap is {bootstrap}; give at least {_FEWEST} replicates (1,000 is usual), or 0 "
            "for no intervals"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")


def check_samples(p: Tensor, y: Tensor, users: Tensor | None, classes: int | None) -> None:
    """Refuse predictions p, labels y and users that are not one a sample, or of the wrong kind."""
    n = y.numel()
    if n == 0 or y.shape != (n,) or p.shape != (n,):
        raise ValueError(
            f"predictions have shape {tuple(p.shape)} and labels {tuple(y.shape)}; expected (n,) "
            "for both with n > 0: one class for each sample (scores.argmax(-1)), or one real number"
        )
    if users is not None and (users.shape != (n,) or users.is_floating_point()):
        raise ValueError(
            f"users is {users.dtype} of shape {tuple(users.shape)}; expected whole numbers of "
            f"shape ({n},), one for each sample: number the users first"
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


def check_attributes(a: Tensor, declared: Sequence[Attribute], n: int) -> None:
    """Refuse codes that are not those of the declared attributes."""
    if a.shape != (n, len(declared)):
        raise ValueError(
            f"attribute codes have shape {tuple(a.shape)}; expected ({n}, {len(declared)}): one "
            f"row for each sample, one column for each of {[x.name for x in declared]}"
        )
    if a.is_floating_point():
        raise ValueError(f"attribute codes are {a.dtype}; expected whole numbers: call .long()")
    for attribute, codes in zip(declared, a.unbind(dim=1), strict=True):
        lowest = UNKNOWN if attribute.unknown else 0
        if bool(((codes < lowest) | (codes >= len(attribute.values))).any()):
            raise ValueError(
                f"codes of attribute {attribute.name!r} run from {int(codes.min())} to "
                f"{int(codes.max())}; expected {lowest} to {len(attribute.values) - 1}"
                + ("" if attribute.unknown else " (declare unknown=True to allow -1)")
            )
