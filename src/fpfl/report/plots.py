"""Pictures: a rate of every group over the rounds, and figures against ε."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""For every line's name: (round, value) points."""

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_groups(
    panels: Mapping[str, Curves],
    path: Path,
    *,
    rate: str,
    subtitles: Mapping[str, str] | None = None,
    note: str = "",
) -> Path:
    """Draw one panel for each run: the rate of every group over the rounds.

    Parameters
    ----------
    panels
        For every run's name, its groups' curves.
    path
        Where to write the picture.
    rate
        The rate's name, for the axis.
    subtitles
        A second line under a panel's title.
    note
        A line under the picture, e.g. what the values were measured on.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(panels), 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        groups = [group for group in curves if group != "overall"]
        for colour, group in zip(COLOURS * len(groups), groups, strict=False):
            axis.plot(*zip(*curves[group], strict=True), color=colour, lw=1.8, label=group)
        if "overall" in curves:
            axis.plot(
                *zip(*curves["overall"], strict=True), color="#555555", lw=1.2, ls="--",
                label="overall",
            )  # fmt: skip
        axis.set_title(name, fontweight="bold")
        if subtitles and name in subtitles:
            axis.text(
                0.5, 0.985, subtitles[name], transform=axis.transAxes, ha="center", va="top",
                fontsize=9, color="#333333",
            )  # fmt: skip
        axis.set_xlabel("round")
        axis.set_ylim(0.0, 1.09)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(rate)
    axes[0].legend(loc="lower left", frameon=False, fontsize=9)
    return _written(figure, note, path)


Points = Mapping[str, Sequence[tuple[float, float, float]]]
"""For every line's name: (ε, mean, standard deviation) points."""


def plot_against_epsilon(
    panels: Mapping[str, Points], path: Path, *, limits: Mapping[str, float], note: str = ""
) -> Path:
    """Draw one panel for each quantity: a line for each algorithm over ε, with its spread.

    Parameters
    ----------
    panels
        For every quantity's name, the algorithms' points.
    path
        Where to write the picture.
    limits
        A level to mark in a panel, by the quantity's name.
    note
        A line under the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, lines) in zip(axes, panels.items(), strict=True):
        for colour, marker, (algorithm, points) in zip(
            COLOURS, "os^Dv", lines.items(), strict=False
        ):
            epsilon, mean, spread = zip(*points, strict=True)
            axis.errorbar(
                epsilon, mean, yerr=spread, color=colour, marker=marker, ms=4.5, lw=1.6,
                capsize=2.5, label=algorithm,
            )  # fmt: skip
        if name in limits:
            axis.axhline(limits[name], color="#555555", lw=1.0, ls=":")
        axis.set_xscale("log")
        axis.set_xticks(sorted({point[0] for points in lines.values() for point in points}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_xlabel("ε")
        axis.set_title(name, fontsize=10.5, fontweight="bold")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right", frameon=False, fontsize=9)
    return _written(figure, note, path)


def _written(figure: Figure, note: str, path: Path) -> Path:
    """Write a picture, with a line under it."""
    if note:
        figure.supxlabel(note, fontsize=8.5, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
