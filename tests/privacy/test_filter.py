"""The privacy filter: what one release costs, and what fits into a budget."""

from __future__ import annotations

import json
import math
import sys
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fpfl.privacy import (
    Block,
    MissingAccountantError,
    PrivacyPlan,
    epsilon_poisson,
    epsilon_without_replacement,
    gaussian_epsilon,
)
from fpfl.privacy.filter import (
    Mechanism,
    PrivacyFilter,
    _renyi,
    good_order,
    renyi_budget,
)
from fpfl.privacy.renyi import fixed_size_renyi, renyi_epsilon

dp = pytest.importorskip("dp_accounting")

K, DELTA = 16280, 5e-5
ADULT = Mechanism("poisson", K, 200, 1.006, "zero-out")

paper_delta = pytest.mark.filterwarnings("ignore::fpfl.privacy.PrivacyWarning")


def rdp(event, order, relation="ADD_OR_REMOVE_ONE"):
    accountant = dp.rdp.RdpAccountant([order], getattr(dp.NeighboringRelation, relation))
    accountant.compose(event)
    return float(accountant.rdp[0])


@st.composite
def mechanisms(draw, population=None, neighbours=("zero-out", "add-remove", "replace-one")):
    users = population or draw(st.integers(1, 10**6))
    relation = draw(st.sampled_from(neighbours))
    sampler = draw(st.sampled_from(["poisson", "all"] + ["fixed"] * (relation == "replace-one")))
    cohort = users if sampler == "all" else draw(st.integers(1, users))
    return Mechanism(sampler, users, cohort, draw(st.floats(0.3, 50)), relation)


# --- One release --------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["zero-out", "add-remove"])
def test_poisson_is_the_sampled_gaussian(relation):
    event = dp.PoissonSampledDpEvent(200 / K, dp.GaussianDpEvent(1.5))
    for order in (2, 3, 7, 32):
        found = Mechanism("poisson", K, 200, 1.5, relation).renyi(order)
        for name in ("ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL"):
            assert rdp(event, order, name) < found
            assert found == pytest.approx(rdp(event, order, name), rel=1e-8)


def test_everyone_and_no_amplification():
    for relation, size in (("zero-out", 1), ("add-remove", 1), ("replace-one", 2)):
        for order in (2, 9, 300):
            plain = order * size**2 / (2 * 1.7**2)
            assert Mechanism("all", 50, 50, 1.7, relation).renyi(order) == pytest.approx(plain)
            # Poisson sampling where everyone takes part is the same thing.
            assert Mechanism("poisson", 50, 50, 1.7, relation).renyi(order) == pytest.approx(plain)
    # With replace-one neighbours there is no bound for Poisson sampling but this one.
    assert Mechanism("poisson", 50, 5, 1.7, "replace-one").renyi(4) == pytest.approx(
        4 * 4 / (2 * 1.7**2)
    )


@pytest.mark.parametrize("cohort", [1, 200, 1000, 5000])
@pytest.mark.parametrize("noise", [1.0, 3.0, 16.0])
def test_fixed_size_is_wang_et_al_at_twice_the_clip_bound(cohort, noise):
    event = dp.SampledWithoutReplacementDpEvent(K, cohort, dp.GaussianDpEvent(noise / 2))
    for order in (2, 3, 4, 9, 16, 300):
        found = Mechanism("fixed", K, cohort, noise, "replace-one").renyi(order)
        plain = order * 4 / (2 * noise**2)
        expected = min(rdp(event, order, "REPLACE_ONE"), plain)
        assert found == pytest.approx(expected, rel=1e-6, abs=2e-15)
        assert found >= expected * (1 - 1e-7)


