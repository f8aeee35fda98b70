"""The schema: what is public about a population.

Classes, groups, ranges and the number of users are declared by whoever runs the training, not
read from the users' data: reading them would be a release that no accountant has seen.

Scaling by declared ranges costs no privacy, unlike a mean read from the data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fpfl.fairness.groups import Attribute

__all__ = ["DRAFTED", "Attribute", "Schema", "Source", "Task"]

Task = Literal["binary", "multiclass", "regression"]
ClassWeights = Mapping[Any, float] | Sequence[float]
Source = Literal["declared", "data"]

DRAFTED = (
    'the schema in {where} was drafted from the data (source = "data"), and what was read there '
    "is not covered by any epsilon: check its ranges, values and numbers against public knowledge, "
    'then change it to source = "declared". Or train without privacy'
)
"""Why a draft is refused."""


@dataclass(frozen=True)
class Schema:
    """A declared public description of the samples.

    Parameters
    ----------
    shape
        The shape of one sample's features, e.g. ``(92,)`` or ``(3, 28, 28)``.
    classes
        The number of classes, labelled 0 ... classes − 1; ``None`` for regression.
    label_range
        For regression: the range of the label, which bounds errors and predictions.
    attributes
        The declared sensitive attributes, in the order of the data's attribute columns.
    feature_names, feature_ranges
        For tables: the columns' names and the public ranges they were scaled by.
    population
        K, where it is declared; the dataset's own number of users otherwise.
    samples_per_user
        How many samples a user is expected to have: a declared constant, not a count.
    source
        "declared", or "data" where it was made by looking at the data: no ε covers that, and
        whatever claims one refuses it.
    class_names
        What the classes 0 ... classes − 1 stand for, where it is declared; of two, the second is
        the positive one. Data whose schema names none is of the same kind.
    label_unit
        For regression: (c, w), where a model's output o stands for c + w o while it is trained; by
        default the range, (low, high − low). Training sets it (`fpfl.data.inputs`).
    class_weights
        What a sample's loss is multiplied by, for each class; rates count samples as they are. It
        is declared: shares that were counted in the data would be a release of their own.
    """

    shape: tuple[int, ...]
    classes: int | None = 2
    label_range: tuple[float, float] | None = None
    attributes: tuple[Attribute, ...] = ()
    feature_names: tuple[str, ...] | None = None
    feature_ranges: tuple[tuple[float, float], ...] | None = None
    population: int | None = None
    samples_per_user: float | None = None
    source: Source = "declared"
    class_names: tuple[str, ...] | None = None
    label_unit: tuple[float, float] | None = None
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        object.__setattr__(self, "shape", shape)
        self._check_types()
        if self.classes is None:
            if self.label_range is None or not self.label_range[0] < self.label_range[1]:
                raise ValueError(
                    f"classes=None means regression, which needs label_range=(low, high) with "
                    f"low < high; {self.label_range} was given"
                )
        elif self.classes < 2:
            raise ValueError(f"classes is {self.classes}; give 2 or more, or None for regression")
        if self.class_names is not None and (
            len(self.class_names) != self.classes
            or len(set(self.class_names)) != len(self.class_names)
        ):
            raise ValueError(
                f"class_names is {self.class_names} for classes = {self.classes}; expected a name "
                "for each class, and each once"
            )
        weights = self.class_weights
        if weights is not None and (len(weights) != self.classes or not min(weights) > 0.0):
            raise ValueError(
                f"class_weights is {weights} for classes = {self.classes}; expected a positive "
                "number for each class"
            )
        names = [attribute.name for attribute in self.attributes]
        if len(set(names)) != len(names):
            raise ValueError(f"the attributes {names} have a name twice; give each its own")
        for what, given in (("names", self.feature_names), ("ranges", self.feature_ranges)):
            if given is not None and self.shape != (len(given),):
                raise ValueError(
                    f"{len(given)} feature {what} were declared for features of shape {self.shape}"
                )
        if self.population is not None and self.population < 1:
            raise ValueError(f"the population is {self.population}; it must be at least 1")
        if self.samples_per_user is not None and not self.samples_per_user > 0:
            raise ValueError(f"samples_per_user is {self.samples_per_user}; it must be positive")

    def _check_types(self) -> None:
        """Refuse what is no number or text in the place of one: a file may hold anything."""
        for what, good, expected in (
            ("shape", _each(self.shape, _size), "whole numbers, e.g. (28, 28)"),
            ("classes", self.classes is None or _whole(self.classes), "a whole number or None"),
            ("label_range", self.label_range is None or _range(self.label_range), "(low, high)"),
            ("attributes", _each(self.attributes, _named), "Attribute objects, with texts"),
            ("feature_names", _maybe_each(self.feature_names, _text), "a text for each column"),
            ("feature_ranges", _maybe_each(self.feature_ranges, _range), "(low, high) for each"),
            ("population", self.population is None or _whole(self.population), "a whole number"),
            (
                "samples_per_user",
                self.samples_per_user is None or _finite(self.samples_per_user),
                "a finite number",
            ),
            ("source", self.source in get_args(Source), "'declared' or 'data'"),
            ("class_names", _maybe_each(self.class_names, _text), "a text for each class"),
            ("class_weights", _maybe_each(self.class_weights, _finite), "a number for each class"),
            ("label_unit", self.label_unit is None or _range(self.label_unit), "(c, w)"),
        ):
            if not good:
                raise ValueError(f"{what} is {getattr(self, what)!r}; expected {expected}")

    @property
    def task(self) -> Task:
        """Binary or multi-class classification, or regression."""
        if self.classes is None:
            return "regression"
        return "binary" if self.classes == 2 else "multiclass"

    def difference(self, other: Schema) -> str | None:
        """How samples of another schema are of another kind, in words; None where they are not."""
        for what in ("shape", "classes", "label_range", "attributes"):
            mine, others = getattr(self, what), getattr(other, what)
            if mine != others:
                return f"one declares {what} = {mine}, the other {what} = {others}"
        mine, others = self.class_names, other.class_names
        if mine is not None and others is not None and mine != others:
            return f"one declares class_names = {mine}, the other class_names = {others}"
        return None

    def check_declared(self) -> None:
        """Refuse a schema that was made by looking at the data, where ε is claimed."""
        if self.source == "data":
            raise ValueError(DRAFTED.format(where="use"))

    def weighing(self, weights: ClassWeights | None) -> Schema:
        """The same with weights of its classes; None leaves it as it is.

        ``weights`` are a number for each class, or numbers by class name (or number): those that
        are not named weigh 1.
        """
        if weights is None:
            return self
        if isinstance(weights, str):
            raise ValueError(
                f"class weights are {weights!r}; what balances classes is their shares, and to "
                "count those in the data is a release that no ε covers. Declare numbers, e.g. "
                "{'yes': 4.5, 'no': 0.56}: 1/(C · share) by shares that are public"
            )
        if self.classes is None:
            raise ValueError("class weights were given for a regression, which has no classes")
        if isinstance(weights, Mapping):
            known = {str(k): k for k in range(self.classes)}
            known |= {name: k for k, name in enumerate(self.class_names or ())}
            strange = [name for name in weights if str(name) not in known]
            if strange:
                raise ValueError(f"class weights name {strange}; the classes are {sorted(known)}")
            by_class = {known[str(name)]: float(weight) for name, weight in weights.items()}
            if len(by_class) < len(weights):
                raise ValueError(f"class weights are {dict(weights)}; name each class once")
            weights = [by_class.get(k, 1.0) for k in range(self.classes)]
        found = tuple(map(float, weights))
        if self.class_weights not in (None, found):
            raise ValueError(
                f"class weights are {found}, and the schema declares {self.class_weights}; give "
                "them in one place"
            )
        return replace(self, class_weights=found)

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; without class names where there are none, as files were."""
        values = asdict(self)
        for name in (
            "class_names",
            "label_unit",
            "class_weights",
        ):  # as files were before there were any
            if values[name] is None:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Schema:
        """The schema of plain values, as JSON gives them back: lists for tuples."""
        values = {name: _tuples(value) for name, value in content.items()}
        attributes = [
            Attribute(**{name: _tuples(value) for name, value in attribute.items()})
            for attribute in content.get("attributes", ())
        ]
        return cls(**values | {"attributes": tuple(attributes)})


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _size(value: object) -> bool:
    return isinstance(value, Integral) and _whole(value) and int(value) >= 0


