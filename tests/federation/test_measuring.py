"""A federation that measures its inputs in a first sum, and scales them by what came of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from federated import Memory, parameters, parts, simulated, with_seed
from test_site import Sites

import fpfl
from fpfl.aggregation.encoding import in_ring
from fpfl.data import CategoryColumn, Label, NumberColumn
from fpfl.data.inputs import ScaledModel, scaling_of
from fpfl.federation import FederationError, federate
from fpfl.federation.agreement import Agreement
from fpfl.federation.approval import in_words, kinds_of, terms_of
from fpfl.federation.contribution import (
    Contribution,
    TestChance,
    broadcast,
    received_round,
    received_scaling,
)
from fpfl.federation.rounds import Federated
from fpfl.federation.secagg import STEPS
from fpfl.measurement.counting import STEP_BITS
from fpfl.measurement.inputs import input_sum
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import Mechanism, PrivacyFilter
from fpfl.privacy.renyi import shares_epsilon
from fpfl.runs.folder import OpenRun
from fpfl.runs.ledger import RunLedger
from fpfl.training.inputs import numbers_of, scaled, with_numbers

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:the noise dominates")

USERS, NODES, SIZE = 150, 5, 5
SCHEMA = fpfl.TableSchema(
    label=Label("y", classes=("no", "yes")),
    features=(
        NumberColumn("age", (0, 1000)),
        NumberColumn("score", (-100, 100), indicator=True, tail="long"),
        CategoryColumn("job", ("a", "b")),
    ),
    user="id",
    population=USERS,
    samples_per_user=2,
)
RANKED = replace(SCHEMA, features=(replace(SCHEMA.features[0], transform="quantile"),
                                   *SCHEMA.features[1:]))  # fmt: skip
DECLARED = replace(
    SCHEMA,
    features=(
        replace(SCHEMA.features[0], centre=40, scale=10),
        replace(SCHEMA.features[1], centre=0, scale=1),
        replace(SCHEMA.features[2], shares=(0.5, 0.25)),
    ),
)
PRIVATE = fpfl.Privacy(noise_multiplier=2.0, clip=1.0, convention="coins", measurement=0.5)


@lru_cache
def people(schema: fpfl.TableSchema = SCHEMA) -> fpfl.FederatedDataset:
    rng = np.random.default_rng(0)
    lines = ["id,age,score,job,y"]
    for user in range(USERS):
        for _ in range(1 + user % 3):
            age, score, job = rng.normal(40, 10), rng.normal(), rng.choice(["a", "a", "b", "c"])
            shown = "" if rng.random() < 0.1 else f"{score:.3f}"
            said = "yes" if age - 40 + 10 * score > rng.normal() else "no"
            lines.append(f"{user},{age:.3f},{shown},{job},{said}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "people.csv"
        path.write_text("\n".join(lines) + "\n")
        return fpfl.read_table(path, schema)


def agreement(schema: fpfl.TableSchema = SCHEMA, **changes) -> Agreement:
    data = people(schema)
    inputs = data.schema.shape[0]
    given = {
        "model": lambda: fpfl.mlp(inputs, (4,), seed=1),
        "schema": data.schema,
        "population": USERS,
        "cohort": 50,
        "rounds": 3,
        "nodes": NODES,
        "privacy": PRIVATE,
        "learning_rate": 0.2,
        "selection": "last",
        "measure": True,
        "columns": schema,
    }
    return Agreement(**given | changes)


def memory(agreed: Agreement, schema: fpfl.TableSchema = SCHEMA, **more) -> Memory:
    data = people(schema)
    loads = [lambda part=part: data.subset(part) for part in parts(agreed)]
    return Memory(agreed, data=loads, **more)


class Asked(Memory):
    """A courier that remembers which rounds were asked for."""

    rounds: list[int]

    def exchange(self, requests, timeout):
        for request in requests.values():
            if request["step"] == "mask":
                self.rounds.append(request["round"])
                break
        return super().exchange(requests, timeout)


def asked(agreed: Agreement, **more) -> Asked:
    found = Asked(agreed, data=memory(agreed).data, **more)
    found.rounds = []
    return found


def federated(agreed: Agreement, courier: Memory | None = None, **more) -> fpfl.Run:
    courier = courier or memory(agreed)
    return federate(agreed, courier, courier.key, **more)


def kinds(folder: Path) -> list[str]:
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line)["kind"] for line in lines]


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SCHEMA, RANKED], ids=["plain", "ranked"])
def test_the_figures_and_the_model_are_those_of_a_central_training(schema):
    """With the same noise: within the rounding of whole numbers."""
    agreed = with_seed(agreement(schema), 7)
    run = federated(agreed, memory(agreed, schema))
    measured, (encoding, bits) = agreed.measured, agreed.encodings(0)
    data = people(schema)
    exact = input_sum(data, measured.columns, bins=measured.bins) * 2.0**-STEP_BITS
    shares = [TestChance(7, i, 0).noise(encoding.size, bits, 0) for i in range(NODES)]
    total = torch.from_numpy(exact) + encoding.decoded(in_ring(np.sum(shares, axis=0)), 0)
    found = measured.found(total, float(encoding.noise_stddev(NODES, bits)[0]))
    assert set(found) == {"age", "score", "job"}
    want = scaling_of(agreed.inputs.columns, agreed.inputs.size, found)
    assert run.scaling.columns == want.columns
    assert run.scaling.of("measured") == ("age", "score", "job")
    assert numbers_of(run.scaling) == pytest.approx(numbers_of(want), rel=1e-3, abs=1e-4)
    # And they are right, within the noise of few users.
    if schema is SCHEMA:
        centre = 1000 * (run.scaling.centre[0] + 3) / 6
        assert centre == pytest.approx(40, abs=12)
    other = simulated(agreed, scaled(data, run.scaling))
    assert isinstance(run.model, ScaledModel)
    units = agreed.encoding.units[: agreed.layout.parameters].min()
    step = agreed.learning_rate / agreed.spec.normaliser
    bound = 2 * agreed.rounds * step * agreed.encoding.rounding_bound(USERS) / float(units)
    moved = float((parameters(other) - agreed.spec.flat.vector()).norm())
    assert float((parameters(run) - parameters(other)).norm()) <= bound < 0.05 * moved


def test_declared_columns_take_no_sum_and_need_no_privacy():
    agreed = agreement(DECLARED, privacy=None, clip=1.0)
    courier = asked(agreed)
    courier.loads = memory(agreed, DECLARED).loads
    run = federated(agreed, courier)
    assert courier.rounds == [1, 2, 3]
    assert run.scaling == scaling_of(agreed.inputs.columns, agreed.inputs.size)
    assert run.scaling.of("declared") == ("age", "score", "job")
    private = agreement(DECLARED)
    assert private.plan.measurement is None
    with pytest.raises(ValueError, match="whole number from 1 to 3"):
        received_round({"round": 0}, private)


def test_without_measure_nothing_changes():
    plain = agreement(measure=False, columns=None)
    assert plain.inputs is plain.measured is plain.plan.measurement is None
    assert federated(plain).scaling is None
    assert plain.fingerprint != agreement().fingerprint
    assert agreement().fingerprint == agreement(columns=people().columns).fingerprint
    assert agreement().fingerprint != agreement(RANKED).fingerprint


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"columns": None}, "give both"),
        ({"measure": False}, "give both"),
        ({"privacy": None, "clip": 1.0}, "without privacy their histograms"),
        ({"whole_inputs": torch.int64}, "about other inputs"),
        ({"columns": replace(SCHEMA, features=SCHEMA.features * 1 + (NumberColumn("x", (0, 1)),))},
         "about other inputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        agreement(**changes)


def test_whom_the_server_picks_is_measured():
    privacy = fpfl.Privacy(epsilon=8.0, clip=1.0, convention="picked")
    agreed = agreement(privacy=privacy, cohort=90)
    assert agreed.asked == 3
    courier = asked(agreed)
    run = federated(agreed, courier)
    assert courier.rounds == [0, 1, 2, 3]
    assert agreed.measured.users == 90
    assert run.privacy.epsilon <= 8.0
    assert "those whose nodes are picked take part" in str(run.privacy)


def test_a_trusted_server_adds_the_noise():
    privacy = fpfl.Privacy(epsilon=4.0, clip=1.0, convention="poisson")
    agreed = agreement(privacy=privacy)
    assert agreed.encodings(0)[1] is None
    run = federated(agreed)
    assert run.scaling.of("measured") == ("age", "score", "job")
    numbers = 3 * agreed.layout.size + agreed.measured.size
    assert any(f"{numbers:,}" in term.name for term in run.privacy.delta_terms)
    assert run.privacy.epsilon < 4.01
    # The same seed, the same noise, and another one another.
    one, same, other = (federated(with_seed(agreed, seed)).scaling for seed in (1, 1, 2))
    assert one == same != other


# --- what one user changes ------------------------------------------------------------------------


class Everybody:
    """No noise, and rounding that is the same each time."""

    def sampled(self, users, agreement, round):
        raise AssertionError("nobody tosses a coin in round 0")

    def uniform(self, count):
        return np.full(count, 0.5)

    def noise(self, size, bits, round):
        return np.zeros(size, dtype=np.int64)


def whole(agreed: Agreement, data: fpfl.FederatedDataset) -> np.ndarray:
    return Contribution(agreed, lambda: data, Everybody()).vector(0).view(np.int32).astype(int)


@pytest.mark.parametrize("value", [0.0, 2.9, 1e9, -1e30, math.nan, math.inf])
@pytest.mark.parametrize("user", [0, 11, 29])
def test_one_user_changes_the_sum_by_a_bound_and_nothing_else(user, value):
    """Rounding included; the others send what they always do, whatever the user's samples are."""
    agreed = agreement()
    encoding, _ = agreed.encodings(0)
    data = people().subset(np.arange(30))
    others = whole(agreed, data.subset([k for k in range(30) if k != user]))
    features = data.features.clone()
    features[int(data.offsets[user]) : int(data.offsets[user + 1])] = value
    strange = replace(data, checked=False)
    object.__setattr__(strange, "features", features)
    for changed in (data, strange):
        own = whole(agreed, changed) - others
        assert np.linalg.norm(own) <= encoding.bound
    assert np.array_equal(whole(agreed, data) - others, whole(agreed, data.subset([user])))


