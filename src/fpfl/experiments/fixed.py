"""Settings of the Adult tables: a fixed clip bound, for features standardised by the data.

    C = 1.5 n̄,    shares 0.70 / 0.25 / 0.05 (gradient, counts, selection),
    η = min(0.2, 0.4/n̄, 0.3 m/(s √T)),    s = C σ/√0.70,

with n̄ the schema's declared number of samples per user (at least 1), m the expected cohort, and so
s the noise on every number of the summed gradient. They were `fpfl.suggest`'s in 0.1.0, and their
alternatives are in ``docs/robust.md``; what other tables want is in `fpfl.training.defaults`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.privacy.settings import Clipping
from fpfl.training.defaults import with_counts

CLIP = 1.5
COUNTS_SHARE = 0.25
LEARNING_RATE, SAMPLE_RATE = 0.2, 0.4
ACCUMULATED = 0.3


def fixed_clipping(schema: Schema, constraint: Constraint | None = None) -> Clipping:
    """C, C_s and the split of the budget."""
    samples = max(1.0, schema.samples_per_user or 1.0)
    return replace(with_counts(CLIP * samples, constraint, schema), counts_share=COUNTS_SHARE)


def fixed_learning_rate(
    clipping: Clipping, noise_multiplier: float, cohort: int, rounds: int, samples: float | None
) -> float:
    """η."""
    share = 1.0 - clipping.counts_share - clipping.selection_share
    noise = clipping.bound * noise_multiplier / math.sqrt(share)
    accumulated = ACCUMULATED * cohort / (noise * math.sqrt(rounds))
    return min(LEARNING_RATE, SAMPLE_RATE / max(1.0, samples or 1.0), accumulated)
