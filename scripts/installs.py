"""Install the built wheel into empty environments, from several sets of versions, and use it.

``python scripts/installs.py known newest`` is ``make install-test``; ``make release-check`` runs
every set on every Python, with the torch that each of them names. The sets:

- *known*: ``constraints.txt``;
- *lowest*: what ``pyproject.toml`` names as the lowest of each direct dependency;
- *newest*: ``newest.txt``, which ``--refresh`` (``make newest``) writes anew;
- *flower*: ``newest-flower.txt``, the newest beside Flower, which holds typer and rich back.

In each, the wheel is installed alone first and then with its extras; ``scripts/installed.py`` says
what is done with it. Standard library alone: nothing needs to be there before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXTRAS = ("sklearn", "report", "femnist", "parquet", "tracking", "export")
"""What users install; Flower's is a set of its own, and the rest is for work on fpfl itself."""
FILES = {"known": "constraints.txt", "newest": "newest.txt", "flower": "newest-flower.txt"}
SETS = {"known": EXTRAS, "lowest": EXTRAS, "newest": EXTRAS, "flower": (*EXTRAS, "flower")}
NOT = "sympy!=1.14.0rc1"
"""uv takes this candidate, since the final version has a bound on mpmath that it has not; pip does
not."""
PYTHONS = ("3.11", "3.12", "3.13")
_CUDA = re.compile(r"^(torch|triton|nvidia-|cuda-)", re.I)
"""What the CUDA build of torch brings; with the CPU build none of it is wanted."""


def main() -> int:
    """Run what was asked for; the status says whether all of it held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--python", action="append", help="a version, or a path; may be repeated")
    parser.add_argument("--own-torch", action="store_true", help="the torch that each set names")
    parser.add_argument("--extras", help="with commas, instead of those of each set")
    parser.add_argument("--wheel", type=Path, help="this one, instead of one built now")
    parser.add_argument("--json", type=Path, help="write what was found to a file")
    parser.add_argument("--refresh", action="store_true", help="write newest*.txt anew")
    given = parser.parse_args()
    if strange := set(given.sets) - set(SETS):
        parser.error(f"there is no set {sorted(strange)}; there are {', '.join(SETS)}")
    if given.refresh:
        for name in ("newest", "flower"):
            refresh(name)
        return 0
    pythons = given.python or [f"{sys.version_info.major}.{sys.version_info.minor}"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="fpfl-installs-") as scratch:
        wheel = given.wheel or build(Path(scratch))
        for name in given.sets or ["known", "newest"]:
            extras = SETS[name] if given.extras is None else tuple(given.extras.split(","))
            for python in pythons:
                place = Path(scratch) / f"{name}-{Path(python).name}"
                row = install_and_use(name, python, extras, wheel, place, given.own_torch)
                rows.append(row)
                shutil.rmtree(place, ignore_errors=True)
                print(line_of(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(not all(row["held"] for row in rows))


def build(folder: Path) -> Path:
    """The wheel of this tree."""
    found = uv()
    how = [found, "build", "--out-dir"] if found else [sys.executable, "-m", "build", "--outdir"]
    run([*how, str(folder), "--wheel", str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_and_use(
    name: str, python: str, extras: tuple[str, ...], wheel: Path, place: Path, own_torch: bool
) -> dict[str, Any]:
    """One set on one Python: what was installed, how long it took, and whether it held."""
    row: dict[str, Any] = {"set": name, "python": python, "held": False}
    place.mkdir(parents=True)
    inside, home = place / "env" / "bin" / "python", place / "work"
    home.mkdir()
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join(versions(name, extras, own_torch)) + "\n", encoding="utf-8")
    try:
        start = time.monotonic()
        maker = [found, "venv", "--python"] if (found := uv()) else []
        run([*maker, find(python), *([] if maker else ["-m", "venv"]), str(place / "env")])
        for stage, what in (("alone", f"{wheel}"), ("extras", f"{wheel}[{','.join(extras)}]")):
            begun = time.monotonic()
            run([*tool(inside, "install"), *ONLY_WHEELS, "-c", str(constraints), what])
            row[f"install_{stage}_s"] = round(time.monotonic() - begun, 1)
            begun = time.monotonic()
            words = [str(inside), str(ROOT / "scripts" / "installed.py"), wheel.name.split("-")[1]]
            row[f"did_{stage}"] = run([*words, *(extras if stage == "extras" else ())], cwd=home)
            row[f"use_{stage}_s"] = round(time.monotonic() - begun, 1)
        run(tool(inside, "check"))
        row["held"] = True
    except subprocess.CalledProcessError as error:
        row["error"] = f"{' '.join(map(str, error.cmd))}\n{error.stdout}"[-4000:]
    row["seconds"] = round(time.monotonic() - start, 1)
    row["megabytes"] = megabytes(place / "env")
    row["versions"] = listed(inside)
    return row


ONLY_WHEELS = ("--only-binary", ":all:")
"""A lowest version that has to be compiled is none that people can install."""


def run(command: list[str], cwd: Path | None = None) -> list[str]:
    """What a command printed; nothing of this process's own packages reaches it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=clean | {"OMP_NUM_THREADS": "1"}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout.splitlines()


