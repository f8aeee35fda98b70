r"""Weighting: from the weights that the server broadcasts to the objective of every sample.

A sample's objective is ℓ_i + Σ_r b_{r,i} f_r(i) (`fpfl.fairness.totals`), and one of two things
stands in for f_r:

- e_r(y_i) ℓ_i, for rates that move with the loss (`fpfl.fairness.rates`). All of them together are
  a weight of the sample's loss, kept in the public range:

      ω_i ℓ_i,    ω_i = min(max(1 + Σ_r e_r(y_i) b_{r,i}, low), high).

- its own surrogate, with the weight τ_{r,i} = b_{r,i}, kept in ±(high − 1). In a regression it is a
  tenth of that: ½ (o − t)² + τ o moves the target t by τ, in units of the label's range, and errors
  of a tenth of the range have the weight that a loss has.

Neither depends on w, nor on other users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fpfl.data.schema import Schema
from fpfl.fairness.rates import Rate
from fpfl.fairness.totals import Weights
from fpfl.numerics.summing import tree_sum
from fpfl.users.packing import Batch

SHIFT = 0.1
"""How far a surrogate of weight 1 moves a regression's target, in units of its range."""


@dataclass(frozen=True)
class Weighting:
    """How samples are weighted in the one gradient of a user.

    Parameters
    ----------
    slopes
        e_r(y), of shape (R, classes), or (R, 1) in a regression; 0 for rates with their own
        surrogate.
    own
        The numbers of the rates with their own surrogate.
    unit
        What their weights are multiplied by.
    """

    slopes: Tensor
    own: tuple[int, ...]
    unit: float

    @classmethod
    def of(cls, rates: Sequence[Rate], schema: Schema, like: Tensor, *, losses: bool) -> Weighting:
        """Which surrogate every rate gets: the loss where it may, if ``losses`` are wanted."""
        found = [rate.loss_slopes(schema.classes) if losses else None for rate in rates]
        nothing = torch.zeros(schema.classes or 1)
        slopes = [nothing if slope is None else slope for slope in found]
        own = tuple(r for r, slope in enumerate(found) if slope is None)
        unit = SHIFT if schema.classes is None else 1.0
        return cls(torch.stack(slopes or [nothing]).to(like), own, unit)

    def weighted(self, batch: Batch, member: Tensor, weights: Weights) -> Batch:
        """The batch of the one gradient: ω in place of ``real``, τ in place of ``conditions``.

        ``member`` (N, G) has the groups of the batch's rows.
        """
        b = weights.of_samples(batch.conditions, member)
        labels = torch.zeros_like(batch.labels) if self.slopes.shape[1] == 1 else batch.labels
        slopes = self.slopes.index_select(1, labels.long())
        added = tree_sum(slopes * b, 0) if len(b) else torch.zeros_like(batch.real)
        low, high = weights.low, weights.high
        omega = (1.0 + added).clamp(low, high)  # type: ignore[arg-type]
        most = high - 1.0
        return replace(
            batch,
            real=omega * batch.real,
            conditions=self.unit * b[list(self.own)].clamp(-most, most),  # type: ignore[arg-type]
        )
