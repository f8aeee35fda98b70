"""From a table with a declared schema to a federated dataset."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.data.checks import checked_by_user, refusing
from fpfl.data.federated import MOST_MISSING, FederatedDataset
from fpfl.data.inputs import InputColumn, tail_threshold
from fpfl.data.schema import HALF_WIDTH, scale_by_ranges
from fpfl.data.table_files import Rows, bare, table_rows, title
from fpfl.data.table_schema import (
    CategoryColumn,
    NumberColumn,
    Scalar,
    TableSchema,
    read_table_schema,
)
from fpfl.fairness.groups import UNKNOWN

STRANGE = -2
"""The code of a value that is not declared."""

LACKING = ("?", "-", "na", "NA", "n/a", "N/A", "nan", "NaN", "null", "NULL", "None", "none")
"""Texts that often mean "no value"; what they mean in a table is for its schema to say."""


def read_table(table: Any, schema: TableSchema | str | Path) -> FederatedDataset:
    """Read a table of people: one row a sample.

    Parameters
    ----------
    table
        A CSV file (UTF-8, with a header), a Parquet file (needs ``fpfl[parquet]``) or a pandas
        data frame.
    schema
        What is public about it: a `TableSchema`, or the path of a schema file.

    Returns
    -------
    FederatedDataset
        Users in the order of their ids (as numbers where all are whole, as texts otherwise), then
        those without a row, where a larger population is declared. A cell that the schema does
        not allow is a ValueError that says where it is and what was expected.
    """
    if not isinstance(schema, TableSchema):
        schema = read_table_schema(schema)
    return table_and_ids(table, schema)[0]


def table_and_ids(table: Any, schema: TableSchema) -> tuple[FederatedDataset, frozenset[str]]:
    """A table's people, and the ids that they have there; none where every row is a user."""
    where = title(table)
    encode = _Encoder(schema, where)
    texts, numbers = encode.wanted()
    parts = [encode(rows) for rows in table_rows(table, texts, numbers, schema.separator)]
    if not any(len(part[0]) for part in parts):
        raise ValueError(f"{where} has a header and no rows; there is nobody to learn from")
    features, labels, kept, attributes, users = (
        np.concatenate(pieces) for pieces in zip(*parts, strict=True)
    )
    users, seen = encode.in_order(users)
    columns = (features[kept], labels[kept], attributes[kept], users[kept])
    try:
        return _dataset(*columns, seen, schema), frozenset(encode.users)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@dataclass(frozen=True)
class TableColumns:
    """Some columns of a table as they are: nothing scaled, filled or left out.

    Parameters
    ----------
    numbers
        Columns of numbers: NaN where there is none, infinity for what is no number.
    codes
        Columns of categories: the number of the declared value, `UNKNOWN` or `STRANGE`.
    users
        Every row's user, numbered in the order of their ids.
    population
        K: declared, or how many users there are.
    """

    numbers: dict[str, NDArray[np.float64]]
    codes: dict[str, NDArray[np.int64]]
    users: NDArray[np.int64]
    population: int


def table_columns(table: Any, schema: TableSchema, names: Collection[str]) -> TableColumns:
    """Read declared columns, with whatever is in them: no cell is an error, for it is its user's.

    A line that cannot be read as a row belongs to nobody.
    """
    encode = _Encoder(schema, title(table))
    texts, numbers = (
        [name for name in wanted if name in {*names, schema.user}] for wanted in encode.wanted()
    )
    with checked_by_user():
        parts = [
            encode.columns(rows, texts, numbers)
            for rows in table_rows(table, texts, numbers, schema.separator)
        ]
    users = np.concatenate([np.zeros(0, dtype=np.int64), *(part[""] for part in parts)])
    users, seen = encode.in_order(users)

    def whole(name: str, kind: type) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype=kind), *(part[name] for part in parts)])

    return TableColumns(
        {name: whole(name, np.float64) for name in numbers},
        {name: whole(name, np.int64) for name in texts if name in names},
        users,
        schema.population or seen,
    )


