"""Whether an exported file answers as the model does, on made-up inputs of two batch sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fpfl.data.scaling import scale_by_ranges
from fpfl.data.schema import Schema
from fpfl.exporting.predictor import Ranges
from fpfl.users import task

BATCHES = (1, 7)
TOLERANCE = 1e-4
"""How far a score of a file may be from the model's, in units of 1 + its size."""

Answers = tuple[NDArray[Any], NDArray[Any]]


def verify(
    answers: Callable[[Tensor], Answers],
    model: nn.Module,
    schema: Schema,
    ranges: Ranges | None,
    tokens: int | None,
    target: Path,
) -> None:
    """Refuse a file that does not answer as the model does; the model is asked without Predictor.

    Classes may differ where the two best scores are closer than the tolerance.
    """
    plain = copy.deepcopy(model).cpu().eval()
    for batch in BATCHES:
        x = made_up(schema, ranges, tokens, batch, input_dtype(model))
        inputs = x if ranges is None else _scaled_columns(x, ranges)
        with torch.no_grad():
            output = task.flatten_output(plain(inputs), schema)
            wanted = arrays((task.scores(output, schema), task.predictions(output, schema)))
        found = answers(x)
        if not _agree(wanted, found, schema):
            worst = _distance(wanted[0], found[0])
            raise ValueError(
                f"the exported model does not answer as the model does: scores of a batch of "
                f"{batch} differ by up to {worst:.3g}. {target} was not written; the model has "
                "something that its export does not follow, such as a branch on the data"
            )


def _agree(wanted: Answers, found: Answers, schema: Schema) -> bool:
    scores, predictions = wanted
    if found[0].shape != scores.shape or found[1].shape != predictions.shape:
        return False
    if not np.allclose(found[0], scores, rtol=TOLERANCE, atol=TOLERANCE):
        return False
    if schema.classes is None:
        return np.allclose(found[1], predictions, rtol=TOLERANCE, atol=TOLERANCE)
    best = np.sort(scores, axis=-1)
    tie = best[..., -1] - best[..., -2] <= 2.0 * TOLERANCE
    return bool(((found[1] == predictions) | tie).all())


def _distance(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    if wanted.shape != found.shape:
        return math.inf
    return float(np.abs(np.asarray(wanted, dtype=np.float64) - found).max(initial=0.0))


def made_up(
    schema: Schema, ranges: Ranges | None, tokens: int | None, batch: int, dtype: torch.dtype
) -> Tensor:
    """Inputs that are made up from public numbers; with ranges, some lie beyond them."""
    generator = torch.Generator().manual_seed(batch)
    if tokens is not None:
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}; expected the size of a vocabulary")
        return torch.randint(tokens, (batch, *schema.shape), generator=generator)
    x = torch.randn(batch, *schema.shape, generator=generator, dtype=torch.float64)
    if ranges is not None:
        ends = np.array([(-1.0, 1.0) if each is None else each for each in ranges])
        low, high = torch.from_numpy(ends.T.copy())
        x = (low + high) / 2.0 + x * (high - low) / 3.0
    return x.to(dtype)


def _scaled_columns(x: Tensor, ranges: Ranges) -> Tensor:
    """The same scaling as Predictor's, by the function that the training data went through."""
    columns = [
        x.numpy()[:, number : number + 1].astype(np.float64)
        if each is None
        else scale_by_ranges(x.numpy()[:, number : number + 1], [each])
        for number, each in enumerate(ranges)
    ]
    return torch.from_numpy(np.concatenate(columns, axis=1)).to(x.dtype)


def arrays(answers: Any) -> Answers:
    """Scores and predictions, out of torch."""
    scores, predictions = answers
    return scores.detach().numpy(), predictions.detach().numpy()


def input_dtype(model: nn.Module) -> torch.dtype:
    """The type that a model takes its features in, where they are no tokens."""
    return next(model.parameters(), torch.zeros(())).dtype
