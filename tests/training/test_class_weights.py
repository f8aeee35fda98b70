"""Declared class weights: they weigh losses, count nothing twice, and change no bound."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SEX, make_population, vectors
from torch import nn

import fpfl
from fpfl.config import load_config, load_data
from fpfl.data.table_schema import declared_schema
from fpfl.users import CohortEngine, FlatModel
from fpfl.users.reference import user_statistics


def weighed(classes: int, weights: object) -> fpfl.FederatedDataset:
    from dataclasses import replace

    data = make_population(classes=classes).to("cpu", torch.float64)
    return replace(data, schema=data.schema.weighing(weights))


@pytest.mark.parametrize("classes", [2, 4])
def test_every_path_weighs_a_samples_loss_and_nothing_else(classes: int) -> None:
    weights = [0.5, 3.0, 1.0, 2.0][:classes]
    torch.manual_seed(0)
    model = FlatModel.of(nn.Linear(5, 1 if classes == 2 else classes).double())
    constraint = fpfl.accuracy_parity("sex")
    plain = CohortEngine(model, weighed(classes, None), constraint)
    ours = CohortEngine(model, weighed(classes, weights), constraint)
    w, everyone = model.vector(), np.arange(plain.data.population)
    one, other = (vectors(e, w, everyone) for e in (plain, ours))
    p = model.size
    assert torch.equal(one[:, p:], other[:, p:])  # rates, counts, the confusion table
    for k in everyone:
        wanted = user_statistics(int(k), w, model, ours.data, constraint)
        if wanted:
            torch.testing.assert_close(other[k, :p], wanted["loss_gradient"])
    # Class by class: the loss's gradient of samples of class k, times its weight.
    total = torch.zeros(p, dtype=torch.float64)
    for k, weight in enumerate(weights):
        alone = [0.0 + (j == k) for j in range(classes)]
        engine = CohortEngine(model, weighed(classes, [a or 1e-300 for a in alone]), constraint)
        total += weight * vectors(engine, w, everyone)[:, :p].sum(0)
    torch.testing.assert_close(other[:, :p].sum(0), total)


def test_train_takes_them_by_name_and_the_noise_is_the_same() -> None:
    data = make_population(users=60)
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=1.0)
    how = {"cohort": 30, "rounds": 3, "privacy": privacy, "seed": 0, "noise_seed": 0}
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    plain, one, other = (
        fpfl.train(model, data, class_weights=weights, selection="last", **how)
        for weights in (None, [1.0, 8.0], {"1": 8.0})
    )
    assert one.settings["class_weights"] == [1.0, 8.0]
    assert "class_weights" not in plain.settings
    assert plain.privacy.epsilon == one.privacy.epsilon
    assert torch.equal(one.model.weight, other.model.weight)
    assert not torch.equal(one.model.weight, plain.model.weight)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("balanced", "no ε covers"),
        ([1.0], "a positive number for each class"),
        ([1.0, 0.0], "a positive number for each class"),
        ({"maybe": 2.0}, "class weights name"),
    ],
)
def test_what_cannot_be_weights_is_refused(weights: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_population().schema.weighing(weights)


def test_a_regression_has_none_and_one_place_declares_them() -> None:
    with pytest.raises(ValueError, match="regression"):
        make_population(classes=None).schema.weighing([1.0, 2.0])
    with pytest.raises(ValueError, match="in one place"):
        make_population().schema.weighing([1.0, 2.0]).weighing([2.0, 1.0])


def test_schemas_are_what_they_were_without_them_and_are_read_back_with_them() -> None:
    schema = fpfl.Schema((2,), attributes=(SEX,))
    assert "class_weights" not in schema.as_dict()
    ours = schema.weighing([1.0, 2.0])
    assert fpfl.Schema.from_dict(ours.as_dict()) == ours


TABLE = """
samples_per_user = 1
[label]
column = "y"
classes = ["no", "yes"]
{label}
[attributes]
sex = ["F", "M"]
[features]
x = [0, 1]
"""


def test_a_tables_schema_declares_them() -> None:
    found = declared_schema(tomllib.loads(TABLE.format(label="weights = { yes = 4 }")))
    assert found.schema().class_weights == (1.0, 4.0)
    again = declared_schema(tomllib.loads(found.toml()))
    assert again.schema() == found.schema()
    assert declared_schema(tomllib.loads(TABLE.format(label=""))).schema().class_weights is None
    for label, words in (
        ('weights = "balanced"', "shares counted in the data"),
        ("weights = { perhaps = 2 }", "class weights name"),
        ('weights = { yes = "much" }', "expected a number"),
        ("weights = { yes = 0 }", "a positive number for each class"),
    ):
        with pytest.raises(ValueError, match=words):
            declared_schema(tomllib.loads(TABLE.format(label=label))).schema()


def test_a_configs_schema_declares_them_for_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sex = rng.integers(0, 2, 40)
    np.savez(
        tmp_path / "people.npz",
        features=rng.normal(size=(40, 2)),
        labels=rng.integers(0, 2, 40),
        attributes=sex[:, None],
    )
    text = """
[data]
train = "people.npz"
[data.schema]
attributes = { sex = ["F", "M"] }
samples_per_user = 1
{weights}
[training]
cohort = 10
rounds = 2
"""
    path = tmp_path / "config.toml"

    def weights(line: str) -> object:
        path.write_text(text.replace("{weights}", line), encoding="utf-8")
        return load_data(load_config(path), tmp_path, None)[0].schema.class_weights

    assert weights("class_weights = [1, 4]") == (1.0, 4.0)
    assert weights("") is None
    with pytest.raises(ValueError, match="a positive number for each class"):
        weights("class_weights = [1, 4, 2]")
