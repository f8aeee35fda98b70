"""The same server and nodes by NVFlare's tasks: in one process, and in NVFlare's simulator."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import federated
import pytest
import torch

pytest.importorskip("nvflare", reason="NVFlare is not installed: pip install 'fpfl[nvflare]'")

import nvflare_task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from safetensors.torch import load_file
from typer.testing import CliRunner

from fpfl.cli import app
from fpfl.federation.enrolment import AUTHORITY, IDENTITY, make_keys
from fpfl.federation.nvflare import PLACE, RECORD, TASK
from fpfl.federation.nvflare.controller import FederationController
from fpfl.federation.nvflare.executor import FederationExecutor
from fpfl.federation.nvflare.job import ALLOWED, write_job
from fpfl.federation.nvflare.site import prepare_server, prepare_site
from fpfl.federation.project import make_project

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

NODES = 4
NAMES = [f"node-{i + 1}" for i in range(NODES)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, NODES)
    return folder


def put(local: Path, keys: Path, names: list[str], **more: Any) -> None:
    """What the sites' people put into their workspaces, and what the server's do."""
    local.mkdir(parents=True)
    parts = federated.parts(nvflare_task.agreement())
    for name in names:
        i = NAMES.index(name)
        place = local / name
        place.mkdir(parents=True)
        shutil.copy(keys / name / IDENTITY, place / IDENTITY)
        told = {"partition-id": i, "first-user": int(parts[i][0])}
        told |= more if i == NODES - 1 else {}
        lines = [f"{key} = {json.dumps(value)}" for key, value in told.items()]
        (place / "node.toml").write_text("\n".join(lines) + "\n")
    shutil.copy(keys / AUTHORITY, local / AUTHORITY)


def context(root: Path, name: str = "", engine: Any = None) -> Any:
    """As much of NVFlare's context as the adapter uses."""
    workspace = SimpleNamespace(get_root_dir=lambda: str(root))
    engine = engine or SimpleNamespace(get_workspace=lambda: workspace)
    engine.get_workspace = lambda: workspace
    return SimpleNamespace(
        get_engine=lambda: engine, get_identity_name=lambda: name, get_job_id=lambda: "a-job_1"
    )


def state_of(place: Path) -> Path:
    (found,) = (place / "identity.states").glob("*.state")
    return found


Change = Callable[[str, str, Shareable], "Shareable | None"]


class Federation:
    """A server and its clients in this process. ``change`` may change or drop what comes back."""

    def __init__(self, root: Path, keys: Path, change: Change | None = None, **more: Any) -> None:
        self.root, self.change = root, change
        self.seen: list[tuple[str, str, Any]] = []
        for name in NAMES:
            put(root / name / PLACE, keys, [name], **more)
        put(root / "server" / PLACE, keys, [])
        self.executor = FederationExecutor("nvflare_task:agreement", "nvflare_task:load")
        self.panic = ""
        self.cancelled: list[Any] = []

    def task(self, name: str, task: Any) -> None:
        """A client fetches a task, and its answer arrives or does not."""
        step = str(task.data[RECORD]["step"])
        site = context(self.root / name, name)
        reply: Shareable | None = self.executor.execute(TASK, task.data, site, Signal())
        assert reply is not None
        self.seen.append((step, name, dict(reply[RECORD])))
        if self.change is not None:
            reply = self.change(step, name, reply)
        if reply is not None:
            client = SimpleNamespace(result=reply)
            task.result_received_cb(client_task=client, fl_ctx=None)
            task.task_done_cb(task=task, fl_ctx=None)

    def run(self, signal: Signal | None = None, **server: Any) -> Path:
        """The controller's run; the folder that it wrote."""
        signal = signal or Signal()
        given = {"agreement": "nvflare_task:agreement", "folder": "run"} | server
        controller = FederationController(**given)
        controller.broadcast = lambda task, fl_ctx, targets, min_responses: self.task(
            targets[0], task
        )
        controller.get_client_disconnect_time = lambda name: None
        controller.cancel_task = self.cancelled.append
        controller.system_panic = lambda reason, fl_ctx: setattr(self, "panic", reason)
        clients = [SimpleNamespace(name=name) for name in reversed(NAMES)]
        engine = SimpleNamespace(get_clients=lambda: clients)
        controller.control_flow(signal, context(self.root / "server", engine=engine))
        return self.root / "server" / "run"


def trained(folder: Path) -> torch.Tensor:
    model = nvflare_task.agreement().model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_simulated(folder: Path) -> None:
    """The model is that of the simulation, but for the rounding of sums."""
    agreed = nvflare_task.agreement()
    wanted = federated.parameters(federated.simulated(agreed, federated.people(60)))
    moved = float((wanted - agreed.spec.flat.vector()).norm())
    assert float((trained(folder) - wanted).norm()) <= 1e-4 * moved


def test_a_run_by_tasks_is_the_simulation(tmp_path, keys):
    federation = Federation(tmp_path, keys)
    folder = federation.run()
    assert federation.panic == ""
    check_simulated(folder)
    state = state_of(tmp_path / "node-1" / PLACE / "node-1")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600


