"""Trainings prepared here and computed on a machine that has torch and numpy alone.

``fpfl reproduce tables --data DIR --prepare work.pickle`` reads the tables, settles the defaults
and calibrates the noise; ``python -m fpfl.experiments.people work.pickle --out results.json
--device cuda`` trains and measures elsewhere. The file is a pickle: a program, so open your own
alone. Rows that are no trainings of ours (the reduction) are for the machine that prepares.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from fpfl.experiments.people.rows import TUNED, Row, Selection
from fpfl.experiments.people.runner import Keeper, here
from fpfl.experiments.people.runs import (
    GRID_HELD_OUT,
    PLAIN,
    Result,
    about,
    constraint_of,
    cost_of,
    default_job,
    grid_models,
    of_run,
    quiet,
    shape_of,
    table_of,
    tuned,
    with_tuned,
)
from fpfl.experiments.people.tables import Split, people
from fpfl.experiments.together import finished, groups_of, side_by_side_shares
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import Privacy
from fpfl.store.files import write_whole
from fpfl.sweeps.batch import Job
from fpfl.training.inputs import Inputs


@dataclass(frozen=True)
class Search:
    """What a tuned row's grid is trained with: the initial models of its seeds, and the noise."""

    models: list[nn.Module]
    privacy: Privacy


@dataclass(frozen=True)
class Prepared:
    """A training whose noise is calibrated; ``spent`` is what only an accountant can say of it."""

    row: Row
    seed: int
    job: Job
    spent: dict[str, Any]
    search: Search | None = None


def prepare(selection: Selection, data: Path, path: Path, say: Callable[[str], None]) -> int:
    """Write what is to be trained into a file; returns how many trainings it has."""
    work = [
        (row, seed) for row, seed in here(selection.work(), data, say) if row.algorithm not in PLAIN
    ]
    splits = {row.table: people(table_of(row), data) for row, _ in work}
    searches: dict[Row, Search] = {}
    with quiet():
        made = [_prepared(row, seed, splits[row.table], searches) for row, seed in work]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pickle.dumps((made, splits), pickle.HIGHEST_PROTOCOL)
    write_whole(path, zlib.compress(content, 6))  # most features are 0 or 1
    return len(made)


def _prepared(row: Row, seed: int, split: Split, searches: dict[Row, Search]) -> Prepared:
    job = default_job(split.train, constraint_of(row), row.epsilon, seed, row.cohort)
    if job.settings["privacy"] is None:
        return Prepared(row, seed, job, {"epsilon_spent": None, "delta": None})
    K = split.train.K
    told, plan = _calibrated(job, K, row)
    if row.algorithm == TUNED and row not in searches:
        fewer = K - round(GRID_HELD_OUT * K)
        searches[row] = Search(grid_models(row, split.train), _calibrated(job, fewer, row)[0])
    job = replace(job, settings={**job.settings, "privacy": told})
    spent = {"epsilon_spent": plan.epsilon, "delta": plan.delta}
    return Prepared(row, seed, job, spent, searches.get(row))


def _calibrated(job: Job, population: int, row: Row) -> tuple[Privacy, PrivacyPlan]:
    """The job's privacy with its σ and σ₀ in place of ε, and the plan that they are from."""
    privacy: Privacy = job.settings["privacy"]
    plan = privacy.plan(
        population=population,
        cohort=job.settings["cohort"],
        rounds=job.settings["rounds"],
        constrained=row.constraint is not None,
        measurement=Inputs.measures(job.data, privacy, measure=job.settings.get("measure", True)),
    )
    told = replace(
        privacy,
        epsilon=None,
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        measurement=plan.measurement,
    )
    return told, plan


def run_prepared(
    path: Path, out: Path, *, device: str, jobs: int, words: Sequence[str]
) -> list[Result]:
    """Train what a file has and results have not; returns all that the results file has then."""
    made, splits = _read(path)
    with Keeper(out, words) as keeper:
        due = [n for n, each in enumerate(made) if not keeper.has(each.row, each.seed)]
        keeper.begin(len(made), len(due))
        groups = groups_of(
            [shape_of(made[n].row) for n in due],
            [cost_of(made[n].row, splits[made[n].row.table].train.population) for n in due],
            jobs,
        )
        shares = [[due[place] for place in group] for group in groups]
        compute = _Share(path, device)
        for group, place, result in side_by_side_shares(shares, compute, jobs):
            each = made[shares[group][place]]
            keeper.take(each.row, each.seed, result)
        return keeper.results()


@lru_cache(maxsize=1)
def _read(path: Path) -> tuple[list[Prepared], dict[str, Split]]:
    try:
        made, splits = pickle.loads(zlib.decompress(path.read_bytes()))
    except (zlib.error, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} was not written by --prepare of this version: {error}") from error
    return made, splits


@dataclass(frozen=True)
class _Share:
    """Trains the trainings of these numbers; a worker reads the file once."""

    path: Path
    device: str

    def __call__(self, numbers: Sequence[int]) -> Iterator[tuple[int, Result]]:
        made, splits = _read(self.path)
        here = [made[number] for number in numbers]
        choices: dict[Row, dict[str, Any]] = {}
        jobs = []
        for each in here:
            job = replace(each.job, model=each.job.model.to(self.device))
            if each.search is not None:
                if each.row not in choices:
                    models = [model.to(self.device) for model in each.search.models]
                    with quiet():
                        choices[each.row] = tuned(job, models, each.search.privacy)
                job = with_tuned(job, choices[each.row])
            jobs.append(job)
        runs = finished(jobs)
        while True:
            with quiet():
                found = next(runs, None)
            if found is None:
                return
            each = here[found.number]
            table, split = table_of(each.row), splits[each.row.table]
            took = {"seconds": round(found.seconds, 2), "together": found.together}
            result = about(each.row, each.seed, table, split)
            result |= of_run(found.run, split, constraint_of(each.row))
            yield found.number, result | each.spent | took | {"device": self.device}
