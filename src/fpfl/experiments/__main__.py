"""``python -m fpfl.experiments TABLE ...``: the tables with torch and numpy alone.

Where dp-accounting is not installed give ``--noise-multiplier``; everything else is the same as
``fpfl reproduce``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fpfl.experiments.runner import run_table


def main(arguments: list[str] | None = None) -> int:
    """Run a table from the command line."""
    parser = argparse.ArgumentParser(prog="python -m fpfl.experiments", description=__doc__)
    parser.add_argument("table")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--rows", default="*", help="glob on model/algorithm/cohort/population")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    parser.add_argument("--convention", default="poisson", help="poisson, replace-one or paper")
    parser.add_argument(
        "--noise-multiplier", action="append", default=[],
        help="σ instead of ε, for all rows; or PATTERN=σ, as often as needed",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="KEY=VALUE for all rows"
    )
    parser.add_argument("--jobs", type=int, default=None, help="processes side by side")
    parser.add_argument(
        "--one-by-one", action="store_true", help="train every run by itself, e.g. to time it"
    )
    parser.add_argument("--data", default=None, help="femnist: PATH, femnist or digits (default)")
    parser.add_argument("--order", default="lexicographic", help="femnist: or seeded")
    parser.add_argument("--scale", type=float, default=None, help="of the rounds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", help="float32, tf32 or bf16")
    parser.add_argument("--resume", action="store_true", help="go on with the folder's table")
    words = sys.argv[1:] if arguments is None else arguments
    given = vars(parser.parse_args(words))
    try:
        print(
            run_table(
                given.pop("table"), words=["python", "-m", "fpfl.experiments", *words], **given
            )
        )
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
