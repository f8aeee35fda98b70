r"""Defaults: what is left open is settled by rule, from public quantities alone.

One rule for every door: `fpfl.suggest`, ``suggested = true``, ``fpfl train --data``, the
scikit-learn estimators, ``fpfl plan`` and sweeps. For `OneGradient` with privacy, K users of n̄
samples and a model of p parameters,

    m = K/10, but no fewer than 100 and no more than 5,000,    T = 1,000,
    C_0 = 3 max(1, n̄/2),    C_s = j,    η = 1/n̄ (of a regression 1/4n̄),
    shares 0.20 / 0.05 / 0.01 (counts, selection, clipped users; the gradient has the rest, ρ).

With s = σ/√ρ the noise on every number of the summed gradient, in clip bounds, noise against signal
is z = s √p/m: about how long the noise on the mean gradient is, when the bound is the most that the
mean can be. The bound adapts (`fpfl.privacy.adaptive`) until it clips the fraction

    τ = 0.25 z,    between 0.02 and 0.6.

Where there is little noise nearly nobody is clipped: an up-weighted sample that is clipped gains
nothing, and gaps close from the strong side. Where there is much, a smaller bound is less noise.
It is no more than 4 C_0: weights of up to 11 make norms long, and a bound that chases them adds
noise for the sake of few. The bound moves by 0.3 (f̃ − τ) a round in its logarithm to the base 2,
and by less where the fraction itself is noisy: 0.3 min(1, 0.1/its standard deviation).

Gradients are divided by m, so noise adds up to η C_t s √T/m in every parameter over a run; η_t
comes down as C_t goes up (C_ref), so that this is 0.25 at most. C_s is one sample: j = 1 where
groups partition the samples, otherwise a sample counts once for each attribute or intersection that
groups are made by, and once for the whole. That has the least noise for what it counts: a user with
several relevant samples counts as their mean.

A constraint of one rate that counts errors helps the weak group first: weights stay at 1 or above
for T/5 rounds, and then go down only as long as a group is outside the tolerance. With two such
rates each of them has a weak group of its own, and errors of both kinds would only be moved; there,
and for selection rates, weights may go down from the start.

The numbers were chosen by hand, on the tables that ``people-tables.toml`` (in ``fpfl/experiments``)
names for it, and checked on its others; ``docs/tables.md`` says how, and where that line was
crossed. Choosing them looked at data, which no ε covers; using them elsewhere does not. They
suppose features of about unit variance, which measuring sees to, and a network as `fpfl.mlp` begins
it.

Where doors differ, with a constraint and privacy:

    door                                 C, η, shares   m                     T
    fpfl.train, a config                 as given       as given              as given
    suggest, suggested = true            by rule        as given              as given, or 1,000
    estimators, fpfl train --data        by rule        by rule               1,000
    fpfl plan                            by rule        by rule               1,000
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.methods import OneGradient
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import CLIPPED, GRADIENTS, Clipping, Privacy

ROUNDS = 1000
LEAST_COHORT, MOST_COHORT = 100, 5000

CLIP = 1.5
"""C_0 for each sample of a user, of whom there are two at least."""

COUNTS = 1.0
COUNTS_SHARE, SELECTION_SHARE, CLIPPED_SHARE = 0.20, 0.05, 0.01

LEARNING_RATE = 1.0
"""η for users of one sample, with gradients that are divided by m."""

REGRESSION = 0.25
"""η of a regression over that of a classifier. In the output a squared error is curved by 1 and a
log loss by 1/4 at most: so steps are as far from those that run away."""

ACCUMULATED = 0.25
"""Noise that may add up in a parameter over a run."""

CLIPPED_FRACTION, LEAST_CLIPPED, MOST_CLIPPED = 0.25, 0.02, 0.6
"""τ/z, and the range that τ is kept in."""

MOST_CLIP = 4.0
"""C/C_0 at most: for equalised odds the bound went on to nine times C_0, and steps shrank."""

BOUND_RATE, STEADY = 0.3, 0.1
"""How fast the bound moves, and the noise on f̃ up to which it does."""

PATIENCE = 0.2
"""For which part of the rounds the weak group alone is helped, where the others could be held back
instead."""

PARAMETERS = 1000
"""p, where nobody says."""

PLAIN_ROUNDS = 300
"""T without a constraint and without privacy."""

PLAIN_SAMPLES, PLAIN_LEAST = 15_000, 0.25
"""Without noise in the way, fewer samples than that are learnt by heart: η is smaller, but no less
than a quarter, for T rounds have to get somewhere. (A few thousand rows of Adult and of a state's
people wanted 0.3, all of their rows 1.)"""

PLAIN_TARGET, PLAIN_DAMPING = 0.75, 10.0
"""Without privacy: the part of α that training steers towards, and c. Exact counts can be answered
at once; multipliers that chase them as `OneGradient`'s own settings do, which are for noise, swing,
the more so where two rates pull at the same rows. Chosen on Adult's training rows, a quarter held
out in turn (by sex, α = 0.02): towards α/2 equalized odds had an accuracy of 0.846 and a gap of
0.031 on held-out rows with those settings, and 0.848 and 0.022 with these."""


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


def suggest(
    schema: Schema,
    constraint: Constraint | None = None,
    *,
    population: int,
    cohort: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    rounds: int = ROUNDS,
    parameters: int = PARAMETERS,
    **privacy: Any,
) -> Suggestion:
    """Settings for `OneGradient` from public quantities.

    Parameters
    ----------
    schema, constraint
        The declared ``samples_per_user``, and how many groups a sample is in, are used.
    population, cohort
        K and m; m by rule where it is left out.
    epsilon, noise_multiplier, delta
        As in `Privacy`: one of the first two.
    rounds, parameters
        T, and p of the model.
    privacy
        Anything else that `Privacy` takes, but ``clip``.
    """
    if "clip" in privacy:
        raise ValueError("clip was given to suggest, whose rule it is; give it to Privacy instead")
    cohort = chosen_cohort(population) if cohort is None else cohort
    asked = Privacy(epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, **privacy)
    clipping = suggested_clipping(
        asked, schema, constraint, population=population, cohort=cohort, rounds=rounds,
        parameters=parameters,
    )  # fmt: skip
    asked = replace(asked, clip=clipping)
    return Suggestion(
        cohort=cohort,
        rounds=rounds,
        learning_rate=chosen_rate(asked, constraint, schema, population, cohort, rounds),
        method=OneGradient() if constraint is None else chosen_method(
            constraint, schema, private=True, rounds=rounds
        ),
        privacy=asked,
    )  # fmt: skip


def suggested_clipping(
    asked: Privacy,
    schema: Schema,
    constraint: Constraint | None = None,
    *,
    population: int,
    cohort: int,
    rounds: int,
    parameters: int = PARAMETERS,
) -> Clipping:
    """C, how it adapts, C_s and the split of the budget, by the module's rules.

    ``asked`` says how private it is to be; its own clip bounds are left alone.
    """
    if schema.samples_per_user is None:
        raise ValueError(
            "the rule for C needs the number of samples that a user is expected to have; declare "
            "samples_per_user in the schema, or give Clipping(...) yourself"
        )
    samples = max(1.0, schema.samples_per_user)
    start = CLIP * max(2.0, samples)
    adapts = AdaptiveBound(LEAST_CLIPPED, share=CLIPPED_SHARE, most=MOST_CLIP * start)
    first = replace(with_counts(start, constraint, schema), adapts=adapts)
    plan = replace(asked, clip=first).plan(
        population=population, cohort=cohort, rounds=rounds, constrained=constraint is not None
    )
    noise = plan.noise_stddev(GRADIENTS) / start
    fraction = CLIPPED_FRACTION * noise * math.sqrt(parameters) / cohort
    unsteady = plan.noise_stddev(CLIPPED) / cohort
    return replace(
        first,
        adapts=replace(
            adapts,
            target=_rounded(min(MOST_CLIPPED, max(LEAST_CLIPPED, fraction))),
            rate=_rounded(BOUND_RATE * min(1.0, STEADY / unsteady)),
            reference=_rounded(
                ACCUMULATED * cohort / (full_rate(schema) * noise * math.sqrt(rounds))
            ),
        ),
    )


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


def full_rate(schema: Schema) -> float:
    """η where noise does not shorten steps, with the samples that a user is declared to have."""
    rate = LEARNING_RATE / max(1.0, schema.samples_per_user or 1.0)
    return rate if schema.classes is not None else REGRESSION * rate


def suggested_learning_rate(plan: PrivacyPlan, clipping: Clipping, schema: Schema) -> float:
    """η, by the module's rule; where the bound adapts, C_ref shortens steps."""
    rate = full_rate(schema)
    if clipping.adapts is not None and clipping.adapts.reference is not None:
        return rate
    name = GRADIENTS if clipping.counts is not None else plan.blocks[0].name
    return min(rate, ACCUMULATED * plan.cohort / (plan.noise_stddev(name) * math.sqrt(plan.rounds)))


