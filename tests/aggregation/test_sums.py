"""Clipping, noise and sums: bounds, standard deviations, and what clipping may not bend."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from conftest import make_population, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fpfl import Clipping, Privacy, equalized_odds, fnr_parity
from fpfl.aggregation import (
    DenseRows,
    SeededNoise,
    SystemNoise,
    ThirdParty,
    clip,
    clip_rules,
    clipped_sum,
)
from fpfl.privacy import Block
from fpfl.users import CohortEngine, FlatModel, Layout

JOINT = Clipping(1.5)
BLOCKS = Clipping(1.5, counts=2.0, selection=1.0)


def layout(basis: str = "paper", partition: bool = True) -> Layout:
    return Layout(4, ("FNR", "FPR"), ("a", "b"), partition=partition, basis=basis)


def rules_of(clipping: Clipping, where: Layout):
    return clip_rules(clipping.blocks(constrained=True, selection=True), where.slices)


@given(
    st.integers(0, 10_000), st.floats(1e-3, 1e3), st.booleans(), st.sampled_from([JOINT, BLOCKS])
)
@settings(max_examples=60)
def test_no_user_exceeds_a_bound_and_small_ones_are_left_alone(seed, scale, partition, how) -> None:
    where = layout(partition=partition)
    rows = scale * torch.randn(9, where.size, generator=torch.Generator().manual_seed(seed))
    rules = rules_of(how, where)
    dense = DenseRows(rows, where.slices)
    clipped = clip(dense, rules)
    for rule in rules:
        pieces = torch.cat([clipped[:, place] for place in rule.places], dim=1)
        before = torch.cat([rows[:, place] for place in rule.places], dim=1)
        assert bool((pieces.norm(dim=1) <= rule.bound * (1 + 1e-5)).all())
        within = before.norm(rule.order, dim=1) <= rule.bound
        assert torch.equal(pieces[within], before[within])
    total = clipped_sum(dense, rules)
    torch.testing.assert_close(total, clipped.double().sum(0), rtol=1e-4, atol=1e-4)


def test_joint_clipping_is_the_papers_formula() -> None:
    where = Layout(4, ("FNR",), ("a", "b"), selection=False)
    rows = 3 * torch.randn(50, where.size, generator=torch.Generator().manual_seed(0))
    rules = clip_rules(Clipping(2.0).blocks(constrained=True, selection=False), where.slices)
    expected = rows * (2.0 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(clip(DenseRows(rows, where.slices), rules), expected)


def test_every_number_of_v_is_in_exactly_one_block() -> None:
    for how in (JOINT, BLOCKS):
        for partition in (True, False):
            where = layout(partition=partition)
            hit = torch.zeros(where.size)
            for rule in rules_of(how, where):
                for place in rule.places:
                    hit[place] += 1
            assert bool((hit == 1).all())


def test_a_block_that_is_left_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        clip_rules((Block("gradients", 1.0, 1.0),), layout().slices)


def test_counts_of_their_own_keep_the_measured_rate() -> None:
    """Joint clipping bends FNR (errors have larger vectors); scaled split counts do not.

    The split block is scaled by a function of n' alone, so users with equal n' contribute in
    the true proportion; the joint norm depends on whether the user was misclassified.
    """
    data = make_population(users=400, mean=2.0, seed=3).single_samples()
    torch.manual_seed(0)
    model = FlatModel.of(nn.Linear(5, 1))
    w = model.vector() * 3
    users = torch.arange(data.population).numpy()

    def measured(clipping: Clipping | None, basis: str) -> float:
        engine = CohortEngine(model, data, fnr_parity("sex"), basis=basis)
        rows = vectors(engine, w, users)
        if clipping is not None:
            places = engine.layout.slices
            rules = clip_rules(clipping.blocks(constrained=True, selection=True), places)
            rows = clip(DenseRows(rows, places), rules)
        return float(engine.layout.totals(rows.sum(0), 1.0).overall()[0])

    true = measured(None, "paper")
    assert abs(measured(Clipping(0.5, counts=0.5), "split") - true) < 1e-5
    assert measured(Clipping(0.5), "paper") < true - 0.02


@pytest.mark.parametrize("convention", ["paper", "replace-one", "poisson"])
@pytest.mark.parametrize("how", [JOINT, BLOCKS], ids=["joint", "blocks"])
@pytest.mark.parametrize("source", [SystemNoise(), SeededNoise(7)], ids=["system", "seeded"])
def test_noise_has_the_plans_standard_deviation_in_every_block(convention, how, source) -> None:
    """Sample variances within 5.5 standard errors: a false alarm below 1e-6 over all cases."""
    where = layout("split")
    blocks = how.blocks(constrained=True, selection=True)
    plan = Privacy(noise_multiplier=1.3, clip=how, convention=convention).plan(
        population=1000, cohort=100, rounds=10, blocks=blocks
    )
    third_party = ThirdParty(where.slices, blocks, plan, source)
    like = torch.zeros(where.size, dtype=torch.float64)
    draws = torch.stack([third_party.release([], like, t) for t in range(4000)])
    assert math.isclose(sum((b.bound / plan.noise_stddev(b.name)) ** 2 for b in blocks), 1 / 1.69)
    for rule in third_party.rules:
        sample = torch.cat([draws[:, place] for place in rule.places], dim=1).flatten()
        stddev = float(third_party.noise_stddev[rule.places[0].start])
        assert 1 < stddev / plan.noise_stddev(rule.name) < 1.001  # room for rounding
        error = math.sqrt(2 / len(sample))
        assert abs(float(sample.var()) / stddev**2 - 1) < 5.5 * error
        assert abs(float(sample.mean())) < 5.5 * stddev / math.sqrt(len(sample))
    # No two numbers share their noise: correlations within 6 standard errors.
    correlation = torch.corrcoef(draws.T) - torch.eye(where.size)
    assert float(correlation.abs().max()) < 6 / math.sqrt(4000)


def test_joint_noise_is_the_papers_when_nothing_else_is_in_v() -> None:
    blocks = Clipping(2.0).blocks(constrained=True, selection=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = Privacy(noise_multiplier=4.0, clip=2.0, convention="paper").plan(
            population=100, cohort=10, rounds=1, blocks=blocks
        )
    assert plan.noise_stddev("joint") == 8.0


def test_system_noise_differs_every_time_and_seeded_noise_does_not() -> None:
    def draw(source: SystemNoise | SeededNoise, t: int = 1) -> torch.Tensor:
        return source.integers(50, t, device=torch.device("cpu"))

    assert not torch.equal(draw(SystemNoise()), draw(SystemNoise()))
    assert torch.equal(draw(SeededNoise(1)), draw(SeededNoise(1)))
    assert not torch.equal(draw(SeededNoise(1)), draw(SeededNoise(2)))
    assert not torch.equal(draw(SeededNoise(1)), draw(SeededNoise(1), 2))


def test_system_noise_is_normal() -> None:
    """Kolmogorov-Smirnov at a false-alarm rate of 1e-6."""
    n = 200_000
    z = SystemNoise().integers(n, 1, device=torch.device("cpu")).sort().values / 2.0**24
    empirical = torch.arange(1, n + 1) / n
    distance = float((torch.special.ndtr(z) - empirical).abs().max())
    assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2) / n)


def test_a_user_with_bad_numbers_sends_zero() -> None:
    where = layout()
    rows = torch.randn(3, where.size)
    rows[1, 2] = float("nan")
    rows[2, 0] = float("inf")
    rules = rules_of(JOINT, where)
    dense, good = DenseRows(rows, where.slices), DenseRows(rows[:1], where.slices)
    torch.testing.assert_close(clipped_sum(dense, rules).float(), clip(good, rules)[0])


def test_a_plan_for_other_blocks_is_refused() -> None:
    blocks = JOINT.blocks(constrained=True, selection=True)
    plan = Privacy(noise_multiplier=1.0, clip=JOINT).plan(
        population=100, cohort=10, rounds=1, blocks=blocks
    )
    with pytest.raises(ValueError, match="use the plan's own"):
        ThirdParty(layout().slices, BLOCKS.blocks(constrained=True, selection=True), plan)


def test_clipping_settings_are_checked() -> None:
    for bad in ({"bound": 0.0}, {"bound": float("nan")}, {"bound": 1.0, "counts": -1.0},
                {"bound": 1.0, "selection_share": 0.0}, {"bound": 1.0, "clipped_share": 0.0},
                {"bound": 1.0, "clipped_share": 0.8},
                {"bound": 1.0, "counts_share": 0.6, "selection_share": 0.5}):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|leave nothing"):
            Clipping(**bad)
    with pytest.raises(ValueError, match="exactly one"):
        Privacy(epsilon=1.0, noise_multiplier=1.0)


def test_equalized_odds_uses_both_rates() -> None:
    data = make_population()
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), data, equalized_odds("sex"))
    assert engine.layout.rates == ("FNR", "FPR")


# How many were clipped, for those who ask.

COUNTED = {
    "joint": Clipping(1.5, clipped_share=0.02),
    "blocks": Clipping(1.5, counts=2.0, selection=1.0, clipped_share=0.02),
}


@pytest.mark.parametrize("how", COUNTED)
def test_clipped_users_are_counted_where_they_are_clipped(how) -> None:
    where = Layout(4, ("FNR", "FPR"), ("a", "b"), basis="split", clipped=True)
    assert list(where.shapes)[-1] == "clipped"
    g = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.01, 1.0, 60).unsqueeze(1)
    rows = scale * torch.randn(60, where.size, generator=g)
    rows[:, -1] = 0.0  # what users send there
    rows[3, 2], rows[4, 0] = float("nan"), float("inf")  # bad ones count nothing
    rows[5, :4] = 3e38  # too long for its norm
    rules = rules_of(COUNTED[how], where)
    first = rules[0]
    sent = torch.cat([rows[:, place] for place in first.places], dim=1)
    over = (sent.double().norm(dim=1) > 1.5) & sent.isfinite().all(dim=1)
    over[5] = False
    assert 10 < int(over.sum()) < 55
    clipped = clip(DenseRows(rows, where.slices), rules)
    assert torch.equal(clipped[:, -1].bool(), over)
    total = clipped_sum(DenseRows(rows, where.slices), rules)
    assert float(total[-1]) == int(over.sum())
    assert float(where.totals(total, 1.0).clipped) == int(over.sum())
    # All else is as if nobody counted.
    less = Layout(4, ("FNR", "FPR"), ("a", "b"), basis="split")
    plain = clipped_sum(DenseRows(rows[:, :-1], less.slices), rules_of(COUNTED[how], less))
    torch.testing.assert_close(total[:-1], plain)


def test_the_clipped_users_have_a_block_and_a_share_of_their_own() -> None:
    for how in COUNTED.values():
        for constrained in (True, False):
            blocks = how.blocks(constrained=constrained, selection=True)
            assert (blocks[-1].name, blocks[-1].bound, blocks[-1].share) == ("clipped", 1.0, 0.02)
            assert math.isclose(sum(block.share for block in blocks), 1.0)
    assert "clipped" not in {b.name for b in JOINT.blocks(constrained=True, selection=True)}
    with pytest.raises(ValueError, match="nobody is clipped"):
        ThirdParty(Layout(4, clipped=True).slices)
    with pytest.raises(ValueError, match="do not cover"):
        ThirdParty(Layout(4, clipped=True).slices, JOINT.blocks(constrained=False, selection=True))


@pytest.mark.parametrize("memory", [2**30, 20_000])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_count_comes_through_chunks_and_noise(memory, noisy) -> None:
    """Within 5.2 standard deviations of the noise: a false alarm once in 5 million."""
    data = make_population(users=200)
    model = FlatModel.of(nn.Linear(5, 1))
    how = Clipping(0.4, clipped_share=0.1)
    engine = CohortEngine(model, data, fnr_parity("sex"), memory=memory, clipped=True)
    blocks = how.blocks(constrained=True, selection=True)
    plan = Privacy(noise_multiplier=1.0, clip=how).plan(
        population=200, cohort=100, rounds=1, blocks=blocks
    )
    third_party = ThirdParty(engine.layout.slices, blocks, plan if noisy else None)
    w, users = model.vector(), torch.arange(200).numpy()
    parts = list(engine.statistics(w, users))
    # Users with few samples and with many are apart in any case.
    assert (len(parts) > 2) == (memory < 2**30)
    released = third_party.release(parts, w, 1)
    rows = vectors(engine, w, users)
    assert bool((rows[:, -1] == 0).all())  # users do not know
    places = [engine.layout.slices[name] for name in ("loss_gradient", "F", "F_gradient", "n")]
    norms = torch.cat([rows[:, place] for place in places], dim=1).norm(dim=1)
    true = int((norms > 0.4).sum())
    assert 20 < true < 200
    counted = float(engine.layout.totals(released, 1.0).clipped)
    if not noisy:
        assert counted == true
    else:
        stddev = float(third_party.noise_stddev[-1])
        assert stddev == pytest.approx(1 / 0.1**0.5, rel=2e-3)
        assert counted != true
        assert abs(counted - true) < 5.2 * stddev


def test_without_being_asked_nothing_is_said_about_clipping() -> None:
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), make_population(), fnr_parity("sex"))
    assert "clipped" not in engine.layout.shapes
    totals = engine.layout.totals(torch.zeros(engine.layout.size), 1.0)
    assert totals.clipped is None
    assert (totals + totals).clipped is None


def test_counts_of_clipped_users_add_up_over_rounds() -> None:
    where = Layout(4, clipped=True)
    v = torch.zeros(where.size)
    v[-1] = 3.0
    totals = where.totals(v, 1.0)
    assert float((totals + totals).clipped) == 6.0
