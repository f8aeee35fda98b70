"""The charts of one run over its rounds. All of it follows from what was released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpfl.report.charts import (
    BLUE,
    RED,
    Chart,
    Number,
    axes,
    dots,
    drawn,
    few_rounds,
    first,
    last,
    level,
    line,
    outside,
    rounds_of,
    span_of,
    style,
    thinned,
)
from fpfl.report.noisecharts import counts_chart, epsilon_chart, gradient_chart
from fpfl.report.reading import RunRecord
from fpfl.report.series import (
    RateLines,
    epsilon_curve,
    gap_of_means,
    multiplier_lines,
    rate_lines,
    running_mean,
    window,
)
from fpfl.report.words import number, score_word


def charts(record: RunRecord) -> tuple[list[Chart], list[str]]:
    """A run's charts, in their order, and sentences on those that are not drawn."""
    found: list[Chart | None] = [_accuracy(record)]
    silent: list[str] = []
    lines = rate_lines(record) if record.history else []
    if lines:
        found += [_gap(record, lines), *(_rate(record, i, r) for i, r in enumerate(lines))]
        found += _multipliers(record)
    elif record.history:
        silent.append(
            "There are no groups' rates, gaps and multipliers to draw over the rounds: the run was "
            "trained without a constraint, so its users sent no such counts."
        )
    if record.privacy is not None and record.history:
        found += [counts_chart(record), gradient_chart(record)]
    curve = epsilon_curve(record)
    if curve.why is None:
        found.append(epsilon_chart(record, curve))
    else:
        silent.append(curve.why)
    return [chart for chart in found if chart is not None], silent


def _exact(record: RunRecord) -> str:
    return " Released with noise." if record.privacy is not None else " Exact, without noise."


def _accuracy(record: RunRecord) -> Chart | None:
    values: list[Number] = [row.get("accuracy") for row in record.history]
    if not any(v is not None for v in values):
        return None
    word, W, rounds = score_word(record), window(len(values)), rounds_of(record.history)
    means, places = running_mean(values, W), thinned(len(values))
    x, span = drawn(rounds, places), span_of([means], values, W - 1)
    return Chart(
        "accuracy",
        f"{word.capitalize()} of each round's cohort",
        f"The line is the mean of the last {W} rounds, dots are single rounds.{_exact(record)} "
        f"It is each round's own model on the users of that round, not the model that was kept."
        f"{outside(span, [*values, *means])}",
        f"Line chart of the released {word} over {len(values)} rounds. The running mean goes from "
        f"{number(first(means))} to {number(last(means))}.",
        [
            dots(word, x, drawn(values, places), colour=BLUE, symbol="circle"),
            line(f"mean of {W} rounds", x, drawn(means, places), colour=BLUE, width=2.6),
        ],
        axes("round", word, span=span),
        few_rounds(
            f"Released {word}, some of the rounds",
            rounds,
            {"released": values, f"mean of {W} rounds": means},
        ),
    )


def _gap(record: RunRecord, lines: Sequence[RateLines]) -> Chart:
    rounds = rounds_of(record.history)
    W, places = window(len(rounds)), thinned(len(rounds))
    x = drawn(rounds, places)
    single: list[Number] = [row.get("gap") for row in record.history]
    averaged: list[Number] = [row.get("averaged_gap") for row in record.history]
    means = gap_of_means(lines)
    columns: dict[str, Sequence[Number]] = {"single round": single, f"mean of {W} rounds": means}
    data = [
        dots("gap", x, drawn(single, places), colour=RED, symbol="circle"),
        line(f"gap of the means of {W} rounds", x, drawn(means, places), colour=RED, width=2.6),
    ]
    if any(v is not None for v in averaged):
        columns["the method's averages"] = averaged
        data.append(
            line("gap of the method's averages", x, drawn(averaged, places), colour=BLUE,
                 dash="dot")
        )  # fmt: skip
    if record.tolerance is not None:
        data.append(level(f"tolerance α = {record.tolerance:g}", x, record.tolerance))
    solid = [v for v in (*means[W - 1 :], *averaged[W - 1 :]) if v is not None]
    top = max([record.tolerance or 0.0, *solid, *_middle(single)], default=1.0)
    span = (0.0, 1.08 * top or 1.0)
    alpha = "" if record.tolerance is None else f"; the tolerance is {record.tolerance:g}"
    return Chart(
        "gap",
        "Gap: the largest difference between a group and the whole",
        f"Below the dashed line is within α. The line is the gap of the rates' means over {W} "
        "rounds, which noise blurs less than a single round's (dots). Noise makes gaps look larger "
        f"than they are. Read it beside the accuracy: a model that says the same of everybody is "
        f"fair, too.{outside(span, [*single, *means, *averaged])}",
        f"Line chart of the released gap over {len(rounds)} rounds. The gap of the means goes from "
        f"{number(first(means))} to {number(last(means))}{alpha}.",
        data,
        axes("round", "gap", span=span),
        few_rounds("Released gap, some of the rounds", rounds, columns),
    )


