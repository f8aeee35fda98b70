"""Sweeps on real people: what is charged, when, what is refused, and what is said before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_population

import fpfl
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.sweeps import processes
from fpfl.sweeps.batch import Job, trained
from fpfl.sweeps.charges import without
from fpfl.sweeps.sweep import Sweep

PEOPLE, OTHERS = make_population(users=160).split(0.25, seed=0)
RUNS = fpfl.grid(privacy__noise_multiplier=[2.0, 4.0], seed=range(2))
COMMON: dict[str, Any] = {
    "held_out": OTHERS,
    "cohort": 30,
    "rounds": 5,
    "constraint": fpfl.fnr_parity("sex", tolerance=0.1),
    "method": fpfl.OneGradient(),
    "privacy": fpfl.Privacy(noise_multiplier=2.0, clip=1.0),
}


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "people.jsonl"
    fpfl.PopulationLedger.create(path, population=120, epsilon=20.0).close()
    return path


def model(seed: int) -> torch.nn.Module:
    return fpfl.mlp(5, (4,), seed=seed)


def made(ledger: Path, runs: Sequence[dict[str, Any]] = RUNS, **how: Any) -> Sweep:
    return fpfl.sweep(model, PEOPLE, runs, ledger=ledger, **COMMON | how)


def charges(ledger: Path) -> dict[str, Any]:
    with fpfl.PopulationLedger.open(ledger, write=False) as opened:
        return opened.by_run()


def test_every_round_of_every_run_is_charged_under_its_own_name(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = made(ledger)
    assert not charges(ledger), "nothing is charged before the sweep is begun"
    assert sweep.cost is not None
    said = capsys.readouterr().err
    assert f"4 runs, 20 rounds, will be charged to {ledger}: together ε = " in said
    assert "is left after them" in said
    sweep.finish()
    found = charges(ledger)
    assert [each["rounds"] for each in found.values()] == [5] * 4
    spent = fpfl.tuning_cost(ledger)
    assert spent.epsilon == pytest.approx(sweep.cost.epsilon)
    assert spent.share == pytest.approx(sweep.cost.share)
    assert spent.left == pytest.approx(sweep.cost.left)


def test_noise_and_cohorts_come_from_the_operating_system(ledger: Path) -> None:
    """Seeds are of initial weights: two runs of one seed differ, and statements promise."""
    found = list(made(ledger, [{"seed": 0}, {"seed": 0}]))
    first, second = (torch.cat([p.flatten() for p in each.run.model.parameters()])
                     for each in found)  # fmt: skip
    assert not torch.equal(first, second)
    for each in found:
        assert each.run.settings["seeded_noise"] is False
        assert each.run.settings["seeded_cohorts"] is False
        assert each.run.privacy is not None
        assert each.run.privacy.population_ledger is not None
        assert each.row["simulated"] is False


@pytest.mark.parametrize(
    "how", [{"simulate": True}, {"noise_seed": 3}, {"runs": [{"noise_seed": 3}]}]
)
def test_seeded_noise_is_not_charged(ledger: Path, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="was given beside a ledger"):
        made(ledger, **how)


def test_what_the_budget_has_no_room_for_is_refused_before_anything(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "trained", None)
    with pytest.raises(BudgetExhaustedError) as error:
        made(ledger, rounds=4000, folder=tmp_path / "out")
    assert "was not started and nothing was charged: its 4 runs with 16,000 rounds" in str(
        error.value
    )
    assert "Try fewer values or seeds" in str(error.value)
    assert not charges(ledger)
    assert not (tmp_path / "out").exists()


def test_just_enough_is_enough(tmp_path: Path) -> None:
    """The last unit of a budget may be used, and no more."""
    ledger = tmp_path / "small.jsonl"
    fpfl.PopulationLedger.create(ledger, population=120, epsilon=2.0).close()
    one = made(ledger, RUNS[:1], rounds=1).cost
    assert one is not None
    room = int(1.0 / one.share)
    with pytest.raises(BudgetExhaustedError):
        made(ledger, RUNS[:1], rounds=room + 1)
    assert made(ledger, RUNS[:1], rounds=room).finish().finished == 1
    with pytest.raises(BudgetExhaustedError, match="enough for 0 runs"):
        made(ledger, RUNS[:1], rounds=room)


def test_who_else_charges_meanwhile_ends_the_sweep_and_not_the_people(ledger: Path) -> None:
    sweep = made(ledger, rounds=40)
    with fpfl.PopulationLedger.open(ledger) as opened:
        assert sweep._account is not None
        mechanism = sweep._account.mechanisms[0]
        for _ in range(opened.left(mechanism)):
            opened.charge("others", mechanism, None)
    with pytest.raises(BudgetExhaustedError, match="somebody else charged"):
        sweep.finish()
    assert set(charges(ledger)) == {"others"}


def test_going_on_charges_what_is_trained_again_alone(
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cut_off(jobs: Sequence[Job], **how: Any) -> Iterator[Any]:
        for number, found in enumerate(trained(jobs, **how)):
            if number == 3:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(processes, "trained", cut_off)
        with pytest.raises(KeyboardInterrupt):
            made(ledger, folder=tmp_path / "out").finish()
    assert len(charges(ledger)) == 4, "charged before they were begun"
    capsys.readouterr()
    again = made(ledger, folder=tmp_path / "out", resume=True)
    assert again.cost is not None
    assert (again.cost.runs, again.cost.rounds) == (1, 5)
    said = capsys.readouterr().err
    assert "Runs that are finished are not charged again" in said
    assert again.finish().finished == 4
    assert len(charges(ledger)) == 5
    done = made(ledger, folder=tmp_path / "out", resume=True)
    assert done.cost is not None
    assert done.cost.runs == 0
    assert "Nothing will be charged" in str(done.cost)


def test_charges_are_on_the_disk_before_a_share_is_trained(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def looking(jobs: Sequence[Job], **how: Any) -> Iterator[Any]:
        seen.append(sum(each["rounds"] for each in charges(ledger).values()))
        return trained(jobs, **how)

    monkeypatch.setattr(processes, "trained", looking)
    monkeypatch.setattr("fpfl.sweeps.sweep.AT_ONCE", 2)
    made(ledger).finish()
    assert seen == [10, 20], "two runs at a time, each charged first"


def test_workers_are_charged_for_too(ledger: Path) -> None:
    assert made(ledger, jobs=2).finish().finished == 4
    assert [each["rounds"] for each in charges(ledger).values()] == [5] * 4


def test_runs_without_privacy_cost_nothing(ledger: Path) -> None:
    made(ledger, [{"privacy": None}, {}]).finish()
    assert [each["rounds"] for each in charges(ledger).values()] == [5]
    with pytest.raises(ValueError, match="no run of the sweep has privacy"):
        made(ledger, [{"privacy": None}])


def test_the_ledger_has_to_be_of_those_who_are_trained_on(ledger: Path) -> None:
    whole = make_population(users=120)
    with pytest.raises(ValueError, match=r"is about 120 users, and the sweep trains on 90 .*90"):
        fpfl.sweep(model, whole, RUNS, ledger=ledger, **COMMON | {"held_out": 0.25})


def test_a_ledger_is_about_one_population(ledger: Path) -> None:
    with pytest.raises(ValueError, match=r"has 2 \(a, b\); give one"):
        fpfl.sweep(model, {"a": PEOPLE, "b": PEOPLE}, [{"data": "a"}], ledger=ledger, **COMMON)


def test_neighbours_that_training_would_refuse_are_refused_before_charges(ledger: Path) -> None:
    other = fpfl.Privacy(noise_multiplier=2.0, clip=1.0, neighbours="add-remove")
    with pytest.raises(ValueError, match=r"run 0 .*declare"):
        made(ledger, privacy=other)
    with pytest.raises(ValueError, match=r"run 0 .*sampling"):
        made(ledger, sampling="without-replacement")
    assert not charges(ledger)


def test_who_withdrew_is_left_out(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fpfl.PopulationLedger.open(ledger) as opened:
        opened.withdraw([0, 7])
    seen = []

    def looking(jobs: Sequence[Job], **how: Any) -> Iterator[Any]:
        seen.extend(job.data for job in jobs)
        return trained(jobs, **how)

    monkeypatch.setattr(processes, "trained", looking)
    made(ledger, RUNS[:1]).finish()
    (data,) = seen
    sizes = PEOPLE.sizes().clone()
    sizes[[0, 7]] = 0
    assert torch.equal(data.sizes(), sizes)
    assert data.population == PEOPLE.population


def test_without_leaves_the_others_as_they_are() -> None:
    found = without(PEOPLE, [3, 5, 10_000])
    for user in range(PEOPLE.population):
        (start,), (size,) = PEOPLE.rows([user])
        (there,), (left,) = found.rows([user])
        assert left == (0 if user in (3, 5) else size)
        before = PEOPLE.features[start : start + left]
        assert torch.equal(found.features[there : there + left], before)
    assert without(PEOPLE, []) is PEOPLE
