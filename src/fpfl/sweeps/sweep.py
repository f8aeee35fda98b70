"""Sweeps: many trainings that differ in settings and seeds, and what was found by them."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from fpfl.callbacks.progress import printable
from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.evaluation import Evaluation
from fpfl.privacy.budget import BudgetExhaustedError
from fpfl.runs.about import about_this_run
from fpfl.runs.fingerprints import environment
from fpfl.runs.folder import as_json
from fpfl.sweeps import folder as files
from fpfl.sweeps.asked import (
    SIMULATION,
    Asked,
    Population,
    asked,
    described,
    differing,
    populations,
    seeded,
    settled,
)
from fpfl.sweeps.charges import Account, SweepCost, refusal
from fpfl.sweeps.choice import LOOKED, OVER, Choice, choose
from fpfl.sweeps.folder import SweepFolder
from fpfl.sweeps.grid import BESIDES, keywords
from fpfl.sweeps.picture import picture
from fpfl.sweeps.processes import AT_ONCE, Bench, Finished, Workers, compute, shares
from fpfl.sweeps.progress import SweepProgress
from fpfl.sweeps.table import Row, Table, row_of
from fpfl.training.run import Run

SEEDED = (
    "private runs draw their cohorts and their noise from their seeds: they show how good settings "
    "are, and protect nobody from anyone who has the seeds"
)

_EVERY = 5.0
"""Seconds between two writings of the table while runs finish; at the end it is written anyhow."""


@dataclass(frozen=True)
class SweepRun:
    """A finished run of a sweep.

    Parameters
    ----------
    number
        Its place in the sweep, from 0.
    settings
        What was asked for of this run, by dotted names, as plain values.
    run
        The run, as ``fpfl.train`` returns it.
    held_out
        What the model is worth on held-out users, without noise; None where nobody is held out.
    row
        Its row of the sweep's table.
    note
        That it is a simulation.
    """

    number: int
    settings: dict[str, Any]
    run: Run = field(repr=False)
    held_out: Evaluation | None = field(repr=False)
    row: Row = field(repr=False)
    note: str = SIMULATION


class Sweep:
    """Many trainings: iterate over it, and it trains; `fpfl.sweep` makes it.

    ``for run in sweep:`` yields each `SweepRun` as it finishes, those of an earlier session first;
    `finish` does so for whoever wants the table alone. A loop that is left early, or Ctrl-C, keeps
    what is finished; the next loop goes on with the rest.

    Attributes
    ----------
    cost
        What the runs that were still to be trained when the sweep was made cost the people of the
        ledger, as it was said before; None without a ledger.
    """

    def __init__(
        self,
        runs: Sequence[Asked],
        people: Mapping[str, Population],
        *,
        judge: Constraint | None = None,
        tolerance: float | None = None,
        held_out: Any = None,
        simulate: bool | None = None,
        ledger: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        jobs: int | None = None,
        memory: int | None = None,
        progress: bool = False,
        again: str | None = None,
        command: str | None = None,
    ) -> None:
        if resume and folder is None:
            raise ValueError("resume goes on with the sweep of a folder; name it: folder=")
        self._runs = seeded(runs, simulate, charged=ledger is not None)
        self._jobs = _checked_jobs(jobs, self._runs)
        self._bench, self._progress = Bench(people, judge, _for_each(memory, self._jobs)), progress
        self._names = differing(self._runs)
        self._tolerance = tolerance
        specs = settled(self._runs, people)
        self._account = None if ledger is None else Account.of(ledger, self._runs, specs, people)
        self._folder = None if folder is None else SweepFolder(folder)
        self._again = again or f"fpfl.sweep(..., folder={os.fspath(folder or '')!r}, resume=True)"
        self._command = command or shlex.join(sys.argv)
        self._rows: dict[int, Row] = {}
        self._kept: dict[int, SweepRun] = {}
        self._training = False
        order = files.order_of(
            self._runs,
            None if judge is None else described("constraint", judge),
            held_out,
            charged=ledger is not None,
        )
        due = self._runs
        if self._folder is not None and resume:
            found = self._folder.begin(order, files.fingerprints(self._runs, people), resume=True)
            self._take(found)
            due = self._due()
        self.cost: SweepCost | None = None
        if self._account is not None:
            self.cost = self._account.cost(due)
            if not self.cost.fits:
                raise BudgetExhaustedError(refusal(self.cost))
        if self._folder is not None and not resume:
            self._folder.begin(order, files.fingerprints(self._runs, people), resume=False)
        for line in self._said(len(due), resume=resume):
            _say(line)

    # --- what there is ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Count the runs that were asked for."""
        return len(self._runs)

    @property
    def finished(self) -> int:
        """How many runs are finished."""
        return len(self._rows)

    @property
    def tolerance(self) -> float | None:
        """α that gaps of held-out users are judged by."""
        judge = self._bench.judge
        return self._tolerance if judge is None or self._tolerance is not None else judge.tolerance

    def table(self) -> Table:
        """One row a finished run, in their order: the settings that differ, and figures."""
        return Table(self._rows[number] for number in sorted(self._rows))

    def chosen(self, *, tolerance: float | None = None, over: Sequence[str] = OVER) -> Choice:
        """The setting with the best held-out accuracy among those within the tolerance.

        Parameters
        ----------
        tolerance
            α; by default that of the sweep's constraint.
        over
            What runs of one setting may differ in; ``("seed", "data")`` averages over folds, too.
        """
        return choose(self.table(), tolerance=tolerance, over=over)

    @property
    def choice(self) -> Choice | None:
        """What `chosen` says; None where nobody is held out, or nothing is finished yet."""
        try:
            return self.chosen()
        except ValueError:
            return None

    def finish(self) -> Self:
        """Train all that is left."""
        for _ in self._trained():
            pass
        return self

    def __iter__(self) -> Iterator[SweepRun]:
        for number in sorted(self._rows):
            yield self._finished(self._runs[number])
        yield from self._trained()

    # --- training -----------------------------------------------------------------------------

    def _trained(self) -> Iterator[SweepRun]:
        if self._training:
            raise ValueError("somebody iterates over this sweep already; one loop at a time")
        if not self._due():
            return
        self._training = True
        try:
            with ExitStack() as stack:
                if self._folder is not None:
                    self._take(stack.enter_context(self._folder.held()))
                yield from self._kept_up(self._due())
        finally:
            self._training = False

    def _kept_up(self, due: Sequence[Asked]) -> Iterator[SweepRun]:
        """Train runs; whatever happens, what is finished is written down at the end."""
        start, written = time.perf_counter(), 0.0
        before = len(self._rows)
        session = self._folder.sessions() if self._folder is not None else []
        self._write_about(session, None, due)
        bar = SweepProgress({r.number: r.rounds for r in due}, before) if self._progress else None
        try:
            for found in self._computed(due, bar.watch if bar else None):
                run = self._take_in(found)
                if bar is not None:
                    bar.finished(self._runs[run.number], run.row)
                now = time.perf_counter()
                if now - written > _EVERY:
                    self._write_results()
                    written = now
                yield run
        except (KeyboardInterrupt, GeneratorExit) as end:
            # Ctrl-C in the loop's own lines is not raised here: the loop is left, and this closed.
            if bar is not None:
                bar.close()
            if self._due():
                _say(self._left("Interrupted" if isinstance(end, KeyboardInterrupt) else "Left"))
            raise
        finally:
            if bar is not None:
                bar.close()
            self._write_results()
            self._write_about(session, time.perf_counter() - start, due)
            self._draw()

    def _computed(
        self, due: Sequence[Asked], watch: Callable[[Sequence[int], int], None] | None
    ) -> Iterator[Finished]:
        bench, account = self._bench, self._account
        most = None
        if account is not None:
            most = AT_ONCE
            bench = replace(
                bench,
                people={
                    name: replace(part, training=account.without_withdrawn(part.training))
                    for name, part in bench.people.items()
                },
            )
        dealt = shares(due, self._jobs, most=most)

        def charge(share: Sequence[Asked]) -> None:
            if account is not None:
                account.charge(share)

        if self._jobs == 1:
            for share in dealt:
                charge(share)
                yield from compute(share, bench, watch)
            return
        with Workers(bench, min(self._jobs, len(dealt))) as workers:
            yield from workers.compute(dealt, watch, charge)

    def _take_in(self, found: Finished) -> SweepRun:
        asked_for = self._runs[found.number]
        run = replace(found.run, constraint=asked_for.keywords.get("constraint"))
        if self._account is not None and run.privacy is not None:
            said = replace(run.privacy, population_ledger=self._account.summary())
            run = replace(run, privacy=said)
        row = row_of(asked_for, run, found.held_out, self._names, self.tolerance)
        done = SweepRun(found.number, asked_for.settings, run, found.held_out, row)
        if self._folder is not None:
            self._folder.keep(asked_for, run, found.held_out, row)
        else:
            self._kept[found.number] = done
        self._rows[found.number] = row
        return done

    def _finished(self, asked_for: Asked) -> SweepRun:
        if self._folder is None:
            return self._kept[asked_for.number]
        run, held_out = self._folder.run(asked_for)
        row = self._rows[asked_for.number]
        return SweepRun(asked_for.number, asked_for.settings, run, held_out, row)

    def _take(self, numbers: Sequence[int]) -> None:
        assert self._folder is not None
        for number in numbers:
            if number < len(self._runs) and number not in self._rows:
                self._rows[number] = self._folder.row(self._runs[number])

    def _due(self) -> list[Asked]:
        return [run for run in self._runs if run.number not in self._rows]

    # --- words and files ----------------------------------------------------------------------

    def _said(self, due: int, *, resume: bool) -> list[str]:
        what = "run" if len(self) == 1 else "runs"
        lines = [f"Sweep of {len(self)} {what}, {due} to train. {_sentence(SIMULATION)}"]
        private = [run for run in self._runs if run.private]
        if private and self._account is None:
            lines.append(_sentence(SEEDED))
        if self.cost is not None:
            lines.append(str(self.cost))
            if resume and self.cost.runs:
                lines.append(
                    "Runs that are finished are not charged again. Runs that were cut off are "
                    "trained again, and charged again."
                )
        if any(part.held_out is not None for part in self._bench.people.values()):
            lines.append(LOOKED)
        return lines

    def _left(self, how: str) -> str:
        said = f"{how}: {self.finished} of {len(self)} runs are finished"
        if self._folder is None:
            return f"{said}. They are in this sweep alone; iterate again for the rest."
        return f"{said} and kept in {self._folder.path}. Go on with it: {self._again}"

    def _write_about(
        self, earlier: Sequence[Mapping[str, Any]], seconds: float | None, due: Sequence[Asked]
    ) -> None:
        if self._folder is None:
            return
        this = about_this_run(self._command, seconds) | {
            "packages": environment()["packages"],
            "jobs": self._jobs,
            "runs": len(due),
            "finished": sum(run.number in self._rows for run in due),
            "charged": self.cost.as_dict() if self.cost is not None else None,
        }
        content = {"note": SIMULATION, "sessions": [*earlier, this]}
        self._folder.write(files.ABOUT, as_json(content))

    def _write_results(self) -> None:
        if self._folder is None:
            return
        table = self.table()
        choice = self.choice
        content = {
            "note": SIMULATION,
            "held_out": LOOKED,
            "runs": len(self),
            "finished": self.finished,
            "settings": list(table.settings),
            "tolerance": self.tolerance,
            "choice": None if choice is None else choice.as_dict(),
            "rows": [_plain(row) for row in table],
        }
        self._folder.write(files.RESULTS, as_json(content))
        said = [f"# Sweep: {self.finished} of {len(self)} runs finished", ""]
        if choice is not None:
            said += [f"- {line}" for line in choice.lines()]
            said += ["", "## Settings, the best first", "", choice.markdown()]
        said += ["## Runs", "", table.markdown()]
        self._folder.write(files.TABLE, "\n".join(said).encode())

    def _draw(self) -> None:
        choice = self.choice
        if self._folder is None or choice is None:
            return
        try:
            self._folder.write(files.PICTURE, picture(choice))
        except ImportError as error:  # all the rest is there without it
            _say(f"No picture: {error}")


