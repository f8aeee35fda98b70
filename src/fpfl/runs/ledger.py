"""A run's ledger: every charge is written here, and on the disk, before what it pays for is used.

Two regimes:

- as planned: the settings were fixed before the run, so the plan's own accountant (PLD for Poisson
  cohorts) gives ε of all T rounds, and the ledger counts up to T charges;
- filtered: the settings were changed, or T raised, by someone who had seen released totals. Then a
  privacy filter at a Rényi order that was fixed before the run decides whether a round still fits
  into the budget that was fixed then, and the budget is what is promised.

A charge is never taken back. A round that was charged and then lost (a crash before its totals were
written down) is charged again when it is drawn again with fresh noise. A seeded simulation draws
the same noise again, so the second charge would pay for the same release: it is not made.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fpfl.privacy.assumptions import ALONE
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism, PrivacyFilter, ServerLimit, Terms
from fpfl.store.chain import Chain, ChainError
from fpfl.store.files import sync_folder

NO_MEASUREMENT = (
    "the population's budget is spent: the measurement of the inputs and a round would exceed it, "
    "so nothing is released; the budget's file says which runs used it"
)

LOST_MEASUREMENT = (
    "the measurement of the inputs was made, and a line of the run's ledger was cut off before it "
    "was whole: what is left of it may have the figures. A second measurement is not in what this "
    "run may cost, so nothing is released; start a new run, which is charged for its own"
)

LOST_SUM = (
    "the sum of the inputs' measurement was about to be opened once, in an attempt that failed "
    "later: it counts as released. A second one is not in what this run may cost, so nothing is "
    "released; start a new run, which is charged for its own"
)


class CopiedRunError(ValueError):
    """A run folder that may be a copy, resumed where the original could be, too."""


class RunLedger:
    """The open ledger of one run; `create` or `open` makes it.

    ``terms`` is None for a run without privacy, whose ledger has no charges. ``simulation`` says
    that the noise is seeded.
    """

    def __init__(self, chain: Chain, population: PopulationLedger | None) -> None:
        self.chain = chain
        self.population = population
        first = chain.records[0]
        if not {"run", "simulation", "terms"} <= first.keys():
            raise ChainError(f"{chain.path} is not the ledger of a run; name a run's own")
        self.run: str = first["run"]
        self.simulation: bool = first["simulation"]
        # Of runs that were begun before it was kept to there is nothing here.
        self.contributions: str | None = first.get("contributions")
        terms = first["terms"]
        self.terms = None if terms is None else Terms.from_dict(terms)
        self.charges: dict[Mechanism, int] = {}
        self.charged: set[int] = set()
        self.changes: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.measurements: list[dict[str, Any]] = []
        self.scaling: dict[str, Any] | None = None
        self._moved = False
        self._torn = 0
        self._opening = False
        self._charge_lines = 0
        self._mechanism = self.terms.mechanism if self.terms else None
        self._rounds = self.terms.rounds if self.terms else 0
        for record in chain.records:
            self._take(record)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        run: str,
        terms: Terms | None,
        simulation: bool,
        population: PopulationLedger | None = None,
    ) -> RunLedger:
        """Begin the ledger of a new run: whole with its first record, or not there."""
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        chain = Chain.create(
            part,
            run=run,
            simulation=simulation,
            terms=terms.as_dict() if terms else None,
            population=population is not None,
            contributions=ALONE,
        )
        try:
            chain.lock()
            chain.append("place", folder=_identity(part))
            chain.sync()
            os.link(part, path)  # unlike a rename, it fails where there is a ledger already
        except BaseException:
            chain.close()
            raise
        part.unlink()
        sync_folder(path.parent)
        chain.path = path
        return cls(chain, population)

    @classmethod
    def open(
        cls, path: Path, *, population: PopulationLedger | None = None, moved: bool = False
    ) -> RunLedger:
        """Open the ledger of a run that is to be resumed; nobody else may have it open.

        ``moved`` says that the folder was moved (or restored) and that no other copy of it will
        be resumed.
        """
        ledger = cls.look(path)
        try:
            ledger.hold(moved=moved)
            ledger.go_on_writing(population)
        except BaseException:
            ledger.chain.close()
            raise
        return ledger

    @classmethod
    def of_finished(cls, path: Path, *, moved: bool = False) -> RunLedger:
        """Open the ledger of a finished run to record what is released about its model."""
        ledger = cls.look(path)
        try:
            ledger.to_evaluate(moved=moved)
        except BaseException:
            ledger.chain.close()
            raise
        return ledger

    @classmethod
    def look(cls, path: Path) -> RunLedger:
        """Read a ledger without a lock, to look at; nothing is written."""
        with Chain.open(path, write=False) as chain:
            return cls(chain, None)

    def hold(self, *, moved: bool = False, patience: float = 0.0) -> None:
        """Hold the file that was looked at for this process alone; nothing is written yet.

        The lines that were read are not read again. ``patience`` is how many seconds to wait for
        another process that has it.
        """
        for record in self.chain.hold(patience):
            self._take(record)
        self._check_copy(self.chain.path, moved)
        self._moved = moved

    def go_on_writing(self, population: PopulationLedger | None = None) -> None:
        """Begin to write to the file that is held, and to the population's, which agree first."""
        self.population = population
        for record in self.chain.mend():
            self._take(record)
        self._check_population()

    def to_evaluate(self, *, moved: bool = False) -> None:
        """Begin to write to the ledger of a finished run that was looked at."""
        self.hold(moved=moved)
        for record in self.chain.mend():
            self._take(record)
        if moved:
            self.chain.append("place", folder=_identity(self.chain.path))

    @property
    def mechanism(self) -> Mechanism | None:
        """What one round costs now; None without privacy."""
        return self._mechanism

    @property
    def planned(self) -> int:
        """T as it was planned, or last changed to: what ε is about, however few rounds are run."""
        return self._rounds

    @property
    def spent(self) -> int:
        """How many rounds have been charged, lost ones included."""
        return sum(self.charges.values())

    @property
    def filter(self) -> PrivacyFilter | None:
        """The privacy filter, once settings were changed; None as long as all goes as planned."""
        return self._filter() if self.changes else None

    @property
    def server(self) -> ServerLimit | None:
        """The filter on what a server sees that knows the cohorts, once settings were changed."""
        if not self.changes or self.terms is None:
            return None
        return ServerLimit.of(self.terms, self._filter())

    @property
    def finished(self) -> bool:
        """Whether the run ended and was not resumed since."""
        ends = [r["kind"] for r in self.chain.records if r["kind"] in ("open", "resume", "finish")]
        return bool(ends[-1] == "finish")

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings that the run went on with last; None where it was never resumed."""
        resumed = [r["settings"] for r in self.chain.records if r["kind"] == "resume"]
        return resumed[-1] if resumed else None

    def resume(
        self, path: Path, next_round: int, notes: list[str], settings: dict[str, Any]
    ) -> None:
        """Record that the run goes on from a round, and with which settings."""
        self.chain.append("place", folder=_identity(path))
        self.chain.append("resume", round=next_round, notes=notes, settings=settings)
        self.chain.sync()

    def go_on(self, mechanism: Mechanism, rounds: int, cap: int | None, what: list[str]) -> None:
        """Put a run that goes on under the filter, where a round, or T, costs other than planned.

        Composition is adaptive: what the users are asked may depend on all that was released. So
        a learning rate, say, may be changed at will. What one round costs, and how many rounds
        there are, the plan's accountant takes as fixed in advance; fewer rounds are fine.
        """
        if self.terms is None or self._mechanism is None:
            raise ValueError(
                "the run was begun without privacy and cannot go on with it: start a new one"
            )
        if cap != self.terms.cap:
            raise ValueError(
                f"the run was begun with max_participations={self.terms.cap}, which its ε rests "
                f"on, and cannot go on with {cap}: start a new run"
            )
        if mechanism == self._mechanism and rounds <= self._rounds:
            return
        old = self.terms.mechanism
        if (mechanism.neighbours, mechanism.population) != (old.neighbours, old.population):
            raise ValueError(
                f"the run was begun for {old.neighbours} neighbours and {old.population} users; it "
                f"cannot go on with {mechanism.neighbours} and {mechanism.population}: start a new "
                "run, with a population ledger that adds them up"
            )
        room, left = self._filter().room(self.all_charges, mechanism), self._rounds - self.spent
        if room <= left and not self.changes:
            raise ValueError(
                f"under the privacy filter that other rounds or noise need, the budget of "
                f"ε = {self.terms.budget:g} has room for {room} more rounds, and as planned there "
                f"are {left}: go on as planned. (A filter costs more than a plan; a run that may "
                "be changed later needs Privacy(budget=...) from the beginning)"
            )
        record = {"mechanism": mechanism.as_dict(), "rounds": rounds, "what": what}
        self.chain.append("change", **record)
        self.chain.sync()
        self._take({"kind": "change", **record})

    def check(self, round: int) -> None:
        """Raise where the charge of a round would be refused; nothing is written."""
        if self._mechanism is None or (self.simulation and round in self.charged):
            return
        self._check_room(round)

    def charge(self, round: int) -> None:
        """Write the charge of a round, or refuse it; not yet synced."""
        if self._mechanism is None:
            return
        if self.simulation and round in self.charged:
            return
        self._check_room(round)
        self.chain.append("charge", round=round)
        self._take({"kind": "charge", "round": round})
        if self.population is not None:
            self.population.charge(self.run, self._mechanism, round)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that charges are written to, for whoever syncs them."""
        mine = self.chain.descriptor
        return (mine,) if self.population is None else (mine, self.population.descriptor)

    def withdrawal(self, round: int, users: int) -> None:
        """Record that so many users have withdrawn and are left out from a round on."""
        self.chain.append("withdrawal", round=round, users=users)

    def evaluation(
        self, mechanism: Mechanism, epsilon: float, delta: float, model: str | None = None
    ) -> None:
        """Charge the one private evaluation of a model, on held-out users, before it is released.

        ``model`` is the digest of its file. A run that was resumed, and ended with another model,
        may be evaluated again: that is a further release, and costs as much again.
        """
        known = self._evaluated(model)
        if known is not None:
            raise BudgetExhaustedError(
                f"this run was evaluated privately already (ε = {known['epsilon']:g} at "
                f"δ = {known['delta']:g}), and has had the same model since; a second release "
                "would cost as much again and is not made. Use the figures that were released"
            )
        record = {
            "mechanism": mechanism.as_dict(),
            "epsilon": epsilon,
            "delta": delta,
            "model": model,
        }
        self.chain.append("evaluation", **record)
        self._take({"kind": "evaluation", **record})
        self.chain.sync()

    def measurement(self, mechanism: Mechanism, epsilon: float, delta: float) -> None:
        """Charge the one private measurement of the run's own users, before it is released.

        The population's ledger first, where the run has it open: what that refuses is written down
        nowhere. A measurement that was charged and then lost (a crash before it was written down)
        stays charged, and is not made again.
        """
        if self.measurements:
            known = self.measurements[0]
            raise BudgetExhaustedError(
                f"this run has charged a measurement already (ε = {known['epsilon']:g} at "
                f"δ = {known['delta']:g}); a second release would cost as much again and is not "
                "made. Use the figures that were released; if a crash lost them, measure apart "
                "from this run, charged to the population's ledger"
            )
        own = self.terms.mechanism if self.terms else None
        if own is not None and (own.population, own.neighbours) != (
            mechanism.population,
            mechanism.neighbours,
        ):
            raise ValueError(
                f"the run is about {own.population:,} users with {own.neighbours!r} neighbours, "
                f"and the measurement about {mechanism.population:,} with "
                f"{mechanism.neighbours!r}; measure the same users in the same way"
            )
        if self.population is not None:
            self.population.charge(self.run, mechanism, None, "measurement")
            self.population.sync()
        record = {"mechanism": mechanism.as_dict(), "epsilon": epsilon, "delta": delta}
        self.chain.append("measurement", **record)
        self._take({"kind": "measurement", **record})
        self.chain.sync()

    def check_opening(self) -> None:
        """Raise where the sum of the measurement counts as opened, and was not written down."""
        # A simulation draws the same noise, and releases the same figures again.
        if self._opening and self.scaling is None and not self.simulation:
            raise BudgetExhaustedError(LOST_SUM)

    def charge_scaling(self, *, opened: bool = False) -> None:
        """Charge the population for the measurement before the first round; before it is made.

        A run that is resumed charges it where nothing was written down of it: a release that no
        process outlived was seen by nobody, and is the one that was charged then. Of a folder that
        was restored one cannot know that: the run that it is a copy of may have gone on, with
        other figures. Nor where a line was torn, which others may have read.

        ``opened`` says that others have a part in opening the sum, as in a federation: then a line
        of the run's own says before that it will be, and it is never opened again.
        """
        mechanism = self.terms.measurement if self.terms else None
        if mechanism is None or self.scaling is not None:
            raise ValueError(
                "this run has no measurement to charge: it was planned without one, or has made it"
            )
        assert self._mechanism is not None  # a run with terms is private
        self.check_opening()
        charged = self.population is None or self._scaling_charges(mechanism) > 0
        # A simulation draws the same noise, and releases the same figures again.
        if self._torn and charged and not self.simulation:
            raise BudgetExhaustedError(LOST_MEASUREMENT)
        again = self._moved and not self.simulation
        if self.population is not None and (again or not charged):
            if not self.population.has_room({mechanism: 1, self._mechanism: 1}):
                raise BudgetExhaustedError(NO_MEASUREMENT)
            self.population.charge(self.run, mechanism, None, "measurement")
            self.population.sync()
        if opened:
            self.chain.append("opening", mechanism=mechanism.as_dict())
            self._take({"kind": "opening"})
            self.chain.sync()

    def _scaling_charges(self, mechanism: Mechanism) -> int:
        """How many charges of it the population has that nothing else here accounts for."""
        assert self.population is not None
        others = [Mechanism.from_dict(record["mechanism"]) for record in self.measurements]
        return max(0, self.population.charged(self.run, mechanism) - others.count(mechanism))

    def record_scaling(self, scaling: dict[str, Any], *, measured: bool) -> None:
        """Write down how inputs are scaled, on the disk, before anything is computed with it.

        What was measured is written together with its charge, in one line: there is no time at
        which the one is known and the other is not.
        """
        mechanism = self.terms.measurement if self.terms and measured else None
        record: dict[str, Any] = {
            "mechanism": None if mechanism is None else mechanism.as_dict(),
            "scaling": scaling,
        }
        if mechanism is not None and self.population is not None:
            charges = self._scaling_charges(mechanism)
            record |= {"charges": charges} if charges > 1 else {}  # of a folder that was restored
        self.chain.append("scaling", **record)
        self._take({"kind": "scaling", **record})
        self.chain.sync()

    @property
    def all_charges(self) -> dict[Mechanism, int]:
        """How often each mechanism was charged, with the measurement before the first round.

        That counts from the beginning: what a filter has room for must not depend on whether it
        was made yet.
        """
        before = self.terms.measurement if self.terms else None
        return self.charges if before is None else _plus_one(self.charges, before)

    def finish(self, rounds: int, stopped: str | None) -> None:
        """Record that the run ended after so many rounds, and that its result was saved."""
        self.chain.append("finish", rounds=rounds, stopped=stopped)
        self.chain.sync()

    def close(self) -> None:
        """Let others open the ledger."""
        self.chain.close()
        if self.population is not None:
            self.population.close()

    def __enter__(self) -> RunLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        # What is left of a torn line may have been a charge; a simulation will make it again.
        count = 1 if kind == "charge" else 0
        if kind == "torn" and not self.simulation:
            count = record["lines"]
        if kind == "torn" and self.scaling is None:
            self._torn += record["lines"]
        if self._mechanism is not None and count:
            self.charges[self._mechanism] = self.charges.get(self._mechanism, 0) + count
            if kind == "charge":
                self._charge_lines += 1
                self.charged.add(record["round"])
        elif kind == "change":
            self._mechanism = Mechanism.from_dict(record["mechanism"])
            self._rounds = record["rounds"]
            self.changes.append(record)
        elif kind == "evaluation":
            self.evaluations.append(record)
        elif kind == "measurement":
            self.measurements.append(record)
        elif kind == "opening":
            self._opening = True
        elif kind == "scaling":
            self.scaling = record
            # The population's ledger has a charge for it, too.
            self._charge_lines += record.get("charges", 1) if record["mechanism"] else 0

    def _evaluated(self, model: str | None) -> dict[str, Any] | None:
        """The private evaluation of the model that the run ended with last; None: not yet."""
        ended = False
        for record in reversed(self.chain.records):
            if record["kind"] == "evaluation" and (not ended or record.get("model") == model):
                return record
            ended = ended or record["kind"] == "finish"
        return None

    def _check_room(self, round: int) -> None:
        assert self._mechanism is not None
        if not self.changes:
            if self.spent >= self._rounds:
                raise BudgetExhaustedError(
                    f"the budget is spent: all {self._rounds} planned rounds have been charged, "
                    f"some of them for rounds that a crash lost, so round {round} is not released. "
                    "The model so far is kept"
                )
        else:
            rounds = _plus_one(self.charges, self._mechanism)
            more = _plus_one(self.all_charges, self._mechanism)
            limit = self._filter()
            if not limit.fits(more):
                raise BudgetExhaustedError(
                    f"the budget is spent: round {round} would exceed ε = {limit.epsilon:g} at "
                    f"δ = {limit.delta:g}, fixed before the run (privacy filter, Rényi order "
                    f"{limit.order}), so it is not released. The model so far is kept"
                )
            server = self.server
            # Where noise comes in shares, the filter above is the server's as well.
            shares = self._mechanism.sampler in ("coins", "all")
            # Its limit has the measurement besides.
            if server is not None and not shares and not server.fits(rounds):
                raise BudgetExhaustedError(
                    f"the budget is spent: against a server that knows the cohorts round {round} "
                    f"would exceed ε = {server.epsilon:g} at δ = {server.delta:g}, fixed before "
                    "the run, so it is not released. The model so far is kept"
                )
        if self.population is not None and self.population.left(self._mechanism) < 1:
            raise BudgetExhaustedError(
                f"the population's budget is spent: round {round} would exceed it, so it is not "
                "released. The model so far is kept; the budget's file says which runs used it"
            )

    def _filter(self) -> PrivacyFilter:
        terms = self.terms
        if terms is None or terms.budget is None or terms.order is None:
            raise ValueError(
                "this run was begun without a budget for changed settings (dp-accounting was not "
                "installed there): go on with the settings it was begun with"
            )
        return PrivacyFilter(terms.budget, terms.delta, terms.order)

    def _check_copy(self, path: Path, moved: bool) -> None:
        places = [r for r in self.chain.records if r["kind"] == "place"]
        if not places:  # both lines were there before the file was
            raise ChainError(
                f"{path} has no line that says where the run is: lines were taken out of it. Put "
                "an intact copy in its place"
            )
        last = places[-1]
        if last["folder"] != _identity(path) and not moved:
            raise CopiedRunError(
                f"{path.parent} is not the folder that this run was written to: it was copied, "
                "moved to another disk or restored. If a copy and the original both go on, users "
                "pay twice and neither ledger knows. If no other copy will be resumed, say so: "
                "fpfl resume --moved (RunFolder(..., moved=True))"
            )

    def _check_population(self) -> None:
        if self.chain.records[0]["population"] and self.population is None:
            raise ValueError(
                "this run was begun with a population ledger; name the same file to resume it"
            )
        if self.population is None:
            return
        known = self.population.charged_rounds(self.run)
        # What was measured on the run's account (`fpfl measure --run`) was charged by its name.
        apart = [Mechanism.from_dict(record["mechanism"]) for record in self.measurements]
        mine = self._charge_lines + sum(self.population.charged(self.run, m) > 0 for m in apart)
        # A measurement is charged to the population first: a crash then left it to be made.
        planned = self.terms.measurement if self.terms else None
        if planned is not None and self.scaling is None:
            mine += self._scaling_charges(planned)
        # One more or less is a crash between the two files, before anything was released.
        if known > mine + 1:
            raise CopiedRunError(
                f"the population's ledger has {known} charges of this run, the run's own has "
                f"{mine}: this folder is an old copy, and another one went on. Resume that one"
            )
        if mine > known + 1:
            raise ChainError(
                f"the population's ledger has {known} charges of this run, the run's own has "
                f"{mine}: lines were taken out of the population's file. Put an intact copy of it "
                "in its place"
            )
        if self._mechanism is None:
            return
        if known > mine:
            self.chain.append("charge", round=0)
            self._take({"kind": "charge", "round": 0})
        elif mine > known:
            # Where its budget is spent, the next round will say so.
            with suppress(BudgetExhaustedError):
                self.population.charge(self.run, self._mechanism, None, "charge lost in a crash")
                self.population.sync()


def _plus_one(charges: dict[Mechanism, int], mechanism: Mechanism) -> dict[Mechanism, int]:
    return charges | {mechanism: charges.get(mechanism, 0) + 1}


def _identity(path: Path) -> list[int]:
    """What a copy does not have in common: the file system's numbers for folder and ledger."""
    return [path.parent.stat().st_ino, path.stat().st_ino]
