"""HTML for tables and texts. Everything from a folder is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fpfl.report.charts import Table
from fpfl.report.evaluated import Evaluated, Gap
from fpfl.report.words import interval, number, percent, signed, source_mark, with_interval

VERDICTS = {"within": "✓ within α", "outside": "✗ outside α", "cannot tell": "? cannot tell"}
"""A sign, a word and a colour each: none of them alone."""


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
