"""One user touches nobody else: on whole numbers, a sum with it less the sum without is its own.

For every way that a user's vector is computed, on data that makes rounding matter: aligned users,
samples that cancel, predictions at the threshold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import some
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import CONSTRAINTS, MODELS, TOKENS
from torch import Tensor, nn

from fpfl import Clipping, FederatedDataset, Privacy, Schema, train
from fpfl.aggregation import clip_rules
from fpfl.aggregation.clipping import whole_total
from fpfl.fairness.totals import Weights
from fpfl.users import CohortEngine, FlatModel, steady
from fpfl.users import isolation as company
from fpfl.users.factored import FactoredGradients
from fpfl.users.local import FederatedAveraging, LocalPass
from fpfl.users.precision import THREADS, computing
from fpfl.users.rows import CellGradients
from fpfl.users.steady import products

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def deep(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 37), nn.ReLU(), nn.Linear(37, 21), nn.ReLU(),
                         nn.Linear(21, outputs))  # fmt: skip


def dropping(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 19), nn.ReLU(), nn.Dropout(0.3), nn.Linear(19, 9), nn.Dropout(0.5), nn.Tanh(),
        nn.Linear(9, outputs),
    )  # fmt: skip


def dropping_channels(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.Dropout1d(0.5), nn.Flatten(), nn.LazyLinear(outputs)
    )


WAYS = {name: (build, shape) for name, (build, shape, _) in MODELS.items()} | {
    "deep": (deep, (5,)),
    "dropout": (dropping, (5,)),
    "dropout inside": (dropping_channels, (2, 9)),
}
TOKENISED = ("bag", "lstm", "gru", "rnn")
DATA = ("random", "aligned", "cancelling", "threshold")


def made(way: str, kind: str, sizes, classes: int, constraint: str, seed: int, **how):
    """An engine on users of the given sizes, in single precision."""
    build, shape = WAYS[way]
    wanted, attributes = CONSTRAINTS[constraint]
    g = torch.Generator().manual_seed(seed)
    n = int(sum(sizes))
    x = torch.randn(n, *shape, generator=g)
    if kind == "aligned":  # everybody the same, but for a little
        x = torch.randn(1, *shape, generator=g) + 1e-3 * x
    if kind == "threshold":  # equal rows
        x = x[torch.randint(0, min(n, 3), (n,), generator=g)]
    labels = torch.randint(0, classes, (n,), generator=g)
    if kind == "cancelling":  # pairs of the same sample with both labels
        x[1::2], labels[1::2] = x[: n - 1 : 2], 1 - labels[: n - 1 : 2].clamp(max=1)
    codes = [
        torch.randint(-1 if a.unknown else 0, len(a.values), (n,), generator=g) for a in attributes
    ]
    if way in TOKENISED:
        x = torch.randint(0, TOKENS, (n, *shape), generator=g)
    schema = Schema(shape, classes=classes, attributes=attributes)
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    data = FederatedDataset(x, labels, torch.stack(codes, dim=1), offsets, schema)
    torch.manual_seed(seed)
    module = build(classes if classes > 2 else 1)
    module(data.features[:1])
    flat = FlatModel.of(module)
    w = flat.vector()
    if kind == "threshold":  # logits around zero, where the last bit is a whole count
        w = w * 1e-4
    # As a private run does: users are computed alone where kernels fail the test.
    engine, _ = company.checked(CohortEngine(flat, data, wanted(), private=True, **how))
    return engine, w


def whole(engine: CohortEngine, w: Tensor, users, bound=0.1, key=7, shares=1, weights=None):
    """The sum of the users' clipped vectors in whole numbers, in so many shares."""
    clipping = Clipping(bound, counts=1.5 if engine.basis == "split" else None)
    blocks = clipping.blocks(constrained=engine.constraint is not None, selection=True)
    rules = clip_rules(blocks, engine.layout.slices)
    total = torch.zeros(engine.layout.size, dtype=torch.int64)
    for share in range(shares):
        for part in engine.statistics(w, np.asarray(users), key, (share, shares), weights):
            total += whole_total(part, rules)
    return total