def _rate(record: RunRecord, index: int, lines: RateLines) -> Chart:
    rounds = rounds_of(record.history)
    W, places = window(len(rounds)), thinned(len(rounds))
    x = drawn(rounds, places)
    data: list[dict[str, Any]] = []
    for i, group in enumerate(lines.groups):
        colour, dash, symbol = style(i)
        own: dict[str, Any] = {"meta": {"group": group}, "legendgroup": group}
        data.append(
            dots(group, x, drawn(lines.groups[group], places), colour=colour, symbol=symbol, **own)
        )
        mean = drawn(lines.means[group], places)
        data.append(line(group, x, mean, colour=colour, dash=dash, symbol=symbol, **own))
    data.append(line("the whole", x, drawn(lines.overall_mean, places), colour="@muted", width=3.0))
    singles = [v for values in lines.groups.values() for v in values]
    every = [*lines.means.values(), lines.overall_mean]
    span = span_of(every, singles, W - 1)
    ends = ", ".join(f"{g} {number(last(m))}" for g, m in lines.means.items())
    return Chart(
        f"rate-{index}",
        f"{lines.rate} of every group",
        f"Lines are means over {W} rounds, weighted by the released counts; dots are single "
        f"rounds.{_exact(record)}{outside(span, [*singles, *(v for m in every for v in m)])}",
        f"Line chart of the {lines.rate} of {len(lines.groups)} groups over {len(rounds)} rounds. "
        f"Means at the end: {ends}; the whole {number(last(lines.overall_mean))}.",
        data,
        axes("round", lines.rate, span=span),
        few_rounds(
            f"{lines.rate}: means over {W} rounds, some of the rounds",
            rounds,
            {"the whole": lines.overall_mean, **lines.means},
        ),
        grouped=True,
    )


def _multipliers(record: RunRecord) -> list[Chart]:
    rounds = rounds_of(record.history)
    places = thinned(len(rounds))
    x = drawn(rounds, places)
    found = []
    for index, (rate, lines) in enumerate(multiplier_lines(record).items()):
        data = []
        for i, (group, values) in enumerate(lines.items()):
            colour, dash, symbol = style(i)
            own: dict[str, Any] = {"meta": {"group": group}, "legendgroup": group}
            data.append(
                line(
                    group, x, drawn(values, places), colour=colour, dash=dash, symbol=symbol, **own
                )
            )
        ends = ", ".join(f"{g} {number(last(v))}" for g, v in lines.items())
        found.append(
            Chart(
                f"multipliers-{index}",
                f"Multipliers λ for {rate}",
                "How hard training pushes for a group: λ moves as long as the group's rate is off, "
                "and stays where it is even.",
                f"Line chart of the multipliers for {rate} over {len(rounds)} rounds. At the end: "
                f"{ends}.",
                data,
                axes("round", f"λ ({rate})"),
                few_rounds(f"Multipliers for {rate}, some of the rounds", rounds, dict(lines), 4),
                grouped=True,
            )
        )
    return found


def _middle(values: Sequence[Number]) -> list[float]:
    """The values but for the largest twentieth."""
    known = sorted(v for v in values if v is not None)
    return known[: len(known) - len(known) // 20]
