"""The figures of docs/federation.md: a real federation, and secure aggregation on its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fpfl.privacy.statement import round_up

ROOT = Path(__file__).parents[1]


def figures() -> str:
    """The federation of ``make federation-test`` beside the simulation."""
    found = _read(ROOT / "docs" / "results" / "federation" / "results.json", "make federation-test")
    lines = [
        "| Adult, five nodes | federation | simulation | difference |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, key in (("test accuracy", "accuracy"), ("test gap (FNR, sex)", "gap")):
        here, there = found[key]["federation"], found[key]["simulation"]
        lines.append(f"| {name} | {here:.4f} | {there:.4f} | {abs(here - there):.1e} |")
    lines.append(
        f"| parameters, of a distance of {found['model_moved']:.2f} | | "
        f"| {found['model_error']:.1e} (bound {found['model_error_bound']:.1e}) |"
    )
    return (
        "\n".join(lines)
        + f"\n\n`{found['command']}`: {found['rounds']} rounds in {found['seconds']:.0f} s, TLS "
        f"and node authentication on, ε = {round_up(found['epsilon'])} with noise in shares, seed "
        f"{found['seed']}; {found['date']}, {found['hardware']}, flwr {found['versions']['flwr']}, "
        f"torch {found['versions']['torch']}.\n"
    )


def secagg() -> str:
    """What the protocol costs, beside Flower's."""
    path = ROOT / "benchmarks" / "results" / "secagg.json"
    found = _read(path, "python -m benchmarks.secagg")
    small, large, flower = found["200 x 3,100"], found["1,000 x 160,000"], found["flower"]
    ours = small["nobody leaves"]["whole_seconds"]
    usual = small["the agreement's defaults"]
    lines = [
        "| 200 nodes × 3,100 numbers, one core | seconds | times the first |",
        "| --- | ---: | ---: |",
        f"| fpfl, a tenth colludes and a twentieth drops out: {small['degree']} neighbours, "
        f"t = {small['threshold']} | {ours:.2f} | 1 |",
        f"| the same, 10 nodes drop out | {small['10 leave']['whole_seconds']:.2f} "
        f"| {small['10 leave']['whole_seconds'] / ours:.2f} |",
        f"| fpfl as an agreement of 200 nodes has it (a fifth collude, a third drop out): "
        f"{usual['degree']} neighbours, t = {usual['threshold']} | {usual['whole_seconds']:.2f} "
        f"| {usual['whole_seconds'] / ours:.1f} |",
        "| Flower's SecAgg+, its own work in one process "
        f"| {flower['direct']['whole_seconds']:.1f} "
        f"| {flower['direct']['whole_seconds'] / ours:.0f} |",
        "| Flower's SecAgg+, a round of its simulation "
        f"| {flower['simulation']['whole_seconds']:.1f} "
        f"| {flower['simulation']['whole_seconds'] / ours:.0f} |",
    ]
    text = "\n".join(lines)
    text += (
        f"\n\n1,000 nodes × 160,000 numbers, {large['degree']} neighbours, {large['leaving']} "
        f"nodes leaving: {large['one_client_whole_milliseconds']:.1f} ms for a node, "
        f"{large['server_whole_seconds']:.1f} s for the server. How it grows:\n\n"
        "| nodes | numbers | neighbours | a node, ms | the server, s |\n"
        "| ---: | ---: | ---: | ---: | ---: |\n"
    )
    for row in found["growth"]:
        text += (
            f"| {row['clients']:,} | {row['numbers']:,} | {row['neighbours']} "
            f"| {row['one_client_milliseconds']:.1f} | {row['server_seconds']:.2f} |\n"
        )
    about = found["about"]
    return (
        f"{text}\n`{about['command']}`, {about['date']}, {about['hardware']}, Python "
        f"{about['python']}, cryptography {about['cryptography']}.\n"
    )


def _read(path: Path, command: str) -> Any:
    if not path.exists():
        raise SystemExit(f"{path.name} is missing: run {command}")
    return json.loads(path.read_text(encoding="utf-8"))


def fleet() -> str:
    """Many enrolled nodes of one user each, of whom the server picks some."""
    found = _read(ROOT / "benchmarks" / "results" / "fleet.json", "python -m benchmarks.fleet")
    row, about = found["fleet"], found["about"]
    node = row["node_milliseconds"]
    lines = [
        f"| {row['nodes']:,} enrolled nodes, {row['cohort']} picked a round | |",
        "| --- | ---: |",
        f"| enrolling all of them | {row['enrolling_seconds']:.1f} s |",
        f"| the agreement, with its graph and the trial of the model | "
        f"{row['agreeing_seconds']:.1f} s |",
        f"| the server's own work in a round | {row['server_seconds_a_round']:.2f} s |",
        f"| a node's own work in a round | {sum(node.values()):.0f} ms |",
        f"| of it training, clipping, rounding and masking | {node['mask']:.0f} ms |",
        f"| what a node sends and is sent in a round ({row['numbers']:,} numbers) | "
        f"{sum(row['node_bytes'].values()) / 1024:.0f} KiB |",
        f"| memory of the one process with all parties | {row['peak_mib']} MiB |",
        "",
        "| all of them asked at once | neighbours | choosing the graph, ms |",
        "| ---: | ---: | ---: |",
        *(
            f"| {each['nodes']:,} | {each['degree']} | {each['milliseconds']:.1f} |"
            for each in found["graphs"]
        ),
    ]
    return (
        "\n".join(lines) + f"\n\n`{about['command']}`, {about['date']}, {about['hardware']}, load "
        f"{about['load_average_at_end']:.0f} beside it, {row['rounds']} rounds.\n"
    )


def rounds() -> str:
    """A round as documented: real processes, five nodes, beside how it was."""
    path = ROOT / "benchmarks" / "results" / "federation_rounds.json"
    found = _read(path, "python -m benchmarks.federation_rounds")
    lines = [
        "| five nodes, Adult, noise in shares | a round, s | CPU of a node and round, s | "
        "the first round, with starting and dealing, s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, words in (("now", "now"), ("before", "five exchanges, a process for each (0.1)")):
        row = found[name]
        lines.append(
            f"| {words} | {row['seconds_a_round']:.1f} | "
            f"{row['cpu_seconds_a_node_and_round']:.2f} | {row['first_round_seconds']:.0f} |"
        )
    return (
        "\n".join(lines) + f"\n\n`{found['command']}`, {found['now']['rounds']} and "
        f"{found['before']['rounds']} rounds one after the other, {found['date']}, "
        f"{found['hardware']}, load {found['load_at_the_end'][0]:.0f} at the end; TLS and node "
        "authentication on, no `hold`.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "figures": figures,
    "secagg": secagg,
    "fleet": fleet,
    "rounds": rounds,
}
"""What ``<!-- federation: NAME -->`` stands for."""
