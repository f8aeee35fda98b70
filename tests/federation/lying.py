"""A server that lies about its sessions, to open the vectors of single nodes.

It divides the nodes into two halves and tells each that its own half survived. Either half then
gives the seeds of its own and the masking keys of the other: with t shares of both a node's vector
lies open. For that no more than half of a node's holders must do as t, and nobody must miss those
of the other half among the survivors: they are padded with names, made up or of the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import broadcast
from fpfl.federation.rounds import Courier
from fpfl.federation.secagg import Credential, Dealing, Trust, choose_graph, transcript
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    Invalid,
    KeyAgreement,
    add_mask,
    derive,
    unseal,
    xor,
)
from fpfl.federation.secagg.shamir import SHARE_BYTES, recovered

Vectors = dict[str, NDArray[np.uint32]]
ROUND = 1


def lies(agreed: Agreement) -> Iterator[tuple[str, Dealing]]:
    """Sessions that a server might open, the agreed one first, by what it says."""
    nodes, parts = agreed.nodes, agreed.aggregation
    numbers: dict[str, tuple[int, int | None, int]] = {}
    for asked in range(nodes, 400):
        dropping = min(asked - parts.least, asked - (2 * asked // 3 + 1))
        try:
            # What was complete up to fifty nodes, and is now up to a hundred: a lie in either.
            graph = choose_graph(asked, parts.colluders, dropping, complete_up_to=50)
        except ValueError:
            continue
        degree = asked if graph.degree is None else graph.degree
        numbers.setdefault("as agreed", (asked, graph.degree, graph.threshold))
        if graph.threshold <= min(degree, nodes) // 2:
            numbers["more were asked"] = (asked, graph.degree, graph.threshold)
            break
    half = nodes // 2
    numbers["a low threshold"] = (nodes, None, half)
    numbers["fewer were asked"] = (parts.least, None, 2 * parts.least // 3 + 1)
    even = 2 * (nodes // 2)
    numbers["few neighbours"] = (nodes, even, half)
    for what, (asked, few, threshold) in numbers.items():
        # As a session had it when it said how many were asked, and as it has it now.
        for said in (asked.to_bytes(4, "big"), b""):
            yield (
                what,
                Dealing(
                    run=bytes(16) + agreed.fingerprint + said,
                    number=1,
                    sessions=1,
                    size=agreed.encoding.size,
                    threshold=threshold,
                    least=parts.least,
                    degree=few,
                ),
            )


@dataclass
class Lying:
    """Plays one session with the nodes that a courier reaches, and keeps what it opens."""

    agreed: Agreement
    courier: Courier
    authority: Trust
    dealing: Dealing
    invented: bool = True

    def opened(self) -> Vectors:
        """The vectors that both secrets of their nodes are known of, by name."""
        dealing = self.dealing
        self.session = dealing.session(0)
        nodes = self.courier.nodes(self.agreed.nodes, self.agreed.timeout)
        found = self._said(dict.fromkeys(nodes, dealing.to_message()))
        credentials = {
            node: Credential.verified(answer["credential"], self.authority)
            for node, answer in found.items()
        }
        self.index = {one.name: one.index for one in credentials.values()}
        self.place = {one.name: node for node, one in credentials.items()}
        adverts = {credentials[node].name: answer for node, answer in found.items()}
        names = sorted(self.place, key=self.index.__getitem__)
        self.circles = _circles(names, dealing.degree)
        dealt = self._step(
            "share",
            {
                name: {
                    "credentials": [adverts[one]["credential"] for one in circle],
                    "publics": [adverts[one]["public"] for one in circle],
                    "signatures": [adverts[one]["signature"] for one in circle],
                }
                for name, circle in self.circles.items()
            },
        )
        partners = {
            name: [one for one in self.circles[name] if one in dealt and one != name]
            for name in dealt
        }
        model = broadcast(ROUND, self.agreed.spec.flat.vector(), None)
        self.digest = transcript.broadcast(model)
        masked = self._step("mask", {name: model | self._sent(name, partners, dealt)
                                     for name in dealt})  # fmt: skip
        seeds, keys = self._shares(names, set(masked), partners)
        threshold = dealing.threshold
        return {
            name: self._unmasked(name, answer["vector"], seeds[name], keys[name], partners, adverts)
            for name, answer in masked.items()
            if min(len(seeds.get(name, ())), len(keys.get(name, ()))) >= threshold
        }

    def _sent(self, name: str, partners: Any, dealt: Any) -> dict[str, Any]:
        def of(dealer: str, what: str) -> Any:
            return dealt[dealer][what][self.circles[dealer].index(name)]

        senders = partners[name]
        return {
            "senders": senders,
            "sealed": [of(one, "sealed") for one in senders],
            "commitments": [of(one, "commitments") for one in senders],
        }

    def _shares(self, names: list[str], there: set[str], partners: Any) -> Any:
        """Shares of seeds and of keys by dealer and holder's index, from either half."""
        least = self.dealing.least
        halves = [[one for one in names[start::2] if one in there] for start in (0, 1)]
        survivors: dict[str, set[str]] = {}
        for half, other in (halves, halves[::-1]):
            missing = max(0, least - len(half))
            more = [f"nobody-{i}" for i in range(missing)] if self.invented else other[:missing]
            survivors.update({name: {*half, *more} for name in half})
        answers = self._step(
            "unmask", {name: {"survivors": sorted(of)} for name, of in survivors.items()}
        )
        near = {
            name: sorted(
                (one for one in partners[name] if one in survivors[name]),
                key=self.index.__getitem__,
            )
            for name in answers
        }
        seeds: dict[str, dict[int, bytes]] = {}
        keys: dict[str, dict[int, bytes]] = {}
        for name in answers:
            around = sorted([name, *partners[name]], key=self.index.__getitem__)
            for dealer, share in zip(around, self._opened(name, answers, near), strict=False):
                kept = seeds if dealer in survivors[name] else keys
                kept.setdefault(dealer, {})[self.index[name]] = share
        return seeds, keys

    def _opened(self, name: str, answers: Any, near: Any) -> list[bytes]:
        """The shares that a node revealed, if enough others consented to the same."""
        session, own, answer = self.session, self.index[name], answers[name]
        parts = {own: answer["own"]}
        for place, other in enumerate(near[name]):
            if other not in answers or name not in near[other]:
                continue
            pads = answers[other]["consents"]
            part = xor(_cut(answer["parts"], place), _cut(pads, near[other].index(name)))
            at = self.index[other]
            committed = answer["commitments"][32 * (place + 1) : 32 * (place + 2)]
            if transcript.commitment(session, b"part", own, at, part) == committed:
                parts[at] = part
        if len(parts) < session.threshold:
            return []
        key = recovered(parts, session.threshold)
        try:
            shares = unseal(key, answer["revealed"], transcript.boxed(session, own))
        except Invalid:
            return []
        return [_cut(shares, i) for i in range(len(shares) // SHARE_BYTES)]

    def _unmasked(
        self, name: str, vector: bytes, seeds: Any, keys: Any, partners: Any, adverts: Any
    ) -> NDArray[np.uint32]:
        session, own, digest = self.session, self.index[name], self.digest
        x = np.frombuffer(vector, "<u4").copy()
        seed = recovered(seeds, session.threshold)
        add_mask(x, derive(seed, transcript.self_mask_of(session, digest, own)), -1)
        agreement = KeyAgreement(recovered(keys, session.threshold))
        for one in partners[name]:
            public, other = adverts[one]["public"][KEY_BYTES:], self.index[one]
            mask = agreement.key(public, transcript.mask_of(session, digest, own, other))
            add_mask(x, mask, -1 if own < other else 1)
        return x

    def _step(self, step: str, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        of = self.dealing if step == "share" else self.session
        header = of.header(step)
        sent = {self.place[name]: {**header, **request} for name, request in requests.items()}
        found = self._said(sent)
        return {name: found[self.place[name]] for name in requests if self.place[name] in found}

    def _said(self, sent: Any) -> dict[int, Any]:
        return dict(self.courier.exchange(sent, self.agreed.timeout)) if sent else {}


def _cut(data: bytes, place: int) -> bytes:
    return data[SHARE_BYTES * place : SHARE_BYTES * (place + 1)]


def _circles(names: list[str], degree: int | None) -> dict[str, list[str]]:
    """Everybody, or the next ones on either side: half of them are of either half."""
    n = len(names)
    if degree is None or degree >= n - 1:
        return dict.fromkeys(names, names)
    reach = degree // 2
    around = [[(i + j) % n for j in range(-reach, reach + 1)] for i in range(n)]
    return {names[i]: [names[j] for j in sorted(near)] for i, near in enumerate(around)}
