"""The server's arithmetic at the end: secrets from shares, masks from secrets, then the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    Invalid,
    KeyAgreement,
    add_mask,
    derive,
    public_of,
)
from fpfl.federation.secagg.session import Session
from fpfl.federation.secagg.shamir import combine_shares

Shares = Mapping[int, bytes]
"""Shares of one secret, by their holders' indices."""


def recovered(shares: Shares, threshold: int) -> bytes:
    """A secret from the shares of the first t holders: the same t for many secrets."""
    first = sorted(shares)[:threshold]
    return combine_shares({index: shares[index] for index in first})


def remove_self_mask(
    total: NDArray[np.uint32], session: Session, index: int, shares: Shares, committed: bytes
) -> None:
    """Take PRG(b) of a survivor off the total; :class:`Invalid` if it committed to another b."""
    seed = recovered(shares, session.threshold)
    if transcript.commitment(session, b"seed", index, 0, seed) != committed:
        raise Invalid("the shares of its seed do not give the seed that it committed to.")
    add_mask(total, derive(seed, transcript.self_mask_of(session, index)), -1)


def remove_pairwise_masks(
    total: NDArray[np.uint32],
    session: Session,
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
    session
        For whom.
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
        mask = agreement.key(key, transcript.mask_of(session, index, other))
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
