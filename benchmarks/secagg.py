"""Secure aggregation: where the time of a round goes, all parties in one process, no transport.

``python -m benchmarks.secagg``: writes ``results/secagg.json``; then with ``--peer`` for Flower's
SecAgg+, in its own environment (three minutes). Set OMP_NUM_THREADS=1: nothing here uses a second
core. Client times are sums over all clients, one after the other.

What one process changes: a node's credential is verified once in it and not once by every
neighbour. That is how it is for nodes whose process has met its neighbours before ("warm"). For
nodes that meet for the first time, or whose process is new for each message, the same round is
measured with that memory emptied before each client ("cold").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environments import ROOT, python_of
from fpfl.experiments.runner import about_this_run
from fpfl.federation.secagg import (
    STEPS,
    Aggregation,
    Authority,
    ClientState,
    Deal,
    Dealing,
    Identity,
    advertise,
    choose_graph,
    identity,
    mask,
    shamir,
    share,
    unmask,
)

AUTHORITY = Authority.make()


def enrolled(nodes: int) -> dict[str, Identity]:
    """So many nodes."""
    return {f"node-{i:05}": AUTHORITY.enrol(f"node-{i:05}", i) for i in range(1, nodes + 1)}


@dataclass
class Times:
    """Seconds by step, of all clients together and of the server."""

    clients: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    server: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    storing: float = 0.0
    state_bytes: int = 0

    @property
    def whole(self) -> float:
        """The round without storing states."""
        return sum(self.clients.values()) + sum(self.server.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "whole_seconds": round(self.whole, 4),
            "clients_seconds": {step: round(value, 4) for step, value in self.clients.items()},
            "server_seconds": {step: round(value, 4) for step, value in self.server.items()},
            "storing_states_seconds": round(self.storing, 4),
            "largest_state_bytes": self.state_bytes,
        }


def one_round(
    nodes: dict[str, Identity], session: Dealing, leave: int = 0, cold: bool = False
) -> Times:
    """A dealing for one session, in which some leave before they mask; its sum is checked."""
    times = Times()
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**32, session.size, dtype=np.uint32)
    vectors = {name: base + np.uint32(node.index) for name, node in nodes.items()}
    gone = set(rng.choice(list(nodes), leave, replace=False).tolist())
    deal = Deal(session, AUTHORITY.trust, nodes)
    server: Deal | Aggregation = deal
    states: dict[str, ClientState] = {}
    while server.step != "done":
        step, start = server.step, time.perf_counter()
        requests = server.requests()
        times.server[step] += time.perf_counter() - start
        for name, request in requests.items():
            if step == "mask" and name in gone:
                continue
            if cold:
                identity._signed.cache_clear()
            start = time.perf_counter()
            states[name], answer = answered(step, nodes[name], states.get(name), request, vectors)
            between = time.perf_counter()
            data = states[name].to_bytes()
            ClientState.from_bytes(data)
            stored = time.perf_counter()
            server.take(name, answer)
            end = time.perf_counter()
            times.clients[step] += between - start
            times.storing += stored - between
            times.server[step] += end - stored
            times.state_bytes = max(times.state_bytes, len(data))
        start = time.perf_counter()
        server.close_step()
        if server is deal and deal.step == "done":
            server = Aggregation(deal, 0, {})
        times.server[step] += time.perf_counter() - start
    assert isinstance(server, Aggregation)
    count, indices = len(server.survivors), sum(nodes[name].index for name in server.survivors)
    expected = base * np.uint32(count) + np.uint32(indices)
    if not np.array_equal(server.total(), expected) or count != len(nodes) - leave:
        raise SystemExit("the sum is wrong")
    return times


def answered(
    step: str, node: Identity, state: ClientState | None, request: Any, vectors: dict[str, Any]
) -> Any:
    """A client's part of a step."""
    if step == "advertise":
        return advertise(node, Dealing.from_message(request))
    assert state is not None
    if step == "share":
        return share(state, request, node)
    if step == "mask":
        return mask(state, request, vectors[node.name], node)
    return unmask(state, request, node)


def a_session(nodes: int, size: int, degree: int | None, threshold: int, least: int) -> Dealing:
    return Dealing(b"benchmark", 1, 1, size, threshold, least, degree)


