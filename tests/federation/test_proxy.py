"""The proxy in front of the SuperLink, with real processes: nodes pass, and nobody else.

Each of the two attacks is made on the SuperLink's own port, too, where it succeeds: so it is the
proxy that stops it. Whoever attacks has ``ca.pem``, which every participant has.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")

if sys.platform != "linux":
    pytest.skip("finds its processes by /proc", allow_module_level=True)
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed: apt-get install nginx-light", allow_module_level=True)

import httpx
from flower_deployment import BIN, Deployment
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors.http import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient

from fpfl.federation.proxy import CALLS, nginx

PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "{name}.apps:server"
clientapp = "{name}.apps:client"
[tool.flwr.app.config]
folder = ""
"""
APPS = """\
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    # Larger than what nginx keeps in memory.
    said = RecordDict({"text": ConfigRecord({"text": bytes(1 << 20)})})
    nodes = list(grid.get_node_ids())
    asked = [Message(said, dst_node_id=node, message_type="query") for node in nodes]
    answers = [each for each in grid.send_and_receive(asked) if not each.has_error()]
    print(f"fpfl: {len(answers)} nodes answered", flush=True)


@client.query()
def answer(message, context):
    if folder := context.run_config["folder"]:
        Path(folder, str(context.node_id)).touch()  # any code of whoever starts the run
    return Message(message.content, reply_to=message)
"""


@pytest.fixture(scope="module")
def federation() -> Iterator[Deployment]:
    # The SuperLink's own process asks for tasks every two seconds: the thief is there before it.
    with Deployment(2, proxy=True, task_poll=2.0) as deployment:
        yield deployment


def project(folder: Path, name: str) -> Path:
    (folder / name / name).mkdir(parents=True)
    (folder / name / "pyproject.toml").write_text(PROJECT.format(name=name))
    (folder / name / name / "__init__.py").touch()
    (folder / name / name / "apps.py").write_text(APPS)
    return folder / name


def client(deployment: Deployment, kind: type, port: int):
    """Flower's own client with ``ca.pem`` and nothing else."""
    root = Path(deployment.certificate("ca.pem")).read_bytes()
    said = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    return kind.from_server_address(f"127.0.0.1:{port}", False, root, said)


