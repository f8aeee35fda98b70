"""How far a run has come, of which nothing but its folder is known."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.plan import PrivacyPlan
from fpfl.report.reading import read_run
from fpfl.runs.folder import LEDGER, OpenRun, read_excluded
from fpfl.runs.journal import read_past


def standing(folder: Path) -> str:
    """What a run's folder says: its round, what was charged, ε so far, when it was last written."""
    record = read_run(folder)
    ledger = OpenRun(folder).ledger
    planned, released = int(record.settings["rounds"]), len(record.history)
    if not ledger.finished:  # the history is of the last checkpoint, the journal of every round
        released = max([released, *read_past(folder, ledger.simulation).totals])
    lines = [f"{folder}: {released} of {planned} rounds released"]
    lines[0] += ", finished" if ledger.finished else ", not finished"
    if record.charged is None or record.privacy is None:
        lines.append("No privacy was asked for, so there is no ε.")
    else:
        try:
            plan = PrivacyPlan.from_dict(record.privacy)

            def epsilon(rounds: int) -> float:
                cut = plan.with_rounds(rounds)
                return cut.epsilon_honest if cut.epsilon_real is None else cut.epsilon_real

            whole = epsilon(plan.rounds)
            spent = 0.0 if not record.charged else epsilon(min(record.charged, plan.rounds))
            figures = f"ε = {spent:.3f} of {whole:.3f} at δ = {plan.delta:g}"
        except (MissingAccountantError, TypeError, ValueError) as error:
            figures = f"what they cost is not known ({error})"
        lines.append(f"{record.charged} of {ledger.planned} rounds charged: {figures}")
        lost = record.charged - released
        if lost > 0:
            lines.append(f"{lost} of them charged, and lost or under way")
    if excluded := read_excluded(folder):
        lines.append(f"Left out, having broken the protocol: {', '.join(map(repr, excluded))}")
    # Lines of the ledger have times, and so has the file: of the last charge, or of the end.
    written = datetime.fromtimestamp((folder / LEDGER).stat().st_mtime, UTC)
    lines.append(f"The ledger was last written at {written:%Y-%m-%d %H:%M:%S} UTC")
    return "\n".join(lines)
