"""The methods' formulas against autograd and against their definitions."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fpfl
import fpfl.data.loaders
import fpfl.privacy.conventions.base
import fpfl.users.recorders
from fpfl import BMDM, MMDM, Constraint, Rate, Tran
from fpfl.config import Config, make_method
from fpfl.config.sections import MethodConfig
from fpfl.fairness import Totals
from fpfl.methods import REGISTER, MethodState, Unconstrained
from fpfl.methods.base import about, register
from fpfl.training.spec import plain_value
from fpfl.users import CohortEngine, FlatModel, task

ALPHA = 0.02


def random_totals(seed: int, rates: int = 2, groups: int = 3, p: int = 7) -> Totals:
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(5, 60, (rates, groups), generator=g).double()
    F = n * torch.rand(rates, groups, generator=g).double()
    gradient = torch.randn(rates, groups, p, generator=g).double()
    return Totals(
        loss_gradient=torch.randn(p, generator=g).double(),
        normaliser=50.0,
        F=F,
        n=n,
        F_gradient=gradient,
        overall_F=F.sum(1),
        overall_n=n.sum(1),
        overall_F_gradient=gradient.sum(1),
    )


def state_of(totals: Totals, seed: int = 0) -> MethodState:
    g = torch.Generator().manual_seed(seed + 1000)
    return MethodState(torch.rand(totals.F.shape, generator=g).double())


@given(st.integers(0, 10_000), st.floats(0, 10), st.floats(0, 1))
@settings(max_examples=60)
def test_mmdm_direction_is_its_formula(seed: int, damping: float, rate: float) -> None:
    """∇L/N + Σ_a β_a ∇F_a with β_a = Σ_b κ_b/n' − κ_a/n'_a, for every rate."""
    totals = random_totals(seed)
    state = state_of(totals, seed)
    new, direction = MMDM(damping=damping, multiplier_lr=rate).update(state, totals, ALPHA)
    D = totals.overall_F[:, None] / totals.overall_n[:, None] - totals.F / totals.n
    h = D.abs() - ALPHA
    g = h.clamp(min=0)
    lam = state.multipliers + rate * g
    kappa = torch.where(h >= 0, D.sign() * (lam + damping * g), 0.0)
    beta = (kappa.sum(1) / totals.overall_n)[:, None] - kappa / totals.n
    expected = totals.loss_gradient / 50.0 + torch.einsum("rg,rgp->p", beta, totals.F_gradient)
    torch.testing.assert_close(new.multipliers, lam)
    torch.testing.assert_close(direction, expected)


@given(st.integers(0, 10_000))
@settings(max_examples=40)
def test_no_damping_is_bmdm_bit_for_bit(seed: int) -> None:
    totals = random_totals(seed)
    state = state_of(totals, seed)
    # BMDM written down on its own: λ ← λ + γ g, then L's gradient and Σ λ_a ∇g_a.
    difference = totals.differences()
    active = difference.abs() - ALPHA >= 0
    g = torch.where(active, difference.abs() - ALPHA, 0.0)
    lam = state.multipliers + 0.01 * g
    kappa = torch.where(active, difference.sign() * lam, 0.0)
    by_group = (kappa / totals.n).flatten() @ totals.F_gradient.flatten(0, 1)
    overall = kappa.sum(dim=1) / totals.overall_n
    expected = totals.loss_gradient / totals.normaliser + (
        overall @ totals.overall_F_gradient - by_group
    )
    for method in (MMDM(damping=0.0, multiplier_lr=0.01), BMDM(multiplier_lr=0.01)):
        new, direction = method.update(state, totals, ALPHA)
        assert torch.equal(new.multipliers, lam)
        assert torch.equal(direction, expected)


def smooth_rate() -> Rate:
    """A rate whose f is itself differentiable, so that F and ∇F belong together."""
    return Rate(
        "smooth",
        condition=lambda y: torch.ones_like(y, dtype=torch.bool),
        true=lambda p, y: torch.sigmoid(p - y),
        surrogate=lambda s, y: torch.sigmoid(s - y),
        kind="regression",
    )


@pytest.mark.parametrize("attributes", [(SEX,), (SEX, RACE)])
@pytest.mark.parametrize("damping", [0.0, 2.0])
def test_direction_is_autograd_of_the_lagrangian(attributes, damping: float) -> None:
    """For a differentiable f: the direction is ∇(L/N + λᵀg + (c/2)|g|²) on the whole batch."""
    data = make_population(users=40, classes=None, attributes=attributes).to("cpu", torch.float64)
    torch.manual_seed(0)
    # A final sigmoid keeps predictions inside the declared range, where none is clamped.
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Sigmoid()
    ).double()
    flat = FlatModel.of(net)
    constraint = Constraint((smooth_rate(),), tolerance=0.001)
    engine = CohortEngine(flat, data, constraint)
    w = flat.vector()
    rows = vectors(engine, w, np.arange(data.population))
    totals = engine.layout.totals(rows.sum(0), normaliser=17.0)
    state = MethodState(torch.full(totals.F.shape, 0.3, dtype=torch.float64))
    new, direction = MMDM(damping=damping, multiplier_lr=0.01).update(state, totals, 0.001)
    assert bool((totals.differences().abs() > 0.001).any())

    member = engine.groups.membership(data.attributes).double()

    def lagrangian(w: Tensor) -> Tensor:
        output = flat(w, data.features).squeeze(-1)
        L = task.loss(output, data.labels, data.schema).sum()
        f = torch.sigmoid(task.scores(output, data.schema) - data.labels)
        D = f.mean() - (f @ member) / member.sum(0)
        g = (D.abs() - 0.001).clamp(min=0)
        return L / 17.0 + (new.multipliers[0] * g).sum() + damping / 2 * (g**2).sum()

    expected = torch.autograd.functional.jacobian(lagrangian, w)
    torch.testing.assert_close(direction, expected, rtol=1e-9, atol=1e-11)


def test_tran_uses_unsigned_slopes_and_caps_the_multipliers() -> None:
    totals = random_totals(3)
    state = MethodState(torch.full(totals.F.shape, 0.049).double())
    new, direction = Tran(multiplier_lr=1.0, max_multiplier=0.05).update(
        state, totals, tolerance=0.9
    )
    assert float(new.multipliers.max()) == 0.05
    slopes = (
        totals.overall_F_gradient[:, None] / totals.overall_n[:, None, None]
        - totals.F_gradient / totals.n[..., None]
    ).abs()
    expected = totals.loss_gradient / 50.0 + torch.einsum("rg,rgp->p", new.multipliers, slopes)
    torch.testing.assert_close(direction, expected)
    assert bool((direction - totals.loss_gradient / 50.0 >= 0).all())


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6),
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6),
)
@settings(max_examples=100)
def test_noisy_counts_never_give_a_quotient_that_is_not_finite(F, n) -> None:
    """n'_a may be zero, negative or tiny: the constraint rests, the direction stays finite."""
    base = random_totals(0)
    F_, n_ = torch.tensor(F).double().reshape(2, 3), torch.tensor(n).double().reshape(2, 3)
    totals = dataclasses.replace(base, F=F_, n=n_, overall_F=F_.sum(1), overall_n=n_.sum(1))
    for method in (MMDM(), Tran()):
        state, direction = method.update(MethodState.zeros(2, 3), totals, ALPHA)
        assert bool(direction.isfinite().all())
        assert bool(state.multipliers.isfinite().all())
        assert bool((state.multipliers >= 0).all())