def test_the_noise_is_what_the_plan_counts_on():
    """σ₀ of the honest nodes' shares over Δ: with the rounding, and a person on several nodes."""
    for copies in (1, 2):
        agreed = agreement(privacy=replace(PRIVATE, copies=copies))
        encoding, bits = agreed.encodings(0)
        noise = math.sqrt(agreed.aggregation.adders) * 2.0**bits
        assert noise / (copies * encoding.bound) >= agreed.plan.measurement
        assert encoding.rules[0].bound == math.sqrt(3)
    run = federated(agreement())
    assert run.privacy.measurement == 0.5
    plain = agreement(measure=False, columns=None).plan
    assert run.privacy.epsilon > plain.epsilon


# --- what it costs --------------------------------------------------------------------------------


def test_the_statement_says_what_it_cost():
    privacy = fpfl.Privacy(epsilon=4.0, clip=1.0, convention="coins")
    agreed = agreement(privacy=privacy)
    assert agreed.plan.epsilon == pytest.approx(4.0, rel=1e-3)
    said = federated(agreed).privacy
    delta = agreed.plan.delta
    assert said.epsilon_measurement == pytest.approx(
        shares_epsilon(agreed.plan.measurement, 1, delta)
    )
    text = str(said)
    assert "Before the first round the inputs' columns were measured once" in text
    assert "in which everybody takes part, with noise of" in text
    assert "secure aggregation, up to 20 sessions" in text  # three rounds and one, five times each


