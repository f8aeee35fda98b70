"""``fpfl reproduce tables``: the tables, the rows, a run of all of it, and the bars."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fpfl
from fpfl.cli.app import app
from fpfl.data.table_schema import NumberColumn
from fpfl.experiments.people import bars as bars_module
from fpfl.experiments.people import measured, prepared, runs
from fpfl.experiments.people.__main__ import main as people_main
from fpfl.experiments.people.bars import bars, by_row, fair_without_privacy, score
from fpfl.experiments.people.report import PARTS
from fpfl.experiments.people.rows import (
    ALPHA,
    BOUNDS,
    CONSTRAINTS,
    EPSILONS,
    FL,
    LOGISTIC,
    OURS,
    PFL,
    REDUCTION,
    TUNED,
    Row,
    Selection,
    all_rows,
    parsed_epsilons,
)
from fpfl.experiments.people.runner import read_results, reproduce_tables
from fpfl.experiments.people.tables import (
    BIRTHPLACES,
    OCCUPATIONS,
    grouped,
    people,
    table_schema,
    tables,
)
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.training.models import mlp

DATA = Path(__file__).parents[3] / "shared" / "data"

TABLES = {table.name: table for table in tables()}


# --- tables -----------------------------------------------------------------------------------


def test_every_table_has_a_declared_schema() -> None:
    assert {table.role for table in TABLES.values()} == {"chosen", "checked"}
    for table in TABLES.values():
        schema = table_schema(table)
        assert schema.source == "declared", table.name
        assert [each.name for each in schema.attributes] == [_column(table.name)], table.name
        assert (schema.label.classes is None) == table.regression
        assert not any(f.given for f in schema.features), "what is measured is not declared"


def _column(name: str) -> str:
    """The attribute as its file calls it."""
    return {"compas": "race", "diabetes": "gender", "credit": "SEX"}.get(
        name, "SEX" if name.startswith("acs") else "sex"
    )


@pytest.mark.parametrize(
    ("name", "K", "share"),
    [("adult-2", 16_280, 0.24), ("adult-10", 3_256, 0.24), ("credit", 21_000, 0.22),
     ("compas", 4_317, 0.46), ("diabetes", 50_063, 0.11), ("acs-AL", 15_517, 0.30)],
)  # fmt: skip
def test_the_tables_at_hand(name: str, K: int, share: float) -> None:
    table = TABLES[name]
    if not (DATA / table.file).is_file():
        pytest.skip(f"there is no {DATA / table.file}")
    split = people(table, DATA)
    assert split.train.population == K
    for part in (split.train, split.test):
        assert float(part.labels.double().mean()) == pytest.approx(share, abs=0.02)
        assert part.schema.feature_ranges is not None


def test_codes_are_grouped_by_the_first_code() -> None:
    occupations = grouped(np.array([10, 440, 500, 4760, 9830]), OCCUPATIONS)
    assert occupations.tolist() == ["MGR", "MGR", "BUS", "SAL", "MIL"]
    assert grouped(np.array([6, 72, 303]), BIRTHPLACES).tolist() == [
        "US", "territories", "Americas",
    ]  # fmt: skip


# --- rows -------------------------------------------------------------------------------------


def test_the_rows_of_a_table() -> None:
    rows = all_rows(TABLES["credit"])
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.algorithm == REDUCTION for row in rows) == len(CONSTRAINTS) * len(BOUNDS)
    assert sum(row.algorithm == OURS for row in rows) == len(CONSTRAINTS) * len(EPSILONS)
    assert [row.epsilon for row in rows if row.algorithm in (FL, PFL)] == list(EPSILONS)
    assert [row.name for row in rows if row.algorithm == TUNED] == ["credit/FPFL-1G tuned/fnr/2"]
    assert {row.seeds for row in rows} == {1, 10}
    assert {row.seeds for row in all_rows(TABLES["acs-IL"])} == {1, 3}
    assert [row.cohort for row in all_rows(TABLES["adult-2"])][-3:] == [200, 200, 200]


def test_rows_are_selected() -> None:
    some = Selection(["compas"], ["odds"], [2.0, None], seeds=2)
    assert {row.constraint for row in some.rows()} == {None, "odds"}
    assert {row.epsilon for row in some.rows()} == {2.0, None}
    assert [seed for row, seed in some.work() if row.algorithm == OURS] == [0, 1, 0, 1]
    assert [seed for row, seed in some.work() if row.algorithm == LOGISTIC] == [0]
    assert [r.name for r in Selection(pattern="credit/pfl/*/8").rows()] == ["credit/PFL/-/8"]
    assert parsed_epsilons("0.5, none") == [0.5, None]
    kept = Selection(["credit"], pattern="!*tuned*").rows()
    assert {row.algorithm for row in kept} == {LOGISTIC, REDUCTION, FL, PFL, OURS}


@pytest.mark.parametrize(
    ("given", "said"),
    [({"tables": ["nobody"]}, "--tables names"), ({"constraints": ["x"]}, "--constraints names"),
     ({"epsilons": [-1.0]}, "--epsilons"), ({"seeds": 0}, "--seeds"),
     ({"pattern": "none/such"}, "no row")],
)  # fmt: skip
def test_a_wrong_selection_says_what_there_is(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Selection(**given).rows()
    with pytest.raises(ValueError, match="expected e"):
        parsed_epsilons("2,many")


# --- all of it, on a made-up table ------------------------------------------------------------


@pytest.fixture
def credit(tmp_path: Path) -> Path:
    """A folder with a made-up credit table: 300 people, whose bills and sex say who will pay."""
    rng = np.random.default_rng(0)
    schema = table_schema(TABLES["credit"])
    n, columns = 300, {}
    for feature in schema.features:
        assert isinstance(feature, NumberColumn)
        low, high = feature.range
        columns[feature.name] = rng.integers(int(low), int(high) + 1, n)
    late = columns["PAY_0"] + 2 * columns["SEX"] + rng.normal(0, 1, n) > 5
    columns["default-payment-next-month"] = late.astype(int)
    folder = tmp_path / "data"
    (folder / "tables").mkdir(parents=True)
    rows = [
        ",".join(columns),
        *(",".join(map(str, r)) for r in zip(*columns.values(), strict=True)),
    ]
    with gzip.open(folder / "tables" / "credit.csv.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    people.cache_clear()
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds, a bound that adapts, and a grid of two."""
    whole = runs.default_job

    def job(*args: Any) -> Any:
        made = whole(*args)
        settings = {**made.settings, "rounds": 5}
        if (privacy := settings["privacy"]) is not None:
            clip = replace(privacy.clip, adapts=AdaptiveBound(0.1))
            settings["privacy"] = replace(privacy, clip=clip)
        return replace(made, settings=settings)

    monkeypatch.setattr(runs, "default_job", job)
    monkeypatch.setattr(runs, "GRID_CLIPS", (1.0, 4.0))
    monkeypatch.setattr(runs, "GRID_RATES", (0.3,))
    monkeypatch.setattr(runs, "GRID_SHARES", (0.2,))


