"""What one node that lies does to a sum: it adds any vector of the ring, and nobody sees it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import Memory, agreement, with_seed

from fpfl.aggregation.encoding import hadamard, in_ring
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import Contribution, broadcast
from fpfl.federation.rounds import Federated

DOCS = Path(__file__).parents[2] / "docs"
LIAR = 0


@pytest.fixture(scope="module")
def agreed() -> Agreement:
    return with_seed(agreement(rounds=1), 3)


def summed(agreed: Agreement) -> torch.Tensor:
    """The first round's sum, in clip bounds; coins and noise are the same each time."""
    courier = Memory(agreed)
    server = Federated(agreed, courier, courier.key, b"r" * 16)
    total = server._attempt(1, broadcast(1, agreed.spec.flat.vector(), None))
    assert not courier.refused
    return agreed.encoding.decoded(total, 1) * agreed.encoding.units


def lied(agreed: Agreement, lie: torch.Tensor, monkeypatch: Any) -> torch.Tensor:
    """By how much the sum moves where a node adds so many clip bounds to its own vector."""
    encoding, honest = agreed.encoding, Contribution.vector
    before = summed(agreed)
    wide = torch.zeros(encoding.size, dtype=torch.float64)
    wide[: encoding.numbers] = lie
    whole = (hadamard(wide * encoding.signs(1)) * encoding.scale).round().long().numpy()

    def vector(self: Contribution, *what: Any) -> Any:
        x = honest(self, *what)
        return x + in_ring(whole) if self.chance.node == LIAR else x

    with monkeypatch.context() as patched:
        patched.setattr(Contribution, "vector", vector)
        return summed(agreed) - before


@pytest.mark.parametrize("k", [1.0, 1000.0, -345.6, "the most"])
def test_a_node_moves_a_sum_by_as_many_clip_bounds_as_it_likes(k, agreed, monkeypatch):
    """By exactly k in any direction, and nobody refuses; rounding is half a step a number."""
    encoding = agreed.encoding
    size = 0.9 * encoding.reach if k == "the most" else k
    direction = torch.from_numpy(np.random.default_rng(1).normal(size=encoding.numbers))
    lie = size * direction / direction.norm()
    moved = lied(agreed, lie, monkeypatch)
    assert float((moved - lie).norm()) <= math.sqrt(encoding.size) / encoding.scale
    assert float(moved.norm()) == pytest.approx(abs(size), rel=1e-3)


def test_one_number_can_be_moved_further_and_the_ring_is_the_end(agreed, monkeypatch):
    """Rotated, a single number is spread over all D, each of which has room for 2³¹ steps."""
    encoding, lie = agreed.encoding, torch.zeros(agreed.encoding.numbers, dtype=torch.float64)
    most = encoding.reach * math.sqrt(encoding.size)
    lie[0] = 0.9 * most
    moved = lied(agreed, lie, monkeypatch)
    assert float((moved - lie).norm()) <= math.sqrt(encoding.size) / encoding.scale
    lie[0] = 1.5 * most  # wraps round
    assert float(lied(agreed, lie, monkeypatch).norm()) < 1.01 * most


def test_a_node_weighs_more_than_all_users_together(agreed):
    """The ring holds everybody's vectors at once, and so a liar's of that size."""
    assert agreed.encoding.reach > agreed.population


def test_the_page_has_the_figures_of_the_documented_agreement():
    page = (DOCS / "federation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    code = next(one for one in blocks if "Agreement(" in one)  # the first of the page's
    names: dict[str, Any] = {"print": lambda *said: None}
    exec(code, names)
    documented, encoding = names["agreement"], names["agreement"].encoding
    said = (DOCS / "threat-model.md").read_text(encoding="utf-8")
    for figure in (
        f"S = {encoding.scale:,.0f}",
        f"D = {encoding.size:,}",
        f"{encoding.reach:,.0f} clip bounds",
        f"{encoding.reach * math.sqrt(encoding.size):,.0f} along",
        f"K = {documented.population:,}",
        f"{encoding.reach / documented.cohort:.0f} times",
    ):
        assert figure in said, figure