def test_it_is_charged_before_it_is_opened_and_written_down_before_it_is_used(tmp_path):
    agreed = agreement()
    path = tmp_path / "population.jsonl"
    with PopulationLedger.create(
        path, epsilon=40.0, delta=5e-4, population=USERS, neighbours="zero-out"
    ) as population:
        assert population.charged_rounds("x") == 0  # fmt: skip
    run = federated(agreed, folder=tmp_path / "run", ledger=path)
    assert run.stopped is None
    found = kinds(tmp_path / "run")
    assert [k for k in found if k in ("opening", "scaling", "charge")] == [
        "opening", "scaling", "charge", "charge", "charge",
    ]  # fmt: skip
    with PopulationLedger.open(path) as population:
        mechanism = Mechanism.measurement_of(agreed.plan)
        name = OpenRun(tmp_path / "run").ledger.run
        assert population.charged(name, mechanism) == 1
    assert OpenRun(tmp_path / "run").ledger.scaling["scaling"] == json.loads(
        json.dumps(run.scaling.as_dict())
    )


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        ({}, {"privacy": replace(PRIVATE, measurement=0.6)}, "noise multiplier 0.5, and now"),
        ({}, {"measure": False, "columns": None}, "0.5, and now it is None"),
        ({"measure": False, "columns": None}, {}, "None, and now it is 0.5"),
        ({}, {"columns": RANKED}, "other columns"),
        ({"columns": DECLARED}, {"measure": False, "columns": None}, "begun with scaled inputs"),
        ({"measure": False, "columns": None}, {"columns": DECLARED}, "begun without scaled"),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_the_inputs_that_it_was_begun_with(first, then, why, tmp_path):
    """What was charged is what the statement speaks of, and all rounds are of one scaling."""
    agreed = agreement(**first)

    def stop(event):
        raise Killed

    with pytest.raises(Killed):
        federated(agreed, folder=tmp_path / "run", callbacks=[stop])
    courier = asked(agreement(**then))
    with pytest.raises(FederationError, match=why):
        federated(courier.agreed, courier, folder=tmp_path / "run")
    assert not courier.rounds


