r"""The plan of a private evaluation, and its one release.

    v = Σ_k min(1, B/n^k) (counts of user k) + N(0, s²),   s = C σ,   C = B √t

(:mod:`fpfl.heldout.estimates` has the counts and t). For two classes the scores are counted as
well, for the AUC, in units of λ; then C = B √(t + λ²) (:mod:`fpfl.heldout.scores`). Every held-out
user takes part, once: there is no sampling and nothing to amplify, and ε is that of one Gaussian
mechanism with sensitivity C (a user left out) or 2C (a user replaced), exactly.

What is estimated are the rates of the population that the held-out users were drawn from, with
every user weighing at most B samples: F and n' are sums of scaled counts. Where no user has more
than B samples they are the plain rates.

Users are read and counted some at a time. Nothing here raises or logs because of what the data is:
a user with a sample that is broken (not finite, not what the schema declares, or too much for the
model) sends zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.aggregation import DenseRows, NoiseSource, SystemNoise, ThirdParty
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.heldout.estimates import Cells, Judge
from fpfl.heldout.intervals import Floats
from fpfl.heldout.result import PrivateEvaluation, statement
from fpfl.heldout.scores import BINS, ReleasedScores, count_scores
from fpfl.privacy.assumptions import ALONE
from fpfl.privacy.filter import OneRelease
from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from fpfl.privacy.plan import PrivacyPlan
from fpfl.users import task
from fpfl.users.isolation import Outputs
from fpfl.users.packing import Ints
from fpfl.users.task import check_model

_AT_ONCE = 2**16
"""Samples, or users, that are counted together; one user with more is by itself."""
_BATCH = 8192
"""Samples that are read and go through the model together."""


def user_counts(
    model: nn.Module, data: FederatedDataset, cells: Cells, bound: float, scores: float = 0.0
) -> Iterator[Tensor]:
    """Count the users' samples, (users, cells) at a time; users without samples are left out.

    ``scores`` is λ: beside the cells stand the counts of scores, in this unit, where it is not 0.

    A user's counts are scaled by min(1, B/n^k): nobody weighs more than B samples, and how the
    model does on them has no influence on the weight, so a rate is not bent by it.
    """
    outputs = Outputs(model, data.schema)
    for first, last in _chunks(data.offsets.numpy()):
        starts, sizes = data.rows(np.arange(first, last), strict=False)
        for some in _runs(starts, sizes):
            sizes_of_run = sizes[some]
            place = slice(int(starts[some][0]), int(starts[some][0] + sizes_of_run.sum()))
            yield _counted(
                outputs, data, place, torch.from_numpy(sizes_of_run), cells, bound, scores
            )


def _runs(starts: Ints, sizes: Ints) -> Iterator[Ints]:
    """Users with samples whose samples stand one after the other, as their places.

    All of them are one run, but where a lazy population's offsets are damaged.
    """
    there = np.flatnonzero(sizes)
    ends = (starts + sizes)[there]
    breaks = np.flatnonzero(starts[there][1:] != ends[:-1]) + 1
    yield from (run for run in np.split(there, breaks) if len(run))


def _chunks(offsets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[tuple[int, int]]:
    """Cut the users into runs of few samples and few users."""
    first, users = 0, len(offsets) - 1
    while first < users:
        room = int(np.searchsorted(offsets, offsets[first] + _AT_ONCE, side="right")) - 1
        last = min(max(room, first + 1), first + _AT_ONCE, users)
        yield first, last
        first = last


def _counted(
    outputs: Outputs,
    data: FederatedDataset,
    place: slice,
    sizes: Tensor,
    cells: Cells,
    bound: float,
    scores: float,
) -> Tensor:
    """The counts of users with the given numbers of samples, one after the other in ``place``."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    labels, attributes = data.labels[place].cpu(), data.attributes[place].cpu()
    kind = torch.float64 if data.schema.classes is None else torch.int64
    answers, sound = _answers(outputs, data, place, sizes)
    sound &= cells.valid(labels, attributes)
    # What is not sound may be any number, and is counted as nothing.
    answers, labels = answers.masked_fill(~sound, 0), labels.masked_fill(~sound, 0).to(kind)
    predicted = _predicted(answers, data.schema).to(kind)
    counts = cells.count(predicted, labels, attributes, owner)
    if scores:
        counts = torch.cat([counts, scores * count_scores(answers, labels, owner)], dim=1)
    scale = (bound / sizes.double()).clamp(max=1.0)
    broken = torch.zeros(len(sizes), dtype=torch.bool)
    broken[owner[~sound]] = True
    return (counts * scale.unsqueeze(1)).masked_fill(broken.unsqueeze(1), 0.0)


