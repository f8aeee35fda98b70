"""A node's side: five requests, five answers.

Each step is a function of the state and the request, and gives the next state and the answer.
A request that breaks the protocol raises :class:`~fpfl.federation.secagg.session.Refused`: then
there is no answer and the state stays as it was. What a node never does, whatever it is asked:

- mask two vectors in a session, or with fewer than t neighbours (itself included) to hold its
  secrets;
- sign two sets of survivors, or one without itself or with fewer than `least`;
- give shares before t nodes that it knows have signed the same survivors;
- give both shares of one node: a survivor's seed, anybody else's key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.identity import Credential, Identity, Trust
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    ByteSource,
    Invalid,
    KeyAgreement,
    add_mask,
    derive,
    public_of,
    seal,
    sign,
    unseal,
    verify,
)
from fpfl.federation.secagg.session import (
    Message,
    Request,
    Session,
    fingerprint,
    read_many,
    read_names,
)
from fpfl.federation.secagg.shamir import SHARE_BYTES, make_shares
from fpfl.federation.secagg.state import ClientState, Held, Peer, refusing
from fpfl.federation.secagg.transcript import COMMITMENT_BYTES

Vector = NDArray[np.uint32]

SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


def advertise(
    identity: Identity, session: Session, source: ByteSource = os.urandom
) -> tuple[ClientState, Message]:
    """Step 1: two fresh pairs of keys, the public halves signed.

    Parameters
    ----------
    identity
        Who the node is.
    session
        From :meth:`Session.from_message`, after a look at its settings.
    source
        Where random bytes come from.
    """
    channel, masking = source(KEY_BYTES), source(KEY_BYTES)
    public = public_of(channel) + public_of(masking)
    signed = transcript.advertised(session, identity.name, identity.index, public)
    state = ClientState(
        session,
        identity.name,
        identity.index,
        "advertise",
        public=public,
        channel=channel,
        masking=masking,
    )
    answer: Message = {
        **session.header("advertise"),
        "credential": identity.credential.to_bytes(),
        "public": public,
        "signature": sign(identity.signing, signed),
    }
    return state, answer


def share(
    state: ClientState, request: Request, identity: Identity, source: ByteSource = os.urandom
) -> tuple[ClientState, Message]:
    """Step 2: check the neighbours' keys; share the masking key and a seed among them."""
    with refusing(state, request, identity, "share", "advertise"):
        peers = _peers(state, request, identity.authority)
    session, own = state.session, state.index
    seed = source(KEY_BYTES)
    holders = [peer.index for peer in peers]
    keys = make_shares(state.masking, session.threshold, holders, source)
    seeds = make_shares(seed, session.threshold, holders, source)
    nonces = source(NONCE_BYTES * len(peers))
    sealed, commitments, held = [], [], []
    for place, (peer, key, part) in enumerate(zip(peers, keys, seeds, strict=True)):
        commitments.append(transcript.share_commitments(session, own, peer.index, key, part))
        if peer.index == own:
            sealed.append(b"")
            held.append(Held(state.name, key, part))
        else:
            nonce = nonces[NONCE_BYTES * place : NONCE_BYTES * (place + 1)]
            context = transcript.sealed(session, own, peer.index)
            sealed.append(seal(peer.channel, nonce, key + part, context))
    after = replace(
        state,
        done="share",
        public=b"",
        channel=b"",
        seed=seed,
        peers=tuple(peer for peer in peers if peer.index != own),
        held=tuple(held),
    )
    answer: Message = {
        **session.header("share"),
        "sealed": sealed,
        "commitments": commitments,
        "seed_commitment": transcript.commitment(session, b"seed", own, 0, seed),
    }
    return after, _signed(answer, identity)


