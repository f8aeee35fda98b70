"""The page's section that compares runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fpfl.report.charts import BLUE, Chart, Table, Trace, axes, safe
from fpfl.report.comparability import BALANCED, WHERE, Comparison, Entry, compare, groups_in_words
from fpfl.report.evaluations import SIMULATION_ONLY, Figure
from fpfl.report.reading import RunRecord
from fpfl.report.sections import COLLAPSED as COLLAPSED_BADGE
from fpfl.report.sections import badge, figure_html, paragraphs, verdict_badge
from fpfl.report.words import epsilon_words, marks, number, with_interval

BEST = "best trade-off"
NOT_BEATEN = "not dominated, outside α"
BEATEN = "another run is better"
COLLAPSED = "collapsed model"
UNTRAINED = "not trained for it"
_CORNERS = ("bottom left", "top left", "top right", "bottom right")
_SYMBOLS = {BEST: "star", NOT_BEATEN: "diamond", BEATEN: "circle", COLLAPSED: "x"}


def comparison_html(
    records: Sequence[RunRecord], names: Sequence[str], links: Sequence[str]
) -> tuple[str, list[tuple[str, Chart]]]:
    """The section's content, and its charts by the ids of their places."""
    comparisons, silent = compare(records)
    placed: list[tuple[str, Chart]] = []
    text = ""
    for i, comparison in enumerate(comparisons):
        place = f"compare-{i}"
        chart = _scatter(comparison, records, names)
        placed.append((place, chart))
        text += _one(comparison, records, names, links, place, chart)
    if not comparisons:
        text += paragraphs(["These runs cannot be compared with each other."])
    if silent:
        text += f'<div class="notes">{paragraphs(silent)}</div>'
    return text, placed


def standing(entry: Entry) -> str:
    """How a run stands among the others, in words."""
    if entry.collapsed:
        return COLLAPSED
    if entry.recommended:
        return BEST
    return NOT_BEATEN if entry.best else BEATEN