def test_unknown_count_rests_its_constraint() -> None:
    base = random_totals(1)
    n = base.n.clone()
    n[:, 0] = -4.0
    totals = dataclasses.replace(base, n=n)
    state, direction = MMDM().update(MethodState.zeros(2, 3), totals, 0.0)
    assert bool((state.multipliers[:, 0] == 0).all())
    changed = dataclasses.replace(
        totals, F_gradient=totals.F_gradient.clone().index_fill_(1, torch.tensor([0]), 1e9)
    )
    _, same = MMDM().update(MethodState.zeros(2, 3), changed, 0.0)
    torch.testing.assert_close(direction, same)


def test_unconstrained_is_the_loss() -> None:
    totals = random_totals(2)
    state, direction = Unconstrained().update(MethodState.zeros(2, 3), totals, ALPHA)
    assert torch.equal(direction, totals.loss_gradient / 50.0)
    assert bool((state.multipliers == 0).all())


def test_the_methods_own_tolerance_replaces_the_constraints() -> None:
    totals = random_totals(4)
    state = MethodState.zeros(2, 3)
    _, tight = MMDM(tolerance=0.0).update(state, totals, 0.9)
    _, same = MMDM().update(state, totals, 0.0)
    assert torch.equal(tight, same)


@pytest.mark.parametrize(
    "make", [lambda: MMDM(damping=-1), lambda: MMDM(multiplier_lr=-0.1),
             lambda: MMDM(tolerance=1.0),
             lambda: Tran(max_multiplier=-1), lambda: Tran(multiplier_lr=float("nan"))],
)  # fmt: skip
def test_bad_settings_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_old_names_of_settings_are_taken() -> None:
    """What 0.1.0 called rate, memory and standin; in code, pickles, and files."""
    assert MMDM(rate=0.3) == MMDM(multiplier_lr=0.3)
    assert BMDM(rate=0.3) == BMDM(0.3)
    old = fpfl.OneGradient(rate=0.2, memory=0.5, standin="rate")
    assert old == fpfl.OneGradient(multiplier_lr=0.2, decay=0.5, surrogate="rate")
    assert (old.rate, old.memory, old.standin) == (0.2, 0.5, "rate")
    with pytest.raises(TypeError, match="rate and multiplier_lr"):
        MMDM(rate=0.1, multiplier_lr=0.2)
    pickled = object.__new__(MMDM)
    pickled.__setstate__({"damping": 1.0, "rate": 0.4, "tolerance": None})
    assert pickled == MMDM(1.0, 0.4)
    assert pickle.loads(pickle.dumps(old)) == old
    assert plain_value(old)["rate"] == 0.2  # as run.json and fingerprints have it
    rate = fpfl.Rate("r", lambda y: y, lambda p, y: p, standin=lambda s, y: s)
    assert rate.standin is rate.surrogate


