"""Reading the first two answers of a node, which the server keeps and passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.client import SEALED_BYTES
from fpfl.federation.secagg.identity import Credential
from fpfl.federation.secagg.primitives import KEY_BYTES, SIGNATURE_BYTES, Invalid, verify
from fpfl.federation.secagg.recovery import check_exchange
from fpfl.federation.secagg.session import Request, Session, read_bytes, read_many
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


def read_advert(session: Session, authority: bytes, name: str, answer: Request) -> Advert:
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
