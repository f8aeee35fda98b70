"""Running the rows of a table: every row and seed through ``fpfl.train``, side by side."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch

from fpfl.arguments import check_device
from fpfl.experiments.markdown import markdown_table
from fpfl.experiments.rows import STATEMENT, Options, Result, population, run_row
from fpfl.experiments.tables import Row, load_table, matches, override
from fpfl.privacy.plan import Convention


def run_table(
    table: str,
    *,
    seeds: int,
    rows: str,
    out: Path | None,
    as_json: bool,
    jobs: int | None,
    convention: str,
    noise_multiplier: float | None,
    overrides: Sequence[str],
    device: str,
    words: Sequence[str],
) -> str:
    """Run a table, write its files, and return what is to be printed."""
    for known in get_args(Convention):
        if convention == known:
            break
    else:
        names = ", ".join(get_args(Convention))
        raise ValueError(f"the convention is {convention!r}; expected one of {names}")
    options = Options(
        convention=known,
        noise_multiplier=noise_multiplier,
        overrides=tuple(overrides),
        device=device,
    )
    start = time.perf_counter()
    results = reproduce(
        table,
        seeds=range(seeds),
        pattern=rows,
        options=options,
        jobs=jobs,
        report=print_result,
        partial=out / "partial.json" if out else None,
    )
    about = about_this_run(shlex.join(words), time.perf_counter() - start)
    if out is not None:
        write_results(out, results, about)
    if as_json:
        return json.dumps(plain_results(results), indent=1)
    return markdown_table(results, load_table(table), about)


def print_result(result: Result, done: int, total: int) -> None:
    """One line on the error stream for each finished run."""
    print(
        f"[{done}/{total}] {result['model']} {result['algorithm']} m={result['cohort'] or '-'} "
        f"{result['variant']} seed {result['seed']}: {_shown(result['accuracy'])}, gap "
        f"{result['gap']:.3f} (training {result['train_gap']:.3f}), {result['seconds']} s",
        file=sys.stderr,
        flush=True,
    )


def _shown(accuracy: float | None) -> str:
    return "regression" if accuracy is None else f"accuracy {accuracy:.3f}"


def reproduce(
    table: str,
    *,
    seeds: Sequence[int],
    pattern: str = "*",
    options: Options | None = None,
    jobs: int | None = None,
    report: Callable[[Result, int, int], None] | None = None,
    partial: Path | None = None,
) -> list[Result]:
    """Run the rows of a table that match, with every seed; results in the table's order.

    What is finished so far is kept in the file ``partial`` until all is, so that a run which is
    cut off has not been for nothing.
    """
    options = options or Options()
    check_device(options.device)
    rows = [
        override(row, options.overrides)
        for row in load_table(table)
        if matches(row.name(population(row)), pattern)
    ]
    if not rows:
        names = [row.name(population(row)) for row in load_table(table)]
        raise ValueError(f"no row of {table} matches {pattern!r}; the rows are {', '.join(names)}")
    if not seeds:
        raise ValueError("no seeds were given; give at least one")
    work = [(row, seed) for row in rows for seed in seeds]
    results: dict[int, Result] = {}
    for index, result in _run_all(work, options, jobs or side_by_side(options.device)):
        results[index] = result
        if partial is not None:
            partial.parent.mkdir(parents=True, exist_ok=True)
            done = plain_results([results[i] for i in sorted(results)])
            partial.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        if report:
            report(result, len(results), len(work))
    if partial is not None:
        partial.unlink(missing_ok=True)
    return [results[i] for i in range(len(work))]


def side_by_side(device: str) -> int:
    """How many runs to have at a time: one for each core; on a GPU, which they share, up to eight.

    A small network leaves most of a GPU idle while Python prepares its next step.
    """
    cores = os.cpu_count() or 1
    return cores if device == "cpu" else min(cores, 8)


def _run_all(
    work: Sequence[tuple[Row, int]], options: Options, jobs: int
) -> Iterator[tuple[int, Result]]:
    if jobs == 1 or len(work) == 1:
        for index, (row, seed) in enumerate(work):
            yield index, run_row(row, seed, options)
        return
    # One thread for each process: two threads sharing small matrices are slower than two runs.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(work)), mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = {
            pool.submit(run_row, row, seed, options): index
            for index, (row, seed) in enumerate(work)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


def write_results(folder: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Write ``results.json`` (the runs), ``about.json`` and ``table.md`` (for people)."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain_results(results), indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    rows = load_table(results[0]["table"])
    (folder / "table.md").write_text(markdown_table(results, rows, about), encoding="utf-8")


def plain_results(results: Sequence[Result]) -> list[Result]:
    """The results as JSON knows them: None where a figure is not a number."""
    return [
        {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in result.items()
            if key != STATEMENT
        }
        for result in results
    ]


def about_this_run(command: str, seconds: float) -> dict[str, Any]:
    """What a reader needs to place the figures: command, machine, versions, date."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wall_seconds": round(seconds, 1),
    }
