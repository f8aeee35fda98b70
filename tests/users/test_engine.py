"""The engine's fast paths against the plain loop over users, over models, sizes and chunkings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fpfl import (
    Clipping,
    Constraint,
    FederatedDataset,
    Schema,
    accuracy_parity,
    equalized_odds,
    fnr_parity,
)
from fpfl.aggregation import DenseRows, ThirdParty, clip, clip_rules, clipped_sum
from fpfl.users import CohortEngine, FlatModel
from fpfl.users.dispatch import chosen_pass
from fpfl.users.factored import FactoredGradients
from fpfl.users.passes import LayerPass, Objective, VmapPass
from fpfl.users.reference import user_statistics

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

TOKENS = 11


class Bag(nn.Module):
    """Token ids through an embedding (one of them padding), averaged."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4, padding_idx=0)
        self.out = nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(dim=1))


class Recurrent(nn.Module):
    """Token ids through an embedding and a recurrent layer."""

    def __init__(self, outputs: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.recurrent = kind(4, 5, batch_first=True)
        self.out = nn.Linear(5, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(tokens))[0][:, -1])


class Attentive(nn.Module):
    """A transformer layer over six-number tokens."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(dim=1))


class Twice(nn.Module):
    """A linear layer that is used twice, and one at several positions of a sample."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.out(self.norm(torch.relu_(self.first(x))).mean(dim=1))


def convolutional(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, (2, 3), dilation=(1, 1)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(outputs),
    )  # fmt: skip


def wave(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, dilation=2, bias=False), nn.ReLU(), nn.Flatten(), nn.LazyLinear(outputs)
    )


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, outputs, bias=False)
    )


MODELS = {
    "linear": (lambda o: nn.Linear(5, o), (5,), LayerPass),
    "perceptron": (perceptron, (5,), LayerPass),
    "convolutional": (convolutional, (2, 7, 7), LayerPass),
    "wave": (wave, (2, 9), LayerPass),
    "bag": (Bag, (7,), LayerPass),
    "twice": (Twice, (3, 6), LayerPass),
    "lstm": (lambda o: Recurrent(o, nn.LSTM), (5,), VmapPass),
    "gru": (lambda o: Recurrent(o, nn.GRU), (5,), VmapPass),
    "rnn": (lambda o: Recurrent(o, nn.RNN), (5,), VmapPass),
    "attention": (Attentive, (5, 6), VmapPass),
}
CONSTRAINTS = {
    "none": (lambda: None, (SEX,)),
    "one attribute": (lambda: accuracy_parity("sex"), (SEX,)),
    "two attributes": (lambda: accuracy_parity(), (SEX, RACE)),
    "intersection": (lambda: accuracy_parity(("sex", "race")), (SEX, RACE)),
}


def population(shape, sizes, classes, attributes, seed, dtype=torch.float64) -> FederatedDataset:
    g = torch.Generator().manual_seed(seed)
    n = int(sum(sizes))
    x = torch.randn(n, *shape, generator=g, dtype=dtype)
    labels = torch.randint(0, classes, (n,), generator=g)
    codes = [
        torch.randint(-1 if a.unknown else 0, len(a.values), (n,), generator=g) for a in attributes
    ]
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    schema = Schema(shape, classes=classes, attributes=attributes)
    return FederatedDataset(x, labels, torch.stack(codes, dim=1), offsets, schema)


def with_tokens(data: FederatedDataset, seed: int) -> FederatedDataset:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TOKENS, tuple(data.features.shape), generator=g)
    return FederatedDataset(tokens, data.labels, data.attributes, data.offsets, data.schema)


def loop_over_users(engine: CohortEngine, w: Tensor, users: np.ndarray) -> Tensor:
    """The paper's UserStatistics, one user after the other, as rows of the engine's layout."""
    layout = engine.layout
    rows = torch.zeros(len(users), layout.size, dtype=w.dtype)
    for row, k in zip(rows, users, strict=True):
        v = user_statistics(int(k), w, engine.model, engine.data, engine.constraint)
        if engine.basis == "split":
            v |= {n: v[n] - v[f] for n, f in (("n", "F"), ("overall_n", "overall_F")) if n in v}
        for name, place in layout.slices.items():
            if name in v:
                row[place] = v[name].to(w.dtype).flatten()
    return rows


