"""The grid of an adaptive clip bound, and the update on it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import thorough
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fpfl
from fpfl import AdaptiveBound, Clipping
from fpfl.privacy.adaptive import RATIO, REACH, BoundGrid
from fpfl.privacy.settings import CLIPPED, COUNTS, GRADIENTS, JOINT, SELECTION
from fpfl.server.bound import BoundControl

starts = st.floats(1e-6, 1e6)
ratios = st.sampled_from([RATIO, 2.0, 2**0.125, 3.0])


@given(starts, ratios, st.floats(1.0, 1e4), st.floats(1.0, 1e4))
def test_the_grid_has_what_is_in_the_range_and_nothing_else(start, ratio, below, above) -> None:
    adapts = AdaptiveBound(0.5, least=start / below, most=start * above, ratio=ratio)
    grid = BoundGrid(start, adapts)
    assert grid.at(0) == start
    assert len(grid.bounds) == grid.highest - grid.lowest + 1
    for level in range(grid.lowest, grid.highest + 1):
        assert grid.at(level) == pytest.approx(start * ratio**level, rel=1e-12)
        assert adapts.least <= grid.at(level) <= adapts.most
    # The next one in either direction would be outside.
    assert grid.at(grid.lowest) / ratio < adapts.least
    assert grid.at(grid.highest) * ratio > adapts.most


def test_the_bits_of_the_grid_are_those_of_products() -> None:
    """A node on another machine makes the same: powers would not do."""
    grid = BoundGrid(0.3, AdaptiveBound(0.5))
    up = down = 0.3
    for level in range(1, 30):
        up, down = up * 1.189207115002721, down / 1.189207115002721
        assert (grid.at(level), grid.at(-level)) == (up, down)
    assert pytest.approx(2**0.25, rel=1e-15) == RATIO
    assert grid.at(grid.highest) <= 0.3 * REACH < grid.at(grid.highest) * RATIO


@pytest.mark.parametrize("level", [-41, 41, 1.0, True, "1", None, math.nan])
def test_a_level_off_the_grid_is_refused(level) -> None:
    grid = BoundGrid(0.3, AdaptiveBound(0.5))
    assert (grid.lowest, grid.highest) == (-40, 40)
    with pytest.raises(ValueError, match="whole numbers from -40 to 40"):
        grid.at(level)


@given(starts, st.floats(-50, 50), st.floats(0.0, 1.0), st.floats(0.01, 0.99), st.floats(0.01, 3.0))
def test_too_many_clipped_raise_the_bound_and_too_few_lower_it(
    start, u, fraction, target, rate
) -> None:
    grid = BoundGrid(start, AdaptiveBound(target, rate=rate))
    before = grid.moved(u, target)  # within the ends
    after = grid.moved(before, fraction)
    if fraction > target:
        assert after >= before
    if fraction < target:
        assert after <= before
    assert abs(after - before) <= rate * abs(fraction - target) + 1e-9
    assert grid.at(grid.level(after)) == pytest.approx(
        start * 2**after, rel=2 ** (math.log2(RATIO) / 2) - 1 + 1e-9
    )  # the nearest, half a level away at most


def test_an_end_is_left_at_once() -> None:
    """No way back is to be gone that was gone beyond the end."""
    grid = BoundGrid(1.0, AdaptiveBound(0.5, rate=1.0, least=0.5, most=2.0))
    u = 0.0
    for _ in range(100):
        u = grid.moved(u, 1.0)
    assert grid.at(grid.level(u)) == pytest.approx(2.0, rel=1e-12)
    assert grid.level(grid.moved(u, 0.0)) < grid.highest


@given(
    st.floats(0.1, 0.9),
    st.floats(-3.0, 3.0),
    st.floats(0.1, 1.5),
    st.floats(0.1, 0.5),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=thorough(40, 200))
def test_without_noise_the_bound_goes_to_the_quantile(target, where, spread, rate, seed) -> None:
    """Users' norms are lognormal: in the end C clips τ of them, up to a level of the grid."""
    norms = np.sort(np.exp(np.random.default_rng(seed).normal(where, spread, 2000)))
    control = BoundControl(BoundGrid(1.0, AdaptiveBound(target, rate=rate)), len(norms), False)

    def clipped(bound: float) -> int:
        return len(norms) - int(np.searchsorted(norms, bound, side="right"))

    u, seen = 0.0, []
    for _ in range(int(40 / rate / min(target, 1 - target))):
        bits = clipped(control.bound(u))
        assert control.fraction(bits - len(norms) / 2) == pytest.approx(bits / len(norms))
        u = control.moved(u, bits - len(norms) / 2)
        seen.append(control.bound(u))
    wanted = float(np.quantile(norms, 1 - target))
    assume(1 / REACH < wanted < REACH)
    # It goes back and forth between the levels around the quantile, and u by one update more.
    away = RATIO ** (1.0 + 1e-9) * 2**rate
    for bound in seen[-20:]:
        assert wanted / away <= bound <= wanted * away


def test_the_fraction_is_kept_within_0_and_1() -> None:
    control = BoundControl(BoundGrid(1.0, AdaptiveBound(0.5)), 100, False)
    assert [control.fraction(x) for x in (-1e9, -50, 0, 25, 50, 1e9)] == [0, 0, 0.5, 0.75, 1, 1]


