"""Peers: frameworks that can run FPFL's rounds too, each in an environment of its own.

``run_peer`` measures one of them. Imports nothing but the standard library: the peers' scripts are
in this package as well, and run where there is no fpfl.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

Peer = Literal["pfl-research", "flower"]

SCRIPTS = {
    "pfl-research": "benchmarks.peers.pfl_research",
    "flower": "benchmarks.peers.flower_simulation",
}
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns at every start
}


def run_peer(
    peer: Peer,
    kind: Literal["adult", "cnn"],
    vector: Literal["paper", "one"],
    seconds: float,
    *options: str,
) -> dict[str, Any]:
    """Measure rounds of a peer on a workload; needs fpfl, to write the workload.

    The result has rounds_per_second, users_per_second, rounds, peak_memory_mib (of the process, or
    of all processes added) and version. ``options`` are further arguments of the peer's script:
    with ``--check`` the result says how far a round's sum is from a plain reference.
    """
    from benchmarks.peers.environments import ROOT, python_of
    from benchmarks.peers.workload import write_workload

    python = python_of(peer)
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / f"{kind}.npz"
        write_workload(workload, kind)
        command = [str(python), "-m", SCRIPTS[peer], "--workload", str(workload)]
        command += ["--vector", vector, "--seconds", str(seconds), "--threads", "1", *options]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **SETTINGS}, capture_output=True, text=True
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise RuntimeError(f"{peer} on {kind}, {vector}: exit status {done.returncode}\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
