"""What may go into a plan: conventions, blocks, pairs of convention and neighbours, δ, caps.

What is checked here either comes back or is an error that says what was given, what was expected
and what to do about it. Conventions are the files of this folder (`fpfl.privacy.conventions.base`).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

from fpfl.numerics.checks import positive_number, probability, whole_number
from fpfl.privacy.accounting import Neighbours
from fpfl.privacy.conventions.base import REGISTER

for _found in iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")

SHARED = ("coins", "picked")
"""The conventions of a federation whose nodes add the noise in shares."""

_WHY_NOT_FIXED_SIZE = (
    "cohorts of a fixed size are accounted for with 'replace-one' neighbours only: when a user "
    "leaves, another fills the slot, so the total changes by up to 2C all the same"
)


class PrivacyWarning(UserWarning):
    """The settings are allowed, but promise less than they may seem to."""


class BudgetExhaustedError(RuntimeError):
    """A release that would exceed a budget was not made."""


@dataclass(frozen=True)
class Block:
    """A part of the statistics that is clipped and noised on its own.

    Parameters
    ----------
    name : str
        Name of the block.
    bound : float
        Clip bound C_b: the largest Euclidean norm of one user's part.
    share : float
        Share ρ_b of the budget 1/σ², in (0, 1]; the shares of all blocks add up to 1.
    """

    name: str
    bound: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a block's name must be a non-empty string, but got {self.name!r}.")
        bound = positive_number(
            f"the bound of block {self.name!r}", self.bound, hint="give its clip bound"
        )
        share = positive_number(
            f"the share of block {self.name!r}",
            self.share,
            most=1.0,
            hint="give its share of 1/σ², where all shares add up to 1",
        )
        object.__setattr__(self, "bound", bound)
        object.__setattr__(self, "share", share)


def checked_pair(convention: str, neighbours: str | None) -> str:
    """The neighbours of a convention, given or its own; refuse pairs without a proof."""
    if convention not in REGISTER:
        raise ValueError(f"convention must be one of {_quoted(REGISTER)}, but got {convention!r}.")
    allowed = REGISTER[convention].sensitivity
    if neighbours is None:
        return next(iter(allowed))
    if neighbours not in get_args(Neighbours):
        raise ValueError(
            f"neighbours must be one of {_quoted(get_args(Neighbours))}, but got {neighbours!r}."
        )
    if neighbours not in allowed and REGISTER[convention].shares:
        raise ValueError(
            f"convention {convention!r} cannot have {neighbours!r} neighbours: what is known of "
            "noise in shares is for users who are left out, and whom a server picks in place of "
            "another changes a total by 2C. Leave neighbours out."
        )
    if neighbours not in allowed:
        raise ValueError(
            f"convention {convention!r} cannot have {neighbours!r} neighbours: "
            f"{_WHY_NOT_FIXED_SIZE}. Leave neighbours out, or use convention='poisson'."
        )
    return neighbours


def checked_delta(delta: float | None, population: int, real: int | None) -> float:
    """δ, given or 1/(10 K); warn above that, refuse from 1/K on."""
    if delta is None:
        return 1 / (10 * population)
    value = probability("delta", delta, hint="leave it out for 1 / (10 * population)")
    if value >= 1 / population:
        raise ValueError(
            f"delta must be below 1 / population = {1 / population:.3g}, but got {value:g}: a δ "
            "that large allows to publish one user's data in full. Use 1 / (10 * population) = "
            f"{1 / (10 * population):.3g} or less, or leave delta out."
        )
    # With a hypothetical population δ is that population's matter, unless the real one is larger.
    users = max(population, real or 0)
    if value * 10 * users > 1 + 1e-9:
        warnings.warn(
            f"delta={value:g} is above 1 / (10 * {users}) = {1 / (10 * users):.3g}: the chance "
            "that the guarantee fails for some user is not small. Leave delta out to use "
            "1 / (10 * population).",
            PrivacyWarning,
            stacklevel=_stacklevel_of_caller(),
        )
    return value


def checked_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks, with different names and shares that add up to 1."""
    parts = tuple(blocks)
    for part in parts:
        if not isinstance(part, Block):
            raise ValueError(f"blocks must be Block objects, but got {part!r}.")
    if not parts:
        raise ValueError("blocks must not be empty: give at least Block('statistics', bound=C).")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"blocks must have different names, but got {_quoted(names)}.")
    total = math.fsum(part.share for part in parts)
    if abs(total - 1) > 1e-9:
        raise ValueError(
            f"the shares of all blocks must add up to 1, but {_quoted(names)} add up to "
            f"{total!r}: divide each by their sum."
        )
    return parts


def checked_cap(cap: int | None, convention: str, neighbours: str) -> int | None:
    """The cap on participations, where a proof covers it."""
    if cap is None:
        return None
    number = whole_number(
        "max_participations", cap, hint="give the most rounds that one user may take part in"
    )
    if neighbours not in REGISTER[convention].capped:
        raise ValueError(
            f"max_participations={number} cannot be combined with convention {convention!r} and "
            f"{neighbours!r} neighbours: there, past cohorts and the cap's state depend on each "
            "other under both neighbours, and no proof covers that. Use convention='poisson' with "
            "'zero-out' or 'add-remove' neighbours, or leave the cap out."
        )
    return number


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _stacklevel_of_caller() -> int:
    """Stack level, seen from the function that warns, of the first frame outside fpfl."""
    level, frame = 1, sys._getframe(1)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fpfl"
    ):
        level, frame = level + 1, frame.f_back
    return level
