"""Federated datasets: users, partitions and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population

from fpfl import Attribute, FederatedDataset, Schema, load_adult, scale_by_ranges
from fpfl.data.table_schema import Label, NumberColumn, TableSchema
from fpfl.training.models import DEEP, SHALLOW, mlp

SCHEMA = Schema((2,), attributes=(SEX,))


def test_samples_are_ordered_by_user() -> None:
    x = np.arange(10).reshape(5, 2)
    data = FederatedDataset.from_samples(
        x, [0, 1, 0, 1, 1], [[0], [1], [0], [1], [0]], SCHEMA, users=["b", "a", "b", "c", "a"]
    )
    assert data.offsets.tolist() == [0, 2, 4, 5]
    assert data.features[:, 0].tolist() == [2, 8, 0, 4, 6]
    assert data.attributes[:, 0].tolist() == [1, 0, 0, 0, 1]


def test_a_declared_population_has_users_without_samples() -> None:
    schema = Schema((2,), attributes=(SEX,), population=7)
    data = FederatedDataset.from_samples(np.zeros((3, 2)), [0, 1, 0], [0, 1, 0], schema, [1, 1, 2])
    assert data.population == 7
    assert data.sizes().tolist() == [2, 1, 0, 0, 0, 0, 0]


def test_adult_partition_is_the_papers() -> None:
    """K = 16,280 with the empty users; sizes Poisson(2): chi-square at a 1e-6 false alarm."""
    from scipy.stats import chi2, poisson

    adult = load_adult()
    data = adult.partition(mean=2, seed=1)
    assert data.population == 16_280
    assert len(data) == len(adult) == 32_561
    sizes = np.minimum(data.sizes().numpy(), 8)
    seen = np.bincount(sizes, minlength=9)
    expected = poisson.pmf(np.arange(9), len(data) / data.population) * data.population
    expected[8] = data.population - expected[:8].sum()
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(1e-6, df=8)
    assert seen[0] > 2000
    assert data.features.double().sum() == pytest.approx(float(adult.features.double().sum()))
    again = adult.partition(mean=2, seed=1)
    assert torch.equal(data.features, again.features)
    assert not torch.equal(data.offsets, adult.partition(mean=2, seed=2).offsets)


def test_split_and_subset_keep_whole_users() -> None:
    data = make_population(users=50)
    rest, held = data.split(0.2, seed=0)
    assert (rest.population, held.population) == (40, 10)
    assert len(rest) + len(held) == len(data)
    assert data.subset([3, 1]).sizes().tolist() == data.sizes()[[3, 1]].tolist()


def test_rows_and_gather_find_the_samples_of_users() -> None:
    data = make_population(users=50, attributes=(SEX, RACE))
    users = np.array([7, 49, 0, 7])
    starts, sizes = data.rows(users)
    assert starts.tolist() == data.offsets[users].tolist()
    assert sizes.tolist() == data.sizes()[users].tolist()
    index = np.array([3, len(data) - 1, 3, 0])
    for one, two in zip(data.gather(index), data.gather(torch.from_numpy(index)), strict=True):
        assert torch.equal(one, two)
    features, labels, attributes = data.gather(index)
    assert torch.equal(features, data.features[index])
    assert torch.equal(labels, data.labels[index])
    assert torch.equal(attributes, data.attributes[index])
    part = data.subset(users)
    for place, user in enumerate(users):
        mine, theirs = (
            d.features[slice(*d.offsets[k : k + 2])] for d, k in ((part, place), (data, user))
        )
        assert torch.equal(mine, theirs)
    assert data.rows([])[0].shape == (0,)
    for bad in ([50], [-1], [3, 60]):
        with pytest.raises(ValueError, match="from 0 to 49"):
            data.rows(bad)


def test_a_population_without_any_samples() -> None:
    data = FederatedDataset.from_samples(np.zeros((0, 2)), [], None, Schema((2,), population=3))
    assert data.sizes().tolist() == [0, 0, 0]
    assert len(data.subset([1])) == 0


def test_whole_numbers_stay_as_they_are() -> None:
    schema = Schema((2,))
    images = FederatedDataset.from_samples(
        np.zeros((3, 2), dtype=np.uint8), [0, 1, 0], None, schema
    )
    assert images.to("cpu", torch.float64).features.dtype == torch.uint8
    assert images.input_dtype(torch.float64) == torch.uint8
    assert make_population().input_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.zeros((3, 4))}, r"shape \(3, 4\); the schema declares samples of shape"),
        ({"features": np.array([[0, 1], [np.nan, 0], [0, 0]])}, "1 samples have NaN .*sample 1"),
        ({"features": np.array([[0, 1], [np.inf, 0], [0, 0]])}, "NaN or infinite"),
        ({"features": np.array([["a", "b"]] * 3)}, "expected numbers"),
        ({"labels": [0, 1]}, "one for each sample"),
        ({"labels": [0, 1, 2]}, "labels run from 0 to 2; the schema declares classes 0 to 1"),
        ({"labels": [0, 0.5, 1]}, "whole numbers"),
        ({"attributes": [[0], [1], [-1]]}, "declare unknown=True"),
        ({"attributes": [[0], [1], [2]]}, "run from 0 to 2; expected 0 to 1"),
        ({"attributes": np.zeros((3, 2))}, r"expected \(3, 1\)"),
        ({"users": [1, 2]}, "one for each of 3 rows"),
    ],
)
def test_bad_samples_are_refused(changes, message) -> None:
    good = {"features": np.zeros((3, 2)), "labels": [0, 1, 0], "attributes": [[0], [1], [0]]}
    with pytest.raises(ValueError, match=message):
        FederatedDataset.from_samples(**good | changes, schema=SCHEMA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schema((2,), classes=1), "2 or more"),
        (lambda: Schema((2,), classes=None), "needs label_range"),
        (lambda: Schema((2,), classes=None, label_range=(1, 1)), "low < high"),
        (lambda: Schema((2,), attributes=(SEX, SEX)), "name twice"),
        (lambda: Schema((2,), feature_names=("a",)), "1 feature names"),
        (lambda: Schema((2,), population=0), "at least 1"),
        (lambda: Schema((2,), class_names=("no",)), "a name for each class"),
        (lambda: Schema((2,), class_names=("no", "no")), "each once"),
        (lambda: Schema((2,), class_names="no"), "a text for each class"),
        (
            lambda: Schema((2,), classes=None, label_range=(0, 1), class_names=("a", "b")),
            "classes = None",
        ),
        (lambda: Attribute("x", ("a",)), "at least two"),
        (lambda: mlp(3, (0,)), "at least 1"),
        (lambda: make_population().partition(mean=0), "positive"),
        (lambda: make_population().split(1.5), "between 0 and 1"),
    ],
)
def test_bad_declarations_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_regression_labels_stay_in_the_declared_range() -> None:
    schema = Schema((2,), classes=None, label_range=(0, 1), attributes=(RACE,))
    with pytest.raises(ValueError, match="the range"):
        FederatedDataset.from_samples(np.zeros((2, 2)), [0.5, 1.5], [[0], [-1]], schema)


def test_the_papers_networks() -> None:
    sizes = {SHALLOW: 92 * 10 + 10 + 11, DEEP: 92 * 16 + 16 + 16 * 8 + 8 + 8 * 8 + 8 + 9}
    for hidden, size in sizes.items():
        assert sum(p.numel() for p in mlp(92, hidden).parameters()) == size
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two = mlp(3, seed=1), mlp(3, seed=1)
    assert torch.equal(one[0].weight, two[0].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_scaling_by_declared_ranges() -> None:
    scaled = scale_by_ranges([[0.0, 5.0], [10.0, 50.0], [99.0, -1.0]], [(0, 10), (0, 10)])
    assert scaled.tolist() == [[-3, 0], [3, 3], [3, -3]]
    with pytest.raises(ValueError, match="one range for each column"):
        scale_by_ranges([[0.0]], [(0, 1), (0, 1)])
    with pytest.raises(ValueError, match="low < high"):
        scale_by_ranges([[0.0]], [(1, 1)])


def test_class_names_say_which_class_is_which() -> None:
    named, other = (Schema((2,), class_names=names) for names in (("no", "yes"), ("yes", "no")))
    bare = Schema((2,))
    assert "class_names" not in bare.as_dict()  # as in files that were written before
    for schema in (named, bare):
        assert Schema.from_dict(json.loads(json.dumps(schema.as_dict()))) == schema
    assert named.difference(bare) is None
    assert bare.difference(named) is None
    assert "class_names" in str(named.difference(other))
    table = TableSchema(Label("y", classes=("no", "yes")), (NumberColumn("x", (0, 1)),))
    assert table.schema().class_names == ("no", "yes")
    assert load_adult("test").schema.class_names == ("<=50K", ">50K")
    assert load_adult("test", label="hours-per-week").schema.class_names is None
