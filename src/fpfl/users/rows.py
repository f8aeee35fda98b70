r"""Users' vectors, kept in the form they were computed in.

A row of the matrix of users' vectors v^k has (1 + R·G + ...)·p numbers, most of them zero or sums
of others: a user has gradients of a group only if it has samples there. What the third party needs
is norms of blocks of each row, and sums of rows times a scale per user; counts are small and
written down, gradients answer both questions from what was computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.numerics.summing import ByRun, row_norms, tree_sum, weighted_sum, whole_sum
from fpfl.users.layout import Layout
from fpfl.users.precision import repeatable_sums

LOSS, GROUPS, OVERALL = GRADIENTS = ("loss_gradient", "F_gradient", "overall_F_gradient")
CLIPPED = "clipped"

WIDE = 2**16
"""Numbers whose squares are added up together, on a CPU."""


class Gradients(Protocol):
    """The gradients of B users: blocks of v by name."""

    def norms(self, names: Collection[str]) -> Tensor:
        """Every user's ℓ2 norm over the blocks, (B,), in double precision."""
        ...

    def unrounded(self, names: Collection[str]) -> Tensor | None:
        """Which part of its bound a user must leave for the rounding of `whole`; None for none."""
        ...

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Σ_k round(scale_k · block^k) of every block, flat, in whole numbers (int64).

        And every user's Σ z² over them, or None where its norm bounds it already.
        """
        ...

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """Σ_k scale_k · block^k of every block, flat."""
        ...

    def block(self, name: str) -> Tensor:
        """The block written down, (B, ...)."""
        ...

    def without(self, bad: Tensor) -> Self:
        """The same with some users' gradients zero."""
        ...

    def joined(self, more: Self) -> Self:
        """The gradients of one user, with more of its samples."""
        ...


