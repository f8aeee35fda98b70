"""The run folder: where a run is written down, and what it says about its run.

run.json schema.json environment.json    what was begun
fingerprints.json config.toml origin.json    of the data, and with seeds: confidential
table-schema.toml                        a table's schema, where the config has it in a file
ledger.jsonl                             every charge, before what it pays for is used
checkpoint-*.safetensors totals-*.bin    the server's state, and the totals released since
cohorts-*.bin withdrawals.txt            who took part (with a cap), who withdrew: confidential
model.safetensors history.json result.json privacy.txt    the finished run
evaluation-{test,training,private}.json  what was measured of it
reference/                               a run of its own: the same without the constraint
against-{test,training,private}.json     who is better and who is worse off than by it

No other module has these names. A folder is opened once (`OpenRun`): ``run.json`` is read, the
ledger verified, and everybody on the way is handed what was found.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fpfl.privacy.filter import Terms
from fpfl.runs.ledger import RunLedger
from fpfl.store.chain import ChainError
from fpfl.store.typed import TypedError, read_json, typed

FORMAT = 1
ABOUT, SCHEMA, ENVIRONMENT = "run.json", "schema.json", "environment.json"
FINGERPRINTS, CONFIG, ORIGIN = "fingerprints.json", "config.toml", "origin.json"
TABLE_SCHEMA = "table-schema.toml"
LEDGER = "ledger.jsonl"
WITHDRAWALS = "withdrawals.txt"
MODEL, HISTORY, RESULT, PRIVACY = (
    "model.safetensors",
    "history.json",
    "result.json",
    "privacy.txt",
)
EVALUATION = "evaluation-{}.json"
"""With "test", "training" or "private"."""
AGAINST = "against-{}.json"
"""The same, against the run's reference."""
REFERENCE = "reference"
EXCLUDED = "excluded.json"
"""Of a federation: the nodes that broke its protocol, which take no part any more."""
CHECKPOINTS = "checkpoint-*.safetensors"
NUMBERED = re.compile(
    r"(?P<kind>checkpoint|totals|cohorts)-((?P<session>[0-9]{4,})-)?(?P<round>[0-9]{8,})"
    r"\.(safetensors|bin)"
)
"""Checkpoints by their round, logs by the session that wrote them and their first round."""


_RECORDS: dict[str, dict[str, Any]] = {
    "open": {"run": str, "simulation": bool, "population": bool},
    "place": {"folder": list[int]},
    "resume": {"settings": dict[str, Any]},
    "charge": {"round": int},
    "change": {"rounds": int},
    "finish": {"rounds": int},
    "evaluation": {"epsilon": float, "delta": float},
}
"""What is asked of a ledger's records after they were read."""


@dataclass(frozen=True)
class _Asked:
    """What is asked of plain settings later."""

    privacy: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    population: int


@dataclass(frozen=True)
class Manifest:
    """What ``run.json`` says: the run's name, what it was begun with, and who else is charged.

    ``plan`` is the privacy plan (since 0.2; before, it follows from the settings).
    """

    format: int
    run: str
    simulation: bool
    strict: bool
    settings: dict[str, Any]
    population_ledger: str | None
    plan: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)


@dataclass(frozen=True)
class Origin:
    """Where a config was, and the seed of its made-up users.

    ``reference``: the same is to be trained without the constraint, in a folder in the run's.
    ``unconstrained``: this run is such a reference, and its config the other run's.
    """

    folder: str
    partition_seed: int
    reference: bool = False
    unconstrained: bool = False


class OpenRun:
    """A run folder that was opened: ``run.json`` is read and the ledger verified, once.

    Attributes
    ----------
    path
        The folder.
    ledger
        Its ledger, verified, and not held by anybody: `RunLedger.hold` takes it for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = _looked_at(path)

    @cached_property
    def manifest(self) -> Manifest:
        """What the run was begun with."""
        return read_manifest(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run went on with last."""
        return self.ledger.settings or self.manifest.settings

    @property
    def seeded_cohorts(self) -> bool:
        """Whether any part of the run drew its cohorts from a seed."""
        resumed = [r["settings"] for r in self.ledger.chain.records if r["kind"] == "resume"]
        return any(part["seeded_cohorts"] for part in (self.manifest.settings, *resumed))

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of what the run was begun with.

        They are in a file of their own, for its owner alone: whoever knows all users but one could
        try out that one's data against a digest.
        """
        return read_json(self.path / FINGERPRINTS, dict[str, str])

    @cached_property
    def origin(self) -> Origin:
        """Where the run's config was."""
        return read_origin(self.path)

    def require_finished(self) -> None:
        """Refuse a run that has not ended, or went on since."""
        if not self.ledger.finished:
            raise ValueError(f"{self.path} is not finished: fpfl resume {self.path}")


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written down, and how it is resumed.

    Parameters
    ----------
    path
        The folder; for a new run it must not be there, or be empty.
    resume
        Go on with the run in the folder.
    ledger
        A population ledger that the run's charges go to as well (`fpfl.PopulationLedger`).
    checkpoint_every
        Rounds between two checkpoints. What was released since the last one is logged, so nothing
        is lost between them.
    moved
        When resuming: the folder was moved or restored, and no other copy of it will be resumed.
    files
        Further texts to write into a new folder, by name.
    """

    path: Path
    resume: bool = False
    ledger: Path | None = None
    checkpoint_every: int = 200
    moved: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    _open: list[OpenRun] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.ledger is not None:
            object.__setattr__(self, "ledger", Path(self.ledger))
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every}; it must be at least 1")

    @property
    def run(self) -> OpenRun:
        """The run in the folder; opened when it is first asked for, and once."""
        if not self._open:
            self._open.append(OpenRun(self.path))
        return self._open[0]

    def once(self) -> RunFolder:
        """The same for one training: what is opened for it is not kept here."""
        return replace(self, _open=[*self._open])

    def with_files(self, every: int, files: Mapping[str, str]) -> RunFolder:
        """The same opened folder, with checkpoints every so many rounds and texts to write."""
        return replace(self, checkpoint_every=every, files=files)


def checkpoint_name(round: int) -> str:
    """What a round's checkpoint is called."""
    return f"checkpoint-{round:08d}.safetensors"


