r"""The layout of v: which numbers of the flat vector are what.

    v^k = [∇L, F_a, ∇F_a, n'_a for every rate and group a]                      (the paper's)

or, where users send one gradient of an objective with broadcast weights (`fpfl.OneGradient`),

    v^k = [∇(L + N Σ β_a F_a), F_a, n'_a for every rate and group a],

followed by the whole's own F, ∇F, n' where the groups do not partition the samples, by the hits and
misses that model selection needs, and, where it is asked for, by the number of clipped users.
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

Basis = Literal["paper", "split"]
Form = Literal["paper", "one-gradient"]


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
        Whether hits and misses are in v.
    clipped
        Whether the number of clipped users is in v. Users do not compute it: clipping does.
    form
        The paper's, or one gradient (see the module).
    """

    parameters: int
    rates: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    partition: bool = True
    basis: Basis = "paper"
    selection: bool = True
    clipped: bool = False
    form: Form = "paper"

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
            shapes |= {"hits": (1,), "misses": (1,)}
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
            hits=parts["hits"][0] if self.selection else None,
            misses=parts["misses"][0] if self.selection else None,
            clipped=parts["clipped"][0] if self.clipped else None,
        )
