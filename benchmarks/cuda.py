"""The engine on a GPU: rounds of the paper's CNN against the plain batch on the same samples.

``PYTHONPATH=src python -m benchmarks.cuda [FILE.json]``: needs torch, numpy and fpfl alone. Every
precision's plain batch, one-gradient round and paper's vector take turns; medians. A round is all
of it: drawing the cohort, reading, forward and backward, clipping, adding, noise.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.report import gpu_ratios
from benchmarks.workloads import Vector, cnn, constraint, images, plain_batch
from fpfl import FederatedDataset, Schema
from fpfl.aggregation import SeededNoise, ThirdParty
from fpfl.experiments.runner import about_this_run, reproduce
from fpfl.experiments.tables import Options
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.sampling import FixedSizeSampling
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.server.simulation import Simulation
from fpfl.training.spec import memory_budget
from fpfl.users import CohortEngine, FlatModel
from fpfl.users.precision import Precision

RESULTS = Path(__file__).parent / "results" / "cuda.json"
SAMPLES = 100
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


def simulated(
    model: FlatModel, data: Any, vector: Vector, precision: Precision
) -> Callable[[], Tensor]:
    """Rounds of everybody, private, at a fixed w."""
    engine = CohortEngine(
        model, data, constraint("cnn", vector), precision=precision,
        memory=memory_budget(None, data.features.device),
    )  # fmt: skip
    privacy = Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-6, convention="replace-one")
    blocks = privacy.clipping.blocks(constrained=vector == "paper", selection=True)
    users = data.population
    plan: PrivacyPlan = privacy.plan(population=users, cohort=users, rounds=10**6, blocks=blocks)
    simulation = Simulation(
        engine, ThirdParty(engine.layout.slices, blocks, plan, SeededNoise(0)),
        FixedSizeSampling(users, users), RoundStreams(0, "cohorts"), RoundStreams(0, "samples"),
        rounds=10**6,
    )  # fmt: skip
    w = model.vector()
    return lambda: simulation.release(1, w)


def turns(runs: dict[str, Callable[[], object]], count: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, measured by turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start) / rounds)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(users: int) -> list[dict[str, Any]]:
    """All precisions for a cohort of this many users × 100 images."""
    data = images(np.full(users, SAMPLES), "cuda")
    net = cnn().cuda()
    model = FlatModel.of(net)
    everything = torch.arange(len(data), device="cuda")
    rows = []
    for precision in PRECISIONS:
        plain = plain_batch(net, data, precision)
        runs: dict[str, Callable[[], object]] = {
            "plain": lambda plain=plain: plain(everything),
            "one": simulated(model, data, "one", precision),
            "paper": simulated(model, data, "paper", precision),
        }
        slow = users >= 1000
        times = turns(runs, 4 if slow else 8, 3 if slow else 20)
        peaks = {}
        for name, run in runs.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append(
            {"users": users, "samples": users * SAMPLES, "precision": precision,
             "milliseconds": times, "peak_memory_mib": peaks,
             "ratio": {name: times[name] / times["plain"] for name in ("one", "paper")}}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def profiled(vector: Vector, precision: Precision, users: int = 100) -> list[dict[str, Any]]:
    """Where the GPU's time goes in one round: the largest kernels."""
    from torch.profiler import ProfilerActivity, profile

    data = images(np.full(users, SAMPLES), "cuda")
    run = simulated(FlatModel.of(cnn().cuda()), data, vector, precision)
    for _ in range(5):
        run()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    kernels = [
        event for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0
    ]  # fmt: skip
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels) / 10
    rows = [{"kernel": "all", "microseconds": total, "calls": sum(e.count for e in kernels) / 10}]
    rows += [
        {"kernel": event.key[:90], "microseconds": event.self_device_time_total / 10,
         "calls": event.count / 10}
        for event in kernels[:14]
    ]  # fmt: skip
    return rows


