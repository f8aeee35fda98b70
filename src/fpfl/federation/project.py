"""A federation's project: a Flower project that is ready to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fpfl.federation.enrolment import AUTHORITY
from fpfl.federation.quoting import printable, toml
from fpfl.store.files import write_whole

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "server_app.py": "{package}/server_app.py",
    "client_app.py": "{package}/client_app.py",
    "task.py": "{package}/task.py",
}
_VALUE = re.compile(r"{([a-z]+)}")
# A path may have quotes in it, and whoever reads these files takes them for the path's end.
_ESCAPED: dict[str, Callable[[str], str]] = {".toml": toml, ".md": shlex.quote}


def make_project(
    folder: Path, keys: Path, *, nodes: int, cohort: int, rounds: int, epsilon: float
) -> list[Path]:
    """Write a project into a new folder; the files that were written.

    Parameters
    ----------
    folder
        The new folder; its name is the project's.
    keys
        Where the keys are, or will be.
    nodes, cohort, rounds, epsilon
        What its agreement begins with.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise ValueError(f"{folder.name!r} is no name for a project; begin it with a letter")
    package = name.replace("-", "_")
    if find_spec(package) is not None:
        raise ValueError(f"there is a package {package!r} already; name the project otherwise")
    if nodes < 3:
        raise ValueError(f"nodes is {nodes}; a federation needs at least 3")
    paths = {
        "keys": keys.resolve().as_posix(),
        "authority": (keys.resolve() / AUTHORITY).as_posix(),
        "folder": (folder.resolve().parent / f"{name}-run").as_posix(),
    }
    values = {
        "name": name,
        "package": package,
        "nodes": str(nodes),
        "cohort": str(cohort),
        "rounds": str(rounds),
        "epsilon": f"{epsilon:g}",
    }
    for text in paths.values():
        printable(text)
    written = []
    templates = resources.files("fpfl.federation") / "template"
    (folder / package).mkdir(parents=True)
    for source, target in _FILES.items():
        template = (templates / f"{source}.txt").read_text(encoding="utf-8")
        path = folder / target.format(package=package)
        escaped = _ESCAPED.get(path.suffix, str)
        filling = values | {each: escaped(text) for each, text in paths.items()}
        write_whole(path, _filled(template, filling).encode())
        written.append(path)
    write_whole(folder / package / "__init__.py", b"")
    return written


def _filled(template: str, values: dict[str, str]) -> str:
    """A template with values for ``{name}``; what has no value stays as it is."""
    return _VALUE.sub(lambda found: values.get(found[1], found[0]), template)
