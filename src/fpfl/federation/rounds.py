r"""A federation over a network, as the server's loop sees it: something that can release a round.

One attempt at a round is one session of secure aggregation: five exchanges with all nodes that can
be reached (or, where the server picks, with those that it picked). What goes wrong on the way, a
node that is gone, late or says something wrong, is that node's dropping out. An attempt is given up
when too few are left, which depends on who answered and never on any value; the next one has fresh
keys, masks, coins and noise.

The charge is in the ledger, on the disk, before the first request to unmask leaves. From then on
the sum counts as released: an attempt that fails later has been paid for, and the next one is paid
for again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fpfl.fairness.totals import Weights
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import broadcast
from fpfl.federation.node import RUN_BYTES
from fpfl.federation.secagg import (
    Abandoned,
    Aggregation,
    Credential,
    Invalid,
    Message,
    Refused,
    Session,
    Trust,
)
from fpfl.federation.secagg.server import read_advert
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.runs.folder import RunFolder, is_begun
from fpfl.runs.journal import Journal
from fpfl.runs.resume import Kept
from fpfl.server.loop import Callback
from fpfl.server.ranks import Ranks
from fpfl.server.state import Past
from fpfl.training.run import Run
from fpfl.training.session import conduct

log = logging.getLogger("fpfl.federation")


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
    """

    agreement: Agreement
    courier: Courier
    authority: Trust
    run: bytes
    past: Past | None = None
    journal: Journal | None = None
    names: dict[int, str] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    opened: list[int] = field(default_factory=list)
    """The rounds of all sums that were opened, where no ledger counts them."""
    doubted: set[int] = field(default_factory=set)
    """Those that were asked in this round and showed no keys that count."""

    def release(
        self, round: int, w: Tensor, weights: Weights | None = None, level: int | None = None
    ) -> Tensor:
        """Run one round at w; one that was released before a run was resumed is not run again."""
        if self.past is not None:
            known = self.past.totals.get(round)
            if known is not None:
                return known.to(w.device, w.dtype)
        failures = []
        self.doubted.clear()
        for attempt in range(1, self.agreement.attempts + 1):
            self._check_room(round)
            try:
                total = self._attempt(round, w, weights, level)
                v = self._noised(total, round, level).to(w.dtype)
            except Abandoned as failure:
                log.warning("round %d, attempt %d was abandoned: %s", round, attempt, failure)
                failures.append(str(failure))
                if failure.culprit is not None:
                    # It broke the protocol for all to see, and would again.
                    log.warning("%s is left out from now on", failure.culprit)
                    self.excluded.add(failure.culprit)
                continue
            if self.journal is not None:
                self.journal.log(round, v)
            return v
        raise FederationError(
            f"round {round} was abandoned {len(failures)} times, at last because {failures[-1]} "
            "What was released stays: start the run again when more nodes can be reached, and it "
            "goes on from here"
        )

    # --- one attempt --------------------------------------------------------------------------

    def _attempt(self, round: int, w: Tensor, weights: Weights | None, level: int | None) -> Tensor:
        """Σ of the survivors' vectors, decoded."""
        nodes = self._asked()
        session = self._session(round)
        places, aggregation = self._advertised(session, nodes)
        while aggregation.step != "done":
            step = aggregation.step
            if step == "unmask":
                self._charge(round)
            requests = aggregation.requests()
            if step == "mask":
                said = broadcast(w, weights, level)
                requests = {name: {**request, **said} for name, request in requests.items()}
            sent = {places[name]: request for name, request in requests.items()}
            for node, answer in self.courier.exchange(sent, self.agreement.timeout):
                self._take(aggregation, node, answer)
            aggregation.close_step()
            if aggregation.dropped.get(step):
                log.warning("round %d: lost in %r: %s", round, step, aggregation.dropped[step])
        log.info("round %d: the sum of %d nodes", round, len(aggregation.survivors))
        _, encoding = self.agreement.at(level)
        return encoding.decoded(aggregation.total(), round)

    def _asked(self) -> list[int]:
        """Whom to ask: everybody who can be reached, or those that the server picks."""
        agreement, least = self.agreement, self.agreement.aggregation.least
        # In the beginning all are waited for, later no more than it takes.
        enough = least if self.names else agreement.nodes
        found = sorted(self.courier.nodes(enough, agreement.timeout))
        nodes = [node for node in found if self.names.get(node) not in self.excluded]
        privacy = agreement.privacy
        if privacy is not None and privacy.convention == "picked":
            # Nothing is claimed for how they are picked. Who is a stranger shows when it is asked:
            # in the next attempt it takes nobody's place.
            secrets.SystemRandom().shuffle(nodes)
            nodes = sorted(sorted(nodes, key=self.doubted.__contains__)[: agreement.asked])
        if len(nodes) < least:
            raise Abandoned(f"{len(nodes)} nodes can be reached, and {least} must be.", False, 0)
        return nodes

    def _session(self, round: int) -> Session:
        agreement = self.agreement
        graph = agreement.graph  # whoever is there, or says so
        return Session(
            run=self.run + agreement.fingerprint,
            round=round,
            # Never the same again, not even by a server that was started anew.
            attempt=secrets.randbelow(2**62),
            size=agreement.encoding.size,
            threshold=graph.threshold,
            least=agreement.aggregation.least,
            degree=graph.degree,
        )

    def _advertised(self, session: Session, nodes: list[int]) -> tuple[dict[str, int], Aggregation]:
        """Ask everybody for keys: the answers say who is where."""
        answers: dict[str, Message] = {}
        places: dict[str, int] = {}
        indices: dict[str, int] = {}
        self.doubted.update(nodes)
        request = session.to_message()
        found = self.courier.exchange(dict.fromkeys(nodes, request), self.agreement.timeout)
        for node, answer in found:
            try:
                credential = Credential.verified(_bytes(answer, "credential"), self.authority)
                # Credentials are no secret: only the signature says that this is its node.
                read_advert(session, self.authority, credential.name, answer)
            except Invalid as error:
                log.warning("node %d is refused: %s", node, error)
                continue
            if credential.name in self.excluded:
                log.warning("node %d is refused: %s was left out", node, credential.name)
                continue
            if credential.name in places and places[credential.name] != node:
                log.warning("node %d is refused: %s is there already", node, credential.name)
                continue
            if self.names.get(node) != credential.name and (
                soon := self.authority.soon(credential)
            ):
                log.warning("%s", soon)
            places[credential.name] = node
            indices[credential.name] = credential.index
            self.names[node] = credential.name
            self.doubted.discard(node)
            answers.setdefault(credential.name, answer)
        # More than were agreed on would have all of them refuse: those enrolled last are left out.
        first = sorted(answers, key=indices.__getitem__)
        for name in first[self.agreement.asked :]:
            log.warning("%s is left out: %d nodes were agreed on", name, self.agreement.asked)
        names = first[: self.agreement.asked]
        aggregation = Aggregation(session, self.authority, names)
        for name in names:
            self._take(aggregation, places[name], answers[name])
        aggregation.close_step()
        return places, aggregation

    def _take(self, aggregation: Aggregation, node: int, answer: Message) -> None:
        name = self.names.get(node, f"node {node}")
        try:
            aggregation.take(name, answer)
        except Refused as error:
            log.warning("an answer is refused: %s", error)

    def _charge(self, round: int) -> None:
        """Count a sum that is about to be opened; one beyond the planned rounds is not.

        By the ledger, or here where there is none: an attempt that fails later was paid for, and
        the statement is of T sums.
        """
        if self.journal is not None:
            self.journal.charge(round)
            self.journal.wait()
            return
        self._check_room(round)
        self.opened.append(round)

    def _check_room(self, round: int) -> None:
        """Raise where no further sum may be opened: nodes count, too, and would refuse to begin."""
        if self.journal is not None:
            self.journal.ledger.check(round)
        elif self.agreement.plan is not None and len(self.opened) >= self.agreement.rounds:
            raise BudgetExhaustedError(
                f"the budget is spent: all {self.agreement.rounds} planned sums have been opened, "
                f"some of them in attempts that failed later, so round {round} is not released. "
                "The model so far is kept"
            )

    def _noised(self, total: Tensor, round: int, level: int | None = None) -> Tensor:
        """With the server's noise, where it is the one that adds it."""
        party = self.agreement.trusted_party
        return total if party is None else party.at(level).noised(total, round)


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
    where = None
    if folder is not None:
        path = Path(folder)
        where = RunFolder(
            path,
            resume=is_begun(path),
            ledger=None if ledger is None else Path(ledger),
        )

    def federation(kept: Kept | None) -> Federated:
        journal = kept.journal if kept else None
        run = secrets.token_bytes(RUN_BYTES) if journal is None else bytes.fromhex(
            journal.ledger.run
        )  # fmt: skip
        return Federated(agreement, courier, authority, run, kept.past if kept else None, journal)

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
    )
