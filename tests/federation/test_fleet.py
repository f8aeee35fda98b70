"""Thousands of enrolled nodes of one user each, of whom the server picks a few in every round."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography")

import numpy as np

from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import Contribution
from fpfl.federation.rounds import federate
from fpfl.federation.secagg import Authority


def test_a_round_costs_what_it_asks_and_not_what_is_enrolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exchanges, states and answers are those of the picked, of 3,000 as of 60."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import fleet

    def nothing(self: Contribution, *_: object) -> np.ndarray:
        return np.zeros(self.agreement.encoding.size, dtype=np.uint32)

    monkeypatch.setattr(Contribution, "vector", nothing)  # what it costs is another test's
    authority, asked = Authority.make(), {}
    for nodes in (60, 3000):
        agreement: Agreement = fleet.agreed(nodes, 6, 2)
        identities = [authority.enrol(f"n{i:05}", i + 1) for i in range(nodes)]
        courier = fleet.Fleet(agreement, identities)
        run = federate(agreement, courier, identities[0].authority)
        assert len(run.history) == 2
        assert len(courier.states) <= 12
        asked[nodes] = dict(courier.answers)
    assert asked[60] == asked[3000]
    assert set(asked[60].values()) == {12}
