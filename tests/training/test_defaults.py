"""Settings by rule, and merging groups that are too small."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population
from torch import nn

import fpfl
from fpfl import AdaptiveBound, Clipping, Privacy, Schema, cli, merge_values, suggest
from fpfl.config import load_config
from fpfl.data.table_schema import read_table_schema
from fpfl.training.defaults import (
    chosen_cohort,
    chosen_method,
    chosen_rate,
    full_rate,
    parameters_of,
    suggested_clipping,
    suggested_learning_rate,
)
from fpfl.training.models import SHALLOW

SIGMA = {"epsilon": None, "noise_multiplier": 1.006, "delta": 1e-6}
PUBLIC = {"population": 16_280, "cohort": 200, "rounds": 1000, "parameters": 941}


def clip_of(schema: Schema, constraint: fpfl.Constraint | None = None, **changed: Any) -> Clipping:
    """C by the rules, with noise of so many clip bounds."""
    asked = Privacy(**SIGMA | {n: v for n, v in changed.items() if n in SIGMA})
    public = PUBLIC | {n: v for n, v in changed.items() if n in PUBLIC}
    return suggested_clipping(asked, schema, constraint, **public)


def adapts_of(*args: Any, **changed: Any) -> AdaptiveBound:
    found = clip_of(*args, **changed).adapts
    assert found is not None
    return found


def test_the_rules_use_public_quantities_alone() -> None:
    schema = Schema((3,), samples_per_user=2.0)
    clip = clip_of(schema)
    assert (clip.bound, clip.counts, clip.counts_share, clip.selection_share) == (3, 1, 0.2, 0.05)
    assert adapts_of(schema).share == 0.01
    for samples, bound in ((0.5, 3.0), (1.0, 3.0), (3.0, 4.5), (75.0, 112.5)):
        assert clip_of(Schema((3,), samples_per_user=samples)).bound == bound
    found = suggest(schema, population=16_280, epsilon=2.0)
    assert (found.cohort, found.rounds, found.learning_rate) == (1628, 1000, 0.5)
    assert found.method == fpfl.OneGradient()
    with pytest.raises(ValueError, match="samples_per_user"):
        clip_of(Schema((3,)))
    with pytest.raises(ValueError, match="clip was given"):
        suggest(schema, population=99, cohort=9, noise_multiplier=1.0, clip=2.0)
    # A sample counts for each attribute and for the whole, where groups overlap.
    both = Schema((3,), samples_per_user=2.0, attributes=(SEX, RACE))
    for by, wanted in ((("sex",), 1), (("sex", "race"), 3), ((), 3), ((("sex", "race"),), 2)):
        assert clip_of(both, fpfl.fnr_parity(*by)).counts == wanted


def test_the_cohort_is_a_tenth_of_the_users_within_bounds() -> None:
    for users, cohort in ((30, 30), (100, 100), (999, 100), (4300, 430), (50_000, 5000),
                          (140_000, 5000)):  # fmt: skip
        assert chosen_cohort(users) == cohort
        found = suggest(Schema((3,), samples_per_user=1.0), population=users, noise_multiplier=2.0)
        assert found.cohort == cohort


def noise_against_signal(clip: Clipping, **changed: Any) -> float:
    """z = s √p/m, by the plan of the settings themselves; s in clip bounds."""
    public = PUBLIC | {n: v for n, v in changed.items() if n in PUBLIC}
    asked = Privacy(**SIGMA | {n: v for n, v in changed.items() if n in SIGMA}, clip=clip)
    plan = asked.plan(population=public["population"], cohort=public["cohort"],
                      rounds=public["rounds"], constrained=False)  # fmt: skip
    s = plan.noise_stddev("gradients") / clip.bound
    return s * math.sqrt(public["parameters"]) / public["cohort"]


@pytest.mark.parametrize(
    "changed",
    [{}, {"noise_multiplier": 5.0}, {"parameters": 4 * 941}, {"cohort": 300}, {"rounds": 300}],
    ids=str,
)
def test_the_bound_aims_at_a_quarter_of_noise_against_signal(changed: dict[str, Any]) -> None:
    """τ = z/4, and C_ref such that what adds up in a parameter, η C_ref s √T/m, is 1/4."""
    schema = Schema((3,), samples_per_user=2.0)
    clip = clip_of(schema, **changed)
    z, adapts = noise_against_signal(clip, **changed), adapts_of(schema, **changed)
    public = PUBLIC | {n: v for n, v in changed.items() if n in PUBLIC}
    assert adapts.target == pytest.approx(0.25 * z, rel=6e-3)  # three digits
    assert adapts.reference is not None
    s = z * public["cohort"] / math.sqrt(public["parameters"])
    added_up = 0.5 * adapts.reference * s * math.sqrt(public["rounds"]) / public["cohort"]
    assert added_up == pytest.approx(0.25, rel=6e-3)


def test_the_aim_is_kept_within_its_ends() -> None:
    schema = Schema((3,), samples_per_user=2.0)
    assert adapts_of(schema, parameters=10, cohort=16_280).target == 0.02
    assert adapts_of(schema, parameters=1_600_000).target == 0.6


def test_a_bound_moves_slowly_where_the_fraction_is_noisy() -> None:
    """0.3, times 0.1 over the standard deviation of f̃ where that is more."""
    schema = Schema((3,), samples_per_user=2.0)
    rates = []
    for sigma in (0.5, 1.006, 5.0, 20.0):
        clip = clip_of(schema, noise_multiplier=sigma)
        plan = Privacy(**SIGMA | {"noise_multiplier": sigma}, clip=clip).plan(
            population=16_280, cohort=200, rounds=1000, constrained=False
        )
        deviation = plan.noise_stddev("clipped") / 200
        assert clip.adapts is not None
        assert clip.adapts.rate == pytest.approx(0.3 * min(1.0, 0.1 / deviation), rel=6e-3)
        rates.append(clip.adapts.rate)
    assert rates[0] == 0.3 > rates[-2] > rates[-1]


def test_steps_are_shortened_by_the_bound_that_there_is_for_now() -> None:
    """η is whole; where C_t is above C_ref training takes η C_ref/C_t."""
    schema = Schema((3,), samples_per_user=1.0)
    clip = clip_of(schema, noise_multiplier=10.0)
    privacy = Privacy(**SIGMA | {"noise_multiplier": 10.0}, clip=clip)
    rate = chosen_rate(privacy, None, schema, 16_280, 200, 1000)
    assert rate == full_rate(schema) == 1.0
    assert clip.adapts is not None
    assert clip.adapts.reference is not None
    assert clip.adapts.reference < clip.bound
    # A bound that stays where it was given: η itself is shortened.
    fixed = replace(clip, adapts=None)
    plan = replace(privacy, clip=fixed).plan(
        population=16_280, cohort=200, rounds=1000, constrained=False
    )
    shortened = suggested_learning_rate(plan, fixed, schema)
    assert shortened < 1.0
    added_up = shortened * plan.noise_stddev("gradients") * math.sqrt(1000) / 200
    assert added_up == pytest.approx(0.25)


def test_the_weak_group_first_where_one_rate_counts_errors() -> None:
    """For a fifth of the rounds; with two rates, or a selection rate, from the start."""
    people = Schema((3,), samples_per_user=2.0, attributes=(SEX,), population=16_280)
    hours = replace(people, classes=None, label_range=(0.0, 1.0))
    cases = [
        (fpfl.fnr_parity(), people, True),
        (fpfl.accuracy_parity(), people, True),
        (fpfl.equal_error(label_range=(0.0, 1.0)), hours, True),
        (fpfl.equalized_odds(), people, False),
        (fpfl.demographic_parity(), people, False),
    ]
    for constraint, schema, patient in cases:
        for rounds, patience in ((1000, 200), (301, 61), (4, 1)):
            wanted = patience if patient else None
            found = suggest(
                schema, constraint, population=16_280, epsilon=2.0, rounds=rounds, cohort=200
            )
            assert found.method == fpfl.OneGradient(patience=wanted)
            plain = chosen_method(constraint, schema, private=False, rounds=rounds)
            assert plain.patience == wanted
            assert plain.tolerance == pytest.approx(0.75 * constraint.tolerance)
            assert (plain.damping, plain.spread) == (10.0, None)


def test_every_door_has_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """suggest, suggested = true, fpfl train --data, the estimator and fpfl plan: one rule."""
    pytest.importorskip("sklearn", reason="the estimators take scikit-learn")
    from fpfl.estimator import FairPrivateClassifier

    users = 400
    rng = np.random.default_rng(0)
    age, sex = rng.uniform(0, 100, users), rng.choice(["F", "M"], users)
    y = np.where(age + 20 * (sex == "M") > 60, "yes", "no")
    rows = [f"{a},{s},{label}" for a, s, label in zip(age, sex, y, strict=True)]
    (tmp_path / "people.csv").write_text("\n".join(["age,sex,y", *rows]), encoding="utf-8")
    (tmp_path / "people.toml").write_text(
        "population = 400\nsamples_per_user = 1\n[label]\ncolumn = 'y'\nclasses = ['no', 'yes']\n"
        "[attributes]\nsex = ['F', 'M']\n[features]\nage = [0, 100]\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    schema = read_table_schema(Path("people.toml")).schema()
    p = parameters_of(fpfl.mlp(1, SHALLOW, 1))
    found = suggest(
        schema, fpfl.fnr_parity("sex"), population=users, epsilon=8.0, parameters=p, rounds=20
    )

    def of(settings: dict[str, Any]) -> tuple[Any, ...]:
        clip = {n: v for n, v in settings["clip"].items() if n != "kind" and v is not None}
        return (settings["cohort"], settings["learning_rate"], clip, settings["method"]["patience"])

    wanted_clip = {n: v for n, v in asdict(found.privacy.clipping).items() if v is not None}
    wanted = (100, 1.0, wanted_clip, 4)
    assert (found.cohort, found.learning_rate, found.method.patience) == (100, 1.0, 4)

    plan = fpfl.plan_training(
        population=users, groups={"sex": {"F": 0.5, "M": 0.5}}, base_rate=0.5, parameters=p,
        epsilon=8.0, rounds=20,
    )  # fmt: skip
    assert plan.chosen.clipping == found.privacy.clipping
    assert plan.chosen.cohort == 100

    estimator = FairPrivateClassifier(
        constraint="fnr_parity", epsilon=8.0, feature_range=(0, 100), measure=False, rounds=20
    )
    job = estimator._prepared(age[:, None], y, sex, None).job
    assert job.settings["privacy"].clipping == found.privacy.clipping
    assert (job.settings["cohort"], job.settings["learning_rate"]) == (100, 1.0)
    assert job.settings["method"] == found.method

    words = ["train", "--data", "people.csv", "--groups", "sex", "--constraint", "fnr_parity",
             "--epsilon", "8", "--no-measure", "--rounds", "20", "--out", "run"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["fpfl", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert load_config(Path("run/config.toml")).training.suggested
    assert of(json.loads(Path("run/run.json").read_text())["settings"]) == wanted


def test_a_regression_takes_a_quarter_of_a_classifiers_steps() -> None:
    """Squared errors are curved by 1, log losses by a quarter at most."""
    classes = Schema((3,), samples_per_user=2.0)
    number = replace(classes, classes=None, label_range=(0.0, 9.0))
    assert (full_rate(classes), full_rate(number)) == (0.5, 0.125)
    assert chosen_rate(None, None, number, 900, 100, 300) == 0.125
    one, other = adapts_of(number).reference, adapts_of(classes).reference
    assert one is not None
    assert other is not None
    assert one == pytest.approx(4 * other, rel=6e-3)  # what adds up is the same


def test_a_suggestion_is_what_train_takes() -> None:
    pytest.importorskip("dp_accounting")
    data = make_population(users=60)
    found = suggest(data.schema, population=60, cohort=20, epsilon=8.0, delta=1e-3, rounds=5)
    run = fpfl.train(
        nn.Linear(5, 1), data, constraint=fpfl.fnr_parity("sex"), seed=0, noise_seed=0,
        **found.arguments(),
    )  # fmt: skip
    assert run.privacy is not None
    assert run.privacy.epsilon == pytest.approx(8.0, rel=1e-3)
    assert [block.bound for block in run.privacy.blocks] == [4.5, 1.0, 2.0, 0.5]


@pytest.mark.parametrize("private", [True, False])
def test_a_number_as_clip_bound_keeps_counts_apart(private) -> None:
    """With one gradient; with the paper's vector it bounds all of it."""
    data = make_population(users=60)
    how = {"privacy": fpfl.Privacy(noise_multiplier=1.0, clip=2, delta=1e-3)}
    for method, apart in ((fpfl.OneGradient(), True), (fpfl.MMDM(), False)):
        run = fpfl.train(
            nn.Linear(5, 1), data, cohort=20, rounds=1, constraint=fpfl.fnr_parity("sex"),
            method=method, **(how if private else {"clip": 2}),
        )  # fmt: skip
        assert (run.settings["clip"]["counts"] is not None) == apart
        assert run.settings["clip"]["bound"] == 2.0
        assert run.settings["layout"]["basis"] == ("split" if apart else "paper")


