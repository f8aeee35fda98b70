"""Merging values of an attribute, where groups would be too small for anything to be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fpfl.data.federated import NO_CODE, FederatedDataset
from fpfl.data.schema import Attribute


def merge_values(
    data: FederatedDataset, attribute: str, into: Mapping[str, Sequence[str]]
) -> FederatedDataset:
    """The same samples with some values of an attribute taken together.

    Which values are too rare has to be public, a published census for example: whoever counts them
    in the users' data has released something.

    Parameters
    ----------
    data
        A population in memory.
    attribute
        The attribute's name.
    into
        For every new value, the old ones that become it; values that are not named stay.
    """
    column, old = _column(data, attribute)
    target = {value: value for value in old.values}
    named: list[str] = []
    for new, values in into.items():
        if isinstance(values, str):
            raise ValueError(f"{new!r} is made of {values!r}; give a list of values")
        twice = [value for value in values if value in named]
        if twice:
            raise ValueError(f"{twice} would become two values of {attribute!r}; name each once")
        named += values
        strange = [value for value in values if value not in target]
        if strange:
            raise ValueError(f"{attribute!r} has no value {strange}; it has {list(old.values)}")
        target |= dict.fromkeys(values, new)
    names = tuple(dict.fromkeys(target[value] for value in old.values))
    table = torch.tensor([names.index(target[value]) for value in old.values])
    codes = data.attributes.clone()
    # What is no code stays none: it is looked at where its user is computed.
    codes[codes[:, column] >= len(table), column] = int(NO_CODE)
    known = codes[:, column] >= 0
    codes[known, column] = table.to(codes.device)[codes[known, column]]
    merged = Attribute(attribute, names, old.unknown)
    attributes = tuple(merged if a.name == attribute else a for a in data.schema.attributes)
    return replace(data, attributes=codes, schema=replace(data.schema, attributes=attributes))


def _column(data: FederatedDataset, attribute: str) -> tuple[int, Attribute]:
    for column, each in enumerate(data.schema.attributes):
        if each.name == attribute:
            return column, each
    names = [each.name for each in data.schema.attributes]
    raise ValueError(f"there is no attribute {attribute!r}; the schema declares {names}")