def _dataset(
    features: NDArray[np.float32],
    labels: NDArray[Any],
    attributes: NDArray[np.int64],
    users: NDArray[np.int64],
    seen: int,
    schema: TableSchema,
) -> FederatedDataset:
    # More users than declared is nothing that anybody may see: all of them stay.
    population = max(schema.population or 0, seen)
    if population > seen + MOST_MISSING:
        raise ValueError(
            f"it has {seen} users, and the schema declares a population of {population}; correct "
            "the number"
        )
    order = np.argsort(users, kind="stable")
    sizes = np.bincount(users, minlength=population)
    return FederatedDataset(
        torch.from_numpy(features[order]),
        torch.from_numpy(labels[order]),
        torch.from_numpy(attributes[order]),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)),
        schema.schema(),
        columns=input_columns(schema),
    )


def input_columns(schema: TableSchema) -> tuple[InputColumn, ...]:
    """What the schema says about the inputs that its features become, in their units.

    A range [low, high] is mapped to [−3, 3]: a unit of the table is 6/(high − low) of an input's.
    """
    found: list[InputColumn] = []
    first = 0
    for feature in schema.features:
        if isinstance(feature, NumberColumn):
            found.append(number_input(feature, first))
        else:
            shares = feature.shares
            if shares is not None:
                shares = (*shares, max(0.0, 1.0 - math.fsum(shares)))
            size = len(feature.outputs)
            found.append(InputColumn(feature.name, first, size, number=False, shares=shares))
        first += len(feature.outputs)
    label = schema.label
    if label.range is not None:
        number = NumberColumn(label.column, label.range, centre=label.centre, scale=label.scale)
        found.append(number_input(number, first))
    return tuple(found)


def number_input(feature: NumberColumn, first: int) -> InputColumn:
    """The input that a number becomes, and, with an indicator, the one behind it."""
    low, high = feature.range
    unit = 2.0 * HALF_WIDTH / (high - low)
    middle = low / 2 + high / 2
    long = feature.tail is not None or feature.transform is not None
    return InputColumn(
        feature.name,
        first,
        indicator=first + 1 if feature.indicator else None,
        centre=None if feature.centre is None else (feature.centre - middle) * unit,
        width=None if feature.scale is None else feature.scale * unit,
        origin=-middle * unit if long else 0.0,
        threshold=tail_threshold(low, high) * unit if long else None,
        log=feature.transform == "log",
        ranks=feature.transform == "quantile",
        quantiles=None
        if feature.quantiles is None
        else tuple((each - middle) * unit for each in feature.quantiles),
    )


