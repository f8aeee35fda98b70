"""Running the rows of a table: every row and seed, those of one shape computed together."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fpfl.data.femnist.unfair import Order
from fpfl.experiments.femnist import default_scale
from fpfl.experiments.markdown import markdown_table, with_epsilon
from fpfl.experiments.rows import TASKS, Result, cost_of, row_name, run_rows, shape_of
from fpfl.experiments.tables import KEY, Options, Row, load_table, matches, override, parsed_noise
from fpfl.experiments.together import groups_of, side_by_side_shares
from fpfl.privacy.conventions.base import REGISTER
from fpfl.runs.about import about_this_run as about_this_run
from fpfl.store.files import write_whole
from fpfl.training.spec import check_device
from fpfl.users.precision import Precision

PARTIAL, RESULTS, ABOUT = "partial.json", "results.json", "about.json"


def run_key(row: Row, seed: int, options: Options) -> str:
    """What a run is one of: its row, seed and settings.

    Where and how precisely it was computed does not count; its result says it.
    """
    said = asdict(row) | {
        "seed": seed,
        "data": (TASKS[row.task].title(options), TASKS[row.task].content(options)),
        "convention": options.convention,
        "noise": options.noise_multiplier(row_name(row, options)) if row.private else None,
    }
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_kept(folder: Path) -> list[Result]:
    """The runs of a folder: of a table that was cut off, or of one that was finished."""
    for name in (PARTIAL, RESULTS):
        path = folder / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            keys = [result["run"] for result in found]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be resumed ({error!r}); name another folder with --out"
            ) from error
        if len(set(keys)) != len(keys):
            raise ValueError(f"{path} has a run twice; name another folder with --out")
        return list(found)
    return []


def write_kept(folder: Path, name: str, results: Sequence[Result]) -> None:
    """Keep runs in a file that is whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, json_text(results).encode())


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Say how the folder's runs were made; from the beginning, in case a call is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ABOUT, f"{json.dumps(about, indent=1)}\n".encode())


def read_about(folder: Path) -> list[dict[str, Any]]:
    """Under what the runs that are kept were made: the latest call first.

    ``wall_seconds`` is None for a call that was cut off.
    """
    path = folder / ABOUT
    if not path.exists():
        return []
    about = json.loads(path.read_text(encoding="utf-8"))
    return [{k: v for k, v in about.items() if k != "earlier"}, *about.get("earlier", [])]


def json_text(results: Sequence[Result]) -> str:
    """The results as JSON knows them: None where a figure is not a number."""
    return json.dumps([_plain(result) for result in results], indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def run_table(
    table: str,
    *,
    seeds: int,
    rows: str,
    out: Path | None,
    as_json: bool,
    jobs: int | None,
    convention: str,
    noise_multiplier: Sequence[str],
    overrides: Sequence[str],
    data: str | None,
    order: str,
    scale: float | None,
    device: str,
    precision: str,
    resume: bool,
    one_by_one: bool = False,
    words: Sequence[str],
) -> str:
    """Run a table, write its files, and return what is to be printed."""
    if scale is None:
        scale = default_scale(data) if table == "femnist" else 1.0
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"the scale is {scale}; it must be above 0, and 1 at most")
    options = Options(
        convention=_one_of("convention", convention, tuple(REGISTER)),
        noise=tuple(parsed_noise(each) for each in noise_multiplier),
        overrides=tuple(overrides),
        data=data,
        order=_one_of("order", order, get_args(Order)),
        scale=scale,
        device=device,
        precision=_one_of("precision", precision, get_args(Precision)),
    )
    if resume and out is None:
        raise ValueError("--resume goes on with the table of a folder; name it with --out")
    if out is not None and not resume and (out / PARTIAL).exists():
        raise ValueError(
            f"{out / PARTIAL} has finished runs of a table that was cut off: go on with them by "
            "--resume, or remove the file"
        )
    start, command = time.perf_counter(), shlex.join(words)
    before = read_about(out) if out is not None and resume else []
    earlier = {"earlier": before} if before else {}
    results = reproduce(
        table,
        seeds=range(seeds),
        pattern=rows,
        options=options,
        jobs=jobs,
        report=print_result,
        folder=out,
        resume=resume,
        apart=one_by_one,
        about=about_this_run(command, None) | earlier,
    )
    about = about_this_run(command, time.perf_counter() - start) | earlier
    if out is not None:
        write_results(out, results, about)
    if as_json:
        return json_text(results).rstrip()
    return markdown_table(results, load_table(table), about)


def _one_of(what: str, given: str, known: Sequence[Any]) -> Any:
    if given not in known:
        raise ValueError(f"the {what} is {given!r}; expected one of {', '.join(known)}")
    return given


