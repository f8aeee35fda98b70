"""A node's side, the last two steps: what it signs, and what it reveals after that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fpfl.federation.secagg import transcript
from fpfl.federation.secagg.identity import Identity
from fpfl.federation.secagg.primitives import SIGNATURE_BYTES, Invalid, sign, verify
from fpfl.federation.secagg.session import (
    Message,
    Request,
    Session,
    fingerprint,
    read_many,
    read_names,
)
from fpfl.federation.secagg.state import ClientState, Held, refusing


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
