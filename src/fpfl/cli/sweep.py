"""The command ``fpfl sweep``: many trainings written down as one file."""

from __future__ import annotations

import os
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fpfl.config import SweepFile
    from fpfl.sweeps.asked import Asked, Population
    from fpfl.sweeps.sweep import Sweep


def sweep(
    config: Path,
    out: Annotated[Path, typer.Option(help="A new folder for the sweep.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out: only what is missing.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Worker processes; on a CPU one for each core by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
) -> None:
    """Train many runs that differ in settings and seeds, and choose by held-out users.

    CONFIG is a training as TOML with a section "sweep": a grid of values, or a list of runs.

    A sweep is a simulation: a run that is to be released is trained on its own. The noise of
    private runs is seeded, unless the config names a ledger: then every run is charged to it, and
    what all of them cost is printed before they start.
    """
    from fpfl.config import load_sweep
    from fpfl.sweeps.folder import RESULTS

    made = _made(load_sweep(config), config, out, resume=resume, jobs=jobs)
    try:
        made.finish()
    except KeyboardInterrupt:  # it has said what is kept, and how to go on
        raise typer.Exit(130) from None
    if as_json:
        print((out / RESULTS).read_text(encoding="utf-8"), end="")
        return
    choice = made.choice
    if choice is None:
        print(made.table().markdown())
    else:
        print(choice.markdown())
        print(choice)
    print(f"\nSaved in {out}")


def _made(asked: SweepFile, config: Path, out: Path, *, resume: bool, jobs: int | None) -> Sweep:
    """The sweep of a file, checked, and its cost said."""
    from fpfl.config import load_data, load_people, make_constraint
    from fpfl.sweeps.asked import populations
    from fpfl.sweeps.sweep import Sweep, judge_of

    first = asked.configs[0]
    private = any(each.privacy is not None for each in asked.configs)
    folder = config.parent.resolve()
    people, _ = load_data(first, folder, asked.seed, private=private)
    others = asked.held_out
    given = isinstance(others, Path)
    held_out = load_people(first, folder / others, folder) if isinstance(others, Path) else others
    parts = populations(people, held_out, asked.seed)
    runs = _runs(asked, parts)
    own = first.model_copy(update={"constraint": asked.constraint})
    judge = judge_of(make_constraint(own, people.schema), runs)
    named = {each.privacy.ledger for each in asked.configs if each.privacy is not None} - {None}
    ledger = next(iter(named), None)
    lazy = any(part.training.lazy for part in parts.values())
    again = ["fpfl", "sweep", str(config), "--out", str(out), "--resume"]
    return Sweep(
        runs,
        parts,
        judge=judge,
        tolerance=asked.sweep.tolerance,
        held_out={"of": str(others)} if given else {"share": others, "seed": asked.seed},
        ledger=None if ledger is None else folder / ledger,
        folder=out,
        resume=resume,
        jobs=_usual_jobs(first.training.device, lazy=lazy) if jobs is None else jobs,
        memory=first.training.memory,
        progress=True,
        again=shlex.join(again),
        command=shlex.join(["fpfl", *sys.argv[1:]]),
    )


def _runs(asked: SweepFile, parts: dict[str, Population]) -> list[Asked]:
    from fpfl.config import make_model, train_keywords
    from fpfl.sweeps.asked import ONE, Asked

    data = parts[ONE].training
    hidden = {tuple(each.model.hidden): each for each in asked.configs}

    @cache
    def model(layers: tuple[int, ...], seed: int) -> Any:
        config = hidden[layers]
        training = config.training.model_copy(update={"seed": seed})
        return make_model(config.model_copy(update={"training": training}), data.schema)

    runs = []
    for number, (config, own) in enumerate(zip(asked.configs, asked.settings, strict=True)):
        try:
            given = train_keywords(config, data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"run {number} of the sweep: {error}") from error
        given.pop("memory")
        layers, seed = tuple(config.model.hidden), int(given.pop("seed"))
        settings = {name: value for name, value in own.items() if name != "training.seed"}
        runs.append(
            Asked(
                number,
                settings,
                f"hidden layers {list(layers)}",
                ONE,
                seed,
                given,
                lambda layers=layers, seed=seed: model(layers, seed),  # type: ignore[misc]
            )
        )
    return runs


def _usual_jobs(device: str, *, lazy: bool) -> int:
    if device != "cpu" or lazy:
        return 1
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
