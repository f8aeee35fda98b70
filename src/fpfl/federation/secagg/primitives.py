r"""The cryptography that secure aggregation is made of, each piece in a few lines.

Nothing here is invented: X25519 for agreeing on keys, HKDF-SHA-256 for deriving them, Ed25519 for
signatures, ChaCha20-Poly1305 for sealing, and AES-256 in counter mode as the generator that
stretches a key into a mask, which is a vector over the ring of whole numbers modulo 2³²:

    PRG(key) = AES-256-CTR(key, counter 0), four bytes a number, little-endian.

On processors with AES instructions that is a third faster than ChaCha20 for long vectors and as
fast for short ones. The counter may start at 0 each time because no key stretches twice.

Whatever is signed, hashed or derived is encoded by `fpfl.federation.encoding`, with a label of its
own in front: types and lengths are part of it, so that no two meanings share an encoding.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fpfl.federation.encoding import Invalid as Invalid

ByteSource = Callable[[int], bytes]
"""Gives so many bytes that nobody can guess."""

KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 12
TAG_BYTES = 16

# A piece of key stream at a time: it is added while it is still in the processor's cache.
_PIECE = 2**16
_ZEROS = bytes(_PIECE)


def pseudorandom(key: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HMAC-SHA-512, cut to so many bytes, up to 64."""
    return hmac.digest(key, info, "sha512")[:length]


def xor(one: bytes, other: bytes) -> bytes:
    """Two strings of one length, bit by bit."""
    number = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return number.to_bytes(len(one), "big")


def join(*parts: bytes) -> bytes:
    """One byte string from several, each with its length before it."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def split(data: bytes, count: int | None = None) -> list[bytes]:
    """Undo :func:`join`; anything that it cannot have written is :class:`Invalid`."""
    parts, place = [], 0
    while place < len(data):
        start = place + 4
        place = start + int.from_bytes(data[place:start], "big")
        if place > len(data):
            raise Invalid(f"a record of {len(data)} bytes ends within a field: it was cut off.")
        parts.append(data[start:place])
    if count is not None and len(parts) != count:
        raise Invalid(f"a record must have {count} fields, but got {len(parts)}.")
    return parts


def digest(label: bytes, *parts: bytes) -> bytes:
    """SHA-256 of a label and some fields."""
    return hashlib.sha256(join(label, *parts)).digest()


def sign(secret: bytes, message: bytes) -> bytes:
    """An Ed25519 signature."""
    signature: bytes = Ed25519PrivateKey.from_private_bytes(secret).sign(message)
    return signature


def verify(public: bytes, signature: bytes, message: bytes, what: str) -> None:
    """Check an Ed25519 signature; a wrong one is :class:`Invalid`, with ``what`` it is of."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise Invalid(
            f"the signature of {what} does not hold: it is of another session, or was changed."
        ) from None


def public_of_signing(secret: bytes) -> bytes:
    """The Ed25519 public key of a secret one."""
    public: bytes = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return public


def public_of(secret: bytes) -> bytes:
    """The X25519 public key of a secret one."""
    public: bytes = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return public


class KeyAgreement:
    """One side of many X25519 exchanges: its secret key is loaded once.

    Parameters
    ----------
    secret
        32 bytes.
    """

    def __init__(self, secret: bytes):
        self._key = X25519PrivateKey.from_private_bytes(secret)

    def key(self, public: bytes, info: bytes) -> bytes:
        """HKDF-SHA-256 of the secret shared with the owner of ``public``."""
        try:
            shared: bytes = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise Invalid(
                "a public key is of small order or no key: any secret is known."
            ) from None
        return derive(shared, info)


def derive(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA-256 without salt, 32 bytes: the secret is random, or an exchange's result."""
    key: bytes = HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)
    return key


def seal(key: bytes, nonce: bytes, text: bytes, context: bytes) -> bytes:
    """ChaCha20-Poly1305 with the nonce in front; ``context`` is authenticated along."""
    sealed: bytes = ChaCha20Poly1305(key).encrypt(nonce, text, context)
    return nonce + sealed


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Undo :func:`seal`; :class:`Invalid` where key, bytes or context are others."""
    try:
        text: bytes = ChaCha20Poly1305(key).decrypt(
            sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context
        )
    except (InvalidTag, ValueError):
        raise Invalid("a sealed message does not open.") from None
    return text


def add_mask(total: NDArray[np.uint32], key: bytes, sign: int) -> None:
    """Add ``sign``·PRG(key) to ``total`` in place, modulo 2³²; ``sign`` is 1 or −1."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    operation = np.add if sign > 0 else np.subtract
    # A buffer of this call's own: threads may mask at the same time.
    buffer = bytearray(min(4 * len(total), _PIECE))
    numbers = np.frombuffer(buffer, dtype="<u4")
    for start in range(0, len(total), _PIECE // 4):
        part = total[start : start + _PIECE // 4]
        stream.update_into(memoryview(_ZEROS)[: 4 * len(part)], buffer)
        operation(part, numbers[: len(part)], out=part)
