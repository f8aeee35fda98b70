"""A federation in memory: the same as the simulation, and what happens when things go wrong."""

from __future__ import annotations

import json
import logging
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import some
from federated import (
    CONSTRAINT,
    Memory,
    agreement,
    contributed,
    dealt,
    keep_engines,
    network,
    nobody,
    parameters,
    people,
    simulated,
    with_seed,
)

import fpfl
from fpfl.aggregation.encoding import in_ring
from fpfl.data import AttributeColumn, Label, NumberColumn, TableSchema
from fpfl.federation import FederationError, federate, rounds
from fpfl.federation import contribution as contributing
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import (
    Contribution,
    SystemChance,
    TestChance,
    broadcast,
    received,
    received_level,
    received_round,
)
from fpfl.federation.rounds import SOON, Federated
from fpfl.federation.secagg import STEPS, Abandoned, Authority, GraphChoice
from fpfl.federation.secagg.client import _signed
from fpfl.runs.ledger import RunLedger

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:the noise dominates")

ADAPTS = fpfl.AdaptiveBound(0.3, rate=3.0, share=0.05)
METHODS = {
    "one gradient": {"method": fpfl.OneGradient()},
    "the paper's form": {"method": fpfl.MMDM(damping=2.0)},
    "no constraint": {"constraint": None, "method": None},
    "local steps": {
        "constraint": None,
        "method": None,
        "local": fpfl.FederatedAveraging(steps=2, learning_rate=0.1),
    },
    "a bound that adapts": {
        "method": fpfl.OneGradient(),
        "privacy": fpfl.Privacy(
            noise_multiplier=1.0,
            clip=fpfl.Clipping(0.5, counts=4.0, adapts=ADAPTS),
            convention="coins",
        ),
    },
    "a joint bound that adapts": {
        "method": fpfl.MMDM(damping=2.0),
        "privacy": fpfl.Privacy(
            noise_multiplier=1.0,
            clip=fpfl.Clipping(0.5, adapts=ADAPTS),
            convention="coins",
        ),
    },
}


def federated(agreed: Agreement, courier: Memory | None = None, **more):
    courier = courier or Memory(agreed)
    return federate(agreed, courier, courier.key, **more)


def step_bound(agreed: Agreement) -> float:
    """How far rounding moves one step of SGD: η/N times the decoded gradient's error."""
    units = agreed.encoding.units[: agreed.layout.parameters].min()
    rounding = agreed.encoding.rounding_bound(agreed.population) / float(units)
    return agreed.learning_rate * rounding / agreed.spec.normaliser


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("users", "nodes"), [(60, 5), (12, 12)], ids=["silos", "devices"])
def test_a_federation_is_the_simulation(method, users, nodes):
    """With the same coins and noise: within the rounding of the fixed-point encoding."""
    changes = METHODS[method] | {"selection": "last"}
    agreed = with_seed(agreement(users, nodes, **changes), 7)
    one, other = federated(agreed), simulated(agreed, people(users))
    moved = float((parameters(other) - agreed.spec.flat.vector()).norm())
    error = float((parameters(one) - parameters(other)).norm())
    # Twice: where the models differ by the rounding of one round, so do the next gradients.
    bound = 2 * agreed.rounds * step_bound(agreed)
    assert error <= bound < 0.05 * moved
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-3)
        assert mine.get("clip_bound") == theirs.get("clip_bound")
    if "adapts" in method:
        assert len({row["clip_bound"] for row in one.history}) == agreed.rounds
    assert str(one.privacy).startswith("NOT PRIVATE")


def test_totals_of_a_round_differ_by_the_stated_bound():
    agreed = with_seed(agreement(), 3)
    courier = Memory(agreed)
    w = agreed.spec.flat.vector()
    v = Federated(agreed, courier, courier.key, b"r" * 16).release(1, w)
    assert agreed.plan is not None
    noiseless = replace(agreed, privacy=None, clip=agreed.spec.clipping)
    other = Memory(noiseless)
    plain = Federated(noiseless, other, other.key, b"r" * 16).release(1, w)
    noise = sum(
        TestChance(3, i, 0).noise(agreed.encoding.size, agreed.bits, 1) for i in range(agreed.nodes)
    )
    difference = (v - plain - agreed.encoding.decoded(in_ring(noise), 1)) * agreed.encoding.units
    bound = sum(e.rounding_bound(agreed.population) for e in (agreed.encoding, noiseless.encoding))
    assert float(difference.norm()) <= bound + 1e-4  # v is in single precision


def test_real_randomness_gives_other_numbers_and_no_marks():
    agreed = agreement(rounds=1)
    one, other = federated(agreed), federated(agreed)
    assert not torch.equal(parameters(one), parameters(other))
    said = str(one.privacy)
    assert "NOT PRIVATE" not in said
    assert "simulation" not in said
    assert "up to 1 of the 5 nodes" in said
    assert "at least 3 honest nodes" in said


# --- who is sampled ------------------------------------------------------------------------------


def test_coins_are_each_user_s_own_and_fair():
    """20,000 coins at 1/3: within five standard deviations (a false alarm in 10⁶ runs)."""
    agreed = agreement()
    chance = SystemChance()
    counts = np.zeros(50)
    for _ in range(400):
        counts[chance.sampled(50, agreed, 1)] += 1
    total, mean = counts.sum(), 20_000 / 3
    assert abs(total - mean) < 5 * math.sqrt(20_000 * 2 / 9)
    assert counts.min() > 0


def test_a_node_where_nobody_is_sampled_answers_as_the_others_do():
    agreed = replace(agreement(), cohort=1)
    courier = Memory(agreed)
    run = federated(agreed, courier)
    assert len(run.history) == 3
    lengths = {len(a["vector"]) for step, _, a in courier.seen if step == "mask"}
    assert lengths == {4 * agreed.encoding.size}
    assert len([1 for step, _, _ in courier.seen if step == "mask"]) == 15


