"""The tables: every row of the paper, and results in the promised form."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
from conftest import make_population, vectors
from torch import nn

import fpfl
from fpfl.experiments import runner, together
from fpfl.experiments.__main__ import main
from fpfl.experiments.adult import CHANGES, CONSTRAINTS, SeparateGradients, with_loss
from fpfl.experiments.rows import _method as method_of
from fpfl.experiments.rows import run_rows
from fpfl.experiments.tables import TABLES, Options, load_table, matches, override
from fpfl.experiments.together import MOST, groups_of
from fpfl.methods import REGISTER, MethodState
from fpfl.users import CohortEngine, FlatModel

FIELDS = [
    "table", "data", "model", "algorithm", "cohort", "variant", "population",
    "accounted_population", "rounds", "seed",
    "accuracy", "error", "gap", "fnr_gap", "eo_gap", "demp_gap", "pp_gap", "accuracy_gap",
    "train_accuracy", "train_error", "train_gap", "rates", "stopped", "numbers_sent",
    "real_cohort",
    "convention", "epsilon", "epsilon_honest", "epsilon_real", "delta", "noise_multiplier",
    "blocks", "device", "precision", "together", "training_seconds", "seconds", "run",
]  # fmt: skip


def test_every_row_of_the_papers_tables_is_there() -> None:
    central = load_table("adult-central")
    assert [(r.model, r.algorithm) for r in central] == [
        (model, algorithm)
        for model in ("shallow", "deep")
        for algorithm in ("SGD", "Tran", "BMDM", "MMDM")
    ]
    federated = load_table("adult-federated")
    assert len(federated) == 24
    assert sum(r.cohort == 1000 for r in federated) == 6
    by_name = {(r.model, r.algorithm, r.cohort): r for r in federated}
    fpfl_row = by_name["shallow", "FPFL", 1000]
    assert (fpfl_row.clip, fpfl_row.damping, fpfl_row.rounds, fpfl_row.epsilon) == (2.0, 2, 250, 2)
    assert fpfl_row.paper["accuracy"] == 0.851
    pfl = by_name["deep", "PFL", 200]
    assert (pfl.clip, pfl.method, pfl.rounds) == (2.0, None, 1000)
    assert by_name["deep", "FFL+Clip", 200].clip == 2.4
    assert by_name["shallow", "FL+Clip", 200].clip == 1.3
    free = by_name["deep", "BMDM-FL", 200]
    assert (free.clip, free.epsilon, free.damping) == (None, None, 0.0)


def test_the_tables_beyond_the_paper() -> None:
    robust = load_table("adult-robust")
    assert len(robust) == 24
    assert {(r.cohort, r.epsilon) for r in robust} == {(200, 2), (200, 0.5), (200, 0.1), (1000, 2)}
    by_name = {r.name(16_280): r for r in robust}
    one = by_name["deep/FPFL-1G/200/16280/ε=0.5"]
    assert (one.method, one.suggested, one.clip, one.rounds) == ("one-gradient", True, None, 1000)
    paper = by_name["deep/FPFL/1000/16280/ε=2"]
    assert (paper.method, paper.suggested, paper.clip, paper.rounds) == ("mmdm", False, 2.4, 250)
    plain = by_name["shallow/PFL/200/16280/ε=0.1"]
    assert (plain.method, plain.suggested) == (None, True)
    ablation = load_table("adult-ablation")
    lift = load_table("adult-lift")
    assert {r.change for r in lift} == {"lift"}
    digits = load_table("femnist")
    assert {r.change for r in (*ablation, *lift, *digits)} == {"", *CHANGES}
    assert {r.constraint for r in ablation} == set(CONSTRAINTS)
    # Rows of the same name would be taken for one.
    for rows in (robust, ablation, lift):
        assert len({r.key for r in rows}) == len(rows)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "part",
    [
        "*without*",
        "*counts*",
        "*alike",
        "*multipliers",
        "*race*",
        "*odds",
        "*parity",
        "*regression",
    ],
)
def test_every_row_of_the_ablation_runs(part, capsys) -> None:
    arguments = ["adult-ablation", "--rows", f"shallow/{part}", "--jobs", "1", "--json"]
    assert main([*arguments, "--convention", "poisson"]) == 0
    for result in json.loads(capsys.readouterr().out):
        assert list(result) == FIELDS
        fixed = "fixed cohorts" in result["variant"]
        assert result["convention"] == ("replace-one" if fixed else "poisson")
        assert result["epsilon_honest"] == pytest.approx(2.0, rel=1e-3)
        separate = "separate" in result["variant"]
        p = 92 * 10 + 10 + 10 + 1 if result["accuracy"] is not None else 91 * 10 + 21
        assert (result["numbers_sent"] > 3 * p) == separate
        assert result["train_gap"] == max(v["gap"] for v in result["rates"]["train"].values())


def test_separate_gradients_are_combined_as_one_would_be() -> None:
    """The ablation's method on the paper's form, against the loss of weighted samples."""
    data = make_population(users=20).to("cpu", torch.float64)
    model = FlatModel.of(nn.Linear(5, 1).double())
    constraint = fpfl.equalized_odds("sex")
    rates = tuple(with_loss(rate) for rate in constraint.rates)
    paper = CohortEngine(model, data, dataclasses.replace(constraint, rates=rates))
    users, w, N = np.arange(20), model.vector(), 7.0
    totals = paper.layout.totals(vectors(paper, w, users).sum(0), N, 1e-9)
    inner = fpfl.OneGradient(decay=0.0, high=1e9, low=0.0, multiplier_lr=0.01, damping=0.01)
    state, direction = SeparateGradients(inner).update(MethodState.zeros(2, 2), totals, 0.02)
    weights = inner.weights(state, N, 0.02)
    one = CohortEngine(model, data, constraint, form="one-gradient")
    summed = vectors(one, w, users, weights=weights).sum(0)[: model.size]
    torch.testing.assert_close(direction, summed / N, rtol=1e-5, atol=1e-7)


def test_tables_know_every_method_that_is_registered() -> None:
    """A row never trains with another method than the one that it names."""
    row = load_table("adult-central")[0]
    for name, known in REGISTER.items():
        made = method_of(dataclasses.replace(row, method=name))
        assert type(made) is type(known.make())
    assert method_of(dataclasses.replace(row, method=None)) is None
    with pytest.raises(ValueError, match=r"expected one of .*one-gradient"):
        method_of(dataclasses.replace(row, method="nobody's"))


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [("*", True), ("SHALLOW/fpfl/*", True), ("*/FPFL/1000/*", True), ("deep/*", False)],
)
def test_patterns_are_case_insensitive_globs(pattern: str, hit: bool) -> None:
    assert matches("shallow/FPFL/1000/16280", pattern) is hit


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dataclasses.replace(r, rounds=4) for t in TABLES for r in load_table(t)]
    monkeypatch.setattr(runner, "load_table", lambda table: [r for r in rows if r.table == table])


@pytest.mark.usefixtures("short")
def test_results_have_the_promised_form(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["adult-federated", "--rows", "shallow/*PFL/200/*", "--seeds", "2", "--jobs", "1",
                 "--out", str(out), "--json"]  # fmt: skip
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    results = json.loads((out / "results.json").read_text())
    assert results == printed
    assert [list(r) for r in results] == [FIELDS] * 6
    assert {r["algorithm"] for r in results} == {"PFL", "BMDM-PFL", "FPFL"}
    assert {r["seed"] for r in results} == {0, 1}
    private = results[0]
    assert private["population"] == 16_280
    assert private["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert private["epsilon_honest"] == private["epsilon"]
    assert "mean ± standard deviation" in (out / "table.md").read_text().lower()
    assert json.loads((out / "about.json").read_text())["command"].startswith("python -m fpfl")


@pytest.mark.usefixtures("short")
def test_the_papers_convention_shows_the_honest_epsilon(capsys) -> None:
    assert main(["adult-federated", "--rows", "shallow/PFL/200/*", "--convention", "paper",
                 "--json"]) == 0  # fmt: skip
    result = json.loads(capsys.readouterr().out)[0]
    assert result["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert result["epsilon_honest"] > 5


@pytest.mark.usefixtures("short")
def test_central_rows_have_no_cohort(capsys) -> None:
    assert main(["adult-central", "--rows", "shallow/Tran/*", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)[0]
    assert result["cohort"] is None
    assert result["population"] == 32_561
    assert result["epsilon"] is None


@pytest.mark.usefixtures("short")
def test_together_and_one_by_one_are_the_same_but_for_rounding(capsys) -> None:
    """Rows of several shapes, private and not; by itself a run has a time of its own."""
    found = {}
    for way in ([], ["--one-by-one"]):
        assert main(["adult-federated", "--rows", "shallow/*F*L/200/*", "--seeds", "2",
                     "--jobs", "1", "--json", *way]) == 0  # fmt: skip
        found[bool(way)] = json.loads(capsys.readouterr().out)
    assert len(found[True]) == 12
    assert {r["together"] for r in found[True]} == {1}
    for one, other in zip(found[True], found[False], strict=True):
        assert one["run"] == other["run"]
        assert one["numbers_sent"] == other["numbers_sent"]
        for figure in ("accuracy", "gap", "train_gap"):
            assert one[figure] == pytest.approx(other[figure], abs=1e-3), figure


def test_a_worker_that_fails_gives_what_it_has() -> None:
    rows = [dataclasses.replace(r, rounds=2) for r in load_table("adult-central")[:1]]
    bad = dataclasses.replace(rows[0], learning_rate=1e30)
    compute = partial(run_rows, options=Options(), apart=True)
    found, error = together._share(compute, [(rows[0], 0), (bad, 0)])
    assert [place for place, _ in found] == [0]
    assert "diverged" in str(error)


def test_a_failure_in_one_process_loses_nothing_of_another() -> None:
    good = dataclasses.replace(load_table("adult-central")[0], rounds=2)
    bad = dataclasses.replace(good, learning_rate=1e30)
    found = []

    def collect() -> None:
        for index, result in runner._run_all([(bad, 0), (good, 0)], Options(), 2, False):
            found.append((index, result["algorithm"]))

    with pytest.raises(ValueError, match="diverged"):
        collect()
    assert found == [(1, "SGD")]


def test_shares_of_work() -> None:
    """Nothing is lost or done twice; one shape a group; workers have about the same to do."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        number, workers = int(rng.integers(1, 150)), int(rng.integers(1, 9))
        shapes = rng.integers(0, rng.integers(1, 12), number).tolist()
        costs = [float(1 + shape) for shape in shapes]
        groups = groups_of(shapes, costs, workers)
        assert sorted(n for group in groups for n in group) == list(range(number))
        assert max(map(len, groups)) <= MOST
        assert all(len({shapes[n] for n in group}) == 1 for group in groups)
        assert len(groups) >= min(number, workers)
        # Whoever is free takes the next: no worker has more than its part and one group.
        loads = [0.0] * workers
        for group in groups:
            loads[loads.index(min(loads))] += sum(costs[n] for n in group)
        largest = sum(costs[n] for n in groups[0])
        assert max(loads) <= sum(costs) / workers + largest
    assert [len(g) for g in groups_of([0] * 64, [1.0] * 64, 2)] == [16] * 4
    assert [len(g) for g in groups_of([0] * 10, [1.0] * 10, 2)] == [5, 5]