def uv() -> str | None:
    """The uv of this environment, or the machine's, if there is one."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


def tool(python: Path, verb: str) -> list[str]:
    """What installs into an environment: uv where there is one, and pip otherwise."""
    found = uv()
    if found is None:
        return [str(python), "-m", "pip", verb]
    if "PIP_FIND_LINKS" in os.environ:  # uv reads its own variables alone
        os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
    return [found, "pip", verb, "--python", str(python)]


def find(python: str) -> str:
    """A Python by its version (on the path, or pyenv's) or by its path."""
    if "/" in python:
        return python
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [f"python{python}", *map(str, sorted(root.glob(f"{python}.*/bin/python")))]
    for place in places:
        if shutil.which(place):
            done = subprocess.run([place, "-c", "0"], capture_output=True, check=False)
            if done.returncode == 0:  # pyenv has a python3.12 on the path that does not start
                return place
    raise SystemExit(f"there is no Python {python}; install it, or name one: --python PATH")


def versions(name: str, extras: tuple[str, ...], own_torch: bool) -> list[str]:
    """The constraints of a set; with the CPU build of torch that is known unless ``own_torch``."""
    if name == "lowest":
        lines = lowest(extras)
    else:
        text = (ROOT / FILES[name]).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if not own_torch:
        known = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        lines = [line for line in lines if not _CUDA.match(line)]
        lines += re.findall(r"^torch==.*", known, re.M)
    return lines


def lowest(extras: tuple[str, ...]) -> list[str]:
    """``name==version`` for each ``name>=version`` of ``pyproject.toml``, with its marker."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    return sorted({each.replace(">=", "==", 1) if ";" not in each else marked(each)
                   for each in needed})  # fmt: skip


def marked(requirement: str) -> str:
    """The lowest of a requirement that holds for some Pythons only."""
    name, marker = requirement.split(";", 1)
    return f"{name.replace('>=', '==', 1).strip()} ; {marker.strip()}"


def refresh(name: str) -> None:
    """Resolve the newest versions that go together, for all Pythons at once."""
    found = uv()
    if found is None:
        raise SystemExit("make newest needs uv: pip install uv")
    asked = [word for extra in SETS[name] for word in ("--extra", extra)]
    done = subprocess.run(
        [found, "pip", "compile", "--quiet", "--universal", "--no-header", "--no-annotate",
         "--upgrade", "--prerelease", "if-necessary", "--python-version", PYTHONS[0], *asked,
         "-c", "-", "pyproject.toml"],
        cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE, input=NOT,
    )  # fmt: skip
    head = (
        f"# The newest versions that go together: pip install 'fpfl[{','.join(SETS[name])}]' on\n"
        f"# {time.strftime('%Y-%m-%d')}. Written by `make newest`; checked by `make install-test`."
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("-")]
    (ROOT / FILES[name]).write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    print(f"{FILES[name]}: {len(lines)} packages")


def listed(python: Path) -> dict[str, str]:
    """What is installed in an environment, by name."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    )
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=False)
    return dict(sorted(json.loads(done.stdout).items())) if done.returncode == 0 else {}


def megabytes(folder: Path) -> int:
    """Size of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(path.stat().st_size for path in files) / 1e6)


def line_of(row: dict[str, Any]) -> str:
    """One set in a line, with what went wrong below it."""
    shown = {name: row["versions"].get(name, "none") for name in ("torch", "numpy", "typer")}
    text = (
        f"{row['set']}, Python {row['python']}: {'held' if row['held'] else 'FAILED'}, "
        f"{row['seconds']:.0f} s, {row['megabytes']} MB "
        f"({', '.join(f'{name} {version}' for name, version in shown.items())})"
    )
    return text if row["held"] else f"{text}\n{row['error']}"


if __name__ == "__main__":
    sys.exit(main())
