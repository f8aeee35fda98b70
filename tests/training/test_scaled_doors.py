"""Every door measures: the command line, configs, estimators, several processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from test_scaled_inputs import SCHEMA, rows

from fpfl.data import AttributeColumn
from fpfl.data.federated import FederatedDataset
from fpfl.privacy.budget import PopulationLedger
from fpfl.report.reading import read_run
from fpfl.runs.folder import OpenRun

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:DP noise dominates")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "people.csv").write_text(rows())
    (tmp_path / "people.schema.toml").write_text(SCHEMA.toml())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "people.csv"


def test_the_command_line_measures_and_says_so(fpfl: Command, table: Path) -> None:
    words = ("train", "--data", "people.csv", "--epsilon", "4", "--rounds", "3", "--seed", "1")
    code, out, err = fpfl(*words, "--out", "measured")
    assert code == 0, err
    assert "Measured once, privately, within ε, to scale them" in out
    assert "Inputs: 3 columns measured with privacy (age, score, job)." in out
    assert "measured once, to scale them" in out
    assert "measured with privacy" in str(read_run(Path("measured")).inputs)
    code, out, err = fpfl(*words, "--no-measure", "--out", "mapped")
    assert code == 0, err
    assert "measured once" not in out
    assert tomllib.loads(Path("mapped/config.toml").read_text())["data"]["measure"] is False
    assert OpenRun(Path("mapped")).ledger.scaling is None
    code, _, err = fpfl("train", "mapped/config.toml", "--no-measure", "--out", "x")
    assert code != 0
    assert "--no-measure without --data" in err


def test_what_is_made_of_a_run_scales_itself(fpfl: Command, table: Path) -> None:
    """Evaluations, exported files and the card are of the model that takes the table's rows."""
    import torch

    grouped = replace(SCHEMA, attributes=(AttributeColumn("sex", ("f", "m")),))
    Path("people.schema.toml").write_text(grouped.toml())
    words = ("train", "--data", "people.csv", "--groups", "sex", "--rounds", "30", "--seed", "1")
    code, _, err = fpfl(*words, "--out", "run")
    assert code == 0, err
    state = load_file("run/model.safetensors")
    assert "scaling.centre" in state
    code, _, err = fpfl("evaluate", "run", "--data", "people.csv", "--epsilon", "20")
    assert code == 0, err
    released = json.loads(Path("run/evaluation-private.json").read_text())
    people = fpfl_read()
    exact = json.loads(Path("run/evaluation-training.json").read_text())
    assert released["score"] == "accuracy"
    code, _, err = fpfl("export", "run", "--format", "torch", "--out", "exported")
    assert code == 0, err
    model = torch.export.load("exported/model.pt2").module()
    _, predicted = model(people.features)
    assert exact["accuracy"] == pytest.approx(
        float((predicted == people.labels).double().mean()), abs=1e-6
    )
    code, _, err = fpfl("export", "run", "--format", "card", "--out", "exported")
    assert code == 0, err
    card = Path("exported/MODEL_CARD.md").read_text()
    assert "3 columns computed from the training users (no privacy)" in card


def fpfl_read() -> FederatedDataset:
    import fpfl

    return fpfl.read_table("people.csv", "people.schema.toml")


@pytest.mark.parametrize("private", [True, False])
def test_an_estimator_measures_within_its_ranges(tmp_path: Path, private: bool) -> None:
    """The same rows are scaled alike in training and in predict; units do not matter."""
    from fpfl import FairPrivateClassifier

    rng = np.random.default_rng(0)
    X = rng.normal([40.0, 0.0], [10.0, 1.0], (600, 2))
    y = X[:, 0] + 10 * X[:, 1] > 40
    ledger = tmp_path / "people.jsonl"
    PopulationLedger.create(ledger, population=600, epsilon=40.0).close()
    more = {"epsilon": 8.0, "ledger": ledger} if private else {}
    options = {"rounds": 80, "random_state": 0} | more
    wide = [(0, 1000), (-100, 100)]
    found = FairPrivateClassifier(feature_range=wide, **options).fit(X, y)
    scaling = found.run_.scaling
    assert scaling is not None
    assert scaling.of("measured" if private else "exact") == ("feature 0", "feature 1")
    inner = found.run_.model.model
    import torch

    inputs = found.run_.model.scaling(torch.from_numpy(found._scaling(X)).float())
    assert float(inputs.abs().mean()) == pytest.approx(0.8, abs=0.5)  # a standardised column
    logits = inner(inputs).detach().numpy()[:, 0]
    assert np.allclose(found.decision_function(X), logits, atol=1e-4)
    plain = FairPrivateClassifier(feature_range=wide, measure=False, **options).fit(X, y)
    assert plain.run_.scaling is None
    assert found.score(X, y) > max(0.8, plain.score(X, y))
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.predict(X), found.predict(X))
    if not private:
        thousand = [(0, 1_000_000), (-100_000, 100_000)]
        other = FairPrivateClassifier(feature_range=thousand, **options).fit(1000 * X, y)
        assert np.allclose(other.decision_function(1000 * X), found.decision_function(X), atol=1e-3)
        return
    with PopulationLedger.open(ledger, write=False) as theirs:
        assert sorted(theirs.charges().values()) == [1, 80, 80]  # one measured, one did not


def test_an_old_estimator_goes_on_as_it_was() -> None:
    from fpfl import FairPrivateClassifier

    state = FairPrivateClassifier().__getstate__()
    del state["measure"]
    old = FairPrivateClassifier.__new__(FairPrivateClassifier)
    old.__setstate__(state)
    assert old.get_params()["measure"] is False


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import warnings; warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from pathlib import Path
import fpfl
from fpfl.server.ranks import join
from test_scaled_inputs import PRIVATE, RANKED, train
ranks, _ = join("cpu")
data = fpfl.read_table({table!r}, RANKED)
out = Path({out!r})
run = train(data, privacy=PRIVATE, folder=out / "run-2", rounds=3, **{more!r})
torch.save((run.scaling.centre, run.scaling.width, run.scaling.knots), out / f"2-{{ranks.rank}}")
"""


def test_processes_share_what_the_first_one_measured(table: Path, tmp_path: Path) -> None:
    """Unseeded noise: it was drawn once, in one process."""
    import torch

    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(paths=paths, table=str(table), out=str(tmp_path), more={"seed": None})
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"2-{rank}") for rank in (0, 1))
    assert first == second
    assert len(first[2]) == 2
    kinds = [r["kind"] for r in OpenRun(tmp_path / "run-2").ledger.chain.records]
    assert kinds.count("scaling") == 1
