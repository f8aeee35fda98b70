"""What a statement says of a federation: who adds up, who adds the noise, who may collude."""

from __future__ import annotations

from dataclasses import dataclass

NOT_PRIVATE = (
    "NOT PRIVATE: coins and noise came from a test generator, and whoever has its seed can take "
    "the noise off. All figures below are those of a run without it."
)
SEES_SUMS = (
    "Against the server: NO GUARANTEE. It learns the exact sum of every round and adds the noise "
    "itself: it must be trusted with these sums. Secure aggregation keeps single contributions "
    "from it, and nothing else."
)


@dataclass(frozen=True)
class Aggregation:
    """How a federation adds up, as far as its promise depends on that.

    Parameters
    ----------
    nodes
        How many are enrolled.
    least
        A sum is opened only with so many nodes' contributions in it.
    colluders
        So many of them may tell the server all they know.
    shares
        Whether nodes add the noise, in shares; otherwise the server does.
    injected
        Whether a test generator stands in for the operating system's randomness.
    held
        Whether answers are held back, so that they take equally long.
    attempts
        The most sessions of secure aggregation in a round.
    """

    nodes: int
    least: int
    colluders: int
    shares: bool
    injected: bool = False
    held: bool = False
    attempts: int = 5

    @property
    def adders(self) -> int:
        """The fewest honest nodes whose noise is in a sum."""
        return self.least - self.colluders


def against_the_curious(parts: Aggregation | None, neighbours: str) -> list[str]:
    """Against a server that follows the protocol, where users toss secret coins."""
    if parts is None:
        return [
            "Against the server of a federation with secret coins and noise in shares: the same. "
            "(This was a simulation of it.)"
        ]
    times = (
        "How long answers take is not hidden: on nodes with many users it may say something about "
        "how many were sampled (hold=... hides it)."
    )
    if parts.held:
        times = "Answers are held back, so that they take equally long whoever was sampled."
    lines = [
        f"Against the server that follows the protocol, and up to {parts.colluders} of the "
        f"{parts.nodes} nodes that tell it all they know: the same ε. From what it is sent it does "
        f"not learn who was sampled, and no sum without the noise of at least {parts.adders} "
        f"honest nodes. {times}"
    ]
    if neighbours == "add-remove":
        lines.append(
            "The server knows which nodes there are. Against it a user's data is protected; that a "
            "node with a single user takes part at all is not."
        )
    return lines


def whose_noise(parts: Aggregation | None) -> str:
    """What kind of noise there is, and by whom."""
    if parts is None:
        return "Gaussian noise"
    if not parts.shares:
        return "Gaussian noise, added by the server,"
    return (
        "Discrete Gaussian noise in shares, added by every node before its vector is masked; the "
        f"shares of {parts.adders} nodes together have a standard deviation"
    )


def several(copies: int) -> list[str]:
    """What is to be known where a person may be on several nodes."""
    if copies == 1:
        return []
    return [
        f"ε holds for people whose data is on at most {copies} nodes: a person's contributions "
        f"together are taken for {copies} bounds, and {copies} times as likely. The noise above is "
        f"for one bound; the nodes add {copies} times as much."
    ]
