"""References, end to end: a run, the same without its constraint, and who is worse off by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.report.card import model_card
from fpfl.report.facts import run_facts
from fpfl.report.page import write_report
from fpfl.report.reading import read_run
from fpfl.runs.folder import OpenRun
from fpfl.training.reference import reference_seed

SCHEMA = """
source = "declared"
user = "id"
samples_per_user = 1.0
[label]
column = "y"
classes = ["no", "yes"]
positive = "yes"
[attributes]
sex = ["F", "M"]
[features]
a = { range = [-3, 3] }
b = { range = [-3, 3] }
"""
TABLE = ("--groups", "sex", "--constraint", "fnr_parity", "--rounds", 6, "--test", 0.2)
PRIVATE = ("--epsilon", 2, "--ledger", "people.jsonl")
USERS = 400


@pytest.fixture
def table(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a small table, its schema and a budget for two runs."""
    rng = np.random.default_rng(0)
    rows = ["id,y,sex,a,b"]
    for i in range(USERS):
        sex, a, b, e = rng.integers(2), *rng.normal(size=3)
        label = "yes" if a + 0.5 * b - 0.8 * sex + 0.4 * e > 0 else "no"
        rows.append(f"{i},{label},{'FM'[sex]},{a:.3f},{b:.3f}")
    (tmp_path / "people.csv").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "people.schema.toml").write_text(SCHEMA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "people.csv"


def budget(fpfl, epsilon: float = 20.0) -> None:
    assert (
        fpfl("budget", "create", "people.jsonl", "--population", 320, "--epsilon", epsilon)[0] == 0
    )


def test_both_runs_are_charged_evaluated_and_compared(fpfl, table: Path) -> None:
    budget(fpfl)
    code, out, err = fpfl("train", "--data", table, *TABLE, *PRIVATE, "--reference", "--out", "run")
    assert code == 0, err
    assert "The reference: the same without the constraint." in out
    assert "not measured" not in out
    assert "together cost ε = 4.000 at δ = 0.000625 at most (2.000 + 2.000, added up" in out
    run, reference = OpenRun(Path("run")), OpenRun(Path("run/reference"))
    names = {run.manifest.run, reference.manifest.run}
    assert len(names) == 2
    with PopulationLedger.open(Path("people.jsonl"), write=False) as ledger:
        charges = ledger.charges()
        assert set(ledger.as_dict()["runs"]) == names
    # Two measurements before the first rounds, of the same kind, and six rounds of each.
    assert sum(charges.values()) == 2 * (6 + 1)
    assert reference.settings["constraint"] is None
    assert run.settings["constraint"] == "FNR parity"
    for name in ("cohort", "rounds", "learning_rate", "normaliser", "population"):
        assert run.settings[name] == reference.settings[name]
    assert run.settings["clip"]["bound"] == reference.settings["clip"]["bound"]
    assert run.settings["privacy"]["epsilon"] == reference.settings["privacy"]["epsilon"] == 2.0

    found = json.loads(Path("run/against-test.json").read_text(encoding="utf-8"))
    assert {c["group"] for c in found["changes"]} == {"overall", "sex=F", "sex=M"}
    mine = json.loads(Path("run/evaluation-test.json").read_text(encoding="utf-8"))
    theirs = json.loads(Path("run/reference/evaluation-test.json").read_text(encoding="utf-8"))
    for change in found["changes"][1:]:
        for evaluation, value in ((mine, change["value"]), (theirs, change["reference"])):
            rows = evaluation["gaps"]["constraint"]["differences"]
            own = next(row["value"] for row in rows if row["group"] == change["group"])
            assert value == pytest.approx(own)
        assert change["low"] <= change["difference"] <= change["high"]

    code, out, err = fpfl("evaluate", "run", "--epsilon", 1, "--bound", 1)
    assert code == 0, err
    assert "Two models were evaluated on these users" in out
    assert "together for ε = 1.0000" in out
    spent = [json.loads((Path(p) / "evaluation-private.json").read_text(encoding="utf-8"))
             for p in ("run", "run/reference")]  # fmt: skip
    assert spent[0]["epsilon"] == spent[1]["epsilon"] < 1.0
    noise, delta = spent[0]["mechanism"]["noise_multiplier"], spent[0]["delta"]
    assert gaussian_epsilon(noise, 2, delta) == pytest.approx(1.0, rel=1e-6)
    for each in (run, reference):
        assert len(OpenRun(each.path).ledger.evaluations) == 1
    code, _, err = fpfl("evaluate", "run", "--epsilon", 1, "--bound", 1)
    assert code == 2
    assert "evaluated privately already" in err

    record = read_run("run")
    assert set(record.against) == {"private", "test"}
    page = write_report("run", "report.html").read_text(encoding="utf-8")
    for text in (page, model_card("run")):
        assert "Against training without the constraint (Held-out users" in text
        assert "Two runs compose" in text
        assert "not measured" not in text


def test_without_a_reference_it_is_not_measured(fpfl, table: Path) -> None:
    code, out, err = fpfl("train", "--data", table, *TABLE, "--out", "run")
    assert code == 0, err
    assert "Against training without the constraint: not measured." in out
    code, out, err = fpfl("evaluate", "run", "--epsilon", 1, "--bound", 1)
    assert code == 0, err
    assert "Against training without the constraint: not measured." in out
    page = write_report("run", "report.html").read_text(encoding="utf-8")
    for text in (page, model_card("run")):
        assert "Against training without the constraint: not measured." in text
    assert not Path("run/reference").exists()


def test_a_reference_that_was_cut_short_is_not_compared(fpfl, table: Path) -> None:
    """The budget has room for one run and a little more."""
    budget(fpfl, 3.0)
    asked = ("--data", table, *TABLE, *PRIVATE, "--reference", "--out", "run")
    code, _, err = fpfl("train", *asked)
    assert code == 1
    assert "the reference: the population's budget is spent" in err
    assert OpenRun(Path("run")).ledger.finished
    assert "not measured" in model_card("run")
    assert "The reference ended long before" in model_card("run")
    code, out, err = fpfl("evaluate", "run", "--epsilon", 1, "--bound", 1)
    assert code == 0
    assert "not measured" in out
    assert "The reference ended long before" in err


def test_levelling_down_is_in_the_verdict(fpfl, table: Path) -> None:
    assert fpfl("train", "--data", table, *TABLE, "--reference", "--out", "run")[0] == 0
    file = Path("run/against-test.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    for change in content["changes"]:
        change |= {"difference": 0.2, "low": 0.1, "high": 0.3}
    file.write_text(json.dumps(content), encoding="utf-8")
    assert "LEVELLED DOWN" in read_run("run").evaluations["test"].verdict_in_words
    assert run_facts("run")["verdict_in_words"].count("LEVELLED DOWN") == 1
    page = write_report("run", "report.html").read_text(encoding="utf-8")
    assert "LEVELLED DOWN" in page
    content["changes"][1]["low"] = "much"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"against-test.json is not what a run writes"):
        read_run("run")


def test_a_comparison_of_another_model_is_left_out(fpfl, table: Path) -> None:
    assert fpfl("train", "--data", table, *TABLE, "--reference", "--out", "run")[0] == 0
    assert set(read_run("run").against) == {"test", "training"}
    code, _, err = fpfl("resume", "run", "--rounds", 8)
    assert code == 0, err
    # Both have gone on, and were compared again.
    assert [OpenRun(Path(p)).settings["rounds"] for p in ("run", "run/reference")] == [8, 8]
    assert set(read_run("run").against) == {"test", "training"}
    content = json.loads(Path("run/against-test.json").read_text(encoding="utf-8"))
    Path("run/against-test.json").write_text(json.dumps(content | {"model": "0"}), encoding="utf-8")
    record = read_run("run")
    assert set(record.against) == {"training"}
    assert any("against-test.json was left out" in note for note in record.notes)


def test_resuming_keeps_the_reference(fpfl, table: Path, monkeypatch) -> None:
    """Cut off when the run has ended and its reference has not begun."""
    from fpfl.cli import train as module

    one = module._train_one
    calls = []

    def dies(settings, origin, *rest):
        calls.append(origin)
        if origin.get("unconstrained"):
            raise ValueError("cut off")
        return one(settings, origin, *rest)

    budget(fpfl)
    monkeypatch.setattr(module, "_train_one", dies)
    asked = ("--data", table, *TABLE, *PRIVATE, "--reference", "--out", "run")
    assert fpfl("train", *asked)[0] == 2
    assert len(calls) == 2
    assert OpenRun(Path("run")).ledger.finished
    assert not Path("run/reference").exists()
    assert read_run("run").reference is None
    assert "not measured" in model_card("run")
    monkeypatch.setattr(module, "_train_one", one)
    assert fpfl("withdraw", "run", 3)[0] == 0
    code, out, err = fpfl("resume", "run")
    assert code == 0, err
    assert "Against training without the constraint (80 users" in out
    reference = OpenRun(Path("run/reference"))
    assert reference.ledger.finished
    # Who has withdrawn from the run is not drawn for its reference.
    assert any(r["kind"] == "withdrawal" for r in reference.ledger.chain.records)
    assert fpfl("withdraw", "run", 4)[0] == 0
    assert Path("run/reference/withdrawals.txt").read_text(encoding="utf-8") == "3\n4\n"
    code, out, _ = fpfl("resume", "run")
    assert code == 0
    assert "nothing is left to do" in out


CONFIG = """
[data]
table = "people.csv"
schema_file = "people.schema.toml"
held_out = 0.2
[training]
cohort = 100
rounds = 4
seed = 5
noise_seed = 6
{more}
[constraint]
kind = "demographic_parity"
[privacy]
epsilon = 3.0
"""


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_config_and_its_seeds(fpfl, table: Path, by_flag: bool) -> None:
    more = "" if by_flag else "reference = true"
    Path("fair.toml").write_text(CONFIG.format(more=more), encoding="utf-8")
    flags = ["--reference"] if by_flag else []
    code, out, err = fpfl("train", "fair.toml", "--out", "run", *flags)
    assert code == 0, err
    # A selection rate is neither good nor bad: accuracy says who is better off.
    found = json.loads(Path("run/against-test.json").read_text(encoding="utf-8"))
    assert {c["rate"] for c in found["changes"]} == {"selection rate", "accuracy"}
    assert {c["good"] for c in found["changes"]} == {"neither", "more"}
    # Neither cohorts nor noise are the run's: the same could be told apart, or taken off.
    rows = [json.loads((Path(p) / "history.json").read_text()) for p in ("run", "run/reference")]
    assert rows[0][0]["gradient_norm"] != rows[1][0]["gradient_norm"]
    assert len({5, 6, reference_seed(5), reference_seed(6)}) == 4
    # The reference itself goes on, too.
    code, out, _ = fpfl("resume", "run/reference")
    assert code == 0
    assert "nothing is left to do" in out


def test_there_must_be_a_constraint(fpfl, table: Path) -> None:
    code, _, err = fpfl("train", "--data", table, "--rounds", 2, "--reference", "--out", "run")
    assert code == 2
    assert "there is no constraint" in err
    text = CONFIG.format(more="reference = true").replace(
        '[constraint]\nkind = "demographic_parity"', ""
    )
    Path("plain.toml").write_text(text, encoding="utf-8")
    code, _, err = fpfl("train", "plain.toml", "--out", "run")
    assert code == 2
    assert "there is no constraint" in err
    text = CONFIG.format(more="reference = true") + "[sweep.grid]\ntraining.cohort = [50, 60]\n"
    Path("sweep.toml").write_text(text, encoding="utf-8")
    code, _, err = fpfl("sweep", "sweep.toml", "--out", "swept")
    assert code == 2
    assert "training.reference = true is for one training" in err