def started(deployment: Deployment, app: Path, port: int, folder: Path) -> subprocess.Popen[str]:
    """``flwr run`` by whoever has ``ca.pem``."""
    home = folder / f"home-{port}"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "it"\n\n[superlink.it]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{deployment.certificate("ca.pem")}"\n'
    )
    environment = deployment.environment(f"{deployment.id}:attack", "attack")
    return subprocess.Popen(
        [
            str(BIN / "flwr"),
            "run",
            str(app),
            "it",
            "--stream",
            "--run-config",
            f'folder="{folder}"',
        ],
        env=environment | {"FLWR_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def refused(call, request) -> None:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        call(request)
    assert caught.value.response.status_code == 403
    assert "nginx" in caught.value.response.text


def status(deployment: Deployment, path: str, more: str = "") -> int:
    """The status of a request that is written out, as no client would write it."""
    trust = ssl.create_default_context(cafile=deployment.certificate("ca.pem"))
    place = ("127.0.0.1", deployment.door)
    with (
        socket.create_connection(place, timeout=10) as plain,
        trust.wrap_socket(plain, server_hostname="localhost") as door,
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        door.sendall(f"{head}Content-Type: application/protobuf\r\n{more}\r\n".encode())
        return int(door.makefile("rb").readline().split()[1])


def test_the_federation_works_through_it(federation, tmp_path):
    result = federation.run(project(tmp_path, "greeting"))
    assert "fpfl: 2 nodes answered" in result.log
    assert len(federation.online()) == 2


def test_a_participant_runs_no_code_on_the_nodes(federation, tmp_path):
    app = project(tmp_path, "attack")
    attack = started(federation, app, federation.door, tmp_path)
    said, _ = attack.communicate(timeout=120)
    assert attack.returncode != 0, said
    assert "Successfully started" not in said
    control = client(federation, ControlHttpClient, federation.door)
    refused(control.ListRuns, ListRunsRequest())
    refused(control.ListNodes, ListNodesRequest())
    refused(control.RegisterNode, RegisterNodeRequest(public_key=b"mine"))
    fleet = client(federation, FleetHttpClient, federation.door)
    refused(fleet.RegisterNode, RegisterNodeFleetRequest(public_key=b"mine"))
    assert not [path for path in tmp_path.iterdir() if path.name.isdigit()]
    # The same at the SuperLink's own port: this is what must not be reached from elsewhere.
    said, _ = started(federation, app, federation.port, tmp_path).communicate(timeout=120)
    assert "Successfully started" in said
    assert {path.name for path in tmp_path.iterdir() if path.name.isdigit()} == {
        str(node) for node in federation.node_ids
    }


def test_a_participant_takes_no_task_of_the_server(federation, tmp_path):
    wanted = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    through = client(federation, RuntimeHttpClient, federation.door)
    bare = client(federation, RuntimeHttpClient, federation.port)
    refused(through.AcquireTask, wanted)
    run = federation.start_run(project(tmp_path, "taken"))
    deadline = time.monotonic() + 60
    while not (found := bare.AcquireTask(wanted)).token:
        if not run.process.alive() or time.monotonic() > deadline:
            # The SuperLink's own process was quicker.
            run = federation.start_run(tmp_path / "taken")
            deadline = time.monotonic() + 60
    thief = client(federation, RuntimeHttpClient, federation.door)
    thief._client.headers["flwr-task-token"] = found.token
    refused(thief.PullTaskInput, PullTaskInputRequest())
    refused(thief.GetNodes, PullTaskInputRequest())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "/v1/fleet/pull-messages/../../control/list-runs",
        "/v1/fleet/pull-messages%2f..%2f..%2fcontrol/list-runs",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/register-node",
        "/V1/control/list-runs",
        "/v1;/control/list-runs",
        "https://localhost/v1/control/list-runs",
        "/health",
        "/docs",
        "/openapi.json",
    ],
)
def test_no_spelling_of_another_call_passes(federation, path):
    log = federation.superlink.log
    before = log.read_text().count("/v1/control/list-runs")
    assert status(federation, path, "Content-Length: 0\r\n") == 403
    assert log.read_text().count("/v1/control/list-runs") == before


def test_what_passes_is_what_a_node_asks(federation):
    """Each call comes to Flower, which asks who it is; and none is larger than agreed."""
    for call in CALLS:
        path = f"/v1/fleet/{call}"
        assert status(federation, path, "Content-Length: 0\r\n") == 401, call
        assert status(federation, path, "Content-Length: 67108865\r\n") == 413, call
    # However it is spelled, Flower gets the name that is in the proxy's own file.
    spelled = "/v1/control/%2e%2e/fleet/get-run"
    assert status(federation, spelled, "Content-Length: 0\r\n") == 401


def test_every_call_of_a_node_is_known():
    """Flower's client of 1.41: all its calls but those that operators make for it."""
    import inspect
    import re

    asked = re.findall(r'"/v1/fleet/([a-z-]+)"', inspect.getsource(FleetHttpClient))
    assert set(asked) - set(CALLS) == {"register-node", "unregister-node"}


def test_what_cannot_be_written_down_is_refused(tmp_path):
    names = [tmp_path / name for name in ("ca.pem", "server.pem", "server.key")]
    odd = tmp_path / 'a";}\n#'
    with pytest.raises(ValueError, match="letters without accents"):
        nginx(odd, *names[1:], name="fl.example")
    with pytest.raises(ValueError, match="letters without accents"):
        nginx(Path("/$host"), *names[1:], name="fl.example")
    with pytest.raises(ValueError, match="no name or address"):
        nginx(*names, name="fl.example; }")
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        nginx(*names, name="fl.example", listen="8443")
    with pytest.raises(ValueError, match="of this machine alone"):
        nginx(*names, name="fl.example", superlink="10.0.0.1:8000")
    with pytest.raises(ValueError, match="must be 1 or more"):
        nginx(*names, name="fl.example", megabytes=0)
