"""The estimator beside fairlearn's ``ExponentiatedGradient``, without privacy, on Adult.

``python -m benchmarks.fairlearn_peer [--seeds 5] [--without-trees] [--out docs/results/estimator]``

Both get the same rows, the same 92 features and the same constraint by sex, |group − everybody| ≤
0.02 (fairlearn's ``difference_bound`` is against everybody's rate too). Seed i leaves out the i-th
fifth of Adult's training rows, and is the seed of networks; so what is compared is paired. Rates
are measured on the rows of the fit, on the fifth that was left out (``held out``, all fifths
together being Adult's training rows), and on the test split, which no setting was chosen by.

``ExponentiatedGradient`` returns a randomised classifier. Its accuracy and rates are those expected
over its coin tosses, as its own bound is; drawing them makes a gap larger by chance. Ours tosses no
coins. Times are of ``fit`` alone, in one thread, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: a thread each is what is compared

import fairlearn
import numpy as np
import sklearn
import torch
from fairlearn.metrics import MetricFrame
from fairlearn.reductions import (
    DemographicParity,
    EqualizedOdds,
    ExponentiatedGradient,
    TruePositiveRateParity,
)
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from fpfl import FairPrivateClassifier, load_adult
from fpfl.experiments.runner import about_this_run
from fpfl.fairness.gaps import distinct, quotient, resample
from fpfl.training.models import SHALLOW

Floats = NDArray[np.float64]
Predict = Callable[[Floats], Floats]

ALPHA, FOLDS, REPLICATES, CONFIDENCE = 0.02, 5, 1000, 0.95
OURS = "FairPrivateClassifier"
CONSTRAINTS = {
    "equalized_odds": EqualizedOdds,
    "demographic_parity": DemographicParity,
    "fnr_parity": TruePositiveRateParity,
}
LEARNERS: dict[str, Callable[[int], Any]] = {
    # The solver of fairlearn's own examples, and the fastest of scikit-learn's here.
    "logistic regression": lambda seed: LogisticRegression(solver="liblinear"),
    # Our default network. Settings that are as good as scikit-learn's and four times as fast:
    # chosen, as ours, on Adult's training rows.
    "network": lambda seed: MLPClassifier(
        SHALLOW, batch_size=1000, learning_rate_init=0.01, max_iter=30, random_state=seed
    ),
    "boosted trees": lambda seed: HistGradientBoostingClassifier(random_state=seed),
}
PEERS = ("logistic regression", "network")


@dataclass(frozen=True)
class Rows:
    """Features, labels and sexes."""

    X: Floats
    y: NDArray[np.int64]
    sex: NDArray[np.int64]

    @classmethod
    def of(cls, split: Any) -> Rows:
        """Adult's."""
        data = load_adult(split)
        groups = np.asarray(data.attributes).reshape(len(data.labels))
        return cls(np.asarray(data.features, np.float64), np.asarray(data.labels), groups)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Some of them."""
        return Rows(self.X[rows], self.y[rows], self.sex[rows])


def selected(y_true: Any, y_pred: Any) -> float:
    """P[Ŷ = 1], where predictions may be probabilities of it."""
    return float(np.mean(y_pred))


def positives(y_true: Any, y_pred: Any) -> float:
    """P[Ŷ = 1 | Y = 1]: the same differences as the false negative rate's."""
    return float(np.mean(np.asarray(y_pred)[np.asarray(y_true) == 1]))


def false_positives(y_true: Any, y_pred: Any) -> float:
    """P[Ŷ = 1 | Y = 0]."""
    return float(np.mean(np.asarray(y_pred)[np.asarray(y_true) == 0]))


RATES = {
    "equalized_odds": {"TPR": positives, "FPR": false_positives},
    "demographic_parity": {"selected": selected},
    "fnr_parity": {"TPR": positives},
}


def measured(rows: Rows, p: Floats, constraint: str) -> dict[str, float]:
    """Accuracy, and the gap by fairlearn's own frame: the furthest group from everybody."""
    frame = MetricFrame(
        metrics=RATES[constraint], y_true=rows.y, y_pred=p, sensitive_features=rows.sex
    )
    gap = float(frame.difference(method="to_overall").max())
    return {"accuracy": float(np.where(rows.y == 1, p, 1 - p).mean()), "gap": gap}


def fitted(who: str, constraint: str | None, rows: Rows, seed: int) -> tuple[Predict, float, int]:
    """P[Ŷ = 1] as a function, the seconds of the fit, and how often a learner was called."""
    if who == OURS:
        tolerance = None if constraint is None else ALPHA
        ours = FairPrivateClassifier(constraint=constraint, tolerance=tolerance, random_state=seed)
        start = time.perf_counter()
        ours.fit(rows.X, rows.y, sensitive_features=None if constraint is None else rows.sex)
        return lambda X: ours.predict(X).astype(np.float64), time.perf_counter() - start, 1
    learner = LEARNERS[who](seed)
    if constraint is None:
        start = time.perf_counter()
        learner.fit(rows.X, rows.y)
        return lambda X: learner.predict(X).astype(np.float64), time.perf_counter() - start, 1
    peer = ExponentiatedGradient(learner, CONSTRAINTS[constraint](difference_bound=ALPHA))
    start = time.perf_counter()
    peer.fit(rows.X, rows.y, sensitive_features=rows.sex)
    seconds = time.perf_counter() - start
    return lambda X: np.asarray(peer._pmf_predict(X)[:, 1]), seconds, int(peer.n_oracle_calls_)


