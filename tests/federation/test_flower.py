"""A whole federation of real processes on this machine: TLS, authenticated nodes, SIGKILL.

One round here, three before a release, when processes are killed, too; ``make federation-test``
has twenty, and writes its figures down.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")

from conftest import thorough
from federated import parameters, simulated
from flower_deployment import Deployment

import fpfl
from fpfl.federation.enrolment import AUTHORITY, IDENTITY, make_keys
from fpfl.federation.project import make_project
from fpfl.federation.transport import make_supernode_key
from fpfl.training.run import evaluate_model

if sys.platform != "linux":
    pytest.skip("finds its processes by /proc", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

ROUNDS = int(os.environ.get("FPFL_FEDERATION_ROUNDS", thorough(1, 3)))
RESULTS = os.environ.get("FPFL_FEDERATION_RESULTS")
"""Where the figures go, for ``make federation-test``."""

TASK = (Path(__file__).parent / "flower_task.py.txt").read_text()


class Federation:
    """Keys, projects, and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_keys(folder / "keys", 5)
        firsts = [int(part[0]) for part in np.array_split(np.arange(16_280), 5)]
        self.deployment = Deployment(
            5,
            node_configs=[
                {
                    "identity": str(folder / "keys" / f"node-{i + 1}" / IDENTITY),
                    "partition-id": i,
                    "first-user": firsts[i],
                }
                for i in range(5)
            ],
            # With several rounds they are a deployment's: through its proxy.
            proxy=ROUNDS > 1 and shutil.which("nginx") is not None,
            # torch's compiler is not used, but imported by the way; it takes seconds.
            preload=[
                "torch._dynamo",
                "fpfl.federation.contribution",
                "fpfl.training",
                "fpfl.training.defaults",
            ],
        )

    def project(self, name: str, **settings: Any) -> Path:
        """A project as ``fpfl federation init`` writes it, with the tests' own task."""
        settings = {"MARK": None} | settings
        path = self.folder / name
        make_project(path, self.folder / "keys", nodes=5, cohort=1, rounds=1, epsilon=1.0)
        text = TASK.replace("{settings}", "\n".join(f"{k} = {v!r}" for k, v in settings.items()))
        (path / name / "task.py").write_text(text)
        return path

    def config(self, name: str) -> dict[str, str]:
        keys = self.folder / "keys"
        return {"folder": str(self.folder / f"{name}-run"), "authority": str(keys / AUTHORITY)}


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("flower"))
    with made.deployment:
        yield made


def kinds(folder: Path, kind: str) -> list[int]:
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [line["round"] for line in lines if line["kind"] == kind]


def agreed_by(project: Path, monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(project))
    return import_module(f"{project.name}.task").agreement()