def test_a_server_that_picks_asks_those_nodes_and_claims_nothing_for_it():
    privacy = fpfl.Privacy(noise_multiplier=5.0, clip=1.0, convention="picked")
    agreed = agreement(12, 12, privacy=privacy, cohort=6, rounds=12)
    assert (agreed.aggregation.least, agreed.aggregation.colluders) == (5, 1)  # of six
    courier = Memory(agreed)
    run = federated(agreed, courier)
    masks = [node for step, node, _ in courier.seen if step == "mask"]
    assert len(masks) == 12 * 6
    with pytest.raises(ValueError, match="copies=2 is for federations"):
        fpfl.train(
            network(),
            people(),
            cohort=5,
            rounds=1,
            privacy=fpfl.Privacy(noise_multiplier=1, convention="coins", copies=2),
        )
    said = str(run.privacy)
    assert "Against a server that knows the cohorts (no amplification by sampling)" in said
    assert "12 rounds. Nobody takes part more often" in said
    assert run.privacy is not None
    assert run.privacy.epsilon == run.privacy.epsilon_server


def test_a_trusted_server_adds_the_noise_and_the_statement_says_so():
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="poisson")
    agreed = agreement(privacy=privacy)
    assert agreed.bits is None
    run = federated(agreed)
    said = str(run.privacy)
    assert "Against the server: NO GUARANTEE" in said
    assert "privacy loss distributions" in said
    # With a seed it is, with that server's noise, what `fpfl.train` makes of it.
    seeded = with_seed(replace(agreed, selection="last"), 5)
    one = federated(seeded)
    other = fpfl.train(
        network(), people(), cohort=seeded.cohort, rounds=3, constraint=CONSTRAINT,
        method=fpfl.OneGradient(), privacy=privacy, learning_rate=0.2, selection="last",
        seed=5, noise_seed=5,
    )  # fmt: skip
    error = float((parameters(one) - parameters(other)).norm())
    # The ring's rounding has room in the noise: a thousandth more of it than in the simulation.
    moved = float((parameters(other) - seeded.spec.flat.vector()).norm())
    assert error <= 2 * 3 * step_bound(seeded) + 1e-3 * moved


def test_a_node_with_one_user_does_the_same_work_either_way(monkeypatch):
    agreed = replace(agreement(12, 12, rounds=1), cohort=1)
    computed = []
    real = Contribution._summed

    def counting(self, engine, round, w, users, *more):
        computed.append(len(users))
        return real(self, engine, round, w, users, *more)

    monkeypatch.setattr(Contribution, "_summed", counting)
    w, data = agreed.spec.flat.vector(), dealt(agreed)[0]
    for _ in range(20):  # sampled or not
        Contribution(agreed, lambda: data, SystemChance()).vector(1, w, None)
    assert computed == [1] * 20
    # Nobody's data is in what an unsampled node sends: with no coin at all, it is its noise.
    unlucky = with_seed(replace(agreed, cohort=1), 3)
    quiet = TestChance(3, 0, 10**6)
    sent = Contribution(unlucky, lambda: data, quiet).vector(1, w, None)
    assert np.array_equal(sent, in_ring(quiet.noise(unlucky.encoding.size, unlucky.bits, 1)))


