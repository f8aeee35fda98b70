"""One row of a table: its users, its constraint, its settings; trained and measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol, get_args

from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.experiments import adult, femnist
from fpfl.experiments.adult import changed
from fpfl.experiments.fixed import fixed_clipping, fixed_learning_rate
from fpfl.experiments.tables import Options, Row
from fpfl.experiments.together import Finished, finished
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import Evaluation
from fpfl.methods import MMDM, REGISTER, Method, OneGradient, Tran
from fpfl.privacy.plan import PrivacyPlan, PrivacyWarning
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.server.selection import Rule
from fpfl.store.typed import typed
from fpfl.sweeps.batch import Job
from fpfl.training import FpflWarning
from fpfl.training.run import Run, evaluate_model
from fpfl.users.layout import Layout

Result = dict[str, Any]


class Task(Protocol):
    """What a table is about: a module with these functions."""

    def title(self, options: Options) -> str:
        """What the data is called."""
        ...

    def content(self, options: Options) -> str:
        """A fingerprint of the data."""
        ...

    def users(self, row: Row, options: Options) -> int:
        """K of a row."""
        ...

    def training(self, row: Row, seed: int, options: Options) -> FederatedDataset:
        """The population to train on."""
        ...

    def testing(self, row: Row, options: Options) -> FederatedDataset:
        """The test set."""
        ...

    def constraint(self, row: Row) -> Constraint:
        """What is measured, and enforced where the row has a method."""
        ...

    def network(self, row: Row, data: FederatedDataset, seed: int) -> nn.Module:
        """The network, initialised by the seed."""
        ...


TASKS: dict[str, Task] = {"adult": adult, "femnist": femnist}


def row_name(row: Row, options: Options) -> str:
    """What a pattern is matched with."""
    return row.name(TASKS[row.task].users(row, options))


def shape_of(row: Row) -> Hashable:
    """What is equal in rows whose trainings can be computed as one; seeds and ε may differ."""
    clipped = row.clip is not None or row.suggested
    what = (row.task, row.model, row.constraint, row.method, row.change, clipped, row.private)
    return *what, row.mean_samples, row.cohort, row.batch, row.rounds


def cost_of(row: Row) -> float:
    """About how long a training of the row takes, in no unit."""
    users = row.cohort or row.batch or 1
    # A round costs something even if nobody is in it; the paper's fair rows have several gradients.
    one = row.method in (None, "one-gradient") and row.change != "separate"
    gradients = 1.0 if one else 2.0
    return gradients * row.rounds * (200 + users)


def run_rows(
    work: Sequence[tuple[Row, int]], options: Options, *, apart: bool = False
) -> Iterator[tuple[int, Result]]:
    """Train rows with seeds, together or ``apart``, and measure each; results as they finish.

    Each is evaluated on the test set and on the population that it was trained on.
    """
    jobs, loading = [], []
    for row, seed in work:
        start, task = time.perf_counter(), TASKS[row.task]
        with _quiet():
            job = row_job(
                row, task.training(row, seed, options), task.constraint(row), seed, options
            )
        jobs.append(job)
        loading.append(time.perf_counter() - start)
    runs = finished(jobs, apart=apart)
    while True:
        with _quiet():  # not while the results are somebody else's
            each = next(runs, None)
        if each is None:
            return
        row, seed = work[each.number]
        start = time.perf_counter()
        result = _result(row, seed, options, jobs[each.number].data, each)
        seconds = loading[each.number] + each.seconds + time.perf_counter() - start
        yield each.number, result | {"seconds": round(seconds, 2)}


def _result(
    row: Row, seed: int, options: Options, data: FederatedDataset, trained: Finished
) -> Result:
    """What a finished run of a row is measured to be."""
    task, run = TASKS[row.task], trained.run
    if run.stopped and not row.private:
        raise ValueError(f"{row_name(row, options)}, seed {seed}: {run.stopped}")
    test, training = (
        evaluate_model(run.model, each, constraint=task.constraint(row), bootstrap=0)
        for each in (task.testing(row, options), data)
    )
    return {
        "table": row.table,
        "data": task.title(options),
        "model": row.model,
        "algorithm": row.algorithm,
        "cohort": row.cohort,
        "variant": row.variant,
        "population": data.population,
        "accounted_population": row.population,
        "rounds": row.rounds,
        "seed": seed,
        "accuracy": test.accuracy,
        "error": test.error,
        "gap": test.gaps["constraint"].value,
        **{f"{name}_gap": _gap(test, name) for name in ("fnr", "eo", "demp", "pp", "accuracy")},
        "train_accuracy": training.accuracy,
        "train_error": training.error,
        "train_gap": training.gaps["constraint"].value,
        "rates": {"test": _rates(test), "train": _rates(training)},
        "stopped": run.stopped,
        "numbers_sent": typed(Layout, run.settings["layout"]).size,
        "real_cohort": run.settings["cohort"],
        **_privacy(run),
        "device": options.device,
        "precision": options.precision,
        "together": trained.together,
        "training_seconds": round(trained.seconds, 2),
    }


def _privacy(run: Run) -> dict[str, Any]:
    """What ε can be computed from, and the place where it will stand (`accounts`)."""
    said = run.privacy
    return {
        "convention": said and said.convention,
        "epsilon": None,
        "epsilon_honest": None,
        "epsilon_real": None,
        "delta": said and said.delta,
        "noise_multiplier": said and said.noise_multiplier,
        "blocks": said and [[block.name, block.bound, block.share] for block in said.blocks],
    }


def row_job(
    row: Row, data: FederatedDataset, constraint: Constraint, seed: int, options: Options
) -> Job:
    """The training of one row: Algorithm 1 with that row's parts switched on."""
    settings = _settings(row, data, constraint, options)
    return Job(
        TASKS[row.task].network(row, data, seed).to(options.device),
        data,
        {
            "seed": seed,
            "noise_seed": seed if row.private else None,
            "precision": options.precision,
            **settings,
        },
    )


