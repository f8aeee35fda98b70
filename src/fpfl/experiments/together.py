"""Trainings of a table together: who computes which of them, and what each of them took."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fpfl.sweeps.batch import Job, trained
from fpfl.training import train
from fpfl.training.run import Run

MOST = 32
"""Runs in a group: what a cut-off may lose, and what progress waits for."""

FEW = 8
"""A group of fewer runs gains less by being computed together, so none is made smaller without
need."""

GROUPS_A_WORKER = 2
"""With one group a worker, all wait for the slowest."""


@dataclass(frozen=True)
class Finished:
    """A run that was trained, beside others or by itself.

    Parameters
    ----------
    number
        Which of the jobs it is.
    run
        The run.
    seconds
        What it took: of runs that were trained together, their time over their number.
    together
        How many runs shared that time.
    """

    number: int
    run: Run
    seconds: float
    together: int


def finished(jobs: Sequence[Job], *, apart: bool = False) -> Iterator[Finished]:
    """Train jobs, and say what each of them took.

    Parameters
    ----------
    jobs
        What to train.
    apart
        One after the other, each with `fpfl.train` and with a time of its own.
    """
    if apart:
        for number, job in enumerate(jobs):
            start = time.perf_counter()
            run = train(job.model, job.data, **job.settings)
            yield Finished(number, run, time.perf_counter() - start, 1)
        return
    groups: dict[int, tuple[int, ...]] = {}

    def watch(numbers: Sequence[int], round: int) -> None:
        # Of a group's first round: later on some of its runs may have stopped.
        for number in numbers:
            groups.setdefault(number, tuple(numbers))

    runs = trained(jobs, watch=watch)
    waiting: dict[tuple[int, ...], tuple[dict[int, Run], float]] = {}
    while True:
        # Only what is spent in there: whoever takes the runs evaluates them in between.
        start = time.perf_counter()
        found = next(runs, None)
        took = time.perf_counter() - start
        if found is None:
            break
        number, run = found
        group = groups.get(number, (number,))
        done, before = waiting.pop(group, ({}, 0.0))
        done, took = done | {number: run}, before + took
        if len(done) < len(group):
            waiting[group] = done, took
        else:
            yield from _shared(done, took)
    for done, took in waiting.values():
        yield from _shared(done, took)


def _shared(runs: dict[int, Run], took: float) -> Iterator[Finished]:
    for number, run in runs.items():
        yield Finished(number, run, took / len(runs), len(runs))


def groups_of(
    shapes: Sequence[Hashable], costs: Sequence[float], workers: int, *, most: int = MOST
) -> list[list[int]]:
    """Cut runs into groups that are computed together, the longest first.

    A group has runs of one shape. There are as many groups as keep all workers busy until the end,
    none of more than ``most`` runs.

    Parameters
    ----------
    shapes
        What has to be equal for runs to be computed as one.
    costs
        How long each run takes, in any unit.
    workers
        How many groups are computed at a time.

    Returns
    -------
    list of list of int
        The runs' numbers.
    """
    alike: dict[Hashable, list[int]] = {}
    for number, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(number)
    everything = sum(costs)
    groups: list[list[int]] = []
    for numbers in alike.values():
        part = sum(costs[number] for number in numbers) / everything if everything else 1.0
        pieces = max(
            math.ceil(len(numbers) / most),
            math.ceil(part * workers - 1e-9),
            min(math.ceil(part * workers * GROUPS_A_WORKER - 1e-9), len(numbers) // FEW),
        )
        groups += _cut(numbers, min(pieces, len(numbers)))
    # Stable: groups of equal length stay in the order that they were given in.
    return sorted(groups, key=lambda group: -sum(costs[number] for number in group))


def _cut(numbers: list[int], pieces: int) -> list[list[int]]:
    """Neighbours stay together; lengths differ by one at most."""
    ends = [len(numbers) * piece // pieces for piece in range(pieces + 1)]
    return [numbers[start:end] for start, end in pairwise(ends)]


def side_by_side_shares(
    shares: Sequence[Sequence[Any]],
    compute: Callable[[Sequence[Any]], Iterator[tuple[int, Any]]],
    jobs: int,
) -> Iterator[tuple[int, int, Any]]:
    """Have shares of work computed, in this process or in several of one thread each.

    Parameters
    ----------
    shares
        The work, in the order in which it is begun.
    compute
        Yields (a place in the share, its result); processes are sent it, so it has to have a name.
    jobs
        How many processes.

    Yields
    ------
    tuple
        (the share, the place in it, the result), as shares finish.
    """
    if jobs == 1 or len(shares) <= 1:
        for number, share in enumerate(shares):
            for place, result in compute(share):
                yield number, place, result
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(shares)), mp_context=context, initializer=_begin_worker
    ) as pool:
        futures = {
            pool.submit(_share, compute, share): number for number, share in enumerate(shares)
        }
        failed: Exception | None = None
        try:
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                results, error = future.result()
                for place, result in results:
                    yield futures[future], place, result
                if error is not None and failed is None:
                    failed = error
                    # What is being computed comes to its end, and is kept.
                    for other in futures:
                        other.cancel()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        if failed is not None:
            raise failed


def _begin_worker() -> None:
    # Two threads sharing small matrices are slower than two runs.
    torch.set_num_threads(1)
    # A pool's worker would take an interrupt for a failure, and go on with what is queued.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _share(
    compute: Callable[[Sequence[Any]], Iterator[tuple[int, Any]]], share: Sequence[Any]
) -> tuple[list[tuple[int, Any]], Exception | None]:
    """A worker's results, and the error that ended them: what was finished before it is kept."""
    results: list[tuple[int, Any]] = []
    try:
        results.extend(compute(share))
    except Exception as error:
        return results, error
    return results, None
