"""The charts of one run over its rounds, of its noise and of what they cost.

All of it follows from what was released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpfl.report.charts import (
    BLUE,
    GREEN,
    PATTERNS,
    RED,
    Chart,
    Number,
    Table,
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
    safe,
    span_of,
    style,
    thinned,
)
from fpfl.report.reading import RunRecord
from fpfl.report.series import (
    CountNoise,
    EpsilonCurve,
    RateLines,
    bound_course,
    count_noise,
    epsilon_curve,
    gap_of_means,
    gradient_noise,
    multiplier_lines,
    rate_lines,
    running_mean,
    window,
)
from fpfl.report.words import number, score_word


def counts_chart(record: RunRecord) -> Chart | None:
    """How noisy the counts of a round are."""
    noise = count_noise(record)
    if not noise:
        return None
    data = []
    for i, group in enumerate(record.groups):
        own = [c for c in noise if c.group == group]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": safe(group),
                "y": [safe(c.rate) for c in own],
                "x": [c.ratio if c.ratio is None else round(c.ratio, 5) for c in own],
                "marker": {
                    "color": style(i)[0],
                    "pattern": {"shape": PATTERNS[i % len(PATTERNS)], "solidity": 0.25},
                },
                "meta": {"group": group},
                "legendgroup": group,
                "hovertemplate": f"{safe(group)}, %{{y}}: noise is %{{x:.1%}} of n'<extra></extra>",
            }
        )
    known = [c for c in noise if c.ratio is not None]
    worst = max(known, key=lambda c: c.ratio or 0.0, default=None)
    lost = len(noise) - len(known)
    most = "" if worst is None else f" The noisiest is {_where(worst)}: {worst.ratio:.0%} of n'."
    dominated = (
        f" {lost} of {len(noise)} counts are dominated altogether, and have no bar." if lost else ""
    )
    return Chart(
        "counts",
        "Noise on the groups' counts",
        f"The noise on a round's n' (standard deviation {noise[0].noise:.3g}) as a part of the "
        "mean of n' over the rounds: 10% and less is good. Beyond the dashed line, at one half, "
        f"a round's rate is thrown away as unknown.{dominated}",
        f"Bar chart of noise over signal for {len(noise)} counts.{most}",
        data,
        _ratio_axes(),
        Table(
            "Noise on the counts of a round",
            ("group", "rate", "mean of n'", "noise", "noise / n'"),
            tuple(
                (
                    c.group,
                    c.rate,
                    number(c.mean, 1),
                    number(c.noise, 2),
                    "dominated" if c.ratio is None else f"{c.ratio:.1%}",
                )
                for c in noise
            ),
        ),
        grouped=True,
    )


def _ratio_axes() -> dict[str, Any]:
    half = {"type": "line", "x0": 0.5, "x1": 0.5, "yref": "paper", "y0": 0, "y1": 1}
    layout = axes("noise / n'", "", barmode="group", bargap=0.25)
    layout["xaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    layout["yaxis"] |= {"autorange": "reversed"}
    layout["shapes"] = [{**half, "line": {"color": "@limit", "dash": "dash", "width": 1.6}}]
    return layout


def _where(noise: CountNoise) -> str:
    return f"{noise.rate} in {noise.group}"


def gradient_chart(record: RunRecord) -> Chart | None:
    """How noisy the summed gradient is."""
    found = gradient_noise(record)
    if found is None:
        return None
    rounds = rounds_of(record.history)
    W, places = window(len(rounds)), thinned(len(rounds))
    x = drawn(rounds, places)
    # The mean of squares is what p s² is taken off.
    squares = running_mean([None if v is None else v * v for v in found.released], W)
    released = [None if v is None else v**0.5 for v in squares]
    noises = running_mean([v * v for v in found.noise], W)
    noise = [None if v is None else v**0.5 for v in noises]
    signal = [
        None if v is None or own is None else max(0.0, v - own) ** 0.5
        for v, own in zip(squares, noises, strict=True)
    ]
    estimated = line(
        "signal, estimated", x, drawn(signal, places), colour=GREEN, dash="dot", symbol="diamond"
    )
    ends = last(signal), found.noise[-1]
    share = "" if ends[0] is None else f" ({ends[0] / ends[1]:.0%} of the noise at the end)"
    fixed = len(set(found.noise)) == 1
    size = f"s√p = {ends[1]:.4g}"
    if not fixed:
        size = f"s√p, which follows the clip bound ({ends[1]:.4g} at the end)"
    return Chart(
        "gradient",
        "Noise on the summed gradient",
        f"The released sum's norm (root of the mean square of {W} rounds), the norm that its noise "
        f"has, {size}, and what is left for the signal, √(‖released‖² − p s²)"
        f"{share}. Training works even where noise is larger: it averages out over the rounds.",
        f"Line chart of the released gradient's norm over {len(rounds)} rounds against a noise of "
        f"{ends[1]:.4g}; the signal is estimated at {number(ends[0], 2)} at the end.",
        [
            dots("signal", x, drawn(found.signal, places), colour=GREEN, symbol="diamond"),
            line("released", x, drawn(released, places), colour=BLUE),
            estimated,
            level("noise s√p", x, ends[1])
            if fixed
            else line("noise s√p", x, drawn(noise, places), colour="@limit", dash="dash"),
        ],
        axes("round", "norm") | {"yaxis": {"title": {"text": "norm"}, "rangemode": "tozero"}},
        few_rounds(
            "Norms of the summed gradient, some of the rounds",
            rounds,
            {"released": released, "signal, estimated": signal, "noise": noise},
        ),
    )


def bound_chart(record: RunRecord) -> Chart | None:
    """How a clip bound that adapts went."""
    course = bound_course(record)
    if course is None:
        return None
    rounds, places = rounds_of(record.history), thinned(len(record.history))
    W, x = window(len(rounds)), drawn(rounds, places)
    clipped = running_mean(course.clipped, W)
    target = "" if course.target is None else f" (aimed at: {course.target:.3g})"
    return Chart(
        "bound",
        "The clip bound",
        f"C of each round: it grows where more users are clipped than aimed at, and shrinks where "
        f"fewer are. Of the last {W} rounds' users {number(last(clipped))} were clipped{target}."
        f"{_exact(record)}",
        f"Line chart of the clip bound over {len(rounds)} rounds, from {course.bounds[0]:.3g} to "
        f"{course.bounds[-1]:.3g}.",
        [line("clip bound C", x, drawn(course.bounds, places), colour=BLUE, symbol="circle")],
        axes("round", "C") | {"yaxis": {"title": {"text": "C"}, "rangemode": "tozero"}},
        few_rounds(
            "The clip bound and the users clipped, some of the rounds",
            rounds,
            {"C": course.bounds, "clipped": course.clipped, f"mean of {W} rounds": clipped},
        ),
    )


def epsilon_chart(record: RunRecord, curve: EpsilonCurve) -> Chart:
    """What the rounds cost."""
    data = [
        line("who sees only releases", curve.rounds, curve.epsilon, colour=BLUE, symbol="circle")
    ]
    columns: dict[str, Sequence[Number]] = {"ε": curve.epsilon}
    if curve.server:
        data.append(
            line("a server that knows cohorts", curve.rounds, curve.server, colour=RED,
                 dash="dash", symbol="square")
        )  # fmt: skip
        columns["ε, server"] = curve.server
    end, T = curve.epsilon[-1], curve.rounds[-1]
    going = "" if record.finished else f" {record.charged or 0:,} rounds have been charged so far."
    return Chart(
        "epsilon",
        "ε over the rounds",
        f"What the plan would cost if it had been made for so many rounds. The run's own ε is that "
        f"of all {T:,} planned rounds, even where it stops before.{going}",
        f"Line chart of ε against the number of rounds, from {curve.epsilon[0]:.3g} after round 1 "
        f"to {end:.4g} after {T}.",
        data,
        axes("rounds", "ε") | {"yaxis": {"title": {"text": "ε"}, "rangemode": "tozero"}},
        Table(
            "ε of the plan for so many rounds",
            ("rounds", *columns),
            tuple(
                (f"{t:,}", *(number(values[i]) for values in columns.values()))
                for i, t in enumerate(curve.rounds)
            ),
        ),
    )


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
    found.append(bound_chart(record))
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
