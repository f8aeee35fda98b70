r"""UpdateMultiplier of Algorithm 1: the modified method of differential multipliers.

(Platt and Barr, 1987; the paper's sections 2.3 and 3.1.)

With the difference D_a = F/n' − F_a/n'_a of every group a, h_a = |D_a| − α and g_a = max(h_a, 0):

    λ ← λ + γ g
    direction = ∇L/N + Σ_a (λ_a + c g_a) ∇g_a,   ∇g_a = s_a (∇F/n' − ∇F_a/n'_a),

s_a = sign(D_a) where h_a ≥ 0 and 0 elsewhere. Writing κ_a = s_a (λ_a + c g_a), and ∇F = Σ_a ∇F_a
where the groups partition the samples, the constraint's part is Σ_a β_a ∇F_a with
β_a = Σ_b κ_b/n' − κ_a/n'_a. With several rates these sums run over the rates too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fpfl.compat import formerly
from fpfl.fairness.totals import Totals
from fpfl.methods.base import MethodState, register


@register(
    "mmdm",
    "the modified method of differential multipliers (FPFL)",
    words={"tolerance": "constraint"},
)
@formerly
@dataclass(frozen=True)
class MMDM:
    """MMDM; BMDM, the basic method, is ``damping=0``.

    Parameters
    ----------
    damping
        c, the weight of the quadratic penalty that makes the neighbourhood of a solution convex.
    multiplier_lr
        γ, the multipliers' learning rate.
    tolerance
        α to train towards; the constraint's own when it is not given. (Selection and verdicts
        always use the constraint's.)

    Notes
    -----
    g ≥ 0, so λ never comes down: faithful to the paper.
    """

    damping: float = 2.0
    multiplier_lr: float = 0.01
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.damping, self.multiplier_lr, self.tolerance)

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[MethodState, Tensor]:
        """One step of the multipliers, then the direction for the parameters."""
        alpha = tolerance if self.tolerance is None else self.tolerance
        difference = totals.differences()
        h = difference.abs() - alpha
        # A NaN (a count below its noise floor) compares false: skipped this round.
        active = h >= 0
        g = torch.where(active, h, torch.zeros_like(h))
        multipliers = state.multipliers + self.multiplier_lr * g
        strength = multipliers + self.damping * g
        kappa = torch.where(active, difference.sign() * strength, torch.zeros_like(h))
        direction = totals.loss_gradient / totals.normaliser + constraint_direction(kappa, totals)
        return replace(state, multipliers=multipliers), direction


@register("bmdm", "the basic method of differential multipliers", words={"tolerance": "constraint"})
@formerly
def BMDM(multiplier_lr: float = 0.01, tolerance: float | None = None) -> MMDM:
    """The basic method of differential multipliers: MMDM without the quadratic penalty."""
    return MMDM(damping=0.0, multiplier_lr=multiplier_lr, tolerance=tolerance)


def constraint_direction(kappa: Tensor, totals: Totals) -> Tensor:
    """Σ_r Σ_a κ_{r,a} (∇F_r/n'_r − ∇F_{r,a}/n'_{r,a}), for κ of shape (R, G).

    Where κ is not 0 both counts are known; elsewhere the divisor only avoids 0/0.
    """
    overall_n, n = totals.divisors()
    on_groups = kappa / n
    on_overall = kappa.sum(dim=1) / overall_n
    by_group = on_groups.flatten() @ totals.F_gradient.flatten(0, 1)
    return on_overall @ totals.overall_F_gradient - by_group


def check_settings(damping: float, multiplier_lr: float, tolerance: float | None) -> None:
    """Refuse a damping, a learning rate of the multipliers or a tolerance that cannot be one."""
    if not damping >= 0.0:
        raise ValueError(f"damping is {damping}; it must be 0 (BMDM) or more")
    check_rate(multiplier_lr)
    if tolerance is not None and not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance is {tolerance}; it must be in [0, 1)")


def check_rate(rate: float) -> None:
    """Refuse a learning rate of the multipliers that cannot be one."""
    if not rate >= 0.0:
        raise ValueError(f"the multipliers' learning rate is {rate}; it must be 0 or more")