def test_the_state_is_on_the_disk_before_an_answer_leaves(tmp_path, keys):
    """Each task is answered by a process of its own: nothing is kept in memory."""
    federation = Federation(tmp_path, keys)
    place = tmp_path / "node-2" / PLACE / "node-2"
    kept = []

    def change(step: str, name: str, reply: Shareable) -> Shareable:
        if name == "node-2":
            kept.append(state_of(place).read_bytes())
        federation.executor = FederationExecutor("nvflare_task:agreement", "nvflare_task:load")
        return reply

    federation.change = change
    check_simulated(federation.run())
    assert len(set(kept)) > 2


@pytest.mark.parametrize("how", ["silent", "failed", "forged", "refused"])
def test_a_node_that_drops_out_is_done_without(how, tmp_path, keys, caplog, monkeypatch):
    def change(step: str, name: str, reply: Shareable) -> Shareable | None:
        if name != "node-4" or step != "mask":
            return reply
        if how == "silent":
            return None
        if how == "failed":
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        if how == "forged":
            reply[RECORD]["token"] = b"another one's"
        else:
            reply[RECORD] = {"refused": "no\nround 9 of 9", "token": reply[RECORD]["token"]}
        return reply

    agreed = nvflare_task.agreement
    short = 1.0 if how == "silent" else 60.0
    monkeypatch.setattr(
        nvflare_task,
        "agreement",
        lambda: federated.agreement(60, 4, rounds=1, test_seed=5, timeout=short, attempts=1),
    )
    federation = Federation(tmp_path, keys, change)
    with caplog.at_level(logging.INFO):
        federation.run()
    assert federation.panic == ""
    assert "round 1: the sum of 3 nodes" in caplog.text
    assert "\nround 9 of 9" not in caplog.text
    assert len(federation.cancelled) == (how == "silent")
    assert agreed().nodes == NODES


def test_a_job_that_was_aborted_goes_on_when_it_is_submitted_again(tmp_path, keys):
    signal = Signal()

    def change(step: str, name: str, reply: Shareable) -> Shareable:
        if len([1 for each in federation.seen if each[0] == "mask"]) > NODES:
            signal.trigger(True)  # in the second round
        return reply

    federation = Federation(tmp_path, keys, change)
    folder = federation.run(signal)
    assert "the job was aborted" in federation.panic
    federation.panic, federation.change = "", None
    federation.run()
    assert federation.panic == ""
    check_simulated(folder)


def test_a_vector_is_masked_once_in_a_session(tmp_path, keys):
    """The same task again, to a node that was started anew."""
    federation = Federation(tmp_path, keys)
    site = context(tmp_path / "node-1", "node-1")
    again: list[Any] = []
    real = federation.task

    def task(name: str, task: Any) -> None:
        copy = Shareable()
        copy[RECORD] = dict(task.data[RECORD])
        real(name, task)
        if name == "node-1" and copy[RECORD]["step"] == "mask":
            anew = FederationExecutor("nvflare_task:agreement", "nvflare_task:load")
            again.append(anew.execute(TASK, copy, site, Signal())[RECORD])

    federation.task = task  # type: ignore[method-assign]
    federation.run()
    assert again
    assert all("vector" not in said and "refused" in said for said in again)


def test_what_fails_on_a_node_stays_there(tmp_path, keys, caplog, monkeypatch):
    def broken(node: Any) -> None:
        raise ValueError(f"patient 17 of node {node['partition-id']} has no date of birth")

    monkeypatch.setattr(nvflare_task, "load", broken)
    federation = Federation(tmp_path, keys)
    with caplog.at_level(logging.INFO):
        federation.run()
    # NVFlare may send its logs to the server.
    assert "patient 17" not in caplog.text
    assert "patient 17" not in repr([said for _, _, said in federation.seen])
    log = tmp_path / "node-1" / PLACE / "node-1" / "node.log"
    assert "patient 17 of node 0" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_node_that_was_not_told_who_it_is_says_so_at_its_site(tmp_path, keys, caplog):
    federation = Federation(tmp_path, keys)
    for name in NAMES:
        (tmp_path / name / PLACE / name / IDENTITY).unlink()
    with caplog.at_level(logging.WARNING):
        federation.run()
    log = tmp_path / "node-1" / PLACE / "node-1" / "node.log"
    assert "was not told who it is" in log.read_text()
    assert "its own log says why" in federation.seen[0][2]["refused"]
    assert "FederationError" in federation.panic


def test_a_job_has_no_code_in_it(tmp_path):
    job = write_job(
        tmp_path / "job", "test", agreement="a.task:agreement", load="a.task:load",
        run="/srv/run", nodes=4, ledger="/srv/ledger.jsonl",
    )  # fmt: skip
    files = {path.suffix for path in job.rglob("*") if path.is_file()}
    assert files == {".json"}
    server = json.loads((job / "app" / "config" / "config_fed_server.json").read_text())
    assert server["workflows"][0]["args"]["ledger"] == "/srv/ledger.jsonl"
    with pytest.raises(ValueError, match="not empty"):
        write_job(job, "test", agreement="a:b", load="a:b", run="run", nodes=4)


