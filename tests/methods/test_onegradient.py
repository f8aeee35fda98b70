"""One gradient for each user: the form of v, the weights, the method, local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import CONSTRAINTS, MODELS, SIZES, make
from torch import Tensor, nn

import fpfl
from fpfl import Clipping, Constraint, FederatedAveraging, OneGradient, Privacy
from fpfl.aggregation.clipping import DenseRows, clip, clip_rules, clipped_sum
from fpfl.fairness import rates
from fpfl.fairness.totals import Totals, Weights
from fpfl.methods import MethodState
from fpfl.methods.mmdm import constraint_direction
from fpfl.methods.onegradient import MOST, AveragedState
from fpfl.users import CohortEngine, FlatModel, task
from fpfl.users.factored import FactoredGradients

ALPHA = 0.02


def some_weights(engine: CohortEngine, seed: int, low=0.1, high=3.0) -> Weights:
    """Weights that some samples' reach the ends of the range with."""
    r, g = len(engine.layout.rates), len(engine.layout.groups)
    generator = torch.Generator().manual_seed(seed)
    like = engine.model.vector()
    groups = 1.5 * torch.randn(r, g, generator=generator).to(like)
    return Weights(groups, torch.randn(r, generator=generator).to(like), low, high)


def objective(engine: CohortEngine, w: Tensor, part: slice, weights: Weights | None) -> Tensor:
    """A user's objective, sample by sample, straight from the definitions."""
    data, schema = engine.data, engine.data.schema
    x, y = data.features[part], data.labels[part]
    output = task.flatten_output(engine.model(w, x), schema)
    loss = task.loss(output, y, schema)
    total = torch.zeros((), dtype=w.dtype)
    found = engine.constraint.rates if engine.constraint and weights is not None else ()
    member = engine.groups.membership(data.attributes[part]) if found else None
    for i in range(len(y)):
        omega, own = 1.0, torch.zeros((), dtype=w.dtype)
        for r, rate in enumerate(found):
            if not bool(rate.condition(y[i : i + 1])):
                continue
            b = float(weights.overall[r])
            b += sum(float(weights.groups[r, g]) for g in range(len(engine.groups)) if member[i, g])
            slopes = rate.loss_slopes(schema.classes) if engine.surrogate == "loss" else None
            if slopes is None:
                b = min(max(b, 1.0 - weights.high), weights.high - 1.0)
                b *= 0.1 if schema.classes is None else 1.0
                own = own + b * rate.surrogate(task.scores(output, schema), y)[i]
            else:
                omega += float(slopes[0 if schema.classes is None else int(y[i])]) * b
        if found:
            omega = min(max(omega, weights.low), weights.high)
        total = total + omega * loss[i] + own
    return total


