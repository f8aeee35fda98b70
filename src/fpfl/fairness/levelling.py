r"""Levelling down, said in words: a gap that closes because somebody is treated worse.

Weights of samples below 1 hold the strong groups back. How far they went down is in the history
(``least_weight``, a function of released counts), and this says since when, and how far. A row's
figure is that of the round after it: weights are broadcast before a round, by what was released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COUNTED = ("FNR", "FPR")
"""Rates that count errors: one moves with the loss of the samples that it is about, so that the
least weight by one rate and group is that of a sample."""


def weighed_down(history: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str | None:
    """When and how far strong groups were weighed down, in sentences; None without a constraint.

    Parameters
    ----------
    history
        A run's rows.
    settings
        What the run was started with, as plain values.
    """
    layout, method = settings.get("layout") or {}, settings.get("method")
    if settings.get("constraint") is None or not history:
        return None
    own: Mapping[str, Any] = method if isinstance(method, Mapping) else {"kind": method}
    low = own.get("low")
    if not isinstance(low, int | float):
        return (
            "Whether strong groups were held back is not known: this method has no weights of "
            "samples."
        )
    rates = tuple(layout.get("rates") or ())
    if own.get("surrogate", "loss") != "loss" or not rates:
        return "Whether strong groups were held back is not known: the rates' own surrogates move."
    if own.get("patience") is None:
        return (
            f"Samples of strong groups may have weighed less than 1 from the start, {low:g} at the "
            "least; how far they went down is not recorded (patience = none)."
        )
    if not set(rates) <= set(COUNTED):
        return (
            f"Samples of strong groups weighed {low:g} at the least; how far they went down is "
            f"recorded for rates that count errors alone ({', '.join(COUNTED)})."
        )
    return _recorded(
        history,
        several=not layout.get("partition", True),
        low=float(low),
        times=" times its class's declared weight" if settings.get("class_weights") else "",
    )


def _recorded(
    history: Sequence[Mapping[str, Any]], *, several: bool, low: float, times: str
) -> str:
    """What the rows' ``least_weight`` say.

    ``several``: a sample may be in several groups, or in none. Its weight is not that of one group
    then, and may be less.
    """
    # The last row's is that of a round that was not run.
    found = {row["round"] + 1: row.get("least_weight") for row in history[:-1]}
    known = {t: float(weight) for t, weight in found.items() if weight is not None}
    if len(known) < len(found):
        return f"Weights went down to {low:g} at the least; the history does not say how far."
    down = {t: weight for t, weight in known.items() if weight < 1.0}
    others = "who is in several, or in none, may have weighed less"
    if not down and several:
        return (
            f"By one group alone no sample weighed less than 1{times} in any of "
            f"{len(history):,} rounds ({others})."
        )
    if not down:
        return (
            f"Nobody was weighed down: no sample weighed less than 1{times} in any of "
            f"{len(history):,} rounds."
        )
    first, furthest = min(down), min(down, key=lambda t: down[t])
    of_several = f" by one group alone ({others})" if several else ""
    theirs = times.replace("its class", "their class")
    return (
        f"Strong groups were weighed down: samples of some group weighed {_shown(down[furthest])}"
        f"{theirs} at the least{of_several}, in round {furthest:,}; below 1{times} from round "
        f"{first:,} on, in {len(down):,} of {len(history):,} rounds."
    )


def _shown(weight: float) -> str:
    """0.32; 0.998 rather than 1.00."""
    return f"{weight:.2f}" if weight < 0.995 else f"{min(weight, 0.9999):.4f}"
