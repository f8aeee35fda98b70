"""Models that read texts, and the pages about one's own model, rate and task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import vectors
from test_engine import loop_over_users
from torch import Tensor, nn

import fpfl
from fpfl.users import CohortEngine, FlatModel

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
WORDS, LENGTH = 13, 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore::fpfl.FpflWarning"),
]


class Recurrent(nn.Module):
    """The state of a recurrent layer at the last word; or, packed, the layer's own."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, *, packed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, padding_idx=0)
        self.read = kind(4, 5, batch_first=True)
        self.out = nn.Linear(5, 1)
        self.packed = packed

    def forward(self, tokens: Tensor) -> Tensor:
        read, lengths = self.words(tokens), (tokens != 0).sum(dim=1).clamp(min=1)
        if self.packed:
            bundle = nn.utils.rnn.pack_padded_sequence(
                read, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            return self.out(self.read(bundle)[1][-1])
        return self.out(self.read(read)[0][torch.arange(len(tokens)), lengths - 1])


class Attentive(nn.Module):
    """A transformer with places, a padding mask, and the mean over words."""

    def __init__(self, *, nested: bool = False, dropout: float = 0.0, first: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, 4))
        layer = nn.TransformerEncoderLayer(
            4, 2, 6, dropout=dropout, batch_first=True, norm_first=first
        )
        self.read = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        padding = padding & ~padding.all(dim=1, keepdim=True)
        read = self.read(self.words(tokens) + self.places, src_key_padding_mask=padding)
        read = read.masked_fill(padding.unsqueeze(-1), 0.0)
        return self.out(read.sum(dim=1) / (~padding).sum(dim=1, keepdim=True))


def texts(users: int = 12, mean: float = 3.0, seed: int = 0) -> fpfl.FederatedDataset:
    """Texts of different lengths, one of them empty, of users of whom some wrote none."""
    rng = np.random.default_rng(seed)
    sizes = rng.poisson(mean, users)
    n = int(sizes.sum())
    tokens = rng.integers(1, WORDS, (n, LENGTH))
    tokens[np.arange(LENGTH) >= rng.integers(0, LENGTH + 1, n)[:, None]] = 0
    tokens[0] = 0
    schema = fpfl.Schema(
        shape=(LENGTH,),
        attributes=(fpfl.Attribute("dialect", ("first", "second")),),
        population=users,
        samples_per_user=mean,
    )
    return fpfl.FederatedDataset.from_samples(
        tokens,
        (tokens > WORDS // 2).sum(axis=1) > (tokens > 0).sum(axis=1) / 2,
        rng.integers(0, 2, (n, 1)),
        schema,
        users=np.repeat(np.arange(users), sizes),
    )


MODELS = {
    "gru": lambda: Recurrent(),
    "lstm": lambda: Recurrent(nn.LSTM),
    "transformer": lambda: Attentive(),
    "transformer, norm first": lambda: Attentive(first=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_users_statistics_are_those_of_a_loop(name: str) -> None:
    torch.manual_seed(1)
    model, data = FlatModel.of(MODELS[name]().double()), texts()
    assert data.features.dtype == torch.int64
    engine = CohortEngine(model, data, fpfl.equalized_odds("dialect"))
    users = np.arange(data.population)
    with torch.no_grad():  # away from initial values, where layers may hide each other
        w = model.vector() + 0.1 * torch.randn(model.size, dtype=torch.float64)
    given = vectors(engine, w, users)
    assert bool((given.abs().sum(dim=1) > 0).sum() > 5)
    torch.testing.assert_close(given, loop_over_users(engine, w, users), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: Recurrent(nn.LSTM), lambda: Attentive(dropout=0.2)])
def test_they_train_with_privacy(make) -> None:
    torch.manual_seed(0)
    run = fpfl.train(
        make(),
        texts(users=60),
        cohort=30,
        rounds=2,
        constraint=fpfl.fnr_parity("dialect"),
        method=fpfl.OneGradient(),
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.0),
        seed=0,
    )
    assert len(run.history) == 2
    assert all(bool(value.isfinite().all()) for value in run.model.parameters())


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (Recurrent(packed=True), "cannot be packed"),
        (Attentive(nested=True), "enable_nested_tensor=False"),
    ],
)
def test_what_cannot_be_computed_is_explained(model: nn.Module, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        fpfl.train(model, texts(), cohort=5, rounds=1)


def after(page: str, number: int = 0) -> dict[str, Any]:
    """What a block of a page leaves behind."""
    blocks = re.findall(r"```python\n(.*?)```", (HOWTO / page).read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[number], page, "exec"), names)
    return names


def test_the_pages_recurrent_model_learns_both_dialects() -> None:
    names = after("own-model.md")
    found = names["run"].evaluate(names["people"])
    # Who reads single words and no "not" is right for half of the second dialect's turns of phrase.
    assert found.rates["accuracy"]["dialect=second"] > 0.85


def test_a_rate_of_ones_own_is_moved() -> None:
    names = after("own-rate.md")
    gaps = {
        name: fpfl.evaluate_model(
            names[name].model, names["people"], constraint=names["constraint"]
        ).gaps["constraint"].value
        for name in ("plain", "fair")
    }  # fmt: skip
    assert gaps["plain"] > 0.1
    assert gaps["fair"] < 0.05


def test_a_regressions_errors_are_made_equal() -> None:
    names = after("regression.md")
    errors = {
        name: fpfl.evaluate_model(names[name].model, names["people"]).rates["squared error"]
        for name in ("plain", "fair")
    }
    assert errors["plain"]["region=north"] > 3 * errors["plain"]["region=south"]
    ratio = errors["fair"]["region=north"] / errors["fair"]["region=south"]
    assert 2 / 3 < ratio < 3 / 2
    assert errors["fair"]["overall"] < 2 * errors["plain"]["overall"]