def contest(
    seeds: int, trees: bool
) -> tuple[list[dict[str, Any]], dict[tuple[str, str, int], Floats]]:
    """Fit everybody, in turns; the figures, and predictions on the test split."""
    train, test = Rows.of("train"), Rows.of("test")
    fifths = np.array_split(np.random.default_rng(0).permutation(len(train.y)), FOLDS)
    found, kept = [], {}
    for seed in range(seeds):
        out = np.sort(fifths[seed])
        mine, held = np.setdiff1d(np.arange(len(train.y)), out), train.take(out)
        for constraint in (*CONSTRAINTS, None):
            whos = [OURS, *PEERS]
            if trees and seed == 0 and constraint in (None, "equalized_odds"):
                whos.append("boosted trees")  # for information, once: they take their time
            for who in whos if seed % 2 == 0 else whos[::-1]:
                predict, seconds, calls = fitted(who, constraint, train.take(mine), seed)
                on_test = predict(test.X)
                if constraint is not None:
                    kept[who, constraint, seed] = on_test
                for named in CONSTRAINTS if constraint is None else (constraint,):
                    row = {
                        "who": who, "constraint": constraint, "measured": named, "seed": seed,
                        "seconds": round(seconds, 2), "calls": calls,
                        "train": measured(train.take(mine), predict(train.X[mine]), named),
                        "held out": measured(held, predict(held.X), named),
                        "test": measured(test, on_test, named),
                    }  # fmt: skip
                    found.append(row)
                print(f"seed {seed} {constraint!s:18s} {who:22s} {seconds:6.1f} s", flush=True)
    return found, kept


def differences(
    constraint: str, peer: str, kept: dict[tuple[str, str, int], Floats], seeds: int
) -> dict[str, Any]:
    """Ours − the peer's on the test split, with intervals of a bootstrap over rows and seeds.

    Each replicate draws test rows, the same for both and for all seeds, and seeds, and takes the
    mean difference of accuracies and of gaps.
    """
    test = Rows.of("test")
    cells = np.stack(
        [(test.sex == a) & (test.y == label) for a in (0, 1) for label in (0, 1)], axis=1
    ).astype(np.float64)
    whos = [(who, seed) for who in (OURS, peer) for seed in range(seeds)]
    columns = [cells, *(cells * kept[who, constraint, seed][:, None] for who, seed in whos)]
    rows, alike = distinct(np.ascontiguousarray(np.concatenate(columns, axis=1)))
    drawn = np.concatenate([(alike @ rows)[None], resample(rows, alike, REPLICATES, seed=0)])
    parts = drawn.reshape(len(drawn), 1 + 2 * seeds, 4)
    n, sums = parts[:, :1], parts[:, 1:]
    right = sums[..., 1] + sums[..., 3] + (n - sums)[..., 0] + (n - sums)[..., 2]
    figures = {"accuracy": right / n.sum(axis=-1), "gap": gaps(constraint, sums, n)}
    rng, told = np.random.default_rng(1), {}
    picks = np.concatenate(
        [np.arange(seeds)[None], rng.integers(0, seeds, size=(REPLICATES, seeds))]
    )
    for name, values in figures.items():
        paired = np.take_along_axis(values[:, :seeds] - values[:, seeds:], picks, axis=1)
        ends = np.quantile(paired[1:].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        told[name] = {"value": float(paired[0].mean()), "low": ends[0], "high": ends[1]}
    return {"constraint": constraint, "peer": peer, **told}


def gaps(constraint: str, sums: Floats, n: Floats) -> Floats:
    """The gap of `measured`, from Σ P[Ŷ = 1] and counts in (sex, label) cells (…, 4)."""
    by_label = {"TPR": (1, 3), "FPR": (0, 2)}
    found = []
    for rate in RATES[constraint]:
        if rate == "selected":
            F, count = (part[..., [0, 2]] + part[..., [1, 3]] for part in (sums, n))
        else:
            F, count = sums[..., by_label[rate]], n[..., by_label[rate]]
        count = np.broadcast_to(count, F.shape)
        whole = quotient(F.sum(axis=-1), count.sum(axis=-1))
        found.append(np.abs(quotient(F, count) - whole[..., None]).max(axis=-1))
    return np.max(found, axis=0)


def main() -> None:
    """Measure, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=FOLDS, choices=range(1, FOLDS + 1))
    parser.add_argument("--without-trees", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of networks that scikit-learn would train longer
    begin = time.perf_counter()
    with threadpool_limits(1):
        rows, kept = contest(asked.seeds, not asked.without_trees)
    compared = [differences(c, peer, kept, asked.seeds) for c in CONSTRAINTS for peer in PEERS]
    for row in compared:
        mine, other = (
            mean(
                r["seconds"] for r in rows if (r["who"], r["constraint"]) == (w, row["constraint"])
            )
            for w in (OURS, row["peer"])
        )
        row["seconds"] = {"ours": mine, "peer": other, "ratio": mine / other}
        print(json.dumps(row))
    command = f"python -m benchmarks.fairlearn_peer --seeds {asked.seeds}"
    command += " --without-trees" * asked.without_trees
    about = about_this_run(command, time.perf_counter() - begin) | {
        "fairlearn": fairlearn.__version__, "scikit-learn": sklearn.__version__,
        "load": round(os.getloadavg()[0], 1), "alpha": ALPHA, "replicates": REPLICATES,
        "confidence": CONFIDENCE, "seeds": asked.seeds,
    }  # fmt: skip
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "compared": compared, "rows": rows}, indent=1)
        (asked.out / "results.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
