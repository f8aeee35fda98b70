"""Audits: bounds that hold at their confidence, canaries that send what they should, and twins.

Audits draw from the operating system's randomness. The sound pipeline is tested at a confidence of
99.99 %, so one of its tests fails by chance with probability 10⁻⁴ at most. The broken twins are
tested at the level that a row of a whole audit has, by attacks and checks that are strong enough to
hardly ever miss one.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from conftest import some
from twins import CASES, CHECKED, LEVEL, WHOLE

from fpfl import AdaptiveBound, Clipping, FederatedAveraging, OneGradient, Privacy
from fpfl.audit import (
    ATTACKS,
    CHECKS,
    AuditSettings,
    CohortSize,
    GradientCanaries,
    Guesses,
    HeavyUser,
    KeptModel,
    ShownMultipliers,
    SilentUser,
    audit,
    default_settings,
    lower_bound,
    one_run_p_value,
    run_audit,
    run_by_run_p_value,
    run_check,
    surest,
)
from fpfl.audit.audits import released
from fpfl.audit.checks import alike, binomial_two_sided, chi_square_above, chi_square_below
from fpfl.audit.setup import Scene, User, _sampled, steps
from fpfl.audit.table import CONFIDENCE
from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier

# --- The statistics -----------------------------------------------------------------------------


def q_of(epsilon: float) -> float:
    return math.exp(epsilon) / (1 + math.exp(epsilon))


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize(("correct", "guesses", "canaries"), [(1, 1, 1), (7, 9, 20), (30, 40, 40)])
def test_the_one_run_p_value_is_the_theorems_formula(correct, guesses, canaries, delta) -> None:
    q = q_of(0.7)
    mass = [math.comb(guesses, w) * q**w * (1 - q) ** (guesses - w) for w in range(guesses + 1)]
    slopes = [sum(mass[max(0, correct - i) : correct]) / i for i in range(1, canaries + 1)]
    expected = min(1.0, sum(mass[correct:]) + 2 * canaries * delta * max(slopes))
    given = one_run_p_value(correct, guesses, 0.7, canaries=canaries, delta=delta)
    assert given == pytest.approx(expected, rel=1e-9)


def test_p_values_fall_with_right_guesses_and_rise_with_epsilon_and_delta() -> None:
    by_correct = [one_run_p_value(v, 50, 1.0, canaries=80, delta=1e-4) for v in range(51)]
    assert all(a >= b for a, b in pairwise(by_correct))
    for p_value in (
        lambda e, d: one_run_p_value(45, 50, e, canaries=80, delta=d),
        lambda e, d: run_by_run_p_value([Guesses(20, 10, (9, 10, 8, 9))], e, delta=d),
    ):
        by_epsilon = [p_value(e, 1e-4) for e in np.linspace(0, 6, 40)]
        assert all(a <= b + 1e-12 for a, b in pairwise(by_epsilon))
        assert p_value(1.0, 0.0) <= p_value(1.0, 1e-3) <= p_value(1.0, 0.1) <= 1.0


def test_large_numbers_do_not_overflow() -> None:
    assert 0.0 < one_run_p_value(50_300, 100_000, 0.0, canaries=10**6) < 0.05
    assert one_run_p_value(100_000, 100_000, 59.0, canaries=10**6) == pytest.approx(1.0)
    assert run_by_run_p_value([Guesses(10, 10, (10,) * 5000)], 0.0) < 1e-300


def test_nobody_gains_by_betting_on_randomised_response() -> None:
    """E[M] = 1 where the bound on c/r is met with equality: by enumeration, and so E[1/p] ≤ 1."""
    q = q_of(1.2)
    expected = 0.0
    for c in product(range(3), repeat=3):
        chance = math.prod(math.comb(2, k) * q**k * (1 - q) ** (2 - k) for k in c)
        p = run_by_run_p_value([Guesses(2, 2, c)], 1.2)
        expected += chance / p
        assert p <= 1.0
    # p is cut at 1, where the better has lost: a little more than M on average, never much.
    assert 1.0 <= expected < 1.5


def failures(draw, epsilon: float, delta: float, confidence: float, times: int) -> int:
    """How often the bound of a mechanism's guesses exceeds its true ε."""
    return sum(
        lower_bound(draw(), delta=delta, confidence=confidence).epsilon > epsilon
        for _ in range(times)
    )


