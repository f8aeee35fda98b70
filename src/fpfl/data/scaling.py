"""Scaling by declared public ranges: what costs no privacy, unlike a mean read from the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