def _peers(state: ClientState, request: Request, authority: Trust) -> list[Peer]:
    """The neighbours and the node itself, in the order of their indices, each one checked."""
    session = state.session
    credentials = request.get("credentials")
    count = len(credentials) if isinstance(credentials, list) else 0
    most = count if session.degree is None else session.degree + 1
    if not session.threshold <= count <= most:
        raise Invalid(
            f"there must be from {session.threshold} to {most} nodes, this one among them, to "
            f"share with, but got {count}."
        )
    publics = read_many(request, "publics", {2 * KEY_BYTES}, count)
    signatures = read_many(request, "signatures", {SIGNATURE_BYTES}, count)
    agreement = KeyAgreement(state.channel)
    peers: list[Peer] = []
    names: set[str] = set()
    for data, public, signature in zip(credentials, publics, signatures, strict=True):  # type: ignore[arg-type]
        if type(data) is not bytes:
            raise Invalid("'credentials' must hold byte strings.")
        credential = Credential.verified(data, authority)
        name, index = credential.name, credential.index
        if name in names or (peers and index <= peers[-1].index):
            raise Invalid(f"{name!r} or its index {index} is there twice, or out of order.")
        names.add(name)
        if name == state.name or index == state.index:
            if (name, index, public) != (state.name, state.index, state.public):
                raise Invalid(f"{name!r} has this node's name or index, but is not this node.")
            peers.append(Peer(name, index, credential.key))
            continue
        signed = transcript.advertised(session, name, index, public)
        verify(credential.key, signature, signed, f"the keys of {name!r}")
        info = transcript.channel_of(session, state.index, index)
        channel = agreement.key(public[:KEY_BYTES], info)
        peers.append(Peer(name, index, credential.key, public[KEY_BYTES:], channel))
    if state.name not in names:
        raise Invalid("this node is not among those to share with.")
    return peers


def mask(
    state: ClientState,
    request: Request,
    vector: Vector | Callable[[], Vector],
    identity: Identity,
) -> tuple[ClientState, Message]:
    """Step 3: open the shares that came, and answer the vector under all masks.

        y = x + PRG(b) + Σ_{v of higher index} PRG(s_uv) − Σ_{v of lower index} PRG(s_uv)  mod 2³²

    A sealed pair of shares that does not open, or is not what its dealer committed to, is reported
    and not counted, but it stops nobody: the other holders' shares may do.

    Parameters
    ----------
    state, request
        As they are.
    vector
        ``session.size`` numbers of type uint32, or a function that gives them, which is called
        only when the request is in order.
    identity
        Who signs.
    """
    session = state.session
    with refusing(state, request, identity, "mask", "share"):
        known = {peer.name: peer for peer in state.peers}
        senders = read_names(request, "senders")
        if not known.keys() >= set(senders):
            raise Invalid("shares came from a node that is no neighbour of this one.")
        sealed = read_many(request, "sealed", {SEALED_BYTES}, len(senders))
        lengths = {2 * COMMITMENT_BYTES}
        commitments = read_many(request, "commitments", lengths, len(senders))
        partners = [known[name] for name in senders]
        held, unreadable = list(state.held), []
        for peer, text, commitment in zip(partners, sealed, commitments, strict=True):
            try:
                held.append(_opened(state, peer, text, commitment))
            except Invalid:
                unreadable.append(peer.name)
        if len(held) < session.threshold:
            raise Invalid(
                f"shares of {session.threshold} nodes are needed, this one's among them, but only "
                f"{len(held)} came and could be read."
            )
        agreement = KeyAgreement(state.masking)
        keys = [
            agreement.key(peer.masking, transcript.mask_of(session, state.index, peer.index))
            for peer in partners
        ]
    x = vector() if callable(vector) else vector
    if not isinstance(x, np.ndarray) or x.dtype != np.uint32 or x.shape != (session.size,):
        raise ValueError(
            f"vector must be an array of {session.size} numbers of type uint32, but got "
            f"{getattr(x, 'dtype', type(x).__name__)} of shape {getattr(x, 'shape', None)}."
        )
    total = x.copy()
    add_mask(total, derive(state.seed, transcript.self_mask_of(session, state.index)), 1)
    for peer, key in zip(partners, keys, strict=True):
        add_mask(total, key, 1 if state.index < peer.index else -1)
    after = replace(
        state,
        done="mask",
        masking=b"",
        seed=b"",
        peers=tuple(Peer(peer.name, peer.index, peer.signing) for peer in partners),
        held=tuple(held),
    )
    answer: Message = {
        **session.header("mask"),
        "vector": total.astype("<u4", copy=False).tobytes(),
        "unreadable": unreadable,
    }
    return after, _signed(answer, identity)


def _signed(answer: Message, identity: Identity) -> Message:
    """The answer with the node's signature: the server cannot tell from it alone what was sent."""
    return {**answer, "signature": sign(identity.signing, transcript.answered(answer))}


