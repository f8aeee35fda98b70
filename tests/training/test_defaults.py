"""Settings by rule, and merging groups that are too small."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import RACE, SEX, make_population
from torch import nn

import fpfl
from fpfl import Schema, merge_values, suggest
from fpfl.training.defaults import suggested_clipping, suggested_learning_rate


def test_the_rules_use_public_quantities_alone() -> None:
    schema = Schema((3,), samples_per_user=2.0)
    found = suggest(schema, population=16_280, cohort=200, noise_multiplier=1.006, delta=5e-5)
    clip = found.privacy.clipping
    assert (clip.bound, clip.counts, clip.counts_share, clip.selection_share) == (3, 1, 0.25, 0.05)
    assert (found.rounds, found.learning_rate) == (1000, 0.2)
    assert suggested_clipping(Schema((3,), samples_per_user=0.5)).bound == 1.5
    with pytest.raises(ValueError, match="samples_per_user"):
        suggested_clipping(Schema((3,)))
    with pytest.raises(ValueError, match="clip was given"):
        suggest(schema, population=99, cohort=9, noise_multiplier=1.0, clip=2.0)
    # A sample counts for each attribute and for the whole, where groups overlap.
    both = Schema((3,), samples_per_user=2.0, attributes=(SEX, RACE))
    for by, wanted in ((("sex",), 1), (("sex", "race"), 3), ((), 3), ((("sex", "race"),), 2)):
        assert suggested_clipping(both, fpfl.fnr_parity(*by)).counts == wanted
    # Ten times the noise: the learning rate keeps what adds up at 0.3.
    noisy = suggest(schema, population=16_280, cohort=200, noise_multiplier=10.35, delta=5e-5)
    added_up = noisy.learning_rate * 3 * 10.35 / math.sqrt(0.7) * math.sqrt(1000) / 200
    assert added_up == pytest.approx(0.3)


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
    assert [block.bound for block in run.privacy.blocks] == [4.5, 1.0, 2.0]


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
    """A gradient is summed over n̄ samples: where there is no noise to speak of, η falls with n̄."""
    for samples, expected in ((None, 0.2), (1.0, 0.2), (2.0, 0.2), (75.0, 0.4 / 75)):
        clipping = suggested_clipping(Schema((3,), samples_per_user=samples or 1.0))
        assert suggested_learning_rate(clipping, 1e-6, 2000, 1000, samples) == expected
