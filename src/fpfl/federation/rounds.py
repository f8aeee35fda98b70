r"""A federation over a network, as the server's loop sees it: something that can release a round.

Keys and shares of many rounds are dealt in two exchanges. The first is a roll call of all nodes
that can be reached (or, where the server picks, of those that it picked): who shows no credential
and no key to it takes part in nothing and counts for nothing. One attempt at a round is then one of
the sessions that were dealt, two exchanges: the nodes send their masked vectors, and then what
takes the masks off the sum. What goes wrong on the way, a node that is gone, late or says something
wrong, is that node's dropping out. An attempt is given up when too few are left, which depends on
who answered and never on any value; the next one has fresh keys, masks, coins and noise.

It is dealt again when the sessions run out, after an attempt that was given up, and after `SOON`
rounds where somebody who can be reached is not in the dealing or did not answer: a node that has
lost what it was dealt, or is new, waits that long.

The charge is in the ledger, on the disk, before the first request to unmask leaves. From then on
the sum counts as released: an attempt that fails later has been paid for, and the next one is paid
for again.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fpfl.aggregation.noise import SeededNoise, SystemNoise
from fpfl.data.inputs import Found, Scaling, scaling_of
from fpfl.fairness.totals import Weights
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import broadcast
from fpfl.federation.node import RUN_BYTES
from fpfl.federation.secagg import (
    Abandoned,
    Aggregation,
    Credential,
    Deal,
    Dealing,
    Invalid,
    Message,
    Refused,
    Trust,
)
from fpfl.federation.secagg.server import Exchange, read_advert
from fpfl.federation.secagg.session import MOST_SESSIONS
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism
from fpfl.runs.folder import EXCLUDED, RunFolder, is_begun, read_excluded
from fpfl.runs.journal import Journal
from fpfl.runs.ledger import LOST_SUM, RunLedger
from fpfl.runs.resume import Kept
from fpfl.server.loop import Callback
from fpfl.server.ranks import Ranks
from fpfl.server.state import Past
from fpfl.store.files import write_whole
from fpfl.training.run import Run
from fpfl.training.session import conduct

log = logging.getLogger("fpfl.federation")

SOON = 5
"""After so many rounds of a dealing those that are missing in it are called again."""

DEALT_BYTES = 2**20
"""About so long is the longest message of a dealing: it says for how many rounds is dealt."""
_EACH = 160  # bytes of a session and a holder: two sealed shares, two commitments

LISTED = 10
"""So many names are written into a line of the log."""


class FederationError(RuntimeError):
    """A round could not be finished; what is written down stays, and a run can go on later."""


class Courier(Protocol):
    """Carries messages to nodes and back."""

    def nodes(self, enough: int, timeout: float) -> list[int]:
        """The nodes that can be reached, as soon as there are enough, or when the time is over."""
        ...

    def exchange(
        self, requests: Mapping[int, Message], timeout: float
    ) -> Iterable[tuple[int, Message]]:
        """Send each node its request; what comes back in time, from whom, in any order.

        A node that has nothing to say, or fails, has no answer here.
        """
        ...


@dataclass
class Dealt:
    """A dealing that rounds are taken from: where its members are, and which session is next."""

    deal: Deal
    places: dict[str, int]
    next: int = 0
    missing: set[int] = field(default_factory=set)
    """Nodes that were asked for something after it and gave no answer that counts."""

    @property
    def left(self) -> int:
        """How many sessions were not played."""
        return self.deal.dealing.sessions - self.next


@dataclass
class Federated:
    """Releases rounds by secure aggregation over a network.

    Parameters
    ----------
    agreement
        What was agreed.
    courier
        Carries the messages.
    authority
        The authority that enrolled the nodes, and whom it revoked.
    run
        What tells this run from all others.
    past, journal
        What is kept of the run, where it is.
    folder
        Where the run is written down, if anywhere: there it is kept who is left out.
    """

    agreement: Agreement
    courier: Courier
    authority: Trust
    run: bytes
    past: Past | None = None
    journal: Journal | None = None
    folder: Path | None = None
    names: dict[int, str] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    opened: list[int] = field(default_factory=list)
    """The rounds of all sums that were opened, where no ledger counts them."""
    suspects: set[str] = field(default_factory=set)
    """Those that spoilt attempts at this round, or whom others made seem so."""
    spoilers: set[str] = field(default_factory=set)
    """Those among them that cost a sum: they are suspects in all rounds that follow."""
    doubted: set[int] = field(default_factory=set)
    """Those that were called and showed no keys that count."""
    dealt: Dealt | None = None
    scaling: Scaling | None = None
    """How nodes are to scale their inputs, once it is known."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            self.excluded |= set(read_excluded(self.folder))

    def release(
        self, round: int, w: Tensor, weights: Weights | None = None, level: int | None = None
    ) -> Tensor:
        """Run one round at w; one that was released before a run was resumed is not run again."""
        if self.past is not None:
            known = self.past.totals.get(round)
            if known is not None:
                return known.to(w.device, w.dtype)
        sent = self.scaling if self.agreement.measured is not None else None
        total = self._summed(round, broadcast(round, w, weights, level, sent))
        _, encoding = self.agreement.at(level)
        v = self._noised(encoding.decoded(total, round), round, level).to(w.dtype)
        if self.journal is not None:
            self.journal.log(round, v)
        return v

    def scale(self) -> Scaling | None:
        """How inputs are scaled: as was written down, or measured now; None where they are not.

        What was measured is written down before anything is computed with it, and a run that goes
        on reads it there.
        """
        inputs = self.agreement.inputs
        ledger = None if self.journal is None else self.journal.ledger
        if ledger is not None:
            self._check_begun(ledger)
        if inputs is None:
            return None
        plain = scaling_of(inputs.columns, inputs.size)
        if ledger is not None and ledger.scaling is not None:
            self.scaling = Scaling.from_dict(ledger.scaling["scaling"])
            if _by_columns(plain) != _by_columns(self.scaling):
                raise FederationError(
                    f"the run in {self.folder} has scaled other columns than these: start it again "
                    "with the schema that it was begun with"
                )
            return self.scaling
        found = self._measured() if inputs.measured else {}
        self.scaling = scaling_of(inputs.columns, inputs.size, found)
        if ledger is not None:
            ledger.record_scaling(self.scaling.as_dict(), measured=inputs.measured)
        return self.scaling

    def _check_begun(self, ledger: RunLedger) -> None:
        """Refuse a run that was begun with another measurement, or with other inputs."""
        plan, inputs = self.agreement.plan, self.agreement.inputs
        before = ledger.terms.measurement if ledger.terms else None
        mine = None if plan is None else Mechanism.measurement_of(plan)
        if before != mine:
            noise = [None if each is None else each.noise_multiplier for each in (before, mine)]
            raise FederationError(
                f"the run in {self.folder} was begun with a measurement of the noise multiplier "
                f"{noise[0]}, and now it is {noise[1]}; what it costs is fixed. Go on with "
                f"Privacy(measurement={noise[0]}), or start a new run"
            )
        going = self.past is not None and self.past.next_round > 1
        if (inputs is None and ledger.scaling is not None) or (
            inputs is not None and ledger.scaling is None and going
        ):
            raise FederationError(
                f"the run in {self.folder} was begun {'with' if inputs is None else 'without'} "
                "scaled inputs: go on with the measure and columns that it was begun with"
            )

    def _measured(self) -> dict[str, Found]:
        """Round 0, and what it says of the columns."""
        agreement = self.agreement
        measured, (encoding, bits) = agreement.measured, agreement.encodings(0)
        assert measured is not None  # or there is no round 0
        total = encoding.decoded(self._summed(0, {"round": 0}), 0)
        if bits is None:
            seed = agreement.test_seed
            source = SystemNoise() if seed is None else SeededNoise(seed)
            total = measured.noised(total, encoding, source)
            return measured.found(total, measured.server_stddev)
        return measured.found(total, float(encoding.noise_stddev(agreement.asked, bits)[0]))

    def _summed(self, round: int, said: Mapping[str, Any]) -> NDArray[np.uint32]:
        """The sum of a round in the ring; what is tried again is dealt anew."""
        failures = []
        for attempt in range(1, self.agreement.attempts + 1):
            self._check_room(round)
            try:
                total = self._attempt(round, said)
                self.suspects = set(self.spoilers)
                return total
            except Abandoned as failure:
                log.warning("round %d, attempt %d was abandoned: %s", round, attempt, failure)
                failures.append(str(failure))
                self.dealt = None  # whoever lost what it was dealt gets new keys
                if failure.suspect is not None:
                    self.suspects.add(failure.suspect)
                    if failure.unmask_sent:
                        self.spoilers.add(failure.suspect)
                if failure.culprit is not None:
                    # It broke the protocol for all to see, and would again.
                    self._exclude(failure.culprit)
        raise FederationError(
            f"round {round} was abandoned {len(failures)} times, at last because {failures[-1]} "
            "What was released stays: start the run again when more nodes can be reached, and it "
            "goes on from here"
        )

    def _exclude(self, name: str) -> None:
        """Leave a node out from now on, also when the run is started again."""
        log.warning("%s is left out from now on", name)
        self.excluded.add(name)
        if self.folder is not None:
            said = json.dumps(sorted(self.excluded), indent=1).encode() + b"\n"
            write_whole(self.folder / EXCLUDED, said)

    # --- one attempt --------------------------------------------------------------------------

    def _attempt(self, round: int, said: Mapping[str, Any]) -> NDArray[np.uint32]:
        """Σ of the survivors' vectors."""
        dealt, there = self._ready(round)
        place, dealt.next = dealt.next, dealt.next + 1
        names = {name for name, node in dealt.places.items() if node in there} - self.excluded
        names = {name for name in names if self._counts(dealt.deal, name)}
        aggregation = Aggregation(dealt.deal, place, said, names)
        lost: set[str] = set()
        while aggregation.step != "done":
            step = aggregation.step
            if step == "unmask":
                self._charge(round)
            self._play(aggregation, f"round {round}", dealt.places)
            if gone := aggregation.dropped.get(step):
                log.warning("round %d: lost in %r: %s", round, step, gone)
                lost |= set(gone)
        dealt.missing -= {dealt.places[name] for name in aggregation.survivors}
        dealt.missing |= {dealt.places[name] for name in lost}
        log.info("round %d: the sum of %d nodes", round, len(aggregation.survivors))
        return aggregation.total()

    def _counts(self, deal: Deal, name: str) -> bool:
        """Whether a member's credential counts still: it was looked at when keys were dealt."""
        try:
            Credential.verified(deal.adverts[name].credential, self.authority)
        except Invalid as error:
            log.warning("%s is refused: %s", name, error)
            return False
        return True

    def _play(self, exchange: Exchange, what: str, places: Mapping[str, int]) -> None:
        """One step: ask, take what comes, close."""
        step, begun = exchange.step, time.monotonic()
        requests = exchange.requests()
        asked = len(requests)
        log.info("%s: %r: waiting for %s", what, step, _listed(requests))
        sent = {places[name]: request for name, request in requests.items()}
        late = False
        for node, answer in self.courier.exchange(sent, self.agreement.timeout):
            self._take(exchange, node, answer)
            if not late and 2 * len(exchange.waiting) <= asked and len(exchange.waiting) > 0:
                late = True  # once, when half of them have answered
                log.info("%s: %r: still waiting for %s", what, step, _listed(exchange.waiting))
        answered, seconds = asked - len(exchange.waiting), time.monotonic() - begun
        log.info("%s: %r: %d of %d answered in %.1f s", what, step, answered, asked, seconds)
        exchange.close_step()

    # --- dealing ------------------------------------------------------------------------------

    def _ready(self, round: int) -> tuple[Dealt, set[int]]:
        """A dealing with a session left, and who can be reached now."""
        dealt, agreement = self.dealt, self.agreement
        if dealt is not None and dealt.left and dealt.deal.dealing.size == self._size(round):
            there = set(self.courier.nodes(agreement.aggregation.least, agreement.timeout))
            members = set(dealt.places.values())
            complete = there <= members - dealt.missing
            few = len(there & members) < agreement.aggregation.least
            if not few and (complete or dealt.next < SOON):
                return dealt, there & members
        self.dealt = self._deal(round)
        return self.dealt, set(self.dealt.places.values())

    def _deal(self, round: int) -> Dealt:
        """Call everybody, and deal keys and shares for the rounds that are left."""
        dealing = self._dealing(round)
        what = f"dealing for {dealing.sessions} rounds"
        answers, places = self._called(dealing, what)
        names = self._first(answers)
        deal = Deal(dealing, self.authority, names, self.agreement.asked)
        for name in names:
            self._take(deal, places[name], answers[name])
        deal.close_step()
        self._play(deal, what, places)
        if gone := deal.dropped["share"]:
            log.warning("%s: lost in 'share': %s", what, gone)
        missing = {places[name] for name in deal.dropped["share"]} | self.doubted
        return Dealt(deal, {name: places[name] for name in deal.members}, missing=missing)

    def _size(self, round: int) -> int:
        return self.agreement.encodings(round)[0].size

    def _dealing(self, round: int) -> Dealing:
        agreement = self.agreement
        graph = agreement.graph  # whoever is there, or says so
        holders = agreement.asked if graph.degree is None else graph.degree + 1
        fitting = min(MOST_SESSIONS, max(1, DEALT_BYTES // (_EACH * holders)))
        return Dealing(
            run=self.run + agreement.fingerprint,
            # Never the same again, not even by a server that was started anew.
            number=secrets.randbelow(2**62),
            # Where the server picks, every round has other nodes; the measurement has its own size.
            sessions=1
            if self._picks or not round
            else max(1, min(agreement.rounds - round + 1, fitting)),
            size=self._size(round),
            threshold=graph.threshold,
            least=agreement.aggregation.least,
            degree=graph.degree,
        )

    def _called(self, dealing: Dealing, what: str) -> tuple[dict[str, Message], dict[str, int]]:
        """The roll call: what those answered that are who they say, by name, and where they are.

        Strangers are asked, once, and not waited for any longer than the others; whoever comes
        later is called, too, until there are enough.
        """
        agreement, least = self.agreement, self.agreement.aggregation.least
        # In the beginning all are waited for, later no more than it takes.
        enough = least if self.names else agreement.asked
        # Where the server picks, others take the places of those that show no keys.
        wanted = agreement.asked if self._picks else enough
        answers: dict[str, Message] = {}
        places: dict[str, int] = {}
        asked: set[int] = set()
        request = dealing.to_message()
        end = time.monotonic() + agreement.timeout
        while True:
            strangers = len(asked) - len(places)
            left = max(0.0, end - time.monotonic()) if len(answers) < enough else 0.0
            there = self.courier.nodes(enough + strangers, left)
            nodes = self._next(set(there) - asked, agreement.asked - len(places))
            if not nodes:
                break
            asked |= set(nodes)
            waiting = {node for node in nodes if node not in self.doubted}
            self.doubted.update(nodes)
            log.info("%s: roll call: %d nodes are asked", what, len(nodes))
            sent = dict.fromkeys(nodes, request)
            for node, answer in self.courier.exchange(sent, agreement.timeout):
                waiting.discard(node)
                self._called_by(dealing, node, answer, answers, places)
                # Those that were strangers before are not waited for.
                if len(answers) == agreement.asked or (len(answers) >= least and not waiting):
                    break
            if len(answers) >= wanted:
                break
        log.info("%s: roll call: %d of %d are enrolled", what, len(answers), len(asked))
        if len(answers) < least:
            raise Abandoned(
                f"{len(answers)} nodes of the federation can be reached, and {least} must be.",
                False,
                0,
            )
        return answers, places

    @property
    def _picks(self) -> bool:
        """Whether the server picks who takes part in a round."""
        privacy = self.agreement.privacy
        return privacy is not None and privacy.convention == "picked"

    def _next(self, nodes: set[int], wanted: int) -> list[int]:
        """Whom to call: everybody, or as many as are wanted where the server picks."""
        found = sorted(node for node in nodes if self.names.get(node) not in self.excluded)
        if self._picks:
            # Nothing is claimed for how they are picked. Who is a stranger shows when it is called:
            # after that it takes nobody's place.
            secrets.SystemRandom().shuffle(found)
            found = sorted(sorted(found, key=self.doubted.__contains__)[: max(0, wanted)])
        return found

    def _called_by(
        self,
        dealing: Dealing,
        node: int,
        answer: Message,
        answers: dict[str, Message],
        places: dict[str, int],
    ) -> None:
        """Take a node's answer to the roll call, where it is who it says."""
        try:
            credential = Credential.verified(_bytes(answer, "credential"), self.authority)
            # Credentials are no secret: only the signature says that this is its node.
            read_advert(dealing, self.authority, credential.name, answer)
        except Invalid as error:
            log.warning("node %d is refused: %s", node, error)
            return
        name = credential.name
        if name in self.excluded:
            log.warning("node %d is refused: %s was left out", node, name)
            return
        if name in places and places[name] != node:
            log.warning("node %d is refused: %s is there already", node, name)
            return
        if self.names.get(node) != name and (soon := self.authority.soon(credential)):
            log.warning("%s", soon)
        places[name] = node
        self.names[node] = name
        self.doubted.discard(node)
        answers.setdefault(name, answer)

    def _first(self, answers: Mapping[str, Message]) -> list[str]:
        """Those that take part: of more than were agreed on all would refuse.

        A dealer whose shares too many could not read is left out of the next dealing. Where more
        said so than may lie it is the culprit, and left out for good.
        """
        index = {
            name: Credential.verified(_bytes(answer, "credential"), self.authority).index
            for name, answer in answers.items()
        }
        first = sorted(answers, key=index.__getitem__)
        # Without proof for this dealing alone, and only where there are enough others.
        others = [name for name in first if name not in self.suspects]
        if self.agreement.aggregation.least <= len(others) < len(first):
            log.warning("left out of this dealing: %s", _listed(self.suspects))
            first = others
        for name in first[self.agreement.asked :]:
            log.warning("%s is left out: %d nodes were agreed on", name, self.agreement.asked)
        return first[: self.agreement.asked]

    def _take(self, exchange: Exchange, node: int, answer: Message) -> None:
        name = self.names.get(node, f"node {node}")
        try:
            exchange.take(name, answer)
        except Refused as error:
            log.warning("an answer is refused: %s", error)

    def _charge(self, round: int) -> None:
        """Count a sum that is about to be opened; one beyond the planned rounds is not.

        By the ledger, or here where there is none: an attempt that fails later was paid for, and
        the statement is of T sums.
        """
        if round == 0:
            self._check_room(0)
            self.opened.append(0)
            if self.journal is not None:
                self.journal.ledger.charge_scaling(opened=True)
            return
        if self.journal is not None:
            self.journal.charge(round)
            self.journal.wait()
            return
        self._check_room(round)
        self.opened.append(round)

    def _check_room(self, round: int) -> None:
        """Raise where no further sum may be opened: nodes count, too, and would refuse to begin."""
        opened = sum(each > 0 for each in self.opened)
        if round == 0:
            if 0 in self.opened:
                raise BudgetExhaustedError(LOST_SUM)
            if self.journal is not None:
                self.journal.ledger.check_opening()
        elif self.journal is not None:
            self.journal.ledger.check(round)
        elif self.agreement.plan is not None and opened >= self.agreement.rounds:
            raise BudgetExhaustedError(
                f"the budget is spent: all {self.agreement.rounds} planned sums have been opened, "
                f"some of them in attempts that failed later, so round {round} is not released. "
                "The model so far is kept"
            )

    def _noised(self, total: Tensor, round: int, level: int | None = None) -> Tensor:
        """With the server's noise, where it is the one that adds it."""
        party = self.agreement.trusted_party
        return total if party is None else party.at(level).noised(total, round)


def _listed(names: Iterable[str]) -> str:
    """Names for a line of the log: not all of very many."""
    found = sorted(names)
    more = len(found) - LISTED
    return ", ".join(found[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _by_columns(scaling: Scaling) -> tuple[Any, ...]:
    """What there is about a scaling that follows from the columns."""
    names = ("origin", "threshold", "indicator", "limit", "ranked")
    columns = tuple(name for name, _ in scaling.columns)
    return columns, *(getattr(scaling, name) for name in names)


def _bytes(answer: Message, name: str) -> bytes:
    value = answer.get(name)
    if not isinstance(value, bytes):
        raise Invalid(f"{name!r} must be bytes, but got {type(value).__name__}.")
    return value


def federate(
    agreement: Agreement,
    courier: Courier,
    authority: Trust,
    *,
    folder: str | Path | None = None,
    ledger: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train with users who are elsewhere.

    Parameters
    ----------
    agreement
        What all parties have agreed on.
    courier
        Carries messages to nodes and back.
    authority
        The authority that enrolled the nodes, and whom it revoked.
    folder
        Where the run is written down. One that has begun there goes on from its last finished
        round; what was charged stays charged.
    ledger
        A population's ledger that is charged as well.
    callbacks
        Called with a `RoundEvent` after every round, and told of the beginning and the end, as in
        `fpfl.train`.
    """
    where, place = None, None if folder is None else Path(folder)
    if place is not None:
        where = RunFolder(
            place,
            resume=is_begun(place),
            ledger=None if ledger is None else Path(ledger),
        )

    made: list[Federated] = []

    def federation(kept: Kept | None) -> Federated:
        if not made:
            made.append(begun(kept))
        return made[0]

    def begun(kept: Kept | None) -> Federated:
        journal = kept.journal if kept else None
        run = secrets.token_bytes(RUN_BYTES) if journal is None else bytes.fromhex(
            journal.ledger.run
        )  # fmt: skip
        past = kept.past if kept else None
        return Federated(agreement, courier, authority, run, past, journal, place)

    seed = agreement.test_seed
    return conduct(
        agreement.spec,
        agreement,
        agreement.spec.flat.vector(),
        federation,
        more=agreement.terms,
        aggregation=agreement.aggregation,
        where=where,
        data="",
        seeds=(seed, seed),
        ranks=Ranks(),
        callbacks=callbacks,
        scale=lambda kept: federation(kept).scale(),
        measured=0 if agreement.measured is None else agreement.measured.size,
    )
