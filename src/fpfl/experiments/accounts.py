"""What the rows of a table cost: ε of every private run, and its statement in words.

A run remembers what its ε follows from; that is worked out here, so that runs from machines without
dp-accounting get theirs on one that has it.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.plan import Block, Convention, PrivacyPlan, PrivacyWarning


def with_epsilon(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its ε: None where there is no noise, or no accountant.

    ``epsilon`` is by the row's convention and for the population that it is calibrated for,
    ``epsilon_honest`` the same with the true sensitivity; ``epsilon_real`` is what holds for the
    users it ran on, with the cohort that there really was.
    """
    if result["noise_multiplier"] is None or result["epsilon_real"] is not None:
        return result
    try:
        calibrated, real = _plan_of(result, real=False), _plan_of(result, real=True)
        return result | {
            "epsilon": calibrated.epsilon,
            "epsilon_honest": calibrated.epsilon_honest,
            "epsilon_real": real.epsilon_honest,
        }
    except MissingAccountantError:
        return result


def statement(result: dict[str, Any]) -> str | None:
    """What a private run promises the users it ran on; None where it promises nothing."""
    if result["noise_multiplier"] is None:
        return None
    return _said(_plan_of(result, real=True))


def _plan_of(result: dict[str, Any], *, real: bool) -> PrivacyPlan:
    users, cohort = result["population"], result["real_cohort"]
    noise = result["noise_multiplier"]
    if not real:
        asked = result["cohort"] or cohort
        noise *= asked / cohort
        users, cohort = result["accounted_population"] or users, asked
    return _plan(
        users,
        cohort,
        result["rounds"],
        result["delta"],
        noise,
        result["convention"],
        tuple(tuple(block) for block in result["blocks"]),
    )


# A plan computes its ε once: one object for all seeds of a row.
@lru_cache(maxsize=256)
def _plan(
    users: int,
    cohort: int,
    rounds: int,
    delta: float,
    noise: float,
    convention: Convention,
    blocks: tuple[Any, ...],
) -> PrivacyPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return PrivacyPlan(
            population=users,
            cohort=cohort,
            rounds=rounds,
            delta=delta,
            noise_multiplier=noise,
            convention=convention,
            blocks=[Block(*block) for block in blocks],
        )


@lru_cache(maxsize=256)
def _said(plan: PrivacyPlan) -> str:
    return str(plan.statement(seeded_noise=True, seeded_cohorts=True))
