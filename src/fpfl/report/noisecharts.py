"""The charts of a run's noise and of what its rounds cost."""

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
    last,
    level,
    line,
    rounds_of,
    safe,
    style,
    thinned,
)
from fpfl.report.reading import RunRecord
from fpfl.report.series import (
    CountNoise,
    EpsilonCurve,
    count_noise,
    gradient_noise,
    running_mean,
    window,
)
from fpfl.report.words import number


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
    drowned = f" {lost} of {len(noise)} counts drown altogether, and have no bar." if lost else ""
    return Chart(
        "counts",
        "Noise on the groups' counts",
        f"The noise on a round's n' (standard deviation {noise[0].noise:.3g}) as a part of the "
        "mean of n' over the rounds: 10% and less is good. Beyond the dashed line, at one half, "
        f"a round's rate is thrown away as unknown.{drowned}",
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
                    "drowned" if c.ratio is None else f"{c.ratio:.1%}",
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
    signal = [None if v is None else max(0.0, v - found.noise**2) ** 0.5 for v in squares]
    estimated = line(
        "signal, estimated", x, drawn(signal, places), colour=GREEN, dash="dot", symbol="diamond"
    )
    noise = [found.noise] * len(rounds)
    end = last(signal)
    share = "" if end is None else f" ({end / found.noise:.0%} of the noise at the end)"
    return Chart(
        "gradient",
        "Noise on the summed gradient",
        f"The released sum's norm (root of the mean square of {W} rounds), the norm that its noise "
        f"has, s√p = {found.noise:.4g}, and what is left for the signal, √(‖released‖² − p s²)"
        f"{share}. Training works even where noise is larger: it averages out over the rounds.",
        f"Line chart of the released gradient's norm over {len(rounds)} rounds against a noise of "
        f"{found.noise:.4g}; the signal is estimated at {number(end, 2)} at the end.",
        [
            dots("signal", x, drawn(found.signal, places), colour=GREEN, symbol="diamond"),
            line("released", x, drawn(released, places), colour=BLUE),
            estimated,
            level("noise s√p", x, found.noise),
        ],
        axes("round", "norm") | {"yaxis": {"title": {"text": "norm"}, "rangemode": "tozero"}},
        few_rounds(
            "Norms of the summed gradient, some of the rounds",
            rounds,
            {"released": released, "signal, estimated": signal, "noise": noise},
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
