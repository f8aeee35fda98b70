"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CONFIG = """
[data]
name = "adult"
mean_samples = 2

[training]
cohort = 200
rounds = 4
seed = 1
noise_seed = 1

[constraint]
kind = "fnr_parity"
by = ["sex"]

[privacy]
noise_multiplier = 1.0
clip = 2.0
"""


def fpfl(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fpfl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_privacy_gives_the_known_figures() -> None:
    """The issue's line: 1.723 with honest 5.19, twice that noise, 1.006; all within 1%."""
    out = fpfl("privacy", "--population", "16280", "--cohort", "200", "--rounds", "1000",
               "--epsilon", "2", "--delta", "5e-5", "--json")  # fmt: skip
    assert out.returncode == 0, out.stderr
    answers = {a["convention"]: a for a in json.loads(out.stdout)}
    paper, replace, poisson = (answers[c] for c in ("paper", "replace-one", "poisson"))
    assert paper["noise_multiplier"] == pytest.approx(1.723, rel=0.01)
    assert paper["epsilon_honest"] == pytest.approx(5.19, rel=0.01)
    assert replace["noise_multiplier"] == pytest.approx(2 * 1.723, rel=0.01)
    assert poisson["noise_multiplier"] == pytest.approx(1.006, rel=0.01)
    for answer in answers.values():
        assert {"convention", "noise_multiplier", "sensitivity", "epsilon", "epsilon_honest",
                "epsilon_server", "delta"} <= set(answer)  # fmt: skip
        assert answer["epsilon"] == pytest.approx(2.0, rel=0.01)
        assert answer["epsilon_server"] > answer["epsilon_honest"]
    assert "δ" in out.stderr or "delta" in out.stderr  # 5e-5 is above 1/(10 K): a warning


def test_train_saves_a_run(tmp_path: Path) -> None:
    config = tmp_path / "fair.toml"
    config.write_text(CONFIG, encoding="utf-8")
    out = fpfl("train", str(config), "--out", str(tmp_path / "run"))
    assert out.returncode == 0, out.stderr
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.safetensors", "history.json", "run.json", "privacy.txt", "config.toml",
            "evaluation-test.json"} <= files  # fmt: skip
    assert "simulation: no guarantee against anyone who has the seed" in out.stdout
    again = fpfl("train", str(config), "--out", str(tmp_path / "run"))
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_train_on_a_file_of_ones_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 200
    np.savez(
        tmp_path / "people.npz",
        features=rng.normal(size=(n, 3)),
        labels=rng.integers(0, 3, n),
        attributes=rng.integers(-1, 2, (n, 1)),
        users=rng.integers(0, 50, n),
    )
    (tmp_path / "own.toml").write_text(
        """
[data]
train = "people.npz"
[data.schema]
classes = 3
attributes = { region = ["north", "south"] }
unknown = ["region"]
[training]
cohort = 20
rounds = 3
[constraint]
kind = "accuracy_parity"
""",
        encoding="utf-8",
    )
    out = fpfl("train", str(tmp_path / "own.toml"), "--out", str(tmp_path / "run"))
    assert out.returncode == 0, out.stderr
    assert "no privacy guarantee" in out.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds = 4", "rounds = 4\nround = 5"), "training.round: there is no such key"),
        (("cohort = 200", "cohort = 20000"), "between 1 and the population 16280"),
        (("cohort = 200", 'cohort = "many"'), "training.cohort"),
        (('kind = "fnr_parity"', 'kind = "predictive_parity"'), "cannot be enforced"),
        (('kind = "fnr_parity"', 'kind = "justice"'), "expected one of"),
        (('by = ["sex"]', 'by = ["age"]'), "no attribute 'age'"),
        (("noise_multiplier = 1.0", "epsilon = -2"), "epsilon"),
        (("noise_multiplier = 1.0", "noise_multiplier = 1.0\ndelta = 0.1"), "δ|delta"),
        (("noise_multiplier = 1.0", ""), "exactly one"),
        (('name = "adult"', 'train = "missing.npz"'), "schema"),
        (("[data]", "[data"), "not a TOML file"),
    ],
)
def test_bad_configs_end_with_one_line(tmp_path: Path, change, message) -> None:
    assert change[0] in CONFIG
    config = tmp_path / "bad.toml"
    config.write_text(CONFIG.replace(*change), encoding="utf-8")
    out = fpfl("train", str(config), "--out", str(tmp_path / "run"))
    assert out.returncode == 2, out.stdout
    lines = [line for line in out.stderr.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert __import__("re").search(message, lines[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["privacy", "--population", "10", "--cohort", "20", "--rounds", "1", "--epsilon", "1"],
        ["privacy", "--population", "10", "--cohort", "2", "--rounds", "1"],
        ["privacy", "--population", "ten"],
        ["train", "nowhere.toml", "--out", "never"],
        ["nonsense"],
        ["reproduce", "nonsense"],
    ],
)
def test_bad_arguments_end_with_one_line(arguments: list[str], tmp_path: Path) -> None:
    out = fpfl(*arguments, cwd=tmp_path)
    assert out.returncode == 2
    assert len(out.stderr.strip().splitlines()) == 1
    assert "Traceback" not in out.stderr
