"""Messages by Flower's grid."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

log = logging.getLogger("fpfl.federation")

RECORD = "fpfl"
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class FlowerCourier:
    """Carries messages to SuperNodes and back.

    Parameters
    ----------
    grid
        What Flower gives a ``ServerApp``.
    """

    grid: Grid

    def nodes(self, enough: int, timeout: float) -> list[int]:
        """See `fpfl.federation.rounds.Courier`."""
        end = time.monotonic() + timeout
        while True:
            found = sorted(self.grid.get_node_ids())
            if len(found) >= enough or time.monotonic() >= end:
                return found
            time.sleep(POLL_SECONDS)

    def exchange(
        self, requests: Mapping[int, Mapping[str, Any]], timeout: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `fpfl.federation.rounds.Courier`."""
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord(dict(request))}),
                dst_node_id=node,
                message_type="query",
                # What nobody has fetched when the step is over, nobody shall answer later.
                ttl=timeout,
            )
            for node, request in requests.items()
        ]
        for reply in self.grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("node %d failed: %s", node, reply.error.reason)
                continue
            said = dict(reply.content.config_records.get(RECORD, {}))
            if "refused" in said:
                log.warning("node %d refuses: %s", node, said["refused"])
                continue
            yield node, said
