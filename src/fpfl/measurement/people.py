"""People: whose rows are measured, from a table with its schema or a federated dataset.

What is asked for is turned into cells by what is declared alone; then rows are read. No row is an
error: what is not what was declared counts nowhere, and its user's other rows weigh no more for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import tail_threshold
from fpfl.data.schema import HALF_WIDTH
from fpfl.data.table_schema import CategoryColumn, NumberColumn, TableSchema
from fpfl.data.tables import STRANGE, table_columns
from fpfl.measurement.cells import (
    NOWHERE,
    CategoryCells,
    Cells,
    Floats,
    Ints,
    NumberCells,
    checked_columns,
)
from fpfl.measurement.counting import CodedRows

Columns = Sequence[str] | Mapping[str, tuple[float, float]]
"""Which columns: by their names, or with ranges to count them in."""

Symlog = Sequence[str] | Mapping[str, float | None]
"""Which have symmetric-log bins: by their names, or with thresholds, None for the usual one."""

LABEL = "label"
"""What a dataset's label is called, which has no name of its own."""

_AT_ONCE = 2**18
"""Samples that are read together; one user with more is by itself."""

_USERS = 2**14


@dataclass(frozen=True)
class People:
    """What is to be measured, and of whom.

    Parameters
    ----------
    columns
        The cells of every column.
    population
        K: declared, or counted.
    declared
        Whether it was declared.
    chunks
        Reads all rows, whole users at a time.
    """

    columns: tuple[Cells, ...]
    population: int
    declared: bool
    chunks: Callable[[], Iterator[CodedRows]]


def people_of_table(
    table: Any, schema: TableSchema, columns: Columns | None, bins: int, symlog: Symlog
) -> People:
    """A table's people. All of the columns' cells, some bytes each, are in memory."""
    cells = table_cells(schema, columns, bins, symlog)
    read = table_columns(table, schema, [each.name for each in cells])

    def chunks() -> Iterator[CodedRows]:
        codes = []
        for each in cells:
            if isinstance(each, NumberCells):
                codes.append(each.codes(read.numbers[each.name]))
            else:
                found = read.codes[each.name]
                strange = len(each.values) if each.other else NOWHERE
                codes.append(np.where(found == STRANGE, strange, np.maximum(found, NOWHERE)))
        yield CodedRows(tuple(codes), read.users)

    return People(cells, read.population, schema.population is not None, chunks)


def table_cells(
    schema: TableSchema, columns: Columns | None, bins: int, symlog: Symlog
) -> tuple[Cells, ...]:
    """The cells of a table's columns; those without centre, scale or shares where none is named."""
    known = _declared(schema)
    if columns is None:
        names = [feature.name for feature in schema.features if not feature.given]
        if not names:
            raise ValueError(
                "the schema gives centres, scales or shares for all of its features, and what is "
                "given costs nothing: there is nothing to measure. Name columns to measure them "
                "all the same"
            )
    else:
        names = list(columns)
    ranges = columns if isinstance(columns, Mapping) else {}
    _check_symlog(symlog, names)
    return checked_columns(
        [_cells(name, known.get(name), ranges.get(name), bins, symlog, known) for name in names]
    )


def _declared(schema: TableSchema) -> dict[str, NumberColumn | CategoryCells]:
    """What is declared of every column that can be measured."""
    known: dict[str, NumberColumn | CategoryCells] = {}
    label = schema.label
    if label.classes is not None:
        # What the table has: the cells of a merged class are counted one by one.
        texts = tuple(_text(cell) for cells in label.cells for cell in cells)
        known[label.column] = CategoryCells(label.column, texts)
    elif label.range is not None:
        known[label.column] = NumberColumn(label.column, label.range)
    for attribute in schema.attributes:
        known[attribute.name] = CategoryCells(attribute.name, tuple(map(_text, attribute.values)))
    for feature in schema.features:  # a feature has a cell for other values, an attribute none
        if isinstance(feature, CategoryColumn):
            feature_cells = CategoryCells(feature.name, tuple(map(_text, feature.values)), True)
            known[feature.name] = feature_cells
        else:
            known[feature.name] = feature
    return known


def _cells(
    name: str,
    declared: NumberColumn | CategoryCells | None,
    range: tuple[float, float] | None,
    bins: int,
    symlog: Symlog,
    known: Mapping[str, object],
) -> Cells:
    if declared is None:
        raise ValueError(
            f"the column {name!r} has no declared range or values; declared are {sorted(known)}. "
            "Values that are not declared cannot be counted: to name one that occurs would tell "
            "that somebody has it (it would take partition selection). Declare the column in the "
            "schema, e.g. age = [0, 120] or job = ['clerk', 'cook']"
        )
    if isinstance(declared, CategoryCells):
        if range is not None or name in symlog:
            raise ValueError(f"the column {name!r} has categories; expected no range or symlog")
        return declared
    low, high = declared.range if range is None else range
    if declared.transform == "quantile" and name not in symlog:
        symlog = [name]  # as training would measure it
    return _number(name, low, high, bins, symlog, missing=declared.indicator)