def sweep(
    model: nn.Module | Callable[[int], nn.Module] | Mapping[str, Any],
    data: FederatedDataset | Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    *,
    held_out: float | FederatedDataset | None = 0.25,
    split_seed: int = 0,
    simulate: bool | None = None,
    ledger: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | None = None,
    progress: bool = False,
    **common: Any,
) -> Sweep:
    """Train many runs that differ in settings and seeds, as one computation.

    A sweep is a simulation: it is for choosing settings. A run that is to be released is trained on
    its own, with `fpfl.train`. Nothing is trained before the `Sweep` is iterated over.

    Private runs of a sweep draw cohorts **and noise** from their seeds, so that their privacy
    statements say that there is no guarantee against anyone who has these. With a ``ledger`` that
    is otherwise: it is for people who are real. Then both are drawn from the operating system,
    every round of every run is charged to the ledger before the run is trained, what all of it
    costs is said before it starts, and a sweep that the budget has no room for is refused.

    Parameters
    ----------
    model
        An ``nn.Module`` for all runs; a function from a run's seed to one, e.g.
        ``lambda seed: fpfl.mlp(92, seed=seed)``; or a dict of these by name, of which a run names
        one (``"model"``).
    data
        The population; or a dict by name (folds, partitions), of which a run names one
        (``"data"``). Its values are populations, or pairs of users to train on and users held out.
    runs
        A list of dicts, one a run, of what it has otherwise than ``common``: `fpfl.grid` makes
        every combination of some values, and its page says what settings are called.
    held_out
        Users to choose by: a share that is set aside by ``data.split(held_out, seed=split_seed)``,
        the same users for all runs; other users; or None. Never the test set.
    split_seed
        Seeds the split.
    simulate
        True: the noise of a private run without a ``noise_seed`` has the run's seed; the default
        without a ledger. False needs a ledger.
    ledger
        The file of a `PopulationLedger` for the users that are trained on.
    folder
        A new folder for the sweep: every finished run, tables, the choice. Without one nothing is
        written.
    resume
        Go on with the sweep in the folder: settings and data have to be what they were.
    jobs
        Worker processes on a CPU, each with one thread; 1 by default, which is this process. More
        are spawned: the script has to begin with ``if __name__ == "__main__":``.
    memory
        Bytes for the runs that are computed together, in all processes.
    progress
        Show how far all runs are, on stderr.
    **common
        Keywords of `fpfl.train` for all runs: ``cohort``, ``rounds``, ``constraint``, ``method``,
        ``privacy``, ``learning_rate`` and so on; ``seed`` is 0 where it is not given. The
        constraint given here is what held-out users' gaps are judged by; without one, that of the
        runs with the smallest tolerance.

    Returns
    -------
    Sweep
        Iterate over it for finished runs; ``table()``, ``chosen()``.

    Examples
    --------
    >>> import fpfl
    >>> people = fpfl.load_adult("train").partition(mean=2, seed=0)
    >>> sweep = fpfl.sweep(
    ...     lambda seed: fpfl.mlp(people.schema.shape[0], seed=seed),
    ...     people,
    ...     fpfl.grid(learning_rate=[0.1, 0.3], seed=range(2)),
    ...     cohort=100, rounds=2, constraint=fpfl.fnr_parity("sex"),
    ... )
    >>> len(sweep.finish().table())
    4
    """
    known = keywords()
    lost = [name for name in common if name not in known]
    if lost:
        there = "it belongs to one training" if lost[0] in BESIDES else "fpfl.train has none"
        raise ValueError(f"fpfl.sweep takes no {lost[0]!r}: {there}; there are {', '.join(known)}")
    people = populations(data, held_out, split_seed)
    found = asked(model, people, runs, common)
    share = held_out if isinstance(held_out, int | float) else None
    return Sweep(
        found,
        people,
        judge=judge_of(common.get("constraint"), found),
        held_out=None if share is None else {"share": share, "seed": split_seed},
        simulate=simulate,
        ledger=ledger,
        folder=folder,
        resume=resume,
        jobs=jobs,
        memory=memory,
        progress=progress,
    )


