"""How fpfl scales: with the population, the cohort, users' sizes, and the number of processes.

``python -m benchmarks.scaling WHAT ...`` measures one thing and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workloads import cnn, images, private_training
from fpfl import Attribute, FederatedDataset, Schema, accuracy_parity, fnr_parity, mlp
from fpfl.aggregation import ThirdParty
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy import PoissonSampling
from fpfl.privacy.settings import Clipping
from fpfl.server.ranks import join
from fpfl.server.simulation import Simulation
from fpfl.users import CohortEngine, FlatModel

ROOT = Path(__file__).parents[1]


def populations() -> dict[str, Any]:
    """Milliseconds a round for populations of 10⁴ to 10⁷ users, cohorts of 1,000, fair and clipped.

    All populations are in memory at once and take turns; one more is read from mapped files.
    """
    model = mlp(92, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        rounds: dict[str, Callable[[], Tensor]] = {}
        for power in (4, 5, 6, 7):
            data = people(10**power)
            rounds[f"{10**power}"] = one_round(model, data)
            if power == 6:
                data.save(Path(folder) / "people")
                lazy = FederatedDataset.open(Path(folder) / "people")
                rounds["1000000 from files"] = one_round(model, lazy)
        times: dict[str, list[float]] = {name: [] for name in rounds}
        for turn in range(13):
            for name, run in rounds.items():
                start = time.perf_counter()
                for _ in range(20):
                    run()
                if turn:
                    times[name].append((time.perf_counter() - start) / 20)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def people(users: int) -> FederatedDataset:
    """Users as Adult's: two samples on average, 92 features."""
    return table(np.random.default_rng(0).poisson(2.0, users), 92)


def table(sizes: np.ndarray, features: int) -> FederatedDataset:
    """Users of given sizes, each sample in one of two groups; beyond a million they repeat."""
    n = int(sizes.sum())
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(min(n, 10**6), features, generator=generator)
    return FederatedDataset(
        some.repeat(-(-n // len(some)), 1)[:n],
        torch.randint(0, 2, (n,), generator=generator),
        torch.randint(0, 2, (n, 1), generator=generator),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        Schema((features,), attributes=(Attribute("sex", ("Female", "Male")),)),
    )


def one_round(model: nn.Module, data: FederatedDataset) -> Callable[[], Tensor]:
    """A round of the simulation at a fixed w: sampling, reading, computing, clipping, adding."""
    flat = FlatModel.of(model)
    engine = CohortEngine(flat, data, fnr_parity("sex"))
    blocks = Clipping(1.0).blocks(constrained=True, selection=True)
    simulation = Simulation(
        engine, ThirdParty(engine.layout.slices, blocks), PoissonSampling(data.population, 1000),
        RoundStreams(0, "cohorts"), RoundStreams(0, "samples"), rounds=10**9,
    )  # fmt: skip
    w = flat.vector()
    return lambda: simulation.release(1, w)


def memory(cohort: int) -> dict[str, Any]:
    """MiB of the process before and at most during a round of the paper's vector, budget 64 MiB."""
    data, model = images(np.full(10_000, 5)), FlatModel.of(cnn())
    engine = CohortEngine(model, data, accuracy_parity("pen"), memory=64 * 2**20)
    blocks = Clipping(1.0).blocks(constrained=True, selection=True)
    third_party = ThirdParty(engine.layout.slices, blocks)
    w, rng = model.vector(), np.random.default_rng(0)
    before, peak, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    third_party.release(
        engine.statistics(w, np.sort(rng.choice(10_000, cohort, replace=False))), like=w, round=1
    )
    done.set()
    thread.join()
    return {"before_mib": before, "peak_mib": peak[0]}


def resident() -> float:
    """This process's resident memory, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def packing() -> dict[str, Any]:
    """Samples against rows computed, for log-uniform sizes from 1 to 1,000 and to 10,000."""
    small, large = (
        np.exp(np.random.default_rng(0).uniform(0, np.log(largest), 200)).astype(np.int64)
        for largest in (1000, 10_000)
    )
    perceptron = mlp(16, (64,), seed=0)
    cases = (
        ("CNN", 1000, cnn(), images(small)),
        ("perceptron", 1000, perceptron, table(small, 16)),
        ("perceptron", 10_000, perceptron, table(large, 16)),
    )
    shares = {}
    for name, largest, model, data in cases:
        for vector, rule in (("one", None), ("paper", accuracy_parity())):
            engine = CohortEngine(FlatModel.of(model), data, rule)
            packed = [chunk.batch.packing for chunk in engine.chunks(np.arange(data.population))]
            useful = sum(int(each.sizes.sum()) for each in packed)
            rows = sum(each.rows for each in packed)
            shares[f"{name}, {vector}, up to {largest}"] = useful / rows
    return shares


def share_of_the_ranks(rounds: int) -> dict[str, Any]:
    """Rounds a second of a training in this many processes, on the CNN; started by torchrun."""
    processes, _ = join("cpu")
    times: list[float] = []
    data = images(np.full(200, 20))
    private_training(
        cnn(), data, "cnn", "one", 40, rounds, lambda _: times.append(time.perf_counter())
    )
    speed = (len(times) - 3) / (times[-1] - times[2]) if processes.first else None
    return {"rank": processes.rank, "rounds_per_second": speed}


def ranks(rounds: int = 60, turns: int = 3) -> dict[str, Any]:
    """Two processes against one, one thread each, by turns."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for processes, found in speeds.items():
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(processes), "-m", "benchmarks.scaling",
                "share_of_the_ranks", str(rounds),
            ]  # fmt: skip
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            line = next(x for x in done.stdout.splitlines() if '"rank": 0' in x)
            found.append(json.loads(line[line.index("{") :])["rounds_per_second"])
    return {f"{n} processes": statistics.median(found) for n, found in speeds.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, *arguments = sys.argv[1:]
    given = [int(a) if a.isdigit() else a for a in arguments]
    print(json.dumps(globals()[name](*given)), flush=True)
