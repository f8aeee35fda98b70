"""A node that decides for itself: it counts, keeps to its site's budget, and runs its own code."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import federated
import pytest
from federated import Memory, agreement, keep_engines
from typer.testing import CliRunner

import fpfl
from fpfl.cli import app
from fpfl.federation import federate
from fpfl.federation.agreement import Agreement
from fpfl.federation.approval import in_words, terms_of
from fpfl.federation.contribution import Contribution, broadcast
from fpfl.federation.ledger import Budget, NodeLedger, NotAnsweredError
from fpfl.federation.rounds import Federated
from fpfl.federation.sealing import opened, sealed
from fpfl.federation.secagg import Abandoned, Authority, Refused
from fpfl.federation.site import (
    IDENTITY,
    SITE,
    Site,
    SiteNode,
    figures,
    figures_in_words,
    ledger_of,
    package_hash,
    pause,
    paused_of,
    pinned,
    resume,
)
from fpfl.privacy.filter import Mechanism, PrivacyFilter
from fpfl.store.chain import ChainError

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:the noise dominates")

PLAIN: dict[str, Any] = {"constraint": None, "method": None, "selection": "last"}


@pytest.fixture(autouse=True)
def one_engine(monkeypatch) -> None:
    keep_engines(monkeypatch)


def agreed_on(**changes: Any) -> Agreement:
    return agreement(60, 5, **{"rounds": 2, **PLAIN, **changes})


class Sites:
    """A federation in memory whose nodes have a site each, in a folder of its own."""

    def __init__(
        self, agreed: Agreement, folder: Path, monkeypatch: Any, toml: str = "", **memory: Any
    ) -> None:
        self.agreed = agreed
        self.authority = memory.setdefault("authority", Authority.make())
        self.courier = Memory(agreed, **memory)
        self.nodes: dict[str, SiteNode] = {}
        for identity in self.courier.identities:
            path = folder / identity.name
            if not path.exists():
                path.mkdir()
                (path / IDENTITY).write_bytes(identity.to_bytes())
                if toml:
                    (path / SITE).write_text(toml)
            self.nodes[identity.name] = SiteNode.at(path)
        self.folder = folder

        def answered(request: Any, state: bytes, identity: Any, make: Any) -> Any:
            return self.nodes[identity.name].answered(request, state, make)

        monkeypatch.setattr(federated, "answered", answered)

    @property
    def ledgers(self) -> list[NodeLedger]:
        found = [node.ledger for node in self.nodes.values()]
        return [ledger for ledger in found if ledger is not None]

    def run(self, **more: Any) -> Any:
        return federate(self.agreed, self.courier, self.courier.key, **more)

    def server(self, agreed: Agreement | None = None) -> Federated:
        """A server that has no ledger, and so none to keep to."""
        return Federated(agreed or self.agreed, self.courier, self.courier.key, os.urandom(16))

    def lied_to(self, round: int) -> str:
        """Ask for a round as a server does that does not count; what nodes said against it."""
        before = len(self.courier.refused)
        server = self.server(self.agreed)
        server._check_room = lambda round: None  # type: ignore[method-assign]
        server._charge = lambda round: None  # type: ignore[method-assign]
        try:
            said = broadcast(round, self.agreed.spec.flat.vector(), None)
            server._attempt(round, said if round else {"round": 0})
        except Abandoned:
            return "\n".join(self.courier.refused[before:])
        return ""


def sums(sites: Sites) -> list[int]:
    name = sites.agreed.fingerprint.hex()
    return [len(ledger.accounts[name].sums) for ledger in sites.ledgers]


# --- what is counted ------------------------------------------------------------------------------


def test_an_honest_server_finishes_exactly_at_the_limit(tmp_path, monkeypatch):
    agreed = agreed_on(rounds=3)
    assert agreed.plan is not None
    budget = f"[budget]\nepsilon = {agreed.plan.epsilon * 1.0001}\ndelta = {agreed.plan.delta}\n"
    sites = Sites(agreed, tmp_path, monkeypatch, 'approve = "first"\n' + budget)
    run = sites.run()
    assert len(run.history) == 3
    assert sums(sites) == [3] * 5
    assert not sites.courier.refused
    figures = sites.ledgers[0].as_dict()
    assert figures["spent"] == pytest.approx(agreed.plan.epsilon, rel=1e-3)
    assert figures["reserved"] == figures["spent"]
    assert "all 3 sums" in sites.lied_to(3)
    assert sums(sites) == [3] * 5


@pytest.mark.parametrize("round", [0, 3, 1_000_000])
def test_a_round_that_was_not_agreed_on_is_refused(round, tmp_path, monkeypatch):
    """A million was answered."""
    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch)
    said = sites.lied_to(round)
    assert "rounds 1 to 2" in said or "from 1" in said
    assert sums(sites) == [0] * 5


def test_a_server_that_does_not_count_opens_no_more_than_was_agreed(tmp_path, monkeypatch):
    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch)
    assert not sites.lied_to(1)
    assert not sites.lied_to(1)
    assert "all 2 sums" in sites.lied_to(1)
    assert "all 2 sums" in sites.lied_to(2)
    assert sums(sites) == [2] * 5


def test_attempts_that_fail_after_unmasking_count_and_the_server_stops_by_itself(
    tmp_path, monkeypatch
):
    """Server and nodes count alike: the run ends as it would without them, and nobody refuses."""
    lost = {"left": True}

    def fault(step: str, node: int, answer: Any) -> list[Any]:
        if step == "unmask" and lost["left"]:
            lost["left"] = node != 4
            return []
        return [answer]

    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch, fault=fault)
    run = sites.run()
    assert run.stopped is not None
    assert "planned sums have been opened" in run.stopped
    assert len(run.history) == 1
    assert sums(sites) == [2] * 5
    assert not sites.courier.refused


def test_attempts_that_are_abandoned_before_cost_nothing(tmp_path, monkeypatch):
    lost = {"left": True}

    def fault(step: str, node: int, answer: Any) -> list[Any]:
        if step == "mask" and lost["left"]:
            lost["left"] = node != 4
            return []
        return [answer]

    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch, fault=fault)
    assert len(sites.run().history) == 2
    assert sums(sites) == [2] * 5
    assert not sites.courier.refused
    assert {len(account.vectors) for each in sites.ledgers for account in each.accounts.values()} \
        == {3}  # fmt: skip


def test_a_site_can_count_every_vector(tmp_path, monkeypatch):
    """Then nothing that other nodes do opens more: without this node's shares, too."""
    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch, 'count = "vectors"\n')
    sites.courier.fault = lambda step, node, answer: [] if step == "mask" else [answer]
    sites.lied_to(1)
    sites.lied_to(1)
    assert "all 2 sums" in sites.lied_to(1)
    assert sums(sites) == [0] * 5


