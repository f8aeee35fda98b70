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


class Keeper:
    """A results file, written as runs finish; whatever happens in the ``with``, they are kept.

    Parameters
    ----------
    out
        The file or its folder; None: nothing is written.
    words
        The command, for the file's ``about``.
    say
        What is told of every run; by default it is printed.
    """

    def __init__(
        self, out: Path | None, words: Sequence[str], say: Callable[[str], None] | None = None
    ) -> None:
        self.tell = say or _print
        self._path = None if out is None else results_file(out)
        found = {"about": [], "results": []} if self._path is None else read_results(self._path)
        self._earlier, self._command = found["about"], shlex.join(words)
        self._done: dict[Key, Result] = {(e["row"], e["seed"]): e for e in found["results"]}
        self._code = code_fingerprint()[:12]
        self._due = self._finished = 0
        self._start = self._written = time.perf_counter()
        others = sum(each.get("code") != self._code for each in self._done.values())
        if others:
            self.tell(
                f"{others} runs of {self._path} were made by other code or packages; to make all "
                "anew name another --out"
            )

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        if self._due:
            self._write(time.perf_counter() - self._start)

    def has(self, row: Row, seed: int) -> bool:
        """Whether a run is there already."""
        return (row.name, seed) in self._done

    def begin(self, asked: int, due: int) -> None:
        """Say how many runs are asked for, and how many of them are due."""
        self._due = due
        self.tell(f"{asked} runs, {due} to do")

    def take(self, row: Row, seed: int, result: Result) -> None:
        """Keep a run."""
        self._done[row.name, seed] = result | {"code": self._code}
        self._finished += 1
        self.tell(f"[{self._finished}/{self._due}] {shown(result)}")
        if time.perf_counter() - self._written > _EVERY:
            self._write(None)
            self._written = time.perf_counter()

    def results(self) -> list[Result]:
        """All runs, in the order of the tables, rows and seeds; rows that are no more come last."""
        place = {row.name: number for number, row in enumerate(Selection().rows())}
        keys = sorted(self._done, key=lambda key: (place.get(key[0], len(place)), *key))
        return [self._done[key] for key in keys]

    def _write(self, seconds: float | None) -> None:
        if self._path is None:
            return
        made = about_this_run(self._command, seconds) | {"code": self._code, "runs": self._due}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(each) for each in self.results())
        about = json.dumps([*self._earlier, made])
        write_whole(self._path, f'{{"about": {about},\n"results": [\n{lines}\n]}}\n'.encode())


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
    out, words, say
        See `Keeper`. A run that the file has is not run again.
    jobs
        Processes side by side; one for each core by default.
    """
    with Keeper(out, words, say) as keeper:
        work = here(selection.work(), data, keeper.tell)
        due = [(row, seed) for row, seed in work if not keeper.has(row, seed)]
        keeper.begin(len(work), len(due))
        processes = jobs or side_by_side("cpu")
        shares = [[due[number] for number in group] for group in dealt(due, data, processes)]
        found = side_by_side_shares(shares, partial(run_rows, folder=data), processes)
        for group, place, result in found:
            keeper.take(*shares[group][place], result)
        return keeper.results()


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


def here(
    work: list[tuple[Row, int]], data: Path, tell: Callable[[str], None]
) -> list[tuple[Row, int]]:
    """The work on tables whose files are there; of the others it is said that they are not."""
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


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
