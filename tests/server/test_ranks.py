"""Several processes: the same model as one, whatever their number, with the noise added once."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_population, some

from fpfl import FpflWarning, fnr_parity
from fpfl.runs.ledger import RunLedger
from fpfl.server.simulation import ahead
from fpfl.training import train

SCRIPT = """
import json, sys
import torch
from torch import nn
sys.path.insert(0, {tests!r})
from conftest import make_population
from pathlib import Path
from fpfl import AdaptiveBound, Clipping, FederatedAveraging, OneGradient, Privacy, RunFolder
from fpfl import fnr_parity
from fpfl.server.ranks import join
from fpfl.runs.journal import withdraw
from fpfl.training import train

torch.set_num_threads(1)
ranks, _ = join("cpu")
vectors = {{}}
for kind in {kinds!r}:
    torch.manual_seed(ranks.rank)  # the first process's parameters count, whatever others have
    dropout = [nn.Dropout(0.3)] if kind == "dropout" else []
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *dropout, nn.Linear(8, 1))
    seed = None if kind.startswith(("unseeded", "kept")) else 0
    if kind == "kept":  # resumed with more rounds than its budget has room for, after withdrawals
        folder = Path({folder!r}) / f"kept-{{ranks.size}}"
        how = dict(cohort=25, constraint=fnr_parity("sex"), selection="last",
                   privacy=Privacy(noise_multiplier=3.0, clip=1.0, budget=6.0))
        data = make_population(users=60, mean=4.0)
        train(model, data, rounds=8, folder=folder, **how)
        if ranks.first:
            withdraw(folder, range(30))
        run = train(model, data, rounds=10_000, folder=RunFolder(folder, resume=True), **how)
        assert 8 < len(run.history) < 10_000 and "budget is spent" in run.stopped
        vectors[kind] = [len(run.history), *run.model[0].weight.detach().flatten().tolist()]
        continue
    one = kind.startswith("one gradient")
    clip = Clipping(1.0, counts=1.0) if one else 1.0
    if kind == "one gradient, adapts":
        clip = Clipping(0.3, counts=1.0, adapts=AdaptiveBound(0.3, rate=1.0, share=0.05))
    run = train(model, make_population(users=60, mean=4.0, seed=ranks.rank * (kind == "different")),
                cohort=25, rounds=12, learning_rate=0.5, constraint=fnr_parity("sex"),
                privacy=None if kind == "plain" else Privacy(noise_multiplier=1.0, clip=clip),
                method=OneGradient() if one else None,
                local=FederatedAveraging(2, 0.1) if kind == "one gradient, local" else None,
                samples_per_user=3 if kind == "part" else None, selection="last",
                seed=seed, noise_seed=seed)
    vectors[kind] = torch.cat([p.detach().flatten() for p in run.model.parameters()]).tolist()
print("RESULT" + json.dumps([ranks.rank, ranks.size, vectors]), flush=True)
"""
SEEDED = ("plain", "private", "part", "dropout", "one gradient", "one gradient, local",
          "one gradient, adapts")  # fmt: skip
ALL = (*SEEDED, "unseeded", "unseeded again", "kept")
Models = dict[str, list[float]]


def written(kinds: tuple[str, ...], folder: Path) -> Path:
    script = folder / "training.py"
    script.write_text(
        SCRIPT.format(kinds=kinds, folder=str(folder), tests=str(Path(__file__).parents[1]))
    )
    return script


def models(kinds: tuple[str, ...], processes: int, folder: Path) -> list[Models]:
    """Train in several processes; what each of them ended with."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), str(written(kinds, folder)),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [part for line in done.stdout.splitlines() for part in line.split("RESULT")[1:]]
    results = sorted(json.loads(line) for line in lines)
    assert [r[:2] for r in results] == [[i, processes] for i in range(processes)]
    return [vectors for _, _, vectors in results]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Models:
    """In this process, which nobody started with others."""
    before = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FpflWarning)
        found = runpy.run_path(str(written(SEEDED, tmp_path_factory.mktemp("alone"))))
    torch.set_num_threads(before)
    assert found["ranks"].size == 1
    return found["vectors"]


@pytest.fixture(scope="module", params=some((2, 3), 2))
def several(request, tmp_path_factory) -> tuple[Path, list[Models]]:
    """All kinds from one start, which takes longer than they do; and the folder of the kept one."""
    folder = tmp_path_factory.mktemp("several")
    return folder / f"kept-{request.param}", models(ALL, request.param, folder)


def test_any_number_of_processes_gives_the_same_model(several, alone) -> None:
    """To 1e-5: sums of users are added in another order, nothing else differs."""
    first, *others = several[1]
    assert others
    assert all(other == first for other in others)  # to the last bit among themselves
    for kind in SEEDED:
        np.testing.assert_allclose(first[kind], alone[kind], rtol=1e-5, atol=1e-5)
    assert first["unseeded"] != first["unseeded again"]


def test_several_processes_keep_one_run(several) -> None:
    """One of them writes; all stop at the same round, and leave out the same users."""
    folder, found = several
    assert all(other["kept"] == found[0]["kept"] for other in found)
    ledger = RunLedger.look(folder / "ledger.jsonl")
    assert ledger.spent == found[0]["kept"][0]
    assert [r["users"] for r in ledger.chain.records if r["kind"] == "withdrawal"] == [30]


def test_processes_with_different_data_are_refused(tmp_path) -> None:
    with pytest.raises(AssertionError, match="same data and settings"):
        models(("different",), 2, tmp_path)


def test_ahead_gives_the_same_items_and_errors() -> None:
    assert list(ahead(iter(range(5)))) == [0, 1, 2, 3, 4]
    assert list(ahead(iter(()))) == []

    def failing():
        yield 1
        raise ValueError("the file was cut short")

    items = ahead(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="cut short"):
        next(items)


def test_ahead_never_has_more_than_one_item_waiting() -> None:
    made, used = [], []

    def items():
        for i in range(20):
            made.append(i)
            yield i

    for item in ahead(items()):
        used.append(item)
        assert len(made) <= len(used) + 1


def test_reading_ahead_from_files_gives_the_same_model(tmp_path) -> None:
    data = make_population(users=40)
    data.save(tmp_path / "people")
    how = {"cohort": 10, "rounds": 5, "seed": 0, "selection": "last",
           "constraint": fnr_parity("sex"), "clip": 1.0}  # fmt: skip
    model = torch.nn.Linear(5, 1)
    memory, files = (train(model, d, **how) for d in (data, data.open(tmp_path / "people")))
    torch.testing.assert_close(memory.model.weight, files.model.weight, rtol=1e-6, atol=1e-7)
