"""The unfair digits as a population: in memory, or written to a folder user by user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.data.federated import FederatedDataset
from fpfl.data.femnist.features import FEATURES, Floats
from fpfl.data.femnist.source import CLASSES, SIDE, Part, Source
from fpfl.data.femnist.unfair import GROUPS, Order, assigned, drawn, writers_stream
from fpfl.data.files import open_population
from fpfl.data.schema import Attribute, Schema
from fpfl.data.writer import PopulationWriter

PEN = Attribute("pen", GROUPS)


def unfair_digits(
    source: Source,
    part: Part = "train",
    *,
    order: Order = "lexicographic",
    seed: int = 0,
    features: str = "pixels",
    samples_per_user: float | None = None,
) -> FederatedDataset:
    """The population of a part, in memory: all of a source's writers, in lexicographic order.

    Writers with digits in the other part only are users without samples, so that K and the groups
    are the same in both.

    Parameters
    ----------
    source, part
        Whose digits.
    order, seed
        How writers are dealt to pens; the seed also draws the blackboards' noise.
    features
        ``"pixels"``, ``"standardised"``, ``"oriented"`` or ``"both ways"``.
    samples_per_user
        What the schema declares, a public number.
    """
    names = source.names()
    number = {name: k for k, name in enumerate(names)}
    group = assigned(names, order, seed)
    shown: list[tuple[Floats, NDArray[np.int64]] | None] = [None] * len(names)
    for name, images, labels in _shown(source, part, group, seed, features):
        shown[number[name]] = images, labels
    schema = _schema(features, samples_per_user, len(names))
    found = [each for each in shown if each is not None]
    sizes = np.array([0 if each is None else len(each[1]) for each in shown])
    codes = np.array([group[name] for name in names])
    x = np.concatenate([each[0] for each in found] or [np.zeros((0, *schema.shape), np.float32)])
    y = np.concatenate([each[1] for each in found] or [np.zeros(0, np.int64)])
    return FederatedDataset(
        torch.from_numpy(x),
        torch.from_numpy(y),
        torch.from_numpy(np.repeat(codes, sizes)[:, None]),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        schema,
    )


def write_unfair_digits(
    source: Source,
    folder: str | Path,
    part: Part = "train",
    *,
    order: Order = "lexicographic",
    seed: int = 0,
    features: str = "pixels",
    samples_per_user: float | None = None,
) -> FederatedDataset:
    """The same population in a new folder, read lazily: one writer at a time is in memory.

    Users stand in the order in which the source has them, those without samples last.
    """
    names = source.names()
    group = assigned(names, order, seed)
    schema = _schema(features, samples_per_user, len(names))
    with PopulationWriter(folder, schema) as out:
        for name, images, labels in _shown(source, part, group, seed, features):
            out.add(images, labels, np.full((len(labels), 1), group[name]))
    return open_population(folder)


def _shown(
    source: Source, part: Part, group: dict[str, int], seed: int, features: str
) -> Iterator[tuple[str, Floats, NDArray[np.int64]]]:
    """Every writer's features and labels, one writer at a time."""
    seen = _features(features)
    for writer in source.read(part):
        rng = writers_stream(seed, part, writer.name)
        images = seen(drawn(writer.pixels, group[writer.name], rng))
        yield writer.name, images, writer.labels.astype(np.int64)


def _schema(features: str, samples_per_user: float | None, users: int) -> Schema:
    shape = _features(features)(np.zeros((1, 3, SIDE, SIDE), np.float32)).shape[1:]
    return Schema(
        shape,
        classes=CLASSES,
        attributes=(PEN,),
        population=users,
        samples_per_user=samples_per_user,
    )


def _features(name: str) -> Callable[[Floats], Floats]:
    if name not in FEATURES:
        raise ValueError(f"the features are {name!r}; expected one of {list(FEATURES)}")
    return FEATURES[name]
