"""A node's worker and its state: killed at any point, twice at once, with a planted door."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
if sys.platform != "linux":
    pytest.skip("looks at processes in /proc", allow_module_level=True)

from federated import Memory, agreement

from fpfl.federation import states as kept
from fpfl.federation.flower import client, worker
from fpfl.federation.flower.worker import Node, Place, WorkerError, connected, handed_over, serve
from fpfl.federation.secagg import Aggregation, Authority, Deal, Dealing
from fpfl.federation.states import States, UnsafeFolderError, private_folder

AUTHORITY = Authority.make()
DEALING = Dealing(b"r" * 16, 5, 2, 4, 2, 2)


@pytest.fixture
def node(tmp_path) -> Node:
    path = tmp_path / "identity"
    path.write_bytes(AUTHORITY.enrol("node-0", 1).to_bytes())
    return Node(str(path), "federated:agreement", "federated:load_default", {"partition-id": 0})


@contextmanager
def serving(node: Node, idle: float = 60.0) -> Iterator[threading.Thread]:
    """The worker of a node, in a thread, until its time is over."""
    watched = subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE)
    key = Place.of(node).key
    thread = threading.Thread(target=serve, args=(node, key, watched.pid, idle))
    thread.start()
    while not Place.of(node).socket.exists():
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield thread
    finally:
        watched.kill()
        watched.wait()
        thread.join()


def asked(node: Node, **more: Any) -> Any:
    return handed_over(node, "1f", DEALING.to_message() | more, os.getpid())


def test_a_worker_answers_and_keeps_the_state_for_its_user_alone(node):
    with serving(node):
        first, second = asked(node), asked(node)
        assert first["public"] != second["public"]
        assert "nothing was begun" in handed_over(node, "2", {"step": "share"}, 1)["refused"]
    folder = States.beside(Path(node.identity)).folder
    state = folder / "1f.state"
    assert state.stat().st_mode & 0o777 == 0o600
    for path in (folder, Place.of(node).folder):
        assert path.stat().st_mode & 0o777 == 0o700
    assert not Place.of(node).socket.exists()  # it ended, and cleared up


def test_a_worker_ends_when_nobody_asks_and_when_its_supernode_is_gone(node, monkeypatch):
    monkeypatch.setattr(worker, "WATCH", 0.01)
    key = Place.of(node).key
    serve(node, key, os.getpid(), idle=0.05)
    gone = subprocess.Popen([sys.executable, "-IS", "-c", ""])
    gone.wait()
    with serving(node):
        serve(node, key, os.getpid())  # there is one: this one ends at once
        assert asked(node)["step"] == "advertise"
    assert worker._began(gone.pid) == ""
    assert worker._began(os.getpid())


def test_nothing_is_handed_to_a_door_that_is_not_this_user_s_alone(node, monkeypatch, tmp_path):
    place = Place.of(node)
    place.folder.mkdir(mode=0o755)
    place.folder.chmod(0o755)  # whatever the umask is
    with pytest.raises(UnsafeFolderError, match="nobody else can enter"):
        asked(node)
    place.folder.chmod(0o700)
    place.socket.write_text("planted")
    with pytest.raises(UnsafeFolderError, match="no socket"):
        asked(node)
    place.socket.unlink()
    place.socket.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolderError, match="no socket"):
        asked(node)
    place.socket.unlink()
    place.folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    place.folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafeFolderError):
        asked(node)
    place.folder.unlink()
    private_folder(place.folder)
    real = os.geteuid
    monkeypatch.setattr(os, "geteuid", lambda: real() + 1)  # all of it is somebody else's
    with pytest.raises(UnsafeFolderError, match="belongs to user"):
        asked(node)
    one, other = socket.socketpair()
    with one, other, pytest.raises(UnsafeFolderError, match="at the other end"):
        worker._check_peer(one)


def test_a_door_that_was_left_behind_is_none(node, monkeypatch):
    place = Place.of(node)
    private_folder(place.folder)
    with monkeypatch.context() as there, socket.socket(socket.AF_UNIX) as door:
        there.chdir(place.folder)  # a path may be longer than a socket's name can be
        door.bind(place.socket.name)
    assert connected(place) is None
    with serving(node, idle=1.0):
        pass


def test_a_long_path_is_no_matter(node, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    path = deep / "identity"
    path.write_bytes(Path(node.identity).read_bytes())
    node = Node(str(path), node.agreement, node.load, node.config)
    with serving(node):
        assert asked(node)["step"] == "advertise"


def test_a_node_counts_and_keeps_to_its_site_whoever_carries_its_messages(node):
    """It did where Flower's settings named its identity: under NVFlare nothing was counted."""
    from fpfl.federation.ledger import NodeLedger
    from fpfl.federation.site import SITE, ledger_of

    agreed, path = agreement(), Path(node.identity)
    path.with_name(SITE).write_text('approve = "ask"\n')
    dealing = Dealing(b"r" * 16 + agreed.fingerprint, 1, 1, agreed.encoding.size,
                      agreed.graph.threshold, agreed.aggregation.least)  # fmt: skip
    assert "is not approved at this site" in node.answer("1f", dealing.to_message())["refused"]
    with NodeLedger.open(ledger_of(path), "node-0", write=False) as ledger:
        assert agreed.fingerprint.hex() in ledger.accounts


