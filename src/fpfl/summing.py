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

PIECE = 128
"""Rows that are added in their own precision, all pieces at once."""

NARROW, SMALL = 8, 2**12
"""So many weights per row, or numbers in the result, leave room for the sums of all pieces."""

LONG_PIECE, GROUP = 1024, 32
"""Rows that are added in their own precision where there is none: one piece after the other, or so
many at once on a GPU."""


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
        return _pieces_at_once(weights, rows, PIECE)
    if rows.is_cuda:  # where calls cost more than room
        return _groups_of_pieces(weights, rows)
    if len(rows) <= LONG_PIECE:
        return weights @ rows
    total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float64)
    parts = torch.split(weights, LONG_PIECE, dim=1), torch.split(rows, LONG_PIECE)
    for left, right in zip(*parts, strict=True):
        total += left @ right
    return total


def _groups_of_pieces(weights: Tensor, rows: Tensor) -> Tensor:
    if len(rows) <= GROUP * LONG_PIECE:
        return _pieces_at_once(weights, rows, LONG_PIECE)
    total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float64)
    size = GROUP * LONG_PIECE
    parts = torch.split(weights, size, dim=1), torch.split(rows, size)
    for left, right in zip(*parts, strict=True):
        total += _pieces_at_once(left, right, LONG_PIECE)
    return total


def _pieces_at_once(weights: Tensor, rows: Tensor, piece: int) -> Tensor:
    whole = len(rows) - len(rows) % piece
    if whole == 0 or len(rows) == piece:
        return weights @ rows
    left = weights[:, :whole].reshape(len(weights), -1, piece).transpose(0, 1)
    right = rows[:whole].reshape(-1, piece, rows.shape[1])
    total = torch.bmm(left, right).sum(dim=0, dtype=torch.float64)
    if whole < len(rows):
        total += weights[:, whole:] @ rows[whole:]
    return total
