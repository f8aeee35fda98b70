"""The schema: what is public about a population.

Classes, groups, ranges and the number of users are declared by whoever runs the training, not
read from the users' data: reading them would be a release that no accountant has seen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fpfl.fairness.groups import Attribute

__all__ = ["Attribute", "Schema", "Task"]

Task = Literal["binary", "multiclass", "regression"]


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
    """

    shape: tuple[int, ...]
    classes: int | None = 2
    label_range: tuple[float, float] | None = None
    attributes: tuple[Attribute, ...] = ()
    feature_names: tuple[str, ...] | None = None
    feature_ranges: tuple[tuple[float, float], ...] | None = None
    population: int | None = None
    samples_per_user: float | None = None

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        object.__setattr__(self, "shape", shape)
        if self.classes is None:
            if self.label_range is None or not self.label_range[0] < self.label_range[1]:
                raise ValueError(
                    f"classes=None means regression, which needs label_range=(low, high) with "
                    f"low < high; {self.label_range} was given"
                )
        elif self.classes < 2:
            raise ValueError(f"classes is {self.classes}; give 2 or more, or None for regression")
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
        return None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Schema:
        """The schema of plain values, as JSON gives them back: lists for tuples."""
        values = {name: _tuples(value) for name, value in content.items()}
        attributes = [
            Attribute(**{name: _tuples(value) for name, value in attribute.items()})
            for attribute in content.get("attributes", ())
        ]
        return cls(**values | {"attributes": tuple(attributes)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
