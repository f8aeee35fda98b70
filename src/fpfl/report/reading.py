"""A run folder as a report reads it: what is there, what is missing, and nothing that is guessed.

Full run folders, folders made by `fpfl.Run.save` and folders of runs that have not ended are read;
anything else is refused with a word on what to do. Nothing in a folder is written or executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpfl.data.inputs import Scaling
from fpfl.fairness.against import Against
from fpfl.privacy.assumptions import BEFORE, Aggregation
from fpfl.privacy.conventions import SHARED
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import Clipping
from fpfl.report.evaluations import (
    KINDS,
    Evaluated,
    Kind,
    check_history,
    check_privacy,
    check_settings,
    damaged,
    read,
    read_evaluation,
)
from fpfl.runs.folder import (
    ABOUT,
    AGAINST,
    CHECKPOINTS,
    CUT_SHORT,
    ENVIRONMENT,
    EVALUATION,
    HISTORY,
    LEDGER,
    PRIVACY,
    REFERENCE,
    RESULT,
    SCHEMA,
    OpenRun,
    is_begun,
    is_cut_short,
    model_digest,
)
from fpfl.runs.resume import statement
from fpfl.server.state import CLASSES
from fpfl.store.checkpoints import load_checkpoint
from fpfl.store.typed import plain, typed
from fpfl.users.layout import Layout

if TYPE_CHECKING:
    from fpfl.privacy.statement import PrivacyStatement
    from fpfl.runs.ledger import RunLedger


def kept_history(folder: Path) -> tuple[list[Any], str]:
    """The rows in the last checkpoint, and a sentence on how far they go.

    The totals released since are in a log that only the run itself, with its model and method,
    turns into rows again.
    """
    files = sorted(folder.glob(CHECKPOINTS))
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


def planned_statement(run: OpenRun) -> PrivacyStatement | None:
    """What a run promises as planned, or as its filter keeps to; None without privacy."""
    ledger, settings = run.ledger, run.settings
    mechanism = ledger.mechanism
    if ledger.terms is None or mechanism is None:
        return None
    try:
        begun = run.manifest.plan or _plan_of(settings)
        plan = PrivacyPlan.from_dict(
            begun
            | {
                "cohort": settings["cohort"],
                "rounds": ledger.planned,
                "noise_multiplier": mechanism.noise_multiplier,
                "neighbours": mechanism.neighbours,
                "delta": ledger.terms.delta,
                "max_participations": ledger.terms.cap,
            }
        )
        together = None
        if settings.get("sampling") == "federation":
            together = typed(
                Aggregation,
                {name: settings.get(name) for name in ("nodes", "least", "colluders")}
                | {
                    "shares": plan.convention in SHARED,
                    "injected": ledger.simulation,
                    "held": bool(settings.get("held")),
                },
            )
        return statement(
            plan,
            ledger,
            ledger.simulation,
            bool(settings.get("seeded_cohorts")),
            together,
            size=typed(Layout, settings["layout"]).size,
            declared=settings.get("population_declared", together and True),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the settings of the run in {run.path} do not say what it promises ({error!r}); put "
            f"intact copies of {ABOUT} and {LEDGER} in their places"
        ) from error


def _plan_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What a plan is made of, from the settings of a run of 0.1.0, which wrote down no plan."""
    asked, real = settings["privacy"], settings["population"]
    clipping = typed(Clipping, settings["clip"])
    blocks = clipping.blocks(
        constrained=settings["constraint"] is not None,
        selection=bool(settings["layout"]["selection"]),
    )
    accounted = asked["population"] or real
    return {
        "population": accounted,
        "real_population": None if accounted == real else real,
        "blocks": plain(blocks),
        "convention": asked["convention"],
        "copies": asked.get("copies", 1),
    }


Row = dict[str, Any]
"""A row of the history."""

