r"""What training finds out about its inputs, so that they can be scaled.

With privacy: one release of the columns that the schema says nothing about but their ranges and
values, as `fpfl.measure` makes it, of the inputs that rows became. A number has 64 bins over its
range (symmetric-log where a long tail is declared), or, where many columns share the noise of few
users, 32, 16 or 8: as many as leave a median's rank known within a tenth of the users. Its centre
is the median, or the range's end where that is in the last bin before it (most such values are the
end itself: a 0). Its width is the spread of `MeasuredNumber`. A number with two values is a
category, in fact, and has their mean and deviation. A number that becomes its rank has the
distribution function in place of centre and width: the histogram's, made monotone, with a bin's
people at its middle; bins are symmetric-log. Categories have their shares. Where noise dominates a
column of B cells,

    z s √B > K/2,    z = 1.96, noise of s users on a count,

so that a median's rank would be known within a quarter of the users at best, nothing is known about
it, and it keeps the mapping of its range. That is decided by public numbers, for all columns of
that size alike.

Without privacy the same figures are computed from the training users exactly, and no bins are
needed. In both a user's rows weigh 1/n_k each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import Found, InputColumn, Knots, share_width, through
from fpfl.data.schema import HALF_WIDTH
from fpfl.measurement.cells import NOWHERE, CategoryCells, Cells, Floats, Ints, NumberCells, places
from fpfl.measurement.counting import CodedRows, each_sum, whole_sum
from fpfl.measurement.intervals import normal_quantile, rank_error, ratio
from fpfl.measurement.plan import MeasurementPlan
from fpfl.measurement.result import MeasuredCategories, MeasuredNumber

BINS, FEWEST = 64, 8
"""Of a number: at most, and at least."""

_GOOD_ERROR = 0.1
"""Fewer bins are taken until a median's rank is known within so large a share of the users."""

_AT_ONCE = 2**14
"""Users whose rows are read together."""

_MOST_ERROR = 0.25
"""How far off a median's rank may be, as a share of the users: beyond it noise dominates."""

_RARE = 0.02
"""A number has two values where each of them is at least so common, and nothing lies between."""

_QUARTILES, _WIDE = 1.3489795003921634, 3.289707253902945
"""Of a normal distribution: standard deviations from 25% to 75%, and from 5% to 95%."""


def unknown(columns: Sequence[InputColumn]) -> tuple[InputColumn, ...]:
    """The columns that are to be measured: those whose scaling is not declared."""
    return tuple(column for column in columns if not column.known)


def bins_for(noise_multiplier: float, columns: int, population: int) -> int:
    """How many bins a number has, by public numbers alone."""
    noise, bins = noise_multiplier * math.sqrt(columns), BINS
    while bins > FEWEST and rank_error(0.5, bins, noise, population, 0.95) > _GOOD_ERROR:
        bins //= 2
    return bins


def input_cells(columns: Sequence[InputColumn], bins: int = BINS) -> tuple[Cells, ...]:
    """What is counted of every column: public, before data is touched."""
    return tuple(_cells(column, bins) for column in columns)


def _cells(column: InputColumn, bins: int) -> Cells:
    if not column.number:
        return CategoryCells(column.name, tuple(map(str, range(column.size))))
    low, high = column.range
    # The logarithm's own units are cut evenly.
    threshold = None if column.log else column.threshold
    return NumberCells(column.name, low, high, bins, threshold, column.indicator is not None)


def input_sum(
    data: FederatedDataset,
    columns: Sequence[InputColumn],
    without: Collection[int] = frozenset(),
    bins: int = BINS,
) -> Ints:
    """Σ_k z_k of the columns' cells; users who withdrew are left out, by number."""
    return whole_sum(_chunks(data, columns, bins), input_cells(columns, bins), without)


def input_vectors(
    data: FederatedDataset, columns: Sequence[InputColumn], bins: int, at_once: int
) -> Iterator[Ints]:
    """z_k of all users, (users, cells), so many users at a time: where each is added up apart."""
    cells = input_cells(columns, bins)
    for users in _some(data, at_once):
        yield each_sum(_coded(data, columns, bins, users), cells, users)


def _chunks(
    data: FederatedDataset, columns: Sequence[InputColumn], bins: int
) -> Iterator[CodedRows]:
    for users in _some(data, _AT_ONCE):
        yield _coded(data, columns, bins, users)


def _some(data: FederatedDataset, at_once: int) -> Iterator[range]:
    for first in range(0, data.population, at_once):
        yield range(first, min(first + at_once, data.population))


def _coded(
    data: FederatedDataset, columns: Sequence[InputColumn], bins: int, users: range
) -> CodedRows:
    offsets = data.offsets[users.start : users.stop + 1].numpy()
    rows = _rows(data, slice(offsets[0], offsets[-1]))
    owner = np.repeat(np.arange(users.start, users.stop), np.diff(offsets))
    return CodedRows(tuple(_codes(rows, column, bins) for column in columns), owner)


def _rows(data: FederatedDataset, place: slice) -> Floats:
    """Inputs, and behind them the label of a regression, from its range to [−3, 3]."""
    rows: Floats = data.features[place].double().cpu().numpy()
    if data.schema.label_range is None:
        return rows
    low, high = data.schema.label_range
    labels = data.labels[place].double().cpu().numpy()
    mapped = HALF_WIDTH * (2.0 * (labels - low) / (high - low) - 1.0)
    return np.concatenate([rows, mapped[:, None]], axis=1)


