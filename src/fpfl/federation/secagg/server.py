"""The server's side: who is asked what, which answers count, and when to give up.

The server never sees a vector, a seed or a key of a node that is there. It sees masked vectors,
which are uniform, and in the end shares from which the masks of the *sum* follow. First a `Deal`,
then one `Aggregation` after the other for the sessions that were dealt; for each step of either

    requests = deal.requests()
    ...  deal.take(name, answer) for each answer, in any order, late ones left out
    deal.close_step()

and after an aggregation's last one its `total`. Before the requests of the step "unmask" are handed
out nothing can be learnt about any vector, whoever fails; from then on the sum has to be counted as
released. Who keeps a privacy ledger charges it when `step` is "unmask", before calling `requests`.
A node's *circle* is the node itself and its neighbours: those that hold shares of its secrets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.encoding import Invalid
from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.client import SEALED_BYTES
from fpfl.federation.secagg.graph import neighbours
from fpfl.federation.secagg.identity import Credential, Trust
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    unseal,
    verify,
    xor,
)
from fpfl.federation.secagg.session import (
    DEALING_STEPS,
    SESSION_STEPS,
    Abandoned,
    Dealing,
    Message,
    Refused,
    Request,
    Session,
    read_bytes,
    read_many,
    read_names,
)
from fpfl.federation.secagg.shamir import (
    SHARE_BYTES,
    check_exchange,
    recovered,
    remove_pairwise_masks,
    remove_self_mask,
)
from fpfl.federation.secagg.transcript import COMMITMENT_BYTES


@dataclass(frozen=True)
class Advert:
    """What a node advertised: its credential, all public keys, its signature of them."""

    credential: bytes
    index: int
    signing: bytes
    public: bytes
    signature: bytes

    def masking(self, place: int) -> bytes:
        """The public key for masks in the session at this place."""
        return self.public[KEY_BYTES * (1 + place) : KEY_BYTES * (2 + place)]


def read_advert(dealing: Dealing, authority: Trust, name: str, answer: Request) -> Advert:
    """Check the answer to "advertise" of the node that is known as ``name``."""
    public = read_bytes(answer, "public", KEY_BYTES * (1 + dealing.sessions))
    signature = read_bytes(answer, "signature", SIGNATURE_BYTES)
    data = answer.get("credential")
    if type(data) is not bytes:
        raise Invalid("'credential' must be bytes.")
    credential = Credential.verified(data, authority)
    if credential.name != name:
        raise Invalid(f"its credential is for {credential.name!r}.")
    signed = transcript.advertised(dealing, name, credential.index, public)
    verify(credential.key, signature, signed, "its keys")
    check_exchange(public)
    return Advert(data, credential.index, credential.key, public, signature)


@dataclass(frozen=True)
class Dealt:
    """What a node dealt for all sessions, by holder, and what it committed to."""

    index: int
    sealed: Mapping[str, bytes]
    commitments: Mapping[str, bytes]
    seeds: bytes

    def sealed_for(self, holder: str, place: int) -> bytes:
        """The sealed shares of a holder in the session at this place."""
        return self.sealed[holder][SEALED_BYTES * place : SEALED_BYTES * (place + 1)]

    def committed_to(self, holder: str, place: int) -> bytes:
        """Both commitments to them."""
        length = 2 * COMMITMENT_BYTES
        return self.commitments[holder][length * place : length * (place + 1)]

    def seed(self, place: int) -> bytes:
        """The commitment to the seed."""
        return self.seeds[COMMITMENT_BYTES * place : COMMITMENT_BYTES * (place + 1)]

    def fits(self, session: Session, holder: str, index: int, kind: int, share: bytes) -> bool:
        """Whether a holder reveals the share that it was dealt, of ``SHARE_KINDS[kind]``."""
        start = COMMITMENT_BYTES * kind
        committed = self.committed_to(holder, session.place)[start : start + COMMITMENT_BYTES]
        name = transcript.SHARE_KINDS[kind]
        return transcript.commitment(session, name, self.index, index, share) == committed


def read_dealt(
    dealing: Dealing, name: str, index: int, circle: tuple[str, ...], answer: Request
) -> Dealt:
    """Check the answer to "share" of a node; ``circle`` is itself and its neighbours."""
    count = dealing.sessions
    sealed = read_many(answer, "sealed", {0, SEALED_BYTES * count}, len(circle))
    for holder, text in zip(circle, sealed, strict=True):
        if (text == b"") != (holder == name):
            raise Invalid("its shares must be sealed for each neighbour, and not for itself.")
    lengths = {2 * COMMITMENT_BYTES * count}
    commitments = read_many(answer, "commitments", lengths, len(circle))
    return Dealt(
        index,
        dict(zip(circle, sealed, strict=True)),
        dict(zip(circle, commitments, strict=True)),
        read_bytes(answer, "seed_commitments", COMMITMENT_BYTES * count),
    )


@dataclass(frozen=True)
class Revealed:
    """A node's answer to "unmask"; ``near`` are the survivors around it, by their indices."""

    near: tuple[str, ...]
    sealed: bytes
    own: bytes
    parts: Mapping[str, bytes]
    consents: Mapping[str, bytes]
    commitments: Mapping[str, bytes]


