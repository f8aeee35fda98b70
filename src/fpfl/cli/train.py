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
    from fpfl.data.federated import FederatedDataset
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
    reference: options.Reference = False,
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
        _train_table(data, out, simulation, chosen | {"reference": reference}, watching)
        return
    given = sorted(f"--{name}" for name, value in chosen.items() if value is not None)
    given = ["--no-measure" if name == "--measure" else name for name in given]
    if config is None or given:
        what = f"{', '.join(given)} without --data" if given else "neither a config nor --data"
        raise ValueError(f"{what}; give fpfl train CONFIG.toml --out RUN, or --data FILE.csv")
    if out is None:
        raise ValueError("Missing option '--out': the run's new folder")
    from fpfl.config import load_config, with_schema
    from fpfl.config.sections import NO_CONSTRAINT
    from fpfl.runs.folder import CONFIG

    settings = load_config(config)
    if reference and settings.constraint is None:
        raise ValueError(f"--reference: {NO_CONSTRAINT}")
    origin = _origin(config.parent, settings.training.seed)
    origin |= {"reference": True} if reference or settings.training.reference else {}
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
    origin |= {"reference": True} if chosen["reference"] else {}
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
    from fpfl.runs.folder import CONFIG, ORIGIN, RunFolder, as_json

    keep = RunFolder(run, resume=True, moved=moved)
    origin = asdict(keep.run.origin)
    watching = _Watch(verbose, tensorboard, mlflow, watch)
    if keep.run.ledger.finished and rounds is None and config is None:
        if origin["reference"] and not _compared(run):
            _train_reference(load_run_config(run), origin, keep, simulation, watching)
            return
        print(f"{run} is finished; nothing is left to do. To go on, give --rounds or --config.")
        return
    files: dict[str, str] = {}
    if config is None:
        settings = load_run_config(run)
    else:
        settings, files = with_schema(load_config(config), Path(origin["folder"]))
        files[CONFIG] = config.read_text(encoding="utf-8")
        if settings.training.reference and not origin["reference"]:
            origin["reference"] = True
            files[ORIGIN] = as_json(origin).decode()
    if rounds is None and config is None:
        # T may have been raised before, for a resumption that was cut off itself.
        rounds = int(keep.run.settings["rounds"])
    if rounds is not None:
        training = settings.training.model_copy(update={"rounds": rounds})
        settings = settings.model_copy(update={"training": training})
    keep = keep.with_files(settings.training.checkpoint_every, files)
    _run(settings, origin, keep, simulation, watching)


def _run(
    settings: Config,
    origin: dict[str, Any],
    keep: RunFolder,
    simulation: bool,
    watch: _Watch,
    loaded: Loaded | None = None,
) -> None:
    """Train in a run folder, and its reference where one was asked for; say how it went."""
    from fpfl.heldout.against import NOT_MEASURED
    from fpfl.server.ranks import Ranks

    unconstrained = bool(origin.get("unconstrained"))
    wanted = bool(origin.get("reference")) and not unconstrained
    stopped, loaded = _train_one(settings, origin, keep, simulation, watch, loaded)
    if wanted and not stopped:
        _train_reference(settings, origin, keep, simulation, watch, loaded)
    if not Ranks.current().first:
        return
    if settings.constraint is not None and not unconstrained and not wanted:
        print(f"\n{NOT_MEASURED}")
    print(f"\nSaved in {keep.path}")
    print(f"Next: fpfl report {keep.path} -o report.html, fpfl export {keep.path}")
    if stopped:
        print(f"error: {stopped}", file=sys.stderr)
        raise typer.Exit(1)


