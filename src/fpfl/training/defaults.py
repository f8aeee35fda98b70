r"""Defaults: what is left open is settled by rule, from public quantities alone.

For `OneGradient` with privacy,

    C = 1.5 n̄,    C_s = j,    shares 0.70 / 0.25 / 0.05 (gradient, counts, selection),
    T = 1,000,     η = min(0.2, 0.4/n̄, 0.3 m/(s √T)),    s = C σ/√0.70,

with n̄ the schema's declared number of samples per user (at least 1), m the expected cohort, σ the
noise multiplier and so s the noise on every number of the summed gradient. With loss gradients
divided by m, noise adds up to η s √T/m in every parameter over a run, and the rule for η keeps
that at 0.3 at most; a user's gradient is a sum, and 0.4/n̄ keeps a step along its mean at 0.4. C_s
is one sample: j = 1 where groups partition the samples, otherwise a sample counts once for each
attribute or intersection that groups are made by, and once for the whole. That has the least noise
for what it counts: a user with several relevant samples counts as their mean.

The numbers were chosen on Adult's training users, a quarter of whom were held out, for the false
negative rate by sex, with both of the paper's networks (``docs/robust.md`` has alternatives).
Choosing them looked at data, which no ε covers; using them elsewhere does not. (0.4/n̄ is
0.2 for Adult's users, who have two samples; it is for users with many.) They suppose
features of about unit variance and a model of a few thousand parameters; for others they are a
place to start from.

Where doors differ today, with a constraint and privacy:

    door                                 C              m                     T        counts' share
    fpfl.train, a config                 as given       as given              as given 0.15
    suggest, suggested = true            1.5 n̄          as given              1,000    0.25
    estimators, fpfl train --data        1.5 n̄, >= 3    K/10, 100 to 5,000    1,000    0.25
    fpfl plan                            1.5 n̄          least that will do    1,000    0.25
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.methods import OneGradient
from fpfl.privacy.settings import Clipping, Privacy

ROUNDS = 1000
CLIP = 1.5
COUNTS = 1.0
COUNTS_SHARE, SELECTION_SHARE = 0.25, 0.05
LEARNING_RATE, SAMPLE_RATE = 0.2, 0.4
ACCUMULATED = 0.3
"""Noise that may add up in a parameter over a run."""


@dataclass(frozen=True)
class Suggestion:
    """Arguments for ``fpfl.train``: ``train(model, data, constraint=..., **found.arguments())``."""

    cohort: int
    rounds: int
    learning_rate: float
    method: OneGradient
    privacy: Privacy

    def arguments(self) -> dict[str, Any]:
        """The settings by the names that ``fpfl.train`` has for them."""
        return {
            "cohort": self.cohort,
            "rounds": self.rounds,
            "learning_rate": self.learning_rate,
            "method": self.method,
            "privacy": self.privacy,
        }


def suggested_clipping(schema: Schema, constraint: Constraint | None = None) -> Clipping:
    """C, C_s and the split of the budget, by the module's rules."""
    found = schema.samples_per_user
    if found is None:
        raise ValueError(
            "the rule for C needs the number of samples that a user is expected to have; declare "
            "samples_per_user in the schema, or give Clipping(...) yourself"
        )
    return with_counts(CLIP * max(1.0, found), constraint, schema)


def with_counts(bound: float, constraint: Constraint | None, schema: Schema) -> Clipping:
    """A bound for the gradient, and the counts in a block of their own."""
    times = 1
    if constraint is not None and not constraint.bind(schema.attributes).partition:
        times = 1 + len(constraint.by or schema.attributes)
    return Clipping(
        bound,
        counts=COUNTS * times,
        counts_share=COUNTS_SHARE,
        selection_share=SELECTION_SHARE,
    )


def suggested_learning_rate(
    clipping: Clipping, noise_multiplier: float, cohort: int, rounds: int, samples: float | None
) -> float:
    """η, by the module's rule, with the samples that a user is declared to have (or 1)."""
    share = 1.0 - clipping.counts_share - clipping.selection_share - (clipping.clipped_share or 0.0)
    noise = clipping.bound * noise_multiplier / math.sqrt(share)
    accumulated = ACCUMULATED * cohort / (noise * math.sqrt(rounds))
    return min(LEARNING_RATE, SAMPLE_RATE / max(1.0, samples or 1.0), accumulated)


def suggest(
    schema: Schema,
    constraint: Constraint | None = None,
    *,
    population: int,
    cohort: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    rounds: int = ROUNDS,
    **privacy: Any,
) -> Suggestion:
    """Settings for `OneGradient` from public quantities.

    Parameters
    ----------
    schema, constraint
        The declared ``samples_per_user``, and how many groups a sample is in, are used.
    population, cohort
        K and m.
    epsilon, noise_multiplier, delta
        As in `Privacy`: one of the first two.
    rounds
        T.
    privacy
        Anything else that `Privacy` takes, but ``clip``.
    """
    if "clip" in privacy:
        raise ValueError("clip was given to suggest, whose rule it is; give it to Privacy instead")
    clipping = suggested_clipping(schema, constraint)
    asked = Privacy(
        epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, clip=clipping, **privacy
    )
    plan = asked.plan(population=population, cohort=cohort, rounds=rounds)
    return Suggestion(
        cohort=cohort,
        rounds=rounds,
        learning_rate=suggested_learning_rate(
            clipping, plan.noise_multiplier, cohort, rounds, schema.samples_per_user
        ),
        method=OneGradient(),
        privacy=asked,
    )


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
    plan = privacy.plan(
        population=population, cohort=cohort, rounds=rounds, constrained=constraint is not None
    )
    return suggested_learning_rate(clipping, plan.noise_multiplier, cohort, rounds, samples)


def chosen_method(constraint: Constraint, *, private: bool) -> OneGradient:
    """`OneGradient`; where counts have no noise, with steadier multipliers (`PLAIN_DAMPING`)."""
    if private:
        return OneGradient()
    target = PLAIN_TARGET * constraint.tolerance
    return OneGradient(damping=PLAIN_DAMPING, tolerance=target, spread=None)