@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_from_its_file_to_its_bars(credit: Path, tmp_path: Path) -> None:
    asked = Selection(["credit"], ["fnr"], [2.0, None], seeds=2)
    said: list[str] = []
    out = tmp_path / "out"
    results = reproduce_tables(asked, credit, out, jobs=1, words=["words"], say=said.append)
    assert [(each["row"], each["seed"]) for each in results] == [
        (row.name, seed) for row, seed in asked.work()
    ]
    for each in results:
        assert {"accuracy", "balanced_accuracy", "rates", "gaps", "base_rate"} <= set(each["test"])
        assert each["K"] == 210
        assert each["role"] == "chosen"
        if each["algorithm"] in (OURS, PFL, FL, TUNED):
            assert each["settings"]["rounds"] == 5
            assert each["settings"]["cohort"] == 100
            assert each["test"]["named"] == (each["test"]["collapsed"] is not None)
        private = each["epsilon"] is not None
        assert (each.get("epsilon_spent") is not None) == private
        if private:
            assert 1.5 < each["epsilon_spent"] <= 2.0
    by_name = {(each["row"], each["seed"]): each for each in results}
    tuned = by_name["credit/FPFL-1G tuned/fnr/2", 0]["settings"]
    assert tuned["clip"] in (1.0, 4.0)
    assert tuned["clip_at_end"] is None
    assert (tuned["learning_rate"], tuned["counts_share"]) == (0.3, 0.2)

    # Seeds matter, and are all that two runs of a row differ in.
    one, two = (copy.deepcopy(by_name["credit/PFL/-/2", seed]) for seed in (0, 1))
    assert one["settings"].pop("clip_at_end") > 0
    assert two["settings"].pop("clip_at_end") > 0
    assert one["settings"] == two["settings"]
    assert one["test"]["auc"] != two["test"]["auc"]

    # What is in the file is not run again; a further seed is.
    kept = read_results(out / "results.json")
    assert kept["results"] == json.loads(json.dumps(results))
    assert kept["about"][0]["command"] == "words"
    said.clear()
    again = reproduce_tables(asked, credit, out, jobs=1, say=said.append)
    assert said == [f"{len(results)} runs, 0 to do"]
    assert again == results
    more = reproduce_tables(
        Selection(pattern="credit/pfl/-/2", seeds=3), credit, out, jobs=1, say=said.append
    )
    assert said[1] == "3 runs, 1 to do"
    assert len(more) == len(results) + 1
    assert len(read_results(out / "results.json")["about"]) == 2

    for name, part in PARTS.items():
        text = part(more, kept["about"])
        assert text.endswith("\n"), name
        assert "nan" not in text, name


