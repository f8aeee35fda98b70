r"""Rates: the functions of interest f whose averages fairness compares.

A rate is three functions on a batch of samples:

- the *condition* that picks d' (for the false negative rate: y = 1), from the labels alone;
- the true f, counted on the hard predictions, in [0, 1]: it gives F and with it h, g and signs;
- its differentiable *surrogate* on the soft scores: it gives ∇F.

Where users send one gradient (`fpfl.OneGradient`) the surrogate is the sample's own loss ℓ, times
how f moves with it (`Rate.loss_slopes`): a weighted loss cannot be made small by a model that is
wrong about everybody, which a bounded surrogate can.

The rates here are made once for the same arguments, so that two of them are equal.

Scores have shape (n, classes) for classification (two columns for a binary model too) and (n,)
for regression. A rate of one's own is one ``Rate(...)`` with these three functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from fpfl.compat import formerly

Kind = Literal["classification", "regression"]


@formerly
@dataclass(frozen=True)
class Rate:
    """A function of interest.

    Parameters
    ----------
    name
        How it is called in tables and in the layout of v.
    condition
        ``condition(labels) -> bool tensor``: which samples are in d'.
    true
        ``true(predictions, labels) -> tensor in [0, 1]``: f itself, on hard predictions.
    surrogate
        ``surrogate(scores, labels) -> tensor``: a differentiable estimate of f.
    kind
        The task it is for.
    binary
        Whether it only makes sense for two classes (a rate that was not told which class is the
        positive one).
    slope
        ``slope(scores, labels) -> tensor of the scores' shape``: the surrogate's derivative by the
        scores, where it is known in closed form. Without it torch differentiates the surrogate.
    loss_slope
        For regression: how f moves with the sample's loss, ½ ((ŷ − y)/range)². None where it does
        not: then its surrogate is used in every method.
    """

    name: str
    condition: Callable[[Tensor], Tensor]
    true: Callable[[Tensor, Tensor], Tensor]
    surrogate: Callable[[Tensor, Tensor], Tensor]
    kind: Kind = "classification"
    binary: bool = False
    slope: Callable[[Tensor, Tensor], Tensor] | None = None
    loss_slope: float | None = None

    def loss_slopes(self, classes: int | None) -> Tensor | None:
        """How f moves with a sample's loss, e(y) for every class y; (1,) in a regression.

        Errors add to the loss, so e(y) = f(p, y) − f(y, y) for the wrong class p that moves f the
        most: 1 where f counts errors, −1 where it counts hits, and for a selection rate −1 where
        the label is the selected one and 1 elsewhere. None where f does not move with the loss:
        errors move it both ways for some label in d'.
        """
        if classes is None:
            return None if self.loss_slope is None else torch.tensor([self.loss_slope])
        labels = torch.arange(classes)
        slopes = torch.zeros(classes)
        for y in labels[self.condition(labels)].tolist():
            f = self.evaluate(labels, torch.full_like(labels, y))
            moves = f - f[y]
            if bool((moves > 0).any()) and bool((moves < 0).any()):
                return None
            slopes[y] = moves[moves.abs().argmax()]
        return slopes

    def evaluate(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """f on every sample, kept in [0, 1] so that one sample's count is bounded."""
        return self.true(predictions, labels).clamp(0.0, 1.0)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Another process makes the rates of this module anew: their functions cannot be pickled.

        A rate of one's own can be where its functions have names in a module.
        """
        return _ORIGINS.get(id(self)) or super().__reduce_ex__(protocol)


P = ParamSpec("P")

_ORIGINS: dict[int, tuple[Any, ...]] = {}
"""What makes each rate of this module; they live as long as it does."""


def _once(make: Callable[P, Rate]) -> Callable[P, Rate]:
    """Make a rate once for the same arguments."""
    cached: Callable[..., Rate] = cache(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Rate:
        given = [tuple(arg) if isinstance(arg, list) else arg for arg in args]
        rate = cached(*given, **kwargs)
        _ORIGINS.setdefault(id(rate), (partial(made, *args, **kwargs), ()))
        return rate

    return made


def _everyone(labels: Tensor) -> Tensor:
    return torch.ones_like(labels, dtype=torch.bool)


def _column(one: int, value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The slope of ±(the score of one class)."""

    def slope(scores: Tensor, labels: Tensor) -> Tensor:
        gradient = torch.zeros_like(scores)
        gradient[..., one] = value
        return gradient

    return slope


