"""Tables as batches of rows: CSV files, Parquet files and data frames.

No more than a batch of cells is ever held as Python objects.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.data.checks import refusing
from fpfl.data.table_schema import SEPARATORS

BATCH = 16_384
"""Rows that are held as Python objects at a time."""

PARQUET = b"PAR1"
"""How a Parquet file begins."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Parameters
    ----------
    count
        How many.
    texts
        Columns as texts, stripped; empty where there is no value.
    numbers
        Columns as numbers, NaN where there is no value; or as texts, where the table has those.
    place
        Where a row is, in words: "line 7".
    """

    count: int
    texts: Mapping[str, list[str]]
    numbers: Mapping[str, NDArray[np.float64] | list[str]]
    place: Callable[[int], str]


def title(table: Any) -> str:
    """What a table is called in messages."""
    return "the data frame" if hasattr(table, "columns") else str(table)


def column_names(table: Any, separator: str | None = None) -> list[str]:
    """The names of a table's columns, as they are."""
    if hasattr(table, "columns"):
        return [str(name) for name in table.columns]
    path = Path(table)
    if _is_parquet(path):
        with _parquet(path) as file:
            return [str(name) for name in file.schema_arrow.names]
    with _csv(path, separator) as (header, _):
        return header


def table_rows(
    table: Any,
    texts: Collection[str],
    numbers: Collection[str],
    separator: str | None = None,
) -> Iterator[Rows]:
    """A table's rows, in batches, of the columns that are wanted as texts or as numbers."""
    names = column_names(table, separator)
    _check_columns(title(table), names, [*texts, *numbers])
    if hasattr(table, "columns"):
        yield from _frame_rows(table, texts, numbers)
    elif _is_parquet(Path(table)):
        yield from _parquet_rows(Path(table), texts, numbers)
    else:
        yield from _csv_rows(Path(table), texts, numbers, separator)


def _check_columns(where: str, names: list[str], wanted: list[str]) -> None:
    missing = sorted(set(wanted) - set(names))
    if missing:
        found = ", ".join(repr(name) for name in names[:30]) + (", ..." if names[30:] else "")
        raise ValueError(f"{where} has no column {', '.join(map(repr, missing))}; it has {found}")
    twice = sorted({name for name in wanted if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{where} has several columns called {', '.join(map(repr, twice))}; rename all but one"
        )


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET or path.suffix in (".parquet", ".pq")


# CSV


@contextmanager
def _csv(path: Path, separator: str | None) -> Iterator[tuple[list[str], Iterator[list[str]]]]:
    """The header, and the reader of what follows; errors in one line."""
    reader: Any = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = file.readline()
            if not first.strip():
                more = "its first line is empty" if first else "it is empty"
                raise ValueError(f"{path} has no header: {more}. The first line names the columns")
            file.seek(0)
            reader = csv.reader(file, delimiter=separator or _separator(first), strict=True)
            yield [name.strip() for name in next(reader)], reader
        except csv.Error as error:
            line = reader.line_num if reader else 1
            raise ValueError(
                f"{path}, near line {line}: {error}; expected cells in double quotes where they "
                'contain the separator, quotes ("" for one) or line breaks'
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start}); save "
                "it as CSV in UTF-8, or as Parquet"
            ) from error


def _separator(first: str) -> str:
    """The separator that gives a header the most columns."""
    return max(SEPARATORS, key=lambda s: len(next(csv.reader([first], delimiter=s), [])))


