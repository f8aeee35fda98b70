"""What is exported: a model with what stands before and behind it in fpfl."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fpfl.data.schema import HALF_WIDTH, Schema
from fpfl.users import task

Ranges = Sequence[tuple[float, float] | None]
"""The public range that each column is scaled by inside the file; None: it is taken as it is."""


UNKNOWN = -1
"""The predicted class where the scores are not numbers."""


class Predictor(nn.Module):
    r"""A model with what stands before and behind it in fpfl: features → (scores, predictions).

    Scores are probabilities of shape (n, classes), for two classes as well, or numbers in the
    label's unit, (n,). Predictions are the likeliest class (−1 where scores are NaN), or the number
    clamped to the declared range. With ``ranges`` a column x of a table is scaled first as
    `fpfl.scale_by_ranges` does,

        3 (2 (clip(x, low, high) − low)/(high − low) − 1).

    Parameters
    ----------
    model
        It returns logits, or numbers in units of the label range, as ``run.model`` does. A copy is
        kept, on the CPU and in evaluation mode.
    schema
        The task.
    ranges
        Of each column, where features are to be scaled inside.
    """

    def __init__(self, model: nn.Module, schema: Schema, ranges: Ranges | None = None) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().eval()
        self.schema = schema
        self.ranges = None if ranges is None else _checked_ranges(ranges, schema)
        if self.ranges is not None:
            ends = [(0.0, 1.0) if each is None else each for each in self.ranges]
            scaled = [each is not None for each in self.ranges]
            # Double precision, in which the training features were scaled.
            self.register_buffer("low", torch.tensor([e[0] for e in ends], dtype=torch.float64))
            self.register_buffer("high", torch.tensor([e[1] for e in ends], dtype=torch.float64))
            self.register_buffer("scaled", torch.tensor(scaled))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and predictions of a batch."""
        if self.ranges is not None:
            features = self._scaled(features)
        output = task.flatten_output(self.model(features), self.schema)
        scores, predictions = (
            task.scores(output, self.schema),
            task.predictions(output, self.schema),
        )
        if self.schema.classes is not None:
            # A comparison with NaN is false, which would make it the first class.
            predictions = torch.where(scores.sum(dim=-1).isnan(), UNKNOWN, predictions)
        return scores, predictions

    def _scaled(self, features: Tensor) -> Tensor:
        low, high, scaled = (self.get_buffer(name) for name in ("low", "high", "scaled"))
        x = features.to(torch.float64)
        inside = torch.minimum(torch.maximum(x, low), high)
        mapped = HALF_WIDTH * (2.0 * (inside - low) / (high - low) - 1.0)
        return torch.where(scaled, mapped, x).to(features.dtype)


def _checked_ranges(ranges: Ranges, schema: Schema) -> tuple[tuple[float, float] | None, ...]:
    if schema.shape != (len(ranges),):
        raise ValueError(
            f"{len(ranges)} ranges were given for features of shape {schema.shape}; expected one "
            "for each column of a table, None where it is taken as it is"
        )
    for each in ranges:
        if each is not None and not each[0] < each[1]:
            raise ValueError(f"the range {each} is not (low, high) with low < high")
    return tuple(None if each is None else (float(each[0]), float(each[1])) for each in ranges)
