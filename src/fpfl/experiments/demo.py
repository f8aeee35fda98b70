"""The demo: private federated learning is unfair, and FPFL repairs it; on Adult, in a minute."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fpfl.data.adult import load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint, fnr_parity
from fpfl.fairness.gaps import Evaluation
from fpfl.report.evaluations import SIMULATION_ONLY
from fpfl.runs.folder import EVALUATION, model_digest
from fpfl.server.loop import Callback, RoundEvent
from fpfl.training import train
from fpfl.training.defaults import chosen_cohort, chosen_rate, parameters_of, suggest
from fpfl.training.inputs import scaled
from fpfl.training.models import mlp
from fpfl.training.run import Run, evaluate_model, evaluate_vector
from fpfl.users.flat import FlatModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""For every line's name: (round, value) points."""

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_groups(
    panels: Mapping[str, Curves],
    path: Path,
    *,
    rate: str,
    subtitles: Mapping[str, str] | None = None,
    note: str = "",
) -> Path:
    """Draw one panel for each run: the rate of every group over the rounds.

    Parameters
    ----------
    panels
        For every run's name, its groups' curves.
    path
        Where to write the picture.
    rate
        The rate's name, for the axis.
    subtitles
        A second line under a panel's title.
    note
        A line under the picture, e.g. what the values were measured on.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(panels), 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        groups = [group for group in curves if group != "overall"]
        for colour, group in zip(COLOURS * len(groups), groups, strict=False):
            axis.plot(*zip(*curves[group], strict=True), color=colour, lw=1.8, label=group)
        if "overall" in curves:
            axis.plot(
                *zip(*curves["overall"], strict=True), color="#555555", lw=1.2, ls="--",
                label="overall",
            )  # fmt: skip
        axis.set_title(name, fontweight="bold")
        if subtitles and name in subtitles:
            axis.text(
                0.5, 0.985, subtitles[name], transform=axis.transAxes, ha="center", va="top",
                fontsize=9, color="#333333",
            )  # fmt: skip
        axis.set_xlabel("round")
        axis.set_ylim(0.0, 1.09)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(rate)
    axes[0].legend(loc="lower left", frameon=False, fontsize=9)
    return _written(figure, note, path)


Points = Mapping[str, Sequence[tuple[float, float, float]]]
"""For every line's name: (ε, mean, standard deviation) points."""


def plot_against_epsilon(
    panels: Mapping[str, Points], path: Path, *, limits: Mapping[str, float], note: str = ""
) -> Path:
    """Draw one panel for each quantity: a line for each algorithm over ε, with its spread.

    Parameters
    ----------
    panels
        For every quantity's name, the algorithms' points.
    path
        Where to write the picture.
    limits
        A level to mark in a panel, by the quantity's name.
    note
        A line under the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, lines) in zip(axes, panels.items(), strict=True):
        for colour, marker, (algorithm, points) in zip(
            COLOURS, "os^Dv", lines.items(), strict=False
        ):
            epsilon, mean, spread = zip(*points, strict=True)
            axis.errorbar(
                epsilon, mean, yerr=spread, color=colour, marker=marker, ms=4.5, lw=1.6,
                capsize=2.5, label=algorithm,
            )  # fmt: skip
        if name in limits:
            axis.axhline(limits[name], color="#555555", lw=1.0, ls=":")
        axis.set_xscale("log")
        axis.set_xticks(sorted({point[0] for points in lines.values() for point in points}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_xlabel("ε")
        axis.set_title(name, fontsize=10.5, fontweight="bold")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right", frameon=False, fontsize=9)
    return _written(figure, note, path)


def _written(figure: Figure, note: str, path: Path) -> Path:
    """Write a picture, with a line under it."""
    if note:
        figure.supxlabel(note, fontsize=8.5, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


ROUNDS, EPSILON, DELTA, TOLERANCE, SEED = 500, 2.0, 5e-6, 0.02, 0
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
    therefore says that this is a simulation. Nothing but ranges and categories is declared, what
    inputs are scaled by is measured within ε, and all settings follow the rules that every door
    has (`fpfl.training.defaults`), but for the rounds, so that it takes a minute.
    """
    data = load_adult("train", normalise="measured").partition(mean=2, seed=SEED)
    test = load_adult("test", normalise="measured")
    plans: list[tuple[str, str, Constraint | None, float | None]] = [
        ("FL", "federated learning", None, None),
        ("PFL", "private federated learning", None, EPSILON),
        ("FPFL", "fair private federated learning", PARITY, EPSILON),
    ]
    return [_train(*plan, data, test, progress) for plan in plans]


