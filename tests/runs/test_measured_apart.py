"""What `fpfl.measure` charges in a run's name is no charge for the run's own measurement."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from conftest import make_population
from torch import nn

import fpfl
from fpfl.data.inputs import InputColumn
from fpfl.privacy.budget import PopulationLedger
from fpfl.runs.folder import OpenRun


def test_a_refused_measurement_is_not_made_after_another_was_charged(tmp_path: Path) -> None:
    columns = tuple(InputColumn(f"x{n}", n) for n in range(5))
    data = replace(make_population(users=400), columns=columns)
    ledger, folder = tmp_path / "people.ledger", tmp_path / "run"
    PopulationLedger.create(ledger, population=data.K, epsilon=1.0).close()

    def train(*, resume: bool) -> fpfl.Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fpfl.train(
                nn.Linear(5, 1),
                data,
                cohort=100,
                rounds=3,
                selection="average",
                privacy=fpfl.Privacy(noise_multiplier=1.5, measurement=1.0),
                folder=fpfl.RunFolder(folder, resume=resume, ledger=ledger),
            )

    assert "measurement of the inputs" in str(train(resume=False).stopped)  # there is no room
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fpfl.measure(
            data,
            columns={"feature 0": (-3.0, 3.0)},
            noise_multiplier=50.0,
            run=folder,
            ledger=ledger,
        )
    again = train(resume=True)
    assert "measurement of the inputs" in str(again.stopped)
    assert again.scaling is None
    assert OpenRun(folder).ledger.scaling is None
    with PopulationLedger.open(ledger, write=False) as found:
        assert sum(found.charges().values()) == 1
