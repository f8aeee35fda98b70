"""Users who touch nobody else: whether kernels keep their bits here, and what it costs.

``python -m benchmarks.company --against ../other`` runs private rounds of Adult and of the digits'
network in this checkout and in the other, one after the other in turns, each in a process of its
own, and writes the ratios of the medians. ``--kernels`` tries the kernels with the paper's
networks in each precision, first as a private run does before it begins and then on Adult's own
users: with and without a heavy user, sums of whole numbers must differ by that user's vector.
Needs torch, numpy and fpfl alone; ``--device cuda`` for a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parents[1]
CASES = {
    "cpu": (
        "adult FPFL-1G m=200 float32",
        "adult FPFL-1G m=1000 float32",
        "adult FPFL m=1000 float32",
        "cnn FPFL-1G m=20 float32",
    ),
    "cuda": (
        "adult FPFL-1G m=200 float32",
        "adult FPFL-1G m=1000 float32",
        "cnn FPFL-1G m=100 float32",
        "cnn FPFL-1G m=100 tf32",
        "cnn FPFL-1G m=100 bf16",
    ),
}
SKIPPED = 5
"""First rounds that are not counted: kernels and allocators warm up."""


def seconds(case: str, device: str) -> float:
    """The median round of one training."""
    import fpfl
    from benchmarks.workloads import cnn, images

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, method, size, precision = case.split()
    cohort = int(size.split("=")[1])
    if kind == "adult":
        data = fpfl.load_adult().partition(mean=2.0, seed=0)
        model = fpfl.mlp(data.schema.shape[0], seed=0)
        constraint, rounds = fpfl.fnr_parity("sex", tolerance=0.02), 60
    else:
        import numpy as np

        data = images(np.full(20 * cohort, 20), device)
        model, constraint, rounds = cnn(), fpfl.accuracy_parity("pen"), 12
    rounds *= 1 if device == "cpu" else 5
    times: list[float] = []
    fpfl.train(
        model, data, constraint=constraint,
        method=fpfl.OneGradient() if method == "FPFL-1G" else None,
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.5), cohort=cohort, rounds=rounds,
        learning_rate=0.1, seed=0, device=device, precision=precision,
        callbacks=[lambda _: times.append(time.perf_counter())],
    )  # fmt: skip
    each = [b - a for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return statistics.median(each)


def price(against: Path, turns: int, device: str) -> dict[str, Any]:
    """Seconds of both checkouts for every case, and their ratio."""
    found = {}
    for case in CASES[device]:
        times: dict[str, list[float]] = {"here": [], "against": []}
        for _ in range(turns):
            for name, tree in (("here", HERE), ("against", against.resolve())):
                # Each with its own benchmarks, whose names are those of its package.
                paths = os.pathsep.join([str(tree / "src"), str(tree)])
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-m", "benchmarks.company",
                     "--case", case, "--device", device],
                    env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                    cwd=tree, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    raise RuntimeError(f"{case} of {name} failed: {done.stderr[-800:]}")
                times[name].append(float(done.stdout.split()[-1]))
        medians = {name: statistics.median(each) for name, each in times.items()}
        found[case] = {"seconds": times, "ratio": medians["here"] / medians["against"]}
        print(f"{case}: {1e3 * medians['here']:.2f} ms, before {1e3 * medians['against']:.2f} ms, "
              f"ratio {found[case]['ratio']:.2f}", flush=True)  # fmt: skip
    return found


def engines(device: str) -> Iterator[tuple[str, Any]]:
    """The paper's networks on its kinds of data, as private runs compute them."""
    import numpy as np
    from torch import nn

    import fpfl
    from benchmarks.workloads import cnn, images
    from fpfl.training.models import DEEP
    from fpfl.training.spec import memory_budget
    from fpfl.users import CohortEngine, FlatModel

    # Users of a sample or two, one with a thousand, and next to them those around the limits of
    # the ways in which vectors are computed.
    adult = fpfl.load_adult()
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(0, 4, 16_000), [1000], np.repeat([11, 12, 13, 64, 65], 4)])
    rows = rng.integers(0, len(adult.labels), sizes.sum())
    many = adult.subset(rows)
    many = fpfl.FederatedDataset(
        many.features, many.labels, many.attributes,
        torch.tensor([0, *np.cumsum(sizes)]), many.schema,
    )  # fmt: skip
    digits = images(np.concatenate([np.full(60, 20), rng.integers(0, 70, 30), [400]]), device)
    torch.manual_seed(0)
    width = adult.schema.shape[0]
    networks = {
        "logistic": (nn.Linear(width, 1), many, fpfl.fnr_parity("sex")),
        "shallow": (fpfl.mlp(width, seed=0), many, fpfl.fnr_parity("sex")),
        "deep": (fpfl.mlp(width, DEEP, seed=0), many, fpfl.fnr_parity("sex")),
        "wide": (fpfl.mlp(width, (100, 50, 20), seed=0), many, fpfl.fnr_parity("sex")),
        "cnn": (cnn(), digits, fpfl.accuracy_parity("pen")),
    }
    for name, (module, data, constraint) in networks.items():
        for precision in ("float32",) if device == "cpu" else ("float32", "tf32", "bf16"):
            for form in ("paper", "one-gradient"):
                engine = CohortEngine(
                    FlatModel.of(module.to(device)), data.to(torch.device(device)), constraint,
                    basis="split", form=form, precision=precision, private=True,
                    memory=memory_budget(None, torch.device(device)), expected=1000.0,
                )  # fmt: skip
                yield f"{name}, {form} form, {precision}", engine


