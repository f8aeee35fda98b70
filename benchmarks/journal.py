"""What it costs to write a run down: charges synced every round, totals logged, checkpoints.

``python -m benchmarks.journal [FOLDER]``: trains with and without a run folder by turns, private
and unseeded, and writes ``results/journal.json``. The disk is FOLDER's, by default that of the
temporary files; what its sync costs alone is measured beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import COHORT, Kind, constraint, workload
from fpfl import Privacy, RunFolder, train
from fpfl.experiments.runner import about_this_run

ROUNDS: dict[Kind, int] = {"adult": 1000, "cnn": 40}
TURNS = 7
NOTHING, FOLDER = "nothing is kept", "run folder"


def round_time(kind: Kind, folder: RunFolder | None, rounds: int) -> float:
    """Seconds a round of a training, from the end of its first round to the end of its last."""
    data, model = workload(kind)
    ends: list[float] = []
    train(
        model, data, cohort=COHORT[kind], rounds=rounds, constraint=constraint(kind, "paper"),
        privacy=Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-6), learning_rate=1e-3,
        seed=0, selection="last", folder=folder,
        callbacks=[lambda _: ends.append(time.perf_counter())],
    )  # fmt: skip
    return (ends[-1] - ends[0]) / (rounds - 1)


def sync_time(folder: Path) -> float:
    """Seconds that the disk takes to sync one appended line, alone."""
    file = os.open(folder / "line", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        os.write(file, b"x" * 150)
        os.fdatasync(file)
        times.append(time.perf_counter() - start)
    os.close(file)
    return statistics.median(times)


def main() -> None:
    """Measure by turns; print and save."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        root = Path(name)
        for kind, rounds in ROUNDS.items():
            times: dict[str, list[float]] = {NOTHING: [], FOLDER: []}
            round_time(kind, None, max(rounds // 10, 3))  # warm-up
            for turn in range(TURNS):
                folder = RunFolder(root / f"{kind}-{turn}")
                times[NOTHING].append(round_time(kind, None, rounds))
                times[FOLDER].append(round_time(kind, folder, rounds))
            # The ratio of each pair of turns; a busy moment then spoils one of them, not all.
            pairs = [b / a for a, b in zip(times[NOTHING], times[FOLDER], strict=True)]
            row = {
                "workload": kind, "rounds": rounds, "turns": TURNS,
                "milliseconds": {k: 1e3 * statistics.median(v) for k, v in times.items()},
                "ratio": statistics.median(pairs), "ratios": pairs,
            }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
        sync = sync_time(root)
    results = {
        "rows": rows,
        "sync_milliseconds": 1e3 * sync,
        "about": about_this_run("python -m benchmarks.journal", time.perf_counter() - start),
    }
    print(f"one sync: {1e3 * sync:.3f} ms")
    path = Path(__file__).parent / "results" / "journal.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
