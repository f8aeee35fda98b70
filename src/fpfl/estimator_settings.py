"""The settings of `fpfl.train` that an estimator's user left open: by rule, from public numbers."""

from __future__ import annotations

from dataclasses import replace

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.methods import OneGradient
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.suggesting import CLIP, suggested_clipping, suggested_learning_rate, with_counts

LEAST_COHORT, MOST_COHORT = 100, 5000

LEAST_CLIP = 2.0 * CLIP
"""C with a constraint at least. Looked at on a quarter of Adult's training rows, every row a user
(FNR parity by sex, ε = 2): accuracy 0.795 with C = 1.5, 0.834 with 3, 0.840 with 6."""

PLAIN_ROUNDS = 300
"""T without a constraint and without privacy."""

PLAIN_RATE = 0.5
"""η without privacy, for gradients divided by the number of samples."""

PLAIN_TARGET, PLAIN_DAMPING = 0.75, 10.0
"""Without privacy: the part of α that training steers towards, and c. Exact counts can be answered
at once; multipliers that chase them as `OneGradient`'s own settings do, which are for noise, swing,
the more so where two rates pull at the same rows. Chosen on Adult's training rows, a quarter held
out in turn (by sex, α = 0.02): towards α/2 equalized odds had an accuracy of 0.846 and a gap of
0.031 on held-out rows with those settings, and 0.848 and 0.022 with these. Three quarters of α are
0.849 and 0.028, and for demographic parity 0.838 and 0.014 in place of 0.837 and 0.010."""


def chosen_cohort(population: int) -> int:
    """A tenth of the users, but no fewer than 100 (or all of them), and no more than 5,000."""
    return min(population, max(LEAST_COHORT, min(population // 10, MOST_COHORT)))


def chosen_clip(
    given: float | Clipping | None, constraint: Constraint | None, schema: Schema
) -> Clipping:
    """Clip bounds by `fpfl.suggest`'s rules, where they were not given.

    With a constraint the bound is no less than for users of two samples, which the rule was made
    with: a weighted single row is cut back to an unweighted one's length otherwise.
    """
    if given is None:
        found = suggested_clipping(schema, constraint)
        return found if constraint is None else replace(found, bound=max(LEAST_CLIP, found.bound))
    return given if isinstance(given, Clipping) else with_counts(float(given), constraint, schema)


def chosen_rate(
    privacy: Privacy | None,
    constraint: Constraint | None,
    schema: Schema,
    population: int,
    cohort: int,
    rounds: int,
) -> float:
    """η for gradients that are divided by m; with privacy by `fpfl.suggest`'s rule."""
    samples = max(1.0, schema.samples_per_user or 1.0)
    if privacy is None:
        return PLAIN_RATE / samples
    clipping = privacy.clipping
    blocks = clipping.blocks(constrained=constraint is not None, selection=True)
    plan = privacy.plan(population=population, cohort=cohort, rounds=rounds, blocks=blocks)
    return suggested_learning_rate(clipping, plan.noise_multiplier, cohort, rounds, samples)


def chosen_method(constraint: Constraint, *, private: bool) -> OneGradient:
    """`OneGradient`; where counts have no noise, with steadier multipliers (`PLAIN_DAMPING`)."""
    if private:
        return OneGradient()
    target = PLAIN_TARGET * constraint.tolerance
    return OneGradient(damping=PLAIN_DAMPING, tolerance=target, spread=None)
