r"""Clipping: bounding what one user can add to the sum.

A block of gradients (or the paper's joint vector) is scaled by min(1, C/‖v^k‖₂). A block of
counts is scaled by min(1, C/‖v^k‖₁): in the basis (F, n' − F) its ℓ1 norm is Σ n', which does
not depend on how the model does, so the measured rate stays what it is; and ‖·‖₂ ≤ ‖·‖₁ ≤ C.

Where it is asked for, v also has the number of users whose gradients (or joint vector) were scaled
down. A user's part in it is 0 or 1, made here: nobody else knows who was clipped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fpfl.privacy.plan import Block
from fpfl.privacy.settings import CLIPPED, COUNTS, GRADIENTS, JOINT, SELECTION
from fpfl.summing import weighted_sum


class Rows(Protocol):
    """The vectors of several users, in whatever form they were computed.

    Clipping asks for norms and for sums of scaled rows, never for the rows themselves.
    """

    def __len__(self) -> int: ...

    def norms(self, names: Collection[str], order: int) -> Tensor:
        """Every row's norm over the named blocks."""
        ...

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """Σ_k scale_k · (each named block of row k)."""
        ...

    def without(self, bad: Tensor) -> Rows:
        """The same with some rows zero."""
        ...


@dataclass(frozen=True)
class ClipRule:
    """One block's bound: the parts of v in it, where they stand, its bound, its norm's order."""

    name: str
    parts: dict[str, slice]
    bound: float
    order: int

    @property
    def places(self) -> tuple[slice, ...]:
        """Where the block stands in v."""
        return tuple(self.parts.values())

    @property
    def size(self) -> int:
        """How many numbers of v the block has."""
        return sum(int(place.stop - place.start) for place in self.places)


@dataclass(frozen=True)
class DenseRows:
    """Users' vectors written down, one row each."""

    rows: Tensor
    places: dict[str, slice]

    def __len__(self) -> int:
        return len(self.rows)

    def norms(self, names: Collection[str], order: int) -> Tensor:
        """See `Rows`."""
        parts = [
            torch.linalg.vector_norm(
                self.rows[:, self.places[name]], order, dim=1, dtype=torch.float64
            )
            for name in names
        ]
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
        return norms.to(self.rows.dtype)

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Rows`."""
        return {name: weighted_sum(scale, self.rows[:, self.places[name]]) for name in names}

    def without(self, bad: Tensor) -> DenseRows:
        """See `Rows`."""
        return DenseRows(self.rows.masked_fill(bad.unsqueeze(1), 0.0), self.places)


def clip_rules(blocks: Sequence[Block], names: dict[str, slice]) -> tuple[ClipRule, ...]:
    """Find the places of the plan's blocks in a layout, given its named slices.

    Every number of v must belong to exactly one block: one left out would be unclipped.
    """
    kinds = {name: _kind(name) for name in names}
    present = {block.name for block in blocks}
    rules = []
    for block in blocks:
        wanted = (GRADIENTS, COUNTS) if block.name == JOINT else (block.name,)
        parts = {name: names[name] for name, kind in kinds.items() if kind in wanted}
        order = 1 if block.name in (COUNTS, SELECTION, CLIPPED) else 2
        if parts:
            rules.append(ClipRule(block.name, parts, block.bound, order))
    covered = sum(rule.size for rule in rules)
    if covered != max(place.stop for place in names.values()):
        raise ValueError(
            f"the blocks {sorted(present)} do not cover each number of v exactly once: {kinds}"
        )
    return tuple(rules)


def scales(rows: Rows, rules: Sequence[ClipRule]) -> tuple[list[Tensor], Tensor]:
    """Each rule's min(1, C/‖·‖) for every row, and which rows have no usable norm.

    A norm that is not a number, infinite, or so large that C/‖·‖ would lose digits. In place of
    the scale of the clipped users' count stands the count: 1 where the gradients' is below 1.
    """
    sent = [rule for rule in rules if rule.name != CLIPPED]
    norms = [rows.norms(rule.parts, rule.order) for rule in sent]
    tiny = torch.finfo(norms[0].dtype).tiny
    scale = {
        rule.name: (rule.bound / each.clamp(min=tiny)).clamp_(max=1.0)
        for rule, each in zip(sent, norms, strict=True)
    }
    if len(sent) < len(rules):
        gradients = scale[JOINT] if JOINT in scale else scale[GRADIENTS]
        scale[CLIPPED] = (gradients < 1.0).to(gradients.dtype)
    limit = min(min(rule.bound for rule in sent) / tiny, torch.finfo(norms[0].dtype).max)
    return [scale[rule.name] for rule in rules], ~(sum(norms[1:], norms[0]) < limit)


def clip(rows: DenseRows, rules: Sequence[ClipRule]) -> Tensor:
    """Clip every row (user), block by block."""
    scale, bad = scales(rows, rules)
    clipped = rows.without(bad).rows.clone()
    for rule, each in zip(rules, scale, strict=True):
        kept = each.masked_fill(bad, 0.0).unsqueeze(1)
        for place in rule.places:
            clipped[:, place] = kept if rule.name == CLIPPED else clipped[:, place] * kept
    return clipped


def clipped_sum(rows: Rows, rules: Sequence[ClipRule]) -> Tensor:
    """Sum of the clipped rows, in double precision and without writing them down.

    A user whose numbers are not finite sends zero: an error would tell that it was there.
    """
    scale, bad = scales(rows, rules)
    # A GPU would have to be waited for to know whether there are any; zeroing costs less.
    if bad.is_cuda or bool(bad.any()):
        rows, scale = rows.without(bad), [each.masked_fill(bad, 0.0) for each in scale]
    return _scaled_sum(rows, rules, scale)


def _scaled_sum(rows: Rows, rules: Sequence[ClipRule], scale: list[Tensor]) -> Tensor:
    size = max(int(place.stop) for rule in rules for place in rule.places)
    total = scale[0].new_empty(size, dtype=torch.float64)
    for rule, each in zip(rules, scale, strict=True):
        if rule.name == CLIPPED:
            (place,) = rule.places
            total[place] = each.sum()
            continue
        for name, block in rows.totals(rule.parts, each).items():
            total[rule.parts[name]] = block
    return total


def _kind(name: str) -> str:
    if name.endswith("gradient"):
        return GRADIENTS
    if name == CLIPPED:
        return CLIPPED
    return SELECTION if name in ("hits", "misses") else COUNTS
