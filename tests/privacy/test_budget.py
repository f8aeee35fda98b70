"""The budget of a population: all runs add up, nothing exceeds it, nothing is refunded."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import make_population
from hypothesis import given, settings
from hypothesis import strategies as st

import fpfl
from fpfl.privacy import MissingAccountantError, PrivacyWarning
from fpfl.privacy import filter as filter_module
from fpfl.privacy.budget import BudgetExhaustedError, PopulationLedger
from fpfl.privacy.conventions import poisson
from fpfl.privacy.filter import Mechanism, PrivacyFilter, good_order
from fpfl.store import Chain, ChainError

K = 1000
# Without amplification, so that these need no accountant.
SMALL = Mechanism("all", K, K, 40.0, "zero-out")
LARGE = Mechanism("all", K, K, 8.0, "zero-out")
SAMPLED = Mechanism("poisson", K, 50, 2.0, "zero-out")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "people.jsonl"


def make(path: Path, epsilon: float = 1.0, **settings) -> PopulationLedger:
    return PopulationLedger.create(path, population=K, epsilon=epsilon, **settings)


def test_what_it_is_made_with(path):
    with make(path, name="people") as ledger:
        assert ledger.filter == PrivacyFilter(1.0, 1e-4, good_order(1.0, 1e-4))
        assert (ledger.name, ledger.population, ledger.neighbours) == ("people", K, "zero-out")
        assert ledger.spent == 0.0
        assert ledger.share == 0.0
    with PopulationLedger.open(path) as again:
        assert again.filter == ledger.filter
    with pytest.raises(FileExistsError):
        make(path)


def test_there_is_room_for_what_can_be_charged_and_for_no_more(path):
    """Asked of several mechanisms together, and beside what others charged."""
    with make(path, epsilon=2.0) as ledger:
        ledger.charge("first", LARGE, 1)
        room = ledger.left(LARGE)
        assert ledger.has_room({})
        assert ledger.has_room({LARGE: room})
        assert not ledger.has_room({LARGE: room + 1})
        more = ledger.filter.room({LARGE: 2}, SMALL)
        assert ledger.has_room({LARGE: 1, SMALL: more})
        assert not ledger.has_room({LARGE: 1, SMALL: more + 1})
        with pytest.raises(ValueError, match="1,000 users"):
            ledger.has_room({Mechanism("all", 10, 10, 8.0, "zero-out"): 1})


def test_the_order_can_be_given_or_chosen_for_a_mechanism(path):
    little = Mechanism("poisson", K, 10, 0.9, "zero-out")
    assert make(path, 2.0, order=5).filter.order == 5
    chosen = make(path.with_name("b"), 2.0, mechanism=little)
    plain = make(path.with_name("c"), 2.0)
    assert chosen.filter.order < plain.filter.order
    assert chosen.left(little) > plain.left(little)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"population": 0}, "population"),
        ({"epsilon": 0}, "epsilon"),
        ({"delta": 0.5}, "delta"),
        ({"neighbours": "none"}, "neighbours"),
        ({"order": 1}, "order"),
        ({"order": 2, "epsilon": 0.1}, "no room"),
        ({"mechanism": Mechanism("all", 5, 5, 1.0, "zero-out")}, "same users"),
    ],
)
def test_wrong_settings_make_no_file(path, change, match):
    with pytest.raises(ValueError, match=match):
        PopulationLedger.create(path, **{"population": K, "epsilon": 1.0} | change)
    assert not path.exists()


def test_a_large_delta_warns(path):
    with pytest.warns(PrivacyWarning, match="is above"):
        make(path, delta=5e-4)


def test_runs_add_up_to_the_budget_and_no_further(path):
    with make(path) as ledger:
        room = ledger.left(SMALL)
        assert room == ledger.filter.room({}, SMALL) > 20
        for number in range(room):
            ledger.charge("ab"[number % 2], SMALL, number // 2)
            assert ledger.left(SMALL) == room - number - 1
        before = path.read_bytes()
        for _ in range(2):
            with pytest.raises(BudgetExhaustedError, match="Nothing that was charged can be") as e:
                ledger.charge("c", SMALL, 0)
        assert path.read_bytes() == before
        text = str(e.value)
        assert "ε = 1 at δ = 0.0001" in text
        assert "Run 'c' asked for one more round (all cohorts of 1,000, noise multiplier" in text
        assert ledger.charges() == {SMALL: room}
        assert ledger.charged_rounds("a") == room - room // 2
        assert ledger.charged_rounds("c") == 0
        assert ledger.filter.fits(ledger.charges())
        assert 0.9 < ledger.share <= 1
        assert ledger.spent == pytest.approx(ledger.filter.spent({SMALL: room}))
        assert ledger.spent <= 1
    with PopulationLedger.open(path) as again:
        assert again.charges() == {SMALL: room}
        assert again.left(SMALL) == 0
        with pytest.raises(BudgetExhaustedError):
            again.charge("a", SMALL, None)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([SMALL, LARGE, SAMPLED]), st.booleans()), max_size=60))
def test_whatever_is_chosen_after_looking_keeps_to_the_budget(tmp_path_factory, wishes):
    """Two openings of a file charge in turn: both agree with the filter about every charge."""
    path = tmp_path_factory.mktemp("adaptive") / "people"
    one = make(path, 0.5)
    two = PopulationLedger.open(path)
    charges: dict[Mechanism, int] = {}
    for mechanism, first in wishes:
        wanted = charges | {mechanism: charges.get(mechanism, 0) + 1}
        ledger = one if first else two
        assert ledger.left(mechanism) == ledger.filter.room(charges, mechanism)
        if ledger.filter.fits(wanted):
            ledger.charge("run", mechanism, None)
            charges = wanted
        else:
            with pytest.raises(BudgetExhaustedError):
                ledger.charge("run", mechanism, None)
    for ledger in (one, two):
        assert ledger.charges() == charges
        assert ledger.share == pytest.approx(ledger.filter.rho(charges) / ledger.filter.budget)
        ledger.close()


@pytest.mark.parametrize(
    "other",
    [
        Mechanism("all", K, K, 40.0, "add-remove"),
        Mechanism("all", K, K, 40.0, "replace-one"),
        Mechanism("all", K + 1, K + 1, 40.0, "zero-out"),
        Mechanism("fixed", K, 10, 40.0, "replace-one"),
    ],
)
def test_other_users_and_other_neighbours_are_refused(path, other):
    with make(path) as ledger:
        before = path.read_bytes()
        for attempt in (ledger.left, lambda m: ledger.charge("run", m, 0)):
            with pytest.raises(ValueError, match="same users in the same way"):
                attempt(other)
        assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [("", 0), (None, 0), ("run", -1), ("run", 1.5)])
def test_charges_are_checked(path, bad):
    with make(path) as ledger, pytest.raises(ValueError, match=r"run's name|round"):
        ledger.charge(bad[0], SMALL, bad[1])


# --- The file -----------------------------------------------------------------------------------


def test_looking(path):
    with make(path) as ledger:
        ledger.charge("run", SMALL, 0)
        with PopulationLedger.open(path, write=False) as look:
            assert look.charges() == {SMALL: 1}
            ledger.charge("run", SMALL, 1)
            assert look.charges() == {SMALL: 2}
            for attempt in (lambda: look.charge("x", SMALL, 0), lambda: look.withdraw([1])):
                with pytest.raises(ValueError, match="opened to look"):
                    attempt()
        assert ledger.charges() == {SMALL: 2}


def test_an_edited_file_is_refused(path):
    with make(path) as ledger:
        for number in range(3):
            ledger.charge("run", LARGE, number)
    content = path.read_bytes()
    edited = content.replace(b'"noise_multiplier":8.0', b'"noise_multiplier":9.0', 1)
    lines = content.splitlines(keepends=True)
    for changed in (edited, b"".join(lines[:1] + lines[2:]), content.replace(b"1.0", b"9.0", 1)):
        path.write_bytes(changed)
        with pytest.raises(ChainError, match="edited or damaged"):
            PopulationLedger.open(path)
        assert path.read_bytes() == changed


def test_other_files_are_refused(path):
    Chain.create(path, run="x").close()
    with pytest.raises(ChainError, match="not the ledger of a population"):
        PopulationLedger.open(path)
    other = path.with_name("other")
    make(other).close()
    with Chain.open(other, lock=True) as chain:
        chain.append("refund", run="x")
    with pytest.raises(ChainError, match="line 2: it is not what a population's ledger holds"):
        PopulationLedger.open(other)


def test_charges_about_others_in_the_file_are_refused(path):
    make(path).close()
    with Chain.open(path, lock=True) as chain:
        other = Mechanism("all", 7, 7, 40.0, "zero-out").as_dict()
        chain.append("charge", run="x", what="round", round=0, mechanism=other)
    with pytest.raises(ChainError, match="line 2"):
        PopulationLedger.open(path)


def test_a_torn_line_counts_as_the_dearest_charge(path):
    with make(path) as ledger:
        room = ledger.left(SMALL)
        ledger.charge("run", SMALL, 0)
    with path.open("ab") as file:
        file.write(b'{"n":2,"time":')
    with PopulationLedger.open(path, write=False) as look:
        assert look.as_dict()["torn"] == 1
        assert look.left(SMALL) == room - 2
    with PopulationLedger.open(path) as ledger:
        assert ledger.left(SMALL) == room - 2
        assert ledger.charges() == {SMALL: 1}
        assert ledger.charged_rounds("run") == 1
        assert ledger.left(LARGE) == ledger.filter.room({SMALL: 1, LARGE: 1}, LARGE)
        ledger.charge("run", LARGE, 1)
        # The torn line may have been such a charge, too.
        assert ledger.left(SMALL) == ledger.filter.room({SMALL: 1, LARGE: 2}, SMALL)
        assert "Torn lines in the file: 1" in ledger.summary()


def test_syncing_from_a_thread(path):
    with make(path, 50.0) as ledger:
        stop = threading.Event()

        def keep_syncing():
            while not stop.is_set():
                ledger.sync()

        thread = threading.Thread(target=keep_syncing)
        thread.start()
        for number in range(200):
            ledger.charge("run", SMALL, number)
        stop.set()
        thread.join()
    with PopulationLedger.open(path) as again:
        assert again.charges() == {SMALL: 200}


def test_only_sums_need_an_accountant(path, monkeypatch):
    with make(path) as ledger:
        ledger.charge("run", SMALL, 0)
        ledger.charge("run", SAMPLED, 1)
        expected = ledger.share

    def missing():
        raise MissingAccountantError("dp-accounting")

    with PopulationLedger.open(path) as bare:
        with monkeypatch.context() as patch:
            filter_module._renyi.cache_clear()
            patch.setattr(poisson, "_dp_accounting", missing)
            assert bare.withdrawn() == frozenset()
            assert bare.charged_rounds("run") == 2
            for _ in range(2):
                with pytest.raises(MissingAccountantError):
                    bare.charge("run", SAMPLED, 2)
                with pytest.raises(MissingAccountantError):
                    _ = bare.spent
        assert bare.share == expected


# --- Withdrawals --------------------------------------------------------------------------------


def test_withdrawals(path):
    with make(path) as one, PopulationLedger.open(path) as two:
        assert one.withdrawn() == frozenset()
        one.withdraw(np.array([5, 3, 5]))
        two.withdraw([3, 999])
        two.withdraw([])
        for ledger in (one, two):
            assert ledger.withdrawn() == {3, 5, 999}
            assert ledger.withdrawn() is ledger.withdrawn()
        before = path.read_bytes()
        for wrong in ([K], [-1], [1.5], ["1"], [True], [1, 2, K]):
            with pytest.raises(ValueError, match=r"user"):
                one.withdraw(wrong)
        assert path.read_bytes() == before
        assert before.count(b'"withdrawal"') == 2
        assert one.share == 0
    with PopulationLedger.open(path, write=False) as look:
        assert look.withdrawn() == {3, 5, 999}
        assert look.as_dict()["withdrawn"] == 3


def test_what_people_read(path):
    with make(path, 2.0, name="people") as ledger:
        for number in range(3):
            ledger.charge("first", SMALL, number)
        ledger.charge("second", SAMPLED, None, "an evaluation")
        ledger.withdraw([123, 456])
        text = ledger.summary()
        values = ledger.as_dict()
    for part in (
        "Budget of 'people' (1,000 users): ε = 2 at δ = 0.0001",
        "4 charges",
        "Run first: 3 charges",
        "Run second: 1 charges",
        "Users who withdrew: 2.",
        "not against a server",
    ):
        assert part in text
    assert "123" not in text  # who withdrew is nobody's business
    assert json.loads(json.dumps(values)) == values
    assert "123" not in json.dumps(values["runs"])
    assert values["runs"]["first"]["rounds"] == 3
    assert values["spent"] == pytest.approx(ledger.filter.spent({SMALL: 3, SAMPLED: 1}))
    assert sum(entry["charges"] for entry in values["mechanisms"]) == 4
    assert {entry["noise_multiplier"] for entry in values["mechanisms"]} == {40.0, 2.0}


# --- Several processes --------------------------------------------------------------------------


def charge_until_exhausted(path: Path, run: str, mechanism: Mechanism) -> None:
    with PopulationLedger.open(path) as ledger:
        for number in range(10**6):
            try:
                ledger.charge(run, mechanism, number)
            except BudgetExhaustedError:
                break


def test_processes_share_a_budget_exactly(path):
    with make(path, 2.0) as ledger:
        room = ledger.filter.room({}, SMALL)
        assert 100 < room < 2000
    context = multiprocessing.get_context("fork")
    runs = [f"run {number}" for number in range(3)]
    processes = [
        context.Process(target=charge_until_exhausted, args=(path, run, SMALL)) for run in runs
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    with PopulationLedger.open(path) as ledger:
        assert ledger.charges() == {SMALL: room}
        assert sum(ledger.charged_rounds(run) for run in runs) == room
        assert sum(values["rounds"] for values in ledger.by_run().values()) == room


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_a_training_without_a_folder_charges_its_population(tmp_path: Path) -> None:
    """Before each round; a spent budget ends it, and who withdrew is left out."""
    path = tmp_path / "people.jsonl"
    privacy = fpfl.Privacy(noise_multiplier=2.0)
    mechanism = Mechanism("poisson", 30, 10, 2.0, "zero-out")
    PopulationLedger.create(path, population=30, epsilon=6.0, mechanism=mechanism).close()
    with PopulationLedger.open(path, write=False) as ledger:
        room = ledger.left(mechanism)
    assert 5 < room < 500
    how = {"cohort": 10, "privacy": privacy, "ledger": path, "seed": 0, "noise_seed": 0}
    people = make_population()
    first = fpfl.train(fpfl.mlp(5, seed=0), people, rounds=4, **how)
    assert "of its budget" in str(first.privacy) or "budget" in str(first.privacy)
    rest = fpfl.train(fpfl.mlp(5, seed=0), people, rounds=room, **how)
    assert len(rest.history) == room - 4
    assert "the population's budget is spent" in str(rest.stopped)
    with PopulationLedger.open(path) as ledger:
        assert sorted(run["rounds"] for run in ledger.by_run().values()) == [4, room - 4]
        assert ledger.left(mechanism) == 0
    with pytest.raises(ValueError, match="give privacy="):
        fpfl.train(fpfl.mlp(5, seed=0), people, rounds=4, cohort=10, ledger=path)


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_who_withdrew_from_a_ledger_takes_no_part(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    with PopulationLedger.create(path, population=30, epsilon=50.0) as ledger:
        ledger.withdraw(range(30))
    runs = [
        fpfl.train(
            fpfl.mlp(5, seed=0), make_population(seed=seed), rounds=2, cohort=30, ledger=path,
            privacy=fpfl.Privacy(noise_multiplier=2.0), seed=0, noise_seed=0,
        )
        for seed in (0, 1)
    ]  # fmt: skip
    assert runs[0].history == runs[1].history  # noise alone, whatever their data
