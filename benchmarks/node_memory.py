"""What a node with many users and a large model keeps in memory, and how long its vector takes.

``python -m benchmarks.node_memory``: writes ``results/node_memory.json``. Every measurement is a
process of its own; its peak is what the operating system says at the end. What a process has after
its imports, before any data, is said apart. ``--against CHECKOUT`` measures another checkout's code
as well, with ``--users`` of them for who has no hour.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
USERS, SAMPLES = 3256, 8
MIB = 2**20


def peak() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(users: int) -> dict[str, Any]:
    """One node's vector for one round, with all its users in it."""
    import numpy as np
    import torch

    import fpfl
    from fpfl.federation import agreement, contribution

    imports = peak()
    rng = np.random.default_rng(0)
    schema = fpfl.Schema(
        shape=(784,),
        classes=2,
        attributes=(fpfl.Attribute("kind", ("a", "b")),),
        population=users,
        samples_per_user=float(SAMPLES),
    )
    data = fpfl.FederatedDataset.from_samples(
        rng.random((SAMPLES * users, 784), dtype=np.float32),
        rng.integers(0, 2, SAMPLES * users),
        schema=schema,
        attributes=rng.integers(0, 2, (SAMPLES * users, 1)),
        users=np.repeat(np.arange(users), SAMPLES),
    )
    agreed = agreement.Agreement(
        model=lambda: fpfl.mlp(784, (1000, 110), seed=1),
        schema=schema,
        population=users,
        cohort=users,
        rounds=10,
        nodes=5,
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="coins"),
    )
    made = contribution.Contribution(agreed, lambda: data, contribution.SystemChance())
    failures: list[str] = []
    watch = logging.Handler(logging.ERROR)
    watch.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    contribution.log.addHandler(watch)  # a node that cannot compute says so to itself alone
    before, begun = peak(), time.perf_counter()
    vector = made.vector(1, agreed.spec.flat.vector(), None)
    if failures:
        raise SystemExit(f"the node did not compute: {failures}")
    return {
        "users": users,
        "parameters": agreed.layout.parameters,
        "numbers": len(vector),
        "threads": torch.get_num_threads(),
        "data_mib": round(data.features.nbytes / MIB, 1),
        "imports_mib": round(imports, 1),
        "before_mib": round(before, 1),
        "peak_mib": round(peak(), 1),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def apart(users: int, checkout: Path) -> dict[str, Any]:
    """The same in a process of its own, by a checkout's code."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.node_memory", "--child", "--users", str(users)],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{users} users failed ({done.returncode}):\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[USERS // 8, USERS])
    parser.add_argument("--against", type=Path, help="a checkout to compare with")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.users[0])))
        return
    from fpfl.experiments.runner import about_this_run

    start = time.perf_counter()
    found: dict[str, Any] = {"now": [apart(users, ROOT) for users in options.users]}
    if options.against:
        found["before"] = [apart(users, options.against) for users in options.users]
    found["about"] = {
        **about_this_run("python -m benchmarks.node_memory", time.perf_counter() - start),
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }
    text = json.dumps(found, indent=1) + "\n"
    (Path(__file__).parent / "results" / "node_memory.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
