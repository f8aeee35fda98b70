"""A picture of what a sweep found: held-out accuracy against the gap, the chosen setting marked."""

from __future__ import annotations

import io
import math

from fpfl.sweeps.choice import Averaged, Choice, Estimate

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_CHOSEN, _ALIKE, _WITHIN, _OUTSIDE = "#D55E00", "#0072B2", "#56B4E9", "#999999"
_NAMED = 6
_WIDTH = 42
_BESIDE = ((6, 6), (6, -15), (-13, 6), (-13, -15))
"""Where numbers stand beside their points: settings may be at one place."""


def picture(choice: Choice, title: str = "") -> bytes:
    """Draw every setting of a choice as a PNG.

    ImportError where matplotlib is missing, with what to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture of the sweep takes matplotlib, which is missing: pip install matplotlib"
        ) from error

    figure = Figure(figsize=(10.8, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    constrained = any(each.gap is not None for each in choice.settings)
    best = choice.best
    named = [best, *choice.alike[: _NAMED - 1]]
    for place, each in enumerate(choice.settings):
        colour, size = _look(choice, each)
        x = each.gap if constrained else Estimate(float(place + 1), math.nan, math.nan)
        if x is None or math.isnan(x.value):
            continue
        axes.errorbar(
            x.value,
            each.score.value,
            xerr=_arms(x),
            yerr=_arms(each.score),
            color=colour,
            marker="*" if each is best else "o",
            ms=size,
            lw=1.4 if each in named else 0.8,
            alpha=1.0 if each in named else 0.55,
            zorder=3 if each is best else 2,
            ls="none",
            label=_label(choice, each) if each in named else None,
        )
        if each in named:
            number = named.index(each)
            axes.annotate(
                str(number + 1),
                (x.value, each.score.value),
                xytext=_BESIDE[number % len(_BESIDE)],
                textcoords="offset points",
                fontsize=11,
                fontweight="bold",
                color=colour,
            )
    if choice.tolerance is not None and constrained:
        axes.axvline(choice.tolerance, color="#333333", lw=1.2, ls="--")
        axes.annotate(
            f"α = {choice.tolerance:g}",
            (choice.tolerance, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -14),
            textcoords="offset points",
            fontsize=11,
            color="#333333",
        )
    if constrained:
        axes.set_xlim(left=-0.03 * axes.get_xlim()[1])
    axes.set_xlabel("held-out gap" if constrained else "settings, the best first", fontsize=12)
    axes.set_ylabel(f"held-out {choice.measure}", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title or _title(choice), fontsize=13, fontweight="bold", loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=10.5)
    figure.supxlabel(_wrapped(_note(choice), 118), fontsize=10, color="#444444")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def _look(choice: Choice, each: Averaged) -> tuple[str, float]:
    if each is choice.best:
        return _CHOSEN, 16.0
    if each in choice.alike:
        return _ALIKE, 7.0
    return (_OUTSIDE if each.within is False else _WITHIN), 6.0


def _arms(estimate: Estimate) -> list[list[float]] | None:
    """Both arms of an interval, as matplotlib takes them."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return None
    return [[estimate.value - estimate.low], [estimate.high - estimate.value]]


def _label(choice: Choice, each: Averaged) -> str:
    number = 1 if each is choice.best else choice.alike.index(each) + 2
    what = "chosen: " if each is choice.best else ""
    return _wrapped(f"{number}  {what}{each.name}", _WIDTH)


def _title(choice: Choice) -> str:
    settings = len(choice.settings)
    return f"{settings} {'setting' if settings == 1 else 'settings'} on held-out users"


def _note(choice: Choice) -> str:
    said = [choice.intervals()]
    if choice.alike:
        said.append("Blue: cannot be told apart from the chosen one.")
    if any(each.within is False for each in choice.settings):
        said.append("Grey: gap above the tolerance.")
    said.append("Simulation only: measured without noise.")
    return " ".join(said)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    whole = text.replace(" = ", "\u00a0=\u00a0")  # a name and its value on one line
    return "\n   ".join(textwrap.wrap(whole, width)) if width < 100 else textwrap.fill(text, width)
