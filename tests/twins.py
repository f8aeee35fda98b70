"""Broken twins: the real pipeline with one mistake in it, which an audit has to find.

Each function makes its mistake through pytest's monkeypatch, in the place where somebody might
really make it, and leaves everything else as it is. The claimed ε stays what it was.

``python tests/twins.py FILE`` audits all of them and writes what was found to a file, as
``fpfl audit --out FILE`` does for the pipeline itself.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import fpfl.privacy.plan
import fpfl.thirdparty.sums
from fpfl import Clipping, Privacy
from fpfl.audit import AuditSettings, CohortSize, HeavyUser, KeptModel, audit
from fpfl.audit.table import as_content, as_text
from fpfl.experiments.runner import about_this_run
from fpfl.privacy.sampling import PoissonSampling
from fpfl.server.selection import Selection
from fpfl.thirdparty.sums import ThirdParty
from fpfl.users.layout import Layout

Twin = Callable[[pytest.MonkeyPatch], None]


def noise_halved(patch: pytest.MonkeyPatch) -> None:
    """Half of the noise that was accounted for."""
    noised = ThirdParty.noised

    def half(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        whole = noised(self, total, *args, **how)
        return total + (whole - total) / 2

    patch.setattr(ThirdParty, "noised", half)


def sensitivity_of_zero_out(patch: pytest.MonkeyPatch) -> None:
    """Replace-one neighbours accounted for as if one user changed a total by C, not 2C."""
    for name in ("calibrate_poisson", "epsilon_poisson"):
        right = getattr(fpfl.privacy.plan, name)

        def wrong(noise: float, q: float, rounds: int, delta: float, *_: Any, right=right) -> Any:
            return right(noise, q, rounds, delta, "zero-out")

        patch.setattr(fpfl.privacy.plan, name, wrong)


def counts_unclipped(patch: pytest.MonkeyPatch) -> None:
    """The block of fairness counts is left as it is."""
    rules = fpfl.thirdparty.sums.clip_rules

    def without_counts(*args: Any, **how: Any) -> Any:
        return tuple(
            dataclasses.replace(rule, bound=1e9) if rule.name == "counts" else rule
            for rule in rules(*args, **how)
        )

    patch.setattr(fpfl.thirdparty.sums, "clip_rules", without_counts)


def without_noise(*names: str) -> Twin:
    """Some parts of v are released as they are."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        noised = ThirdParty.noised

        def partly(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
            released = noised(self, total, *args, **how).clone()
            for name in names:
                released[self.places[name]] = total[self.places[name]].to(released.dtype)
            return released

        patch.setattr(ThirdParty, "noised", partly)

    return broken


def divided_by_the_cohort(patch: pytest.MonkeyPatch) -> None:
    """What is released is a mean over those who took part, times the public cohort."""
    took_part, noised = _counting(patch), ThirdParty.noised

    def divided(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        assert self.plan is not None
        return noised(self, total, *args, **how) * (self.plan.cohort / took_part[0])

    patch.setattr(ThirdParty, "noised", divided)


def step_divided_by_the_cohort(patch: pytest.MonkeyPatch) -> None:
    """The server divides the gradient by the number of those who took part."""
    took_part, totals = _counting(patch), Layout.totals

    def divided(self: Layout, v: Tensor, normaliser: float, *args: Any, **how: Any) -> Any:
        return totals(self, v, float(took_part[0]), *args, **how)

    patch.setattr(Layout, "totals", divided)


def _counting(patch: pytest.MonkeyPatch) -> list[int]:
    """Count who took part in the present round, and at least one."""
    add, took_part = ThirdParty.sum, [1]

    def counted(self: ThirdParty, chunks: Iterable[Any], *args: Any, **how: Any) -> Tensor:
        sizes: list[int] = []

        def counting() -> Iterator[Any]:
            for rows in chunks:
                sizes.append(len(rows))
                yield rows

        total = add(self, counting(), *args, **how)
        took_part[0] = max(1, sum(sizes))
        return total

    patch.setattr(ThirdParty, "sum", counted)
    return took_part


def selection_by_true_accuracy(patch: pytest.MonkeyPatch) -> None:
    """The kept model is chosen by hits and misses as they were before the noise."""
    noised, observe = ThirdParty.noised, Selection.observe
    true: dict[str, Tensor] = {}

    def remembered(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        true.update({name: total[self.places[name]][0].clone() for name in ("hits", "misses")})
        return noised(self, total, *args, **how)

    def peeking(self: Selection, t: int, measured: Tensor, counts: Any, *rest: Any) -> Selection:
        return observe(self, t, measured, dataclasses.replace(counts, **true), *rest)

    patch.setattr(ThirdParty, "noised", remembered)
    patch.setattr(Selection, "observe", peeking)


def cohort_that_stays(patch: pytest.MonkeyPatch) -> None:
    """The first users of the population take part in every round: there is nothing to amplify."""

    def draw(self: PoissonSampling, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.arange(self.cohort)

    patch.setattr(PoissonSampling, "draw", draw)


WHOLE = AuditSettings(
    Privacy(epsilon=1.0, delta=9e-3), cohort_share=1.0, rounds=1, canaries=100, runs=100
)
ALONE = replace(WHOLE, runs=60)
BLOCKS = Privacy(epsilon=1.0, delta=9e-3, clip=Clipping(1.0, counts=2.0, clipped_share=0.05))

CASES = {
    "noise halved": (noise_halved, WHOLE),
    "sensitivity 2C taken for C": (
        sensitivity_of_zero_out,
        replace(WHOLE, privacy=Privacy(epsilon=1.0, delta=9e-3, neighbours="replace-one")),
    ),
    "always the same cohort": (
        cohort_that_stays,
        AuditSettings(
            Privacy(epsilon=1.0, delta=4.5e-3, neighbours="replace-one"),
            cohort_share=0.05,
            rounds=20,
            canaries=200,
            runs=50,
        ),
    ),
    "fairness counts not clipped": (
        counts_unclipped,
        replace(ALONE, privacy=BLOCKS, attack=HeavyUser("counts"), constraint=True),
    ),
    "selection's counts without noise": (
        without_noise("hits", "misses"),
        replace(ALONE, attack=HeavyUser("selection")),
    ),
    "number of clipped users without noise": (
        without_noise("clipped"),
        replace(ALONE, privacy=BLOCKS, attack=HeavyUser("clipped")),
    ),
    "totals divided by the true size of the cohort": (
        divided_by_the_cohort,
        replace(ALONE, attack=CohortSize()),
    ),
    "steps divided by the true size of the cohort": (
        step_divided_by_the_cohort,
        replace(ALONE, attack=CohortSize()),
    ),
    # All eight models have one sign in 1 of 128 runs: only then the kept one tells nothing.
    "model selected by true accuracy": (
        selection_by_true_accuracy,
        replace(ALONE, attack=KeptModel(), rounds=8),
    ),
}


def main() -> None:
    """Audit the twins, and write down what was found."""
    results, began = {}, time.perf_counter()
    for title, (twin, setting) in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            twin(patch)
            results[title] = audit(setting)
    out = Path(sys.argv[1])
    about = about_this_run(f"python tests/twins.py {out}", time.perf_counter() - began)
    as_content(results, about, out)
    print(as_text(results))


if __name__ == "__main__":
    main()
