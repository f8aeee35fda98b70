r"""Scaling: what is done to a table's inputs before the network sees them.

A table's numbers come mapped from their public ranges to [−3, 3], and its categories as 0/1 columns
(`fpfl.data.tables`). Neither is a good input: a rare category is as large as a common one, and a
range with a long tail has all of its people in a corner. So every input x becomes

    z = clamp((T(x) − c)/w, ±LIMIT),

with a centre c and a width w that are known from somewhere:

    declared    the schema says them (``centre``, ``scale``, ``shares``): public, free, and they win
    measured    a private release before the first round (`fpfl.measurement.inputs`)
    exact       computed from the training users, where nothing is private
    range       nothing: c = 0, w = 1, the mapping of the range as it is

T is the identity, or what a schema declares: the logarithm (``transform = "log"``),

    T(x) = sign(x − o) log1p(|x − o|/t),

with o where the table's 0 lies, or the normal score of the rank (``transform = "quantile"``),

    T(x) = Φ⁻¹(p),    p = P(X < x) + P(X = x)/2 within [1/64, 63/64],    c = 0,    w = 1,

linear between `KNOTS` knots (`through`) and flat beyond them: an input is then nearly normal, as a
standardised column would be, whatever the column's shape and units are. It is normal and not
uniform because that trained as well or better with 6,000 made-up users, whatever the label
followed; with 1,500 it was level. It ends at ±2.15, since noise hides what ranks are beyond. Where
nothing is known of such a column it keeps the mapping of its range.

A number that is missing becomes its centre, z = 0, where a column says that it is missing. An
indicator of a category has

    c = p,    w = max(√(p(1 − p)), √(0.05 · 0.95)),

with p its share: a rarer one is not stretched further.

The label of a regression is such a column, too: its centre and width are the unit of the network's
output while it is trained, so that its loss is in standard deviations. A range that is much wider
than the labels would leave a loss that hardly depends on the inputs.

A scaling belongs to a model: a finished model is a `ScaledModel`, which takes inputs as the table
gives them. It holds for people who were not trained on, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fpfl.data.schema import HALF_WIDTH

LIMIT = 5.0
"""Scaled inputs are clamped to ±LIMIT: a few outliers would rule a clipped gradient."""

LEAST_SHARE = 0.05
"""Indicators that are rarer are scaled as this one is."""

TAIL = 1e-3
"""Logarithms and their bins are linear within this part of a range, by default."""


def tail_threshold(low: float, high: float) -> float:
    """t where none is declared: a thousandth of the range's larger end."""
    return TAIL * max(abs(low), abs(high))


KNOTS = 33
"""Of T, where it is a normal score: a public number, whatever was found."""

LEAST_RANK = 1 / 64
"""Normal scores end at this rank and at 1 minus it: half a knot's step, where a bin's middle is."""

Knots = tuple[tuple[float, float], ...]
"""Where T's knots lie, and what it is there: both ascend."""


