"""The run folder: where a run is written down, and what it says about its run.

run.json schema.json environment.json    what was begun
fingerprints.json config.toml            of the data, and with seeds: confidential
table-schema.toml                        a table's schema, where the config has it in a file
ledger.jsonl                             every charge, before what it pays for is used
checkpoint-*.safetensors totals-*.bin    the server's state, and the totals released since
cohorts-*.bin withdrawals.txt            who took part (with a cap), who withdrew: confidential
model.safetensors history.json result.json privacy.txt    the finished run
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fpfl.runs.ledger import RunLedger
from fpfl.store.chain import ChainError

FORMAT = 1
LEDGER = "ledger.jsonl"
MODEL = "model.safetensors"
FINGERPRINTS = "fingerprints.json"
_ABOUT = {
    "run": str,
    "simulation": bool,
    "strict": bool,
    "settings": dict,
    "population_ledger": str | None,
}
"""What ``run.json`` has besides its format."""
_RECORDS: dict[str, dict[str, Any]] = {
    "open": {"run": str, "simulation": bool, "population": bool},
    "place": {"folder": list},
    "resume": {"settings": dict},
    "charge": {"round": int},
    "change": {"rounds": int},
    "finish": {"rounds": int},
    "evaluation": {"epsilon": int | float, "delta": int | float},
}
"""What is asked of a ledger's records after they were read."""
_TERMS: dict[str, Any] = {
    "rounds": int,
    "delta": int | float,
    "budget": int | float | None,
    "order": int | None,
    "cap": int | None,
}


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.ledger is not None:
            object.__setattr__(self, "ledger", Path(self.ledger))
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every}; it must be at least 1")


def as_run_folder(folder: str | Path | RunFolder) -> RunFolder:
    """A folder with its settings, where just its path was given."""
    return folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))


def read_about(path: Path) -> dict[str, Any]:
    """What a run folder says about its run."""
    _check_begun(path)
    file = path / "run.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        version = about["format"]
        if type(version) is not int:
            raise TypeError(f"its format is {version!r}")
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what a run writes ({error!r}); put an intact copy in its place"
        ) from error
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer fpfl (format {version}; this one reads up to {FORMAT}):"
            " upgrade fpfl to resume it"
        )
    wrong = [name for name, kind in _ABOUT.items() if not isinstance(about.get(name, ...), kind)]
    if not wrong and not _good_settings(about["settings"]):
        wrong = ["settings"]
    if wrong:
        raise ValueError(
            f"{file} lacks {wrong}, or has something else in their places; put an intact copy in "
            "its place"
        )
    return dict(about)


def _check_begun(path: Path) -> None:
    if not (path / LEDGER).is_file():
        raise ValueError(f"{path} has no run that was begun (no {LEDGER}); start one: fpfl train")


def look(path: Path) -> RunLedger:
    """The ledger in a run folder as it is now; one that is in order and not a run's is refused."""
    _check_begun(path)
    try:
        with RunLedger.look(path / LEDGER) as ledger:
            # Every record but the last is vouched for by the one after it.
            for record in ledger.chain.records:
                _check_kinds(record, _RECORDS.get(record["kind"], {}))
                if record["kind"] == "resume" and not _good_settings(record["settings"]):
                    raise TypeError(f"the settings {record['settings']!r}")
            if ledger.terms is not None:
                _check_kinds(ledger.terms.as_dict(), _TERMS)
            return ledger
    except ChainError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ChainError(
            f"{path / LEDGER} is not the ledger of a run ({error!r}); put an intact copy in its "
            "place"
        ) from error


def _check_kinds(record: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(record[name], kind) or (kind is int and type(record[name]) is bool):
            raise TypeError(f"{name} is {record[name]!r}")


def _good_settings(settings: Mapping[str, Any]) -> bool:
    """Whether there is in plain settings what is asked of them later."""
    kinds = {"privacy": dict | None, "optimizer": dict | None, "population": int}
    return all(isinstance(settings.get(name, ...), kind) for name, kind in kinds.items())


def read_fingerprints(path: Path) -> dict[str, str]:
    """The fingerprints of what a run was begun with.

    They are in a file of their own, for its owner alone: whoever knows all users but one could try
    out that one's data against a digest.
    """
    file = path / FINGERPRINTS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it holds {found!r}")
        return {str(name): str(digest) for name, digest in found.items()}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what a run writes ({error!r}); put an intact copy in its place"
        ) from error


def model_digest(path: Path) -> str | None:
    """SHA-256 of the model file in a run's folder; None where there is none.

    An evaluation is kept with it: a run that is resumed gets another model.
    """
    try:
        with (path / MODEL).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def finished(path: Path) -> bool:
    """Whether the run in a folder is finished: it ended, and was not resumed since."""
    return look(path).finished


def as_json(values: Any) -> bytes:
    """Plain values as the text of a file."""
    return (json.dumps(values, indent=1) + "\n").encode()
