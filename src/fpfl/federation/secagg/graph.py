r"""Who masks with whom, and how many neighbours and shares it takes.

With all nodes as each other's neighbours, every node agrees on n − 1 keys. Bell et al. (2020) let
it do so with k of them only, in a graph that nobody can foresee: nodes stand on a circle in a
random order, and each has the k/2 next ones on either side as neighbours.

The order is a hash of the session, of all names *and of the fresh keys* that were advertised. With
names alone it would be known before a session starts, and those who collude could be enrolled, or
others kept away, at chosen places. Every honest node's keys are random, so while anybody can still
decide who takes part, the order is not determined.

That is for a server that follows the protocol and remembers all it sees (semi-honest). One that
deviates could try orders until it likes one, by choosing which advertisements to count: against
such a server only the complete graph holds, with t > 2n/3 and fewer than n/3 colluding.

How large k and t have to be: let n nodes take part, at most c of them colluding with the server and
at most d dropping out. With X colluding and Y dropped among a node's k neighbours, both
hypergeometric (k drawn from n − 1, of which c or d are marked), three things may go wrong:

    a node's colluding neighbours recover its secrets        n · P[X ≥ t]    (c of a − 1)
    the honest survivors fall apart in groups, each of
    which has its own sum (two gaps of k/2 on the circle)    n(n−1)/2 · C(n−k, b−k)/C(n, b)
    too few neighbours are left for some node                n · P[k − Y < t]

with b = c + d. Where fewer than n take part, c is a larger part of them: the first is computed for
the fewest, a of them. The others are largest with all n, since those who never came are some of
the d. The first two are each kept below 2^−(privacy_bits + 1) and the third below
2^−correctness_bits. All three are ratios of binomial coefficients, compared as whole numbers:
nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, perm

from fpfl.federation.secagg.primitives import digest
from fpfl.federation.secagg.session import Dealing

COMPLETE_UP_TO = 100
"""So many nodes are all each other's neighbours."""

_ORDER = b"fpfl secagg order 1"
_PLACE = b"fpfl secagg place 1"


def neighbours(session: Dealing, keys: Mapping[str, bytes]) -> dict[str, frozenset[str]]:
    """The neighbours of every node, itself among them.

    Parameters
    ----------
    session
        Its degree says how many.
    keys
        By name, the public keys that the node advertised.
    """
    names = sorted(keys)
    n = len(names)
    if session.degree is None or session.degree >= n - 1:
        everybody = frozenset(names)
        return dict.fromkeys(names, everybody)
    listed = [part for name in names for part in (name.encode(), keys[name])]
    order = digest(_ORDER, session.id, *listed)
    circle = sorted(names, key=lambda name: digest(_PLACE, order, name.encode()))
    reach = session.degree // 2
    around = circle[n - reach :] + circle + circle[:reach]
    return {name: frozenset(around[i : i + 2 * reach + 1]) for i, name in enumerate(circle)}


@dataclass(frozen=True)
class GraphChoice:
    """Neighbours of each node (None: all others) and the threshold t among them and itself."""

    degree: int | None
    threshold: int


