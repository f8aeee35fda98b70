r"""Estimates: which counts a held-out user sends, and how rates, gap and verdict follow from them.

The groups of one attribute (or of one intersection) share the samples out between them, with one
cell more for the samples in none of them where the schema allows for such. So every way of grouping
that a constraint names has the whole as its sum, and the rest beside each of its groups with noise
of its own; no counts of the whole are needed.

In each group samples are counted by *kind*. Of two classes there are four kinds, the confusion
matrix, and every rate is a sum over some of them. For other tasks there are two kinds for each
rate, f and 1 − f where its condition holds; the model's accuracy, or error, is added to the rates.

A sample adds vectors of length 1 at most, one for each way of grouping (and for each rate, if there
are more than two classes or none): t of them, so it moves the cells by √t. All samples of a user
are weighted by min(1, B/n^k), and a user moves the cells by B√t.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.data.schema import Schema
from fpfl.fairness import rates as _rates
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import Difference, GapEstimate
from fpfl.fairness.groups import UNKNOWN, Groups
from fpfl.fairness.metrics import ClassMetrics, Estimate
from fpfl.fairness.rates import Rate
from fpfl.heldout.intervals import Floats, Sums, difference_interval, rate_interval
from fpfl.heldout.result import RateEstimate

Ints = NDArray[np.int64]

CONFUSION = ("TP", "FN", "FP", "TN")
_PREDICTED, _LABEL = torch.tensor([1, 0, 1, 0]), torch.tensor([1, 1, 0, 0])


@dataclass(frozen=True)
class Cells:
    """What is counted: P parts (groups, and samples in none) × Q kinds.

    Parameters
    ----------
    schema
        The declared schema.
    constraint
        Whose rates and groups are to be known.
    """

    schema: Schema
    constraint: Constraint

    @cached_property
    def groups(self) -> Groups:
        """The constraint's groups: the first parts, in their order."""
        return self.constraint.bind(self.schema.attributes)

    @cached_property
    def score(self) -> Rate:
        """How good the model is: its accuracy, or its error where the label is a number."""
        if self.schema.classes is not None or self.schema.label_range is None:
            return _rates.accuracy()
        errors = ("absolute error", "squared error")
        own = [rate for rate in self.constraint.rates if rate.name in errors]
        return own[0] if own else _rates.absolute_error(self.schema.label_range)

    @cached_property
    def rates(self) -> tuple[Rate, ...]:
        """All rates that follow from the cells, the score first.

        Of two with the same name the constraint's own is meant.
        """
        wanted = [self.score]
        if self.confusion:
            wanted += [_rates.false_negative_rate(), _rates.false_positive_rate()]
            wanted += [_rates.selection_rate()]
        own = {rate.name: rate for rate in self.constraint.rates}
        return tuple(({rate.name: rate for rate in wanted} | own).values())

    @property
    def confusion(self) -> bool:
        """Whether the kinds are those of the confusion matrix."""
        return self.schema.task == "binary"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds."""
        if self.confusion:
            return CONFUSION
        return tuple(f"{rate.name}: {what}" for rate in self.rates for what in ("F", "n' - F"))

    @cached_property
    def ways(self) -> dict[tuple[str, ...], list[int]]:
        """The parts of each way of grouping, which share all samples out between them."""
        ways: dict[tuple[str, ...], list[int]] = {}
        for number, group in enumerate(self.groups.groups):
            ways.setdefault(tuple(name for name, _ in group.where), []).append(number)
        unknown = {attribute.name for attribute in self.schema.attributes if attribute.unknown}
        parts = len(self.groups)
        for names, members in ways.items():
            if unknown & set(names):
                members.append(parts)
                parts += 1
        return ways

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""
        groups = self.groups.names
        others = [
            f"{' & '.join(names)} not known"
            for names, members in self.ways.items()
            if members[-1] >= len(groups)
        ]
        return (*groups, *others)

    @cached_property
    def way_of(self) -> Ints:
        """Each group's way of grouping, (G,)."""
        way = np.empty(len(self.parts), dtype=np.int64)
        for number, members in enumerate(self.ways.values()):
            way[members] = number
        return way[: len(self.groups)]

    @property
    def smallest_way(self) -> int:
        """The way of grouping with the fewest parts: its sum has the least noise."""
        sizes = [len(members) for members in self.ways.values()]
        return sizes.index(min(sizes))

    @property
    def comparisons(self) -> int:
        """How many differences there are; where there are just two groups, one tells both."""

        def differences(members: list[int]) -> int:
            groups = sum(member < len(self.groups) for member in members)
            return 1 if groups == len(members) == 2 else groups

        return len(self.constraint.rates) * sum(map(differences, self.ways.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """(P, Q)."""
        return len(self.parts), len(self.kinds)

    @property
    def length(self) -> float:
        """√t: how far one sample moves the cells at most."""
        return math.sqrt(len(self.ways) * (1 if self.confusion else len(self.rates)))

    def count(self, predicted: Tensor, labels: Tensor, attributes: Tensor, owner: Tensor) -> Tensor:
        """Count the samples of each user: (users, P Q).

        Parameters
        ----------
        predicted, labels, attributes
            Of the samples: hard predictions, labels and codes.
        owner
            Each sample's user, rising from 0.
        """
        users = int(owner[-1]) + 1
        kinds = self._kinds_of(predicted, labels)
        counts = torch.zeros(users, *self.shape, dtype=torch.float64)
        for part, member in enumerate(self._members(attributes)):
            counts[:, part].index_add_(0, owner[member], kinds[member])
        return counts.flatten(1)

    def valid(self, labels: Tensor, attributes: Tensor) -> Tensor:
        """Which samples have a label and codes that the schema declares."""
        low, high = 0.0, float(self.schema.classes or 0) - 1.0
        if self.schema.classes is None and self.schema.label_range is not None:
            low, high = self.schema.label_range
        valid = (labels >= low) & (labels <= high)
        for column, attribute in enumerate(self.schema.attributes):
            codes, least = attributes[:, column], UNKNOWN if attribute.unknown else 0
            valid = valid & (codes >= least) & (codes < len(attribute.values))
        return valid

    def sums(self, released: Floats, stddev: float, rates: tuple[Rate, ...]) -> Sums:
        """F and M of every rate and part, (R, P), from released cells (P, Q)."""
        F, M = (np.stack(each) for each in zip(*map(self._weights, rates), strict=True))
        # For f between 0 and 1 these are more than the variances Σ f² s² and Σ (1 − f)² s².
        noise = (np.outer(each.sum(axis=1), np.full(len(released), stddev**2)) for each in (F, M))
        return Sums(F @ released.T, M @ released.T, *noise)

    def wholes(self, sums: Sums) -> Sums:
        """The same of the whole, once for each way of grouping: (R, number of ways)."""
        belongs = np.zeros((len(self.parts), len(self.ways)))
        for number, members in enumerate(self.ways.values()):
            belongs[members, number] = 1.0
        return Sums(*(each @ belongs for each in (sums.F, sums.M, sums.noise_F, sums.noise_M)))

    def _members(self, attributes: Tensor) -> list[Tensor]:
        """Which samples are in each part."""
        members = list(self.groups.membership(attributes).unbind(-1))
        for way in self.ways.values():
            if way[-1] >= len(self.groups):
                known = torch.stack([members[number] for number in way[:-1]])
                members.append(~known.any(dim=0))
        return members

    def _kinds_of(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """What each sample adds to each kind, (n, Q)."""
        if self.confusion:
            codes = 2 * (1 - labels) + (1 - predicted)  # in the order of CONFUSION
            return torch.nn.functional.one_hot(codes, 4).double()
        columns = []
        for rate in self.rates:
            condition = rate.condition(labels).double()
            f = condition * rate.evaluate(predicted, labels).double()
            columns += [f, condition - f]
        return torch.stack(columns, dim=1)

    def _weights(self, rate: Rate) -> tuple[Floats, Floats]:
        """What a sample of each kind adds to the rate's F and to its M, (Q,)."""
        if self.confusion:
            condition = rate.condition(_LABEL).double()
            f = condition * rate.evaluate(_PREDICTED, _LABEL).double()
            return f.numpy(), (condition - f).numpy()
        F, M = np.zeros(len(self.kinds)), np.zeros(len(self.kinds))
        place = 2 * [each.name for each in self.rates].index(rate.name)
        F[place], M[place + 1] = 1.0, 1.0
        return F, M


@dataclass(frozen=True)
class Judge:
    """Judges released cells; all it knows besides them is public.

    Parameters
    ----------
    cells
        What was counted.
    bound
        B: how many samples a user weighs at most.
    confidence
        Of the intervals.
    """

    cells: Cells
    bound: float
    confidence: float

    def rates(self, released: Floats, stddev: float) -> dict[str, dict[str, RateEstimate]]:
        """Every rate of the whole and of each group, with an interval of its own."""
        cells = self.cells
        sums = whole_and_groups(cells, released, stddev, cells.rates)
        low, high = rate_interval(sums, 1.0 - self.confidence, self.bound)
        numbers = np.stack([sums.value(), low, high, sums.n], axis=-1).tolist()
        names = ("overall", *cells.groups.names)
        return {
            rate.name: {name: RateEstimate(*four) for name, four in zip(names, row, strict=True)}
            for rate, row in zip(cells.rates, numbers, strict=True)
        }

    def metrics(self, released: Floats, stddev: float, auc: Estimate | None) -> ClassMetrics | None:
        """What accuracy does not say of two classes; None for other tasks.

        All but the AUC follow from the confusion matrix of the whole. F1 = TP/(TP + (FN + FP)/2) is
        a ratio like a rate. Each interval by itself contains its figure with probability
        ``confidence``; that of the balanced accuracy is the mean of the recalls', which hold at
        once.
        """
        cells = self.cells
        if not cells.confusion:
            return None
        members = list(cells.ways.values())[cells.smallest_way]
        whole, variance = released[members].sum(axis=0), len(members) * stddev**2

        def estimate(F: tuple[float, ...], M: tuple[float, ...], share: float = 1.0) -> Estimate:
            # In the order of CONFUSION.
            noise = (np.array([variance * np.square(each).sum()]) for each in (F, M))
            sums = Sums(np.array([whole @ F]), np.array([whole @ M]), *noise)
            low, high = rate_interval(sums, share * (1.0 - self.confidence), self.bound)
            return Estimate(float(sums.value()[0]), float(low[0]), float(high[0]))

        recalls = (
            estimate((1, 0, 0, 0), (0, 1, 0, 0), 0.5),
            estimate((0, 0, 0, 1), (0, 0, 1, 0), 0.5),
        )
        mean = np.mean([[each.value, each.low, each.high] for each in recalls], axis=0).tolist()
        ones, said = (1, 1, 0, 0), (1, 0, 1, 0)
        zeros, silent = (0, 0, 1, 1), (0, 1, 0, 1)
        return ClassMetrics(
            balanced_accuracy=Estimate(*mean),
            f1=estimate((1, 0, 0, 0), (0, 0.5, 0.5, 0)),
            auc=auc,
            labels=(estimate(zeros, ones), estimate(ones, zeros)),
            predicted=(estimate(silent, said), estimate(said, silent)),
            class_names=cells.schema.class_names,
        )

    def gap(self, released: Floats, stddev: float) -> GapEstimate:
        """The constraint's gap; the intervals of all differences hold at once (Bonferroni)."""
        cells = self.cells
        parts = cells.sums(released, stddev, cells.constraint.rates)
        groups = _columns(parts, range(len(cells.groups)))
        whole = _columns(cells.wholes(parts), cells.way_of)
        error = (1.0 - self.confidence) / cells.comparisons
        low, high = difference_interval(groups, whole - groups, error, self.bound)
        overall, value = whole.value(), groups.value()
        ends = rate_interval(groups, error, self.bound)
        D = overall - value
        count = np.where(np.isnan(D), 0, np.maximum(groups.n, 1.0)).round()
        names = product([rate.name for rate in cells.constraint.rates], cells.groups.names)
        numbers = np.stack([overall, value, count, D, low, high, *ends], axis=-1)
        return GapEstimate(
            cells.constraint.name,
            value=float(np.fmax.reduce(np.abs(D), axis=None, initial=np.nan)),
            low=float(np.maximum(np.maximum(low, -high), 0.0).max()),
            high=float(np.maximum(-low, high).max()),
            differences=tuple(
                Difference(*each, o, v, int(n), *d)
                for each, (o, v, n, *d) in zip(names, numbers.reshape(-1, 8).tolist(), strict=True)
            ),
        )

    def advice(
        self, released: Floats, stddev: float, population: int, noise: Callable[[float], float]
    ) -> str:
        """What it takes for intervals of ± α, with groups and rates as they were released.

        Such intervals mostly tell a fair model, and one whose gap is twice the tolerance. What it
        takes to tell a gap that is nearly α itself nobody can say. ``noise`` gives the noise that
        there would be if ε were so many times as large.
        """
        tolerance = self.cells.constraint.tolerance

        def narrow(times: float, noise: float) -> bool:
            gap = self.gap(times * released, noise)
            widest = max(d.high - d.low for d in gap.differences)
            return widest <= 2 * tolerance and not gap.unknown_groups

        if narrow(1.0, stddev):
            return "The intervals are narrow: the gap may be close to α itself"
        users = _first(lambda times: narrow(times, stddev), 20)
        if users is None:
            return f"No number of users is in sight that would give intervals of ± {tolerance:g}"
        needed = f"about {_two_digits(population * users)} users like these"
        budget = _first(lambda times: narrow(1.0, noise(times)), 6)
        other = (
            "; a larger ε alone is not enough"
            if budget is None
            else f", or about {budget:.2g} times the ε"
        )
        return f"For intervals of ± {tolerance:g} it takes {needed}{other}"


def whole_and_groups(
    cells: Cells, released: Floats, stddev: float, rates: tuple[Rate, ...]
) -> Sums:
    """F and M of every rate for the whole and for each group, (R, 1 + G)."""
    parts = cells.sums(released, stddev, rates)
    whole = _columns(cells.wholes(parts), [cells.smallest_way])
    groups = _columns(parts, range(len(cells.groups)))
    return Sums(*(np.hstack(pair) for pair in zip(_arrays(whole), _arrays(groups), strict=True)))


def _first(enough: Callable[[float], bool], powers: int) -> float | None:
    """About the least factor that is enough, up to 2 to the given power."""
    steps = [2.0 ** (step / 4) for step in range(1, 4 * powers + 1)]
    found = bisect_left(steps, True, key=enough)
    return steps[found] if found < len(steps) else None


def _arrays(sums: Sums) -> tuple[Floats, ...]:
    return sums.F, sums.M, sums.noise_F, sums.noise_M


def _columns(sums: Sums, which: object) -> Sums:
    return Sums(*(each[:, np.asarray(which)] for each in _arrays(sums)))


def _two_digits(number: float) -> str:
    unit = 10.0 ** max(math.floor(math.log10(number)) - 1, 0)
    return f"{math.ceil(number / unit) * unit:,.0f}"
