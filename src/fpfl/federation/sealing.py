"""State between two requests, sealed: whoever carries it can neither read nor change it.

Flower kept a node's state in a process that serves it to whoever asks on this machine, without
authentication; it is in a file now, and files are copied. So it is sealed with ChaCha20-Poly1305
under

    key = HKDF-SHA-256(the identity's signing key, "fpfl sealed state 1"),

bound to the node's name, index and public key; the session that it is of is in the state itself,
and a message of another one is refused (`fpfl.federation.secagg.state`). The key is
made of the signing key, and is no file of its own: there is one secret to protect and none to
forget, whoever has the signing key can answer as this node anyway, and a renewed key opens no old
state, which ends its session and no more. HKDF's label keeps the two uses apart.

Sealing does not show that the state is the latest. That a node masks one vector in a session, and
reveals shares for one set of survivors, is in its ledger (`fpfl.federation.ledger`).
"""

from __future__ import annotations

import os

from fpfl.federation.secagg import Identity, Invalid, Refused
from fpfl.federation.secagg.primitives import NONCE_BYTES, derive, join, seal, unseal

_KEY = b"fpfl sealed state 1"


def sealed(state: bytes, identity: Identity) -> bytes:
    """The state as it may leave the node's process."""
    key = derive(identity.signing, _KEY)
    # 96 random bits: a node would need billions of messages for two to be alike.
    return seal(key, os.urandom(NONCE_BYTES), state, _context(identity))


def opened(data: bytes, identity: Identity) -> bytes:
    """Undo :func:`sealed`; `Refused` for another node's state, or one that was changed.

    Nothing is opened of nothing.
    """
    if not data:
        return b""
    try:
        return unseal(derive(identity.signing, _KEY), data, _context(identity))
    except Invalid:
        raise Refused(
            identity.name,
            "the state that was kept is of another node, or was changed: begin a new session.",
        ) from None


def _context(identity: Identity) -> bytes:
    credential = identity.credential
    index = credential.index.to_bytes(8, "big")
    return join(_KEY, credential.name.encode(), index, credential.key)
