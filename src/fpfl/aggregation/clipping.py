r"""Clipping: bounding what one user can add to the sum, and adding up.

A block of gradients (or the paper's joint vector) is scaled by min(1, C/‖v^k‖₂). A block of
counts is scaled by min(1, C/‖v^k‖₁): in the basis (F, n' − F) its ℓ1 norm is Σ n', which does
not depend on how the model does, so the measured rate stays what it is; and ‖·‖₂ ≤ ‖·‖₁ ≤ C.

Where it is asked for, v also has the number of users whose gradients (or joint vector) were scaled
down. A user's part in it is b − (1 − C_b), where b is 1 if it was clipped and 0 if not: 0 or 1 with
the bound C_b = 1, and −½ or ½ with C_b = ½. It is made here: nobody else knows who was clipped.

A clipped block is then written in whole steps of h = 2⁻³⁸ C, each user's on its own and rounded to
the nearest, and its norm is looked at once more in whole numbers: one above

    2³⁸ (1 + 2⁻²¹) + √d/2    for the d numbers of the block

was not clipped, and is left out. Whole numbers are all that is added (`fpfl.numerics.summing`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from fpfl.numerics.summing import STEP_BITS, ByRun, tree_sum, weighted_sum, whole_sum
from fpfl.privacy.plan import Block
from fpfl.privacy.settings import CLIPPED, COUNTS, GRADIENTS, JOINT, SELECTION

ROUNDING = 2.0**-21
"""Room for norms and scales in double precision, as a part of the bound: a few times 2⁻⁵³ for each
of a row's numbers, in sums that round pair by pair."""


