"""A round on Adult's users against the plain batch and a loop over users, one thread each.

Prints a table and writes ``benchmarks/results/adult.json``. Seconds differ between machines and
hours; the ratios within one run are what to read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fpfl import FederatedDataset, fnr_parity, load_adult, mlp
from fpfl.experiments.runner import about_this_run
from fpfl.privacy import PoissonSampling
from fpfl.privacy.settings import Privacy
from fpfl.thirdparty import SeededNoise, ThirdParty
from fpfl.users import CohortEngine, FlatModel

COHORT = 200
RESULTS = Path(__file__).parent / "results" / "adult.json"


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    data = load_adult().partition(mean=2, seed=0)
    cohorts = [
        PoissonSampling(data.population, COHORT).draw(np.random.default_rng(i)) for i in range(50)
    ]
    model = mlp(data.schema.shape[0], seed=0)
    rows = {
        "plain batch (forward and backward)": rate(plain_batch(model, data), cohorts, 3.0),
        "loop over users, ∇L alone": rate(loop_over_users(model, data), cohorts, 3.0),
        "fpfl, private, ∇L": rate(private_round(model, data, fair=False), cohorts, 3.0),
        "fpfl, private, the paper's vector": rate(
            private_round(model, data, fair=True), cohorts, 3
        ),
    }
    floor = rows["plain batch (forward and backward)"]
    print(f"Adult, cohort {COHORT}, shallow network, one thread\n")
    print(f"{'':38s}{'rounds/s':>10s}{'users/s':>10s}{'of the plain batch':>20s}")
    for name, speed in rows.items():
        print(f"{name:38s}{speed:10.1f}{speed * COHORT:10.0f}{speed / floor:19.2f}x")
    answer = privacy_seconds()
    print(f"\n`fpfl privacy`, all three conventions, in a fresh process: {answer:.1f} s")
    about = about_this_run("make bench", time.perf_counter() - start)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"rounds_per_second": rows, "privacy_seconds": answer, "about": about}, indent=1)
        + "\n"
    )


def privacy_seconds() -> float:
    """How long a user waits for `fpfl privacy`, imports included."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fpfl.cli", "privacy", "--population", "16280", "--cohort", "200",
         "--rounds", "1000", "--epsilon", "2", "--delta", "5e-5", "--json"],
        capture_output=True, check=True,
    )  # fmt: skip
    return time.perf_counter() - start


def rate(
    round_of: Callable[[np.ndarray], None], cohorts: list[np.ndarray], seconds: float
) -> float:
    """Rounds a second, after a warm-up."""
    round_of(cohorts[0])
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        round_of(cohorts[done % len(cohorts)])
        done += 1
    return done / (time.perf_counter() - start)


def plain_batch(model: nn.Module, data: FederatedDataset) -> Callable[[np.ndarray], None]:
    """The floor: one batch with the cohort's samples, no users at all."""

    def run(users: np.ndarray) -> None:
        cohort = data.cohort(users)
        x, y = cohort.features[cohort.mask], cohort.labels[cohort.mask].float()
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()

    return run


def loop_over_users(model: nn.Module, data: FederatedDataset) -> Callable[[np.ndarray], None]:
    """What simulators do: one user after the other, clipped and added."""

    def run(users: np.ndarray) -> None:
        total = 0.0
        for k in users:
            part = slice(*data.offsets[k : k + 2].tolist())
            x, y = data.features[part], data.labels[part].float()
            if len(y):
                output = model(x).squeeze(-1)
                loss = nn.functional.binary_cross_entropy_with_logits(output, y, reduction="sum")
                g = torch.cat([p.flatten() for p in torch.autograd.grad(loss, model.parameters())])
                total = total + g * min(1.0, 1.0 / float(g.norm()))

    return run


def private_round(
    model: nn.Module, data: FederatedDataset, *, fair: bool
) -> Callable[[np.ndarray], None]:
    """A round of fpfl: statistics, clipping, sum, noise."""
    constraint = fnr_parity("sex") if fair else None
    engine = CohortEngine(FlatModel.of(model), data, constraint)
    privacy = Privacy(noise_multiplier=1.0, clip=1.0)
    blocks = privacy.clipping.blocks(constrained=fair, selection=True)
    plan = privacy.plan(population=data.population, cohort=COHORT, rounds=1000, blocks=blocks)
    third_party = ThirdParty(engine.layout.slices, blocks, plan, SeededNoise(0))
    w = engine.model.vector()

    def run(users: np.ndarray) -> None:
        third_party.release(engine.statistics(w, users), like=w)

    return run


if __name__ == "__main__":
    main()
