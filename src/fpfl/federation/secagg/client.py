r"""A node's side: four requests, four answers.

Two of them deal keys and shares for many sessions ahead; then every session takes two. Each step is
a function of the state and the request, and gives the next state and the answer. A request that
breaks the protocol raises :class:`~fpfl.federation.secagg.session.Refused`: then there is no answer
and the state stays as it was. What a node never does, whatever it is asked:

- mask two vectors in a session, or with fewer than t neighbours (itself included) to hold its
  secrets;
- consent to two sets of survivors in a session, or to one without itself or with fewer than
  `least`, of whom it could read the shares where all nodes are neighbours;
- reveal shares but to t nodes that it knows and that consented to what it consented to: the same
  survivors of the same session, after the same broadcast;
- give both shares of one node: a survivor's seed, anybody else's key.

Consent and shares in one answer
--------------------------------
Let T_i be what node i consents to, a hash of the session, of the broadcast it was sent and of the
survivors that it was named (`transcript.consented`). Let k_ij be a key of the session that i and j
alone have. Node i seals the shares that it reveals under a fresh key κ_i, shares κ_i among the
survivors around it, t of whom have it together, and gives the server

    the sealed shares,  σ_ii,
    c_ij = σ_ij ⊕ PRF(k_ij, i → j, T_i)    and    e_ij = PRF(k_ij, j → i, T_i)    for each j

where σ_ij is j's part of κ_i. The e_ij are i's consent: σ_ji = c_ji ⊕ e_ij exactly where T_j = T_i.
So κ_i comes out where t nodes around i, i among them, consented to what i did. Where j consented to
something else, or to nothing, its pad over σ_ij is a value of a PRF that nobody has seen: σ_ij
stays uniform. A colluding j can open σ_ij whatever it consented to, as it could sign anything.

This is what signed consents gave (Bonawitz et al. 2017, Figure 4), where a node revealed shares
only after it had seen t signatures around it under its own survivors, in one exchange less. Why a
server that deviates learns one sum at most, with the complete graph of n nodes, c < n/3 of them
colluding and t > 2n/3: shares of honest nodes come out for T only if t − c honest nodes or more
consented to T, and each of the n − c consents once in a session. If two different T came out, then
2(t − c) ≤ n − c, so t ≤ (n + c)/2 < 2n/3. So they come out for one T. In it a node is a survivor or
not: honest holders reveal its seed or its key, never both, and since t > c, colluders alone cannot
recover the other. Each honest node that consented to T saw that at least `least` survive, and
itself with them.

All this is about n nodes that have one dealing in common. A server could give the same settings to
nodes twice, or to more than n, tell each of other neighbours, open the key of a node that dropped
out in one place, and count it as a survivor in another: its masks can be taken off, and the sum has
fewer nodes than names. So what two nodes share comes from a hash of all that either was told of,
names and keys, and a node counts towards `least` only those whose shares it could read: they were
told of the same n nodes.

The broadcast in the masks
--------------------------
A server could send different models to different nodes, such that all but one's vectors are known
beforehand, and read that one's off the sum (Pasquini et al. 2022). So the keys of all masks are
derived with a hash of the broadcast that the node itself was sent. Of two survivors with different
broadcasts neither's mask cancels the other's, and neither's masking key comes out: every sum in
which one of them is has a mask in it that is uniform to the server.

Secrets of other sessions
-------------------------
Masking keys and seeds are drawn afresh for every session. Of two nodes' keys each session has its
own, from a chain that moves on (`state.Chain`). Nothing that is revealed in one session is used in
another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.encoding import Invalid, decode, encode
from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.identity import Credential, Identity, Trust
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    ByteSource,
    KeyAgreement,
    add_mask,
    derive,
    pseudorandom,
    public_of,
    seal,
    sign,
    unseal,
    verify,
    xor,
)
from fpfl.federation.secagg.session import (
    Dealing,
    Message,
    Request,
    Session,
    read_many,
    read_names,
)
from fpfl.federation.secagg.shamir import SHARE_BYTES, make_shares
from fpfl.federation.secagg.state import (
    Chain,
    ClientState,
    Held,
    Partner,
    Peer,
    Played,
    Secrets,
    refusing,
)
from fpfl.federation.secagg.transcript import COMMITMENT_BYTES

Vector = NDArray[np.uint32]

SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


def advertise(
    identity: Identity, dealing: Dealing, source: ByteSource = os.urandom
) -> tuple[ClientState, Message]:
    """Step 1: a fresh pair of keys for agreeing, one for masks per session, their publics signed.

    Parameters
    ----------
    identity
        Who the node is.
    dealing
        From :meth:`Dealing.from_message`.
    source
        Where random bytes come from.
    """
    channel, *masking = (source(KEY_BYTES) for _ in range(1 + dealing.sessions))
    public = b"".join(public_of(secret) for secret in (channel, *masking))
    signed = transcript.advertised(dealing, identity.name, identity.index, public)
    state = ClientState(
        dealing,
        identity.name,
        identity.index,
        "advertise",
        public=public,
        channel=channel,
        secrets=tuple(Secrets(secret) for secret in masking),
    )
    answer: Message = {
        **dealing.header("advertise"),
        "credential": identity.credential.to_bytes(),
        "public": public,
        "signature": sign(identity.signing, signed),
    }
    return state, answer


def share(
    state: ClientState, request: Request, identity: Identity, source: ByteSource = os.urandom
) -> tuple[ClientState, Message]:
    """Step 2: check the neighbours' keys; share each session's masking key and seed."""
    with refusing(state, request, identity, "advertise", "share"):
        state.dealing.expect(request, "share")
        peers = _peers(state, request, identity.authority)
    own = state.index
    holders = [own if peer is None else peer.index for peer in peers]
    chains = [None if peer is None else Chain(peer.chain) for peer in peers]
    sealed: list[list[bytes]] = [[] for _ in peers]
    commitments: list[list[bytes]] = [[] for _ in peers]
    seeds, secrets = [], []
    for place, drawn in enumerate(state.secrets):
        session, seed = state.dealing.session(place), source(KEY_BYTES)
        keys = make_shares(drawn.masking, session.threshold, holders, source)
        parts = make_shares(seed, session.threshold, holders, source)
        seeds.append(transcript.commitment(session, b"seed", own, 0, seed))
        nonces = source(NONCE_BYTES * len(peers))
        for i, (holder, chain, key, part) in enumerate(
            zip(holders, chains, keys, parts, strict=True)
        ):
            commitments[i].append(transcript.share_commitments(session, own, holder, key, part))
            if chain is None:
                secrets.append(Secrets(drawn.masking, seed, key, part))
                continue
            sealing = pseudorandom(chain.take(), transcript.seal_of(session, own, holder))
            nonce = nonces[NONCE_BYTES * i : NONCE_BYTES * (i + 1)]
            context = transcript.sealed(session, own, holder)
            sealed[i].append(seal(sealing, nonce, key + part, context))
    after = replace(
        state,
        done="share",
        public=b"",
        channel=b"",
        secrets=tuple(secrets),
        peers=tuple(peer for peer in peers if peer is not None),
    )
    answer: Message = {
        **state.dealing.header("share"),
        "sealed": [b"".join(each) for each in sealed],
        "commitments": [b"".join(each) for each in commitments],
        "seed_commitments": b"".join(seeds),
    }
    return after, _signed(answer, identity)


def _peers(state: ClientState, request: Request, authority: Trust) -> list[Peer | None]:
    """The neighbours in the order of their indices, each one checked; None for the node itself."""
    dealing = state.dealing
    credentials = request.get("credentials")
    count = len(credentials) if isinstance(credentials, list) else 0
    most = count if dealing.degree is None else dealing.degree + 1
    if not dealing.threshold <= count <= most:
        raise Invalid(
            f"there must be from {dealing.threshold} to {most} nodes, this one among them, to "
            f"share with, but got {count}."
        )
    lengths = {KEY_BYTES * (1 + dealing.sessions)}
    publics = read_many(request, "publics", lengths, count)
    signatures = read_many(request, "signatures", {SIGNATURE_BYTES}, count)
    told = transcript.told(dealing, credentials, publics)
    agreement = KeyAgreement(state.channel)
    peers: list[Peer | None] = []
    names: set[str] = set()
    last = 0
    for data, public, signature in zip(credentials, publics, signatures, strict=True):  # type: ignore[arg-type]
        if type(data) is not bytes:
            raise Invalid("'credentials' must hold byte strings.")
        credential = Credential.verified(data, authority)
        name, index = credential.name, credential.index
        if name in names or index <= last:
            raise Invalid(f"{name!r} or its index {index} is there twice, or out of order.")
        names.add(name)
        last = index
        if name == state.name or index == state.index:
            if (name, index, public) != (state.name, state.index, state.public):
                raise Invalid(f"{name!r} has this node's name or index, but is not this node.")
            peers.append(None)
            continue
        signed = transcript.advertised(dealing, name, index, public)
        verify(credential.key, signature, signed, f"the keys of {name!r}")
        info = transcript.channel_of(dealing, state.index, index, told)
        chain = agreement.key(public[:KEY_BYTES], info)
        peers.append(Peer(name, index, public[KEY_BYTES:], chain, data))
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

    where the keys of the masks are derived from b and s_uv with a hash of all that the request
    says beside the protocol's own fields: the broadcast.

    A sealed pair of shares that does not open, or is not what its dealer committed to, is reported
    and not counted, but it stops nobody: the other holders' shares may do.

    Parameters
    ----------
    state, request
        As they are.
    vector
        ``dealing.size`` numbers of type uint32, or a function that gives them, which is called
        only when the request is in order.
    identity
        Who signs.
    """
    with refusing(state, request, identity, "share", "mask"):
        place = state.dealing.place(request)
        state.dealing.session(place).expect(request, "mask")
        session, secrets, around, after = state.playing(place)
        known = {peer.name: (peer, secret) for peer, secret in around}
        senders = read_names(request, "senders")
        if not known.keys() >= set(senders):
            raise Invalid("shares came from a node that is no neighbour of this one.")
        sealed = read_many(request, "sealed", {SEALED_BYTES}, len(senders))
        commitments = read_many(request, "commitments", {2 * COMMITMENT_BYTES}, len(senders))
        partners = [known[name] for name in senders]
        for peer, _ in partners:
            Credential.verified(peer.credential, identity.authority)
        held = [Held(state.name, secrets.key_share, secrets.seed_share)]
        unreadable = []
        for (peer, secret), text, commitment in zip(partners, sealed, commitments, strict=True):
            try:
                held.append(_opened(session, state.index, peer, secret, text, commitment))
            except Invalid:
                unreadable.append(peer.name)
        if len(held) < session.threshold:
            raise Invalid(
                f"shares of {session.threshold} nodes are needed, this one's among them, but only "
                f"{len(held)} came and could be read."
            )
        digest = transcript.broadcast(request)
        agreement = KeyAgreement(secrets.masking)
        own = state.index
        keys = [
            agreement.key(peer.masking, transcript.mask_of(session, digest, own, peer.index))
            for peer, _ in partners
        ]
    x = vector() if callable(vector) else vector
    if not isinstance(x, np.ndarray) or x.dtype != np.uint32 or x.shape != (session.size,):
        raise ValueError(
            f"vector must be an array of {session.size} numbers of type uint32, but got "
            f"{getattr(x, 'dtype', type(x).__name__)} of shape {getattr(x, 'shape', None)}."
        )
    total = x.copy()
    add_mask(total, derive(secrets.seed, transcript.self_mask_of(session, digest, own)), 1)
    for (peer, _), key in zip(partners, keys, strict=True):
        add_mask(total, key, 1 if own < peer.index else -1)
    consenting = [
        Partner(
            peer.name,
            peer.index,
            pseudorandom(secret, transcript.consent_of(session, own, peer.index)),
        )
        for peer, secret in partners
    ]
    after = replace(after, played=Played(place, digest, tuple(consenting), tuple(held)))
    answer: Message = {
        **session.header("mask"),
        "vector": total.astype("<u4", copy=False).tobytes(),
        "unreadable": unreadable,
    }
    return after, _signed(answer, identity)


