r"""The measurement before the first round: how users' histograms become one sum.

    z_k = the cells of user k's rows, which weigh 1/n_k each,    ‖z_k‖ ≤ C = √d for d columns

(:mod:`fpfl.measurement.counting`) is encoded like a round's vector, each user rounded on its own,
with a scale and noise of its own: σ₀ in place of σ. There are no coins: every user of every node
that is asked is in the sum. So it is one release with Rényi divergence α/(2σ₀²), rounding included,
which the plan's accountant adds to the rounds' (:mod:`fpfl.privacy.renyi`). With ``picked`` those
are asked whom the server picked, as in a round, and everybody is in it once at most.

What the server makes of the noisy sum is broadcast with the model: a scaling of the inputs. It is a
layer of the network without parameters, so a node need not believe it any more than the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fpfl.aggregation.clipping import ClipRule
from fpfl.aggregation.encoding import RESERVE, Encoding
from fpfl.aggregation.noise import GRID_BITS, NoiseSource
from fpfl.aggregation.sums import MANY, grid_stddev, on_grid
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import Found, InputColumn
from fpfl.measurement.cells import Cells
from fpfl.measurement.counting import STEP_BITS
from fpfl.measurement.inputs import bins_for, input_cells, input_vectors, measured_inputs
from fpfl.measurement.plan import HISTOGRAMS, plan_measurement
from fpfl.privacy.conventions import PrivacyWarning
from fpfl.privacy.plan import Block, PrivacyPlan


@dataclass(frozen=True)
class Measured:
    """The sum of a measurement: what is counted, and with which noise.

    Parameters
    ----------
    columns
        The columns that nobody declared.
    plan
        The training's plan, which has the measurement in it.
    users
        How many users are in the sum, as far as that is public.
    """

    columns: tuple[InputColumn, ...]
    plan: PrivacyPlan
    users: int

    @property
    def noise_multiplier(self) -> float:
        """σ₀."""
        assert self.plan.measurement is not None  # there is a measurement
        return self.plan.measurement

    @cached_property
    def bins(self) -> int:
        """How many bins a number has, by public numbers alone."""
        # A person may be on several nodes, and the noise is for all of them together.
        return bins_for(self.noise_multiplier * self.plan.copies, len(self.columns), self.users)

    @cached_property
    def cells(self) -> tuple[Cells, ...]:
        """What is counted of every column."""
        return input_cells(self.columns, self.bins)

    @property
    def size(self) -> int:
        """How many numbers are released."""
        return sum(each.size for each in self.cells)

    @property
    def bound(self) -> float:
        """C = √d."""
        return math.sqrt(len(self.columns))

    @cached_property
    def release(self) -> PrivacyPlan:
        """The release as a plan: one round of everybody, with σ₀."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # of δ the training's plan has warned
            return PrivacyPlan(
                population=self.plan.population,
                cohort=self.plan.population,
                rounds=1,
                noise_multiplier=self.noise_multiplier,
                blocks=[Block(HISTOGRAMS, self.bound)],
                convention=self.plan.convention,
                neighbours=self.plan.neighbours,
                delta=self.plan.delta,
                copies=self.plan.copies,
            )

    @property
    def rules(self) -> tuple[ClipRule, ...]:
        """How long a user's vector is at most; nothing has to be clipped for it."""
        return (ClipRule(HISTOGRAMS, {HISTOGRAMS: slice(0, self.size)}, self.bound, 2),)

    def vectors(self, data: FederatedDataset, at_once: int) -> Iterator[Tensor]:
        """The users' vectors, so many users at a time; a user without rows sends zero."""
        for whole in input_vectors(data, self.columns, self.bins, at_once):
            yield torch.from_numpy(whole).double() * 2.0**-STEP_BITS

    def noised(self, total: Tensor, encoding: Encoding, source: NoiseSource) -> Tensor:
        """The sum with the noise of a server that is trusted to add it."""
        # One user moves the decoded sum by Δ/S bounds: more than one, by rounding.
        if encoding.bound / encoding.scale > 1.0 + RESERVE / 2:
            raise ValueError(
                f"a ring of 2^32 is too coarse to measure {self.users} users: rounding would move "
                "the sum by more than the noise allows for. Have nodes add the noise "
                "(convention='coins')"
            )
        grid = torch.tensor(self.server_stddev * 2.0**-GRID_BITS, dtype=torch.float64)
        noise = source.integers(self.size, 0, device=torch.device("cpu"))
        return on_grid(total, grid, noise)

    @property
    def server_stddev(self) -> float:
        """The deviation of the noise on every number where the server adds it."""
        stddev = self.release.noise_stddev(HISTOGRAMS)
        users = max(MANY, self.plan.population, self.users)
        return (1.0 + RESERVE) * grid_stddev(stddev, self.bound, self.size, users)

    def found(self, total: Tensor, noise_stddev: float) -> dict[str, Found]:
        """What the noisy sum says of the columns; ``noise_stddev`` is that of every number."""
        plan = plan_measurement(
            self.cells,
            population=self.users,
            # What there is where all nodes answer: more than the noise that is counted on.
            noise_multiplier=noise_stddev / self.bound,
            neighbours=self.plan.neighbours,
        )
        return measured_inputs(self.columns, plan, total.double().numpy())
