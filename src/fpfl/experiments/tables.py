"""The paper's tables as declarative files: one TOML file per table, one entry per row."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, Literal

from fpfl.models import DEEP, SHALLOW

TABLES = ("adult-central", "adult-federated")

NETWORKS = {"shallow": SHALLOW, "deep": DEEP}

SETTINGS: dict[str, type] = {
    "rounds": int,
    "learning_rate": float,
    "multiplier_rate": float,
    "max_multiplier": float,
    "tolerance": float,
    "normaliser": str,
    "selection": str,
    "selection_window": int,
    "initial": str,
}
"""What may be set for a whole table. Not what makes a row that row: cohort, clipping, noise, c."""


@dataclass(frozen=True)
class Row:
    """One row of a table: what to run, and what the paper reports for it."""

    table: str
    model: str
    algorithm: str
    cohort: int | None
    rounds: int
    selection: str
    learning_rate: float
    multiplier_rate: float
    tolerance: float
    paper: dict[str, float]
    batch: int | None = None
    mean_samples: float | None = None
    normaliser: str = "users"
    selection_window: int = 1
    initial: Literal["glorot", "torch"] = "glorot"
    method: str | None = None
    damping: float = 0.0
    max_multiplier: float = 0.0
    clip: float | None = None
    epsilon: float | None = None
    delta: float | None = None

    @property
    def private(self) -> bool:
        """Whether noise is added."""
        return self.epsilon is not None

    def name(self, population: int) -> str:
        """``model/algorithm/cohort/population``, what a pattern is matched with."""
        return f"{self.model}/{self.algorithm}/{self.cohort or '-'}/{population}"


def override(row: Row, settings: Sequence[str]) -> Row:
    """A row with other settings, given as ``key=value``: for trying something on a whole table."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in SETTINGS:
            raise ValueError(f"--set {setting!r}: expected KEY=VALUE with KEY in {list(SETTINGS)}")
        try:
            values[key] = SETTINGS[key](text)
        except ValueError as error:
            raise ValueError(f"--set {setting!r}: {error}") from error
    return replace(row, **values)


def matches(name: str, pattern: str) -> bool:
    """Whether a row's name matches a case-insensitive glob."""
    return fnmatchcase(name.lower(), pattern.lower())


def load_table(table: str) -> list[Row]:
    """Read a table's rows."""
    if table not in TABLES:
        raise ValueError(f"there is no table {table!r}; choose one of {', '.join(TABLES)}")
    file = resources.files("fpfl.experiments") / f"{table}.toml"
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_row(content, row) for row in content["rows"]]


def _row(content: dict[str, Any], entry: dict[str, Any]) -> Row:
    settings = content["defaults"] | content["algorithms"][entry["algorithm"]] | entry
    settings.setdefault("cohort", None)
    if settings.pop("clip", False):
        bounds = content["clip"][entry["model"]]
        settings["clip"] = bounds["constrained" if "method" in settings else "plain"]
    if not settings.pop("private", False):
        settings.pop("epsilon", None)
        settings.pop("delta", None)
    return Row(table=content["table"], **settings)