def test_answers_are_held_back(monkeypatch, caplog):
    slept, now = [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(contributing, "time", clock)
    agreed = agreement(hold=30.0)
    data = dealt(agreed)[0]
    contribution = Contribution(agreed, lambda: data, SystemChance())
    contribution.vector(1, agreed.spec.flat.vector(), None)
    assert slept == [30.0]
    late = Contribution(agreed, lambda: now.__setitem__(0, 31.0), SystemChance())
    with caplog.at_level(logging.WARNING):
        late.vector(1, agreed.spec.flat.vector(), None)
    assert "agree on more" in caplog.text
    with pytest.raises(ValueError, match="held back"):
        agreement(hold=700.0)


# --- bad data ------------------------------------------------------------------------------------


def test_bad_data_on_a_node_becomes_a_zero_vector(caplog):
    agreed = with_seed(agreement(rounds=1, selection="last"), 2)

    def fails() -> None:
        raise OSError("the disk of this hospital is gone")

    own = dealt(agreed)
    other_schema = replace(own[1], schema=replace(own[1].schema, classes=3))
    loads = [fails, lambda: other_schema, *(lambda part=part: part for part in own[2:])]
    with caplog.at_level(logging.ERROR):
        broken = federated(agreed, Memory(agreed, data=loads))
    assert "this hospital" in caplog.text
    empty = [nobody, nobody, *(lambda part=part: part for part in own[2:])]
    without = federated(agreed, Memory(agreed, data=empty))
    assert torch.allclose(parameters(broken), parameters(without), atol=1e-6)


def test_one_bad_user_harms_no_other_of_its_node(caplog, monkeypatch):
    """Where users cannot be computed together they are tried one by one."""
    agreed = with_seed(replace(agreement(rounds=1), cohort=60), 2)
    data = dealt(agreed)[0]
    chance = TestChance(2, 0, 0)
    contribution = Contribution(agreed, lambda: data, chance)
    w = agreed.spec.flat.vector()
    good = contribution.vector(1, w, None).view(np.int32).astype(int)
    real = Contribution._summed

    def fragile(self, engine, round, w, users, *more):
        if 3 in users:
            raise RuntimeError("user 3 is broken")
        return real(self, engine, round, w, users, *more)

    monkeypatch.setattr(Contribution, "_summed", fragile)
    with caplog.at_level(logging.ERROR):
        bad = Contribution(agreed, lambda: data, TestChance(2, 0, 0)).vector(1, w, None)
    assert "one user cannot be used" in caplog.text
    moved = np.linalg.norm(good - bad.view(np.int32).astype(int))
    assert 0 < moved <= agreed.encoding.bound + 2 * math.sqrt(agreed.encoding.size) * 12


class Everybody:
    """All users of a node, without noise; rounding that is the same each time."""

    def sampled(self, users, agreement, round):
        return np.arange(users)

    def uniform(self, count):
        return np.full(count, 0.5)

    def noise(self, size, bits, round):
        return np.zeros(size, dtype=np.int64)


def sum_of_node(agreed: Agreement, load) -> np.ndarray:
    sent = Contribution(agreed, load, Everybody()).vector(1, agreed.spec.flat.vector(), None)
    return sent.view(np.int32).astype(int)


BAD = {
    "a number that is none": lambda x, y, a, i: x[i].fill_(math.nan),
    "a number without end": lambda x, y, a, i: x[i].fill_(math.inf),
    "no such class": lambda x, y, a, i: y[i].fill_(7),
    "no such group": lambda x, y, a, i: a[i].fill_(9),
    "a group below all": lambda x, y, a, i: a[i].fill_(-7),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_takes_its_user_away_and_nobody_else(kind, method):
    """Whether the loader makes the dataset with it, or it gets in later."""
    agreed = agreement(rounds=1, **METHODS[method])
    data = people().subset(np.arange(20))
    bad = 11
    x, y, a = (t.clone() for t in (data.features, data.labels, data.attributes))
    BAD[kind](x, y, a, int(data.offsets[bad]))
    sizes = data.sizes().numpy().copy()
    assert sizes[bad] > 1
    others = data.subset([k for k in range(20) if k != bad])
    made = sum_of_node(agreed, lambda: fpfl.FederatedDataset(x, y, a, data.offsets, data.schema))
    want = sum_of_node(agreed, lambda: others)
    assert want.any()
    assert np.array_equal(made, want)
    late = replace(data)
    for name, values in (("features", x), ("labels", y), ("attributes", a)):
        object.__setattr__(late, name, values)
    assert np.array_equal(sum_of_node(agreed, lambda: late), want)


def test_a_bad_cell_of_a_table_takes_its_user_away_and_nobody_else(tmp_path):
    agreed = agreement(rounds=1)
    schema = TableSchema(
        label=Label("y", classes=("no", "yes")),
        features=tuple(NumberColumn(f"x{j}", (-4.0, 4.0)) for j in range(5)),
        attributes=(AttributeColumn("sex", ("a", "b")),),
        user="who",
    )
    data = people().subset(np.arange(20))
    owner = np.repeat(np.arange(20), data.sizes().numpy())
    rows = [
        [*(f"{v:.3f}" for v in x), ("no", "yes")[int(y)], "ab"[int(a)], str(k)]
        for x, y, a, k in zip(
            data.features.tolist(), data.labels, data.attributes[:, 0], owner, strict=True
        )
    ]
    head = [*(f"x{j}" for j in range(5)), "y", "sex", "who"]

    def load(rows):
        path = tmp_path / "people.csv"
        path.write_text("\n".join(",".join(row) for row in [head, *rows]))
        found = fpfl.read_table(path, schema)
        return replace(found, schema=agreed.schema) if len(found) else found

    agreed = replace(agreed, schema=replace(agreed.schema, population=None))
    want = sum_of_node(agreed, lambda: load([row for row in rows if row[-1] != "11"]))
    assert want.any()
    place = next(i for i, row in enumerate(rows) if row[-1] == "11")
    for column, cell in ((0, "abc"), (0, "inf"), (5, "perhaps"), (5, ""), (6, "c"), (6, "")):
        spoilt = [list(row) for row in rows]
        spoilt[place][column] = cell
        with pytest.raises(ValueError, match="expected"):
            load(spoilt)
        assert np.array_equal(sum_of_node(agreed, lambda rows=spoilt: load(rows)), want), cell
        # Whoever reads may do so in threads of its own.
        with ThreadPoolExecutor(1) as pool:
            told = sum_of_node(agreed, lambda rows=spoilt: pool.submit(load, rows).result())
        assert np.array_equal(told, want)
    # A row that is none is nobody's.
    all_of_them = sum_of_node(agreed, lambda: load(rows))
    for none in (["1", "2"], [*rows[0], "more"], ['"a"b', *rows[0][1:]]):
        with pytest.raises(ValueError, match=r"people\.csv"):
            load([rows[0], none, *rows[1:]])
        told = sum_of_node(agreed, lambda none=none: load([rows[0], none, *rows[1:]]))
        assert np.array_equal(told, all_of_them)
    # A row of nobody is nobody's.
    assert np.array_equal(sum_of_node(agreed, lambda: load([*rows, [*rows[0][:-1], ""]])),
                          sum_of_node(agreed, lambda: load(rows)))  # fmt: skip


def test_merging_leaves_what_is_no_group_to_its_user():
    data = people().subset(np.arange(20))
    attributes = data.attributes.clone()
    attributes[int(data.offsets[11])] = 9
    values = {"first": ["a"], "second": ["b"]}
    agreed = agreement(rounds=1)
    schema = replace(
        agreed.schema, attributes=(fpfl.Attribute("sex", ("first", "second")),), population=None
    )
    agreed = replace(agreed, schema=schema)

    def load(attributes, chosen=range(20)):
        made = fpfl.FederatedDataset(
            data.features, data.labels, attributes, data.offsets, data.schema
        )
        return fpfl.merge_values(made, "sex", values).subset(chosen)

    others = [k for k in range(20) if k != 11]
    want = sum_of_node(agreed, lambda: load(data.attributes, others))
    assert want.any()
    assert np.array_equal(sum_of_node(agreed, lambda: load(attributes)), want)


def test_one_user_more_than_agreed_adds_itself_alone():
    """K is a public number: more users than that is nothing that anybody sees."""
    agreed = agreement(40, rounds=1, selection="last")
    data = people(60)
    few, more = (sum_of_node(agreed, lambda n=n: data.subset(np.arange(n))) for n in (40, 41))
    own = sum_of_node(agreed, lambda: data.subset([40]))
    assert own.any()
    assert np.array_equal(more - few, own)


# --- drop-outs, and what they cost ---------------------------------------------------------------


def lost(steps: dict[str, set[int]]):
    """A fault: these nodes' answers to these steps, and all later ones, do not come."""

    def fault(step, node, answer):
        gone = {n for s, ns in steps.items() for n in ns if STEPS.index(s) <= STEPS.index(step)}
        return [] if node in gone else [answer]

    return fault


@pytest.mark.parametrize("step", STEPS)
def test_a_round_survives_thirty_percent_of_its_nodes(step, tmp_path):
    """Ten nodes, three of which are gone from one step on: the sum is of the others, or of all."""
    agreed = with_seed(agreement(60, 10, rounds=1, selection="last", colluders=1), 4)
    courier = Memory(agreed, fault=lost({step: {1, 4, 7}}))
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert len(run.history) == 1
    late = step == "unmask"  # their vectors were in the sum by then
    own = dealt(agreed)
    loads = [
        (lambda part=part: part) if late or i not in (1, 4, 7) else nobody
        for i, part in enumerate(own)
    ]
    wanted = federated(agreed, Memory(agreed, data=loads))
    noise = 0.0 if late else 3.0  # shares of noise are missing, too
    error = float((parameters(run) - parameters(wanted)).norm())
    stddev = agreed.encoding.noise_stddev(3, agreed.bits or 0)[: agreed.layout.parameters]
    size = agreed.learning_rate / agreed.spec.normaliser * float(stddev.norm())
    assert error <= 2 * step_bound(agreed) + noise * size
    assert charges(tmp_path / "run") == [1]


def charges(folder) -> list[int]:
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [line["round"] for line in lines if line["kind"] == "charge"]


@pytest.mark.parametrize("step", STEPS)
def test_a_round_with_too_few_is_abandoned_and_tried_again(step, tmp_path, caplog):
    """The first attempt fails; the second has all nodes, fresh keys and fresh noise."""
    agreed = agreement(rounds=2)
    failing = {"left": 1}
    inner = lost({step: {0, 1}})

    def fault(at, node, answer):
        kept = inner(at, node, answer) if failing["left"] else [answer]
        return kept

    courier = Memory(agreed, fault=fault)
    real = courier.nodes

    def nodes(enough, timeout):
        if any(s == "advertise" for s, _, _ in courier.seen):
            failing["left"] = 0
        return real(enough, timeout)

    courier.nodes = nodes
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier, folder=tmp_path / "run")
    assert "round 1, attempt 1 was abandoned" in caplog.text
    # Before requests to unmask leave nothing is charged; after that it stays charged, and of two
    # rounds that were paid for one is lost.
    paid = step == "unmask"
    assert len(run.history) == (1 if paid else 2)
    assert (run.stopped is not None) == paid
    assert charges(tmp_path / "run") == ([1, 1] if paid else [1, 2])
    keys = [a["public"] for s, _, a in courier.seen if s == "advertise"]
    assert len(set(keys)) == len(keys) == 10  # dealt once more, for all that was left
    assert len({a["session"] for s, _, a in courier.seen if s == "advertise"}) == 2


def test_a_round_that_cannot_be_finished_keeps_what_there_is(tmp_path):
    agreed = agreement(rounds=3, attempts=2)
    courier = Memory(agreed)
    done = []

    def stop(event):
        done.append(event.row["round"])
        if len(done) == 2:
            courier.gone |= {0, 1}

    with pytest.raises(FederationError, match=r"abandoned 2 times.*goes on from here"):
        federated(agreed, courier, folder=tmp_path / "run", callbacks=[stop])
    assert done == [1, 2]
    courier.gone.clear()
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert len(run.history) == 3
    assert charges(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize("where", ["before the charge", "after the charge", "after the sum"])
def test_a_server_that_dies_goes_on_from_the_last_finished_round(where, tmp_path, monkeypatch):
    agreed = agreement(rounds=4)
    courier = Memory(agreed)

    class Killed(BaseException):
        pass

    def die(*arguments):
        raise Killed

    target = {
        "before the charge": ("_charge", Federated),
        "after the charge": ("_take", Federated),
        "after the sum": ("_noised", Federated),
    }[where]
    real = getattr(target[1], target[0])

    def fragile(self, *arguments):
        third = len({a["session"] for s, _, a in courier.seen if s == "mask"}) == 3
        step = courier.seen[-1][0] if courier.seen else ""
        if third and (where != "after the charge" or step == "unmask"):
            die()
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(target[1], target[0], fragile)
        with pytest.raises(Killed):
            federated(agreed, courier, folder=tmp_path / "run")
    before = charges(tmp_path / "run")
    assert before == ([1, 2] if where == "before the charge" else [1, 2, 3])
    run = federated(agreed, courier, folder=tmp_path / "run")
    # Four rounds were planned and paid for: where one of them was lost, three are left.
    free = where == "before the charge"
    assert [row["round"] for row in run.history] == ([1, 2, 3, 4] if free else [1, 2, 3])
    assert charges(tmp_path / "run") == ([1, 2, 3, 4] if free else [1, 2, 3, 3])
    with RunLedger.look(tmp_path / "run" / "ledger.jsonl") as ledger:
        assert ledger.finished


def test_a_spent_budget_stops_before_anything_is_opened(tmp_path):
    """Rounds that were lost after their charge are paid for twice: the last ones do not fit."""
    agreed = agreement(rounds=2)
    first = {"left": True}

    def fault(step, node, answer):
        if step == "unmask" and first["left"]:
            if node == 4:
                first["left"] = False
            return []
        return [answer]

    courier = Memory(agreed, fault=fault)
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert run.stopped is not None
    assert len(run.history) == 1
    assert charges(tmp_path / "run") == [1, 1]
    opened = {a["session"] for s, _, a in courier.seen if s == "unmask"}
    assert len(opened) == 2


# --- messages that are wrong ---------------------------------------------------------------------


def test_wrong_messages_are_refused_by_name_and_harm_no_other(caplog):
    agreed = with_seed(agreement(60, 10, rounds=2, selection="last", colluders=1), 4)
    old: dict[tuple[str, int], dict] = {}

    def fault(step, node, answer):
        stale = old.get((step, node))
        old.setdefault((step, node), answer)
        if node == 1 and step == "mask":  # of a wrong length
            return [_signed(answer | {"vector": answer["vector"][:-4]}, courier.identities[1])]
        if node == 2 and stale is not None:  # of the round before
            return [stale]
        if node == 3:  # again and again
            return [answer, answer, answer]
        if node == 4 and step == "unmask":
            return [answer | {"signature": bytes(64)}]
        return [answer]

    courier = Memory(agreed, fault=fault)
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier)
    assert len(run.history) == 2
    for name, why in (("node-1", "bytes"), ("node-2", "session"), ("node-4", "signature")):
        assert any(name in r.getMessage() and why in r.getMessage() for r in caplog.records), (
            name,
            why,
        )
    assert "node-3" not in caplog.text


def test_an_unknown_node_does_not_get_in(caplog):
    agreed = agreement(rounds=1)
    courier = Memory(agreed)
    courier.identities[2] = Authority.make().enrol("node-2", 3)
    with caplog.at_level(logging.WARNING):
        run = federate(agreed, courier, courier.authority.trust)
    assert len(run.history) == 1
    assert "node 2 is refused" in caplog.text
    # Nor a second node under a name that is there.
    courier = Memory(agreed)
    courier.identities[3] = courier.authority.enrol("node-0", 1)
    with caplog.at_level(logging.WARNING):
        run = federate(agreed, courier, courier.authority.trust)
    assert "node-0 is there already" in caplog.text


def test_a_credential_is_not_enough_to_take_a_name(caplog):
    """Every neighbour has seen it. Whoever shows it without its key harms nobody but itself."""
    agreed = agreement(rounds=1)
    shown: dict[str, bytes] = {}

    def fault(step, node, answer):
        if step == "advertise":
            shown.setdefault("node-1", courier.identities[1].credential.to_bytes())
            if node == 0:  # before node 1 itself comes
                return [answer | {"credential": shown["node-1"]}]
        return [answer]

    courier = Memory(agreed, fault=fault)
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier)
    assert len(run.history) == 1
    assert "node 0 is refused" in caplog.text
    assert "node 1 is refused" not in caplog.text