def _settings(
    data: FederatedDataset, constraint: Constraint | None, epsilon: float | None
) -> dict[str, Any]:
    """What is trained with, by rule."""
    if epsilon is not None:
        p = parameters_of(mlp(data.schema.shape[0]))
        found = suggest(
            data.schema, constraint, population=data.K, epsilon=epsilon, delta=DELTA,
            rounds=ROUNDS, parameters=p,
        ).arguments()  # fmt: skip
        return found if constraint is not None else {**found, "method": None}
    cohort = chosen_cohort(data.K)
    rate = chosen_rate(None, constraint, data.schema, data.K, cohort, ROUNDS)
    return {"cohort": cohort, "rounds": ROUNDS, "learning_rate": rate}


def in_words(runs: list[DemoRun]) -> str:
    """What the table says, for somebody who has never heard of a false negative rate."""
    plain, fair = runs[0].test, runs[-1].test

    def overlooked(test: Evaluation) -> tuple[str, str]:
        rates = test.rates["FNR"]
        women, men = (f"{100 * rates[f'sex={each}']:.0f}" for each in ("Female", "Male"))
        return women, men

    (women, men), (fair_women, fair_men) = overlooked(plain), overlooked(fair)
    assert plain.accuracy is not None  # they are classifiers
    assert fair.accuracy is not None
    lost, gap = 100 * (plain.accuracy - fair.accuracy), fair.gaps["fnr"]
    cost = f"{lost:.1f} points of accuracy" if lost >= 0.05 else "no accuracy"
    said = (
        f"In words: of 100 women who earn more than 50,000 dollars {runs[0].name} overlooks "
        f"{women}, of 100 such men {men}. {runs[-1].name} overlooks {fair_women} of the women and "
        f"{fair_men} of the men; privacy (ε = {EPSILON:g}) and that cost {cost} together."
    )
    if fair.verdict == "cannot tell":
        counted = gap.differences
        fewest = min(each.count for each in counted)
        said += (
            f' "Cannot tell": its gap of {gap.value:.3f} is measured on {fewest} such women, too '
            f"few to be sure of a gap below {TOLERANCE:g}: it may be up to {gap.high:.3f}."
        )
    return said


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
        (path / EVALUATION.format("test")).write_text(text, encoding="utf-8")
        gap = r.test.gaps["fnr"]
        figures.append(
            {
                "algorithm": r.name,
                "accuracy": r.test.accuracy,
                "balanced_accuracy": r.test.balanced_accuracy,
                "auc": r.test.auc,
                "collapsed": r.test.collapsed,
                "fnr": r.test.rates["FNR"],
                "fnr_gap": gap.value,
                "fnr_gap_interval": [gap.low, gap.high],
                "epsilon": r.run.privacy.epsilon if r.run.privacy else None,
                "delta": r.run.privacy.delta if r.run.privacy else None,
                "cohort": r.run.settings["cohort"],
                "rounds": r.run.settings["rounds"],
                "seed": SEED,
            }
        )
    text = json.dumps({"runs": figures, "about": about}, indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")


def _train(
    name: str,
    what: str,
    constraint: Constraint | None,
    epsilon: float | None,
    data: FederatedDataset,
    test: FederatedDataset,
    progress: Progress,
) -> DemoRun:
    model = mlp(data.schema.shape[0], seed=SEED)
    flat = FlatModel.of(model)
    kept: list[tuple[int, Tensor]] = []

    def watch(event: RoundEvent) -> None:
        t = event.row["round"]
        if t == 1 or t % 5 == 0:
            kept.append((t, event.w.clone()))

    with progress(f"{name:5s}", ROUNDS) as callback, warnings.catch_warnings():
        # It is a demo of noise; what FpflWarning says of it is in every run's own warnings.
        warnings.filterwarnings("ignore", "DP noise dominates")
        run = train(
            model,
            data,
            **_settings(data, constraint, epsilon),
            constraint=constraint,
            selection="average",
            seed=SEED,
            noise_seed=None if epsilon is None else SEED,
            callbacks=[callback, watch],
        )
    # w is of the network behind the scaling, which is known when training has begun.
    seen = test if run.scaling is None else scaled(test, run.scaling)
    curves: dict[str, list[tuple[int, float]]] = {}
    for t, w in kept:
        for group, value in evaluate_vector(flat, w, seen, bootstrap=0).rates["FNR"].items():
            curves.setdefault(group, []).append((t, value))
    # All three are judged by the constraint, whether or not they were trained with it.
    judged = evaluate_model(run.model, test, constraint=PARITY)
    return DemoRun(name, what, run, judged, curves)
