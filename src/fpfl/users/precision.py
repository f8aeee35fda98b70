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


@contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute in the given precision, whatever torch's global settings are, and restore them."""
    with ExitStack() as stack:
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