def choose_graph(
    nodes: int,
    colluding: int,
    dropping: int,
    *,
    fewest: int | None = None,
    privacy_bits: int = 40,
    correctness_bits: int = 20,
    complete_up_to: int = COMPLETE_UP_TO,
) -> GraphChoice:
    """The smallest degree that keeps to the bounds above; for few nodes the complete graph.

    Parameters
    ----------
    nodes
        n, those that are asked.
    colluding, dropping
        c and d: how many of them may tell the server all they know, and how many may fall silent
        at any step.
    fewest
        a, the fewest that may take part from the beginning; by default all n.
    privacy_bits, correctness_bits
        The probability of a breach is at most 2^−privacy_bits, that of a sum which fails for want
        of shares, with at most d drop-outs, at most 2^−correctness_bits, in one session.
    complete_up_to
        So many nodes are all each other's neighbours: that costs little and promises more.

    Returns
    -------
    GraphChoice
        Of all thresholds that its degree allows the largest: it errs towards privacy. For the
        complete graph t = ⌊2n/3⌋ + 1, with which at most one of a node's two secrets can ever be
        recovered while fewer than a third collude, whatever the server does.
    """
    for name, value, lowest in (("nodes", nodes, 2), ("colluding", colluding, 0),
                                ("dropping", dropping, 0)):  # fmt: skip
        if type(value) is not int or not lowest <= value <= max(lowest, nodes):
            raise ValueError(
                f"{name} must be a whole number from {lowest} to nodes, but got {value!r}."
            )
    if colluding + dropping >= nodes - 1:
        raise ValueError(
            f"of {nodes} nodes {colluding} may collude and {dropping} drop out: fewer than two "
            "honest ones are left, whose sum hides nothing. Ask more nodes."
        )
    few = nodes if fewest is None else fewest
    lowest = max(2, colluding + 1)
    if type(few) is not int or not lowest <= few <= nodes:
        raise ValueError(
            f"fewest must be a whole number from {lowest}, with {colluding} that may collude, to "
            f"nodes = {nodes}, but got {fewest!r}."
        )
    end = nodes - 1 if nodes > complete_up_to else 0
    bad = colluding + max(dropping, nodes - few)
    degree = _first_that_holds_together(nodes, bad, end, privacy_bits + 1)
    while degree < end:
        marked = _unlikely(few - 1, colluding, min(degree, few - 1), nodes, privacy_bits + 1)
        private = max(2, marked)
        correct = degree + 1 - _unlikely(nodes - 1, dropping, degree, nodes, correctness_bits)
        if private <= correct:
            return GraphChoice(degree, correct)
        # With one more neighbour the least private threshold does not sink, and the largest
        # correct one rises by 1 at most: none of the degrees in between can do.
        degree += private - correct
        degree += degree % 2
    threshold = 2 * nodes // 3 + 1
    # The node itself may be the one that drops out, but then it is one of the d.
    if threshold > nodes - dropping or colluding >= threshold:
        raise ValueError(
            f"{nodes} nodes are too few for {colluding} that collude and {dropping} that drop out: "
            f"all of them as neighbours need a threshold of {threshold}. Ask more nodes."
        )
    return GraphChoice(None, threshold)


def _first_that_holds_together(nodes: int, bad: int, end: int, bits: int) -> int:
    """The smallest even degree from 2 that keeps survivors together; ``end`` or more for none.

    Each further neighbour multiplies the probability by (b − k)/(n − k) < 1, so that the degrees
    that hold begin somewhere and never end: it is looked for in doubling steps, then by halves.
    """
    low, high = 0, 2
    while high < end and _falls_apart(nodes, bad, high, bits):
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 4 * 2
        if _falls_apart(nodes, bad, middle, bits):
            low = middle
        else:
            high = middle
    return high


def _falls_apart(nodes: int, bad: int, degree: int, bits: int) -> bool:
    """Whether n(n−1)/2 · C(n−k, b−k)/C(n, b) is above 2^−bits.

    The quotient is that of b(b−1)…(b−k+1) and n(n−1)…(n−k+1), which are short numbers.
    """
    pairs = nodes * (nodes - 1) // 2
    return pairs * perm(bad, degree) << bits > perm(nodes, degree)


def _unlikely(others: int, marked: int, drawn: int, nodes: int, bits: int) -> int:
    """The smallest x with n · P[X ≥ x] ≤ 2^−bits: so many marked neighbours no node has.

    X of the ``drawn`` are marked, where ``marked`` of all ``others`` are. The ways to draw exactly
    i marked ones, C(c, i) C(a−c, k−i), are added up from the largest i on, and each follows from
    the one before by a product and a division without remainder.
    """
    i = min(drawn, marked)
    unmarked = others - marked
    ways = comb(marked, i) * comb(unmarked, drawn - i)
    most, tail = comb(others, drawn) // (nodes << bits), ways
    while tail <= most:
        ways = ways * (i * (unmarked - drawn + i)) // ((marked - i + 1) * (drawn - i + 1))
        tail += ways
        i -= 1
    return i + 1
