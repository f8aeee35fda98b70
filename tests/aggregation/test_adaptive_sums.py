"""Clipping and noise where the bound adapts: what one user changes, at every level of the grid."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_population, thorough, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpfl
from fpfl import AdaptiveBound, Clipping, Privacy
from fpfl.aggregation import DenseRows, SystemNoise, ThirdParty, clip
from fpfl.aggregation.clipping import at_bound
from fpfl.aggregation.noise import GRID_BITS
from fpfl.numerics.summing import STEP_BITS
from fpfl.users import CohortEngine, FlatModel

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

ADAPTS = AdaptiveBound(0.3)
FORMS = {
    "joint": Clipping(0.7, adapts=ADAPTS),
    "counts of their own": Clipping(0.7, counts=2.0, adapts=ADAPTS),
}
FIRST = {"joint": "joint", "counts of their own": "gradients"}


def engine_of(form: str, **how) -> CohortEngine:
    basis = "paper" if form == "joint" else "split"
    return CohortEngine(
        FlatModel.of(nn.Linear(5, 1)),
        make_population(users=40),
        fpfl.fnr_parity("sex"),
        basis=basis,
        clipped=True,
        **how,
    )


def party_of(form: str, engine: CohortEngine, noise: float | None = 1.0) -> ThirdParty:
    clipping = FORMS[form]
    blocks = clipping.blocks(constrained=True, selection=True)
    plan = None
    if noise is not None:
        plan = Privacy(noise_multiplier=noise, clip=clipping).plan(
            population=1000, cohort=100, rounds=1
        )
    return ThirdParty(engine.layout.slices, blocks, plan, SystemNoise(), grid=clipping.grid)


@pytest.mark.parametrize("form", FORMS)
@given(
    level=st.integers(-40, 40), user=st.integers(0, 39), others=st.integers(0, 39),
    scale=st.floats(-3.0, 3.0),
)  # fmt: skip
@settings(max_examples=thorough(30, 300))
def test_a_user_changes_its_own_bit_and_clipped_vector_and_nothing_else(
    form, level, user, others, scale
) -> None:
    """In whole steps, exactly: within the round's bound, whatever it is, and whoever else is there.

    The bit is ±½, which is ±2³⁸ steps; a user who has no samples sends nothing, not even that.
    """
    engine = engine_of(form)
    party = party_of(form, engine).at(level)
    w = engine.model.vector() * 10**scale
    company = np.array([k for k in range(others) if k != user], dtype=np.int64)

    def total(users: np.ndarray) -> torch.Tensor:
        return party.sum(engine.statistics(w, users), w)

    there = total(np.sort(np.append(company, user)))
    moved = there - total(company) if len(company) else there
    alone = total(np.array([user]))
    assert torch.equal(moved, alone)
    (row,) = vectors(engine, w, np.array([user]))
    for rule in party.rules:
        own = torch.cat([moved[place] for place in rule.places]).double()
        norm = float(own.abs().sum() if rule.order == 1 else own.square().sum().sqrt())
        assert norm <= rule.most
        if rule.name == FIRST[form]:
            assert rule.bound == party.grid.at(level)
            before = torch.cat([row[place] for place in rule.places]).double()
            over = float(before.norm()) > rule.bound
    bit = int(moved[engine.layout.slices["clipped"]])
    half = 2**STEP_BITS
    empty = int(engine.data.sizes()[user]) == 0
    assert bit == (0 if empty else half if over else -half)


@pytest.mark.parametrize("form", FORMS)
def test_the_released_sum_says_the_fraction(form) -> None:
    """(n_clipped − n/2)/m + ½, for the users that were there; a user with bad numbers is not."""
    engine = engine_of(form)
    rows = vectors(engine, engine.model.vector(), np.arange(40))
    present = engine.data.sizes() > 0
    rows = rows[present]
    rows[0, 0] = float("nan")
    party = party_of(form, engine, noise=None)
    for level in (-20, -3, 0, 2, 9):
        rules = party.at(level).rules
        clipped = clip(DenseRows(rows, engine.layout.slices), rules)
        places = [place for rule in rules[:1] for place in rule.places]
        norms = torch.cat([rows[1:, place] for place in places], dim=1).norm(dim=1)
        over = norms > party.grid.at(level)
        assert clipped[0].abs().sum() == 0
        assert torch.equal(clipped[1:, -1], over.to(clipped.dtype) - 0.5)
        total = party.at(level).release([DenseRows(rows, engine.layout.slices)], rows[0], 1)
        assert float(total[-1]) == pytest.approx(int(over.sum()) - len(over) / 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", [-17, 0, 11])
def test_noise_is_in_proportion_to_the_bound(form, level) -> None:
    """Of N numbers Σ(x/s)² is χ²(N): within 6 of its deviations √(2N), up and down.

    A false alarm in 6 cases of up to 4 blocks less than once in 10⁶. The levels are factors of 19
    and 1/7 away: noise of another level would be seen for sure.
    """
    engine = engine_of(form)
    party = party_of(form, engine, noise=1.3).at(level)
    assert party.plan is not None
    like = torch.zeros(party.size, dtype=torch.float64)
    draws = torch.stack([party.release([], like, t) for t in range(1500)])
    for rule in party.rules:
        planned = party.plan.noise_stddev(rule.name)
        factor = party.grid.at(level) / 0.7 if rule.name == FIRST[form] else 1.0
        sample = torch.cat([draws[:, place] for place in rule.places], dim=1) / (planned * factor)
        squares, count = float(sample.square().sum()), sample.numel()
        # (s' is up to 10⁻⁵ more than s, for rounding: far below 1/√N.)
        assert abs(squares - count) < 6 * math.sqrt(2 * count)
        # In whole steps of the round's own grid.
        step = float(party.noise_stddev[rule.places[0].start]) * 2.0**-GRID_BITS
        multiples = draws[:, rule.places[0]] / step
        assert float((multiples - multiples.round()).abs().max()) < 2.0**-20


@given(level=st.integers(-40, 40), form=st.sampled_from(list(FORMS)))
def test_what_is_accounted_for_is_the_same_at_every_level(level, form) -> None:
    """C_b/s_b of every block is the plan's, and all blocks' together 1/σ²."""
    engine = engine_of(form)
    party = party_of(form, engine)
    at = party.at(level)
    assert at.plan is party.plan
    assert at.plan is not None
    squares = 0.0
    for rule, planned in zip(at.rules, party.rules, strict=True):
        ratios = [
            float(each.noise_stddev[r.places[0].start]) / r.bound
            for each, r in ((at, rule), (party, planned))
        ]
        assert ratios[0] == pytest.approx(ratios[1], rel=1e-14)
        assert ratios[0] >= at.plan.noise_stddev(rule.name) / planned.bound
        squares += (planned.bound / at.plan.noise_stddev(rule.name)) ** 2
        assert rule.step == rule.bound * 2.0**-STEP_BITS
    assert squares == pytest.approx(1.0)


def test_a_fixed_bound_has_no_other_level() -> None:
    engine = engine_of("joint")
    fixed = replace(party_of("joint", engine), grid=None)
    assert fixed.at(None) is fixed
    assert fixed.at(0) is fixed
    with pytest.raises(ValueError, match="level 3 of a clip bound was asked for"):
        fixed.at(3)
    with pytest.raises(ValueError, match="whole numbers from -40 to 40"):
        party_of("joint", engine).at(41)


def test_bounds_of_counts_stay_what_they_are() -> None:
    rules = party_of("counts of their own", engine_of("counts of their own")).rules
    moved = {rule.name: rule.bound for rule in at_bound(rules, 9.0)}
    assert moved == {"gradients": 9.0, "counts": 2.0, "selection": 2.0, "clipped": 0.5}


# --- whole trainings ----------------------------------------------------------------------------


def train(clip: Clipping, *, noise: float | None = None, **more) -> fpfl.Run:
    how = {
        "cohort": 200,
        "rounds": 80,
        "constraint": fpfl.fnr_parity("sex"),
        "method": fpfl.OneGradient() if clip.counts else fpfl.MMDM(),
        "learning_rate": 1e-9,
        "seed": 0,
        "selection": "last",
    } | more
    if noise is None:
        return fpfl.train(fpfl.mlp(5, (4,), seed=0), people(), clip=clip, **how)
    private = Privacy(noise_multiplier=noise, clip=clip)
    return fpfl.train(fpfl.mlp(5, (4,), seed=0), people(), privacy=private, noise_seed=1, **how)


def people() -> fpfl.FederatedDataset:
    return make_population(users=200, mean=5.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", [0.1, 0.5])
@pytest.mark.parametrize("start", [0.01, 30.0])
def test_the_bound_finds_the_fraction(form, target, start) -> None:
    """At a model that stays where it is, without noise: within a level's part of the users."""
    adapts = AdaptiveBound(target, rate=0.6)
    run = train(replace(FORMS[form], bound=start, adapts=adapts))
    last = run.history[-20:]
    assert np.mean([row["clipped_fraction"] for row in last]) == pytest.approx(target, abs=0.06)
    assert {row["clip_bound"] for row in run.history} <= set(
        replace(FORMS[form], bound=start, adapts=adapts).grid.bounds
    )
    for row in run.history:  # everybody takes part
        assert row["clipped"] == pytest.approx(200 * row["clipped_fraction"])


