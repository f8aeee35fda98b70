"""A run and its reference, evaluated privately on the same held-out users, and compared.

Two releases, one of each model, with noise of their own. Together they cost the ε that was asked
for, and each by itself less: the noise is that of two Gaussian mechanisms on the same users.

A rate's interval of each model misses with probability (1 − confidence)/(2 R (G + 1)) at most, and
a difference lies between the furthest ends of the two: no independence is needed, for the users
are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.aggregation import NoiseSource
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.against import NOT_MEASURED as NOT_MEASURED
from fpfl.fairness.against import Against, changes_of, good_end
from fpfl.fairness.constraints import Constraint
from fpfl.heldout.estimates import Cells, whole_and_groups
from fpfl.heldout.evaluation import evaluate_run
from fpfl.heldout.intervals import rate_interval
from fpfl.heldout.result import PrivateEvaluation
from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from fpfl.runs.folder import AGAINST, OpenRun, as_json, model_digest
from fpfl.store.files import write_whole


@dataclass(frozen=True)
class _Second:
    """Where the noise of the second of two releases comes from: a seed must not draw it again."""

    source: NoiseSource

    @property
    def seeded(self) -> bool:
        """See `NoiseSource`."""
        return self.source.seeded

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        """See `NoiseSource`: what the source has for the round after."""
        return self.source.integers(size, round + 1, device=device)


def epsilon_of_each(epsilon: float, delta: float) -> float:
    """ε of each of two releases that cost ``epsilon`` together, at the same δ."""
    return gaussian_epsilon(gaussian_noise_multiplier(epsilon, 2, delta), 1, delta)


def compare_private(
    mine: PrivateEvaluation,
    reference: PrivateEvaluation,
    schema: Schema,
    constraint: Constraint,
    confidence: float = 0.95,
) -> Against:
    """Compare two private evaluations of the same users, by what was released alone."""
    cells = Cells(schema, constraint)
    own = {rate.name for rate in constraint.rates}
    rates = tuple(rate for rate in cells.rates if rate.name in own)
    ends = [good_end(rate, schema.classes) for rate in rates]
    if all(end == "neither" for end in ends):
        rates = (*rates, cells.score)
        ends.append(good_end(cells.score, schema.classes))
    error = (1.0 - confidence) / (2 * len(rates) * (len(cells.groups) + 1))
    values, lows, highs = [], [], []
    for one in (mine, reference):
        released = np.array([[row[kind] for kind in cells.kinds] for row in one.released.values()])
        sums = whole_and_groups(cells, released, one.noise_stddev, rates)
        low, high = rate_interval(sums, error, one.bound)
        values.append(sums.value())
        lows.append(low)
        highs.append(high)
    names = [(rate.name, group) for rate in rates for group in ("overall", *cells.groups.names)]
    fields = [*values, values[0] - values[1], lows[0] - highs[1], highs[0] - lows[1]]
    sigma = (mine.noise_multiplier, reference.noise_multiplier)
    both = (sum(s**-2 for s in sigma) / 2) ** -0.5
    delta = max(mine.delta, reference.delta)
    return Against(
        changes_of(names, fields, ends),
        constraint.name,
        mine.population,
        confidence,
        gaussian_epsilon(both, 2, delta),
        delta,
    )


def evaluate_with_reference(
    run: OpenRun,
    reference: OpenRun,
    data: FederatedDataset,
    *,
    model: nn.Module,
    constraint: Constraint,
    epsilon: float,
    delta: float | None = None,
    bound: float | None = None,
    confidence: float = 0.95,
    ledger: str | Path | None = None,
    moved: bool = False,
    noise: NoiseSource | None = None,
    auc: bool = True,
) -> tuple[PrivateEvaluation, PrivateEvaluation, Against]:
    """Evaluate a finished run and its reference, each once, and compare them.

    Each run's ledger records its own release, and a population ledger of the held-out users both.
    ``epsilon`` is what they cost together; the other parameters are those of `evaluate_run`. What
    was released is written to both folders, the comparison to the run's.
    """
    for each in (run, reference):
        each.require_finished()
        digest = model_digest(each.path)
        if any(record.get("model") == digest for record in each.ledger.evaluations):
            raise ValueError(
                f"{each.path} was evaluated privately already, and a model is evaluated once: it "
                "cannot be compared with the other of the two on the same release. Use the figures "
                "that were released"
            )
    each_epsilon = epsilon_of_each(epsilon, 1 / (10 * data.K) if delta is None else delta)
    # With the same noise twice, the difference of the two would have none.
    second = None if noise is None else _Second(noise)
    mine, theirs = (
        evaluate_run(
            each,
            data,
            model=model,
            constraint=constraint,
            epsilon=each_epsilon,
            delta=delta,
            bound=bound,
            confidence=confidence,
            ledger=ledger,
            moved=moved,
            noise=own,
            auc=auc,
        )
        for each, own in ((run, noise), (reference, second))
    )
    found = compare_private(mine, theirs, data.schema, constraint, confidence)
    write_against(run.path, reference.path, "private", found)
    return mine, theirs, found


def write_against(run: Path, reference: Path, kind: str, found: Against) -> None:
    """Keep a comparison in the run's folder, with the digests of both models."""
    digests = {"model": model_digest(run), "reference_model": model_digest(reference)}
    write_whole(run / AGAINST.format(kind), as_json(found.as_dict() | digests))
