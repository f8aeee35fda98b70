"""The folder of a sweep: what was asked for, and every run that is finished, each of them whole.

sweep.json                     the settings of all runs, what they are judged by
fingerprints.json              of the data and the initial models: confidential
about.json                     hardware, versions, dates, seconds, what was charged, a session each
runs/0000/                     a finished run (`fpfl.Run.save`), its held-out evaluation, its row
results.json table.md          all finished runs, and the choice; for programs and for people
picture.png README.md          held-out accuracy against the gap; what this folder is

A run's folder is written under another name and then renamed: it is there in full or not at all,
whatever ends the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from fpfl.data.inputs import Scaling, load_model
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import Evaluation
from fpfl.privacy.statement import PrivacyStatement
from fpfl.runs.fingerprints import data_fingerprint, weights_fingerprint
from fpfl.runs.folder import EVALUATION, HISTORY, MODEL, RESULT, as_json
from fpfl.store.files import BusyError, explained, flock, write_folder, write_whole
from fpfl.store.typed import read_json
from fpfl.sweeps.asked import SIMULATION, Asked, Population, digest
from fpfl.sweeps.choice import LOOKED
from fpfl.sweeps.table import Row
from fpfl.training.run import Run

FORMAT = 1
SWEEP, FINGERPRINTS, ABOUT, README = "sweep.json", "fingerprints.json", "about.json", "README.md"
RESULTS, TABLE, PICTURE, RUNS, ROW = "results.json", "table.md", "picture.png", "runs", "row.json"
HELD_OUT = EVALUATION.format("held-out")
_LOCK = ".lock"
_NAMED = 3

Order = dict[str, Any]
"""What was asked for, as plain values."""


def order_of(
    runs: Sequence[Asked], judge: Mapping[str, Any] | None, held_out: Any, *, charged: bool
) -> Order:
    """What a sweep is asked for; two sweeps with the same order and data are the same."""
    return {
        "format": FORMAT,
        "note": SIMULATION,
        "held_out": held_out,
        "judged_by": judge,
        "charged": charged,
        "runs": [{"settings": run.settings, "all": run.plain} for run in runs],
    }


def fingerprints(runs: Sequence[Asked], people: Mapping[str, Population]) -> dict[str, str]:
    """Digests of the data and of the initial models, by name."""
    found = {}
    for name, part in people.items():
        found[f"training users of {name!r}"] = data_fingerprint(part.training)
        if part.held_out is not None:
            found[f"held-out users of {name!r}"] = data_fingerprint(part.held_out)
    seen: dict[int, str] = {}
    for run in runs:
        model = run.make()
        if id(model) not in seen:
            seen[id(model)] = weights_fingerprint(model)
        found[f"model {run.model!r} of seed {run.seed}"] = seen[id(model)]
    return found


class SweepFolder:
    """The folder of a sweep, held by one process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, order: Order, prints: Mapping[str, str], *, resume: bool) -> list[int]:
        """Make the folder or go on with the one that is there; the numbers of finished runs."""
        if resume and not (self.path / SWEEP).is_file():
            raise ValueError(
                f"{self.path} has no sweep to go on with (no {SWEEP}); leave resume out"
            )
        if resume:
            self._check(order, prints)
            return self.finished()
        if self.path.exists() and any(each.name != _LOCK for each in self.path.iterdir()):
            there = (self.path / SWEEP).is_file()
            what = "go on with it (resume=True, --resume), or name" if there else "name"
            raise ValueError(
                f"{self.path} {'has a sweep already' if there else 'is not empty'}; {what} a new "
                "folder"
            )
        with explained(self.path, "Nothing was trained; name a folder that can be written to"):
            (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        # Whoever knows all users but one could try out that one's data against a digest.
        write_whole(self.path / FINGERPRINTS, as_json(dict(prints)), mode=0o600)
        write_whole(self.path / README, _readme(order).encode())
        write_whole(self.path / SWEEP, as_json(order))  # the last: where it is, the others are
        return []

    @contextmanager
    def held(self) -> Iterator[list[int]]:
        """Hold the folder, alone, and clear what a crash left; yields who is finished."""
        path = self.path / _LOCK
        with explained(path, "Nothing was trained; name a folder that can be written to"):
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                flock(lock, path, "LOCK_EX", "LOCK_NB")
            except BusyError as error:
                raise ValueError(
                    f"another process is working on the sweep in {self.path}; wait for it, or name "
                    "another folder"
                ) from error
            for place in (self.path / RUNS).glob(".*.part"):
                shutil.rmtree(place)
            yield self.finished()
        finally:
            os.close(lock)

    def finished(self) -> list[int]:
        """The numbers of the runs that are finished."""
        places = (self.path / RUNS).iterdir()
        return sorted(int(place.name) for place in places if place.name.isdigit())

    def keep(self, asked: Asked, run: Run, held_out: Evaluation | None, row: Row) -> None:
        """Write a finished run, whole or not at all."""
        content = run.files()
        if held_out is not None:
            evaluation = held_out.as_dict() | {
                "on": "held-out users",
                "mark": f"simulation only: {LOOKED}",
                "model": hashlib.sha256(content[MODEL]).hexdigest(),
            }
            content[HELD_OUT] = as_json(evaluation)
        about = {"note": SIMULATION, "digest": digest(asked.plain), "settings": asked.settings}
        content[ROW] = as_json(about | {"row": row})
        write_folder(self._of(asked.number), content)

    def row(self, asked: Asked) -> Row:
        """The row of a finished run."""
        path = self._of(asked.number) / ROW
        found = read_json(path, dict[str, Any])
        if found.get("digest") != digest(asked.plain) or not isinstance(found.get("row"), dict):
            raise ValueError(
                f"{path} is not what run {asked.number} of this sweep writes; remove the folder "
                f"{path.parent} to have that run trained again"
            )
        row: Row = found["row"]
        return row

    def run(self, asked: Asked) -> tuple[Run, Evaluation | None]:
        """Read a finished run."""
        from safetensors.torch import load_file

        place = self._of(asked.number)
        model = load_model(deepcopy(asked.make()), load_file(str(place / MODEL)))
        about = read_json(place / RESULT, dict[str, Any])
        evaluation = None
        if (place / HELD_OUT).is_file():
            values = read_json(place / HELD_OUT, dict[str, Any])
            evaluation = Evaluation.from_dict(values)
        constraint: Constraint | None = asked.keywords.get("constraint")
        privacy = about["privacy"]
        run = Run(
            model=model.eval(),
            history=json.loads((place / HISTORY).read_text(encoding="utf-8")),
            privacy=None if privacy is None else PrivacyStatement.from_dict(privacy),
            selected=about["selected"],
            constraint=constraint,
            stopped=about["stopped"],
            warnings=tuple(about["warnings"]),
            settings=about["settings"],
            scaling=Scaling.from_dict(about["scaling"]) if "scaling" in about else None,
        )
        return run, evaluation

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the folder whole."""
        write_whole(self.path / name, content)

    def sessions(self) -> list[dict[str, Any]]:
        """How the runs were made so far: one entry a session."""
        path = self.path / ABOUT
        return list(read_json(path, dict[str, Any])["sessions"]) if path.is_file() else []

    def _of(self, number: int) -> Path:
        return self.path / RUNS / f"{number:04d}"

    def _check(self, order: Order, prints: Mapping[str, str]) -> None:
        kept = read_json(self.path / SWEEP, dict[str, Any])
        if kept.get("format", 0) > FORMAT:
            raise ValueError(
                f"{self.path} was written by a newer fpfl (format {kept['format']}); upgrade fpfl"
            )
        differ = _differences(kept, json.loads(as_json(order)))
        if differ:
            shown = "; ".join(differ[:_NAMED])
            more = f"; and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            raise ValueError(
                f"{self.path} is another sweep: {shown}{more}. Ask for what was asked for, or name "
                "a new folder"
            )
        before = read_json(self.path / FINGERPRINTS, dict[str, str])
        others = [name for name in {**before, **prints} if before.get(name) != prints.get(name)]
        if others:
            raise ValueError(
                f"{self.path} was begun with other data: the {', the '.join(others[:_NAMED])} "
                f"{'is' if len(others) == 1 else 'are'} not what it was. Give the same, or name a "
                "new folder"
            )


def _differences(kept: Any, asked: Any, where: str = "") -> list[str]:
    """How two orders differ, in words."""
    if isinstance(kept, dict) and isinstance(asked, dict):
        found = []
        for name in dict.fromkeys([*kept, *asked]):
            if name in ("note", "settings"):
                continue
            inner = f"{where}.{name}" if where else str(name)
            inner = inner.replace(".all.", ": ", 1) if ".all." in inner else inner
            found += _differences(kept.get(name), asked.get(name), inner)
        return found
    if isinstance(kept, list) and isinstance(asked, list):
        if len(kept) != len(asked):
            return [f"{where} were {len(kept)} and are {len(asked)}"]
        found = []
        for number, (a, b) in enumerate(zip(kept, asked, strict=True)):
            found += _differences(
                a, b, f"run {number}" if where == "runs" else f"{where}[{number}]"
            )
        return found
    return [] if kept == asked else [f"{where} was {kept!r} and is {asked!r}"]


def _readme(order: Order) -> str:
    runs = len(order["runs"])
    return (
        f"# A sweep of {runs} {'run' if runs == 1 else 'runs'}\n\n"
        f"{SIMULATION[0].upper()}{SIMULATION[1:]}: `fpfl train`, or `fpfl.train`.\n\n"
        f"{LOOKED} No figure here is of a test set.\n\n"
        "- `table.md`: every finished run, and which setting is chosen; `results.json`: the same "
        "for programs.\n"
        "- `picture.png`: held-out accuracy against the gap.\n"
        "- `runs/`: a folder a run, as `fpfl.Run.save` writes it, with its held-out evaluation.\n"
        "- `sweep.json`: what was asked for. `about.json`: on which machine, when, what was "
        "charged.\n"
        "- `fingerprints.json`: digests of the data. Keep it to yourself: whoever knows all users "
        "but one could try out that one's data against them.\n"
    )
