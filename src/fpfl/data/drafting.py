"""A draft of a table's schema, made by looking at the table, for a person to check.

Looking is a release that nothing counts: the draft is marked ``source = "data"``, and training
with privacy refuses it until somebody has checked it against public knowledge and says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fpfl.data.table_files import column_names, table_rows
from fpfl.data.table_schema import (
    AttributeColumn,
    CategoryColumn,
    Label,
    NumberColumn,
    Scalar,
    TableSchema,
)
from fpfl.data.tables import LACKING, cell_number

MOST_VALUES = 50
"""A column of texts with more different ones is left out."""

MOST_CODES = 10
"""A column of whole numbers with no more different ones is taken for codes."""

MOST_EXACT = 2**53
"""Whole numbers below are their own as floats."""

NEARLY = 0.95
"""A column of whole numbers that differ in so many of the rows is left out: it numbers them."""

_LOOKED = 100_000
"""Cells of a column in which values are told apart."""

_IDS = re.compile(r"(?i:(^|[\W_])(id|ids|uuid|guid))$|[a-z0-9](Id|ID)$")
"""How columns that say who somebody is are called: id, user_id, userId, "Patient ID"."""

_NOTE = """\
# A draft of what is public about {name}, made by looking at it. Check every line:
# ranges, values and numbers of users must follow from what anybody may know (a questionnaire,
# a law, a standard), not from these people's data. Widen what is too narrow, add values that
# could occur, remove columns that should not be used. Then change the next line to
# source = "declared": training with epsilon refuses it as it is.
"""


@dataclass
class _Seen:
    """What was seen of a column: its range while it holds numbers, its values while few."""

    numbers: bool = True
    whole: bool = True
    low: float = math.inf
    high: float = -math.inf
    absent: bool = False
    values: dict[str, None] = field(default_factory=dict)
    distinct: set[str] = field(default_factory=set)
    told: int = 0

    def add(self, cells: list[str], absent: set[str]) -> None:
        for cell in cells:
            if cell == "" or cell in LACKING:
                self.absent = True
                absent.add(cell)
                continue
            if len(self.values) <= MOST_VALUES:
                self.values.setdefault(cell)
            if self.numbers:
                self._number(cell)
            if self.numbers and self.whole and self.told < _LOOKED:
                self.told += 1
                self.distinct.add(cell)

    def _number(self, cell: str) -> None:
        value = cell_number(cell)
        if math.isinf(value):
            self.numbers = False
            return
        self.whole = self.whole and value == int(value)
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def numbered(self) -> bool:
        """Whether nearly every row has a whole number of its own: it is no feature, but a name.

        Amounts can be as different in small tables; a person who checks the draft puts them back.
        Numbers with fractions are measurements, however different.
        """
        own = len(self.distinct) >= NEARLY * self.told
        return self.numbers and self.whole and len(self.values) > MOST_VALUES and own

    @property
    def ranged(self) -> bool:
        """Whether it is a number to measure by, and not a code."""
        few = self.whole and len(self.values) <= MOST_CODES
        return self.numbers and not few and self.low < self.high

    @property
    def listed(self) -> tuple[Scalar, ...]:
        """Its values, in order; codes as numbers, which are met however they are written."""
        if self.numbers and self.whole and max(abs(self.low), abs(self.high)) < MOST_EXACT:
            return tuple(sorted({int(float(text)) for text in self.values}))
        key = float if self.numbers else str
        return tuple(sorted(self.values, key=lambda text: (key(text), text)))


def draft_schema(
    table: str | Path, *, label: str, user: str | None = None, groups: Sequence[str] = ()
) -> tuple[TableSchema, dict[str, str]]:
    """Look at a table; a draft of its schema, and why columns were left out."""
    names = [name for name in column_names(table) if name]
    seen = {name: _Seen() for name in dict.fromkeys([label, *groups, *names]) if name != user}
    ids: dict[str, None] = {}
    absent: set[str] = set()
    rows = 0
    for part in table_rows(table, [*seen, *([user] if user else [])], ()):
        rows += part.count
        for name, column in seen.items():
            column.add(part.texts[name], absent)
        if user is not None:
            ids |= dict.fromkeys(part.texts[user])
    if not rows:
        raise ValueError(f"{table} has a header and no rows; there is nothing to look at")
    for name in (label, *groups):
        if len(seen[name].values) < 2:
            raise ValueError(
                f"{table}: the column {name!r} has {len(seen[name].values)} different values; "
                "expected two or more"
            )
    for name in groups:
        if len(seen[name].values) > MOST_VALUES:
            raise ValueError(
                f"{table}: the column {name!r} has more than {MOST_VALUES} different values; each "
                "would be a group. Give a column with fewer, e.g. with ages in bins"
            )
    features, left_out = _features(names, seen, {label, *groups})
    if not features:
        raise ValueError(f"{table}: no column beside {[label, *groups]} can be a feature")
    drafted = TableSchema(
        label=_label(label, seen[label], str(table)),
        attributes=tuple(
            AttributeColumn(name, seen[name].listed, unknown=seen[name].absent) for name in groups
        ),
        features=tuple(features),
        user=user,
        population=None if user is None else len(ids),
        samples_per_user=None if user is None else round(rows / len(ids), 2),
        missing=tuple(sorted(absent - {""})),
        source="data",
    )
    return drafted, left_out


def draft_text(name: str, drafted: TableSchema, left_out: dict[str, str]) -> str:
    """A draft as a file for a person to read."""
    lines = [
        f"# {column!r} is not used: {why}".replace("\n", " ") for column, why in left_out.items()
    ]
    return "\n".join([_NOTE.format(name=name) + drafted.toml().rstrip("\n"), *lines]) + "\n"


def _label(name: str, seen: _Seen, where: str) -> Label:
    missing = "drop" if seen.absent else "refuse"
    if seen.ranged:
        return Label(name, range=(seen.low, seen.high), missing=missing)  # type: ignore[arg-type]
    if len(seen.values) > MOST_VALUES:
        raise ValueError(
            f"{where}: the label {name!r} has more than {MOST_VALUES} different texts; expected "
            "classes, or numbers for a regression"
        )
    return Label(name, seen.listed, missing=missing)  # type: ignore[arg-type]


def _features(
    names: Sequence[str], seen: dict[str, _Seen], others: set[str]
) -> tuple[list[NumberColumn | CategoryColumn], dict[str, str]]:
    found: list[NumberColumn | CategoryColumn] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if name in others or name not in seen:
            continue
        column = seen[name]
        if len(column.values) < 2:
            left_out[name] = "it has one value or none"
        elif _IDS.search(name.strip()) and len(column.values) > MOST_VALUES:
            left_out[name] = "its name and its many values are those of an identifier"
        elif column.numbered:
            left_out[name] = (
                "it looks like an identifier, with a whole number of its own in nearly every row; "
                "if it is a measurement, declare its public range"
            )
        elif column.ranged:
            found.append(NumberColumn(name, (column.low, column.high), column.absent))
        elif len(column.values) <= MOST_VALUES:
            found.append(CategoryColumn(name, column.listed))
        else:
            left_out[name] = f"it has more than {MOST_VALUES} different texts"
    return found, left_out