def test_other_code_or_settings_have_another_worker(node):
    others = [
        Node(node.identity, "other:agreement", node.load, node.config),
        Node(node.identity, node.agreement, node.load, {"partition-id": 1}),
    ]
    assert len({Place.of(one).key for one in (node, *others)}) == 3


# What is run in the place of a worker: it dies at a point, once.
FRAGILE = """
import json, os, signal, sys
from fpfl.federation.flower import worker
from fpfl.federation.states import States
said = json.loads(sys.stdin.buffer.read())
key, watch, point = said.pop("key"), said.pop("watch"), said.pop("point")
write = States.write
def die(self, run, state):
    if point == "after":
        write(self, run, state)
    os.kill(os.getpid(), signal.SIGKILL)
States.write = die
if point == "asked":
    worker.Node.answer = lambda *more: os.kill(os.getpid(), signal.SIGKILL)
worker.serve(worker.Node(**said), key, watch)
"""


@contextmanager
def fragile(node: Node, point: str) -> Iterator[Any]:
    """A worker that dies at a point."""
    import json

    place = Place.of(node)
    said = {
        "identity": node.identity, "agreement": node.agreement, "load": node.load,
        "config": dict(node.config), "watch": os.getpid(), "key": place.key, "point": point,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", FRAGILE],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    with process.stdin as told:
        told.write(json.dumps(said).encode())
    while connected_once(place) is None:
        assert process.poll() is None
    yield process
    process.wait()


def connected_once(place: Place) -> bool | None:
    found = connected(place)
    if found is not None:
        found.close()
        return True
    return None


def in_threads(monkeypatch) -> list[Any]:
    """Workers are started in this process: a new one each time."""
    ended: list[Any] = []

    def spawned(node: Node, place: Place, watch: int) -> Any:
        thread = threading.Thread(target=serve, args=(node, place.key, watch, 3.0))
        thread.start()
        ended.append(thread)
        return SimpleNamespace(poll=lambda: None, returncode=None)

    monkeypatch.setattr(worker, "_spawned", spawned)
    return ended


@pytest.mark.parametrize("point", ["asked", "before", "after"])
def test_a_worker_that_is_killed_is_started_again_and_masks_once(point, node, monkeypatch, caplog):
    """At each point of a message to mask: either one vector leaves, or none."""
    agreed = agreement()
    memory = Memory(agreed, authority=AUTHORITY)
    memory.identities = [AUTHORITY.enrol(f"node-{i}", i + 1) for i in range(5)]
    Path(node.identity).write_bytes(memory.identities[0].to_bytes())
    dealing = Dealing(b"r" * 16 + agreed.fingerprint, 1, 1, agreed.encoding.size,
                      agreed.graph.threshold, agreed.aggregation.least)  # fmt: skip
    deal = Deal(dealing, AUTHORITY.trust, [f"node-{i}" for i in range(5)])
    while deal.step != "done":
        requests = deal.requests()
        deal.take("node-0", node.answer("1f", requests["node-0"]))
        rest = {i: requests[f"node-{i}"] for i in range(1, 5)}
        for i, answer in memory.exchange(rest, 1.0):
            deal.take(f"node-{i}", answer)
        deal.close_step()
    from fpfl.federation.contribution import broadcast

    said = broadcast(1, agreed.spec.flat.vector(), None)
    request = Aggregation(deal, 0, said).requests()["node-0"]
    threads = in_threads(monkeypatch)
    with caplog.at_level(logging.WARNING), fragile(node, point) as process:
        answer = handed_over(node, "1f", request, os.getpid())
    assert process.returncode == -signal.SIGKILL
    assert "is gone, in the middle of a message" in caplog.text
    if point == "asked":
        assert len(answer["vector"]) == 4 * dealing.size
    elif point == "before":  # the ledger has its line, and no vector has left
        assert "masked in this session before" in answer["refused"]
    else:  # the state is on the disk, too
        assert "No step is done twice" in answer["refused"]
    again = handed_over(node, "1f", request, os.getpid())
    assert "vector" not in again
    assert "refused" in again
    for thread in threads:
        thread.join()


def test_two_processes_at_once_mask_one_vector(node, monkeypatch):
    """Without a lock both read the state before either has written it."""
    from fpfl.federation import site as answering

    waiting = threading.Barrier(2, timeout=2.0)
    seen = []

    def slowly(request: Any, state: bytes, *more: Any) -> Any:
        seen.append(state)
        with suppress(threading.BrokenBarrierError):
            waiting.wait()
        return state + b"x", {"answer": len(state)}

    monkeypatch.setattr(answering, "answered", slowly)
    threads = [threading.Thread(target=node.answer, args=("1f", {})) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"", b"x"]


def test_a_worker_that_does_not_start_is_done_without(node, monkeypatch, caplog):
    """The process of the message does the work."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/flwr-clientapp"])
    asked: list[Any] = []

    def none(*more: Any) -> Any:
        asked.append(more)
        raise WorkerError("none")

    monkeypatch.setattr(client, "handed_over", none)
    context = SimpleNamespace(node_config={"identity": node.identity}, run_config={}, run_id=31)
    request = DEALING.to_message()
    with caplog.at_level(logging.WARNING):
        said = client._answered(node.agreement, node.load, request, context)
    assert said["step"] == "advertise"
    assert "no worker" in caplog.text
    assert len(asked) == 1
    context.node_config["worker"] = False
    client._answered(node.agreement, node.load, request, context)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    context.node_config.pop("worker")
    client._answered(node.agreement, node.load, request, context)
    assert len(asked) == 1


def test_the_server_does_not_say_who_a_node_is(tmp_path, monkeypatch):
    """Its settings name an identity in Flower's simulation alone."""
    context = SimpleNamespace(
        node_config={"partition-id": 0, "num-partitions": 5},
        run_config={"simulation-keys": str(tmp_path)},
    )
    with pytest.raises(ValueError, match="not told who it is"):
        client._identity(context)
    monkeypatch.setitem(sys.modules, client.SIMULATED, SimpleNamespace())
    assert client._identity(context) == tmp_path / "node-1" / "identity"


def test_states_of_few_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    states = States(tmp_path / "states")
    with states.locked():
        for i, run in enumerate(("a", "b", "c")):
            states.write(run, run.encode())
            os.utime(states.folder / f"{run}.state", (i, i))
        states.write("d", b"d")
        assert [states.read(run) for run in "abcd"] == [b"", b"", b"c", b"d"]
    with pytest.raises(ValueError, match="letters and digits"):
        states.read("../x")
    states.folder.chmod(0o750)
    with pytest.raises(UnsafeFolderError), states.locked():
        pass


def test_the_process_of_a_message_imports_next_to_nothing():
    code = (
        "import sys, flwr.supernode.runtime.run_clientapp\n"
        "before = set(sys.modules)\n"
        "import fpfl.federation.flower.client\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['fpfl']"


def test_a_message_with_a_long_environment_is_run_as_flower_runs_it(tmp_path):
    """The process that forks takes so many bytes; of more it would see a part."""
    from fpfl.federation.flower import supernode

    real, asking = tmp_path / "real", tmp_path / supernode.COMMAND
    real.write_text("#!/bin/sh\necho real $1\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(tmp_path / supernode.DOOR))
        door.listen()
        said = {"door": str(tmp_path / supernode.DOOR), "real": str(real)}
        longest = getattr(supernode, "LONGEST", 0)
        asking.write_text(supernode._ASK.format(python=sys.executable, longest=longest, **said))
        for script in (real, asking):
            script.chmod(0o700)
        long = {f"LONG_{i}": "x" * 100_000 for i in range(12)}
        words = [str(asking), "--once"]
        found = subprocess.run(words, env=os.environ | long, stdout=subprocess.PIPE, timeout=60)
        assert found.stdout == b"real --once\n"
