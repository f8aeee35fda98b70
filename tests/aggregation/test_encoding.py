"""From clipped vectors to whole numbers and back: norms, means, the ring."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.aggregation.clipping import DenseRows, clip, clip_rules
from fpfl.aggregation.encoding import RING, Encoding, hadamard, in_ring, padded, system_uniform
from fpfl.aggregation.noise import discrete_gaussian
from fpfl.privacy.plan import Block, PrivacyPlan

BLOCKS = (Block("gradients", 1.5, 0.7), Block("counts", 2.0, 0.25), Block("selection", 1.0, 0.05))
PLACES = {
    "loss_gradient": slice(0, 90),
    "F": slice(90, 92),
    "n": slice(92, 94),
    "hits": slice(94, 95),
    "misses": slice(95, 96),
}
RULES = clip_rules(BLOCKS, PLACES)
PLAN = PrivacyPlan(
    population=1000, cohort=50, rounds=10, noise_multiplier=1.3, blocks=BLOCKS, convention="coins"
)


def encoding(adders: int = 3, bits: int = 10) -> Encoding:
    return Encoding.of(PLAN, RULES, 96, adders, bits)


def clipped(users: int, seed: int = 0, size: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = size * torch.randn(users, 96, generator=generator, dtype=torch.float64)
    rows[:, 90:] = rows[:, 90:].abs()
    return clip(DenseRows(rows, PLACES), RULES)


@given(st.integers(0, 9), st.integers(0, 100))
def test_hadamard_is_orthonormal_and_its_own_inverse(power, seed):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 2**power)))
    turned = hadamard(x)
    assert torch.allclose(turned.norm(dim=1), x.norm(dim=1))
    assert torch.allclose(hadamard(turned), x)


def test_a_large_number_is_spread_over_all():
    x = torch.zeros(1024, dtype=torch.float64)
    x[7] = 1.0
    assert float(hadamard(x * encoding().signs(1)[0]).abs().max()) == pytest.approx(1 / 32)


@given(seed=st.integers(0, 1000), round=st.integers(1, 50), bits=st.integers(4, 16))
@settings(max_examples=30)
def test_no_user_is_longer_than_its_bound(seed, round, bits):
    """Whatever came in: what one user changes is what the noise is made for."""
    here = encoding(bits=bits)
    whole = here.encoded(clipped(5, seed, size=50.0), round)
    norms = whole.double().norm(dim=1)
    assert bool((norms <= here.bound).all())
    assert bool((norms > 0).all())


@pytest.mark.parametrize("scale", [1e3, 1e7, 1e9])
def test_a_row_at_its_bound_is_kept_however_fine_the_steps(scale):
    """Clipped in single precision it may be a little longer than its bound."""
    here = Encoding(RULES, (0.7, 0.25, 0.05), 96, scale)
    generator = torch.Generator().manual_seed(1)
    rows = 1e3 * torch.randn(40, 96, generator=generator)
    rows[:, 90:] = 0.0
    rows[:, [91, 95]] = 1e3  # a single count, so that its ℓ2 norm is at the bound, too
    single = clip(DenseRows(rows, PLACES), RULES) * (1 + 2.0**-20)
    whole = here.encoded(single, 1)
    norms = whole.double().norm(dim=1)
    assert bool((norms > 0.99 * scale).all())
    assert bool((norms <= here.bound * (1 + 1e-12)).all())


def test_a_row_that_was_not_clipped_becomes_zero():
    rows = torch.zeros(3, 96, dtype=torch.float64)
    rows[0], rows[1, 3], rows[2, 5] = 10.0, math.nan, math.inf
    assert not encoding().encoded(rows, 1).any()


def test_rounding_is_right_on_average():
    """2,000 roundings of one vector; six standard errors: a false alarm in 10⁶ runs or fewer."""
    here = encoding(bits=4)
    row = clipped(1, seed=3, size=0.01)  # far from its bound, so that nothing is tried again
    many = here.encoded(row.expand(2000, -1), 1).double()
    wanted = hadamard(torch.nn.functional.pad(row[0] * here.units, (0, 32)) * here.signs(1))
    error = (many.mean(dim=0) - wanted * here.scale).abs()
    assert float(error.max()) < 6 * 0.5 / math.sqrt(2000)
    assert many.std() > 0


@given(users=st.integers(1, 8), seed=st.integers(0, 1000), round=st.integers(1, 1000))
@settings(max_examples=30)
def test_sums_in_the_ring_are_sums(users, seed, round):
    """The decoded sum differs from the sum by rounding alone, within the bound that is stated."""
    here, rows = encoding(), clipped(users, seed)
    parts = [in_ring(row.numpy()) for row in here.encoded(rows, round)]
    total = np.zeros(here.size, dtype=np.uint32)
    for part in parts:
        total += part
    error = (here.decoded(total, round) - rows.sum(dim=0)) * here.units
    assert float(error.norm()) <= here.rounding_bound(users)


def test_noise_in_shares_has_the_deviation_that_is_said():
    """4,000 sums of three shares in 128 numbers: the deviation to six standard errors."""
    here = encoding(adders=3, bits=8)
    draws = 400
    z = discrete_gaussian(3 * draws * here.size, bits=8).reshape(draws, 3, here.size).sum(axis=1)
    found = torch.stack([here.decoded(in_ring(row), 2) for row in z])
    ratio = found.std(dim=0) / here.noise_stddev(3, 8)
    assert float((ratio.square().mean() - 1).abs()) < 6 * math.sqrt(2 / (draws * 96))


def test_the_plan_s_noise_is_met():
    """The shares of the fewest honest nodes, over what a user can change, are no less than σ."""
    for adders, bits in ((1, 6), (3, 10), (40, 4)):
        here = encoding(adders, bits)
        assert math.sqrt(adders) * 2.0**bits / here.bound >= PLAN.noise_multiplier


def test_an_overflow_is_refused_before_it_can_happen():
    here = encoding(bits=10)
    most = int((RING / 2 - 40 * math.sqrt(5) * 2**10) / here.bound)
    here.check_ring(most, 5, 10)
    with pytest.raises(ValueError, match="does not fit into a ring"):
        here.check_ring(most + 2, 5, 10)
    with pytest.raises(ValueError, match="too small for"):
        Encoding.without_noise(RULES, (0.7, 0.25, 0.05), 96, 2**31)
    fine = Encoding.without_noise(RULES, (0.7, 0.25, 0.05), 96, 1000)
    fine.check_ring(1000, 5, None)
    # The largest sum there is: everybody sends the same, at the bound, all in one number.
    edge = np.full(1, int(fine.bound), dtype=np.int64)
    total = np.zeros(1, dtype=np.uint32)
    for _ in range(1000):
        total += in_ring(edge)
    assert int(total.view(np.int32)[0]) == 1000 * int(fine.bound)


def test_small_things():
    assert [padded(n) for n in (1, 2, 3, 4, 5, 96, 4096, 4097)] == [1, 2, 4, 4, 8, 128, 4096, 8192]
    drawn = system_uniform(10_000)
    assert 0.0 <= drawn.min() < 0.01
    assert 0.99 < drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 6 * 0.2887 / 100  # six standard errors
    assert in_ring(np.array([-1, 0, 2**32], dtype=np.int64)).tolist() == [2**32 - 1, 0, 0]
    assert not torch.equal(encoding().signs(1), encoding().signs(2))


@pytest.mark.parametrize("place", [0, 91, 95])
def test_how_far_one_vector_of_the_ring_moves_a_number_of_the_sum(place):
    """In clip bounds √D · 2³¹/S, as docs/threat-model.md says, and no vector moves one further."""
    made, round = encoding(), 3
    unit = torch.zeros(made.size, dtype=torch.float64)
    unit[place] = 1.0
    row = hadamard(unit * made.signs(round))  # where a number comes from, with its signs
    worst = in_ring((row.sign().numpy() * (RING // 2 - 1)).astype(np.int64))
    moved = made.decoded(worst, round) * made.units
    reach = math.sqrt(made.size) * 2**31 / made.scale
    assert float(moved[place]) == pytest.approx(reach, rel=1e-6)
    assert float(moved.norm()) <= reach
    made.check_ring(PLAN.population, 3, 10)
    assert reach > PLAN.population
