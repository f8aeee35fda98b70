"""Runs of a sweep, here or dealt to worker processes, each finished one with its evaluation.

A worker has one thread and computes its share as one (`fpfl.sweeps.batch`): two threads that share
small matrices are slower than two workers. Workers are spawned, not forked: a script that asks for
several has to begin with ``if __name__ == "__main__":``. They ignore Ctrl-C, which is this
process's to handle; they end with it, whatever ends it.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import Evaluation
from fpfl.sweeps.asked import Asked, Population
from fpfl.sweeps.batch import Job, trained
from fpfl.training.run import Run, evaluate_model
from fpfl.training.session import RunNote

Watch = Callable[[Sequence[int], int], None]

AT_ONCE = 16
"""Runs that are charged together: those that an interruption cuts off were charged in vain."""

_EVERY = 0.1
"""Seconds between two words of a worker on how far it is."""


@dataclass(frozen=True)
class Finished:
    """A run that is finished, and what it is worth on held-out users."""

    number: int
    run: Run
    held_out: Evaluation | None


@dataclass(frozen=True)
class Bench:
    """What all runs have in common: the populations, what they are judged by, and the memory."""

    people: Mapping[str, Population]
    judge: Constraint | None
    memory: int | None


def compute(runs: Sequence[Asked], bench: Bench, watch: Watch | None = None) -> Iterator[Finished]:
    """Train runs in this process, side by side; yields them as they finish."""
    jobs = [Job(run.make(), bench.people[run.data].training, run.keywords) for run in runs]
    yield from _computed(jobs, runs, bench, watch)


@dataclass(frozen=True)
class _Numbered:
    """What a worker needs to know of a run besides its job."""

    number: int
    data: str


def _computed(
    jobs: Sequence[Job],
    runs: Sequence[Asked] | Sequence[_Numbered],
    bench: Bench,
    watch: Watch | None,
) -> Iterator[Finished]:
    def watching(indices: Sequence[int], round: int) -> None:
        if watch is not None:
            watch([runs[index].number for index in indices], round)

    found = trained(jobs, memory=bench.memory, watch=watching)
    with ExitStack() as stack:
        close = getattr(found, "close", None)  # where this is left early, so is the training
        if close is not None:
            stack.callback(close)
        yield from _evaluated(found, runs, bench)


def _evaluated(
    found: Iterator[tuple[int, Run]], runs: Sequence[Asked] | Sequence[_Numbered], bench: Bench
) -> Iterator[Finished]:
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunNote)  # they are in the run's own warnings
            item = next(found, None)
        if item is None:
            return
        index, run = item
        others = bench.people[runs[index].data].held_out
        held_out = None
        if others is not None:
            held_out = evaluate_model(run.model, others, constraint=bench.judge)
        yield Finished(runs[index].number, run, held_out)


def shares(runs: Sequence[Asked], jobs: int, *, most: int | None = None) -> list[list[Asked]]:
    """Deal runs to so many workers: those that can be computed together stay together.

    Shares are about equal in rounds × cohort. ``most``: no share is of more runs, and there may
    then be more shares.
    """
    if not runs:
        return []
    alike: dict[str, list[Asked]] = {}
    for run in runs:
        alike.setdefault(run.shape, []).append(run)
    ordered = [run for group in alike.values() for run in group]
    weights = [run.rounds * int(run.keywords["cohort"]) for run in ordered]
    total, before = sum(weights), 0
    dealt: list[list[Asked]] = [[] for _ in range(min(jobs, len(runs)))]
    for run, weight in zip(ordered, weights, strict=True):
        place = (before + weight / 2) / total * len(dealt)
        dealt[min(int(place), len(dealt) - 1)].append(run)
        before += weight
    size = most or len(runs)
    return [share[i : i + size] for share in dealt for i in range(0, len(share), size)]


# --- workers ----------------------------------------------------------------------------------


class Workers:
    """Worker processes that train shares; used in a ``with`` block, at whose end they end.

    Parameters
    ----------
    bench
        What all runs have in common.
    count
        How many there are to be.
    """

    def __init__(self, bench: Bench, count: int) -> None:
        lazy = [name for name, part in bench.people.items() if part.training.lazy]
        if lazy:
            raise ValueError(
                f"the population {lazy[0]!r} is read from disk, and worker processes would each "
                "take all of it into memory; give jobs=1"
            )
        self._bench, self._count = bench, count
        self._running: dict[Connection, Any] = {}
        self._idle: list[Connection] = []

    def __enter__(self) -> Workers:
        content = _pickled(self._bench, "the populations and the constraint")
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._running[ours] = process
            for connection in self._running:  # by a pipe: no file with people's data is left behind
                self._send(connection, content)
                self._idle.append(connection)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def compute(
        self,
        dealt: Sequence[Sequence[Asked]],
        watch: Watch | None,
        before: Callable[[Sequence[Asked]], None],
    ) -> Iterator[Finished]:
        """Train shares; yields runs as they finish. ``before`` is called with each share first."""
        rest = list(reversed([list(share) for share in dealt]))
        busy: set[Connection] = set()
        while rest or busy:
            while rest and self._idle:
                share, connection = rest.pop(), self._idle.pop()
                before(share)
                message = _pickled(
                    [(_Numbered(r.number, r.data), r.make(), r.keywords) for r in share],
                    "the settings and models of the runs",
                )
                self._send(connection, message)
                busy.add(connection)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                kind, content = self._receive(ready)
                if kind == "watch" and watch is not None:
                    watch(*content)
                elif kind == "finished":
                    yield content
                elif kind == "error":
                    raise content
                elif kind == "idle":
                    busy.discard(ready)
                    self._idle.append(ready)

    def _send(self, connection: Connection, message: bytes) -> None:
        try:
            connection.send_bytes(message)
        except OSError as error:
            raise self._gone(connection) from error

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            found: tuple[str, Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._gone(connection) from error
        return found

    def _gone(self, connection: Connection) -> OSError:
        process = self._running[connection]
        process.join(5)
        return OSError(
            f"a worker process of the sweep ended by itself (exit code {process.exitcode}). Where "
            "that is -9, the system may have run out of memory: give fewer jobs. Where it ended at "
            "once, a script without `if __name__ == '__main__':` may have started itself again. "
            "What is finished is kept in the sweep's folder"
        )

    def _end(self) -> None:
        for process in self._running.values():
            process.terminate()
        for connection, process in self._running.items():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._running, self._idle = {}, []


def _pickled(value: Any, what: str) -> bytes:
    # Not multiprocessing's own pickler, which would share tensors by files of the system.
    file = io.BytesIO()
    try:
        pickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{what} cannot be sent to worker processes ({error}); give jobs=1, or functions that "
            "have a name in a module instead of lambdas (an optimizer, a rate, a layer)"
        ) from error
    return file.getvalue()


def _work(connection: Connection) -> None:
    """A worker: takes shares and sends what is finished, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # whoever asked is gone: there is nobody to tell
        try:
            bench: Bench = pickle.loads(connection.recv_bytes())
            while True:
                share = pickle.loads(connection.recv_bytes())
                for finished in _share(share, bench, connection):
                    connection.send_bytes(pickle.dumps(("finished", finished)))
                connection.send_bytes(pickle.dumps(("idle", None)))
        except (EOFError, BrokenPipeError, ConnectionError):
            return
        except Exception as error:
            connection.send_bytes(pickle.dumps(("error", _sendable(error))))


def _share(
    share: Sequence[tuple[_Numbered, Any, dict[str, Any]]], bench: Bench, connection: Connection
) -> Iterator[Finished]:
    said = 0.0
    reached: dict[int, int] = {}

    def watch(numbers: Sequence[int], round: int) -> None:
        nonlocal said
        reached.update(dict.fromkeys(numbers, round))
        now = time.monotonic()
        if now - said > _EVERY:
            said = now
            rounds: dict[int, list[int]] = {}
            for number, at in reached.items():
                rounds.setdefault(at, []).append(number)
            reached.clear()
            for at, found in rounds.items():
                connection.send_bytes(pickle.dumps(("watch", (found, at))))

    runs = [numbered for numbered, _, _ in share]
    jobs = [
        Job(model, bench.people[numbered.data].training, keywords)
        for numbered, model, keywords in share
    ]
    return _computed(jobs, runs, bench, watch)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
