r"""What a statement adds to an accountant's figures: who adds up, small terms, assumptions.

Noise in whole numbers. Accountants of sampled cohorts, and the exact formula of the Gaussian
mechanism, speak of the Gaussian. What is added is a discrete Gaussian of N numbers in a run with
the standard deviation s = 2²⁴ steps (`fpfl.aggregation.noise`). Rounded Gaussian numbers are
post-processing, and two bounds say how far the discrete ones are from those. One is additive,

    δ + (1 + e^ε) √N 2⁻⁵³    at the same ε,

from the total variation between the two. Where e^ε makes it large, another holds, by the ratio of
their probabilities D and G. For a whole number x, with u uniform on (−½, ½),

    G(x)/D(x) = E exp(−xu/s² − u²/2s²) · Z/(s√2π)    lies between e^{−1/8s²} and e^{x²/24s⁴},

but for a factor 1 + 3 exp(−2π² s²), and Σ x² ≤ 2s² (2N + 3t) + N/2 but for a chance of e^{−t}
(Laurent and Massart 2000). With t = ε + 42 these make

    ε + κ,    (1 + κ) δ + 2⁻⁵⁹,    κ = (N + t)/(3 s²):

a set has at most e^{N/8s²} times its probability under rounded noise, that is at most e^ε times
the neighbour's plus δ, and going back costs e^{(4N + 6t + 1)/24s²} and the chance e^{ε − t}.
"""

from __future__ import annotations

import math
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
        Whether answers are held back for a time that was agreed on.
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
        times = (
            "Answers were agreed to take at least a given number of seconds (hold=...), whoever "
            "was sampled. A node that needs longer writes it down for itself, and its time can be "
            "seen; whether one did is not known here."
        )
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


ALONE = "alone"
"""A user's contribution is a function of that user's samples alone. Where a run does not say so, it
was begun by a version that did not keep to it."""

KERNELS = (
    "What a user sends is a function of that user's samples alone, bit for bit; this rests on the "
    "kernels' behaviour at fixed shapes, tested at the start of the run on its device."
)
"""What every private run that is computed here assumes."""

BEFORE = (
    "NOT ESTABLISHED: this run was begun by fpfl 0.1.0 or before. There one user's data could "
    "change what other users send, by more than the noise covers: every ε here was computed for a "
    "sensitivity that this version did not keep. Treat its ε as unknown, and train again."
)
BEFORE_EVALUATED = (
    "NOT ESTABLISHED: this evaluation was made by fpfl 0.1.0 or before. There one held-out user "
    "could change what others' samples count as, by more than the noise covers. Treat its ε as "
    "unknown."
)
BEFORE_CHARGED = (
    "Begun by fpfl 0.1.0 or before, where one user's data could change what other users send: what "
    "these runs cost is not established, and may be more than was charged: {runs}."
)
BEFORE_REFUSED = (
    "the run in {path} is private and was begun by fpfl 0.1.0 or before, where one user's data "
    "could change what other users send, by more than the noise covers. Its ε is not established, "
    "and going on would not mend what it has released: start a new run, charged to the "
    "population's ledger on top of this one (the old one can still be read and reported)"
)

BREACH = 2.0**-40
"""The chance that a session's graph lets secrets of secure aggregation be put together."""

_GRID = 2.0**48


@dataclass(frozen=True)
class DeltaTerm:
    """A term of δ that is no accountant's, and what it is for."""

    name: str
    value: float


@dataclass(frozen=True)
class Beyond:
    """What a run is apart from its plan, as far as its statement depends on that.

    Parameters
    ----------
    numbers
        How many numbers it may release, in all rounds; None where that is not known.
    declared
        Whether K was declared; otherwise it was counted from the data. None: not known.
    contributions
        `ALONE`, or None for a run of a version that did not keep to it.
    assumptions
        What else it rests on, in sentences.
    """

    numbers: int | None = None
    declared: bool | None = None
    contributions: str | None = ALONE
    assumptions: tuple[str, ...] = ()


def whole_numbers(
    epsilon: float, delta: float, numbers: int, part: float = 1e-3
) -> tuple[float, float]:
    """What noise in whole numbers adds to ε and to δ: the module's bounds.

    The additive one, which leaves ε as it is, as long as it is this part of δ at most.
    """
    if numbers == 0:
        return 0.0, 0.0
    additive = math.exp(min(epsilon, 700.0)) + 1
    additive *= math.sqrt(numbers) * 2.0**-53
    if additive <= part * delta:
        return 0.0, additive
    kappa = (numbers + epsilon + 42) / (3 * _GRID)
    return kappa, kappa * delta + 2.0**-59


def who_is_public(neighbours: str, declared: bool | None) -> str:
    """What is taken for public about who there is."""
    if neighbours == "add-remove":
        return "The number of users K is a declared number; who they are is not taken as public."
    text = "The list of users is taken as public: that somebody is on it is not hidden."
    if declared is None:
        return text
    counted = "K is a declared number." if declared else "K was counted from the data."
    return f"{text} {counted}"


def check_declared(neighbours: str, declared: bool) -> None:
    """Refuse add-remove neighbours for a population that was counted."""
    if neighbours == "add-remove" and not declared:
        raise ValueError(
            "neighbours='add-remove' hides who is among the users, and here the number of users K "
            "was counted from the data: q, σ and ε would tell it. Declare K, a public number that "
            "need not be exact: Schema(population=...) or data.declared(...) in Python, "
            "population = ... in a table's schema or under [data.declared] in a config, or an "
            "estimator's ledger=. Or use neighbours='zero-out', for which the list of users is "
            "public"
        )