def test_fixed_size_where_floating_point_cancels():
    """dp_accounting is 0.7 % too low here; the figure was checked with 120 digits."""
    event = dp.SampledWithoutReplacementDpEvent(
        10**7, 6_400_357, dp.GaussianDpEvent(6.925251776623221)
    )
    exact = fixed_size_renyi(79, 6.925251776623221, 10**7, 6_400_357)
    assert exact == pytest.approx(0.5055111458828295, rel=1e-12)
    assert rdp(event, 79, "REPLACE_ONE") < 0.995 * exact


@settings(max_examples=60)
@given(mechanisms(), st.integers(2, 60))
def test_one_release_is_bounded_and_monotone(mechanism, order):
    rho = mechanism.renyi(order)
    size = 2 if mechanism.neighbours == "replace-one" else 1
    assert 0 < rho <= order * size**2 / (2 * mechanism.noise_multiplier**2) * (1 + 1e-12)
    assert rho <= mechanism.renyi(order + 1) * (1 + 1e-12)
    louder = Mechanism(**mechanism.as_dict() | {"noise_multiplier": 2 * mechanism.noise_multiplier})
    assert louder.renyi(order) <= rho
    if mechanism.sampler != "all" and mechanism.cohort < mechanism.population:
        more = Mechanism(**mechanism.as_dict() | {"cohort": mechanism.cohort + 1})
        assert rho <= more.renyi(order) * (1 + 1e-8)


@pytest.mark.parametrize("noise", [1e-200, 1e-9, 1e9])
def test_extreme_noise(noise):
    for sampler, relation in (("poisson", "zero-out"), ("fixed", "replace-one")):
        mechanism = Mechanism(sampler, K, 200, noise, relation)
        rho = mechanism.renyi(8)
        assert rho > 1e4 if noise < 1 else 0 < rho < 2e-15
        limit = PrivacyFilter(100, DELTA, 8)
        assert (limit.room({}, mechanism) == 0) == (noise < 1)


@paper_delta
def test_of_a_plan_is_what_really_happens():
    blocks = (Block("statistics", 1.0),)
    shared = {"cohort": 200, "rounds": 10, "noise_multiplier": 1.7, "blocks": blocks}
    paper = PrivacyPlan(population=100_000, real_population=K, convention="paper", **shared)
    assert Mechanism.of(paper) == Mechanism("fixed", K, 200, 1.7, "replace-one")
    honest = PrivacyPlan(population=K, convention="replace-one", **shared)
    assert Mechanism.of(honest) == Mechanism.of(paper)
    capped = PrivacyPlan(population=K, max_participations=3, neighbours="add-remove", **shared)
    assert Mechanism.of(capped) == Mechanism("poisson", K, 200, 1.7, "add-remove")


@given(mechanisms())
def test_to_json_and_back(mechanism):
    values = json.loads(json.dumps(mechanism.as_dict()))
    again = Mechanism.from_dict(values)
    assert again == mechanism
    assert hash(again) == hash(mechanism)


@pytest.mark.parametrize(
    "change",
    [
        {"sampler": "cycling"}, {"sampler": None}, {"neighbours": "none"}, {"neighbours": ["x"]},
        {"population": 0}, {"population": 1.5}, {"population": "9"}, {"cohort": True},
        {"cohort": K + 1}, {"noise_multiplier": 0}, {"noise_multiplier": math.nan},
        {"noise_multiplier": "1"}, {"sampler": "fixed"}, {"sampler": "all"}, {"more": 1},
    ],
)  # fmt: skip
def test_strict(change):
    with pytest.raises(ValueError, match=r"must|cannot|where everyone"):
        Mechanism.from_dict(ADULT.as_dict() | change)


def test_strict_about_what_is_missing():
    for name in ADULT.as_dict():
        values = ADULT.as_dict()
        del values[name]
        with pytest.raises(ValueError, match="exactly the fields"):
            Mechanism.from_dict(values)
    with pytest.raises(ValueError, match="exactly the fields"):
        Mechanism.from_dict(None)
    for order in (1, 2.5, "2", True):
        with pytest.raises(ValueError, match="order must be"):
            ADULT.renyi(order)