def test_a_node_that_deals_useless_shares_spoils_one_attempt(caplog, tmp_path):
    """It is caught after the charge, named, and left out from then on."""
    agreed = agreement(60, 10, rounds=3, colluders=1)

    def fault(step, node, answer):
        if step == "share" and node == 6:
            bad = answer | {"seed_commitments": bytes(len(answer["seed_commitments"]))}
            bad.pop("signature")
            return [_signed(bad, courier.identities[6])]
        return [answer]

    courier = Memory(agreed, fault=fault)
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier, folder=tmp_path / "run")
    assert "node-6 is left out from now on" in caplog.text
    assert charges(tmp_path / "run") == [1, 1, 2]  # one of three rounds was spoilt
    assert len(run.history) == 2


def deals_rubbish_to(courier: Memory, liar: int, places: slice):
    """A node whose sealed shares some of the others cannot open."""

    def fault(step, node, answer):
        if step == "share" and node == liar:
            sealed = list(answer["sealed"])
            sealed[places] = [bytes(len(each)) for each in sealed[places]]
            bad = answer | {"sealed": sealed}
            bad.pop("signature")
            return [_signed(bad, courier.identities[liar])]
        return [answer]

    courier.fault = fault


def test_a_node_whose_shares_nobody_can_read_spoils_one_attempt_that_costs_nothing(
    caplog, tmp_path
):
    agreed = agreement(60, 10, rounds=2, colluders=1)
    courier = Memory(agreed)
    deals_rubbish_to(courier, 6, slice(None))
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier, folder=tmp_path / "run")
    assert len(run.history) == 2
    assert charges(tmp_path / "run") == [1, 2]
    assert json.loads((tmp_path / "run" / "excluded.json").read_text()) == ["node-6"]


