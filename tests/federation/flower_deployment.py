"""A whole Flower federation on this machine, for tests: TLS, authenticated nodes, real processes.

Everything lives in a temporary folder: certificates, keys, Flower's homes, logs. The processes are
the real ones (``flower-superlink``, ``flower-supernode``, ``flwr run``), on free ports of the
loopback interface. Two accelerators change no behaviour but waiting, and can be turned off:

``warm``
    Flower starts a Python process for every message that a node handles, which costs a second of
    imports (and more with torch). With ``warm`` the process is forked from one that has imported
    them already: it is still a new process for every message, with nothing left from the last.
``idle_poll``
    A SuperNode that found no message asks again after 3 seconds, which no option changes. Here it
    asks after ``idle_poll`` seconds; None leaves Flower's program as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from fpfl.federation.proxy import nginx
from fpfl.federation.transport import make_certificates, make_supernode_key

T = TypeVar("T")

BIN = Path(sys.executable).parent
NAME = "test"  # of the connection in Flower's configuration
MARK = "FPFL_TEST_DEPLOYMENT"  # in the environment of every process, which is how they are found
TAIL = 40  # lines of every log in a failure's message
# A node that vanished counts as online until two of its heartbeats, 30 s apart, are missing, and
# until then nobody can come back with its key.
FORGOTTEN = 75.0
# Seconds until what hangs is given up. A machine that is busy with other things takes its time.
PATIENCE = 300.0

# What runs with `python -c`. The SuperNode as it is, but for how long it sleeps between questions.
SUPERNODE = """
import sys, time, types
import flwr.supernode.start_client_internal as loop
from flwr.supernode.cli import flower_supernode
poll = float(sys.argv.pop(1))
loop.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, poll)))
sys.argv[0] = "flower-supernode"
flower_supernode()
"""
# Flower's command line, once for each list of arguments: one start instead of one for every node.
COMMANDS = """
import json, sys
from flwr.cli.app import app
for arguments in json.loads(sys.argv[1]):
    app(arguments, standalone_mode=False)
"""
# Forks a process that has imported everything for whoever asks over the socket, and runs Flower's
# `flwr-clientapp` in it, with the arguments, folder, environment and output of the one that asked.
WARM = """
import importlib, json, os, signal, socket, sys, threading
from flwr.supernode.cli import flwr_clientapp
for name in sys.argv[2:]:
    importlib.import_module(name)

def serve(asker):
    message, fds, _, _ = socket.recv_fds(asker, 1 << 20, 2)
    asked = json.loads(message)
    for number, fd in zip((1, 2), fds):
        os.dup2(fd, number)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["arguments"]

    def follow():  # the asker's death is this process's death
        if not asker.recv(1):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    code = 0
    try:
        flwr_clientapp()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    asker.send(bytes([code & 255]))
    os._exit(code)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.bind(sys.argv[1])
door.listen(64)
print("warm", flush=True)
while True:
    asker, _ = door.accept()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        door.close()
        serve(asker)
    asker.close()
"""
SHIM = """#!{python} -IS
import json, os, socket, sys
asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
asker.connect({door!r})
asked = dict(arguments=sys.argv, folder=os.getcwd(), environment=dict(os.environ))
socket.send_fds(asker, [json.dumps(asked).encode()], [1, 2])
answer = asker.recv(1)
sys.exit(answer[0] if answer else 1)
"""


# Waits for the end of the test's process, however it comes, and removes what is left of it.
KEEPER = """
import os, shutil, signal, sys
mark, folder = sys.argv[1].encode(), sys.argv[2]
sys.stdin.read()
for _ in range(3):
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
shutil.rmtree(folder, ignore_errors=True)
"""


class DeploymentError(RuntimeError):
    """Something did not start, did not end or ended badly; the message ends with the logs."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended: Flower's status ("finished:completed", ...) and all that it wrote."""

    run_id: int
    status: str
    log: str
    seconds: float

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


@dataclass
class Process:
    """One of the federation's processes, its log, and the mark by which its children are found."""

    name: str
    mark: str
    log: Path
    popen: subprocess.Popen[bytes]

    def alive(self) -> bool:
        return self.popen.poll() is None


