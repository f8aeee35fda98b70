"""The statement says what must be said, for each convention, and works without an accountant."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.privacy import Block, PrivacyPlan
from fpfl.privacy.assumptions import BEFORE, BREACH, KERNELS, Aggregation, Beyond, whole_numbers
from fpfl.privacy.conventions.base import REGISTER
from fpfl.privacy.filter import Mechanism, PrivacyFilter, ServerLimit, Terms, good_order
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.privacy.statement import PrivacyStatement, round_up

BLOCKS = (Block("gradients", 2.0, 0.8), Block("counts", 5.0, 0.2))
ADULT = {"population": 16280, "cohort": 200, "rounds": 1000, "delta": 5e-5, "blocks": BLOCKS}

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.privacy.PrivacyWarning")

PAIRS = sorted((name, each) for name, one in REGISTER.items() for each in one.sensitivity)


def text_of(seeded_noise=False, seeded_cohorts=False, **changes):
    plan = PrivacyPlan(**{**ADULT, "noise_multiplier": 1.0060, **changes})
    return str(plan.statement(seeded_noise, seeded_cohorts))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            ["zero-out", "nothing in its place", "Poisson sampling", "PLD", "at most C (C"],
        ),
        (
            {"neighbours": "add-remove"},
            ["add-remove", "or without", "the fact of taking part is not"],
        ),
        ({"neighbours": "replace-one"}, ["replace-one", "any other data", "PLD", "at most 2C"]),
        (
            {"convention": "replace-one"},
            ["replace-one", "sampling without replacement", "Wang et al.", "at most 2C"],
        ),
        (
            {"convention": "paper"},
            ["honest ε = ", "paper's convention, at face value", "C (C: clip bound) at face value"],
        ),
    ],
)
def test_every_convention_says_what_it_is(changes, expected):
    text = text_of(**changes)
    for phrase in [
        *expected,
        "all samples of one user",
        "δ = 5e-05",
        "see only what is released (models and noisy totals)",
        "server that knows the cohorts",
        "37 rounds",
        "no user exceeds it but with probability 5e-05, which adds to δ",
        "at δ = 0.0001",
        "200 of 16,280 users",
        "1,000 rounds",
        "gradients: bound 2, noise 2.249; counts: bound 5, noise 11.25",
        "adds to it",
    ]:
        assert phrase in text, phrase
    for phrase in ("Seeded", "simulation", "HYPOTHETICAL", "REAL", "not computed"):
        assert phrase not in text
    assert ("honest" in text) == (changes.get("convention") == "paper")


def test_paper_gives_both_figures():
    text = text_of(convention="paper", noise_multiplier=1.7233)
    assert "honest ε = 5.19" in text
    assert "reads ε = 2.000" in text
    assert "at most 180.0 times as likely" in text  # e^5.193: the words go with the honest figure
    assert "Rely on the honest figure" in text


def test_poisson_figures():
    text = text_of()
    assert "ε = 2.000 at δ = 5e-05" in text
    assert "at most 7.4 times as likely" in text


def test_a_cap_is_called_a_cap():
    text = text_of(max_participations=20)
    assert "20 rounds. That is a cap: nobody takes part more often" in text
    assert "no user exceeds" not in text
    assert "0.0001" not in text
    assert "1 round. That is a cap" in text_of(max_participations=1)


def test_seeds():
    phrase = "simulation: no guarantee against anyone who has the seed"
    assert phrase in text_of(seeded_noise=True)
    assert phrase not in text_of(seeded_cohorts=True)
    plan = PrivacyPlan(noise_multiplier=1.006, **ADULT)
    text = str(plan.statement(seeded_noise=False, seeded_cohorts=True))
    assert "amplification by sampling does not hold against anyone who has that seed" in text
    assert f"For them ε is the server's, {round_up(plan.epsilon_server)}" in text
    assert text.startswith("Seeded cohorts")  # what takes the most away comes first


@pytest.mark.parametrize("convention", ["paper", "replace-one", "poisson"])
def test_a_hypothetical_population_is_marked(convention):
    plan = PrivacyPlan(
        convention=convention,
        population=338_300,
        real_population=3383,
        cohort=2000,
        rounds=2000,
        delta=2.5e-6,
        noise_multiplier=1.421,
        blocks=BLOCKS,
    )
    text = str(plan.statement(False, False))
    assert "HYPOTHETICAL: the figures for 338,300 users" in text
    assert "It draws from 3,383 users" in text
    assert f"REAL, 3,383 users: ε = {round_up(plan.epsilon_real)}" in text
    assert f"REAL, 3,383 users: ε = {round_up(plan.epsilon_server_real)}" in text
    assert "2,000 of 3,383 users" in text
    assert ("honest ε = " in text) == (convention == "paper")
    # With the seed of the cohorts it is the real server's that counts.
    seeded = str(plan.statement(False, True))
    assert f"the server's, {round_up(plan.epsilon_server_real)}" in seeded


def test_as_dict_is_json_and_complete():
    plan = PrivacyPlan(convention="paper", noise_multiplier=1.7233, **ADULT)
    statement = plan.statement(True, False)
    values = statement.as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["epsilon"] == plan.epsilon
    assert values["epsilon_honest"] == plan.epsilon_honest
    assert values["epsilon_server"] == plan.epsilon_server
    assert values["epsilon_real"] is None
    assert values["participations"] == 37
    assert values["participations_capped"] is False
    assert values["delta_server"] == 1e-4
    assert values["seeded_noise"] is True
    assert values["blocks"][1] == {
        "name": "counts",
        "bound": 5.0,
        "share": 0.2,
        "noise_stddev": plan.noise_stddev("counts"),
    }
    assert statement.lines() == str(statement).split("\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.99989, "2.000"),
        (2.0000000000000004, "2.000"),
        (5.19308, "5.194"),
        (12.1779, "12.18"),
        (33.551, "33.56"),
        (1509.3, "1,510"),
        (0.049991, "0.05000"),
        (0.0, "0"),
    ],
)
def test_figures_are_rounded_up(value, expected):
    assert round_up(value) == expected


def in_a_process(code):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_needs_neither_accountant_nor_scipy():
    code = """
        import sys
        import fpfl.privacy
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"dp_accounting", "scipy"}))
    """
    assert in_a_process(code).strip() == "[]"


def test_all_but_the_accountant_works_without_dp_accounting():
    code = """
        import sys
        sys.modules["dp_accounting"] = None  # any import of it fails from here on
        import numpy as np
        from fpfl import privacy as p

        settings = dict(population=16280, cohort=200, rounds=1000, blocks=[p.Block("all", 2.0)])
        for convention in ("paper", "replace-one", "poisson"):
            plan = p.PrivacyPlan(convention=convention, noise_multiplier=1.5, **settings)
            assert plan.noise_stddev("all") == 3.0
            assert plan.epsilon_server > 10
            assert len(plan.sampling.draw(np.random.default_rng(0))) > 100
            statement = plan.statement(False, False)
            assert "server that knows the cohorts" in str(statement)
            if convention != "poisson":  # Rényi DP of fixed cohorts is fpfl's own
                assert plan.epsilon > 1
                continue
            assert "ε not computed here: dp-accounting is not installed" in str(statement)
            assert statement.as_dict()["epsilon"] is None
            for ask in (
                lambda: plan.epsilon,
                lambda: p.PrivacyPlan.calibrate(epsilon=2.0, convention=convention, **settings),
            ):
                try:
                    ask()
                except ImportError as error:
                    assert isinstance(error, p.MissingAccountantError)
                    assert "dp-accounting" in str(error) and "noise_multiplier" in str(error)
                else:
                    raise AssertionError("no error")
        hypothetical = p.PrivacyPlan(noise_multiplier=1.5, real_population=1000, **settings)
        assert "REAL, 1,000 users: ε not computed here" in str(hypothetical.statement(True, True))
        # Where everyone takes part in every round no accountant is needed.
        everyone = p.PrivacyPlan.calibrate(epsilon=2.0, **{**settings, "cohort": 16280})
        assert everyone.epsilon <= 2.0
        print("done")
    """
    assert in_a_process(code).strip() == "done"


# --- the server, whoever sees more --------------------------------------------------------------


def terms_of(plan, budget):
    mechanism = Mechanism.of(plan)
    order = good_order(budget, plan.delta, mechanism)
    return Terms(mechanism, plan.rounds, plan.delta, budget, order, plan.max_participations)


def changed(plan, budget, charges=None):
    """The statement of a run that was begun as planned, and changed."""
    terms = terms_of(plan, budget)
    limit = PrivacyFilter(budget, plan.delta, terms.order)
    server = ServerLimit.of(terms, limit)
    charges = {terms.mechanism: plan.rounds} if charges is None else charges
    return plan.statement(False, False).filtered(limit, server, charges, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_statement_promises_the_server_more_than_outsiders(data):
    """Planned or changed, with a cap or without, with all small terms: server's ε ≥ outsiders'."""
    convention, neighbours = data.draw(st.sampled_from(PAIRS))
    users = data.draw(st.integers(3, 5000))
    cohort = data.draw(st.integers(1, users))
    cap = None
    if convention == "poisson" and neighbours != "replace-one":
        cap = data.draw(st.none() | st.integers(1, 50))
    plan = PrivacyPlan(
        convention=convention,
        neighbours=neighbours,
        population=users,
        cohort=cohort,
        rounds=data.draw(st.integers(1, 200)),
        noise_multiplier=data.draw(st.floats(0.6, 30.0)),
        blocks=BLOCKS,
        max_participations=cap,
        real_population=data.draw(st.none() | st.integers(cohort, 5000)),
        delta=data.draw(st.floats(1e-9, 0.9)) / max(users, 5000),
    )
    said = plan.statement(False, False)
    if data.draw(st.booleans()):
        budget = max(said.epsilon_honest, said.epsilon_real or 0.0, 0.01) * data.draw(
            st.floats(1.0, 4.0)
        )
        if budget < 1000:
            said = changed(plan, budget)
    run = Beyond(numbers=data.draw(st.none() | st.integers(1, 10**12)))
    for each in (said, said.of_run(run)):
        assert each.epsilon_server >= each.epsilon_honest
        if each.epsilon_real is not None:
            assert each.epsilon_server_real >= each.epsilon_real
        assert each.delta_server >= each.delta
        text = str(each)
        assert ("for those who see less" in text) <= each.server_raised


def test_where_a_bound_is_loose_the_larger_figure_is_given_and_said():
    plan = PrivacyPlan(**{**ADULT, "noise_multiplier": 1.0})
    values = plan.statement(False, False).as_dict() | {"blocks": BLOCKS[:0], "epsilon_server": 0.1}
    said = PrivacyStatement(**values)._in_order()
    assert said.epsilon_server == said.epsilon
    assert "theirs is given for it" in str(said)


def test_a_changed_run_s_server_figure_is_fixed_before_the_run():
    """It was computed from the rounds that happened to be charged: 5.1 where outsiders had 8."""
    plan = PrivacyPlan(noise_multiplier=1.0, **ADULT | {"rounds": 300})
    mechanism = Mechanism.of(plan)
    few, many = (changed(plan, 8.0, {mechanism: n}) for n in (1, 400))
    limit = PrivacyFilter(8.0, plan.delta, terms_of(plan, 8.0).order)
    rounds = limit.room({}, mechanism)
    assert rounds > 300
    assert few.epsilon_server == many.epsilon_server == gaussian_epsilon(1.0, rounds, plan.delta)
    assert few.delta_server == few.delta == 2 * plan.delta
    assert f"{rounds} rounds: all that the budget had room for" in str(few)
    capped = PrivacyPlan(noise_multiplier=1.0, max_participations=20, **ADULT | {"rounds": 300})
    said = changed(capped, 8.0, {mechanism: 1})
    assert said.epsilon_server == max(8.0, gaussian_epsilon(1.0, 20, plan.delta))
    assert "20 rounds. That is a cap" in str(said)


def test_the_filter_on_unamplified_rounds():
    usual = Mechanism("poisson", 1000, 100, 2.0, "zero-out")
    louder, quieter = (Mechanism("poisson", 1000, 100, s, "zero-out") for s in (1.0, 4.0))
    free = ServerLimit(usual, 40, 1e-5)
    assert free.fits({usual: 40})
    assert not free.fits({usual: 41})
    assert free.fits({louder: 10})  # a quarter of the variance: four times the price
    assert not free.fits({louder: 10, quieter: 1})
    assert free.fits({louder: 5, usual: 20})
    capped = ServerLimit(usual, 40, 1e-5, cap=4)
    assert capped.fits({usual: 10**6})  # nobody is in more than four of them
    assert capped.fits({usual: 3, quieter: 5})
    assert not capped.fits({usual: 3, louder: 1})
    assert capped.epsilon < free.epsilon
    replaced = Mechanism("fixed", 1000, 100, 2.0, "replace-one")
    assert ServerLimit(replaced, 40, 1e-5).epsilon == gaussian_epsilon(2.0, 40, 1e-5, sensitivity=2)


# --- small terms, K, assumptions, old versions --------------------------------------------------


def test_terms_of_delta_are_computed_added_and_named():
    plan = PrivacyPlan(noise_multiplier=1.0060, **ADULT)
    said, numbers = plan.statement(False, False), 1000 * 10_000
    whole = said.of_run(Beyond(numbers=numbers))
    (term,) = whole.delta_terms
    assert term.value == pytest.approx((1 + math.exp(plan.epsilon)) * math.sqrt(numbers) * 2**-53)
    assert whole.delta == plan.delta + term.value
    assert whole.epsilon == plan.epsilon
    assert "In δ, besides the accountant's: noise in whole numbers (10,000,000 of them): " in str(
        whole
    )
    # e^ε of the server's figure would make the additive term larger than δ: the other bound.
    assert 0 < whole.epsilon_server - said.epsilon_server < 1e-6
    assert 2 * plan.delta < whole.delta_server < 2 * plan.delta * (1 + 1e-6)


@pytest.mark.parametrize(("convention", "terms"), [("poisson", 2), ("coins", 1), ("picked", 1)])
def test_sessions_of_secure_aggregation_are_in_delta(convention, terms):
    plan = PrivacyPlan(convention=convention, noise_multiplier=5.0, **ADULT)
    parts = Aggregation(10, 8, 2, shares=convention != "poisson")
    values = plan.statement(False, False).as_dict() | {"blocks": (), "aggregation": parts}
    said = PrivacyStatement(**values).of_run(Beyond(numbers=10**6))
    assert len(said.delta_terms) == terms
    assert said.delta_terms[-1].value == 1000 * parts.attempts * BREACH
    assert said.delta >= plan.delta + said.delta_terms[-1].value
    assert "secure aggregation, up to 5,000 sessions: 4.5e-09" in str(said)


@given(epsilon=st.floats(0.0, 600.0), delta=st.floats(1e-12, 1e-2), numbers=st.integers(1, 10**13))
def test_noise_in_whole_numbers_costs_little_at_any_epsilon(epsilon, delta, numbers):
    more, added = whole_numbers(epsilon, delta, numbers)
    assert 0 <= more <= (numbers + 1000) / 2**49
    assert added <= delta * max(1e-3, numbers / 2**49) + 2**-58
    assert whole_numbers(epsilon, delta, 2 * numbers) >= (0.0, 0.0)
    assert (more == 0.0) == ((1 + math.exp(epsilon)) * math.sqrt(numbers) / 2**53 <= delta / 1000)


def test_the_ratio_of_discrete_and_rounded_gaussians_is_as_bounded():
    """The remark's e^{−1/8s²} ≤ G(x)/D(x) ≤ e^{x²/24s⁴}, at a scale where floats can see it."""
    s = 3.0
    Z = sum(math.exp(-(x**2) / (2 * s * s)) for x in range(-200, 201))
    for x in range(25):
        edges = [math.erfc((x + half) / (s * math.sqrt(2))) / 2 for half in (-0.5, 0.5)]
        ratio = (edges[0] - edges[1]) / (math.exp(-(x**2) / (2 * s * s)) / Z)
        assert -1 / (8 * s * s) - 1e-12 <= math.log(ratio) <= x * x / (24 * s**4) + 1e-12