# --- budget and approval --------------------------------------------------------------------------


def test_a_budget_is_for_all_agreements_together(tmp_path, monkeypatch, caplog):
    first, second = agreed_on(rounds=2), agreed_on(rounds=3)
    assert first.plan is not None
    spends = first.plan.epsilon * 1.0001
    toml = f"[budget]\nepsilon = {spends}\ndelta = {first.plan.delta}\n"
    sites = Sites(first, tmp_path, monkeypatch, toml)
    sites.run()
    other = Sites(second, tmp_path, monkeypatch, authority=sites.authority)
    # The identities of the folder are those of the first federation.
    other.courier.identities = sites.courier.identities
    said = other.lied_to(1)
    assert "no room for the agreement" in said
    assert "ε" not in said  # what else a site has spent on is nobody's business
    assert "100.00% of it is taken" in caplog.text or "99.9" in caplog.text
    assert all(second.fingerprint.hex() not in ledger.accounts for ledger in other.ledgers) or all(
        not ledger.accounts[second.fingerprint.hex()].approved for ledger in other.ledgers
    )
    ledger = other.ledgers[0]
    assert ledger.filter_terms is not None
    limit = PrivacyFilter(spends, first.plan.delta, ledger.filter_terms["order"])
    assert limit.fits({Mechanism.of(first.plan): 2})


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": None, "clip": 1.0},
        {"privacy": fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="poisson")},
        {"test_seed": 3},
    ],
)
def test_what_nothing_bounds_counts_as_infinite(changes, tmp_path, monkeypatch):
    agreed = agreed_on(**changes)
    assert terms_of(agreed)["mechanism"] is None
    toml = "[budget]\nepsilon = 900.0\ndelta = 0.01\n"
    assert "counts as infinite" in Sites(agreed, tmp_path, monkeypatch, toml).lied_to(1)
    free = tmp_path / "free"
    free.mkdir()
    if changes.get("test_seed") is None:
        sites = Sites(agreed, free, monkeypatch)
        sites.run()
        assert sites.ledgers[0].as_dict()["spent"] is None
        assert sites.ledgers[0].spent(1e-5) == math.inf
        assert "no bound on ε" in figures_in_words(figures(free / "node-0"))


