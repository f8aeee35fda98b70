"""The journal of a run: charges before releases, released totals before their use, checkpoints.

    charge t ──► compute v_t ──► wait until the charge is on the disk ──► log v_t ──► use v_t

A small process waits for the disk while the users' statistics are computed, so that an ordinary
disk costs little. After a crash the logged totals are used again, never drawn again.

Users who withdraw are in a list in the folder, which a run reads before it draws a cohort. It names
users by their index and is as confidential as the list of users. The ledger, which others may be
shown, has only how many they are.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.privacy.budget import BudgetExhaustedError, PopulationLedger
from fpfl.privacy.filter import Mechanism
from fpfl.runs.folder import NUMBERED, WITHDRAWALS, checkpoint_name, log_name
from fpfl.runs.ledger import NO_MEASUREMENT, RunLedger
from fpfl.server.state import CLASSES, Past, ServerState
from fpfl.store.chain import ChainError
from fpfl.store.checkpoints import DamagedError, load_checkpoint, save_checkpoint
from fpfl.store.files import SyncProcess, explained, write_all
from fpfl.store.roundlog import Record, RoundLog, read_rounds

_INDEX = re.compile(rb"[0-9]{1,18}")
_TORN = b"?"
"""Ends a line that a crash or a full disk cut off: what is left of it names nobody."""


def withdraw(folder: Path, users: Iterable[int]) -> None:
    """Add users to the withdrawals of a run; it may be running."""
    lines = "".join(f"{int(user)}\n" for user in users).encode()
    path = folder / WITHDRAWALS
    with explained(path, "The withdrawal was not recorded"):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                lines = _TORN + b"\n" + lines
            write_all(file, lines)
            os.fsync(file)
        finally:
            os.close(file)


def read_withdrawals(path: Path) -> frozenset[int]:
    """The users on a list; none where there is no list.

    A line that was not finished is not read: half of a number names somebody else.
    """
    if not path.exists():
        return frozenset()
    # Bytes, and plain digits alone: what int() makes of signs, underscores and other alphabets'
    # digits would leave out somebody who did not ask for it.
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    users = set()
    for number, line in enumerate(map(bytes.strip, whole.split(b"\n")), start=1):
        if not line or line.endswith(_TORN):
            continue
        if not _INDEX.fullmatch(line):
            raise ValueError(
                f"{path}, line {number} is {line[:40]!r}; expected one user's index on each line, "
                "in plain digits. Correct it"
            )
        users.add(int(line))
    return frozenset(users)


LOG_BUDGET = 256 * 2**20
"""Bytes of logged totals after which a checkpoint is made, however few rounds that took."""

LOG_SYNCED = 16
"""Logged totals survive the process at once. So many rounds of them a power cut may take along, and
those are charged again: syncing them every round would cost as much as the ledger."""


class Journal:
    """What a run writes down while it goes on, in its folder.

    Parameters
    ----------
    folder
        The run folder.
    past
        What is in it so far.
    ledger
        Its open ledger.
    every
        A checkpoint after so many rounds.
    capped
        Whether participations are capped: then who took part is written down, too.
    """

    def __init__(
        self, folder: Path, past: Past, ledger: RunLedger, *, every: int, capped: bool
    ) -> None:
        self.folder, self.ledger, self.every = folder, ledger, every
        self.next_round = past.next_round
        sessions = sum(r["kind"] in ("open", "resume") for r in ledger.chain.records)
        logs = _files(folder, "totals") + _files(folder, "cohorts")
        sessions = max([sessions, *(1 + _place(path)[0] for path in logs)])
        self._session = sessions
        self._log = self._new("totals", self.next_round)
        self._cohorts = self._new("cohorts", self.next_round) if capped else None
        self._rows: list[str] = []
        # A ledger without charges need not be waited for.
        self._syncing = SyncProcess(ledger.descriptors) if ledger.terms is not None else None
        self._follow()
        self._withdrawn: frozenset[int] = frozenset()
        self._withdrawals = os.fspath(folder / WITHDRAWALS)
        self._seen: tuple[int, int] | None = None

    # --- a round ------------------------------------------------------------------------------

    def charge(self, round: int) -> None:
        """Write a round's charge and let the disk have it; a spent budget is an error."""
        self.ledger.charge(round)
        if self._syncing is not None:
            self._syncing.start(everything=round % LOG_SYNCED == 0)

    def drawn(self, round: int, users: NDArray[np.int64]) -> None:
        """Write down who takes part, where that is counted."""
        if self._cohorts is not None:
            self._cohorts.append(round, users)

    def wait(self) -> None:
        """Wait until the charge is on the disk: nothing may leave the third party before."""
        if self._syncing is not None:
            with explained(
                self.ledger.chain.path, "Its totals were not used; mend the disk, resume"
            ):
                self._syncing.wait()
        if self._cohorts is not None:
            self._cohorts.sync()

    def log(self, round: int, v: Tensor) -> None:
        """Write down the released totals, before the server uses them."""
        self._log.append(round, v.detach().cpu().numpy())

    # --- users --------------------------------------------------------------------------------

    def withdrawn(self, round: int) -> frozenset[int] | None:
        """Who has withdrawn, where that changed since it was last asked; recorded from a round on.

        Only how many they are goes into the ledger, which others may be shown.
        """
        population = self.ledger.population
        users = frozenset() if population is None else population.withdrawn()
        path = self._withdrawals
        try:
            about = os.stat(path)
            seen = (about.st_size, about.st_mtime_ns)
        except FileNotFoundError:
            seen = None
        if seen == self._seen and users <= self._withdrawn:
            return None
        self._seen = seen
        users |= read_withdrawals(Path(path))
        if users == self._withdrawn:
            return None
        self._withdrawn = users
        self.ledger.withdrawal(round, len(users))
        return users

    # --- checkpoints --------------------------------------------------------------------------

    def due(self, round: int) -> bool:
        """Whether a checkpoint is wanted after this round."""
        return round % self.every == 0 or self._log.bytes > LOG_BUDGET

    def keep(self, state: ServerState) -> None:
        """Write a checkpoint and begin a new log of totals; the last two of either are kept."""
        self._rows += [json.dumps(row) for row in state.history[len(self._rows) :]]
        _save(self.folder, state, f"[{','.join(self._rows)}]")
        if self._log.bytes and state.round >= self.next_round:
            self._log.close()
            self._log = self._new("totals", state.round + 1)
            self._follow()
        _prune(self.folder)

    def close(self) -> None:
        """Close all files; others may open the run."""
        try:
            if self._syncing is not None:
                self._syncing.close()
        finally:
            self._log.close()
            if self._cohorts is not None:
                self._cohorts.close()
            self.ledger.close()

    def _follow(self) -> None:
        if self._syncing is not None:
            self._syncing.follow(self._log.path)

    def _new(self, kind: str, round: int) -> RoundLog:
        return RoundLog(self.folder / log_name(kind, self._session, round))


