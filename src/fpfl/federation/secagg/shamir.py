r"""Shamir's secret sharing over the integers modulo p = 2²⁵⁶ + 297, the first prime above 2²⁵⁶.

A secret a₀ of 32 bytes is the value at 0 of a polynomial with t − 1 random coefficients,

    f(x) = a₀ + a₁ x + ... + a_{t−1} x^{t−1}  mod p.

The share of the party with index x is f(x). Any t shares give the secret back, and t − 1 of them
are uniform and independent of it:

    f(0) = Σ_i λ_i f(x_i),    λ_i = Π_{j≠i} x_j / (x_j − x_i)  mod p.

The λ depend on the indices only, so they are kept from one secret to the next. Python's whole
numbers are quick here because indices are small: a product of indices and of their differences is
reduced once, at its end. pycryptodome's sharing, which Flower's helper uses, multiplies in GF(2¹²⁸)
bit by bit in Python, and 16 bytes of a secret at a time. With 32 bytes, 27 parties and t = 17 it
takes 6 ms to share and 20 ms to combine; this module takes 0.05 ms for either (one core, measured
by ``benchmarks/secagg.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import mul

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    ByteSource,
    Invalid,
    KeyAgreement,
    add_mask,
    derive,
    public_of,
)
from fpfl.federation.secagg.session import Session

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
LARGEST_INDEX = 2**32 - 1

# 48 bytes modulo p are uniform up to a distance of 2⁻¹²⁷.
_DRAWN_BYTES = 48
# So many steps of Horner's rule before the number is reduced: it grows by an index a step.
_STEPS = 16


def make_shares(
    secret: bytes, threshold: int, indices: Sequence[int], source: ByteSource = os.urandom
) -> list[bytes]:
    """Share 32 bytes among parties so that any ``threshold`` of them have it together.

    Parameters
    ----------
    secret
        32 bytes.
    threshold
        t, from 1 to the number of parties.
    indices
        The parties' indices, different and in 1, ..., 2³² − 1.
    source
        Where random bytes come from.

    Returns
    -------
    list of bytes
        A share of 33 bytes for each party, in the order of ``indices``.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret must have {SECRET_BYTES} bytes, but got {len(secret)}.")
    if len(set(indices)) != len(indices) or not all(0 < x <= LARGEST_INDEX for x in indices):
        raise ValueError(f"indices must be different and from 1 to 2**32 - 1, but got {indices}.")
    if not 1 <= threshold <= len(indices):
        raise ValueError(
            f"threshold must be from 1 to the {len(indices)} parties, but got {threshold}."
        )
    drawn = source(_DRAWN_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[start : start + _DRAWN_BYTES], "big") % PRIME
        for start in range(0, len(drawn), _DRAWN_BYTES)
    ]
    coefficients.append(int.from_bytes(secret, "big"))
    # In Horner's order, cut up so that numbers are reduced now and then and not at every step.
    pieces = [coefficients[i : i + _STEPS] for i in range(0, threshold, _STEPS)]
    shares = []
    for x in indices:
        value = 0
        for piece in pieces:
            for coefficient in piece:
                value = value * x + coefficient
            value %= PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """The secret from shares by index, exactly as many as the threshold.

    Wrong shares give a wrong secret; one that has no 32 bytes is :class:`Invalid`.
    """
    indices = tuple(sorted(shares))
    values = [read_share(shares[x]) for x in indices]
    value: int = sum(map(mul, _weights(indices), values)) % PRIME
    if value >= 2 ** (8 * SECRET_BYTES):
        raise Invalid("the shares do not belong together: what they give is no secret.")
    return value.to_bytes(SECRET_BYTES, "big")


def read_share(share: bytes) -> int:
    """The number that a share is; :class:`Invalid` where it is none."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise Invalid(f"a share must have {SHARE_BYTES} bytes and be below 2**256 + 297.")
    return value


@lru_cache(maxsize=4096)
def _weights(indices: tuple[int, ...]) -> tuple[int, ...]:
    """λ_i = Π_j x_j / (x_i Π_{j≠i} (x_j − x_i)) mod p, with one division for all of them."""
    bottoms = [x * math.prod([y - x for y in indices if y != x]) % PRIME for x in indices]
    # The inverse of the product of all, times the products of those before and after each.
    before = [1]
    for bottom in bottoms:
        before.append(before[-1] * bottom % PRIME)
    rest = math.prod(indices) * pow(before[-1], -1, PRIME) % PRIME
    weights = []
    for place in range(len(bottoms) - 1, -1, -1):
        weights.append(rest * before[place] % PRIME)
        rest = rest * bottoms[place] % PRIME
    return tuple(reversed(weights))


Shares = Mapping[int, bytes]
"""Shares of one secret, by their holders' indices."""


def recovered(shares: Shares, threshold: int) -> bytes:
    """A secret from the shares of the first t holders: the same t for many secrets."""
    first = sorted(shares)[:threshold]
    return combine_shares({index: shares[index] for index in first})


def remove_self_mask(
    total: NDArray[np.uint32],
    session: Session,
    digest: bytes,
    index: int,
    shares: Shares,
    committed: bytes,
) -> None:
    """Take PRG(b) of a survivor off the total; :class:`Invalid` if it committed to another b."""
    seed = recovered(shares, session.threshold)
    if transcript.commitment(session, b"seed", index, 0, seed) != committed:
        raise Invalid("the shares of its seed do not give the seed that it committed to.")
    add_mask(total, derive(seed, transcript.self_mask_of(session, digest, index)), -1)


def remove_pairwise_masks(
    total: NDArray[np.uint32],
    session: Session,
    digest: bytes,
    index: int,
    shares: Shares,
    public: bytes,
    partners: Iterable[tuple[int, bytes]],
) -> None:
    """Take the masks that survivors share with a drop-out off the total.

    Parameters
    ----------
    total
        Changed in place.
    session, digest
        For whom, and the hash of what was broadcast there.
    index, shares, public
        Of the node that dropped out: its index, the shares of its masking key, and the public half
        that it advertised. :class:`Invalid` where the two do not belong together.
    partners
        Indices and public masking keys of its neighbours that survived.
    """
    secret = recovered(shares, session.threshold)
    if public_of(secret) != public:
        raise Invalid("the shares of its masking key do not give the key that it advertised.")
    agreement = KeyAgreement(secret)
    for other, key in partners:
        mask = agreement.key(key, transcript.mask_of(session, digest, index, other))
        # The survivor added it if its own index is the lower one.
        add_mask(total, mask, -1 if other < index else 1)


@lru_cache(maxsize=1)
def _probe() -> KeyAgreement:
    """Any secret will do: such keys give zero with each."""
    return KeyAgreement(bytes(range(KEY_BYTES)))


def check_exchange(public: bytes) -> None:
    """Refuse public keys of small order: no neighbour could agree on a key with them."""
    for start in range(0, len(public), KEY_BYTES):
        _probe().key(public[start : start + KEY_BYTES], b"")
