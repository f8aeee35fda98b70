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
from pathlib import Path

from fpfl.experiments.runner import Options, Result, about_this_run, reproduce, write_results
from fpfl.experiments.tables import TABLES


def main(arguments: list[str] | None = None) -> int:
    """Run a table from the command line."""
    parser = argparse.ArgumentParser(prog="python -m fpfl.experiments", description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--rows", default="*", help="glob on model/algorithm/cohort/population")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--convention", default="poisson", help="poisson, replace-one or paper")
    parser.add_argument("--noise-multiplier", type=float, default=None, help="σ, instead of ε")
    parser.add_argument("--normaliser", choices=("users", "samples"), default=None)
    parser.add_argument("--selection", choices=("best", "last", "average"), default=None)
    parser.add_argument("--jobs", type=int, default=None, help="processes side by side")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    options = Options(
        convention=given.convention,
        noise_multiplier=given.noise_multiplier,
        normaliser=given.normaliser,
        selection=given.selection,
        device=given.device,
    )
    start = time.perf_counter()
    try:
        results = reproduce(
            given.table,
            seeds=range(given.seeds),
            pattern=given.rows,
            options=options,
            jobs=given.jobs,
            report=print_result,
        )
    except (ValueError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if given.out is not None:
        words = ["fpfl", "reproduce", *(sys.argv[1:] if arguments is None else arguments)]
        command = shlex.join(words)
        write_results(given.out, results, about_this_run(command, time.perf_counter() - start))
    if given.json:
        print(json.dumps(results, indent=1))
    return 0


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