def _finite(value: Any) -> bool:
    # Compared, not converted: a whole number may be too large for a float.
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and bool(abs(value) <= sys.float_info.max)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _range(value: object) -> bool:
    return _each(value, _finite) and len(value) == 2  # type: ignore[arg-type]


def _named(value: object) -> bool:
    return (
        isinstance(value, Attribute)
        and _each((value.name, *value.values), _text)
        and not isinstance(value.values, str)
        and value.unknown in (True, False)
    )


def _each(values: object, good: Callable[[object], bool]) -> bool:
    return isinstance(values, Sequence) and not _text(values) and all(map(good, values))


def _maybe_each(values: object, good: Callable[[object], bool]) -> bool:
    return values is None or _each(values, good)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


HALF_WIDTH = 3.0
"""Ranges are mapped to [−3, 3]: a variable that fills its range then varies by about 1, as a
standardised one would, and learning rates keep their meaning."""


def scale_by_ranges(
    values: ArrayLike, ranges: Sequence[tuple[float, float]]
) -> NDArray[np.float64]:
    """Map every column from its declared range to [−3, 3]; values outside are clamped.

    Parameters
    ----------
    values
        Shape (n, number of columns).
    ranges
        The public (low, high) of every column: declared by somebody who has not looked.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != len(ranges):
        raise ValueError(
            f"values have shape {array.shape} and {len(ranges)} ranges were declared; expected "
            "one range for each column"
        )
    low, high = np.array(ranges, dtype=np.float64).reshape(-1, 2).T
    if not (low < high).all():
        raise ValueError(f"the ranges {list(ranges)} are not all (low, high) with low < high")
    return HALF_WIDTH * (2.0 * (array.clip(low, high) - low) / (high - low) - 1.0)