def read_revealed(
    session: Session,
    name: str,
    index: int,
    near: tuple[str, ...],
    dealers: int,
    answer: Request,
) -> Revealed:
    """Check the form of an answer to "unmask" with the shares of so many dealers."""
    n = len(near)
    length = NONCE_BYTES + SHARE_BYTES * dealers + TAG_BYTES
    parts = _cut(read_bytes(answer, "parts", SHARE_BYTES * n), SHARE_BYTES)
    consents = _cut(read_bytes(answer, "consents", SHARE_BYTES * n), SHARE_BYTES)
    data = read_bytes(answer, "commitments", COMMITMENT_BYTES * (n + 1))
    first, *commitments = _cut(data, COMMITMENT_BYTES)
    own = read_bytes(answer, "own", SHARE_BYTES)
    if transcript.commitment(session, b"part", index, index, own) != first:
        raise Invalid("its own part of its key is not the one that it committed to.")
    return Revealed(
        near,
        read_bytes(answer, "revealed", length),
        own,
        dict(zip(near, parts, strict=True)),
        dict(zip(near, consents, strict=True)),
        dict(zip(near, commitments, strict=True)),
    )


def _cut(data: bytes, length: int) -> list[bytes]:
    return [data[start : start + length] for start in range(0, len(data), length)]


Names = frozenset[str]


