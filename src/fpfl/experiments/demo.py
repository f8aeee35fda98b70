"""The demo: private federated learning is unfair, and FPFL repairs it; on Adult, in a minute."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpfl.data.adult import load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint, fnr_parity
from fpfl.fairness.gaps import Evaluation
from fpfl.folder import model_digest
from fpfl.models import mlp
from fpfl.privacy.settings import Privacy
from fpfl.report.evaluated import SIMULATION_ONLY
from fpfl.report.plots import plot_groups
from fpfl.run import Run, evaluate_model, evaluate_vector
from fpfl.server.round import Callback, RoundEvent
from fpfl.training import train
from fpfl.users.flat import FlatModel

COHORT, ROUNDS, EPSILON, DELTA, CLIP, TOLERANCE, SEED = 1000, 250, 2.0, 5e-6, 2.0, 0.02, 0
PARITY = fnr_parity("sex", tolerance=TOLERANCE)

Progress = Callable[[str, int], AbstractContextManager[Callback]]


@dataclass(frozen=True)
class DemoRun:
    """One of the demo's trainings."""

    name: str
    what: str
    run: Run
    test: Evaluation
    curves: dict[str, list[tuple[int, float]]]


def run_demo(progress: Progress) -> list[DemoRun]:
    """Train FL, PFL and FPFL on Adult's users and evaluate them on its test set.

    Everything is seeded so that the demo shows the same figures again; the privacy statement
    therefore says that this is a simulation. Numerical features are scaled by declared public
    ranges, so that ε is the whole cost.
    """
    data = load_adult("train").partition(mean=2, seed=SEED)
    test = load_adult("test")
    private = Privacy(epsilon=EPSILON, delta=DELTA, clip=CLIP)
    plans: list[tuple[str, str, Constraint | None, Privacy | None]] = [
        ("FL", "federated learning", None, None),
        ("PFL", "private federated learning", None, private),
        ("FPFL", "fair private federated learning", PARITY, private),
    ]
    return [_train(*plan, data, test, progress) for plan in plans]


def draw_demo(runs: list[DemoRun], path: Path) -> Path:
    """The picture: each group's FNR over the rounds."""
    return plot_groups(
        {r.name: r.curves for r in runs},
        path,
        rate="false negative rate",
        subtitles={
            r.name: f"accuracy {r.test.accuracy:.3f}, FNR gap {r.test.gaps['fnr'].value:.3f}"
            for r in runs
        },
        note="Adult, measured on the test set (simulation only: a federation has no such view)",
    )


def run_folders(runs: list[DemoRun], folder: Path) -> list[Path]:
    """Where the runs are saved."""
    return [folder / r.name.lower() for r in runs]


def save_demo(runs: list[DemoRun], folder: Path, about: dict[str, Any]) -> None:
    """Write every run with its evaluation, and the figures of the table as ``results.json``."""
    figures = []
    mark = f"{SIMULATION_ONLY}: measured without noise, not covered by ε"
    for r, path in zip(runs, run_folders(runs, folder), strict=True):
        r.run.save(path)
        evaluation = r.test.as_dict() | {
            "on": "test set",
            "mark": mark,
            "model": model_digest(path),
        }
        text = json.dumps(evaluation, indent=1) + "\n"
        (path / "evaluation-test.json").write_text(text, encoding="utf-8")
        gap = r.test.gaps["fnr"]
        figures.append(
            {
                "algorithm": r.name,
                "accuracy": r.test.accuracy,
                "fnr": r.test.rates["FNR"],
                "fnr_gap": gap.value,
                "fnr_gap_interval": [gap.low, gap.high],
                "epsilon": r.run.privacy.epsilon if r.run.privacy else None,
                "delta": r.run.privacy.delta if r.run.privacy else None,
                "cohort": COHORT,
                "rounds": ROUNDS,
                "seed": SEED,
            }
        )
    text = json.dumps({"runs": figures, "about": about}, indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")


def _train(
    name: str,
    what: str,
    constraint: Constraint | None,
    privacy: Privacy | None,
    data: FederatedDataset,
    test: FederatedDataset,
    progress: Progress,
) -> DemoRun:
    model = mlp(data.schema.shape[0], seed=SEED)
    flat = FlatModel.of(model)
    curves: dict[str, list[tuple[int, float]]] = {}

    def watch(event: RoundEvent) -> None:
        t = event.row["round"]
        if t == 1 or t % 5 == 0:
            rates = evaluate_vector(flat, event.w, test, bootstrap=0).rates["FNR"]
            for group, value in rates.items():
                curves.setdefault(group, []).append((t, value))

    with progress(f"{name:5s}", ROUNDS) as callback, warnings.catch_warnings():
        # It is a demo of noise; what FpflWarning says of it is in every run's own warnings.
        warnings.filterwarnings("ignore", "the noise drowns")
        run = train(
            model,
            data,
            cohort=COHORT,
            rounds=ROUNDS,
            constraint=constraint,
            privacy=privacy,
            selection="average",
            seed=SEED,
            noise_seed=None if privacy is None else SEED,
            callbacks=[callback, watch],
        )
    # All three are judged by the constraint, whether or not they were trained with it.
    judged = evaluate_model(run.model, test, constraint=PARITY)
    return DemoRun(name, what, run, judged, curves)
