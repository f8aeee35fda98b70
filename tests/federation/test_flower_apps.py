"""The apps on a grid in this process, whose messages are lost, late, repeated, changed, forged."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import federated
import numpy as np
import pytest
from conftest import some

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")

from flower_grid import (
    Corrupt,
    Crash,
    Delay,
    DropReply,
    DropRequest,
    Impersonate,
    InProcessGrid,
    Kill,
    Raise,
    Repeat,
    Step,
)

from fpfl.federation import FederationError, client_app, federate, server_app
from fpfl.federation.agreement import Agreement
from fpfl.federation.enrolment import (
    AUTHORITY,
    IDENTITY,
    REVOKED,
    load_trust,
    make_keys,
    renew,
    revoke,
)
from fpfl.federation.flower import RECORD, TOKEN
from fpfl.federation.flower import server as courier
from fpfl.federation.flower.server import FlowerCourier
from fpfl.federation.rounds import Federated
from fpfl.federation.secagg import STEPS, Credential, Identity
from fpfl.federation.secagg.certificates import certificates_from_pem

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

FAULTS = {
    "request lost": DropRequest(),
    "reply lost": DropReply(),
    "late": Delay(5000.0),
    "late and unasked": Delay(200.0, unasked=True),
    "three times": Repeat(2),
    "again later": Repeat(1, after=150.0),
    "reply changed": Corrupt(),
    "request changed": Corrupt(request=True),
    "in another's name": Impersonate(3),
    "app fails": Raise(RuntimeError("patient 17 has no date of birth")),
    "app fails late": Raise(after=True),
    "app dies": Crash(),
    "app dies after its reply": Crash(replied=True),
    "node dies": Kill(),
    "node dies after": Kill(after=True),
    "node is back without its state": Kill(back=70.0, keep_state=False),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, 10)
    return folder


def asked(step: Step) -> str:
    return str(step.content.config_records[RECORD]["step"])


class Federation:
    """Nodes on a grid, and what the server opened: which sums, and of whom."""

    def __init__(self, agreed: Agreement, keys: Path, monkeypatch: Any, **grid: Any) -> None:
        federated.CURRENT.append(agreed)
        self.agreed, self.keys = agreed, keys
        for path in keys.glob("*/*.ledger"):  # federations have keys in common, and not the count
            path.unlink()
        firsts = [int(part[0]) for part in federated.parts(agreed)]
        configs = [
            {
                "identity": str(keys / f"node-{i + 1}" / IDENTITY),
                "partition-id": i,
                "first-user": firsts[i],
            }
            for i in range(agreed.nodes)
        ]
        app = client_app("federated:current", "federated:load")
        self.grid = InProcessGrid(app, node_configs=configs, **grid)
        monkeypatch.setattr(courier, "time", self.grid.clock)
        self.opened: list[tuple[int, tuple[str, ...], np.ndarray, np.ndarray]] = []
        self._watch(monkeypatch)
        federated.keep_engines(monkeypatch)

    def _watch(self, monkeypatch: Any) -> None:
        """Compare every sum with that of its survivors' contributions, number by number."""
        from fpfl.federation import rounds
        from fpfl.federation.contribution import received

        real = rounds.Aggregation
        opened, agreed = self.opened, self.agreed
        attempt = Federated._attempt
        now: list[Any] = []

        class Watched(real):  # type: ignore[misc, valid-type]
            def total(self) -> Any:
                found = super().total()
                round, w, weights = now
                numbers = [int(name.removeprefix("node-")) - 1 for name in self.survivors]
                wanted = np.zeros(agreed.encoding.size, dtype=np.uint32)
                for node in numbers:
                    wanted += federated.contributed(agreed, node, round, w, weights)
                opened.append((round, self.survivors, found, wanted))
                return found

        def watched(self: Federated, round: int, said: Any) -> Any:
            now[:] = [round, *received(dict(said), agreed)]
            return attempt(self, round, said)

        monkeypatch.setattr(rounds, "Aggregation", Watched)
        monkeypatch.setattr(Federated, "_attempt", watched)

    def run(self, **more: Any) -> Any:
        key = load_trust(self.keys / AUTHORITY)
        return federate(self.agreed, FlowerCourier(self.grid), key, **more)

    def check(self) -> None:
        """Every sum that was opened is the sum of its survivors, and they are enough."""
        for _, survivors, found, wanted in self.opened:
            assert np.array_equal(found, wanted)
            assert len(survivors) >= self.agreed.aggregation.least