@dataclass
class Roster:
    """Neighbours, and the sets of the protocol as they become known.

    Parameters
    ----------
    threshold
        t.
    circles
        By name, the node and its neighbours, in the order of their indices.
    masking
        U2: those that dealt shares, and that others mask with.
    survivors
        U3: those whose masked vector came.
    unreadable
        Pairs of a dealer and a holder that could not read its shares.
    """

    threshold: int
    circles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    masking: Names = frozenset()
    survivors: Names = frozenset()
    unreadable: set[tuple[str, str]] = field(default_factory=set)

    def near(self, name: str, among: Container[str]) -> list[str]:
        """The node and its neighbours, as far as they are among these."""
        return [one for one in self.circles[name] if one in among]

    def well_surrounded(self, there: Names) -> Names:
        """Those with t of these around them, themselves included."""
        return frozenset(name for name in there if len(self.near(name, there)) >= self.threshold)

    def convinced(self, there: Names, least: int) -> Names:
        """Those that can read the shares of so many survivors, their own among them."""
        return frozenset(
            name
            for name in there
            if sum((one, name) not in self.unreadable for one in self.survivors) >= least
        )

    def core(self, there: Names) -> Names:
        """The largest part of these in which each has t around it.

        A node with fewer would refuse to mask, and its neighbours would have masked with it
        already. So it is left out before anybody masks; then others may have too few, and so on.
        """
        while (kept := self.well_surrounded(there)) != there:
            there = kept
        return there

    def wanted(self) -> tuple[list[str], list[str]]:
        """Whose seeds and whose keys it takes; of a drop-out without survivors around it, none."""
        gone = self.masking - self.survivors
        return sorted(self.survivors), sorted(one for one in gone if self.near(one, self.survivors))

    def dealers(self, holder: str) -> list[str]:
        """Whose shares a node has, its own among them, in the order of their indices."""
        return [
            one for one in self.near(holder, self.masking) if (one, holder) not in self.unreadable
        ]

    def suspect(self) -> tuple[str | None, int]:
        """The dealer whose shares most could not read, and how many these are."""
        counts = Counter(dealer for dealer, _ in sorted(self.unreadable))
        return counts.most_common(1)[0] if counts else (None, 0)

    def lost(self, there: Names) -> str | None:
        """Why these cannot recover all that it takes; None where they can."""
        for names in self.wanted():
            for dealer in names:
                near = self.near(dealer, there)
                count = sum((dealer, holder) not in self.unreadable for holder in near)
                if count < self.threshold:
                    return (
                        f"{count} of those that hold shares of {dealer!r} are left, and "
                        f"{self.threshold} are needed"
                    )
        return None


class Exchange:
    """Steps in which all that are asked answer, or drop out.

    Parameters
    ----------
    steps
        Their names.
    names
        Who is asked.

    Attributes
    ----------
    step : str
        The step whose answers are awaited; "done" after the last.
    dropped : dict
        For each step that is closed, who was asked and gave no answer that counts.
    refused : list of Refused
        Every answer that was refused, in order.
    """

    unmask_sent = False
    """Whether requests for shares were handed out."""

    def __init__(self, steps: tuple[str, ...], names: Iterable[str]):
        self._steps = steps
        self.step: str = steps[0]
        self.dropped: dict[str, tuple[str, ...]] = {}
        self.refused: list[Refused] = []
        self._asked = frozenset(names)
        self._taken: dict[str, tuple[bytes, object]] = {}  # a hash of the answer, its signature
        self._adverts: dict[str, Advert] = {}
        self._came: set[str] = set()  # from whom any answer to "unmask" came

    @property
    def asked(self) -> frozenset[str]:
        """Who is asked in this step."""
        return self._asked

    @property
    def waiting(self) -> tuple[str, ...]:
        """Those of them that have not answered."""
        return tuple(sorted(self._asked - self._taken.keys()))

    @property
    def shares_received(self) -> int:
        """From how many nodes an answer to "unmask" came, right or wrong."""
        return len(self._came)

    @property
    def _of(self) -> Dealing | Session:
        raise NotImplementedError

    def requests(self) -> dict[str, Message]:
        """What to send to whom in this step."""
        if self.step == "unmask":
            self.unmask_sent = True
        make = getattr(self, f"_ask_{self.step}")
        header = self._of.header(self.step)
        return {name: {**header, **make(name)} for name in sorted(self._asked)}

    def take(self, name: str, answer: Request) -> None:
        """Count an answer, or raise :class:`Refused`.

        A refused answer is as if it had not come: a right one may still follow, and if none does,
        the node has dropped out. The same answer again changes nothing; a second one that differs
        is refused, and the first one stands.
        """
        try:
            if name not in self._asked or self.step not in self._steps:
                raise Invalid(f"it was not asked anything in the step {self.step!r}.")
            if self.step == "unmask":
                self._came.add(name)
            self._of.expect(answer, self.step)
            found = transcript.answered(answer), answer.get("signature")
            if self._taken.get(name, found) != found:
                raise Invalid("it has answered before, and otherwise: the first answer stands.")
            if name not in self._taken:
                if self.step != "advertise":  # whose answer brings the key to check it with
                    signature = read_bytes(answer, "signature", SIGNATURE_BYTES)
                    verify(self._adverts[name].signing, signature, found[0], "its answer")
                getattr(self, f"_take_{self.step}")(name, answer)
                self._taken[name] = found
        except Invalid as error:
            refused = Refused(str(name), str(error))
            self.refused.append(refused)
            raise refused from None

    def close_step(self) -> None:
        """Go on with those that answered; :class:`Abandoned` where they are too few.

        Whether they are depends on who answered, and on the neighbours of each, alone.
        """
        if self.step not in self._steps:
            raise ValueError("all steps are closed.")
        step, there = self.step, frozenset(self._taken)
        following = getattr(self, f"_close_{step}")(there)
        gone = self._asked - (following if step == "share" else there)
        self.dropped[step] = tuple(sorted(gone))
        self._taken = {}
        self._asked = following
        self.step = (*self._steps, "done")[self._steps.index(step) + 1]

    def _abandon(
        self, reason: str, culprit: str | None = None, suspect: str | None = None
    ) -> Abandoned:
        self.dropped[self.step] = self.waiting
        self.step = "abandoned"
        return Abandoned(reason, self.unmask_sent, self.shares_received, culprit, suspect)

    def _enough(self, there: Names, needed: int) -> None:
        if len(there) < needed:
            left = f"{len(there)} nodes are left after {self.step!r}"
            raise self._abandon(f"{left}, and {needed} are needed.")