class Rows(Protocol):
    """The vectors of several users, in whatever form they were computed.

    Clipping asks for norms and for sums of scaled rows, never for the rows themselves.
    """

    @property
    def runs(self) -> ByRun | None:
        """Of which runs the rows are, where there are several."""
        ...

    def __len__(self) -> int: ...

    def norms(self, names: Collection[str], order: int) -> Tensor:
        """Every row's norm over the named blocks, in double precision."""
        ...

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Σ_k round(scale_k · block^k) of each named block, and every row's Σ z² over them.

        None in place of the squares where the norms bound the rounded rows already.
        """
        ...

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """Σ_k scale_k · (each named block of row k)."""
        ...

    def without(self, bad: Tensor) -> Rows:
        """The same with some rows zero."""
        ...


@dataclass(frozen=True)
class ClipRule:
    """One block's bound: the parts of v in it, where they stand, its bound, its norm's order.

    The bound is a number, or a tensor with one for each row, where rows belong to several runs.
    """

    name: str
    parts: dict[str, slice]
    bound: Any
    order: int

    @property
    def places(self) -> tuple[slice, ...]:
        """Where the block stands in v."""
        return tuple(self.parts.values())

    @property
    def size(self) -> int:
        """How many numbers of v the block has."""
        return sum(int(place.stop - place.start) for place in self.places)

    @property
    def step(self) -> Any:
        """h: what one in whole numbers stands for."""
        return self.bound * 2.0**-STEP_BITS

    @property
    def most(self) -> float:
        """The largest norm of a clipped row, in steps."""
        return 2.0**STEP_BITS * (1.0 + ROUNDING) + 0.5 * math.sqrt(self.size)


@dataclass(frozen=True)
class DenseRows:
    """Users' vectors written down, one row each."""

    rows: Tensor
    places: dict[str, slice]
    runs: ByRun | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def norms(self, names: Collection[str], order: int) -> Tensor:
        """See `Rows`."""
        parts = [self.rows[:, self.places[name]].double() for name in names]
        if order == 1:
            return sum_of(tree_sum(part.abs(), 1) for part in parts)
        return sum_of(tree_sum(part.square(), 1) for part in parts).sqrt()

    def whole(
        self, names: Collection[str], scale: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """See `Rows`."""
        found = {
            name: whole_sum(scale, self.rows[:, self.places[name]], runs=self.runs)
            for name in names
        }
        return {n: total for n, (total, _) in found.items()}, sum_of(s for _, s in found.values())

    def totals(self, names: Collection[str], scale: Tensor) -> dict[str, Tensor]:
        """See `Rows`."""
        return {name: weighted_sum(scale, self.rows[:, self.places[name]]) for name in names}

    def without(self, bad: Tensor) -> DenseRows:
        """See `Rows`."""
        return replace(self, rows=self.rows.masked_fill(bad.unsqueeze(1), 0.0))


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


def at_bound(rules: Sequence[ClipRule], bound: float) -> tuple[ClipRule, ...]:
    """The rules with another bound of the gradients, or of the joint vector."""
    return tuple(
        replace(rule, bound=bound) if rule.name in (JOINT, GRADIENTS) else rule for rule in rules
    )


def scales(rows: Rows, rules: Sequence[ClipRule]) -> tuple[list[Tensor], Tensor]:
    """Each rule's min(1, C/‖·‖) for every row, and which rows have no usable norm.

    A norm that is not a number, infinite, or so large that C/‖·‖ would lose digits. In place of
    the scale of the clipped users' count stands what a user sends for it (the module's b).
    """
    sent = [rule for rule in rules if rule.name != CLIPPED]
    norms = [rows.norms(rule.parts, rule.order) for rule in sent]
    tiny = torch.finfo(norms[0].dtype).tiny
    scale = {
        rule.name: (rule.bound / each.clamp(min=tiny)).clamp_(max=1.0)
        for rule, each in zip(sent, norms, strict=True)
    }
    for rule in rules:
        if rule.name == CLIPPED:
            gradients = scale[JOINT] if JOINT in scale else scale[GRADIENTS]
            scale[CLIPPED] = (gradients < 1.0).to(gradients.dtype) - (1.0 - rule.bound)
    # As far as single precision reaches, which rows may be in.
    limit = torch.finfo(torch.float32).max * reduce(_smaller, (r.bound for r in sent), 1.0)
    return [scale[rule.name] for rule in rules], ~(sum(norms[1:], norms[0]) < limit)


def _smaller(one: Any, other: Any) -> Any:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        like = one if isinstance(one, Tensor) else other
        return torch.minimum(
            *(torch.as_tensor(each).to(like).expand_as(like) for each in (one, other))
        )
    return min(one, other)


def clip(rows: DenseRows, rules: Sequence[ClipRule]) -> Tensor:
    """Clip every row (user), block by block."""
    scale, bad = scales(rows, rules)
    clipped = rows.without(bad).rows.clone()
    for rule, each in zip(rules, scale, strict=True):
        kept = each.masked_fill(bad, 0.0).unsqueeze(1)
        for place in rule.places:
            clipped[:, place] = (kept if rule.name == CLIPPED else clipped[:, place] * kept).to(
                clipped.dtype
            )
    return clipped


def whole_total(rows: Rows, rules: Sequence[ClipRule]) -> Tensor:
    """The sum of the clipped rows in whole steps (int64), each row rounded on its own.

    Of rows of several runs it is one for each run. A user whose numbers are not finite sends zero:
    an error would tell that it was there.
    """
    scale, bad = scales(rows, rules)
    # A GPU would have to be waited for to know whether there are any; zeroing costs less.
    if bad.is_cuda or bool(bad.any()):
        rows, scale = rows.without(bad), [each.masked_fill(bad, 0.0) for each in scale]
    size = max(int(place.stop) for rule in rules for place in rule.places)
    runs = rows.runs
    shape = (size,) if runs is None else (runs.count, size)
    total = scale[0].new_empty(shape, dtype=torch.int64)
    for rule, each in zip(rules, scale, strict=True):
        if rule.name == CLIPPED:
            (place,) = rule.places
            clipped = (each / rule.step).round().long().unsqueeze(1)
            total[..., place] = clipped.sum(dim=0) if runs is None else runs.sum(clipped)
            continue
        for name, block in _whole_block(rows, rule, each).items():
            total[..., rule.parts[name]] = block
    return total


def _whole_block(rows: Rows, rule: ClipRule, scale: Tensor) -> dict[str, Tensor]:
    steps = scale / rule.step
    total, squares = rows.whole(rule.parts, steps)
    if squares is None:
        return total
    beyond = ~(squares <= rule.most**2)
    if not bool(beyond.any()):
        return total
    # A row that is longer than clipping left it was not clipped. Whole numbers can be taken off
    # the sum again, exactly.
    off, _ = rows.whole(rule.parts, steps.masked_fill(~beyond, 0.0))
    return {name: block - off[name] for name, block in total.items()}


def clipped_sum(rows: Rows, rules: Sequence[ClipRule]) -> Tensor:
    """The sum of the clipped rows in v's own units, in double precision."""
    total = whole_total(rows, rules)
    return total * steps_of(rules, len(total), total.device)


def steps_of(rules: Sequence[ClipRule], size: int, device: torch.device) -> Tensor:
    """h of every number of v."""
    steps = torch.zeros(size, dtype=torch.float64)
    for rule in rules:
        for place in rule.places:
            steps[place] = rule.step
    return steps.to(device)


def sum_of(values: Iterable[Tensor]) -> Tensor:
    """Add up tensors in the order they come."""
    first, *rest = values
    return sum(rest, first)


def _kind(name: str) -> str:
    if name.endswith("gradient"):
        return GRADIENTS
    if name == CLIPPED:
        return CLIPPED
    return SELECTION if name in ("hits", "misses", "table") else COUNTS