class PopulationJournal:
    """What a run without a folder writes down: its charges, in the ledger of its population.

    Parameters
    ----------
    population
        The open ledger.
    mechanism
        What one round costs.
    """

    def __init__(self, population: PopulationLedger, mechanism: Mechanism) -> None:
        self.population, self.mechanism = population, mechanism
        self.run = secrets.token_hex(16)
        self._withdrawn: frozenset[int] = frozenset()

    def charge(self, round: int) -> None:
        """Write a round's charge; a spent budget is an error."""
        if self.population.left(self.mechanism) < 1:
            raise BudgetExhaustedError(
                f"the population's budget is spent: round {round} would exceed it, so it is not "
                "released. The model so far is kept; the budget's file says which runs used it"
            )
        self.population.charge(self.run, self.mechanism, round)

    def measurement(self, mechanism: Mechanism) -> frozenset[int]:
        """Charge the measurement before the first round; return who withdrew.

        It is for the rounds: where not one of them fits behind it, it is not made.
        """
        if not self.population.has_room({mechanism: 1, self.mechanism: 1}):
            raise BudgetExhaustedError(NO_MEASUREMENT)
        self.population.charge(self.run, mechanism, None, "measurement")
        self.population.sync()
        return self.population.withdrawn()

    def drawn(self, round: int, users: NDArray[np.int64]) -> None:
        """Nothing: who took part is in no file."""

    def wait(self) -> None:
        """Wait until the charge is on the disk."""
        self.population.sync()

    def log(self, round: int, v: Tensor) -> None:
        """Nothing: a crash loses the run, and not what it cost."""

    def withdrawn(self, round: int) -> frozenset[int] | None:
        """Who has withdrawn, where that changed since it was last asked."""
        users = self.population.withdrawn()
        if users == self._withdrawn:
            return None
        self._withdrawn = users
        return users

    def close(self) -> None:
        """Let go of the ledger."""
        self.population.close()


def begin_state(folder: Path, state: ServerState) -> None:
    """Write the state that a run begins with."""
    _save(folder, state, "[]")


