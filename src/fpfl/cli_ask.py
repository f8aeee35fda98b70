"""Asking for a table's schema on a terminal: the names of columns are shown, and no value of them.

What is typed is what somebody knows without looking, so the schema counts as declared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import typer

from fpfl.data.table_files import column_names
from fpfl.data.table_schema import (
    AttributeColumn,
    CategoryColumn,
    Label,
    NumberColumn,
    TableSchema,
)

Answer = Literal["skip", "number", "categories"]


def terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_schema(table: Path, *, label: str, user: str | None, groups: Sequence[str]) -> TableSchema:
    """Ask what is public about every column of a table."""
    names = [name for name in column_names(table) if name]
    missing = [name for name in (label, *groups, *([user] if user else [])) if name not in names]
    if missing:
        raise ValueError(f"{table} has no column {missing}; it has {names}")
    print(
        f"What is public about {table}? Answer from what anybody may know, not from the data: "
        "values and ranges that are read from people's data are a release that no ε covers."
    )
    asked = _label(label)
    attributes = tuple(
        AttributeColumn(
            name,
            typer.prompt(f"{name} (groups): its values, separated by commas", value_proc=_values),
            typer.confirm(f"{name}: may it be missing?", default=False),
        )
        for name in groups
    )
    samples = None
    if user is not None:
        samples = typer.prompt(
            f"{user} (user): about how many rows does one have?", value_proc=_positive
        )
    features: list[NumberColumn | CategoryColumn] = []
    for name in names:
        if name not in (label, user, *groups):
            features += _feature(name)
    return TableSchema(asked, tuple(features), attributes, user, samples_per_user=samples)


def _label(name: str) -> Label:
    kind = typer.prompt(
        f"{name} (label): classes or a number? (classes, number)",
        value_proc=_one_of("classes", "number"),
    )
    if kind == "number":
        return Label(name, range=typer.prompt(f"{name}: lowest, highest", value_proc=_range))
    classes = typer.prompt(
        f"{name}: its classes, separated by commas (of two, the positive one last)",
        value_proc=_values,
    )
    return Label(name, classes)


def _feature(name: str) -> list[NumberColumn | CategoryColumn]:
    kinds: tuple[Answer, ...] = ("skip", "number", "categories")
    answer: Answer = typer.prompt(
        f"{name}: use it? ({', '.join(kinds)})", value_proc=_one_of(*kinds), default="skip"
    )
    if answer == "number":
        return [NumberColumn(name, typer.prompt(f"{name}: lowest, highest", value_proc=_range))]
    if answer == "categories":
        ask = f"{name}: its values, separated by commas"
        return [CategoryColumn(name, typer.prompt(ask, value_proc=_values))]
    return []


def _one_of(*allowed: str) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text.strip() not in allowed:
            raise typer.BadParameter(f"{text!r}: give one of {', '.join(allowed)}")
        return text.strip()

    return chosen


def _values(text: str) -> tuple[str, ...]:
    values = tuple(part.strip() for part in text.split(","))
    if len(values) < 2 or "" in values or len(set(values)) != len(values):
        raise typer.BadParameter(f"{text!r}: give two or more values, each once, between commas")
    return values


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = 0.0
    if not low < high:
        raise typer.BadParameter(f"{text!r}: give two numbers, e.g. 0, 120")
    return low, high


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise typer.BadParameter(f"{text!r}: give a number above 0, e.g. 3")
    return value
