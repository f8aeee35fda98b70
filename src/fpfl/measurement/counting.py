r"""Counting: one vector for each user, in whole numbers, and their sum.

A user k with n_k rows, of which c_kj count in cell j, sends

    z_kj = ⌊2³⁰ c_kj / n_k⌋,    in steps of 2⁻³⁰, computed in whole numbers.

A row counts in one cell of a column at most, so Σ_j c_kj ≤ n_k over a column, and rounding down
keeps it so: with h = 2⁻³⁰ and d columns

    ‖h z_k‖₂² ≤ Σ_columns ‖h z_k‖₁² ≤ d,    exactly.

A user without rows sends zero. Whole numbers are all that is added, so the sum with a user less the
sum without is z_k, bit for bit, whoever else there is, in any order and in any chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fpfl.measurement.cells import Cells, Ints, places

STEP_BITS = 30
"""A user's weight of 1 is 2 to this power, in whole steps: sums of 2³³ users fit 64 bits."""


@dataclass(frozen=True)
class CodedRows:
    """All rows of some users, as cells.

    Parameters
    ----------
    codes
        Of each column, every row's cell, or `NOWHERE`: (n,) each.
    owner
        Every row's user, by number: (n,), in any order.
    """

    codes: tuple[Ints, ...]
    owner: Ints


def whole_sum(
    chunks: Iterable[CodedRows],
    columns: Sequence[Cells],
    without: Collection[int] = frozenset(),
) -> Ints:
    """Σ_k z_k, (cells,).

    Parameters
    ----------
    chunks
        Rows; all of a user are in one chunk.
    columns
        What their codes are of.
    without
        Users who are left out, by number: those who withdrew.
    """
    left_out = np.array(sorted(without), dtype=np.int64)
    total = np.zeros(sum(each.size for each in columns), dtype=np.int64)
    for rows in chunks:
        stays = np.isin(rows.owner, left_out, invert=True)
        for place, _, cell, whole in _counted(rows, columns, stays):
            np.add.at(total[place], cell, whole)
    return total


def each_sum(rows: CodedRows, columns: Sequence[Cells], users: range) -> Ints:
    """z_k of each of these users, (users, cells); ``rows`` are all rows of theirs."""
    found = np.zeros((len(users), sum(each.size for each in columns)), dtype=np.int64)
    stays = np.ones(len(rows.owner), dtype=bool)
    for place, user, cell, whole in _counted(rows, columns, stays):
        found[user - users.start, place.start + cell] = whole
    return found


def _counted(
    rows: CodedRows, columns: Sequence[Cells], stays: NDArray[np.bool_]
) -> Iterator[tuple[slice, Ints, Ints, Ints]]:
    """Each column's place, and there the users, cells and whole numbers that are not 0."""
    if not len(rows.owner):
        return
    first = rows.owner.min()
    owner = rows.owner - first
    sizes = np.bincount(owner)
    for codes, column, place in zip(rows.codes, columns, places(columns), strict=True):
        there = np.flatnonzero((codes >= 0) & stays)
        key = owner[there] * column.size + codes[there]
        found, count = np.unique(key, return_counts=True)
        user, cell = np.divmod(found, column.size)
        yield place, user + first, cell, (count.astype(np.int64) << STEP_BITS) // sizes[user]
