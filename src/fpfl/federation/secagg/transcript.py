"""The byte strings that nodes and server have to agree on: signed, committed to, derived from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fpfl.federation.secagg.primitives import digest, join
from fpfl.federation.secagg.session import Request, Session, fingerprint

COMMITMENT_BYTES = 32
SHARE_KINDS = (b"key", b"seed share")
"""The two shares that a dealer gives to a holder, in their order."""

_KEYS = b"fpfl secagg advertised keys 1"
_ANSWER = b"fpfl secagg answer 1"
_SURVIVORS = b"fpfl secagg survivors 1"
_SEALED = b"fpfl secagg sealed shares 1"


def advertised(session: Session, name: str, index: int, public: bytes) -> bytes:
    """What a node signs of its two public keys; all but the name at the end is of fixed length."""
    return _KEYS + session.id + public + index.to_bytes(8, "big") + name.encode()


def survived(session: Session, names: Iterable[str]) -> bytes:
    """What a node signs of the survivors: a hash of their sorted names."""
    hashed = digest(_SURVIVORS, *(name.encode() for name in sorted(names)))
    return join(_SURVIVORS, session.id, hashed)


def answered(answer: Request) -> bytes:
    """What a node signs of a whole answer, of everything in it but the signature."""
    rest = {key: value for key, value in answer.items() if key != "signature"}
    return _ANSWER + fingerprint(rest)


def sealed(session: Session, sender: int, receiver: int) -> bytes:
    """What goes with sealed shares: they open for these two in this direction only."""
    return _SEALED + session.id + sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")


def pairwise(session: Session, purpose: bytes, one: int, other: int) -> bytes:
    """What a key of two nodes is derived with: the same from either side."""
    low, high = sorted((one, other))
    return b"fpfl secagg " + purpose + session.id + low.to_bytes(8, "big") + high.to_bytes(8, "big")


def channel_of(session: Session, one: int, other: int) -> bytes:
    """For the key under which two nodes seal shares."""
    return pairwise(session, b"channel 1", one, other)


def mask_of(session: Session, one: int, other: int) -> bytes:
    """For the key of the mask that one node adds and the other subtracts."""
    return pairwise(session, b"mask 1", one, other)


def self_mask_of(session: Session, index: int) -> bytes:
    """For the key of a node's own mask."""
    return pairwise(session, b"self-mask 1", index, index)


def commitment(session: Session, kind: bytes, dealer: int, holder: int, secret: bytes) -> bytes:
    """A hash by which a share, or a seed (holder 0), is recognised when it is revealed.

    Shares and seeds have 256 random bits: their hashes say nothing about them.
    """
    parts = (kind, session.id, dealer.to_bytes(8, "big"), holder.to_bytes(8, "big"), secret)
    return hashlib.sha256(b"fpfl secagg commitment 1 " + b"".join(parts)).digest()


def share_commitments(session: Session, dealer: int, holder: int, key: bytes, seed: bytes) -> bytes:
    """Those of the two shares that one dealer gives to one holder."""
    first, second = SHARE_KINDS
    return commitment(session, first, dealer, holder, key) + commitment(
        session, second, dealer, holder, seed
    )
