"""The front door: private statistics of a population, charged before they are released."""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fpfl.aggregation import NoiseSource, SystemNoise
from fpfl.data.federated import FederatedDataset
from fpfl.data.table_schema import TableSchema, read_table_schema
from fpfl.measurement.counting import whole_sum
from fpfl.measurement.people import (
    Columns,
    People,
    Symlog,
    people_of_dataset,
    people_of_table,
)
from fpfl.measurement.plan import MeasurementPlan, plan_measurement
from fpfl.measurement.result import Measurement
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.plan import Neighbours
from fpfl.runs.folder import OpenRun
from fpfl.runs.ledger import RunLedger
from fpfl.store.files import write_whole

MEASURED = "measured.json"
"""What a run's folder calls its measurement."""


def measure(
    data: Any,
    schema: TableSchema | str | Path | None = None,
    *,
    columns: Columns | None = None,
    bins: int = 64,
    symlog: Symlog = (),
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    neighbours: Neighbours = "zero-out",
    confidence: float = 0.95,
    ledger: str | Path | None = None,
    name: str | None = None,
    run: str | Path | OpenRun | None = None,
    moved: bool = False,
    out: str | Path | None = None,
    noise: NoiseSource | None = None,
) -> Measurement:
    """Measure a population once, privately at the level of users, under a budget of its own.

    All columns are one release: histograms over public bins and counts of declared categories, in
    which a user's rows weigh 1/n_k each. Medians, quantiles, means and shares follow from it.
    Values that were not declared are never counted by name.

    Parameters
    ----------
    data
        A table (a CSV or Parquet file, a data frame) with its schema, or a `FederatedDataset`.
        Nothing in it is an error: a value that is none counts nowhere.
    schema
        A table's: a `TableSchema` or the path of a file.
    columns
        Which columns; the schema's features that have no centre, scale or shares by default. The
        label and attributes can be named as well (a dataset's label is ``"label"``). With ranges,
        ``{"age": (0, 100)}``, in those ranges. A dataset's features are measured in the units that
        they are in: over [−3, 3] by default, where they were scaled by declared ranges.
    bins
        For each column of numbers. Noise on a quantile's rank grows with √bins.
    symlog
        Columns whose declared range has a long tail, which get symmetric-log bins; with
        thresholds, ``{"income": 100.0}``, those are linear up to them.
    epsilon, noise_multiplier
        Give one: the ε that the release may cost, e.g. 0.2, or σ, the noise over √(number of
        columns).
    delta
        δ; 1/(10 K) when it is not given.
    neighbours
        What one user may change: ``"zero-out"``, ``"add-remove"`` (which takes a declared K) or
        ``"replace-one"`` (which takes twice the noise).
    confidence
        Of each interval by itself.
    ledger
        The population's ledger: charged, on disk, before anything is released, and refused where
        its budget does not suffice.
    name
        What the release is called in that ledger; the run's name, or a new one, when it is not
        given.
    run
        The folder of a finished run on the same users: its own ledger records the release as well,
        before it is made, and refuses a second one.
    moved
        The run's folder was moved or restored, and no other copy of it is used.
    out
        A new file for the result, as JSON; ``measured.json`` in the run's folder, where there is
        one.
    noise
        Where the noise comes from; the operating system's randomness when it is not given.

    Returns
    -------
    Measurement
        ``print`` it, or see ``number("age").median``, ``categories("job").shares``,
        ``statement()``, ``plot()``.

    Raises
    ------
    BudgetExhaustedError
        The ledger's budget does not suffice: nothing was charged or released.
    """
    source = SystemNoise() if noise is None else noise
    opened = OpenRun(Path(run)) if isinstance(run, str | Path) else run
    if opened is not None:
        opened.require_finished()
        out = opened.path / MEASURED if out is None else out
    file = None if out is None else new_file(out)
    people = _people(data, schema, columns, bins, symlog)
    plan = plan_measurement(
        people.columns,
        population=people.population,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighbours=neighbours,
        confidence=confidence,
        declared=people.declared,
    )
    if opened is None:
        found = measured(plan, people, source, ledger=ledger, name=name)
    else:
        opened.ledger.to_evaluate(moved=moved)
        with opened.ledger as own:
            found = measured(plan, people, source, ledger=ledger, name=name or own.run, run=own)
    if file is not None:
        text = json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n"
        write_whole(file, text.encode())
    return found


def new_file(path: str | Path) -> Path:
    """A file that can be written later; said now, before anything is paid for."""
    file = Path(path)
    if file.exists():
        raise ValueError(
            f"{file} is there already. What was measured is paid for and can be read again; to "
            "measure once more, at the same price again, name another file"
        )
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file} cannot be written: there is no folder {file.parent}; make it")
    return file


def measured(
    plan: MeasurementPlan,
    people: People,
    source: NoiseSource,
    *,
    ledger: str | Path | None = None,
    name: str | None = None,
    run: RunLedger | None = None,
) -> Measurement:
    """Count, charge, and only then release: a crash in between costs, and releases nothing.

    Who withdrew, by the ledger, is left out of the sum and stays in K.
    """
    charged = None
    with ExitStack() as stack:
        theirs = run.population if run is not None else None
        if ledger is not None:
            theirs = stack.enter_context(PopulationLedger.open(ledger))
        withdrawn = frozenset() if theirs is None else theirs.withdrawn()
        total = whole_sum(people.chunks(), plan.columns, withdrawn)
        if ledger is not None and theirs is not None:
            charged = name or f"measurement-{secrets.token_hex(4)}"
            plan.charge(charged, theirs)
        if run is not None:
            run.measurement(plan.mechanism, plan.epsilon, plan.delta)
    released = plan.release(total, source)
    return Measurement.of(plan, released, seeded=source.seeded, charged=charged)


def _people(
    data: Any,
    schema: TableSchema | str | Path | None,
    columns: Columns | None,
    bins: int,
    symlog: Symlog,
) -> People:
    if isinstance(columns, str) or isinstance(symlog, str):
        raise ValueError(
            f"columns={columns!r} and symlog={symlog!r} were given; expected lists of names, e.g. "
            "columns=['age']"
        )
    if isinstance(data, FederatedDataset):
        if schema is not None:
            raise ValueError("a dataset has a schema of its own; give schema with a table alone")
        data.schema.check_declared()
        return people_of_dataset(data, columns, bins, symlog)
    if schema is None:
        raise ValueError(
            "a table needs its declared schema: measure(table, 'people.schema.toml'); "
            "fpfl data draft makes one to be checked"
        )
    declared = schema if isinstance(schema, TableSchema) else read_table_schema(schema)
    declared.schema().check_declared()
    return people_of_table(data, declared, columns, bins, symlog)
