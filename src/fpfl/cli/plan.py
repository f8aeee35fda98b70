"""The command ``fpfl plan``: settings from public numbers, before anything is trained."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fpfl.planning import Setting, Share, TrainingPlan

_HEAD = (
    "m",
    "T",
    "σ",
    "gradient: noise/C",
    "count noise",
    "smallest n'",
    "error: one round",
    "averaged",
    "run",
    "gap resolvable?",
    "ε, server",
    "uploads",
)

_RENAMED = ("parameters", "epsilon", "population", "samples_per_user", "base_rate", "rate",
            "constraint", "tolerance", "delta", "cohort", "rounds")  # fmt: skip
"""What `plan_training` calls as its options are called, but for dashes."""


def plan(
    epsilon: Annotated[float, typer.Option(help="ε that the training may cost.")],
    parameters: Annotated[
        int | None,
        typer.Option(help="Number of model parameters p; with --schema, of fpfl train's network."),
    ] = None,
    population: Annotated[int | None, typer.Option(help="Number of users K.")] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(help="sex=Female:0.33,Male:0.67 (shares; a third number: its base rate)."),
    ] = None,
    group_sizes: Annotated[
        str | None, typer.Option(help="Instead of shares: 5400,10900 for one attribute.")
    ] = None,
    samples_per_user: Annotated[
        float | None, typer.Option(help="Samples of a user, on average; exactly 1 by default.")
    ] = None,
    base_rate: Annotated[float | None, typer.Option(help="Share of positive samples.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Expected value of the constrained rate; by default the worst."),
    ] = None,
    constraint: Annotated[
        str, typer.Option(help="The constraint, by its name in a config.")
    ] = "fnr_parity",
    tolerance: Annotated[float, typer.Option(help="α, the tolerance.")] = 0.02,
    delta: Annotated[float | None, typer.Option(help="δ; 1/(10 K) by default.")] = None,
    cohort: Annotated[int | None, typer.Option(help="A cohort to add to the table.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds T.")] = 1000,
    schema: Annotated[
        Path | None, typer.Option(help="A table's schema file: K, samples per user, groups, p.")
    ] = None,
    hidden: Annotated[
        str | None,
        typer.Option(help="With --schema: sizes of hidden layers, e.g. 16,8; 10 by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict the noise, say whether a gap of α can be resolved, and recommend settings.

    From public numbers alone: nothing is read and nothing is trained. Shares, rates and sizes are
    guesses that have to be public.
    """
    from fpfl.planning import plan_training

    declared = _Declared.of(schema)
    users = population if population is not None else declared.population
    if users is None:
        raise ValueError("the number of users is not known; give --population")
    samples = samples_per_user if samples_per_user is not None else declared.samples_per_user
    with _options_named():
        found = plan_training(
            population=users,
            groups=_groups(groups or [], group_sizes, declared.attributes),
            parameters=_parameters(parameters, hidden, declared.layers),
            epsilon=epsilon,
            samples_per_user=1.0 if samples is None else samples,
            delta=delta,
            constraint=constraint,
            tolerance=tolerance,
            base_rate=base_rate,
            rate=rate,
            cohort=cohort,
            rounds=rounds,
        )
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    _print_table(found)
    for line in found.lines():
        print(f"\n{line}")


@contextmanager
def _options_named() -> Iterator[None]:
    """Let errors name options: ``--base-rate`` where Python says ``base_rate``."""
    names = "|".join(_RENAMED)
    try:
        yield
    except ValueError as error:
        # A name that is spoken of: "rate is 2", "and parameters 0", "give base_rate".
        spoken = rf"(?<![\w-])({names})(?= is | must |=| -?\d)|(?<=give )({names})\b"
        said = re.sub(spoken, lambda at: f"--{at[0].replace('_', '-')}", str(error))
        raise ValueError(said) from error


@dataclass(frozen=True)
class _Declared:
    """What a schema file says of the numbers that a plan needs.

    ``layers`` is how many numbers the network of ``fpfl train`` gets and gives.
    """

    population: int | None = None
    samples_per_user: float | None = None
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layers: tuple[int, int] | None = None

    @classmethod
    def of(cls, path: Path | None) -> _Declared:
        if path is None:
            return cls()
        from fpfl.data.table_schema import read_table_schema

        table = read_table_schema(path)
        if table.source == "data":
            print(
                f'warning: {path} was drafted by looking at the data (source = "data"): a plan '
                "made from it is not made from public numbers",
                file=sys.stderr,
            )
        found = table.schema()
        values = {attribute.name: attribute.values for attribute in found.attributes}
        outputs = 1 if found.classes in (None, 2) else int(found.classes or 0)
        layers = (math.prod(found.shape), outputs)
        return cls(found.population, found.samples_per_user, values, layers)