@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_prepared_is_trained_as_it_is_here(
    credit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "default_job", runs.default_job)  # the one with five rounds
    asked = Selection(["credit"], ["fnr"], [2.0, None], pattern="*fl*", seeds=2)
    here = reproduce_tables(asked, credit, jobs=1, say=lambda _: None)
    work, out = tmp_path / "work.pickle", tmp_path / "there.json"
    assert prepared.prepare(asked, credit, work, print) == len(here)
    assert people_main([str(work), "--out", str(out)]) == 0
    there = read_results(out)["results"]
    own = ("seconds", "together", "code", "device", "delta")
    for one, other in zip(json.loads(json.dumps(here)), there, strict=True):
        same = {key: value for key, value in one.items() if key not in own}
        if one["algorithm"] == TUNED:  # its grid has a σ of its own
            same = {key: same[key] for key in ("row", "seed", "K", "epsilon_spent")}
        assert same == {key: other[key] for key in same}
    said = read_results(out)["about"][0]["command"]
    assert said.startswith("python -m fpfl.experiments.people")
    (tmp_path / "bad.pickle").write_bytes(b"no pickle")
    assert people_main([str(tmp_path / "bad.pickle"), "--out", str(out)]) == 2


@pytest.mark.usefixtures("short")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_finished_before_a_failure_is_kept(
    credit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Selection(["credit"], pattern="*/logistic*", seeds=1)
    reproduce_tables(asked, credit, tmp_path / "r.json", jobs=1, say=lambda _: None)

    def broken(row: Row, split: Any) -> dict[str, Any]:
        if row.bound == BOUNDS[1]:
            raise ValueError("no solution")
        return whole(row, split)

    whole = runs.PLAIN[REDUCTION]
    monkeypatch.setitem(runs.PLAIN, REDUCTION, broken)
    asked = Selection(["credit"], ["fnr"], pattern="*/reduction/*", seeds=1)
    with pytest.raises(ValueError, match="no solution"):
        reproduce_tables(asked, credit, tmp_path / "r.json", jobs=1, say=lambda _: None)
    kept = read_results(tmp_path / "r.json")["results"]
    assert [each["algorithm"] for each in kept] == [LOGISTIC, REDUCTION]


def test_tables_without_files_are_skipped(credit: Path) -> None:
    said: list[str] = []
    asked = Selection(["credit", "compas"], pattern="*/logistic*")
    results = reproduce_tables(asked, credit, jobs=1, say=said.append)
    assert {each["table"] for each in results} == {"credit"}
    assert said[0] == f"compas is skipped: there is no {credit / 'tables/compas.csv.gz'}"
    with pytest.raises(ValueError, match="none of the tables is in"):
        reproduce_tables(Selection(["compas"]), credit, jobs=1, say=said.append)


def test_the_command(credit: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    words = ["reproduce", "tables", "--data", str(credit), "--tables", "credit", "--out", str(out)]
    words += ["--constraints", "parity", "--rows", "*/logistic*", "--jobs", "1"]
    made = CliRunner().invoke(app, [*words[:-6], "--rows", "*/fl/*", "--seeds", "1", "--prepare",
                                    str(tmp_path / "work.pickle")])  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "1 trainings are in" in made.output
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "| credit | none (FNR gap) |" in found.output
    assert len(read_results(out)["results"]) == 1
    for wrong in (
        ["reproduce", "tables"],
        ["reproduce", "adult-central", "--tables", "credit"],
    ):
        failed = CliRunner().invoke(app, wrong)
        assert isinstance(failed.exception, ValueError)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"results": [{"row": 1}], "about": []}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match="no results file"):
            read_results(tmp_path / "results.json")


