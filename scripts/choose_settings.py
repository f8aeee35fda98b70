"""How FPFL-1G's settings compare on held-out training users: docs/results/adult-chosen.

A quarter of the training users is held out, the others are trained on with the noise of the whole
population's plan, scaled so that the noise over the cohort is what it would be there. No figure
here looks at the test set. ``python scripts/choose_settings.py --seeds 3``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fpfl
from fpfl.experiments.runner import RESULTS, about_this_run, write_about, write_kept
from fpfl.experiments.tables import NETWORKS
from fpfl.privacy.accounting import calibrate_poisson
from fpfl.training.defaults import suggested_clipping, suggested_learning_rate

OUT = Path(__file__).parents[1] / "docs" / "results" / "adult-chosen"
USERS, DELTA = 16_280, 5e-5

ALTERNATIVES: dict[str, dict[str, Any]] = {
    "as suggested": {},
    "C = 2": {"bound": 2.0},
    "C = 4": {"bound": 4.0},
    "C_s = 2": {"counts": 2.0},
    "C_s = 3": {"counts": 3.0},
    "10% for counts": {"counts_share": 0.10},
    "40% for counts": {"counts_share": 0.40},
    "η = 0.1": {"learning_rate": 0.1},
    "η = 0.4": {"learning_rate": 0.4},
    "T = 500": {"rounds": 500},
    "T = 2,000": {"rounds": 2000},
    "γ = 0.03": {"rate": 0.03},
    "c = 1": {"damping": 1.0},
    "c = 4": {"damping": 4.0},
    "b = 0.9": {"memory": 0.9},
    "b = 0.98": {"memory": 0.98},
    "α = 0.01": {"tolerance": 0.01},
}
"""What is set otherwise, one at a time."""
PLACES = [(200, 2.0), (200, 0.5)]


def one(job: tuple[str, int, float, str, int, float]) -> dict[str, Any]:
    """Train one alternative with one seed; the gap is of the users it was trained on."""
    name, cohort, epsilon, model, seed, noise = job
    torch.set_num_threads(1)
    changes = dict(ALTERNATIVES[name])
    rounds = changes.pop("rounds", 1000)
    people = fpfl.load_adult("train", normalise="paper").partition(mean=2, seed=seed)
    training, held = people.split(0.25, seed=seed)
    clip = suggested_clipping(people.schema)
    clip = replace(clip, **{k: changes.pop(k) for k in list(changes) if hasattr(clip, k)})
    rate = changes.pop("learning_rate", None)
    rate = rate or suggested_learning_rate(
        clip, noise, cohort, rounds, people.schema.samples_per_user
    )
    m = round(cohort * training.population / USERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fpfl.train(
            fpfl.mlp(people.schema.shape[0], NETWORKS[model], seed=seed),
            training,
            cohort=m,
            rounds=rounds,
            constraint=fpfl.fnr_parity("sex"),
            method=fpfl.OneGradient(**changes),
            privacy=fpfl.Privacy(noise_multiplier=noise * m / cohort, delta=DELTA, clip=clip),
            learning_rate=rate,
            seed=seed,
            noise_seed=seed,
        )
    return {
        "alternative": name, "cohort": cohort, "epsilon": epsilon, "model": model, "seed": seed,
        "accuracy": run.evaluate(held, bootstrap=0).accuracy,
        "train_gap": run.evaluate(training, bootstrap=0).gaps["fnr"].value,
    }  # fmt: skip


def main() -> None:
    """Run all alternatives and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    start = time.perf_counter()
    jobs = []
    for name, changes in ALTERNATIVES.items():
        for cohort, epsilon in PLACES:
            rounds = changes.get("rounds", 1000)
            noise = calibrate_poisson(epsilon, cohort / USERS, rounds, DELTA, "zero-out")
            jobs += [(name, cohort, epsilon, model, seed, noise)
                     for model in NETWORKS for seed in range(seeds)]  # fmt: skip
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(one, jobs))
    command = shlex.join(["python", "scripts/choose_settings.py", *sys.argv[1:]])
    write_kept(OUT, RESULTS, found)
    write_about(OUT, about_this_run(command, time.perf_counter() - start))


if __name__ == "__main__":
    main()
