"""Groups: the samples with one value of an attribute, or of an intersection of attributes.

Attributes are declared, never read off the data: a group that nobody in today's cohort
belongs to still has its place in the statistics vector, and the list of groups reveals nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

UNKNOWN = -1
"""The code of a sample whose value of an attribute is not known."""


@dataclass(frozen=True)
class Attribute:
    """A declared sensitive attribute.

    Parameters
    ----------
    name
        For example ``"sex"``.
    values
        Its possible values, in the order of their codes 0, 1, ...
    unknown
        Whether samples may lack it (code -1). Such samples count in the overall value of a
        rate and are constrained by nothing.
    """

    name: str
    values: tuple[str, ...]
    unknown: bool = False

    def __post_init__(self) -> None:
        if len(self.values) < 2 or len(set(self.values)) != len(self.values):
            raise ValueError(
                f"attribute {self.name!r} was declared with the values {self.values}; "
                "give at least two values, each once"
            )

    def check_codes(self, codes: Tensor) -> None:
        """Refuse codes that no declared value has."""
        lowest = UNKNOWN if self.unknown else 0
        if bool(((codes < lowest) | (codes >= len(self.values))).any()):
            raise ValueError(
                f"codes of attribute {self.name!r} run from {int(codes.min())} to "
                f"{int(codes.max())}; expected {lowest} to {len(self.values) - 1}"
                + ("" if self.unknown else " (declare unknown=True to allow -1)")
            )


@dataclass(frozen=True)
class Group:
    """The samples that have all of the given (attribute, value) pairs."""

    where: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """For example ``"sex=Female"`` or ``"sex=Female & race=Black"``."""
        return " & ".join(f"{attribute}={value}" for attribute, value in self.where)


@dataclass(frozen=True)
class Groups:
    """Several groups, resolved against declared attributes.

    ``partition`` says whether every sample is in exactly one of them: only then are the
    overall sums the sums over groups, and only then can v leave the overall's blocks out.
    """

    groups: tuple[Group, ...]
    codes: tuple[tuple[tuple[int, int], ...], ...]
    partition: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The groups' names, in order."""
        return tuple(group.name for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def membership(self, attributes: Tensor) -> Tensor:
        """Which group each sample is in.

        Parameters
        ----------
        attributes
            Codes of shape (..., number of attributes).

        Returns
        -------
        Tensor
            Booleans of shape (..., number of groups).
        """
        columns = []
        for pairs in self.codes:
            member = torch.ones(attributes.shape[:-1], dtype=torch.bool, device=attributes.device)
            for column, code in pairs:
                member = member & (attributes[..., column] == code)
            columns.append(member)
        return torch.stack(columns, dim=-1)


def groups_by(
    attributes: Sequence[Attribute], by: Sequence[str | tuple[str, ...]] | None = None
) -> Groups:
    """Make the groups of one or several attributes and intersections.

    Parameters
    ----------
    attributes
        The declared attributes, in the order of the data's attribute columns.
    by
        What to group by: names (``["sex", "race"]`` gives the groups of both) and tuples of
        names (``[("sex", "race")]`` gives their intersections). All attributes, one by one,
        when it is not given.
    """
    if not attributes:
        raise ValueError(
            "the schema declares no attributes, so there are no groups; "
            "declare e.g. Attribute('sex', ('Female', 'Male')) in the schema"
        )
    index = {attribute.name: i for i, attribute in enumerate(attributes)}
    if by is None:
        by = [attribute.name for attribute in attributes]
    if not by:
        raise ValueError("no attribute was given to group by; name at least one of the schema's")
    groups: list[Group] = []
    codes: list[tuple[tuple[int, int], ...]] = []
    complete = True
    for item in by:
        names = (item,) if isinstance(item, str) else tuple(item)
        for name in names:
            if name not in index:
                raise ValueError(
                    f"there is no attribute {name!r} in the schema; it declares {sorted(index)}"
                )
        complete = complete and not any(attributes[index[name]].unknown for name in names)
        for values in product(*(enumerate(attributes[index[name]].values) for name in names)):
            group = Group(tuple((n, value) for n, (_, value) in zip(names, values, strict=True)))
            if group in groups:
                raise ValueError(f"the group {group.name!r} was asked for twice in {list(by)}")
            groups.append(group)
            codes.append(tuple((index[n], c) for n, (c, _) in zip(names, values, strict=True)))
    return Groups(tuple(groups), tuple(codes), partition=complete and len(by) == 1)
