"""Who is whose neighbour and who is still there: the counting that decides whether a sum can be.

Sets of names alone. A node's *circle* is the node itself and its neighbours: those that hold shares
of its secrets.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

Names = frozenset[str]


@dataclass
class Roster:
    """Neighbours, and the sets of the protocol as they become known.

    Parameters
    ----------
    threshold
        t.
    circles
        By name, the node and its neighbours, in the order of their indices.
    masking
        U2: those that dealt shares, and that others mask with.
    survivors
        U3: those whose masked vector came.
    unreadable
        Pairs of a dealer and a holder that could not read its shares.
    """

    threshold: int
    circles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    masking: Names = frozenset()
    survivors: Names = frozenset()
    unreadable: set[tuple[str, str]] = field(default_factory=set)

    def near(self, name: str, among: Container[str]) -> list[str]:
        """The node and its neighbours, as far as they are among these."""
        return [one for one in self.circles[name] if one in among]

    def well_surrounded(self, there: Names) -> Names:
        """Those with t of these around them, themselves included."""
        return frozenset(name for name in there if len(self.near(name, there)) >= self.threshold)

    def core(self, there: Names) -> Names:
        """The largest part of these in which each has t around it.

        A node with fewer would refuse to mask, and its neighbours would have masked with it
        already. So it is left out before anybody masks; then others may have too few, and so on.
        """
        while (kept := self.well_surrounded(there)) != there:
            there = kept
        return there

    def wanted(self) -> tuple[list[str], list[str]]:
        """Whose seeds and whose keys it takes; of a drop-out without survivors around it, none."""
        gone = self.masking - self.survivors
        return sorted(self.survivors), sorted(one for one in gone if self.near(one, self.survivors))

    def asked_of(self, holder: str) -> tuple[list[str], list[str]]:
        """Of whom a node is asked for shares, of seeds and of keys: whose shares it could read."""
        dealers = [
            one for one in self.near(holder, self.masking) if (one, holder) not in self.unreadable
        ]
        seeds = [one for one in dealers if one in self.survivors]
        return seeds, [one for one in dealers if one not in self.survivors]

    def lost(self, there: Names) -> str | None:
        """Why these cannot recover all that it takes; None where they can."""
        for names in self.wanted():
            for dealer in names:
                near = self.near(dealer, there)
                count = sum((dealer, holder) not in self.unreadable for holder in near)
                if count < self.threshold:
                    return (
                        f"{count} of those that hold shares of {dealer!r} are left, and "
                        f"{self.threshold} are needed"
                    )
        return None
