"""What the server does: the round, the optimiser's step, model selection."""

from fpfl.server.loop import (
    Callback,
    Federation,
    Outcome,
    RoundEvent,
    Server,
    ServerSettings,
    serve,
)
from fpfl.server.selection import Candidate, Selection
from fpfl.server.simulation import Simulation

__all__ = [
    "Callback",
    "Candidate",
    "Federation",
    "Outcome",
    "RoundEvent",
    "Selection",
    "Server",
    "ServerSettings",
    "Simulation",
    "serve",
]
