"""What a SuperLink says of a federation: its nodes, its last run, who was left out.

It is asked by its Control API, as an operator does. What a run's folder says without a network is
`fpfl.report.standing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.supercore.control.control_http_client import ControlHttpClient

LOST = re.compile(r"left out|is refused|refuses|failed:|lost in|was abandoned|cannot answer")
"""What our own lines say of nodes that a round went on without."""

LINES = 10


class UnreachableError(RuntimeError):
    """The SuperLink did not answer."""


@dataclass(frozen=True)
class Node:
    """A node whose key is registered."""

    id: int
    name: str
    status: str
    since: str


@dataclass(frozen=True)
class Link:
    """What the SuperLink says: its nodes, its last run, and that run's own lines."""

    nodes: tuple[Node, ...]
    run: int | None
    status: str
    said: tuple[str, ...]

    @property
    def lost(self) -> tuple[str, ...]:
        """The lines about nodes that were left out or lost."""
        return tuple(line for line in self.said if LOST.search(line))

    def __str__(self) -> str:
        online = sum(node.status == "online" for node in self.nodes)
        lines = [f"Nodes: {len(self.nodes)} registered, {online} online"]
        lines += [
            f"  {node.name or node.id}: {node.status}, since {node.since or 'never'}"
            for node in sorted(self.nodes, key=lambda each: (each.name, each.id))
        ]
        if self.run is None:
            return "\n".join([*lines, "No run was started."])
        lines.append(f"Run {self.run}: {self.status}")
        lines += ["Left out, refused or lost:" if self.lost else "No node was lost."]
        lines += [f"  {line}" for line in self.lost]
        lines += ["Its last lines:", *(f"  {line}" for line in self.said[-LINES:])]
        return "\n".join(lines)


@contextmanager
def connected(name: str | None) -> Iterator[ControlHttpClient]:
    """A client of the Control API, for a connection of Flower's configuration."""
    import httpx
    from flwr.cli import utils
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import init_http_client_from_connection

    failures = utils.click.ClickException  # Flower's own: typer has a copy of click by now

    try:
        with redirect_stdout(StringIO()):  # it says which connection it uses, each time
            client = init_http_client_from_connection(read_superlink_connection(name))
    except failures as error:
        raise UnreachableError(error.message) from error
    try:
        yield client
    except (httpx.HTTPError, failures) as error:
        raise UnreachableError(f"the SuperLink does not answer as one: {error!r}") from error
    finally:
        client.close()


def of_run(name: str | None, run_id: int) -> str:
    """Flower's status of one run, with what it says of it."""
    from flwr.proto.control_pb2 import ListRunsRequest

    with connected(name) as client:
        run = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
    return _status(run)


def of_link(name: str | None) -> Link:
    """What the SuperLink of a connection says."""
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StreamLogsRequest

    with connected(name) as client:
        found = client.ListNodes(ListNodesRequest()).nodes_info
        nodes = tuple(
            Node(
                each.node_id,
                _line(each.name),
                each.status,
                each.last_activated_at if each.status == "online" else each.last_deactivated_at,
            )
            for each in found
            if each.status != "unregistered"
        )
        runs = client.ListRuns(ListRunsRequest(limit=1)).run_dict
        if not runs:
            return Link(nodes, None, "", ())
        run_id, run = max(runs.items(), key=lambda item: item[1].pending_at)
        answers = client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0))
        text = next(answers, None)
        answers.close()
    said = (text.log_output if text is not None else "").splitlines()
    ours = tuple(_line(line) for line in said if line.startswith("fpfl:"))
    return Link(nodes, run_id, _status(run), ours)


def _status(run: object) -> str:
    found = run.status  # type: ignore[attr-defined]
    words = ":".join(word for word in (found.status, found.sub_status) if word)
    return f"{words} ({_line(found.details)})" if found.details else words


def _line(text: str) -> str:
    """A text on one line, without what a terminal would take for an order: a node may say it."""
    return "".join(each if each.isprintable() else "?" for each in text)
