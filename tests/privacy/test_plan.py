"""The plan: what can be built, what cannot, and what it promises."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.privacy import (
    Block,
    FixedSizeSampling,
    PoissonSampling,
    PrivacyPlan,
    PrivacyWarning,
    compare_conventions,
    epsilon_without_replacement,
    gaussian_epsilon,
    participations_bound,
)

CONVENTIONS = ["paper", "replace-one", "poisson"]
NEIGHBOURS = ["replace-one", "zero-out", "add-remove"]
VALID = {
    ("paper", "replace-one"): (1, FixedSizeSampling),
    ("replace-one", "replace-one"): (2, FixedSizeSampling),
    ("poisson", "zero-out"): (1, PoissonSampling),
    ("poisson", "add-remove"): (1, PoissonSampling),
    ("poisson", "replace-one"): (2, PoissonSampling),
}
ADULT = {"population": 16280, "cohort": 200, "rounds": 1000}
ONE = (Block("statistics", 1.0),)

paper_delta = pytest.mark.filterwarnings("ignore::fpfl.privacy.PrivacyWarning")


def plan(**changes):
    return PrivacyPlan(**{**ADULT, "noise_multiplier": 1.0, "blocks": ONE, **changes})


@pytest.mark.parametrize(
    ("convention", "neighbours"), list(itertools.product(CONVENTIONS, NEIGHBOURS))
)
def test_only_pairs_with_a_proof_can_be_built(convention, neighbours):
    if (convention, neighbours) not in VALID:
        with pytest.raises(ValueError, match="another fills the slot"):
            plan(convention=convention, neighbours=neighbours)
        return
    sensitivity, sampler = VALID[convention, neighbours]
    built = plan(convention=convention, neighbours=neighbours)
    assert built.sensitivity == sensitivity
    assert isinstance(built.sampling, sampler)
    assert built.sampling.probability == 200 / 16280


def test_defaults():
    assert plan().convention == "poisson"
    assert plan().neighbours == "zero-out"
    assert plan(convention="paper").neighbours == "replace-one"
    assert plan(convention="replace-one").neighbours == "replace-one"
    assert plan().delta == 1 / 162800
    with pytest.raises(TypeError):
        PrivacyPlan(16280, 200, 1000)


def test_plans_are_frozen_comparable_and_can_be_changed_by_replacement():
    built = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.noise_multiplier = 0.0
    assert built == plan()
    assert hash(built) == hash(plan())
    assert dataclasses.replace(built, rounds=10) == plan(rounds=10)
    assert plan(population=np.int64(16280), noise_multiplier=np.float32(1.0)) == built


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convention": "wrong"}, "convention must be one of"),
        ({"neighbours": "wrong"}, "neighbours must be one of"),
        ({"population": 0}, "population must be at least 1"),
        ({"population": 100}, "cohort must not exceed population"),
        ({"cohort": 0}, "cohort must be at least 1"),
        ({"cohort": 2.5}, "cohort must be a whole number"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be positive"),
        ({"noise_multiplier": "1"}, "noise_multiplier must be a number"),
        ({"delta": 0.0}, "delta must be positive"),
        ({"delta": 1 / 16280}, r"delta must be below 1 / population"),
        ({"max_participations": 0}, "max_participations must be at least 1"),
        ({"real_population": 100}, "cohort must not exceed real_population"),
        ({"blocks": ()}, "blocks must not be empty"),
        ({"blocks": (1.0,)}, "blocks must be Block objects"),
        ({"blocks": (Block("a", 1.0, 0.5), Block("a", 1.0, 0.5))}, "different names"),
        ({"blocks": (Block("a", 1.0, 0.5), Block("b", 1.0, 0.6))}, "must add up to 1"),
        ({"blocks": (Block("a", 1.0, 0.5),)}, "must add up to 1"),
    ],
)
def test_refuses_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1.0), "non-empty string"),
        (("a", 0.0), "bound of block 'a' must be positive"),
        (("a", math.inf), "bound of block 'a' must be positive"),
        (("a", 1.0, 0.0), "share of block 'a' must be in"),
        (("a", 1.0, 1.5), "share of block 'a' must be in"),
    ],
)
def test_refuses_bad_blocks(arguments, message):
    with pytest.raises(ValueError, match=message):
        Block(*arguments)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 100.1, math.inf, "2"])
def test_refuses_bad_epsilon(epsilon):
    with pytest.raises(ValueError, match="epsilon must be"):
        PrivacyPlan.calibrate(epsilon=epsilon, blocks=ONE, **ADULT)


@pytest.mark.parametrize(
    ("convention", "neighbours"),
    [("paper", None), ("replace-one", None), ("poisson", "replace-one")],
)
def test_refuses_a_cap_where_it_has_no_proof(convention, neighbours):
    with pytest.raises(ValueError, match="no proof covers that"):
        plan(convention=convention, neighbours=neighbours, max_participations=20)


def test_delta_above_a_tenth_of_one_over_population_warns_the_caller():
    with pytest.warns(PrivacyWarning, match="above 1 / ") as record:
        plan(delta=5e-5)
    assert record[0].filename == __file__
    with pytest.warns(PrivacyWarning) as record:
        PrivacyPlan.calibrate(epsilon=2.0, delta=5e-5, blocks=ONE, **ADULT)
    assert len(record) == 1
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(delta=1 / 162800)
        # A hypothetical population is what δ is compared with.
        plan(population=10**6, real_population=16280, delta=1e-7)
    with pytest.warns(PrivacyWarning):
        plan(population=16280, real_population=10**6, delta=6e-6)


@settings(derandomize=True, max_examples=100)
@given(
    noise=st.floats(1e-3, 1e3),
    parts=st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.01, 1.0)), min_size=1, max_size=6),
)
def test_blocks_together_are_one_gaussian_mechanism(noise, parts):
    total = sum(share for _, share in parts)
    blocks = [Block(f"b{i}", bound, share / total) for i, (bound, share) in enumerate(parts)]
    built = plan(noise_multiplier=noise, blocks=blocks)
    inverse = sum((b.bound / built.noise_stddev(b.name)) ** 2 for b in built.blocks)
    assert inverse == pytest.approx(1 / noise**2, rel=1e-8)


def test_noise_of_one_block_is_in_clip_bounds_and_unknown_blocks_are_named():
    built = plan(noise_multiplier=1.5, blocks=(Block("joint", 2.0),))
    assert built.noise_stddev("joint") == 3.0
    with pytest.raises(ValueError, match="no block 'other' in this plan: its blocks are 'joint'"):
        built.noise_stddev("other")


@paper_delta
@pytest.mark.parametrize(
    ("cohort", "rounds", "noise", "honest"),
    [
        (200, 1000, 1.723, 5.19),
        (200, 250, 1.014, 12.18),
        (1000, 1000, 7.813, 4.48),
        (1000, 250, 4.006, 4.73),
    ],
)
def test_paper_against_replace_one(cohort, rounds, noise, honest):
    shared = {
        "epsilon": 2.0,
        "population": 16280,
        "cohort": cohort,
        "rounds": rounds,
        "delta": 5e-5,
        "blocks": ONE,
    }
    paper = PrivacyPlan.calibrate(convention="paper", **shared)
    assert paper.noise_multiplier == pytest.approx(noise, rel=0.01)
    assert paper.epsilon <= 2.0
    assert paper.epsilon_honest == pytest.approx(honest, rel=0.01)
    twice = PrivacyPlan.calibrate(convention="replace-one", **shared)
    assert twice.noise_multiplier == 2 * paper.noise_multiplier
    assert twice.epsilon == twice.epsilon_honest == paper.epsilon


@paper_delta
@pytest.mark.parametrize(
    ("neighbours", "noise"), [("zero-out", 1.006), ("add-remove", 1.006), ("replace-one", 1.434)]
)
def test_poisson(neighbours, noise):
    built = PrivacyPlan.calibrate(
        epsilon=2.0, delta=5e-5, neighbours=neighbours, blocks=ONE, **ADULT
    )
    assert built.noise_multiplier == pytest.approx(noise, rel=0.01)
    assert 1.999 < built.epsilon <= 2.0
    assert built.epsilon_honest == built.epsilon
    assert built.epsilon_real is None


@pytest.mark.parametrize(("convention", "neighbours"), list(VALID))
def test_server_epsilon_has_the_honest_sensitivity(convention, neighbours):
    built = plan(convention=convention, neighbours=neighbours)
    times = participations_bound(16280, 200, 1000, built.delta)
    assert built.participations == times
    honest = 2 if neighbours == "replace-one" else 1
    expected = gaussian_epsilon(1.0, times, built.delta, sensitivity=honest)
    assert built.epsilon_server == expected
    assert built.epsilon_server > built.epsilon_honest


def test_a_cap_bounds_participations_and_every_epsilon():
    free, capped = plan(), plan(max_participations=20)
    assert capped.participations == 20
    assert capped.epsilon_server < free.epsilon_server
    assert capped.epsilon == free.epsilon
    assert capped.sampling == PoissonSampling(16280, 200, 20)
    assert plan(max_participations=10**6).participations == 1000
    # So tight a cap that the server's ε is less than the accountant finds by amplification.
    tight = plan(cohort=16000, rounds=100, max_participations=2)
    assert tight.epsilon == tight.epsilon_server
    calibrated = PrivacyPlan.calibrate(
        epsilon=2.0,
        population=16280,
        cohort=16000,
        rounds=100,
        max_participations=2,
        blocks=ONE,
    )
    assert 1.999 < calibrated.epsilon <= 2.0
    assert calibrated.noise_multiplier < 5


@paper_delta
def test_a_hypothetical_population_has_a_real_epsilon():
    settings_ = {
        "population": 338_300,
        "real_population": 3383,
        "cohort": 2000,
        "rounds": 2000,
        "delta": 2.5e-6,
        "noise_multiplier": 1.421,
    }
    paper = plan(convention="paper", **settings_)
    assert paper.epsilon == pytest.approx(2.0, rel=0.01)
    assert paper.epsilon_real == epsilon_without_replacement(1.421 / 2, 3383, 2000, 2000, 2.5e-6)
    assert paper.epsilon_real > 100 * paper.epsilon_honest
    assert paper.sampling == FixedSizeSampling(3383, 2000)
    assert paper.participations_real > 10 * paper.participations
    assert paper.epsilon_server_real > paper.epsilon_server
    poisson = plan(**settings_)
    assert 249 < poisson.epsilon_real < 300  # 249 at δ = 2.5e-4
    assert poisson.sampling == PoissonSampling(3383, 2000)
    same = plan(real_population=16280)
    assert (same.epsilon_real, same.participations_real, same.epsilon_server_real) == (None,) * 3
    capped = plan(max_participations=7, **settings_)
    assert capped.participations_real == 7


@settings(derandomize=True, max_examples=10)
@given(
    convention=st.sampled_from(CONVENTIONS), noise=st.floats(0.8, 5.0), rounds=st.integers(20, 900)
)
def test_epsilon_falls_with_noise_and_rises_with_rounds(convention, noise, rounds):
    here = plan(convention=convention, noise_multiplier=noise, rounds=rounds)
    quieter = plan(convention=convention, noise_multiplier=noise / 1.1, rounds=rounds)
    longer = plan(convention=convention, noise_multiplier=noise, rounds=rounds + 50)
    for other in (quieter, longer):
        assert other.epsilon >= here.epsilon
        assert other.epsilon_honest >= here.epsilon_honest
        assert other.epsilon_server >= here.epsilon_server


def test_table_by_epsilon():
    with pytest.warns(PrivacyWarning) as record:
        rows = compare_conventions(epsilon=2.0, delta=5e-5, max_participations=20, **ADULT)
    assert len(record) == 1
    assert [list(row) for row in rows] == 3 * [
        [
            "convention",
            "noise_multiplier",
            "sensitivity",
            "epsilon",
            "epsilon_honest",
            "epsilon_server",
            "delta",
            "delta_server",
            "participations",
        ]
    ]
    paper, replace_one, poisson = rows
    assert [row["convention"] for row in rows] == CONVENTIONS
    assert paper["noise_multiplier"] == pytest.approx(1.723, rel=0.01)
    assert replace_one["noise_multiplier"] == 2 * paper["noise_multiplier"]
    assert poisson["noise_multiplier"] == pytest.approx(1.006, rel=0.01)
    assert [row["sensitivity"] for row in rows] == [1, 2, 1]
    assert all(1.999 < row["epsilon"] <= 2.0 for row in rows)
    assert paper["epsilon_honest"] == pytest.approx(5.19, rel=0.01)
    assert [row["participations"] for row in rows] == [37, 37, 20]
    assert all(row["delta"] == 5e-5 for row in rows)


def test_table_by_noise_multiplier():
    rows = compare_conventions(noise_multiplier=2.0, **ADULT)
    assert {row["noise_multiplier"] for row in rows} == {2.0}
    paper, replace_one, poisson = rows
    assert paper["epsilon_honest"] == replace_one["epsilon"]
    assert poisson["epsilon"] < paper["epsilon"] < replace_one["epsilon"]
    for arguments in ({}, {"epsilon": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(ValueError, match="either epsilon or noise_multiplier"):
            compare_conventions(**ADULT, **arguments)