class Deal(Exchange):
    """One dealing, from the server's side: who takes part, with which keys and shares.

    Its first step is a roll call: who has no credential, or no key to it, is not part of anything
    that follows, and counts for nothing.

    Parameters
    ----------
    dealing : Dealing
        Its settings.
    authority : bytes
        The public key of the authority that enrolled the nodes.
    names : iterable of str
        Who is asked.
    agreed : int, optional
        How many nodes the threshold is for; by default those that are asked.

    Attributes
    ----------
    lying : int
        So many may say wrongly that they cannot read shares: fewer than a third of those that were
        agreed on, or where each has few neighbours fewer than t. One more, and the dealer lied.
    """

    def __init__(
        self, dealing: Dealing, authority: Trust, names: Iterable[str], agreed: int | None = None
    ):
        super().__init__(DEALING_STEPS, names)
        self.dealing = dealing
        most = len(self._asked) if agreed is None else agreed
        self.lying = (most - 1) // 3 if dealing.degree is None else dealing.threshold - 1
        self.circles: dict[str, tuple[str, ...]] = {}
        self.dealt: dict[str, Dealt] = {}
        self._authority = authority
        self._indices: set[int] = set()

    @property
    def _of(self) -> Dealing:
        return self.dealing

    @property
    def adverts(self) -> Mapping[str, Advert]:
        """Who was called, and the keys."""
        return self._adverts

    @property
    def members(self) -> Names:
        """Those that dealt; nobody before the last step is closed."""
        return self._asked if self.step == "done" else frozenset()

    # Step 1: advertise

    def _ask_advertise(self, name: str) -> Message:
        return self.dealing.to_message()

    def _take_advertise(self, name: str, answer: Request) -> None:
        advert = read_advert(self.dealing, self._authority, name, answer)
        if advert.index in self._indices:
            raise Invalid(f"its index {advert.index} is another node's here: enrol it anew.")
        self._indices.add(advert.index)
        self._adverts[name] = advert

    def _close_advertise(self, there: Names) -> Names:
        self._enough(there, max(self.dealing.threshold, self.dealing.least))
        keys = {name: advert.public for name, advert in self._adverts.items()}
        circles = neighbours(self.dealing, keys)
        by_index = sorted(self._adverts, key=lambda one: self._adverts[one].index)
        place = {name: i for i, name in enumerate(by_index)}
        self.circles = {
            name: tuple(sorted(circle, key=place.__getitem__)) for name, circle in circles.items()
        }
        return there

    # Step 2: share

    def _ask_share(self, name: str) -> Message:
        adverts = [self._adverts[one] for one in self.circles[name]]
        return {
            "credentials": [advert.credential for advert in adverts],
            "publics": [advert.public for advert in adverts],
            "signatures": [advert.signature for advert in adverts],
        }

    def _take_share(self, name: str, answer: Request) -> None:
        circle, index = self.circles[name], self._adverts[name].index
        self.dealt[name] = read_dealt(self.dealing, name, index, circle, answer)

    def _close_share(self, there: Names) -> Names:
        left = Roster(self.dealing.threshold, self.circles).core(there)
        self._enough(left, max(self.dealing.threshold, self.dealing.least))
        return left


