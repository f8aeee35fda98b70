"""Neighbours and thresholds are those of the bounds as they are written, at any number of nodes."""

from __future__ import annotations

from math import comb

import pytest

pytest.importorskip("cryptography")

from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.federation.secagg.graph import GraphChoice, choose_graph


def plainly(
    nodes: int, colluding: int, dropping: int, few: int, privacy: int, correctness: int
) -> GraphChoice | None:
    """The bounds of the module for one degree after the other, with every coefficient anew."""
    bad = colluding + max(dropping, nodes - few)
    for degree in range(2, nodes - 1, 2):
        if bad >= degree:
            pairs = nodes * (nodes - 1) // 2
            apart = pairs * comb(nodes - degree, bad - degree) << (privacy + 1)
            if apart > comb(nodes, bad):
                continue
        near = min(degree, few - 1)
        whole, tail, private = comb(few - 1, near), 0, near + 1
        while private > 2:
            tail += comb(colluding, private - 1) * comb(few - 1 - colluding, near - private + 1)
            if nodes * tail << (privacy + 1) > whole:
                break
            private -= 1
        whole, tail, correct = comb(nodes - 1, degree), 0, 0
        while correct < degree:
            tail += comb(dropping, degree - correct) * comb(nodes - 1 - dropping, correct)
            if nodes * tail << correctness > whole:
                break
            correct += 1
        if private <= correct:
            return GraphChoice(degree, correct)
    return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_choice_is_that_of_one_degree_after_the_other(data) -> None:
    nodes = data.draw(st.integers(4, 130))
    colluding = data.draw(st.integers(0, nodes - 2))
    dropping = data.draw(st.integers(0, max(0, nodes - 2 - colluding)))
    few = data.draw(st.integers(max(2, colluding + 1), nodes))
    privacy, correctness = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 40))
    expected = plainly(nodes, colluding, dropping, few, privacy, correctness)

    def found() -> GraphChoice:
        return choose_graph(
            nodes, colluding, dropping, fewest=few, privacy_bits=privacy,
            correctness_bits=correctness, complete_up_to=0,
        )  # fmt: skip

    if colluding + dropping >= nodes - 1:
        with pytest.raises(ValueError, match="fewer than two honest"):
            found()
    elif expected is not None:
        assert found() == expected
    elif 2 * nodes // 3 + 1 > nodes - dropping or colluding >= 2 * nodes // 3 + 1:
        with pytest.raises(ValueError, match="too few"):
            found()
    else:
        assert found() == GraphChoice(None, 2 * nodes // 3 + 1)


# Found by the plain way, which took up to 44 s for one of them.
@pytest.mark.parametrize(
    ("nodes", "colluding", "dropping", "few", "degree", "threshold"),
    [
        (1000, 200, 333, 667, 234, 117),
        (1000, 332, 5, 997, 48, 43),
        (1000, 500, 333, None, 626, 375),
        (2000, 1000, 666, None, 934, 559),
        (3000, 1500, 1000, None, 1118, 668),
        (5000, 1000, 1666, 3334, 332, 168),
        (5000, 2500, 1666, None, 1330, 794),
        (10_000, 1000, 500, None, 42, 27),
        (10_000, 2000, 3333, 6667, 360, 183),
        (10_000, 2000, 1000, 9000, 86, 56),
        (10_000, 3332, 5, 9997, 48, 44),
    ],
)
def test_large_choices_are_what_they_were(
    nodes: int, colluding: int, dropping: int, few: int | None, degree: int, threshold: int
) -> None:
    assert choose_graph(nodes, colluding, dropping, fewest=few) == GraphChoice(degree, threshold)


def test_a_hundred_thousand_nodes_need_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wall clock: how many whole degrees are looked at, and how long the numbers get."""
    from fpfl.federation.secagg import graph

    looked, bits = [], []

    def counted(others: int, marked: int, drawn: int, nodes: int, enough: int) -> int:
        looked.append(drawn)
        return unlikely(others, marked, drawn, nodes, enough)

    def measured(n: int, k: int) -> int:
        bits.append(perm(n, k).bit_length())
        return perm(n, k)

    unlikely, perm = graph._unlikely, graph.perm
    monkeypatch.setattr(graph, "_unlikely", counted)
    monkeypatch.setattr(graph, "perm", measured)
    choice = choose_graph(100_000, 20_000, 33_333, fewest=66_667)
    assert choice == GraphChoice(406, 205)
    assert len(looked) <= 60
    assert max(bits) <= 20_000


@pytest.mark.parametrize("few", [20, 1, 0, 102, 50.0])
def test_fewest_must_leave_somebody_honest(few) -> None:
    with pytest.raises(ValueError, match=r"fewest must be a whole number from 21, .* to nodes"):
        choose_graph(101, 20, 30, fewest=few)