# --- what is measured -------------------------------------------------------------------------


def test_probabilities_and_models_are_measured_alike(credit: Path) -> None:
    data = people(TABLES["credit"], credit).train
    model = mlp(data.schema.shape[0], seed=1)
    with torch.no_grad():
        p = (model(data.features).squeeze(-1) > 0).double().numpy()
    one = measured.of_probabilities(p, measured.Cells.of(data))
    other = measured.of_model(model, data, fpfl.fnr_parity("SEX"))
    assert {"FNR", "FPR", "selection rate"} == set(one["rates"])
    for name in ("accuracy", "balanced_accuracy", "base_rate", "predicted"):
        assert one[name] == pytest.approx(other[name])
    for name in CONSTRAINTS:
        assert one["gaps"][name] == pytest.approx(other["gaps"][name])
    for name, groups in one["rates"].items():
        assert groups == pytest.approx(other["rates"][name])


def test_coins_are_counted_by_their_expectation() -> None:
    cells = measured.Cells(np.array([0, 1, 1, 0]), {"a": np.array([1, 1, 0, 0], dtype=bool)})
    found = measured.of_probabilities(np.array([0.2, 0.5, 1.0, 0.0]), cells)
    assert found["accuracy"] == pytest.approx((0.8 + 0.5 + 1 + 1) / 4)
    assert found["rates"]["FNR"] == pytest.approx({"overall": 0.25, "a": 0.5})
    assert found["gaps"]["fnr"] == pytest.approx(0.25)
    assert found["collapsed"] is None
    assert measured.of_probabilities(np.zeros(4), cells)["collapsed"] is not None


