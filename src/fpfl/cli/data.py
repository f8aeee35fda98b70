"""The commands about data: ``fpfl data draft`` and ``fpfl data femnist``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from fpfl.cli.options import help_alone

if TYPE_CHECKING:
    from fpfl.data.femnist.source import Part, Source
    from fpfl.data.femnist.unfair import Order

app = typer.Typer(
    help="Inspect and convert data.", callback=help_alone, invoke_without_command=True
)

PICTURE = "out/femnist.png"
"""Where ``--show`` alone writes."""

_ROWS = ("black pen\non white", "blue pen\non white", "white chalk on\na blackboard")


def show_alone(words: Sequence[str]) -> list[str]:
    """A command line in which ``--show`` has its path: Typer has no option that may go without."""
    if list(words[:2]) != ["data", "femnist"]:
        return list(words)
    full = []
    for word, following in zip(words, [*words, "-"][1:], strict=True):
        full += [word, PICTURE] if word == "--show" and following.startswith("-") else [word]
    return full


@app.command()
def draft(
    table: Path,
    label: Annotated[str, typer.Option(help="The column to predict.")],
    user: Annotated[str | None, typer.Option(help="User id column (the unit of privacy).")] = None,
    groups: Annotated[
        str | None, typer.Option(help="Columns of sensitive attributes, e.g. sex,race.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The new schema; NAME.schema.toml by default."),
    ] = None,
) -> None:
    """Draft a schema by looking at a table, for you to check before training with ε.

    TABLE is a CSV or Parquet file.
    """
    from fpfl.data.drafting import draft_schema, draft_text
    from fpfl.store.files import write_whole

    path = table.with_suffix(".schema.toml") if out is None else out
    if path.exists():
        raise ValueError(f"{path} is there already; remove it first, or name another with -o")
    names = [name.strip() for name in (groups or "").split(",") if name.strip()]
    drafted, left_out = draft_schema(table, label=label, user=user, groups=names)
    write_whole(path, draft_text(table.name, drafted, left_out).encode())
    print(
        f"Written: {path}, with what the data shows: {len(drafted.features)} features, "
        f"{len(left_out)} columns left out. Check it against public knowledge, then change "
        'source = "data" to source = "declared"; fpfl train --epsilon refuses it before.'
    )


@app.command()
def femnist(
    data: Annotated[
        str,
        typer.Option(
            help="A compact .npz, an .h5 of TFF's pair, a folder with TFF's or LEAF's files; "
            "femnist: the cache folder or a download; digits: those that scikit-learn brings.",
        ),
    ] = "digits",
    convert: Annotated[
        Path | None, typer.Option(help="Write all of it to a new compact .npz file.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help=f"Draw samples of each group; alone: to {PICTURE}.")
    ] = None,
    order: Annotated[
        str, typer.Option(help="How users get their groups: lexicographic or seeded.")
    ] = "lexicographic",
    seed: Annotated[
        int, typer.Option(help="Seed of that order, and of the third group's images (chalk).")
    ] = 0,
) -> None:
    """Show which handwritten digits there are, by writer and by the paper's three groups."""
    from typing import get_args

    from fpfl.data.femnist.compact import CompactSource, write_compact
    from fpfl.data.femnist.finding import named_digits
    from fpfl.data.femnist.unfair import Order

    orders: dict[str, Order] = {name: name for name in get_args(Order)}
    if order not in orders:
        raise ValueError(f"--order is {order!r}; expected {' or '.join(orders)}")
    if data == "femnist":
        print("Looking in the cache folder, and then on the network...", file=sys.stderr)
    source: Source = named_digits(data)
    if convert is not None:
        source = CompactSource(write_compact(source, convert))
    _summarise(source, orders[order], seed)
    if convert is not None:
        print(f"Written: {convert} ({convert.stat().st_size / 1e6:.1f} MB)")
    if show is not None:
        print(f"Picture: {draw_samples(source, show, order=orders[order], seed=seed)}")


def _summarise(source: Source, order: Order, seed: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from fpfl.data.femnist.unfair import GROUPS, assigned

    groups = assigned(source.names(), order, seed)
    users = np.bincount(list(groups.values()), minlength=len(GROUPS))
    samples = np.zeros((2, len(GROUPS)), dtype=np.int64)
    parts: tuple[Part, ...] = ("train", "test")
    for row, part in enumerate(parts):
        for writer in source.read(part):
            samples[row, groups[writer.name]] += len(writer.labels)
    how = order if order == "lexicographic" else f"seeded, seed {seed}"
    print(source.title)
    train, test = samples.sum(axis=1).tolist()
    print(f"{len(groups):,} writers, {train:,} train samples, {test:,} test samples")
    table = Table()
    table.add_column(f"group ({how})")
    for column in ("users", "train samples", "test samples"):
        table.add_column(column, justify="right")
    rows = np.stack([users, *samples])
    for name, column in zip(GROUPS, rows.T, strict=True):
        table.add_row(name, *(f"{count:,}" for count in column))
    table.add_section()
    table.add_row("all", *(f"{count:,}" for count in rows.sum(axis=1)))
    Console().print(table)


def draw_samples(source: Source, path: Path, *, order: Order, seed: int) -> Path:
    """Draw the paper's figure of samples: a row of the ten digits for each group."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fpfl.data.femnist.source import CLASSES
    from fpfl.data.femnist.unfair import GROUPS, assigned, drawn

    chosen = _chosen(source, assigned(source.names(), order, seed), len(GROUPS))
    rng = np.random.default_rng(seed)
    figure = Figure(figsize=(9.6, 3.3))
    FigureCanvasAgg(figure)
    close = {"left": 0.13, "right": 0.99, "bottom": 0.02, "top": 0.84, "wspace": 0.06}
    axes = figure.subplots(len(GROUPS), CLASSES, gridspec_kw={**close, "hspace": 0.06})
    for group, label in enumerate(_ROWS):
        for digit in range(CLASSES):
            axis = axes[group, digit]
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set(color="#999999", linewidth=0.6)
            if group == 0:
                axis.set_title(str(digit), fontsize=10, color="#444444")
            if (group, digit) in chosen:
                image = drawn(chosen[group, digit][None], group, rng)[0].transpose(1, 2, 0)
                axis.imshow(image.clip(0, 1), interpolation="nearest")
            else:
                axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", va="center")
        axes[group, 0].set_ylabel(
            label, rotation=0, ha="right", va="center", labelpad=8, fontsize=10
        )
    figure.suptitle(source.title, fontsize=11.5, fontweight="bold", wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _chosen(
    source: Source, groups: dict[str, int], count: int
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """An image for each group and digit, of as many writers as there are."""
    from fpfl.data.femnist.source import CLASSES

    chosen: dict[tuple[int, int], NDArray[np.uint8]] = {}
    spare: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for writer in source.read("train"):
        group = groups[writer.name]
        if all((group, digit) in chosen for digit in range(CLASSES)):
            continue
        taken = False
        for digit in np.unique(writer.labels).tolist():
            image: NDArray[Any] = writer.pixels[np.argmax(writer.labels == digit)]
            if not taken and (group, digit) not in chosen:
                chosen[group, digit], taken = image, True
            else:
                spare.setdefault((group, digit), image)
        if len(chosen) == count * CLASSES:
            break
    return spare | chosen
