"""Draw the pictures of docs/robust.md from committed results: ``python scripts/draw_docs.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from robust_tables import RESULTS, by, runs  # noqa: E402 - a neighbour of this script

from fpfl.experiments.demo import plot_against_epsilon  # noqa: E402


def main() -> None:
    """Accuracy and gaps of the deep network over ε."""
    found = [run for run in runs("adult-robust") if (run["cohort"], run["model"]) == (200, "deep")]
    found += [run for run in runs("adult-ablation") if run["variant"].startswith("ε=")]
    panels = {
        "accuracy, test set": "accuracy",
        "FNR gap, test set": "gap",
        "FNR gap, training population": "train_gap",
    }
    drawn = {}
    for title, field in panels.items():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for (algorithm, variant), some in by(found, "algorithm", "variant").items():
            values = [run[field] for run in some]
            point = (float(variant.removeprefix("ε=")), mean(values), stdev(values))
            lines.setdefault(algorithm, []).append(point)
        drawn[title] = {name: sorted(points) for name, points in lines.items()}
    plot_against_epsilon(
        drawn,
        RESULTS / "adult-ablation" / "epsilon.png",
        limits=dict.fromkeys(list(panels)[1:], 0.02),
        note="Adult, deep network, m = 200 of K = 16,280, δ = 5e-5, Poisson cohorts; mean "
        "and standard deviation of ten seeds; dotted: α = 0.02",
    )


if __name__ == "__main__":
    main()
