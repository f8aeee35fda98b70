"""``python -m fpfl.experiments TABLE ...``: the tables with torch and numpy alone.

Where dp-accounting is not installed give ``--noise-multiplier``; everything else is the same as
``fpfl reproduce``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from fpfl.experiments.runner import (
    Options,
    Result,
    about_this_run,
    plain_results,
    reproduce,
    write_results,
)
from fpfl.experiments.tables import load_table
from fpfl.privacy.plan import Convention
from fpfl.report.tables import markdown_table


def main(arguments: list[str] | None = None) -> int:
    """Run a table from the command line."""
    parser = argparse.ArgumentParser(prog="python -m fpfl.experiments", description=__doc__)
    parser.add_argument("table")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--rows", default="*", help="glob on model/algorithm/cohort/population")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    parser.add_argument("--convention", default="poisson", help="poisson, replace-one or paper")
    parser.add_argument("--noise-multiplier", type=float, default=None, help="σ, instead of ε")
    parser.add_argument("--normaliser", default=None, help="users or samples")
    parser.add_argument("--selection", default=None, help="best, last or average")
    parser.add_argument("--jobs", type=int, default=None, help="processes side by side")
    parser.add_argument("--device", default="cpu")
    words = sys.argv[1:] if arguments is None else arguments
    given = vars(parser.parse_args(words))
    try:
        print(run_table(given.pop("table"), words=["reproduce", *words], **given))
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


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
    normaliser: str | None,
    selection: str | None,
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
        normaliser=normaliser,
        selection=selection,
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
    about = about_this_run(shlex.join(["fpfl", *words]), time.perf_counter() - start)
    if out is not None:
        write_results(out, results, about)
    if as_json:
        return json.dumps(plain_results(results), indent=1)
    return markdown_table(results, load_table(table), about)


def print_result(result: Result, done: int, total: int) -> None:
    """One line on the error stream for each finished run."""
    print(
        f"[{done}/{total}] {result['model']} {result['algorithm']} m={result['cohort'] or '-'} "
        f"seed {result['seed']}: accuracy {result['accuracy']:.3f}, FNR gap "
        f"{result['fnr_gap']:.3f} (training {result['train_gap']:.3f}), {result['seconds']} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
