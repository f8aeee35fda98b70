"""The byte strings that nodes and server have to agree on: signed, committed to, derived from.

All of them are `encode` of a list that begins with a label of its own: typed, with lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from fpfl.federation.encoding import encode, hashed
from fpfl.federation.secagg.session import Dealing, Request, Session

COMMITMENT_BYTES = 32
SHARE_KINDS = (b"key", b"seed share")
"""The two shares that a dealer gives to a holder, in their order."""

PROTOCOL = frozenset({"step", "session", "place", "senders", "sealed", "commitments"})
"""The fields of a request to mask that are the protocol's own; all others are the broadcast."""


def advertised(dealing: Dealing, name: str, index: int, public: bytes) -> bytes:
    """What a node signs of all its public keys."""
    return encode([b"fpfl secagg advertised keys 2", dealing.id, name, index, public])


def answered(answer: Request) -> bytes:
    """What a node signs of a whole answer, of everything in it but the signature."""
    rest = {key: value for key, value in answer.items() if key != "signature"}
    return hashed(b"fpfl secagg answer 2", rest)


def broadcast(request: Request) -> bytes:
    """A hash of all that a request to mask says beside the protocol's own fields: the model, ..."""
    rest = {key: value for key, value in request.items() if key not in PROTOCOL}
    return hashed(b"fpfl secagg broadcast 2", rest)


def consented(session: Session, digest: bytes, names: Iterable[str]) -> bytes:
    """What a node consents to: these survivors of this session, and the broadcast they had."""
    return hashed(b"fpfl secagg consent 2", [session.id, digest, sorted(names)])


def sealed(session: Session, sender: int, receiver: int) -> bytes:
    """What goes with sealed shares: they open for these two in this direction only."""
    return encode([b"fpfl secagg sealed shares 2", session.id, sender, receiver])


def boxed(session: Session, owner: int) -> bytes:
    """What goes with the shares that a node reveals."""
    return encode([b"fpfl secagg revealed shares 2", session.id, owner])


def pairwise(of: Dealing | Session, purpose: bytes, one: int, other: int, *more: bytes) -> bytes:
    """What a key of two nodes is derived with: the same from either side."""
    low, high = sorted((one, other))
    return encode([b"fpfl secagg pair 2", purpose, of.id, low, high, *more])


def told(dealing: Dealing, credentials: Any, publics: Any) -> bytes:
    """A hash of all nodes that one was told of, and their keys: where all have to be the same."""
    if dealing.degree is not None:
        return b""  # each has a circle of its own
    return hashed(b"fpfl secagg circle 2", [credentials, publics])


def channel_of(dealing: Dealing, one: int, other: int, told: bytes) -> bytes:
    """For the secret of two nodes that the keys of all their sessions come from."""
    return pairwise(dealing, b"channel", one, other, told)


def seal_of(session: Session, one: int, other: int) -> bytes:
    """For the key under which two nodes seal shares."""
    return pairwise(session, b"seal", one, other)


def consent_of(session: Session, one: int, other: int) -> bytes:
    """For the key with which two nodes consent to each other's revealing shares."""
    return pairwise(session, b"consent", one, other)


def pad_of(owner: int, holder: int, consented: bytes) -> bytes:
    """For the pad over the holder's part of the owner's key: of this direction and consent."""
    return encode([b"fpfl secagg pad 2", owner, holder, consented])


def mask_of(session: Session, digest: bytes, one: int, other: int) -> bytes:
    """For the key of the mask that one node adds and the other subtracts."""
    return pairwise(session, b"mask", one, other, digest)


def self_mask_of(session: Session, digest: bytes, index: int) -> bytes:
    """For the key of a node's own mask."""
    return pairwise(session, b"self-mask", index, index, digest)


def commitment(session: Session, kind: bytes, dealer: int, holder: int, secret: bytes) -> bytes:
    """A hash by which a share, or a seed (holder 0), is recognised when it is revealed.

    Shares and seeds have 256 random bits: their hashes say nothing about them.
    """
    parts = [b"fpfl secagg commitment 2", kind, session.id, dealer, holder, secret]
    return hashlib.sha256(encode(parts)).digest()


def share_commitments(session: Session, dealer: int, holder: int, key: bytes, seed: bytes) -> bytes:
    """Those of the two shares that one dealer gives to one holder."""
    first, second = SHARE_KINDS
    return commitment(session, first, dealer, holder, key) + commitment(
        session, second, dealer, holder, seed
    )