def judge_of(common: Constraint | None, runs: Sequence[Asked]) -> Constraint | None:
    """What held-out users' gaps are judged by: the common constraint, or the strictest there is."""
    own = [run.keywords["constraint"] for run in runs if run.keywords.get("constraint") is not None]
    if common is not None or not own:
        return common
    strictest: Constraint = min(own, key=lambda constraint: constraint.tolerance)
    return strictest


def _checked_jobs(jobs: int | None, runs: Sequence[Asked]) -> int:
    if jobs is None:
        return 1
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise ValueError(f"jobs is {jobs!r}; give a number of processes, from 1")
    devices = {str(run.keywords.get("device") or "cpu") for run in runs}
    if jobs > 1 and devices != {"cpu"}:
        raise ValueError(
            f"jobs is {jobs}, and the runs are computed on {', '.join(sorted(devices))}: processes "
            "would compete for it. Give jobs=1; runs are computed side by side all the same"
        )
    return min(jobs, len(runs))


def _for_each(memory: int | None, jobs: int) -> int | None:
    if memory is not None and memory < 1:
        raise ValueError(f"memory is {memory}; give a positive number of bytes")
    return None if memory is None else max(1, memory // jobs)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _say(line: str) -> None:
    print(printable(line, sys.stderr.encoding or "ascii"), file=sys.stderr, flush=True)


def _plain(row: Row) -> Row:
    odd = [n for n, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    return row | dict.fromkeys(odd)