@dataclass
class Run:
    """A run under way: ``wait()`` for its end; ``log()`` is what it has written so far."""

    deployment: Deployment
    process: Process
    began: float = field(default_factory=time.monotonic)
    _id: int | None = None

    def log(self) -> str:
        return read(self.process.log)

    @property
    def run_id(self) -> int:
        """The run's id, once Flower has given it one."""
        if self._id is None:
            log = self.wait_for("Successfully started run")
            self._id = int(log.partition("Successfully started run ")[2].split()[0])
        return self._id

    def wait_for(self, text: str, timeout: float = PATIENCE) -> str:
        """The log once it contains ``text``; an error if it ends without."""

        def there() -> str | None:
            ended = not self.process.alive()
            log = self.log()
            if text in log:
                return log
            if ended:
                raise self.deployment.error(f"the run ended without writing {text!r}")
            return None

        return self.deployment.wait_for(there, timeout, f"{text!r} in the run's log")

    def wait(self, timeout: float = PATIENCE) -> RunResult:
        """Wait until the run has ended, however it did."""
        run_id = self.run_id
        self.deployment.wait_for(
            lambda: not self.process.alive(), timeout, f"run {run_id} to end", poll=0.1
        )
        status = self.deployment.status(run_id)
        return RunResult(run_id, status, self.log(), time.monotonic() - self.began)


