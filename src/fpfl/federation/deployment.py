"""What starts a whole federation on one machine, and a run of it whose end is its exit status."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fpfl.federation.enrolment import IDENTITY, ROOT, SUPERNODE
from fpfl.federation.quoting import printable, toml
from fpfl.federation.services import node_config, superlink, supernode

log = logging.getLogger("fpfl.federation")

CONNECTION = "here"
"""What Flower's configuration calls the SuperLink of this machine."""

CONFIG, DATABASE = "config.toml", "superlink.db"
STARTED = "Successfully started run "
COMPLETED, ENDED = "finished:completed", "finished:"
POLL = 2.0

# Who has a port is asked before anything is started: another SuperLink would answer in its place.
_PORTS = """\
import socket, sys
for port in sys.argv[1:]:
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", int(port)))
        except OSError as error:
            sys.exit(f"port {port} of 127.0.0.1 cannot be had ({error.strerror}): stop what "
                     "listens there, or take another with --port")
"""

_KEEP = """\
# Starts a part of the federation, and starts it again whenever it ends: keep LOG COMMAND...
keep() {
  log=$1
  shift
  trap 'kill "$child" 2>/dev/null; wait "$child"; exit' TERM INT
  while :; do
    "$@" >> "$log" 2>&1 & child=$!
    wait "$child"
    echo "ended with status $?; it is started again" >> "$log"
    sleep 2 & child=$!
    wait "$child"
  done
}
# Registers a node's key; one that is registered stays so: the database has it.
register() {
  flwr supernode register "$1" here --name "$2" > "$list" 2>&1 ||
    grep -q 'already in use' "$list" || { cat "$list" >&2; exit 1; }
}
"""


def commands(project: Path, keys: Path, home: Path, *, nodes: int, port: int) -> str:
    """What starts a whole federation on one machine, as a script for a shell.

    Parameters
    ----------
    project, keys
        What ``fpfl federation init`` and ``keys`` made.
    home
        For logs, the SuperLink's database, and Flower's own files.
    nodes
        How many nodes are started.
    port
        The SuperLink's; the nodes have those after it.
    """
    for path in (project / "pyproject.toml", keys / ROOT, keys / f"node-{nodes}" / IDENTITY):
        if not path.is_file():
            raise ValueError(
                f"{path} is not there: fpfl federation init makes a project, and fpfl federation "
                f"keys the keys, for {nodes} nodes"
            )
    if not 0 < port < 65536 - nodes:
        raise ValueError(
            f"port is {port}; expected 1 to {65535 - nodes}: {nodes} more are the nodes'"
        )

    def quoted(text: str | Path) -> str:
        return shlex.quote(printable(text))

    def command(words: Sequence[str]) -> str:
        """Words of a command, an option and what it is given on a line."""
        lines = [quoted(words[0])]
        for word in words[1:]:
            if word.startswith("--"):
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {quoted(word)}"
        return " \\\n".join(lines)

    ports = " ".join(str(port + i) for i in range(nodes + 1))
    lines = [
        "# Starts a federation on this machine. It ends as its run does: 0 if that was completed.",
        "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1",
        f"export FLWR_HOME={quoted(home)}",
        f"list={quoted(home / 'list.log')}",
        _KEEP + f"{quoted(sys.executable)} -c {shlex.quote(_PORTS)} {ports} || exit 1",
        f"mkdir -p {quoted(home)} && chmod 700 {quoted(home)} || exit 1",
        f"printf %s {shlex.quote(connection(port, keys / ROOT))} > {quoted(home / CONFIG)}",
        "pids=",
        "trap 'kill $pids 2>/dev/null; wait' EXIT  # all of it ends with this script",
        "trap 'exit 130' INT",
        "trap 'exit 143' TERM",
        "# The server's side: TLS on, and only nodes whose keys are registered.",
        f"keep {quoted(home / 'superlink.log')} "
        f"{command(superlink(str(keys), str(home / DATABASE), port=port))} &",
        'pids="$pids $!"',
        "tries=0",
        f'until flwr supernode list {CONNECTION} > "$list" 2>&1; do',
        "  tries=$((tries + 1))",
        '  [ "$tries" -lt 60 ] || {',
        f"    echo 'the SuperLink does not answer; its last words, and its log is' "
        f"{quoted(home / 'superlink.log')}: >&2",
        f"    tail -n 20 {quoted(home / 'superlink.log')} >&2",
        "    exit 1",
        "  }",
        "  sleep 1",
        "done",
    ]
    for i in range(nodes):
        own = keys / f"node-{i + 1}"
        told = node_config(own / IDENTITY, {"partition-id": i})
        words = supernode(f"127.0.0.1:{port}", str(own), str(keys / ROOT), told, port=port + 1 + i)
        lines += [
            f"# Node {i + 1}: register its public key, then start it.",
            f"register {quoted(own / f'{SUPERNODE}.pub')} node-{i + 1}",
            f"FLWR_HOME={quoted(home / f'node-{i + 1}')} "
            f"keep {quoted(home / f'node-{i + 1}.log')} {command(words)} &",
            'pids="$pids $!"',
        ]
    lines += [
        "# The training itself, behind: a shell hears no signal while it waits for one in front.",
        f"fpfl federation run {quoted(project)} {CONNECTION} & run=$!",
        'pids="$pids $run"',
        'wait "$run"',
        "exit $?",
    ]
    return "\n".join(lines)


def connection(port: int, root: Path) -> str:
    """Flower's configuration for who starts runs on this machine."""
    return (
        f"[superlink]\ndefault = {toml(CONNECTION)}\n\n[superlink.{CONNECTION}]\n"
        f"address = {toml(f'127.0.0.1:{port}')}\nroot-certificates = {toml(root)}\n"
    )


def run(project: str, name: str, config: str | None = None, *, patience: float = 120.0) -> str:
    """Run a project and print what it says; how it ended, in Flower's words.

    ``flwr run`` alone says nothing of how a run ended. A SuperLink that is started again meanwhile
    is waited for: it knows the run if it has a database.

    Parameters
    ----------
    project
        The project's folder.
    name
        The connection in Flower's configuration.
    config
        Settings of the run in place of the project's (``flwr run --run-config``).
    patience
        Seconds to wait for a SuperLink that does not answer.
    """
    words = ["flwr", "run", project, name, "--stream"]
    if config is not None:
        words += ["--run-config", config]
    run_id = None
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if run_id is None and STARTED in line:
                    run_id = int(line.partition(STARTED)[2].split()[0])
        finally:
            process.terminate()
    if run_id is None:
        return "not started"
    return ending(name, run_id, patience)


def ending(name: str, run_id: int, patience: float) -> str:
    """Wait for the end of a run that was started: Flower's status, with what it says of it."""
    from fpfl.federation.status import UnreachableError, of_run

    deadline = time.monotonic() + patience
    while True:
        try:
            status = of_run(name, run_id)
        except UnreachableError as error:
            if time.monotonic() >= deadline:
                return f"not known: {error}"
        else:
            if status.startswith(ENDED):
                return status
            deadline = time.monotonic() + patience
        time.sleep(POLL)
