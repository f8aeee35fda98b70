"""A node's worker: a process that stays, with torch, the agreement and the users' data loaded.

Flower starts a process for every message. That process hands the request over here, through a
socket that only the node's own user can open, and passes the answer on; it imports next to nothing.
The first message starts the worker, which ends by itself: when it was idle for long, or when what
started it (Flower's SuperNode) is gone.

IDENTITY.worker/        a folder of this user's, closed to all others; else nothing is handed over
IDENTITY.worker/*.lock  held by the worker as long as it lives: there is one
IDENTITY.worker/*.sock  where it answers; who is at the other end is asked of the system as well

What a worker knows is nothing that a node needs: its state is on the disk before an answer leaves
(`fpfl.federation.states`). Where one cannot be started, or was killed twice over one message, the
message's own process does the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import selectors
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fpfl.federation.encoding import decode, encode
from fpfl.federation.flower.logs import show
from fpfl.federation.states import States, UnsafeFolderError, private_folder
from fpfl.store.files import BusyError, flock, flock_within

log = logging.getLogger("fpfl.federation")

IDLE = 1800.0
"""Seconds without a message after which a worker ends."""
START = 120.0
"""Seconds until a worker that was started has to be there."""
ENDING = 2.0
"""Seconds that one which was killed may take to be gone."""
WATCH = 1.0
"""Seconds between two looks at whether its SuperNode is there."""
LONGEST = 2**32
"""Bytes of a message."""

_SHORT = 100  # bytes of a socket's path that every system takes


class WorkerError(OSError):
    """A worker cannot be had, or was lost on the way."""


@dataclass(frozen=True)
class Node:
    """What a node is: by whom it is told, and where its users and its agreement come from.

    Parameters
    ----------
    identity
        The file of its identity.
    agreement, load
        ``"module:function"`` each.
    config
        What it was started with.
    simulated
        Whether it is one of Flower's simulation, where all nodes are one process: nothing is
        counted there, and no site has settings.
    """

    identity: str
    agreement: str
    load: str
    config: Mapping[str, Any] = field(default_factory=dict)
    simulated: bool = False
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def answer(self, run: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request's answer; the state that follows is on the disk."""
        from fpfl.federation.enrolment import ending
        from fpfl.federation.secagg import Refused
        from fpfl.federation.site import SiteNode

        try:
            path = Path(self.identity)
            states = States.beside(path)
            with states.locked(), closing(SiteNode.beside(path, simulated=self.simulated)) as node:
                if request.get("step") == "advertise":
                    for line in ending(node.identity.authority, node.identity.credential):
                        log.warning("%s", line)
                before = states.read(run)
                kept, said = node.answered(
                    request,
                    before,
                    lambda: node.contribution(
                        self.config,
                        lambda: (resolved(self.agreement), resolved(self.load)),
                        self._kept,
                    ),
                )
                states.write(run, kept)
            return said
        except Refused as error:
            log.warning("refused: %s", error)
            return {"refused": str(error)}
        except Exception:
            # Flower would send the text of an exception to the server; it may be about data.
            log.exception("this node cannot answer")
            return {"refused": "it cannot answer; its own log says why"}


def resolved(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    module, _, function = name.partition(":")
    found = getattr(import_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"{name!r} names no function; expected 'module:function'")
    return found  # type: ignore[no-any-return]


# --- who hands over ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the worker of a node is found: a folder, and what its files begin with."""

    folder: Path
    key: str

    @classmethod
    def of(cls, node: Node) -> Place:
        """Another one for other code, other settings, another Python."""
        path = Path(node.identity)
        said = [node.identity, node.agreement, node.load, dict(node.config), sys.path]
        text = json.dumps([*said, sys.executable], sort_keys=True, default=repr)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(path.with_name(f"{path.name}.worker"), key)

    @property
    def lock(self) -> Path:
        """What the worker holds as long as it lives."""
        return self.folder / f"{self.key}.lock"

    @property
    def socket(self) -> Path:
        """Where it answers."""
        return self.folder / f"{self.key}.sock"


def handed_over(node: Node, run: str, request: Mapping[str, Any], watch: int) -> Mapping[str, Any]:
    """The answer of a node's worker, which is started where there is none.

    Parameters
    ----------
    node, run, request
        What is asked of whom.
    watch
        The process that a worker which is started now shall not outlive.
    """
    place, asked = Place.of(node), encode({"run": run, "request": dict(request)})
    for _ in range(2):
        connection = connected(place) or _started(node, place, watch)
        with connection:
            try:
                _send(connection, asked)
                answer: Mapping[str, Any] = decode(_receive(connection))
                return answer
            except (OSError, EOFError, struct.error) as error:
                # That it is asked again does no harm: its state says what was answered.
                log.warning(
                    "the worker of this node is gone, in the middle of a message: %s", error
                )
        _wait_for_end(place)
    raise WorkerError("a worker was lost twice over one message")


def _wait_for_end(place: Place) -> None:
    """Until one that is being killed has let go of what it held: its door still opens till then."""
    end = time.monotonic() + ENDING
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(BusyError):
            flock_within(lock, place.lock, "LOCK_EX", ENDING)
    finally:
        os.close(lock)
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionError):
            if (connection := connected(place)) is None:
                return
            connection.close()
        time.sleep(0.02)


