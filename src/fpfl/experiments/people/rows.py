"""The rows: for each table which model is trained, how often, and which of them were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from fpfl.experiments.people.tables import Table, tables
from fpfl.fairness.constraints import (
    Constraint,
    demographic_parity,
    equalized_odds,
    fnr_parity,
)

ALPHA = 0.02

EPSILONS: tuple[float | None, ...] = (0.1, 0.5, 2.0, 8.0, None)

CONSTRAINTS: dict[str, Callable[..., Constraint]] = {
    "fnr": fnr_parity,
    "odds": equalized_odds,
    "parity": demographic_parity,
}

BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.04)
"""Bounds of fairlearn's reduction: one of them has no larger a training gap than ours."""

SMALL_COHORT = 200
"""m of the rows that are compared with docs/robust.md's."""

CHEAP = ("adult-2", "adult-1", "adult-10", "adult-hours", "compas", "credit")
MANY, FEW = 10, 3
"""Seeds of a cheap table, and of the others."""

REDUCTION, LOGISTIC = "reduction", "logistic regression"
FL, PFL, OURS, TUNED = "FL", "PFL", "FPFL-1G", "FPFL-1G tuned"
MEAN, LEAST_SQUARES = "mean", "least squares"

FIXED = (REDUCTION, LOGISTIC, MEAN, LEAST_SQUARES)
"""What has no randomness: one seed is enough."""


@dataclass(frozen=True)
class Row:
    """One row: a model of a table.

    Parameters
    ----------
    table
        Its table's name.
    algorithm
        One of this module's names.
    constraint
        What is to be equal, by its name here; None where nothing is.
    epsilon
        ε; None without privacy.
    bound
        Of the reduction.
    cohort
        m, where it is not the default.
    """

    table: str
    algorithm: str
    constraint: str | None = None
    epsilon: float | None = None
    bound: float | None = None
    cohort: int | None = None

    @property
    def name(self) -> str:
        """``table/algorithm/constraint/epsilon``, with the bound or cohort where it has one."""
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        parts = [self.table, self.algorithm, self.constraint or "-", epsilon]
        parts += [] if self.bound is None else [f"bound={self.bound:g}"]
        parts += [] if self.cohort is None else [f"m={self.cohort}"]
        return "/".join(parts)

    @property
    def seeds(self) -> int:
        """How many seeds it has by default."""
        if self.algorithm in FIXED:
            return 1
        return MANY if self.table in CHEAP else FEW

    def as_dict(self) -> dict[str, Any]:
        """Its fields, which are the first of a result's."""
        return asdict(self)


@dataclass(frozen=True)
class Selection:
    """Which rows were asked for; an empty list means all.

    Parameters
    ----------
    tables, constraints
        Names.
    epsilons
        Values of ε, None for none. Models without privacy are compared with those of any ε: they
        are left out only by a list without None.
    pattern
        A glob on `Row.name`; after an exclamation mark, of rows that are left out.
    seeds
        How many at most; None for each row's own number.
    """

    tables: Sequence[str] = ()
    constraints: Sequence[str] = ()
    epsilons: Sequence[float | None] = ()
    pattern: str = "*"
    seeds: int | None = None

    def __post_init__(self) -> None:
        names = [table.name for table in tables()]
        for what, given, known in (
            ("--tables", self.tables, names),
            ("--constraints", self.constraints, list(CONSTRAINTS)),
        ):
            strange = [each for each in given if each not in known]
            if strange:
                raise ValueError(f"{what} names {strange}; expected some of {', '.join(known)}")
        if any(each is not None and not each > 0 for each in self.epsilons):
            raise ValueError(
                f"--epsilons is {list(self.epsilons)}; expected positive numbers, or none"
            )
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds is {self.seeds}; give at least 1")

    def rows(self) -> list[Row]:
        """The rows, in the order of the tables."""
        found = [row for table in tables() for row in all_rows(table) if self._wants(row)]
        if not found:
            raise ValueError(
                "no row is like that; a row is called table/algorithm/constraint/epsilon, e.g. "
                f"{Row('credit', OURS, 'fnr', 2.0).name!r}"
            )
        return found

    def work(self) -> list[tuple[Row, int]]:
        """Rows with their seeds."""
        return [
            (row, seed)
            for row in self.rows()
            for seed in range(row.seeds if self.seeds is None else min(self.seeds, row.seeds))
        ]

    def _wants(self, row: Row) -> bool:
        return (
            (not self.tables or row.table in self.tables)
            and (not self.constraints or row.constraint in (None, *self.constraints))
            and (not self.epsilons or row.epsilon in self.epsilons)
            and self._matches(row.name)
        )

    def _matches(self, name: str) -> bool:
        wanted = self.pattern.removeprefix("!")
        return fnmatchcase(name.lower(), wanted.lower()) != self.pattern.startswith("!")


def all_rows(table: Table) -> list[Row]:
    """The rows of a table."""
    name = table.name
    if table.regression:
        plain = [Row(name, MEAN), Row(name, LEAST_SQUARES)]
        return [*plain, Row(name, FL), *(Row(name, PFL, None, e) for e in EPSILONS if e)]
    rows = [Row(name, LOGISTIC)]
    rows += [Row(name, REDUCTION, c, bound=b) for c in CONSTRAINTS for b in BOUNDS]
    rows += [Row(name, PFL if epsilon else FL, None, epsilon) for epsilon in EPSILONS]
    rows += [Row(name, OURS, c, epsilon) for c in CONSTRAINTS for epsilon in EPSILONS]
    rows.append(Row(name, TUNED, "fnr", 2.0))
    if name == "adult-2":
        rows += [Row(name, OURS, "fnr", e, cohort=SMALL_COHORT) for e in (2.0, 0.5, 0.1)]
    return rows


def parsed_epsilons(text: str) -> list[float | None]:
    """``0.5,2,none`` as numbers and None."""
    try:
        words = [word.strip() for word in text.split(",") if word.strip()]
        return [None if word == "none" else float(word) for word in words]
    except ValueError as error:
        raise ValueError(f"--epsilons is {text!r}; expected e.g. 0.5,2,none") from error