class Killed(BaseException):
    pass


def test_a_run_that_goes_on_measures_never_again(tmp_path, monkeypatch):
    """Killed between the measurement and the first round; with another seed of noise, as always."""
    agreed = agreement()
    courier = asked(agreed)
    with monkeypatch.context() as patch:
        patch.setattr(Federated, "release", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            federated(agreed, courier, folder=tmp_path / "run")
    assert courier.rounds == [0]
    with RunLedger.look(tmp_path / "run" / "ledger.jsonl") as ledger:
        before = ledger.scaling["scaling"]
    run = federated(agreed, courier, folder=tmp_path / "run")
    assert courier.rounds == [0, 1, 2, 3]
    assert json.loads(json.dumps(run.scaling.as_dict())) == before
    assert kinds(tmp_path / "run").count("scaling") == 1


@pytest.mark.parametrize("when", ["in time", "too late"])
def test_a_sum_that_was_about_to_be_opened_is_not_asked_for_again(when, tmp_path, monkeypatch):
    """Killed before requests to unmask left, or after: then it counts as released."""
    agreed = agreement()
    courier = asked(agreed)
    real, late = Federated._charge, when == "too late"

    def dying(self, round):
        if late:
            real(self, round)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Federated, "_charge", dying)
        with pytest.raises(Killed):
            federated(agreed, courier, folder=tmp_path / "run")
    assert kinds(tmp_path / "run").count("opening") == late
    run = federated(agreed, courier, folder=tmp_path / "run")
    if late:
        assert "about to be opened once" in run.stopped
        assert not run.history
        assert run.scaling is None
    else:
        assert courier.rounds == [0, 0, 1, 2, 3]
        assert run.stopped is None


@pytest.mark.parametrize("folder", [True, False])
def test_an_attempt_that_fails_after_unmasking_is_the_last_one(folder, tmp_path):
    agreed = agreement()
    courier = asked(agreed, fault=lambda step, node, answer: [] if step == "unmask" else [answer])
    where = {"folder": tmp_path / "run"} if folder else {}
    run = federated(agreed, courier, **where)
    assert "about to be opened once" in run.stopped
    assert sum(step == "unmask" for step, _, _ in courier.seen) == NODES  # of the first attempt


# --- nodes that are lost, and a server that lies -------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_is_lost_leaves_the_others_measured(step):
    agreed = agreement()
    gone = {"left": True}

    def fault(at, node, answer):
        if node == 2 and at == step and gone["left"]:
            gone["left"] = at != "unmask"
            return []
        return [answer]

    run = federated(agreed, asked(agreed, fault=fault))
    assert len(run.history) == 3
    assert run.scaling.of("measured") == ("age", "score", "job")


def test_an_agreement_that_measures_nothing_knows_no_round_0():
    plain = agreement(measure=False, columns=None, attempts=1)
    courier = memory(plain)
    with pytest.raises(FederationError):
        Federated(plain, courier, courier.key, b"r" * 16)._summed(0, {"round": 0})
    assert len(courier.refused) == NODES
    assert all("whole number from 1 to 3" in said for said in courier.refused)


def test_a_measurement_is_not_taken_for_a_round_nor_the_other_way():
    """What a round is of, its number alone says, and the vectors' length has to fit."""
    agreed = replace(agreement(), attempts=1)
    courier = memory(agreed)
    assert agreed.encodings(0)[0].size != agreed.encodings(1)[0].size
    lying = Federated(agreed, courier, courier.key, b"r" * 16)
    w = agreed.spec.flat.vector()
    for round, said in ((1, {"round": 0}), (0, broadcast(1, w, None))):
        with pytest.raises(FederationError):
            lying._summed(round, said)
    assert len(courier.refused) == 2 * NODES
    assert all("vectors of round" in said for said in courier.refused)


