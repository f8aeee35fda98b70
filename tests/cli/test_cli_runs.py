"""The commands about runs, as a user would type them one after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_population
from killing import counting

from fpfl.config import load_config, make_model
from fpfl.fairness.constraints import fnr_parity
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism
from fpfl.report.reading import read_run
from fpfl.runs.ledger import RunLedger
from fpfl.training.defaults import ROUNDS, parameters_of, suggest

CONFIG = """
version = 1
[data]
name = "adult"
[training]
cohort = 200
rounds = 4
selection = "last"
[constraint]
kind = "fnr_parity"
by = ["sex"]
[privacy]
noise_multiplier = 2.0
clip = { bound = 2.0, clipped_share = 0.05 }
budget = 2.0
ledger = "people.jsonl"
"""


def test_a_run_from_its_budget_to_its_evaluation(fpfl, tmp_path: Path) -> None:
    people, config, run = tmp_path / "people.jsonl", tmp_path / "fair.toml", tmp_path / "run"
    config.write_text(CONFIG, encoding="utf-8")
    code, out, _ = fpfl("budget", "create", people, "--population", 16280, "--epsilon", 2,
                        "--cohort", 200, "--noise-multiplier", 2, "--name", "clinic")  # fmt: skip
    assert code == 0
    assert "'clinic' (16,280 users): ε = 2" in out
    code, _, err = fpfl("budget", "create", people, "--population", 16280, "--epsilon", 3)
    assert code == 2
    assert "is there already" in err
    assert fpfl("withdraw", people, 5)[0] == 0

    code, out, err = fpfl("train", config, "--out", run)
    assert code == 0, err
    assert "population's ledger" in out
    assert "simulation only" in out  # the test set
    history = json.loads((run / "history.json").read_text())
    assert all("clipped" in row for row in history)
    code, out, _ = fpfl("resume", run)
    assert code == 0
    assert "finished" in out
    code, out, err = fpfl("resume", run, "--rounds", 6)
    assert code == 0, err
    assert "privacy filter" in out
    assert len(json.loads((run / "history.json").read_text())) == 6
    code, out, _ = fpfl("budget", "show", people, "--json")
    shown = json.loads(out)
    assert (shown["charges"], shown["withdrawn"]) == (6, 1)
    assert sum(r["rounds"] for r in shown["runs"].values()) == 6

    code, out, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 0, err
    assert "held-out users, evaluated under ε = 1.0000" in out
    assert "FNR parity" in out
    # Whatever is shown was released, for 16,281 people: the model's scores, too.
    assert "AUC 0." in out
    assert "10% of the budget" in out
    saved = json.loads((run / "evaluation-private.json").read_text())
    assert saved["metrics"]["auc"]["low"] < saved["metrics"]["auc"]["high"]
    assert (saved["collapsed"] is not None) == ("COLLAPSED" in out)
    assert saved["epsilon"] == pytest.approx(1.0)
    code, _, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 2
    assert "evaluated privately already" in err

    # Another model: nothing of the one before is told of it, and it may be judged itself.
    assert read_run(run).evaluations.keys() == {"private", "test"}
    code, _, err = fpfl("resume", run, "--rounds", 7)
    assert code == 0, err
    record = read_run(run)
    assert record.evaluations.keys() == {"test"}
    assert any("evaluation-private.json" in note for note in record.notes)
    code, out, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 0, err
    both = f"they cost ε = 2.000 at δ = {2 * saved['delta']:g} together"
    assert "evaluation number 2 of this run" in out
    assert both in out
    record = read_run(run)
    assert record.evaluations.keys() == {"private", "test"}
    assert both in record.evaluations["private"].statement[-1]
    code, _, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 2
    assert "evaluated privately already" in err
    code, _, err = fpfl("withdraw", run, 16280)
    assert code == 2
    assert "indices run from 0 to 16279" in err


def test_fpfl_resume_opens_its_folder_once(fpfl, tmp_path: Path, monkeypatch) -> None:
    config, run, people = tmp_path / "fair.toml", tmp_path / "run", tmp_path / "people.jsonl"
    config.write_text(CONFIG, encoding="utf-8")
    assert fpfl("budget", "create", people, "--population", 16280, "--epsilon", 2)[0] == 0
    assert fpfl("train", config, "--out", run)[0] == 0
    size = (run / "ledger.jsonl").stat().st_size
    read, verified = counting(monkeypatch, run)
    assert fpfl("resume", run, "--rounds", 6)[0] == 0
    assert sorted(read) == ["config.toml", "fingerprints.json", "origin.json", "run.json"]
    assert verified == [size]


def test_one_model_is_judged_once_however_often_its_run_ends(tmp_path: Path) -> None:
    asked = Mechanism("all", 100, 100, 1.0, "zero-out"), 1.0, 1e-5
    with RunLedger.create(
        tmp_path / "ledger.jsonl", run="a", terms=None, simulation=False
    ) as ledger:
        ledger.finish(4, None)
        ledger.evaluation(*asked, "one")
        with pytest.raises(BudgetExhaustedError, match="privately already"):
            ledger.evaluation(*asked, "two")  # not resumed: the file was changed
        ledger.finish(4, None)
        with pytest.raises(BudgetExhaustedError, match="the same model since"):
            ledger.evaluation(*asked, "one")
        ledger.evaluation(*asked, "two")
    with RunLedger.of_finished(tmp_path / "ledger.jsonl") as ledger:
        assert [record["model"] for record in ledger.evaluations] == ["one", "two"]
        with pytest.raises(BudgetExhaustedError):
            ledger.evaluation(*asked, "two")


def test_a_config_of_a_newer_version_is_refused(fpfl, tmp_path: Path) -> None:
    config = tmp_path / "newer.toml"
    config.write_text(CONFIG.replace("version = 1", "version = 2\nfuture = true"))
    code, _, err = fpfl("train", config, "--out", tmp_path / "run")
    assert code == 2
    assert "newer fpfl" in err
    assert "upgrade" in err
    assert not (tmp_path / "run").exists()


def test_audit_prints_a_table_and_fails_on_a_refuted_claim(
    fpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--convention", "replace-one", "--canaries", 20, "--runs", 8, "--rounds", 2)
    monkeypatch.setattr("fpfl.audit.table.CHECKS", ["released numbers on the grid"])
    code, out, err = fpfl("audit", *few, "--out", tmp_path / "audit.json")
    assert code == 0, err
    assert "claimed ε" in out
    assert json.loads((tmp_path / "audit.json").read_text())["audits"]
    for refuted in (
        "fpfl.audit.audits.AuditResult.caught",
        "fpfl.audit.checks.CheckResult.failed",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(refuted, True)
            assert fpfl("audit", *few)[0] == 1


# --- one gradient for each user -----------------------------------------------------------------

OWN = """
[data]
train = "people.npz"
test = "others.npz"
[data.schema]
attributes = { sex = ["Female", "Male"] }
samples_per_user = 3.0
population = 300
[training]
cohort = 60
rounds = 6
checkpoint_every = 4
[constraint]
kind = "fnr_parity"
by = ["sex"]
[method]
kind = "one-gradient"
[privacy]
noise_multiplier = 2.0
clip = { bound = 3.0, counts = 1.0 }
budget = 20.0
"""
SEEDS = "rounds = 6\nseed = 1\nnoise_seed = 2"


@pytest.fixture
def own(tmp_path: Path):
    """Write a config, changed here and there, beside the files that it names."""
    for number, name in enumerate(("people", "others")):
        data = make_population(users=300, seed=number)
        users = np.repeat(np.arange(300), data.sizes().numpy())
        np.savez(
            tmp_path / f"{name}.npz",
            features=data.features.numpy(),
            labels=data.labels.numpy(),
            attributes=data.attributes.numpy(),
            users=users,
        )

    def write(*changes: tuple[str, str], name: str = "own.toml") -> Path:
        text = OWN
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture
def one_thread():
    """As many as the process beside this one has: sums of floats depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def used(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())["settings"]