def some_weights(engine: CohortEngine, seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    rates, groups = len(engine.layout.rates), len(engine.layout.groups)
    return Weights(
        torch.randn(rates, groups, generator=g), torch.randn(rates, generator=g), 0.2, 3.0
    )


SIZES = st.lists(st.integers(0, 20) | st.sampled_from([33, 100]), min_size=2, max_size=8)


@pytest.mark.parametrize("way", WAYS)
@given(
    kind=st.sampled_from(DATA),
    sizes=SIZES.filter(lambda sizes: sum(sizes) > 1),
    classes=st.sampled_from([2, 3]),
    constraint=st.sampled_from(list(CONSTRAINTS)),
    basis=st.sampled_from(["paper", "split"]),
    form=st.sampled_from(["paper", "one-gradient"]),
    memory=st.sampled_from([30_000, 10**9]),
    shares=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=6)
def test_a_sum_less_one_user_is_the_rest(
    way, kind, sizes, classes, constraint, basis, form, memory, shares, seed
) -> None:
    """In any company, in any chunks and by any number of processes, to the last bit."""
    form = form if constraint != "none" else "paper"
    engine, w = made(
        way, kind, sizes, classes, constraint, seed, basis=basis, memory=memory, form=form
    )
    weights = some_weights(engine, seed) if form == "one-gradient" else None
    users = np.random.default_rng(seed).permutation(len(sizes))
    together = whole(engine, w, users, shares=shares, weights=weights)
    for k in range(len(sizes)):
        rest = whole(engine, w, np.delete(users, k), weights=weights)
        own = whole(engine, w, users[k : k + 1], weights=weights)
        assert torch.equal(together - rest, own)


@pytest.mark.parametrize("way", ["deep", "convolutional", "lstm"])
@given(kind=st.sampled_from(DATA), sizes=SIZES.filter(any), seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_local_steps_are_ones_own(way, kind, sizes, seed) -> None:
    engine, w = made(way, kind, sizes, 2, "none", seed, local=FederatedAveraging(3, 0.5))
    together = whole(engine, w, np.arange(len(sizes)))
    alone = [whole(engine, w, [k]) for k in range(len(sizes))]
    assert torch.equal(together, sum(alone))


@pytest.mark.parametrize("half", some([4000, 8000], 4000))
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("way", ["linear", "deep"])
def test_a_silent_heavy_user_among_thousands(way, kind, half) -> None:
    """The attack that refuted 0.1.0: its own vector is zero, and it must change nothing."""
    sizes = [2] * half + [1] * half + [1000]
    engine, w = made(way, kind, sizes, 2, "one attribute", 1, basis="split")
    data = engine.data
    heavy = slice(-1000, None)
    data.features[heavy] = 0.0
    users = np.arange(len(sizes))
    together, without = whole(engine, w, users), whole(engine, w, users[:-1])
    assert torch.equal(together - without, whole(engine, w, users[-1:]))
    kinds = {type(part.gradients) for part in engine.statistics(w, users)}
    assert kinds == {FactoredGradients, CellGradients}


@given(seed=st.integers(0, 10**6), size=st.integers(2, 30), power=st.integers(0, 7))
@settings(max_examples=25)
def test_no_row_is_longer_than_the_bound(seed, size, power) -> None:
    """Nor where samples cancel, to any degree; alone or with counts."""
    engine, w = made("deep", "cancelling", [size], 2, "two attributes", seed)
    engine.data.features[1::2] += 10.0**-power
    for basis, bound in (("paper", 0.01), ("split", 3.0)):
        each = replace(engine, basis=basis)
        row = whole(each, w, [0], bound=bound).double()
        clipping = Clipping(bound, counts=1.5 if basis == "split" else None)
        rules = clip_rules(clipping.blocks(constrained=True, selection=True), each.layout.slices)
        for rule in rules:
            block = torch.cat([row[place] for place in rule.places])
            assert float(block.norm()) <= rule.most


def test_masks_are_a_samples_own() -> None:
    """Another seed, another mask; the same key, the same mask, whatever the company."""
    engine, w = made("dropout", "random", [3, 5, 2, 8], 2, "none", 0)
    one = whole(engine, w, [1], key=1)
    assert torch.equal(one, whole(engine, w, [1], key=1))
    assert not torch.equal(one, whole(engine, w, [1], key=2))


@pytest.mark.parametrize("way", ["dropout", "dropout inside", "lstm"])
def test_what_a_user_has_moves_nobody_elses_masks_or_samples(way) -> None:
    """Masks and chosen samples go by the user and its own samples, wherever these are stored."""
    sizes = [6, 3, 5, 2, 8]
    engine, w = made(way, "random", sizes, 2, "one attribute", 0, samples_per_user=4)
    data, others = engine.data, np.arange(1, 5)
    before = whole(engine, w, others)
    for kept in (0, 1):  # the first user has fewer samples than it had
        rows = np.r_[np.arange(kept), np.arange(sizes[0], sum(sizes))]
        offsets = np.cumsum([0, kept, *sizes[1:]])
        fewer = FederatedDataset(
            data.features[rows], data.labels[rows], data.attributes[rows],
            torch.from_numpy(offsets), data.schema,
        )  # fmt: skip
        assert torch.equal(whole(replace(engine, data=fewer), w, others), before)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Sigmoid, nn.ELU])
