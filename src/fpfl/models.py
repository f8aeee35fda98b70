"""The networks of the paper's Adult experiments, and any other perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from fpfl.randomness import derived_seed

SHALLOW = (10,)
"""The paper's shallow network: one hidden layer of 10 units."""

DEEP = (16, 8, 8)
"""The paper's deep network: three hidden layers of 16, 8 and 8 units."""


def mlp(
    inputs: int,
    hidden: Sequence[int] = SHALLOW,
    outputs: int = 1,
    *,
    initial: Literal["glorot", "torch"] = "glorot",
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
    if initial not in ("glorot", "torch"):
        raise ValueError(f"initial is {initial!r}; expected 'glorot' or 'torch'")
    sizes = [inputs, *hidden, outputs]
    if min(sizes) < 1:
        raise ValueError(f"the layers have sizes {sizes}; each must be at least 1")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(derived_seed(seed, "initialisation"))
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            linear = nn.Linear(before, after)
            if initial == "glorot":
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
