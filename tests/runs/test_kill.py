"""Runs are killed at random moments and at every call that changes a file, and must survive it."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import killing
import pytest
from conftest import thorough
from safetensors import safe_open

from fpfl.runs.journal import read_past
from fpfl.runs.ledger import RunLedger

# `make kill` runs 200, as before a release; here fewer, in the same time as other tests.
KILLS = int(os.environ.get("FPFL_KILLS", thorough(12, 200)))


def finish(folder: Path, evidence: Path, noise_seed: int | None) -> None:
    process = killing.start(str(folder), str(evidence), noise_seed)
    process.join()
    assert process.exitcode == 0


def check_whole(folder: Path, evidence: Path, noise_seed: int | None) -> None:
    """What must hold at any moment: paid before it was used, and every file whole."""
    if not (folder / "ledger.jsonl").exists():
        assert not killing.released(evidence)
        return
    ledger = RunLedger.look(folder / "ledger.jsonl")
    used = killing.released(evidence)
    assert set(used) <= ledger.charged
    # Used once with these totals, never with others: they were logged before.
    assert all(len(digests) == 1 for digests in used.values())
    assert ledger.spent <= killing.ROUNDS
    past = read_past(folder, noise_seed is not None)
    assert past.next_round > max(used, default=0)
    for file in folder.glob("*.json"):
        json.loads(file.read_text())
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            assert content.keys()


def outcome(folder: Path) -> tuple[bytes, list[dict[str, object]]]:
    history = json.loads((folder / "history.json").read_text())
    return (folder / "model.safetensors").read_bytes(), history


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder / "run", folder / "evidence", 5)
    return outcome(folder / "run")


def test_a_seeded_run_survives_any_number_of_kills(
    tmp_path: Path, undisturbed: tuple[bytes, list[dict[str, object]]]
) -> None:
    """The same model bit for bit; the moments are random, over as many runs as it takes."""
    moments = random.Random(0)
    start = time.monotonic()
    finish(tmp_path / "timed", tmp_path / "timed-evidence", 5)
    whole = time.monotonic() - start
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        folder, evidence = tmp_path / f"run-{runs}", tmp_path / f"evidence-{runs}"
        while True:
            process = killing.start(str(folder), str(evidence), 5)
            process.join(moments.uniform(0.0, 1.2 * whole))
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            kills += 1
            check_whole(folder, evidence, 5)
        assert process.exitcode == 0
        check_whole(folder, evidence, 5)
        assert outcome(folder) == undisturbed
        assert not list(folder.glob(".*.part"))


def test_a_seeded_run_survives_a_kill_at_every_call_that_changes_a_file(
    tmp_path: Path, undisturbed: tuple[bytes, list[dict[str, object]]]
) -> None:
    """Not at random: killed at the n-th call, before it, or in the middle of its write."""
    chosen = random.Random(1)
    n = 1
    while True:
        folder, evidence = tmp_path / f"run-{n}", tmp_path / f"evidence-{n}"
        process = killing.FORKS.Process(
            target=killing.train_and_die, args=(n, n % 2 == 0, str(folder), str(evidence), 5)
        )
        process.start()
        process.join()
        check_whole(folder, evidence, 5)
        if process.exitcode == 0:
            break
        finish(folder, evidence, 5)
        check_whole(folder, evidence, 5)
        assert outcome(folder) == undisturbed
        n += 1 if KILLS >= 200 else chosen.randint(1, 1000 // KILLS)
    assert n > 100


def test_a_bound_that_adapts_survives_kills(tmp_path: Path) -> None:
    """Killed again and again at other calls: the same course of the bound, the same model."""
    import fpfl

    adapts = fpfl.AdaptiveBound(0.3, rate=0.8, reference=0.5, share=0.1)
    clip = fpfl.Clipping(0.1, counts=1.0, adapts=adapts)
    more = {
        "privacy": fpfl.Privacy(noise_multiplier=1.0, clip=clip, max_participations=20),
        "method": fpfl.OneGradient(),
    }

    def run(folder: Path, evidence: Path, call: int | None) -> int | None:
        given = (str(folder), str(evidence), 5)
        process = killing.start(*given, **more) if call is None else killing.FORKS.Process(
            target=killing.train_and_die, args=(call, call % 2 == 0, *given), kwargs=more
        )  # fmt: skip
        if call is not None:
            process.start()
        process.join()
        return process.exitcode

    assert run(tmp_path / "whole", tmp_path / "whole-evidence", None) == 0
    history = outcome(tmp_path / "whole")[1]
    assert len({row["clip_bound"] for row in history}) > 5
    chosen, folder, evidence = random.Random(3), tmp_path / "run", tmp_path / "evidence"
    kills = 0
    while run(folder, evidence, chosen.randint(30, 130)) != 0:
        kills += 1
        check_whole(folder, evidence, 5)
        assert kills < 100, "it gets nowhere"
    assert kills > 3
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_an_unseeded_run_replays_what_it_released_and_never_pays_less(tmp_path: Path) -> None:
    """Its noise is fresh after a crash: lost rounds are charged again, and the budget is kept."""
    chosen = random.Random(2)
    folder, evidence = tmp_path / "run", tmp_path / "evidence"
    for _ in range(max(5, KILLS // 5)):
        call = chosen.randint(1, 60)
        process = killing.FORKS.Process(
            target=killing.train_and_die,
            args=(call, chosen.random() < 0.5, str(folder), str(evidence), None),
        )
        process.start()
        process.join()
        check_whole(folder, evidence, None)
        if process.exitcode == 0:
            break
    finish(folder, evidence, None)
    check_whole(folder, evidence, None)
    ledger = RunLedger.look(folder / "ledger.jsonl")
    done = len(json.loads((folder / "history.json").read_text()))
    assert len(killing.released(evidence)) == done <= ledger.spent <= killing.ROUNDS
    result = json.loads((folder / "result.json").read_text())
    # Whatever a crash lost is missing at the end, and the run says so.
    assert (result["stopped"] is None) == (done == killing.ROUNDS)
    if result["stopped"]:
        assert "budget is spent" in result["stopped"]
