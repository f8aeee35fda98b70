"""What a round released, in a few words: for progress bars and lines."""

from __future__ import annotations

from dataclasses import dataclass

from fpfl.privacy.spending import Spent
from fpfl.privacy.statement import round_up
from fpfl.server.state import Row


@dataclass(frozen=True)
class Worst:
    """The rate and the group that are furthest from the whole in a round, and how far."""

    rate: str
    group: str
    gap: float


def worst(row: Row) -> Worst | None:
    """The largest known |F/n' − F_a/n'_a| of a row, kept within 1; None where none is known."""
    found = [
        Worst(rate, group, min(abs(row["overall"][rate] - value), 1.0))
        for rate, groups in row.get("groups", {}).items()
        for group, value in groups.items()
        if value is not None and row["overall"][rate] is not None
    ]
    return max(found, key=lambda each: each.gap, default=None)


def accuracy_words(row: Row, score: str = "accuracy") -> str:
    """Empty where v has no counts for it, or the noise drowned them."""
    return "" if row["accuracy"] is None else f"{score} {row['accuracy']:.3f}"


def gap_words(row: Row) -> str:
    """The gap, and where it is; empty without a constraint."""
    if "groups" not in row:
        return ""
    furthest = worst(row)
    if furthest is None:
        return "gap not known"
    where = f"({furthest.rate} {furthest.group})"
    if row["gap"] is None:
        # Some group is silent, and could be worse.
        return f"gap {furthest.gap:.3f} or more {where}"
    return f"gap {row['gap']:.3f} {where}"


def averaged_words(row: Row) -> str:
    """The gap by the method's averages over rounds, where it has one."""
    averaged = row.get("averaged_gap")
    return "" if averaged is None else f"averaged gap {averaged:.3f}"


def spent_words(spent: Spent | None) -> str:
    """ε so far: a bound, of the ε that the run costs in the end."""
    if spent is None:
        return ""
    return f"ε ≤ {round_up(spent.epsilon)} of {round_up(spent.total)}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as clocks have it."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def pace(rounds_per_second: float) -> str:
    """Rounds a second, or seconds a round where that is more."""
    if rounds_per_second >= 10:
        return f"{rounds_per_second:,.0f} rounds/s"
    if rounds_per_second >= 1:
        return f"{rounds_per_second:.1f} rounds/s"
    return f"{1 / rounds_per_second:,.1f} s/round"


def printable(text: str, encoding: str) -> str:
    """The text as a terminal of this encoding can show it."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        plain = text.replace("ε", "eps").replace("≤", "<=").replace("√", "sqrt ")
        plain = plain.replace("σ", "sigma")
        return plain.encode("ascii", "replace").decode("ascii")
    return text
