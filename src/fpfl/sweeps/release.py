"""A round of several runs: their cohorts are read, computed, clipped and added up together.

Each run has its own cohort, model, weights, bounds and noise, as if it were alone, and its own sum
in whole numbers. What is shared is the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpfl.aggregation.clipping import ClipRule, whole_total
from fpfl.aggregation.noise import GRID_BITS
from fpfl.aggregation.sums import ThirdParty, on_grid
from fpfl.fairness.totals import Weights
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.server.simulation import ahead
from fpfl.users.engine import CohortEngine
from fpfl.users.packing import Ints
from fpfl.users.reading import Chunk, Runs
from fpfl.users.rows import UserRows


@dataclass(frozen=True)
class Sampled:
    """How a run's users are drawn, and where they are.

    Parameters
    ----------
    sampling
        Who is drawn.
    cohorts, samples
        The streams of every round, as in `fpfl.server.simulation.Simulation`.
    drawn_by
        Runs with the same have the same cohorts: they are drawn once. None for one of its own.
    first
        Where the run's population begins among the users of all.
    participation
        Who has taken part.
    random
        Whether anything is random on devices: which samples are used, dropout.
    """

    sampling: PoissonSampling | FixedSizeSampling
    cohorts: RoundStreams
    samples: RoundStreams
    drawn_by: Any
    first: int
    participation: Participation
    random: bool

    def draw(self, round: int) -> tuple[Ints, int]:
        """A round's cohort, and what is random on its devices."""
        users = self.participation.admit(self.sampling.draw(self.cohorts.of(round)))
        # Nobody asks for a key that decides nothing: making one takes as long as a cohort.
        key = int(self.samples.of(round).integers(2**63)) if self.random else 0
        return users + self.first, key


class SideBySide:
    """The simulations of R runs, as something that releases rounds of all.

    Parameters
    ----------
    engine
        Computes v^k, with the populations of all runs.
    third_parties
        Each run's own: bounds and noise.
    sampled
        Each run's users.
    rounds
        T.
    watch
        Called after each round.
    """

    def __init__(
        self,
        engine: CohortEngine,
        third_parties: Sequence[ThirdParty],
        sampled: Sequence[Sampled],
        rounds: int,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        self.engine, self.third_parties, self.sampled = engine, list(third_parties), list(sampled)
        self.rounds, self.watch = rounds, watch
        self._now = list(third_parties)  # with the bounds of the present round

    def release(
        self,
        round: int,
        w: Tensor,
        weights: Weights | None = None,
        level: Sequence[int] | None = None,
    ) -> Tensor:
        """Run one round of all runs, each at its w, and return their v, (R, size)."""
        self._at(level or [None] * len(w))
        first = self.third_parties[0]
        kind = torch.int64 if first.rules else torch.float64
        total = w.new_zeros(len(w), first.size, dtype=kind)
        for rows in self.engine.computed(w, self._one_round(), weights):
            if first.rules:
                total += whole_total(rows, self._rules(rows))
            else:
                for name, block in rows.totals(first.places, w.new_ones(len(rows))).items():
                    total[:, first.places[name]] += block
            del rows  # not kept while the next ones are computed
        v = self._noised(total, round).to(w.dtype)
        if self.watch is not None:
            self.watch(round)
        return v

    def _at(self, levels: Sequence[int | None]) -> None:
        """Take the bounds of these levels, where a run's has moved."""
        for run, (party, level) in enumerate(zip(self.third_parties, levels, strict=True)):
            own = party.at(level)
            if own.level == self._now[run].level:
                continue
            self._now[run] = own
            self._bounds[:, run] = self._bounds.new_tensor([rule.bound for rule in own.rules])
            self._steps[run] = own.steps(self._device)
            self._grid[run] = _grid(own, self._device)

    def _rules(self, rows: UserRows) -> list[ClipRule]:
        """Each row's bounds."""
        assert rows.runs is not None  # there are several
        own = self._bounds.index_select(1, rows.runs.of_rows).unbind()
        rules = self.third_parties[0].rules
        return [replace(rule, bound=bound) for rule, bound in zip(rules, own, strict=True)]

    @cached_property
    def _bounds(self) -> Tensor:
        """Each rule's bound in every run, (rules, R)."""
        bounds = [[rule.bound for rule in each.rules] for each in self.third_parties]
        return torch.tensor(bounds, dtype=torch.float64, device=self._device).T.contiguous()

    @property
    def _device(self) -> torch.device:
        return self.engine.model.vector().device

    def _noised(self, total: Tensor, round: int) -> Tensor:
        """Each run's noise on its sum (`fpfl.aggregation.sums.ThirdParty.noised`)."""
        if self.third_parties[0].plan is None:
            return total if total.is_floating_point() else total * self._steps
        noise = torch.stack(
            [
                each.source.integers(each.size, round, device=total.device)
                for each in self.third_parties
            ]
        )
        return on_grid(total * self._steps, self._grid, noise)

    @cached_property
    def _steps(self) -> Tensor:
        """The users' steps, (R, size)."""
        return torch.stack([each.steps(self._device) for each in self.third_parties])

    @cached_property
    def _grid(self) -> Tensor:
        """The noise's steps, (R, size)."""
        return torch.stack([_grid(each, self._device) for each in self.third_parties])

    def _one_round(self) -> Iterator[Chunk]:
        for chunk in self._reading:
            if chunk is None:
                return
            yield chunk

    @cached_property
    def _reading(self) -> Iterator[Chunk | None]:
        return ahead(self._rounds()) if reads_ahead(self._device) else self._rounds()

    def _rounds(self) -> Iterator[Chunk | None]:
        """The chunks of all rounds, with None at the end of each."""
        for round in range(1, self.rounds + 1):
            drawn: dict[Any, tuple[Ints, int]] = {}
            cohorts = []
            for run, each in enumerate(self.sampled):
                same = run if each.drawn_by is None else (each.drawn_by, each.first)
                if same not in drawn:
                    drawn[same] = each.draw(round)
                cohorts.append(drawn[same])
            sizes = [len(users) for users, _ in cohorts]
            of_users = np.repeat(np.arange(len(cohorts)), sizes)
            keys = np.array([key for _, key in cohorts], dtype=np.int64)
            runs = Runs(of_users, keys, self._first)
            users = np.concatenate([users for users, _ in cohorts])
            yield from self.engine.chunks(users, runs=runs)
            yield None

    @cached_property
    def _first(self) -> Ints:
        return np.array([each.first for each in self.sampled], dtype=np.int64)


def _grid(party: ThirdParty, device: torch.device) -> Tensor:
    """A run's own steps of the noise."""
    return party.noise_stddev.to(device) * 2.0**-GRID_BITS


def reads_ahead(device: torch.device) -> bool:
    """Whether a thread draws and packs the next round's users meanwhile.

    A GPU is not to wait for them; on a CPU the thread would only stand in the way.
    """
    return device.type != "cpu"
