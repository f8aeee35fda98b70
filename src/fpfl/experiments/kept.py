"""What a folder has of a table: finished runs, so that a table can be gone on with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fpfl.experiments.options import Options
from fpfl.experiments.rows import TASKS, Result, row_name
from fpfl.experiments.tables import Row
from fpfl.store.files import write_whole

PARTIAL, RESULTS, ABOUT = "partial.json", "results.json", "about.json"


def run_key(row: Row, seed: int, options: Options) -> str:
    """What a run is one of: its row, seed and settings.

    Where and how precisely it was computed does not count; its result says it.
    """
    said = asdict(row) | {
        "seed": seed,
        "data": (TASKS[row.task].title(options), TASKS[row.task].content(options)),
        "convention": options.convention,
        "noise": options.noise_multiplier(row_name(row, options)) if row.private else None,
    }
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_kept(folder: Path) -> list[Result]:
    """The runs of a folder: of a table that was cut off, or of one that was finished."""
    for name in (PARTIAL, RESULTS):
        path = folder / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            keys = [result["run"] for result in found]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be gone on with ({error!r}); name another folder with --out"
            ) from error
        if len(set(keys)) != len(keys):
            raise ValueError(f"{path} has a run twice; name another folder with --out")
        return list(found)
    return []


def write_kept(folder: Path, name: str, results: Sequence[Result]) -> None:
    """Keep runs in a file that is whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, json_text(results).encode())


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Say how the folder's runs were made; from the beginning, in case a call is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ABOUT, f"{json.dumps(about, indent=1)}\n".encode())


def read_about(folder: Path) -> list[dict[str, Any]]:
    """Under what the runs that are kept were made: the latest call first.

    ``wall_seconds`` is None for a call that was cut off.
    """
    path = folder / ABOUT
    if not path.exists():
        return []
    about = json.loads(path.read_text(encoding="utf-8"))
    return [{k: v for k, v in about.items() if k != "earlier"}, *about.get("earlier", [])]


def json_text(results: Sequence[Result]) -> str:
    """The results as JSON knows them: None where a figure is not a number."""
    return json.dumps([_plain(result) for result in results], indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
