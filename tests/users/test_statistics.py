"""What users compute, against the batch's own gradients, finite differences and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, vectors
from torch import Tensor, nn

from fpfl import (
    Constraint,
    FederatedDataset,
    accuracy_parity,
    fnr_parity,
)
from fpfl.fairness import rates
from fpfl.users import CohortEngine, FlatModel, task

EVERY_RATE = {
    "binary": [
        rates.false_negative_rate(),
        rates.false_positive_rate(),
        rates.true_positive_rate(),
        rates.accuracy(),
        rates.selection_rate(),
    ],
    "multiclass": [rates.accuracy(), rates.class_recall(2), rates.selection_rate(0)],
    "regression": [
        rates.squared_error((-5, 5)),
        rates.absolute_error((-5, 5)),
        rates.mean_prediction((-5, 5)),
    ],
}
CLASSES = {"binary": 2, "multiclass": 4, "regression": None}


def network(data: FederatedDataset, seed: int = 0) -> FlatModel:
    torch.manual_seed(seed)
    classes = data.schema.classes
    outputs = classes if classes and classes > 2 else 1
    net = nn.Sequential(nn.Linear(*data.schema.shape, 6), nn.Tanh(), nn.Linear(6, outputs))
    return FlatModel.of(net.double())


def everyone(data: FederatedDataset) -> np.ndarray:
    return np.arange(data.population)


def total(engine: CohortEngine, w: Tensor) -> Tensor:
    return vectors(engine, w, everyone(engine.data)).sum(0)


@pytest.mark.parametrize("kind", EVERY_RATE)
@pytest.mark.parametrize("attributes", [(SEX,), (SEX, RACE)])
def test_sums_are_the_batchs_and_gradients_match_finite_differences(kind, attributes) -> None:
    data = make_population(classes=CLASSES[kind], attributes=attributes).to("cpu", torch.float64)
    model = network(data)
    constraint = Constraint(tuple(EVERY_RATE[kind]))
    engine = CohortEngine(model, data, constraint)
    w = model.vector()
    totals = engine.layout.totals(total(engine, w), 1.0)
    schema = data.schema
    member = engine.groups.membership(data.attributes).double()

    def batch(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = task.flatten_output(model(w, data.features), schema)
        L = task.loss(output, data.labels, schema).sum()
        soft = task.scores(output, schema)
        F = torch.stack(
            [r.surrogate(soft, data.labels) * r.condition(data.labels) for r in constraint.rates]
        )
        return L, F @ member, F.sum(1)

    for part, gradient in enumerate(
        (totals.loss_gradient, totals.F_gradient, totals.overall_F_gradient)
    ):
        reference = torch.autograd.functional.jacobian(lambda w, i=part: batch(w)[i], w)
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)
        step = 1e-6
        for j in (0, 7, model.size - 1):
            e = torch.zeros_like(w)
            e[j] = step
            difference = (batch(w + e)[part] - batch(w - e)[part]) / (2 * step)
            torch.testing.assert_close(gradient[..., j], difference, rtol=1e-5, atol=1e-6)

    output = task.flatten_output(model(w, data.features), schema)
    predicted = task.predictions(output, schema)
    for r, rate in enumerate(constraint.rates):
        condition = rate.condition(data.labels).double()
        f = rate.evaluate(predicted, data.labels).double() * condition
        torch.testing.assert_close(totals.F[r], f @ member)
        torch.testing.assert_close(totals.n[r], condition @ member)
        torch.testing.assert_close(totals.overall_F[r], f.sum())
        torch.testing.assert_close(totals.overall_n[r], condition.sum())
    torch.testing.assert_close(totals.hits + totals.misses, torch.tensor(float(len(data))).double())


def test_both_bases_carry_the_same_totals() -> None:
    data = make_population(attributes=(SEX, RACE))
    model = FlatModel.of(nn.Linear(5, 1))
    w = model.vector()
    paper, split = (
        CohortEngine(model, data, fnr_parity(), basis=basis) for basis in ("paper", "split")
    )
    one = paper.layout.totals(total(paper, w), 1.0)
    other = split.layout.totals(total(split, w), 1.0)
    for name in ("F", "n", "overall_F", "overall_n", "F_gradient", "hits", "misses"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


def test_unknown_groups_count_overall_and_in_no_group() -> None:
    data = make_population(attributes=(RACE,), users=60)
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), data, accuracy_parity())
    assert not engine.layout.partition
    totals = engine.layout.totals(total(engine, engine.model.vector()), 1.0)
    unknown = int((data.attributes[:, 0] < 0).sum())
    assert unknown > 0
    assert float(totals.overall_n[0]) == len(data)
    assert float(totals.n.sum()) == len(data) - unknown


def test_one_complete_attribute_partitions_and_needs_no_overall_block() -> None:
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), make_population(), fnr_parity("sex"))
    assert list(engine.layout.shapes) == ["loss_gradient", "F", "F_gradient", "n", "table"]
    p, groups = 6, 2
    assert engine.layout.size == (groups + 1) * p + 2 * groups + 4


def test_users_without_samples_send_nothing() -> None:
    data = make_population(users=40, mean=0.5)
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), data)
    parts = engine.statistics(engine.model.vector(), everyone(data))
    assert sum(len(part) for part in parts) == int((data.sizes() > 0).sum()) < data.population
    empty = np.flatnonzero(data.sizes().numpy() == 0)
    assert list(engine.statistics(engine.model.vector(), empty)) == []


def test_a_part_of_the_samples() -> None:
    """At most the asked number, drawn without replacement, every sample equally often."""
    data = make_population(users=12, mean=5.0)
    seen = np.zeros(len(data))
    repeats, limit = 4000, 3
    engine = CohortEngine(FlatModel.of(nn.Linear(5, 1)), data, samples_per_user=limit)
    for key in range(repeats):
        for chunk in engine.chunks(everyone(data), key):
            picked = chunk.batch.samples[chunk.batch.real > 0].numpy()
            assert len(set(picked)) == len(picked)
            seen[picked] += 1
    sizes = data.sizes().numpy()
    owners = np.repeat(np.arange(data.population), sizes)
    expected = np.minimum(sizes, limit)[owners] / sizes[owners]
    # Bernoulli frequencies: false alarm below 1e-6 for all ~60 samples together (5.6 sigma each).
    sigma = np.sqrt(expected * (1 - expected) / repeats)
    assert np.all(np.abs(seen / repeats - expected) <= 5.6 * sigma + 1e-12)


def test_dropout_works_and_gradients_stay_per_user() -> None:
    data = make_population()
    model = FlatModel.of(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    engine = CohortEngine(model, data)
    rows = vectors(engine, model.vector(), everyone(data), key=1)
    assert bool(rows.isfinite().all())
    torch.testing.assert_close(rows, vectors(engine, model.vector(), everyone(data), key=1))
    other = vectors(engine, model.vector(), everyone(data), key=2)
    p = model.size
    assert not torch.allclose(rows[:, :p], other[:, :p])
    torch.testing.assert_close(rows[:, p:], other[:, p:])  # counts are of the whole model


@pytest.mark.parametrize("kind", EVERY_RATE)
def test_closed_gradients_are_autograds(kind) -> None:
    """∂ℓ/∂o and the chain rule through the scores, against autograd."""
    data = make_population(classes=CLASSES[kind], users=8).to("cpu", torch.float64)
    schema, n = data.schema, len(data)
    g = torch.Generator().manual_seed(0)
    shape = (n, 4) if kind == "multiclass" else (n,)
    output = (3 * torch.randn(shape, generator=g, dtype=torch.float64)).requires_grad_()
    loss = task.loss(output, data.labels, schema).sum()
    (wanted,) = torch.autograd.grad(loss, output)
    torch.testing.assert_close(task.loss_gradient(output, data.labels, schema), wanted)
    soft = task.scores(output, schema)
    inner = torch.randn(soft.shape, generator=g, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(soft, output, inner)
    torch.testing.assert_close(task.score_gradient(soft, inner, schema), wanted)
