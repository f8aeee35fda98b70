"""The commands that train: ``fpfl train`` and ``fpfl resume``."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpfl.cli import options

if TYPE_CHECKING:
    from fpfl.config import Config, Loaded
    from fpfl.runs.folder import RunFolder
    from fpfl.server.loop import Callback

SIMULATION_ONLY = "simulation only: measured without noise, not covered by ε"

_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Explain how noisy each released sum is.")
]
_TensorBoard = Annotated[
    Path | None, typer.Option(help="A folder to log what is released to, for TensorBoard.")
]
_MLflow = Annotated[
    str | None, typer.Option("--mlflow", help="An MLflow experiment to log what is released to.")
]


_Also = Annotated[
    list[str] | None,
    typer.Option("--watch", help="Another callback of fpfl.callbacks: NAME or NAME=VALUE."),
]


@dataclass(frozen=True)
class _Watch:
    """Who is told what a training releases, besides the terminal."""

    verbose: bool
    tensorboard: Path | None
    mlflow: str | None
    also: list[str] | None = None

    def callbacks(self) -> list[Callback]:
        """Made before anything is begun: a server that cannot be reached costs nothing then."""
        from fpfl.callbacks import named

        asked = [
            *(["explain"] if self.verbose else []),
            *([f"tensorboard={self.tensorboard}"] if self.tensorboard else []),
            *([f"mlflow={self.mlflow}"] if self.mlflow else []),
            *(self.also or []),
        ]
        return [named(words) for words in asked]


def train(
    config: Annotated[Path | None, typer.Argument()] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder for the run; with --data, out/NAME by default."),
    ] = None,
    simulation: Annotated[
        bool, typer.Option(help="Also evaluate a private run on its training population.")
    ] = False,
    verbose: _Verbose = False,
    tensorboard: _TensorBoard = None,
    mlflow: _MLflow = None,
    watch: _Also = None,
    data: options.Data = None,
    schema: options.SchemaFile = None,
    label: options.LabelColumn = None,
    user: options.UserColumn = None,
    groups: options.Groups = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    ledger: options.Ledger = None,
    constraint: options.ConstraintName = None,
    tolerance: options.Tolerance = None,
    cohort: options.Cohort = None,
    rounds: options.Rounds = None,
    test: options.TestSet = None,
    hidden: options.Hidden = None,
    seed: options.Seed = None,
    measure: options.Measure = True,
) -> None:
    """Train by a config, or on a table; the run is kept in a folder and can be resumed.

    CONFIG is the training as TOML; without one give --data, a table.

    On several cores or GPUs: torchrun --nproc-per-node 2 -m fpfl.cli train CONFIG --out FOLDER.
    """
    watching = _Watch(verbose, tensorboard, mlflow, watch)
    chosen = {
        "schema": schema,
        "label": label,
        "user": user,
        "groups": groups,
        "epsilon": epsilon,
        "delta": delta,
        "ledger": ledger,
        "constraint": constraint,
        "tolerance": tolerance,
        "cohort": cohort,
        "rounds": rounds,
        "test": test,
        "hidden": hidden,
        "seed": seed,
        "measure": None if measure else False,
    }
    if data is not None:
        if config is not None:
            raise ValueError(f"both {config} and --data were given; give one of them")
        _train_table(data, out, simulation, chosen, watching)
        return
    given = sorted(f"--{name}" for name, value in chosen.items() if value is not None)
    given = ["--no-measure" if name == "--measure" else name for name in given]
    if config is None or given:
        what = f"{', '.join(given)} without --data" if given else "neither a config nor --data"
        raise ValueError(f"{what}; give fpfl train CONFIG.toml --out RUN, or --data FILE.csv")
    if out is None:
        raise ValueError("Missing option '--out': the run's new folder")
    from fpfl.config import load_config, with_schema
    from fpfl.runs.folder import CONFIG

    settings = load_config(config)
    origin = _origin(config.parent, settings.training.seed)
    settings, files = with_schema(settings, Path(origin["folder"]))
    files[CONFIG] = config.read_text(encoding="utf-8")
    _run(settings, origin, _new_folder(out, settings, origin, files), simulation, watching)


def _train_table(
    data: Path, out: Path | None, simulation: bool, chosen: dict[str, Any], watch: _Watch
) -> None:
    """Make a config of a table and the options, and train what it says."""
    from fpfl.cli.table import TableOptions, free_folder, planned
    from fpfl.runs.folder import CONFIG

    out = free_folder(data) if out is None else out
    origin = _origin(Path(), chosen["seed"])
    options = TableOptions(data, **chosen | {"measure": chosen["measure"] is None})
    plan = planned(
        options,
        Path(origin["folder"]),
        int(origin["partition_seed"]),
    )
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone or os.environ.get("RANK") == "0":
        for note in plan.notes:
            print(note)
    keep = _new_folder(out, plan.config, origin, {CONFIG: plan.text})
    _run(plan.config, origin, keep, simulation, watch, plan.loaded)


def _origin(folder: Path, seed: int | None) -> dict[str, Any]:
    # Made-up users, and those held out, are the same people when the run is resumed; and in two
    # runs, which could not be compared otherwise. Knowing who is held out tells nothing of cohorts.
    return {"folder": str(folder.resolve()), "partition_seed": 0 if seed is None else seed}


def _new_folder(
    out: Path, settings: Config, origin: dict[str, Any], files: dict[str, str]
) -> RunFolder:
    from fpfl.runs.folder import ORIGIN, RunFolder, as_json

    ledger = settings.privacy.ledger if settings.privacy else None
    return RunFolder(
        out,
        ledger=None if ledger is None else Path(origin["folder"]) / ledger,
        checkpoint_every=settings.training.checkpoint_every,
        files=files | {ORIGIN: as_json(origin).decode()},
    )


def resume(
    run: Path,
    rounds: Annotated[int | None, typer.Option(help="Another number of rounds T.")] = None,
    config: Annotated[Path | None, typer.Option(help="A changed config.")] = None,
    moved: Annotated[
        bool,
        typer.Option(help="The folder was moved or restored; no other copy will be resumed."),
    ] = False,
    simulation: Annotated[
        bool, typer.Option(help="Also evaluate a private run on its training population.")
    ] = False,
    verbose: _Verbose = False,
    tensorboard: _TensorBoard = None,
    mlflow: _MLflow = None,
    watch: _Also = None,
) -> None:
    """Resume a run: after a crash, or for more rounds where its budget allows.

    RUN is the run's folder.
    """
    from fpfl.config import load_config, load_run_config, with_schema
    from fpfl.runs.folder import CONFIG, RunFolder

    keep = RunFolder(run, resume=True, moved=moved)
    origin = asdict(keep.run.origin)
    if keep.run.ledger.finished and rounds is None and config is None:
        print(f"{run} is finished; nothing is left to do. To go on, give --rounds or --config.")
        return
    files: dict[str, str] = {}
    if config is None:
        settings = load_run_config(run)
    else:
        settings, files = with_schema(load_config(config), Path(origin["folder"]))
        files[CONFIG] = config.read_text(encoding="utf-8")
    if rounds is None and config is None:
        # T may have been raised before, for a resumption that was cut off itself.
        rounds = int(keep.run.settings["rounds"])
    if rounds is not None:
        training = settings.training.model_copy(update={"rounds": rounds})
        settings = settings.model_copy(update={"training": training})
    keep = keep.with_files(settings.training.checkpoint_every, files)
    _run(settings, origin, keep, simulation, _Watch(verbose, tensorboard, mlflow, watch))


def _run(
    settings: Config,
    origin: dict[str, Any],
    keep: RunFolder,
    simulation: bool,
    watch: _Watch,
    loaded: Loaded | None = None,
) -> None:
    """Train in a run folder, evaluate, and say how it went."""
    from fpfl.callbacks.interrupt import finishing_rounds
    from fpfl.callbacks.progress import progress
    from fpfl.config import run_config
    from fpfl.runs.folder import EVALUATION, OpenRun, as_json, model_digest
    from fpfl.server.ranks import join
    from fpfl.store.files import write_whole
    from fpfl.training.session import RunNote

    ranks, device = join(settings.training.device)
    how: dict[str, Any] = {
        "folder": Path(origin["folder"]),
        "device": device,
        "partition_seed": ranks.numbers_from_first([origin["partition_seed"]])[0],
        "keep": keep,
        "loaded": loaded,
    }
    if not ranks.first:  # computes its share; the first process shows and saves
        run_config(settings, **how)
        return
    watching: list[Callback] = watch.callbacks()
    with ExitStack() as stack:
        watching.append(stack.enter_context(progress("training", settings.training.rounds)))
        if ranks.size == 1:  # of several processes all are interrupted, each for itself
            watching.append(stack.enter_context(finishing_rounds(keep.path)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RunNote)  # it is printed with the run
        run, data, test = run_config(settings, **how, callbacks=tuple(watching))
    print(run)
    if settings.training.suggested:
        print(_settings_used(run.settings))
    parts = {"test set": test}
    if settings.privacy is None or simulation:
        parts = {"training population": data, **parts}
    for name, part in parts.items():
        if part is not None:
            evaluation = run.evaluate(part)
            content = evaluation.as_dict() | {
                "on": name,
                "mark": SIMULATION_ONLY,
                "model": model_digest(keep.path),
            }
            write_whole(keep.path / EVALUATION.format(name.split()[0]), as_json(content))
            print(f"\nOn the {name} ({SIMULATION_ONLY}):\n{evaluation}")
    print(f"\nSaved in {keep.path}")
    print(f"Next: fpfl report {keep.path} -o report.html, fpfl export {keep.path}")
    if run.stopped:
        ledger = OpenRun(keep.path).ledger
        if run.privacy is not None and not ledger.changes and ledger.spent >= ledger.planned:
            return  # all that was planned is spent, if not all of it was used: the run says so
        print(f"error: {run.stopped}", file=sys.stderr)
        raise typer.Exit(1)


def _settings_used(settings: dict[str, Any]) -> str:
    """What a run was trained with, as a config would say it."""
    parts = [f"rounds = {settings['rounds']}", f"clip = {_inline(settings['clip'])}"]
    if settings["learning_rate"] is not None:  # another optimiser than SGD has its own
        parts.insert(1, f"learning_rate = {settings['learning_rate']:.4g}")
    return f"Settings used: {', '.join(parts)}"


def _inline(values: dict[str, Any]) -> str:
    """Numbers by name as an inline table of TOML, with tables inside."""
    found = [
        f"{name} = {_inline(value) if isinstance(value, dict) else f'{value:g}'}"
        for name, value in values.items()
        if name != "kind" and value is not None
    ]
    return f"{{ {', '.join(found)} }}"
