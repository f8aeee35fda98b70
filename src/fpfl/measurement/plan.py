r"""The plan of a measurement: one Gaussian mechanism, and all that is public about it.

    v = h Σ_k z_k + N(0, s²),   s = C σ,   C = √d

(:mod:`fpfl.measurement.counting` has the users' vectors z_k in steps of h). One user's vector is at
most C = √d long, for d columns:

    zero-out, add-remove    the sum changes by one vector: C
    replace-one             by the difference of two: 2C

Two vectors without negative numbers differ by √2 C at most. That is not used, as it is not for the
counts of a training: every accountant here has the 2C of the difference of any two.

Rounding the sum to the noise's grid takes a little more than C, and the noise is larger by as much:
s' in place of s (:mod:`fpfl.aggregation.sums`, whose bound on a user's own rounding is not needed
here). So the release is a Gaussian mechanism with noise multiplier σ in which everybody takes part,
`MeasurementPlan.mechanism`, whoever it is charged to or composed with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fpfl.aggregation import NoiseSource
from fpfl.aggregation.noise import GRID_BITS
from fpfl.aggregation.sums import MANY, grid_stddev, on_grid
from fpfl.measurement.cells import Cells, Floats, Ints, NumberCells, checked_columns
from fpfl.measurement.counting import STEP_BITS
from fpfl.measurement.intervals import rank_error
from fpfl.privacy.assumptions import check_declared
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import OneRelease
from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from fpfl.privacy.plan import Block, Neighbours, PrivacyPlan

HISTOGRAMS = "histograms"

_LARGEST = 100.0


@dataclass(frozen=True)
class MeasurementPlan(OneRelease):
    """All that is public about a measurement; `plan_measurement` makes it.

    Parameters
    ----------
    columns
        The cells of every column.
    privacy
        The same as a privacy plan: one round in which every user takes part.
    confidence
        Of the intervals.
    declared
        Whether K was declared, and not counted.
    """

    columns: tuple[Cells, ...]
    privacy: PrivacyPlan
    confidence: float = 0.95
    declared: bool = False

    @property
    def size(self) -> int:
        """How many numbers are released."""
        return sum(each.size for each in self.columns)

    @property
    def bound(self) -> float:
        """C = √d: how long one user's vector is at most (in ℓ2)."""
        return math.sqrt(len(self.columns))

    @cached_property
    def epsilon(self) -> float:
        """ε of this one release at δ, by the formula for one Gaussian mechanism."""
        reach = float(self.privacy.sensitivity)
        return gaussian_epsilon(self.noise_multiplier, 1, self.delta, sensitivity=reach)

    @cached_property
    def noise_stddev(self) -> float:
        """s': the standard deviation of the noise on every number, in users."""
        stddev = self.privacy.noise_stddev(HISTOGRAMS)
        return grid_stddev(stddev, self.bound, self.size, max(MANY, self.population))

    def rank_error(self, q: float = 0.5, bins: int | None = None) -> float:
        """How far off a quantile's rank is, as a share of the users: known before it is paid for.

        Parameters
        ----------
        q
            Which quantile.
        bins
            Of the column; by default the most that a column here has.
        """
        if bins is None:
            bins = max(
                (each.bins for each in self.columns if isinstance(each, NumberCells)), default=1
            )
        return rank_error(q, bins, self.noise_stddev, self.population, self.confidence)

    def charge(self, run: str, ledger: PopulationLedger) -> None:
        """Write the release into a population's ledger, on disk, or be refused; before it is made.

        Raises
        ------
        BudgetExhaustedError
            The budget does not suffice: nothing was written, and nothing may be released.
        """
        ledger.charge(run, self.mechanism, None, "measurement")
        ledger.sync()

    def release(self, total: Ints, source: NoiseSource) -> Floats:
        """Add the noise to the sum of all users: (cells,), in users. Each call is a release.

        Parameters
        ----------
        total
            Σ_k z_k, in whole steps: `fpfl.measurement.counting.whole_sum`.
        source
            Where the noise comes from.
        """
        if total.shape != (self.size,) or total.dtype.kind != "i":
            raise ValueError(
                f"a sum of shape {total.shape} and type {total.dtype}; expected ({self.size},) "
                "whole numbers, as whole_sum gives them for these columns"
            )
        noise = source.integers(self.size, 0, device=torch.device("cpu"))
        grid = torch.tensor(self.noise_stddev * 2.0**-GRID_BITS, dtype=torch.float64)
        exact = torch.from_numpy(total).double() * 2.0**-STEP_BITS
        found: Floats = on_grid(exact, grid, noise).numpy()
        return found


def plan_measurement(
    columns: Sequence[Cells],
    *,
    population: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    neighbours: Neighbours = "zero-out",
    confidence: float = 0.95,
    declared: bool = True,
) -> MeasurementPlan:
    """Plan a measurement: all that is public, before any data is touched.

    Parameters
    ----------
    columns
        The cells of every column.
    population
        K.
    epsilon, noise_multiplier
        Give one: the ε that the release may cost, or σ itself, the noise over C = √d.
    delta
        δ; 1/(10 K) when it is not given.
    neighbours
        What one user may change: ``"zero-out"``, ``"add-remove"`` (which takes a declared K) or
        ``"replace-one"`` (which takes twice the noise).
    confidence
        Of the intervals.
    declared
        Whether K was declared, and not counted.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"epsilon={epsilon} and noise_multiplier={noise_multiplier} were given; give exactly "
            "one of them, e.g. epsilon=0.2"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")
    check_declared(neighbours, declared)
    found = checked_columns(columns)
    blocks = [Block(HISTOGRAMS, math.sqrt(len(found)))]
    # With a cohort of all users everyone takes part for certain, and nothing is amplified.
    privacy = PrivacyPlan(
        population=population,
        cohort=population,
        rounds=1,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        blocks=blocks,
        convention="poisson",
        neighbours=neighbours,
        delta=delta,
    )
    if epsilon is not None:
        if not 0.0 < epsilon <= _LARGEST:
            raise ValueError(f"epsilon is {epsilon}; expected 0 < ε ≤ {_LARGEST:g}, e.g. 0.2")
        reach = float(privacy.sensitivity)
        noise = gaussian_noise_multiplier(epsilon, 1, privacy.delta, sensitivity=reach)
        # A second plan would warn twice about the same δ.
        object.__setattr__(privacy, "noise_multiplier", noise)
    plan = MeasurementPlan(found, privacy, confidence, declared)
    _ = plan.noise_stddev  # what cannot be done is said before anything is charged
    return plan