def test_a_node_that_is_told_another_scaling_masks_for_nobody():
    """It is in the hash that is in every mask: what comes out is no sum of the vectors."""
    agreed = with_seed(agreement(), 5)
    courier, plain = memory(agreed), scaling_of(agreed.inputs.columns, agreed.inputs.size)
    numbers = list(numbers_of(plain))
    numbers[2] += 1.0
    other = np.array(numbers, dtype="<f8").tobytes()
    real, w = courier.exchange, agreed.spec.flat.vector()

    def exchange(requests, timeout):
        for node, request in requests.items():
            lied = {"scaling": other} if node == 1 and "scaling" in request else {}
            yield from real({node: dict(request) | lied}, timeout)

    def summed() -> np.ndarray:
        said = broadcast(1, w, None, None, plain)
        opened = Federated(agreed, courier, courier.key, b"r" * 16)._summed(1, said)
        return np.abs(opened.view(np.int32).astype(float))

    honest = summed()
    courier.exchange = exchange
    lied = summed()
    # Uniform in the ring: half of the numbers are beyond a quarter of it.
    assert honest.max() < 2.0**29
    assert np.mean(lied > 2.0**30) > 0.2


@pytest.mark.parametrize("what", ["none", "short", "long", "NaN", "width", "knots", "text"])
def test_a_scaling_that_is_none_is_refused_by_the_nodes(what, monkeypatch):
    agreed = agreement(RANKED, attempts=1)
    plain = scaling_of(agreed.inputs.columns, agreed.inputs.size)
    numbers = list(numbers_of(plain))
    if what == "NaN":
        numbers[3] = math.nan
    if what == "width":
        numbers[2 + plain.inputs] = -1.0
    if what == "knots":
        numbers[-1] = -9.0
    data = np.array(numbers, dtype="<f8").tobytes()
    sent = {"none": None, "short": data[:-8], "long": data + bytes(8), "text": "x"}.get(what, data)
    courier = memory(agreed, RANKED)
    lying = Federated(agreed, courier, courier.key, b"r" * 16)
    real = broadcast

    def told(*given):
        said = real(*given)
        said.pop("scaling", None)
        return said if sent is None else said | {"scaling": sent}

    monkeypatch.setattr("fpfl.federation.rounds.broadcast", told)
    with pytest.raises(FederationError):
        lying.release(1, agreed.spec.flat.vector())
    assert len(courier.refused) == NODES
    assert all("'scaling' must" in said for said in courier.refused)


def test_a_scaling_survives_the_wire_and_is_refused_where_none_is_measured():
    agreed = agreement(RANKED)
    plain = scaling_of(agreed.inputs.columns, agreed.inputs.size)
    other = with_numbers(plain, [x + (i % 3) * 0.25 for i, x in enumerate(numbers_of(plain))][:2]
                         + list(numbers_of(plain))[2:])  # fmt: skip
    w = agreed.spec.flat.vector()
    said = dict(broadcast(1, w, None, None, other))
    assert received_scaling(said, agreed) == other
    without = agreement(measure=False, columns=None)
    with pytest.raises(ValueError, match="none is measured"):
        received_scaling(said, without)
    assert received_scaling({}, without) is None
    # Without ranks there are no knots.
    few = scaling_of(agreement().inputs.columns, agreement().inputs.size)
    assert with_numbers(few, numbers_of(few)) == few


def test_a_node_whose_table_has_other_columns_sends_its_noise(caplog):
    agreed = agreement()
    data = people().subset(np.arange(30))
    other = replace(data, columns=people(RANKED).columns)
    assert np.abs(whole(agreed, data)).sum() > 0
    assert not whole(agreed, other).any()
    assert "other columns than were agreed on" in caplog.text
    assert np.array_equal(whole(agreed, replace(data, columns=())), whole(agreed, data))


# --- nodes that count -----------------------------------------------------------------------------


def sites(agreed: Agreement, folder: Path, monkeypatch, toml: str = "") -> Sites:
    return Sites(agreed, folder, monkeypatch, toml, data=memory(agreed).data)


