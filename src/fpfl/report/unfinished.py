"""What a run that has not ended has released and promised so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.privacy.ledger import RunLedger
    from fpfl.privacy.statement import PrivacyStatement


def kept_history(folder: Path) -> tuple[list[Any], str]:
    """The rows in the last checkpoint, and a sentence on how far they go.

    The totals released since are in a log that only the run itself, with its model and method,
    turns into rows again.
    """
    from fpfl.server.state import CLASSES
    from fpfl.store.checkpoints import load_checkpoint

    files = sorted(folder.glob("checkpoint-*.safetensors"))
    if not files:
        return [], "There is no checkpoint in the folder, so nothing can be drawn over rounds."
    _, text = load_checkpoint(files[-1], CLASSES)
    rows = json.loads(text or "[]")
    if not isinstance(rows, list):
        raise ValueError(f"{files[-1]} holds no history; put an intact copy in its place")
    if not rows:
        return [], "No round is in a checkpoint yet, so nothing can be drawn over rounds."
    return rows, (
        f"The charts show the {len(rows):,} rounds up to the last checkpoint ({files[-1].name}); "
        "rounds released since then are not in them."
    )


def planned_statement(
    folder: Path, ledger: RunLedger, settings: dict[str, Any]
) -> PrivacyStatement | None:
    """What the run promises as planned, or as its filter keeps to; None without privacy."""
    from fpfl.begun import statement
    from fpfl.privacy.aggregation import Aggregation
    from fpfl.privacy.plan import PrivacyPlan
    from fpfl.privacy.settings import Clipping
    from fpfl.users.layout import Layout

    mechanism = ledger.mechanism
    if ledger.terms is None or mechanism is None:
        return None
    try:
        asked, clip = settings["privacy"], settings["clip"]
        bounds = {name: value for name, value in clip.items() if name != "kind"}
        blocks = Clipping(**bounds).blocks(
            constrained=settings["constraint"] is not None,
            selection=bool(settings["layout"]["selection"]),
        )
        real = settings["population"]
        accounted = asked["population"] or real
        plan = PrivacyPlan(
            population=accounted,
            real_population=None if accounted == real else real,
            cohort=settings["cohort"],
            rounds=ledger.planned,
            noise_multiplier=mechanism.noise_multiplier,
            blocks=blocks,
            convention=asked["convention"],
            neighbours=mechanism.neighbours,
            delta=ledger.terms.delta,
            max_participations=ledger.terms.cap,
            copies=asked.get("copies", 1),
        )
        parts = {name: settings.get(name) for name in ("nodes", "least", "colluders")}
        together = None
        if settings.get("sampling") == "federation":
            together = Aggregation(
                **parts,  # type: ignore[arg-type]
                shares=asked["convention"] in ("coins", "picked"),
                injected=ledger.simulation,
                held=bool(settings.get("held")),
            )
        seeded = bool(settings.get("seeded_cohorts"))
        layout = {name: value for name, value in settings["layout"].items() if name != "kind"}
        return statement(
            plan,
            ledger,
            ledger.simulation,
            seeded,
            together,
            size=Layout(**layout).size,
            declared=settings.get("population_declared", together and True),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the settings of the run in {folder} do not say what it promises ({error!r}); put "
            "intact copies of run.json and ledger.jsonl in their places"
        ) from error
