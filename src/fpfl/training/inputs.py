"""Inputs: what a training finds out about a table's columns before its first round, once.

Declared figures are used as they are. What is missing is measured, under the plan's own ε, where
training is private, and computed exactly where it is not. Either way it is written down before
anything is computed with it, and a run that goes on reads what was written.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fpfl.aggregation.noise import NoiseSource
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import InputColumn, Scaling, Source, scaling_of
from fpfl.data.schema import Schema
from fpfl.measurement.inputs import (
    bins_for,
    exact_inputs,
    input_cells,
    input_sum,
    measured_inputs,
    unknown,
)
from fpfl.measurement.plan import MeasurementPlan, plan_measurement
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
        size = data.schema.shape[0]
        if too_many(data.columns, data.schema):
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


def too_many(columns: Sequence[InputColumn], schema: Schema) -> bool:
    """Whether columns are about more inputs than samples have; a regression's label is behind."""
    most = schema.shape[0] + (schema.label_range is not None)
    return any(column.first + column.size > most for column in columns)


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
    numbers = numbers_of(mine)
    bits = struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))
    same = ranks.numbers_from_first(list(bits))
    return with_numbers(
        mine, struct.unpack(f"<{len(numbers)}d", struct.pack(f"<{len(numbers)}q", *same))
    )


def numbers_of(scaling: Scaling) -> tuple[float, ...]:
    """The numbers of a scaling that are found out; the others follow from the columns.

    How many there are is public: what is ranked has knots, whatever was found.
    """
    knots = np.array(scaling.knots).reshape(-1).tolist()
    return (*scaling.label, *scaling.centre, *scaling.width, *knots)


def with_numbers(scaling: Scaling, numbers: Sequence[float]) -> Scaling:
    """A scaling with other such numbers, as many as it has; a ValueError where they are none."""
    first, last = 2 + scaling.inputs, 2 + 2 * scaling.inputs
    each = len(scaling.knots[0]) if scaling.knots else 0
    pairs = np.array(numbers[last:]).reshape(len(scaling.ranked), each, 2).tolist()
    return replace(
        scaling,
        label=(numbers[0], numbers[1]),
        centre=tuple(numbers[2:first]),
        width=tuple(numbers[first:last]),
        knots=tuple(tuple((place, share) for place, share in each) for each in pairs),
    )