def test_time_is_that_of_a_group_over_its_runs(monkeypatch) -> None:
    """By a clock that training alone moves, and evaluating does not."""
    clock = [0.0]

    def trained(jobs, *, memory=None, watch=None):
        for group, seconds in (([1, 2], 6.0), ([0], 5.0)):
            watch(group, 1)
            clock[0] += seconds
            for number in group:
                watch(group[:1], 2)  # the others may have stopped
                yield number, f"run {number}"

    monkeypatch.setattr(together, "trained", trained)
    monkeypatch.setattr(together.time, "perf_counter", lambda: clock[0])
    found = []
    for each in together.finished([None] * 3):
        clock[0] += 100.0
        found.append((each.number, each.run, each.seconds, each.together))
    assert found == [(1, "run 1", 3.0, 2), (2, "run 2", 3.0, 2), (0, "run 0", 5.0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "there is no table 'nonsense'"),
        (["adult-central", "--rows", "nothing/*"], "no row of adult-central matches"),
        (["adult-central", "--seeds", "0"], "no seeds"),
        (["adult-central", "--convention", "hope"], "expected one of"),
        (
            ["adult-central", "--rows", "shallow/SGD/*", "--set", "selection=luck"],
            "expected 'best'",
        ),
        (["adult-central", "--set", "rounds=abc"], "rounds=abc"),
        (["adult-central", "--set", "cohort=3"], "expected KEY=VALUE"),
        (["adult-central", "--rows", "*/SGD/*", "--device", "cuda:99"], "cannot be used here"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_settings_can_be_overridden_for_a_whole_table() -> None:
    row = load_table("adult-central")[0]
    changed = override(row, ["rounds=7", "initial=torch", "learning_rate=0.5"])
    assert (changed.rounds, changed.initial, changed.learning_rate) == (7, "torch", 0.5)
    for bad in ("speed", "speed=3", "algorithm=FPFL", "epsilon=1"):
        with pytest.raises(ValueError, match="expected KEY=VALUE"):
            override(row, [bad])
