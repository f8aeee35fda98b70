"""A virtual environment for each peer: what they need and what fpfl needs do not go together."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")

# The whole recipe: `python -m venv DIRECTORY`, then
# `pip install -c benchmarks/peers/constraints.txt REQUIREMENTS`. Neither needs any more than that.
# Flower's simulation brings ray, but no torch.
ENVIRONMENTS = {
    "pfl-research": (".venv-pfl", ("pfl[pytorch]",)),
    "flower": (".venv-flower", ("flwr[simulation]", "torch", "numpy")),
}
PYTHONS = ((3, 11), (3, 12))  # what both peers support


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made where it is missing or out of date."""
    directory, requirements = ENVIRONMENTS[peer]
    folder = ROOT / directory
    python = folder / "bin" / "python"
    recipe = "\n".join([*requirements, CONSTRAINTS.read_text()])
    stamp = folder / ".stamp"  # written last: an interrupted installation is no environment
    if python.exists() and stamp.exists() and stamp.read_text() == recipe:
        return python
    print(f"Installing {peer} into {directory} (once)", file=sys.stderr, flush=True)
    _run([_base_python(), "-m", "venv", "--clear", str(folder)], f"making {directory}")
    (folder / ".gitignore").write_text("*\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--quiet"]
    _run([*pip, "-c", str(CONSTRAINTS), *requirements], f"installing {', '.join(requirements)}")
    stamp.write_text(recipe)
    return python


def _base_python() -> str:
    """An interpreter that the peers support: this one, or another that can be found."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    names = [f"python{major}.{minor}" for major, minor in PYTHONS]
    for name in names:
        if found := shutil.which(name):
            return found
    raise RuntimeError(f"the peers need one of {', '.join(names)} on the path; none was found")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise RuntimeError(f"{what} failed:\n{tail}")
