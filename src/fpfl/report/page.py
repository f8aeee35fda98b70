"""The report: one HTML file that holds all it needs, and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fpfl.report.charts import Chart
from fpfl.report.comparability import told_apart
from fpfl.report.comparison import comparison_html
from fpfl.report.reading import RunRecord, read_run
from fpfl.report.sections import brief, run_html
from fpfl.store.files import explained, write_whole


def write_report(runs: str | Path | Iterable[str | Path], path: str | Path) -> Path:
    """Write a report of run folders: one page, which opens offline in any browser.

    Parameters
    ----------
    runs
        One folder or several; several are compared first, as far as they were measured alike.
    path
        The HTML file to write.

    Returns
    -------
    Path
        The file.
    """
    given = [runs] if isinstance(runs, str | Path) else list(runs)
    target = Path(path)
    if not given:
        raise ValueError("no run was given; name at least one run folder")
    if target.is_dir():
        raise ValueError(f"{target} is a folder; name a file for the page, e.g. report.html")
    folder = target.parent
    if not folder.is_dir() and not folder.parent.is_dir():
        raise ValueError(
            f"{target} cannot be written: there is no folder {folder.parent}; make it first, or "
            "name a file in a folder that is there"
        )
    script = plotly_script()
    text = report_html([read_run(run) for run in given], script)
    with explained(target, "The report was not written; name a file that can be written"):
        folder.mkdir(exist_ok=True)
        write_whole(target, text.encode())
    return target


def plotly_script() -> str:
    """plotly.js, all of it: the package brings one bundle, of about 5 MB."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "a report takes plotly, which is not installed: pip install 'fpfl[report]'"
        ) from error
    script = str(get_plotlyjs())
    if "</script" in script.lower():  # it would end the element that it stands in
        raise ValueError("this version of plotly.js cannot stand in a page; install another one")
    return script


def report_html(records: Sequence[RunRecord], script: str) -> str:
    """The page's text."""
    names = told_apart([record.folder for record in records])
    ids = [f"run-{i}" for i in range(len(records))]
    specs: dict[str, Any] = {}
    several = len(records) > 1
    parts = []
    if several:
        compared, placed = comparison_html(records, names, ids)
        specs |= _specs("compare", placed)
        parts.append(
            '<section class="part" aria-labelledby="comparison"><h2 id="comparison">Comparison'
            f"</h2>{compared}</section>"
        )
        parts.append('<section class="part" aria-labelledby="runs"><h2 id="runs">The runs</h2>')
    for record, name, run in zip(records, names, ids, strict=True):
        content, placed = run_html(record, run, 4 if several else 2)
        specs |= _specs(run, placed)
        if several:
            content = (
                f'<details class="run" id="{run}"><summary><h3>{escape(name)}</h3>'
                f'<span class="brief">{escape(brief(record))}</span></summary>'
                f'<div class="within">{content}</div></details>'
            )
        parts.append(content)
    if several:
        parts.append("</section>")
    lead = (
        "What each run did, what it promises, and which trade-offs are best."
        if several
        else "What was trained, what it promises to its users, and how even it is between groups."
    )
    js = _file("page.js")
    return Template(_file("page.html")).substitute(
        hashes=" ".join(_hash(text) for text in (script, js)),
        title=escape(f"{len(records)} runs compared" if several else f"Run {names[0]}"),
        lead=escape(lead),
        version=escape(_version()),
        nav=_nav(names, ids) if several else "",
        css=_file("page.css"),
        js=js,
        body="\n".join(parts),
        charts=in_script(specs),
        plotly=script,
    )


def _hash(script: str) -> str:
    """What a page's policy says of a script that may run: no other may, whatever is on the page.

    Of the element's text, which begins and ends with a line break (`page.html`).
    """
    found = hashlib.sha256(f"\n{script}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(found).decode()}'"


def in_script(content: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, or a line."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))  # ASCII alone
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _specs(run: str, placed: Iterable[tuple[str, Chart]]) -> dict[str, Any]:
    return {
        place: {
            "run": run,
            "grouped": chart.grouped,
            "legend": sum(trace.get("showlegend", True) for trace in chart.data) > 1,
            "data": chart.data,
            "layout": chart.layout,
        }
        for place, chart in placed
    }


def _nav(names: Sequence[str], ids: Sequence[str]) -> str:
    links = "".join(
        f'<li><a href="#{run}">{escape(name)}</a></li>'
        for name, run in zip(names, ids, strict=True)
    )
    comparison = '<li><a href="#comparison">Comparison</a></li>'
    return f'<nav class="runs" aria-label="Runs"><ul>{comparison}{links}</ul></nav>'


def _file(name: str) -> str:
    return files("fpfl.report").joinpath(name).read_text(encoding="utf-8")


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("fpfl")
    except metadata.PackageNotFoundError:
        return ""
