"""The tables: where their files are, what is public about them, who is trained on and who tests.

Every table is read as a user's own would be: a CSV file and a schema that declares public ranges
and categories (the TOML files beside this module), by `fpfl.data.tables.read_table`. Files that
come compressed or as arrays are written as CSV into a temporary folder first.

Adult has its own split; of the others 30% of the users are held out, drawn with seed 0, the same
for all runs. Training rows of ``adult-2`` and ``adult-10`` are dealt to users of 2 and 10 rows on
average, with seed 0 too. A run's seed is that of its network, cohorts and noise.
"""

from __future__ import annotations

import csv
import gzip
import lzma
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.data.federated import FederatedDataset
from fpfl.data.table_schema import TableSchema, declared_schema
from fpfl.data.tables import read_table

HELD_OUT, SPLIT_SEED = 0.3, 0

CHOSEN, CHECKED = "chosen", "checked"

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip

OCCUPATIONS = {
    "MGR": 10, "BUS": 500, "FIN": 800, "CMM": 1005, "ENG": 1305, "SCI": 1600, "CMS": 2001,
    "LGL": 2100, "EDU": 2205, "ENT": 2600, "MED": 3000, "HLS": 3601, "PRT": 3700, "EAT": 4000,
    "CLN": 4200, "PRS": 4330, "SAL": 4700, "OFF": 5000, "FFF": 6005, "CON": 6200, "EXT": 6800,
    "RPR": 7000, "PRD": 7700, "TRN": 9005, "MIL": 9800,
}  # fmt: skip
"""The major groups of the Census Bureau's occupation codes of 2018, by the first code of each."""

BIRTHPLACES = {
    "US": 1, "territories": 60, "Europe": 100, "Asia": 200, "Americas": 300, "Africa": 400,
    "Oceania": 500,
}  # fmt: skip
"""Groups of the Census Bureau's places of birth, by the first code of each."""


@dataclass(frozen=True)
class Table:
    """A table of people.

    Parameters
    ----------
    name
        What it is called.
    group
        The attribute whose groups are compared.
    role
        "chosen": settings were chosen on it. "checked": they were not.
    rows
        How many rows a user has on average; None where the file says whose a row is.
    """

    name: str
    group: str
    role: str
    rows: float | None = None

    @property
    def source(self) -> str:
        """Which files it is made of."""
        return "acs" if self.name.startswith("acs-") else self.name.split("-")[0]

    @property
    def file(self) -> str:
        """The first of the files, below the folder of the data."""
        return FILES[self.source]

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return self.name == HOURS.name


@dataclass(frozen=True)
class Split:
    """Users to train on, and users to test on, who are others."""

    train: FederatedDataset
    test: FederatedDataset


FILES = {
    "adult": "adult/adult.data",
    "credit": "tables/credit.csv.gz",
    "compas": "tables/compas.csv.gz",
    "diabetes": "diabetes/diabetic_data.csv.xz",
    "acs": "acs-income/acs-income.npz",
}

HOURS = Table("adult-hours", "sex", CHOSEN, 1)
"""The regression: hours per week, by Adult's other columns but the income."""


def tables() -> tuple[Table, ...]:
    """All tables, as ``people-tables.toml`` fixes their roles, and the regression."""
    file = resources.files("fpfl.experiments") / "people-tables.toml"
    found = tomllib.loads(file.read_text(encoding="utf-8"))["table"]
    return (*(Table(**each) for each in found), HOURS)


def table_schema(table: Table) -> TableSchema:
    """What is declared as public about a table."""
    name = table.name if table.regression else table.source
    file = resources.files("fpfl.experiments.people") / f"{name}.toml"
    return declared_schema(tomllib.loads(file.read_text(encoding="utf-8")))


def missing_file(table: Table, folder: Path) -> str | None:
    """What is said of a table whose file is not there; None where it is."""
    path = folder / table.file
    return None if path.is_file() else f"{table.name} is skipped: there is no {path}"


@lru_cache(maxsize=3)
def people(table: Table, folder: Path) -> Split:
    """A table's users, to train on and to test on."""
    absent = missing_file(table, folder)
    if absent is not None:
        raise ValueError(f"{absent}; name the folder that has {table.file} with --data")
    schema = table_schema(table)
    with TemporaryDirectory() as made:
        files = WRITERS[table.source](table, folder, Path(made))
        train, *tests = (read_table(file, schema) for file in files)
    if tests:
        test = tests[0]
    else:
        train, test = train.split(HELD_OUT, seed=SPLIT_SEED)
    if table.rows is not None and table.rows != 1:
        train = train.partition(mean=table.rows, seed=SPLIT_SEED)
    return Split(train, test)


# --- files to CSV -----------------------------------------------------------------------------


def _adult(table: Table, folder: Path, made: Path) -> list[Path]:
    """Adult's two files, which have no header; one begins with a remark and ends labels by dots."""
    files = []
    for name in ("adult.data", "adult.test"):
        lines = (folder / table.file).with_name(name).read_text(encoding="utf-8").splitlines()
        rows = [line.rstrip(".").split(", ") for line in lines if line.count(",") > 1]
        files.append(_written(made / f"{name}.csv", ADULT_COLUMNS, rows))
    return files


def _unpacked(table: Table, folder: Path, made: Path) -> list[Path]:
    path = folder / table.file
    opened = lzma.open if path.suffix == ".xz" else gzip.open
    with opened(path) as source, (made / "table.csv").open("wb") as target:
        shutil.copyfileobj(source, target)
    return [made / "table.csv"]


def _acs(table: Table, folder: Path, made: Path) -> list[Path]:
    """The people of some states, whose names the table has; codes in public groups."""
    with np.load(folder / table.file, allow_pickle=False) as file:
        states = file["states"].tolist()
        wanted = [states.index(name) for name in table.name.removeprefix("acs-").split("-")]
        here = np.isin(file["state"], wanted)
        columns = {name: file[name][here] for name in file.files if name not in ("state", "states")}
    for name, groups in (("OCCP", OCCUPATIONS), ("POBP", BIRTHPLACES)):
        columns[name] = grouped(columns[name], groups)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [_written(made / "table.csv", tuple(columns), rows)]


def grouped(codes: NDArray[Any], groups: Mapping[str, int]) -> NDArray[np.str_]:
    """The group of each code: the last whose first code is not above it."""
    names, first = np.array(list(groups)), np.array(list(groups.values()))
    found: NDArray[np.str_] = names[np.searchsorted(first, codes, side="right") - 1]
    return found


def _written(path: Path, header: tuple[str, ...], rows: object) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)  # type: ignore[arg-type]
    return path


WRITERS: dict[str, Callable[[Table, Path, Path], list[Path]]] = {
    "adult": _adult,
    "credit": _unpacked,
    "compas": _unpacked,
    "diabetes": _unpacked,
    "acs": _acs,
}
"""For each source what writes its CSV files: that of training users, or of all; then a test's."""