def test_a_node_whose_shares_some_cannot_read_is_left_out_of_the_next_dealing(caplog, tmp_path):
    """With nine of ten there, three that complain stop a sum, but as many may lie."""
    agreed = agreement(60, 10, rounds=2, colluders=1)
    courier = Memory(agreed, gone={9})
    deals_rubbish_to(courier, 6, slice(0, 3))
    with caplog.at_level(logging.WARNING):
        run = federated(agreed, courier, folder=tmp_path / "run")
    assert len(run.history) == 2
    assert charges(tmp_path / "run") == [1, 2]
    assert "left out of this dealing: node-6" in caplog.text
    assert not (tmp_path / "run" / "excluded.json").exists()


def test_a_node_whose_shares_just_suffice_with_its_own_costs_one_sum(tmp_path):
    """It keeps its own share to itself when all is paid for; nothing proves that it does so."""
    agreed = agreement(60, 10, rounds=9, colluders=1)
    courier = Memory(agreed)
    deals_rubbish_to(courier, 6, slice(0, 3))
    rubbish = courier.fault
    courier.fault = lambda step, node, answer: (
        [] if (step, node) == ("unmask", 6) else rubbish(step, node, answer)
    )
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert charges(tmp_path / "run") == [1, 1, 2, 3, 4, 5, 6, 7, 8]
    assert len(run.history) == 8


