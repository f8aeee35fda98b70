"""Grids, and what a run has otherwise than all others."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpfl
from fpfl.sweeps.grid import keywords, setting_name, with_settings

PRIVATE = fpfl.Privacy(epsilon=2.0, clip=1.0)


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
)
def test_a_grid_is_every_combination_once(rates: list[float], seeds: list[int]) -> None:
    runs = fpfl.grid(learning_rate=rates, seed=seeds, privacy__clip=1.5)
    expected = [
        {"learning_rate": rate, "seed": seed, "privacy.clip": 1.5}
        for rate, seed in product(rates, seeds)
    ]
    assert runs == expected


def test_values_may_be_arrays_ranges_and_dotted_names() -> None:
    found = fpfl.grid(**{"privacy.epsilon": np.array([1.0, 2.0])}, seed=range(2), model="wide")
    assert [run["privacy.epsilon"] for run in found] == [1.0, 1.0, 2.0, 2.0]
    assert {type(run["privacy.epsilon"]) for run in found} == {float}, "files hold plain numbers"
    assert {run["model"] for run in found} == {"wide"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epsilon", "'privacy.epsilon'"),
        ("learning_rat", "'learning_rate'"),
        ("damping", "'method.damping'"),
        ("folder", "for the whole sweep"),
        ("cohort.size", "no setting 'cohort.size'"),
        ("privacy_epsilon", "'privacy.epsilon'"),
    ],
)
def test_an_unknown_setting_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="has no setting") as error:
        fpfl.grid(**{name: [1]})
    assert hint in str(error.value)


def test_empty_and_doubled_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate has no values"):
        fpfl.grid(learning_rate=[])
    with pytest.raises(ValueError, match="given twice"):
        fpfl.grid(privacy__clip=[1], **{"privacy.clip": [2]})


@pytest.mark.parametrize("name", [*keywords(), "model", "data", "seed"])
def test_every_keyword_of_train_is_a_setting(name: str) -> None:
    assert setting_name(name) == name


COMMON: dict[str, Any] = {
    "constraint": fpfl.fnr_parity("sex", tolerance=0.1),
    "method": fpfl.OneGradient(),
    "privacy": PRIVATE,
    "learning_rate": 0.1,
}


@pytest.mark.parametrize(
    ("run", "name", "expected"),
    [
        ({"learning_rate": 0.5}, "learning_rate", 0.5),
        ({"privacy.clip": 3.0}, "privacy", fpfl.Privacy(epsilon=2.0, clip=3.0)),
        ({"privacy.clip.bound": 3.0}, "privacy", fpfl.Privacy(epsilon=2.0, clip=3.0)),
        (
            {"privacy.clip.counts": 2.0},
            "privacy",
            fpfl.Privacy(epsilon=2.0, clip=fpfl.Clipping(1.0, counts=2.0)),
        ),
        (
            {"privacy.noise_multiplier": 1.5},
            "privacy",
            fpfl.Privacy(noise_multiplier=1.5, clip=1.0),
        ),
        ({"privacy": None}, "privacy", None),
        ({"method.damping": 1.0}, "method", fpfl.OneGradient(damping=1.0)),
        (
            {"method.damping": 1.0, "method": fpfl.MMDM(damping=9.0, multiplier_lr=0.2)},
            "method",
            fpfl.MMDM(damping=1.0, multiplier_lr=0.2),
        ),
        (
            {"constraint.tolerance": 0.02},
            "constraint",
            fpfl.fnr_parity("sex", tolerance=0.02),
        ),
    ],
)
def test_settings_inside_others(run: dict[str, Any], name: str, expected: Any) -> None:
    assert with_settings(COMMON, run) == COMMON | {name: expected}


def test_what_is_not_there_is_made_or_refused() -> None:
    assert with_settings({}, {"privacy.epsilon": 1.0})["privacy"] == fpfl.Privacy(epsilon=1.0)
    parity = COMMON["constraint"]
    assert with_settings({"constraint": parity}, {"method.damping": 1.0})["method"] == fpfl.MMDM(
        damping=1.0
    )
    with pytest.raises(ValueError, match=r"constraint is None.*give constraint="):
        with_settings({}, {"constraint.tolerance": 0.1})
    with pytest.raises(ValueError, match="OneGradient has no 'dampng'; it has damping"):
        with_settings(COMMON, {"method.dampng": 0.1})
