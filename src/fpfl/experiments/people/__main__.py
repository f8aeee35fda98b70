"""``python -m fpfl.experiments.people WORK --out RESULTS``: what was prepared, computed here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fpfl.experiments.people.prepared import run_prepared


def main(arguments: list[str] | None = None) -> int:
    """Train what a file of ``fpfl reproduce tables --prepare`` has."""
    parser = argparse.ArgumentParser(prog="python -m fpfl.experiments.people", description=__doc__)
    parser.add_argument("work", type=Path, help="a file that --prepare wrote: a pickle, your own")
    parser.add_argument("--out", type=Path, required=True, help="a results file, or its folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(words)
    try:
        run_prepared(
            given.work,
            given.out,
            device=given.device,
            jobs=given.jobs,
            words=["python", "-m", "fpfl.experiments.people", *words],
        )
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
