"""Trainings side by side against the same trainings one after the other.

``python -m benchmarks.sweeps``: 64 private trainings of Adult by FPFL-1G, 1,000 rounds, two worker
processes, side by side and one after the other in each worker. On a GPU (``--device cuda``, with
torch and numpy alone): 1,000 such trainings in ``--jobs`` processes, and 16 of the CNN at m = 100
in one, by turns with one after the other. Results are added to benchmarks/results/sweeps.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fpfl
from benchmarks.workloads import cnn, images
from fpfl.privacy.settings import Privacy
from fpfl.runs.about import about_this_run
from fpfl.sweeps.batch import Job, trained
from fpfl.training.defaults import suggested_clipping

RESULTS = Path(__file__).parent / "results" / "sweeps.json"


def adult_jobs(runs: Sequence[int], rounds: int, device: str) -> list[Job]:
    """Private trainings that differ in seeds, noise, learning rate, bounds and multipliers."""
    people = fpfl.load_adult("train", normalise="paper").partition(mean=2, seed=0)
    clip = suggested_clipping(people.schema)
    constraint = fpfl.fnr_parity("sex")
    return [
        Job(
            fpfl.mlp(people.schema.shape[0], (10,), seed=run),
            people,
            {
                "cohort": 200,
                "rounds": rounds,
                "constraint": constraint,
                "method": fpfl.OneGradient(damping=1.0 + run % 4),
                "privacy": Privacy(
                    noise_multiplier=0.6 + 0.1 * (run % 5), delta=5e-5, clip=clip
                ),
                "learning_rate": 0.1 + 0.05 * (run % 3),
                "seed": run,
                "noise_seed": run,
                "device": device,
            },
        )
        for run in runs
    ]  # fmt: skip


def cnn_jobs(runs: Sequence[int], rounds: int, device: str) -> list[Job]:
    """Private trainings of the CNN by FPFL-1G at m = 100, 20 images a user."""
    people = images(np.full(1000, 20))
    constraint = fpfl.accuracy_parity()
    clip = fpfl.Clipping(1.0, counts=20.0)
    return [
        Job(
            cnn(),
            people,
            {
                "cohort": 100,
                "rounds": rounds,
                "constraint": constraint,
                "method": fpfl.OneGradient(),
                "privacy": Privacy(
                    noise_multiplier=0.5, delta=1e-4, clip=clip, convention="replace-one"
                ),
                "learning_rate": 0.05 + 0.01 * run,
                "seed": run,
                "noise_seed": run,
                "device": device,
                "precision": "tf32" if device != "cpu" else "float32",
            },
        )
        for run in runs
    ]


JOBS: dict[str, Callable[[Sequence[int], int, str], list[Job]]] = {
    "adult": adult_jobs,
    "cnn": cnn_jobs,
}


def share(
    what: str, runs: Sequence[int], rounds: int, device: str, apart: bool, ready: Any, out: Any
) -> None:
    """Train a share of the runs; says when it is ready, and waits until all are."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs = JOBS[what](runs, rounds, device)
    # What happens once in a process (looking at kernels, noise tables) is not what is compared.
    list(trained(JOBS[what](runs[:2], 2, device)))
    if device != "cpu":
        torch.cuda.synchronize()
    ready.wait()
    start = time.perf_counter()
    if apart:
        found = [fpfl.train(job.model, job.data, **job.settings) for job in jobs]
    else:
        found = [run for _, run in trained(jobs)]
    assert all(len(run.history) == rounds for run in found)
    out.put((start, time.perf_counter()))


def measured(
    what: str, runs: int, rounds: int, device: str, workers: int, *, apart: bool
) -> dict[str, Any]:
    """Seconds from when all workers are ready to when the last one is finished."""
    context = multiprocessing.get_context("spawn")
    ready, out = context.Barrier(workers), context.Queue()
    dealt = [range(k, runs, workers) for k in range(workers)]
    started = time.perf_counter()
    processes = [
        context.Process(target=share, args=(what, list(mine), rounds, device, apart, ready, out))
        for mine in dealt
    ]
    for process in processes:
        process.start()
    times: list[tuple[float, float]] = []
    while len(times) < workers:
        try:
            times.append(out.get(timeout=1.0))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                ready.abort()
                raise RuntimeError("a worker ended; its error is above") from None
    for process in processes:
        process.join()
    seconds = max(end for _, end in times) - min(start for start, _ in times)
    whole = time.perf_counter() - started
    about = {"runs": runs, "rounds": rounds, "workers": workers, "side by side": not apart}
    return about | {"seconds": round(seconds, 2), "with starting": round(whole, 2)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="adult", choices=JOBS)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--apart", type=int, help="runs one after the other; default: as many")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.sweeps", *sys.argv[1:]])
    turns = []
    for _ in range(args.turns):
        turn = [measured(args.what, args.runs, args.rounds, args.device, args.jobs, apart=False)]
        print(turn[-1], flush=True)
        alone = args.runs if args.apart is None else args.apart
        if alone:
            turn.append(measured(args.what, alone, args.rounds, args.device, args.jobs, apart=True))
            print(turn[-1], flush=True)
        turns.append(turn)
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    about = {k: v for k, v in about_this_run(command, None).items() if k != "wall_seconds"}
    each = [[t["seconds"] / t["runs"] for t in turn] for turn in turns]
    ratios = sorted(turn[1] / turn[0] for turn in each if len(turn) > 1)
    found[f"{args.what}, {args.device}"] = about | {
        "turns": turns,
        "ratio": round(ratios[len(ratios) // 2], 2) if ratios else None,
    }
    args.out.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    print(json.dumps({"ratios": ratios}))


if __name__ == "__main__":
    main()
