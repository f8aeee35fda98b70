"""A server that lies about its sessions opens no node's vector; in 0.1.0 it opened them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import some
from federated import Memory, agreement, contributed, dealt, keep_engines, parts, with_seed
from lying import ROUND, Lying, lies

import fpfl
from fpfl.federation.agreement import Agreement
from fpfl.federation.secagg import Trust

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

NUMBERS = some(range(3, 61), 3, 5, 8, 10, 27, 50, 51)
CHANGES: dict[str, Any] = {"constraint": None, "method": None, "rounds": 1, "selection": "last"}


@pytest.fixture(autouse=True)
def one_engine(monkeypatch) -> None:
    keep_engines(monkeypatch)


def agreed_on(nodes: int) -> Agreement:
    """With a test generator, so that it is known what the nodes had to hide."""
    return with_seed(agreement(60, nodes, **CHANGES), 3)


def hidden(agreed: Agreement) -> dict[bytes, int]:
    """Every node's vector."""
    w = agreed.spec.flat.vector()
    vectors = (contributed(agreed, node, ROUND, w, None) for node in range(agreed.nodes))
    return {vector.tobytes(): node for node, vector in enumerate(vectors)}


def learnt(agreed: Agreement, courier: Any, authority: Trust) -> dict[str, int]:
    """How many vectors come out exactly, by what the server says."""
    secrets = hidden(agreed)
    found = {}
    for what, session in lies(agreed):
        for invented in (True, False):
            opened = Lying(agreed, courier, authority, session, invented).opened()
            right = {secrets.get(np.asarray(x).tobytes()) for x in opened.values()} - {None}
            label = f"{what}, {'invented' if invented else 'real'} names"
            found[label] = max(found.get(label, 0), len(right))
    return found


@pytest.mark.parametrize("nodes", NUMBERS)
def test_no_session_opens_a_single_vector(nodes):
    agreed = agreed_on(nodes)
    courier = Memory(agreed)
    found = learnt(agreed, courier, courier.key)
    assert set(found.values()) == {0}, found
    assert any("another graph" in text for text in courier.refused)


@pytest.mark.parametrize("nodes", NUMBERS)
def test_no_session_opens_a_single_vector_through_flower(nodes, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
    import federated
    from flower_grid import InProcessGrid

    from fpfl.federation import client_app
    from fpfl.federation.flower import server as courier
    from fpfl.federation.secagg import Authority

    agreed = agreed_on(nodes)
    monkeypatch.setattr(federated, "CURRENT", [agreed])
    authority, configs = Authority.make(), []
    for i, part in enumerate(parts(agreed)):
        path = Path(tmp_path / f"identity-{i}")
        path.write_bytes(authority.enrol(f"node-{i}", i + 1).to_bytes())
        configs.append({"identity": str(path), "partition-id": i, "first-user": int(part[0])})
    grid = InProcessGrid(client_app("federated:current", "federated:load"), node_configs=configs)
    monkeypatch.setattr(courier, "time", grid.clock)
    found = learnt(agreed, courier.FlowerCourier(grid), authority.trust)
    assert set(found.values()) == {0}, found


@pytest.mark.parametrize("nodes", [10, 120])
def test_the_attack_is_one(nodes, monkeypatch):
    """Nodes that ask the session for its graph lose every vector to it."""
    from fpfl.federation.secagg import GraphChoice

    agreed = agreed_on(10)
    courier = Memory(agreed)
    lie = dict(lies(agreed))["more were asked" if nodes == 120 else "few neighbours"]
    told = GraphChoice(lie.degree, lie.threshold)
    monkeypatch.setitem(agreed.__dict__, "graph", told)
    opened = Lying(agreed, courier, courier.key, lie).opened()
    secrets = hidden(agreed)
    assert {secrets[x.tobytes()] for x in opened.values()} == set(range(10))
    assert dealt(agreed)  # each has users of its own


def one_more(agreed: Agreement, enrolled: bool) -> Memory:
    """A courier that reaches a node more than was agreed on."""
    larger = Memory(with_seed(agreement(60, agreed.nodes + 1, **CHANGES), 3))
    larger.agreed = agreed
    if not enrolled:
        from fpfl.federation.secagg import Authority

        larger.identities[-1] = Authority.make().enrol("stranger", 99)
    larger.nodes = lambda enough, timeout: list(range(agreed.nodes + 1))  # type: ignore[method-assign]
    return larger


@pytest.mark.parametrize("enrolled", [True, False])
@pytest.mark.parametrize("nodes", [3, 50, 100])
def test_one_node_more_changes_no_graph_and_stops_no_run(nodes, enrolled):
    agreed = agreement(100 if nodes == 100 else 60, nodes, **CHANGES)
    courier = one_more(agreed, enrolled) if nodes < 60 else Memory(agreed)
    sessions = set()
    exchange = courier.exchange

    def watched(requests: Any, timeout: float) -> Any:
        for request in requests.values():
            if request["step"] == "advertise":
                sessions.add((request["threshold"], request["degree"]))
        return exchange(requests, timeout)

    courier.exchange = watched  # type: ignore[method-assign]
    run = fpfl.federation.federate(agreed, courier, courier.key)
    assert len(run.history) == 1
    assert sessions == {(2 * nodes // 3 + 1, 0)}
    assert not courier.refused


def test_a_stranger_takes_nobody_s_place_twice():
    """Where the server picks, one that shows no keys is picked last in the next attempts."""
    privacy = fpfl.Privacy(noise_multiplier=5.0, clip=1.0, convention="picked")
    agreed = agreement(6, 6, privacy=privacy, cohort=3, rounds=8, attempts=4)
    courier = Memory(agreed)
    assert agreed.asked == 3  # all of whom it takes
    courier.nodes = lambda enough, timeout: [*range(6), 97, 98, 99]  # type: ignore[method-assign]
    exchange = courier.exchange
    courier.exchange = lambda requests, timeout: exchange(  # type: ignore[method-assign]
        {node: request for node, request in requests.items() if node < 90}, timeout
    )
    assert len(fpfl.federation.federate(agreed, courier, courier.key).history) == 8


def test_more_enrolled_nodes_than_agreed_on_are_refused_by_the_others():
    """A server that lets them in gets no vector: two thirds of those agreed on are fewer of all."""
    agreed = agreed_on(8)
    larger = one_more(agreed, enrolled=True)
    session = next(session for what, session in lies(agreed) if what == "as agreed"
                   and session.run == bytes(16) + agreed.fingerprint)  # fmt: skip
    assert not Lying(agreed, larger, larger.key, session).opened()
    assert sum("another number of nodes" in text for text in larger.refused) == 9
