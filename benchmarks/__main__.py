"""``make bench``: fpfl against the plain batch, a loop over users, pfl-research and Flower.

One thread each, in the same run on the same machine; prints a table, writes
``results/engine.json`` and ``results/engine.md``, and ends with status 1 where a ratio misses its
bar. Seconds differ between machines and hours; ratios within one run are what to read. The GPU's
figures come from ``python -m benchmarks.cuda``, on a machine that has one.

``python -m benchmarks --without-peers`` leaves the other frameworks out (no network needed), and
writes nothing; ``--scaling`` measures the scaling alone again and keeps the rest of the file.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import run_peer
from benchmarks.report import markdown, ratios
from benchmarks.workloads import COHORT
from fpfl.experiments.runner import about_this_run

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
SECONDS, TURNS = 4.0, 3
OWN = {"plain": "plain batch", "loop": "loop over users", "fpfl": "fpfl"}
PEERS = {
    "pfl-research": ("pfl-research", ()),
    "pfl-research, tuned": ("pfl-research", ("--tuned",)),
    "Flower simulation": ("flower", ("--nodes", "population")),
    "Flower simulation, 50 nodes": ("flower", ()),
}


def in_a_process(*command: str) -> dict[str, Any]:
    """What a module of ours prints as JSON, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def speeds(peers: bool) -> list[dict[str, Any]]:
    """Rounds a second and peak memory of everybody, on both workloads, for both vectors."""
    rows = []
    for kind in ("adult", "cnn"):
        for vector in ("one", "paper"):
            found: dict[str, list[dict[str, Any]]] = {}
            for turn in range(TURNS):
                for who, name in OWN.items():
                    case = (who, kind, vector, str(SECONDS))
                    found.setdefault(name, []).append(in_a_process("benchmarks.case", *case))
                for name, (peer, options) in PEERS.items() if peers else ():
                    # A node for each of 16,280 users takes a minute to start: once is enough.
                    if turn and peer == "flower":
                        continue
                    result = run_peer(peer, kind, vector, SECONDS, *options)
                    found.setdefault(name, []).append(result)
            for name, results in found.items():
                speed = statistics.median(r["rounds_per_second"] for r in results)
                row = {
                    "workload": kind, "vector": vector, "who": name, "rounds_per_second": speed,
                    "users_per_second": speed * COHORT[kind],
                    "peak_memory_mib": max(r["peak_memory_mib"] for r in results),
                    "turns": len(results),
                }  # fmt: skip
                rows.append(row)
                print(f"{kind:6s} {vector:6s} {name:28s} {speed:10.2f} rounds/s", flush=True)
    return rows


def scaling() -> dict[str, Any]:
    """The population, memory, packing and processes."""
    found: dict[str, Any] = {}
    for name in ("populations", "packing", "ranks"):
        found[name] = in_a_process("benchmarks.scaling", name)
        print(name, json.dumps(found[name]), flush=True)
    found["memory"] = {}
    for cohort in (100, 1000, 10_000):
        found["memory"][str(cohort)] = in_a_process("benchmarks.scaling", "memory", str(cohort))
    print("memory", json.dumps(found["memory"]), flush=True)
    return found


def privacy_seconds() -> float:
    """How long a user waits for `fpfl privacy`, imports included."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fpfl.cli", "privacy", "--population", "16280", "--cohort", "200",
         "--rounds", "1000", "--epsilon", "2", "--delta", "5e-5", "--json"],
        capture_output=True, check=True,
    )  # fmt: skip
    return time.perf_counter() - start


def main() -> int:
    """Measure, print, save, judge."""
    start = time.perf_counter()
    peers = "--without-peers" not in sys.argv[1:]
    if "--scaling" in sys.argv[1:]:
        results: dict[str, Any] = json.loads((RESULTS / "engine.json").read_text())
        results["scaling"] = scaling()
        again = about_this_run("python -m benchmarks --scaling", time.perf_counter() - start)
        results["about_scaling"] = again
    else:
        results = {"speeds": speeds(peers), "scaling": scaling()}
        results["privacy_seconds"] = privacy_seconds()
        results["about"] = about_this_run("make bench", time.perf_counter() - start)
        results["about_scaling"] = results["about"]
    results["ratios"] = ratios(results["speeds"], results["scaling"])
    gpu = RESULTS / "cuda.json"
    text = markdown(results, json.loads(gpu.read_text()) if gpu.exists() else None)
    print("\n" + text)
    if peers:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "engine.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "engine.md").write_text(text)
    return 0 if all(ratio["reached"] for ratio in results["ratios"]) else 1


if __name__ == "__main__":
    sys.exit(main())
