"""Training the rows: ours by the defaults, fairlearn's reduction, and what is plainest."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.experiments.people import measured
from fpfl.experiments.people.rows import (
    ALPHA,
    CONSTRAINTS,
    LEAST_SQUARES,
    LOGISTIC,
    MEAN,
    OURS,
    REDUCTION,
    TUNED,
    Row,
)
from fpfl.experiments.people.tables import Split, Table, people, tables
from fpfl.experiments.together import finished
from fpfl.fairness.constraints import Constraint
from fpfl.privacy.plan import PrivacyWarning
from fpfl.privacy.settings import Privacy
from fpfl.sweeps.batch import Job
from fpfl.sweeps.grid import grid, with_settings
from fpfl.sweeps.sweep import sweep
from fpfl.training import FpflWarning
from fpfl.training.run import Run

Result = dict[str, Any]
Floats = NDArray[np.float64]

GRID_CLIPS, GRID_RATES, GRID_SHARES = (1.5, 3.0, 6.0, 12.0, 24.0), (0.1, 0.3, 1.0), (0.1, 0.25)
"""The fixed grid of the tuned rows: C and 1/η for users of one row, and the counts' share.

C is for n̄ rows a user n̄ times as large, and η as small: a user's gradient is a sum.
"""

GRID_SEEDS, GRID_HELD_OUT = 3, 0.25


def default_job(
    data: FederatedDataset,
    constraint: Constraint | None,
    epsilon: float | None,
    seed: int,
    cohort: int | None = None,
) -> Job:
    """What ``fpfl`` trains by default: the settings of its scikit-learn estimators.

    All rows have their defaults from here, and none of its own. The population has been read by its
    declared schema; the noise is drawn from the seed, for these are simulations.
    """
    from fpfl.estimator import FairPrivateClassifier, FairPrivateRegressor

    make = FairPrivateRegressor if data.schema.classes is None else FairPrivateClassifier
    estimator = make(epsilon=epsilon, cohort=cohort, random_state=seed)
    job = estimator._job(data, constraint, None)
    return replace(job, settings={**job.settings, "noise_seed": None if epsilon is None else seed})


def table_of(row: Row) -> Table:
    """The row's table."""
    return next(table for table in tables() if table.name == row.table)


def constraint_of(row: Row) -> Constraint | None:
    """What the row's training makes equal, between the groups of the table's only attribute."""
    return None if row.constraint is None else CONSTRAINTS[row.constraint](tolerance=ALPHA)


def run_rows(work: Sequence[tuple[Row, int]], folder: Path) -> Iterator[tuple[int, Result]]:
    """Train rows with seeds, those of one shape together, and measure each."""
    jobs: list[Job] = []
    numbers: list[int] = []
    choices: dict[Row, dict[str, Any]] = {}  # one for all seeds of a row
    for number, (row, seed) in enumerate(work):
        table = table_of(row)
        split = people(table, folder)
        if row.algorithm in PLAIN:
            start = time.perf_counter()
            found = PLAIN[row.algorithm](row, split)
            seconds = round(time.perf_counter() - start, 2)
            yield number, about(row, seed, table, split) | found | {"seconds": seconds}
            continue
        constraint = constraint_of(row)
        with quiet():
            job = default_job(split.train, constraint, row.epsilon, seed, row.cohort)
            if row.algorithm == TUNED:
                if row not in choices:
                    models = grid_models(row, split.train)
                    choices[row] = tuned(job, models, job.settings["privacy"])
                job = with_tuned(job, choices[row])
        jobs.append(job)
        numbers.append(number)
    runs = finished(jobs)
    while True:
        with quiet():  # not while the results are somebody else's
            each = next(runs, None)
        if each is None:
            return
        number = numbers[each.number]
        row, seed = work[number]
        table = table_of(row)
        split = people(table, folder)
        found = of_run(each.run, split, constraint_of(row))
        took = {"seconds": round(each.seconds, 2), "together": each.together}
        yield number, about(row, seed, table, split) | found | took