def _number(
    name: str, low: float, high: float, bins: int, symlog: Symlog, *, missing: bool = False
) -> NumberCells:
    threshold = None
    if name in symlog:
        given = symlog[name] if isinstance(symlog, Mapping) else None
        threshold = tail_threshold(low, high) if given is None else float(given)
    return NumberCells(name, float(low), float(high), bins, threshold, missing)


def _check_symlog(symlog: Symlog, names: Sequence[str]) -> None:
    strange = sorted(set(symlog) - set(names))
    if strange:
        raise ValueError(f"symlog names {strange}, which are not measured; measured are {names}")


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else str(value)


def people_of_dataset(
    data: FederatedDataset, columns: Columns | None, bins: int, symlog: Symlog
) -> People:
    """A dataset's people; its features are counted in the units that they are in."""
    cells, readers = _dataset_cells(data, columns, bins, symlog)

    def chunks() -> Iterator[CodedRows]:
        for first, last in _chunks(data.offsets.numpy()):
            starts, sizes = data.rows(np.arange(first, last), strict=False)
            before = np.cumsum(sizes) - sizes
            index = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
            features, labels, attributes = data.gather(index)
            samples = (
                features.double().cpu().numpy(),
                labels.double().cpu().numpy(),
                attributes.cpu().numpy(),
            )
            owner = np.repeat(np.arange(first, last), sizes)
            yield CodedRows(tuple(read(*samples) for read in readers), owner)

    return People(cells, data.K, data.schema.population is not None, chunks)


_Reader = Callable[[Floats, Floats, Ints], Ints]


def _dataset_cells(
    data: FederatedDataset, columns: Columns | None, bins: int, symlog: Symlog
) -> tuple[tuple[Cells, ...], list[_Reader]]:
    schema = data.schema
    if len(schema.shape) != 1:
        raise ValueError(
            f"the samples have shape {schema.shape}; expected columns, shape (number of columns,)"
        )
    names = list(schema.feature_names or (f"feature {i}" for i in range(schema.shape[0])))
    asked = names if columns is None else list(columns)
    _check_symlog(symlog, asked)
    known: dict[str, tuple[Cells, _Reader]] = {}
    if schema.classes is not None:
        classes = schema.class_names or tuple(map(str, range(schema.classes)))
        known[LABEL] = CategoryCells(LABEL, classes), lambda x, y, a: _whole(y, len(classes))
    for number, attribute in enumerate(schema.attributes):
        known[attribute.name] = (
            CategoryCells(attribute.name, attribute.values),
            _attribute(number, len(attribute.values)),
        )
    ranges = dict(columns) if isinstance(columns, Mapping) else {}
    cells: list[Cells] = []
    readers: list[_Reader] = []
    for name in asked:
        if name in known and name not in names:
            cell, reader = known[name]
        else:
            cell, reader = _feature(data, names, name, ranges.get(name), bins, symlog, known)
        cells.append(cell)
        readers.append(reader)
    return checked_columns(cells), readers


def _attribute(number: int, count: int) -> _Reader:
    return lambda x, y, a: _whole(a[:, number], count)


def _feature(
    data: FederatedDataset,
    names: list[str],
    name: str,
    range: tuple[float, float] | None,
    bins: int,
    symlog: Symlog,
    known: Mapping[str, object],
) -> tuple[Cells, _Reader]:
    if name not in names:
        raise ValueError(
            f"there is no column {name!r}; there are {names[:30] + sorted(known)}. Values that are "
            "not declared are not counted: declare an attribute with its values"
        )
    if range is None and data.schema.feature_ranges is None:
        raise ValueError(
            f"the column {name!r} has no declared range: give columns={{{name!r}: (low, high)}} in "
            "the units that the features are in, from public knowledge, or declare "
            "Schema(feature_ranges=...) where they were scaled by those"
        )
    low, high = (-HALF_WIDTH, HALF_WIDTH) if range is None else range
    cells = _number(name, low, high, bins, symlog)
    place = names.index(name)
    return cells, lambda x, y, a: cells.codes(x[:, place])


def _whole(values: Any, count: int) -> Ints:
    """Codes from 0 to count − 1; all else counts nowhere."""
    with np.errstate(invalid="ignore"):
        good = (values >= 0) & (values < count) & (values == np.floor(values))
    return np.where(good, values, NOWHERE).astype(np.int64)


def _chunks(offsets: Ints) -> Iterator[tuple[int, int]]:
    """Cut the users into runs of few samples and few users."""
    first, users = 0, len(offsets) - 1
    while first < users:
        room = int(np.searchsorted(offsets, offsets[first] + _AT_ONCE, side="right")) - 1
        last = min(max(room, first + 1), first + _USERS, users)
        yield first, last
        first = last
