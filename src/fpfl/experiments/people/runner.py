"""``fpfl reproduce tables``: the rows that were asked for, kept in a file as they finish."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fpfl.experiments.people.rows import Row, Selection
from fpfl.experiments.people.runs import Result, cost_of, run_rows, shape_of, table_of
from fpfl.experiments.people.tables import missing_file, people
from fpfl.experiments.runner import side_by_side
from fpfl.experiments.together import groups_of, side_by_side_shares
from fpfl.runs.about import about_this_run
from fpfl.runs.fingerprints import code_fingerprint
from fpfl.store.files import write_whole

FILE = "results.json"

_EVERY = 5.0
"""Seconds between two writings of the file."""

Key = tuple[str, int]


def results_file(out: Path) -> Path:
    """The file of ``--out``: itself where it is called .json, otherwise one in that folder."""
    return out if out.suffix == ".json" else out / FILE


def read_results(path: Path) -> dict[str, Any]:
    """A results file: ``about`` (one entry a call) and ``results``; empty where there is none."""
    if not path.exists():
        return {"about": [], "results": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        keys = [(each["row"], each["seed"]) for each in found["results"]]
        list(found["about"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no results file of fpfl reproduce tables ({error!r}); name another --out"
        ) from error
    if len(set(keys)) != len(keys):
        raise ValueError(f"{path} has a run twice; name another --out")
    return dict(found)


def reproduce_tables(
    selection: Selection,
    data: Path,
    out: Path | None = None,
    *,
    jobs: int | None = None,
    words: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> list[Result]:
    """Run what was asked for and is not in the file yet; returns all that the file has then.

    Parameters
    ----------
    selection
        Which rows, and how many seeds.
    data
        The folder of the tables' files; a table whose file is not there is skipped, and said so.
    out
        The file that runs are kept in, or its folder. A run that it has is not run again.
    jobs
        Processes side by side; one for each core by default.
    words
        The command, for the file's ``about``.
    say
        What is told of tables that are skipped and of every run; by default it is printed.
    """
    tell = say or _print
    path = None if out is None else results_file(out)
    kept = {"about": [], "results": []} if path is None else read_results(path)
    done: dict[Key, Result] = {(each["row"], each["seed"]): each for each in kept["results"]}
    code = code_fingerprint()[:12]
    others = sum(each.get("code") != code for each in done.values())
    if others:
        tell(f"{others} runs of {path} were made by other code; for new ones name another --out")
    work = _here(selection.work(), data, tell)
    due = [each for each in work if (each[0].name, each[1]) not in done]
    tell(f"{len(work)} runs, {len(due)} to do")
    start, command = time.perf_counter(), shlex.join(words)

    def write(seconds: float | None) -> None:
        if path is not None:
            made = about_this_run(command, seconds) | {"code": code, "runs": len(due)}
            _write(path, [*kept["about"], made], _ordered(done))

    processes = jobs or side_by_side("cpu")
    groups = dealt(due, data, processes)
    shares = [[due[number] for number in group] for group in groups]
    written = time.perf_counter()
    try:
        found = side_by_side_shares(shares, partial(run_rows, folder=data), processes)
        for finished, (group, place, result) in enumerate(found, start=1):
            row, seed = shares[group][place]
            done[row.name, seed] = result | {"code": code}
            tell(f"[{finished}/{len(due)}] {shown(result)}")
            if time.perf_counter() - written > _EVERY:
                write(None)
                written = time.perf_counter()
    finally:  # whatever happens, what is finished is kept
        if due:
            write(time.perf_counter() - start)
    return _ordered(done)


def dealt(work: Sequence[tuple[Row, int]], data: Path, processes: int) -> list[list[int]]:
    """Which of the work each share has: trainings of one shape together, the longest first."""
    users = {row.table: people(table_of(row), data).train.population for row, _ in work}
    shapes = [shape_of(row) for row, _ in work]
    return groups_of(shapes, [cost_of(row, users[row.table]) for row, _ in work], processes)


def shown(result: Result) -> str:
    """A run in one line."""
    name = f"{result['row']} seed {result['seed']}"
    test, train = result["test"], result["train"]
    if "rmse" in test:
        return f"{name}: RMSE {test['rmse']:.3f}, {result['seconds']} s"
    gap = train["gaps"][result["constraint"] or "fnr"]
    collapsed = f", COLLAPSED: {test['collapsed']}" if test.get("collapsed") else ""
    return (
        f"{name}: accuracy {test['accuracy']:.3f}, balanced {test['balanced_accuracy']:.3f}, "
        f"training gap {gap:.3f}, {result['seconds']} s{collapsed}"
    )


def _here(
    work: list[tuple[Row, int]], data: Path, tell: Callable[[str], None]
) -> list[tuple[Row, int]]:
    absent = {}
    for row, _ in work:
        said = missing_file(table_of(row), data)
        if said is not None:
            absent[row.table] = said
    for said in absent.values():
        tell(said)
    found = [each for each in work if each[0].table not in absent]
    if not found:
        raise ValueError(f"none of the tables is in {data}: {'; '.join(absent.values())}")
    return found


def _ordered(done: dict[Key, Result]) -> list[Result]:
    """In the order of the tables, rows and seeds; rows that are no more come last."""
    place = {row.name: number for number, row in enumerate(Selection().rows())}
    return [done[key] for key in sorted(done, key=lambda k: (place.get(k[0], len(place)), *k))]


def _write(path: Path, about: list[dict[str, Any]], results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in results)
    text = f'{{"about": {json.dumps(about)},\n"results": [\n{lines}\n]}}\n'
    write_whole(path, text.encode())


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