@pytest.mark.parametrize("form", FORMS)
def test_with_noise_the_rows_are_functions_of_what_was_released(form) -> None:
    """The course follows from the released sums alone: nothing else moves the bound."""
    clipping = replace(FORMS[form], adapts=AdaptiveBound(0.2, rate=1.0, share=0.05))
    seen: list[fpfl.RoundEvent] = []
    run = train(clipping, noise=1.0, callbacks=[seen.append], rounds=20)
    grid, u = clipping.grid, 0.0
    for row, event in zip(run.history, seen, strict=True):
        assert row["clip_bound"] == grid.at(grid.level(u))
        fraction = min(1.0, max(0.0, float(event.v[-1]) / 200 + 0.5))
        assert row["clipped_fraction"] == fraction
        u = grid.moved(u, fraction)
    assert len({row["clip_bound"] for row in run.history}) > 5


def test_a_run_whose_bound_cannot_move_is_the_one_with_that_bound() -> None:
    """Same blocks, same noise: the levels change nothing else. (The count has bound ½, not 1.)"""
    held = AdaptiveBound(0.3, share=0.02, least=0.7, most=0.7 * 1.01)
    one = train(Clipping(0.7, counts=2.0, adapts=held), noise=1.0, learning_rate=0.1)
    other = train(Clipping(0.7, counts=2.0, clipped_share=0.02), noise=1.0, learning_rate=0.1)
    assert {row["clip_bound"] for row in one.history} == {0.7}
    mine, theirs = (
        torch.cat([p.flatten() for p in run.model.parameters()]) for run in (one, other)
    )
    assert torch.equal(mine, theirs)
    assert one.privacy.epsilon == other.privacy.epsilon