# --- NVFlare's own simulator: a process for the server, one for each client ----------------------


def simulator(root: Path, keys: Path, **more: Any) -> tuple[Path, str]:
    """A job in the simulator; where the run was written, and what all processes said."""
    local = root / "ws" / "local"
    put(local / "fpfl", keys, NAMES, **more)
    policy = {"format_version": 2, "class_allow_list": ALLOWED}
    (local / "resources.json").write_text(json.dumps(policy))
    run = root / "run"
    write_job(
        root / "job", "test", agreement="nvflare_task:agreement", load="nvflare_task:load",
        run=str(run), nodes=NODES,
    )  # fmt: skip
    source = Path(__file__).parents[2] / "src"
    here = [source, Path(__file__).parent, Path(__file__).parents[1]]
    path = os.pathsep.join([*map(str, here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", "simulator", str(root / "job"), "-w",
         str(root / "ws"), "-c", ",".join(NAMES), "-t", str(NODES)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    return run, done.stdout


@pytest.mark.release
def test_the_simulator_s_model_is_ours(tmp_path, keys):
    folder, log = simulator(tmp_path, keys)
    assert "round 2: the sum of 4 nodes" in log, log
    check_simulated(folder)


@pytest.mark.release
def test_a_client_that_dies_in_the_simulator_is_done_without(tmp_path, keys):
    """Its process ends in the middle of a contribution."""
    _, log = simulator(tmp_path, keys, dies=True)
    assert "the sum of 3 nodes" in log, log


# --- what a site's people put into its workspace --------------------------------------------------


def made_workspace(root: Path) -> Path:
    """As much of what NVFlare's provisioning makes as is read here."""
    local = root / "local"
    local.mkdir(parents=True)
    resources = {"format_version": 2, "class_allow_list": ["nvflare."], "allow_log_streaming": True}
    roles = {"project_admin": "any", "lead": {"byoc": "any", "submit_job": "any"}}
    (local / "resources.json.default").write_text(json.dumps(resources))
    rights = {"format_version": "1.0", "permissions": roles}
    (local / "authorization.json.default").write_text(json.dumps(rights))
    return root


def test_a_site_takes_no_code_and_keeps_its_logs(tmp_path, keys):
    workspace = made_workspace(tmp_path / "node-1")
    told = {"partition-id": 0, "path": 'C:\\data "mine"\n', "weight": 0.5, "fast": True}
    place = prepare_site(workspace, keys / "node-1" / IDENTITY, "node-1", told)
    assert tomllib.loads((place / "node.toml").read_text()) == told
    assert stat.S_IMODE((place / IDENTITY).stat().st_mode) == 0o600
    resources = json.loads((workspace / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["fpfl.federation.nvflare."]
    assert resources["allow_log_streaming"] is False
    rights = json.loads((workspace / "local" / "authorization.json").read_text())["permissions"]
    for role in ("project_admin", "lead"):
        assert rights[role]["byoc"] == rights[role]["shell_commands"] == "none"
        assert rights[role]["submit_job"] == "any"


def test_the_command_line_prepares_all_of_it(tmp_path, keys):
    """As the page has it; the project is the one of ``fpfl federation init``."""
    project = tmp_path / "my-federation"
    make_project(project, keys, nodes=NODES, cohort=100, rounds=1, epsilon=1.0)
    site, server = made_workspace(tmp_path / "a"), made_workspace(tmp_path / "b")
    run = CliRunner().invoke
    word = ["federation", "nvflare"]
    given = ["--identity", str(keys / "node-1" / IDENTITY), "--tell", "partition-id=0"]
    done = [
        run(app, [*word, "job", str(project), str(tmp_path / "job"), "--nodes", "4"]),
        run(app, [*word, "server", str(server), "--authority", str(keys / AUTHORITY)]),
        run(app, [*word, "site", str(site), "--name", "hospital-a", *given]),
    ]
    assert [each.exit_code for each in done] == [0, 0, 0], [each.output for each in done]
    client = json.loads(
        (tmp_path / "job" / "app" / "config" / "config_fed_client.json").read_text()
    )
    named = client["executors"][0]["executor"]["args"]
    assert named == {"agreement": "my_federation.task:agreement", "load": "my_federation.task:load"}
    told = site / PLACE / "hospital-a" / "node.toml"
    assert tomllib.loads(told.read_text()) == {"partition-id": 0}
    nothing = run(app, [*word, "job", str(tmp_path / "a"), str(tmp_path / "other")])
    assert nothing.exit_code != 0


def test_a_server_is_told_whose_nodes_count(tmp_path, keys):
    workspace = made_workspace(tmp_path / "server")
    place = prepare_server(workspace, keys / AUTHORITY)
    assert (place / AUTHORITY).read_bytes() == (keys / AUTHORITY).read_bytes()
    with pytest.raises(ValueError, match="nvflare provision"):
        prepare_server(tmp_path, keys / AUTHORITY)