def make(model, constraint, sizes, classes, seed, dtype=torch.float64, **how):
    build, shape, way = MODELS[model]
    wanted, attributes = CONSTRAINTS[constraint]
    data = population(shape, sizes, classes, attributes, seed, dtype)
    if model in ("bag", "lstm", "gru", "rnn"):
        data = with_tokens(data, seed)
    torch.manual_seed(seed)
    module = build(classes if classes > 2 else 1)
    module(data.features[:1].to(torch.float32) if data.features.is_floating_point()
           else data.features[:1])  # fmt: skip
    module = module.to(dtype)
    engine = CohortEngine(FlatModel.of(module), data, wanted(), **how)
    assert type(engine._pass) is way, (model, type(engine._pass))
    return engine


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@pytest.mark.parametrize("model", MODELS)
@given(
    constraint=st.sampled_from(list(CONSTRAINTS)),
    sizes=SIZES,
    classes=st.sampled_from([2, 3]),
    basis=st.sampled_from(["paper", "split"]),
    memory=st.sampled_from([1, 3_000, 30_000, 10**9]),
    shares=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
def test_every_path_equals_the_loop(model, constraint, sizes, classes, basis, memory, shares, seed):
    """float64: to 1e-10, whatever the model, sizes, groups, chunks and shares.

    Clipped factors have inputs of 18 bits, and leave a part of the bound for their rounding.
    """
    engine = make(model, constraint, sizes, classes, seed, basis=basis, memory=memory)
    users, w = np.arange(len(sizes)), engine.model.vector()
    wanted = loop_over_users(engine, w, users)
    given_ = sum(vectors(engine, w, users, share=(i, shares)) for i in range(shares))
    torch.testing.assert_close(given_, wanted, rtol=1e-10, atol=1e-11)
    blocks = Clipping(0.5, counts=1.0 if basis == "split" else None).blocks(
        constrained=engine.constraint is not None, selection=True
    )
    places = engine.layout.slices
    rules = clip_rules(blocks, places)
    parts = list(engine.statistics(w, users))
    total = sum(clipped_sum(part, rules) for part in parts)
    expected = clip(DenseRows(wanted, places), rules).sum(0)
    factored = any(isinstance(part.gradients, FactoredGradients) for part in parts)
    close = {"rtol": 1e-4, "atol": 1e-5} if factored else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(total, expected, **close)
    third_party = ThirdParty(places)
    torch.testing.assert_close(third_party.sum(engine.statistics(w, users), w), wanted.sum(0))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("classes", [2, 3])
def test_every_path_equals_the_loop_in_float32(model, classes) -> None:
    """float32: to 1e-5 of the largest number of a user's vector."""
    engine = make(model, "two attributes", [3, 1, 8, 0, 5], classes, 1, torch.float32)
    users, w = np.arange(5), engine.model.vector()
    wanted = loop_over_users(engine, w, users)
    error = (vectors(engine, w, users) - wanted).abs().amax(dim=1)
    assert bool((error <= 1e-5 * wanted.abs().amax(dim=1).clamp(min=1.0)).all())
    rules = clip_rules(Clipping(0.5).blocks(constrained=True, selection=True), engine.layout.slices)
    total = sum(clipped_sum(part, rules) for part in engine.statistics(w, users))
    expected = clip(DenseRows(wanted, engine.layout.slices), rules).sum(0)
    assert float((total - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("factored", [True, False])
def test_both_forms_of_the_gradients_are_tested(factored) -> None:
    """Small users of a wide model are factored, large ones of a narrow model are not."""
    sizes = [1, 2, 1] if factored else [19] * 6
    engine = make("perceptron", "one attribute", sizes, 2, 0)
    parts = list(engine.statistics(engine.model.vector(), np.arange(len(sizes))))
    assert all(isinstance(part.gradients, FactoredGradients) == factored for part in parts)


def test_a_user_larger_than_the_memory_is_computed_in_pieces() -> None:
    engine = make("convolutional", "two attributes", [40, 2], 3, 0, memory=100_000)
    chunks = list(engine.chunks(np.arange(2)))
    assert sum(chunk.unfinished for chunk in chunks) > 3
    # Cells are padded within a piece, which the limit of samples does not count.
    assert max(int(c.batch.real.sum()) for c in chunks) * engine.costs.row_bytes <= 100_000
    w = engine.model.vector()
    torch.testing.assert_close(
        vectors(engine, w, np.arange(2)), loop_over_users(engine, w, np.arange(2))
    )


class ByHand(nn.Module):
    """Known layers, used in a way that their recorders cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.first.weight.T))


class Transposed(nn.Module):
    """Puts positions first, so that rows are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.transpose(0, 1))).mean(dim=0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).sum(dim=1)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class ZeroHead(ByHand):
    """The same behind a head of zeros, which hides it at the initial parameters."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)


class Small(ByHand):
    """The same with gradients far below those of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + 1e-4 * torch.tanh(x @ self.first.weight.T).sum(dim=1, keepdim=True)


class Sorting(nn.Module):
    """Sorts samples by their number of zeros, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        order = (x != 0).sum(dim=1).argsort(descending=True, stable=True)
        return self.last(torch.tanh(self.first(x[order])))[order.argsort()]


@pytest.mark.parametrize(
    ("module", "shape"),
    [(ByHand(), (5,)), (ZeroHead(), (5,)), (Small(), (5,)), (Sorting(), (5,)),
     (Transposed(), (3, 6)), (Tied(), (5,)), (Doubling(5, 1), (5,)),
     (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(100, 1)), (2, 7, 7)),
     (nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)), (5,))],
    ids=["by hand", "zero head", "small", "sorting", "transposed", "tied", "subclass",
         "grouped convolution", "weight norm"],
)  # fmt: skip
def test_models_that_recorders_would_get_wrong_take_the_other_path(module, shape) -> None:
    data = population(shape, [2, 0, 5, 1], 2, (SEX,), 0)
    engine = CohortEngine(FlatModel.of(module.double()), data, fnr_parity("sex"))
    assert type(engine._pass) is VmapPass
    w = engine.model.vector() + 0.1
    torch.testing.assert_close(
        vectors(engine, w, np.arange(4)), loop_over_users(engine, w, np.arange(4))
    )


def test_frozen_layers_are_left_out() -> None:
    module = perceptron(1).double()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    data = population((5,), [2, 4, 1], 2, (SEX,), 0)
    engine = CohortEngine(FlatModel.of(module), data, equalized_odds("sex"))
    assert type(engine._pass) is LayerPass
    assert engine.model.size == 14
    w = engine.model.vector()
    torch.testing.assert_close(
        vectors(engine, w, np.arange(3)), loop_over_users(engine, w, np.arange(3))
    )


@pytest.mark.parametrize("sizes", [[1, 2, 1, 3], [9, 9, 9, 9]], ids=["factored", "cells"])
def test_one_users_nan_does_not_reach_the_others(sizes) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    data = population((5,), sizes, 2, (SEX,), 0)
    good = FederatedDataset(
        data.features.abs(), data.labels, data.attributes, data.offsets, data.schema
    )
    bad = good.features.clone()
    bad[0, 0] = -1.0
    spoilt = FederatedDataset(bad, data.labels, data.attributes, data.offsets, data.schema)
    torch.manual_seed(0)
    model = FlatModel.of(
        nn.Sequential(Root(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    )
    w = model.vector()
    totals = []
    for source, users in ((good, np.arange(1, 4)), (spoilt, np.arange(4))):
        engine = CohortEngine(model, source, fnr_parity("sex"))
        rules = clip_rules(
            Clipping(0.5).blocks(constrained=True, selection=True), engine.layout.slices
        )
        totals.append(sum(clipped_sum(part, rules) for part in engine.statistics(w, users)))
    assert bool(totals[0].isfinite().all())
    torch.testing.assert_close(totals[0], totals[1])


@given(st.integers(0, 10_000), st.floats(0.0, 8.0))
@settings(max_examples=30)
def test_cancelling_gradients_cannot_get_past_the_bound(seed, power) -> None:
    """Two samples whose gradients nearly cancel: the clipped sum stays within C all the same."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 50, generator=g) * 10.0**power
    features = torch.cat([x, x * (1 + 1e-6)])
    labels = torch.tensor([0, 1])
    codes = torch.zeros(2, 1, dtype=torch.int64)
    data = FederatedDataset(
        features, labels, codes, torch.tensor([0, 2]), Schema((50,), attributes=(SEX,))
    )
    model = nn.Linear(50, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = FederatedDataset(
        data.features, labels, codes, data.offsets, Schema((50,), classes=3, attributes=(SEX,))
    )
    engine = CohortEngine(FlatModel.of(model), data)
    rules = clip_rules(
        Clipping(0.01).blocks(constrained=False, selection=True), engine.layout.slices
    )
    (part,) = engine.statistics(engine.model.vector(), np.arange(1))
    assert isinstance(part.gradients, FactoredGradients)
    total = clipped_sum(part, rules)
    assert float(total[engine.layout.slices["loss_gradient"]].double().norm()) <= 0.01 * (1 + 1e-5)


def test_sizes_from_one_to_a_thousand_waste_little() -> None:
    """Log-uniform sizes: at least 95% of the computed rows are samples."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(1000), 300)).astype(int)
    data = population((2, 7, 7), sizes, 2, (SEX,), 0, torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 32, 5), nn.ReLU(), nn.Flatten(), nn.Linear(288, 1))
    for constraint in (None, fnr_parity("sex")):
        engine = CohortEngine(FlatModel.of(model), data, constraint, memory=2**28)
        packings = [chunk.batch.packing for chunk in engine.chunks(np.arange(300))]
        useful = sum(int(packing.sizes.sum()) for packing in packings)
        assert useful == sizes.sum()
        assert useful >= 0.95 * sum(packing.rows for packing in packings)


def test_groups_that_nobody_belongs_to_cost_nothing() -> None:
    """A user in one of many groups has one cell, whatever the number of groups."""
    rows = []
    for values in (2, 20):
        attribute = type(SEX)("group", tuple(f"g{i}" for i in range(values)))
        data = population((2, 7, 7), [4, 6, 5], 3, (attribute,), 0)
        data.attributes[:] = torch.tensor([0] * 4 + [1] * 6 + [0] * 5).unsqueeze(1)
        torch.manual_seed(0)
        module = convolutional(3)
        module(data.features[:1].float())
        engine = CohortEngine(FlatModel.of(module.double()), data, accuracy_parity("group"))
        (chunk,) = engine.chunks(np.arange(3))
        rows.append((len(chunk.batch.labels), len(chunk.owner)))
    assert rows[0] == rows[1]
    assert rows[0][1] == 3


def test_a_pass_is_chosen_without_looking_at_data() -> None:
    model = FlatModel.of(nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.Linear(3, 1)))
    way = chosen_pass(model, Objective(Schema((5,))), torch.float32)
    assert type(way) is LayerPass


def test_a_rate_of_ones_own_is_differentiated_as_it_is() -> None:
    from fpfl.fairness import Rate

    rate = Rate(
        "margin", lambda y: y >= 0, lambda p, y: (p != y).float(),
        lambda s, y: (1.0 - s.gather(-1, y.unsqueeze(-1)).squeeze(-1)) ** 3,
    )  # fmt: skip
    data = make_population(users=6).to("cpu", torch.float64)
    engine = CohortEngine(FlatModel.of(perceptron(1).double()), data, Constraint((rate,)))
    w, users = engine.model.vector(), np.arange(6)
    torch.testing.assert_close(vectors(engine, w, users), loop_over_users(engine, w, users))


class Surprising(nn.Module):
    """Does with many samples what it does not do with few."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 40), nn.Linear(40, 40), nn.Linear(40, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.how == "split":
            h = torch.cat([self.middle(part) for part in h.split(16)])
        elif self.how == "twice" and len(x) > 12:
            h = self.middle(torch.tanh(self.middle(h)))
        elif self.how == "sort" and len(x) > 12:
            order = x[:, 0].argsort()
            return self.last(torch.tanh(self.middle(h[order])))[order.argsort()]
        elif self.how != "skip" or len(x) <= 12:
            h = self.middle(h)
        return self.last(torch.tanh(h))


@pytest.mark.parametrize("how", ["split", "twice", "sort", "skip"])
def test_what_shows_with_many_samples_only_is_noticed_before_there_are_any(how) -> None:
    """Made-up samples come in as many rows as real ones: no data decides which way is taken."""
    data = population((5,), [2, 3, 1, 4] * 5, 2, (SEX,), 0)
    torch.manual_seed(0)
    engine = CohortEngine(FlatModel.of(Surprising(how).double()), data, fnr_parity("sex"))
    assert type(engine._pass) is VmapPass
    w, users = engine.model.vector(), np.arange(20)
    rules = clip_rules(Clipping(0.5).blocks(constrained=True, selection=True), engine.layout.slices)
    wanted = clip(DenseRows(loop_over_everybody(engine, w), engine.layout.slices), rules).sum(0)
    total = sum(clipped_sum(part, rules) for part in engine.statistics(w, users))
    torch.testing.assert_close(total, wanted)


def loop_over_everybody(engine: CohortEngine, w: Tensor) -> Tensor:
    return loop_over_users(engine, w, np.arange(engine.data.population))


@pytest.mark.parametrize("power", [4, 6, 8])
@pytest.mark.parametrize("factoring", [False, True])
def test_cells_that_cancel_cannot_get_past_the_bound(power, factoring) -> None:
    """A user whose two cells nearly cancel changes the clipped sum by C at most."""
    g = torch.Generator().manual_seed(0)
    x = 10.0**power * torch.randn(1, 3, generator=g)
    other = -x.clone()
    other[0, 0] += 1e-3 * 10.0**power
    rest = torch.randn(40, 3, generator=g)
    features = torch.cat([x.repeat(6, 1), other.repeat(6, 1), rest])
    codes = torch.cat([torch.zeros(6), torch.ones(6), torch.arange(40) % 2]).long().unsqueeze(1)
    offsets = torch.cat([torch.tensor([0, 12]), 12 + 2 * torch.arange(1, 21)])
    data = FederatedDataset(
        features,
        torch.zeros(52, dtype=torch.int64),
        codes,
        offsets,
        Schema((3,), attributes=(SEX,)),
    )
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    engine = CohortEngine(FlatModel.of(model), data, fnr_parity("sex"), factoring=factoring)
    rules = clip_rules(Clipping(0.3).blocks(constrained=True, selection=True), engine.layout.slices)
    sums = []
    for users in (np.arange(21), np.arange(1, 21)):
        parts = list(engine.statistics(engine.model.vector(), users))
        assert (type(parts[0].gradients) is FactoredGradients) == factoring
        sums.append(sum(clipped_sum(part, rules) for part in parts).double())
    place = engine.layout.slices["loss_gradient"]
    assert float((sums[0] - sums[1])[place].norm()) <= 0.3 * (1 + 1e-4)


def test_norms_of_millions_of_numbers_are_not_too_small() -> None:
    rows = torch.full((1, 5_000_000), 0.1)
    (norm,) = DenseRows(rows, {"loss_gradient": slice(0, 5_000_000)}).norms(["loss_gradient"], 2)
    assert float(norm) == pytest.approx(0.1 * 5_000_000**0.5, rel=1e-6)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("model", ["perceptron", "convolutional", "lstm"])
def test_coarser_products_stay_near_and_within_the_bound(precision, model) -> None:
    exact = make(model, "one attribute", [1, 2, 9, 3], 3, 0, torch.float32)
    coarse = make(model, "one attribute", [1, 2, 9, 3], 3, 0, torch.float32, precision=precision)
    w, users = exact.model.vector(), np.arange(4)
    rules = clip_rules(Clipping(0.5).blocks(constrained=True, selection=True), exact.layout.slices)
    one, other = (
        sum(clipped_sum(part, rules) for part in e.statistics(w, users)) for e in (exact, coarse)
    )
    assert other.dtype == torch.float64
    # A sample whose two likeliest classes are about as likely may be taken for the other one.
    table = exact.layout.slices["table"]
    torch.testing.assert_close(one[: table.start], other[: table.start], rtol=0.1, atol=0.03)
    torch.testing.assert_close(one[table].sum(), other[table].sum())
    for k in users:
        (part,) = coarse.statistics(w, np.array([k]))
        total = clipped_sum(part, rules)
        places = [exact.layout.slices[n] for n in ("loss_gradient", "F", "F_gradient", "n")]
        norm = torch.cat([total[place] for place in places]).double().norm()
        assert float(norm) <= 0.5 * (1 + 1e-5)


def test_columns_of_whole_numbers_may_have_ranges_of_their_own() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Embedding(1000, 3)
            self.small = nn.Parameter(torch.randn(5, 3))
            self.out = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.large(x[:, 0]) + self.small[x[:, 1]])

    data = population((2,), [2, 1, 4], 2, (SEX,), 0)
    tokens = torch.randint(0, 5, (7, 2))
    data = FederatedDataset(tokens, data.labels, data.attributes, data.offsets, data.schema)
    engine = CohortEngine(FlatModel.of(Tables().double()), data, fnr_parity("sex"))
    w, users = engine.model.vector(), np.arange(3)
    torch.testing.assert_close(vectors(engine, w, users), loop_over_users(engine, w, users))


def test_a_model_that_vmap_cannot_do_is_refused_with_the_reason() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(-1) * float(x[x > 0].sum())

    data = population((5,), [2, 3], 2, (SEX,), 0)
    engine = CohortEngine(FlatModel.of(Masked(5, 1).double()), data)
    with pytest.raises(ValueError, match=r"several users at once.*boolean indexing"):
        list(engine.statistics(engine.model.vector(), np.arange(2)))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(*[m for _ in range(30) for m in (nn.Linear(64, 64), nn.ReLU())],
                       nn.Linear(64, 1)), (64,)),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Flatten(),
                       nn.Linear(100, 1)), (2, 7, 7)),
        (nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 1)), (5,)),
    ],
    ids=["deep", "a gradient that is zero but for rounding", "dropout"],
)  # fmt: skip
def test_ordinary_models_keep_the_fast_path(module, shape) -> None:
    data = population(shape, [2, 3, 1], 2, (SEX,), 0, torch.float32)
    engine = CohortEngine(FlatModel.of(module), data, fnr_parity("sex"))
    list(engine.statistics(engine.model.vector(), np.arange(3)))
    assert type(engine._pass) is LayerPass
