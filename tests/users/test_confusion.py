"""The confusion table in v: who is in it, what it is bounded by, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_population, vectors
from torch import nn
from torch.func import vmap

import fpfl
from fpfl.aggregation.clipping import DenseRows, clip, clip_rules
from fpfl.privacy.settings import Clipping
from fpfl.users import CohortEngine, FlatModel
from fpfl.users.layout import MOST_CLASSES, Layout, table_classes
from fpfl.users.reference import user_statistics


def engine_of(classes: int, constraint: object = None, **how: object) -> CohortEngine:
    torch.manual_seed(1)
    data = make_population(classes=classes).to("cpu", torch.float64)
    model = nn.Linear(5, 1 if classes == 2 else classes).double()
    return CohortEngine(FlatModel.of(model), data, constraint, **how)


@pytest.mark.parametrize("classes", [2, 4, MOST_CLASSES])
@pytest.mark.parametrize("constraint", [None, fpfl.accuracy_parity("sex")])
@pytest.mark.parametrize("form", ["paper", "one-gradient"])
def test_each_users_table_is_the_plain_loops(classes: int, constraint, form: str) -> None:
    if form == "one-gradient" and constraint is None:
        form = "paper"
    engine = engine_of(classes, constraint, form=form)
    w, K = engine.model.vector(), engine.data.population
    place = engine.layout.slices["table"]
    sent = vectors(engine, w, np.arange(K))[:, place]
    for k in range(K):
        own = user_statistics(k, w, engine.model, engine.data, constraint)
        wanted = own["table"].flatten() if own else torch.zeros(classes**2)
        assert sent[k].tolist() == wanted.tolist()
        # Every sample is counted once: the ℓ1 norm is n^k, as that of hits and misses.
        assert float(sent[k].sum()) == int(engine.data.sizes()[k])


def test_hits_and_misses_are_what_they_were() -> None:
    for classes in (2, 4):
        now, before = engine_of(classes), engine_of(classes, table=False)
        w, everyone = now.model.vector(), np.arange(now.data.population)
        new, old = (e.layout.totals(vectors(e, w, everyone).sum(0), 1.0) for e in (now, before))
        assert old.table is None
        assert new.table is not None
        assert (new.hits, new.misses, new.accuracy()) == (old.hits, old.misses, old.accuracy())
        assert float(new.hits) == float(new.table.trace())
        # What follows from counts alone is in both, number by number.
        both = [n for n in now.layout.shapes if n != "table"]
        assert [n for n in before.layout.shapes if n not in ("hits", "misses")] == both


def test_many_classes_and_regressions_have_hits_and_misses() -> None:
    assert [table_classes(C) for C in (None, 2, 10, 11)] == [None, 2, 10, None]
    for classes in (None, MOST_CLASSES + 1):
        data = make_population(classes=classes)
        layout = CohortEngine(FlatModel.of(nn.Linear(5, classes or 1)), data).layout
        assert list(layout.shapes) == ["loss_gradient", "hits", "misses"]


def test_one_user_changes_its_own_row_alone_and_by_the_bound_at_most() -> None:
    engine = engine_of(4, fpfl.accuracy_parity("sex"))
    data, w = engine.data, engine.model.vector()
    everyone, k = np.arange(data.population), 3
    own = slice(*data.offsets[k : k + 2].tolist())
    labels = data.labels.clone()
    labels[own] = (labels[own] + 1) % 4
    features = data.features.clone()
    features[own] *= -3.0
    other = replace(engine, data=replace(data, labels=labels, features=features))
    one, two = (vectors(e, w, everyone) for e in (engine, other))
    changed = (one != two).any(dim=1)
    assert changed.tolist() == [each == k for each in everyone]
    bound = 1.5
    rules = clip_rules(
        Clipping(1.0, selection=bound).blocks(constrained=True, selection=True),
        engine.layout.slices,
    )
    place = engine.layout.slices["table"]
    for rows in (one, two):
        clipped = clip(DenseRows(rows, engine.layout.slices), rules)[:, place]
        assert float(clipped.abs().sum(dim=1).max()) <= bound * (1 + 1e-9)
        # Clipping scales a user's whole table: what is derived from it is not biased.
        n = rows[:, place].sum(dim=1, keepdim=True)
        shares = (rows[:, place] / n.clamp(min=1)).double()
        torch.testing.assert_close(clipped, shares * n.clamp(max=bound))


def test_the_noise_of_every_number_is_that_of_hits_and_misses() -> None:
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=1.0)
    plan = privacy.plan(population=1000, cohort=100, rounds=10, constrained=False)
    deviations = []
    for layout in (Layout(4, classes=2), Layout(4)):
        party = fpfl.aggregation.ThirdParty(layout.slices, plan.blocks, plan)
        deviations.append(float(party.noise_stddev[-1]))
    # Up to the rounding that a block of four numbers allows for instead of two.
    assert deviations[0] == pytest.approx(deviations[1], rel=1e-6)


@pytest.mark.parametrize("classes", [2, 3, 7, 10])
def test_of_several_runs_hits_and_misses_have_the_same_bits(classes: int) -> None:
    layout = Layout(3, classes=classes)
    v = torch.randn(5, layout.size, generator=torch.Generator().manual_seed(classes)) * 1e3

    def derived(each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        totals = layout.totals(each, 1.0)
        return totals.hits, totals.misses

    for mapped, single in zip(vmap(derived)(v), zip(*map(derived, v), strict=True), strict=True):
        assert mapped.tolist() == [float(each) for each in single]
    table = v[0, layout.slices["table"]].double().reshape(classes, classes)
    hits, misses = derived(v[0])
    assert float(hits) == pytest.approx(float(table.trace()), rel=1e-3, abs=1e-2)
    assert float(misses) == pytest.approx(float(table.sum() - table.trace()), rel=1e-3, abs=1e-2)
