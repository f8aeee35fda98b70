"""Who may take part: an authority enrols nodes, and its signature is all that others need to know.

Enrolment is the only trust that secure aggregation starts from. Without it a server could invent
nodes, count them among the survivors, and read the vectors of the few that are real.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache

from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    ByteSource,
    Invalid,
    join,
    public_of_signing,
    sign,
    split,
    verify,
)
from fpfl.federation.secagg.shamir import LARGEST_INDEX

_CREDENTIAL = b"fpfl secagg credential 1"
_IDENTITY = b"fpfl secagg identity 1"
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Credential:
    """A node's name, index and key, signed by the authority.

    Parameters
    ----------
    name : str
        Up to 200 bytes.
    index : int
        Where the node's shares are evaluated: different for each node, from 1 to 2³² − 1.
    key : bytes
        The node's Ed25519 public key.
    signature : bytes
        The authority's, over the three.
    """

    name: str
    index: int
    key: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        """What travels."""
        return join(*_fields(self.name, self.index, self.key), self.signature)

    @staticmethod
    def verified(data: bytes, authority: bytes) -> Credential:
        """Read a credential and check it; :class:`Invalid` unless this authority signed it.

        Right ones are kept: a process that meets a node again, in another session or as another
        node's neighbour, does not check its credential again.
        """
        return _verified(data, authority)


def _fields(name: str, index: int, key: bytes) -> tuple[bytes, bytes, bytes]:
    return name.encode(), index.to_bytes(8, "big"), key


@lru_cache(maxsize=2**14)
def _verified(data: bytes, authority: bytes) -> Credential:
    name, index, key, signature = split(data, 4)
    what = "a credential by the authority"
    verify(authority, signature, join(_CREDENTIAL, name, index, key), what)
    # From here on the authority vouches for what the fields hold.
    return Credential(name.decode(), int.from_bytes(index, "big"), key, signature)


@dataclass(frozen=True)
class Identity:
    """What one node keeps for good: its signing key, its credential and the authority's key."""

    credential: Credential
    authority: bytes
    signing: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.credential.name

    @property
    def index(self) -> int:
        """The node's index."""
        return self.credential.index

    def to_bytes(self) -> bytes:
        """All of it, the secret key included: for a file that the node alone can read."""
        return join(_IDENTITY, self.credential.to_bytes(), self.authority, self.signing)

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Undo :meth:`to_bytes`; :class:`Invalid` where the parts do not belong together."""
        label, credential, authority, signing = split(data, 4)
        if label != _IDENTITY or len(signing) != KEY_BYTES:
            raise Invalid("these bytes are no identity: give what Identity.to_bytes() returned.")
        found = cls(Credential.verified(credential, authority), authority, signing)
        if public_of_signing(signing) != found.credential.key:
            raise Invalid(f"the signing key is not the one of the credential of {found.name!r}.")
        return found


@dataclass(frozen=True)
class Authority:
    """Enrols nodes. Its secret key is needed for that alone, and may be kept off every network."""

    secret: bytes = field(repr=False)

    @classmethod
    def make(cls, source: ByteSource = os.urandom) -> Authority:
        """With a fresh key."""
        return cls(source(KEY_BYTES))

    @property
    def key(self) -> bytes:
        """The public key, which every node and the server know."""
        return public_of_signing(self.secret)

    def enrol(self, name: str, index: int, source: ByteSource = os.urandom) -> Identity:
        """A new node's identity, with a fresh signing key.

        The authority does not remember whom it enrolled: that no name and no index is given out
        twice is for the caller to see to. Where two meet in a session nevertheless, the second is
        refused.
        """
        signing = source(KEY_BYTES)
        return Identity(self.certify(name, index, public_of_signing(signing)), self.key, signing)

    def certify(self, name: str, index: int, key: bytes) -> Credential:
        """A credential for a key that the node made itself and whose secret half it keeps."""
        if not 0 < len(name.encode()) <= _LONGEST_NAME:
            raise ValueError(f"a name must have 1 to {_LONGEST_NAME} bytes, but got {name!r}.")
        if not 1 <= index <= LARGEST_INDEX:
            raise ValueError(f"an index must be from 1 to {LARGEST_INDEX}, but got {index!r}.")
        if len(key) != KEY_BYTES:
            raise ValueError(f"a public key must have {KEY_BYTES} bytes, but got {len(key)}.")
        signature = sign(self.secret, join(_CREDENTIAL, *_fields(name, index, key)))
        assert len(signature) == SIGNATURE_BYTES
        return Credential(name, index, key, signature)