def about(row: Row, seed: int, table: Table, split: Split) -> Result:
    """What a result is of."""
    return row.as_dict() | {
        "row": row.name,
        "seed": seed,
        "role": table.role,
        "K": split.train.population,
        "samples_per_user": round(len(split.train) / split.train.population, 2),
        "test_users": split.test.population,
    }


def of_run(run: Run, split: Split, constraint: Constraint | None) -> Result:
    """What a finished training is worth, and what it was trained with."""
    said = run.privacy
    parts: Result
    if split.train.schema.classes is None:
        parts = {
            name: {"rmse": measured.rmse(measured.errors(run.model, data))}
            for name, data in (("train", split.train), ("test", split.test))
        }
    else:
        parts = {
            "train": measured.of_model(run.model, split.train, constraint),
            "test": measured.of_model(run.model, split.test, constraint),
            "warned": (run.collapse or "").startswith("Collapsed"),
        }
    return parts | {
        "stopped": run.stopped,
        "epsilon_spent": None if said is None else said.epsilon,
        "delta": None if said is None else said.delta,
        "noise_multiplier": None if said is None else said.noise_multiplier,
        "settings": settings_of(run),
    }


def settings_of(run: Run) -> Result:
    """C, where it adapts the one of the last round too; η, m and T."""
    known = run.settings
    clip = known.get("clip") or {}
    return {
        "clip": clip.get("bound") if isinstance(clip, dict) else clip,
        "clip_at_end": run.history[-1].get("clip_bound") if run.history else None,
        "counts_share": clip.get("counts_share") if isinstance(clip, dict) else None,
        "learning_rate": known.get("learning_rate"),
        "cohort": known.get("cohort"),
        "rounds": known.get("rounds"),
    }


def tuned(job: Job, models: Sequence[nn.Module], privacy: Privacy) -> dict[str, Any]:
    """C, η and the counts' share by held-out training users, as `with_tuned` takes them.

    The fixed grid, three seeds each, is trained on three quarters of the training users, and the
    best accuracy within α on the others is taken (`Sweep.chosen`); no test user is looked at.
    ``models`` are the initial ones of the seeds, ``privacy`` that of these fewer users.
    """
    settings, train = job.settings, job.data
    rows = max(1.0, train.schema.samples_per_user or 1.0)
    common = {k: v for k, v in settings.items() if k not in ("seed", "noise_seed")}
    runs = grid(
        privacy__clip__adapts=[None],  # the bound is what is tuned
        privacy__clip__bound=[rows * bound for bound in GRID_CLIPS],
        learning_rate=[rate / rows for rate in GRID_RATES],
        privacy__clip__counts_share=GRID_SHARES,
        seed=range(GRID_SEEDS),
    )
    # What a sweep says of itself is not about the table.
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        found = sweep(
            lambda seed: models[seed],
            train,
            runs,
            held_out=GRID_HELD_OUT,
            **(common | {"privacy": privacy}),
        )
        return runs[found.finish().chosen().best.runs[0]]


def grid_models(row: Row, train: FederatedDataset) -> list[nn.Module]:
    """The initial models of the grid's seeds."""
    return [
        default_job(train, constraint_of(row), row.epsilon, seed).model
        for seed in range(GRID_SEEDS)
    ]


def with_tuned(job: Job, chosen: dict[str, Any]) -> Job:
    """The job with what was chosen by a sweep; all else is the default."""
    names = [name for name in chosen if name not in ("seed", "noise_seed")]
    settings = with_settings(job.settings, {name: chosen[name] for name in names})
    return replace(job, settings=settings)


# --- without privacy, and without us ------------------------------------------------------------


def _arrays(data: FederatedDataset) -> tuple[Floats, NDArray[Any], NDArray[np.int64]]:
    return (
        data.features.numpy().astype(np.float64),
        data.labels.numpy(),
        data.attributes[:, 0].numpy(),
    )


