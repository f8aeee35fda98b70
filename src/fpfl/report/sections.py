"""The page's sections about one run: tables and texts.

Everything from a folder is escaped here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fpfl.report.charts import Chart, Table, style
from fpfl.report.evaluations import Evaluated, Gap
from fpfl.report.reading import RunRecord
from fpfl.report.runcharts import charts
from fpfl.report.series import window, windows
from fpfl.report.words import (
    AGAINST_HEAD,
    WINDOW_HEAD,
    against_lines,
    against_rows,
    balance_lines,
    balance_rows,
    banners,
    collapses,
    epsilon_words,
    gap_name,
    headline,
    interval,
    levelled_lines,
    marks,
    number,
    percent,
    signed,
    source_mark,
    trained_lines,
    what_was_trained,
    when_and_with,
    window_lines,
    window_rows,
    with_interval,
)

VERDICTS = {"within": "✓ within α", "outside": "✗ outside α", "cannot tell": "? cannot tell"}
"""A sign, a word and a colour each: none of them alone."""

COLLAPSED = "✗ collapsed model"


def table(content: Table, *, numeric: bool = True) -> str:
    """A table in a container of its own, which scrolls where it is too wide."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in content.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in content.rows
    )
    kind = "numbers" if numeric else "words"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(content.caption)}">'
        f'<table class="{kind}"><caption><span>{escape(content.caption)}</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def badge(text: str, kind: str) -> str:
    """A small mark."""
    return f'<span class="badge {kind}">{escape(text)}</span>'


def verdict_badge(verdict: str | None) -> str:
    """A verdict with sign and word."""
    kind = {"within": "good", "outside": "bad"}.get(str(verdict), "unsure")
    return badge(VERDICTS.get(str(verdict), str(verdict or "not judged")), kind)


def judged_badge(evaluation: Evaluated) -> str:
    """A verdict's badge; that of a collapsed model says so in its place."""
    if evaluation.collapsed is not None:
        return badge(COLLAPSED, "bad")
    return verdict_badge(evaluation.verdict) if evaluation.verdict else ""


def paragraphs(texts: Iterable[str], css: str = "") -> str:
    """Texts, a paragraph each."""
    kind = f' class="{css}"' if css else ""
    return "".join(f"<p{kind}>{escape(text)}</p>" for text in texts)