def test_without_an_accountant(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    _renyi.cache_clear()
    with pytest.raises(MissingAccountantError, match="dp-accounting"):
        ADULT.renyi(7)
    assert Mechanism("all", 9, 9, 1.0, "zero-out").renyi(2) == 1.0
    assert Mechanism("fixed", 9, 2, 4.0, "replace-one").renyi(2) > 0


# --- ε and ρ ------------------------------------------------------------------------------------


@given(st.floats(1e-6, 50), st.integers(2, 500), st.floats(1e-12, 0.5))
def test_conversion_is_dp_accountings(rho, order, delta):
    # It has a shortcut for tiny divergences, which is no part of the formula.
    assume(delta**2 + math.expm1(-rho) <= 0)
    found, _ = dp.rdp.compute_epsilon([order], [rho], delta)
    assert renyi_epsilon(rho, order, delta) == pytest.approx(found, rel=1e-9, abs=1e-12)


@given(st.floats(1e-4, 100), st.integers(2, 5000), st.floats(1e-15, 0.5))
def test_budget_is_the_inverse(epsilon, order, delta):
    rho = renyi_budget(epsilon, order, delta)
    assert rho >= 0
    if rho > 0:
        back = renyi_epsilon(rho, order, delta)
        assert back <= epsilon
        assert back == pytest.approx(epsilon, abs=1e-9)
        assert renyi_epsilon(rho + 1e-9, order, delta) > epsilon * (1 - 1e-12)


def test_nothing_costs_nothing():
    assert renyi_epsilon(0.0, 5, DELTA) == 0.0
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="rho"):
            renyi_epsilon(wrong, 5, DELTA)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0, 20.0, 100.0])
@pytest.mark.parametrize("delta", [1e-10, DELTA, 1e-2])
def test_good_order_has_most_room_for_a_gaussian(epsilon, delta):
    room = [renyi_budget(epsilon, order, delta) / order for order in range(2, 6000)]
    best = good_order(epsilon, delta)
    assert renyi_budget(epsilon, best, delta) / best == pytest.approx(max(room), rel=1e-9)


@pytest.mark.parametrize("noise", [0.7, 1.006, 2.0, 8.0])
def test_good_order_of_a_mechanism(noise):
    for mechanism in (
        Mechanism("poisson", K, 200, noise, "zero-out"),
        Mechanism("fixed", K, 200, 2 * noise, "replace-one"),
    ):
        rooms = {o: PrivacyFilter(2.0, DELTA, o).room({}, mechanism) for o in range(5, 40)}
        assert rooms[good_order(2.0, DELTA, mechanism)] == max(rooms.values())


# --- The filter ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cohort", "rounds", "noise", "epsilon", "factor"),
    [
        (200, 1000, 1.006, 2.0, 1.15),
        (200, 250, 0.789, 2.0, 1.35),  # little noise: Rényi DP is at its worst
        (1000, 1000, 3.636, 2.0, 1.15),
        (1000, 250, 1.974, 2.0, 1.15),
        (200, 1000, 1.518, 1.0, 1.15),
        (200, 1000, 2.572, 0.5, 1.15),
    ],
)
def test_adult_poisson(cohort, rounds, noise, epsilon, factor):
    """Never below the tight figure for the same plan, and not far above it."""
    mechanism = Mechanism("poisson", K, cohort, noise, "zero-out")
    limit = PrivacyFilter(epsilon, DELTA, good_order(epsilon, DELTA, mechanism))
    tight = epsilon_poisson(noise, cohort / K, rounds, DELTA)
    assert tight == pytest.approx(epsilon, rel=0.01)
    assert tight <= limit.spent({mechanism: rounds}) <= factor * tight
    wide = PrivacyFilter(factor * epsilon, DELTA, limit.order)
    assert wide.fits({mechanism: rounds})


