"""The server's side: who is asked what, which answers count, and when to give up.

The server never sees a vector, a seed or a key of a node that is there. It sees masked vectors,
which are uniform, and in the end shares from which the masks of the *sum* follow. For each step

    requests = aggregation.requests()
    ...  aggregation.take(name, answer) for each answer, in any order, late ones left out
    aggregation.close_step()

and after the last one `total`. Before the requests of the step "unmask" are handed out nothing can
be learnt about any vector, whoever fails; from then on the sum has to be counted as released. Who
keeps a privacy ledger charges it when `step` is "unmask", before calling `requests`. A node's
*circle* is the node itself and its neighbours: those that hold shares of its secrets.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.client import SEALED_BYTES
from fpfl.federation.secagg.graph import neighbours
from fpfl.federation.secagg.identity import Credential, Trust
from fpfl.federation.secagg.primitives import KEY_BYTES, SIGNATURE_BYTES, Invalid, verify
from fpfl.federation.secagg.session import (
    STEPS,
    Abandoned,
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
    remove_pairwise_masks,
    remove_self_mask,
)
from fpfl.federation.secagg.transcript import COMMITMENT_BYTES


@dataclass(frozen=True)
class Advert:
    """What a node advertised: its credential, both public keys, its signature of them."""

    credential: bytes
    index: int
    signing: bytes
    public: bytes
    signature: bytes

    @property
    def masking(self) -> bytes:
        """The public key for masks."""
        return self.public[KEY_BYTES:]


def read_advert(session: Session, authority: Trust, name: str, answer: Request) -> Advert:
    """Check the answer to "advertise" of the node that is known as ``name``."""
    public = read_bytes(answer, "public", 2 * KEY_BYTES)
    signature = read_bytes(answer, "signature", SIGNATURE_BYTES)
    data = answer.get("credential")
    if type(data) is not bytes:
        raise Invalid("'credential' must be bytes.")
    credential = Credential.verified(data, authority)
    if credential.name != name:
        raise Invalid(f"its credential is for {credential.name!r}.")
    signed = transcript.advertised(session, name, credential.index, public)
    verify(credential.key, signature, signed, "its keys")
    check_exchange(public)
    return Advert(data, credential.index, credential.key, public, signature)


@dataclass(frozen=True)
class Dealt:
    """What a node dealt, by holder, and what it committed to."""

    session: Session
    index: int
    sealed: Mapping[str, bytes]
    commitments: Mapping[str, bytes]
    seed: bytes

    def fits(self, holder: str, index: int, place: int, share: bytes) -> bool:
        """Whether a holder reveals the share that it was dealt, of ``SHARE_KINDS[place]``."""
        kind, start = transcript.SHARE_KINDS[place], COMMITMENT_BYTES * place
        committed = self.commitments[holder][start : start + COMMITMENT_BYTES]
        return transcript.commitment(self.session, kind, self.index, index, share) == committed


def read_dealt(
    session: Session, name: str, index: int, circle: tuple[str, ...], answer: Request
) -> Dealt:
    """Check the answer to "share" of a node; ``circle`` is itself and its neighbours."""
    sealed = read_many(answer, "sealed", {0, SEALED_BYTES}, len(circle))
    for holder, text in zip(circle, sealed, strict=True):
        if (text == b"") != (holder == name):
            raise Invalid("its shares must be sealed for each neighbour, and not for itself.")
    commitments = read_many(answer, "commitments", {2 * COMMITMENT_BYTES}, len(circle))
    return Dealt(
        session,
        index,
        dict(zip(circle, sealed, strict=True)),
        dict(zip(circle, commitments, strict=True)),
        read_bytes(answer, "seed_commitment", COMMITMENT_BYTES),
    )


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

    def asked_of(self, holder: str) -> tuple[list[str], list[str]]:
        """Of whom a node is asked for shares, of seeds and of keys: whose shares it could read."""
        dealers = [
            one for one in self.near(holder, self.masking) if (one, holder) not in self.unreadable
        ]
        seeds = [one for one in dealers if one in self.survivors]
        return seeds, [one for one in dealers if one not in self.survivors]

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


class Aggregation:
    """One session, from the server's side.

    Parameters
    ----------
    session : Session
        Its settings.
    authority : Trust
        The authority that enrolled the nodes, and whom it revoked.
    names : iterable of str
        Who is asked.

    Attributes
    ----------
    step : str
        The step whose answers are awaited; "done" after the last.
    dropped : dict
        For each step that is closed, who was asked and gave no answer that counts.
    refused : list of Refused
        Every answer that was refused, in order.
    survivors : tuple of str
        Those whose vectors are in the sum, sorted; empty before "mask" is closed.
    unmask_sent : bool
        Whether requests for shares were handed out.
    """

    def __init__(self, session: Session, authority: Trust, names: Iterable[str]):
        self.session = session
        self.step: str = STEPS[0]
        self.dropped: dict[str, tuple[str, ...]] = {}
        self.refused: list[Refused] = []
        self.survivors: tuple[str, ...] = ()
        self.unmask_sent = False
        self._authority = authority
        self._asked = frozenset(names)
        self._taken: dict[str, tuple[bytes, object]] = {}  # a hash of the answer, its signature
        self._adverts: dict[str, Advert] = {}
        self._indices: set[int] = set()
        self._dealt: dict[str, Dealt] = {}
        self._roster = Roster(session.threshold)
        self._sum: NDArray[np.uint32] = np.zeros(session.size, np.uint32)
        self._signed = b""  # what nodes sign of the survivors
        self._consents: dict[str, bytes] = {}
        self._shares: dict[str, dict[int, bytes]] = {}  # by dealer, then by holder's index
        self._came: set[str] = set()  # from whom any answer to "unmask" came
        self._total: NDArray[np.uint32] | None = None

    @property
    def shares_received(self) -> int:
        """From how many nodes an answer to "unmask" came, right or wrong."""
        return len(self._came)

    def total(self) -> NDArray[np.uint32]:
        """Σ x over the survivors, modulo 2³²."""
        if self._total is None:
            raise ValueError(f"there is no sum yet: the step {self.step!r} is not closed.")
        return self._total

    def requests(self) -> dict[str, Message]:
        """What to send to whom in this step."""
        if self.step == "unmask":
            self.unmask_sent = True
        make = getattr(self, f"_ask_{self.step}")
        header = self.session.header(self.step)
        return {name: {**header, **make(name)} for name in sorted(self._asked)}

    def take(self, name: str, answer: Request) -> None:
        """Count an answer, or raise :class:`Refused`.

        A refused answer is as if it had not come: a right one may still follow, and if none does,
        the node has dropped out. The same answer again changes nothing; a second one that differs
        is refused, and the first one stands.
        """
        try:
            if name not in self._asked or self.step not in STEPS:
                raise Invalid(f"it was not asked anything in the step {self.step!r}.")
            if self.step == "unmask":
                self._came.add(name)
            self.session.expect(answer, self.step)
            found = transcript.answered(answer), answer.get("signature")
            if self._taken.get(name, found) != found:
                raise Invalid("it has answered before, and otherwise: the first answer stands.")
            if name not in self._taken:
                if self.step in ("share", "mask"):
                    # The others are checked as they are taken, by signature or commitment.
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
        if self.step not in STEPS:
            raise ValueError("all steps are closed.")
        step, there = self.step, frozenset(self._taken)
        following = getattr(self, f"_close_{step}")(there)
        gone = self._asked - (following if step == "share" else there)
        self.dropped[step] = tuple(sorted(gone))
        self._taken = {}
        self._asked = following
        self.step = (*STEPS, "done")[STEPS.index(step) + 1]

    def _abandon(self, reason: str, culprit: str | None = None) -> Abandoned:
        self.dropped[self.step] = tuple(sorted(self._asked - self._taken.keys()))
        self.step = "abandoned"
        return Abandoned(reason, self.unmask_sent, self.shares_received, culprit)

    def _enough(self, there: frozenset[str], needed: int) -> None:
        if len(there) < needed:
            left = f"{len(there)} nodes are left after {self.step!r}"
            raise self._abandon(f"{left}, and {needed} are needed.")

    def _recoverable(self, there: frozenset[str]) -> None:
        if why := self._roster.lost(there):
            raise self._abandon(f"after {self.step!r}, {why}.")

    # Step 1: advertise

    def _ask_advertise(self, name: str) -> Message:
        return self.session.to_message()

    def _take_advertise(self, name: str, answer: Request) -> None:
        advert = read_advert(self.session, self._authority, name, answer)
        if advert.index in self._indices:
            raise Invalid(f"its index {advert.index} is another node's here: enrol it anew.")
        self._indices.add(advert.index)
        self._adverts[name] = advert

    def _close_advertise(self, there: frozenset[str]) -> frozenset[str]:
        self._enough(there, max(self.session.threshold, self.session.least))
        keys = {name: advert.public for name, advert in self._adverts.items()}
        circles = neighbours(self.session, keys)
        by_index = sorted(self._adverts, key=lambda one: self._adverts[one].index)
        place = {name: i for i, name in enumerate(by_index)}
        self._roster.circles = {
            name: tuple(sorted(circle, key=place.__getitem__)) for name, circle in circles.items()
        }
        return there

    # Step 2: share

    def _ask_share(self, name: str) -> Message:
        adverts = [self._adverts[one] for one in self._roster.circles[name]]
        return {
            "credentials": [advert.credential for advert in adverts],
            "publics": [advert.public for advert in adverts],
            "signatures": [advert.signature for advert in adverts],
        }

    def _take_share(self, name: str, answer: Request) -> None:
        circle, index = self._roster.circles[name], self._adverts[name].index
        self._dealt[name] = read_dealt(self.session, name, index, circle, answer)

    def _close_share(self, there: frozenset[str]) -> frozenset[str]:
        left = self._roster.core(there)
        self._enough(left, max(self.session.threshold, self.session.least))
        self._roster.masking = left
        return left

    # Step 3: mask

    def _ask_mask(self, name: str) -> Message:
        roster = self._roster
        senders = [one for one in roster.near(name, roster.masking) if one != name]
        return {
            "senders": senders,
            "sealed": [self._dealt[one].sealed[name] for one in senders],
            "commitments": [self._dealt[one].commitments[name] for one in senders],
        }

    def _take_mask(self, name: str, answer: Request) -> None:
        roster = self._roster
        data = read_bytes(answer, "vector", 4 * self.session.size)
        unreadable = read_names(answer, "unreadable")
        if not set(unreadable) <= set(roster.near(name, roster.masking)) - {name}:
            raise Invalid("it could not read shares of a node that sent it none.")
        roster.unreadable.update((dealer, name) for dealer in unreadable)
        self._sum += np.frombuffer(data, dtype="<u4")

    def _close_mask(self, there: frozenset[str]) -> frozenset[str]:
        self._enough(there, self.session.least)
        self._roster.survivors = there
        self._recoverable(there)
        self.survivors = tuple(sorted(there))
        self._signed = transcript.survived(self.session, there)
        return there

    # Step 4: consent

    def _ask_consent(self, name: str) -> Message:
        return {"survivors": list(self.survivors)}

    def _take_consent(self, name: str, answer: Request) -> None:
        signature = read_bytes(answer, "signature", SIGNATURE_BYTES)
        verify(self._adverts[name].signing, signature, self._signed, "the survivors")
        self._consents[name] = signature

    def _close_consent(self, there: frozenset[str]) -> frozenset[str]:
        # The others would refuse to unmask, for want of signatures.
        willing = self._roster.well_surrounded(there)
        self._recoverable(willing)
        return willing

    # Step 5: unmask

    def _ask_unmask(self, name: str) -> Message:
        near = self._roster.near(name, self._consents)
        # As many as a node wants to see: each one takes it a tenth of a millisecond to verify.
        signers = [one for one in near if one != name][: self.session.threshold - 1]
        seeds, keys = self._roster.asked_of(name)
        return {
            "signers": signers,
            "signatures": [self._consents[one] for one in signers],
            "seeds": seeds,
            "keys": keys,
        }

    def _take_unmask(self, name: str, answer: Request) -> None:
        seeds, keys = self._roster.asked_of(name)
        index = self._adverts[name].index
        found: dict[str, bytes] = {}
        for what, place, dealers in (("keys", 0, keys), ("seeds", 1, seeds)):
            shares = read_many(answer, what, {SHARE_BYTES}, len(dealers))
            for dealer, share in zip(dealers, shares, strict=True):
                if not self._dealt[dealer].fits(name, index, place, share):
                    raise Invalid(f"its share of {dealer!r} is not the one that was dealt.")
                found[dealer] = share
        # All of them are right, or none counts.
        for dealer, share in found.items():
            self._shares.setdefault(dealer, {})[index] = share

    def _close_unmask(self, there: frozenset[str]) -> frozenset[str]:
        self._recoverable(there)
        for names in self._roster.wanted():
            for name in names:
                try:
                    self._remove_masks(name)
                except Invalid as error:
                    reason = f"{name!r} dealt shares that do not fit: {error}"
                    raise self._abandon(reason, culprit=name) from None
        self._total = self._sum
        return frozenset()

    def _remove_masks(self, name: str) -> None:
        index, shares = self._adverts[name].index, self._shares[name]
        if name in self._roster.survivors:
            remove_self_mask(self._sum, self.session, index, shares, self._dealt[name].seed)
            return
        near = [self._adverts[one] for one in self._roster.near(name, self._roster.survivors)]
        partners = [(advert.index, advert.masking) for advert in near]
        public = self._adverts[name].masking
        remove_pairwise_masks(self._sum, self.session, index, shares, public, partners)