def _signed(answer: Message, identity: Identity) -> Message:
    """The answer with the node's signature: the server cannot tell from it alone what was sent."""
    return {**answer, "signature": sign(identity.signing, transcript.answered(answer))}


def _opened(
    session: Session, own: int, peer: Peer, secret: bytes, sealed: bytes, commitments: bytes
) -> Held:
    key = pseudorandom(secret, transcript.seal_of(session, own, peer.index))
    text = unseal(key, sealed, transcript.sealed(session, peer.index, own))
    key, seed = text[:SHARE_BYTES], text[SHARE_BYTES:]
    expected = transcript.share_commitments(session, peer.index, own, key, seed)
    if expected != commitments:
        raise Invalid(f"the shares of {peer.name!r} are not those it committed to.")
    return Held(peer.name, key, seed)


def unmask(
    state: ClientState, request: Request, identity: Identity, source: ByteSource = os.urandom
) -> tuple[ClientState, Message]:
    """Step 4: consent to the survivors, and reveal shares where t nodes consent to the same.

    Of survivors the share of the seed is revealed, of the others that were masked with the share of
    the masking key. See the head of this module.

    The request lists all survivors. A hash would be shorter, but then a node could not see that
    they are as many as `least` demands; in the complete graph it counts those alone whose shares it
    could read. With few neighbours it knows those alone by their credentials, and has the server's
    word for the rest.
    """
    with refusing(state, request, identity, "share", "unmask"):
        played = state.played
        if played is None or state.dealing.place(request) != played.place:
            raise Invalid("no vector was masked in this session, or another one came after it.")
        session = state.dealing.session(played.place)
        session.expect(request, "unmask")
        names = _survivors(state, played, request)
        consented = transcript.consented(session, played.digest, names)
        if played.consented:
            if consented != played.consented:
                raise Invalid("other survivors were consented to before: one set in a session.")
            return state, _kept(played.answer)
        near = [one for one in played.partners if one.name in set(names)]
        if len(near) + 1 < session.threshold:
            raise Invalid(
                f"of the {session.threshold} nodes that must consent, this one among them, only "
                f"{len(near) + 1} survived around it."
            )
    answer = _signed(_revealed(state, session, played, set(names), consented, source), identity)
    done = replace(played, partners=(), held=(), consented=consented, answer=encode(answer))
    return replace(state, played=done), answer


