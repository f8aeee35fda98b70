"""How FPFL-1G's settings compare on held-out training users: docs/results/adult-chosen.

A quarter of the training users is held out, the others are trained on with the noise of the whole
population's plan, scaled so that the noise over the cohort is what it would be there. No figure
here looks at the test set. ``python scripts/choose_settings.py --seeds 3``.

Trainings of one shape are computed together, in two processes; with ``--one-by-one`` each by
itself, which shows what that saves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fpfl
from fpfl.experiments.fixed import fixed_clipping, fixed_learning_rate
from fpfl.experiments.runner import RESULTS, about_this_run, write_about, write_kept
from fpfl.experiments.tables import NETWORKS
from fpfl.experiments.together import finished, groups_of
from fpfl.privacy.accounting import calibrate_poisson
from fpfl.sweeps.batch import Job

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


@dataclass(frozen=True)
class Trial:
    """One alternative at one place, with one network and seed; ``noise`` is the plan's σ."""

    name: str
    cohort: int
    epsilon: float
    model: str
    seed: int
    noise: float

    @property
    def rounds(self) -> int:
        """T."""
        return int(ALTERNATIVES[self.name].get("rounds", 1000))


@cache
def users(seed: int) -> tuple[fpfl.FederatedDataset, fpfl.FederatedDataset]:
    """Who is trained on, and who is held out; one object for all trials of a seed."""
    people = fpfl.load_adult("train", normalise="paper").partition(mean=2, seed=seed)
    training, held = people.split(0.25, seed=seed)
    return training, held


def job(trial: Trial) -> Job:
    """What is trained."""
    changes = dict(ALTERNATIVES[trial.name])
    rounds = changes.pop("rounds", 1000)
    training, _ = users(trial.seed)
    clip = fixed_clipping(training.schema)
    clip = replace(clip, **{k: changes.pop(k) for k in list(changes) if hasattr(clip, k)})
    rate = changes.pop("learning_rate", None)
    rate = rate or fixed_learning_rate(
        clip, trial.noise, trial.cohort, rounds, training.schema.samples_per_user
    )
    m = round(trial.cohort * training.population / USERS)
    sigma = trial.noise * m / trial.cohort
    return Job(
        fpfl.mlp(training.schema.shape[0], NETWORKS[trial.model], seed=trial.seed),
        training,
        {
            "cohort": m,
            "rounds": rounds,
            "constraint": fpfl.fnr_parity("sex"),
            "method": fpfl.OneGradient(**changes),
            "privacy": fpfl.Privacy(noise_multiplier=sigma, delta=DELTA, clip=clip),
            "learning_rate": rate,
            "seed": trial.seed,
            "noise_seed": trial.seed,
        },
    )


def measured(share: Sequence[Trial], apart: bool) -> list[dict[str, Any]]:
    """Train a share of the trials; gaps are of the users that a trial was trained on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[dict[str, Any]] = [{} for _ in share]
        for each in finished([job(trial) for trial in share], apart=apart):
            trial, run = share[each.number], each.run
            training, held = users(trial.seed)
            found[each.number] = {
                "alternative": trial.name, "cohort": trial.cohort, "epsilon": trial.epsilon,
                "model": trial.model, "seed": trial.seed,
                "accuracy": run.evaluate(held, bootstrap=0).accuracy,
                "train_gap": run.evaluate(training, bootstrap=0).gaps["fnr"].value,
                "together": each.together, "training_seconds": round(each.seconds, 2),
            }  # fmt: skip
    return found


def all_trials(seeds: int) -> list[Trial]:
    """In the order of the results."""
    trials = []
    for name, changes in ALTERNATIVES.items():
        for cohort, epsilon in PLACES:
            rounds = changes.get("rounds", 1000)
            noise = calibrate_poisson(epsilon, cohort / USERS, rounds, DELTA, "zero-out")
            trials += [Trial(name, cohort, epsilon, model, seed, noise)
                       for model in NETWORKS for seed in range(seeds)]  # fmt: skip
    return trials


def main() -> None:
    """Run all alternatives and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--one-by-one", action="store_true", help="train each by itself")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the results")
    given = parser.parse_args()
    start = time.perf_counter()
    trials = all_trials(given.seeds)
    if given.one_by_one:
        groups = [[number] for number in range(len(trials))]
    else:
        groups = groups_of(
            [(trial.model, trial.cohort, trial.rounds) for trial in trials],
            [float(trial.rounds) for trial in trials],
            given.jobs,
        )
    found: list[dict[str, Any]] = [{} for _ in trials]
    with ProcessPoolExecutor(
        given.jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        futures = {
            pool.submit(measured, [trials[n] for n in group], given.one_by_one): group
            for group in groups
        }
        for done, future in enumerate(as_completed(futures), start=1):
            for number, result in zip(futures[future], future.result(), strict=True):
                found[number] = result
            if done == len(groups) or done % max(1, len(groups) // 20) == 0:
                took = time.perf_counter() - start
                print(f"[{sum(map(bool, found))}/{len(found)}] {took:.0f} s", file=sys.stderr)
    command = shlex.join(["python", "scripts/choose_settings.py", *sys.argv[1:]])
    write_kept(given.out, RESULTS, found)
    write_about(given.out, about_this_run(command, time.perf_counter() - start))


if __name__ == "__main__":
    main()
