"""What a user of the library says about clipping and privacy; the plan is made from it.

Clip bounds are part of the plan: noise means nothing without the bound that it is measured in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fpfl.privacy.accounting import measurement_noise
from fpfl.privacy.adaptive import AdaptiveBound, BoundGrid
from fpfl.privacy.conventions import checked_pair
from fpfl.privacy.conventions.base import REGISTER
from fpfl.privacy.plan import Block, Neighbours, PrivacyPlan

JOINT, GRADIENTS, COUNTS, SELECTION = "joint", "gradients", "counts", "selection"
CLIPPED = "clipped"


@dataclass(frozen=True)
class Clipping:
    """Bounds on what one user can add to a sum.

    Parameters
    ----------
    bound
        C. Without ``counts`` it bounds the paper's whole vector [∇L, F_a, ∇F_a, n'_a] in ℓ2.
    counts
        C_s: gives the fairness counts a block of their own, written (F, n' − F) and scaled by
        min(1, C_s/Σ n'), so that clipping cannot bias the measured rates; ``bound`` is then for
        the gradients alone.
    selection
        The bound of the confusion table (or hits and misses) that model selection and the
        history's accuracy come from, a block of its own always (inside the joint norm it would
        crowd the gradient out).
    counts_share, selection_share
        Which part of the privacy budget 1/σ² the blocks get; the gradients have the rest.
    clipped_share
        Count how many users of a cohort had their gradients (or their joint vector) scaled down,
        with this part of the budget: the count says whether the bound suits, and is a release like
        any other. Without it nobody learns how many were clipped.
    adapts
        Have the bound of the gradients (or of the joint vector) find itself: ``bound`` is then C₀,
        which it begins with. The number of clipped users is counted for it, with the share that
        `AdaptiveBound` names.
    """

    bound: float
    counts: float | None = None
    selection: float = 2.0
    counts_share: float = 0.15
    selection_share: float = 0.05
    clipped_share: float | None = None
    adapts: AdaptiveBound | None = None

    def __post_init__(self) -> None:
        for name in ("bound", "counts", "selection"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"the clip bound {name!r} is {value}; it must be positive")
        for name in ("counts_share", "selection_share", "clipped_share"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ValueError(f"{name} is {value}; it must be between 0 and 1")
        if self.adapts is not None:
            if not isinstance(self.adapts, AdaptiveBound):
                raise ValueError(
                    f"adapts is {self.adapts!r}; expected something like AdaptiveBound(0.1), to "
                    "clip a tenth of the users"
                )
            if self.clipped_share is not None:
                raise ValueError(
                    f"clipped_share={self.clipped_share} was given beside adapts, which counts "
                    "clipped users with a share of its own; give AdaptiveBound(share=...)"
                )
            _ = self.grid  # refuses a bound outside its range
        if self.counts_share + self.selection_share + (self.counting_share or 0.0) >= 1.0:
            raise ValueError("the shares of counts leave nothing for the gradients")

    @property
    def counting_share(self) -> float | None:
        """The share of the number of clipped users; None where they are not counted."""
        return self.clipped_share if self.adapts is None else self.adapts.share

    @property
    def grid(self) -> BoundGrid | None:
        """The bounds that there may be, where the bound adapts."""
        return None if self.adapts is None else BoundGrid(self.bound, self.adapts)

    def blocks(self, *, constrained: bool, selection: bool) -> tuple[Block, ...]:
        """The blocks of a vector with or without fairness counts and selection counts."""
        blocks = []
        rest = 1.0
        if constrained and self.counts is not None:
            blocks.append(Block(COUNTS, self.counts, self.counts_share))
            rest -= self.counts_share
        if selection:
            blocks.append(Block(SELECTION, self.selection, self.selection_share))
            rest -= self.selection_share
        if self.counting_share is not None:
            # A user's part is 0 or 1; or, where the bound adapts, -1/2 or 1/2.
            bound = 1.0 if self.adapts is None else 0.5
            blocks.append(Block(CLIPPED, bound, self.counting_share))
            rest -= self.counting_share
        return (Block(JOINT if self.counts is None else GRADIENTS, self.bound, rest), *blocks)


@dataclass(frozen=True)
class Privacy:
    """How private a training is to be.

    Parameters
    ----------
    epsilon, noise_multiplier
        Give one: the ε to calibrate to, or σ itself (the noise's standard deviation over the
        clip bound).
    clip
        A clip bound C for the paper's joint clipping (with `OneGradient`, for the gradient beside
        counts in a block of their own), or `Clipping` for more.
    delta
        δ; 1/(10 K) when it is not given.
    convention
        ``"poisson"`` (Poisson cohorts, PLD), ``"replace-one"`` (fixed cohorts, RDP, sensitivity
        2C) or ``"paper"`` (the same with σ at face value, for reproduction). For federations whose
        nodes add the noise: ``"coins"`` (users toss secret coins) and ``"picked"`` (the server
        picks cohorts; no amplification).
    neighbours
        Which populations count as neighbours; the convention's own when it is not given.
    population
        Account as if there were so many users (the paper's hypothetical populations). The
        statement gives the real ε beside it.
    max_participations
        Cap on the rounds that one user takes part in.
    budget
        ε that the run may cost in the end, if its settings are changed or its rounds are raised
        after looking: a privacy filter keeps to it (see ``docs/privacy.md``). It is fixed when
        the run begins; by default it is the plan's own ε.
    copies
        On how many nodes of a federation one person may be; their sum is what is protected.
    measurement
        σ₀, the noise over its bound, of the release that a table's columns are measured by before
        the first round; by rule where it is not given. Where nothing is measured it has no use.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    clip: float | Clipping = 1.0
    delta: float | None = None
    convention: str = "poisson"
    neighbours: Neighbours | None = None
    population: int | None = None
    max_participations: int | None = None
    budget: float | None = None
    copies: int = 1
    measurement: float | None = None

    def __post_init__(self) -> None:
        given = self.measurement
        if given is not None and not (math.isfinite(given) and given > 0):
            raise ValueError(
                f"measurement is {given}; give its noise, a positive σ₀, or leave it out"
            )
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise ValueError(f"the budget is {self.budget}; it must be a positive ε")
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier} were given; "
                "give exactly one of them"
            )

    @property
    def clipping(self) -> Clipping:
        """The clip bounds."""
        return self.clip if isinstance(self.clip, Clipping) else Clipping(float(self.clip))

    def plan(
        self,
        *,
        population: int,
        cohort: int,
        rounds: int,
        constrained: bool = True,
        clipping: Clipping | None = None,
        blocks: tuple[Block, ...] | None = None,
        measurement: bool | float = False,
    ) -> PrivacyPlan:
        """Bind the settings to a population and a schedule.

        ``constrained`` says whether fairness counts are sent; ``clipping`` are the bounds that a
        method chose where a number was given; ``blocks`` are those of another vector altogether.
        ``measurement`` is σ₀ of a release before the first round, or says that there is one, with
        σ₀ by rule (`fpfl.privacy.accounting.measurement_noise`).
        """
        if blocks is None:
            bounds = clipping or self.clipping
            blocks = bounds.blocks(constrained=constrained, selection=True)
        accounted = population if self.population is None else self.population
        shared = {
            "convention": self.convention,
            "neighbours": self.neighbours,
            "population": accounted,
            "real_population": None if accounted == population else population,
            "cohort": cohort,
            "rounds": rounds,
            "delta": self.delta,
            "blocks": blocks,
            "max_participations": self.max_participations,
            "copies": self.copies,
            "measurement": self._measurement(measurement, accounted, cohort, rounds),
        }
        if self.noise_multiplier is not None:
            return PrivacyPlan(noise_multiplier=self.noise_multiplier, **shared)  # type: ignore[arg-type]
        return PrivacyPlan.calibrate(epsilon=self.epsilon, **shared)  # type: ignore[arg-type]

    def _measurement(
        self, measurement: bool | float, population: int, cohort: int, rounds: int
    ) -> float | None:
        """σ₀, given or by rule; None without a measurement."""
        if not isinstance(measurement, bool):
            return measurement
        if not measurement or self.measurement is not None:
            return self.measurement if measurement else None
        neighbours, terms = (
            checked_pair(self.convention, self.neighbours),
            REGISTER[self.convention],
        )
        delta = self.delta or 1 / (10 * population)
        if terms.measured is not None:
            chance = 1.0 if terms.sampler.everybody else self.copies * cohort / population
            return terms.measured(
                self.epsilon,
                self.noise_multiplier,
                min(1.0, chance),
                rounds,
                delta,
                terms.measurement_share,
            )
        return measurement_noise(
            self.epsilon,
            self.noise_multiplier,
            q=min(1.0, cohort / population),
            rounds=rounds,
            delta=delta,
            sensitivity=terms.sensitivity[neighbours],
            share=terms.measurement_share,
        )


Sampling = Literal["poisson", "without-replacement"]
