"""Broken twins: the real pipeline with one mistake in it, which an audit has to find.

Each function makes its mistake through pytest's monkeypatch, in the place where somebody might
really make it, and leaves everything else as it is. The claimed ε stays what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import fpfl.privacy.plan
import fpfl.thirdparty.sums
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