def chosen_cohort(population: int) -> int:
    """A tenth of the users, but no fewer than 100 (or all of them), and no more than 5,000."""
    return min(population, max(LEAST_COHORT, min(population // 10, MOST_COHORT)))


def chosen_clip(
    given: float | Clipping | None,
    asked: Privacy,
    constraint: Constraint | None,
    schema: Schema,
    *,
    population: int,
    cohort: int,
    rounds: int,
    parameters: int,
) -> Clipping:
    """Clip bounds by `fpfl.suggest`'s rules, where they were not given."""
    if given is None:
        return suggested_clipping(
            asked, schema, constraint, population=population, cohort=cohort, rounds=rounds,
            parameters=parameters,
        )  # fmt: skip
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
    if privacy is None:
        return min(full_rate(schema), _plain_rate(population, schema.samples_per_user))
    plan = privacy.plan(
        population=population, cohort=cohort, rounds=rounds, constrained=constraint is not None
    )
    return suggested_learning_rate(plan, privacy.clipping, schema)


def _plain_rate(population: int, samples: float | None) -> float:
    """η without privacy, of a classifier."""
    each = max(1.0, samples or 1.0)
    part = min(1.0, population * each / PLAIN_SAMPLES)
    return max(PLAIN_LEAST, part) * LEARNING_RATE / each


def chosen_method(
    constraint: Constraint, schema: Schema, *, private: bool, rounds: int
) -> OneGradient:
    """`OneGradient`; where counts have no noise, with steadier multipliers (`PLAIN_DAMPING`)."""
    patience = math.ceil(PATIENCE * rounds) if _one_error_rate(constraint, schema) else None
    if private:
        return OneGradient(patience=patience)
    target = PLAIN_TARGET * constraint.tolerance
    return OneGradient(damping=PLAIN_DAMPING, tolerance=target, spread=None, patience=patience)


def parameters_of(model: nn.Module) -> int:
    """p."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def _one_error_rate(constraint: Constraint, schema: Schema) -> bool:
    """Whether the constraint is about one rate, which counts errors, or hits and so errors."""
    if len(constraint.rates) != 1:
        return False
    slopes = constraint.rates[0].loss_slopes(schema.classes)
    return slopes is not None and bool((slopes >= 0).all() or (slopes <= 0).all())


def _rounded(number: float) -> float:
    """Three digits: a rule of thumb, that is read in configs."""
    return float(f"{number:.3g}")