NO_PRIVACY = "This run gives no privacy guarantee."


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says about its run.

    Parameters
    ----------
    folder
        Where it was read.
    settings
        What the run was started with, or went on with last.
    history
        One row a round, all released; for a run that has not ended, up to its last checkpoint.
    finished
        Whether there is a result; a run that was resumed since has not ended.
    selected, stopped, warnings
        As in `fpfl.Run`; empty for a run that has not ended.
    privacy
        The privacy statement's figures (``PrivacyStatement.as_dict()``); None without privacy. For
        a run that has not ended: those of its plan.
    statement
        The statement in words, one point a line.
    charged
        How many rounds were charged; None where the folder has no ledger.
    evaluations
        By kind: "private" (released under its own ε), "test" and "training" (simulation only).
    schema, environment
        What ``schema.json`` and ``environment.json`` hold; None where they are missing.
    begun, ended
        Dates from the ledger, as ISO 8601 text.
    notes
        What is missing, or does not go together, in sentences.
    inputs
        How a table's columns are scaled, in words; None where they are not, or that is not known.
    against
        Who is better and who is worse off than by the run's reference, by kind of evaluation.
    reference
        The privacy figures of the reference in the folder, and None in it where it has none
        (``{"privacy": ...}``); None without a reference that has ended.
    """

    folder: Path
    settings: dict[str, Any] = field(repr=False)
    history: list[Row] = field(repr=False)
    finished: bool
    selected: str | None
    stopped: str | None
    warnings: tuple[str, ...]
    privacy: dict[str, Any] | None = field(repr=False)
    statement: tuple[str, ...] = field(repr=False)
    charged: int | None
    evaluations: dict[Kind, Evaluated] = field(repr=False)
    schema: dict[str, Any] | None = field(repr=False)
    environment: dict[str, Any] | None = field(repr=False)
    begun: str | None
    ended: str | None
    notes: tuple[str, ...]
    inputs: str | None = None
    against: dict[Kind, Against] = field(default_factory=dict, repr=False)
    reference: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name or self.folder.resolve().name

    @property
    def rounds(self) -> int:
        """T as planned; the recorded rounds where the settings do not say."""
        return int(self.settings.get("rounds") or len(self.history))

    @property
    def rates(self) -> tuple[str, ...]:
        """The constrained rates; none without a constraint."""
        return tuple(self._layout("rates") or self._tables())

    @property
    def groups(self) -> tuple[str, ...]:
        """The constrained groups; none without a constraint."""
        tables = self._tables()
        return tuple(self._layout("groups") or (next(iter(tables.values())) if tables else ()))

    @property
    def parameters(self) -> int | None:
        """p: how many trainable parameters the model has."""
        found = (self.settings.get("layout") or {}).get("parameters")
        return None if found is None else int(found)

    @property
    def tolerance(self) -> float | None:
        """α; None without a constraint."""
        return None if self.settings.get("constraint") is None else self.settings.get("tolerance")

    @property
    def constraint(self) -> str | None:
        """The constraint's name."""
        return self.settings.get("constraint")

    @property
    def seeded_noise(self) -> bool:
        """Whether whoever has a seed can take the noise off."""
        return self.privacy is not None and bool(self.privacy["seeded_noise"])

    @property
    def seeded_cohorts(self) -> bool:
        """Whether whoever has a seed knows who took part; as the statement says it."""
        said = self.privacy or {}
        return bool(said.get("seeded_cohorts")) and said.get("aggregation") is None

    @property
    def injected(self) -> bool:
        """Whether a federation's coins and noise came from a test generator."""
        aggregation = (self.privacy or {}).get("aggregation") or {}
        return bool(aggregation.get("injected"))

    @property
    def epsilon(self) -> float | None:
        """ε that holds for the run's users; None without privacy, or where nobody computed it.

        The honest figure, and the real population's where ε was computed for another.
        """
        if self.privacy is None:
            return None
        if self.privacy["real_population"] is not None:
            found = self.privacy["epsilon_real"]
        else:
            found = self.privacy["epsilon_honest"]
        return None if found is None else float(found)

    def _layout(self, name: str) -> Sequence[str]:
        return (self.settings.get("layout") or {}).get(name) or ()

    def _tables(self) -> Mapping[str, Any]:
        return (self.history[-1].get("groups") or {}) if self.history else {}


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder; what is no such folder, or damaged, is a ValueError."""
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise ValueError(f"{path} {what}; name the folder of a run (fpfl train, or Run.save)")
    run = OpenRun(path) if is_begun(path) else None
    result = _read(path / RESULT, dict)
    if result is not None and (run is None or run.ledger.finished):
        return _finished(path, result, None if run is None else run.ledger)
    if run is not None:
        return _unfinished(run)
    raise ValueError(
        f"{path} is not the folder of a run: it has neither result.json nor ledger.jsonl. Name a "
        "folder that fpfl train or Run.save has written"
    )


def _finished(path: Path, result: dict[str, Any], ledger: RunLedger | None) -> RunRecord:
    file = path / RESULT
    settings = check_settings(file, result.get("settings"))
    privacy = check_privacy(file, result.get("privacy"))
    if privacy is not None and ledger is not None and ledger.contributions is None:
        # The ledger is a chain, and the result a file that anybody may have edited.
        privacy = privacy | {"contributions": None}
    warned = result.get("warnings") or []
    words = [result.get("selected"), result.get("stopped")]
    if not isinstance(warned, list) or not all(isinstance(w, str | None) for w in words):
        raise ValueError(f"{file} is not what a run writes; put an intact copy in its place")
    notes = []
    history = _read(path / HISTORY, list)
    if history is None:
        notes.append(
            "history.json is missing, so nothing is drawn over rounds. Put back the file that was "
            "saved with the run."
        )
    said = _text(path / PRIVACY)
    if said is None:
        notes.append(
            "privacy.txt is missing: the privacy statement's figures are those of result.json, and "
            "its words are not there. Put back the file that was saved with the run."
        )
        said = NO_PRIVACY if privacy is None else ""
    lines = [line for line in said.splitlines() if line.strip()]
    if privacy is not None and privacy.get("contributions") is None and BEFORE not in lines:
        lines.insert(0, BEFORE)
    return _record(
        path,
        ledger,
        settings,
        check_history(path / HISTORY, history or []),
        notes,
        finished=True,
        selected=words[0],
        stopped=words[1],
        warnings=tuple(map(str, warned)),
        privacy=privacy,
        statement=tuple(lines),
        inputs=_inputs(file, result.get("scaling")),
    )


def _inputs(file: Path, scaling: Any) -> str | None:
    if scaling is None:
        return None
    try:
        return str(Scaling.from_dict(scaling))
    except ValueError as error:
        raise ValueError(f"{file} is not what a run writes: {error}") from error


def _unfinished(run: OpenRun) -> RunRecord:
    """A run that goes on, was cut off, or was resumed and has not ended since."""
    path, ledger = run.path, run.ledger
    settings = check_settings(path / ABOUT, run.settings)
    history, found = kept_history(path)
    notes = [
        "This run has not ended: it goes on elsewhere, or was cut off (fpfl resume goes on with "
        "it). There is no selected model yet, and no result.",
        found,
    ]
    said = planned_statement(run)
    if said is not None:
        notes.append(
            f"{ledger.spent:,} of {ledger.planned:,} planned rounds have been charged so far; the "
            "privacy figures are those of the whole plan."
        )
    return _record(
        path,
        ledger,
        settings,
        check_history(path, history),
        notes,
        finished=False,
        selected=None,
        stopped=None,
        warnings=(),
        privacy=None if said is None else json.loads(json.dumps(said.as_dict())),
        statement=(NO_PRIVACY,) if said is None else tuple(said.lines()),
        inputs=_inputs(ledger.chain.path, (ledger.scaling or {}).get("scaling")),
    )


def _record(
    path: Path,
    ledger: RunLedger | None,
    settings: dict[str, Any],
    history: list[Row],
    notes: list[str],
    **more: Any,
) -> RunRecord:
    # A model that is not final was not evaluated: what is there is of the one before.
    found = _evaluations(path, notes) if more["finished"] else {}
    reference = _reference(path, ledger, notes) if more["finished"] else None
    against = {} if reference is None else _against(path, notes)
    for kind, each in against.items():
        judged = found.get(kind)
        if each.warning is not None and judged is not None and judged.verdict_in_words is not None:
            words = f"{judged.verdict_in_words.rstrip('.')}. {each.warning}"
            found[kind] = replace(judged, verdict_in_words=words)
    times = [] if ledger is None else [r for r in ledger.chain.records if "time" in r]
    ends = [r["time"] for r in times if r["kind"] == "finish"]
    return RunRecord(
        folder=path,
        settings=settings,
        history=history,
        charged=None if ledger is None or ledger.terms is None else ledger.spent,
        evaluations=found,
        schema=_read(path / SCHEMA, dict),
        environment=_environment(path / ENVIRONMENT),
        begun=str(times[0]["time"]) if times else None,
        ended=str(ends[-1]) if ends and more["finished"] else None,
        notes=tuple(notes),
        against=against,
        reference=reference,
        **more,
    )


def _evaluations(path: Path, notes: list[str]) -> dict[Kind, Evaluated]:
    """The evaluations of the model in the folder; what is of another one is noted, and left out."""
    model = model_digest(path)
    found, of_another, unsure = {}, [], []
    for kind in KINDS:
        file = path / EVALUATION.format(kind)
        content = _read(file, dict)
        if content is None:
            continue
        evaluation, judged = read_evaluation(file, kind, content), content.get("model")
        if None not in (judged, model) and judged != model:
            of_another.append(file.name)
            continue
        found[kind] = evaluation
        if None in (judged, model):
            unsure.append(file.name)
    if of_another:
        notes.append(
            f"Left out, being of another model than the run has now: {', '.join(of_another)}. The "
            "run was resumed since; evaluate it again (fpfl evaluate, or fpfl resume --simulation)."
        )
    if unsure:
        notes.append(
            f"It is not known which model was measured in {', '.join(unsure)}: the file or the "
            "folder does not say. If the run was resumed since, it was the one before."
        )
    return found


def _against(path: Path, notes: list[str]) -> dict[Kind, Against]:
    """The comparisons with the reference in the folder; those of other models are left out."""
    models = {"model": model_digest(path), "reference_model": model_digest(path / REFERENCE)}
    found: dict[Kind, Against] = {}
    for kind in KINDS:
        file = path / AGAINST.format(kind)
        content = _read(file, dict)
        if content is None:
            continue
        if any(content.get(name) != digest for name, digest in models.items()):
            notes.append(
                f"{file.name} was left out: it is about another model than the run, or its "
                "reference, has now. Evaluate both again (fpfl evaluate)."
            )
            continue
        try:
            found[kind] = Against.from_dict(content)
        except ValueError as error:
            raise damaged(file, error) from error
    return found


def _reference(path: Path, ledger: RunLedger | None, notes: list[str]) -> dict[str, Any] | None:
    """What the reference in a folder says of its privacy; None where none ended as the run did."""
    there = path / REFERENCE
    result = _read(there / RESULT, dict)
    if result is None:
        return None
    if is_begun(there) and ledger is not None:
        own = OpenRun(there).ledger
        if not own.finished:
            return None
        if is_cut_short(own, ledger):
            notes.append(CUT_SHORT)
            return None
    return {"privacy": check_privacy(there / RESULT, result.get("privacy"))}


def _environment(file: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _read(file, dict)
    if found is not None:
        read(file, dict[str, Any] | None, found.get("packages"), "packages")  # type: ignore[arg-type]
    return found


def _read(file: Path, kind: type) -> Any:
    """What a JSON file holds; None where it is missing."""
    text = _text(file)
    if text is None:
        return None
    try:
        found = json.loads(text, parse_constant=lambda word: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); put an intact copy in its place") from error
    if not isinstance(found, kind):
        raise ValueError(
            f"{file} holds a {type(found).__name__} where a run writes a {kind.__name__}; put an "
            "intact copy in its place"
        )
    return found


def _text(file: Path) -> str | None:
    if not file.exists():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); put an intact copy in its place"
        ) from error