@pytest.mark.parametrize(("runs", "canaries"), [(1, 400), (40, 10), (400, 1)])
def test_coverage_on_randomised_response(runs, canaries) -> None:
    """Randomised response is the worst case of both tests: no slack in the mechanism."""
    rng = np.random.default_rng(7)

    def draw() -> list[Guesses]:
        coins = rng.random((runs, canaries)) < 0.5
        told = coins ^ (rng.random(coins.shape) > q_of(1.0))
        return surest(coins, np.where(told, 1.0, -1.0), (0.1, 0.5, 1.0))

    # 10 % may fail; four standard deviations more is 0.1 + 0.085.
    assert failures(draw, 1.0, 0.0, 0.9, 200) <= 37
    bounds = [lower_bound(draw(), delta=0.0, confidence=0.9).epsilon for _ in range(20)]
    assert np.mean(bounds) > 0.5  # and it is a bound worth having


@pytest.mark.parametrize(("runs", "canaries", "delta"), [(1, 2000, 1e-5), (100, 50, 1e-3)])
def test_coverage_on_a_gaussian_mechanism(runs, canaries, delta) -> None:
    rng = np.random.default_rng(8)
    noise = gaussian_noise_multiplier(2.0, 1, delta)
    assert gaussian_epsilon(noise, 1, delta) == pytest.approx(2.0, rel=1e-6)

    def draw() -> list[Guesses]:
        coins = rng.random((runs, canaries)) < 0.5
        seen = coins + noise * rng.normal(size=coins.shape)
        return surest(coins, seen - 0.5, (0.02, 0.1, 0.5))

    assert failures(draw, 2.0, delta, 0.9, 60) <= 15
    assert lower_bound(draw(), delta=delta, confidence=0.9).epsilon > 0.5


@pytest.mark.parametrize(("runs", "delta"), [(1, 0.04), (60, 0.04), (60, 0.002)])
def test_coverage_where_a_mechanism_fails_everybody_at_once(runs, delta) -> None:
    """With probability δ it tells all coins of a run: what the δ terms are there for."""
    rng = np.random.default_rng(9)

    def draw() -> list[Guesses]:
        coins = rng.random((runs, 20)) < 0.5
        told = coins ^ (rng.random(coins.shape) > q_of(0.5))
        told = np.where(rng.random((runs, 1)) < delta, coins, told)
        return surest(coins, np.where(told, 1.0, -1.0), (0.2, 1.0))

    assert failures(draw, 0.5, delta, 0.9, 200) <= 37


