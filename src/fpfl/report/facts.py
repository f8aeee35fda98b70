"""A run as others are told of it: read from its folder, or taken from a `fpfl.Run` in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpfl.report.evaluations import Evaluated, Kind, read_evaluation
from fpfl.report.reading import NO_PRIVACY, RunRecord, read_run
from fpfl.report.words import marks, source_mark

if TYPE_CHECKING:
    from fpfl.data.schema import Schema
    from fpfl.fairness.evaluation import Evaluation
    from fpfl.heldout.result import PrivateEvaluation
    from fpfl.training.run import Run

IN_MEMORY = Path("run")
"""Stands in for the folder of a run that has none."""


def record_of(
    run: str | Path | Run | RunRecord,
    *,
    schema: Schema | None = None,
    test: Evaluation | None = None,
    training: Evaluation | None = None,
    private: PrivateEvaluation | None = None,
) -> RunRecord:
    """A run's record, with evaluations that are given beside those that its folder has.

    Parameters
    ----------
    run
        A run folder, a record of one, or a run in memory.
    schema
        The data's schema, where the run has no folder that says it.
    test, training
        Evaluations without noise (``Run.evaluate``): simulation only.
    private
        One that was released under its own ε (`fpfl.evaluate_privately`).
    """
    record = run if isinstance(run, RunRecord) else None
    if isinstance(run, str | Path):
        record = read_run(run)
    if record is None:
        record = _in_memory(run)  # type: ignore[arg-type]
    given: dict[Kind, Evaluation | PrivateEvaluation | None] = {
        "private": private,
        "test": test,
        "training": training,
    }
    found: dict[Kind, Evaluated] = dict(record.evaluations)
    for kind, evaluation in given.items():
        if evaluation is not None:
            found[kind] = read_evaluation(record.folder, kind, evaluation.as_dict())
    plain = record.schema if schema is None else _plain(schema.as_dict())
    return replace(record, evaluations=found, schema=plain)


def run_facts(
    run: str | Path | Run | RunRecord,
    *,
    test: Evaluation | None = None,
    private: PrivateEvaluation | None = None,
) -> dict[str, Any]:
    """What an exported file should say of the run its model is from: ε, δ, α and the verdict.

    Plain values, and nothing confidential. The verdict is the one that was released under ε, else
    the test set's, which is marked "simulation only".

    Parameters
    ----------
    run, test, private
        As in `fpfl.model_card`.
    """
    record = record_of(run, test=test, private=private)
    said: Mapping[str, Any] = record.privacy or {}
    judged = judged_by(record)
    server = said.get("epsilon_server_real")
    return {
        "epsilon": record.epsilon,
        "delta": said.get("delta"),
        "epsilon_server": said.get("epsilon_server") if server is None else server,
        "delta_server": said.get("delta_server"),
        "privacy": list(record.statement),
        "marks": marks(record),
        "constraint": record.constraint,
        "tolerance": record.tolerance,
        "rates": list(record.rates),
        "groups": list(record.groups),
        "verdict": None if judged is None else judged.verdict,
        "verdict_in_words": None if judged is None else judged.verdict_in_words,
        "collapsed": None if judged is None else judged.collapsed,
        "verdict_on": None if judged is None else verdict_on(judged),
        "inputs": record.inputs,
        "selected": record.selected,
        "trained": record.ended,
    }


def judged_by(record: RunRecord) -> Evaluated | None:
    """The evaluation that the verdict is taken from; the training population's is none."""
    for kind in ("private", "test"):
        found = record.evaluations.get(kind)
        if found is not None and found.verdict is not None:
            return found
    return None


def verdict_on(evaluation: Evaluated) -> str:
    """What a verdict rests on, in a few words."""
    return f"{evaluation.title.lower()} ({source_mark(evaluation)})"


def _in_memory(run: Run) -> RunRecord:
    privacy = run.privacy
    return RunRecord(
        folder=IN_MEMORY,
        settings=_plain(run.settings),
        history=run.history,
        finished=True,
        selected=run.selected,
        stopped=run.stopped,
        warnings=run.warnings,
        privacy=None if privacy is None else _plain(privacy.as_dict()),
        statement=(NO_PRIVACY,) if privacy is None else tuple(privacy.lines()),
        charged=None,
        evaluations={},
        schema=None,
        # It was trained by this very process.
        environment={"packages": {name: metadata.version(name) for name in ("fpfl", "torch")}},
        begun=None,
        ended=None,
        notes=(),
        inputs=None if run.scaling is None else str(run.scaling),
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As a file would give it back."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found