def _standardised(split: Split) -> tuple[Floats, Floats]:
    """Features with mean 0 and deviation 1 over the training rows: nothing here is private."""
    train, test = (part.features.numpy().astype(np.float64) for part in (split.train, split.test))
    mean, width = train.mean(axis=0), train.std(axis=0)
    width = np.where(width > 1e-9, width, 1.0)
    return (train - mean) / width, (test - mean) / width


def reduction(row: Row, split: Split) -> Result:
    """fairlearn's ``ExponentiatedGradient`` of logistic regression; or that alone."""
    from fairlearn.reductions import (
        DemographicParity,
        EqualizedOdds,
        ExponentiatedGradient,
        TruePositiveRateParity,
    )
    from sklearn.linear_model import LogisticRegression

    X, X_test = _standardised(split)
    _, y, groups = _arrays(split.train)
    learner = LogisticRegression(max_iter=200)
    model: Any = learner
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a solver that would go on for longer
        if row.constraint is None:
            learner.fit(X, y)
        else:
            known = {
                "fnr": TruePositiveRateParity,
                "odds": EqualizedOdds,
                "parity": DemographicParity,
            }
            model = ExponentiatedGradient(
                learner, known[row.constraint](difference_bound=row.bound)
            )
            model.fit(X, y, sensitive_features=groups)

    def probabilities(rows: Floats) -> Floats:
        """P[Ŷ = 1]: the reduction tosses coins, logistic regression alone does not."""
        if row.constraint is None:
            return np.asarray(model.predict(rows), dtype=np.float64)
        return np.asarray(model._pmf_predict(rows)[:, 1])

    return {
        name: measured.of_probabilities(probabilities(rows), measured.Cells.of(data))
        for name, rows, data in (("train", X, split.train), ("test", X_test, split.test))
    }


def mean(row: Row, split: Split) -> Result:
    """The training labels' mean for everybody."""
    middle = float(split.train.labels.double().mean())
    return {
        name: {"rmse": measured.rmse(middle - data.labels.double().numpy())}
        for name, data in (("train", split.train), ("test", split.test))
    }


def least_squares(row: Row, split: Split) -> Result:
    """Least squares with an intercept."""
    found, y = _standardised(split), split.train.labels.double().numpy()
    with_one = [np.column_stack([rows, np.ones(len(rows))]) for rows in found]
    w = np.linalg.lstsq(with_one[0], y, rcond=None)[0]
    return {
        name: {"rmse": measured.rmse(rows @ w - data.labels.double().numpy())}
        for name, rows, data in zip(
            ("train", "test"), with_one, (split.train, split.test), strict=True
        )
    }


PLAIN = {
    REDUCTION: reduction,
    LOGISTIC: reduction,
    MEAN: mean,
    LEAST_SQUARES: least_squares,
}
"""Rows that are no training of ours."""


class quiet(warnings.catch_warnings):  # noqa: N801 - used like a function
    """Without warnings that are the tables' own: seeds, constraints that the noise dominates."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FpflWarning)
        return found


def shape_of(row: Row) -> tuple[Any, ...]:
    """What is equal in rows whose trainings can be computed as one; seeds and ε may differ."""
    if row.algorithm in (*PLAIN, TUNED):
        return (row,)
    what = OURS if row.constraint else "plain"
    return row.table, what, row.constraint, row.epsilon is None, row.cohort


def cost_of(row: Row, users: int) -> float:
    """About how long a row takes, in no unit."""
    if row.algorithm in PLAIN:
        return 50.0 * users
    cohort = row.cohort or min(users, max(100, min(users // 10, 5000)))
    grid_runs = len(GRID_CLIPS) * len(GRID_RATES) * len(GRID_SHARES) * GRID_SEEDS
    return (grid_runs if row.algorithm == TUNED else 1) * 1000.0 * (200 + cohort)
