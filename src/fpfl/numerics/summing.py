r"""Sums of many users' rows: in whole numbers where privacy rests on them.

What one user adds to a sum must be that user's alone. Numbers in floating point do not add up like
that: the last bits of a sum depend on who else is in it. So each user's row is rounded to whole
numbers on its own, and whole numbers are added, which is exact in any order, in any chunks and on
any number of machines: the sum with a user less the sum without is that user's row, bit for bit.

Whole numbers below 2⁵³ are exact in double precision, and so is every sum of them that stays below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TINY = 512
"""A result of so many numbers is computed in double precision throughout."""

PIECE = 1024
"""Rows that are added in their own precision."""

STEP_BITS = 38
"""A clipped row has a norm of at most 2 to this power, in whole steps."""

LARGEST = 2.0 ** (STEP_BITS + 1)
"""What one number of a row is cut off at: no clipped row has one so large."""

ROWS = 2**14
"""So many numbers up to `LARGEST` add up to less than 2⁵³."""

AT_ONCE = {"cpu": 2**17, "cuda": 2**25}
"""Numbers that are rounded together: what fits a processor's cache, or keeps a GPU busy."""


@dataclass(frozen=True)
class ByRun:
    """The runs of rows, where sums of several runs are computed side by side.

    Parameters
    ----------
    count
        R.
    of_rows
        Each row's run, (B,).
    numbers
        The same beside the CPU, for who must not wait for a GPU; None where nobody asks.
    """

    count: int
    of_rows: Tensor
    numbers: NDArray[np.int64] | None = None

    def of(self, rows: Tensor) -> ByRun:
        """The same for other rows, given which of these each belongs to."""
        return ByRun(self.count, self.of_rows.index_select(0, rows))

    def sum(self, values: Tensor) -> Tensor:
        """Σ over each run's values (B, ...): (R, ...)."""
        total = values.new_zeros(self.count, *values.shape[1:])
        return total.index_add_(0, self.of_rows, values)


def whole_sum(
    weights: Tensor, rows: Tensor, member: Tensor | None = None, runs: ByRun | None = None
) -> tuple[Tensor, Tensor]:
    r"""Round every row on its own and add up: Σ_k z^k with z^k = round(weights_k · row_k).

    Parameters
    ----------
    weights
        Shape (B,), float64.
    rows
        Shape (B, p).
    member
        Shape (B, G), zeros and ones: the sums are by group then, Σ_k member_{k,a} z^k.
    runs
        Of which runs the rows are: the sums are by run then.

    Returns
    -------
    tuple
        The sum (p,), or the sums (G, p), as int64, those of runs (R, ...); and every row's
        Σ_j (z^k_j)², (B,).
    """
    count, width = rows.shape
    groups = 1 if member is None else member.shape[1]
    shape = (groups, width) if runs is None else (runs.count, groups, width)
    total = rows.new_zeros(shape, dtype=torch.int64)
    norms = rows.new_zeros(count, dtype=torch.float64)
    at_once = min(ROWS, max(1, AT_ONCE.get(rows.device.type, 2**17) // max(1, width)))
    # One piece of memory for all: getting it anew costs more than the sums.
    buffer = rows.new_empty(min(at_once, count), width, dtype=torch.float64)
    for piece in range(0, count, ROWS):
        sums = rows.new_zeros(shape, dtype=torch.float64)
        last = min(piece + ROWS, count)
        for start in range(piece, last, at_once):
            part = slice(start, min(start + at_once, last))
            whole = buffer[: part.stop - start]
            torch.mul(rows[part], weights[part].unsqueeze(1), out=whole)
            whole.round_().clamp_(-LARGEST, LARGEST)
            norms[part] = row_norms(whole)
            if runs is not None:
                own = None if member is None else member[part].to(whole.dtype)
                _add_by_run(sums, runs.of_rows[part], whole, own)
            elif member is not None:
                sums += member[part].to(whole.dtype).T @ whole
            else:
                sums += whole.sum(dim=0) if len(whole) > 1 else whole
        total += sums.long()
    return (total[..., 0, :] if member is None else total), norms.square_()


def _add_by_run(sums: Tensor, runs: Tensor, whole: Tensor, member: Tensor | None) -> None:
    """Add rows to their run's sums (R, G, p), in whole numbers: exact in any order."""
    for group in range(sums.shape[1]):
        own = whole if member is None else whole * member[:, group : group + 1]
        sums[:, group].index_add_(0, runs, own)


NORMS_AT_ONCE = 2**21
"""About so many numbers are in one call where a GPU takes norms."""


ALIGNED = 64
"""Rows of a multiple of so many numbers begin at multiples of 256 bytes."""


def row_norms(rows: Tensor) -> Tensor:
    """‖row‖₂ of every row, in double precision: its bits depend on that row alone.

    A GPU goes by how many rows there are, and by where in memory each begins. So a call always has
    the same number of them there, by their width, which is filled up: all begin alike. A CPU may
    cut a single row into pieces for several threads, and never two.
    """
    if not rows.is_cuda:
        return _norms(rows if len(rows) != 1 else rows.expand(2, -1))[: len(rows)]
    width = -(-rows.shape[1] // ALIGNED) * ALIGNED
    count = 1 << max(0, (NORMS_AT_ONCE // max(1, width)).bit_length() - 1)
    found = []
    for part in torch.split(rows, count):
        whole = part.new_zeros(count, width)
        whole[: len(part), : part.shape[1]] = part
        found.append(_norms(whole)[: len(part)])
    return torch.cat(found)


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows`` for weights (B,) or (Q, B) and rows (B, p), where nobody is clipped.

    Pieces of the rows are added in their own precision, and the pieces in double: added one by
    one, ten thousand users' gradients that point roughly the same way are off by half a percent
    of one of them.
    """
    if weights.ndim == 1:
        return weighted_sum(weights.unsqueeze(0), rows).squeeze(0)
    weights = weights.to(rows.dtype)
    if rows.dtype == torch.float64:
        return weights @ rows
    if len(weights) * rows.shape[1] <= TINY:
        return weights.double() @ rows.double()
    if len(rows) <= PIECE:
        return weights @ rows
    total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float64)
    parts = torch.split(weights, PIECE, dim=1), torch.split(rows, PIECE)
    for left, right in zip(*parts, strict=True):
        total += left @ right
    return total


def tree_sum(values: Tensor, dim: int) -> Tensor:
    """Sum over a dimension, pair by pair: its bits depend on that dimension's numbers alone.

    A kernel that reduces may choose its order by the sizes of other dimensions, which are other
    people; additions of two tensors have no order to choose.
    """
    values = values.movedim(dim, 0)
    if not len(values):
        return values.sum(dim=0)
    while len(values) > 1:
        half = len(values) // 2
        front = values[:half] + values[half : 2 * half]
        values = front if len(values) % 2 == 0 else torch.cat([front, values[-1:]])
    return values[0]
