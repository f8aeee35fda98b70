"""One row of a table: its users, its constraint, its settings; trained and measured."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from fpfl.data.adult import RANGES, load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.merging import merge_values
from fpfl.experiments.ablation import changed
from fpfl.experiments.tables import NETWORKS, Row
from fpfl.fairness import rates
from fpfl.fairness.constraints import (
    Constraint,
    demographic_parity,
    equalized_odds,
    fnr_parity,
)
from fpfl.fairness.evaluation import Evaluation
from fpfl.methods import MMDM, Method, OneGradient, Tran
from fpfl.models import mlp
from fpfl.privacy.plan import Convention, PrivacyWarning
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.run import Run, evaluate_model
from fpfl.server.selection import Rule
from fpfl.suggest import suggested_clipping, suggested_learning_rate
from fpfl.train import FpflWarning, train

Result = dict[str, Any]

STATEMENT = "statement"
"""A private run's statement, for the table; it is not among the figures of results.json."""

HOURS = RANGES["hours-per-week"]

CONSTRAINTS = {
    "fnr": lambda alpha: fnr_parity("sex", tolerance=alpha),
    "sex-race": lambda alpha: fnr_parity(("sex", "race"), tolerance=alpha),
    "sex-races": lambda alpha: fnr_parity(("sex", "race"), tolerance=alpha),
    "odds": lambda alpha: equalized_odds("sex", tolerance=alpha),
    "selection": lambda alpha: demographic_parity("sex", tolerance=alpha),
    "mean": lambda alpha: Constraint(
        (rates.mean_prediction(HOURS),), ("sex",), alpha, "equal mean prediction", HOURS
    ),
}
"""What a row measures, and enforces where it has a method, by α."""

KEPT = {"sex-race": ("White",), "sex-races": ("White", "Black")}
"""Races that are not merged. With a declared smallest n'_a of 100 people of the training population
all but White are, since black women with a positive label are 90; with one of 60, all but two."""


@dataclass(frozen=True)
class Options:
    """What may be varied for a whole table, never for one row.

    ``noise_multiplier`` replaces calibration (where dp-accounting is not installed);
    ``overrides`` (``key=value``) replace settings of all rows, for the alternatives in
    docs/reproduction.md.
    """

    convention: Convention = "poisson"
    noise_multiplier: float | None = None
    overrides: tuple[str, ...] = ()
    device: str = "cpu"


def population(row: Row) -> int:
    """K of a row: users of mean size, or single samples when the row is central."""
    return _population(row.mean_samples, row.constraint, 0).population


def run_row(row: Row, seed: int, options: Options) -> Result:
    """Train one row with one seed and evaluate it on the test set and the training population."""
    start = time.perf_counter()
    data = _population(row.mean_samples, row.constraint, seed)
    constraint = CONSTRAINTS[row.constraint](row.tolerance)
    run, sent = train_row(row, data, constraint, seed, options)
    if run.stopped:
        raise ValueError(f"{row.name(data.population)}, seed {seed}: {run.stopped}")
    test, training = (
        evaluate_model(run.model, each, constraint=constraint, bootstrap=0)
        for each in (_samples("test", row.constraint), data)
    )
    statement = run.privacy.as_dict() if run.privacy else {}
    return {
        "table": row.table,
        "data": "adult",
        "model": row.model,
        "algorithm": row.algorithm,
        "cohort": row.cohort,
        "variant": row.variant,
        "population": data.population,
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
        "numbers_sent": sent,
        "convention": statement.get("convention"),
        "epsilon": statement.get("epsilon"),
        "epsilon_honest": statement.get("epsilon_honest"),
        "delta": statement.get("delta"),
        "noise_multiplier": statement.get("noise_multiplier"),
        "seconds": round(time.perf_counter() - start, 2),
        STATEMENT: str(run.privacy) if run.privacy else None,
    }


def train_row(
    row: Row, data: FederatedDataset, constraint: Constraint, seed: int, options: Options
) -> tuple[Run, int]:
    """Train one row: Algorithm 1 with that row's parts switched on; also how long its v is."""
    sent = 0

    def look(event: Any) -> None:
        nonlocal sent
        sent = event.v.numel()

    settings = _settings(row, data, constraint, options)
    with warnings.catch_warnings():
        # δ = 5e-5 is the paper's, and that noise drowns some constraints is what the table shows.
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.filterwarnings("ignore", "the noise drowns", FpflWarning)
        run = train(
            mlp(data.schema.shape[0], NETWORKS[row.model], initial=row.initial, seed=seed).to(
                options.device
            ),
            data,
            seed=seed,
            noise_seed=seed if row.private else None,
            callbacks=[look],
            **settings,
        )
    return run, sent


def _settings(
    row: Row, data: FederatedDataset, constraint: Constraint, options: Options
) -> dict[str, Any]:
    """What ``fpfl.train`` is told."""
    clip: float | Clipping | None = row.clip
    if row.suggested:
        clip = suggested_clipping(data.schema, constraint)
    cohort = row.cohort or row.batch or 1
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
        settings["privacy"] = Privacy(
            epsilon=row.epsilon if options.noise_multiplier is None else None,
            noise_multiplier=options.noise_multiplier,
            clip=clip,
            delta=row.delta,
            convention=options.convention,
        )
    if row.change:
        settings |= changed(row.change, settings)
    if row.suggested and row.private:
        settings["learning_rate"] = _learning_rate(settings, data.population)
    return settings


def _learning_rate(settings: dict[str, Any], users: int) -> float:
    """The suggested η, for the plan's own σ."""
    privacy, clipping = settings["privacy"], settings["privacy"].clipping
    cohort, rounds = settings["cohort"], settings["rounds"]
    constrained = settings["constraint"] is not None
    blocks = clipping.blocks(constrained=constrained, selection=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        plan = privacy.plan(population=users, cohort=cohort, rounds=rounds, blocks=blocks)
    return suggested_learning_rate(clipping, plan.noise_multiplier, cohort, rounds)


@lru_cache(maxsize=8)
def _samples(split: Literal["train", "test"], constraint: str) -> FederatedDataset:
    if constraint == "mean":
        return load_adult(split, normalise="paper", label="hours-per-week")
    if constraint not in KEPT:
        return load_adult(split, normalise="paper")
    data = load_adult(split, normalise="paper", attributes=("sex", "race"))
    values, kept = data.schema.attributes[1].values, KEPT[constraint]
    return merge_values(data, "race", {"other": [v for v in values if v not in kept]})


@lru_cache(maxsize=2)
def _population(mean_samples: float | None, constraint: str, seed: int) -> FederatedDataset:
    data = _samples("train", constraint)
    if mean_samples is None:
        return data.single_samples()
    return data.partition(mean=mean_samples, seed=seed)


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
        return OneGradient()
    if row.method == "tran":
        return Tran(rate=row.multiplier_rate, max_multiplier=row.max_multiplier)
    if row.method == "mmdm":
        return MMDM(damping=row.damping, rate=row.multiplier_rate)
    return None


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
