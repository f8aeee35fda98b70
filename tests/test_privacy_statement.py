"""The statement says what must be said, for each convention, and works without an accountant."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from fpfl.privacy import Block, PrivacyPlan
from fpfl.privacy.statement import round_up

BLOCKS = (Block("gradients", 2.0, 0.8), Block("counts", 5.0, 0.2))
ADULT = {"population": 16280, "cohort": 200, "rounds": 1000, "delta": 5e-5, "blocks": BLOCKS}

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.privacy.PrivacyWarning")


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