def test_nodes_answer_one_measurement_and_no_second_one(tmp_path, monkeypatch):
    """Whatever the server counts, and though it has not had all of its rounds."""
    agreed = agreement()
    here = sites(agreed, tmp_path, monkeypatch)
    server = here.server()
    server.scale()
    assert "all 1 measurements" in here.lied_to(0)
    # A sum of another kind is not used up by it, nor is this one by others.
    server.release(1, agreed.spec.flat.vector())
    name = agreed.fingerprint.hex()
    for ledger in here.ledgers:
        account = ledger.accounts[name]
        assert (account.limit, len(account.sums)) == (4, 2)
        assert sorted(account.vectors.values()) == [0, 1]


def test_an_honest_server_finishes_at_the_nodes_limit(tmp_path, monkeypatch):
    agreed = agreement()
    here = sites(agreed, tmp_path, monkeypatch)
    run = here.run()
    assert len(run.history) == 3
    assert not here.courier.refused
    for round in (0, 1):
        assert "have been opened" in here.lied_to(round)
    ledger = here.ledgers[0]
    spent = {Mechanism.of(agreed.plan): 3, Mechanism.measurement_of(agreed.plan): 1}
    assert ledger.charges("sums") == ledger.charges("reserved") == spent
    # The node's own accountant comes to what the plan says.
    assert ledger.spent(agreed.plan.delta) == pytest.approx(agreed.plan.epsilon)


def test_a_site_s_budget_has_the_measurement_in_it(tmp_path, monkeypatch):
    agreed = agreement()
    mechanism, before = Mechanism.of(agreed.plan), Mechanism.measurement_of(agreed.plan)
    order, delta = 4, 1e-4
    together = PrivacyFilter(100.0, delta, order).spent({mechanism: 3, before: 1})
    alone = PrivacyFilter(100.0, delta, order).spent({mechanism: 3})
    assert alone < 0.9 * together
    for number, (epsilon, fits) in enumerate(((0.99 * together, False), (1.01 * together, True))):
        folder = tmp_path / str(number)
        folder.mkdir()
        here = sites(
            agreed, folder, monkeypatch,
            f"[budget]\nepsilon = {epsilon}\ndelta = {delta}\norder = {order}\n",
        )  # fmt: skip
        if fits:
            assert len(here.run().history) == 3
        else:
            with pytest.raises(FederationError):
                here.run(callbacks=[])
            assert any("no room for the agreement" in said for said in here.courier.refused)


def test_the_terms_say_what_is_measured():
    words = in_words("f", terms_of(agreement()))
    assert "measured   the inputs' columns, in one sum before round 1" in words
    without = terms_of(agreement(measure=False, columns=None))
    assert "measurement" not in without
    assert "measured" not in in_words("f", without)
    trusted = agreement(privacy=fpfl.Privacy(epsilon=4.0, convention="poisson"), attempts=2)
    assert terms_of(trusted)["measurement"] is None
    assert [kind.sums for kind in kinds_of(terms_of(trusted))] == [6, 2]


# --- through Flower -------------------------------------------------------------------------------

CURRENT: list[Agreement] = []


def current() -> Agreement:
    return CURRENT[-1]


def load(node) -> fpfl.FederatedDataset:
    return people().subset(parts(current())[int(node["partition-id"])])


def test_it_goes_through_flower(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")
    from flower_grid import InProcessGrid

    from fpfl.federation import client_app
    from fpfl.federation.flower import server as courier
    from fpfl.federation.secagg import Authority

    agreed = with_seed(agreement(), 5)
    CURRENT.append(agreed)
    authority, configs = Authority.make(), []
    for i, part in enumerate(parts(agreed)):
        (tmp_path / f"{i}").mkdir()
        path = tmp_path / f"{i}" / "identity"
        path.write_bytes(authority.enrol(f"node-{i}", i + 1).to_bytes())
        configs.append({"identity": str(path), "partition-id": i, "first-user": int(part[0])})
    name = __name__
    grid = InProcessGrid(client_app(f"{name}:current", f"{name}:load"), node_configs=configs)
    monkeypatch.setattr(courier, "time", grid.clock)
    run = federate(agreed, courier.FlowerCourier(grid), authority.trust)
    want = federated(agreed)
    assert run.stopped is None
    assert numbers_of(run.scaling) == pytest.approx(numbers_of(want.scaling), abs=1e-6)
    assert torch.allclose(parameters(run), parameters(want), atol=1e-3)
