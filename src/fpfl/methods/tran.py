r"""Tran, Fioretto and Van Hentenryck (2021), as the paper describes it, without their privacy.

    λ_a ← min(λ_a + γ |F/n' − F_a/n'_a|, λ_max)
    direction = ∇L/N + Σ_a λ_a |∇F/n' − ∇F_a/n'_a|      (elementwise, the sign is ignored)

There is no tolerance (α = 0); λ_max keeps the multipliers from growing without end. The
elementwise absolute value is no linear combination of gradients: a method has to see totals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fpfl.compat import formerly
from fpfl.fairness.totals import Totals
from fpfl.methods.base import MethodState, register
from fpfl.methods.mmdm import check_rate


@register("tran", "Tran et al.'s dual update")
@formerly
@dataclass(frozen=True)
class Tran:
    """The method of Tran et al.

    Parameters
    ----------
    multiplier_lr
        γ, the multipliers' learning rate.
    max_multiplier
        λ_max.
    """

    multiplier_lr: float = 0.01
    max_multiplier: float = 0.05

    def __post_init__(self) -> None:
        check_rate(self.multiplier_lr)
        if not self.max_multiplier >= 0.0:
            raise ValueError(f"max_multiplier is {self.max_multiplier}; it must be 0 or more")

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """One step of the multipliers, then the direction; the tolerance is not used."""
        difference = totals.differences()
        known = ~difference.isnan()
        violation = torch.where(known, difference.abs(), torch.zeros_like(difference))
        most = torch.as_tensor(self.max_multiplier, dtype=violation.dtype, device=violation.device)
        multipliers = torch.minimum(state.multipliers + self.multiplier_lr * violation, most)
        overall_n, n = totals.divisors()
        overall = totals.overall_F_gradient / overall_n.unsqueeze(-1)
        groups = totals.F_gradient / n.unsqueeze(-1)
        slopes = (overall.unsqueeze(1) - groups).abs()
        weights = torch.where(known, multipliers, torch.zeros_like(multipliers))
        direction = totals.loss_gradient / totals.normaliser
        return (
            replace(state, multipliers=multipliers),
            direction + torch.einsum("rg,rgp->p", weights, slopes),
        )