class Deployment:
    """A SuperLink and ``nodes`` SuperNodes, with TLS and node authentication, as long as it lasts.

    ``node_configs`` has one mapping per node for ``--node-config`` (by default ``partition-id`` and
    ``num-partitions``). ``environment`` is added to every process's. ``python_path`` goes to the
    front of PYTHONPATH. ``preload`` names the modules the warm process imports besides Flower's.
    With ``proxy`` nodes reach the SuperLink through nginx, and know no other way.
    """

    def __init__(
        self,
        nodes: int = 5,
        *,
        node_configs: Sequence[Mapping[str, bool | int | float | str]] | None = None,
        environment: Mapping[str, str] | None = None,
        python_path: Iterable[Path | str] = (),
        warm: bool = True,
        preload: Sequence[str] = (),
        idle_poll: float | None = 0.2,
        task_poll: float | None = 0.05,
        database: bool = False,
        proxy: bool = False,
    ) -> None:
        self.nodes = nodes
        self.node_configs = list(
            node_configs
            if node_configs is not None
            else [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        )
        self.warm = warm and sys.platform == "linux"
        self.preload = list(preload)
        self.idle_poll = idle_poll
        self.task_poll = task_poll
        self.database = database
        self.folder = Path(tempfile.mkdtemp(prefix="fpfl-"))
        self.id = uuid.uuid4().hex
        self.node_ids: list[int] = []
        self.superlink: Process | None = None
        self.supernodes: dict[int, Process] = {}
        self._warm: Process | None = None
        self._others: list[Process] = []
        self._environment = dict(environment or {})
        self._python_path = [str(p) for p in python_path]
        self._logs: list[Path] = []
        self._count = 0
        self._stopped = False
        self.port = self.door = free_port()
        self.proxy: Process | None = None
        if proxy:
            self.door = free_port()
        self._keeper = subprocess.Popen(
            [sys.executable, "-IS", "-c", KEEPER, f"{MARK}={self.id}", str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.stop)

    # --- Beginning and end ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None and not isinstance(value, DeploymentError):
            value.add_note(self.tails())
        self.stop()

    def start(self) -> None:
        for name in ("certificates", "keys"):
            (self.folder / name).mkdir()
        make_certificates(self.folder / "certificates", ("127.0.0.1", "localhost"))
        for i in range(self.nodes):
            make_supernode_key(self.key(i))
        home = self.home("cli")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
            f'address = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.certificate("ca.pem")}"\n'
        )
        if self.warm:
            self._start_warm()
        self.start_superlink()
        if self.door != self.port:
            self.start_proxy()
        self.node_ids = self.register([self.key(i) for i in range(self.nodes)])
        for i in range(self.nodes):
            self.start_node(i, wait=False)
        for i in range(self.nodes):
            self.wait_for_node(i)

    def stop(self) -> None:
        """Kill everything and remove the folder. May be called again."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        processes = [*self._others, *self.supernodes.values(), self.proxy, self.superlink]
        processes.append(self._warm)
        for process in processes:
            if process is not None:
                kill_group(process)
        deadline = time.monotonic() + 5
        while (left := marked(self.id)) and time.monotonic() < deadline:
            for pid in left:
                kill(pid)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._keeper.communicate()

    # --- The SuperLink -------------------------------------------------------------------------

    def start_superlink(self) -> None:
        """Start the SuperLink on its port and wait until it answers."""
        command = [str(BIN / "flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ssl-ca-certfile", self.certificate("ca.pem")]
        command += ["--ssl-certfile", self.certificate("server.pem")]
        command += ["--ssl-keyfile", self.certificate("server.key")]
        command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        if self.database:
            command += ["--database", str(self.folder / "superlink.db")]
        self.superlink = self._start("superlink", command)
        self._wait_for_answer(self.superlink, self.port)

    def start_proxy(self) -> None:
        """Start nginx as ``fpfl federation proxy`` writes it, and wait until it answers."""
        names = ("ca.pem", "server.pem", "server.key")
        text = nginx(
            *(Path(self.certificate(name)) for name in names),
            name="localhost",
            listen=f"127.0.0.1:{self.door}",
            superlink=f"127.0.0.1:{self.port}",
        )
        # As root its processes would be somebody else's, who may not enter the test's folder.
        if os.geteuid() == 0:
            text = f"user root;\n{text}"
        place = self.folder / "nginx"
        place.mkdir(exist_ok=True)
        (place / "nginx.conf").write_text(text)
        command = ["nginx", "-p", str(place), "-c", "nginx.conf", "-g", "daemon off;"]
        self.proxy = self._start("proxy", command)
        self._wait_for_answer(self.proxy, self.door)

    def _wait_for_answer(self, process: Process, port: int) -> None:
        trust = ssl.create_default_context(cafile=self.certificate("ca.pem"))
        url = f"https://127.0.0.1:{port}/health"

        def answers() -> bool:
            if not process.alive():
                raise self.error(f"{process.name} ended while it started")
            try:
                with urllib.request.urlopen(url, timeout=2, context=trust):
                    return True
            except urllib.error.HTTPError:  # the proxy's refusal
                return True
            except OSError:
                return False

        self.wait_for(answers, PATIENCE, f"{process.name} to answer")

    def kill_superlink(self) -> None:
        """SIGKILL for the SuperLink and all that it started, the running ServerApp too."""
        assert self.superlink is not None
        self._kill(self.superlink)

    def server_apps(self) -> list[int]:
        """The process ids of running ServerApps."""
        assert self.superlink is not None
        return [p for p in marked(self.superlink.mark) if "flwr-serverapp" in command_line(p)]

    def kill_server_app(self, timeout: float = PATIENCE) -> None:
        """SIGKILL for the running ServerApp (once there is one); the SuperLink stays."""
        for pid in self.wait_for(self.server_apps, timeout, "a ServerApp to be running"):
            kill(pid)

    # --- The SuperNodes ------------------------------------------------------------------------

    def register(self, keys: Sequence[Path]) -> list[int]:
        """Register the nodes with these keys; their ids."""
        calls = [["supernode", "register", f"{key}.pub", NAME, "--format", "json"] for key in keys]
        text = self.cli(*calls)
        ids = [int(found) for found in re.findall(r'"node-id":\s*"?(\d+)', text)]
        if len(ids) != len(keys):
            raise self.error(f"{len(ids)} of {len(keys)} nodes were registered:\n{text}")
        return ids

    def supernode_command(
        self,
        i: int,
        *,
        key: Path | None = None,
        authenticate: bool = True,
        root: str | None = None,
    ) -> list[str]:
        """What starts node ``i``; with another key, without one, or trusting another root."""
        command = (
            [str(BIN / "flower-supernode")]
            if self.idle_poll is None
            else [sys.executable, "-c", SUPERNODE, str(self.idle_poll)]
        )
        command += ["--superlink", f"127.0.0.1:{self.door}", "--port", str(free_port())]
        command += ["--root-certificates", root or self.certificate("ca.pem")]
        if authenticate:
            command += ["--auth-supernode-private-key", str(key or self.key(i))]
        if config := self.node_configs[i]:
            pairs = (f"{name}={json.dumps(value)}" for name, value in config.items())
            command += ["--node-config", " ".join(pairs)]
        return command

    def start_node(self, i: int, *, wait: bool = True) -> None:
        """Start node ``i``, also after it was killed: then this may take over a minute."""
        if (old := self.supernodes.get(i)) is not None and old.alive():
            raise self.error(f"node {i} is running already")
        self.supernodes[i] = self._start(f"node-{i}", self.supernode_command(i))
        if wait:
            self.wait_for_node(i)

    def wait_for_node(self, i: int, timeout: float = FORGOTTEN + PATIENCE) -> None:
        """Wait until node ``i`` is admitted; it is started again while its place is taken."""

        def admitted() -> bool:
            process = self.supernodes[i]
            ended = not process.alive()
            log = read(process.log)
            if "SuperNode ID:" in log:
                return True
            if ended:
                if "could not be activated" not in read(self._superlink_log()):
                    raise self.error(f"node {i} was not admitted")
                time.sleep(1)
                self.supernodes[i] = self._start(f"node-{i}", self.supernode_command(i))
            return False

        self.wait_for(admitted, timeout, f"node {i} to be admitted")

    def refused(self, i: int, timeout: float = PATIENCE, **changes: Any) -> tuple[int, str]:
        """Start a node that is not to be admitted: its exit code and its log.

        Where the proxy refuses its first call, Flower's SuperNode fails and its process may stay:
        that it was refused is what counts, and its code is that of a kill then.
        """
        process = self._start(f"stranger-{i}", self.supernode_command(i, **changes))
        self._others.append(process)

        def ended() -> bool:
            if "SuperNode ID:" in read(process.log):
                raise self.error("a stranger was admitted")
            return not process.alive() or "403 Forbidden" in read(process.log)

        self.wait_for(ended, timeout, "the stranger to give up")
        self._kill(process)
        return process.popen.wait(), read(process.log)

    def kill_node(self, i: int) -> None:
        """SIGKILL for node ``i`` and all that it started, the ClientApp it runs too."""
        self._kill(self.supernodes[i])

    def stop_node(self, i: int, timeout: float = PATIENCE) -> None:
        """Ask node ``i`` to end: it says goodbye to the SuperLink and can come back at once."""
        process = self.supernodes[i]
        process.popen.terminate()
        self.wait_for(lambda: not process.alive(), timeout, f"node {i} to end")
        self._kill(process)

    def client_apps(self, i: int) -> list[int]:
        """The process ids of node ``i``'s running ClientApps."""
        return [p for p in marked(self.supernodes[i].mark) if "flwr-clientapp" in command_line(p)]

    # --- Runs ----------------------------------------------------------------------------------

    def start_run(
        self,
        app: Path | str,
        run_config: Mapping[str, bool | int | float | str] | None = None,
    ) -> Run:
        """Start ``flwr run`` and return at once."""
        command = [str(BIN / "flwr"), "run", str(app), NAME, "--stream"]
        if run_config:
            pairs = (f"{name}={json.dumps(value)}" for name, value in run_config.items())
            command += ["--run-config", " ".join(pairs)]
        self._count += 1
        process = self._start(f"run-{self._count}", command, home="cli")
        self._others.append(process)
        return Run(self, process)

    def run(
        self,
        app: Path | str,
        run_config: Mapping[str, bool | int | float | str] | None = None,
        *,
        timeout: float = PATIENCE,
        check: bool = True,
    ) -> RunResult:
        """Run an app to its end; with ``check``, anything but success is an error."""
        result = self.start_run(app, run_config).wait(timeout)
        if check and not result.completed:
            raise self.error(f"the run ended as {result.status}")
        return result

    def status(self, run_id: int) -> str:
        """Flower's status of a run."""
        answer = self.cli(["list", NAME, "--run-id", str(run_id), "--format", "json"])
        found = re.search(r'"status":\s*"([^"]+)"', answer)
        return found[1] if found else answer

    def online(self) -> list[int]:
        """The ids of the nodes that the SuperLink believes to be online."""
        answer = self.cli(["supernode", "list", NAME, "--format", "json"])
        nodes = json.loads(answer[answer.index("{") :])["nodes"]
        return [int(node["node-id"]) for node in nodes if node["status"] == "online"]

    def cli(self, *calls: Sequence[str], timeout: float = PATIENCE) -> str:
        """What Flower's command line writes to these calls, made one after the other."""
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps([list(call) for call in calls])],
            env=self.environment(f"{self.id}:cli", "cli"),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise self.error(f"flwr failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    # --- Processes and files -------------------------------------------------------------------

    def certificate(self, name: str) -> str:
        return str(self.folder / "certificates" / name)

    def key(self, i: int) -> Path:
        return self.folder / "keys" / f"node-{i}"

    def home(self, name: str) -> Path:
        """A Flower home of its own for every node, as on machines of their own."""
        path = self.folder / "homes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, mark: str, home: str) -> dict[str, str]:
        path = [str(self.folder / "bin")] if self.warm else []
        values = {name: text for name, text in os.environ.items() if not name.startswith("FLWR_")}
        values |= {
            "PATH": os.pathsep.join([*path, str(BIN), os.environ.get("PATH", os.defpath)]),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self.home(home)),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_COLOR": "1",
            MARK: mark,
        }
        if self.task_poll is not None:
            values["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(self.task_poll)
        if self._python_path:
            old = [values["PYTHONPATH"]] if values.get("PYTHONPATH") else []
            values["PYTHONPATH"] = os.pathsep.join([*self._python_path, *old])
        return values | self._environment

    def _start(self, name: str, command: list[str], home: str | None = None) -> Process:
        self._count += 1
        mark = f"{self.id}:{name}:{self._count};"
        log = self.folder / "logs" / f"{name}.{self._count}.log"
        log.parent.mkdir(exist_ok=True)
        self._logs.append(log)
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command,
                env=self.environment(mark, home or name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Process(name, mark, log, popen)

    def _start_warm(self) -> None:
        door = str(self.folder / "door")
        shim = self.folder / "bin" / "flwr-clientapp"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(python=sys.executable, door=door))
        shim.chmod(0o755)
        process = self._start("warm", [sys.executable, "-c", WARM, door, *self.preload])
        self._warm = process

        def ready() -> bool:
            if not process.alive():
                raise self.error("the warm process ended")
            return "warm" in read(process.log)

        self.wait_for(ready, PATIENCE, "the warm process")

    def _kill(self, process: Process) -> None:
        kill_group(process)
        deadline = time.monotonic() + 5
        while left := marked(process.mark):
            for pid in left:
                kill(pid)
            if time.monotonic() > deadline:
                raise self.error(f"{process.name} would not die: {left}")
            time.sleep(0.02)

    # --- Waiting and failing -------------------------------------------------------------------

    def wait_for(
        self, question: Callable[[], T], timeout: float, what: str, poll: float = 0.05
    ) -> T:
        """The first answer that counts as true; an error with the logs after ``timeout``."""
        deadline = time.monotonic() + timeout
        while not (answer := question()):
            if time.monotonic() > deadline:
                raise self.error(f"waited {timeout:g} s for {what}")
            time.sleep(poll)
        return answer

    def error(self, text: str) -> DeploymentError:
        return DeploymentError(f"{text}\n{self.tails()}")

    def tails(self) -> str:
        """The end of every log."""
        parts = []
        for log in self._logs:
            lines = read(log).splitlines()[-TAIL:]
            parts.append("\n".join([f"--- {log.stem} ---", *lines]))
        return "\n".join(parts)

    def _superlink_log(self) -> Path:
        assert self.superlink is not None
        return self.superlink.log


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(process: Process) -> None:
    """SIGKILL for a process and its group; the rest of what it started is found by its mark."""
    if process.alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
    for pid in marked(process.mark):
        kill(pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.popen.wait(5)


def marked(mark: str) -> list[int]:
    """The living processes whose environment has a mark that begins with ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
