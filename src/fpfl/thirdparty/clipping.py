r"""Clipping: bounding what one user can add to the sum.

A block of gradients (or the paper's joint vector) is scaled by min(1, C/‖v^k‖₂). A block of
counts is scaled by min(1, C/‖v^k‖₁): in the basis (F, n' − F) its ℓ1 norm is Σ n', which does
not depend on how the model does, so the measured rate stays what it is; and ‖·‖₂ ≤ ‖·‖₁ ≤ C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fpfl.privacy.plan import Block
from fpfl.privacy.settings import COUNTS, GRADIENTS, JOINT, SELECTION


@dataclass(frozen=True)
class ClipRule:
    """One block's bound: where it stands in v, its bound and the order of its norm."""

    name: str
    places: tuple[slice, ...]
    bound: float
    order: int

    def norms(self, rows: Tensor) -> Tensor:
        """The block's norm for every row (user)."""
        parts = [torch.linalg.vector_norm(rows[:, p], self.order, dim=1) for p in self.places]
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), self.order, dim=0)
        return norms


def clip_rules(blocks: Sequence[Block], names: dict[str, slice]) -> tuple[ClipRule, ...]:
    """Find the places of the plan's blocks in a layout, given its named slices.

    Every number of v must belong to exactly one block: one left out would be unclipped.
    """
    kinds = {name: _kind(name) for name in names}
    present = {block.name for block in blocks}
    rules = []
    for block in blocks:
        wanted = (GRADIENTS, COUNTS) if block.name == JOINT else (block.name,)
        places = _merge([names[name] for name, kind in kinds.items() if kind in wanted])
        order = 1 if block.name in (COUNTS, SELECTION) else 2
        if places:
            rules.append(ClipRule(block.name, places, block.bound, order))
    covered = sum(place.stop - place.start for rule in rules for place in rule.places)
    if covered != max(place.stop for place in names.values()):
        raise ValueError(
            f"the blocks {sorted(present)} do not cover each number of v exactly once: {kinds}"
        )
    return tuple(rules)


def clip(rows: Tensor, rules: Sequence[ClipRule]) -> Tensor:
    """Clip every row (user) block by block."""
    rows = _without_bad_rows(rows).clone()
    for rule in rules:
        scale = _scale(rows, rule).unsqueeze(1)
        for place in rule.places:
            rows[:, place] *= scale
    return rows


def clipped_sum(rows: Tensor, rules: Sequence[ClipRule]) -> Tensor:
    """Sum of the clipped rows, without writing the clipped rows down."""
    rows = _without_bad_rows(rows)
    total = rows.new_empty(rows.shape[1])
    for rule in rules:
        scale = _scale(rows, rule)
        for place in rule.places:
            total[place] = scale @ rows[:, place]
    return total


def _scale(rows: Tensor, rule: ClipRule) -> Tensor:
    return (rule.bound / rule.norms(rows).clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1.0)


def _without_bad_rows(rows: Tensor) -> Tensor:
    """A user whose numbers are not finite sends zero: an error would tell that it was there."""
    good = rows.isfinite().all(dim=1)
    return torch.where(good.unsqueeze(1), rows, torch.zeros_like(rows))


def _kind(name: str) -> str:
    if name.endswith("gradient"):
        return GRADIENTS
    return SELECTION if name in ("hits", "misses") else COUNTS


def _merge(places: list[slice]) -> tuple[slice, ...]:
    """Join neighbouring slices: the joint block is one run, and one product, not seven."""
    merged: list[slice] = []
    for place in sorted(places, key=lambda p: p.start):
        if merged and merged[-1].stop == place.start:
            merged[-1] = slice(merged[-1].start, place.stop)
        else:
            merged.append(place)
    return tuple(merged)
