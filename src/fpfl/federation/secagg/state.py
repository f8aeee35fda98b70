"""What a node keeps from one step to the next, as bytes if need be: a new process may go on.

Only what later steps need is kept. Secret keys and the seed go as soon as the masked vector is
made, and of every pair of shares one goes as soon as the survivors are signed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fpfl.federation.secagg.identity import Identity
from fpfl.federation.secagg.primitives import Invalid, join, split
from fpfl.federation.secagg.session import Refused, Request, Session

_STATE = b"fpfl secagg state 1"


@dataclass(frozen=True)
class Peer:
    """A neighbour: its name and index, and the keys that are still needed.

    Parameters
    ----------
    name, index
        As its credential has them.
    signing
        Its Ed25519 public key.
    masking
        The X25519 public key that it advertised for masks.
    channel
        The key of what the two seal for each other.
    """

    name: str
    index: int
    signing: bytes
    masking: bytes = b""
    channel: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """For storing."""
        index = self.index.to_bytes(8, "big")
        return join(self.name.encode(), index, self.signing, self.masking, self.channel)

    @classmethod
    def from_bytes(cls, data: bytes) -> Peer:
        """Undo :meth:`to_bytes`."""
        name, index, *keys = split(data, 5)
        return cls(name.decode(), int.from_bytes(index, "big"), *keys)


@dataclass(frozen=True)
class Held:
    """Shares of a neighbour's masking key and of its seed; empty when it is no longer held."""

    name: str
    key: bytes = field(repr=False)
    seed: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """For storing."""
        return join(self.name.encode(), self.key, self.seed)

    @classmethod
    def from_bytes(cls, data: bytes) -> Held:
        """Undo :meth:`to_bytes`."""
        name, key, seed = split(data, 3)
        return cls(name.decode(), key, seed)


@dataclass(frozen=True)
class ClientState:
    """A node within a session, after the step ``done``.

    Whoever keeps it has to store the new state *before* an answer leaves. A node that forgets that
    it has answered can be asked again, and two masked vectors under the same masks tell how the
    vectors differ.
    """

    session: Session
    name: str
    index: int
    done: str
    public: bytes = b""
    """Both public keys, until the neighbours' have come."""
    channel: bytes = field(default=b"", repr=False)
    """The secret key for sealing, until the neighbours' keys have come."""
    masking: bytes = field(default=b"", repr=False)
    """The secret key for masks, until the vector is masked."""
    seed: bytes = field(default=b"", repr=False)
    """b, until the vector is masked."""
    peers: tuple[Peer, ...] = ()
    """The neighbours; from the consent on, those that survived."""
    held: tuple[Held, ...] = ()
    signed: bytes = b""
    """A hash of the survivors that were signed."""
    asked: bytes = b""
    """A hash of the request for shares that was answered."""
    answered: tuple[tuple[bytes, ...], tuple[bytes, ...]] = field(default=((), ()), repr=False)
    """The shares that were given: of seeds, of keys."""

    def to_bytes(self) -> bytes:
        """All of it, secrets included."""
        return join(
            _STATE,
            self.session.to_bytes(),
            self.name.encode(),
            self.index.to_bytes(8, "big"),
            self.done.encode(),
            self.public,
            self.channel,
            self.masking,
            self.seed,
            join(*(peer.to_bytes() for peer in self.peers)),
            join(*(held.to_bytes() for held in self.held)),
            self.signed,
            self.asked,
            *(join(*shares) for shares in self.answered),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """Undo :meth:`to_bytes`; :class:`Invalid` for anything else."""
        label, session, name, index, done, *rest = split(data, 15)
        if label != _STATE:
            raise Invalid("these bytes are no state: give what ClientState.to_bytes() returned.")
        public, channel, masking, seed, peers, held, signed, asked, seeds, keys = rest
        return cls(
            Session.from_bytes(session),
            name.decode(),
            int.from_bytes(index, "big"),
            done.decode(),
            public,
            channel,
            masking,
            seed,
            tuple(map(Peer.from_bytes, split(peers))),
            tuple(map(Held.from_bytes, split(held))),
            signed,
            asked,
            (tuple(split(seeds)), tuple(split(keys))),
        )


@contextmanager
def refusing(
    state: ClientState, request: Request, identity: Identity | None, step: str, *after: str
) -> Iterator[None]:
    """Check that a step may follow; whatever turns out :class:`Invalid` within is `Refused`."""
    try:
        if identity and (identity.name, identity.index) != (state.name, state.index):
            raise Invalid(f"the identity is of {identity.name!r}, and the state is not.")
        if state.done not in after:
            raise Invalid(
                f"the step {step!r} comes after {after[0]!r}, but {state.done!r} is what was done "
                "last: no step is done twice."
            )
        state.session.expect(request, step)
        yield
    except Invalid as error:
        raise Refused(state.name, str(error)) from None
