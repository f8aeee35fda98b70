"""Reading ahead: the next item of an iterator is made while this one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; a thread makes the next one meanwhile, and never more than one."""
    done = object()
    thread = ThreadPoolExecutor(1, "fpfl-ahead")
    try:
        coming: Future[object] = thread.submit(next, items, done)
        while (item := coming.result()) is not done:
            coming = thread.submit(next, items, done)
            yield item  # type: ignore[misc]
    finally:
        # Not waited for: the thread itself may be the last one that holds on to this.
        thread.shutdown(wait=False, cancel_futures=True)