def test_the_learning_rate_follows_the_bound_down_alone() -> None:
    adapts = AdaptiveBound(0.5, ratio=2.0, reference=2.0)
    control = BoundControl(BoundGrid(1.0, adapts), 100, False)
    assert [control.step_factor(u) for u in (-3.0, 0.0, 1.0, 2.0, 3.0)] == [1, 1, 1, 0.5, 0.25]
    fixed = replace(control, grid=BoundGrid(1.0, replace(adapts, reference=None)))
    assert fixed.step_factor(9.0) == 1.0


def test_counts_in_the_joint_vector_have_the_noise_of_the_bound() -> None:
    joint = BoundControl(BoundGrid(1.0, AdaptiveBound(0.5, ratio=2.0)), 100, True)
    assert joint.counts(2.0, 3.0, 6.0) == (12.0, 24.0)
    assert joint.counts(-4.0, 3.0, 6.0) == (3.0 / 16, 1.0)  # no less than one sample
    assert joint.counts(2.0, 0.0, 1.0) == (0.0, 1.0)
    assert replace(joint, joint=False).counts(2.0, 3.0, 6.0) == (3.0, 6.0)


# --- settings -----------------------------------------------------------------------------------


def test_the_blocks_are_shares_of_one_budget() -> None:
    clip = Clipping(3.0, counts=2.0, adapts=AdaptiveBound(0.1, share=0.02))
    blocks = {block.name: block for block in clip.blocks(constrained=True, selection=True)}
    assert (blocks[CLIPPED].bound, blocks[CLIPPED].share) == (0.5, 0.02)
    assert {name: block.bound for name, block in blocks.items()} == {
        GRADIENTS: 3.0, COUNTS: 2.0, SELECTION: 2.0, CLIPPED: 0.5,
    }  # fmt: skip
    assert sum(block.share for block in blocks.values()) == pytest.approx(1.0)
    joint = replace(clip, counts=None).blocks(constrained=True, selection=True)
    assert [block.name for block in joint] == [JOINT, SELECTION, CLIPPED]


def test_the_accounting_does_not_know_the_bound() -> None:
    """ε follows from σ and the blocks' shares: that C moves within its range changes nothing."""
    plans = [
        fpfl.Privacy(noise_multiplier=1.0, clip=clip).plan(population=1000, cohort=50, rounds=20)
        for clip in (
            Clipping(3.0, counts=2.0, adapts=AdaptiveBound(0.1)),
            Clipping(300.0, counts=2.0, adapts=AdaptiveBound(0.9, rate=2.0, ratio=2.0)),
            Clipping(1.0, counts=2.0),
        )
    ]
    assert len({plan.epsilon for plan in plans}) == 1


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"target": 0.0}, "target is 0.0; it must be between 0 and 1"),
        ({"target": 1.0}, "target is 1.0"),
        ({"target": math.nan}, "target is nan"),
        ({"share": 0.0}, "share is 0.0"),
        ({"rate": -1.0}, "rate is -1.0; it must be positive"),
        ({"least": 0.0}, "least is 0.0"),
        ({"most": math.inf}, "most is inf"),
        ({"reference": 0.0}, "reference is 0.0"),
        ({"ratio": 1.0}, "ratio is 1.0; it must be above 1"),
        ({"least": 2.0}, r"begins with 1, outside \[2, 1024\]"),
        ({"most": 0.5}, r"begins with 1, outside"),
        ({"ratio": 1.0001}, "makes 138636 bounds"),
        ({"share": 0.9}, "leave nothing for the gradients"),
    ],
)
def test_what_cannot_be_is_refused(given_, said) -> None:
    with pytest.raises(ValueError, match=said):
        Clipping(1.0, adapts=AdaptiveBound(**{"target": 0.5, **given_}))


def test_the_share_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"AdaptiveBound\(share=...\)"):
        Clipping(1.0, clipped_share=0.05, adapts=AdaptiveBound(0.5))


def test_a_number_is_no_adaptive_bound() -> None:
    with pytest.raises(ValueError, match=r"adapts is 0.1; expected something like AdaptiveBound"):
        Clipping(1.0, adapts=0.1)  # type: ignore[arg-type]


def test_runs_of_a_sweep_may_differ_in_what_the_bound_aims_at() -> None:
    from fpfl.sweeps.grid import with_settings

    private = fpfl.Privacy(epsilon=1.0, clip=Clipping(1.0, adapts=AdaptiveBound(0.5)))
    runs = fpfl.grid(privacy__clip__adapts__target=[0.1, 0.3])
    found = [with_settings({"privacy": private}, run)["privacy"].clip.adapts for run in runs]
    assert found == [AdaptiveBound(0.1), AdaptiveBound(0.3)]


def test_settings_without_it_are_written_as_before() -> None:
    """Files and fingerprints of runs whose bound is fixed do not know that there is another."""
    from fpfl.sweeps.asked import described
    from fpfl.training.spec import plain_value

    fixed = Clipping(1.0, counts=2.0)
    names = {"kind", "bound", "counts", "selection", "counts_share", "selection_share",
             "clipped_share"}  # fmt: skip
    assert set(plain_value(fixed)) == set(described("clip", fixed)) == names
    assert set(plain_value(fpfl.Privacy(1.0, clip=fixed))["clip"]) == names - {"kind"}
    moving = replace(fixed, adapts=AdaptiveBound(0.1))
    for found in (plain_value(moving), described("clip", moving)):
        assert found["adapts"]["target"] == 0.1
