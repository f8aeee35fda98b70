"""Scaling: what is declared wins, what is found is used, and the layer is the same function."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fpfl
from fpfl.data.inputs import (
    LIMIT,
    Found,
    InputColumn,
    ScaledModel,
    Scaling,
    ScalingLayer,
    load_model,
    scaling_of,
)
from fpfl.data.table_schema import CategoryColumn, NumberColumn, declared_schema
from fpfl.data.tables import input_columns, number_input

COLUMNS = (
    InputColumn("age", 0),
    InputColumn("score", 1, indicator=2),
    InputColumn("job", 3, 3, number=False),
)
X = torch.tensor([[1.0, 0.0, 1.0, 1, 0, 0], [-3.0, 2.0, 0.0, 0, 0, 1], [3.0, -2.0, 0.0, 0, 0, 0]])
FOUND = {
    "age": Found("measured", -1.0, 0.5),
    "score": Found("measured", 1.0, 2.0, missing=0.2),
    "job": Found("measured", shares=(0.5, 0.49, 0.01)),
}


def test_numbers_are_centred_clamped_and_missing_ones_are_the_centre() -> None:
    z = scaling_of(COLUMNS, 6, FOUND)(X)
    assert z[:, 0].tolist() == [4.0, -4.0, LIMIT]
    assert z[:, 1].tolist() == [0.0, 0.5, -1.5]  # the first one is missing
    assert z[:, 2].tolist() == pytest.approx([0.8 / 0.4, -0.2 / 0.4, -0.2 / 0.4])


def test_a_category_that_is_rare_is_not_stretched_further() -> None:
    z = scaling_of(COLUMNS, 6, FOUND)(X)
    assert z[:, 3].tolist() == pytest.approx([1.0, -1.0, -1.0])
    least = math.sqrt(0.05 * 0.95)
    assert z[:, 5].tolist() == pytest.approx([-0.01 / least, 0.99 / least, -0.01 / least])


def test_where_nothing_is_known_the_inputs_stay_as_they_are() -> None:
    kept = scaling_of(COLUMNS, 6)
    assert kept.of("range") == ("age", "score", "job")
    assert torch.equal(kept(X)[:, [0, 2, 3, 4, 5]], X[:, [0, 2, 3, 4, 5]])


def test_what_is_declared_wins() -> None:
    age = replace(COLUMNS[0], centre=1.0, width=2.0)
    job = replace(COLUMNS[2], shares=(0.2, 0.3, 0.5))
    found = scaling_of((age, COLUMNS[1], job), 6, FOUND)
    assert found.columns == (("age", "declared"), ("score", "measured"), ("job", "declared"))
    assert (found.centre[0], found.width[0]) == (1.0, 2.0)
    assert found.centre[3:] == pytest.approx((0.2, 0.3, 0.5))


def test_nothing_of_a_bad_row_becomes_a_number() -> None:
    bad = torch.full((1, 6), math.nan)
    assert bool(scaling_of(COLUMNS, 6, FOUND)(bad)[:, [0, 1, 3]].isnan().all())


def test_a_scaling_goes_to_json_and_back() -> None:
    found = scaling_of(COLUMNS, 6, FOUND)
    assert Scaling.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    for name, wrong in (("width", [0.0] * 6), ("centre", [1.0]), ("columns", [["age", "guess"]])):
        with pytest.raises(ValueError, match="no scaling"):
            Scaling.from_dict(found.as_dict() | {name: wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_scales_as_training_did(dtype: torch.dtype) -> None:
    """The same rows give the same inputs: bit for bit in single precision."""
    found = scaling_of(COLUMNS, 6, FOUND)
    inner = nn.Linear(6, 1).to(dtype)
    whole = ScaledModel(found, inner)
    assert torch.equal(whole(X.to(dtype)), inner(found(X.to(dtype))))
    assert torch.equal(ScalingLayer(found)(X), found(X))
    assert [name for name, _ in whole.named_parameters()] == ["model.weight", "model.bias"]


def test_a_file_says_whether_there_is_a_scaling() -> None:
    inner, other = nn.Linear(6, 1), nn.Linear(6, 1)
    whole = ScaledModel(scaling_of(COLUMNS, 6, FOUND), inner)
    assert torch.equal(load_model(nn.Linear(6, 1), whole.state_dict())(X), whole(X))
    assert isinstance(load_model(other, inner.state_dict()), nn.Linear)
    assert torch.equal(other(X), inner(X))


def test_a_network_with_a_scaling_of_its_own_may_have_another_before_it() -> None:
    """Its own names begin as those of the scaling that training put before it."""

    def network() -> ScaledModel:
        return ScaledModel(scaling_of(COLUMNS, 6), nn.Linear(6, 1))

    own = network()
    whole = ScaledModel(scaling_of(COLUMNS, 6, FOUND), own)
    assert not torch.equal(whole(X), own(X))
    assert torch.equal(load_model(network(), whole.state_dict())(X), whole(X))
    assert torch.equal(load_model(network(), own.state_dict())(X), own(X))


def test_the_schema_says_what_is_known_in_the_inputs_units() -> None:
    schema = fpfl.TableSchema(
        label=fpfl.data.Label("y", classes=(0, 1)),
        features=(
            NumberColumn("age", (0, 120), True, centre=40, scale=10),
            NumberColumn("income", (-100, 1000), tail="long"),
            CategoryColumn("job", ("a", "b"), shares=(0.5, 0.25)),
        ),
    )
    age, income, job = input_columns(schema)
    assert (age.first, age.indicator, income.first, job.first, job.size) == (0, 1, 2, 3, 3)
    assert (age.centre, age.width) == pytest.approx((-1.0, 0.5))
    assert job.shares == pytest.approx((0.5, 0.25, 0.25))
    assert income.threshold == pytest.approx(1.0 * 6 / 1100)  # a thousandth of 1,000
    # The table's 0.
    assert income.origin == pytest.approx(-3 + 100 * 6 / 1100)
    assert [column.known for column in (age, income, job)] == [True, False, True]


def test_a_logarithm_is_that_of_the_tables_value() -> None:
    feature = NumberColumn("income", (0, 1e6), transform="log", centre=1000, scale=500)
    column = number_input(feature, 0)
    values = np.array([0.0, 10.0, 1e3, 1e5])
    z = scaling_of((column,), 1)(torch.from_numpy(6 * values / 1e6 - 3)[:, None].float())
    t = np.log1p(values / 1000)
    width = (np.log1p(1.5) - np.log1p(0.5)) / 2
    assert z[:, 0].tolist() == pytest.approx(((t - np.log(2)) / width).clip(-5, 5), abs=1e-3)


def test_the_new_words_of_a_schema_are_written_and_read(tmp_path: Path) -> None:
    text = {
        "label": {"column": "y", "classes": [0, 1]},
        "features": {
            "income": {"range": [0, 10], "tail": "long"},
            "wealth": {"range": [0, 10], "transform": "log"},
        },
    }
    schema = declared_schema(text)
    (tmp_path / "s.toml").write_text(schema.toml())
    assert fpfl.data.read_table_schema(tmp_path / "s.toml") == schema
    assert [feature.tail for feature in schema.features] == ["long", None]
    for word in ("tail", "transform"):
        text["features"]["income"] = {"range": [0, 10], word: "wide"}
        with pytest.raises(ValueError, match=f"{word} is 'wide'"):
            declared_schema(text)


def test_subsets_keep_what_is_known_of_the_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,y\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    schema = fpfl.TableSchema(
        label=fpfl.data.Label("y", classes=(0, 1)), features=(NumberColumn("age", (0, 20)),)
    )
    people = fpfl.read_table(tmp_path / "t.csv", schema)
    assert people.columns == input_columns(schema)
    for part in (*people.split(0.5, seed=0), people.partition(seed=0), people.declared(30)):
        assert part.columns == people.columns
