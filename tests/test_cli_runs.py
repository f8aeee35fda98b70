"""The commands about runs, as a user would type them one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fpfl import cli

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

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


@pytest.fixture
def fpfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process; its exit code, and what it wrote."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


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
    assert "held-out users, evaluated once under ε = 1.0000" in out
    assert "FNR parity" in out
    saved = json.loads((run / "evaluation-private.json").read_text())
    assert saved["epsilon"] == pytest.approx(1.0)
    code, _, err = fpfl("evaluate", run, "--epsilon", 1, "--bound", 1)
    assert code == 2
    assert "evaluated privately already" in err
    code, _, err = fpfl("withdraw", run, 16280)
    assert code == 2
    assert "indices run from 0 to 16279" in err


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
    code, out, err = fpfl("audit", *few, "--out", tmp_path / "audit.json")
    assert code == 0, err
    assert "claimed ε" in out
    assert json.loads((tmp_path / "audit.json").read_text())["audits"]
    monkeypatch.setattr("fpfl.audit.auditing.AuditResult.caught", True)
    assert fpfl("audit", *few)[0] == 1