def test_a_site_without_an_accountant_refuses_in_words(tmp_path, monkeypatch, caplog):
    agreed = agreed_on()
    sites = Sites(agreed, tmp_path, monkeypatch, "[budget]\nepsilon = 9.0\ndelta = 1e-3\n")

    def missing(self: Any, order: int) -> float:
        raise ImportError("dp-accounting is not installed")

    monkeypatch.setattr(Mechanism, "renyi", missing)
    assert "cannot count" in sites.lied_to(1)
    assert "dp-accounting is not installed" in caplog.text


def test_a_budget_is_fixed_before_the_first_agreement(tmp_path):
    terms = terms_of(agreed_on())
    with NodeLedger.open(tmp_path / "ledger", "a") as ledger:
        ledger.approve("01", "all", terms=terms, budget=Budget(50.0, 1e-3))
        with pytest.raises(NotAnsweredError) as info:
            ledger.approve("02", "all", terms=terms, budget=Budget(60.0, 1e-3))
        assert "ε = 50" in info.value.here
        with pytest.raises(NotAnsweredError, match="not in order"):
            ledger.approve("02", "all", terms=terms)
    with NodeLedger.open(tmp_path / "later", "a") as ledger:
        ledger.approve("01", "all", terms=terms)
        with pytest.raises(NotAnsweredError) as info:
            ledger.approve("02", "all", terms=terms, budget=Budget(50.0, 1e-3))
        assert "before it had one" in info.value.here


def test_what_is_not_approved_is_refused_with_what_to_do(tmp_path, monkeypatch):
    agreed = agreed_on(hold=0.01)
    sites = Sites(agreed, tmp_path, monkeypatch, 'approve = "ask"\n')
    name = agreed.fingerprint.hex()
    assert f"fpfl federation approve SITE {name}" in sites.lied_to(1)
    assert sites.lied_to(1)
    for node in sites.nodes:
        folder = str(tmp_path / node)
        result = CliRunner().invoke(app, ["federation", "approve", folder, name], input="y\n")
        assert result.exit_code == 0, result.output
        for word in ("60 in all", "20 in a round", "ε = ", "noise 1 ", "'coins'", "0.01 s",
                     agreed.model_hash):  # fmt: skip
            assert word in result.output
    assert len(sites.run().history) == 2
    shown = CliRunner().invoke(app, ["federation", "ledger", folder])
    assert "2 of 2 sums" in shown.output
    assert "in order" in shown.output
    again = CliRunner().invoke(app, ["federation", "approve", folder, name])
    assert "approved already" in again.output
    more = CliRunner().invoke(app, ["federation", "approve", folder, name, "--again", "--yes"])
    assert more.exit_code == 0
    figures = CliRunner().invoke(app, ["federation", "ledger", folder, "--json"])
    assert json.loads(figures.output)["agreements"][name]["limit"] == 4
    CliRunner().invoke(app, ["federation", "end", folder, name])
    assert "is not approved" in sites.lied_to(1)