def _csv_rows(
    path: Path, texts: Collection[str], numbers: Collection[str], separator: str | None
) -> Iterator[Rows]:
    with _csv(path, separator) as (header, reader):
        place = {name: header.index(name) for name in {*texts, *numbers}}
        lines: Any = reader
        end = int(lines.line_num)
        while True:
            starts: list[int] = []
            cells: list[list[str]] = []
            read = 0
            for row in itertools.islice(_readable(reader), BATCH):
                read += 1
                start, end = end + 1, int(lines.line_num)
                if not row:
                    continue  # a blank line
                if len(row) != len(header):
                    if not refusing():
                        continue  # whose it is cannot be told either: it is nobody's
                    raise ValueError(
                        f"{path}, line {start}: it has {len(row)} cells and the header has "
                        f"{len(header)} columns; quote cells that contain the separator"
                    )
                starts.append(start)
                cells.append(row)
            if not read:
                return
            columns = {
                name: [row[number].strip() for row in cells] for name, number in place.items()
            }
            yield Rows(
                len(cells),
                {name: columns[name] for name in texts},
                {name: columns[name] for name in numbers},
                lambda row, starts=starts: f"line {starts[row]}",  # type: ignore[misc]
            )


def _readable(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """A reader's rows; without those that are none, where an error would take all others away."""
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            if refusing():
                raise
            continue
        if row is None:
            return
        yield row


# Parquet


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"{path} is a Parquet file, and pyarrow, which reads it, is not installed: "
            "pip install 'fpfl[parquet]', or save the table as CSV"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as a Parquet file: {reason}") from error


def _parquet_rows(path: Path, texts: Collection[str], numbers: Collection[str]) -> Iterator[Rows]:
    wanted = list(dict.fromkeys([*texts, *numbers]))
    start = 1
    with _parquet(path) as file:
        for batch in file.iter_batches(BATCH, columns=wanted):
            columns = {name: batch.column(name) for name in wanted}
            yield Rows(
                batch.num_rows,
                {name: _texts(columns[name].to_pylist(), path, name) for name in texts},
                {name: _arrow_numbers(columns[name], path, name) for name in numbers},
                lambda row, start=start: f"row {start + row}",  # type: ignore[misc]
            )
            start += batch.num_rows


def _arrow_numbers(column: Any, path: Path, name: str) -> NDArray[np.float64] | list[str]:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind):
        numbers: NDArray[np.float64] = column.to_numpy(zero_copy_only=False).astype(np.float64)
        return numbers
    return _texts(column.to_pylist(), path, name)


# Data frames


def _frame_rows(frame: Any, texts: Collection[str], numbers: Collection[str]) -> Iterator[Rows]:
    names = {str(name): name for name in frame.columns}
    for start in range(0, len(frame), BATCH):
        part = frame.iloc[start : start + BATCH]
        columns = {name: part[names[name]] for name in {*texts, *numbers}}
        yield Rows(
            len(part),
            {name: _texts(columns[name].tolist(), "the data frame", name) for name in texts},
            {name: _frame_numbers(columns[name], name) for name in numbers},
            lambda row, start=start: f"row {start + row + 1}",  # type: ignore[misc]
        )


def _frame_numbers(column: Any, name: str) -> NDArray[np.float64] | list[str]:
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
        numbers: NDArray[np.float64] = column.to_numpy().astype(np.float64)
        return numbers
    return _texts(column.tolist(), "the data frame", name)


def _texts(values: list[Any], where: Any, name: str) -> list[str]:
    """Values as a CSV file would have them."""
    for value in values:
        if not isinstance(value, str | int | float | bool | Decimal | date | None) and not _absent(
            value
        ):
            raise ValueError(
                f"{where}, column {name!r}: it holds values of type {type(value).__name__}; "
                "expected numbers or texts in every cell"
            )
    return ["" if _absent(value) else _text(value) for value in values]


def _text(value: Any) -> str:
    # Codes 1, 2, 3 are 1.0, 2.0, 3.0 in a column of numbers that lacks one.
    return bare(str(value).strip()) if isinstance(value, float) else str(value).strip()


def bare(text: str) -> str:
    """A whole number without a point and a nought: 1 for 1.0; any other text as it is."""
    if text.endswith(".0") and text[:-2].removeprefix("-").isdigit():
        return text[:-2]
    return text


def _absent(value: Any) -> bool:
    # NaN and pandas' own absent values differ from themselves, or do not say.
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value
