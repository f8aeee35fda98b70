"""A node's answers: one request in, one answer out, and the state to keep until the next.

Torch and the node's data are needed in one of the four steps only, and loaded there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fpfl.federation.secagg import (
    ClientState,
    Dealing,
    GraphChoice,
    Identity,
    Invalid,
    Message,
    Refused,
    advertise,
    mask,
    share,
    unmask,
)

RUN_BYTES = 16
"""A dealing's run is an id of so many bytes, and the agreement's fingerprint."""

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fpfl.federation.contribution import Contribution


def answered(
    request: Mapping[str, Any],
    state: bytes,
    identity: Identity,
    contribution: Callable[[], Contribution],
) -> tuple[bytes, Message]:
    """The next state and the answer; `Refused` where the request breaks the protocol.

    Parameters
    ----------
    request
        What came.
    state
        What was kept after the last request; empty at first.
    identity
        Who this node is.
    contribution
        Makes what computes the node's vector.
    """
    step = request.get("step")
    if step == "advertise":
        try:
            dealing = Dealing.from_message(request)
        except Invalid as error:
            raise Refused(identity.name, str(error)) from None
        kept, answer = advertise(identity, dealing)
        return kept.to_bytes(), answer
    if not state:
        raise Refused(identity.name, f"nothing was begun here, and {step!r} was asked for.")
    before = ClientState.from_bytes(state)
    if step == "share":
        kept, answer = share(before, request, identity)
    elif step == "mask":
        make = partial(_vector, before, request, contribution)
        kept, answer = mask(before, request, make, identity)
    elif step == "unmask":
        kept, answer = unmask(before, request, identity)
    else:
        raise Refused(identity.name, f"there is no step {step!r}.")
    return kept.to_bytes(), answer


def _vector(
    state: ClientState, request: Mapping[str, Any], make: Callable[[], Contribution]
) -> NDArray[np.uint32]:
    """The node's vector, where the dealing is what was agreed on; nothing was revealed so far."""
    from fpfl.federation.contribution import (
        received,
        received_level,
        received_round,
        received_scaling,
    )

    contribution = make()
    agreement, dealing = contribution.agreement, state.dealing
    agreed = {
        "fingerprint": (dealing.run[RUN_BYTES:], agreement.fingerprint),
        "least": (dealing.least, agreement.aggregation.least),
        "graph": (GraphChoice(dealing.degree, dealing.threshold), agreement.graph),
    }
    wrong = [name for name, (given, expected) in agreed.items() if given != expected]
    # The threshold is more than two thirds of those that were agreed on: of more nodes, all of
    # them enrolled, half might do for one of a node's secrets and half for the other.
    if len(state.peers) + 1 > agreement.asked:
        wrong.append("number of nodes")
    if wrong:
        raise Refused(
            state.name,
            f"the server's session has another {' and '.join(wrong)} than this node's agreement: "
            "see that all parties run the same version of the project.",
        )
    try:
        round = received_round(request, agreement)
        size = agreement.encodings(round)[0].size
        if dealing.size != size:
            raise ValueError(f"vectors of round {round} have {size} numbers, not {dealing.size}")
        given: tuple[Any, ...] = ()
        if round > 0:
            w, weights = received(dict(request), agreement)
            level = received_level(request, agreement)
            given = (w, weights, level, received_scaling(request, agreement))
    except ValueError as error:
        raise Refused(state.name, f"{error}.") from None
    return contribution.vector(round, *given)