def test_only_the_first_agreement_is_taken_unasked_or_those_that_are_listed(tmp_path, monkeypatch):
    first, second = agreed_on(), agreed_on(rounds=3)
    for name, toml in {
        "first": 'approve = "first"\n',
        "list": f'approve = ["{first.fingerprint.hex()}"]\n',
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        sites = Sites(first, folder, monkeypatch, toml)
        assert not sites.lied_to(1)
        other = Sites(second, folder, monkeypatch, authority=sites.authority)
        other.courier.identities = sites.courier.identities
        assert "is not approved" in other.lied_to(1)


def test_a_cap_on_rounds(tmp_path, monkeypatch):
    sites = Sites(agreed_on(rounds=3), tmp_path, monkeypatch, "rounds = 2\n")
    assert "cap on rounds" in sites.lied_to(1)


def test_a_pause_stops_every_step(tmp_path, monkeypatch):
    sites = Sites(agreed_on(rounds=1), tmp_path, monkeypatch)
    folders = [tmp_path / name for name in sites.nodes]

    def fault(step: str, node: int, answer: Any) -> list[Any]:
        if step == "mask" and node == 4:
            for folder in folders:
                pause(folder)
        return [answer]

    sites.courier.fault = fault
    assert "has paused" in sites.lied_to(1)
    assert sums(sites) == [0] * 5
    sites.courier.fault = None
    for folder in folders:
        assert paused_of(folder / IDENTITY).exists()
        resume(folder)
    assert not sites.lied_to(1)


def test_the_words_are_of_the_agreement_and_its_fingerprint_covers_them():
    """Whoever approves a fingerprint has approved what the words say."""
    agreed = agreed_on()
    words = in_words("f", terms_of(agreed))
    for changes in (
        {"hold": 1.0},
        {"rounds": 3},
        {"attempts": 7},
        {"cohort": 30},
        {"model": lambda: fpfl.mlp(5, (3,), seed=1)},
        {"colluders": 0},
        {"privacy": fpfl.Privacy(noise_multiplier=2.0, clip=1.0, convention="coins")},
    ):
        other = agreed_on(**changes)
        assert other.fingerprint != agreed.fingerprint
        if "attempts" not in changes:
            assert in_words("f", terms_of(other)) != words


# --- sessions, processes, files -------------------------------------------------------------------


def captured(sites: Sites) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """The requests of one honest round, by step."""
    seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    real = sites.courier.exchange

    def exchange(requests: Any, timeout: float) -> Iterator[Any]:
        for node, request in requests.items():
            seen.setdefault(request["step"], []).append((node, dict(request)))
        yield from real(requests, timeout)

    sites.courier.exchange = exchange  # type: ignore[method-assign]
    assert not sites.lied_to(1)
    return seen


def test_a_session_has_one_vector_though_the_state_is_rolled_back(tmp_path, monkeypatch):
    """Whoever keeps the state can bring an old one back; the ledger knows."""
    sites = Sites(agreed_on(), tmp_path, monkeypatch)
    states: list[bytes] = []
    real = sites.nodes["node-0"].answered

    def answered(request: Any, state: bytes, identity: Any, make: Any) -> Any:
        node = sites.nodes[identity.name]
        if identity.name == "node-0" and request["step"] in ("mask", "unmask"):
            states.append(state)
        return node.answered(request, state, make)

    monkeypatch.setattr(federated, "answered", answered)
    seen = captured(sites)
    mask = next(request for node, request in seen["mask"] if node == 0)
    unmask = next(request for node, request in seen["unmask"] if node == 0)
    make = sites.courier._maker(0)
    with pytest.raises(Refused, match="a vector was masked in this session before"):
        real(mask, states[0], make)
    real(unmask, states[1], make)  # the same again: shares that the server has already
    assert sums(sites) == [1] * 5
    assert sites.ledgers[0].accounts[sites.agreed.fingerprint.hex()].vectors.keys() == {
        mask["session"].hex()
    }


def test_shares_are_for_one_request_in_a_session(tmp_path):
    terms = terms_of(agreed_on())
    with NodeLedger.open(tmp_path / "ledger", "a") as ledger:
        ledger.approve("01", "all", terms=terms)
        with pytest.raises(NotAnsweredError, match="no vector was given"):
            ledger.give("unmask", b"s", b"x")
        ledger.give_vector(b"s", "01", 1)
        for step in ("consent", "unmask"):
            ledger.give(step, b"s", b"x")
            ledger.give(step, b"s", b"x")
            with pytest.raises(NotAnsweredError, match="for another request"):
                ledger.give(step, b"s", b"y")
        assert len(ledger.accounts["01"].sums) == 1


def test_a_forged_ledger_is_not_gone_on_with_and_a_torn_one_is(tmp_path):
    path, terms = tmp_path / "ledger", terms_of(agreed_on())
    with NodeLedger.open(path, "a") as ledger:
        ledger.approve("01", "all", terms=terms)
        ledger.give_vector(b"s", "01", 1)
        ledger.give("unmask", b"s", b"x")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["open", "proposal", "approval", "vector", "sum"]
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(ChainError, match="edited or damaged"):
        NodeLedger.open(path, "a")
    path.write_bytes(whole.replace(b'"rounds":2', b'"rounds":9'))
    with pytest.raises(ChainError, match="edited or damaged"):
        NodeLedger.open(path, "a")
    path.write_bytes(whole)
    with pytest.raises(ChainError, match="this node is 'b'"):
        NodeLedger.open(path, "b")
    # Cut off within the last line: what it was about has not left.
    path.write_bytes(whole[:-20])
    with NodeLedger.open(path, "a") as ledger:
        assert ledger.accounts["01"].vectors
        with pytest.raises(NotAnsweredError, match="masked in this session before"):
            ledger.give_vector(b"s", "01", 1)
        ledger.give("unmask", b"s", b"x")
        assert len(ledger.accounts["01"].sums) == 1


def _mask(path: str, barrier: Any, results: Any, session: bytes, round: int) -> None:
    with NodeLedger.open(path, "a") as ledger:
        barrier.wait()
        try:
            ledger.give_vector(session, "01", round)
            results.put("given")
        except NotAnsweredError:
            results.put("refused")


def test_of_two_processes_at_once_one_is_refused(tmp_path):
    path = tmp_path / "ledger"
    with NodeLedger.open(path, "a") as ledger:
        ledger.approve("01", "all", terms=terms_of(agreed_on()))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_mask, args=(str(path), barrier, results, b"s", 1)) for _ in "ab"
    ]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=120) for _ in processes) == ["given", "refused"]
    for process in processes:
        process.join()