def test_an_order_for_gaussians_is_a_poor_one_for_little_noise():
    plain = PrivacyFilter(2.0, DELTA, good_order(2.0, DELTA))
    chosen = PrivacyFilter(2.0, DELTA, good_order(2.0, DELTA, ADULT))
    assert chosen.room({}, ADULT) > 2 * plain.room({}, ADULT)


@pytest.mark.parametrize(
    ("cohort", "rounds", "noise"),
    [(200, 1000, 1.723), (200, 250, 1.014), (1000, 1000, 7.813), (1000, 250, 4.006)],
)
def test_adult_fixed_size(cohort, rounds, noise):
    """The plan's accountant is Rényi DP, too: at its best order the two agree."""
    mechanism = Mechanism("fixed", K, cohort, 2 * noise, "replace-one")
    limit = PrivacyFilter(2.0, DELTA, good_order(2.0, DELTA, mechanism))
    plan = epsilon_without_replacement(noise, K, cohort, rounds, DELTA)
    found = limit.spent({mechanism: rounds})
    assert plan * (1 - 1e-9) <= found <= 1.001 * plan


def test_everyone_against_the_exact_figure():
    mechanism = Mechanism("all", 1000, 1000, 20.0, "zero-out")
    limit = PrivacyFilter(2.0, DELTA, good_order(2.0, DELTA))
    exact = gaussian_epsilon(20.0, 100, DELTA)
    assert exact <= limit.spent({mechanism: 100}) <= 1.15 * exact


@settings(max_examples=60)
@given(
    st.dictionaries(mechanisms(1000, ("replace-one",)), st.integers(0, 30), max_size=4),
    mechanisms(1000, ("replace-one",)),
    st.floats(0.5, 60),
    st.integers(2, 12),
)
def test_room_is_exact(charges, mechanism, epsilon, order):
    assume(renyi_budget(epsilon, order, 1e-4) > 1e-9)
    limit = PrivacyFilter(epsilon, 1e-4, order)
    room = limit.room(charges, mechanism)
    before = charges.get(mechanism, 0)
    if limit.fits(charges):
        assert limit.fits(charges | {mechanism: before + room})
        assert limit.rho(charges | {mechanism: before + room}) <= limit.budget
        assert limit.spent(charges | {mechanism: before + room}) <= epsilon
    else:
        assert room == 0
    assert not limit.fits(charges | {mechanism: before + room + 1})


@settings(max_examples=30)
@given(
    st.lists(st.tuples(mechanisms(1000, ("replace-one",)), st.integers(0, 9**9)), max_size=4),
    st.integers(2, 12),
)
def test_the_order_of_charges_does_not_matter(pairs, order):
    limit = PrivacyFilter(80.0, 1e-4, order)
    sums = {limit.rho(dict(some)) for some in permutations(dict(pairs).items())}
    assert len(sums) == 1
    rho = sums.pop()
    assert rho == pytest.approx(sum(t * m.renyi(order) for m, t in dict(pairs).items()))
    more = {mechanism: times + 1 for mechanism, times in pairs}
    assert limit.rho(more) > rho or not pairs
    assert limit.spent(more) >= limit.spent(dict(pairs))


def test_settings_are_checked():
    limit = PrivacyFilter(2, DELTA, 7)
    assert limit == PrivacyFilter(2.0, DELTA, 7)
    assert limit.spent({}) == 0.0
    assert limit.fits({})
    for epsilon, delta, order in (
        (0, DELTA, 7), (1001, DELTA, 7), (2, 0, 7), (2, 1, 7), (2, DELTA, 1), (2, DELTA, 2.5),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"epsilon|delta|order"):
            PrivacyFilter(epsilon, delta, order)
    with pytest.raises(ValueError, match=r"no room for any release: use good_order.* is 98"):
        PrivacyFilter(0.1, DELTA, 2)
    with pytest.raises(ValueError, match="whole number"):
        limit.rho({ADULT: 1.5})
    with pytest.raises(ValueError, match="at least 0"):
        limit.rho({ADULT: -1})