def test_no_place_in_a_tile_is_special_with_many_threads(activation) -> None:
    """Cut into three, numbers at a piece's end go through other instructions than the rest."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 128), activation(), nn.Linear(128, 1))
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 5, generator=g).repeat_interleave(900, 0)
    n = len(rows)
    data = FederatedDataset(
        rows, torch.zeros(n).long(), torch.zeros(n, 0).long(), torch.arange(n + 1),
        Schema((5,), classes=2),
    )  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine, _ = company.checked(
            CohortEngine(FlatModel.of(module), data, private=True, expected=900.0)
        )
        chunk = next(engine.chunks(np.arange(n)))
        with computing("float32", torch.device("cpu"), engine.threads):
            assert torch.get_num_threads() == THREADS
            output = engine._pass.outputs(engine.model.vector(), chunk.batch.features)
            recorded = engine._pass.record(engine.model.vector(), chunk.batch)
        assert torch.get_num_threads() == 3
        held_out = company.Outputs(module, data.schema)(rows)
    finally:
        torch.set_num_threads(before)
    for found in (output, recorded.output, *recorded.calls[0][0].g, held_out):
        alike = found.reshape(40, 900, -1)
        assert torch.equal(alike, alike[:, :1].expand_as(alike))


def test_a_private_run_takes_no_more_threads_where_users_are_together(monkeypatch) -> None:
    seen = []
    real = CohortEngine._gradients

    def watched(self, *args):
        seen.append(torch.get_num_threads())
        return real(self, *args)

    monkeypatch.setattr(CohortEngine, "_gradients", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for way, local, most in (("deep", None, 2), ("deep", FederatedAveraging(2, 0.1), 1),
                                 ("lstm", None, 4)):  # fmt: skip
            engine, w = made(way, "random", [3, 2, 20], 2, "none", 0, local=local)
            seen.clear()
            whole(engine, w, [0, 1, 2])
            assert set(seen) == {most}
            seen.clear()
            whole(replace(engine, private=False), w, [0, 1, 2])
            assert set(seen) == {4}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bound", [0.1, 1e-3])
def test_a_tiny_gradient_beside_a_huge_input_is_clipped(bound) -> None:
    """In double precision a gradient's square can be zero where the product's is not."""
    x = torch.tensor([[2.0**511, 1.0]], dtype=torch.float64)
    module = nn.Linear(2, 1000).double()
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
        module.weight[1:, 1] = -359.2
    data = FederatedDataset(
        x, torch.zeros(1).long(), torch.zeros(1, 0).long(), torch.tensor([0, 1]),
        Schema((2,), classes=1000),
    )  # fmt: skip
    engine = CohortEngine(FlatModel.of(module), data, private=True)
    row = whole(engine, engine.model.vector(), [0], bound=bound).double()
    clipping = Clipping(bound)
    for rule in clip_rules(
        clipping.blocks(constrained=False, selection=True), engine.layout.slices
    ):
        assert float(torch.cat([row[place] for place in rule.places]).norm()) <= rule.most


def test_a_number_that_the_models_type_does_not_have_ends_no_private_run() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    x[17, 1] = 1e300  # in double precision it is a number like others
    data = FederatedDataset(
        torch.from_numpy(x), torch.from_numpy(y), torch.zeros(40, 0).long(), torch.arange(41),
        Schema((3,), classes=2),
    )  # fmt: skip
    privacy = Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-3)
    run = train(nn.Linear(3, 1), data, cohort=20, rounds=2, privacy=privacy)
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_batched_products_of_one_number_are_the_products(at_once) -> None:
    """What a GPU does, on a CPU: the last ones filled up."""
    left, right = torch.randn(11, 5, 16), torch.randn(11, 5, 32)
    assert torch.allclose(products(left, right, at_once), left.mT @ right, atol=1e-5)


def damaged(kind: str, data: FederatedDataset, user: int) -> FederatedDataset:
    """The same with one sample of a user that is not what the schema declares."""
    features, labels = data.features.clone(), data.labels.clone()
    attributes, row = data.attributes.clone(), int(data.offsets[user])
    if kind == "token":
        features[row] = TOKENS + 5
    elif kind == "negative token":
        features[row] = -1
    elif kind == "number":
        features[row] = torch.nan
    elif kind == "label":
        labels[row] = 9
    else:
        attributes[row] = 7
    return FederatedDataset(features, labels, attributes, data.offsets, data.schema, checked=False)


@pytest.mark.parametrize(
    ("way", "kind"),
    [("bag", "token"), ("bag", "negative token"), ("lstm", "token"), ("deep", "number"),
     ("deep", "label"), ("deep", "attribute"), ("convolutional", "label"), ("lstm", "label")],
)  # fmt: skip
def test_a_user_with_bad_data_sends_zero_and_nobody_notices(way, kind, caplog, recwarn) -> None:
    engine, w = made(way, "random", [3, 2, 5, 1, 4], 3, "one attribute", 0)
    users = np.arange(5)
    rest = whole(engine, w, np.delete(users, 2))
    recwarn.clear()
    bad = replace(engine, data=damaged(kind, engine.data, 2))
    assert torch.equal(whole(bad, w, users), rest)
    assert not caplog.records
    assert not [each for each in recwarn.list if "performance drop" not in str(each.message)]


def test_an_error_of_the_model_is_its_users_alone(monkeypatch) -> None:
    """Whatever a kernel raises: that user sends zero, and the others what they would have sent."""
    engine, w = made("deep", "random", [3, 2, 5, 1, 4], 2, "one attribute", 0)
    users = np.arange(5)
    rest = whole(engine, w, np.delete(users, 2))
    real = CohortEngine._compute

    def failing(self: CohortEngine, w: Tensor, chunk, weights):
        if 2 in chunk.users:
            raise RuntimeError("out of memory")
        return real(self, w, chunk, weights)

    monkeypatch.setattr(CohortEngine, "_compute", failing)
    assert torch.equal(whole(engine, w, users), rest)
    with pytest.raises(RuntimeError, match="out of memory"):
        whole(replace(engine, private=False), w, users)


def test_a_user_too_large_for_local_steps_is_cut_by_a_rule_of_its_own() -> None:
    local = FederatedAveraging(2, 0.1)
    engine, w = made("deep", "random", [3000, 2, 5], 2, "none", 0, local=local, memory=10**6)
    assert engine._reader._most < 3000
    together = whole(engine, w, [0, 1, 2])
    assert torch.equal(together, whole(engine, w, [0]) + whole(engine, w, [1, 2]))


def test_globals_of_torch_do_not_reach_a_users_numbers() -> None:
    engine, w = made("deep", "random", [3, 20, 5], 2, "one attribute", 0)
    before = whole(engine, w, [0, 1, 2])
    torch.set_float32_matmul_precision("medium")
    try:
        again = whole(engine, w, [0, 1, 2])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(before, again)


def test_the_self_test_finds_a_place_that_is_special(monkeypatch) -> None:
    """Far down in a tile, where no made-up user stands."""
    engine, _ = made("deep", "random", [3, 2], 2, "one attribute", 0, expected=2000.0)
    assert company.keeps_bits(engine)
    real = steady.linear

    def special(rows, weight, bias):
        output = real(rows, weight, bias)
        return torch.cat([output[:1900], torch.nextafter(output[1900:], output[1900:] + 1)])

    monkeypatch.setattr(steady, "linear", special)
    assert not company.keeps_bits(engine)


def test_the_self_test_finds_cells_that_depend_on_their_place(monkeypatch) -> None:
    engine, _ = made("deep", "random", [3, 2], 2, "none", 0, local=FederatedAveraging(2, 0.1))
    assert company.keeps_bits(engine)
    real = LocalPass.bucket

    def special(self, *args):
        gradients, output = real(self, *args)
        return torch.cat([gradients[:30], gradients[30:] * (1 + 2e-7)]), output

    monkeypatch.setattr(LocalPass, "bucket", special)
    assert not company.keeps_bits(engine)


def test_the_self_test_finds_norms_that_depend_on_the_company(monkeypatch) -> None:
    """Broken the way 0.1.0 was, an engine is refused."""
    engine, _ = made("deep", "random", [3, 2], 2, "one attribute", 0)
    assert company.keeps_bits(engine)
    real = FactoredGradients.norms

    def inflated(self: FactoredGradients, names):
        return real(self, names) * (1 + 12 * 2.0**-23 * int(self.sizes.max()))

    monkeypatch.setattr(FactoredGradients, "norms", inflated)
    monkeypatch.setattr(company, "_FOUND", {})
    assert not company.keeps_bits(engine)
    alone, why = company.checked(engine)
    assert alone.alone
    assert "computed alone" in why


@pytest.mark.parametrize("way", ["lstm", "gru", "rnn", "attention"])
def test_unknown_layers_are_computed_user_by_user(way) -> None:
    engine, w = made(way, "random", [3, 2, 4], 2, "one attribute", 0)
    assert engine.alone
    assert [len(part.users) for part in engine.statistics(w, np.arange(3))] == [1, 1, 1]