class Sequence(nn.Module):
    """Token ids through an embedding and a recurrent or an attention layer."""

    def __init__(self, kind: str):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.kind = kind
        if kind == "attention":
            self.layer: nn.Module = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        else:
            self.layer = getattr(nn, kind)(8, 8, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits from the last position."""
        hidden = self.layer(self.embedding(tokens))
        return self.out((hidden if self.kind == "attention" else hidden[0])[:, -1])


def agreement() -> dict[str, float]:
    """The clipped sum on the GPU against the CPU's in double precision, relative to its largest."""
    sizes = np.array([1, 7, 3, 30, 2, 12, 5, 1, 40])
    pictures = images(sizes)
    tokens = torch.randint(0, 50, (len(pictures), 6), generator=torch.Generator().manual_seed(0))
    texts = FederatedDataset(
        tokens, pictures.labels, pictures.attributes, pictures.offsets,
        Schema((6,), classes=10, attributes=pictures.schema.attributes),
    )  # fmt: skip
    found = {}
    for name in ("CNN", "LSTM", "GRU", "RNN", "attention"):
        data, net = (pictures, cnn()) if name == "CNN" else (texts, Sequence(name))
        exact = clipped_total(net.double(), data, torch.float64, "cpu", "float32")
        single = [(precision, torch.float32) for precision in PRECISIONS]
        for precision, dtype in [("float32", torch.float64), *single]:
            given = clipped_total(net, data, dtype, "cuda", precision)
            label = "float64" if dtype == torch.float64 else precision
            found[f"{name}, {label}"] = float((given - exact).abs().max() / exact.abs().max())
    return found


def clipped_total(
    net: nn.Module, data: FederatedDataset, dtype: torch.dtype, device: str, precision: Precision
) -> Tensor:
    """The clipped sum of everybody's vectors, in double precision on the CPU."""
    model = FlatModel.of(copy.deepcopy(net).to(device, dtype))
    engine = CohortEngine(
        model, data.to(device, dtype), constraint("cnn", "paper"), precision=precision,
        memory=2**22,
    )  # fmt: skip
    blocks = Clipping(1.0).blocks(constrained=True, selection=True)
    w = model.vector()
    rows = engine.statistics(w, np.arange(data.population))
    return ThirdParty(engine.layout.slices, blocks).release(rows, like=w, round=1).double().cpu()


def side_by_side(seeds: int = 8) -> dict[str, float]:
    """Seconds for eight seeds of a row of the Adult table, one after the other and all at once."""
    times = {}
    options = Options(noise=(("*", 1.974),), device="cuda", overrides=("rounds=1000",))
    for jobs in (1, seeds):
        start = time.perf_counter()
        reproduce(
            "adult-federated", seeds=range(seeds), pattern="shallow/FPFL/1000/*", options=options,
            jobs=jobs, apart=True,
        )  # fmt: skip
        times[str(jobs)] = time.perf_counter() - start
    return times


def main() -> int:
    """Measure, print, save, judge."""
    if not torch.cuda.is_available():
        print("this needs a GPU and there is none; `make bench` is for CPUs", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    same = agreement()
    print(json.dumps(same), flush=True)
    rows = [row for users in (100, 1000) for row in measure(users)]
    profiles = {f"{v}, {p}": profiled(v, p) for v in ("one", "paper") for p in ("float32", "tf32")}
    together = side_by_side()
    print(json.dumps(together), flush=True)
    about = about_this_run("python -m benchmarks.cuda", time.perf_counter() - start)
    target = Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS)
    results = {
        "rows": rows, "agreement": same, "profiles": profiles, "side_by_side_seconds": together,
        "about": about,
    }  # fmt: skip
    target.write_text(json.dumps(results, indent=1) + "\n")
    missed = [ratio["name"] for ratio in gpu_ratios(results) if not ratio["reached"]]
    print(f"missed: {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
