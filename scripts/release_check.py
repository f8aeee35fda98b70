"""Everything that takes too long for each change, in a clean clone: ``make release-check``.

Each step is a command; what it printed is in ``out/release-check``. Whether it held, when, on which
commit and version, goes to ``docs/results/release/release-check.json``, which is committed:
``tests/test_packaging.py`` asks that all steps be there, hold, and be no older than the last
release. ``--only STEP`` runs a step again and keeps what the file says of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "release" / "release-check.json"
LOGS = ROOT / "out" / "release-check"

STEPS = {
    "lint": "make lint",
    "dist": "make dist",
    "tests": "make nvflare-test && FPFL_RELEASE=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest "
    "-n auto --dist loadfile --no-loadscope-reorder -m release "
    "--ignore tests/federation/test_nvflare.py",
    "kills": "make kill",
    "audit": ".venv/bin/fpfl audit --out $LOGS/audit.json",
    "fuzz": ".venv/bin/python -m fuzz all -max_total_time=30",
    "installs": ".venv/bin/python scripts/installs.py lowest newest flower --own-torch "
    "--python 3.11 --python 3.12 --python 3.13 --json $LOGS/installs.json",
}
"""In this order. The tests are those that ``make test`` leaves out: every twin, every fault of a
node, real processes that are killed, NVFlare's simulator. The audit ends with an error where a
claim is refuted, and installs where one set does not work."""


def main() -> int:
    """Run the steps and write the file; the status says whether all held."""
    parser = argparse.ArgumentParser(description="Everything that takes too long for each change.")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="may be repeated")
    wanted = parser.parse_args().only or list(STEPS)
    ours = f":!{RESULTS.relative_to(ROOT)}"  # this file itself is written anew
    if changed := said("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ours):
        print(f"commit first, so that the results have a commit to name:\n{changed}")
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fpfl-release-") as scratch:
        clone = Path(scratch) / "fpfl"
        said("git", "clone", "--quiet", str(ROOT), str(clone))
        if (ROOT.parent / "shared").exists():
            (clone.parent / "shared").symlink_to(ROOT.parent / "shared")
        subprocess.run(["make", "lint"], cwd=clone, check=False, capture_output=True)  # installs
        for name in wanted:
            row = about(clone) | step(name, clone)
            found = begun()  # as it is now: another process may be at other steps
            done = found["steps"] | {name: row}
            found["steps"] = {each: done[each] for each in STEPS if each in done}
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {RESULTS.relative_to(ROOT)}")
    return int(not all(row["held"] for row in begun()["steps"].values()))


def said(*command: str) -> str:
    """What a command printed."""
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout.strip()


def begun() -> dict[str, Any]:
    """What the file says so far."""
    if RESULTS.exists():
        return dict(json.loads(RESULTS.read_text(encoding="utf-8")))
    return {"command": "make release-check", "steps": {}}


def about(clone: Path) -> dict[str, Any]:
    """What a step is run on."""
    text = (clone / "src" / "fpfl" / "__init__.py").read_text(encoding="utf-8")
    return {
        "version": re.findall(r'__version__ = "(.+)"', text)[0],
        "commit": said("git", "-C", str(clone), "rev-parse", "HEAD"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
    }


def step(name: str, clone: Path) -> dict[str, Any]:
    """Run one step, with its output in a file."""
    start = time.monotonic()
    print(f"{name}: {STEPS[name]}", flush=True)
    log = LOGS / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            ["bash", "-c", STEPS[name]], cwd=clone, check=False, stdout=file,
            stderr=subprocess.STDOUT, env=os.environ | {"LOGS": str(LOGS)},
        )  # fmt: skip
    row: dict[str, Any] = {
        "command": STEPS[name],
        "held": done.returncode == 0,
        "seconds": round(time.monotonic() - start),
    } | summary(name, log.read_text(encoding="utf-8"))
    print(f"  {'held' if row['held'] else f'FAILED: see {log}'}, {row['seconds']} s", flush=True)
    return row


def summary(name: str, text: str) -> dict[str, Any]:
    """What is worth keeping of a step's output."""
    if name in ("tests", "kills"):
        return {"said": re.findall(r"^.*\d+ passed.*$", text, re.M)[-1:]}
    if name == "fuzz":
        return {"said": [line for line in text.splitlines() if " runs in " in line]}
    if name == "audit":
        found = json.loads((LOGS / "audit.json").read_text(encoding="utf-8"))
        kept = ("claimed", "lower_bound", "caught")
        checks = ("p_value", "level", "failed")
        return {
            "said": {row: {k: v[k] for k in kept} for row, v in found["audits"].items()},
            "checks": {row: {k: v[k] for k in checks} for row, v in found["checks"].items()},
        }
    if name == "installs":
        rows = json.loads((LOGS / "installs.json").read_text(encoding="utf-8"))
        shown = ("torch", "numpy", "pydantic", "typer", "click", "rich", "scikit-learn", "flwr")
        return {
            "said": [
                {k: row[k] for k in ("set", "python", "held", "seconds", "megabytes")}
                | {"versions": {k: row["versions"][k] for k in shown if k in row["versions"]}}
                for row in rows
            ]
        }
    return {}


if __name__ == "__main__":
    sys.exit(main())
