"""How long a round of a real federation takes, and what a node pays for it.

``python -m benchmarks.federation_rounds`` starts a SuperLink with TLS and five authenticated nodes
as `docs/federation.md` says, trains on Adult with noise in shares, and writes
``results/federation_rounds.json``. With ``--against CHECKOUT`` the same is measured with the code
of another checkout, first, and both are in the file.

Seconds and CPU seconds are from the end of the first round to the end of the last: what a run pays
once (starting, the first dealing, the first import of torch) is the first round's, and written down
beside it. A node's CPU seconds are those of its SuperNode and of all that it started, whether they
are there or gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "federation_rounds.json"
TASK = ROOT / "tests" / "federation" / "flower_task.py.txt"
NODES, USERS, COHORT = 5, 16_280, 1000
TICK = os.sysconf("SC_CLK_TCK")
NEW = "fpfl.federation.flower.supernode"


def measured(rounds: int, plain: bool, patience: float) -> dict[str, Any]:
    """One run with the code that this process imports."""
    import numpy as np

    from fpfl.federation import project

    try:
        from fpfl.federation.enrolment import AUTHORITY, IDENTITY, make_keys
    except ImportError:  # an older checkout
        AUTHORITY, IDENTITY, make_keys = project.AUTHORITY, project.IDENTITY, project.make_keys
    make_project = project.make_project

    flower = import_module("flower_deployment")  # of the checkout's tests

    class Documented(flower.Deployment):  # type: ignore[misc]
        def supernode_command(self, i: int, **changes: Any) -> list[str]:
            command: list[str] = super().supernode_command(i, **changes)
            if plain or find_spec(NEW) is None:
                return command
            return [sys.executable, "-m", NEW, *command[1:]]

    with tempfile.TemporaryDirectory(prefix="fpfl-rounds-") as name:
        folder = Path(name)
        make_keys(folder / "keys", NODES)
        make_project(folder / "adult", folder / "keys", nodes=NODES, cohort=1, rounds=1, epsilon=1)
        settings = {
            "ROUNDS": rounds,
            "COHORT": COHORT,
            "SEED": None,
            "TIMEOUT": 300.0,
            "MARK": None,
        }
        said = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
        task = TASK.read_text().replace("{settings}", said)
        (folder / "adult" / "adult" / "task.py").write_text(task)
        firsts = [int(part[0]) for part in np.array_split(np.arange(USERS), NODES)]
        configs = [
            {
                "identity": str(folder / "keys" / f"node-{i + 1}" / IDENTITY),
                "partition-id": i,
                "first-user": firsts[i],
            }
            for i in range(NODES)
        ]
        config = {
            "folder": str(folder / "run"),
            "authority": str(folder / "keys" / AUTHORITY),
        }
        deployment = Documented(
            NODES, node_configs=configs, warm=False, idle_poll=None, task_poll=None,
            python_path=[path for path in sys.path if path.endswith("src")],
        )  # fmt: skip
        with deployment:
            begun = time.monotonic()
            run = deployment.start_run(folder / "adult", config)
            marks = []
            for number in range(1, rounds + 1):
                deployment.wait_for(
                    lambda number=number: ended(deployment, run, f"round {number} of {rounds}:"),
                    patience,
                    f"round {number} to end",
                )
                spent = [cpu_of(node.mark) for node in deployment.supernodes.values()]
                marks.append((time.monotonic() - begun, spent))
            result = run.wait(patience)
            if not result.completed:
                raise SystemExit(f"the run ended as {result.status}:\n{result.log}")
            steps = re.findall(r"'(\w+)': (\d+) of \d+ answered in ([0-9.]+) s", result.log)
    (first, before), (last, after) = marks[0], marks[-1]
    each = [(b - a) / (rounds - 1) for a, b in zip(before, after, strict=True)]
    return {
        "rounds": rounds,
        "seconds_a_round": round((last - first) / (rounds - 1), 2),
        "cpu_seconds_a_node_and_round": round(sum(each) / NODES, 3),
        "first_round_seconds": round(first, 1),
        "first_round_cpu_seconds_a_node": round(sum(before) / NODES, 2),
        "run_seconds": round(result.seconds, 1),
        "step_seconds": {
            step: [float(seconds) for name, _, seconds in steps if name == step]
            for step in dict.fromkeys(name for name, _, _ in steps)
        },
    }


def ended(deployment: Any, run: Any, text: str) -> bool:
    """Whether the run's log says so; an error if it ends without."""
    gone = not run.process.alive()
    if text in run.log():
        return True
    if gone:
        raise deployment.error(f"the run ended without writing {text!r}")
    return False


def cpu_of(mark: str) -> float:
    """CPU seconds of all processes with this mark, and of all that they waited for."""
    wanted, rows = set(import_module("flower_deployment").marked(mark)), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            rows[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    # Those that ended and were not waited for yet have no environment to be known by.
    wanted |= {process for process, (parent, _) in rows.items() if parent in wanted}
    return sum(ticks for process, (_, ticks) in rows.items() if process in wanted) / TICK


def in_checkout(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """The same by the code of a checkout, in a process of its own."""
    path = [checkout / "src", checkout / "tests", checkout / "tests" / "federation"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.federation_rounds", "--here", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=ROOT,  # whose benchmark it is
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"measuring the code in {checkout} failed: the lines above say why")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", type=Path, help="another checkout, measured first")
    parser.add_argument("--against-rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="also with Flower's own SuperNode")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for a round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--with-flower", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measured(given.rounds, given.with_flower, given.patience)))
        return
    from fpfl.experiments.runner import about_this_run

    begun, found = time.perf_counter(), {}
    patience = ["--patience", str(given.patience)]
    if given.against is not None:
        rounds = ["--rounds", str(given.against_rounds)]
        found["before"] = in_checkout(given.against.resolve(), [*rounds, *patience])
        print("before:", found["before"], flush=True)
    rounds = ["--rounds", str(given.rounds)]
    if given.plain:
        found["with_flower_s_own_supernode"] = in_checkout(
            ROOT, [*rounds, *patience, "--with-flower"]
        )
        print("with Flower's own SuperNode:", found["with_flower_s_own_supernode"], flush=True)
    found["now"] = in_checkout(ROOT, [*rounds, *patience])
    print("now:", found["now"], flush=True)
    load = os.getloadavg()
    about = about_this_run("python -m benchmarks.federation_rounds", time.perf_counter() - begun)
    text = json.dumps(
        {**about, "load_at_the_end": [round(one, 1) for one in load], **found}, indent=1
    )
    given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
