"""Weighted sums of many rows that round little.

Added one by one in single precision, ten thousand users' gradients that point roughly the same way
are off by half a percent of one of them, and privacy rests on what one of them can change. Here
pieces of them are added in the rows' own precision, and the pieces in double.

How it is done depends on the sizes of weights and results, not on the number of rows: otherwise a
user more or less could change the way, and with it the rounding of all the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 512
"""A result of so many numbers is computed in double precision throughout."""

PIECE = 256
"""Rows that are added in their own precision, all pieces at once."""

NARROW, SMALL = 8, 2**12
"""So many weights per row, or numbers in the result, leave room for the sums of all pieces."""

LONG_PIECE = 1024
"""Rows that are added in their own precision where there is none: one piece after the other."""


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows`` for weights (B,) or (Q, B) and rows (B, p), in double where it matters."""
    if weights.ndim == 1:
        return weighted_sum(weights.unsqueeze(0), rows).squeeze(0)
    numbers = len(weights) * rows.shape[1]
    if rows.dtype == torch.float64:
        return weights @ rows
    if numbers <= TINY:
        return weights.double() @ rows.double()
    if len(weights) <= NARROW or numbers <= SMALL:
        return _pieces_at_once(weights, rows)
    if len(rows) <= LONG_PIECE:
        return weights @ rows
    total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float64)
    for left, right in zip(weights.split(LONG_PIECE, 1), rows.split(LONG_PIECE), strict=True):
        total += left @ right
    return total


def _pieces_at_once(weights: Tensor, rows: Tensor) -> Tensor:
    whole = len(rows) - len(rows) % PIECE
    if whole == 0 or len(rows) == PIECE:
        return weights @ rows
    left = weights[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1)
    right = rows[:whole].unflatten(0, (-1, PIECE))
    total = torch.bmm(left, right).sum(dim=0, dtype=torch.float64)
    if whole < len(rows):
        total += weights[:, whole:] @ rows[whole:]
    return total
