"""However many nodes are asked, the SuperLink is sent and keeps one model, in its own precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from federated import agreement
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fpfl.fairness.totals import Weights
from fpfl.federation import contribution
from fpfl.federation.flower import COMMON, RECORD, TOKEN
from fpfl.federation.flower.server import FlowerCourier

NODES, MODEL = 20, 2**20


class SuperLink:
    """What Flower's own client of the SuperLink calls, with Flower's own store behind it."""

    def __init__(self) -> None:
        self.store, self.trees, self.sent = InMemoryObjectStore(), [], 0

    def PushMessages(self, request: Any) -> Any:
        missing: list[str] = []
        for tree in request.message_object_trees:
            self.trees.append(tree)
            missing += self.store.preregister(7, tree)
        names = [message.metadata.message_id for message in request.messages_list]
        return SimpleNamespace(message_ids=names, objects_to_push=missing, session_id="s")

    def PushObject(self, request: Any) -> Any:
        self.sent += len(request.object_content)
        self.store.put(request.object_id, request.object_content)
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(messages_list=[], message_object_trees=[])

    def GetNodes(self, request: Any) -> Any:
        return SimpleNamespace(nodes=[])

    @property
    def kept(self) -> int:
        """Bytes in the store."""
        return sum(len(entry.content) for entry in self.store.store.values())

    def messages(self) -> list[Any]:
        """What the nodes get."""
        found = []
        for tree in self.trees:
            ids = [each.object_id for each in iterate_object_tree(tree)]
            contents = {one: self.store.get(one) or b"" for one in ids}
            found.append(inflate_object_from_contents(tree.object_id, contents))
        return found


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    for name, value in (("_run_id", 7), ("_task_id", 1), ("_node_id", SUPERLINK_NODE_ID)):
        monkeypatch.setattr(TaskIdentity, name, value)
    return SuperLink()


def exchange(link: SuperLink, requests: dict[int, dict[str, Any]]) -> None:
    grid = HttpGrid(token="t")
    grid.set_run(Run.create_empty(7))
    grid._client = link  # type: ignore[assignment]
    assert list(FlowerCourier(grid).exchange(requests, 0.01)) == []


@pytest.mark.parametrize("copied", [False, True], ids=["one object", "copies"])
def test_twenty_nodes_store_one_model(link: SuperLink, copied: bool) -> None:
    model = bytes(range(256)) * (MODEL // 256)
    requests = {
        10 + node: {
            "step": "mask",
            "sealed": [b"%d" % node] * 3,
            "w": bytes(bytearray(model)) if copied else model,
        }
        for node in range(NODES)
    }
    exchange(link, requests)
    assert link.kept < 1.1 * MODEL
    assert link.sent < 1.1 * MODEL
    tokens = set()
    for message in link.messages():
        records = message.content.config_records
        said = {**records[COMMON], **records[RECORD]}
        tokens.add(said.pop(TOKEN))
        assert said == requests[message.metadata.dst_node_id]
    assert len(tokens) == NODES


def test_what_differs_or_is_short_is_each_nodes_own(link: SuperLink) -> None:
    long = bytes(2000)
    requests: dict[int, dict[str, Any]] = {
        1: {"a": 1, "b": b"short", "c": long, "d": long, "e": long, "f": [long]},
        2: {"a": 1, "b": b"short", "c": long, "d": long[:-1] + b"1", "f": [long]},
    }
    exchange(link, requests)
    assert len(link.messages()) == 2
    for message in link.messages():
        records = message.content.config_records
        assert set(records[COMMON]) == {"c"}
        said = {**records[COMMON], **records[RECORD]}
        said.pop(TOKEN)
        assert said == requests[message.metadata.dst_node_id]


def test_nobody_is_asked_anything(link: SuperLink) -> None:
    exchange(link, {})
    assert link.trees == []


@pytest.mark.parametrize(("kind", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_a_model_is_sent_in_its_own_precision(kind: torch.dtype, size: int) -> None:
    agreed = agreement()
    w = agreed.spec.flat.vector().to(kind) + torch.rand(agreed.layout.parameters).to(kind)
    rates, groups = len(agreed.layout.rates), len(agreed.layout.groups)
    weights = Weights(torch.rand(rates, groups), torch.rand(rates), 0.5, 2.0)
    said = {
        "w": contribution._bytes(w),
        "groups": contribution._bytes(weights.groups),
        "overall": contribution._bytes(weights.overall),
        "low": 0.5,
        "high": 2.0,
    }
    assert len(said["w"]) == size * agreed.layout.parameters
    back, given = contribution.received(dict(said), agreed)
    assert torch.equal(back, w.to(torch.float32))
    assert given is not None
    assert torch.equal(given.groups, weights.groups)
    for wrong in (b"", said["w"][:-1], said["w"] + b"0000"):
        with pytest.raises(ValueError, match="numbers of 4 or 8 bytes"):
            contribution.received({**said, "w": wrong}, agreed)