def bullets(texts: Iterable[str]) -> str:
    """Texts as a list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def group_table(evaluation: Evaluated, gap: Gap) -> str:
    """Every group in every rate, with intervals, differences and the accuracy beside them."""
    level = percent(evaluation.confidence)
    # Not every evaluation has the score of every group; the whole's stands above the table.
    scored = any(row.score is not None for row in gap.rows)
    rows = tuple(
        (
            f"{row.group}, {row.rate}" if len({r.rate for r in gap.rows}) > 1 else row.group,
            number(row.value.value),
            interval(row.value),
            signed(row.difference.value),
            interval(row.difference, sign=True),
            "–" if row.count is None else f"{row.count:,.0f}",
            *((number(row.score),) if scored else ()),
        )
        for row in gap.rows
    )
    rates = ", ".join(dict.fromkeys(row.rate for row in gap.rows))
    what = f"the constraint ({rates})" if gap.name == "constraint" else rates
    return table(
        Table(
            f"Groups in {what}, {evaluation.title.lower()}, intervals at {level}; "
            f"the whole's {evaluation.score_name} is {number(evaluation.score.value)}",
            (
                "group",
                "value",
                "interval",
                "whole − group",
                "interval",
                "n'",
                *((f"its {evaluation.score_name}",) if scored else ()),
            ),
            rows,
        )
    )


def balance_table(evaluation: Evaluated) -> str:
    """How often each class occurs, and how often it is predicted."""
    rows = tuple(balance_rows(evaluation))
    if not rows:
        return ""
    more = len(evaluation.metrics.labels) - len(rows) if evaluation.metrics else 0
    caption = f"Shares of the classes, {evaluation.title.lower()}"
    caption += f" (the first {len(rows)}; {more} more in the file)" if more else ""
    return table(Table(caption, ("class", "of the labels", "of the predictions"), rows))


def worst_words(evaluation: Evaluated, gap: Gap) -> list[str]:
    """The worst group and the worst pair, named."""
    lines = []
    if gap.worst_group is not None:
        lines.append(f"Furthest from the whole: {gap.worst_group}.")
    pair = gap.worst_pair
    if pair is not None:
        ends = interval(pair.difference)
        lines.append(
            f"Furthest apart: {pair.larger} and {pair.smaller}, by "
            f"{number(pair.difference.value)} in {pair.rate}"
            + (f" {ends} at {percent(evaluation.confidence)}." if ends else ".")
        )
    return lines


def gaps_table(evaluation: Evaluated) -> str:
    """All gaps of an evaluation, the accuracy beside each."""
    rows = tuple(
        (
            "the constraint" if name == "constraint" else name,
            with_interval(gap.value),
            with_interval(evaluation.score),
            gap.worst_group or "–",
        )
        for name, gap in evaluation.gaps.items()
    )
    return table(
        Table(
            f"All gaps, {evaluation.title.lower()} ({source_mark(evaluation)})",
            ("gap", "value", evaluation.score_name, "worst group"),
            rows,
        )
    )


def settings_table(settings: Mapping[str, Any], caption: str) -> str:
    """Settings as they were written down, nested ones by dotted names."""
    rows = tuple((name, _plain(value)) for name, value in flat(settings))
    return table(Table(caption, ("setting", "value"), rows), numeric=False)


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings in a row: ("privacy.epsilon", 2.0)."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


_DASHES = {
    "solid": "",
    "dash": "6 3",
    "dot": "2 3",
    "dashdot": "7 3 2 3",
    "longdash": "9 4",
    "longdashdot": "9 3 2 3",
}


def run_html(record: RunRecord, run: str, level: int) -> tuple[str, list[tuple[str, Chart]]]:
    """A run's sections, and its charts by the ids of their places.

    ``run`` is a prefix of ids, ``level`` that of the sections' headings.
    """
    drawn, silent = charts(record)
    placed = [(f"{run}-{chart.key}", chart) for chart in drawn]
    parts = [
        _banners(record),
        _tiles(record),
        _section("What was trained", run, "what", level, _what(record)),
        _section("Privacy", run, "privacy", level, _privacy(record)),
        _notes(record, run, level),
        _section("Over the rounds", run, "rounds", level, _rounds(record, run, placed, silent)),
        _section("Groups", run, "groups", level, _groups(record, level + 1)),
        _section("Settings", run, "settings", level, _settings(record)),
    ]
    return "".join(parts), placed


def brief(record: RunRecord) -> str:
    """A run in a line, for its closed section."""
    best = _main(record)
    words = [f"ε {epsilon_words(record)}"]
    if best is not None:
        words.insert(0, f"{best.score_name} {number(best.score.value)}")
        gap = best.gaps.get("constraint")  # without one no gap is the run's own
        if gap is not None:
            words.insert(1, f"{gap_name(gap)} {number(gap.value.value)}")
    return " · ".join([*words, *marks(record)])


def figure_html(place: str, chart: Chart) -> str:
    """A chart's place: caption, drawing, and its data as a table."""
    kind = "plot grouped" if chart.grouped else "plot"
    return (
        f'<figure class="chart" aria-labelledby="{place}-title"><figcaption>'
        f'<strong id="{place}-title">{escape(chart.title)}</strong>'
        f'<span class="reading">{escape(chart.reading)}</span></figcaption>'
        f'<div class="{kind}" id="{place}" role="img" aria-label="{escape(chart.label)}"></div>'
        f"<details><summary>Data as a table: {escape(chart.title)}</summary>"
        f"{table(chart.table)}</details></figure>"
    )


def _section(title: str, run: str, key: str, level: int, content: str) -> str:
    if not content:
        return ""
    place = f"{run}-{key}-heading"
    return (
        f'<section class="part" aria-labelledby="{place}"><h{level} id="{place}">{escape(title)}'
        f"</h{level}>{content}</section>"
    )


def _banners(record: RunRecord) -> str:
    return "".join(
        f'<div class="banner" role="note"><strong>{escape(b.title)}</strong>'
        f"<p>{escape(b.text)}</p></div>"
        for b in [*collapses(record), *banners(record)]
    )


def _main(record: RunRecord) -> Evaluated | None:
    """The evaluation that says most: released before simulated, test before training."""
    return next(iter(record.evaluations.values()), None)


