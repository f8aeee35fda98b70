"""Checks of what a caller gives, shared by this package.

Each returns the value as a plain ``int`` or ``float``, so that what is stored is hashable,
comparable and JSON-able whatever number type came in.
"""

from __future__ import annotations

import math
import operator
from numbers import Real


def whole_number(name: str, value: object, *, least: int = 1, hint: str) -> int:
    """Return ``value`` as an ``int`` that is at least ``least``, or raise a ``ValueError``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, but got {value!r}: {hint}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, but got {number}: {hint}.")
    return number


def positive_number(name: str, value: object, *, most: float = math.inf, hint: str) -> float:
    """Return ``value`` as a finite ``float`` in (0, most], or raise a ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, but got {value!r}: {hint}.")
    number = float(value)
    if not math.isfinite(number) or number <= 0 or number > most:
        allowed = "positive and finite" if most == math.inf else f"in (0, {most:g}]"
        raise ValueError(f"{name} must be {allowed}, but got {number!r}: {hint}.")
    return number


def probability(name: str, value: object, *, hint: str) -> float:
    """Return ``value`` as a ``float`` strictly between 0 and 1, or raise a ``ValueError``."""
    number = positive_number(name, value, hint=hint)
    if number >= 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, but got {number!r}: {hint}.")
    return number


def cohort_of(population: object, cohort: object, *, of: str = "population") -> tuple[int, int]:
    """Return (population, cohort) as ``int`` with 1 ≤ cohort ≤ population, or raise."""
    users = whole_number(of, population, hint="give the number of users that cohorts come from")
    size = whole_number("cohort", cohort, hint="give the number of users expected in each round")
    if size > users:
        raise ValueError(
            f"cohort must not exceed {of}, but got cohort={size} and {of}={users}: "
            "choose a smaller cohort."
        )
    return users, size