def through(places: ArrayLike, shares: ArrayLike) -> Knots:
    """`KNOTS` knots of T, for ranks that are linear through points and flat beyond them.

    ``places`` ascend strictly, ``shares`` ascend. The knots are where ranks reach 0, 1/32, ..., 1,
    or their ends where they do not: what lies between two of them has a rank between theirs, so
    T is never off by more than 1/32 of a rank. Knots may coincide.
    """
    x, p = np.asarray(places, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    # What rounding turns round is put right.
    at = np.maximum.accumulate(np.interp(np.linspace(0.0, 1.0, KNOTS), p, x))
    share = np.maximum.accumulate(np.interp(at, x, p)).clip(LEAST_RANK, 1 - LEAST_RANK)
    return tuple(zip(at.tolist(), map(NormalDist().inv_cdf, share.tolist()), strict=True))


def declared_knots(quantiles: ArrayLike) -> Knots:
    """Knots by quantiles at even shares, the least and the largest value among them.

    A value that is named several times is common: its share is the middle of theirs.
    """
    values = np.asarray(quantiles, dtype=np.float64)
    places, first, count = np.unique(values, return_index=True, return_counts=True)
    return through(places, (first + (count - 1) / 2) / (len(values) - 1))


Source = Literal["declared", "measured", "exact", "range"]
"""Where a column's centre and width are from."""


@dataclass(frozen=True)
class InputColumn:
    """What is public about a column of a table, and which inputs it became.

    Parameters
    ----------
    name
        The column.
    first, size
        It became the inputs ``first`` to ``first + size − 1``. A regression's label, mapped to
        [−3, 3] as a number is, stands behind the last input.
    number
        Whether it is a number in [−3, 3] (one input), and not 0/1 inputs of categories.
    indicator
        The input that is 1 where a number is missing.
    centre, width
        Of a number, in the inputs' units, where they are declared.
    shares
        Of every category's input, where they are declared.
    origin
        Where the table's 0 lies, of a column with a threshold.
    threshold
        t of a long tail, in the inputs' units: bins are symmetric-log.
    log
        Whether the input is T(x), the logarithm.
    ranks
        Whether it is T(x), the normal score of its rank.
    quantiles
        At even shares, in the inputs' units, where they are declared.
    """

    name: str
    first: int
    size: int = 1
    number: bool = True
    indicator: int | None = None
    centre: float | None = None
    width: float | None = None
    shares: tuple[float, ...] | None = None
    origin: float = 0.0
    threshold: float | None = None
    log: bool = False
    ranks: bool = False
    quantiles: tuple[float, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether centre and width, quantiles, or shares are declared."""
        if self.ranks:
            return self.quantiles is not None
        return self.width is not None if self.number else self.shares is not None

    @property
    def range(self) -> tuple[float, float]:
        """Of a number: its range in the units of `units`."""
        low, high = self.units(np.array([-HALF_WIDTH, HALF_WIDTH])).tolist()
        return low, high

    def units(self, x: Any) -> Any:
        """A number's inputs in the units that it is measured in: a logarithm, or x − o."""
        u = np.asarray(x, dtype=np.float64) - self.origin
        if not self.log:
            return u
        assert self.threshold is not None  # whoever declares the logarithm has one
        return np.sign(u) * np.log1p(np.abs(u) / self.threshold)


@dataclass(frozen=True)
class Found:
    """What was found out about a column.

    Parameters
    ----------
    source
        From where.
    centre, width
        Of a number, in the units of `InputColumn.units`.
    shares
        Of categories: of each of the column's inputs.
    missing
        The share of rows in which a number is missing.
    knots
        Of a number's normal score, in the units of `InputColumn.units`.
    """

    source: Source
    centre: float | None = None
    width: float | None = None
    shares: tuple[float, ...] | None = None
    missing: float | None = None
    knots: Knots | None = None


@dataclass(frozen=True)
class Scaling:
    """A scaling of all inputs; `scaling_of` makes it.

    Parameters
    ----------
    centre, width
        c and w of every input.
    origin, threshold
        o and t of every input; t = 0 without a logarithm.
    indicator
        The input that is 1 where this one is missing; −1 where none says so.
    columns
        Every column of the table with where its figures are from.
    limit
        Where scaled inputs are clamped.
    label
        (c, w): an output o of the network stands for c + w o in units of the label's range. (0, 1)
        where nothing is known, and for classes.
    ranked, knots
        The inputs whose T is a normal score, and the knots of each.
    """

    centre: tuple[float, ...]
    width: tuple[float, ...]
    origin: tuple[float, ...]
    threshold: tuple[float, ...]
    indicator: tuple[int, ...]
    columns: tuple[tuple[str, Source], ...] = ()
    limit: float = LIMIT
    label: tuple[float, float] = (0.0, 1.0)
    ranked: tuple[int, ...] = ()
    knots: tuple[Knots, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(x) for x in (self.centre, self.width, self.origin, self.threshold)}
        numbers = (
            *self.centre,
            *self.width,
            *self.origin,
            *self.threshold,
            self.limit,
            *self.label,
        )
        good = sizes == {len(self.indicator)} and all(map(math.isfinite, numbers))
        inside = all(-1 <= place < len(self.indicator) for place in self.indicator)
        positive = min(self.width, default=1.0) > 0 and min(self.threshold, default=0.0) >= 0
        if not (
            good and inside and positive and self.limit > 0 and self.label[1] > 0 and self._curved()
        ):
            raise ValueError(
                "a scaling has a finite centre, a positive width, an origin, a threshold and an "
                "indicator for every input, knots that ascend for those that are ranked, and a "
                f"positive limit; {self.as_dict()} was given"
            )

    def _curved(self) -> bool:
        """Whether the knots are some: as many for each ranked input, and finite, and ascending."""
        there = all(0 <= place < self.inputs for place in self.ranked)
        once = len(set(self.ranked)) == len(self.ranked) == len(self.knots)
        alike = {len(each) for each in self.knots} | {len(pair) for k in self.knots for pair in k}
        if not (there and once and alike <= {2, len(self.knots[0]) if self.knots else 2}):
            return False
        k = np.array(self.knots, dtype=np.float64)
        return bool(np.isfinite(k).all() and (k.size == 0 or (np.diff(k, axis=1) >= 0).all()))

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return len(self.centre)

    def of(self, source: Source) -> tuple[str, ...]:
        """The columns whose figures are from there."""
        return tuple(name for name, found in self.columns if found == source)

    def __call__(self, x: Tensor) -> Tensor:
        """Scale inputs, (n, inputs); the same as the finished model does."""
        return ScalingLayer(self).to(x.device, x.dtype)(x)  # type: ignore[no-any-return]

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; without knots where there are none, as files were."""
        values = asdict(self)
        if not self.ranked:
            del values["ranked"], values["knots"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scaling:
        """What `as_dict` wrote."""
        try:
            numbers = {
                name: tuple(float(each) for each in values[name])
                for name in ("centre", "width", "origin", "threshold")
            }
            return cls(
                **numbers,
                indicator=tuple(int(each) for each in values["indicator"]),
                columns=tuple((str(name), _source(word)) for name, word in values["columns"]),
                limit=float(values["limit"]),
                label=(float(values["label"][0]), float(values["label"][1])),
                ranked=tuple(int(each) for each in values.get("ranked", ())),
                knots=tuple(
                    tuple((float(place), float(share)) for place, share in each)
                    for each in values.get("knots", ())
                ),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"{values!r} is no scaling ({error!r}); put an intact copy of the file in its place"
            ) from error

    def __str__(self) -> str:
        words = {
            "measured": "measured with privacy",
            "exact": "computed from the training users (no privacy)",
            "declared": "declared in the schema",
            "range": "mapped from the declared range alone",
        }
        parts = [
            f"{len(names)} column{'s'[: len(names) > 1]} {words[source]} ({_listed(names)})"
            for source in get_args(Source)
            if (names := self.of(source))
        ]
        return "; ".join(parts)


def _source(word: Any) -> Source:
    if word not in get_args(Source):
        raise ValueError(f"a column's source is {word!r}; expected one of {get_args(Source)}")
    return word  # type: ignore[no-any-return]


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def scaling_of(
    columns: Sequence[InputColumn], inputs: int, found: Mapping[str, Found] | None = None
) -> Scaling:
    """The scaling of so many inputs: what is declared, else what was found, else the range.

    Parameters
    ----------
    columns
        What is public about the table's columns.
    inputs
        How many inputs there are.
    found
        By columns' names; of a column that is declared it is not used.
    """
    centre, width = np.zeros(inputs), np.ones(inputs)
    origin, threshold = np.zeros(inputs), np.zeros(inputs)
    indicator = np.full(inputs, -1)
    sources: list[tuple[str, Source]] = []
    knots: dict[int, Knots] = {}
    label = (0.0, 1.0)
    for column in columns:
        known = _declared(column) or (found or {}).get(column.name) or Found("range")
        place = slice(column.first, column.first + column.size)
        sources.append((column.name, known.source))
        if column.first == inputs:
            if known.centre is not None and known.width is not None:
                unit = 2 * HALF_WIDTH
                label = ((known.centre + HALF_WIDTH) / unit, known.width / unit)
        elif column.number:
            if column.indicator is not None:
                indicator[column.first] = column.indicator
                if known.source != "range":
                    share = known.missing or 0.0
                    centre[column.indicator], width[column.indicator] = share, share_width(share)
            if column.log:
                assert column.threshold is not None  # whoever declares the logarithm has one
                origin[place], threshold[place] = column.origin, column.threshold
                low, high = column.range
                # Where nothing else is known, the transformed range is mapped.
                centre[place] = (low + high) / 2
                width[place] = (high - low) / (2 * HALF_WIDTH)
            if column.ranks:
                mapped = np.linspace(-HALF_WIDTH, HALF_WIDTH, KNOTS)
                x, z = zip(*known.knots, strict=True) if known.knots else (mapped, mapped)
                at = np.asarray(x) + (column.origin if known.knots else 0.0)
                knots[column.first] = tuple(zip(_single(at), _single(z), strict=True))
            elif known.centre is not None and known.width is not None:
                centre[place] = known.centre + (0.0 if column.log else column.origin)
                width[place] = known.width
        elif known.shares is not None:
            centre[place] = known.shares
            width[place] = [share_width(share) for share in known.shares]
    return Scaling(
        _single(centre),
        _single(width),
        _single(origin),
        _single(threshold),
        tuple(indicator.tolist()),
        tuple(sources),
        label=(float(np.float32(label[0])), float(np.float32(label[1]))),
        ranked=tuple(knots),
        knots=tuple(knots.values()),
    )


def share_width(share: float) -> float:
    """W of an indicator with this share: √(p(1 − p)), and no less than for `LEAST_SHARE`."""
    return math.sqrt(max(share * (1.0 - share), LEAST_SHARE * (1.0 - LEAST_SHARE)))


def _declared(column: InputColumn) -> Found | None:
    """What is declared of a column, in the units that it is measured in."""
    if not column.number:
        return None if column.shares is None else Found("declared", shares=column.shares)
    if column.ranks:
        if column.quantiles is None:
            return None
        units = column.units(np.array(column.quantiles))
        return Found("declared", knots=declared_knots(units))
    if column.centre is None or column.width is None:
        return None
    ends = np.array([-1.0, 0.0, 1.0]) * column.width + column.centre
    low, middle, high = column.units(ends).tolist()
    return Found("declared", middle, (high - low) / 2)


def _single(values: Any) -> tuple[float, ...]:
    """As single precision holds them: training and predictions have the same bits."""
    return tuple(np.asarray(values, dtype=np.float32).astype(np.float64).tolist())


class ScalingLayer(nn.Module):
    """A scaling as a layer without parameters: what it needs are buffers.

    Parameters
    ----------
    scaling
        The scaling.
    """

    centre: Tensor
    width: Tensor
    origin: Tensor
    threshold: Tensor
    indicator: Tensor
    limit: Tensor
    label: Tensor
    ranked: Tensor | None
    knots: Tensor | None

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        for name in ("centre", "width", "origin", "threshold", "limit", "label"):
            values = torch.tensor(getattr(scaling, name), dtype=torch.float32)
            self.register_buffer(name, values)
        self.register_buffer("indicator", torch.tensor(scaling.indicator, dtype=torch.int64))
        # None is in no file: those of models without knots are as they always were.
        some = bool(scaling.ranked)
        ranked = torch.tensor(scaling.ranked, dtype=torch.int64) if some else None
        knots = torch.tensor(scaling.knots, dtype=torch.float32) if some else None
        self.register_buffer("ranked", ranked)
        self.register_buffer("knots", knots)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled inputs."""
        log = self.threshold > 0
        u = x - self.origin
        t = torch.where(log, self.threshold, 1.0)
        u = torch.where(log, u.sign() * torch.log1p(u.abs() / t), x)
        if self.ranked is not None and self.knots is not None:
            scores = _between(x.index_select(-1, self.ranked), self.knots)
            u = u.index_copy(-1, self.ranked, scores)
        z = ((u - self.centre) / self.width).clamp(-self.limit, self.limit)
        says = self.indicator >= 0
        lacking = x.index_select(-1, self.indicator.clamp(min=0)) > 0.5
        return torch.where(says & lacking, 0.0, z)


def _between(x: Tensor, knots: Tensor) -> Tensor:
    """What functions are that are linear between knots, (functions, knots, 2): (..., functions).

    Each step is monotone and depends on one number alone, so it is, to the last bit: whatever
    else is in a batch.
    """
    functions, number, _ = knots.shape
    # The knot before: only whole numbers are added up.
    before = (x.unsqueeze(-1) >= knots[:, 1:-1, 0]).sum(-1)
    before = before + number * torch.arange(functions, device=x.device)
    flat = knots.flatten(0, 1)
    (k, low), (after, high) = flat[before].unbind(-1), flat[before + 1].unbind(-1)
    step = torch.where(after > k, after - k, 1.0)  # knots may coincide
    return torch.minimum(low + ((x - k) / step).clamp(0.0, 1.0) * (high - low), high)


class ScaledModel(nn.Module):
    """A model with its scaling before it: it takes inputs as the table gives them.

    Parameters
    ----------
    scaling
        The scaling.
    model
        The model that was trained on scaled inputs.
    """

    def __init__(self, scaling: Scaling, model: nn.Module) -> None:
        super().__init__()
        self.scaling = ScalingLayer(scaling)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The model's output for unscaled inputs, in units of a regression's label range."""
        output: Tensor = self.model(self.scaling(x))
        return self.scaling.label[0] + self.scaling.label[1] * output


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A model with the parameters of a file; with a scaling before it, where that has one.

    The model itself gets the parameters: give a copy to keep it as it is.
    """
    # The network may have a scaling of its own, which a file has with or without another before it.
    own = "scaling.centre" in model.state_dict()
    if "scaling.centre" in state and (not own or "model.scaling.centre" in state):
        model = ScaledModel(_like(state), model)
    model.load_state_dict(dict(state))
    return model


def _like(state: Mapping[str, Tensor]) -> Scaling:
    """A scaling whose buffers have the shapes of a file's; one without knots has none."""
    inputs = len(state["scaling.centre"])
    zeros, ones = (0.0,) * inputs, (1.0,) * inputs
    functions, number, _ = state["scaling.knots"].shape if "scaling.knots" in state else (0, 0, 2)
    knots = (((0.0, 0.0),) * number,) * functions
    ranked = tuple(range(functions))
    return Scaling(zeros, ones, zeros, zeros, (-1,) * inputs, ranked=ranked, knots=knots)