@pytest.mark.parametrize(
    ("neighbours", "declared", "expected"),
    [
        ("zero-out", False, "list of users is taken as public: that somebody is on it is not hidd"),
        ("zero-out", False, "K was counted from the data"),
        ("replace-one", True, "K is a declared number"),
        ("replace-one", None, "list of users is taken as public"),
        ("add-remove", True, "K is a declared number; who they are is not taken as public"),
    ],
)
def test_it_is_said_where_k_is_from(neighbours, declared, expected):
    plan = PrivacyPlan(noise_multiplier=1.5, neighbours=neighbours, **ADULT)
    text = str(plan.statement(False, False).of_run(Beyond(declared=declared)))
    assert expected in text
    assert ("counted" in text) == (declared is False)
    assert ("list of users" in text) == (neighbours != "add-remove")


def test_assumptions_and_old_versions():
    plan = PrivacyPlan(noise_multiplier=1.5, **ADULT)
    said = plan.statement(False, False).of_run(Beyond(assumptions=(KERNELS,)))
    assert f"Assumed: {KERNELS}" in said.lines()
    values = said.as_dict()
    assert values["assumptions"] == [KERNELS]
    assert values["contributions"] == "alone"
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert BEFORE not in str(said)
    old = said.of_run(Beyond(contributions=None))
    assert old.lines()[0] == BEFORE  # what takes the most away comes first