def test_the_learning_rate_follows_the_bound() -> None:
    """A step of η min(1, C_ref/C_t), and the optimiser's own state keeps η."""
    adapts = AdaptiveBound(0.3, ratio=2.0, rate=3.0, reference=1.0)
    clip = Clipping(0.7, counts=2.0, adapts=adapts)
    seen: list[fpfl.RoundEvent] = []
    start = torch.cat([p.detach().flatten() for p in fpfl.mlp(5, (4,), seed=0).parameters()])
    train(clip, rounds=6, learning_rate=0.5, callbacks=[seen.append])
    assert max(event.row["clip_bound"] for event in seen) > 2.0
    before = start
    for event in seen:
        factor = min(1.0, 1.0 / event.row["clip_bound"])
        step = 0.5 * factor * event.v[: len(before)] / 200
        torch.testing.assert_close(event.w, before - step)
        before = event.w


def test_the_noise_of_joint_counts_follows_the_bound(monkeypatch) -> None:
    """What is below its noise floor is judged by the noise of the round, not of the first one."""
    import fpfl.server.loop as loop

    given_: list[tuple[float, float]] = []
    real = loop.step

    def watched(settings, method, v):
        given_.append((settings.count_noise, settings.smallest_count))
        return real(settings, method, v)

    monkeypatch.setattr(loop, "step", watched)
    clip = replace(FORMS["joint"], adapts=AdaptiveBound(0.2, rate=2.0))
    run = train(clip, noise=1.0, rounds=8)
    first = given_[0][0]
    assert first > 0
    for row, (noise, smallest) in zip(run.history, given_, strict=True):
        assert noise == pytest.approx(first * row["clip_bound"] / 0.7)
        assert smallest == max(1.0, 2 * noise)
    assert len(set(given_)) > 3
