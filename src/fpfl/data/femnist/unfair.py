r"""The paper's unfair digits: the same handwriting, by three pens.

Users in order, ⌊0.45 K⌋ of them write with a black pen on white, the next ⌊0.45 K⌋ with a blue pen
on white, and the rest with white chalk on a blackboard. There x, with strokes at 1 and the board at
0, becomes

    x ← (x + ξ ⊛ κ₂) ⊛ κ₁,    ξ ~ N(0, I),

with Gaussian filters κ of standard deviation 1 and 2, and is turned by 90°. Everybody's images have
three channels.

A network is shown an image's pixels, standardised ones, or oriented gradients. Each is a fixed
function of one image, with no constants that were read from data: it costs no privacy. The fewer
parameters are left to be learnt, the less noise a private training has to overcome, and fixed
features are the cheapest parameters there are (Tramèr and Boneh, 2021).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.data.federated import FederatedDataset
from fpfl.data.femnist.source import CLASSES, SIDE, Part, Source
from fpfl.data.files import PopulationWriter, open_population
from fpfl.data.schema import Attribute, Schema

GROUPS = ("black pen", "blue pen", "chalk")

SHARE = 0.45
"""Of the users, those with a black pen; and as many with a blue one."""

Order = Literal["lexicographic", "seeded"]
"""Of the users, when they are dealt to the groups: by name, as in the paper, or shuffled."""

Floats = NDArray[np.float32]


def group_sizes(users: int) -> tuple[int, int, int]:
    """How many of K users are in each group: ⌊0.45 K⌋, ⌊0.45 K⌋ and the rest."""
    pens = 45 * users // 100
    return pens, pens, users - 2 * pens


def assigned(names: Sequence[str], order: Order = "lexicographic", seed: int = 0) -> dict[str, int]:
    """The group of every user.

    In lexicographic order whoever comes last has chalk. Names may go with something else, such as
    how much somebody wrote: ``"seeded"`` shuffles the sorted names first.
    """
    if order not in get_args(Order):
        raise ValueError(f"the order is {order!r}; expected one of {get_args(Order)}")
    ordered = sorted(names)
    if len(set(ordered)) != len(ordered):
        raise ValueError(f"{len(ordered) - len(set(ordered))} users have another's name")
    if order == "seeded":
        ordered = [ordered[i] for i in _keyed(seed, "order").permutation(len(ordered))]
    codes = np.repeat(np.arange(len(GROUPS)), group_sizes(len(ordered)))
    return dict(zip(ordered, codes.tolist(), strict=True))


def drawn(pixels: NDArray[np.uint8], group: int, rng: np.random.Generator) -> Floats:
    """Images of one group, of shape (n, 3, 28, 28), from pixels of shape (n, 28, 28).

    Pens stay in [0, 1]; chalk goes a little beyond, as the blurred noise has it.
    """
    x = pixels.astype(np.float32) / np.float32(255)
    if GROUPS[group] == "black pen":
        return np.repeat(x[:, None], 3, axis=1)
    if GROUPS[group] == "blue pen":
        return np.stack([x, x, np.ones_like(x)], axis=1)  # the stroke is (0, 0, 1)
    noise = _blurred(rng.standard_normal(x.shape, dtype=np.float32), 2.0)
    chalk = _blurred(1.0 - x + noise, 1.0)
    return np.repeat(np.rot90(chalk, axes=(1, 2))[:, None], 3, axis=1)


def writers_stream(seed: int, part: Part, name: str) -> np.random.Generator:
    """The stream of one writer's ξ: whatever the order in which writers are read."""
    return _keyed(seed, f"{part}/{name}")


def _keyed(seed: int, what: str) -> np.random.Generator:
    # Not one of `fpfl.numerics.randomness`: with the stream that splits a population, who is held
    # out would depend on who has chalk.
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give a whole number that is 0 or more")
    digest = hashlib.sha256(what.encode()).digest()[:8]
    return np.random.default_rng([seed, int.from_bytes(digest, "little")])


def _blurred(images: Floats, deviation: float) -> Floats:
    """Every image convolved with a Gaussian: rows, then columns, as products with a matrix."""
    matrix = _gaussian(deviation)
    return np.asarray(matrix @ images @ matrix.T, dtype=np.float32)


