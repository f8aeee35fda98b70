"""The choice of a cohort.

All of it is a function of the public numbers that were given: nothing is trained or read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping

from fpfl.planning.errors import heldout_users
from fpfl.planning.figures import Setting
from fpfl.planning.levers import levers
from fpfl.planning.question import Question, Share
from fpfl.planning.result import ENOUGH, TrainingPlan
from fpfl.privacy.rules import PrivacyWarning
from fpfl.suggesting import ROUNDS

CANDIDATES, BISECTIONS = 5, 1
LEAST_COHORT = 50
FEWER_ROUNDS = 250


def plan_training(
    *,
    population: int,
    groups: Mapping[str, Mapping[str, Share]],
    parameters: int,
    epsilon: float,
    samples_per_user: float = 1.0,
    delta: float | None = None,
    constraint: str = "fnr_parity",
    tolerance: float = 0.02,
    base_rate: float | None = None,
    rate: float | None = None,
    cohort: int | None = None,
    rounds: int = ROUNDS,
) -> TrainingPlan:
    """The noise to expect in a training with `OneGradient`, and which settings to take.

    Parameters
    ----------
    population, groups, parameters, epsilon, samples_per_user, delta, constraint, tolerance, \
base_rate, rate
        Public numbers: see `fpfl.planning.question.Question`.
    cohort
        A cohort to look at beside others.
    rounds
        T.
    """
    question = Question(
        population=population,
        groups=groups,
        parameters=parameters,
        epsilon=epsilon,
        samples_per_user=samples_per_user,
        delta=delta,
        constraint=constraint,
        tolerance=tolerance,
        base_rate=base_rate,
        rate=rate,
    )
    if cohort is not None and not 1 <= cohort <= population:
        raise ValueError(f"cohort is {cohort}; expected 1 to the population, {population}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    found = {} if cohort is None else {cohort: question.setting(cohort, rounds)}
    with warnings.catch_warnings():
        # Of a δ that was given the first setting has said what there is to say.
        warnings.simplefilter("ignore" if found else "default", PrivacyWarning)
        for m in _candidates(population):
            found.setdefault(m, question.setting(m, rounds))
            warnings.simplefilter("ignore", PrivacyWarning)
        for _ in range(BISECTIONS):
            between = _between(found.values())
            if between is None:
                break
            found[between] = question.setting(between, rounds)
        settings = tuple(found[m] for m in sorted(found))
        chosen = _chosen(settings)
        fewer = question.setting(chosen.cohort, FEWER_ROUNDS) if rounds > FEWER_ROUNDS else None
        helping = () if chosen.good else levers(question, chosen)
    return TrainingPlan(
        question=question,
        settings=settings,
        chosen=chosen,
        given=None if cohort is None else found[cohort],
        fewer_rounds=fewer,
        levers=helping,
        heldout=heldout_users(
            question.counted,
            samples=question.samples_per_user,
            relevant=question.relevant,
            tolerance=tolerance,
            rate=rate,
        ),
        delta=chosen.delta_server / 2.0,
    )


def _candidates(population: int) -> list[int]:
    """Cohorts of two digits from 50 to everybody, evenly spaced in their logarithm."""
    low = min(LEAST_COHORT, population)
    steps = [k / (CANDIDATES - 1) for k in range(CANDIDATES)]
    sizes = {_two_digits(low * (population / low) ** step) for step in steps}
    return sorted({size for size in sizes if size < 0.9 * population} | {population})


def _between(settings: Iterable[Setting]) -> int | None:
    """A cohort between the largest that will not do and the smallest that will."""
    good = [s.cohort for s in settings if s.good]
    bad = [s.cohort for s in settings if not s.good and s.cohort < min(good, default=0)]
    if not good or not bad:
        return None
    middle = _two_digits(math.sqrt(min(good) * max(bad)))
    return middle if max(bad) < middle < min(good) else None


def _two_digits(number: float) -> int:
    scale = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return max(1, int(round(number / scale) * scale))


def _chosen(settings: tuple[Setting, ...]) -> Setting:
    good = [s for s in settings if s.good]
    least = min(s.score for s in settings)
    return min(good or [s for s in settings if s.score <= ENOUGH * least], key=lambda s: s.cohort)
