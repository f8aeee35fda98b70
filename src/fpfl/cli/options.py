"""What the commands share: help for a group alone, and the options of ``fpfl train --data``.

Arguments are explained in the commands' docstrings: between some releases of Typer and click the
help of an argument is lost, that of an option never.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def help_alone(ctx: typer.Context) -> None:
    """Where a group of commands is called without one: its help, and the status of a mistake."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(2)


_PANEL = "A table of your own"

Data = Annotated[Path | None, typer.Option(help="A CSV or Parquet file.", rich_help_panel=_PANEL)]
SchemaFile = Annotated[
    Path | None,
    typer.Option(
        help="What is public about it, as TOML; NAME.schema.toml or NAME.toml beside it by "
        "default.",
        rich_help_panel=_PANEL,
    ),
]
LabelColumn = Annotated[
    str | None, typer.Option(help="The column to predict.", rich_help_panel=_PANEL)
]
UserColumn = Annotated[
    str | None, typer.Option(help="User id column (the unit of privacy).", rich_help_panel=_PANEL)
]
Groups = Annotated[
    str | None,
    typer.Option(
        help="Sensitive attributes: sex,race; sex+race: intersections.",
        rich_help_panel=_PANEL,
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="ε of the guarantee; without it, no privacy.", rich_help_panel=_PANEL),
]
Delta = Annotated[
    float | None, typer.Option(help="δ; 1/(10 K) by default.", rich_help_panel=_PANEL)
]
Ledger = Annotated[
    Path | None,
    typer.Option(
        help="The ledger of a budget that all runs on these people share (fpfl budget create).",
        rich_help_panel=_PANEL,
    ),
]
ConstraintName = Annotated[
    str | None,
    typer.Option(
        help="Rates to make equal; by default equalized_odds for two classes, accuracy_parity for "
        "more, equal_error for a regression.",
        rich_help_panel=_PANEL,
    ),
]
Tolerance = Annotated[
    float | None, typer.Option(help="α, the tolerance; 0.02 by default.", rich_help_panel=_PANEL)
]
Cohort = Annotated[
    int | None,
    typer.Option(
        help="Users in a round; a tenth of them, from 100 to 5000, by default.",
        rich_help_panel=_PANEL,
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Rounds T; 1000 by default, 300 with neither groups nor ε.", rich_help_panel=_PANEL
    ),
]
TestSet = Annotated[
    str | None,
    typer.Option(
        help="Another file of people to evaluate on, or the share of users to hold out: 0.2.",
        rich_help_panel=_PANEL,
    ),
]
Hidden = Annotated[
    str | None, typer.Option(help="Sizes of hidden layers; 10 by default.", rich_help_panel=_PANEL)
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Find out where columns lie of which the schema says a range alone, under --epsilon "
        "where it is given; without, ranges are mapped as they are.",
        rich_help_panel=_PANEL,
    ),
]
Reference = Annotated[
    bool,
    typer.Option(
        "--reference",
        help="Also train the same without the constraint, as a run of its own that is charged by "
        "itself, and say who is better and who is worse off than by it.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of cohorts, initial weights and held-out users.", rich_help_panel=_PANEL
    ),
]
