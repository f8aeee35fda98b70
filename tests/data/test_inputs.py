"""Scaling: what is declared wins, what is found is used, and the layer is the same function."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpfl
from fpfl.data.inputs import (
    KNOTS,
    LIMIT,
    Found,
    InputColumn,
    ScaledModel,
    Scaling,
    ScalingLayer,
    declared_knots,
    load_model,
    scaling_of,
    through,
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


# --- ranks ----------------------------------------------------------------------------------------

RANKED = (
    InputColumn("income", 0, indicator=1, ranks=True, quantiles=(-3.0, -3.0, -2.5, -1.0, 3.0)),
    InputColumn("age", 2, centre=1.0, width=0.5),
    InputColumn("debt", 3, ranks=True, threshold=0.01, origin=-3.0),
)
ENDS = st.floats(-3, 3, width=32)


def score(p: float) -> float:
    """z of a rank."""
    return NormalDist().inv_cdf(min(max(p, 1 / 64), 63 / 64))


def rank(z: Any) -> Any:
    """The rank of each z; those at the ends may be any beyond."""
    return np.vectorize(NormalDist().cdf)(np.asarray(z, dtype=np.float64))


def test_a_rank_is_met_between_quantiles_and_flat_beyond() -> None:
    x = torch.zeros(7, 4)
    x[:, 0] = torch.tensor([-3.0, -2.75, -2.5, -1.75, -1.0, 3.0, 9.0])
    found = scaling_of(RANKED, 4)
    # −3 stands for 0% to 25% of all: their middle, 1/8.
    ranks = [0.125, 0.3125, 0.5, 0.625, 0.75, 1.0, 1.0]
    assert found(x)[:, 0].tolist() == pytest.approx([score(p) for p in ranks], abs=1e-5)
    assert found(x)[:, 2].tolist() == [-2.0] * 7  # other columns are what they were
    assert found.of("declared") == ("income", "age")


def test_a_missing_number_is_the_middle_of_the_ranks() -> None:
    x = torch.tensor([[-3.0, 1.0, 0.0, 0.0], [math.nan, 0.0, 0.0, math.nan]])
    z = scaling_of(RANKED, 4)(x)
    assert z[0, 0] == 0.0
    assert z[1, [0, 3]].isnan().all()


def test_where_nothing_is_known_ranks_are_the_mapping_of_the_range() -> None:
    found = scaling_of(RANKED, 4)
    assert found.of("range") == ("debt",)
    x = torch.zeros(9, 4)
    x[:, 3] = torch.linspace(-4, 4, 9)
    assert torch.allclose(found(x)[:, 3], x[:, 3].clamp(-3, 3), atol=1e-6)


@given(
    points=st.lists(st.tuples(ENDS, st.floats(0, 1)), min_size=1, max_size=80),
    values=st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=40),
)
def test_ranks_ascend_with_values_and_depend_on_one_alone(
    points: list[tuple[float, float]], values: list[float]
) -> None:
    """Bit for bit, wherever knots lie; and never further than a 32nd from what was found."""
    # Nearer to each other than single precision's smallest numbers they are one place, or none.
    places = sorted({round(place, 30) for place, _ in points})
    shares = sorted(p for _, p in points)[: len(places)]
    knots = through(places, shares)
    assert len(knots) == KNOTS
    column = InputColumn("x", 0, ranks=True)
    found = scaling_of((column,), 1, {"x": Found("measured", knots=knots)})
    x = torch.tensor(sorted(values))[:, None]
    z = found(x)
    assert (z.diff(dim=0) >= 0).all()
    assert torch.equal(torch.cat([found(each[None]) for each in x]), z)
    there = rank(found(torch.tensor(places, dtype=torch.float64)[:, None]).numpy()[:, 0])
    assert np.abs(there - np.clip(shares, 1 / 64, 63 / 64)).max() <= 1 / 32 + 1e-5


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=60).filter(lambda x: min(x) < max(x)),
    st.sampled_from([lambda x: 7 * x - 3, lambda x: x**3, lambda x: np.exp(x / 4)]),
)
def test_declared_quantiles_are_met_in_any_units(values: list[int], units: Any) -> None:
    """A quantile's rank is what it was declared for, whatever the column's values are called."""
    q = np.sort(np.array(values, dtype=np.float64))
    one, other = declared_knots(q), declared_knots(units(q))
    own = [(2 * np.sum(q < v) + np.sum(q == v) - 1) / 2 / (len(q) - 1) for v in q]
    for knots, at in ((one, q), (other, units(q))):
        ranks = rank(np.interp(at, *np.array(knots).T))
        assert np.abs(ranks - np.clip(own, 1 / 64, 63 / 64)).max() <= 1 / 32 + 1e-9


def test_ranks_go_to_json_and_files_and_older_ones_are_read() -> None:
    found, older = scaling_of(RANKED, 4), scaling_of(RANKED[1:2], 4)
    assert Scaling.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert not {"ranked", "knots"} & older.as_dict().keys()  # what older versions wrote
    assert Scaling.from_dict(older.as_dict()) == older
    whole, before = (ScaledModel(each, nn.Linear(4, 1)) for each in (found, older))
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    for each, names in ((whole, {"ranked", "knots"}), (before, set())):
        state = each.state_dict()
        assert {"ranked", "knots"} & {name.removeprefix("scaling.") for name in state} == names
        assert torch.equal(load_model(nn.Linear(4, 1), state)(x), each(x))
    good = found.as_dict()
    for name, wrong in (
        ("ranked", [0]),
        ("ranked", [0, 4]),
        ("ranked", [0, 0]),
        ("knots", good["knots"][:1]),
        ("knots", [good["knots"][0], good["knots"][0][:5]]),
        ("knots", [good["knots"][0], good["knots"][0][::-1]]),
        ("knots", [good["knots"][0], [[0.0, math.nan]] * KNOTS]),
    ):
        with pytest.raises(ValueError, match="no scaling"):
            Scaling.from_dict(good | {name: wrong})


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_ranks_are_exported(kind: str, tmp_path: Path) -> None:
    """Whatever runs the file gives the same answers, beyond the knots and between them."""
    model = ScaledModel(scaling_of(RANKED, 4), nn.Linear(4, 1)).eval()
    x = 2 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    schema = fpfl.Schema(shape=(4,))
    positive = torch.sigmoid(model(x))[:, 0].detach().numpy()
    if kind == "torch":
        path = fpfl.export_torch(model, schema, tmp_path / "m.pt2", about={})
        scores = torch.export.load(path).module()(x)[0].detach().numpy()
    else:
        runtime = pytest.importorskip("onnxruntime")
        path = fpfl.export_onnx(model, schema, tmp_path / "m.onnx", about={})
        scores = runtime.InferenceSession(path).run(None, {"features": x.numpy()})[0]
    assert np.allclose(scores[:, 1], positive, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"quantiles": [0, 1, 10]}, "quantiles go with transform"),
        ({"transform": "quantile", "quantiles": [0, 11]}, "ascend within its range"),
        ({"transform": "quantile", "quantiles": [0, 5, 4, 10]}, "ascend within its range"),
        ({"transform": "quantile", "quantiles": [5, 5]}, "ascend within its range"),
        ({"transform": "quantile", "quantiles": [5]}, "ascend within its range"),
        ({"transform": "quantile", "quantiles": [0, math.nan, 9]}, "a number for each share"),
        ({"transform": "quantile", "quantiles": 5}, "a number for each share"),
        ({"transform": "quantile", "centre": 5, "scale": 1}, "no use for centre and scale"),
        ({"transform": "quantile", "source": "measured"}, "no figures are given"),
    ],
)
def test_wrong_quantiles_are_refused(words: dict[str, Any], expected: str) -> None:
    label = {"column": "y", "classes": [0, 1]}
    with pytest.raises(ValueError, match=expected):
        declared_schema({"label": label, "features": {"x": {"range": [0, 10], **words}}})


def test_a_label_has_no_ranks() -> None:
    """A regression's output is in its label's units."""
    label = {"column": "y", "range": [0, 1], "transform": "quantile"}
    with pytest.raises(ValueError, match=r"\[label\] has the unknown keys \['transform'\]"):
        declared_schema({"label": label, "features": {"x": [0, 10]}})


def test_subsets_keep_what_is_known_of_the_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,y\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    schema = fpfl.TableSchema(
        label=fpfl.data.Label("y", classes=(0, 1)), features=(NumberColumn("age", (0, 20)),)
    )
    people = fpfl.read_table(tmp_path / "t.csv", schema)
    assert people.columns == input_columns(schema)
    for part in (*people.split(0.5, seed=0), people.partition(seed=0), people.declared(30)):
        assert part.columns == people.columns