def _kept(answer: bytes) -> Message:
    found: Message = decode(answer)
    return found


def _survivors(state: ClientState, played: Played, request: Request) -> list[str]:
    """The survivors that are named, where they are such as a node consents to."""
    dealing, names = state.dealing, read_names(request, "survivors")
    if len(names) < dealing.least:
        raise Invalid(f"at least {dealing.least} must survive, but got {len(names)}.")
    if state.name not in names:
        raise Invalid("this node is not among the survivors, but its vector is with the server.")
    if played.consented:
        return names  # the same as before, or none
    known = {state.name, *(partner.name for partner in played.partners)}
    if dealing.degree is None:
        if not set(names) <= known:
            raise Invalid("among the survivors is a node that took no part before.")
        # The others may have been dealt to elsewhere, and their keys may be known from there.
        readable = set(names) & {one.name for one in played.held}
        if len(readable) < dealing.least:
            raise Invalid(
                f"at least {dealing.least} whose shares could be read must survive, but got "
                f"{len(readable)}."
            )
    return names


def _revealed(
    state: ClientState,
    session: Session,
    played: Played,
    survivors: set[str],
    consented: bytes,
    source: ByteSource,
) -> Message:
    """What a node's answer to "unmask" holds: see the head of this module."""
    own = state.index
    near = sorted(
        (one for one in played.partners if one.name in survivors), key=lambda one: one.index
    )
    key = source(KEY_BYTES)
    holders = [own, *(partner.index for partner in near)]
    parts = make_shares(key, session.threshold, holders, source)
    index_of = {state.name: own, **{one.name: one.index for one in played.partners}}
    held = sorted(played.held, key=lambda one: index_of[one.name])
    shares = b"".join(one.seed if one.name in survivors else one.key for one in held)
    return {
        **session.header("unmask"),
        # The key is used once: so may its nonce be.
        "revealed": seal(key, bytes(NONCE_BYTES), shares, transcript.boxed(session, own)),
        "own": parts[0],
        "parts": b"".join(
            xor(part, pad(one.key, own, one.index, consented))
            for one, part in zip(near, parts[1:], strict=True)
        ),
        "consents": b"".join(pad(one.key, one.index, own, consented) for one in near),
        "commitments": b"".join(
            transcript.commitment(session, b"part", own, holder, part)
            for holder, part in zip(holders, parts, strict=True)
        ),
    }


def pad(key: bytes, owner: int, holder: int, consented: bytes) -> bytes:
    """What covers the holder's part of the owner's key, for whoever did not consent to the same."""
    return pseudorandom(key, transcript.pad_of(owner, holder, consented), SHARE_BYTES)