def best(repeats: int, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The fastest of some rounds: other processes only ever slow one down."""
    rounds = [one_round(*arguments, **options) for _ in range(repeats)]
    fastest = min(rounds, key=lambda times: times.whole)
    return {**fastest.as_dict(), "all_whole_seconds": [round(one.whole, 3) for one in rounds]}


def cohort_of_200() -> dict[str, Any]:
    """200 clients × 3,100 numbers."""
    choice = choose_graph(200, colluding=20, dropping=10)
    nodes = enrolled(200)
    session = a_session(200, 3100, choice.degree, choice.threshold, 190)
    one_round(nodes, session)  # load and warm up
    # What an `fpfl.federation.Agreement` of 200 nodes assumes where nothing is said.
    careful = choose_graph(200, colluding=40, dropping=66)
    safer = a_session(200, 3100, careful.degree, careful.threshold, 134)
    return {
        "the agreement's defaults": {
            "degree": careful.degree,
            "threshold": careful.threshold,
            **best(2, nodes, safer),
        },
        "clients": 200,
        "numbers": 3100,
        "degree": choice.degree,
        "threshold": choice.threshold,
        "assumed": "at most 20 collude and 10 drop out; 2^-40 for privacy, 2^-20 for correctness",
        "nobody leaves": best(4, nodes, session),
        "10 leave": best(2, nodes, session, leave=10),
        "nobody leaves, cold": best(1, nodes, session, cold=True),
    }


def cohort_of_1000() -> dict[str, Any]:
    """1,000 clients × 160,000 numbers with 5 % of them leaving: every client is run."""
    choice = choose_graph(1000, colluding=100, dropping=50)
    session = a_session(1000, 160_000, choice.degree, choice.threshold, 950)
    found = one_round(enrolled(1000), session, leave=50).as_dict()
    clients, server = found["clients_seconds"], found["server_seconds"]
    return {
        "clients": 1000,
        "numbers": 160_000,
        "degree": choice.degree,
        "threshold": choice.threshold,
        "leaving": 50,
        "extrapolated": False,
        "one_client_milliseconds": {s: round(1000 * clients[s] / 1000, 3) for s in STEPS},
        "one_client_whole_milliseconds": round(sum(clients.values()), 3),
        "server_whole_seconds": round(sum(server.values()), 3),
        **found,
    }


def growth() -> list[dict[str, Any]]:
    """How a client's and the server's time grow, one thing at a time; 5 % leave."""
    rows = []
    settings = [(n, 3100, 26) for n in (50, 100, 200, 400)]
    settings += [(100, size, 26) for size in (10_000, 40_000, 160_000)]
    settings += [(100, 3100, degree) for degree in (12, 50, None)]
    for n, size, degree in settings:
        threshold = (degree * 17 // 26) if degree else 2 * n // 3 + 1
        session = a_session(n, size, degree, threshold, n // 2)
        times = one_round(enrolled(n), session, leave=n // 20)
        rows.append(
            {
                "clients": n,
                "numbers": size,
                "neighbours": degree or n - 1,
                "threshold": threshold,
                "one_client_milliseconds": round(1000 * sum(times.clients.values()) / n, 3),
                "server_seconds": round(sum(times.server.values()), 4),
            }
        )
    return rows


def sharing() -> dict[str, Any]:
    """Shamir here and in pycryptodome, which Flower uses: 32 bytes among 27, threshold 17."""

    def milliseconds(call: Any, repeats: int) -> float:
        call()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return round(1000 * min(times), 4)

    secret, indices = bytes(range(32)), list(range(1, 28))
    shares = dict(zip(indices[:17], shamir.make_shares(secret, 17, indices), strict=False))

    def combine() -> None:
        shamir._weights.cache_clear()
        shamir.combine_shares(shares)

    found = {
        "make, here": milliseconds(lambda: shamir.make_shares(secret, 17, indices), 50),
        "combine, here": milliseconds(combine, 50),
        "combine with known indices, here": milliseconds(lambda: shamir.combine_shares(shares), 50),
    }
    try:
        from Crypto.Protocol.SecretSharing import Shamir
    except ImportError:
        return found
    halves = secret[:16], secret[16:]
    pieces = [Shamir.split(17, 27, half)[:17] for half in halves]
    found["make, pycryptodome"] = milliseconds(
        lambda: [Shamir.split(17, 27, half) for half in halves], 3
    )
    found["combine, pycryptodome"] = milliseconds(
        lambda: [Shamir.combine(piece) for piece in pieces], 3
    )
    return found


def flower() -> dict[str, Any]:
    """Flower's SecAgg+ with as many clients, numbers, shares and the same threshold."""
    python = str(python_of("flower"))
    choice = choose_graph(200, colluding=20, dropping=10)
    assert choice.degree is not None
    found: dict[str, Any] = {}
    for how in ("direct", "simulation"):
        command = [python, "-m", "benchmarks.peers.flower_secagg", "--how", how]
        command += ["--shares", str(choice.degree + 1), "--threshold", str(choice.threshold)]
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
        found[how] = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        **found,
        "date": about_this_run("", None)["date"],
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "differs": "Flower's protocol has no signatures or credentials, 32-bit seeds for masks, "
        "and quantisation of floats in it",
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="measure Flower's SecAgg+ instead")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "secagg.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    start = time.perf_counter()
    if options.peer:
        found["flower"] = flower()
    else:
        found |= {
            "200 x 3,100": cohort_of_200(),
            "sharing_milliseconds": sharing(),
            "growth": growth(),
            "1,000 x 160,000": cohort_of_1000(),
        }
        found["about"] = {
            **about_this_run("python -m benchmarks.secagg", time.perf_counter() - start),
            "cryptography": version("cryptography"),
            "numpy": version("numpy"),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        }
    text = json.dumps(found, indent=1) + "\n"
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
