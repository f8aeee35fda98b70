"""The paper's tables as declarative files: one TOML file per table, one entry per row."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from itertools import product
from typing import Any, Literal

from fpfl.data.femnist.unfair import Order
from fpfl.training.models import DEEP, SHALLOW
from fpfl.users.precision import Precision

TABLES = (
    "adult-central",
    "adult-federated",
    "adult-robust",
    "adult-ablation",
    "adult-lift",
    "femnist",
)

KEY = ("model", "algorithm", "cohort", "accounted_population", "variant")
"""The fields of a result that say which row it is of; `Row.key` has their values."""

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
    """One row of a table: what to run, and what the paper reports for it.

    ``constraint`` is what is measured, and enforced where there is a ``method``. ``suggested``
    takes clipping and learning rate from `fpfl.experiments.fixed` in place of the row's own, with a
    bound of ``samples_bound`` times the samples of a user and ``pace`` times that rate where these are
    given (a pace of 0 is the row's own rate). ``change`` names a part of FPFL-1G that is taken out,
    ``variant`` what a row of several alike is called. ``population`` is the K that noise is
    calibrated for, where that is not the data's own; ``target`` is the α that FPFL-1G trains
    towards, ``gamma`` its γ where that is not the default.
    """

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
    constraint: str = "fnr"
    suggested: bool = False
    variant: str = ""
    change: str = ""
    task: str = "adult"
    population: int | None = None
    samples_bound: float | None = None
    pace: float = 1.0
    target: float | None = 0.0
    gamma: float | None = None

    @property
    def private(self) -> bool:
        """Whether noise is added."""
        return self.epsilon is not None

    def name(self, population: int) -> str:
        """``model/algorithm/cohort/population``, what a pattern is matched with.

        With ``/variant`` where rows have one.
        """
        users = self.population or population
        name = f"{self.model}/{self.algorithm}/{self.cohort or '-'}/{users}"
        return f"{name}/{self.variant}" if self.variant else name

    @property
    def key(self) -> tuple[str, str, int | None, int | None, str]:
        """What tells a row from the others of its table."""
        return self.model, self.algorithm, self.cohort, self.population, self.variant


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
    return [_row(content, row) for entry in content["rows"] for row in _written_out(entry)]


def _written_out(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """An entry whose settings are lists stands for all combinations, the first varying slowest.

    What differs is the variant: of several ``epsilon``, ``"ε=0.5"``.
    """
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    rows = []
    for values in product(*lists.values()):
        row = entry | dict(zip(lists, values, strict=True))
        if "epsilon" in row:
            row.setdefault("variant", f"ε={row['epsilon']:g}")
        rows.append(row)
    return rows


def _row(content: dict[str, Any], entry: dict[str, Any]) -> Row:
    settings = content["defaults"] | content["algorithms"][entry["algorithm"]] | entry
    settings.setdefault("cohort", None)
    settings.setdefault("paper", {})
    if settings.pop("clip", False) and not settings.get("suggested"):
        bounds = content["clip"][entry["model"]]
        settings["clip"] = bounds["constrained" if "method" in settings else "plain"]
    if not settings.pop("private", False):
        settings.pop("epsilon", None)
        settings.pop("delta", None)
    return Row(table=content["table"], task=content.get("task", "adult"), **settings)


@dataclass(frozen=True)
class Options:
    """What may be varied for a whole table.

    Parameters
    ----------
    convention
        Sampler, sensitivity and accountant.
    noise
        (pattern, σ) pairs that replace calibration, where dp-accounting is not installed: the first
        pattern that a row's name matches counts, and ``"*"`` after all others. σ is that of the
        row's full cohort: where there are fewer users than that, it shrinks with their number.
    overrides
        ``key=value`` settings of all rows, for the alternatives in docs/reproduction.md.
    data, order
        For the table femnist: whose digits, and in which order they are dealt to pens.
    scale
        Every row has so much of its rounds.
    device, precision
        Where and how to compute.
    """

    convention: str = "poisson"
    noise: tuple[tuple[str, float], ...] = ()
    overrides: tuple[str, ...] = ()
    data: str | None = None
    order: Order = "lexicographic"
    scale: float = 1.0
    device: str = "cpu"
    precision: Precision = "float32"

    def noise_multiplier(self, name: str) -> float | None:
        """σ that was given for a row; None where it is to be calibrated."""
        for pattern, sigma in sorted(self.noise, key=lambda pair: pair[0] == "*"):
            if matches(name, pattern):
                return sigma
        return None


def parsed_noise(given: str) -> tuple[str, float]:
    """``"2.28"`` is for all rows, ``"*/100/3383*=2.28"`` for those that match."""
    pattern, _, number = given.rpartition("=")
    try:
        sigma = float(number)
    except ValueError as error:
        raise ValueError(
            f"--noise-multiplier {given!r}: expected a number, or PATTERN=NUMBER"
        ) from error
    if not 0.0 < sigma < float("inf"):
        raise ValueError(f"--noise-multiplier {given!r}: σ must be positive")
    return pattern or "*", sigma