def _codes(rows: Floats, column: InputColumn, bins: int) -> Ints:
    """Each row's cell of a column."""
    if not column.number:
        own = rows[:, column.first : column.first + column.size] == 1.0
        return np.where(own.any(axis=1), own.argmax(axis=1), NOWHERE).astype(np.int64)
    cells = _cells(column, bins)
    assert isinstance(cells, NumberCells)
    found = cells.codes(np.asarray(column.units(rows[:, column.first])))
    found[np.isnan(rows[:, column.first])] = NOWHERE
    if column.indicator is not None:
        lacking = rows[:, column.indicator] == 1.0
        found[lacking] = cells.bins
    return found


def measured_inputs(
    columns: Sequence[InputColumn], plan: MeasurementPlan, released: Floats
) -> dict[str, Found]:
    """What a release says of the columns; nothing of one whose noise dominates."""
    found: dict[str, Found] = {}
    for column, cells, place in zip(columns, plan.columns, places(plan.columns), strict=True):
        numbers = tuple(released[place].tolist())
        more = (plan.noise_stddev, plan.population, plan.confidence)
        if plan.rank_error(0.5, cells.size) > _MOST_ERROR:
            continue
        if isinstance(cells, NumberCells):
            known = _number(MeasuredNumber(cells, numbers, *more), ranks=column.ranks)
        else:
            known = _shares(MeasuredCategories(cells, numbers, *more))
        if known is not None:
            found[column.name] = known
    return found


def _number(measured: MeasuredNumber, *, ranks: bool) -> Found | None:
    median, spread = measured.median.value, measured.spread
    if math.isnan(median) or math.isnan(spread):
        return None
    share = None
    if measured.missing is not None:
        share = min(max(measured.missing.value, 0.0), 1.0)
        share = 0.0 if math.isnan(share) else share
    if ranks:
        below, edges = measured.distribution, measured.cells.edges
        middles = (edges[:-1] + edges[1:]) / 2
        knots = through(middles, (below[:-1] + below[1:]) / 2)
        return Found("measured", missing=share, knots=knots)
    p = _upper_share(measured)
    if p is not None:
        low, high = measured.cells.low, measured.cells.high
        return Found(
            "measured", low + p * (high - low), share_width(p) * (high - low), missing=share
        )
    edges = measured.cells.edges
    if median < edges[1]:
        median = float(edges[0])
    elif median > edges[-2]:
        median = float(edges[-1])
    return Found("measured", median, spread, missing=share)


def _upper_share(measured: MeasuredNumber) -> float | None:
    """How common the range's upper end is, where all values are at its two ends."""
    h, noise = measured.histogram, measured.noise_stddev
    z, total = normal_quantile(measured.confidence), float(h.sum())
    inner = float(h[1:-1].sum())
    nothing = inner <= max(0.01 * total, z * noise * math.sqrt(len(h) - 2))
    common = min(float(h[0]), float(h[-1])) >= _RARE * total + z * noise
    if not (nothing and common):
        return None
    return float(h[-1]) / float(h[0] + h[-1])


def _shares(measured: MeasuredCategories) -> Found | None:
    released = np.array(measured.released)
    z = normal_quantile(measured.confidence)
    if not float(released.sum()) > z * measured.noise_stddev * math.sqrt(len(released)):
        return None
    shares = np.array([ratio(released, one) for one in np.eye(len(released))]).clip(0.0, 1.0)
    return Found("measured", shares=tuple((shares / shares.sum()).tolist()))


# --- without privacy ------------------------------------------------------------------------------


def exact_inputs(data: FederatedDataset, columns: Sequence[InputColumn]) -> Mapping[str, Found]:
    """The same figures of the training users, without noise and without bins."""
    sizes = data.sizes().numpy()
    weights = np.repeat(1.0 / np.maximum(sizes, 1), sizes)
    rows = _rows(data, slice(None))
    return {column.name: _exact(rows, column, weights) for column in columns}


def _exact(rows: Floats, column: InputColumn, weights: Floats) -> Found:
    values = rows[:, column.first : column.first + column.size]
    if not column.number:
        some = values.any(axis=1)
        total = max(float(weights[some].sum()), 1e-300)
        return Found("exact", shares=tuple((weights @ values / total).clip(0.0, 1.0).tolist()))
    there = np.ones(len(values), dtype=bool)
    missing = None
    if column.indicator is not None:
        there = rows[:, column.indicator] != 1.0
        missing = float(weights[~there].sum() / max(float(weights.sum()), 1e-300))
    found = np.asarray(column.units(values[there, 0]))
    if not len(found):
        return Found("range", missing=missing)
    if column.ranks:
        return Found("exact", missing=missing, knots=_ranks(found, weights[there]))
    centre, width = _middle(found, weights[there])
    return Found("exact", centre, width, missing=missing)


def _ranks(values: Floats, weights: Floats) -> Knots:
    """By each value's rank: what is below it, and half of what is there."""
    places, which = np.unique(values, return_inverse=True)
    there = np.bincount(which, weights) / weights.sum()
    return through(places, (np.cumsum(there) - there / 2).clip(0.0, 1.0))


def _middle(values: Floats, weights: Floats) -> tuple[float, float]:
    """The centre and the width of some numbers."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    low, high = float(values[0]), float(values[-1])
    if bool(((values == low) | (values == high)).all()):
        share = float(weights[values == high].sum() / weights.sum()) if high > low else 0.0
        return low + share * (high - low), (share_width(share) * (high - low)) or 1.0
    below = np.cumsum(weights) / weights.sum()

    def quantile(q: float) -> float:
        return float(values[min(int(np.searchsorted(below, q * (1 - 1e-12))), len(values) - 1)])

    width = (quantile(0.75) - quantile(0.25)) / _QUARTILES
    if not width > 0:
        width = (quantile(0.95) - quantile(0.05)) / _WIDE
    if not width > 0:
        mean = float(weights @ values / weights.sum())
        width = math.sqrt(float(weights @ (values - mean) ** 2 / weights.sum()))
    return quantile(0.5), width
