"""Whether trainings side by side are the same trainings alone, on a device: prints the differences.

``PYTHONPATH=src python -m benchmarks.sweeps_check cuda``: needs torch and numpy alone.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

import fpfl
from benchmarks.sweeps import JOBS
from fpfl.sweeps.batch import trained


def main() -> None:
    """Compare four runs of each workload."""
    warnings.simplefilter("ignore")
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for what, rounds in (("adult", 20), ("cnn", 3)):
        jobs = JOBS[what](range(4), rounds, device)
        for number, run in trained(jobs):
            alone = fpfl.train(jobs[number].model, jobs[number].data, **jobs[number].settings)
            mine, theirs = (
                torch.cat([p.flatten() for p in each.model.parameters()]) for each in (run, alone)
            )
            print(
                json.dumps(
                    {
                        "what": what,
                        "run": number,
                        "largest difference": float((mine - theirs).abs().max()),
                        "largest parameter": float(theirs.abs().max()),
                        "together": "side by side" in " ".join(run.warnings),
                        "notes": [note[:80] for note in alone.warnings],
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
