"""``fpfl export`` and ``fpfl report``: a finished run as files for others, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import nn

    from fpfl.config import Config
    from fpfl.data.schema import Schema
    from fpfl.exporting import Ranges

FILES = {"torch": "model.pt2", "onnx": "model.onnx", "card": "MODEL_CARD.md"}
"""What each format is called."""

ALL = "all"


def export(
    run: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path(
        "exported"
    ),
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="torch, onnx, card or all (the default); may be repeated."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Scale numbers by the config's public ranges in the file."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="What the card calls the model.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a finished run's model for PyTorch and ONNX, and its model card.

    RUN is the folder of a finished run.

    The files take features and give scores and predictions. Each was opened again and gave the
    model's own answers before it was written.
    """
    from fpfl.exporting import export_onnx, export_torch, needed
    from fpfl.report.card import model_card
    from fpfl.report.facts import run_facts
    from fpfl.report.reading import read_run
    from fpfl.store.files import explained, write_whole

    wanted = _formats(formats or [ALL])
    record = read_run(run)
    if not record.finished:
        raise ValueError(f"{run} is not finished: fpfl resume {run}")
    there = [out / FILES[each] for each in wanted if (out / FILES[each]).exists()]
    if there and not force:
        raise ValueError(
            f"{', '.join(map(str, there))} {'is' if len(there) == 1 else 'are'} there already; "
            "name another folder, or replace with --force"
        )
    if "onnx" in wanted:
        for package in ("onnx", "onnxscript"):
            needed(package)
    if set(wanted) - {"card"}:
        model, schema, config = _rebuilt(run)
        ranges = _raw_ranges(run, config, schema) if raw else None
        about = run_facts(record)
        for kind, write in (("torch", export_torch), ("onnx", export_onnx)):
            if kind in wanted:
                path = out / FILES[kind]
                write(model, schema, path, ranges=ranges, about=about, overwrite=force)
                print(f"Written: {path}")
    if "card" in wanted:
        path = out / FILES["card"]
        with explained(out, "Nothing was exported; name a folder that can be written to"):
            out.mkdir(parents=True, exist_ok=True)
        write_whole(path, model_card(record, name=name).encode())
        print(f"Written: {path}")


def _formats(given: list[str]) -> list[str]:
    strange = [each for each in given if each not in (*FILES, ALL)]
    if strange:
        raise ValueError(f"--format is {strange[0]!r}; expected {', '.join(FILES)} or {ALL}")
    return [each for each in FILES if each in given or ALL in given]


def _rebuilt(run: Path) -> tuple[nn.Module, Schema, Config]:
    """The trained network, built again from the run's config."""
    import json

    from safetensors.torch import load_file

    from fpfl.config import load_run_config, make_model
    from fpfl.data.inputs import load_model
    from fpfl.data.schema import Schema
    from fpfl.runs.folder import CONFIG, MODEL, SCHEMA

    if not (run / CONFIG).is_file():
        raise ValueError(
            f"{run} has no {CONFIG} to build the network from: it was trained from Python. "
            "Export it there, fpfl.export_onnx(run.model, people.schema, 'model.onnx'); its card "
            "can be written here: --format card"
        )
    config = load_run_config(run)
    file = run / SCHEMA
    try:
        schema = Schema.from_dict(json.loads(file.read_text(encoding="utf-8")))
        model = make_model(config, schema)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not what a run writes ({error}); put an intact copy in its place"
        ) from error
    try:
        model = load_model(model, load_file(run / MODEL))
    except Exception as error:  # a damaged file, or the weights of another network
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{run / MODEL} does not hold the weights of the config's network "
            f"({reason}); put back the files that the run wrote"
        ) from error
    return model, schema, config


def _raw_ranges(run: Path, config: Config, schema: Schema) -> Ranges:
    """The range of every column that the config's data was scaled by; None for the others.

    A schema alone does not say: a 0/1 column has the range (0, 1) there and is not scaled.
    """
    d = config.data
    if d.name is not None:
        from fpfl.data.loaders import REGISTER

        ranges = REGISTER[d.name].ranges(d.settings)
        if ranges:
            return [ranges.get(name) for name in schema.feature_names or ()]
    if d.table is not None:
        from fpfl.config import table_schema
        from fpfl.runs.folder import read_origin

        found: list[tuple[float, float] | None] = []
        for feature in table_schema(config, Path(read_origin(run).folder)).features:
            own = [getattr(feature, "range", None)]
            found += own + [None] * (len(feature.outputs) - 1)
        return found
    declared = None if d.declared is None else d.declared.feature_ranges
    if declared is None:
        raise ValueError(
            "--raw scales features by the public ranges of the config, and it declares none; leave "
            "it out: the file takes features as they were trained on"
        )
    return list(declared)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs: what was trained, privacy, charts, groups, a comparison.

    RUN is a run's folder; several are compared.

    The page holds all it needs and opens offline in any browser. Whatever was not released is
    marked "simulation only" in it.
    """
    from fpfl.report.page import write_report

    path = write_report(runs, out)
    print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB; open it in a browser)")