@dataclass(frozen=True)
class UserRows:
    """The vectors of B users.

    Parameters
    ----------
    layout
        What is where in v.
    users
        The users, one for each row.
    gradients
        The blocks of v that are gradients.
    counts, columns
        The other blocks as a matrix with B rows, and which columns each of them has.
    runs
        Of which runs the users are, where there are several: sums are by run then, with one more
        dimension, in front.
    """

    layout: Layout
    users: NDArray[np.int64]
    gradients: Gradients
    counts: Tensor
    columns: dict[str, slice]
    runs: ByRun | None = None

    def __len__(self) -> int:
        return len(self.users)

    def norms(self, names: Collection[str], order: int) -> Tensor:
        """Every row's ℓ1 or ℓ2 norm over the named blocks, of shape (B,)."""
        gradients = [name for name in names if name in GRADIENTS]
        counts = self._columns([name for name in names if name not in GRADIENTS])
        if order == 1:
            if gradients:
                raise ValueError(f"gradients are bounded in ℓ2, not in ℓ1: {gradients}")
            return tree_sum(counts.double().abs(), 1)
        if not gradients:
            return tree_sum(counts.double().square(), 1).sqrt()
        norms = self.gradients.norms(gradients)
        if counts.shape[1]:
            norms = (norms.square() + tree_sum(counts.double().square(), 1)).sqrt()
        taken = self.gradients.unrounded(gradients)
        return norms if taken is None else norms / (1.0 - taken).clamp(min=0.0)

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Σ_k round(scale_k · block^k) of each named block, and every row's Σ z² over them."""
        gradients = [name for name in names if name in GRADIENTS]
        counted = [name for name in names if name not in GRADIENTS]
        totals: dict[str, Tensor] = {}
        squares: Tensor | None = scale.new_zeros(len(self))
        if gradients:
            totals, squares = self.gradients.whole(gradients, scale)
        for name in counted:
            own_columns = self.counts[:, self.columns[name]]
            totals[name], own = whole_sum(scale, own_columns, runs=self.runs)
            squares = None if squares is None else squares + own
        return totals, squares

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """Σ_k s_k times each named block of row k, flat."""
        gradients = [name for name in names if name in GRADIENTS]
        totals = self.gradients.totals(gradients, scale) if gradients else {}
        if self.runs is None:
            summed = weighted_sum(scale, self.counts)
        else:
            summed = self.runs.sum(self.counts.double() * scale.double().unsqueeze(1))
        return totals | {n: summed[..., self.columns[n]] for n in names if n not in totals}

    def without(self, bad: Tensor) -> UserRows:
        """The same with some users' rows zero: 0 · NaN would still be NaN."""
        return replace(
            self,
            gradients=self.gradients.without(bad),
            counts=self.counts.masked_fill(bad.unsqueeze(1), 0.0),
        )

    def joined(self, more: UserRows) -> UserRows:
        """The one user of this, with more of its samples."""
        return replace(
            self,
            gradients=self.gradients.joined(more.gradients),
            counts=self.counts + more.counts,
        )

    def dense(self) -> Tensor:
        """The rows written down, of shape (B, size)."""
        blocks = [self._block(name) for name in self.layout.shapes]
        return torch.cat(blocks, dim=1)

    def some(self, begin: int, end: int) -> UserRows:
        """The rows from one up to another, where gradients are written down and of one run."""
        if begin == 0 and end >= len(self):
            return self
        if self.runs is not None or not isinstance(self.gradients, CellGradients):
            raise ValueError(
                "rows of several runs, or with factored gradients, cannot be taken apart: "
                "compute them with factoring=False, one run at a time"
            )
        return replace(
            self,
            users=self.users[begin:end],
            gradients=self.gradients.some(begin, end),
            counts=self.counts[begin:end],
        )

    def _block(self, name: str) -> Tensor:
        if name == CLIPPED:  # whoever clips will know
            return self.counts.new_zeros(len(self), 1)
        if name in self.columns:
            return self.counts[:, self.columns[name]]
        return self.gradients.block(name).reshape(len(self), -1)

    def _columns(self, names: Collection[str]) -> Tensor:
        places = [self.columns[name] for name in names]
        if all(one.stop == next_.start for one, next_ in pairwise(places)):
            return (
                self.counts[:, places[0].start : places[-1].stop] if places else self.counts[:, :0]
            )
        return torch.cat([self.counts[:, place] for place in places], dim=1)