def letter(index: int) -> str:
    """A run's short name in charts: A, B, ..., Z, A1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def _one(
    comparison: Comparison,
    records: Sequence[RunRecord],
    names: Sequence[str],
    links: Sequence[str],
    place: str,
    chart: Chart,
) -> str:
    where = WHERE[comparison.source]
    mark = f" {badge(SIMULATION_ONLY, 'sim')}" if comparison.source in ("test", "training") else ""
    title = f"{comparison.what or 'gap'}, measured {where.replace(f' ({SIMULATION_ONLY})', '')}"
    users, samples = comparison.people
    people = f"{users:,} users" + ("" if samples is None else f" with {samples:,} samples")
    how = "trained on" if comparison.source == "released" else "measured on"
    best = [names[e.index] for e in comparison.entries if standing(e) == BEST]
    outside = [names[e.index] for e in comparison.entries if standing(e) == NOT_BEATEN]
    known = any(e.best for e in comparison.entries)
    lines = [
        f"{len(comparison.entries)} runs, each {how} {people}. The gap is the largest "
        f"difference to the whole in {groups_in_words(comparison.measures)}.",
        f"Best trade-offs: {', '.join(best) or ('none' if known else 'not known')}. No other run "
        f"here is at least as good in {comparison.score_name}, gap and ε, and better in one; and "
        "none of them is outside its α. ε counts in three digits; no privacy counts as an "
        "infinite ε. That is by the values; where intervals overlap, the order may be chance.",
    ]
    if comparison.score_name == BALANCED:
        lines.append(
            "Classes are not equally frequent: a model that always says the same has a high "
            "accuracy. So runs are ranked by balanced accuracy, the mean over the classes."
        )
    if outside:
        lines.append(f"Not dominated either, but outside α: {', '.join(outside)}.")
    collapsed = [names[e.index] for e in comparison.entries if e.collapsed]
    if collapsed:
        lines.append(
            f"Collapsed, and compared with no other: {', '.join(collapsed)}. A model that always "
            "says the same has no gap for nothing."
        )
    alphas = {e.tolerance for e in comparison.entries if e.tolerance is not None}
    untrained = [names[e.index] for e in comparison.entries if not e.trained]
    if untrained:
        by = f", by α = {next(iter(alphas)):g}" if len(alphas) == 1 else ""
        lines.append(
            f"{_list(untrained)} {'was' if len(untrained) == 1 else 'were'} not trained for this "
            f"constraint, and {'is' if len(untrained) == 1 else 'are'} judged by the same rates of "
            f"the same groups{by}."
        )
    if len(alphas) > 1:
        lines.append(
            "The runs have different tolerances α ("
            f"{', '.join(f'{a:g}' for a in sorted(alphas))}): each verdict is by the run's own."
        )
    if comparison.source == "released":
        lines.append(
            "These figures are noisy, and of the last rounds' models and not of the kept ones: "
            "they rank runs roughly. Evaluate the runs for more (fpfl evaluate)."
        )
    rows = "".join(_row(e, records[e.index], names[e.index], links[e.index])
                   for e in comparison.entries)  # fmt: skip
    gap = _gap(comparison)
    head = ("run", "trade-off", comparison.score_name, gap, "verdict", "ε", "marks")
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    return (
        f'<div class="evaluation"><h3>{escape(title[:1].upper() + title[1:])}{mark}</h3>'
        f"{paragraphs(lines)}"
        f'<div class="scroll" role="region" tabindex="0" aria-label="Runs compared">'
        f'<table class="comparison"><caption><span>Runs compared, {escape(where)}; intervals in '
        f"brackets</span></caption><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<div class="charts one">{figure_html(place, chart)}</div></div>'
    )


def _gap(comparison: Comparison) -> str:
    """The gap with its rates, which no other gap is taken for then."""
    return f"gap ({' and '.join(sorted({rate for rate, _ in comparison.measures}))})"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _row(entry: Entry, record: RunRecord, name: str, link: str) -> str:
    notes = " ".join(badge(mark, "bad" if mark.isupper() else "plain") for mark in marks(record))
    untrained = "" if entry.trained else f" {badge(UNTRAINED, 'plain')}"
    stands = {
        BEST: badge(f"★ {BEST}", "good"),
        NOT_BEATEN: badge(NOT_BEATEN, "plain"),
        COLLAPSED: "not compared",
    }
    cells = [
        stands.get(standing(entry), "–"),
        escape(with_interval(entry.score)),
        escape(with_interval(entry.gap)),
        _verdict(entry) + untrained,
        escape(epsilon_words(record)),
        notes or "–",
    ]
    return (
        f'<tr><th scope="row"><strong>{letter(entry.index)}</strong> '
        f'<a href="#{link}">{escape(name)}</a></th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _verdict(entry: Entry) -> str:
    if entry.collapsed:
        return badge(COLLAPSED_BADGE, "bad")
    return verdict_badge(entry.verdict) if entry.verdict != "not judged" else "not judged"


def _scatter(comparison: Comparison, records: Sequence[RunRecord], names: Sequence[str]) -> Chart:
    shown = [e for e in comparison.entries if e.gap.value is not None and e.score.value is not None]
    # From left to right in turn, off the bars: letters of runs that lie close would cover each
    # other, or stand on another run's marker.
    by_gap = sorted(shown, key=lambda e: (e.gap.value or 0.0, e.score.value or 0.0))
    corners = {e.index: _CORNERS[i % len(_CORNERS)] for i, e in enumerate(by_gap)}
    data = [
        trace
        for kind in (BEST, NOT_BEATEN, BEATEN, COLLAPSED)
        for chosen in [[e for e in shown if standing(e) == kind]]
        if (trace := _points(kind, chosen, records, names, corners))
    ]
    ends = [e.gap.high for e in shown if e.gap.high is not None]
    top = max([*(e.gap.value or 0.0 for e in shown), *ends, 0.01])
    alphas = {e.tolerance for e in shown if e.tolerance is not None}
    layout = axes(f"{_gap(comparison)}, less is fairer", comparison.score_name)
    if len(alphas) == 1:
        alpha = alphas.pop()
        at = {"x": alpha, "yref": "paper", "y": 1, "yanchor": "top", "xanchor": "left"}
        layout["shapes"] = [
            {"type": "line", "x0": alpha, "x1": alpha, "yref": "paper", "y0": 0, "y1": 1,
             "line": {"color": "@limit", "dash": "dash", "width": 1.6}}
        ]  # fmt: skip
        layout["annotations"] = [
            {**at, "text": f" tolerance α = {alpha:g}", "showarrow": False,
             "font": {"color": "@limit", "size": 12}}
        ]  # fmt: skip
        top = max(top, alpha or 0.0)
    layout["xaxis"]["range"] = [-0.05 * top, 1.08 * top]
    said = "; ".join(
        f"{names[e.index]}: {comparison.score_name} {number(e.score.value)}, "
        f"{_gap(comparison)} {number(e.gap.value)}, ε {epsilon_words(records[e.index])}"
        f"{'' if standing(e) == BEATEN else f', {standing(e)}'}"
        for e in shown
    )
    outside = (
        ", diamonds are outside α though no other run is better in everything"
        if any(standing(e) == NOT_BEATEN for e in shown)
        else ""
    )
    better = "Lower" if comparison.lower else "Higher"
    return Chart(
        "compare",
        f"{comparison.score_name.capitalize()} against gap against ε",
        f"{better} and further left is better. Letters name the runs of the table; markers grow "
        "with ε (small is private), and runs without privacy are hollow. Stars are the best "
        f"trade-offs{outside}. Bars are intervals.",
        f"Scatter chart of {len(shown)} runs. {said}.",
        data,
        layout,
        Table(
            "Runs in the chart",
            ("run", comparison.score_name, _gap(comparison), "ε", "trade-off"),
            tuple(
                (
                    f"{letter(e.index)} {names[e.index]}",
                    number(e.score.value),
                    number(e.gap.value),
                    epsilon_words(records[e.index]),
                    standing(e),
                )
                for e in shown
            ),
        ),
    )


def _points(
    kind: str,
    entries: Sequence[Entry],
    records: Sequence[RunRecord],
    names: Sequence[str],
    corners: Mapping[int, str],
) -> Trace | None:
    if not entries:
        return None
    shape, best = _SYMBOLS[kind], kind == BEST
    colour = BLUE if best else "@muted"
    open_ones = [e.epsilon is None or math.isinf(e.epsilon) for e in entries]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": kind,
        "x": [e.gap.value for e in entries],
        "y": [e.score.value for e in entries],
        "text": [letter(e.index) for e in entries],
        "textposition": [corners[e.index] for e in entries],
        "textfont": {"color": "@ink", "size": 14},
        "marker": {
            "symbol": [f"{shape}-open" if o else shape for o in open_ones],
            "size": [_size(e.epsilon) + (4 if best else 0) for e in entries],
            "color": colour,
            "opacity": 1,
            "line": {"color": colour, "width": 2},
        },
        "error_x": _bars([e.gap for e in entries], colour),
        "error_y": _bars([e.score for e in entries], colour),
        "hovertemplate": [
            f"{letter(e.index)} {safe(names[e.index])}<br>{kind}<br>gap %{{x:.3f}}, score "
            f"%{{y:.3f}}<br>ε {epsilon_words(records[e.index])}<extra></extra>"
            for e in entries
        ],
    }


def _size(epsilon: float | None) -> float:
    """The marker's size: 10 at ε = 0.1, 26 at 10 and beyond, by its logarithm."""
    if epsilon is None or math.isinf(epsilon):
        return 26.0
    return 18.0 + 8.0 * max(-1.0, min(1.0, math.log10(max(epsilon, 1e-9))))


def _bars(figures: Sequence[Figure], colour: str) -> dict[str, object]:
    """Intervals as bars; no bar where there is none."""
    over = [0.0 if f.high is None or f.value is None else f.high - f.value for f in figures]
    under = [0.0 if f.low is None or f.value is None else f.value - f.low for f in figures]
    return {"type": "data", "symmetric": False, "array": over, "arrayminus": under,
            "color": colour, "thickness": 1.2, "width": 4}  # fmt: skip
