"""Flower's SuperNode, such that a message costs a fork and not the start of a Python program.

    fpfl-supernode [what flower-supernode takes]

is ``flower-supernode`` with three differences, for which it has no options:

- It starts ``flwr-clientapp`` for every message. Here that name is a few lines that ask a process
  which has imported Flower already to fork, and to run Flower's own ``flwr-clientapp`` with the
  same arguments. The process of a message is still one of its own, with nothing left of the last.
- It asks for messages every three seconds. Here: every ``FPFL_NODE_POLL`` seconds, 0.5 unless said.
- Its SuperExec asks for work every second. Here every 0.1 (Flower has a variable for that).

The folder with that name and the socket of the process that forks is this user's alone. Where a
version of Flower has no such thing to set, it stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL, POLL_VARIABLE = 0.5, "FPFL_NODE_POLL"
TASKS, TASKS_VARIABLE = "0.1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
COMMAND, DOOR = "flwr-clientapp", "door"
LONGEST = 2**20
"""Bytes of what is asked: arguments and environment."""

# Started by Flower for every message: it imports what it takes to ask, and waits for the end.
_ASK = """#!{python} -IS
import json, os, socket, sys
asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
asked = dict(arguments=sys.argv, folder=os.getcwd(), environment=dict(os.environ))
said = json.dumps(asked).encode()
try:
    if len(said) > {longest}:
        raise OSError
    asker.connect({door!r})
    socket.send_fds(asker, [said], [1, 2])
except OSError:  # nobody to ask, or too much to say: as Flower does it
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
answer = asker.recv(1)
sys.exit(answer[0] if answer else 1)
"""


def main() -> None:
    """Run a SuperNode."""
    try:
        from flwr.supernode.cli import flower_supernode
    except ImportError:
        sys.exit("a node needs flwr, which is not installed: pip install 'fpfl[flower]'")

    os.environ.setdefault(TASKS_VARIABLE, TASKS)
    _poll(float(os.environ.get(POLL_VARIABLE, POLL)))
    folder = Path(tempfile.mkdtemp(prefix="fpfl-node-"))  # 0700
    owner = os.getpid()
    try:
        if hasattr(os, "fork") and sys.platform == "linux":
            _begin_forking(folder)
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sys.argv[0] = "flower-supernode"
        flower_supernode()
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _poll(seconds: float) -> None:
    """How long the SuperNode sleeps between two questions, at most."""
    import flwr.supernode.start_client_internal as loop

    if hasattr(loop, "time") and hasattr(loop.time, "sleep"):
        real: Callable[[float], None] = loop.time.sleep
        loop.time = types.SimpleNamespace(sleep=lambda wanted: real(min(wanted, seconds)))


def _begin_forking(folder: Path) -> None:
    """Fork the process that forks; it ends with this one."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(folder / DOOR))
    door.listen(64)
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(theirs)
        code = 1
        try:
            _fork_on_demand(door, ours)
            code = 0
        finally:
            os._exit(code)
    os.close(ours)
    door.close()
    os.set_inheritable(theirs, False)  # held open by this process alone: its end is the signal
    command = folder / COMMAND
    real = shutil.which(COMMAND) or str(Path(sys.executable).with_name(COMMAND))
    door_path = str(folder / DOOR)
    asking = _ASK.format(python=sys.executable, door=door_path, real=real, longest=LONGEST)
    command.write_text(asking)
    command.chmod(0o700)


def _fork_on_demand(door: socket.socket, owner: int) -> None:
    """A process for everybody who asks, until the owner's end of the pipe is gone."""
    from select import select

    # Whatever a message's process imports, so that it need not.
    import flwr.supernode.runtime.run_clientapp  # noqa: F401

    import fpfl.federation.flower.client  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    awaited: list[Any] = [door, owner]
    while True:
        ready = select(awaited, [], [], 5.0)[0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if owner in ready:
            return
        if door not in ready:
            continue
        asker, _ = door.accept()
        if os.fork() == 0:
            door.close()
            os.close(owner)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _be_clientapp(asker)
        asker.close()


def _be_clientapp(asker: socket.socket) -> None:
    """Run Flower's own program with what the asker was given, and tell it how that ended."""
    from flwr.supernode.cli import flwr_clientapp

    code = 1
    try:
        message, files, _, _ = socket.recv_fds(asker, LONGEST, 2)
        asked = json.loads(message)
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = asked["arguments"]
        threading.Thread(target=_end_with, args=(asker,), daemon=True).start()
        flwr_clientapp()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        asker.send(bytes([code & 255]))
    os._exit(code & 255)


def _end_with(asker: socket.socket) -> None:
    """The end of the one that asked is the end of this process."""
    with contextlib.suppress(OSError):
        if not asker.recv(1):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
