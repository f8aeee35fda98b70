r"""One gradient for each user (FPFL-1G): the paper's constraint at plain private FL's noise.

The constraint's part of MMDM's direction is Σ_a β_a ∇F_a, with β a function of counts alone. From
counts that are released already β is known *before* a round, so it is broadcast, and each user
sends the one gradient

    ∇(L + N Σ_a β_a F_a),    direction = its (noisy) sum / N,

and the counts F_a, n'_a, for the next round's β. In place of the counts of one round stand their
moving averages F̄_a, n̄'_a. With D_a = F̄/n̄' − F̄_a/n̄'_a, every |D_a| ≤ α is two one-sided
constraints, one of which holds with room to spare: both multipliers are held in one number λ_a,
positive for D_a ≤ α and negative for −D_a ≤ α. The dual function is λ D − α |λ| in it, and so

    λ_a ← S(λ_a + γ_a D_a, γ_a α),    S(x, t) = sign(x) max(|x| − t, 0),
    κ_a = λ_a + c_a S(D_a, α),
    β = Σ_a κ_a/n̄' for everybody, −κ_a/n̄'_a for group a.

Other than MMDM's, these multipliers come down inside the tolerance, and act there too. With the
loss in place of a rate's surrogate it is a proxy-Lagrangian (Cotter et al., 2019): constraints that
are counted decide on the multipliers, and a re-weighted loss is descended. There is no proof that
this converges.

The surer a group's counts, the faster its multiplier. With noise of standard deviation s on a
count, one round's rate of group a has about the variance R_a = (s/n̄'_a)² + 1/(4 n̄'_a), and the
best filter of something that drifts has a gain proportional to 1/√R_a; the damping, which passes
noise on as it is, shrinks with R_a itself:

    γ_a = γ ρ_a,    c_a = c min(1, ρ_a²),    ρ_a = √(R_0/R_a), and no more than `MOST`.

No group's multiplier may ask for more than its samples can give: |κ_a| N/n̄'_a ≤ high − 1, and the
same for λ_a. Beyond that only the other side of the constraint would move, everybody's rate towards
the group's: that way a small group whose rate answers slowly would make a model worse for all.

Where errors are counted, the weak group can be helped first. Weights then stay at ℓ = 1 or above:
nobody's errors are asked for, and those of a group that errs too often count more. Only where some
group stays outside the constraint's own tolerance for more than ``patience`` rounds does ℓ go down
towards ``low``, by `RELEASE` of the way in each further round outside; it stops where the groups
are within the tolerance. It is a function of released counts like everything here, and the history
says how far it went.

(Where a regression's rate keeps its own surrogate, a tenth of N β is its weight:
`fpfl.users.weighting` says why.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from fpfl.compat import formerly
from fpfl.fairness.totals import Totals, Weights
from fpfl.methods.base import MethodState, Surrogate, register
from fpfl.methods.mmdm import check_settings

MOST = 6.0
"""How much faster than ``multiplier_lr`` says a multiplier may be: beyond, the delay of what it
moves would make it swing."""

RELEASE = 0.02
"""How much of the way from 1 to ``low`` the least weight goes in a round."""

LARGEST = 1e15
"""No cohort has as many samples: a count beyond, or one that is no number, says nothing."""


@dataclass(frozen=True)
class AveragedState(MethodState):
    """Signed multipliers, and moving averages of counts; the last column is everybody's.

    Parameters
    ----------
    F, n
        Σ_t p_t F_t and Σ_t p_t n'_t of shape (R, G + 1), with the past rounds' weights p_t.
    mass, squares
        Σ_t p_t and Σ_t p_t², of the same shape.
    smallest
        The number below which one round's count says nothing; an average's noise is less.
    noise
        s, the standard deviation of the noise on a round's counts.
    outside
        In how many rounds a group was outside the tolerance, less those in which none was.
    released
        How far ℓ has come from 1 (0) to ``low`` (1).
    least
        The least weight that a sample has in the next round, by one rate and group; NaN where
        weights may go down from the start.
    """

    F: Tensor
    n: Tensor
    mass: Tensor
    squares: Tensor
    smallest: float
    noise: float
    # A run folder of before has none of these: weights went down from the start.
    outside: float | Tensor = 0.0
    released: float | Tensor = 1.0
    least: float | Tensor = math.nan

    def differences(self) -> Tensor:
        """D_a of shape (R, G), kept in [−1, 1]; NaN where the averages say nothing."""
        known = (self.n >= self.smallest * self.squares.sqrt()) & (self.n > 0)
        rate = torch.where(known, self.F / self.n, torch.full_like(self.F, math.nan))
        return (rate[:, -1:] - rate[:, :-1]).clamp(-1.0, 1.0)

    def figures(self) -> dict[str, Tensor]:
        """The gap by the averages, steadier than a single round's."""
        differences = self.differences().abs()
        gap = differences.max() if differences.numel() else self.F.new_tensor(math.nan)
        return {"averaged_gap": gap, "least_weight": torch.as_tensor(self.least).to(gap)}

    def counts(self) -> Tensor:
        """n̄', of shape (R, G + 1), to divide by: where it says nothing, any positive number."""
        least = (self.smallest * self.squares.sqrt()).clamp(min=torch.finfo(self.n.dtype).tiny)
        return self.n.clamp(min=least) / self.mass.clamp(min=torch.finfo(self.n.dtype).tiny)

    def with_round(self, totals: Totals, keep: float) -> AveragedState:
        """Take in a round, keeping ``keep`` of the weights of those before.

        Counts that no cohort can have are left out: they would stay in an average for ever.
        """
        F = torch.cat([totals.F, totals.overall_F.unsqueeze(1)], dim=1)
        n = torch.cat([totals.n, totals.overall_n.unsqueeze(1)], dim=1)
        possible = (F.abs() < LARGEST) & (n.abs() < LARGEST)
        one = torch.ones_like(F)
        kept = (one * keep).masked_fill(~possible, 1.0)
        add = (one * (1.0 - keep)).masked_fill(~possible, 0.0)
        return replace(
            self,
            F=kept * self.F + add * F.masked_fill(~possible, 0.0),
            n=kept * self.n + add * n.masked_fill(~possible, 0.0),
            mass=kept * self.mass + add,
            squares=kept**2 * self.squares + add**2,
            smallest=totals.smallest,
            noise=totals.noise,
        )


