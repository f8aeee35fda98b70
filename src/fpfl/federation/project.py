"""A federation's project: a Flower project that is ready to run, and what starts it."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fpfl.federation.enrolment import IDENTITY, ROOT, SERVER, SERVER_KEY, SUPERNODE
from fpfl.store.files import write_whole

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "server_app.py": "{package}/server_app.py",
    "client_app.py": "{package}/client_app.py",
    "task.py": "{package}/task.py",
}
_VALUE = re.compile(r"{([a-z]+)}")


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
    values = {
        "name": name,
        "package": package,
        "keys": keys.resolve().as_posix(),
        "folder": (folder.resolve().parent / f"{name}-run").as_posix(),
        "nodes": str(nodes),
        "cohort": str(cohort),
        "rounds": str(rounds),
        "epsilon": f"{epsilon:g}",
    }
    written = []
    templates = resources.files("fpfl.federation") / "template"
    (folder / package).mkdir(parents=True)
    for source, target in _FILES.items():
        text = (templates / f"{source}.txt").read_text(encoding="utf-8")
        path = folder / target.format(package=package)
        filled = _VALUE.sub(lambda found: values.get(found[1], found[0]), text)
        write_whole(path, filled.encode())
        written.append(path)
    write_whole(folder / package / "__init__.py", b"")
    return written


def commands(project: Path, keys: Path, home: Path, *, nodes: int, port: int) -> str:
    """What starts a whole federation on one machine, as a script for a shell."""
    for path in (project / "pyproject.toml", keys / ROOT, keys / f"node-{nodes}" / IDENTITY):
        if not path.is_file():
            raise ValueError(
                f"{path} is not there: fpfl federation init makes a project, and fpfl federation "
                f"keys the keys, for {nodes} nodes"
            )

    def quoted(path: Path) -> str:
        return shlex.quote(str(path))

    config = f"""\
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
root-certificates = "{keys / ROOT}"
"""
    lines = [
        "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1",
        f"mkdir -p {quoted(home)} && cat > {quoted(home / 'config.toml')} <<'END'",
        config + "END",
        f"export FLWR_HOME={quoted(home)}",
        "# The server's side: TLS on, and only nodes whose keys are registered.",
        f"flower-superlink --host 127.0.0.1 --port {port} --enable-supernode-auth \\",
        "  --disable-runtime-dependency-installation \\",
        f"  --ssl-ca-certfile {quoted(keys / ROOT)} --ssl-certfile {quoted(keys / SERVER)} \\",
        f"  --ssl-keyfile {quoted(keys / SERVER_KEY)} > {quoted(home / 'superlink.log')} 2>&1 &",
        "pids=$!",
        "trap 'kill $pids' EXIT  # all of it ends with this script",
        f"until flwr supernode list here > {quoted(home / 'list.log')} 2>&1; do sleep 1; done",
    ]
    for i in range(nodes):
        own = keys / f"node-{i + 1}"
        given = f'identity="{own / IDENTITY}" partition-id={i}'
        lines += [
            f"# Node {i + 1}: register its public key, then start it.",
            f"flwr supernode register {quoted(own / f'{SUPERNODE}.pub')} here",
            f"FLWR_HOME={quoted(home / f'node-{i + 1}')} flower-supernode \\",
            f"  --superlink 127.0.0.1:{port} --port {port + 1 + i} \\",
            f"  --root-certificates {quoted(keys / ROOT)} \\",
            f"  --auth-supernode-private-key {quoted(own / SUPERNODE)} \\",
            f"  --node-config {shlex.quote(given)} > {quoted(home / f'node-{i + 1}.log')} 2>&1 &",
            'pids="$pids $!"',
        ]
    lines += [
        "# The training itself.",
        f"flwr run {quoted(project)} here --stream",
    ]
    return "\n".join(lines)
