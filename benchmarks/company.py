"""The price of users who touch nobody else: seconds a round, against another checkout, by turns.

``python -m benchmarks.company --against ../other`` runs private rounds of Adult and of the digits'
network in this checkout and in the other, one after the other in turns, each in a process of its
own, and writes the ratios of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[1]
CASES = ("adult FPFL-1G m=200", "adult FPFL-1G m=1000", "adult FPFL m=1000", "cnn FPFL-1G m=20")
SKIPPED = 5
"""First rounds that are not counted: kernels and allocators warm up."""


def seconds(case: str) -> float:
    """The median round of one training."""
    import fpfl
    from benchmarks.workloads import cnn, images

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, method, size = case.split()
    cohort = int(size.split("=")[1])
    if kind == "adult":
        data = fpfl.load_adult().partition(mean=2.0, seed=0)
        model = fpfl.mlp(data.schema.shape[0], seed=0)
        constraint, rounds = fpfl.fnr_parity("sex", tolerance=0.02), 60
    else:
        import numpy as np

        data = images(np.full(400, 20))
        model, constraint, rounds = cnn(), fpfl.accuracy_parity("pen"), 12
    times: list[float] = []
    fpfl.train(
        model, data, constraint=constraint,
        method=fpfl.OneGradient() if method == "FPFL-1G" else None,
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.5), cohort=cohort, rounds=rounds,
        learning_rate=0.1, seed=0, callbacks=[lambda _: times.append(time.perf_counter())],
    )  # fmt: skip
    each = [b - a for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return statistics.median(each)


def main() -> None:
    """Measure and write benchmarks/results/company.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "benchmarks/results/company.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(seconds(given.case))
        return
    found = {}
    for case in CASES:
        times: dict[str, list[float]] = {"here": [], "against": []}
        for _ in range(given.turns):
            for name, tree in (("here", HERE), ("against", given.against.resolve())):
                paths = os.pathsep.join([str(tree / "src"), str(HERE)])
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-m", "benchmarks.company", "--case", case],
                    env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                    cwd=HERE, capture_output=True, text=True, check=True,
                )  # fmt: skip
                times[name].append(float(done.stdout.split()[-1]))
        medians = {name: statistics.median(each) for name, each in times.items()}
        found[case] = {
            "seconds": times,
            "ratio": medians["here"] / medians["against"],
        }
        print(f"{case}: {1e3 * medians['here']:.2f} ms, before {1e3 * medians['against']:.2f} ms, "
              f"ratio {found[case]['ratio']:.2f}")  # fmt: skip
    what = {
        "date": date.today().isoformat(),
        "hardware": "2 CPU cores, one thread used",
        "torch": torch.__version__,
        "seed": 0,
        "turns": given.turns,
        "cases": found,
    }
    given.out.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