def _opened(state: ClientState, peer: Peer, sealed: bytes, commitments: bytes) -> Held:
    session = state.session
    context = transcript.sealed(session, peer.index, state.index)
    text = unseal(peer.channel, sealed, context)
    key, seed = text[:SHARE_BYTES], text[SHARE_BYTES:]
    expected = transcript.share_commitments(session, peer.index, state.index, key, seed)
    if expected != commitments:
        raise Invalid(f"the shares of {peer.name!r} are not those it committed to.")
    return Held(peer.name, key, seed)


def consent(
    state: ClientState, request: Request, identity: Identity
) -> tuple[ClientState, Message]:
    """Step 4: sign the survivors, one set and no other.

    The request lists all of them. A hash would be shorter, but then a node could not see that they
    are as many as `least` demands; in the complete graph it also sees that each one is a node whose
    credential it has checked. With few neighbours it knows those alone by their credentials, and
    has the server's word for the rest.
    """
    session = state.session
    with refusing(state, request, identity, "consent", "mask", "consent"):
        names = read_names(request, "survivors")
        survivors = set(names)
        if len(names) < session.least:
            raise Invalid(f"at least {session.least} must survive, but got {len(names)}.")
        if state.name not in survivors:
            raise Invalid(
                "this node is not among the survivors, but its vector is with the server."
            )
        if session.degree is None and not survivors <= {
            state.name,
            *(peer.name for peer in state.peers),
        }:
            raise Invalid("among the survivors is a node that took no part before.")
        signed = transcript.survived(session, names)
        if state.signed not in (b"", signed):
            raise Invalid("other survivors were signed before: one set in a session.")
    after = state
    if not state.signed:
        after = replace(
            state,
            done="consent",
            signed=signed,
            peers=tuple(peer for peer in state.peers if peer.name in survivors),
            held=tuple(
                Held(one.name, b"", one.seed)
                if one.name in survivors
                else Held(one.name, one.key, b"")
                for one in state.held
            ),
        )
    return after, {**session.header("consent"), "signature": sign(identity.signing, signed)}


def unmask(state: ClientState, request: Request) -> tuple[ClientState, Message]:
    """Step 5: shares of survivors' seeds and of drop-outs' masking keys, once t have signed."""
    session = state.session
    with refusing(state, request, None, "unmask", "consent", "unmask"):
        asked = fingerprint(request)
        if state.done == "unmask":
            if asked != state.asked:
                raise Invalid("shares were given before, for another request.")
            return state, _revealed(session, *state.answered)
        _check_consents(state, request)
        held = {one.name: one for one in state.held}
        seeds = _wanted(request, "seeds", {name: one.seed for name, one in held.items()})
        keys = _wanted(request, "keys", {name: one.key for name, one in held.items()})
    after = replace(
        state, done="unmask", peers=(), held=(), asked=asked, answered=(tuple(seeds), tuple(keys))
    )
    return after, _revealed(session, *after.answered)


def _check_consents(state: ClientState, request: Request) -> None:
    """Whether t nodes, this one and neighbours that survived, signed what this one signed."""
    signers = read_names(request, "signers")
    signatures = read_many(request, "signatures", {SIGNATURE_BYTES}, len(signers))
    threshold = state.session.threshold
    if len(signers) + 1 < threshold:
        raise Invalid(
            f"{threshold} nodes must have signed the survivors, this one among them, but got "
            f"{len(signers)} others."
        )
    keys = {peer.name: peer.signing for peer in state.peers}
    for name, signature in zip(signers, signatures, strict=True):
        if name not in keys:
            raise Invalid(f"{name[:50]!r} is no neighbour that survived, and cannot consent.")
        verify(keys[name], signature, state.signed, f"the survivors by {name!r}")


def _wanted(request: Request, what: str, shares: Mapping[str, bytes]) -> list[bytes]:
    """The shares that are asked for. Of each node one kind was kept: the other cannot be given."""
    names = read_names(request, what)
    for name in names:
        if not shares.get(name):
            raise Invalid(
                f"the share of {name[:50]!r} among the {what} is not to be had: of survivors the "
                "seed alone is revealed, of other neighbours the key alone."
            )
    return [shares[name] for name in names]


def _revealed(session: Session, seeds: tuple[bytes, ...], keys: tuple[bytes, ...]) -> Message:
    return {**session.header("unmask"), "seeds": list(seeds), "keys": list(keys)}
