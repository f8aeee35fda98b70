"""The command that writes reports: ``fpfl report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs: what was trained, privacy, charts, groups, a comparison.

    RUN is a run's folder; several are compared.

    The page holds all it needs and opens offline in any browser. Whatever was not released is
    marked "simulation only" in it.
    """
    from fpfl.report.page import write_report

    path = write_report(runs, out)
    print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB; open it in a browser)")
