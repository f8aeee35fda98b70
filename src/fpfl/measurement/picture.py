"""A picture of a measurement: every column's histogram, with its noise and its quartiles."""

from __future__ import annotations

import io
import math

from fpfl.measurement.result import MeasuredNumber, Measurement

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_BARS, _MEDIAN = "#56B4E9", "#D55E00"
_ACROSS = 3


def check_picture() -> None:
    """ImportError where matplotlib is missing, with what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "a picture of a measurement takes matplotlib, which is missing: pip install matplotlib"
        ) from error


def picture(measurement: Measurement) -> bytes:
    """Draw every column as a PNG: released counts, ± their noise, quartiles."""
    check_picture()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = measurement.columns
    across = min(_ACROSS, len(columns))
    down = math.ceil(len(columns) / across)
    figure = Figure(figsize=(4.0 * across, 2.6 * down + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis, each in zip(axes, columns, strict=False):
        axis.set_title(each.name, fontsize=10)
        axis.axhline(0.0, color="#444444", linewidth=0.6)
        if isinstance(each, MeasuredNumber):
            axis.stairs(each.histogram, each.cells.edges, fill=True, color=_BARS)
            for number, quartile in enumerate(each.quartiles):
                if not math.isnan(quartile.value):
                    style = "-" if number == 1 else ":"
                    axis.axvline(quartile.value, color=_MEDIAN, linestyle=style, linewidth=1.2)
            if each.cells.threshold is not None:
                axis.set_xscale("symlog", linthresh=each.cells.threshold)
        else:
            axis.bar(
                each.cells.labels,
                each.released,
                yerr=measurement.noise_stddev,
                color=_BARS,
                ecolor="#444444",
            )
            axis.tick_params(axis="x", rotation=30, labelsize=8)
        axis.set_ylabel("users", fontsize=8)
    for axis in axes[len(columns) :]:
        axis.set_visible(False)
    seeded = ", seeded noise: a simulation" if measurement.seeded else ""
    figure.suptitle(
        f"{measurement.population:,} users, ε = {measurement.epsilon:.3g}; noise of "
        f"{measurement.noise_stddev:.3g} users on every count{seeded}",
        fontsize=10,
    )
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()
