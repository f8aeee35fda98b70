"""The commands that train: ``fpfl train`` and ``fpfl resume``."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fpfl.config import Config
    from fpfl.folder import RunFolder

SIMULATION_ONLY = "simulation only: measured without noise, not covered by ε"
_ORIGIN = "origin.json"


def train(
    config: Annotated[Path, typer.Argument(help="The training, as TOML.")],
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    simulation: Annotated[
        bool, typer.Option(help="Also evaluate a private run on its training population.")
    ] = False,
) -> None:
    """Train what a config says; the run is kept in a folder and can be resumed.

    On several cores or GPUs: torchrun --nproc-per-node 2 -m fpfl.cli train CONFIG --out FOLDER.
    """
    from fpfl.config import load_config
    from fpfl.folder import RunFolder

    settings = load_config(config)
    origin = {
        "folder": str(config.parent.resolve()),
        # Made-up users must be the same people when the run is resumed.
        "partition_seed": settings.training.seed
        if settings.training.seed is not None
        else secrets.randbits(62),
    }
    ledger = settings.privacy.ledger if settings.privacy else None
    keep = RunFolder(
        out,
        ledger=None if ledger is None else config.parent / ledger,
        checkpoint_every=settings.training.checkpoint_every,
        files={
            "config.toml": config.read_text(encoding="utf-8"),
            _ORIGIN: json.dumps(origin, indent=1) + "\n",
        },
    )
    _run(settings, origin, keep, simulation)


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    rounds: Annotated[int | None, typer.Option(help="Another number of rounds T.")] = None,
    config: Annotated[Path | None, typer.Option(help="A changed config.")] = None,
    moved: Annotated[
        bool,
        typer.Option(help="The folder was moved or restored; no other copy will be resumed."),
    ] = False,
    simulation: Annotated[
        bool, typer.Option(help="Also evaluate a private run on its training population.")
    ] = False,
) -> None:
    """Go on with a run: after a crash, or with more rounds where its budget allows."""
    from fpfl.config import load_config
    from fpfl.folder import RunFolder, finished, look, read_about

    about = read_about(run)
    origin = origin_of(run)
    if finished(run) and rounds is None and config is None:
        print(f"{run} is finished; nothing is left to do. To go on, give --rounds or --config.")
        return
    settings = load_config(config or run / "config.toml")
    if rounds is None and config is None:
        # T may have been raised before, for a resumption that was cut off itself.
        rounds = int((look(run).settings or about["settings"])["rounds"])
    if rounds is not None:
        training = settings.training.model_copy(update={"rounds": rounds})
        settings = settings.model_copy(update={"training": training})
    keep = RunFolder(
        run,
        resume=True,
        moved=moved,
        checkpoint_every=settings.training.checkpoint_every,
        files={} if config is None else {"config.toml": config.read_text(encoding="utf-8")},
    )
    _run(settings, origin, keep, simulation)


def _run(settings: Config, origin: dict[str, Any], keep: RunFolder, simulation: bool) -> None:
    """Train in a run folder, evaluate, and say how it went."""
    from fpfl.config import run_config
    from fpfl.report.progress import progress
    from fpfl.server.ranks import join
    from fpfl.store.files import write_whole

    ranks, device = join(settings.training.device)
    how: dict[str, Any] = {
        "folder": Path(origin["folder"]),
        "device": device,
        "partition_seed": ranks.numbers_from_first([origin["partition_seed"]])[0],
        "keep": keep,
    }
    if not ranks.first:  # computes its share; the first process shows and saves
        run_config(settings, **how)
        return
    with progress("training", settings.training.rounds) as callback:
        run, data, test = run_config(settings, **how, callbacks=(callback,))
    print(run)
    if settings.training.suggested:
        print(_settings_used(run.settings))
    parts = {"test set": test}
    if settings.privacy is None or simulation:
        parts = {"training population": data, **parts}
    for name, part in parts.items():
        if part is not None:
            evaluation = run.evaluate(part)
            content = evaluation.as_dict() | {"on": name, "mark": SIMULATION_ONLY}
            text = f"{json.dumps(content, indent=1)}\n"
            write_whole(keep.path / f"evaluation-{name.split()[0]}.json", text.encode())
            print(f"\nOn the {name} ({SIMULATION_ONLY}):\n{evaluation}")
    print(f"\nSaved in {keep.path}")
    if run.stopped:
        print(f"error: {run.stopped}", file=sys.stderr)
        raise typer.Exit(1)


def _settings_used(settings: dict[str, Any]) -> str:
    """What a run was trained with, as a config would say it."""
    bounds = settings["clip"].items()
    clip = ", ".join(f"{n} = {v:g}" for n, v in bounds if n != "kind" and v is not None)
    parts = [f"rounds = {settings['rounds']}", f"clip = {{ {clip} }}"]
    if settings["learning_rate"] is not None:  # another optimiser than SGD has its own
        parts.insert(1, f"learning_rate = {settings['learning_rate']:.4g}")
    return f"Settings used: {', '.join(parts)}"


def origin_of(run: Path) -> dict[str, Any]:
    """Where a run's config was, and the seed of its made-up users."""
    try:
        content = json.loads((run / _ORIGIN).read_text(encoding="utf-8"))
        return {"folder": str(content["folder"]), "partition_seed": int(content["partition_seed"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run} was not begun by fpfl train ({_ORIGIN}: {error}); resume it from Python: "
            "fpfl.train(..., folder=fpfl.RunFolder(path, resume=True))"
        ) from error