def gradients_by_hand(engine: CohortEngine, w: Tensor, weights: Weights | None) -> Tensor:
    """mean_s G(w_s) of every user, one after the other."""
    local = engine.local or FederatedAveraging(1, 1.0)
    rows = []
    for k in range(engine.data.population):
        part = slice(*engine.data.offsets[k : k + 2].tolist())
        n, total, own = part.stop - part.start, torch.zeros_like(w), w.clone()
        for _ in range(local.steps if n else 0):
            leaf = own.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(objective(engine, leaf, part, weights), leaf)
            total += gradient / local.steps
            own = own - local.learning_rate * gradient / n
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("model", MODELS)
@given(
    constraint=st.sampled_from(list(CONSTRAINTS)),
    sizes=SIZES,
    classes=st.sampled_from([2, 3]),
    surrogate=st.sampled_from(["loss", "rate"]),
    memory=st.sampled_from([1, 3_000, 10**9]),
    shares=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_every_path_equals_the_loop(
    model, constraint, sizes, classes, surrogate, memory, shares, seed
):
    """One gradient and the counts of every user, whatever the model, groups, chunks and shares."""
    engine = make(
        model, constraint, sizes, classes, seed, basis="split", memory=memory,
        form="one-gradient", surrogate=surrogate,
    )  # fmt: skip
    paper = make(model, constraint, sizes, classes, seed, basis="split")
    users, w = np.arange(len(sizes)), engine.model.vector()
    weights = some_weights(engine, seed) if engine.constraint else None
    given_ = sum(
        vectors(engine, w, users, share=(i, shares), weights=weights) for i in range(shares)
    )
    places = engine.layout.slices
    wanted = gradients_by_hand(engine, w, weights)
    torch.testing.assert_close(given_[:, places["loss_gradient"]], wanted, rtol=1e-9, atol=1e-10)
    counted = vectors(paper, w, users)
    for name in set(places) - {"loss_gradient"}:
        torch.testing.assert_close(given_[:, places[name]], counted[:, paper.layout.slices[name]])
    rules = clip_rules(
        Clipping(0.5, counts=1.0).blocks(constrained=weights is not None, selection=True), places
    )
    parts = list(engine.statistics(w, users, weights=weights))
    total = sum(clipped_sum(part, rules) for part in parts)
    expected = clip(DenseRows(given_, places), rules).sum(0)
    # Clipped factors have inputs of 18 bits.
    factored = any(isinstance(part.gradients, FactoredGradients) for part in parts)
    close = {"rtol": 1e-4, "atol": 1e-5} if factored else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(total, expected, **close)


@pytest.mark.parametrize("model", ["linear", "perceptron", "convolutional", "lstm", "attention"])
@pytest.mark.parametrize("constraint", ["none", "two attributes"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("memory", [1, 10**9])
def test_local_steps_equal_the_loop(model, constraint, classes, memory) -> None:
    """Every user takes its own steps from w; the counts stay those of the broadcast model."""
    sizes = [3, 0, 1, 5, 3]
    plain = make(model, constraint, sizes, classes, 3, form="one-gradient")
    if constraint == "none":
        plain = replace(plain, form="paper")
    engine = replace(plain, local=FederatedAveraging(3, 0.5), memory=memory)
    users, w = np.arange(len(sizes)), engine.model.vector()
    weights = some_weights(engine, 3) if engine.constraint else None
    given_ = vectors(engine, w, users, weights=weights)
    p = engine.layout.slices["loss_gradient"]
    wanted = gradients_by_hand(engine, w, weights)
    torch.testing.assert_close(given_[:, p], wanted, rtol=1e-9, atol=1e-10)
    at_w = vectors(plain, w, users, weights=weights)
    torch.testing.assert_close(given_[:, p.stop :], at_w[:, p.stop :])
    one = replace(engine, local=FederatedAveraging(1, 0.5))
    torch.testing.assert_close(vectors(one, w, users, weights=weights), at_w)
    assert not torch.allclose(wanted, at_w[:, p])


def test_a_regression_shifts_its_targets() -> None:
    """The surrogate of a mean prediction is linear: ½ (o − t)² + τ o is a shift of t by −τ."""
    label_range = (-5.0, 5.0)
    for made, surrogate in [
        ((rates.mean_prediction,), "loss"),
        ((rates.squared_error,), "loss"),
        ((rates.absolute_error,), "loss"),
        ((rates.absolute_error,), "rate"),
        ((rates.mean_prediction, rates.squared_error), "loss"),  # one of each
    ]:
        data = make_population(users=12, classes=None).to("cpu", torch.float64)
        model = FlatModel.of(nn.Linear(5, 1).double())
        both = tuple(rate(label_range) for rate in made)
        constraint = Constraint(both, ("sex",), label_range=label_range)
        engine = CohortEngine(model, data, constraint, form="one-gradient", surrogate=surrogate)
        weights, w = some_weights(engine, 1), model.vector()
        given_ = vectors(engine, w, np.arange(12), weights=weights)
        wanted = gradients_by_hand(engine, w, weights)
        torch.testing.assert_close(given_[:, : model.size], wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("constraint", ["one attribute", "two attributes", "intersection"])
@pytest.mark.parametrize("classes", [2, 3])
def test_one_gradient_is_what_the_paper_form_would_have_combined(constraint, classes) -> None:
    """Σ_k of the one gradient, over N = ∇L/N + Σ_a κ_a (∇F/n' − ∇F_a/n'_a), to rounding."""
    how = {"sizes": [4, 2, 0, 7, 1], "classes": classes, "seed": 5}
    paper = make("perceptron", constraint, **how)
    one = make("perceptron", constraint, **how, form="one-gradient", surrogate="rate")
    users, w, N = np.arange(5), paper.model.vector(), 3.0
    totals = paper.layout.totals(vectors(paper, w, users).sum(0), N, 1e-9)
    method = OneGradient(high=1e9, decay=0.0, surrogate="rate", tolerance=None)
    state = method.begin(*totals.F.shape, w.device)
    state, _ = method.update(state, totals, ALPHA)
    weights = method.weights(state, N, ALPHA)
    assert bool((weights.groups != 0).any())
    found = one.layout.totals(vectors(one, w, users, weights=weights).sum(0), N)
    _, direction = method.update(state, found, ALPHA)
    kappa = method.kappa(state, N, ALPHA).to(w)
    wanted = totals.loss_gradient / N + constraint_direction(kappa, totals)
    torch.testing.assert_close(direction, wanted, rtol=1e-9, atol=1e-10)


def test_with_the_loss_it_is_a_weighted_cross_entropy() -> None:
    engine = make("linear", "one attribute", [3, 3], 2, 0, form="one-gradient")
    engine = replace(engine, constraint=fpfl.fnr_parity("sex"))
    weights = Weights(torch.tensor([[2.0, -5.0]]), torch.tensor([0.5]), 0.1, 31.0)
    data, w = engine.data, engine.model.vector()
    given_ = vectors(engine, w, np.arange(2), weights=weights)[:, : engine.model.size]
    positive, woman = data.labels == 1, data.attributes[:, 0] == 0
    omega = torch.where(positive, torch.where(woman, 3.5, 0.1), 1.0).double()
    leaf = w.clone().requires_grad_()
    logits = engine.model(leaf, data.features).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(
        logits, data.labels.double(), weight=omega, reduction="sum"
    )
    torch.testing.assert_close(given_.sum(0), torch.autograd.grad(loss, leaf)[0])


@pytest.mark.parametrize(
    ("rate", "classes", "wanted"),
    [
        (rates.false_negative_rate(), 2, [0, 1]),
        (rates.false_positive_rate(), 2, [1, 0]),
        (rates.true_positive_rate(), 2, [0, -1]),
        (rates.accuracy(), 3, [-1, -1, -1]),
        (rates.selection_rate(), 2, [1, -1]),
        (rates.selection_rate(2), 3, [1, 1, -1]),
        (rates.class_recall(1), 3, [0, -1, 0]),
        (rates.squared_error((0, 2)), None, [2]),
        (rates.absolute_error((0, 2)), None, [1]),
    ],
)
def test_how_rates_move_with_the_loss(rate, classes, wanted) -> None:
    slopes = rate.loss_slopes(classes)
    if classes is not None:  # outside a rate's condition its slope is never used
        slopes = slopes * rate.condition(torch.arange(classes))
    assert slopes.tolist() == wanted
    assert rates.mean_prediction((0, 1)).loss_slopes(None) is None


def made_totals(F, n, overall_F=None, overall_n=None, smallest=1.0) -> Totals:
    F, n = torch.as_tensor(F, dtype=torch.float32), torch.as_tensor(n, dtype=torch.float32)
    none = torch.zeros(*F.shape, 3)
    return Totals(
        loss_gradient=torch.tensor([1.0, 2.0, 3.0]), normaliser=10.0, F=F, n=n, F_gradient=none,
        overall_F=F.sum(1) if overall_F is None else overall_F,
        overall_n=n.sum(1) if overall_n is None else overall_n,
        overall_F_gradient=none[:, 0], smallest=smallest,
    )  # fmt: skip


COUNTS = st.lists(st.tuples(st.floats(5, 100), st.floats(0, 1)), min_size=2, max_size=4)


@given(rounds=st.lists(COUNTS, min_size=1, max_size=5), memory=st.sampled_from([0.0, 0.5, 0.95]))
@settings(max_examples=60)
def test_the_multipliers_take_proximal_steps(rounds, memory) -> None:
    """Against the argmax of λ D − α |λ| − (λ − λ_old)²/2γ on a grid, and plain weighted sums."""
    groups = min(map(len, rounds))
    method = OneGradient(
        multiplier_lr=0.3, damping=2.0, decay=memory, spread=None, tolerance=None, high=1e9
    )
    state = method.begin(1, groups, torch.device("cpu"))
    wanted, grid = np.zeros(groups), np.linspace(-2.0, 2.0, 40_001)
    past: list[tuple[np.ndarray, np.ndarray]] = []
    for counts in rounds:
        n = np.array([count for count, _ in counts[:groups]])
        F = n * np.array([rate for _, rate in counts[:groups]])
        state, direction = method.update(state, made_totals([F], [n]), ALPHA)
        past.append((F, n))
        share = memory ** np.arange(len(past))[::-1] if memory else np.eye(len(past))[-1]
        F_mean, n_mean = (sum(s * x[i] for s, x in zip(share, past, strict=True)) / share.sum()
                          for i in (0, 1))  # fmt: skip
        D = F_mean.sum() / n_mean.sum() - F_mean / n_mean
        dual = [grid * d - ALPHA * np.abs(grid) - (grid - old) ** 2 / 0.6
                for d, old in zip(D, wanted, strict=True)]  # fmt: skip
        wanted = np.array([grid[each.argmax()] for each in dual])
        torch.testing.assert_close(direction, torch.tensor([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(state.multipliers[0], wanted, atol=5e-4)
    kappa = state.multipliers[0].numpy() + 2.0 * np.sign(D) * np.maximum(np.abs(D) - ALPHA, 0)
    weights = method.weights(state, 10.0, ALPHA)
    np.testing.assert_allclose(weights.groups[0], -10 * kappa / n_mean, rtol=1e-3, atol=1e-4)
    # What some groups get the others give: all weights together are none.
    total = float(weights.overall[0]) * n_mean.sum() + float(
        (weights.groups[0] * torch.tensor(n_mean)).sum()
    )
    assert abs(total) < 1e-3


# The weak group first

DIFFERENT = st.lists(
    st.lists(st.tuples(st.floats(0, 100), st.floats(-0.2, 1.2)), min_size=3, max_size=3),
    min_size=1,
    max_size=60,
)  # counts with noise: none at all, and rates that cannot be


def course(method: OneGradient, rounds, N: float = 10.0, alpha: float = 0.1):
    """The states and weights after each round of counts."""
    state, found = method.begin(1, 3, torch.device("cpu")), []
    for counts in rounds:
        n = [count for count, _ in counts]
        totals = made_totals([[count * rate for count, rate in counts]], [n])
        state, _ = method.update(state, replace(totals, normaliser=N), alpha)
        found.append((state, method.weights(state, N, alpha)))
    return found


@given(rounds=DIFFERENT, patience=st.integers(0, 40), decay=st.sampled_from([0.0, 0.5, 0.95]))
@settings(max_examples=100)
def test_weights_go_down_only_while_a_group_is_outside_and_has_been_for_long(
    rounds, patience, decay
) -> None:
    """ℓ by its definition, counted beside: 1 at first, down in steps, and never up again."""
    method = OneGradient(patience=patience, decay=decay)
    assert float(method.weights(method.begin(1, 3, torch.device("cpu")), 10.0, 0.1).low) == 1.0
    outside, steps, before = 0, 0, 1.0
    for t, (state, weights) in enumerate(course(method, rounds)):
        low = float(weights.low)
        now = bool((state.differences().abs() > 0.1).any())
        outside = max(0, outside + (1 if now else -1))
        steps += now and outside > patience
        assert low == pytest.approx(1.0 - 0.95 * min(1.0, 0.02 * steps), abs=1e-5)
        assert low <= before
        if not now or t < patience:
            assert low == before
        before = low


@given(rounds=DIFFERENT, patience=st.integers(0, 10))
@settings(max_examples=60)
def test_patience_changes_no_multiplier_and_the_least_weight_is_told(rounds, patience) -> None:
    """Only the range of the weights differs; what is told is the least that a sample has in it."""
    pairs = zip(
        course(OneGradient(), rounds), course(OneGradient(patience=patience), rounds), strict=True
    )
    for (plain, theirs), (patient, ours) in pairs:
        assert torch.equal(plain.multipliers, patient.multipliers)
        assert torch.equal(theirs.groups, ours.groups)
        assert torch.equal(theirs.overall, ours.overall)
        assert (theirs.low, theirs.high, ours.high) == (0.05, 11.0, 11.0)
        asked = 1.0 + float((ours.overall.unsqueeze(-1) + ours.groups).min())
        wanted = min(1.0, max(asked, float(ours.low)))
        assert float(patient.figures()["least_weight"]) == pytest.approx(wanted, abs=1e-6)
        assert bool(plain.figures()["least_weight"].isnan())  # nothing is told where none is kept


@given(seed=st.integers(0, 200), patience=st.integers(1, 20))
@settings(max_examples=20)
def test_nobodys_errors_are_asked_for_before_patience_is_over(seed, patience) -> None:
    """Every sample weighs 1 or more, by the engine that weighs them, whatever the counts."""
    engine = make("linear", "two attributes", [5, 3, 2], 2, 0, form="one-gradient")
    engine = replace(engine, constraint=fpfl.fnr_parity("sex", "race"))
    g, groups = torch.Generator().manual_seed(seed), len(engine.layout.groups)
    method = OneGradient(patience=patience)
    state = method.begin(1, groups, torch.device("cpu"))
    chunk = next(engine.chunks(np.arange(3)))

    def least(weights: Weights) -> float:
        batch = engine._weighting.weighted(chunk.batch, chunk.member.double(), weights)
        return float(batch.real[chunk.batch.real > 0].min())  # the others are padding

    for _ in range(patience):
        n = 50.0 + 50.0 * torch.rand(1, groups, generator=g)
        totals = made_totals(n * torch.rand(1, groups, generator=g), n)
        state, _ = method.update(state, totals, ALPHA)
        weights = method.weights(state, 10.0, ALPHA)
        assert bool((weights.groups < 0).any())  # without patience some would be held back
        assert least(weights) >= 1.0


def test_weights_are_released_to_the_end_and_rest_inside_the_tolerance() -> None:
    method = OneGradient(patience=3, decay=0.0)
    apart, level = [(50.0, 0.8), (50.0, 0.2), (50.0, 0.5)], [(50.0, 0.5)] * 3
    low = [float(weights.low) for _, weights in course(method, [apart] * 60)]
    assert low[:3] == [1.0] * 3
    assert low[3] == pytest.approx(1.0 - 0.02 * 0.95)
    assert low[-1] == low[-2] == pytest.approx(0.05)  # after 50 steps of a fiftieth
    assert low[51] > low[52] == pytest.approx(0.05, abs=1e-6)
    # Back inside it stays where it is, and what was inside is taken from what was outside.
    low = [float(w.low) for _, w in course(method, [apart] * 5 + [level] * 4 + [apart] * 4)]
    assert low[4] == pytest.approx(1.0 - 0.04 * 0.95)
    assert low[4] == low[8] == low[10]
    assert low[10] > low[11] > low[12]


def test_multipliers_come_down_inside_the_tolerance_and_act_there() -> None:
    method = OneGradient(multiplier_lr=0.5, decay=0.0, tolerance=None, high=1e9)
    state = method.begin(1, 2, torch.device("cpu"))
    unfair, fair = (
        made_totals([[10.0, 2.0]], [[20.0, 20.0]]),
        made_totals([[6.0, 6.0]], [[20.0, 20.0]]),
    )
    state, _ = method.update(state, unfair, 0.05)
    first = state.multipliers
    assert float(first[0, 0]) < 0 < float(first[0, 1])  # the weak group's errors are weighed up
    assert float(method.weights(state, 1.0, 0.05).groups[0, 0]) > 0
    state, _ = method.update(state, fair, 0.05)
    assert bool((state.multipliers.abs() < first.abs()).all())
    assert bool((method.kappa(state, 1.0, 0.05) != 0).all())
    for _ in range(20):
        state, _ = method.update(state, fair, 0.05)
    assert not bool(state.multipliers.any())
    ratchet = replace(method, ratchet=True)
    state, _ = ratchet.update(ratchet.begin(1, 2, torch.device("cpu")), unfair, 0.05)
    grown = state.multipliers
    state, _ = ratchet.update(state, fair, 0.05)
    assert torch.equal(state.multipliers, grown)
    assert not bool(ratchet.kappa(state, 1.0, 0.05).any())


@pytest.mark.parametrize("ratchet", [False, True])
def test_counts_that_say_nothing_rest(ratchet) -> None:
    """A group below the smallest count has no weight and keeps its multiplier."""
    method = OneGradient(decay=0.0, multiplier_lr=3.0, ratchet=ratchet)
    state = method.begin(1, 2, torch.device("cpu"))
    assert not bool(method.weights(state, 200.0, ALPHA).groups.any())  # before the first round
    known = replace(made_totals([[9.0, 2.0]], [[10.0, 10.0]]), normaliser=200.0)
    state, _ = method.update(state, known, ALPHA)
    before = state.multipliers
    assert float(before[0, 0].abs()) > 0.4
    low = replace(made_totals([[0.5, 2.0]], [[-3.0, 10.0]], smallest=2.0), normaliser=200.0)
    state, _ = method.update(state, low, ALPHA)
    assert float(state.multipliers[0, 0]) == float(before[0, 0])
    weights = method.weights(state, 200.0, ALPHA)
    assert float(weights.groups[0, 0]) == 0.0
    assert bool(weights.groups.isfinite().all())
    assert bool(weights.overall.isfinite().all())


def test_a_rate_that_errors_move_both_ways_keeps_its_own_standin() -> None:
    mean_class = fpfl.Rate(
        "mean class",
        condition=lambda y: y >= 0,
        true=lambda p, y: p.float() / 2,
        surrogate=lambda s, y: s[..., 1] / 2 + s[..., 2],
    )
    assert mean_class.loss_slopes(3) is None
    assert replace(mean_class, condition=lambda y: y == 2).loss_slopes(3).tolist() == [0, 0, -1]
    engine = make("perceptron", "one attribute", [3, 2, 4], 3, 0, form="one-gradient")
    constraint = Constraint((mean_class, rates.accuracy()), ("sex",))
    engine = replace(engine, constraint=constraint)
    weights, w = some_weights(engine, 2), engine.model.vector()
    given_ = vectors(engine, w, np.arange(3), weights=weights)[:, : engine.model.size]
    torch.testing.assert_close(given_, gradients_by_hand(engine, w, weights))


@dataclass(frozen=True)
class Counted(MethodState):
    """A state of somebody's own."""

    seen: int = 0


@dataclass(frozen=True)
class Constant:
    """A broadcasting method of somebody's own."""

    surrogate: str = "loss"

    def begin(self, rates: int, groups: int, device: torch.device) -> Counted:
        return Counted(torch.zeros(rates, groups, device=device))

    def update(self, state: Counted, totals: Totals, tolerance: float):
        return replace(state, seen=state.seen + 1), totals.loss_gradient / totals.normaliser

    def weights(self, state: Counted, normaliser: float, tolerance: float) -> Weights:
        return Weights(state.multipliers + 1.0, state.multipliers.sum(dim=1), 0.5, 2.0)


def test_a_broadcasting_method_of_ones_own(tmp_path) -> None:
    data, how = make_population(), {"constraint": fpfl.fnr_parity("sex"), "rounds": 3}
    run = trained(data, method=Constant(), **how)
    assert run.selected.startswith("average")
    with pytest.raises(ValueError, match="cannot keep the method's state, a Counted"):
        trained(data, method=Constant(), folder=tmp_path / "run", **how)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="a surrogate in"):
        trained(data, method=Constant("Loss"), **how)

    class Odd(fpfl.MMDM):
        begin = 0

    with pytest.raises(ValueError, match="choose other names"):
        trained(data, method=Odd(), **how)
    totals = made_totals([[1.0, 1.0]], [[5.0, 5.0]])
    with pytest.raises(ValueError, match="begin with"):
        OneGradient().update(MethodState.zeros(1, 2), totals, ALPHA)


def test_local_steps_that_run_away_send_nothing_but_counts() -> None:
    data = make_population(users=12, classes=None)
    model = FlatModel.of(nn.Linear(5, 1))
    engine = CohortEngine(model, data, local=FederatedAveraging(80, 1e3))
    sent = vectors(engine, model.vector(), np.arange(12))
    plain = vectors(replace(engine, local=None), model.vector(), np.arange(12))
    assert not bool(sent[:, : model.size].any())
    torch.testing.assert_close(sent[:, model.size :], plain[:, model.size :])


@pytest.mark.parametrize("noise", [0.0, 2.0, 20.0])
def test_gains_follow_how_sure_counts_are(noise) -> None:
    """γ_a ∝ 1/√R_a, R_a = (s/n)² + 1/(4 n), up to `MOST`; the damping shrinks with R_a."""
    method = OneGradient(multiplier_lr=0.1, damping=2.0, decay=0.0, high=1e9)
    n, D = np.array([400.0, 80.0, 12.0]), np.array([0.1, -0.2, 0.3])
    F = n * (0.5 - D)
    totals = replace(
        made_totals([F], [n], torch.tensor([0.5 * n.sum()]), torch.tensor([n.sum()])), noise=noise
    )
    state, _ = method.update(method.begin(1, 3, torch.device("cpu")), totals, ALPHA)
    pace = np.minimum(0.3 / np.sqrt((noise / n) ** 2 + 0.25 / n), MOST)
    np.testing.assert_allclose(state.multipliers[0], 0.1 * pace * D, rtol=1e-4)
    kappa = 0.1 * pace * D + 2.0 * np.minimum(pace**2, 1.0) * D
    np.testing.assert_allclose(method.kappa(state, 1.0, ALPHA)[0], kappa, rtol=1e-4)


def test_multipliers_ask_for_no_more_than_samples_can_give() -> None:
    """A small group's weight ends at the range, and so does what everybody else pays for it."""
    method = OneGradient(multiplier_lr=5.0, decay=0.0, high=11.0)
    state = method.begin(1, 2, torch.device("cpu"))
    totals = made_totals([[4.0, 20.0]], [[5.0, 95.0]])
    for _ in range(50):
        state, _ = method.update(state, totals, ALPHA)
    N = 200.0
    weights = method.weights(replace(state, multipliers=state.multipliers * 100), N, ALPHA)
    assert float(state.multipliers[0, 0]) == pytest.approx(-10.0 * 5.0 / 10.0)  # totals have N = 10
    assert float(weights.groups[0, 0]) == pytest.approx(10.0)
    assert float(weights.overall[0]) == pytest.approx((-10.0 * 5.0 + 10.0 * 95.0) / 100.0)


@given(seed=st.integers(0, 200), spread=st.floats(0.0, 1e6))
@settings(max_examples=40)
def test_whatever_the_noise_the_weights_stay_in_the_range(seed, spread) -> None:
    engine = make("linear", "two attributes", [5, 3, 2], 2, 0, form="one-gradient")
    engine = replace(engine, constraint=fpfl.equalized_odds("sex", "race"))
    g = torch.Generator().manual_seed(seed)
    shape = (2, len(engine.layout.groups))
    totals = made_totals(
        spread * torch.randn(shape, generator=g), spread * torch.randn(shape, generator=g)
    )
    method = OneGradient()
    state, _ = method.update(method.begin(*shape, torch.device("cpu")), totals, ALPHA)
    weights = method.weights(state, 200.0, ALPHA)
    assert bool((weights.groups.abs() <= 10.0 + 1e-4).all())
    assert bool(weights.overall.isfinite().all())
    chunk = next(engine.chunks(np.arange(3)))
    batch = engine._weighting.weighted(chunk.batch, chunk.member.double(), weights)
    omega = batch.real[chunk.batch.real > 0]  # the others are padding
    assert bool(((omega >= 0.05 - 1e-6) & (omega <= 11.0 + 1e-6)).all())


def test_what_users_send() -> None:
    """p numbers and the counts: at most 40% of the paper's vector for two groups."""
    data = make_population(attributes=(SEX, RACE))
    model = FlatModel.of(nn.Linear(5, 1))
    for by in ((), ("sex",), (("sex", "race"),)):
        constraint = fpfl.equalized_odds(*by)
        one = CohortEngine(model, data, constraint, form="one-gradient").layout
        paper = CohortEngine(model, data, constraint).layout
        groups = len(one.groups)
        own = 0 if one.partition else 4
        assert one.size == model.size + 2 * 2 * groups + own + 4
        assert one.size < paper.size
        totals = one.totals(torch.arange(float(one.size)), 1.0)
        assert totals.F_gradient.shape == (2, groups, model.size)
        assert not bool(totals.F_gradient.any())
        assert not bool(totals.overall_F_gradient.any())
    wide = FlatModel.of(nn.Linear(92, 10))
    constraint = fpfl.accuracy_parity("sex")
    sizes = [
        CohortEngine(wide, data, constraint, form=form).layout.size
        for form in ("one-gradient", "paper")
    ]
    assert sizes[0] <= 0.4 * sizes[1]


def trained(data, **how):
    settings = {"cohort": 20, "rounds": 30, "seed": 0} | how
    torch.manual_seed(0)
    return fpfl.train(nn.Linear(5, 1), data, **settings)


def test_training_with_one_gradient() -> None:
    """It narrows the gap of plain training at about its accuracy, with and without local steps."""
    data = make_population(users=300, mean=4.0, features=8, seed=4)
    # The model may know the group: otherwise a linear one cannot tell what to change.
    x = torch.cat([data.features[:, :4], data.attributes.float()], dim=1)
    data = replace(data, features=x, schema=replace(data.schema, shape=(5,)))
    constraint = fpfl.fnr_parity("sex", tolerance=0.0)
    plain = trained(data, rounds=150, cohort=100, learning_rate=0.5)
    before = plain.evaluate(data, bootstrap=0)
    for local in (None, FederatedAveraging(3, 0.3)):
        run = trained(
            data, rounds=150, cohort=100, learning_rate=0.5, constraint=constraint,
            method=OneGradient(multiplier_lr=0.05), local=local,
        )  # fmt: skip
        after = run.evaluate(data, bootstrap=0)
        assert after.gaps["fnr"].value < 0.5 * before.gaps["fnr"].value
        assert after.accuracy > before.accuracy - 0.03
        assert run.selected == "average of the last 75 iterates"


@pytest.mark.parametrize("patience", [None, 12], ids=["free", "patient"])
def test_a_kept_run_goes_on_as_if_nothing_had_happened(tmp_path, patience) -> None:
    """A run with one gradient that is cut off in a round and resumed ends bit for bit the same.

    Cut off in round 17, while weights are released.
    """
    data = make_population(users=60)
    how = {
        "constraint": fpfl.fnr_parity("sex"), "method": OneGradient(patience=patience),
        "privacy": Privacy(noise_multiplier=1.0, delta=1e-3, clip=Clipping(1.0, counts=1.0)),
        "noise_seed": 1, "local": FederatedAveraging(2, 0.1),
    }  # fmt: skip
    whole = trained(data, **how)

    def stop(event):
        if event.row["round"] == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(data, **how, folder=tmp_path / "run", callbacks=[stop])
    again = trained(data, **how, folder=fpfl.RunFolder(tmp_path / "run", resume=True))
    assert again.history == whole.history
    assert whole.history[-1]["averaged_gap"] is not None
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    least = [row["least_weight"] for row in whole.history]
    if patience is None:
        assert set(least) == {None}
    else:
        assert set(least[:patience]) == {1.0}
        assert 1.0 > least[15] > least[-1]


def test_without_patience_it_is_the_method_that_it_was(tmp_path) -> None:
    """A folder of before has no patience in its settings and none in its state."""
    data, how = make_population(users=60), {"constraint": fpfl.fnr_parity("sex"), "noise_seed": 1}
    how["privacy"] = Privacy(noise_multiplier=1.0, delta=1e-3, clip=Clipping(1.0, counts=1.0))
    run = trained(data, **how, method=OneGradient(), folder=tmp_path / "run")
    assert "patience" not in run.settings["method"]
    endless = trained(data, **how, method=OneGradient(patience=10**6, low=1.0))
    from_the_start = trained(data, **how, method=OneGradient(low=1.0))
    assert endless.settings["method"]["patience"] == 10**6

    def released(found):
        return [{k: v for k, v in row.items() if k != "least_weight"} for row in found.history]

    assert released(endless) == released(from_the_start)  # a range of [1, high] either way
    assert released(run) != released(endless)
    old = AveragedState(*(torch.zeros(1, 2), *(torch.zeros(1, 3),) * 4, 1.0, 0.0))
    assert (old.outside, old.released) == (0.0, 1.0)
    assert OneGradient().weights(old, 10.0, ALPHA).low == 0.05
    assert float(OneGradient(patience=5).weights(old, 10.0, ALPHA).low) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "make_method",
    [
        lambda: OneGradient(low=-0.1), lambda: OneGradient(low=2.0), lambda: OneGradient(high=0.5),
        lambda: OneGradient(high=float("inf")), lambda: OneGradient(decay=1.0),
        lambda: OneGradient(damping=-1), lambda: OneGradient(multiplier_lr=-1),
        lambda: OneGradient(tolerance=1.0), lambda: OneGradient(patience=-1),
        lambda: OneGradient(surrogate="log"),
        lambda: FederatedAveraging(0, 0.1), lambda: FederatedAveraging(2, 0.0),
        lambda: FederatedAveraging(2.5, 0.1), lambda: FederatedAveraging(2, float("inf")),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(make_method) -> None:
    with pytest.raises(ValueError, match=r"must|expected|give"):
        make_method()


def test_the_papers_form_has_no_local_steps() -> None:
    data = make_population()
    with pytest.raises(ValueError, match="OneGradient"):
        trained(data, constraint=fpfl.fnr_parity("sex"), local=FederatedAveraging(2, 0.1))
    with pytest.raises(ValueError, match="FederatedAveraging"):
        trained(data, local=3)


def test_local_steps_refuse_a_model_that_vmap_cannot_do() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(-1) * float(x[x > 0].sum())

    model = FlatModel.of(Masked(5, 1))
    engine = CohortEngine(model, make_population(), local=FederatedAveraging(2, 0.1))
    with pytest.raises(ValueError, match=r"several users at once.*boolean indexing"):
        list(engine.statistics(model.vector(), np.arange(2)))