def _tiles(record: RunRecord) -> str:
    found = []
    best = _main(record)
    if best is not None:
        mark = badge(source_mark(best), "plain" if best.released else "sim")
        where = f"{escape(best.title.split(',')[0])} {mark}"
        ends = interval(best.score)
        balanced = best.metrics if best.metrics is not None and best.metrics.unbalanced else None
        beside = (
            ""
            if balanced is None
            else f"<br>balanced accuracy {number(balanced.balanced_accuracy.value)}"
        )
        score = number(best.score.value)
        found.append(_tile(best.score_name.capitalize(), score, ends, where + beside))
        gap = best.gaps.get("constraint")
        if gap is not None:
            name = gap_name(gap)
            found.append(
                _tile(
                    f"{name[:1].upper()}{name[1:]}", number(gap.value.value), interval(gap.value),
                    f"{where} {judged_badge(best)}",
                )
            )  # fmt: skip
    else:
        values = [row.get("accuracy") for row in record.history[-window(len(record.history)) :]]
        known = [v for v in values if v is not None]
        if known:
            mean = number(sum(known) / len(known))
            note = f"mean of the last {len(values)} rounds, as released"
            found.append(_tile("Accuracy", mean, "", escape(note)))
    said = record.privacy
    detail = "no guarantee" if said is None else f"δ = {said['delta']:.3g}"
    seen = "" if said is None else "against those who see only what is released"
    found.append(_tile("ε", epsilon_words(record), detail, escape(seen)))
    T, done = record.rounds, len(record.history)
    cohort = record.settings.get("cohort")
    users = "" if cohort is None else f"{cohort:,} users in each"
    state = "ended" if record.finished else "not ended"
    found.append(_tile("Rounds", f"{done:,}", f"of {T:,} planned, {state}", escape(users)))
    return f'<dl class="tiles">{"".join(found)}</dl>'


def _tile(name: str, figure: str, detail: str, below: str) -> str:
    return (
        f'<div class="tile"><dt>{escape(name)}</dt><dd><span class="figure">{escape(figure)}</span>'
        f' <span class="small">{escape(detail)}</span><div class="small">{below}</div></dd></div>'
    )


def _what(record: RunRecord) -> str:
    return paragraphs(what_was_trained(record)) + paragraphs([when_and_with(record)], "lead")


def _privacy(record: RunRecord) -> str:
    text = paragraphs([headline(record)], "headline")
    if record.statement:
        text += f'<div class="statement">{bullets(record.statement)}</div>'
    return text


def _notes(record: RunRecord, run: str, level: int) -> str:
    texts = [*record.notes, *(f"{w[:1].upper()}{w[1:]}." for w in record.warnings)]
    if not texts:
        return ""
    return _section("To know about this run", run, "notes", level,
                    f'<div class="notes">{bullets(texts)}</div>')  # fmt: skip


def _rounds(
    record: RunRecord, run: str, placed: Sequence[tuple[str, Chart]], silent: Sequence[str]
) -> str:
    how = "with noise" if record.privacy is not None else "exactly, without noise"
    intro = (
        f"What each round released {how}: functions of the totals that left the users' side, and "
        "of nothing else."
        if record.history
        else "No round is recorded in this folder."
    )
    text = paragraphs([intro, *trained_lines(record), *levelled_lines(record)])
    found = windows(record)
    if found is not None:
        rows = tuple(window_rows(found))
        text += paragraphs(window_lines(found))
        text += table(Table("Rates early and last, as released", WINDOW_HEAD, rows))
    if any(chart.grouped for _, chart in placed):
        text += _controls(record, run)
    elif placed and record.history:
        text += f'<div class="controls">{_raw_button(run)}</div>'
    figures = "".join(figure_html(place, chart) for place, chart in placed)
    return text + f'<div class="charts">{figures}</div>' + paragraphs(silent, "lead")


def _controls(record: RunRecord, run: str) -> str:
    groups = "".join(
        f'<button type="button" class="group" aria-pressed="true" data-run="{run}" '
        f'data-group="{escape(group)}">{_swatch(i)}<span>{escape(group)}</span></button>'
        for i, group in enumerate(record.groups)
    )
    return (
        f'<div class="controls" role="group" aria-label="Groups shown in this run\'s charts">'
        f'<span class="word">Show</span>{groups}'
        f'<button type="button" data-run="{run}" data-all="show">all</button>'
        f'<button type="button" data-run="{run}" data-all="hide">none</button>'
        f"{_raw_button(run)}</div>"
    )