def test_values_are_merged() -> None:
    data = make_population(attributes=(SEX, RACE))
    merged = merge_values(data, "race", {"other": ("B", "C")})
    assert merged.schema.attributes[1].values == ("A", "other")
    before, after = data.attributes[:, 1], merged.attributes[:, 1]
    assert torch.equal(after, torch.where(before == 2, 1, before))
    assert torch.equal(merged.attributes[:, 0], data.attributes[:, 0])
    assert merge_values(data, "race", {"D": ("A",)}).schema.attributes[1].values == ("D", "B", "C")
    assert bool((data.attributes[:, 1] == 2).any())  # the caller's is left alone
    with pytest.raises(ValueError, match="no value"):
        merge_values(data, "race", {"other": ("Z",)})
    with pytest.raises(ValueError, match="name each once"):
        merge_values(data, "race", {"x": ("A", "B"), "y": ("B",)})
    with pytest.raises(ValueError, match="a list of values"):
        merge_values(data, "race", {"x": "AB"})
    with pytest.raises(ValueError, match="no attribute"):
        merge_values(data, "age", {"old": ("A",)})
    with pytest.raises(ValueError, match="at least two values"):
        merge_values(data, "race", {"all": ("A", "B", "C")})


def test_adult_as_a_regression() -> None:
    data = fpfl.load_adult("test", label="hours-per-week")
    plain = fpfl.load_adult("test")
    assert data.schema.classes is None
    assert data.schema.label_range == (1, 99)
    assert data.schema.shape == (91,)
    assert "hours-per-week" not in data.schema.feature_names
    # The hours as they were, scaled by the same range.
    column = plain.schema.feature_names.index("hours-per-week")
    scaled = plain.features[:, column]
    torch.testing.assert_close((data.labels - 1) / 98 * 6 - 3, scaled, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="hours-per-week"):
        fpfl.load_adult("test", label="age")


