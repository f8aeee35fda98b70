"""Messages as NVFlare's tasks: one for each node and exchange.

NVFlare says which client sent a result, by the token that it gave out when the client registered
with its certificate, and takes it only from the client that it gave the task to.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fpfl.federation.nvflare import RECORD, TASK, TOKEN
from fpfl.federation.rounds import FederationError

log = logging.getLogger("fpfl.federation")

NODES_POLL, REPLIES_POLL = 0.5, 0.5
"""Seconds between two questions: who is there, whether the job was aborted."""

LONGEST = 200
"""So much of what a node says goes into the log."""

TOKEN_BYTES = 16


@dataclass
class TaskCourier:
    """Carries messages to NVFlare's clients and back.

    Parameters
    ----------
    controller
        Gives out the tasks.
    context
        What NVFlare gave the controller.
    aborted
        Triggered when the job is to end.
    """

    controller: Controller
    context: FLContext
    aborted: Signal
    names: list[str] = field(default_factory=list)
    """Of the clients; where one is here is its node's number."""

    def nodes(self, enough: int, timeout: float) -> list[int]:
        """See `fpfl.federation.rounds.Courier`."""
        end = time.monotonic() + timeout
        while True:
            there = self._connected()
            if len(there) >= enough or time.monotonic() >= end:
                return there
            self._check_aborted()
            time.sleep(NODES_POLL)

    def exchange(
        self, requests: Mapping[int, Mapping[str, Any]], timeout: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `fpfl.federation.rounds.Courier`."""
        came: Queue[tuple[int, Any]] = Queue()
        waiting: dict[int, Task] = {}
        tokens: dict[int, bytes] = {}
        for node, request in requests.items():
            tokens[node] = secrets.token_bytes(TOKEN_BYTES)
            waiting[node] = self._given(node, {**request, TOKEN: tokens[node]}, timeout, came)
        end = time.monotonic() + timeout
        try:
            while waiting:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._check_aborted()
                try:
                    node, result = came.get(timeout=min(left, REPLIES_POLL))
                except Empty:
                    continue
                if waiting.pop(node, None) is None:
                    continue  # the task's end, after its result
                if (said := _read(self.names[node], tokens[node], result)) is not None:
                    yield node, said
        finally:
            # What nobody has answered when the step is over, nobody shall answer later.
            for task in waiting.values():
                self.controller.cancel_task(task)

    def _given(
        self, node: int, request: Mapping[str, Any], timeout: float, came: Queue[tuple[int, Any]]
    ) -> Task:
        data = Shareable()
        data[RECORD] = dict(request)
        task = Task(
            TASK,
            data,
            timeout=max(1, math.ceil(timeout)),
            result_received_cb=lambda client_task, fl_ctx: came.put((node, client_task.result)),
            # With or without a result: by then it is in the queue, or the client is gone.
            task_done_cb=lambda task, fl_ctx: came.put((node, None)),
        )
        name = self.names[node]
        self.controller.broadcast(task, self.context, targets=[name], min_responses=1)
        return task

    def _connected(self) -> list[int]:
        """The clients of this job that NVFlare does not hold for dead."""
        found = [client.name for client in self.context.get_engine().get_clients()]
        for name in sorted(found):
            if name not in self.names:
                self.names.append(name)
        dead = self.controller.get_client_disconnect_time
        return sorted(self.names.index(name) for name in found if not dead(name))

    def _check_aborted(self) -> None:
        if self.aborted.triggered:
            raise FederationError(
                "the job was aborted; what was released stays: submit it again, and it goes on "
                "from its last finished round"
            )


def _read(name: str, token: bytes, result: Any) -> dict[str, Any] | None:
    """What a client said, where it is an answer."""
    if not isinstance(result, Shareable):
        log.warning("%s did not answer in time, or is gone", name)
        return None
    code = result.get_return_code(ReturnCode.OK)
    if code != ReturnCode.OK:
        log.warning("%s failed: %s", name, _short(code))
        return None
    said = result.get(RECORD)
    if not isinstance(said, dict) or said.pop(TOKEN, b"") != token:
        log.warning("a reply in the name of %s is not its own: left out", name)
        return None
    if "refused" in said:
        log.warning("%s refuses: %s", name, _short(said["refused"]))
        return None
    return said


def _short(said: object) -> str:
    """What a node says, on one line: it could say anything."""
    return repr(said)[:LONGEST]
