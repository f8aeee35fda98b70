r"""The layout of v: which numbers of the flat vector are what.

    v^k = [∇L, F_a, ∇F_a, n'_a for every rate and group a]                      (the paper's)

or, where users send one gradient of an objective with broadcast weights (`fpfl.OneGradient`),

    v^k = [∇(L + N Σ β_a F_a), F_a, n'_a for every rate and group a],

followed by the whole's own F, ∇F, n' where the groups do not partition the samples, by what model
selection needs, and, where it is asked for, by the number of clipped users. Selection needs the
confusion table, T_{ij} samples of class i that the model takes for class j; its ℓ1 norm is n^k, as
that of hits and misses is, which stand in its place in regressions and where classes are many.
Counts come in one of two bases: the paper's (F, n'), or "split", (F, n' − F), in which a hit and an
error have the same norm, so that scaling a user's counts cannot bias the rate that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fpfl.fairness.totals import SMALLEST_COUNT, Totals
from fpfl.numerics.summing import tree_sum

Basis = Literal["paper", "split"]
Form = Literal["paper", "one-gradient"]

MOST_CLASSES = 10
"""With more classes v has hits and misses: the noise of accuracy grows with the table's C² numbers,
and a cohort has few samples of each."""


@dataclass(frozen=True)
class Layout:
    """Names, places and shapes of the blocks of v.

    Parameters
    ----------
    parameters
        p, the number of trainable parameters.
    rates, groups
        Names; both empty without a constraint.
    partition
        Whether the groups partition the samples, so that the overall sums need no blocks.
    basis
        How counts are written (see the module).
    selection
        Whether the confusion table, or hits and misses, are in v.
    clipped
        Whether the number of clipped users is in v. Users do not compute it: clipping does.
    form
        The paper's, or one gradient (see the module).
    classes
        C, where v has the confusion table; None where it has hits and misses (`table_classes`).
    """

    parameters: int
    rates: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    partition: bool = True
    basis: Basis = "paper"
    selection: bool = True
    clipped: bool = False
    form: Form = "paper"
    classes: int | None = None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The blocks' shapes, in the order of v."""
        p, r, g = self.parameters, len(self.rates), len(self.groups)
        shapes: dict[str, tuple[int, ...]] = {"loss_gradient": (p,)}
        if r:
            shapes |= {"F": (r, g), "F_gradient": (r, g, p), "n": (r, g)}
            if not self.partition:
                shapes |= {"overall_F": (r,), "overall_F_gradient": (r, p), "overall_n": (r,)}
        if self.form == "one-gradient":
            shapes = {
                n: s for n, s in shapes.items() if n not in ("F_gradient", "overall_F_gradient")
            }
        if self.selection:
            if self.classes is None:
                shapes |= {"hits": (1,), "misses": (1,)}
            else:
                shapes |= {"table": (self.classes, self.classes)}
        if self.clipped:
            shapes |= {"clipped": (1,)}
        return shapes

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each block stands in v."""
        places, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + torch.Size(shape).numel()
            places[name] = slice(start, stop)
            start = stop
        return places

    @property
    def size(self) -> int:
        """The length of v."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def totals(
        self,
        v: Tensor,
        normaliser: float,
        smallest_count: float = SMALLEST_COUNT,
        count_noise: float = 0.0,
    ) -> Totals:
        """Take a summed vector apart.

        ``normaliser`` is the public N that the loss is divided by, ``smallest_count`` the public
        number below which a noisy count says nothing, ``count_noise`` the standard deviation of
        the noise on F_a and on n'_a, or n'_a − F_a.
        """
        if v.shape != (self.size,):
            raise ValueError(f"v has shape {tuple(v.shape)}; this layout has ({self.size},)")
        parts = {name: v[place].reshape(self.shapes[name]) for name, place in self.slices.items()}
        r, g, p = len(self.rates), len(self.groups), self.parameters
        F = parts.get("F", v.new_zeros(r, g))
        n = parts.get("n", v.new_zeros(r, g))
        # Zeros without memory of their own, where v has none.
        none = v.new_zeros(())
        F_gradient = parts.get("F_gradient", none.expand(r, g, p))
        if self.basis == "split":
            n = n + F
        if self.partition:
            overall_F, overall_n = F.sum(dim=1), n.sum(dim=1)
            overall_F_gradient = (
                F_gradient.sum(dim=1) if "F_gradient" in parts else none.expand(r, p)
            )
        else:
            overall_F, overall_n = parts["overall_F"], parts["overall_n"]
            overall_F_gradient = parts.get("overall_F_gradient", none.expand(r, p))
            if self.basis == "split":
                overall_n = overall_n + overall_F
        table = parts.get("table")
        hits, misses = parts.get("hits"), parts.get("misses")
        return Totals(
            loss_gradient=parts["loss_gradient"],
            normaliser=normaliser,
            smallest=smallest_count,
            noise=count_noise,
            F=F,
            n=n,
            F_gradient=F_gradient,
            overall_F=overall_F,
            overall_n=overall_n,
            overall_F_gradient=overall_F_gradient,
            hits=_right(table) if hits is None else hits[0],
            misses=_wrong(table) if misses is None else misses[0],
            table=table,
            clipped=parts["clipped"][0] if self.clipped else None,
        )


def table_classes(classes: int | None) -> int | None:
    """The classes of the confusion table in v; None for hits and misses (`MOST_CLASSES`)."""
    return classes if classes is not None and classes <= MOST_CLASSES else None


# Pair by pair: a sum over both dimensions could have other bits where several runs are mapped.


def _right(table: Tensor | None) -> Tensor | None:
    return None if table is None else tree_sum(table.diagonal(), 0)


def _wrong(table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    C = len(table)
    # What lies between two numbers of the diagonal: C − 1 rows of C.
    return tree_sum(table.flatten()[1:].reshape(C - 1, C + 1)[:, :C].flatten(), 0)