def test_one_gradient_from_training_to_evaluation(fpfl, own, tmp_path: Path) -> None:
    """Without a seed: more rounds after the end, under the budget, and held-out users."""
    config, run = own(("[method]", "[method]\nrate = 0.2\nmemory = 0.8")), tmp_path / "run"
    code, out, err = fpfl("train", config, "--out", run)
    assert code == 0, err
    assert "average of the last 3 iterates" in out  # the method's own rule
    assert "round 6 of 6" in err
    method = used(run)["method"]
    assert (method["kind"], method["rate"], method["memory"]) == ("OneGradient", 0.2, 0.8)
    assert used(run)["layout"]["form"] == "one-gradient"
    code, out, err = fpfl("resume", run, "--rounds", 9)
    assert code == 0, err
    assert "privacy filter" in out
    history = json.loads((run / "history.json").read_text())
    assert [row["round"] for row in history] == list(range(1, 10))
    assert all(row["multipliers"]["FNR"]["sex=Male"] is not None for row in history)
    code, out, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 0, err
    assert "FNR parity" in out


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            [("rounds = 6", f"{SEEDS}\nlocal_steps = 3\nlocal_learning_rate = 0.1")],
            id="local-steps",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [
                ("rounds = 6", f"{SEEDS}\nsuggested = true"),
                ("clip = { bound = 3.0, counts = 1.0 }\n", ""),
                ('[method]\nkind = "one-gradient"\n', ""),
            ],
            id="suggested",
        ),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(fpfl, own, one_thread, tmp_path: Path, changes) -> None:
    """Seeded, killed in a process of its own, with averages of counts in the checkpoint."""
    config = own(*changes, ("rounds = 6", "rounds = 120"), ("every = 4", "every = 20"))
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with subprocess.Popen(
        [sys.executable, "-m", "fpfl.cli", "train", str(config), "--out", str(cut)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "round 30 of 120" in line:
                running.kill()
                break
    assert not (cut / "result.json").exists()
    for words in (("resume", cut), ("train", config, "--out", whole)):
        code, _, err = fpfl(*words)
        assert code == 0, err
    for name in ("model.safetensors", "history.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    records = [json.loads(line) for line in (cut / "ledger.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in records].count("resume") == 1


@pytest.mark.parametrize("begun", ["mmdm", "one-gradient"])
def test_a_run_does_not_go_on_with_another_method(fpfl, own, tmp_path: Path, begun: str) -> None:
    kinds = {"mmdm": own(("one-gradient", "mmdm"), name="a.toml"), "one-gradient": own()}
    run = tmp_path / "run"
    assert fpfl("train", kinds.pop(begun), "--out", run)[0] == 0
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (other,) = kinds.values()
    code, _, err = fpfl("resume", run, "--config", other, "--rounds", 9)
    assert code == 2
    (line,) = [line for line in err.splitlines() if not line.startswith("warning")]
    assert "releases other totals" in line
    assert "Resume it with the constraint, the method, the counts" in line
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_bound_that_adapts_is_said_in_a_config(fpfl, own, tmp_path: Path) -> None:
    clip = "clip = { bound = 3.0, counts = 1.0 }\n"
    section = "[privacy.clip]\nbound = 0.5\ncounts = 1.0\n[privacy.clip.adapts]\ntarget = 0.2\n"
    config = own((clip, ""), name="adapts.toml")
    text = config.read_text(encoding="utf-8") + section
    config.write_text(text + "rate = 1.0\nreference = 2.0\n", encoding="utf-8")
    run = tmp_path / "run"
    code, out, err = fpfl("train", config, "--out", run)
    assert code == 0, err
    assert "The bound of the first block adapts" in out
    history = json.loads((run / "history.json").read_text())
    assert history[0]["clip_bound"] == 0.5
    assert len({row["clip_bound"] for row in history}) > 1
    adapts = used(run)["clip"]["adapts"]
    assert adapts == {"target": 0.2, "rate": 1.0, "share": 0.01, "least": None, "most": None,
                      "ratio": 1.189207115002721, "reference": 2.0}  # fmt: skip
    assert read_run(run).settings["clip"]["adapts"]["target"] == 0.2
    for wrong, said in (
        ("target = 1.5\n", "target is 1.5; it must be between 0 and 1"),
        ("target = 0.2\nleast = 1.0\n", "outside [1, 512]"),
        ("target = 0.2\nraet = 1.0\n", "raet"),
        ("rate = 0.2\n", "target"),
    ):
        config.write_text(text.replace("target = 0.2\n", wrong), encoding="utf-8")
        code, _, err = fpfl("train", config, "--out", tmp_path / "wrong")
        assert code == 2
        assert said in err


def test_a_seeded_run_goes_on_with_its_own_method_alone(fpfl, own, tmp_path: Path) -> None:
    seeded = ("rounds = 6", SEEDS)
    config, other = own(seeded), own(seeded, ("one-gradient", "mmdm"), name="other.toml")
    assert fpfl("train", config, "--out", tmp_path / "run")[0] == 0
    code, _, err = fpfl("resume", tmp_path / "run", "--config", other)
    assert code == 2
    assert "begun with other settings" in err


def test_suggested_settings(fpfl, own, tmp_path: Path) -> None:
    """What is left out is filled in by the rules; what is given holds, and a resumption keeps η."""
    clip = "clip = { bound = 3.0, counts = 1.0 }\n"
    bare = (
        ("rounds = 6\n", "rounds = 6\nsuggested = true\n"),
        ('[method]\nkind = "one-gradient"\n', ""),
    )
    run = tmp_path / "run"
    config = own(*bare, (clip, ""))
    code, out, err = fpfl("train", config, "--out", run)
    assert code == 0, err
    schema = make_population().schema
    public = {"population": 300, "cohort": 60, "noise_multiplier": 2.0}
    public["parameters"] = parameters_of(make_model(load_config(config), schema))
    found = suggest(schema, fnr_parity("sex"), rounds=6, **public)
    settings = used(run)
    assert settings["learning_rate"] == found.learning_rate
    suggested = asdict(found.privacy.clipping)
    for name, value in suggested.items():
        assert settings["clip"].get(name) == value  # what is not used is not written down
    assert settings["method"]["patience"] == found.method.patience == 2
    assert settings["method"]["kind"] == "OneGradient"
    assert re.search(r"Settings used: rounds = 6, learning_rate = [0-9.]+, clip = \{ bound", out)
    assert fpfl("resume", run, "--rounds", 400)[0] in (0, 1)  # 1: its budget is spent on the way
    assert used(run)["rounds"] == 400
    assert used(run)["learning_rate"] == found.learning_rate
    assert used(run)["clip"] == settings["clip"]
    assert used(run)["method"] == settings["method"]
    again = suggest(schema, fnr_parity("sex"), rounds=400, **public)
    assert asdict(again.privacy.clipping) != suggested  # by the rule it would be another one
    assert again.method.patience == 80

    given = own(*bare, ("suggested = true", 'suggested = true\noptimizer = "adam"\n'
                "learning_rate = 0.01\nsamples_per_user = 1"), (clip, ""))  # fmt: skip
    code, out, err = fpfl("train", given, "--out", tmp_path / "given")
    assert code == 0, err
    settings = used(tmp_path / "given")
    assert settings["optimizer"]["lr"] == 0.01
    assert found.privacy.clipping.bound == 4.5
    assert settings["clip"]["bound"] == 3.0  # of one sample: as if there were two
    assert "learning_rate" not in out

    unsaid = own(*bare, (clip, ""), ("samples_per_user = 3.0\n", ""))
    code, _, err = fpfl("train", unsaid, "--out", tmp_path / "unsaid")
    assert code == 2
    assert "declare samples_per_user, or give privacy.clip" in err
    assert ROUNDS == 1000  # as docs/config.md says
