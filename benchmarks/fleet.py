"""Many enrolled nodes of one user each, of whom the server picks a cohort: all in one process.

``python -m benchmarks.fleet``: 100,000 nodes, cohorts of 300; writes ``results/fleet.json``. The
protocol is whole: keys, shares, masks, noise in shares. Nodes that were never asked cost the server
an identity and a place in a list. Times are of one process that plays all parties; what one node
computes is said apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fpfl
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import Contribution, SystemChance
from fpfl.federation.node import answered
from fpfl.federation.rounds import federate
from fpfl.federation.secagg import Authority, Identity, choose_graph

NODES, COHORT, ROUNDS = 100_000, 300, 3
SAMPLES, FEATURES = 8, 20
SCHEMA = fpfl.Schema(
    shape=(FEATURES,),
    classes=2,
    attributes=(fpfl.Attribute("kind", ("a", "b")),),
    samples_per_user=float(SAMPLES),
)


def user(node: int) -> fpfl.FederatedDataset:
    """What a node has: made when it is asked for, and always the same."""
    rng = np.random.default_rng([7, node])
    features = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return fpfl.FederatedDataset.from_samples(
        features,
        (features[:, 0] > 0).astype(int),
        schema=SCHEMA,
        attributes=rng.integers(0, 2, (SAMPLES, 1)),
        users=np.zeros(SAMPLES, dtype=int),
    )


def agreed(nodes: int, cohort: int, rounds: int) -> Agreement:
    """One user on every node; the server picks."""
    return Agreement(
        model=lambda: fpfl.mlp(FEATURES, (16,), seed=1),
        schema=SCHEMA,
        population=nodes,
        cohort=cohort,
        rounds=rounds,
        nodes=nodes,
        constraint=fpfl.fnr_parity("kind", tolerance=0.05),
        method=fpfl.OneGradient(),
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="picked"),
    )


@dataclass
class Fleet:
    """A courier to nodes in this process; a state is kept for those alone that were asked."""

    agreement: Agreement
    identities: list[Identity]
    states: dict[int, bytes] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    bytes_: Counter[str] = field(default_factory=Counter)

    def nodes(self, enough: int, timeout: float) -> list[int]:
        """All of them can be reached."""
        return list(range(len(self.identities)))

    def exchange(
        self, requests: Mapping[int, dict[str, Any]], timeout: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Ask one node after the other."""
        for node, request in requests.items():
            step, begun = str(request["step"]), time.perf_counter()
            self.states[node], answer = answered(
                request,
                self.states.get(node, b""),
                self.identities[node],
                lambda node=node: Contribution(self.agreement, lambda: user(node), SystemChance()),  # type: ignore[misc]
            )
            self.seconds[step] += time.perf_counter() - begun
            self.answers[step] += 1
            self.bytes_[step] += sum(map(_size, [*request.values(), *answer.values()]))
            yield node, answer


def _size(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, bytes | str) else 8


def measured(nodes: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Enrol, agree, and train for a few rounds."""
    begun = time.perf_counter()
    authority = Authority.make()
    identities = [authority.enrol(f"phone-{i:07}", i + 1) for i in range(nodes)]
    enrolling = time.perf_counter() - begun
    begun = time.perf_counter()
    agreement = agreed(nodes, cohort, rounds)
    agreement.engine(user(0))  # tried once in a process, not once a node
    agreeing = time.perf_counter() - begun
    fleet = Fleet(agreement, identities)
    begun = time.perf_counter()
    federate(agreement, fleet, identities[0].authority)
    whole = time.perf_counter() - begun
    inside = sum(fleet.seconds.values())
    return {
        "nodes": nodes,
        "cohort": cohort,
        "rounds": rounds,
        "numbers": agreement.encoding.size,
        "asked": len(fleet.states),
        "enrolling_seconds": round(enrolling, 1),
        "agreeing_seconds": round(agreeing, 2),
        "round_seconds": round(whole / rounds, 2),
        "server_seconds_a_round": round((whole - inside) / rounds, 2),
        "node_milliseconds": {
            step: round(1000 * seconds / fleet.answers[step], 2)
            for step, seconds in fleet.seconds.items()
        },
        "node_bytes": {step: round(n / fleet.answers[step]) for step, n in fleet.bytes_.items()},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def graphs() -> list[dict[str, Any]]:
    """How long it takes to choose who masks with whom, were all of them asked at once."""
    rows = []
    for nodes in (1000, 10_000, 100_000, 1_000_000):
        least = 2 * nodes // 3 + 1
        begun = time.perf_counter()
        choice = choose_graph(nodes, nodes // 5, nodes - least, fewest=least)
        seconds = time.perf_counter() - begun
        rows.append({"nodes": nodes, "degree": choice.degree, "milliseconds": 1000 * seconds})
    return [{**row, "milliseconds": round(row["milliseconds"], 1)} for row in rows]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--cohort", type=int, default=COHORT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    from fpfl.experiments.runner import about_this_run

    start = time.perf_counter()
    how = f"--nodes {options.nodes} --cohort {options.cohort} --rounds {options.rounds}"
    found = {
        "graphs": graphs(),
        "fleet": measured(options.nodes, options.cohort, options.rounds),
        "about": {
            **about_this_run(f"python -m benchmarks.fleet {how}", time.perf_counter() - start),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }
    text = json.dumps(found, indent=1) + "\n"
    (Path(__file__).parent / "results" / "fleet.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