def test_a_ledger_that_two_begin_is_one(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path / "ledger"

    def begin(number: int) -> tuple[int, str]:
        with NodeLedger.open(path, "a") as ledger:
            return ledger.head

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(begin, range(8)))) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["ledger"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("step", ["mask", "unmask"])
def test_a_node_that_is_killed_between_line_and_answer_has_counted(step, tmp_path, monkeypatch):
    """SIGKILL when the line is on the disk and the answer has not left."""
    sites = Sites(agreed_on(), tmp_path, monkeypatch)
    path, name = tmp_path / "node-0", sites.agreed.fingerprint.hex()
    real = sites.nodes["node-0"]

    def killed(request: Any, state: bytes, make: Any) -> None:
        import fpfl.federation.site as module

        node = SiteNode.at(path)
        if step == "unmask":
            module.sealed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        else:
            Contribution.vector = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
        node.answered(request, state, make)

    died: list[tuple[Any, bytes, Any]] = []

    def answered(request: Any, state: bytes, identity: Any, make: Any) -> Any:
        if identity.name == "node-0" and request["step"] == step and not died:
            died.append((request, state, make))
            child = os.fork()
            if not child:
                killed(request, state, make)
                os._exit(1)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            raise Refused(identity.name, "it died.")
        return sites.nodes[identity.name].answered(request, state, make)

    monkeypatch.setattr(federated, "answered", answered)
    sites.lied_to(1)
    with closing(SiteNode.at(path)) as node:
        assert node.ledger is not None
        account = node.ledger.accounts[name]
        assert len(account.vectors) == 1
        assert len(account.sums) == (step == "unmask")
        if step == "mask":
            with pytest.raises(Refused, match="masked in this session before"):
                node.answered(*died[0])
        else:
            node.answered(*died[0])  # its answer was lost; the sum is paid for
            assert len(account.sums) == 1
    real.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_lying_server_asks_every_sum_is_counted(seed, tmp_path, monkeypatch):
    """Requests of several rounds, in any order, again, with old states, in any process."""
    rng = random.Random(seed)
    sites = Sites(agreed_on(rounds=2), tmp_path, monkeypatch)
    name = sites.agreed.fingerprint.hex()
    kept: dict[int, list[bytes]] = {i: [b""] for i in range(5)}
    asked: list[tuple[int, Any]] = []
    vectors: dict[int, list[bytes]] = {i: [] for i in range(5)}
    shares: dict[int, set[bytes]] = {i: set() for i in range(5)}

    def ask(number: int, request: Any, state: bytes, make: Any) -> Any:
        identity = sites.courier.identities[number]
        if rng.random() < 0.3:  # a process of its own, as Flower starts one for each message
            with closing(SiteNode.at(tmp_path / identity.name)) as node:
                after, said = node.answered(request, state, make)
        else:
            after, said = sites.nodes[identity.name].answered(request, state, make)
        kept[number].append(after)
        session = request["session"]
        if request["step"] == "mask":
            vectors[number].append(session)
        if request["step"] == "unmask":
            shares[number].add(session)
        return after, said

    def answered(request: Any, state: bytes, identity: Any, make: Any) -> Any:
        number = sites.courier.identities.index(identity)
        asked.append((number, dict(request)))
        for _ in range(rng.randrange(3)):
            other, again = rng.choice(asked)
            try:
                ask(other, again, rng.choice(kept[other]), sites.courier._maker(other))
            except Refused:
                continue
        return ask(number, request, state, make)

    monkeypatch.setattr(federated, "answered", answered)
    for _ in range(5):
        sites.lied_to(rng.choice([0, 1, 2, 2, 3, 10**6]))
    for number, ledger in enumerate(sites.ledgers):
        with NodeLedger.open(ledger_of(tmp_path / f"node-{number}" / IDENTITY), ledger.node) as now:
            account = now.accounts.get(name)
            counted = set() if account is None else account.sums
            assert counted >= {session.hex() for session in shares[number]}
            assert len(counted) <= 2
            assert len(vectors[number]) == len(set(vectors[number]))
            assert {s.hex() for s in vectors[number]} <= (account.vectors.keys() if account else
                                                          set())  # fmt: skip


# --- state, code, times ---------------------------------------------------------------------------


def test_state_is_sealed_for_one_node(tmp_path, monkeypatch):
    """Flower serves it to every process of the machine: secrets stood there in the clear."""
    sites = Sites(agreed_on(), tmp_path, monkeypatch)
    captured(sites)
    one, other = sites.courier.identities[:2]
    state = sites.courier.states[0]
    text = opened(state, one)
    assert one.name.encode() in text
    assert one.name.encode() not in state
    with pytest.raises(Refused, match="of another node, or was changed"):
        opened(state, other)
    for place in (0, 20, len(state) - 1):
        changed = bytearray(state)
        changed[place] ^= 1
        with pytest.raises(Refused, match="of another node, or was changed"):
            opened(bytes(changed), one)
    with pytest.raises(Refused, match="of another node, or was changed"):
        opened(text, one)
    # The same credential with another key, as after a renewal.
    renewed = sites.authority.enrol(one.name, one.index)
    with pytest.raises(Refused, match="of another node, or was changed"):
        opened(sealed(b"state", renewed), one)
    assert opened(sealed(b"state", one), one) == b"state"


def test_nodes_with_a_mismatching_state_refuse_in_words(tmp_path, monkeypatch):
    sites = Sites(agreed_on(), tmp_path, monkeypatch)
    seen = captured(sites)
    node, request = seen["unmask"][0]
    with pytest.raises(Refused, match="of another node, or was changed"):
        sites.nodes[f"node-{node}"].answered(
            request, sites.courier.states[node + 1], sites.courier._maker(node)
        )


PACKAGE = """
import federated

def agreement():
    return federated.current()

def load(node):
    return federated.people() if node["site"] == "mine" else None
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    folder = tmp_path / "installed" / "ourtask"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "task.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "ourtask"]:
        del sys.modules[name]


def toml_of(package: Path) -> str:
    return (
        'agreement = "ourtask.task:agreement"\nload = "ourtask.task:load"\n[node]\nsite = "mine"\n'
        f'[package]\nname = "ourtask"\nsha256 = "{package_hash(package)}"\n'
    )


def test_pinned_code_is_run_and_no_other(package, tmp_path, monkeypatch):
    path = tmp_path / SITE
    path.write_text(toml_of(package))
    site = Site.read(path)
    assert site.package is not None
    agreed = agreed_on()
    monkeypatch.setattr(federated, "CURRENT", [agreed])
    assert pinned(site.package, "ourtask.task:agreement")() is agreed
    (package / "task.py").write_text(PACKAGE + "\nSENT = True\n")
    with pytest.raises(ValueError, match=r"has the hash .* pins"):
        pinned(site.package, "ourtask.task:agreement")
    (package / "task.py").write_text(PACKAGE)
    (package / "more.so").write_bytes(b"\0")
    with pytest.raises(ValueError, match="pins"):
        pinned(site.package, "ourtask.task:agreement")
    (package / "more.so").unlink()
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "any.pyc").write_bytes(b"x")
    assert callable(pinned(site.package, "ourtask.task:load"))
    (package / "link.py").symlink_to(package / "task.py")
    with pytest.raises(ValueError, match="is a link"):
        pinned(site.package, "ourtask.task:load")


def test_a_pinned_node_asks_nothing_of_what_was_sent(package, tmp_path, monkeypatch):
    """Agreement, loader and what the loader is told are the site's, whatever came."""
    agreed, sent = agreed_on(), agreed_on(rounds=9)
    monkeypatch.setattr(federated, "CURRENT", [agreed])
    sites = Sites(agreed, tmp_path, monkeypatch, toml_of(package))

    def ask_what_was_sent() -> Any:
        raise AssertionError("what was sent was run")

    made = sites.nodes["node-0"].contribution({"site": "theirs"}, ask_what_was_sent)
    assert made.agreement is agreed
    assert made.load() is federated.people()

    def answered(request: Any, state: bytes, identity: Any, make: Any) -> Any:
        node = sites.nodes[identity.name]
        return node.answered(
            request, state, lambda: node.contribution({"site": "theirs"}, ask_what_was_sent)
        )

    monkeypatch.setattr(federated, "answered", answered)
    assert not sites.lied_to(1)
    sites.agreed = sent  # a server with another agreement than the pinned one
    assert "than this node's agreement" in sites.lied_to(1)
    free = SiteNode(sites.courier.identities[0], Site(), None, tmp_path / "paused")
    with pytest.raises(ValueError, match=r"add .package., agreement"):
        free.contribution()
    assert free.contribution({}, lambda: (lambda: sent, lambda node: None)).agreement is sent


def test_bytecode_that_lies_beside_pinned_sources_is_not_run(package, monkeypatch):
    """A cached file with the source's time and size is taken for it; it is in no hash."""
    import py_compile

    source = package / "task.py"
    good, digest = source.read_text(), package_hash(package)
    stat = source.stat()
    evil = good.replace("return federated.current()", "return 'from the cache'")
    evil += "#" * max(0, len(good) - len(evil))
    source.write_text(evil[: len(good)].ljust(len(good), "#"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if len(evil) <= len(good):
        py_compile.compile(str(source))
    source.write_text(good)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list((package / "__pycache__").glob("task*.pyc"))
    agreed = agreed_on()
    monkeypatch.setattr(federated, "CURRENT", [agreed])
    from fpfl.federation.site import Package

    assert package_hash(package) == digest
    found = pinned(Package(name="ourtask", sha256=digest), "ourtask.task:agreement")
    assert found() is agreed


def test_code_of_the_same_name_that_was_sent_is_refused(package, tmp_path, monkeypatch):
    """Flower puts what it was sent first on the path, and may have imported it."""
    from fpfl.federation.site import Package

    digest = package_hash(package)
    sent = tmp_path / "sent" / "ourtask"
    sent.mkdir(parents=True)
    (sent / "__init__.py").write_text("")
    (sent / "task.py").write_text(PACKAGE + "\n# changed\n")
    monkeypatch.syspath_prepend(str(tmp_path / "sent"))
    pin = Package(name="ourtask", sha256=digest)
    with pytest.raises(ValueError, match="pins"):
        pinned(pin, "ourtask.task:agreement")
    assert "sent" in str(import_module(f"{pin.name}.task").__file__)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("sent")])
    sys.modules.pop("ourtask").__spec__ = None
    with pytest.raises(ValueError, match="not from the pinned package"):
        pinned(pin, "ourtask.task:agreement")


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('aprove = "ask"\n', "aprove"),
        ("approve = 'never'\n", "approve"),
        ("[budget]\nepsilon = -1.0\ndelta = 1e-5\n", "budget.epsilon"),
        ("[budget]\nepsilon = 1.0\n", "budget.delta"),
        ("rounds = 0\n", "rounds"),
        ("approve = ['everybody']\n", "approve"),
        ('agreement = "a:b"\n', "fpfl federation pin"),
        ('agreement = "os:system"\nload = "ourtask:load"\n[package]\nname = "ourtask"\n'
         f'sha256 = "{"0" * 64}"\n', "ourtask.module:function"),
        ("count = 'rounds'\n", "count"),
        ("rounds = \n", "not a TOML file"),
    ],
)  # fmt: skip
def test_settings_that_say_nothing_are_refused(toml, said, tmp_path):
    (tmp_path / SITE).write_text(toml)
    with pytest.raises(ValueError, match=said) as info:
        Site.read(tmp_path / SITE)
    assert "\n" not in str(info.value)


