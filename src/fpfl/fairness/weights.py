r"""Weights: what the server broadcasts beside w where users send one gradient.

With β_{r,a} for every rate r and group a, and β_r for the whole, a user's objective is

    L + N Σ_r (β_r F_r + Σ_a β_{r,a} F_{r,a})  =  Σ_i (ℓ_i + Σ_r b_{r,i} f_r(i)),
    b_{r,i} = N 1[i ∈ d'_r] (β_r + Σ_{a ∋ i} β_{r,a}):

a sample's weight is the sum over the groups that it is in. They are functions of totals that were
released, so sending them to everybody tells nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """N β, and the public range that a sample's weight is kept in.

    Parameters
    ----------
    groups, overall
        N β_{r,a} of shape (R, G), and N β_r of shape (R,).
    low, high
        The least and the largest weight that a sample's loss may have.
    """

    groups: Tensor
    overall: Tensor
    low: float
    high: float

    @classmethod
    def nothing(cls, groups: int, rates: int, like: Tensor) -> Weights:
        """β = 0: the objective is the loss."""
        return cls(like.new_zeros(rates, groups), like.new_zeros(rates), 1.0, 1.0)

    def of_samples(self, conditions: Tensor, member: Tensor) -> Tensor:
        """b_{r,i} of shape (R, n), for conditions met (R, n) and groups belonged to (n, G)."""
        # Group by group: the bits of a product would depend on the samples' places in it.
        total = self.overall.to(member.dtype).unsqueeze(1).expand(-1, len(member))
        for groups, own in zip(self.groups.to(member.dtype).T, member.T, strict=True):
            total = total + groups.unsqueeze(1) * own
        return conditions * total