def read_past(folder: Path, simulation: bool, cap: int | None = None) -> Past:
    """Read what a run folder has; a file that is damaged is an error, and nothing is changed.

    With a ``cap`` on participations it has to say who took part in every round.
    """
    odd = [p for kind in ("checkpoint", "totals", "cohorts") for p in _files(folder, kind)]
    odd = [path for path in odd if not path.is_file()]
    if odd:
        raise DamagedError(f"{odd[0]} is not a file; put back what was there")
    kept = _files(folder, "checkpoint")
    if not kept:
        raise DamagedError(f"{folder} has no checkpoint; put back what was taken out of it")
    state, history = load_checkpoint(kept[-1], CLASSES)
    if not isinstance(state, ServerState) or state.round != _round(kept[-1]):
        raise DamagedError(f"{kept[-1]} is not the checkpoint that its name says")
    state = replace(state, history=json.loads(history))
    totals: dict[int, Tensor] = {}
    notes: list[str] = []
    for path in _files(folder, "totals"):
        records, torn = _logged(path, "f")
        for round, v in records:
            if round in totals and not np.array_equal(totals[round].numpy(), v, equal_nan=True):
                raise DamagedError(
                    f"{path} has other totals of round {round} than a log before it: the two are "
                    "not of one run. Put back what was there"
                )
            if round > state.round:
                totals[round] = torch.from_numpy(v)
        if torn:
            notes.append(f"{path.name} ends in the middle of a round, which is left out")
    missing = set(range(state.round + 1, state.round + 1 + len(totals))) - totals.keys()
    if missing:
        raise DamagedError(
            f"{folder} lacks the totals of round {min(missing)}, which were logged before later "
            "ones; put back what was taken out of it"
        )
    past = Past(state, totals, {}, tuple(notes))
    return replace(past, participations=_participations(folder, simulation, past.next_round, cap))


def check_charges(folder: Path, past: Past, ledger: RunLedger) -> list[str]:
    """Refuse a ledger that has less than was released; name the rounds that a crash lost."""
    if ledger.terms is None:
        return []
    unpaid = set(range(1, past.next_round)) - ledger.charged
    if unpaid:
        raise ChainError(
            f"the totals of round {min(unpaid)} were released, and the ledger in {folder} has no "
            "charge for it: lines were taken out of it. Put an intact copy in its place"
        )
    again = "with the same noise" if ledger.simulation else "and charged again"
    return [
        f"round {round} was charged and its totals are not there: it is drawn again {again}"
        for round in sorted(ledger.charged)
        if round >= past.next_round
    ]


def _participations(
    folder: Path, simulation: bool, next_round: int, cap: int | None
) -> dict[int, int]:
    """How often each user took part, as written down; rounds that a crash lost count, too."""
    drawn: dict[int, list[NDArray[np.int64]]] = {}
    for path in _files(folder, "cohorts"):
        for round, users in _logged(path, "i")[0]:
            # A simulation draws a lost round's users again: only the last time counts.
            before = [] if simulation else drawn.get(round, [])
            drawn[round] = [*before, users]
    if simulation:
        drawn = {round: users for round, users in drawn.items() if round < next_round}
    missing = set(range(1, next_round)) - drawn.keys()
    if cap is not None and missing:
        raise DamagedError(
            f"{folder} does not say who took part in round {min(missing)}, and participations are "
            f"capped at {cap}: a log of cohorts was taken out of it (put it back), or the run was "
            "begun without a cap (go on without one)"
        )
    everyone = [users for cohorts in drawn.values() for users in cohorts]
    together = np.concatenate([np.zeros(0, np.int64), *everyone])
    users, counts = np.unique(together, return_counts=True)
    if cap is not None and counts.size and counts.max() > cap:
        raise DamagedError(
            f"by the logs of cohorts in {folder} a user has taken part {counts.max()} times, more "
            f"than the cap of {cap}: resume with the cap that the run was begun with, and without "
            "copies of logs beside them"
        )
    return dict(zip(users.tolist(), counts.tolist(), strict=True))


def _logged(path: Path, kind: str) -> tuple[list[Record], bool]:
    """A log's records, and whether a torn one follows; they go on from the round in its name."""
    records, torn = read_rounds(path)
    for expected, (round, numbers) in enumerate(records, start=_round(path)):
        if (round, numbers.dtype.kind) != (expected, kind):
            raise DamagedError(
                f"{path} has a record of round {round}, {numbers.dtype} numbers, in the place of "
                f"round {expected}: that is not what was written there. Put an intact copy in its "
                "place; nothing was changed"
            )
    return records, torn


def _save(folder: Path, state: ServerState, history: str) -> None:
    path = folder / checkpoint_name(state.round)
    save_checkpoint(path, replace(state, history=[]), history)


def _prune(folder: Path) -> None:
    """Remove all checkpoints but the last two, and the logs that neither of them needs."""
    *old, before, _ = [None, None, *_files(folder, "checkpoint")]
    for path in old:
        if path is not None:
            path.unlink()
    logs = _files(folder, "totals")
    for path, following in pairwise(logs):
        if before is not None and _round(following) <= _round(before) + 1:
            path.unlink()


def _files(folder: Path, kind: str) -> list[Path]:
    """The files of a kind in the order in which they were written.

    Anything else, e.g. a copy that somebody made under another name, is not the run's.
    """
    named = [(path, NUMBERED.fullmatch(path.name)) for path in folder.iterdir()]
    return sorted((path for path, name in named if name and name["kind"] == kind), key=_place)


def _place(path: Path) -> tuple[int, int]:
    """The session and the round in a file's name: of a checkpoint its own, of a log the first."""
    name = NUMBERED.fullmatch(path.name)
    assert name is not None  # `_files` found it by that
    return int(name["session"] or 0), int(name["round"])


def _round(path: Path) -> int:
    return _place(path)[1]
