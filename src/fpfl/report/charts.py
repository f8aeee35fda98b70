"""What charts are made of: traces and axes as plotly.js takes them, with colours by name.

Some colours stand as tokens ("@ink", "@muted", "@limit", "@blue"), which the page replaces by those
of the light or the dark scheme. Groups differ in colour, dash and marker, not in colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Trace = dict[str, Any]
Number = float | None

RED, BLUE, GREEN = "#D55E00", "@blue", "#009E73"
PALETTE = (RED, BLUE, GREEN, "#CC79A7", "@ink", "#E69F00", "#56B4E9")
"""Okabe and Ito's. Black is the scheme's ink, blue (#0072B2) is lighter on dark; what is pale on
white comes last."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star")
PATTERNS = ("", "/", "x", "-", "|", "+", ".")
MOST_POINTS = 600
"""A line has no more points: a screen has no more to show them with."""
TABLE_ROWS = 20
"""Rounds in the table behind a chart, about."""


@dataclass(frozen=True)
class Table:
    """A table's caption, head and rows, as texts; the first column names its rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A chart: what is drawn, how it reads, what it says in words, and its data as a table."""

    key: str
    title: str
    reading: str
    label: str
    data: list[Trace] = field(repr=False)
    layout: dict[str, Any] = field(repr=False)
    table: Table = field(repr=False)
    grouped: bool = False
    """Whether its lines are groups, which the page's buttons show and hide."""


def style(index: int) -> tuple[str, str, str]:
    """Colour, dash and marker of the group with an index."""
    return (
        PALETTE[index % len(PALETTE)],
        DASHES[index % len(DASHES)],
        SYMBOLS[index % len(SYMBOLS)],
    )


def safe(name: str) -> str:
    """A name as plotly shows it: it takes texts for a little HTML, and %{...} for a value."""
    return escape(name, quote=False).replace("%{", "%&#123;")


def line(
    name: str,
    x: Sequence[Number],
    y: Sequence[Number],
    *,
    colour: str,
    dash: str = "solid",
    symbol: str | None = None,
    width: float = 2.0,
    **more: Any,
) -> Trace:
    """A line, with a marker now and then."""
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if symbol else "lines",
        "name": safe(name),
        "x": list(x),
        "y": rounded(y),
        "line": {"color": colour, "dash": dash, "width": width},
        "hovertemplate": f"{safe(name)}<br>round %{{x}}: %{{y:.4g}}<extra></extra>",
    }
    if symbol:
        trace["marker"] = {"color": colour, "symbol": symbol, "size": 7, "maxdisplayed": 8}
    return trace | more


def dots(
    name: str, x: Sequence[Number], y: Sequence[Number], *, colour: str, symbol: str, **more: Any
) -> Trace:
    """The single rounds, as released: small and pale. The page's button hides them."""
    meta = {"raw": True, **more.pop("meta", {})}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{safe(name)}, single rounds",
        "showlegend": False,
        "x": list(x),
        "y": rounded(y),
        "opacity": 0.4,
        "marker": {"color": colour, "symbol": symbol, "size": 3.5},
        "hovertemplate": f"{safe(name)}, released in round %{{x}}: %{{y:.4g}}<extra></extra>",
        "meta": meta,
    } | more


def level(name: str, x: Sequence[Number], value: float, **more: Any) -> Trace:
    """A horizontal line at a value."""
    ends = [x[0], x[-1]] if x else []
    return line(
        name, ends, [value] * len(ends), colour="@limit", dash="dash", width=1.6, **more
    )  # fmt: skip


def rounded(values: Sequence[Number]) -> list[Number]:
    """Five digits, which no screen shows more of."""
    return [None if v is None else float(f"{v:.5g}") for v in values]


def axes(x: str, y: str, *, span: tuple[float, float] | None = None, **more: Any) -> dict[str, Any]:
    """A layout with titled axes; ``span`` is the drawn range of y."""
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": safe(x)}},
        "yaxis": {"title": {"text": safe(y)}},
    }
    if span is not None:
        layout["yaxis"]["range"] = list(span)
    return layout | more


def span_of(
    means: Sequence[Sequence[Number]], singles: Sequence[Number], settled: int = 0
) -> tuple[float, float] | None:
    """A range with all lines and the middle 90% of single rounds, and a little room.

    The first ``settled`` points of a line, of which few rounds are the mean, need not be in it.
    """
    solid = [v for line in means for v in (line[settled:] or line) if v is not None]
    loose = sorted(v for v in singles if v is not None)
    cut = len(loose) // 20
    kept = solid + loose[cut : len(loose) - cut]
    if not kept:
        return None
    low, high = min(kept), max(kept)
    room = 0.08 * (high - low) or 0.05
    return low - room, high + room


def outside(span: tuple[float, float] | None, values: Sequence[Number]) -> str:
    """How many values a range leaves out, in a sentence."""
    known = [v for v in values if v is not None]
    out = 0 if span is None else sum(not span[0] <= v <= span[1] for v in known)
    if not out:
        return ""
    return (
        f" {out:,} of {len(known):,} values lie outside the drawn range; a double click shows them."
    )


def thinned(count: int, most: int = MOST_POINTS) -> list[int]:
    """Which of so many rounds to draw, the last among them."""
    step = -(-count // most)
    return sorted({*range(count - 1, -1, -step)}) if count else []


def drawn(values: Sequence[Number], places: Sequence[int]) -> list[Number]:
    """The values at the drawn rounds."""
    return [values[i] for i in places]


def few_rounds(
    caption: str, rounds: Sequence[int], columns: dict[str, Sequence[Number]], digits: int = 3
) -> Table:
    """A table of some of the rounds."""
    rows = []
    for i in thinned(len(rounds), TABLE_ROWS):
        cells = [values[i] for values in columns.values()]
        shown = ["–" if v is None else f"{v:.{digits}f}" for v in cells]
        rows.append((f"{rounds[i]:,}", *shown))
    return Table(caption, ("round", *columns), tuple(rows))


def rounds_of(history: Sequence[dict[str, Any]]) -> list[int]:
    """The rounds' numbers."""
    return [row["round"] for row in history]


def first(values: Sequence[Number]) -> Number:
    """The first that is known."""
    return next((v for v in values if v is not None), None)


def last(values: Sequence[Number]) -> Number:
    """The last that is known."""
    return first(values[::-1])