def _positive(positive: int | None) -> int:
    return 1 if positive is None else positive


@_once
def false_negative_rate(positive: int | None = None) -> Rate:
    """P[Ŷ ≠ positive | Y = positive]; the surrogate is 1 − ψ(x) (the paper's appendix)."""
    one = _positive(positive)
    return Rate(
        "FNR",
        condition=lambda y: y == one,
        true=lambda p, y: (p != one).float(),
        surrogate=lambda s, y: 1.0 - s[..., one],
        binary=positive is None,
        slope=_column(one, -1.0),
    )


@_once
def false_positive_rate(positive: int | None = None) -> Rate:
    """P[Ŷ = positive | Y ≠ positive]."""
    one = _positive(positive)
    return Rate(
        "FPR",
        condition=lambda y: y != one,
        true=lambda p, y: (p == one).float(),
        surrogate=lambda s, y: s[..., one],
        binary=positive is None,
        slope=_column(one, 1.0),
    )


@_once
def true_positive_rate(positive: int | None = None) -> Rate:
    """P[Ŷ = positive | Y = positive]."""
    one = _positive(positive)
    return Rate(
        "TPR",
        condition=lambda y: y == one,
        true=lambda p, y: (p == one).float(),
        surrogate=lambda s, y: s[..., one],
        binary=positive is None,
        slope=_column(one, 1.0),
    )


@_once
def class_recall(label: int) -> Rate:
    """P[Ŷ = label | Y = label], for one class of many."""
    rate = true_positive_rate(label)
    return Rate(f"recall[{label}]", rate.condition, rate.true, rate.surrogate, slope=rate.slope)


@_once
def accuracy() -> Rate:
    """P[Ŷ = Y], for any number of classes; the surrogate is the score of the true class."""
    return Rate(
        "accuracy",
        condition=_everyone,
        true=lambda p, y: (p == y).float(),
        surrogate=lambda s, y: s.gather(-1, y.unsqueeze(-1)).squeeze(-1),
        slope=lambda s, y: torch.zeros_like(s).scatter_(-1, y.unsqueeze(-1), 1.0),
    )


@_once
def selection_rate(positive: int | None = None) -> Rate:
    """P[Ŷ = positive], the rate of demographic parity."""
    one = _positive(positive)
    return Rate(
        "selection rate",
        condition=_everyone,
        true=lambda p, y: (p == one).float(),
        surrogate=lambda s, y: s[..., one],
        binary=positive is None,
        slope=_column(one, 1.0),
    )


def _span(label_range: tuple[float, float]) -> tuple[float, float]:
    low, high = label_range
    if not low < high:
        raise ValueError(f"the label range {label_range} is empty; give (low, high)")
    return low, high - low


@_once
def squared_error(label_range: tuple[float, float]) -> Rate:
    """((ŷ − y)/(high − low))², so that f is bounded by 1 on the declared range."""
    _, span = _span(label_range)
    return Rate(
        "squared error",
        condition=_everyone,
        true=lambda p, y: ((p - y) / span) ** 2,
        surrogate=lambda s, y: ((s - y) / span) ** 2,
        kind="regression",
        loss_slope=2.0,
    )


@_once
def absolute_error(label_range: tuple[float, float]) -> Rate:
    """|ŷ − y|/(high − low)."""
    _, span = _span(label_range)
    return Rate(
        "absolute error",
        condition=_everyone,
        true=lambda p, y: (p - y).abs() / span,
        surrogate=lambda s, y: (s - y).abs() / span,
        kind="regression",
        loss_slope=1.0,
    )


@_once
def mean_prediction(label_range: tuple[float, float]) -> Rate:
    """(ŷ − low)/(high − low): demographic parity's counterpart for regression."""
    low, span = _span(label_range)
    return Rate(
        "mean prediction",
        condition=_everyone,
        true=lambda p, y: (p - low) / span,
        surrogate=lambda s, y: (s - low) / span,
        kind="regression",
    )
