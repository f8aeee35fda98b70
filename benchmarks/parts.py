"""Where the time of one round goes on a CPU: a training of Adult's users, part by part.

``python -m benchmarks.parts``: writes ``results/parts.json``. Clocks are put around the parts of a
real ``fpfl.train``; the clocks themselves cost a few microseconds a part.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import COHORT, Kind, Vector, private_training, workload
from fpfl.aggregation import sums
from fpfl.experiments.runner import about_this_run
from fpfl.methods import MMDM
from fpfl.methods.base import Unconstrained
from fpfl.server import loop as server_round
from fpfl.server.simulation import Simulation
from fpfl.users import engine, passes
from fpfl.users.reading import Reader

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("a round of the federation", Simulation, "release"),
    ("reading: gather and pack", Reader, "_chunk"),
    ("forward and backward", passes.LayerPass, "record"),
    ("counts", engine.CohortEngine, "_counts"),
    ("norms, clipping and sums", sums, "whole_total"),
    ("noise", sums.ThirdParty, "noised"),
    ("method's update", MMDM, "update"),
    ("method's update", Unconstrained, "update"),
    ("optimiser's step", torch.optim.SGD, "step"),
    ("history", server_round, "describe"),
)


def timed(totals: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a clock around it."""

    def run(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            totals[name] = totals.get(name, 0.0) + time.perf_counter() - start

    return run


def parts(kind: Kind, vector: Vector, rounds: int) -> dict[str, float]:
    """Microseconds a round, by part."""
    totals: dict[str, float] = {}
    originals = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]
    for (label, owner, name), (_, _, function) in zip(PARTS, originals, strict=True):
        setattr(owner, name, timed(totals, label, function))
    times: list[float] = []

    def tick(_: object) -> None:
        times.append(time.perf_counter())
        if len(times) == 20:
            totals.clear()  # the first rounds set things up

    try:
        data, model = workload(kind)
        private_training(model, data, kind, vector, COHORT[kind], rounds, tick)
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    count = rounds - 20
    whole = {"the whole round": 1e6 * (times[-1] - times[19]) / count}
    return whole | {name: 1e6 * total / count for name, total in totals.items()}


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    found = {
        f"{kind}, {vector}": parts(kind, vector, rounds)
        for kind, rounds in (("adult", 1000), ("cnn", 60))
        for vector in ("one", "paper")
    }
    about = about_this_run("python -m benchmarks.parts", time.perf_counter() - start)
    text = json.dumps({"parts": found, "about": about}, indent=1) + "\n"
    (Path(__file__).parent / "results" / "parts.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