@dataclass(frozen=True)
class CellGradients:
    r"""The gradients of U cells, which add up to those of users and groups.

        ‖∇F_a^k‖² = ‖Σ_{cells c of k in a} ∇F^c‖²,    Σ_k s_k ∇F_a^k = Σ_c s_{k(c)} 1[c in a] ∇F^c

    Parameters
    ----------
    gradients
        Shape (U, 1 + R, p).
    owner
        Shape (U,): each cell's user.
    member
        Shape (U, G): whether a cell is in a group, as numbers.
    users
        B.
    partition
        Whether every cell is in exactly one group.
    runs
        Of which runs the users are, where there are several.
    """

    gradients: Tensor
    owner: Tensor
    member: Tensor
    users: int
    partition: bool
    runs: ByRun | None = None

    @property
    def one_cell_each(self) -> bool:
        """Whether each user has exactly one cell: then cells are in the order of users."""
        return len(self.gradients) == self.users

    def norms(self, names: Collection[str]) -> Tensor:
        """See `Gradients`."""
        norms = [self._block_norms(name) for name in names]
        return norms[0] if len(norms) == 1 else _added([n.square() for n in norms]).sqrt()

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Gradients`."""
        if self.runs is not None:
            return {name: self._total_by_run(name, scale, self.runs) for name in names}
        return {name: self._total(name, scale) for name in names}

    def _total_by_run(self, name: str, scale: Tensor, runs: ByRun) -> Tensor:
        def scaled(rows: Tensor, by: Tensor) -> Tensor:
            return rows.double() * by.double().reshape(-1, *[1] * (rows.ndim - 1))

        if name != GROUPS:
            places = slice(0, 1) if name == LOSS else slice(1, None)
            return runs.sum(scaled(self._user_rows[:, places], scale)).flatten(1)
        own = scaled(self.gradients[:, 1:], scale[self.owner])
        cells = runs.of(self.owner)
        groups = [cells.sum(scaled(own, member)) for member in self.member.T]
        return torch.stack(groups, dim=2).flatten(1)

    def _block_norms(self, name: str) -> Tensor:
        if name == GROUPS and self.partition:
            # Each cell is a group's own: no two of them add up.
            return self._by_user(tree_sum(self._cell_norms[:, 1:].square(), 1)).sqrt()
        if name == GROUPS:
            squares = self.gradients.new_zeros(self.users, dtype=torch.float64)
            for users, rows in self._group_rows:
                norms = _norms(rows.flatten(1))
                squares.index_add_(0, users, norms * norms)
            return squares.sqrt()
        places = slice(0, 1) if name == LOSS else slice(1, None)
        norms = self._cell_norms if self.one_cell_each else _last_norms(self._user_rows)
        return tree_sum(norms[:, places].square(), 1).sqrt()

    def _total(self, name: str, scale: Tensor) -> Tensor:
        # The very rows whose norms were taken: a sum of scaled cells that cancel would round to
        # something larger than the bound.
        if name == LOSS:
            return weighted_sum(scale, self._user_rows[:, 0])
        if name == OVERALL:
            overall = self._user_rows[:, 1:].unbind(1)
            return torch.cat([weighted_sum(scale, rows) for rows in overall])
        if self.partition or self.one_cell_each:
            by_group = (self.member * scale[self.owner].unsqueeze(1)).T
            rates = self.gradients[:, 1:].unbind(1)
            return torch.stack([weighted_sum(by_group, rows) for rows in rates]).reshape(-1)
        groups = [
            weighted_sum(scale[users], rows.flatten(1)).reshape(rows.shape[1:])
            for users, rows in self._group_rows
        ]
        return torch.stack(groups, dim=1).reshape(-1)

    def unrounded(self, names: Collection[str]) -> Tensor | None:
        """See `Gradients`: rows are written down, and rounded to the nearest."""
        return None

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """See `Gradients`."""
        squares = scale.new_zeros(self.users)
        totals: dict[str, Tensor] = {}
        for name in names:
            totals[name], own = self._whole(name, scale)
            squares = squares + own
        return totals, squares

    def _whole(self, name: str, scale: Tensor) -> tuple[Tensor, Tensor]:
        # The very rows whose norms were taken, as in `_total`.
        if name == LOSS:
            return whole_sum(scale, self._user_rows[:, 0], runs=self.runs)
        if name == OVERALL:
            rates = self._user_rows[:, 1:].unbind(1)
            overall = [whole_sum(scale, rows, runs=self.runs) for rows in rates]
            return torch.cat([t for t, _ in overall], dim=-1), _added([s for _, s in overall])
        if self.partition or self.one_cell_each:
            own = scale[self.owner]
            runs = None if self.runs is None else self.runs.of(self.owner)
            found = [
                whole_sum(own, rows, self.member, runs) for rows in self.gradients[:, 1:].unbind(1)
            ]
            squares = _added([s for _, s in found]) * self.member.double().sum(dim=1)
            total = torch.stack([t for t, _ in found], dim=-3)
            return total.flatten(-3), self._by_user(squares)
        squares = scale.new_zeros(self.users)
        groups = []
        for users, rows in self._group_rows:
            runs = None if self.runs is None else self.runs.of(users)
            total, own = whole_sum(scale[users], rows.flatten(1), runs=runs)
            groups.append(total.reshape(*total.shape[:-1], *rows.shape[1:]))
            squares = squares.index_add(0, users, own)
        return torch.stack(groups, dim=-2).flatten(-3), squares

    def block(self, name: str) -> Tensor:
        """See `Gradients`."""
        if name == LOSS:
            return self._by_user(self.gradients[:, 0])
        rates = self.gradients[:, 1:]
        if name == OVERALL:
            return self._by_user(rates)
        return self._by_user(rates.unsqueeze(2) * self.member[:, None, :, None])

    def some(self, begin: int, end: int) -> Self:
        """The gradients of the users from one up to another."""
        if self.one_cell_each:
            cells: slice | Tensor = slice(begin, end)
        else:
            cells = ((self.owner >= begin) & (self.owner < end)).nonzero().squeeze(1)
            # In the order of users, as it must be where each of these has one cell.
            cells = cells[torch.argsort(self.owner[cells], stable=True)]
        return replace(
            self,
            gradients=self.gradients[cells],
            owner=self.owner[cells] - begin,
            member=self.member[cells],
            users=min(end, self.users) - begin,
        )

    def without(self, bad: Tensor) -> Self:
        """See `Gradients`."""
        cells = bad[self.owner].reshape(-1, 1, 1)
        return replace(self, gradients=self.gradients.masked_fill(cells, 0.0))

    def joined(self, more: Self) -> Self:
        """See `Gradients`: cells of a kind add up."""
        cells = torch.cat([self.gradients, more.gradients])
        # One column for everybody: without groups there would be nothing to tell apart by.
        member = torch.cat([self.member, more.member])
        member = torch.cat([member.new_ones(len(member), 1), member], dim=1)
        member, kind = torch.unique(member, dim=0, return_inverse=True)
        return replace(
            self,
            gradients=_added_by(kind, cells, len(member)),
            owner=kind.new_zeros(len(member)),
            member=member[:, 1:],
        )

    @cached_property
    def _cell_norms(self) -> Tensor:
        """‖∇L^c‖ and ‖∇F_r^c‖, of shape (U, 1 + R)."""
        return _last_norms(self.gradients)

    @cached_property
    def _user_rows(self) -> Tensor:
        """∇L^k and the overall ∇F_r^k, of shape (B, 1 + R, p)."""
        return self._by_user(self.gradients)

    @cached_property
    def _group_rows(self) -> list[tuple[Tensor, Tensor]]:
        """For every group the users who have samples in it, and their ∇F_r, (users, R, p)."""
        found = []
        for member in self.member.T:
            cells = member.nonzero().squeeze(1)
            users, place = torch.unique(self.owner[cells], return_inverse=True)
            rates = self.gradients[cells, 1:]
            found.append((users, _added_by(place, rates, len(users))))
        return found

    def _by_user(self, cells: Tensor) -> Tensor:
        """Add up cells of the same user."""
        if self.one_cell_each:
            return cells
        return _added_by(self.owner, cells, self.users)


def _added_by(owner: Tensor, cells: Tensor, owners: int) -> Tensor:
    # In the order of cells, on a GPU too: three numbers have several sums.
    with repeatable_sums(cells.device):
        return cells.new_zeros(owners, *cells.shape[1:]).index_add_(0, owner, cells)


def _norms(rows: Tensor) -> Tensor:
    # In double precision: millions of float32 squares added up in float32 come out too small.
    width = rows.shape[1]
    if rows.is_cuda or not len(rows):
        return row_norms(rows)
    if width >= WIDE:
        # A copy of one row at a time, always in the same place: a copy of all of them is slow to
        # get, and where a row lies in memory may matter to a kernel.
        row = rows.new_empty(width, dtype=torch.float64)
        return torch.stack([torch.dot(row.copy_(each), row) for each in rows]).sqrt_()
    return torch.cat([row_norms(some) for some in torch.split(rows, WIDE // max(1, width))])


def _added(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0])


def _last_norms(rows: Tensor) -> Tensor:
    return _norms(rows.flatten(0, 1)).reshape(rows.shape[:2])