def _train_one(
    settings: Config,
    origin: dict[str, Any],
    keep: RunFolder,
    simulation: bool,
    watch: _Watch,
    loaded: Loaded | None,
) -> tuple[str | None, Loaded]:
    """Train, evaluate, and say how it went; also return why it failed, and the data."""
    from fpfl.callbacks.interrupt import finishing_rounds
    from fpfl.callbacks.progress import progress
    from fpfl.config import make_constraint, run_config
    from fpfl.runs.folder import EVALUATION, OpenRun, as_json, model_digest
    from fpfl.server.ranks import join
    from fpfl.store.files import write_whole
    from fpfl.training.run import evaluate_model
    from fpfl.training.session import RunNote

    ranks, device = join(settings.training.device)
    unconstrained = bool(origin.get("unconstrained"))
    how: dict[str, Any] = {
        "folder": Path(origin["folder"]),
        "device": device,
        "partition_seed": ranks.numbers_from_first([origin["partition_seed"]])[0],
        "keep": keep,
        "loaded": loaded,
        "unconstrained": unconstrained,
    }
    if not ranks.first:  # computes its share; the first process shows and saves
        _, data, test = run_config(settings, **how)
        ended = not origin.get("reference") or not ranks.numbers_from_first([0])[0]
        return (None if ended else "it failed in the first process"), (data, test)
    watching: list[Callback] = watch.callbacks()
    with ExitStack() as stack:
        title = "reference" if unconstrained else "training"
        watching.append(stack.enter_context(progress(title, settings.training.rounds)))
        if ranks.size == 1:  # of several processes all are interrupted, each for itself
            watching.append(stack.enter_context(finishing_rounds(keep.path)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RunNote)  # it is printed with the run
        run, data, test = run_config(settings, **how, callbacks=tuple(watching))
    print(run)
    if settings.training.suggested:
        print(_settings_used(run.settings))
    # A reference is judged by the constraint that it was trained without.
    constraint = make_constraint(settings, data.schema)
    for name, part in _parts(settings, simulation, data, test).items():
        evaluation = evaluate_model(run.model, part, constraint=constraint)
        content = evaluation.as_dict() | {
            "on": name,
            "mark": SIMULATION_ONLY,
            "model": model_digest(keep.path),
        }
        write_whole(keep.path / EVALUATION.format(name.split()[0]), as_json(content))
        print(f"\nOn the {name} ({SIMULATION_ONLY}):\n{evaluation}")
    stopped = run.stopped
    if stopped:
        ledger = OpenRun(keep.path).ledger
        if run.privacy is not None and not ledger.changes and ledger.spent >= ledger.planned:
            stopped = None  # all that was planned is spent, if not all of it was used: it says so
    if origin.get("reference"):  # the others have to know whether there is more to do
        ranks.numbers_from_first([int(bool(stopped))])
    return stopped, (data, test)


def _parts(
    settings: Config, simulation: bool, data: FederatedDataset, test: FederatedDataset | None
) -> dict[str, FederatedDataset]:
    """Whom a run is evaluated on without noise."""
    parts = {} if test is None else {"test set": test}
    if settings.privacy is None or simulation:
        parts = {"training population": data, **parts}
    return parts


def _compared(run: Path) -> bool:
    """Whether a run's reference has ended, too."""
    from fpfl.runs.folder import reference_of

    reference = reference_of(run)
    return reference is not None and reference.ledger.finished


def _train_reference(
    settings: Config,
    origin: dict[str, Any],
    keep: RunFolder,
    simulation: bool,
    watch: _Watch,
    loaded: Loaded | None = None,
) -> None:
    """Train the same without the constraint beside a run that has ended, and compare them."""
    from fpfl.runs.folder import (
        CONFIG,
        ORIGIN,
        REFERENCE,
        TABLE_SCHEMA,
        WITHDRAWALS,
        RunFolder,
        as_json,
        reference_of,
    )
    from fpfl.server.ranks import Ranks, join

    ranks, _ = join(settings.training.device)
    path, before = keep.path / REFERENCE, reference_of(keep.path)
    own = {"folder": origin["folder"], "partition_seed": origin["partition_seed"]}
    own |= {"unconstrained": True}
    names = (CONFIG, TABLE_SCHEMA, *(() if before else (WITHDRAWALS,)))
    there = [name for name in names if (keep.path / name).exists()]
    files = {name: (keep.path / name).read_text(encoding="utf-8") for name in there}
    files[ORIGIN] = as_json(own).decode()
    ledger = settings.privacy.ledger if settings.privacy else None
    where = RunFolder(
        path,
        resume=before is not None,
        ledger=None if ledger is None else Path(origin["folder"]) / ledger,
        checkpoint_every=settings.training.checkpoint_every,
        moved=keep.moved,
        files=files,
    )
    # Nobody looks at the folder after another process has begun to write in it.
    ranks.numbers_from_first([0])
    if Ranks.current().first:
        print("\nThe reference: the same without the constraint.")
    stopped, loaded = _train_one(settings, own, where, simulation, watch, loaded)
    if not ranks.first:
        return
    if stopped:
        print(f"error: the reference: {stopped}", file=sys.stderr)
        raise typer.Exit(1)
    _compare(settings, keep.path, path, _parts(settings, simulation, *loaded))


def _compare(
    settings: Config, run: Path, reference: Path, parts: dict[str, FederatedDataset]
) -> None:
    """Say who is better and who is worse off than by the reference, and what both cost."""
    from safetensors.torch import load_file

    from fpfl.config import make_constraint, make_model
    from fpfl.data.inputs import load_model
    from fpfl.heldout.against import NOT_MEASURED, write_against
    from fpfl.runs.folder import MODEL, RESULT
    from fpfl.store.typed import read_json
    from fpfl.training.reference import together
    from fpfl.training.run import compare_models

    for name, part in parts.items():
        constraint = make_constraint(settings, part.schema)
        assert constraint is not None  # a run without one has no reference
        mine, other = (
            load_model(make_model(settings, part.schema), load_file(folder / MODEL))
            for folder in (run, reference)
        )
        found = compare_models(mine, other, part, constraint)
        write_against(run, reference, name.split()[0], found)
        print(f"\nOn the {name} ({SIMULATION_ONLY}):\n{found}")
    if not parts:
        print(f"\n{NOT_MEASURED.split(':')[0]}: not measured yet; fpfl evaluate {run} does both.")
    said = together(
        [read_json(each / RESULT, dict[str, Any]).get("privacy") for each in (run, reference)]
    )
    if said is not None:
        print(said)


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