def test_guesses_are_the_surest_and_no_opinion_comes_last() -> None:
    coins = np.array([[True, False, True, False], [True, True, False, False]])
    scores = np.array([[3.0, -2.0, -9.0, 0.0], [math.nan, 0.0, -1.0, 5.0]])
    one, half = surest(coins, scores, (0.01, 0.5))
    assert one == Guesses(4, 1, (0, 0))
    assert half == Guesses(4, 2, (1, 1))
    (everything,) = surest(coins, scores, (1.0,))
    assert everything.guesses == 4
    assert everything.accuracy == sum(everything.correct) / 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guesses(2, 3, (1,)), "expected 1 ≤ guesses ≤ canaries"),
        (lambda: Guesses(3, 2, (3,)), "0 ≤ correct ≤ guesses"),
        (lambda: one_run_p_value(3, 2, 1.0, canaries=4), "correct ≤ guesses"),
        (lambda: one_run_p_value(1, 2, -1.0, canaries=4), "ε ≥ 0"),
        (lambda: lower_bound([Guesses(1, 1, (1,))], delta=0.0, confidence=1.0), "between 0 and 1"),
        (lambda: lower_bound([], delta=0.0), "at least one number"),
        (lambda: surest(np.ones((2, 2), bool), np.ones(2), (1.0,)), "expected .runs, canaries."),
        (lambda: surest(np.ones((2, 2), bool), np.ones((2, 2)), (0.0,)), "each in"),
        (lambda: AuditSettings(cohort_share=0.0), "cohort_share is 0.0"),
        (lambda: AuditSettings(canaries=0), "canaries is 0"),
        (lambda: AuditSettings(groups=1), "groups is 1"),
        (lambda: AuditSettings(attack=CohortSize(), runs=4), "takes 8 at least"),
        (lambda: audit(AuditSettings(attack=HeavyUser("counts"))), "use constraint=True"),
        (lambda: audit(AuditSettings(attack=HeavyUser("clipped"))), "clipped_share"),
        (lambda: audit(AuditSettings(attack=ShownMultipliers())), "use constraint=True"),
        (lambda: audit(AuditSettings(method=OneGradient())), "none was given"),
        (lambda: audit(AuditSettings(attack=KeptModel(), constraint=True)), "constraint=False"),
        (lambda: audit(AuditSettings(attack=CohortSize(), constraint=True)), "constraint=False"),
        (lambda: audit(AuditSettings(attack=SilentUser(), constraint=True)), "constraint=False"),
        (lambda: default_settings(convention="poison"), "expected 'all' or one of"),
        (lambda: default_settings(confidence=1.0), "between 0 and 1"),
        (lambda: run_check("luck", 1e-3), "there is no check 'luck'"),
        (lambda: run_check("Poisson cohorts by q", 0.0), "level is 0.0"),
    ],
)
def test_errors_say_what_to_do(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- The checks' p-values -----------------------------------------------------------------------


def test_a_caps_area_is_at_most_its_bound_and_not_far_from_it() -> None:
    """In three dimensions a cap of height 1 − r has (1 − r)/2 of the sphere (Archimedes)."""
    a, angles = np.array([0.0, 0.0, 2.0]), np.linspace(0.01, math.pi / 2, 50)
    for r, angle in zip(np.cos(angles), angles, strict=True):
        p = alike(a, np.array([math.sin(angle), 0.0, math.cos(angle)]))
        assert 1 - r <= p + 1e-12
        assert p <= 2 * (1 - r) + 1e-12
    assert alike(a, -a) == alike(a, 0 * a) == 0.0


def test_tails_are_those_of_their_distributions() -> None:
    assert binomial_two_sided(1, 3, 0.2) == pytest.approx(2 * (1 - 0.8**3))
    assert binomial_two_sided(3, 3, 0.2) == pytest.approx(2 * 0.2**3)
    assert binomial_two_sided(5000, 10_000, 0.5) == 1.0
    # χ²(2)/2 is exponential.
    assert chi_square_above(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert chi_square_below(3.0, 2) == pytest.approx(1 - math.exp(-1.5))


def test_p_values_of_independent_noise_are_no_smaller_than_they_say() -> None:
    rng = np.random.default_rng(10)
    found = [alike(*rng.normal(size=(2, 30))) for _ in range(4000)]
    for level in (0.5, 0.1, 0.01):
        # Five standard deviations are allowed for.
        assert np.mean(np.array(found) <= level) <= level + 5 * math.sqrt(level / 4000)
    assert np.mean(np.array(found) <= 0.5) > 0.1  # and they are worth having


# --- The canaries -------------------------------------------------------------------------------

SPLIT = Clipping(1.5, counts=2.0, clipped_share=0.05)
ADAPTS = Clipping(1.5, counts=2.0, adapts=AdaptiveBound(0.1, rate=3.0, share=0.05))


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("attack", "clip", "constraint"),
    [
        (GradientCanaries(), 1.5, False),
        (GradientCanaries(), 1.5, True),
        (GradientCanaries(), SPLIT, True),
        (HeavyUser("counts"), 1.5, True),
        (HeavyUser("counts"), SPLIT, True),
        (HeavyUser("selection"), 1.5, False),
        (HeavyUser("selection"), SPLIT, True),
        (HeavyUser("clipped"), SPLIT, False),
        (HeavyUser("clipped"), SPLIT, True),
        (GradientCanaries(), ADAPTS, True),
        (HeavyUser("counts"), ADAPTS, True),
        (HeavyUser("clipped"), ADAPTS, True),
    ],
    ids=str,
)
def test_a_canary_sends_what_its_score_expects(attack, clip, constraint, neighbours) -> None:
    """Next to no noise: the log ratio is what C_b and s_b say, for heads and for tails."""
    privacy = Privacy(noise_multiplier=1e-3, clip=clip, neighbours=neighbours, delta=1e-3)
    setting = AuditSettings(
        privacy, attack, cohort_share=1.0, rounds=1, constraint=constraint, canaries=8
    )
    setup = setting.setup
    count = attack.coins(setup)
    coins = np.arange(count) % 2 == 0
    one, other = (
        attack.scores(released(attack.scene(fallen, setup), setting), setup)
        for fallen in (coins, ~coins)
    )
    for fallen, scores in ((coins, one), (~coins, other)):
        assert ((scores > 0) == fallen).all()
    if isinstance(attack, GradientCanaries):
        block = next(b for b in privacy.clipping.blocks(constrained=constraint, selection=True))
        ratio = block.share / privacy.noise_multiplier**2  # (C_b/s_b)²
        size = 2 * ratio if neighbours == "replace-one" else ratio / 2
        np.testing.assert_allclose(one, np.where(coins, size, -size), rtol=0.02)


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
@pytest.mark.parametrize("local", [None, FederatedAveraging(3, 0.1)], ids=["", "local steps"])
@pytest.mark.parametrize("groups", [2, 17])
@pytest.mark.parametrize(
    "clip", [Clipping(1.5), SPLIT, 1.5, ADAPTS], ids=["joint", "split", "number", "adapts"]
)
def test_a_canary_of_one_gradient_sends_it_whatever_the_weights(
    clip, groups, local, neighbours
) -> None:
    """In three rounds, the later ones with weights: C in its gradient, and C_s in its counts."""
    privacy = Privacy(noise_multiplier=1e-3, clip=clip, neighbours=neighbours, delta=1e-3)
    setting = AuditSettings(
        privacy, cohort_share=1.0, rounds=3, constraint=True, canaries=8,
        method=OneGradient(), local=local, groups=groups,
    )  # fmt: skip
    setup, coins = setting.setup, np.arange(8) % 2 == 0
    seen = released(setting.attack.scene(coins, setup), setting)
    assert (seen.multipliers != 0).any()
    blocks = setup.clipping.blocks(constrained=True, selection=True)
    shares = {block.name: block.share for block in blocks}
    # ‖u‖² − ⟨u, u'⟩ of heads u and tails u', less half the norms' difference: opposite gradients,
    # counts in other places, or nothing at all.
    counts = shares.get("counts", 0.0) if groups == 17 else 0.0
    gradients = next(iter(shares.values()))
    replaced = neighbours == "replace-one"
    size = 2 * gradients + counts if replaced else (gradients + counts) / 2
    size *= 3 / privacy.noise_multiplier**2
    scores = setting.attack.scores(seen, setup)
    np.testing.assert_allclose(scores, np.where(coins, size, -size), rtol=0.02)


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_multipliers_show_a_user_where_there_is_no_noise(neighbours) -> None:
    privacy = Privacy(noise_multiplier=1e-3, clip=SPLIT, neighbours=neighbours, delta=1e-3)
    attack = ShownMultipliers()
    for method in (None, OneGradient()):
        setting = AuditSettings(
            privacy, attack, cohort_share=1.0, rounds=2, constraint=True, method=method
        )
        heads, tails = (
            attack.scores(
                released(attack.scene(np.array([coin]), setting.setup), setting), setting.setup
            )
            for coin in (True, False)
        )
        assert heads > 10 * abs(tails)


@pytest.mark.parametrize("others", ["aligned", "cancelling"])
def test_others_of_a_silent_user_send_what_its_score_sees(others) -> None:
    """Next to no noise: all others along one direction, each with the full bound.

    Users whose samples cancel as much as here count for less (`fpfl.users.factored`).
    """
    attack = SilentUser(others, number=50, samples=9, width=4)
    privacy = Privacy(noise_multiplier=1e-3, clip=1.5, delta=1e-3)
    setting = AuditSettings(privacy, attack, cohort_share=1.0, rounds=1)
    scene = replace(attack.scene(np.array([False]), setting.setup), dtype=torch.float64)
    (score,) = attack.scores(released(scene, setting), setting.setup)
    if others == "aligned":
        assert score == pytest.approx(50 * 1.5, abs=0.02)
    assert 0.3 < score <= 50 * 1.5 + 0.02


def test_every_second_sample_of_a_user_is_turned() -> None:
    scene = Scene((User(), User(3, value=2.0, turn=-0.5), User(2, value=4.0)), 1, steps())
    assert scene.data(()).features[:, 0].tolist() == [0.0, 2.0, -1.0, 2.0, 4.0, 4.0]


def test_the_log_ratio_is_that_of_all_ways_to_take_part() -> None:
    """Against an enumeration of who takes part when, with and without a cap."""
    y = np.random.default_rng(3).normal(size=(5, 1))
    for q, cap in ((0.3, None), (0.3, 2), (0.3, 5), (1.0, None), (1.0, 3)):
        mean = 0.0
        for rounds in product((False, True), repeat=5):
            chance, total, taken = 1.0, 0.0, 0
            for now, drawn in zip(y[:, 0], rounds, strict=True):
                chance *= q if drawn else 1 - q
                if drawn and (cap is None or taken < cap):
                    total, taken = total + now, taken + 1
            mean += chance * math.exp(total)
        (given,) = _sampled(y, q, cap)
        assert given == pytest.approx(math.log(mean), rel=1e-9)


# --- The twins ----------------------------------------------------------------------------------


# Noise, clipping, and a look at what was not released; canaries, a heavy user, what is shown.
HERE = (
    "noise halved",
    "fairness counts not clipped",
    "FPFL-1G: multipliers from counts before the noise",
    "a bound that adapts: noise of the first round's",
    "a bound that adapts: a hundredth of the noise on who is clipped",
)


@pytest.mark.parametrize("name", some(CASES, *HERE))
def test_a_broken_twin_is_caught(name, monkeypatch) -> None:
    twin, setting = CASES[name]
    twin(monkeypatch)
    result = audit(setting)
    assert result.claimed == pytest.approx(1.0, rel=1e-3)
    assert result.caught, result


@pytest.mark.parametrize("name", CHECKED)
def test_a_broken_twin_fails_its_check(name, monkeypatch) -> None:
    twin, check = CHECKED[name]
    twin(monkeypatch)
    result = run_check(check, LEVEL)
    assert result.failed, result


@pytest.mark.parametrize("name", CHECKS)
def test_the_sound_pipeline_passes_each_check(name) -> None:
    result = run_check(name, 1e-4)
    assert not result.failed, result


SETTINGS = [setting for _, setting in CASES.values()]


@pytest.mark.parametrize(
    "name", some([name for i, name in enumerate(CASES) if SETTINGS[i] not in SETTINGS[:i]], *HERE)
)
def test_the_sound_pipeline_is_not(name) -> None:
    """Under the very same attacks (some twins share one)."""
    result = audit(replace(CASES[name][1], confidence=0.9999))
    assert not result.caught, result


def test_the_papers_epsilon_at_face_value_is_refuted_and_the_honest_one_is_not() -> None:
    """With the whole of v: the paper's joint clipping, its constraint, its convention."""
    privacy = Privacy(epsilon=1.0, delta=9e-3, convention="paper")
    result = audit(replace(WHOLE, privacy=privacy, constraint=True, cohort_share=0.95))
    assert result.face_value == pytest.approx(1.0, rel=1e-3)
    assert result.face_value < result.lower_bound < result.claimed
    assert result.face_value_caught
    assert not result.caught


# --- The table ----------------------------------------------------------------------------------


def test_the_table_runs_every_convention_and_attack(tmp_path) -> None:
    settings = default_settings(canaries=20, runs=8, rounds=3)
    levels = [1.0 - setting.confidence for setting in settings.values()]
    assert levels == pytest.approx([(1.0 - CONFIDENCE) / (len(settings) + len(CHECKS))] * 24)
    assert {setting.attack.name for setting in settings.values()} == set(ATTACKS)
    assert {s.privacy.convention for s in settings.values()} == {"poisson", "replace-one", "paper"}
    assert set(default_settings(convention="replace-one")) == {"fixed cohorts"}
    done = []
    text, content = run_audit(
        settings,
        about=lambda seconds: {"command": "a test", "wall_seconds": seconds},
        out=tmp_path / "new" / "audit.json",
        report=lambda title, result: done.append((title, result)),
    )
    assert [title for title, _ in done] == [*CHECKS, *settings]
    written = json.loads((tmp_path / "new" / "audit.json").read_text(encoding="utf-8"))
    assert written == content
    assert written["about"]["command"] == "a test"
    for title, check in done[: len(CHECKS)]:
        assert f"{title} " in text
        assert written["checks"][title]["p_value"] == check.p_value
        assert check.level == pytest.approx(levels[0])
    for title, result in done[len(CHECKS) :]:
        assert title in text
        assert written["audits"][title]["lower_bound"] == result.lower_bound
        assert 0.0 < result.claimed < math.inf
    assert "at face value, ε = 2.00" in text
