r"""How noisy each total is, in plain words: before the first round, and while it runs.

Before, from public numbers alone: the clip bound C_b and the noise s_b of each part of v, against
the most that the part can be,

    ‖Σ_k ∇^k‖ ≤ m C,    n'_a ≤ m min(C, n̄),

with m users in a cohort and n̄ declared samples each. While it runs, from released totals: the
count n'_a of every rate and group over the noise on it, r = n'_a/s, and a word for that:

    dominated   r < 2     the count is below its noise floor: its constraint is skipped that round;
    weak      r < 20    the noise alone moves the rate by several hundredths in a round;
    clear     otherwise.

A rate f = F_a/n'_a is moved by s' √(1 + f²)/n'_a, with noise s' on F_a and on n'_a, or, where
counts are written (F, n' − F), by s' √(f² + (1 − f)²)/n'_a: standard deviations, for n'_a ≫ s'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fpfl.callbacks import register
from fpfl.callbacks.progress import console, printable
from fpfl.server.events import Part, Training
from fpfl.server.loop import RoundEvent
from fpfl.server.state import Row
from fpfl.users.layout import Basis

if TYPE_CHECKING:
    from rich.console import Console

DOMINATED, WEAK = 2.0, 20.0
"""Counts below so many standard deviations of their noise are dominated, or weak."""
TABLES = 4
"""About so many tables are shown while a training runs."""
NO_NOISE = "No noise is added to the totals: this training is not private."

Audible = Literal["clear", "weak", "dominated"]


@dataclass(frozen=True)
class TotalNoise:
    """A total and its noise: ``most`` is the most that it can be, by public numbers.

    ``block`` and ``bound`` are what it is clipped in, and to; ``noise`` is the standard deviation
    on each of its ``size`` numbers; ``words``, where there are any, say what follows.
    """

    what: str
    size: int
    block: str
    bound: float
    noise: float
    most: float
    words: str


@dataclass(frozen=True)
class Heard:
    """How a rate of a group is heard through the noise: by released figures, means of rounds.

    ``count`` is n'_a and ``noise`` the standard deviation of the noise on it; ``moves`` is by how
    much noise moves the rate in a round (the module's formula), None where it is not known.
    """

    rate: str
    group: str
    count: float
    noise: float
    moves: float | None = None

    @property
    def ratio(self) -> float:
        """n'_a/s, and 0 where n'_a is negative."""
        return max(self.count, 0.0) / self.noise

    @property
    def word(self) -> Audible:
        """Clear, weak or dominated (the module's definition)."""
        return "dominated" if self.ratio < DOMINATED else "weak" if self.ratio < WEAK else "clear"


def explain_totals(training: Training) -> list[TotalNoise]:
    """How noisy each total will be, by public numbers alone; empty without privacy."""
    return [_explained(part, training) for part in training.parts if part.block is not None]


def _explained(part: Part, training: Training) -> TotalNoise:
    assert part.block is not None
    assert part.bound is not None
    settings, noise, C = training.settings, part.noise, part.bound
    m, N = float(settings["cohort"]), float(settings["normaliser"])
    declared = [training.schema.samples_per_user, settings.get("samples_per_user")]
    length = noise * math.sqrt(part.size)
    users = "model differences" if settings.get("local") else "gradients"
    if part.name == "loss_gradient":
        what, most = f"sum of {users}", m * C
        words = (
            f"noise of length {length:.4g} (s√p) on one that is at most {most:,.4g} long (m C); "
            f"{noise / N:.3g} on every parameter once divided by N = {N:g}"
        )
    elif part.name.endswith("F_gradient"):
        what, most = "gradients of the rates", m * C
        each = noise * math.sqrt(training.layout.parameters)
        words = f"noise of length {each:.4g} for every rate and group, then divided by its count"
    elif part.name == "clipped":
        what, most = "users who were clipped", m * C
        if C < 1.0:
            what = "users who were clipped, less half of all"
        words = ""
    else:
        # A sum over users who have so many samples each, and count no more than the bound.
        most = m * min([C, *(float(n) for n in declared if n is not None)])
        what = _COUNTS[part.name]
        if part.name == "n" and training.layout.basis == "split":
            what = "n' - F: the others"
        words = ""
        if part.name == "n":
            s = training.count_noise
            words = (
                f"noise of {s:.4g} on a count n', which is dominated below {DOMINATED * s:,.4g} "
                f"and clear from {WEAK * s:,.4g} on"
            )
    return TotalNoise(what, part.size, part.block, C, noise, most, words)


_COUNTS = {
    "F": "F: errors or hits of a rate",
    "n": "n': samples of a rate",
    "overall_F": "F of everybody",
    "overall_n": "n' of everybody",
    "table": "confusion table: class, predicted",
    "hits": "right predictions",
    "misses": "wrong predictions",
}


def heard(rows: list[Row], training: Training) -> list[Heard]:
    """How every rate of every group is heard, by the released counts of some rounds."""
    noise, layout = training.count_noise, training.layout
    if not noise or not rows:
        return []
    if layout.basis == "paper":  # counts are clipped with the gradients
        noise *= _bound_factor(rows, training)
    return [
        _heard(rate, group, [(r["counts"][rate][group], r["groups"][rate][group]) for r in rows],
               noise, layout.basis)
        for rate in layout.rates
        for group in layout.groups
    ]  # fmt: skip


def _bound_factor(rows: list[Row], training: Training) -> float:
    """C_t/C₀, the mean of some rounds: 1 where the clip bound is fixed."""
    start = training.parts[0].bound
    if start is None:
        return 1.0
    return float(sum(row.get("clip_bound", start) for row in rows) / (len(rows) * start))


def _heard(
    rate: str,
    group: str,
    released: list[tuple[float | None, float | None]],
    noise: float,
    basis: Basis,
) -> Heard:
    """From (n'_a, f) of some rounds."""
    count = _mean([n for n, _ in released])
    known = [f for _, f in released if f is not None]
    found = Heard(rate, group, count, noise)
    if not known or found.word == "dominated":
        return found
    f = min(max(_mean(list(known)), 0.0), 1.0)
    if basis == "split":
        moves = noise / math.sqrt(2) * math.hypot(f, 1 - f) / count
    else:
        moves = noise * math.hypot(1, f) / count
    return replace(found, moves=moves)


def _mean(values: list[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)


@register("explain", "how noisy each total is")
class Explain:
    """Explains how noisy each total is: ``fpfl.train(..., callbacks=[fpfl.Explain()])``.

    Before the first round it shows a table of the noise on each part of the totals against what
    they can be at most, from public numbers alone; about every quarter of the run, how clear each
    group's counts are against it, from what was released.

    Parameters
    ----------
    every
        Show the groups' counts after so many rounds; by default about four times in a run.
    where
        The console to write to; by default stderr.
    """

    def __init__(self, every: int | None = None, where: Console | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every is {every}; give a number of rounds, 1 or more")
        self.every, self.where = every, where
        self._training: Training | None = None
        self._rows: list[Row] = []

    def begin(self, training: Training) -> None:
        """Explain the noise on each total."""
        self._training, self._rows = training, []
        if training.plan is None:
            self._say(NO_NOISE)
            return
        settings, plan = training.settings, training.plan
        samples = training.schema.samples_per_user
        found = explain_totals(training)
        self._table(
            "How noisy each total is",
            ("total", "numbers", "block", "bound C", "noise s", "at most"),
            [
                (t.what, f"{t.size:,}", t.block, f"{t.bound:g}", f"{t.noise:.4g}", f"{t.most:,.4g}")
                for t in found
            ],
        )
        for each in found:
            if each.words:
                self._say(f"- {each.what}: {each.words}.")
        self._say(
            f"Every round sums about m = {settings['cohort']:,} users"
            + ("" if samples is None else f" with {samples:g} samples each (declared)")
            + f", clipped block by block; a block's noise is s = C σ/√(its share of the budget), "
            f"σ = {plan.noise_multiplier:.4g}. One user changes a block by C at most"
            + (", by 2C if replaced." if plan.sensitivity_honest == 2 else ".")
        )
        if (settings.get("clip") or {}).get("adapts"):
            self._say(
                "The bound of the gradients adapts, and its noise with it: these are the figures "
                "that it begins with."
            )

    def __call__(self, event: RoundEvent) -> None:
        """Show the groups' counts against their noise, every so many rounds."""
        training, t = self._training, int(event.row["round"])
        if training is None or training.plan is None or t < training.fresh:
            return
        self._rows.append(event.row)
        if t % (self.every or math.ceil(event.rounds / TABLES)) and t != event.rounds:
            return
        rows, self._rows = self._rows, []
        found = heard(rows, training)
        span = f"round {t}" if len(rows) == 1 else f"rounds {t - len(rows) + 1} to {t}"
        if found:
            self._table(
                f"Released counts against their noise, {span}",
                ("rate", "group", "n' a round", "noise s", "n'/s", "is", "moves the rate by"),
                [
                    (
                        h.rate, h.group, f"{h.count:,.1f}", f"{h.noise:.4g}", f"{h.ratio:.1f}",
                        h.word, "-" if h.moves is None else f"{h.moves:.3f}",
                    )
                    for h in found
                ],
            )  # fmt: skip
        gradient = training.parts[0]
        norms = [row["gradient_norm"] for row in rows]
        noise = gradient.noise * math.sqrt(gradient.size) * _bound_factor(rows, training)
        self._say(
            f"The released gradient is {_mean(norms):.4g} long ({span}); noise alone would be "
            f"{noise:.4g}. Over many rounds noise averages "
            "out, and the rest does not."
        )

    @property
    def _out(self) -> Console:
        return self.where or console()

    def _say(self, text: str) -> None:
        text = printable(text, self._out.encoding)
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        from rich.table import Table
        from rich.text import Text

        encoding = self._out.encoding
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(Text(printable(column, encoding)), overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell, encoding)) for cell in row))
        self._out.print(table)
