"""Text as Markdown holds it: names that people chose may hold anything, and must stay text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

LONGEST = 300
"""Characters of one name or sentence that are shown."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")


def plain(text: object, longest: int = LONGEST) -> str:
    """Any text as one line of Markdown that says just that: no markup, no HTML, no table cells."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if len(line) > longest:
        line = f"{line[: longest - 1]}…"
    return _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table; the cells are text, and are escaped here."""
    lines = [f"| {' | '.join(map(plain, head))} |", f"| {' | '.join('---' for _ in head)} |"]
    return [*lines, *(f"| {' | '.join(map(plain, row))} |" for row in rows)]


def bullets(items: Iterable[object]) -> list[str]:
    """A list of sentences, as long as they are."""
    return [f"- {plain(item, 10_000)}" for item in items]