def _raw_button(run: str) -> str:
    return (
        f'<button type="button" class="group" aria-pressed="true" data-run="{run}" data-raw="yes">'
        "single rounds (dots)</button>"
    )


def _swatch(index: int) -> str:
    colour, dash, symbol = style(index)
    colour = {"@ink": "currentColor", "@blue": "var(--blue)"}.get(colour, colour)
    shapes = {
        "circle": '<circle cx="13" cy="7" r="4"/>',
        "square": '<path d="M9 3h8v8h-8z"/>',
        "diamond": '<path d="M13 2l5 5-5 5-5-5z"/>',
        "triangle-up": '<path d="M13 2l5 9H8z"/>',
        "cross": '<path d="M11 2h4v3h3v4h-3v3h-4V9H8V5h3z"/>',
        "triangle-down": '<path d="M13 12L8 3h10z"/>',
        "star": '<path d="M13 1l2 4 4 .6-3 3 .8 4.4L13 11l-3.800 2 .8-4.400-3-3 4-.6z"/>',
    }
    return (
        '<svg width="26" height="14" viewBox="0 0 26 14" aria-hidden="true">'
        f'<path d="M0 7h26" style="stroke:{colour}" stroke-width="2" fill="none" '
        f'stroke-dasharray="{_DASHES[dash]}"/><g style="fill:{colour}">{shapes[symbol]}</g></svg>'
    )


def _groups(record: RunRecord, level: int) -> str:
    if not record.evaluations:
        why = (
            "The kept model was not evaluated. On held-out users, with noise: fpfl evaluate RUN "
            "--epsilon 0.5; in a simulation, a test set in the config is evaluated by itself."
            if record.finished
            else "The run has not ended, so there is no model to evaluate yet."
        )
        return paragraphs([why, *against_lines(record)])
    text = "".join(_evaluation(e, level) for e in record.evaluations.values())
    return text + _against(record, level)


def _against(record: RunRecord, level: int) -> str:
    """Who is better and who is worse off than by the run's reference."""
    lines = against_lines(record)
    if not lines:
        return ""
    tables = "".join(
        table(Table(f"Against the reference, {kind}", AGAINST_HEAD, tuple(against_rows(found))))
        for kind, found in record.against.items()
    )
    return (
        f'<div class="evaluation"><h{level}>Against training without the constraint</h{level}>'
        f"{paragraphs(lines)}{tables}</div>"
    )


def _evaluation(evaluation: Evaluated, level: int) -> str:
    mark = badge(source_mark(evaluation), "plain" if evaluation.released else "sim")
    people = f"{evaluation.users:,} users"
    if evaluation.samples is not None:
        people += f", {evaluation.samples:,} samples"
    score = f"{evaluation.score_name.capitalize()} {with_interval(evaluation.score)}"
    text = paragraphs([f"{score}, {people}; intervals at {percent(evaluation.confidence)}."])
    text += paragraphs(balance_lines(evaluation)) + balance_table(evaluation)
    if evaluation.verdict is not None:
        words = escape(f"{evaluation.constraint}: {evaluation.verdict_in_words}")
        text += f"<p>{judged_badge(evaluation)} {words}</p>"
    elif evaluation.collapsed is not None:
        text += f"<p>{judged_badge(evaluation)} {escape(evaluation.collapsed)}</p>"
    for gap in evaluation.tabled:
        name = gap_name(gap)
        named = f"{name[:1].upper()}{name[1:]}"
        text += paragraphs(
            [f"{named} {with_interval(gap.value)} beside {evaluation.score_name} "
             f"{number(evaluation.score.value)}.", *worst_words(evaluation, gap)]
        ) + group_table(evaluation, gap)  # fmt: skip
    if len(evaluation.gaps) > 1:
        text += f"<details><summary>All gaps</summary>{gaps_table(evaluation)}</details>"
    if evaluation.statement:
        said = bullets(evaluation.statement)
        text += f"<details><summary>What this evaluation promises</summary>{said}</details>"
    return (
        f'<div class="evaluation"><h{level}>{escape(evaluation.title)} {mark}</h{level}>'
        f"{text}</div>"
    )


def _settings(record: RunRecord) -> str:
    text = settings_table(record.settings, "What the run was started with")
    if record.environment:
        text += settings_table(record.environment, "Machine and packages")
    return f"<details><summary>All settings of the run</summary>{text}</details>"
