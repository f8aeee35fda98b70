r"""The paper's unfair digits: the same handwriting, by three pens.

Users in order, ⌊0.45 K⌋ of them write with a black pen on white, the next ⌊0.45 K⌋ with a blue pen
on white, and the rest with white chalk on a blackboard. There x, with strokes at 1 and the board at
0, becomes

    x ← (x + ξ ⊛ κ₂) ⊛ κ₁,    ξ ~ N(0, I),

with Gaussian filters κ of standard deviation 1 and 2, and is turned by 90°. Everybody's images have
three channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fpfl.data.femnist.source import SIDE, Part

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
    # Not one of `fpfl.randomness`: with the stream that splits a population, who is held out
    # would depend on who has chalk.
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