def kernels(device: str) -> dict[str, Any]:
    """For each network: what the test before a run says, and what real users say."""
    import numpy as np

    from fpfl import Clipping
    from fpfl.aggregation import clip_rules
    from fpfl.aggregation.clipping import whole_total
    from fpfl.fairness.totals import Weights
    from fpfl.users import isolation as company

    found = {}
    for name, engine in engines(device):
        start = time.perf_counter()
        keeps = company.keeps_bits(engine)
        took = time.perf_counter() - start
        checked, said = company.checked(engine)
        rules = clip_rules(
            Clipping(0.5, counts=1.0).blocks(constrained=True, selection=True),
            engine.layout.slices,
        )
        w = engine.model.vector()
        weights = None
        if engine.form == "one-gradient":
            shape = len(engine.layout.rates), len(engine.layout.groups)
            weights = Weights(w.new_full(shape, 0.7), w.new_full(shape[:1], 0.3), 0.2, 3.0)

        def total(
            users: Any, engine: Any = checked, w: Any = w, weights: Any = weights,
            rules: Any = rules, memory: int = 0,
        ) -> torch.Tensor:  # fmt: skip
            if memory:
                engine = replace(engine, memory=memory)
            whole = torch.zeros(engine.layout.size, dtype=torch.int64, device=w.device)
            for part in engine.statistics(w, users, key=1, weights=weights):
                whole += whole_total(part, rules)
            return whole

        everybody = np.random.default_rng(1).permutation(engine.data.population)
        sizes = engine.data.sizes().numpy()
        heavy = int(sizes.argmax())
        if checked.alone:  # one after the other
            everybody = np.union1d(everybody[:300], heavy)
        rest = everybody[everybody != heavy]
        whole, without = total(everybody), total(rest)
        apart = total(rest[: len(rest) // 3]) + total(rest[len(rest) // 3 :], memory=2**26)
        exact = torch.equal(whole - without, total(np.array([heavy])))
        found[name] = {
            "parameters": int(w.numel()),
            "users": len(everybody),
            "test before a run": "passed" if keeps else "refused: users are computed alone",
            "seconds": round(took, 3),
            "a heavy user's own vector is what it adds": exact,
            "parts of the cohort add up": torch.equal(apart, without),
        }
        print(f"{name}: {found[name]}", said or "", flush=True)
    return found


def main() -> None:
    """Measure, and write benchmarks/results/company.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, for the price")
    parser.add_argument("--kernels", action="store_true", help="try kernels with real users")
    parser.add_argument("--device", default="cpu", choices=list(CASES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "benchmarks/results/company.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(seconds(given.case, given.device))
        return
    what = {
        "date": date.today().isoformat(),
        "hardware": "2 CPU cores, one thread used"
        if given.device == "cpu"
        else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seed": 0,
        "turns": given.turns,
    }
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    if given.kernels:
        found[f"kernels, {given.device}"] = what | {"cases": kernels(given.device)}
    if given.against is not None:
        cases = price(given.against, given.turns, given.device)
        found[f"price, {given.device}"] = what | {"cases": cases}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
