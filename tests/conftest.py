"""What the tests share: small made-up populations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fpfl import Attribute, FederatedDataset, Schema
from fpfl.users import CohortEngine

SEX = Attribute("sex", ("Female", "Male"))
RACE = Attribute("race", ("A", "B", "C"), unknown=True)


def make_population(
    users: int = 30,
    mean: float = 3.0,
    features: int = 5,
    classes: int | None = 2,
    attributes: tuple[Attribute, ...] = (SEX,),
    seed: int = 0,
) -> FederatedDataset:
    """Users of Poisson sizes (some without samples) with features that predict the label."""
    rng = np.random.default_rng(seed)
    sizes = rng.poisson(mean, users)
    sizes[0] = max(sizes[0], 1)
    n = int(sizes.sum())
    x = rng.normal(size=(n, features))
    codes = (
        np.stack(
            [rng.integers(-1 if a.unknown else 0, len(a.values), n) for a in attributes], axis=1
        )
        if attributes
        else np.zeros((n, 0), dtype=np.int64)
    )
    signal = x @ rng.normal(size=features) + rng.normal(scale=0.5, size=n)
    if codes.shape[1]:
        signal = signal - 0.7 * (codes[:, 0] == 0)
    if classes is None:
        y = np.clip(signal, -5, 5)
    else:
        y = np.digitize(signal, np.quantile(signal, np.linspace(0, 1, classes + 1)[1:-1]))
    schema = Schema(
        shape=(features,),
        classes=classes,
        label_range=(-5.0, 5.0) if classes is None else None,
        attributes=attributes,
        samples_per_user=mean,
    )
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    return FederatedDataset(
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(y.astype(np.float32 if classes is None else np.int64)),
        torch.from_numpy(codes.astype(np.int64)),
        offsets,
        schema,
    )


@pytest.fixture
def population() -> Callable[..., FederatedDataset]:
    return make_population


def vectors(engine: CohortEngine, w: Tensor, users: np.ndarray, **how: Any) -> Tensor:
    """The users' vectors, one row each in the given order; zero for users without samples."""
    rows = torch.zeros(len(users), engine.layout.size, dtype=w.dtype)
    place = {int(user): row for row, user in enumerate(users)}
    for part in engine.statistics(w, users, **how):
        rows[[place[int(user)] for user in part.users]] = part.dense().cpu()
    return rows
