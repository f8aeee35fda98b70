"""What a report asks of a run's files before it draws them: numbers where there must be numbers.

A figure of something that is no number would be drawn as nothing, without a word. Better to say
which file is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SETTINGS: dict[str, Any] = {
    "cohort": int | None,
    "rounds": int | None,
    "population": int | None,
    "constraint": str | None,
    "tolerance": int | float | None,
    "layout": dict | None,
    "clip": dict | None,
    "privacy": dict | None,
}
_STATEMENT: dict[str, Any] = {
    "convention": str,
    "neighbours": str,
    "population": int,
    "real_population": int | None,
    "cohort": int,
    "rounds": int,
    "noise_multiplier": int | float,
    "blocks": list,
    "delta": int | float,
    "epsilon": int | float | None,
    "epsilon_honest": int | float | None,
    "epsilon_real": int | float | None,
    "participations": int,
    "participations_capped": bool,
    "delta_server": int | float,
    "epsilon_server": int | float,
    "epsilon_server_real": int | float | None,
    "seeded_noise": bool,
    "seeded_cohorts": bool,
    "aggregation": dict | None,
    "filter_order": int | float | None,
    "contributions": str | None,
}
_BLOCK: dict[str, Any] = {
    "name": str,
    "bound": int | float,
    "share": int | float,
    "noise_stddev": int | float,
}
_ROW: dict[str, Any] = {
    "accuracy": int | float | None,
    "gap": int | float | None,
    "gradient_norm": int | float | None,
    "averaged_gap": int | float | None,
}
_TABLES = ("groups", "counts", "multipliers")


def damaged(file: Path, what: str) -> ValueError:
    """The error for a file that is not what a run writes."""
    return ValueError(
        f"{file} is not what a run writes ({what}); put an intact copy in its place, or leave this "
        "run out"
    )


HUGE = 1e100


def check_kinds(file: Path, found: Any, kinds: Mapping[str, Any], where: str = "it") -> None:
    """Refuse a mapping that has something else in the place of what is asked for."""
    if not isinstance(found, dict):
        raise damaged(file, f"{where} is {found!r:.80}")
    for name, kind in kinds.items():
        value = found.get(name)
        # A truth value is a whole number to Python, and no number to a reader.
        odd = isinstance(value, bool) and kind is not bool
        # So large that its square is no number any more: nothing that a run writes.
        huge = isinstance(value, int | float) and not abs(value) <= HUGE
        if odd or huge or not isinstance(value, kind):
            raise damaged(file, f"{where} has {name} = {value!r:.80}")


def check_settings(file: Path, settings: Any) -> dict[str, Any]:
    """A run's settings, as far as a report uses them."""
    check_kinds(file, settings, _SETTINGS, "settings")
    layout = settings.get("layout") or {}
    for name in ("rates", "groups"):
        names = layout.get(name) or []
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(file, f"the layout's {name} are {names!r:.80}")
    check_kinds(file, layout, {"parameters": int | None, "basis": str | None}, "the layout")
    return dict(settings)


def check_privacy(file: Path, statement: Any) -> dict[str, Any] | None:
    """A privacy statement's figures; None without privacy."""
    if statement is None:
        return None
    check_kinds(file, statement, _STATEMENT, "privacy")
    for block in statement["blocks"]:
        check_kinds(file, block, _BLOCK, "a block of the noise")
    return dict(statement)


def check_history(file: Path, history: list[Any]) -> list[dict[str, Any]]:
    """The rows of a history: one for each round, in order, with numbers."""
    last = 0
    for row in history:
        check_kinds(file, row, {"round": int, **_ROW}, "a round")
        if row["round"] <= last:
            raise damaged(file, f"round {row['round']} follows round {last}")
        last = row["round"]
        where = f"round {last}"
        overall = {} if row.get("overall") is None else row["overall"]
        _check_numbers(file, overall, f"overall in {where}")
        for name in _TABLES:
            table = {} if row.get(name) is None else row[name]
            check_kinds(file, table, {}, f"{name} in {where}")
            for rate, line in table.items():
                _check_numbers(file, line, f"{rate!r:.40} of {name} in {where}")
    return history


def _check_numbers(file: Path, line: Any, where: str) -> None:
    check_kinds(file, line, {}, where)
    check_kinds(file, line, dict.fromkeys(line, int | float | None), where)
