r"""What a network is shown of an image: its pixels, standardised ones, or oriented gradients.

Each is a fixed function of one image, with no constants that were read from data: it costs no
privacy. The fewer parameters are left to be learnt, the less noise a private training has to
overcome, and fixed features are the cheapest parameters there are (Tramèr and Boneh, 2021).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

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
