"""Checks of what an evaluation is given: each says what came, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fpfl.fairness.constraints import Constraint
from fpfl.fairness.groups import Attribute


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


def _check_classes(what: str, values: Tensor, classes: int, hint: str) -> None:
    if values.is_floating_point():
        raise ValueError(f"{what} are {values.dtype}; expected whole numbers; {hint}")
    if bool(((values < 0) | (values >= classes)).any()):
        raise ValueError(
            f"{what} run from {int(values.min())} to {int(values.max())}; "
            f"expected classes 0 to {classes - 1}; {hint}"
        )