def connected(place: Place) -> socket.socket | None:
    """A connection to a worker of this user's; None where there is none."""
    private_folder(place.folder)
    try:
        found = place.socket.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsafeFolderError(
            f"{place.socket} is no socket of this user's: find out who put it there, and remove it"
        )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(place.socket) as path:
            connection.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):  # left behind by one that was killed
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    _check_peer(connection)
    return connection


def _check_peer(connection: socket.socket) -> None:
    """Refuse whoever is at the other end and is not this user, where the system can tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    if user != os.geteuid():
        connection.close()
        raise UnsafeFolderError(f"user {user} is at the other end of this node's socket: refused")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of a socket that is short enough: systems take a hundred bytes or so."""
    if len(os.fsencode(path)) <= _SHORT or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _started(node: Node, place: Place, watch: int) -> socket.socket:
    """Start a worker, and connect to it, or to one that somebody else started meanwhile."""
    end, process = time.monotonic() + START, None
    while time.monotonic() < end:
        if process is None or process.poll() == 0:  # there was another one, which may be ending
            process = _spawned(node, place, watch)
        elif process.returncode is not None:
            break
        for _ in range(25):
            if (connection := connected(place)) is not None:
                return connection
            time.sleep(0.02)
    raise WorkerError("the worker of this node did not start: the lines above say why")


def _spawned(node: Node, place: Place, watch: int) -> subprocess.Popen[bytes]:
    said = {
        "identity": node.identity,
        "agreement": node.agreement,
        "load": node.load,
        "config": dict(node.config),
        "watch": watch,
        "key": place.key,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "fpfl.federation.flower.worker"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # it outlives the process of this message
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:
        told.write(json.dumps(said).encode())
    return process


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "big") + data)


def _receive(connection: socket.socket) -> bytes:
    length = int.from_bytes(_exactly(connection, 8), "big")
    if length > LONGEST:
        raise OSError(f"a message of {length} bytes came over the worker's socket")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 2**20))
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# --- the worker ----------------------------------------------------------------------------------


def serve(node: Node, key: str, watch: int, idle: float = IDLE) -> None:
    """Answer messages one by one until nobody has any, or ``watch`` is gone."""
    place = Place(Place.of(node).folder, key)
    private_folder(place.folder)
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        flock(lock, place.lock, "LOCK_EX", "LOCK_NB")
        with _door(place) as door:
            _answer_all(node, door, watch, idle)
    except BusyError:
        return  # there is one already
    finally:
        os.close(lock)


@contextlib.contextmanager
def _door(place: Place) -> Iterator[socket.socket]:
    """The socket, as long as the block lasts; one that was left behind is removed."""
    place.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        before = os.umask(0o177)
        try:
            with _short(place.socket) as path:
                door.bind(path)
        finally:
            os.umask(before)
        door.listen(8)
        try:
            yield door
        finally:
            place.socket.unlink(missing_ok=True)


def _answer_all(node: Node, door: socket.socket, watch: int, idle: float) -> None:
    began, last = _began(watch), time.monotonic()
    with selectors.DefaultSelector() as waiting:
        waiting.register(door, selectors.EVENT_READ)
        while time.monotonic() - last < idle and _began(watch) == began:
            if not waiting.select(WATCH):
                continue
            connection, _ = door.accept()
            with connection:
                try:
                    connection.settimeout(60.0)
                    _check_peer(connection)
                    asked = decode(_receive(connection))
                    said = node.answer(asked["run"], asked["request"])
                    connection.settimeout(60.0)
                    _send(connection, encode(dict(said)))
                except (OSError, EOFError, ValueError) as error:
                    log.warning("a message was lost on its way to or from the worker: %s", error)
            last = time.monotonic()


def _began(process: int) -> str:
    """When a process began: another one may have its number later; empty where it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(process, 0)
        return "there"
    except OSError:
        return ""


def main() -> None:
    """Be the worker that standard input says."""
    said = json.loads(sys.stdin.buffer.read())
    show()
    key, watch = said.pop("key"), int(said.pop("watch"))
    serve(Node(**said), key, watch)


if __name__ == "__main__":
    main()