@register(
    "one-gradient",
    "FPFL-1G, one gradient per user with broadcast weights",
    states=(AveragedState,),
    words={"tolerance": "constraint", "spread": "none", "patience": "none"},
)
@formerly
@dataclass(frozen=True)
class OneGradient:
    """FPFL-1G.

    Parameters
    ----------
    damping, multiplier_lr
        c and γ.
    tolerance
        α to train towards. 0, equality, leaves the constraint's own α for what noise and small
        cohorts hide; None takes that very α.
    decay
        b: how much of the averages of counts is kept from one round to the next. 0: none.
    spread
        √R_0: the standard deviation of one round's rate of a group that ``multiplier_lr`` and
        ``damping`` are meant for. None: for all alike.
    low, high
        The range that the weight of a sample's loss is kept in. Below 0 the model would be rewarded
        for being wrong.
    patience
        Weights stay at 1 or above until a group has been outside the tolerance for more than so
        many rounds: the weak are helped before the strong are held back. For rates that count
        errors; selection rates meet in between. None: weights may go down from the start.
    surrogate
        What is differentiated for a rate: ``"loss"``, or the rate's own surrogate (``"rate"``),
        with which training can run into models that are equally wrong about everybody.
    ratchet
        Multipliers that only grow and act outside the tolerance alone, as MMDM's do: to compare
        with. With a tolerance of 0 they never rest.
    """

    damping: float = 2.0
    multiplier_lr: float = 0.1
    tolerance: float | None = 0.0
    decay: float = 0.95
    spread: float | None = 0.3
    low: float = 0.05
    high: float = 11.0
    surrogate: Surrogate = "loss"
    ratchet: bool = False
    patience: int | None = None

    def __post_init__(self) -> None:
        check_settings(self.damping, self.multiplier_lr, self.tolerance)
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay is {self.decay}; it must be in [0, 1)")
        if self.spread is not None and not self.spread > 0.0:
            raise ValueError(f"spread is {self.spread}; it must be positive, or None")
        if not (0.0 <= self.low <= 1.0 <= self.high and math.isfinite(self.high)):
            raise ValueError(
                f"the weights' range is [{self.low}, {self.high}]; it must contain 1 and begin at "
                "0 or above"
            )
        if self.patience is not None and self.patience < 0:
            raise ValueError(
                f"patience is {self.patience}; it must be a number of rounds, 0 or more, or None"
            )
        if self.surrogate not in get_args(Surrogate):
            raise ValueError(
                f"surrogate is {self.surrogate!r}; expected one of {get_args(Surrogate)}"
            )

    def begin(self, rates: int, groups: int, device: torch.device) -> AveragedState:
        """Nothing is known yet: λ = 0, no averages."""
        nothing = torch.zeros(rates, groups + 1, device=device)
        zero, patient = torch.zeros((), device=device), self.patience is not None
        return AveragedState(
            nothing[:, :-1].clone(),
            *(nothing, nothing, nothing, nothing, 0.0, 0.0),
            outside=zero,
            released=zero if patient else zero + 1.0,
            least=zero + (1.0 if patient else math.nan),
        )

    def update(
        self, state: MethodState, totals: Totals, tolerance: float
    ) -> tuple[AveragedState, Tensor]:
        """Average the counts, move the multipliers, and follow the one gradient there is."""
        state = _averaged(state).with_round(totals, self.decay)
        rate = self.multiplier_lr * self._pace(state)
        multipliers = self._multipliers(state, rate, self._alpha(tolerance), totals.normaliser)
        direction = totals.loss_gradient / totals.normaliser
        state = replace(state, multipliers=multipliers)
        return self._released(state, totals.normaliser, tolerance), direction

    def weights(self, state: MethodState, normaliser: float, tolerance: float) -> Weights:
        """N β, from the averages and multipliers of the rounds so far."""
        state = _averaged(state)
        kappa, n = self.kappa(state, normaliser, tolerance), state.counts()
        return Weights(
            groups=-normaliser * kappa / n[:, :-1],
            overall=normaliser * kappa.sum(dim=1) / n[:, -1],
            low=self._low(state),
            high=self.high,
        )

    def _low(self, state: AveragedState) -> float | Tensor:
        """ℓ, the least weight for now."""
        return self.low if self.patience is None else 1.0 - (1.0 - self.low) * state.released

    def _released(self, state: AveragedState, normaliser: float, tolerance: float) -> AveragedState:
        """ℓ's way down, while a group is outside α and has been for long."""
        if self.patience is None or not state.multipliers.numel():
            return state
        now = (state.differences().abs() > tolerance).any()
        outside = torch.where(now, state.outside + 1.0, state.outside - 1.0).clamp(min=0.0)
        more = torch.where(now & (outside > self.patience), RELEASE, 0.0)
        state = replace(state, outside=outside, released=(state.released + more).clamp(max=1.0))
        weights = self.weights(state, normaliser, tolerance)
        asked = 1.0 + (weights.overall.unsqueeze(-1) + weights.groups).min()
        return replace(state, least=asked.clamp(max=1.0).maximum(torch.as_tensor(weights.low)))

    def kappa(self, state: AveragedState, normaliser: float, tolerance: float) -> Tensor:
        """κ of shape (R, G); 0 where the counts say nothing."""
        difference = state.differences()
        g = _soft(difference, self._alpha(tolerance))
        damping = self.damping * self._pace(state).square().clamp(max=1.0)
        kappa = state.multipliers + damping * g
        if self.ratchet:  # λ ≥ 0, with the sign of the difference, and outside the tolerance alone
            kappa = g.sign() * (state.multipliers + damping * g.abs())
        kappa = self._given(kappa, state, normaliser)
        return torch.where(difference.isnan(), torch.zeros_like(kappa), kappa)

    def _multipliers(
        self, state: AveragedState, rate: Tensor, alpha: float, normaliser: float
    ) -> Tensor:
        """λ after a round; where the counts say nothing it stays as it is."""
        old, difference = state.multipliers, state.differences()
        if self.ratchet:
            moved = old + rate * _soft(difference, alpha).abs()
            moved = torch.maximum(self._given(moved, state, normaliser), old)
        else:
            moved = _soft(old + rate * difference, rate * alpha)
            moved = self._given(moved, state, normaliser)
        return torch.where(difference.isnan(), old, moved)

    def _pace(self, state: AveragedState) -> Tensor:
        """ρ of shape (R, G)."""
        if self.spread is None:
            return torch.ones_like(state.multipliers)
        n = state.counts()[:, :-1]
        one = n.reciprocal()
        deviation = ((one * state.noise).square() + one * 0.25).sqrt()
        return (self.spread / deviation).clamp(max=MOST)

    def _given(self, asked: Tensor, state: AveragedState, normaliser: float) -> Tensor:
        """What of multipliers that are asked for a group's samples can give."""
        most = (self.high - 1.0) * state.counts()[:, :-1] / normaliser
        return torch.minimum(torch.maximum(asked, -most), most)

    def _alpha(self, tolerance: float) -> float:
        return tolerance if self.tolerance is None else self.tolerance


def _averaged(state: MethodState) -> AveragedState:
    if not isinstance(state, AveragedState):
        raise ValueError(
            f"OneGradient was given a {type(state).__name__}; begin with OneGradient.begin(...)"
        )
    return state


def _soft(x: Tensor, threshold: Tensor | float) -> Tensor:
    """S(x, t) = sign(x) max(|x| − t, 0)."""
    return x.sign() * (x.abs() - threshold).clamp(min=0.0)