def train_row(
    row: Row, data: FederatedDataset, constraint: Constraint, seed: int, options: Options
) -> Run:
    """Train one row by itself, on whatever data."""
    with _quiet():
        (only,) = finished([row_job(row, data, constraint, seed, options)])
    return only.run


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings about what is the tables' own.

    δ = 5e-5 is the paper's, and that noise dominates some constraints the table shows.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.filterwarnings("ignore", "DP noise dominates", FpflWarning)
        yield


def _settings(
    row: Row, data: FederatedDataset, constraint: Constraint, options: Options
) -> dict[str, Any]:
    """What ``fpfl.train`` is told."""
    clip: float | Clipping | None = row.clip
    if row.suggested:
        clip = _suggested(row, data, constraint)
    # A small population is all there is of a cohort.
    cohort = min(row.cohort or row.batch or 1, data.population)
    # The paper samples without replacement; only the poisson convention has it otherwise.
    poisson = options.convention == "poisson" and row.cohort is not None
    settings: dict[str, Any] = {
        "cohort": cohort,
        "rounds": row.rounds,
        "constraint": constraint if row.method else None,
        "method": _method(row),
        "clip": None if row.private else clip,
        "sampling": "poisson" if poisson else "without-replacement",
        "learning_rate": row.learning_rate,
        "normaliser": _normaliser(row.normaliser),
        "selection": _selection(row.selection),
        "selection_window": row.selection_window,
    }
    if row.private:
        assert clip is not None  # the table gives every private row one
        given = options.noise_multiplier(row_name(row, options))
        settings["privacy"] = Privacy(
            epsilon=row.epsilon if given is None else None,
            noise_multiplier=given,
            clip=clip,
            delta=row.delta,
            convention=options.convention,
        )
    if row.change:
        settings |= changed(row.change, settings)
    if row.private:
        settings |= _with_noise(row, settings, data)
    return settings


def _suggested(row: Row, data: FederatedDataset, constraint: Constraint) -> Clipping:
    clip = fixed_clipping(data.schema, constraint)
    if row.samples_bound is None:
        return clip
    return replace(clip, bound=row.samples_bound * (data.schema.samples_per_user or 1.0))


def _with_noise(row: Row, settings: dict[str, Any], data: FederatedDataset) -> dict[str, Any]:
    """The row's privacy with its σ, calibrated for the population that the row says.

    With fewer users than the cohort should have, everybody is in every round, and σ shrinks with
    the cohort: the noise over the number of users is that of the row. What that costs those users
    is another matter, and is in the results.
    """
    privacy: Privacy = settings["privacy"]
    constrained, rounds = settings["constraint"] is not None, settings["rounds"]
    users, cohort = row.population or data.population, row.cohort or settings["cohort"]
    plan = _plan(privacy, users, cohort, rounds, constrained)
    sigma = plan.noise_multiplier * (settings["cohort"] / plan.cohort)
    private = replace(privacy, epsilon=None, noise_multiplier=sigma, delta=plan.delta)
    changes: dict[str, Any] = {"privacy": private}
    if row.suggested and row.pace:
        samples = data.schema.samples_per_user
        rate = fixed_learning_rate(
            privacy.clipping, plan.noise_multiplier, plan.cohort, plan.rounds, samples
        )
        changes |= {"learning_rate": row.pace * rate}
    return changes


def _plan(privacy: Privacy, users: int, cohort: int, rounds: int, constrained: bool) -> PrivacyPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return privacy.plan(population=users, cohort=cohort, rounds=rounds, constrained=constrained)


def _gap(evaluation: Evaluation, name: str) -> float | None:
    return evaluation.gaps[name].value if name in evaluation.gaps else None


def _rates(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Every constrained rate: overall, by group, and its own gap."""
    found: dict[str, dict[str, float]] = {}
    for each in evaluation.gaps["constraint"].differences:
        own = found.setdefault(each.rate, {"overall": each.overall, "gap": 0.0})
        own[each.group] = each.value
        own["gap"] = max(own["gap"], abs(each.difference))
    return found


def _method(row: Row) -> Method | None:
    if row.method == "one-gradient":
        method = OneGradient(tolerance=row.target)
        return method if row.gamma is None else replace(method, multiplier_lr=row.gamma)
    if row.method == "tran":
        return Tran(multiplier_lr=row.multiplier_rate, max_multiplier=row.max_multiplier)
    if row.method == "mmdm":
        return MMDM(damping=row.damping, multiplier_lr=row.multiplier_rate)
    if row.method is None:
        return None
    if row.method not in REGISTER:
        raise ValueError(f"the method is {row.method!r}; expected one of {', '.join(REGISTER)}")
    # No columns of its own: with the settings that it has by default.
    return REGISTER[row.method].make()


def _normaliser(value: str) -> Literal["users", "samples"]:
    if value not in ("users", "samples"):
        raise ValueError(f"the normaliser is {value!r}; expected 'users' or 'samples'")
    return "users" if value == "users" else "samples"


def _selection(value: str) -> Rule:
    for rule in get_args(Rule):
        if value == rule:
            chosen: Rule = rule
            return chosen
    raise ValueError(f"the selection is {value!r}; expected 'best', 'last' or 'average'")
