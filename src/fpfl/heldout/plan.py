r"""The plan of a private evaluation, and its one release.

    v = Σ_k min(1, B/n^k) (counts of user k) + N(0, s²),   s = C σ,   C = B √t

(:mod:`fpfl.heldout.cells` has the counts and t). Every held-out user takes part, once: there is no
sampling and nothing to amplify, and ε is that of one Gaussian mechanism with sensitivity C (a user
left out) or 2C (a user replaced), exactly.

What is estimated are the rates of the population that the held-out users were drawn from, with
every user weighing at most B samples: F and n' are sums of scaled counts. Where no user has more
than B samples they are the plain rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.heldout.cells import Cells
from fpfl.heldout.counting import user_counts
from fpfl.heldout.estimates import Judge
from fpfl.heldout.intervals import Floats
from fpfl.heldout.result import PrivateEvaluation
from fpfl.heldout.words import statement
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from fpfl.privacy.plan import Neighbours, PrivacyPlan
from fpfl.thirdparty import DenseRows, NoiseSource, SystemNoise, ThirdParty
from fpfl.users.task import check_model


@dataclass(frozen=True)
class HeldoutPlan:
    """All that is public about a private evaluation; :func:`fpfl.heldout.plan_heldout` makes it.

    A ledger charges its ``mechanism`` (or ``epsilon`` and ``delta``) after :meth:`check` and before
    :meth:`release`, once.

    Parameters
    ----------
    cells
        What is counted.
    bound
        B: how many samples one user weighs at most.
    confidence
        Of the intervals.
    privacy
        The same as a privacy plan: one round in which every user takes part.
    """

    cells: Cells
    bound: float
    confidence: float
    privacy: PrivacyPlan = field(repr=False)

    @property
    def mechanism(self) -> Mechanism:
        """What a ledger charges: one release in which everyone takes part."""
        users = self.population
        return Mechanism("all", users, users, self.noise_multiplier, self.neighbours)

    @property
    def population(self) -> int:
        """K: how many users are held out."""
        return self.privacy.population

    @property
    def neighbours(self) -> Neighbours:
        """Which populations count as neighbours."""
        return self.privacy.neighbours

    @property
    def delta(self) -> float:
        """δ."""
        return self.privacy.delta

    @property
    def noise_multiplier(self) -> float:
        """σ = s/C."""
        return self.privacy.noise_multiplier

    @property
    def sensitivity(self) -> int:
        """How much one user changes the released counts (in ℓ2), in units of C."""
        return self.privacy.sensitivity

    @property
    def clip(self) -> float:
        """C = B √t: how long one user's vector of counts is at most (in ℓ2)."""
        return self.bound * self.cells.length

    @cached_property
    def noise_stddev(self) -> float:
        """s: the standard deviation of the noise on every count.

        It is C σ and, for noise on a grid, a little more: :mod:`fpfl.thirdparty.sums` says why.
        """
        return float(self._third_party(SystemNoise()).noise_stddev[0])

    @cached_property
    def epsilon(self) -> float:
        """ε of the release at δ, by the formula for one Gaussian mechanism."""
        return gaussian_epsilon(
            self.noise_multiplier, 1, self.delta, sensitivity=float(self.sensitivity)
        )

    def statement(self, seeded: bool) -> list[str]:
        """What is protected, what it costs and what the figures mean, one point a line.

        ``seeded`` says that the noise comes from a seed and not from the operating system.
        """
        return statement(self, seeded=seeded)

    def check(self, model: nn.Module, data: FederatedDataset) -> None:
        """Refuse a model or users that the plan is not for, before anything is charged.

        It looks at what is public alone: schema, number of users, and the model's answers to
        made-up inputs.
        """
        schema = self.cells.schema
        other = schema.difference(data.schema)
        if other is not None:
            raise ValueError(f"the plan and the data have different schemas: {other}")
        if self.population != data.K:
            raise ValueError(
                f"the data has {data.K:,} users; the plan was made for "
                f"{self.population:,}: make one for these, plan_heldout(population=...)"
            )
        parameter = next(model.parameters(), torch.zeros(()))
        check_model(model, schema, data.input_dtype(parameter.dtype))

    def release(
        self, model: nn.Module, data: FederatedDataset, source: NoiseSource | None = None
    ) -> PrivateEvaluation:
        """Count, add the noise, and say what follows from the noisy counts alone.

        Each call is a release and costs ε again.

        Parameters
        ----------
        model
            It returns logits (or numbers in units of the label range), as for training.
        data
            The held-out users.
        source
            Where the noise comes from; the operating system's randomness when it is not given.
        """
        source = SystemNoise() if source is None else source
        self.check(model, data)
        released = self._noised(model, data, source)
        judge = Judge(self.cells, self.bound, self.confidence)
        s = self.noise_stddev
        gap = judge.gap(released, s)
        verdict = gap.verdict(self.cells.constraint.tolerance)
        advice = None
        if verdict == "cannot tell":
            advice = judge.advice(released, s, self.population, self._noise_at)
        rows = (dict(zip(self.cells.kinds, row, strict=True)) for row in released.tolist())
        return PrivateEvaluation(
            released=dict(zip(self.cells.parts, rows, strict=True)),
            rates=judge.rates(released, s),
            gap=gap,
            verdict=verdict,
            advice=advice,
            score=self.cells.score.name,
            constraint=self.cells.constraint.name,
            tolerance=self.cells.constraint.tolerance,
            confidence=self.confidence,
            bound=self.bound,
            mechanism=self.mechanism,
            epsilon=self.epsilon,
            delta=self.delta,
            noise_stddev=s,
            seeded=source.seeded,
            lines=tuple(self.statement(source.seeded)),
        )

    def _noised(self, model: nn.Module, data: FederatedDataset, source: NoiseSource) -> Floats:
        """The released cells, (P, Q)."""
        third_party = self._third_party(source)

        def rows() -> Iterator[DenseRows]:
            for counts in user_counts(model, data, self.cells, self.bound):
                yield DenseRows(counts, third_party.places)

        total = third_party.sum(rows(), like=torch.zeros((), dtype=torch.float64))
        return third_party.noised(total, 0).reshape(self.cells.shape).numpy()

    def _third_party(self, source: NoiseSource) -> ThirdParty:
        places = {"cells": slice(0, math.prod(self.cells.shape))}
        return ThirdParty(places, self.privacy.blocks, self.privacy, source)

    def _noise_at(self, times: float) -> float:
        """The standard deviation of the noise if ε were so many times as large."""
        epsilon, reach = times * self.epsilon, float(self.sensitivity)
        return self.clip * gaussian_noise_multiplier(epsilon, 1, self.delta, sensitivity=reach)
