"""The networks of the paper's experiments, and any other perceptron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import nn

from fpfl.numerics.randomness import derived_seed

SHALLOW = (10,)
"""The paper's shallow network: one hidden layer of 10 units."""

DEEP = (16, 8, 8)
"""The paper's deep network: three hidden layers of 16, 8 and 8 units."""

Initial = Literal["glorot", "torch"]


def mlp(
    inputs: int,
    hidden: Sequence[int] = SHALLOW,
    outputs: int = 1,
    *,
    initial: Initial = "glorot",
    seed: int | None = None,
) -> nn.Sequential:
    """A perceptron with ReLU units that returns logits.

    Parameters
    ----------
    inputs, hidden, outputs
        The layers' sizes; one output (a logit) for two classes or a regression.
    initial
        ``"glorot"``: Glorot and Bengio's uniform weights, biases at 0. ``"torch"``: PyTorch's own,
        about half as large; a narrow, deep network may sit on its first plateau for hundreds of
        rounds.
    seed
        Initialises the weights from the seed's own stream, and leaves torch's global state alone.
    """
    sizes = [inputs, *hidden, outputs]
    if min(sizes) < 1:
        raise ValueError(f"the layers have sizes {sizes}; each must be at least 1")
    with _seeded(seed):
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [_initialised(nn.Linear(before, after), initial), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(
    classes: int = 10,
    *,
    initial: Initial = "glorot",
    seed: int | None = None,
) -> nn.Sequential:
    """The paper's convolutional network for images of 3 × 28 × 28: 157,206 parameters, 10 classes.

    Two convolutions of 5 × 5 with stride 2 and no padding, 32 and 64 filters, then 100 hidden
    units; ReLU. It returns logits.

    Parameters
    ----------
    classes
        How many logits.
    initial, seed
        As in `mlp`.
    """
    with _seeded(seed):
        return nn.Sequential(
            _initialised(nn.Conv2d(3, 32, 5, stride=2), initial),
            nn.ReLU(),
            _initialised(nn.Conv2d(32, 64, 5, stride=2), initial),
            nn.ReLU(),
            nn.Flatten(),
            _initialised(nn.Linear(64 * 4 * 4, 100), initial),
            nn.ReLU(),
            _initialised(nn.Linear(100, classes), initial),
        )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Torch's generator at the start of the seed's stream, and afterwards as it was.

    Without a seed it goes on, so that no two networks begin alike.
    """
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(derived_seed(seed, "initialisation"))
        yield


def _initialised(layer: nn.Linear | nn.Conv2d, initial: Initial) -> nn.Module:
    if initial not in get_args(Initial):
        raise ValueError(f"initial is {initial!r}; expected 'glorot' or 'torch'")
    if initial == "glorot":
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer
