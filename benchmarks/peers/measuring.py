"""What the peers' scripts have in common: arguments, a clock, memory, the line they print."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.peers.fpfl_round import Users, reference_sum


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments of every peer's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", required=True, help="what write_workload wrote")
    parser.add_argument("--vector", choices=("paper", "one"), required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--check",
        action="store_true",
        help="instead of measuring: compare a round's sum, without noise, to a plain reference",
    )
    return parser


class Clock:
    """Counts rounds after a first one, the warm-up, until the time is up; two at least."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.rounds = -1
        self.start = self.last = 0.0

    def tick(self) -> bool:
        """A round has ended; whether that is enough."""
        self.last = time.perf_counter()
        if self.rounds < 0:
            self.start = self.last
        self.rounds += 1
        return self.rounds >= 2 and self.last - self.start >= self.seconds

    def report(self, cohort: int, peak_memory_mib: float | None, version: str) -> None:
        """Print the result as one line of JSON."""
        speed = self.rounds / (self.last - self.start)
        result = {
            "rounds_per_second": speed,
            "users_per_second": speed * cohort,
            "rounds": self.rounds,
            "peak_memory_mib": peak_memory_mib,
            "version": version,
        }
        print(json.dumps(result), flush=True)


def check(users: Users, cohort: list[int], found: torch.Tensor) -> None:
    """Compare a sum that a framework made to the reference; raise where they differ."""
    expected = reference_sum(users, cohort)
    error = float((found.double() - expected).abs().max())
    line = {"users": len(cohort), "length": len(expected), "norm": float(expected.norm())}
    print(json.dumps({**line, "largest_difference": error}), flush=True)
    if not error < 1e-4:
        raise SystemExit(f"the sum differs from the reference by {error}")


def own_peak_memory() -> float:
    """The largest resident size that this one process has had, in MiB, as the system kept it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


class TreeMemory(threading.Thread):
    """Samples the memory of this process and all that descend from it, twice a second.

    The sum of the resident sizes (from /proc, so on Linux alone; None elsewhere). Pages that
    processes share are counted in each of them.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: float | None = None

    def run(self) -> None:
        """Sample until the process ends."""
        while Path("/proc/self/statm").exists():
            self.peak = max(self.peak or 0.0, _tree_memory(os.getpid()))
            time.sleep(0.5)


def _tree_memory(root: int) -> float:
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name, in brackets, may hold anything; what follows it is split safely.
            line = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(line[1]), []).append(int(folder.name))
        pages[int(folder.name)] = int(line[21])
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        total += pages.get(process, 0)
        todo += children.get(process, [])
    return total * resource.getpagesize() / 2**20
