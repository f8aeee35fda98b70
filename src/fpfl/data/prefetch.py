"""Reading ahead in mapped files: what a cohort needs is asked for at once, not page by page."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LARGE = 256 * 2**20
"""Tensors of fewer bytes than this are left as they are."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Linux's numbers; Python does not name the second."""
GAP = 64 * 2**10
"""Bytes between two rows that are read along with them: one request instead of two."""


def prefetch(values: Tensor, rows: NDArray[np.int64]) -> None:
    """Tell the system that these rows of a mapped tensor are about to be read.

    A page that is touched cold is waited for, with its surroundings, before the next one is; asked
    for first, they are read together. (Telling the system that access is random helps less, and
    makes reading in order slower.) It is a hint: where the system takes none, nothing happens.
    """
    advise = _advise()
    width = values.stride(0) * values.element_size() if values.ndim else 0
    if advise is None or width == 0 or not rows.size or not values.numel():
        return
    starts = values.data_ptr() + np.sort(rows, axis=None) * width
    stops = starts + width
    apart = np.flatnonzero(starts[1:] > stops[:-1] + GAP)
    starts = starts[np.concatenate([[0], apart + 1])] // mmap.PAGESIZE * mmap.PAGESIZE
    stops = stops[np.concatenate([apart, [-1]])]
    for start, length in zip(starts.tolist(), (stops - starts).tolist(), strict=True):
        advise(start, length, mmap.MADV_WILLNEED)


def settle(values: Tensor) -> None:
    """Ask the system to hold a large tensor in large pages.

    Cohorts are random rows: with small pages each of them costs a walk through page tables that
    no cache holds. A hint, likewise.
    """
    advise = _advise()
    if advise is None or values.is_cuda or values.nbytes < LARGE or sys.platform != "linux":
        return
    start = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (values.data_ptr() + values.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    for what in (MADV_HUGEPAGE, MADV_COLLAPSE):
        advise(start, length, what)


@cache
def _advise() -> Callable[[int, int, int], Any] | None:
    """The C library's ``madvise``; None where there is none, as on Windows."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
