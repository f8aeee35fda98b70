"""How exactly matrix products are computed: float32, or faster and coarser on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]
"""``float32``: in the model's own precision (float64 models too). ``tf32``: products of float32
numbers with 10 bits of mantissa, on GPUs that have it. ``bf16``: forward and backward in bfloat16
where that is safe (autocast). Norms, clipping and sums are in the model's precision or better."""


THREADS = 2
"""A CPU's threads, at most, where a row's bits must not depend on its place.

What is computed number by number (sigmoid, SiLU, ...) is cut into a piece for each thread, and the
last numbers of a piece go through other instructions, whose last bit may differ. Tiles have a
multiple of 64 rows: cut in two, no piece has such an end. Cut in three, it would lie within a row,
and in whose row would depend on everybody before it."""


@contextmanager
def computing(
    precision: Precision, device: torch.device, threads: int | None = None
) -> Iterator[None]:
    """Compute in the given precision, whatever torch's global settings are, and restore them.

    With ``threads`` on no more of a CPU's threads than that.
    """
    with ExitStack() as stack:
        if threads is not None and device.type == "cpu":
            stack.enter_context(_on_threads(threads))
        # Set here and not read from globals: a coarser product elsewhere is no matter of ours.
        stack.enter_context(_tf32(precision != "float32" and device.type == "cuda"))
        stack.enter_context(_repeatable())
        if precision == "bf16":
            # The cache would keep casts of a w that the next round overwrites in place.
            stack.enter_context(
                torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
            )
        yield


@contextmanager
def _on_threads(most: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    backends = torch.backends
    places = [
        backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,  # type: ignore[attr-defined]
        backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,  # type: ignore[attr-defined]
    ]  # fmt: skip
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if allowed and place not in places[3:] else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@contextmanager
def _repeatable() -> Iterator[None]:
    """cuDNN's kernels that give the same each time, and none chosen by trying how fast it is."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def repeatable_sums(device: torch.device) -> Iterator[None]:
    """Have ``index_add_`` add in the order of its rows on a GPU, too, as a CPU does."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