def test_a_collapsed_model_is_named(credit: Path) -> None:
    data = people(TABLES["credit"], credit).train
    model = mlp(data.schema.shape[0], seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for constraint in (None, fpfl.fnr_parity("SEX")):
        found = measured.of_model(model, data, constraint)
        assert found["collapsed"] is not None
        assert found["named"]


# --- bars -------------------------------------------------------------------------------------


def result(row: Row, accuracy: float, gap: float, **more: Any) -> dict[str, Any]:
    """A made-up run of a table with a base rate of one half."""
    rates = {
        name: {"overall": 0.3, "g=0": 0.3, "g=1": more.get("weakest", 0.3)}
        for name in ("FNR", "FPR")
    } | {"selection rate": {"overall": 0.3, "g=0": 0.9, "g=1": more.get("lowest", 0.3)}}
    part = {
        "accuracy": accuracy,
        "balanced_accuracy": more.get("balanced", accuracy),
        "base_rate": more.get("base_rate", 0.5),
        "rates": rates,
        "gaps": dict.fromkeys(CONSTRAINTS, gap),
        "collapsed": more.get("collapsed"),
        "named": more.get("named", False),
    }
    return row.as_dict() | {
        "row": row.name, "seed": more.get("seed", 0), "role": TABLES[row.table].role,
        "K": more.get("K", 20_000), "train": part, "test": part, "settings": None, "seconds": 1.0,
    }  # fmt: skip


def bar(results: list[dict[str, Any]], measure: str, role: str = "chosen") -> bars_module.Bar:
    """The only bar that is called like that."""
    (found,) = [b for b in bars(results) if measure in b.measure and b.role == role]
    return found


MODEL = Row("credit", OURS, "fnr", 2.0)
FREE = Row("credit", OURS, "fnr")
REDUCED = Row("credit", REDUCTION, "fnr", bound=ALPHA)


@pytest.mark.parametrize(
    ("accuracy", "held", "aimed"),
    [(0.795, True, True), (0.7949, True, False), (0.790, True, False), (0.7899, False, False)],
)
def test_accuracy_under_the_fair_model(accuracy: float, held: bool, aimed: bool) -> None:
    found = bar([result(MODEL, accuracy, 0.02), result(REDUCED, 0.8, 0.02)], "privacy, K ≥ 15,000")
    assert (found.held, found.aimed) == (held, aimed)
    assert found.cells == pytest.approx({"credit/fnr": 0.8 - accuracy})


def test_tables_are_judged_by_their_size() -> None:
    for K, measure, held in (
        (15_000, "K ≥ 15,000", False),
        (14_999, "K of 4,000 to 15,000", True),
        (4_000, "K of 4,000 to 15,000", True),
        (3_999, "K < 4,000", None),
    ):
        runs_ = [result(MODEL, 0.785, 0.02, K=K), result(REDUCED, 0.8, 0.02, K=K)]
        found = bar(runs_, f"under the fair model without privacy, {measure}")
        assert found.held is held, K
        assert len(found.cells) == 1
        others = [
            b for b in bars(runs_) if "fair model" in b.measure and b.measure != found.measure
        ]
        assert not any(b.cells for b in others)


def test_the_fair_model_has_no_larger_a_gap() -> None:
    tight, wide = replace(REDUCED, bound=0.005), replace(REDUCED, bound=0.04)
    runs_ = [
        result(MODEL, 0.78, 0.02), result(tight, 0.79, 0.005), result(REDUCED, 0.80, 0.02),
        result(wide, 0.82, 0.04), result(FREE, 0.81, 0.03),
    ]  # fmt: skip
    rows = by_row(runs_)
    assert fair_without_privacy(rows, MODEL) == REDUCED
    # The better of ours and the reduction; ours counts where it is as fair, unless it collapsed.
    better = by_row([*runs_[:-1], result(FREE, 0.81, 0.01)])
    assert fair_without_privacy(better, MODEL) == FREE
    collapsed = by_row([*runs_[:-1], result(FREE, 0.81, 0.0, collapsed="it says no")])
    assert fair_without_privacy(collapsed, MODEL) == REDUCED
    reduced = [result(row, 0.8, 0.0, collapsed="it says no") for row in (REDUCED, FREE)]
    assert fair_without_privacy(by_row([runs_[0], *reduced]), MODEL) == REDUCED
    # Where nobody's gap is as small, that with the smallest.
    none = by_row([result(MODEL, 0.78, 0.001), *runs_[1:]])
    assert fair_without_privacy(none, MODEL) == tight
    assert fair_without_privacy(by_row(runs_[:1]), MODEL) is None


@pytest.mark.parametrize(
    ("K", "gap", "held", "aimed"),
    [(15_000, 0.02, True, True), (15_000, 0.025, True, False), (15_000, 0.0251, False, False),
     (14_999, 0.035, True, False), (14_999, 0.0351, False, False)],
)  # fmt: skip
def test_gaps_on_the_training_population(K: int, gap: float, held: bool, aimed: bool) -> None:
    where = "K ≥ 15,000" if K >= 15_000 else "K < 15,000"
    found = bar([result(MODEL, 0.8, gap, K=K)], f"gap on the training population at ε = 2, {where}")
    assert (found.held, found.aimed) == (held, aimed)


def test_a_mean_over_seeds_is_judged() -> None:
    runs_ = [result(MODEL, 0.8, gap, seed=seed) for seed, gap in enumerate((0.0, 0.05))]
    assert bar(runs_, "gap on the training population at ε = 2, K ≥").held
    assert score(runs_) == pytest.approx(0.8)


@pytest.mark.parametrize("base_rate", [0.2499, 0.7501])
def test_balanced_accuracy_counts_for_unbalanced_tables(base_rate: float) -> None:
    runs_ = [result(MODEL, 0.9, 0.0, balanced=0.6, base_rate=base_rate)]
    assert score(runs_) == 0.6
    assert score([result(MODEL, 0.9, 0.0, balanced=0.6, base_rate=0.25)]) == 0.9


@pytest.mark.parametrize(
    ("ours", "pfl", "held", "aimed"),
    [(0.29, 0.3, True, True), (0.31, 0.3, True, False), (0.3101, 0.3, False, False)],
)
def test_the_weakest_group(ours: float, pfl: float, held: bool, aimed: bool) -> None:
    plain = Row("credit", PFL, None, 2.0)
    other = 0.3  # everybody else's rate: the weakest group of error rates has the highest
    runs_ = [
        result(MODEL, 0.8, 0.0, weakest=max(ours, other)),
        result(plain, 0.8, 0.0, weakest=max(pfl, other)),
    ]
    runs_[0]["test"]["rates"]["FNR"]["g=0"] = runs_[1]["test"]["rates"]["FNR"]["g=0"] = 0.0
    runs_[0]["test"]["rates"]["FNR"]["g=1"] = ours
    found = bar(runs_, "the weakest group against PFL's, ε = 2")
    assert (found.held, found.aimed) == (held, aimed)
    # Of selection the weakest has the lowest.
    selected = replace(MODEL, constraint="parity")
    runs_ = [result(selected, 0.8, 0.0, lowest=0.2), result(plain, 0.8, 0.0, lowest=0.25)]
    assert not bar(runs_, "the weakest group against PFL's, ε = 2").held
    assert bar(runs_[::-1][:1], "the weakest group against PFL's, ε = 2").held is None


def test_better_in_four_of_five_cells() -> None:
    names = ("adult-1", "adult-2", "credit", "acs-PA", "acs-NJ-MI-VA")
    runs_ = []
    for number, name in enumerate(names):
        weak = 0.35 if number else 0.405
        runs_ += [
            result(replace(MODEL, table=name), 0.8, 0.0, weakest=weak),
            result(Row(name, PFL, None, 2.0), 0.8, 0.0, weakest=0.4),
        ]
    found = bar(runs_, "the weakest group against PFL's, ε = 2")
    assert (found.held, found.aimed) == (True, True)
    assert "5 of 5 cells hold; better in 80%" in found.measured


def test_defaults_against_tuned_and_without_privacy() -> None:
    tuned = Row("credit", TUNED, "fnr", 2.0)
    for value, held, aimed in ((0.805, True, True), (0.81, True, False), (0.811, False, False)):
        found = bar([result(MODEL, 0.8, 0.0), result(tuned, value, 0.0)], "defaults against tuned")
        assert (found.held, found.aimed) == (held, aimed)
    for value, held, aimed in ((0.8, True, True), (0.805, True, False), (0.8051, False, False)):
        runs_ = [result(FREE, 0.8, 0.031), result(REDUCED, value, 0.02)]
        found = bar(runs_, "without privacy, accuracy under the reduction")
        assert (found.held, found.aimed) == (held, aimed)
        assert not bar(runs_, "without privacy, gap").held


def test_adult_with_small_cohorts() -> None:
    rows = {e: Row("adult-2", OURS, "fnr", e, cohort=200) for e in (2.0, 0.5, 0.1)}
    good = [result(rows[2.0], 0.854, 0.015), result(rows[0.5], 0.850, 0.02)]
    found = bar([*good, result(rows[0.1], 0.843, 0.046)], "ε = 2 and 0.5")
    assert (found.held, found.aimed) == (True, False)
    assert bar([*good, result(rows[0.1], 0.843, 0.046)], "m = 200, ε = 0.1").held is False
    assert bar([*good, result(rows[0.1], 0.846, 0.035)], "m = 200, ε = 0.1").aimed
    assert bar(good[:1], "ε = 2 and 0.5").held is None  # one of two is not both


def test_a_collapsed_model_that_is_not_named_fails_the_bar() -> None:
    good = result(MODEL, 0.5, 0.0, collapsed="it says no", named=True)
    assert bar([good], "collapsed models", "all").held
    silent = result(replace(MODEL, epsilon=8.0), 0.5, 0.0, collapsed="it says no")
    found = bar([good, silent], "collapsed models", "all")
    assert found.held is False
    assert found.measured.startswith("1, of 2 collapsed among 2 runs")


def test_tables_that_are_checked_stand_apart() -> None:
    runs_ = [
        result(replace(MODEL, table="acs-IL"), 0.8, 0.5), result(MODEL, 0.8, 0.0),
    ]  # fmt: skip
    measure = "gap on the training population at ε = 2, K ≥"
    assert bar(runs_, measure).held
    assert not bar(runs_, measure, "checked").held