def test_a_federation_of_processes_is_the_simulation(federation, monkeypatch):
    """Secure aggregation, noise in shares, TLS, node authentication: the same model."""
    project = federation.project("alike", ROUNDS=ROUNDS, COHORT=1000, SEED=11, TIMEOUT=120.0)
    result = federation.deployment.run(
        project, federation.config("alike"), timeout=300.0 + 60.0 * ROUNDS
    )
    folder = federation.folder / "alike-run"
    agreed = agreed_by(project, monkeypatch)
    people = fpfl.load_adult("train").partition(mean=2, seed=0)
    wanted = simulated(agreed, people)
    from safetensors.torch import load_file

    model = agreed.model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    error = float((found - parameters(wanted)).norm())
    moved = float((parameters(wanted) - agreed.spec.flat.vector()).norm())
    # A step of SGD is off by η/N times what rounding moves the gradient's sum by.
    units = float(agreed.encoding.units[: agreed.layout.parameters].min())
    rounding = agreed.encoding.rounding_bound(2 * agreed.cohort) / units
    bound = ROUNDS * agreed.learning_rate * rounding / agreed.spec.normaliser
    # The bound is for roundings that all add up; at random they come to about √(m D)/2 steps.
    likely = bound / (4 * agreed.cohort**0.5)
    assert error <= min(bound, likely)
    test = fpfl.load_adult("test")
    here, there = (
        evaluate_model(m, test, constraint=agreed.constraint, bootstrap=0)
        for m in (model, wanted.model)
    )
    gaps = [each.gaps["constraint"].value for each in (here, there)]
    assert abs(here.accuracy - there.accuracy) <= 0.005
    assert abs(gaps[0] - gaps[1]) <= 0.005
    assert kinds(folder, "charge") == list(range(1, ROUNDS + 1))
    said = (folder / "privacy.txt").read_text()
    assert said.startswith("NOT PRIVATE")
    if RESULTS:
        figures = {
            "command": "make federation-test",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
            "versions": {name: metadata.version(name) for name in ("flwr", "torch")},
            "rounds": ROUNDS,
            "nodes": 5,
            "seconds": round(result.seconds, 1),
            "seed": 11,
            "numbers": agreed.encoding.size,
            "epsilon": agreed.plan.epsilon,
            "noise_multiplier": agreed.plan.noise_multiplier,
            "model_error": error,
            "model_error_bound": bound,
            "model_moved": moved,
            "accuracy": {"federation": here.accuracy, "simulation": there.accuracy},
            "gap": {"federation": gaps[0], "simulation": gaps[1]},
        }
        path = Path(RESULTS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def test_strangers_do_not_get_in(federation):
    deployment = federation.deployment
    make_supernode_key(federation.folder / "stranger")
    for changes in ({"key": federation.folder / "stranger"}, {"authenticate": False}):
        code, log = deployment.refused(0, **changes)
        assert code != 0, log
    assert len(deployment.online()) == 5


@pytest.mark.release
def test_a_server_that_is_killed_goes_on_from_its_last_round(federation):
    """SIGKILL for the ServerApp in the middle of a round; then the run is started again."""
    project = federation.project("again", ROUNDS=3, COHORT=200, SEED=None, TIMEOUT=60.0)
    run = federation.deployment.start_run(project, federation.config("again"))
    folder = federation.folder / "again-run"
    federation.deployment.wait_for(
        lambda: "round 1 of 3" in run.log(), 600, "the first round to end"
    )
    federation.deployment.kill_server_app()
    before = kinds(folder, "charge")
    assert before[0] == 1
    assert len(before) <= 2
    result = federation.deployment.run(project, federation.config("again"), timeout=600)
    assert "round 1: the sum of" not in result.log  # what was released is not asked for again
    assert "round 2: the sum of 5 nodes" in result.log
    # Three rounds were paid for; one that was charged and lost is one less to run.
    after = kinds(folder, "charge")
    assert after == ([1, 2, 3] if before == [1] else [1, 2, 2])
    history = json.loads((folder / "history.json").read_text())
    assert len(history) == 4 - len(before)
    assert kinds(folder, "resume") == [2]
    said = (folder / "privacy.txt").read_text()
    assert "NOT PRIVATE" not in said
    assert "up to 1 of the 5 nodes" in said


@pytest.mark.release
def test_nodes_that_are_killed_are_done_without(federation):
    """SIGKILL in the middle of a contribution, and after one: four nodes' sum, then all five's."""
    deployment = federation.deployment
    mark = federation.folder / "computing"
    project = federation.project(
        "killed", ROUNDS=1, COHORT=200, SEED=None, TIMEOUT=25.0, MARK=str(mark)
    )
    run = deployment.start_run(project, federation.config("killed"))
    deployment.wait_for(mark.exists, 300, "node 5 to compute")
    deployment.kill_node(4)
    result = run.wait(600)
    assert result.completed, result.log
    assert "lost in 'mask': ('node-5',)" in result.log
    assert "the sum of 4 nodes" in result.log
    assert kinds(federation.folder / "killed-run", "charge") == [1]