def charges(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [line["round"] for line in lines if line["kind"] == "charge"]


@pytest.mark.parametrize(
    "fault",
    some(FAULTS, "late and unasked", "reply changed", "in another's name",
         "node is back without its state"),
)  # fmt: skip
def test_one_node_fails_in_every_step_and_the_round_ends_right(fault, keys, tmp_path, monkeypatch):
    """Of five nodes one fails, in round 1 in one step after the other."""
    agreed = federated.with_seed(federated.agreement(rounds=2, timeout=100.0), 5)
    for step in STEPS:
        action = FAULTS[fault]

        def at(message: Step, step: str = step, action: Any = action) -> Any:
            return (
                action
                if message.node == 1 and message.count < 5 and asked(message) == step
                else None
            )

        federation = Federation(agreed, keys, monkeypatch, fault=at, seed=3)
        folder = tmp_path / step
        run = federation.run(folder=folder)
        federation.check()
        assert len(run.history) == 2, (fault, step)
        assert charges(folder) == [1, 2], (fault, step)
        assert [each[0] for each in federation.opened] == [1, 2]


@pytest.mark.parametrize("seed", some(range(6), 2))  # fifteen faults of ten kinds, in every step
def test_anything_may_happen_to_any_message(seed, keys, tmp_path, monkeypatch):
    """Ten nodes, one fault in sixteen messages: sums are right or not there, and paid for."""
    agreed = federated.with_seed(
        federated.agreement(60, 10, rounds=3, timeout=100.0, attempts=4, colluders=1), seed
    )

    def fault(step: Step) -> Any:
        choose = federation.grid.random
        kinds = [name for name in FAULTS if name not in ("node dies", "node dies after")]
        return FAULTS[choose.choice(kinds)] if choose.random() < 1 / 16 else None

    federation = Federation(agreed, keys, monkeypatch, fault=fault, seed=seed)
    folder = tmp_path / "run"
    finished = 0
    try:
        finished = len(federation.run(folder=folder).history)
    except FederationError:
        finished = len(federation.opened)
    federation.check()
    paid = charges(folder)
    rounds = [each[0] for each in federation.opened]
    assert rounds == sorted(set(rounds))  # no round has two sums
    assert set(rounds) <= set(paid)
    assert finished == len(rounds)


def test_exceptions_on_a_node_tell_the_server_nothing(keys, monkeypatch, caplog):
    """Flower itself would have sent the text of the exception."""
    agreed = federated.with_seed(federated.agreement(rounds=1, timeout=100.0), 5)
    federation = Federation(agreed, keys, monkeypatch)

    def broken(node: Any) -> None:
        raise ValueError(f"patient 17 of node {node['partition-id']} has no date of birth")

    monkeypatch.setattr(federated, "load", broken)
    sent = []
    real = FlowerCourier.exchange

    def watched(self: Any, *arguments: Any) -> Any:
        for node, said in real(self, *arguments):
            sent.append(repr(said))
            yield node, said

    monkeypatch.setattr(FlowerCourier, "exchange", watched)
    with caplog.at_level(logging.INFO):
        federation.run()
    assert len(sent) == 20
    assert "patient 17" not in "".join(sent)
    assert "patient 17" in caplog.text  # on the node, where it belongs


def test_an_app_that_cannot_begin_says_so_on_its_own_machine(keys, monkeypatch, caplog):
    agreed = federated.with_seed(federated.agreement(rounds=1, timeout=100.0, attempts=1), 5)
    federated.CURRENT.append(agreed)
    grid = InProcessGrid(client_app("federated:current", "federated:load"), 5)
    monkeypatch.setattr(courier, "time", grid.clock)
    key = load_trust(keys / AUTHORITY)
    with caplog.at_level(logging.WARNING), pytest.raises(FederationError):
        federate(agreed, FlowerCourier(grid), key)
    assert "was not told who it is" in caplog.text
    assert "its own log says why" in caplog.text


def test_a_session_is_answered_with_one_vector_even_by_a_node_that_forgot(
    keys, monkeypatch, caplog
):
    """Its process died after its reply, with its state: the same request again is refused."""
    agreed = federated.with_seed(federated.agreement(rounds=1, timeout=100.0), 5)

    def fault(step: Step) -> Any:
        return Crash(replied=True) if step.node == 1 and asked(step) == "mask" else None

    federation = Federation(agreed, keys, monkeypatch, fault=fault)
    real = FlowerCourier.exchange
    vectors: list[bytes] = []

    def greedy(self: Any, requests: Any, timeout: float) -> Any:
        found = list(real(self, requests, timeout))
        first = next(iter(requests.values()))
        if first["step"] == "mask":
            victim = federation.grid.ids[1]
            again = list(real(self, {victim: requests[victim]}, timeout))
            vectors.extend(said["vector"] for node, said in [*found, *again] if node == victim)
        yield from found

    monkeypatch.setattr(FlowerCourier, "exchange", greedy)
    with caplog.at_level(logging.WARNING):
        federation.run()
    assert len(vectors) == 1
    assert "No step is done twice" in caplog.text


def test_a_revoked_or_ended_node_is_done_without_and_named(tmp_path, monkeypatch, caplog):
    """By the server, which has the list; by the node itself, where it has it; or its dates."""
    keys = tmp_path / "keys"
    make_keys(keys, 8)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    renew(keys, "node-4", tmp_path / "ended", at=long_ago)
    ended = Identity.from_bytes((keys / "node-4" / IDENTITY).read_bytes())
    data = certificates_from_pem((tmp_path / "ended").read_bytes())[0]
    ended = replace(ended, credential=Credential.signed(data, ended.authority))
    (keys / "node-4" / IDENTITY).write_bytes(ended.to_bytes())
    revoke(keys, ["node-2"])
    (keys / "node-2" / REVOKED).unlink()  # it never got the list, and asks to take part
    agreed = federated.with_seed(federated.agreement(nodes=8, rounds=2, timeout=100.0), 5)
    federation = Federation(agreed, keys, monkeypatch)
    with caplog.at_level(logging.WARNING):
        federation.run()
    federation.check()
    left = tuple(f"node-{i}" for i in (1, 3, 5, 6, 7, 8))
    assert [names for _, names, *_ in federation.opened] == [left, left]
    assert "is refused: the certificate of 'node-2' was revoked" in caplog.text
    assert "refused: node-4: the certificate of 'node-4' ended on 2020-12-31" in caplog.text
    # Heeded in the next round, also by processes that run.
    revoke(keys, ["node-1"])
    with caplog.at_level(logging.WARNING), pytest.raises(FederationError):
        federation.run()
    assert "refused: node-1: the certificate of 'node-1' was revoked" in caplog.text


def test_a_token_can_be_anything(keys, monkeypatch, caplog):
    agreed = federated.with_seed(federated.agreement(rounds=1, timeout=100.0), 5)

    def strange(records: Any, random: Any) -> None:
        records.config_records[RECORD][TOKEN] = [1, 2, 3]
        records.config_records[RECORD]["refused"] = "no\nfpfl: round 9 of 9: accuracy 1.000"

    def fault(step: Step) -> Any:
        return Corrupt(change=strange) if step.node == 1 and asked(step) == "unmask" else None

    federation = Federation(agreed, keys, monkeypatch, fault=fault)
    with caplog.at_level(logging.WARNING):
        run = federation.run()
    assert len(run.history) == 1
    assert "is not its own" in caplog.text
    assert "\nfpfl: round 9" not in caplog.text


def test_the_server_s_app_writes_a_run(keys, tmp_path, monkeypatch, capsys):
    agreed = federated.with_seed(federated.agreement(rounds=2, timeout=100.0), 5)
    config = {"folder": str(tmp_path / "run"), "authority": str(keys / AUTHORITY), "ledger": ""}
    federation = Federation(agreed, keys, monkeypatch, run_config=config)
    federation.grid.serve(server_app("federated:current"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["privacy"]["aggregation"]["shares"] is True
    assert (tmp_path / "run" / "privacy.txt").read_text().startswith("NOT PRIVATE")
    with pytest.raises(ValueError, match="names no function"):
        federation.grid.serve(server_app("federated"))
