"""What starts a federation: start.sh with programs that only write down how they were called."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed")

from conftest import make_population
from flower_deployment import free_port
from killing import settings
from typer.testing import CliRunner

import fpfl
from fpfl.cli import app
from fpfl.federation import deployment, services
from fpfl.federation.deployment import commands, ending
from fpfl.federation.enrolment import make_keys
from fpfl.federation.project import make_project
from fpfl.federation.quoting import address, host, plain, toml
from fpfl.federation.status import Link, Node, UnreachableError
from fpfl.report.standing import standing

# Writes down how it was called, does as NAME.does says, and stays if it is a part that stays.
STUB = """#!{python} -IS
import json, os, pathlib, sys, time
place = pathlib.Path({place!r})
name = os.path.basename(sys.argv[0])
with (place / f"{{name}}.calls").open("a") as file:
    file.write(json.dumps([os.getpid(), *sys.argv[1:]]) + "\\n")
does = place / f"{{name}}.does"
if does.exists():
    exec(does.read_text())
if name in ("flower-superlink", "fpfl-supernode"):
    time.sleep(600)
"""


class Stubs:
    """Programs of Flower's names, first on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("flower-superlink", "fpfl-supernode", "flwr", "fpfl"):
            path = folder / name
            path.write_text(STUB.format(python=sys.executable, place=str(folder)))
            path.chmod(0o755)

    def does(self, name: str, text: str) -> None:
        (self.folder / f"{name}.does").write_text(text)

    def calls(self, name: str) -> list[list[str]]:
        path = self.folder / f"{name}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)[1:] for line in lines]

    def alive(self) -> list[int]:
        found = []
        for path in self.folder.glob("*.calls"):
            for line in path.read_text().splitlines():
                pid = json.loads(line)[0]
                state = Path(f"/proc/{pid}/stat")
                if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(pid)
        return found

    def start(self, script: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh"],
            stdin=self._file(script),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"},
            start_new_session=True,
            # A shell in the background has Ctrl-C ignored in all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, script: str) -> tuple[int, str]:
        process = self.start(script)
        try:
            said, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said

    def _file(self, script: str):
        path = self.folder / "start.sh"
        path.write_text(script)
        return path.open()


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    return Stubs(tmp_path / "bin")


def made(folder: Path, name: str = "it", port: int | None = None) -> str:
    """A project and its keys in a folder, and what starts them."""
    make_project(folder / name, folder / "keys", nodes=3, cohort=5, rounds=2, epsilon=1)
    make_keys(folder / "keys", 3)
    places = (folder / name, folder / "keys", folder / "home")
    # Four ports in a row.
    return commands(*places, nodes=3, port=port or free_port())


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds its processes by /proc")


@linux
@pytest.mark.parametrize(
    "name", ["a 'b' $(touch hit) `touch hit`; touch hit", "END", "été ${HOME} # %s", "-x & y"]
)
def test_no_path_is_taken_for_a_command(stubs, tmp_path, name):
    """In the script, in Flower's configuration, and in the project's own file."""
    folder = tmp_path / name
    folder.mkdir()
    calls = str(stubs.folder / "fpfl-supernode.calls")  # else the run may end before they begin
    stubs.does("fpfl", f"while not os.path.exists({calls!r}) or "
               f"len(open({calls!r}).readlines()) < 3: time.sleep(0.05)")  # fmt: skip
    code, said = stubs.run(made(folder))
    assert code == 0, said
    assert not list(tmp_path.rglob("hit"))
    assert stubs.calls("fpfl") == [["federation", "run", str(folder / "it"), "here"]]
    (link,) = stubs.calls("flower-superlink")
    assert link[link.index("--database") + 1] == str(folder / "home" / "superlink.db")
    assert link[link.index("--ssl-keyfile") + 1] == str(folder / "keys" / "server.key")
    assert "--enable-supernode-auth" in link
    nodes = stubs.calls("fpfl-supernode")
    assert sorted(call[call.index("--node-config") + 1] for call in nodes) == [
        f'identity="{folder}/keys/node-{i + 1}/identity" partition-id={i}' for i in range(3)
    ]
    config = tomllib.loads((folder / "home" / "config.toml").read_text())
    assert config["superlink"]["here"]["root-certificates"] == str(folder / "keys" / "ca.pem")
    settings = tomllib.loads((folder / "it" / "pyproject.toml").read_text())
    assert settings["tool"]["flwr"]["app"]["config"] == {
        "folder": str(folder / "it-run"),
        "authority": str(folder / "keys" / "authority.key"),
        "ledger": "",
        "simulation-keys": str(folder / "keys"),
    }
    assert (folder / "home").stat().st_mode & 0o77 == 0


def test_what_no_escape_is_for_is_refused(tmp_path):
    for name in ("two\nEND\ntouch hit\n", "bell\a", "del\x7f"):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(ValueError, match="cannot be printed"):
            make_project(folder / "it", folder / "keys", nodes=3, cohort=5, rounds=2, epsilon=1)
        make_project(tmp_path / f"p{len(name)}", tmp_path, nodes=3, cohort=5, rounds=2, epsilon=1)
        make_keys(folder / "keys", 3)
        with pytest.raises(ValueError, match="cannot be printed"):
            commands(
                tmp_path / f"p{len(name)}", folder / "keys", tmp_path / "h", nodes=3, port=8000
            )
    quote = tmp_path / 'quo"te'
    quote.mkdir()
    with pytest.raises(ValueError, match="a quote or a backslash means something to Flower"):
        made(quote)
    with pytest.raises(ValueError, match="port is 65535"):
        made(tmp_path, port=65535)


@linux
def test_a_taken_port_is_said(stubs, tmp_path):
    """It waited for ever, or had another SuperLink answer in its place."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        port = door.getsockname()[1]
        code, said = stubs.run(made(tmp_path, port=port))
    assert code == 1
    assert f"port {port} of 127.0.0.1 cannot be had" in said
    assert "--port" in said
    assert not stubs.calls("flower-superlink")


@linux
@pytest.mark.parametrize("status", [0, 3])
def test_it_ends_as_its_run_does_and_leaves_nothing(stubs, tmp_path, status):
    stubs.does("fpfl", f"time.sleep(1); sys.exit({status})")
    code, said = stubs.run(made(tmp_path))
    assert code == status, said
    assert len(stubs.calls("fpfl-supernode")) == 3
    assert stubs.alive() == []


@linux
def test_a_signal_ends_all_of_it(stubs, tmp_path):
    stubs.does("fpfl", "time.sleep(600)")
    process = stubs.start(made(tmp_path))
    try:
        until(lambda: len(stubs.calls("fpfl")) == 1)
        # A terminal's Ctrl-C goes to all in front: the script, and what it waits for.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        until(lambda: stubs.alive() == [])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@linux
def test_parts_that_end_are_started_again(stubs, tmp_path):
    """Each alone: SuperLink and nodes, whatever ended them."""
    stubs.does("fpfl", "time.sleep(600)")
    process = stubs.start(made(tmp_path))
    try:
        until(lambda: len(stubs.calls("fpfl-supernode")) == 3 and stubs.calls("fpfl"))
        for name in ("flower-superlink", "fpfl-supernode"):
            before = stubs.calls(name)
            line = (stubs.folder / f"{name}.calls").read_text().splitlines()[0]
            os.kill(json.loads(line)[0], signal.SIGKILL)
            until(lambda name=name, before=before: len(stubs.calls(name)) == len(before) + 1)
            # As it was: node 1 is not started as node 2.
            assert sorted(stubs.calls(name)[1:]) == sorted(before)
        assert "started again" in (tmp_path / "home" / "superlink.log").read_text()
        assert len(stubs.calls("fpfl")) == 1
    finally:
        process.terminate()
        until(lambda: stubs.alive() == [])
        process.wait(60)


@linux
def test_a_node_that_is_registered_stays_so(stubs, tmp_path):
    stubs.does(
        "flwr",
        "if 'register' in sys.argv: print('Error: Public key already in use.'); sys.exit(1)",
    )
    script = made(tmp_path)
    code, said = stubs.run(script)
    assert code == 0, said
    stubs.does("flwr", "if 'register' in sys.argv: print('Error: no such file'); sys.exit(1)")
    code, said = stubs.run(script)
    assert code == 1
    assert "no such file" in said
    assert stubs.alive() == []


def until(question, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not question():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- with Flower itself -------------------------------------------------------------------------

APPS = """\
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    place = Path(context.run_config["folder"])
    place.mkdir(exist_ok=True)
    while not (place / "go").exists():
        time.sleep(0.2)
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    said = RecordDict({"text": ConfigRecord({"text": "hello"})})
    asked = [Message(said, dst_node_id=node, message_type="query") for node in nodes]
    answers = [each for each in grid.send_and_receive(asked) if not each.has_error()]
    print(f"fpfl: {len(answers)} nodes answered", flush=True)
    if (place / "fail").exists():
        raise RuntimeError("no more nodes can be reached")


@client.query()
def answer(message, context):
    return Message(message.content, reply_to=message)
"""


@linux
@pytest.mark.release
def test_all_parts_come_back(tmp_path):
    """The real start.sh: SIGKILL for the SuperLink and a node, a second start, a run that fails."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
    script = made(tmp_path)
    for name in ("server_app.py", "client_app.py"):
        (tmp_path / "it" / "it" / name).write_text(APPS)
    project = tmp_path / "it" / "pyproject.toml"
    text = project.read_text().replace("server_app:app", "server_app:server")
    project.write_text(text.replace("client_app:app", "client_app:client"))
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    place = tmp_path / "it-run"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", script],
            stdout=(tmp_path / "said").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def status() -> str:
        words = ["fpfl", "federation", "status", "--home", str(tmp_path / "home")]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        return done.stdout

    def pids(word: str) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            # The programs themselves, not the shell that has their names in its script.
            if f"bin/{word}\0" in line and str(tmp_path) in line:
                found.append(int(path.name))
        return found

    process = start()
    try:
        until(place.exists, 300)
        assert "3 registered, 3 online" in status()
        assert "running" in status()
        for pid in pids("flower-superlink"):
            os.kill(pid, signal.SIGKILL)
        for pid in pids("fpfl-supernode")[:1]:
            os.kill(pid, signal.SIGKILL)
        # The run has ended with the SuperLink, which says so when it is back.
        assert process.wait(600) == 1
        assert "was not completed: finished:failed" in (tmp_path / "said").read_text()
        # Started again, registrations are there, and the run is another.
        (place / "go").touch()
        process = start()
        assert process.wait(600) == 0, (tmp_path / "said").read_text()
        assert "3 nodes answered" in (tmp_path / "said").read_text()
        (place / "fail").touch()
        process = start()
        assert process.wait(600) == 1
        assert "3 nodes answered" in (tmp_path / "said").read_text()
        until(lambda: not pids("fpfl-supernode") and not pids("flower-superlink"))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


# --- a run's end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "code"), [("finished:completed", 0), ("finished:failed", 1), ("finished:stopped", 1)]
)
@linux
def test_a_run_ends_as_flower_says(stubs, monkeypatch, capfd, ended, code):
    """``flwr run --stream`` itself ends with 0 whatever became of the run."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
    stubs.does("flwr", "print('Successfully started run 17')")
    monkeypatch.setenv("PATH", f"{stubs.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("fpfl.federation.status.of_run", lambda name, run_id: f"{ended}")
    result = CliRunner().invoke(app, ["federation", "run", "it", "--run-config", 'folder="x"'])
    assert result.exit_code == code
    assert ("was not completed: finished" in result.output) == bool(code)
    assert stubs.calls("flwr") == [["run", "it", "here", "--stream", "--run-config", 'folder="x"']]


@linux
def test_a_run_that_never_began(stubs, monkeypatch):
    monkeypatch.setenv("PATH", f"{stubs.folder}{os.pathsep}{os.environ['PATH']}")
    stubs.does("flwr", "sys.exit(1)")
    assert deployment.run("it", "here") == "not started"


def test_a_superlink_that_is_started_again_is_waited_for(monkeypatch):
    answers = [UnreachableError("gone"), UnreachableError("gone"), "running", "finished:completed"]

    def of_run(name, run_id):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(deployment, "POLL", 0.0)
    monkeypatch.setattr("fpfl.federation.status.of_run", of_run)
    assert ending("here", 1, patience=60.0) == "finished:completed"
    answers.append(UnreachableError("it is gone"))
    assert ending("here", 1, patience=0.0) == "not known: it is gone"


# --- status -------------------------------------------------------------------------------------


def test_what_a_superlink_says_of_nodes():
    lines = (
        "fpfl: node 7 is refused: it is a stranger",
        "fpfl: round 1: lost in 'mask': ('node-3',)",
        "fpfl: round 1: the sum of 4 nodes",
    )
    link = Link(
        (Node(7, "node-1", "online", "12:00"), Node(8, "", "offline", "")), 5, "running", lines
    )
    said = str(link)
    assert "2 registered, 1 online" in said
    assert "node-1: online, since 12:00" in said
    assert "8: offline, since never" in said
    assert link.lost == lines[:2]
    assert "Run 5: running" in said
    assert str(Link((), None, "", ())).endswith("No run was started.")


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_what_a_run_s_folder_says(tmp_path):
    """Without a network: rounds, charges, ε so far of the whole, and whether it has ended."""

    class StopError(Exception):
        pass

    def stop(event: fpfl.RoundEvent) -> None:
        if event.row["round"] == 3:
            raise StopError

    def train(folder: Path, **more):
        given = settings(None, rounds=6) | more
        return fpfl.train(fpfl.mlp(5, (4,), seed=0), make_population(), folder=folder, **given)

    with pytest.raises(StopError):
        train(tmp_path / "run", callbacks=[stop])
    said = standing(tmp_path / "run")
    assert "3 of 6 rounds released, not finished" in said
    figures = re.search(r"3 of 6 rounds charged: ε = ([0-9.]+) of ([0-9.]+) at δ", said)
    assert figures is not None, said
    assert 0 < float(figures[1]) < float(figures[2])
    result = CliRunner().invoke(app, ["federation", "status", str(tmp_path / "run")])
    assert result.output == said + "\n"
    train(tmp_path / "whole")
    said = standing(tmp_path / "whole")
    assert "6 of 6 rounds released, finished" in said
    figures = re.search(r"6 of 6 rounds charged: ε = ([0-9.]+) of ([0-9.]+) at δ", said)
    assert figures is not None, said
    assert figures[1] == figures[2]
    (tmp_path / "whole" / "excluded.json").write_text('["node-6"]')
    assert "Left out, having broken the protocol: 'node-6'" in standing(tmp_path / "whole")
    with pytest.raises(ValueError, match="is not there"):
        standing(tmp_path / "none")
    result = CliRunner().invoke(app, ["federation", "status"])
    assert "nothing to look at" in str(result.exception)


# --- units and containers -----------------------------------------------------------------------


def unit(text: str) -> configparser.ConfigParser:
    class Lists(dict):
        """Settings that are given more than once."""

        def __setitem__(self, key, value):
            if isinstance(value, list) and key in self:
                value = self[key] + value
            super().__setitem__(key, value)

    found = configparser.ConfigParser(
        strict=False, interpolation=None, dict_type=Lists, delimiters=("=",)
    )
    found.optionxform = str
    found.read_string(text)
    return found


NODE = {"config": {"partition-id": 2, "table": "/data/cohort.csv"}, "data": [Path("/data")]}


def test_a_node_s_unit_is_one_command_and_sees_what_is_its_own():
    text = services.node_unit("10.1.2.3:8443", Path("/etc/fpfl/node"), Path("/opt/f/bin"), **NODE)
    service = unit(text)["Service"]
    assert service["ExecStart"] == (
        '"/opt/f/bin/fpfl-supernode" "--superlink" "10.1.2.3:8443" "--port" "9094" '
        '"--root-certificates" "/etc/fpfl/node/ca.pem" "--auth-supernode-private-key" '
        '"/etc/fpfl/node/supernode" "--node-config" "identity=\\"/etc/fpfl/node/identity\\" '
        'partition-id=2 table=\\"/data/cohort.csv\\""'
    )
    wanted = {
        "Restart": "always",
        "User": "fpfl",
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "PrivateTmp": "yes",
        "IPAddressDeny": "any",
    }
    for name, value in wanted.items():
        assert service[name] == value
    assert "IPAddressAllow=10.1.2.3\n" in text
    assert "BindReadOnlyPaths=/data\n" in text
    assert "ReadWritePaths=/etc/fpfl/node\n" in text
    named = services.node_unit("fl.example:8443", Path("/k"), Path("/b/bin"), config={})
    assert "IPAddressDeny" not in named


def test_the_server_s_unit_listens_to_its_own_machine():
    text = services.superlink_unit(Path("/etc/fpfl"), Path("/opt/f/bin"), runs=Path("/srv/runs"))
    command = unit(text)["Service"]["ExecStart"]
    assert '"--host" "127.0.0.1"' in command
    assert '"--database" "/var/lib/fpfl/superlink.db"' in command
    assert '"--enable-supernode-auth"' in command
    assert "ReadWritePaths=/srv/runs\n" in text
    assert "IPAddressDeny=any\nIPAddressAllow=localhost\n" in text


def test_the_proxy_s_unit():
    text = services.proxy_unit(Path("/etc/fpfl"), Path("/etc/fpfl/nginx.conf"))
    command = unit(text)["Service"]["ExecStart"]
    assert command.startswith('"/usr/sbin/nginx" "-p" "/var/lib/fpfl" "-c" "/etc/fpfl/nginx.conf"')


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("fpfl-supernode", "flower-superlink", "nginx"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    texts = {
        "fpfl-node": services.node_unit("10.1.2.3:8443", tmp_path, programs, **NODE),
        "fpfl-proxy": services.proxy_unit(tmp_path, tmp_path / "nginx.conf", programs),
        "fpfl-superlink": services.superlink_unit(tmp_path, programs, runs=tmp_path),
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.service"
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(path.name) not in done.stderr, done.stderr
        assert "Unknown" not in done.stderr, done.stderr


def test_a_compose_file():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = services.node_compose("fl.example:8443", Path("/etc/fpfl/node"), **NODE)
    node = yaml.safe_load(text)["services"]["node"]
    assert node["command"][:3] == ["fpfl-supernode", "--superlink", "fl.example:8443"]
    assert node["command"][-1].startswith('identity="/run/fpfl/keys/identity" partition-id=2')
    assert node["volumes"] == ["/etc/fpfl/node:/run/fpfl/keys", "/data:/data:ro"]
    assert node["restart"] == "always"
    assert node["cap_drop"] == ["ALL"]
    assert "ports" not in node
    assert "network_mode" not in node


def test_services_are_commands(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")

    def called(*words: str):
        return CliRunner().invoke(app, ["federation", "service", *words])

    keys = ["--keys", str(tmp_path)]
    told = ["--superlink", "fl.example:8443", "--config", "partition-id=2", "--config", "name=a"]
    assert "ExecStart=" in called("node", *keys, *told).output
    assert 'partition-id=2 name=\\"a\\"' in called("node", *keys, *told, "--compose").output
    assert "flower-superlink" in called("superlink", *keys).output
    assert "FROM python" in called("image", *keys).output
    assert "has to know where to go" in str(called("node", *keys).exception)
    assert "expected node" in str(called("superlink", *keys, "--compose").exception)


def test_what_units_refuse(tmp_path):
    with pytest.raises(ValueError, match="letters without accents"):
        services.node_unit("a:1", Path("/a b"), tmp_path, config={})
    with pytest.raises(ValueError, match="letters without accents"):
        services.node_unit("a:1", Path("/a"), tmp_path, config={"table": "x\n[Service]"})
    with pytest.raises(ValueError, match="is no name"):
        services.node_unit("a:1", Path("/a"), tmp_path, config={'x="': 1})
    with pytest.raises(ValueError, match="NAME=VALUE"):
        services.read_config(["x"])
    assert services.read_config(["a=1", "b=true", "c=x=y", "d=[1]"]) == {
        "a": 1, "b": True, "c": "x=y", "d": "[1]",
    }  # fmt: skip


def test_words_that_others_read():
    odd = 'a"b\\\\é'
    assert tomllib.loads("x = " + toml(odd)) == {"x": odd}
    assert plain("/a/b_c-d@e") == "/a/b_c-d@e"
    for text in ("a b", "a$b", "a\nb", "", "é", "%h"):
        with pytest.raises(ValueError, match="letters without accents"):
            plain(text)
    assert address("[::1]:443") == ("::1", 443)
    assert address("fl.example:1") == ("fl.example", 1)
    for text in ("fl.example", "a:0", "a:65536", "::1:443", ":443", "[a]:1", "a:¹"):
        with pytest.raises(ValueError, match="address"):
            address(text)
    for text in ("a b", "-a", "a..b", "a" * 64, "é"):
        with pytest.raises(ValueError, match="no name or address"):
            host(text)