FIRST_CHECKPOINT = checkpoint_name(0)


def log_name(kind: str, session: int, round: int) -> str:
    """What a log of totals or cohorts is called."""
    return f"{kind}-{session:04d}-{round:08d}.bin"


def as_run_folder(folder: str | Path | RunFolder) -> RunFolder:
    """A folder with its settings, where just its path was given."""
    return folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))


def is_begun(path: Path) -> bool:
    """Whether there is a run in a folder."""
    return (path / LEDGER).is_file()


def _check_begun(path: Path) -> None:
    if not is_begun(path):
        raise ValueError(f"{path} has no run that was begun (no {LEDGER}); start one: fpfl train")


def read_manifest(path: Path) -> Manifest:
    """What a run folder says about its run."""
    _check_begun(path)
    file = path / ABOUT
    content = read_json(file, dict[str, Any])
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer fpfl (format {version}; this one reads up to {FORMAT}):"
            " upgrade fpfl to resume it"
        )
    try:
        manifest = typed(Manifest, content, ABOUT)
        _ = typed(_Asked, manifest.settings, "settings")
    except TypedError as error:
        raise ValueError(
            f"{file} is not what a run writes ({error}); put an intact copy in its place"
        ) from error
    return manifest


def _looked_at(path: Path) -> RunLedger:
    """The ledger in a run folder as it is now; one that is in order and not a run's is refused."""
    _check_begun(path)
    try:
        ledger = RunLedger.look(path / LEDGER)
        # Every record but the last is vouched for by the one after it.
        for record in ledger.chain.records:
            for name, kind in _RECORDS.get(record["kind"], {}).items():
                _ = typed(kind, record[name], name)
            if record["kind"] == "resume":
                _ = typed(_Asked, record["settings"], "settings")
        if ledger.terms is not None:
            _ = typed(Terms, ledger.terms.as_dict(), "terms")
    except ChainError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ChainError(
            f"{path / LEDGER} is not the ledger of a run ({error!r}); put an intact copy in its "
            "place"
        ) from error
    return ledger


def read_origin(path: Path) -> Origin:
    """Where a run's config was."""
    try:
        return read_json(path / ORIGIN, Origin)
    except ValueError as error:
        raise ValueError(
            f"{path} was not begun by fpfl train ({error}); resume it from Python: "
            "fpfl.train(..., folder=fpfl.RunFolder(path, resume=True))"
        ) from error


def reference_of(path: Path) -> OpenRun | None:
    """The reference in a run's folder, opened; None where none was begun."""
    there = path / REFERENCE
    return OpenRun(there) if is_begun(there) else None


def is_cut_short(reference: RunLedger, run: RunLedger) -> bool:
    """Whether a reference ended long before its run did: then it is no model to compare with.

    A crash may lose a few rounds; a budget that is spent, or a divergence, most of them.
    """
    done = [
        next((r["rounds"] for r in reversed(each.chain.records) if r["kind"] == "finish"), 0)
        for each in (reference, run)
    ]
    return bool(done[0] < 0.9 * done[1])


CUT_SHORT = (
    "The reference ended long before the run did, and is not compared with it: what its model "
    "lacks may be rounds. Train one with room in the budget for both."
)


def model_digest(path: Path) -> str | None:
    """SHA-256 of the model file in a run's folder; None where there is none.

    An evaluation is kept with it: a run that is resumed gets another model.
    """
    try:
        with (path / MODEL).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def as_json(values: Any) -> bytes:
    """Plain values as the text of a file."""
    return (json.dumps(values, indent=1) + "\n").encode()


def read_excluded(folder: Path) -> tuple[str, ...]:
    """The nodes that a federation leaves out, by name; none where there is no such file."""
    path = folder / EXCLUDED
    if not path.exists():
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(
            f"{path} is damaged: expected a list of the names of nodes that are left out. Write it "
            "anew, or remove it to let all of them take part"
        )
    return tuple(found)