def _parameters(given: int | None, hidden: str | None, layers: tuple[int, int] | None) -> int:
    """p: as given, or of the perceptron that ``fpfl train`` makes for a schema.

    A layer from a numbers to b has (a + 1) b parameters.
    """
    if given is not None and hidden is not None:
        raise ValueError("--parameters and --hidden both say how large the model is; give one")
    if given is not None:
        return given
    if layers is None:
        raise ValueError(
            "the size of the model is not known; give --parameters (as many as the summed gradient "
            "has numbers, which fpfl train -v shows; in Python sum(w.numel() for w in "
            "model.parameters())), or --schema, and --hidden where it is not 10"
        )
    from fpfl.training.models import SHALLOW

    between = SHALLOW if hidden is None else _sizes(hidden)
    return sum((a + 1) * b for a, b in pairwise((layers[0], *between, layers[1])))


def _sizes(hidden: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in hidden.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--hidden is {hidden!r}; expected sizes of layers, e.g. 16,8")
    return tuple(map(int, numbers))


def _groups(
    given: Sequence[str], sizes: str | None, declared: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, Share]]:
    """The groups' shares: as given, by sizes, or (said aloud) equal ones of a schema's values."""
    found = dict(_attribute(text) for text in given)
    if sizes is not None:
        if found or len(declared) > 1:
            raise ValueError("--group-sizes is for one attribute; give --groups for several")
        name, values = next(iter(declared.items()), ("group", ()))
        found = {name: _by_sizes(sizes, values)}
    for name, shares in found.items():
        values = declared.get(name, tuple(shares))
        if declared and set(values) != set(shares):
            raise ValueError(
                f"--groups gives {name} the values {list(shares)}; the schema declares "
                f"{ {n: list(v) for n, v in declared.items()} }"
            )
    if not found and declared:
        print("No shares were given: equal ones are assumed.", file=sys.stderr)
        found = {n: dict.fromkeys(v, 1.0 / len(v)) for n, v in declared.items()}
    if not found:
        raise ValueError(
            "the groups are not known; give --groups sex=Female:0.33,Male:0.67, or --group-sizes "
            "5400,10900"
        )
    return found


def _attribute(text: str) -> tuple[str, dict[str, Share]]:
    name, equals, rest = text.partition("=")
    items = [_value(item, text) for item in rest.split(",")] if equals and rest else []
    if not name.strip() or len(dict(items)) != len(items) or not items:
        raise ValueError(
            f"--groups is {text!r}; expected an attribute and its values' shares, each once, e.g. "
            "sex=Female:0.33,Male:0.67, or with base rates sex=Female:0.33:0.11,Male:0.67:0.31"
        )
    return name.strip(), dict(items)


def _value(item: str, text: str) -> tuple[str, Share]:
    """``Female:0.33`` or ``Female:0.33:0.11``; a value's own name may have colons."""
    parts = item.strip().split(":")
    numbers: list[float] = []
    while len(parts) > 1 and len(numbers) < 2 and (number := _number(parts[-1])) is not None:
        numbers.insert(0, number)
        parts.pop()
    if not numbers or not parts[0]:
        raise ValueError(f"--groups is {text!r}: {item.strip()!r} has no share, e.g. Female:0.33")
    name = ":".join(parts)
    return name, numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _by_sizes(text: str, values: tuple[str, ...]) -> dict[str, Share]:
    sizes = [_number(item) for item in text.split(",")]
    known = [size for size in sizes if size is not None and size > 0]
    if len(known) != len(sizes) or len(sizes) < 2 or (values and len(values) != len(sizes)):
        expected = f"{len(values)} positive numbers" if values else "two or more positive numbers"
        raise ValueError(f"--group-sizes is {text!r}; expected {expected}, e.g. 5400,10900")
    names = values or tuple(str(number) for number in range(1, len(known) + 1))
    return {name: size / sum(known) for name, size in zip(names, known, strict=True)}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _print_table(found: TrainingPlan) -> None:
    """A table on a terminal; plain columns elsewhere."""
    from rich.console import Console
    from rich.table import Table

    rows = [_row(s, found) for s in _shown(found)]
    console = Console()
    if console.is_terminal:
        table = Table(title=_title(found))
        for column in _HEAD:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    print(_title(found))
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    for row in (_HEAD, *rows):
        print("  ".join(map(str.rjust, row, widths)))


def _shown(found: TrainingPlan) -> list[Setting]:
    more = [] if found.fewer_rounds is None else [found.fewer_rounds]
    return sorted([*found.settings, *more], key=lambda s: (s.cohort, s.rounds))


def _title(found: TrainingPlan) -> str:
    q = found.question
    mark = "recommended" if found.chosen.good else "by the rule; it will not do"
    return (
        f"{q.population:,} users, {q.parameters:,} parameters, ε = {q.epsilon:g}, "
        f"{q.constraint} within α = {q.tolerance:g} (*: {mark})"
    )


def _row(s: Setting, found: TrainingPlan) -> tuple[str, ...]:
    from fpfl.privacy.statement import round_up

    worst, mark = s.worst, "*" if s == found.chosen else ""
    return (
        f"{mark}{s.cohort:,}",
        f"{s.rounds:,}",
        f"{s.noise_multiplier:.3g}",
        f"{s.figures['gradient']:.2f}",
        f"{s.count_noise:.3g}",
        f"{worst.count:,.0f}",
        f"{worst.one_round:.3f}",
        f"{worst.averaged:.3f}",
        f"{worst.run:.4f}",
        s.told(worst.run),
        round_up(s.epsilon_server),
        f"{s.uploads:,}",
    )
