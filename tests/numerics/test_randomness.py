"""Random streams: separate, reproducible, the same in whatever order they are asked for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpfl
from fpfl.numerics.randomness import RoundStreams, hashed

whole = st.integers(min_value=0, max_value=2**62)


@given(key=whole, numbers=st.lists(whole, min_size=1, max_size=3))
def test_one_number_and_an_array_are_hashed_alike(key: int, numbers: list[int]) -> None:
    arrays = [np.array([number], dtype=np.int64) for number in numbers]
    assert hashed(key, *numbers) == int(hashed(key, *arrays)[0])


def test_a_round_has_the_same_stream_whatever_was_drawn_before() -> None:
    """What a resumed run rests on."""
    one, other = RoundStreams(3, "cohorts"), RoundStreams(3, "cohorts")
    ahead = [one.of(round).integers(2**60) for round in range(1, 6)]
    assert [other.of(round).integers(2**60) for round in (4, 2)] == [ahead[3], ahead[1]]
    assert len(set(ahead)) == 5
    assert RoundStreams(3, "samples").of(1).integers(2**60) != ahead[0]
    assert RoundStreams(4, "cohorts").of(1).integers(2**60) != ahead[0]


def test_without_a_seed_rounds_are_fresh() -> None:
    streams = RoundStreams(None, "cohorts")
    assert streams.of(1).integers(2**60) != streams.of(1).integers(2**60)


def test_networks_without_a_seed_do_not_begin_alike() -> None:
    one, other = fpfl.mlp(3, (2,)), fpfl.mlp(3, (2,))
    assert not torch.equal(one[0].weight, other[0].weight)
    before = torch.random.get_rng_state()
    seeded = [fpfl.mlp(3, (2,), seed=4) for _ in range(2)]
    assert torch.equal(seeded[0][0].weight, seeded[1][0].weight)
    assert torch.equal(torch.random.get_rng_state(), before)
