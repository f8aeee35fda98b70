"""Inputs: what a training finds out about a table's columns before its first round, once.

Declared figures are used as they are. What is missing is measured, under the plan's own ε, where
training is private, and computed exactly where it is not. Either way it is written down before
anything is computed with it, and a run that goes on reads what was written.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from fpfl.aggregation.noise import NoiseSource
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import InputColumn, Scaling, Source, scaling_of
from fpfl.measurement.inputs import (
    bins_for,
    exact_inputs,
    input_cells,
    input_sum,
    measured_inputs,
    unknown,
)
from fpfl.measurement.plan import MeasurementPlan, plan_measurement
from fpfl.privacy.conventions.base import REGISTER
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import Privacy
from fpfl.runs.folder import WITHDRAWALS
from fpfl.runs.journal import Journal, PopulationJournal, read_withdrawals
from fpfl.server.ranks import Ranks

_AT_ONCE = 2**18
"""Samples that are scaled together."""


@dataclass(frozen=True)
class Inputs:
    """What is settled about the inputs of a training before its data is touched.

    Parameters
    ----------
    columns
        What is public about the table's columns.
    size
        How many inputs there are.
    source
        Where figures are from that nobody declared; "declared" where there are none of those.
    """

    columns: tuple[InputColumn, ...]
    size: int
    source: Source

    @classmethod
    def of(cls, data: FederatedDataset, privacy: Privacy | None, *, measure: bool) -> Inputs | None:
        """How a population's inputs are to be scaled; None where they are used as they are."""
        if not measure or not data.columns or data.lazy:
            return None
        if privacy is not None and REGISTER[privacy.convention].shares:
            return None  # a federation's: nobody has all rows
        size = data.schema.shape[0]
        # A regression's label stands behind the inputs.
        if any(
            column.first + column.size > size + (column.first == size) for column in data.columns
        ):
            raise ValueError(
                f"the data's columns are about more inputs than the {size} that samples have: its "
                "features are not those of the table any more. Take the columns away, "
                "dataclasses.replace(data, columns=()), or give measure=False"
            )
        source: Source = "declared"
        if unknown(data.columns):
            source = "exact" if privacy is None else "measured"
        return cls(data.columns, size, source)

    @classmethod
    def measures(cls, data: FederatedDataset, privacy: Privacy | None, *, measure: bool) -> bool:
        """Whether a training on a population has a release before its first round."""
        found = cls.of(data, privacy, measure=measure)
        return found is not None and found.measured

    @property
    def measured(self) -> bool:
        """Whether there is a release before the first round."""
        return self.source == "measured"

    @property
    def numbers(self) -> int:
        """How many numbers are released at most."""
        return sum(each.size for each in input_cells(self.wanted)) if self.measured else 0

    @property
    def wanted(self) -> tuple[InputColumn, ...]:
        """The columns that nobody declared."""
        return unknown(self.columns)

    def plan(self, plan: PrivacyPlan, data: FederatedDataset) -> MeasurementPlan:
        """The release that the training's plan has before its first round."""
        users = plan.real_population or plan.population
        return plan_measurement(
            input_cells(self.wanted, self.bins(plan)),
            population=users,
            noise_multiplier=plan.measurement,
            neighbours=plan.neighbours,
            declared=data.schema.population is not None,
        )

    def bins(self, plan: PrivacyPlan) -> int:
        """How many bins a number has."""
        assert plan.measurement is not None  # there is a release
        users = plan.real_population or plan.population
        return bins_for(plan.measurement, len(self.wanted), users)

    def found(
        self,
        data: FederatedDataset,
        plan: PrivacyPlan | None,
        noise: NoiseSource,
        journal: Journal | PopulationJournal | None = None,
    ) -> Scaling:
        """The scaling: what was written down, or what is found out now, charged and written down.

        Parameters
        ----------
        data
            The population.
        plan
            The training's plan, which has the measurement in it.
        noise
            Where noise comes from.
        journal
            What charges and writes down; None where nothing is kept.
        """
        kept = journal.ledger.scaling if isinstance(journal, Journal) else None
        if kept is not None:
            return Scaling.from_dict(kept["scaling"])
        found = {}
        if self.measured:
            assert plan is not None  # it is measured for privacy's sake
            release = self.plan(plan, data)
            without = _charged(journal, Mechanism.measurement_of(plan))
            total = input_sum(data, self.wanted, without, self.bins(plan))
            found = measured_inputs(self.wanted, release, release.release(total, noise))
        elif self.source == "exact":
            found = dict(exact_inputs(data, self.wanted))
        scaling = scaling_of(self.columns, self.size, found)
        if isinstance(journal, Journal):
            journal.ledger.record_scaling(scaling.as_dict(), measured=self.measured)
        return scaling


def _charged(
    journal: Journal | PopulationJournal | None, mechanism: Mechanism | None
) -> Collection[int]:
    """Charge the measurement, before it is made; who withdrew and is left out of it."""
    if journal is None or mechanism is None:
        return frozenset()
    if isinstance(journal, PopulationJournal):
        return journal.measurement(mechanism)
    journal.ledger.charge_scaling()
    theirs = journal.ledger.population
    gone = read_withdrawals(journal.folder / WITHDRAWALS)
    return gone if theirs is None else gone | theirs.withdrawn()


def scaled(data: FederatedDataset, scaling: Scaling) -> FederatedDataset:
    """The population with its inputs scaled, and its label's unit as it was found."""
    rows = max(1, _AT_ONCE // max(1, len(scaling.ranked)))
    pieces = [scaling(piece) for piece in torch.split(data.features, rows)]
    schema = data.schema
    if schema.label_range is not None:
        (low, high), (centre, width) = schema.label_range, scaling.label
        unit = (low + centre * (high - low), width * (high - low))
        schema = replace(schema, label_unit=unit)
    return replace(data, features=torch.cat(pieces), schema=schema, columns=())


def from_first(inputs: Inputs, scaling: Scaling | None, ranks: Ranks) -> Scaling:
    """The first process's scaling, in all processes."""
    if ranks.size == 1:
        assert scaling is not None  # this is the first
        return scaling
    mine = scaling or scaling_of(inputs.columns, inputs.size)
    # How many knots there are is public: what is ranked has some, whatever was found.
    knots = np.array(mine.knots).reshape(-1).tolist()
    numbers = (*mine.label, *mine.centre, *mine.width, *knots)
    bits = struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))
    same = ranks.numbers_from_first(list(bits))
    found = struct.unpack(f"<{len(numbers)}d", struct.pack(f"<{len(numbers)}q", *same))
    first, last = 2 + inputs.size, 2 + 2 * inputs.size
    pairs = np.array(found[last:]).reshape(len(mine.ranked), -1, 2).tolist()
    return replace(
        mine,
        label=(found[0], found[1]),
        centre=found[2:first],
        width=found[first:last],
        knots=tuple(tuple((place, share) for place, share in each) for each in pairs),
    )