def print_result(result: Result, done: int, total: int) -> None:
    """One line on the error stream for each finished run."""
    print(
        f"[{done}/{total}] {result['model']} {result['algorithm']} m={result['cohort'] or '-'} "
        f"of {result['accounted_population'] or result['population']:,} {result['variant']} "
        f"seed {result['seed']}: {_shown(result['accuracy'])}, gap "
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
    folder: Path | None = None,
    resume: bool = False,
    apart: bool = False,
    about: dict[str, Any] | None = None,
) -> list[Result]:
    """Run the rows of a table that match, with every seed; results in the table's order.

    What is finished so far is kept in a file of ``folder`` until `write_results` has written all,
    so that a table which is cut off has not been for nothing; ``about`` says how it is made. With
    ``resume`` the runs that the folder has are not run
    again, and all of them are among the results, those of other rows and seeds too; runs with
    other settings are refused.

    Runs of one shape are computed together (`fpfl.sweeps`), unless they are to be kept ``apart``:
    only then it can be told what a run takes by itself.
    """
    options = options or Options()
    check_device(options.device)
    everything = [_varied(row, options) for row in load_table(table)]
    rows = [row for row in everything if matches(row_name(row, options), pattern)]
    if not rows:
        names = [row_name(row, options) for row in everything]
        raise ValueError(f"no row of {table} matches {pattern!r}; the rows are {', '.join(names)}")
    if not seeds:
        raise ValueError("no seeds were given; give at least one")
    _check_patterns(options, [row_name(row, options) for row in everything])
    for task in {row.task for row in rows}:
        TASKS[task].title(options)  # refuses other data now, and not after the first training
    done = _done(folder, everything, options) if resume and folder else {}
    work = [
        (row, seed) for row in rows for seed in seeds if (everything.index(row), seed) not in done
    ]
    places = [(everything.index(row), seed) for row, seed in work]
    if folder is not None:
        write_kept(folder, PARTIAL, [done[place] for place in sorted(done)])
        write_about(folder, about or {})
    processes = jobs or side_by_side(options.device)
    for index, result in _run_all(work, options, processes, apart):
        row, seed = work[index]
        done[places[index]] = result | {"run": run_key(row, seed, options)}
        if folder is not None:
            write_kept(folder, PARTIAL, [done[place] for place in sorted(done)])
        if report:
            finished = sum(place in done for place in places)
            report(result, finished, len(work))
    return [with_epsilon(done[place]) for place in sorted(done)]


def _check_patterns(options: Options, names: Sequence[str]) -> None:
    for pattern, sigma in options.noise:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"--noise-multiplier {pattern}={sigma:g}: no row matches; the rows are "
                f"{', '.join(names)}"
            )


def _varied(row: Row, options: Options) -> Row:
    """A row with what the options say of all rows."""
    row = override(row, options.overrides)
    return replace(row, rounds=max(1, round(options.scale * row.rounds)))


def _done(folder: Path, rows: Sequence[Row], options: Options) -> dict[tuple[int, int], Result]:
    """The folder's runs by (row, seed)."""
    found = {}
    by_key: dict[tuple[Any, ...], int] = {row.key: number for number, row in enumerate(rows)}
    for result in read_kept(folder):
        key = tuple(result.get(name) for name in KEY)
        number, seed = by_key.get(key), result["seed"]
        if number is None or result["run"] != run_key(rows[number], seed, options):
            raise ValueError(
                f"{folder} has a run of {'/'.join(map(str, key))}, seed {seed}, with other "
                "settings, data or version of the table: give the same ones, or another folder"
            )
        found[number, seed] = result
    return found


def side_by_side(device: str) -> int:
    """How many processes to have: one for each core; on a GPU, which they share, up to eight.

    A small network leaves most of a GPU idle while Python prepares its next step.
    """
    cores = os.cpu_count() or 1
    return cores if device == "cpu" else min(cores, 8)


Work = Sequence[tuple[Row, int]]


def _run_all(work: Work, options: Options, jobs: int, apart: bool) -> Iterator[tuple[int, Result]]:
    """Train and measure all of it; results in the order in which they finish."""
    groups = _dealt(work, jobs, apart)
    shares = [[work[index] for index in group] for group in groups]
    for group, place, result in side_by_side_shares(
        shares, partial(run_rows, options=options, apart=apart), jobs
    ):
        yield groups[group][place], result


def _dealt(work: Work, jobs: int, apart: bool) -> list[list[int]]:
    """Which of the work each call of `run_rows` is given."""
    # A population is that of its seed: those of one seed stand together, so that it is made once.
    order = sorted(range(len(work)), key=lambda index: work[index][1])
    if apart:
        return [[index] for index in range(len(work))]
    rows = [work[index][0] for index in order]
    groups = groups_of([shape_of(row) for row in rows], [cost_of(row) for row in rows], jobs)
    return [[order[place] for place in group] for group in groups]


def write_results(folder: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Write ``results.json`` (the runs), ``about.json`` and ``table.md`` (for people)."""
    write_kept(folder, RESULTS, results)
    write_about(folder, about)
    rows = load_table(results[0]["table"])
    (folder / "table.md").write_text(markdown_table(results, rows, about), encoding="utf-8")
    (folder / PARTIAL).unlink(missing_ok=True)