def test_a_user_with_many_samples_takes_no_larger_steps() -> None:
    """A gradient is summed over n̄ samples: η falls with n̄, with noise and without."""
    for samples, expected in ((None, 1.0), (0.5, 1.0), (1.0, 1.0), (2.0, 0.5), (75.0, 1 / 75)):
        schema = Schema((3,), samples_per_user=samples)
        assert chosen_rate(None, None, schema, 15_000, 200, 1000) == expected
        if samples is None:
            continue
        found = suggest(schema, population=2000, cohort=200, noise_multiplier=1e-3, delta=1e-5)
        assert found.learning_rate == expected


def test_few_samples_are_not_learnt_by_heart() -> None:
    """Without noise η is in proportion below 15,000 samples, a quarter at least."""
    cases = ((15_000, 1.0, 1.0), (6000, 1.0, 0.4), (3000, 2.0, 0.2), (200, 1.0, 0.25),
             (200, None, 0.25))  # fmt: skip
    for users, samples, expected in cases:
        schema = Schema((3,), samples_per_user=samples)
        assert chosen_rate(None, None, schema, users, 100, 300) == pytest.approx(expected)
        number = replace(schema, classes=None, label_range=(0.0, 9.0))
        assert chosen_rate(None, None, number, users, 100, 300) == 0.25 / max(1.0, samples or 1.0)
