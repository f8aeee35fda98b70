"""Trainings side by side: those of one shape are one computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.training.run import Run
from fpfl.training.session import train


@dataclass(frozen=True)
class Job:
    """One training: what ``fpfl.train`` would be called with.

    Parameters
    ----------
    model, data
        The initial model and the population.
    settings
        Keywords of `fpfl.train`; not folder, ledger and callbacks, which belong to one run.
    """

    model: nn.Module
    data: FederatedDataset
    settings: Mapping[str, Any]


def trained(
    jobs: Sequence[Job],
    *,
    memory: int | None = None,
    watch: Callable[[Sequence[int], int], None] | None = None,
) -> Iterator[tuple[int, Run]]:
    """Train all of them; yields (its number, the finished run) as groups finish.

    ``watch`` is called after every round of a group with the numbers of its runs and the round.
    """
    for number, job in enumerate(jobs):
        run = train(job.model, job.data, **job.settings)
        if watch is not None:
            watch([number], len(run.history))
        yield number, run