def _answers(
    outputs: Outputs, data: FederatedDataset, place: slice, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Answers on samples, and which of them are of finite features and no NaN.

    An answer is the logit of class 1 of two; for other tasks it is the hard prediction.
    """
    features = data.features[place]
    if not outputs.alone(data.input_dtype(outputs.dtype)):
        try:
            return _outputs(outputs, features, data)
        except Exception:  # whose sample it was must not be known: that user sends zero
            pass
    parts = [_or_nothing(outputs, part, data) for part in torch.split(features, sizes.tolist())]
    answers, sound = zip(*parts, strict=True)
    return torch.cat(answers), torch.cat(sound)


def _predicted(answers: Tensor, schema: Schema) -> Tensor:
    return task.predictions(answers, schema) if schema.task == "binary" else answers


def _or_nothing(
    outputs: Outputs, features: Tensor, data: FederatedDataset
) -> tuple[Tensor, Tensor]:
    try:
        return _outputs(outputs, features, data)
    except Exception:
        return torch.zeros(len(features)), torch.zeros(len(features), dtype=torch.bool)


def _outputs(outputs: Outputs, features: Tensor, data: FederatedDataset) -> tuple[Tensor, Tensor]:
    dtype = data.input_dtype(outputs.dtype)
    answers, sound = [], []
    pieces = torch.split(features, len(features) if outputs.alone(dtype) else _BATCH)
    for piece in pieces:
        # A copy in any case: a model that works in place must not write to a mapped file.
        inputs = piece.to(outputs.device, dtype, copy=True)
        finite = inputs.isfinite().flatten(1).all(dim=1)
        output = outputs(inputs)
        finite &= ~output.isnan().reshape(len(inputs), -1).any(dim=1)
        binary = data.schema.task == "binary"
        answers.append((output if binary else task.predictions(output, data.schema)).cpu())
        sound.append(finite.cpu())
    return torch.cat(answers), torch.cat(sound)


def length(cells: Cells, scores: float) -> float:
    """√(t + λ²): how far one sample moves the counts at most."""
    return math.hypot(cells.length, scores)


@dataclass(frozen=True)
class HeldoutPlan(OneRelease):
    """All that is public about a private evaluation; :func:`fpfl.heldout.plan_heldout` makes it.

    A ledger charges its ``mechanism`` (or ``epsilon`` and ``delta``) after :meth:`check` and before
    :meth:`release`, once.

    Parameters
    ----------
    cells
        What is counted.
    bound
        B: how many samples one user weighs at most.
    confidence
        Of the intervals.
    privacy
        The same as a privacy plan: one round in which every user takes part.
    scores
        λ: the unit that scores are counted in, for the AUC; 0 where they are not counted.
    """

    cells: Cells
    bound: float
    confidence: float
    privacy: PrivacyPlan = field(repr=False)
    scores: float = 0.0

    @property
    def sensitivity(self) -> int:
        """How much one user changes the released counts (in ℓ2), in units of C."""
        return self.privacy.sensitivity

    @property
    def clip(self) -> float:
        """C = B √(t + λ²): how long one user's vector of counts is at most (in ℓ2)."""
        return self.bound * length(self.cells, self.scores)

    @property
    def size(self) -> int:
        """How many counts are released."""
        return math.prod(self.cells.shape) + (2 * BINS if self.scores else 0)

    @property
    def scores_stddev(self) -> float | None:
        """s/λ: the standard deviation of the noise on every count of scores, in samples."""
        return self.noise_stddev / self.scores if self.scores else None

    @cached_property
    def noise_stddev(self) -> float:
        """s: the standard deviation of the noise on every count.

        It is C σ and, for noise on a grid, a little more: :mod:`fpfl.aggregation.sums` says why.
        """
        return float(self._third_party(SystemNoise()).noise_stddev[0])

    @cached_property
    def epsilon(self) -> float:
        """ε of the release at δ, by the formula for one Gaussian mechanism."""
        return gaussian_epsilon(
            self.noise_multiplier, 1, self.delta, sensitivity=float(self.sensitivity)
        )

    def statement(self, seeded: bool) -> list[str]:
        """What is protected, what it costs and what the figures mean, one point a line.

        ``seeded`` says that the noise comes from a seed and not from the operating system.
        """
        return statement(self, seeded=seeded)

    def check(self, model: nn.Module, data: FederatedDataset) -> None:
        """Refuse a model or users that the plan is not for, before anything is charged.

        It looks at what is public alone: schema, number of users, and the model's answers to
        made-up inputs.
        """
        schema = self.cells.schema
        other = schema.difference(data.schema)
        if other is not None:
            raise ValueError(f"the plan and the data have different schemas: {other}")
        if self.population != data.K:
            raise ValueError(
                f"the data has {data.K:,} users; the plan was made for "
                f"{self.population:,}: make one for these, plan_heldout(population=...)"
            )
        parameter = next(model.parameters(), torch.zeros(()))
        check_model(model, schema, data.input_dtype(parameter.dtype))

    def release(
        self, model: nn.Module, data: FederatedDataset, source: NoiseSource | None = None
    ) -> PrivateEvaluation:
        """Count, add the noise, and say what follows from the noisy counts alone.

        Each call is a release and costs ε again.

        Parameters
        ----------
        model
            It returns logits (or numbers in units of the label range), as for training.
        data
            The held-out users.
        source
            Where the noise comes from; the operating system's randomness when it is not given.
        """
        source = SystemNoise() if source is None else source
        self.check(model, data)
        released, scores = self._noised(model, data, source)
        judge = Judge(self.cells, self.bound, self.confidence)
        auc = None if scores is None else scores.area(self.confidence)
        s = self.noise_stddev
        gap = judge.gap(released, s)
        verdict = gap.verdict(self.cells.constraint.tolerance)
        advice = None
        if verdict == "cannot tell":
            advice = judge.advice(released, s, self.population, self._noise_at)
        rows = (dict(zip(self.cells.kinds, row, strict=True)) for row in released.tolist())
        return PrivateEvaluation(
            released=dict(zip(self.cells.parts, rows, strict=True)),
            rates=judge.rates(released, s),
            gap=gap,
            verdict=verdict,
            advice=advice,
            score=self.cells.score.name,
            constraint=self.cells.constraint.name,
            tolerance=self.cells.constraint.tolerance,
            confidence=self.confidence,
            bound=self.bound,
            mechanism=self.mechanism,
            epsilon=self.epsilon,
            delta=self.delta,
            noise_stddev=s,
            seeded=source.seeded,
            lines=tuple(self.statement(source.seeded)),
            contributions=ALONE,
            metrics=judge.metrics(released, s, auc),
            scores=None if scores is None else scores.counts.tolist(),
            scores_stddev=self.scores_stddev,
        )

    def _noised(
        self, model: nn.Module, data: FederatedDataset, source: NoiseSource
    ) -> tuple[Floats, ReleasedScores | None]:
        """The released cells, (P, Q), and counts of scores."""
        third_party = self._third_party(source)

        def rows() -> Iterator[DenseRows]:
            for counts in user_counts(model, data, self.cells, self.bound, self.scores):
                yield DenseRows(counts, third_party.places)

        total = third_party.sum(rows(), like=torch.zeros((), dtype=torch.float64))
        noised, cells = third_party.noised(total, 0), math.prod(self.cells.shape)
        released: Floats = noised[:cells].reshape(self.cells.shape).numpy()
        if self.scores_stddev is None:
            return released, None
        counts = (noised[cells:] / self.scores).reshape(2, BINS).numpy()
        return released, ReleasedScores(counts, self.scores_stddev, self.bound)

    def _third_party(self, source: NoiseSource) -> ThirdParty:
        places = {"cells": slice(0, self.size)}
        return ThirdParty(places, self.privacy.blocks, self.privacy, source)

    def _noise_at(self, times: float) -> float:
        """The standard deviation of the noise if ε were so many times as large."""
        epsilon, reach = times * self.epsilon, float(self.sensitivity)
        return self.clip * gaussian_noise_multiplier(epsilon, 1, self.delta, sensitivity=reach)
