"""A node with many users: the same whole numbers in pieces of any size, and a bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")

from federated import agreement, dealt, people, with_seed

import fpfl
from fpfl.federation import agreement as agreements
from fpfl.federation import contribution
from fpfl.federation.contribution import Contribution, TestChance

PAPER = {"method": None, "constraint": fpfl.fnr_parity("sex", tolerance=0.02)}


def vector(agreed: Any, round: int = 1) -> np.ndarray:
    part = dealt(agreed)[1]
    chance = TestChance(agreed.test_seed, 1, 30)
    return Contribution(agreed, lambda: part, chance).vector(round, agreed.spec.flat.vector(), None)


@pytest.mark.parametrize("changes", [{}, PAPER], ids=["one gradient", "cells of groups"])
def test_pieces_of_any_size_give_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """The rounding of every user draws the same, in the same order."""
    agreed = with_seed(agreement(nodes=3, cohort=50, **changes), 7)
    size = agreed.encoding.size
    whole = vector(agreed)
    for rows in (1, 2, 3, 1000):
        monkeypatch.setattr(contribution, "ROWS_BYTES", 8 * size * rows)
        assert np.array_equal(vector(agreed), whole)
    monkeypatch.setattr(contribution, "ROWS_BYTES", 1)  # less than one row: one at a time
    assert np.array_equal(vector(agreed), whole)


def test_rows_are_taken_apart_bit_by_bit() -> None:
    """Also where users have several cells, which are not in the order of users."""
    for changes in ({}, PAPER):
        agreed = agreement(**changes)
        engine = agreed.engine(people())
        found = list(engine.statistics(agreed.spec.flat.vector(), np.arange(60)))
        for rows in found:
            dense = rows.dense()
            for step in (1, 2, 7):
                parts = [rows.some(k, k + step).dense() for k in range(0, len(rows), step)]
                assert torch.equal(torch.cat(parts), dense)


def test_factored_rows_are_not_taken_apart() -> None:
    agreed = agreement()
    engine = agreed.spec.engine(people(), private=True)
    (rows,) = engine.statistics(agreed.spec.flat.vector(), np.arange(60))
    with pytest.raises(ValueError, match="factoring=False"):
        rows.some(0, 1)


def test_a_nodes_engine_has_a_budget_of_its_own() -> None:
    assert agreement().engine(people()).memory == agreements.NODE_MEMORY


GROWTH = """
import resource, sys
import numpy as np
import fpfl
from fpfl.federation import agreement, contribution

agreement.NODE_MEMORY = 2**23
users = int(sys.argv[1])
rng = np.random.default_rng(0)
schema = fpfl.Schema(shape=(40,), classes=2, attributes=(fpfl.Attribute("kind", ("a", "b")),),
                     population=users, samples_per_user=2.0)
data = fpfl.FederatedDataset.from_samples(
    rng.random((2 * users, 40), dtype=np.float32), rng.integers(0, 2, 2 * users), schema=schema,
    attributes=rng.integers(0, 2, (2 * users, 1)), users=np.repeat(np.arange(users), 2))
agreed = agreement.Agreement(
    model=lambda: fpfl.mlp(40, (800,), seed=1), schema=schema, population=users, cohort=users,
    rounds=10, nodes=5,
    privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="coins"))
engine = agreed.engine(data)  # tried on made-up users: for any number of real ones the same
w, chance = agreed.spec.flat.vector(), contribution.SystemChance()
made = contribution.Contribution(agreed, lambda: data, chance)
made._summed(engine, 1, w, np.arange(4), 1, None, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made._summed(engine, 1, w, np.arange(users), 1, None, None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def grown(users: int) -> float:
    """MiB that the users' vectors took on top of what there was."""
    path = os.pathsep.join([str(Path(fpfl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(users)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux counts it")
def test_eight_times_the_users_take_no_more_memory() -> None:
    """All rows of 320 users at once are 80 MiB in double precision, several times over."""
    few, many = grown(40), grown(320)
    assert many < 2 * max(few, 16.0)
