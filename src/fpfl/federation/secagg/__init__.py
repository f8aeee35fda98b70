"""Secure aggregation: the sum of many nodes' vectors, and nothing else about them.

The protocol of Bonawitz et al. (2017) with its consistency check, over a graph of few neighbours
for large cohorts (Bell et al. 2020); keys and shares are dealt for many sums at once, and a sum
takes two exchanges. It is arithmetic on messages alone: how they travel is for others
to decide. Vectors are whole numbers modulo 2³².

With the complete graph, t > 2n/3 and fewer than n/3 nodes that collude with it, a server learns the
sum over one set of at least `least` nodes, whatever it does. With few neighbours that holds for a
server that follows the protocol. Nobody is kept from lying about their own vector, and a node that
deals useless shares can spoil a session, though not learn from it.
"""

from fpfl.federation.secagg.client import advertise, mask, share, unmask
from fpfl.federation.secagg.graph import COMPLETE_UP_TO, GraphChoice, choose_graph
from fpfl.federation.secagg.identity import Authority, Credential, Identity, Trust
from fpfl.federation.secagg.primitives import Invalid
from fpfl.federation.secagg.server import Aggregation, Deal
from fpfl.federation.secagg.session import (
    STEPS,
    Abandoned,
    Dealing,
    Message,
    Refused,
    Session,
)
from fpfl.federation.secagg.state import ClientState

__all__ = [
    "COMPLETE_UP_TO",
    "STEPS",
    "Abandoned",
    "Aggregation",
    "Authority",
    "ClientState",
    "Credential",
    "Deal",
    "Dealing",
    "GraphChoice",
    "Identity",
    "Invalid",
    "Message",
    "Refused",
    "Session",
    "Trust",
    "advertise",
    "choose_graph",
    "mask",
    "share",
    "unmask",
]
