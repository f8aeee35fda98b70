"""What a node keeps from one step to the next, as bytes if need be: a new process may go on.

Only what later steps need is kept. The secrets of a session go as soon as its vector is masked, and
those of all sessions before it: sessions are played in their order, and what was passed over is
never played. The secret that two nodes share moves on with them, by a hash that nobody can turn
back, so that who takes a node's state learns nothing about sums that are past.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Self

from fpfl.federation.encoding import Invalid, decode, encode
from fpfl.federation.secagg.identity import Identity
from fpfl.federation.secagg.primitives import KEY_BYTES, pseudorandom
from fpfl.federation.secagg.session import Dealing, Refused, Request, Session

_STATE = b"fpfl secagg state 2"
_NOW, _NEXT = b"fpfl secagg chain 2, this session", b"fpfl secagg chain 2, the next one"


class Chain:
    """The secret of two nodes in one session after the other.

        s_k = HMAC(c_k, "this"),    c_{k+1} = HMAC(c_k, "next")

    From s_k come the two keys of session k: for sealing shares and for consent.
    """

    def __init__(self, secret: bytes):
        self.secret = secret

    def take(self) -> bytes:
        """The secret of this session; the chain moves on."""
        now = pseudorandom(self.secret, _NOW)
        self.secret = pseudorandom(self.secret, _NEXT)
        return now


@dataclass(frozen=True)
class Peer:
    """A neighbour, as long as there are sessions left.

    Parameters
    ----------
    name, index
        As its credential has them.
    masking
        The X25519 public keys that it advertised for masks, of the sessions that are left.
    chain
        What the two nodes' keys of those sessions come from.
    credential
        Looked at again in every session: it may end, or be revoked, meanwhile.
    """

    name: str
    index: int
    masking: bytes
    chain: bytes = field(repr=False)
    credential: bytes = field(repr=False)


@dataclass(frozen=True)
class Secrets:
    """A node's own secrets of one session, and its own shares of them."""

    masking: bytes = field(repr=False)
    """The secret key for masks."""
    seed: bytes = field(default=b"", repr=False)
    """b, of its own mask."""
    key_share: bytes = field(default=b"", repr=False)
    seed_share: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Held:
    """The shares of a node's masking key and of its seed in one session, one of each dealer."""

    name: str
    key: bytes = field(repr=False)
    seed: bytes = field(repr=False)


@dataclass(frozen=True)
class Partner:
    """A node that was masked with, and the key with which the two consent."""

    name: str
    index: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Played:
    """The session that was masked in last.

    Parameters
    ----------
    place
        Which one.
    digest
        Of the broadcast.
    partners
        Who was masked with.
    held
        The shares it can reveal, its own among them; none from the consent on.
    consented
        What it consented to.
    answer
        The answer that it gave then, encoded.
    """

    place: int
    digest: bytes
    partners: tuple[Partner, ...]
    held: tuple[Held, ...]
    consented: bytes = b""
    answer: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ClientState:
    """A node within a dealing, after the step ``done`` of it.

    Whoever keeps it has to store the new state *before* an answer leaves. A node that forgets that
    it has answered can be asked again, and two masked vectors under the same masks tell how the
    vectors differ.
    """

    dealing: Dealing
    name: str
    index: int
    done: str
    public: bytes = b""
    """All public keys, until the neighbours' have come."""
    channel: bytes = field(default=b"", repr=False)
    """The secret key for agreeing with neighbours, until their keys have come."""
    next: int = 0
    """The first session that can still be played."""
    secrets: tuple[Secrets, ...] = ()
    """Of the sessions from that one on."""
    peers: tuple[Peer, ...] = ()
    played: Played | None = None

    def to_bytes(self) -> bytes:
        """All of it, secrets included."""
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        said["dealing"] = self.dealing.to_bytes()
        for name in ("secrets", "peers"):
            said[name] = [astuple(one) for one in said[name]]
        said["played"] = None if self.played is None else astuple(self.played)
        return encode([_STATE, said])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Undo :meth:`to_bytes`; :class:`Invalid` for anything else."""
        try:
            label, said = decode(data)
            if label != _STATE:
                raise ValueError
            said["dealing"] = Dealing.from_bytes(said["dealing"])
            said["secrets"] = tuple(Secrets(*one) for one in said["secrets"])
            said["peers"] = tuple(Peer(*one) for one in said["peers"])
            said["played"] = _played(said["played"])
            return cls(**said)
        except (TypeError, ValueError, KeyError):
            raise Invalid(
                "these bytes are no state: give what ClientState.to_bytes() returned."
            ) from None

    def playing(self, place: int) -> tuple[Session, Secrets, tuple[tuple[Peer, bytes], ...], Self]:
        """What a session is played with: its secrets, and each neighbour with their secret.

        And the state after it: that session and those before it are gone.
        """
        if place < self.next:
            raise Invalid(
                f"session {place} was played or passed over: the next one is {self.next}. No step "
                "is done twice."
            )
        skipped = place - self.next
        playing, left = [], []
        for peer in self.peers:
            chain = Chain(peer.chain)
            for _ in range(skipped):
                chain.take()
            masking = peer.masking[KEY_BYTES * skipped :]
            playing.append((replace(peer, masking=masking[:KEY_BYTES]), chain.take()))
            left.append(replace(peer, masking=masking[KEY_BYTES:], chain=chain.secret))
        after = replace(
            self, next=place + 1, secrets=self.secrets[skipped + 1 :], peers=tuple(left)
        )
        return self.dealing.session(place), self.secrets[skipped], tuple(playing), after


def _played(said: list[Any] | None) -> Played | None:
    if said is None:
        return None
    place, digest, partners, held, *rest = said
    return Played(
        place,
        digest,
        tuple(Partner(*one) for one in partners),
        tuple(Held(*one) for one in held),
        *rest,
    )


@contextmanager
def refusing(
    state: ClientState, request: Request, identity: Identity, done: str, step: str
) -> Iterator[None]:
    """Check that a step may follow; whatever turns out :class:`Invalid` within is `Refused`."""
    try:
        if (identity.name, identity.index) != (state.name, state.index):
            raise Invalid(f"the identity is of {identity.name!r}, and the state is not.")
        if state.done != done:
            raise Invalid(
                f"the step {step!r} comes after {done!r}, but {state.done!r} is what was done "
                "last: no step is done twice."
            )
        yield
    except Invalid as error:
        raise Refused(state.name, str(error)) from None