@pytest.fixture
def counting():
    """A method of one's own, as a file of `fpfl.methods` would have it."""

    @dataclass(frozen=True)
    class CountedState(MethodState):
        rounds: int = 0

    @register("counted", "a method that counts rounds", states=(CountedState,))
    @dataclass(frozen=True)
    class Counted:
        pace: float = 0.5
        word: Literal["a", "b"] = "a"

        def update(self, state, totals, tolerance):
            return state, totals.loss_gradient

    yield Counted
    del REGISTER["counted"]


def test_a_registered_method_is_known_everywhere(counting) -> None:
    """By its name in configs, by its class in reports; nothing else is told of it."""
    method = MethodConfig.model_validate({"kind": "counted", "pace": 2, "word": "b"})
    config = Config.model_validate(
        {"data": {"name": "adult"}, "training": {"cohort": 2, "rounds": 1}, "method": method}
    )
    assert make_method(config) == counting(2.0, "b")
    assert about("Counted") == "a method that counts rounds"
    for values, message in (({"pace": "fast"}, "pace is 'fast'"), ({"word": "c"}, "word is 'c'"),
                            ({"speed": 1}, "which has pace, word")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            MethodConfig.model_validate({"kind": "counted", **values})
    with pytest.raises(ValueError, match="already"):
        register("counted", "again")(counting)


@pytest.mark.parametrize(
    ("room", "registered", "others"),
    [
        (fpfl.methods, [entry.make for entry in REGISTER.values()], {"base"}),
        (fpfl.users.recorders, fpfl.users.recorders.REGISTER, set()),
        (
            fpfl.privacy.conventions,
            [entry.epsilon for entry in fpfl.privacy.conventions.base.REGISTER.values()],
            {"base"},
        ),
        (fpfl.data.loaders, [entry.load for entry in fpfl.data.loaders.REGISTER.values()], set()),
    ],
)
def test_every_file_of_a_folder_registers_something(room, registered, others) -> None:
    """To be known is to be a file there: nothing else names what is in it."""
    modules = {each.__module__ for each in registered if each.__module__.startswith("fpfl.")}
    files = {path.stem for path in Path(room.__file__).parent.glob("*.py")}
    assert modules == {f"{room.__name__}.{stem}" for stem in files - {"__init__", *others}}
