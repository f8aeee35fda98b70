"""Digits without any file: scikit-learn's bundled 8 × 8 images, enlarged, with made-up writers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fpfl.data.femnist.source import SIDE, Part, Writer
from fpfl.randomness import stream

WRITERS = 150
"""Made-up writers: twelve digits each on average."""

TEST = 10
"""Every tenth of a writer's digits is for testing."""

MARGIN = 2
"""Pixels of paper around an enlarged digit."""


class BundledDigits:
    """scikit-learn's 1,797 digits (Alpaydin and Kaynak, 1998) as a population of made-up writers.

    For trying things out where no file is: nobody wrote these digits in this company, so that
    users differ by their pens alone. Results on them say nothing about FEMNIST.

    Parameters
    ----------
    seed
        Deals the digits to writers.
    """

    title = "scikit-learn's digits, enlarged, made-up writers"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def names(self) -> list[str]:
        """Everybody, in lexicographic order."""
        return [f"writer{k:03d}" for k in range(WRITERS)]

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers, one at a time, in order."""
        pixels, labels = self._digits
        for k, name in enumerate(self.names()):
            mine = np.arange(k, len(labels), WRITERS)
            testing = np.arange(len(mine)) % TEST == TEST - 1
            chosen = mine[testing if part == "test" else ~testing]
            if len(chosen):
                yield Writer(name, pixels[chosen], labels[chosen])

    @cached_property
    def _digits(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "the bundled digits are scikit-learn's, which is not installed: "
                "pip install 'fpfl[femnist]', or give a file with --data"
            ) from error
        images, labels = load_digits(return_X_y=True)
        order = stream(self.seed, "partition").permutation(len(labels))
        strokes = images.reshape(-1, 8, 8)[order] / 16
        enlarge = _interpolation(8, SIDE - 2 * MARGIN)
        large = np.zeros((len(labels), SIDE, SIDE))
        large[:, MARGIN:-MARGIN, MARGIN:-MARGIN] = enlarge @ strokes @ enlarge.T
        return np.round(255 * (1.0 - large)).astype(np.uint8), labels[order].astype(np.uint8)


def _interpolation(small: int, large: int) -> NDArray[np.float64]:
    """Linear interpolation of a line of pixels to a longer one, as a matrix."""
    place = ((np.arange(large) + 0.5) * small / large - 0.5).clip(0, small - 1)
    return np.clip(1.0 - np.abs(place[:, None] - np.arange(small)), 0.0, None)
