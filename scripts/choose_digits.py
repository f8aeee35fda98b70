"""How settings compare on held-out training writers: docs/results/femnist-chosen.

A fifth of the training writers is held out and the others are trained on, with the table's own
noise. No figure here looks at the test digits.
``python scripts/choose_digits.py --data nist-digits.npz --seeds 2``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fpfl.experiments import femnist
from fpfl.experiments.rows import train_row
from fpfl.experiments.runner import RESULTS, about_this_run, write_about, write_kept
from fpfl.experiments.tables import Options, Row, load_table
from fpfl.training.run import evaluate_model

OUT = Path(__file__).parents[1] / "docs" / "results" / "femnist-chosen"
HELD = 0.2

ALTERNATIVES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("PFL tuned", ""): [{}, {"samples_bound": 1.5}, {"pace": 1.0}],
    ("FPFL-1G", "loose"): [{}, {"target": 0.04}],
    ("FPFL-1G", "strict"): [{}, {"samples_bound": 1.5}, {"gamma": 0.1}],
}
"""What is set otherwise in each row of the model with oriented gradients."""


def one(job: tuple[Row, dict[str, Any], int, Options]) -> dict[str, Any]:
    """Train one alternative with one seed."""
    row, changes, seed, options = job
    torch.set_num_threads(1)
    people = femnist.training(row, seed, options)
    training, held = people.split(HELD, seed=seed)
    constraint = femnist.constraint(row)
    run = train_row(replace(row, **changes), training, constraint, seed, options)
    found = {
        name: evaluate_model(run.model, data, constraint=constraint, bootstrap=0)
        for name, data in (("held_out", held), ("train", training))
    }
    return {
        "data": femnist.title(options), "model": row.model, "algorithm": row.algorithm,
        "variant": row.variant, "changes": changes, "seed": seed,
        **{f"{name}_accuracy": each.accuracy for name, each in found.items()},
        **{f"{name}_gap": each.gaps["constraint"].value for name, each in found.items()},
        **{
            f"{name}_chalk": next(
                d.value for d in each.gaps["constraint"].differences if "chalk" in d.group
            )
            for name, each in found.items()
        },
    }  # fmt: skip


def main() -> None:
    """Run all alternatives and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--model", default="oriented")
    given = parser.parse_args()
    options = Options(data=given.data, order="seeded")
    start = time.perf_counter()
    rows = {(row.algorithm, row.variant): row for row in load_table("femnist")
            if (row.model, row.cohort) == (given.model, 100)}  # fmt: skip
    jobs = [(rows[key], changes, seed, options)
            for key, alternatives in ALTERNATIVES.items()
            for changes in alternatives for seed in range(given.seeds)]  # fmt: skip
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(one, jobs))
    command = shlex.join(["python", "scripts/choose_digits.py", *sys.argv[1:]])
    write_kept(OUT, RESULTS, found)
    write_about(OUT, about_this_run(command, time.perf_counter() - start))


if __name__ == "__main__":
    main()