@lru_cache(maxsize=4)
def _gaussian(deviation: float) -> Floats:
    """The Gaussian filter of a line of pixels as a matrix.

    The kernel ends at four standard deviations, and a line goes on beyond its ends mirrored at
    them: the choices of SciPy's ``gaussian_filter``, which the paper used.
    """
    radius = int(4.0 * deviation + 0.5)
    steps = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (steps / deviation) ** 2)
    kernel /= kernel.sum()
    matrix = np.zeros((SIDE, SIDE))
    for step, weight in zip(steps, kernel, strict=True):
        seen = (np.arange(SIDE) + step) % (2 * SIDE)
        mirrored = np.where(seen < SIDE, seen, 2 * SIDE - 1 - seen)
        np.add.at(matrix, (np.arange(SIDE), mirrored), weight)
    return matrix.astype(np.float32)


BINS = 8
"""Orientations between 0° and 180°."""

CELLS = 7
"""Cells in a line: each is 4 pixels wide."""


def pixels(images: Floats) -> Floats:
    """The images as they are: shape (n, 3, 28, 28)."""
    return images


def standardised(images: Floats) -> Floats:
    """Every image with mean 0 and variance 1 over all of its channels."""
    axes = (1, 2, 3)
    mean = images.mean(axis=axes, keepdims=True)
    return np.asarray((images - mean) / (images.std(axis=axes, keepdims=True) + 1e-3), np.float32)


def both_ways(images: Floats) -> Floats:
    """Oriented gradients of an image as it is and turned by 90°: shape (n, 2, 392).

    For networks that look at both with the same weights, whichever way a camera was held: digits
    that are seen one way are learnt for the other.
    """
    upright = oriented(images)
    # Turning an image turns its cells, and moves its orientations by half of the bins.
    turned = np.roll(np.rot90(upright, axes=(2, 3)), BINS // 2, axis=1)
    return np.stack([each.reshape(len(images), -1) for each in (upright, turned)], axis=1)


def oriented(images: Floats) -> Floats:
    r"""Histograms of oriented gradients (Dalal and Triggs, 2005): shape (n, 8, 7, 7).

    Of the mean of the channels, g, standardised: the gradient (g_x, g_y) of every pixel goes to the
    two nearest of 8 orientations θ modulo 180°, and is pooled to 7 × 7 overlapping cells with
    weights that fall off linearly to the neighbours' centres. Then square roots, and every image's
    features are standardised. A light stroke on dark and a dark one on light look the same.
    """
    g = images.mean(axis=1)
    g = (g - g.mean(axis=(1, 2), keepdims=True)) / (g.std(axis=(1, 2), keepdims=True) + 1e-3)
    across, down = np.zeros_like(g), np.zeros_like(g)
    across[:, :, 1:-1] = (g[:, :, 2:] - g[:, :, :-2]) / 2
    down[:, 1:-1] = (g[:, 2:] - g[:, :-2]) / 2
    strength = np.hypot(across, down)
    place = np.arctan2(down, across) * np.float32(BINS / np.pi)
    pool = _pooling(g.shape[-1])
    found = np.empty((len(g), BINS, CELLS, CELLS), dtype=np.float32)
    for k in range(BINS):
        # Orientation k's share falls off linearly, to 0 at its neighbours'.
        away = np.abs((place - np.float32(k - BINS / 2)) % BINS - np.float32(BINS / 2))
        found[:, k] = pool @ (strength * (1 - away).clip(0.0)) @ pool.T
    found = np.sqrt(found)
    found -= found.mean(axis=(1, 2, 3), keepdims=True)
    found /= np.sqrt(np.square(found).mean(axis=(1, 2, 3), keepdims=True)) + np.float32(1e-6)
    return found


def _pooling(side: int) -> Floats:
    """The weights of a line's pixels in each of its cells: triangles, one cell wide either way."""
    width = side / CELLS
    centres = (np.arange(CELLS) + 0.5) * width - 0.5
    distance = np.abs(np.arange(side) - centres[:, None]) / width
    return np.clip(1.0 - distance, 0.0, None).astype(np.float32)


FEATURES: dict[str, Callable[[Floats], Floats]] = {
    "pixels": pixels,
    "standardised": standardised,
    "oriented": oriented,
    "both ways": both_ways,
}


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