class _Encoder:
    """Turns rows of cells into features, labels, attribute codes and user numbers."""

    def __init__(self, schema: TableSchema, where: str) -> None:
        self.schema = schema
        self.where = where
        self.missing = frozenset({"", *schema.missing})
        self.users: dict[str, int] = {}
        self.anonymous = 0
        self.broken = np.zeros(0, dtype=bool)
        classes = schema.label.classes
        cells = schema.label.cells
        self.classes = None if classes is None else _Codes(tuple(c for each in cells for c in each))
        # A cell's class, by its place among the cells of all classes.
        self.class_of = np.repeat(np.arange(len(cells)), [len(each) for each in cells])
        self.attributes = {a.name: _Codes(a.values) for a in schema.attributes}
        self.categories = {
            f.name: _Codes(f.values) for f in schema.features if isinstance(f, CategoryColumn)
        }

    def wanted(self) -> tuple[list[str], list[str]]:
        """The columns that are needed as texts, and as numbers."""
        s = self.schema
        texts = [*self.attributes, *self.categories]
        numbers = [f.name for f in s.features if isinstance(f, NumberColumn)]
        (numbers if self.classes is None else texts).append(s.label.column)
        if s.user is not None:
            texts.append(s.user)
        return list(dict.fromkeys(texts)), numbers

    def __call__(self, rows: Rows) -> tuple[NDArray[Any], ...]:
        """Features, labels, which rows are kept, attribute codes, users' numbers."""
        self.broken = np.zeros(rows.count, dtype=bool)
        features, (labels, kept) = self._features(rows), self._labels(rows)
        groups, users = self._groups(rows), self._users(rows)
        # Not a number in any column: their user sends zero.
        features[self.broken] = np.nan
        return features, labels, kept | self.broken, groups, users

    def columns(
        self, rows: Rows, texts: Collection[str], numbers: Collection[str]
    ) -> dict[str, NDArray[Any]]:
        """Columns as codes and as numbers; under the empty name the users' numbers."""
        self.broken = np.zeros(rows.count, dtype=bool)
        known = {**self.attributes, **self.categories}
        if self.classes is not None:
            known[self.schema.label.column] = self.classes
        found: dict[str, NDArray[Any]] = {"": self._users(rows)}
        found |= {name: self._codes(rows, name, known[name]) for name in texts if name in known}
        return found | {name: self._numbers(rows, name, "a number") for name in numbers}

    def in_order(self, users: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Users numbered by their ids, whatever the order of rows; and how many there are."""
        if self.schema.user is None:
            return users, self.anonymous
        ids = list(self.users)
        whole = all(text.isascii() and text.removeprefix("-").isdigit() for text in ids)
        number = {text: int(text) if whole else 0 for text in ids}
        place = np.empty(len(ids), dtype=np.int64)
        for rank, text in enumerate(sorted(ids, key=lambda text: (number[text], text))):
            place[self.users[text]] = rank
        return place[users], len(ids)

    def _features(self, rows: Rows) -> NDArray[np.float32]:
        columns: list[NDArray[Any]] = []
        for feature in self.schema.features:
            if isinstance(feature, NumberColumn):
                low, high = feature.range
                expected = f"a number; the declared range is [{low:g}, {high:g}]"
                values = self._numbers(rows, feature.name, expected)
                lacking = np.isnan(values)
                scaled = scale_by_ranges(values[:, None], [feature.range])
                columns.append(np.where(lacking[:, None], 0.0, scaled))
                if feature.indicator:
                    columns.append(lacking[:, None])
            else:
                codes = self._codes(rows, feature.name, self.categories[feature.name])
                size = len(feature.outputs)
                # Undeclared values have the last column, and missing ones none.
                codes = np.where(codes == STRANGE, size - 1, codes)
                columns.append(codes[:, None] == np.arange(size))
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def _labels(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Labels, and which rows have one; the others are left out, where that is declared."""
        label = self.schema.label
        labels: NDArray[Any]
        if self.classes is not None:
            labels = self._codes(rows, label.column, self.classes)
            expected = _listed(tuple(cell for each in label.cells for cell in each))
            self._refuse(rows, label.column, labels == STRANGE, expected)
            kept = labels != UNKNOWN
            known = labels >= 0
            labels[known] = self.class_of[labels[known]]
        else:
            assert label.range is not None  # the schema checked it
            low, high = label.range
            expected = f"a number in the declared range [{low:g}, {high:g}]"
            labels = self._numbers(rows, label.column, expected)
            kept = ~np.isnan(labels)
            if label.outside == "refuse":
                hint = f"{expected}; widen it, or declare label.outside = 'clamp'"
                self._refuse(rows, label.column, (labels < low) | (labels > high), hint)
            labels = labels.clip(low, high).astype(np.float32)
        if label.missing == "refuse":
            hint = f"{expected}. To leave rows without a label out, declare label.missing = 'drop'"
            self._refuse(rows, label.column, ~kept, hint)
        return labels, kept

    def _groups(self, rows: Rows) -> NDArray[np.int64]:
        columns = [np.zeros((rows.count, 0), dtype=np.int64)]
        for attribute in self.schema.attributes:
            codes = self._codes(rows, attribute.name, self.attributes[attribute.name])
            expected = _listed(attribute.values)
            self._refuse(rows, attribute.name, codes == STRANGE, expected)
            if not attribute.unknown:
                hint = f"{expected}. Where it may be missing, declare unknown = true"
                self._refuse(rows, attribute.name, codes == UNKNOWN, hint)
            columns.append(codes[:, None])
        return np.concatenate(columns, axis=1)

    def _users(self, rows: Rows) -> NDArray[np.int64]:
        if self.schema.user is None:
            self.anonymous += rows.count
            return np.arange(self.anonymous - rows.count, self.anonymous)
        cells, known = rows.texts[self.schema.user], self.users
        lacking = np.array([cell in self.missing for cell in cells], dtype=bool)
        hint = "an id: whose row it is decides what is protected together"
        self._refuse(rows, self.schema.user, lacking, hint)
        numbers = [known.setdefault(bare(cell), len(known)) for cell in cells]
        return np.array(numbers, dtype=np.int64)

    def _codes(self, rows: Rows, name: str, codes: _Codes) -> NDArray[np.int64]:
        """The number of each cell's value; UNKNOWN where it is missing, STRANGE if undeclared."""
        cells = rows.texts[name]
        found = {
            cell: UNKNOWN if {cell, bare(cell)} & self.missing else codes(cell)
            for cell in set(cells)
        }
        return np.array([found[cell] for cell in cells], dtype=np.int64)

    def _numbers(self, rows: Rows, name: str, expected: str) -> NDArray[np.float64]:
        """A column as finite numbers, NaN where one is missing."""
        cells = rows.numbers[name]
        if isinstance(cells, list):
            found = {cell: cell_number(cell, self.missing) for cell in set(cells)}
            values = np.array([found[cell] for cell in cells], dtype=np.float64)
        else:
            absent = [cell_number(text) for text in self.missing]  # e.g. -99
            values = np.where(np.isin(cells, absent) & np.isfinite(cells), np.nan, cells)
        self._refuse(rows, name, np.isinf(values), expected)
        return values

    def _refuse(self, rows: Rows, name: str, bad: NDArray[np.bool_], expected: str) -> None:
        """Raise for the first bad cell, or remember the rows where a user's are its own matter."""
        if not bad.any():
            return
        if not refusing():
            self.broken |= bad
            return
        row = int(bad.argmax())
        cell = rows.texts[name][row] if name in rows.texts else rows.numbers[name][row]
        shown = cell if isinstance(cell, str) else f"{cell:g}"
        given = "the cell is empty" if shown in ("", "nan") else f"it says {shown[:60]!r}"
        more = ""
        if shown in LACKING:
            more = f". If {shown!r} means that there is no value, declare missing = [{shown!r}]"
        raise ValueError(
            f"{self.where}, {rows.place(row)}, column {name!r}: {given}; expected {expected}{more}"
        )


class _Codes:
    """From a cell to the number of the declared value that it has.

    A declared number is met by any way to write it, a truth value in upper and lower case, a text
    by itself alone; but "1" and "1.0", which one table may have for the other, by each other.
    """

    def __init__(self, values: tuple[Scalar, ...]) -> None:
        self.known: dict[str, int] = {}
        self.bare: dict[str, int] = {}
        self.numbers: dict[float, int] = {}
        for code, value in enumerate(values):
            if isinstance(value, str):
                self.known[value.strip()] = code
                self.bare.setdefault(bare(value.strip()), code)
            elif isinstance(value, bool):
                text = str(value)
                self.known |= dict.fromkeys((text, text.lower(), text.upper()), code)
            else:
                self.numbers[float(value)] = code

    def __call__(self, cell: str) -> int:
        code = self.known.get(cell)
        if code is None and self.numbers:
            code = self.numbers.get(cell_number(cell))
        if code is None:
            code = self.bare.get(bare(cell))
        return STRANGE if code is None else code


def cell_number(cell: str, missing: frozenset[str] = frozenset()) -> float:
    """A cell's number; NaN where it is missing, and infinity where it is no finite number."""
    if cell in missing:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        return math.inf
    # Python's own way to write 1000, and not a table's.
    return value if math.isfinite(value) and "_" not in cell else math.inf


def _listed(values: tuple[Scalar, ...]) -> str:
    shown = ", ".join(repr(value) for value in values[:12])
    return f"one of the declared values {shown}" + (", ..." if values[12:] else "")