def test_who_is_left_out_stays_out_when_the_run_is_started_again(tmp_path):
    agreed = agreement(60, 10, rounds=4, colluders=1)

    def fault(step, node, answer):
        if step == "share" and node == 6:
            bad = answer | {"seed_commitments": bytes(len(answer["seed_commitments"]))}
            bad.pop("signature")
            return [_signed(bad, courier.identities[6])]
        return [answer]

    courier = Memory(agreed, fault=fault)

    def cut(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated(agreed, courier, folder=tmp_path / "run", callbacks=[cut])
    assert json.loads((tmp_path / "run" / "excluded.json").read_text()) == ["node-6"]
    courier.seen.clear()
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert len(run.history) == 3  # one of four was spoilt, and no second one
    assert not [1 for step, node, _ in courier.seen if node == 6 and step != "advertise"]
    (tmp_path / "run" / "excluded.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Federated(agreed, courier, courier.key, b"r" * 16, folder=tmp_path / "run")


# --- dealing, and who is called ------------------------------------------------------------------


def asked_in(courier: Memory, monkeypatch_exchange: list) -> None:
    """Note who is asked what."""
    real = courier.exchange

    def exchange(requests, timeout):
        step = next(iter(requests.values()))["step"] if requests else ""
        monkeypatch_exchange.append((step, sorted(requests)))
        return real({n: r for n, r in requests.items() if n < courier.agreed.nodes}, timeout)

    courier.exchange = exchange


def test_a_round_is_two_exchanges():
    agreed = agreement(rounds=3)
    courier, asked = Memory(agreed), []
    asked_in(courier, asked)
    federated(agreed, courier)
    everybody = list(range(5))
    assert asked == [(step, everybody) for step in (*STEPS[:2], *(STEPS[2:] * 3))]


@pytest.mark.parametrize("dead", [0, 1])
def test_strangers_count_for_nothing(dead, monkeypatch):
    """Five nodes and three strangers who are there first; four and three."""
    agreed = agreement(rounds=7, timeout=1.0)
    courier, asked = Memory(agreed), []
    asked_in(courier, asked)
    courier.gone = {4} if dead else set()
    late = {2, 3, 4}  # come when they have been called
    strangers = [97, 98, 99]

    def nodes(enough, timeout):
        here = [i for i in range(5) if i not in courier.gone and (asked or i not in late)]
        return [*here, *strangers]

    courier.nodes = nodes
    run = federated(agreed, courier)
    assert len(run.history) == 7
    # They are called, and asked for nothing else: twice, since it is dealt again after a while.
    assert all(not set(strangers) & set(who) for step, who in asked if step != "advertise")
    assert sum(set(strangers) <= set(who) for step, who in asked if step == "advertise") == 2


def test_a_node_that_lost_what_it_was_dealt_is_back_after_some_rounds(caplog):
    agreed = agreement(rounds=12)
    courier, asked = Memory(agreed), []
    asked_in(courier, asked)
    done = []

    def forget(event):
        done.append(event.row["round"])
        if done == [1]:
            courier.states[3] = b""

    run = federated(agreed, courier, callbacks=[forget])
    assert len(run.history) == 12
    masked = [node for step, node, _ in courier.seen if step == "mask"]
    assert masked.count(3) == 1 + 12 - SOON
    assert sum(step == "advertise" for step, _ in asked) == 2
    # Whoever is back is not called again and again.
    assert all("nothing was begun" in said for said in courier.refused)


def test_a_new_node_is_dealt_to_after_some_rounds():
    agreed = agreement(rounds=8)
    courier = Memory(agreed, gone={2})
    done = []

    def come(event):
        done.append(event.row["round"])
        courier.gone.clear()

    federated(agreed, courier, callbacks=[come])
    masked = [node for step, node, _ in courier.seen if step == "mask"]
    assert masked.count(2) == 8 - SOON


def test_too_few_of_a_dealing_are_dealt_again_at_once():
    agreed = agreement(rounds=4)
    courier, asked = Memory(agreed, gone={4}), []
    asked_in(courier, asked)

    def change(event):
        courier.gone = {0}

    assert len(federated(agreed, courier, callbacks=[change]).history) == 4
    assert sum(step == "advertise" for step, _ in asked) == 2


def test_long_messages_are_for_fewer_rounds(monkeypatch):
    agreed = agreement(rounds=200)
    server = Federated(agreed, Memory(agreed), b"", b"r" * 16)
    assert server._dealing(1).sessions == 200
    assert server._dealing(191).sessions == 10
    assert server._dealing(500).sessions == 1
    monkeypatch.setattr(rounds, "DEALT_BYTES", 160 * 5 * 7)
    assert server._dealing(1).sessions == 7
    assert server._dealing(1).id != server._dealing(1).id


def test_every_step_says_who_is_waited_for(caplog):
    agreed = agreement(rounds=1)
    with caplog.at_level(logging.INFO, logger="fpfl.federation"):
        federated(agreed)
    said = [record.getMessage() for record in caplog.records]
    for step in ("share", "mask", "unmask"):
        lines = [line for line in said if f"{step!r}: waiting for" in line]
        assert "node-0, node-1, node-2, node-3, node-4" in lines[0]
        assert any(f"{step!r}: 5 of 5 answered" in line for line in said)


@pytest.mark.parametrize("nodes", some((120, 200), 120))
def test_many_nodes_have_few_neighbours(nodes, monkeypatch):
    """The sparse graph, from the agreement to the sum; one user a node, some nodes gone."""
    keep_engines(monkeypatch)
    changes = {"constraint": None, "method": None, "rounds": 1, "selection": "last"}
    agreed = with_seed(agreement(nodes, nodes, **changes), 3)
    assert agreed.graph.degree is not None
    lost_nodes = set(range(5, nodes, 11))
    courier = Memory(agreed, fault=lost({"mask": lost_nodes}))
    opened = federated(agreed, courier)
    assert len(opened.history) == 1
    assert not courier.refused
    present = [i for i in range(nodes) if i not in lost_nodes]
    w = agreed.spec.flat.vector()
    wanted = np.zeros(agreed.encoding.size, dtype=np.uint32)
    for node in present:
        wanted += contributed(agreed, node, 1, w, None)
    v = agreed.encoding.decoded(wanted, 1)[: agreed.layout.parameters]
    step = agreed.learning_rate / agreed.spec.normaliser
    assert torch.allclose(parameters(opened), w - step * v.float(), atol=1e-5)


def test_a_node_more_than_was_agreed_on_stops_nobody():
    """Somebody registered with Flower who was never enrolled, and says nothing."""
    agreed = agreement(rounds=1)
    courier = Memory(agreed)
    courier.nodes = lambda enough, timeout: [0, 1, 2, 3, 4, 99]
    exchange = courier.exchange
    courier.exchange = lambda requests, timeout: exchange(
        {node: request for node, request in requests.items() if node != 99}, timeout
    )
    assert len(federated(agreed, courier).history) == 1
    assert not courier.refused


def test_a_node_refuses_a_graph_that_was_not_agreed_on(monkeypatch):
    """A server that would have one share suffice, or few neighbours where all were agreed on."""
    for graph in (GraphChoice(None, 2), GraphChoice(2, 1)):
        agreed = agreement(rounds=1, attempts=1)
        courier = Memory(agreed)
        real = Federated._dealing

        def lenient(self, round, graph=graph, real=real):
            return replace(real(self, round), degree=graph.degree, threshold=graph.threshold)

        monkeypatch.setattr(Federated, "_dealing", lenient)
        with pytest.raises(FederationError):
            federated(agreed, courier)
        monkeypatch.setattr(Federated, "_dealing", real)
        assert len(courier.refused) == 5
        assert all("another graph" in text for text in courier.refused)


def test_a_run_keeps_the_promise_it_was_begun_with(tmp_path):
    agreed = agreement(rounds=2)
    federated(agreed, folder=tmp_path / "run")
    for changes, name in (
        ({"colluders": 0}, "colluders"),
        ({"least": 5}, "least"),
        ({"hold": 1.0}, "held"),
        ({"privacy": replace(agreed.privacy, convention="poisson")}, "convention"),
        ({"privacy": replace(agreed.privacy, copies=2)}, "copies"),
    ):
        with pytest.raises(ValueError, match=f"begun with another.*{name}"):
            federated(replace(agreed, rounds=3, **changes), folder=tmp_path / "run")


def test_a_node_with_another_agreement_sends_nothing():
    agreed = agreement(rounds=1)
    courier = Memory(agreed)
    other = replace(
        agreed, privacy=fpfl.Privacy(noise_multiplier=0.1, clip=1.0, convention="coins")
    )
    with pytest.raises(FederationError):
        federate(replace(other, attempts=1), courier, courier.key)
    assert len(courier.refused) == 5
    assert "another fingerprint" in courier.refused[0]
    assert not any(step == "mask" for step, _, _ in courier.seen)


# --- agreements ----------------------------------------------------------------------------------


def test_what_an_agreement_refuses():
    for changes, text in (
        ({"privacy": fpfl.Privacy(epsilon=1, convention="paper")}, "cannot have the convention"),
        ({"privacy": None}, "give clip"),
        ({"nodes": 2}, "at least 3"),
        ({"least": 9}, "at least two honest"),
        ({"nodes": 10, "least": 10, "colluders": 8}, "Ask more nodes|too few"),
        ({"population": 10**9, "cohort": 10**6}, "do not fit into a ring"),
        ({"privacy": fpfl.Privacy(noise_multiplier=1, convention="picked"), "cohort": 2}, "picked"),
        ({"least": 2, "colluders": 1}, "at least two honest"),
        ({"cohort": 0}, "cohort"),
        ({"attempts": 0}, "attempts"),
        ({"method": fpfl.MMDM(), "constraint": None}, "enforces a constraint"),
    ):
        with pytest.raises(ValueError, match=text):
            _ = agreement(**changes).encoding
    capped = fpfl.Privacy(epsilon=1, convention="poisson", max_participations=3)
    with pytest.raises(ValueError, match="nobody counts"):
        agreement(privacy=capped)


def test_a_person_on_two_nodes_is_declared_and_paid_for():
    once, twice = (
        agreement(privacy=fpfl.Privacy(epsilon=3.0, clip=1.0, convention="coins", copies=c))
        for c in (1, 2)
    )
    assert once.plan is not None
    assert twice.plan is not None
    assert twice.plan.noise_multiplier > once.plan.noise_multiplier  # twice as likely to be there
    for agreed in (once, twice):
        assert agreed.plan is not None
        assert agreed.bits is not None
        noise = math.sqrt(agreed.aggregation.adders) * 2.0**agreed.bits
        copies = agreed.plan.copies
        assert noise / (copies * agreed.encoding.bound) >= agreed.plan.noise_multiplier


def test_agreements_have_fingerprints():
    same, other = agreement(), agreement()
    assert same.fingerprint == other.fingerprint
    for changes in ({"learning_rate": 0.3}, {"least": 5}, {"rounds": 4}, {"nodes": 6}):
        assert agreement(**changes).fingerprint != same.fingerprint


def test_broadcasts_survive_the_wire():
    agreed = agreement()
    w = agreed.spec.flat.vector()
    weights = fpfl.OneGradient().weights(agreed.spec.method.begin(1, 2, w.device), 1.0, 0.1)
    again, beside = received(dict(broadcast(1, w, weights)), agreed)
    assert torch.equal(again, w)
    assert beside is not None
    assert torch.equal(beside.groups, weights.groups)
    assert (beside.low, beside.high) == (weights.low, weights.high)
    assert received(dict(broadcast(1, w, None)), agreed)[1] is None
    with pytest.raises(ValueError, match="must be"):
        received({"w": b"123"}, agreed)


@pytest.mark.parametrize("level", [0, 3, -40, 40])
def test_the_level_of_a_bound_survives_the_wire(level):
    agreed = agreement(**METHODS["a bound that adapts"])
    w = agreed.spec.flat.vector()
    said = dict(broadcast(1, w, None, level))
    assert received_level(said, agreed) == level
    rules, encoding = agreed.at(level)
    assert {rule.name: rule.bound for rule in rules}["gradients"] == agreed.grid.at(level)
    # A user's share of the ring, and the noise, do not know the bound.
    assert (encoding.scale, encoding.bound) == (agreed.encoding.scale, agreed.encoding.bound)


@pytest.mark.parametrize("level", [None, -41, 41, 2**40, 1.0, "1", b"1", [1]])
def test_a_node_refuses_a_bound_that_was_not_agreed_on(level, monkeypatch):
    """By the server's word alone a node would clip to anything, or not at all."""
    agreed = agreement(**METHODS["a bound that adapts"], rounds=1, attempts=1)
    courier = Memory(agreed)
    plain = broadcast

    def lying(round, w, weights, *_):
        return plain(round, w, weights) | ({} if level is None else {"level": level})

    monkeypatch.setattr("fpfl.federation.rounds.broadcast", lying)
    with pytest.raises(FederationError, match="round 1 was abandoned"):
        federated(agreed, courier)
    assert len(courier.refused) == agreed.nodes
    assert all("whole numbers from -40 to 40" in said for said in courier.refused)
    assert not [step for step, _, _ in courier.seen if step == "mask"]


@pytest.mark.parametrize(
    "ends",
    [
        (0.01, 11.0), (-1.0, 11.0), (0.05, 11.1), (0.05, math.inf), (math.nan, 11.0),
        (0.05, math.nan), (1.1, 11.0), (0.05, 0.9), (-math.inf, math.inf), (None, 11.0),
        (0.05, "11"), (0.05, 2**2000),
    ],
)  # fmt: skip
def test_a_node_refuses_weights_beyond_the_agreed_range(ends, monkeypatch):
    """Weights below 0 would reward errors, and others are not what users agreed to."""
    agreed = agreement(rounds=1, attempts=1)
    courier = Memory(agreed)
    plain = broadcast

    def lying(*given):
        return plain(*given) | dict(zip(("low", "high"), ends, strict=True))

    monkeypatch.setattr("fpfl.federation.rounds.broadcast", lying)
    with pytest.raises(FederationError, match="round 1 was abandoned"):
        federated(agreed, courier)
    assert len(courier.refused) == agreed.nodes
    assert all("within [0.05, 11], which was agreed on" in said for said in courier.refused)


@pytest.mark.parametrize("low", [0.0, 0.05, 0.1, 0.3, 0.7, 1.0])
def test_weights_on_their_way_down_are_within_the_agreed_range(low):
    agreed = agreement(method=fpfl.OneGradient(low=low, patience=3))
    method, w = agreed.spec.method, agreed.spec.flat.vector()
    begun = method.begin(1, 2, w.device)
    for released in (0.0, 0.02, 0.5, 0.98, 1.0):
        state = replace(begun, released=torch.tensor(released))
        weights = method.weights(state, 1.0, 0.1)
        _, beside = received(dict(broadcast(1, w, weights)), agreed)
        assert beside is not None
        assert beside.low == pytest.approx(1.0 - (1.0 - low) * released, abs=1e-6)


@pytest.mark.parametrize("round", [None, 0, -1, True, 1.0, "1", 4, 2**62])
def test_what_is_no_number_of_a_round_is_refused(round):
    agreed = agreement(rounds=3)
    with pytest.raises(ValueError, match="round must be a whole number from 1 to 3"):
        received_round({"round": round}, agreed)
    assert received_round({"round": 3}, agreed) == 3


def test_a_node_refuses_any_bound_where_it_is_fixed():
    agreed = agreement()
    w = agreed.spec.flat.vector()
    assert received_level(dict(broadcast(1, w, None)), agreed) is None
    with pytest.raises(ValueError, match="the bound is fixed"):
        received_level(dict(broadcast(1, w, None, 0)), agreed)


def test_a_trusted_server_adds_noise_in_proportion_to_the_bound():
    clip = fpfl.Clipping(0.5, counts=4.0, adapts=ADAPTS)
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=clip, convention="poisson")
    agreed = with_seed(agreement(privacy=privacy), 3)
    party = agreed.trusted_party
    p = agreed.layout.parameters
    for level in (-9, 4):
        moved = party.at(level).noise_stddev / party.noise_stddev
        assert moved[:p].tolist() == pytest.approx([agreed.grid.at(level) / 0.5] * p, rel=1e-12)
        assert torch.equal(moved[p:], torch.ones(agreed.layout.size - p, dtype=torch.float64))
    run = federated(agreed)
    assert len({row["clip_bound"] for row in run.history}) > 1


def test_a_federation_goes_on_with_the_bound_that_it_had(tmp_path):
    agreed = with_seed(agreement(**METHODS["a bound that adapts"], rounds=5), 7)
    whole = federated(agreed)

    def cut(event):
        if event.row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated(agreed, folder=tmp_path / "run", callbacks=[cut])
    run = federated(agreed, folder=tmp_path / "run")
    bounds = [[row["clip_bound"] for row in each.history] for each in (run, whole)]
    assert bounds[0] == bounds[1]
    assert len(set(bounds[0])) > 2


def test_agreements_differ_where_their_grids_do():
    def of(**changes):
        clip = fpfl.Clipping(0.5, counts=4.0, adapts=replace(ADAPTS, **changes))
        return agreement(
            privacy=fpfl.Privacy(noise_multiplier=1.0, clip=clip, convention="coins")
        ).fingerprint

    changes = ({}, {"most": 100.0}, {"least": 0.1}, {"ratio": 2.0}, {"share": 0.02}, {"rate": 1.0})
    assert len({of(**each) for each in changes}) == len(changes)


def test_warnings_are_not_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        federated(agreement(rounds=1))


def test_sums_that_fail_after_they_were_opened_count_without_a_folder(monkeypatch):
    """Every other sum is lost after it was opened: no more are opened than were planned."""
    agreed = agreement(rounds=6)
    courier = Memory(agreed)
    real, calls = Federated._attempt, []

    def failing(self, round, said):
        total = real(self, round, said)
        calls.append(round)
        if len(calls) % 2:
            raise Abandoned("the server fell over", False, 0)
        return total

    monkeypatch.setattr(Federated, "_attempt", failing)
    with pytest.warns(fpfl.FpflWarning, match="planned sums have been opened"):
        run = federated(agreed, courier)
    assert len(calls) == 6
    assert len(run.history) == 3
    assert "planned sums have been opened" in run.stopped
