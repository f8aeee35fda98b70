"""One measurement in a process of its own, so that its peak memory is its own too.

``python -m benchmarks.case plain adult one 3``: prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import (
    COHORT,
    cohorts,
    fpfl_rounds,
    loop_over_users,
    plain_batch,
    workload,
)
from fpfl.privacy import PoissonSampling


def rate(one_round: Callable[[Any], None], inputs: list[Any], seconds: float) -> float:
    """Rounds a second, after a warm-up."""
    one_round(inputs[0])
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or done < 2:
        one_round(inputs[done % len(inputs)])
        done += 1
    return done / (time.perf_counter() - start)


def main() -> None:
    """Measure what the command line names."""
    who, kind, vector, seconds = *sys.argv[1:4], float(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, model = workload(kind)
    if who == "plain":
        speed = rate(plain_batch(model, data), cohorts(data, COHORT[kind], 50), seconds)
    elif who == "loop":
        sampler, rng = PoissonSampling(data.population, COHORT[kind]), np.random.default_rng(0)
        users = [sampler.draw(rng) for _ in range(50)]
        speed = rate(loop_over_users(model, data, vector, kind), users, seconds)
    else:
        speed = fpfl_rounds(model, data, kind, vector, seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps({"rounds_per_second": speed, "peak_memory_mib": peak}))


if __name__ == "__main__":
    main()
