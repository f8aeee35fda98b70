"""Every training of a batch has its own population, and those of one share what was scaled."""

from __future__ import annotations

from dataclasses import replace

import torch
from conftest import make_population
from torch import nn

from fpfl.data.inputs import InputColumn
from fpfl.sweeps import batch
from fpfl.sweeps.batch import Job, trained

SETTINGS = {"cohort": 5, "rounds": 1, "seed": 0, "learning_rate": 0.1}


def test_no_training_has_the_population_of_another(monkeypatch) -> None:
    columns = tuple(InputColumn(f"x{n}", n) for n in range(5))
    populations = [
        replace(make_population(users=12, seed=seed), columns=columns) for seed in range(4)
    ]
    seen = []
    monkeypatch.setattr(batch, "_shape", lambda made: seen.append(made.data) or len(seen))
    monkeypatch.setattr(batch, "train", lambda *_, **__: type("R", (), {"history": []})())
    asked = [populations[n % 4] for n in range(200)]
    jobs = [Job(nn.Linear(5, 1), data, SETTINGS) for data in asked]
    assert len(list(trained(jobs))) == len(seen) == 200
    for data, got in zip(asked, seen, strict=True):
        assert torch.equal(got.labels, data.labels)
        assert not torch.equal(got.features, data.features)  # scaled
    # One scaled copy of each population, whatever lies where in memory.
    assert len({id(got) for got in seen}) == 4
