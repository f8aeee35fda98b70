"""``fpfl measure``: private statistics of a population, alone or into a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fpfl.measurement import Measurement


def measure(
    data: Annotated[Path, typer.Option(help="A CSV or Parquet file, or a population folder.")],
    epsilon: Annotated[float | None, typer.Option(help="ε of the release, e.g. 0.2.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ, the noise over √(number of columns), instead of ε.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; 1/(10 K) by default.")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="What is public about it, as TOML; NAME.schema.toml or NAME.toml beside it by "
            "default."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Which, e.g. age,job; all features that have no figures by default."),
    ] = None,
    bins: Annotated[int, typer.Option(help="Bins of a column of numbers.")] = 64,
    symlog: Annotated[
        str | None,
        typer.Option(help="Columns with long tails: symmetric-log bins, e.g. income,wealth=100."),
    ] = None,
    neighbours: Annotated[
        str, typer.Option(help="Adjacency: what one user may change.")
    ] = "zero-out",
    ledger: Annotated[
        Path | None, typer.Option(help="The population's ledger, charged before the release.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="A finished run on the same users, whose own ledger records it, too."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new file for the result, as JSON.")] = None,
    write_schema: Annotated[
        Path | None,
        typer.Option(help="A new schema, with what was measured where nothing was declared."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A new picture of all histograms.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a population privately: medians, quartiles, means, shares of declared categories.

    One release of noisy histograms, at the level of users, charged before it is made.
    """
    from fpfl.data.federated import FederatedDataset
    from fpfl.measurement import check_fillable, filled
    from fpfl.measurement import measure as measured
    from fpfl.measurement.measuring import new_file
    from fpfl.measurement.picture import check_picture
    from fpfl.store.files import write_whole

    # All that can go wrong is said before anything is paid for.
    for file in (write_schema, plot):
        if file is not None:
            new_file(file)
    if plot is not None:
        check_picture()
    people: Any
    declared = None
    if data.is_dir():
        if schema is not None or write_schema is not None:
            raise ValueError(
                f"{data} is a population folder, which has a schema of its own; --schema and "
                "--write-schema go with a table"
            )
        people = FederatedDataset.open(data)
    else:
        from fpfl.cli.table import TableOptions, schema_of

        people, (declared, _) = data, schema_of(TableOptions(data, schema))
        if write_schema is not None:
            check_fillable(declared)
    found = measured(
        people,
        declared,
        columns=_names(columns),
        bins=bins,
        symlog=_thresholds(symlog),
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighbours=neighbours,  # type: ignore[arg-type]
        ledger=ledger,
        run=run,
        out=out,
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        _print(found)
    # Shown first: what is paid for is not lost where a file cannot be written.
    if write_schema is not None and declared is not None:
        write_whole(write_schema, filled(declared, found).toml().encode())
    if plot is not None:
        write_whole(plot, found.plot())


def _names(given: str | None) -> list[str] | None:
    if given is None:
        return None
    return [name.strip() for name in given.split(",") if name.strip()]


def _thresholds(given: str | None) -> dict[str, float | None]:
    """Columns, with thresholds where they were named: ``wealth=100``."""
    found: dict[str, float | None] = {}
    for item in _names(given) or []:
        name, equals, value = item.rpartition("=")
        try:
            found |= {name.strip(): float(value)} if equals else {item: None}
        except ValueError:
            raise ValueError(
                f"--symlog {item}: {value!r} is no number; expected a threshold in the column's "
                "own units, e.g. wealth=100, or the column's name alone"
            ) from None
    return found


def _print(found: Measurement) -> None:
    print(found)
    print()
    for line in found.statement():
        print(line)
    if found.charged is not None:
        print(f"Charged as {found.charged!r}.")