def test_an_overrun_is_in_the_node_s_own_ledger_and_in_no_answer(tmp_path, monkeypatch, caplog):
    """The statement said "equally long" where every answer took longer than `hold`."""
    sites = Sites(agreed_on(rounds=1, hold=1e-9), tmp_path, monkeypatch)
    run = sites.run()
    name = sites.agreed.fingerprint.hex()
    assert [ledger.accounts[name].overruns for ledger in sites.ledgers] == [1] * 5
    assert (
        "1 took longer"
        in CliRunner().invoke(app, ["federation", "ledger", str(tmp_path / "node-0")]).output
    )
    for _, _, answer in sites.courier.seen:
        assert not any("over" in key or "second" in key for key in answer)
    said = str(run.privacy)
    assert "equally long" not in said
    assert "were agreed to take at least" in said
    assert "its time can be seen" in said


def test_the_client_app_keeps_to_the_site(tmp_path, monkeypatch, caplog):
    """Through Flower: a round of a million is refused, and what it keeps is sealed."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
    from flower_grid import InProcessGrid

    from fpfl.federation import client_app
    from fpfl.federation.flower import RECORD
    from fpfl.federation.flower import server as courier
    from fpfl.federation.flower.server import FlowerCourier

    agreed = agreed_on()
    monkeypatch.setattr(federated, "CURRENT", [agreed])
    authority, configs = Authority.make(), []
    for i in range(5):
        path = tmp_path / f"node-{i}"
        path.mkdir()
        identity = authority.enrol(f"node-{i}", i + 1)
        (path / IDENTITY).write_bytes(identity.to_bytes())
        configs.append({"identity": str(path / IDENTITY), "partition-id": i})
    grid = InProcessGrid(client_app("federated:current", "federated:load"), node_configs=configs)
    monkeypatch.setattr(courier, "time", grid.clock)
    server = Federated(agreed, FlowerCourier(grid), identity.authority, os.urandom(16))
    server._check_room = lambda round: None  # type: ignore[method-assign]
    w = agreed.spec.flat.vector()
    with pytest.raises(Abandoned):
        server._attempt(1_000_000, broadcast(1_000_000, w, None))
    assert "from 1 to 2" in caplog.text
    server._attempt(1, broadcast(1, w, None))
    for i in range(5):
        assert RECORD not in grid.context(i).state.config_records
        states = list((tmp_path / f"node-{i}" / "identity.states").glob("*.state"))
        assert states
        assert all(f"node-{i}".encode() not in path.read_bytes() for path in states)
