"""A run that tests kill: started in a process of its own, with evidence of what it released."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from fpfl.store import chain

ROUNDS, EVERY = 40, 7
WRITE = os.write  # for evidence, which is not to be killed

# Processes are forked from one that has imported torch and computed nothing: starting one takes
# milliseconds, not seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["safetensors.torch", "warm"])
# What is to be imported beforehand is looked for where a new interpreter looks.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
).rstrip(os.pathsep)


def settings(noise_seed: int | None, **others: Any) -> dict[str, Any]:
    import fpfl

    return {
        "cohort": 6,
        "rounds": ROUNDS,
        "constraint": fpfl.fnr_parity("sex", tolerance=0.02),
        "privacy": fpfl.Privacy(noise_multiplier=1.0, clip=1.0, max_participations=20),
        "seed": 1,
        "noise_seed": noise_seed,
        "selection_window": 3,
    } | others


def train(folder: str, evidence: str, noise_seed: int | None, **others: Any) -> None:
    """Begin the run or go on with it; ``evidence`` gets a line for every round that is used."""
    import torch
    from conftest import make_population

    import fpfl

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", fpfl.FpflWarning)  # so few users drown in noise
    file = os.open(evidence, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: fpfl.RoundEvent) -> None:
        digest = hashlib.sha256(event.v.numpy().tobytes()).hexdigest()
        WRITE(file, f"{event.row['round']} {digest}\n".encode())

    path = Path(folder)
    fpfl.train(
        fpfl.mlp(5, (4,), seed=0),
        make_population(),
        folder=fpfl.RunFolder(
            path, resume=(path / "ledger.jsonl").exists(), checkpoint_every=EVERY
        ),
        callbacks=[note],
        **settings(noise_seed, **others),
    )


def train_and_die(deadly_call: int, torn: bool, *args: Any, **kwargs: Any) -> None:
    """The same, killed at the n-th call that changes a file; ``torn``: in the middle of a write."""
    count = 0

    def deadly(name: str) -> None:
        real = getattr(os, name)

        def call(*values: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == deadly_call:
                if torn and name == "write":
                    real(values[0], bytes(values[1])[: len(values[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*values, **named)

        setattr(os, name, call)

    for name in ("write", "fsync", "fdatasync", "replace", "unlink", "open"):
        deadly(name)
    train(*args, **kwargs)


def start(*args: Any, **kwargs: Any) -> BaseProcess:
    process = FORKS.Process(target=train, args=args, kwargs=kwargs)
    process.start()
    return process


def released(evidence: Path) -> dict[int, set[str]]:
    """Which rounds were used, and the digests of the totals they were used with."""
    found: dict[int, set[str]] = {}
    if evidence.exists():
        for line in evidence.read_text().splitlines():
            round, digest = line.split()
            found.setdefault(int(round), set()).add(digest)
    return found


def counting(patch: pytest.MonkeyPatch, folder: Path) -> tuple[list[str], list[int]]:
    """The names of a folder's files as they are read; the bytes of ledgers that are verified."""
    read, verified = [], []
    text, follow = Path.read_text, chain.follow

    def read_text(path: Path, *args: Any, **how: Any) -> str:
        if path.parent == folder:
            read.append(path.name)
        return text(path, *args, **how)

    def followed(path: Path, data: bytes, before: Any) -> Any:
        if path.parent == folder:
            verified.append(len(data))
        return follow(path, data, before)

    patch.setattr(Path, "read_text", read_text)
    patch.setattr(chain, "follow", followed)
    return read, verified