class Aggregation(Exchange):
    """One session, from the server's side.

    Parameters
    ----------
    deal : Deal
        What was dealt; both its steps are closed.
    place : int
        Which of its sessions.
    said : mapping
        The broadcast: what is sent with every request to mask, the same to all.
    there : container of str, optional
        Who can be reached now: others are not asked, and nobody masks with them. By default all.

    Attributes
    ----------
    survivors : tuple of str
        Those whose vectors are in the sum, sorted; empty before "mask" is closed.
    """

    def __init__(self, deal: Deal, place: int, said: Request, there: Container[str] | None = None):
        members = deal.members
        roster = Roster(deal.dealing.threshold, deal.circles)
        present = members if there is None else frozenset(one for one in members if one in there)
        roster.masking = roster.core(present)
        super().__init__(SESSION_STEPS, roster.masking)
        self._adverts = dict(deal.adverts)
        self.session = deal.dealing.session(place)
        self.survivors: tuple[str, ...] = ()
        self._deal, self._said = deal, dict(said)
        self._digest = transcript.broadcast(said)
        self._roster = roster
        self._sum: NDArray[np.uint32] = np.zeros(self.session.size, np.uint32)
        self._revealed: dict[str, Revealed] = {}
        self._shares: dict[str, dict[int, bytes]] = {}  # by dealer, then by holder's index
        self._total: NDArray[np.uint32] | None = None
        needed = max(self.session.threshold, self.session.least)
        if len(roster.masking) < needed:
            raise Abandoned(
                f"of those that were dealt keys {len(present)} can be reached, "
                f"{len(roster.masking)} of them with enough neighbours, and {needed} are needed.",
                False,
                0,
            )

    @property
    def _of(self) -> Session:
        return self.session

    def total(self) -> NDArray[np.uint32]:
        """Σ x over the survivors, modulo 2³²."""
        if self._total is None:
            raise ValueError(f"there is no sum yet: the step {self.step!r} is not closed.")
        return self._total

    def _recoverable(self, there: Names, culprit: str | None = None) -> None:
        if why := self._roster.lost(there):
            suspect, count = self._roster.suspect()
            if culprit is None and count > self._deal.lying:
                culprit = suspect
            raise self._abandon(f"after {self.step!r}, {why}.", culprit, suspect)

    # Step 3: mask

    def _ask_mask(self, name: str) -> Message:
        roster, place = self._roster, self.session.place
        senders = [one for one in roster.near(name, roster.masking) if one != name]
        dealt = [self._deal.dealt[one] for one in senders]
        return {
            **self._said,
            "senders": senders,
            "sealed": [one.sealed_for(name, place) for one in dealt],
            "commitments": [one.committed_to(name, place) for one in dealt],
        }

    def _take_mask(self, name: str, answer: Request) -> None:
        roster = self._roster
        data = read_bytes(answer, "vector", 4 * self.session.size)
        unreadable = read_names(answer, "unreadable")
        if not set(unreadable) <= set(roster.near(name, roster.masking)) - {name}:
            raise Invalid("it could not read shares of a node that sent it none.")
        roster.unreadable.update((dealer, name) for dealer in unreadable)
        self._sum += np.frombuffer(data, dtype="<u4")

    def _close_mask(self, there: Names) -> Names:
        self._enough(there, self.session.least)
        self._roster.survivors = there
        self._recoverable(there)
        self.survivors = tuple(sorted(there))
        # The others would refuse to unmask, for want of consents, or of shares that they can read.
        willing = self._roster.well_surrounded(there)
        if self.session.degree is None:
            willing = self._roster.convinced(willing, self.session.least)
        self._recoverable(willing)
        return willing

    # Step 4: unmask

    def _ask_unmask(self, name: str) -> Message:
        return {"survivors": list(self.survivors)}

    def _take_unmask(self, name: str, answer: Request) -> None:
        roster = self._roster
        near = tuple(one for one in roster.near(name, roster.survivors) if one != name)
        index, dealers = self._adverts[name].index, len(roster.dealers(name))
        self._revealed[name] = read_revealed(self.session, name, index, near, dealers, answer)

    def _close_unmask(self, there: Names) -> Names:
        opened, liar = set(), None
        for name in sorted(there, key=lambda one: self._adverts[one].index):
            try:
                if self._wants(name):
                    self._open(name, there)
                opened.add(name)
            except Refused as error:
                self.refused.append(error)
            except Invalid as error:
                # What it signed gives nothing, or something else than was dealt to it.
                self.refused.append(Refused(name, str(error)))
                liar = liar or name
        self._recoverable(frozenset(opened), liar)
        for names in self._roster.wanted():
            for name in names:
                try:
                    self._remove_masks(name)
                except Invalid as error:
                    reason = f"{name!r} dealt shares that do not fit: {error}"
                    raise self._abandon(reason, culprit=name) from None
        self._total = self._sum
        return frozenset()

    def _wants(self, name: str) -> bool:
        """Whether there is anybody whose shares do not suffice yet, and this node has one more."""
        enough = self.session.threshold
        return any(len(self._shares.get(one, ())) < enough for one in self._roster.dealers(name))

    def _open(self, name: str, there: Names) -> None:
        """The shares that a node reveals, where t around it consented to what it consented to."""
        session, index, said = self.session, self._adverts[name].index, self._revealed[name]
        parts = {index: said.own}
        for other in said.near:
            if len(parts) == session.threshold:
                break
            if other not in there:
                continue
            at = self._adverts[other].index
            part = xor(said.parts[other], self._revealed[other].consents[name])
            if transcript.commitment(session, b"part", index, at, part) == said.commitments[other]:
                parts[at] = part
        if len(parts) < session.threshold:
            raise Refused(
                name,
                f"its shares do not open: {len(parts)} nodes around it consented to what it did, "
                f"and {session.threshold} must.",
            )
        context = transcript.boxed(session, index)
        shares = unseal(recovered(parts, session.threshold), said.sealed, context)
        found: dict[str, bytes] = {}
        dealers = self._roster.dealers(name)
        for dealer, share in zip(dealers, _cut(shares, SHARE_BYTES), strict=True):
            kind = 1 if dealer in self._roster.survivors else 0
            if not self._deal.dealt[dealer].fits(session, name, index, kind, share):
                raise Invalid(f"its share of {dealer!r} is not the one that was dealt.")
            found[dealer] = share
        # All of them are right, or none counts.
        for dealer, share in found.items():
            self._shares.setdefault(dealer, {})[index] = share

    def _remove_masks(self, name: str) -> None:
        session, digest = self.session, self._digest
        advert, shares = self._adverts[name], self._shares[name]
        if name in self._roster.survivors:
            committed = self._deal.dealt[name].seed(session.place)
            remove_self_mask(self._sum, session, digest, advert.index, shares, committed)
            return
        near = [self._adverts[one] for one in self._roster.near(name, self._roster.survivors)]
        partners = [(one.index, one.masking(session.place)) for one in near]
        public = advert.masking(session.place)
        remove_pairwise_masks(self._sum, session, digest, advert.index, shares, public, partners)
