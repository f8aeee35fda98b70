"""Writers and their digits, as every format gives them: read one writer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Part = Literal["train", "test"]

SIDE = 28
"""Images are 28 × 28."""

CLASSES = 10
"""The digits 0 to 9."""


@dataclass(frozen=True)
class Writer:
    """One user's digits in one part.

    Parameters
    ----------
    name
        As in the file.
    pixels
        uint8 of shape (n, 28, 28): 255 is the paper, 0 the stroke.
    labels
        uint8 of shape (n,): 0 to 9.
    """

    name: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]


class Source(Protocol):
    """A file, or files, with writers' digits."""

    @property
    def title(self) -> str:
        """What the data is called wherever its results are shown."""
        ...

    def names(self) -> list[str]:
        """Everybody with a digit in either part, in lexicographic order."""
        ...

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers of a part who have digits in it, one at a time, in the file's own order."""
        ...
