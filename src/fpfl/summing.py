"""Weighted sums of many rows that round little.

Added one by one in single precision, ten thousand users' gradients that point roughly the same way
are off by half a percent of one of them, and privacy rests on what one of them can change. Here
pieces of them are added in the rows' own precision, and the pieces in double.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW, PIECE = 512, 128
"""So many rows are not worth being split; more are, into pieces of so many."""

SMALL = 2**17
"""So many numbers in all are added in double precision at once."""

WIDE = 2048
"""The pieces where there are many weights per row, so that their sums take up room."""


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows`` for weights (B,) or (Q, B), with Q small, and rows (B, p).

    The result is in double precision where there are many rows.
    """
    if rows.dtype == torch.float64 or len(rows) <= FEW:
        return weights @ rows
    if rows.numel() <= SMALL:
        return weights.double() @ rows.double()
    if weights.ndim == 1:
        return weighted_sum(weights.unsqueeze(0), rows).squeeze(0)
    whole = len(rows) - len(rows) % PIECE
    left = weights[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1)
    right = rows[:whole].unflatten(0, (-1, PIECE))
    total = torch.bmm(left, right).sum(dim=0, dtype=torch.float64)
    if whole < len(rows):
        total += weights[:, whole:] @ rows[whole:]
    return total


def wide_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows`` for weights (Q, B), with Q large, and rows (B, p); likewise."""
    if rows.dtype == torch.float64 or len(rows) <= WIDE:
        return weights @ rows
    total = torch.zeros(len(weights), rows.shape[1], dtype=torch.float64, device=rows.device)
    for left, right in zip(weights.split(WIDE, dim=1), rows.split(WIDE), strict=True):
        total += left @ right
    return total
