"""The run folder: what it holds, how it is resumed, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_population
from killing import counting, settings

import fpfl
from fpfl.privacy.budget import BudgetExhaustedError, PopulationLedger
from fpfl.runs.folder import model_digest
from fpfl.runs.journal import read_past, read_withdrawals, withdraw
from fpfl.runs.ledger import CopiedRunError, RunLedger
from fpfl.store.chain import BusyError, ChainError
from fpfl.store.checkpoints import DamagedError
from fpfl.store.files import StorageError
from fpfl.users import CohortEngine

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
ROUNDS = 12
FAST = fpfl.AdaptiveBound(0.3, rate=1.0, reference=0.3)
ADAPTS = fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(0.1, counts=2.0, adapts=FAST))


class StopError(Exception):
    """Raised by a callback: as far as the folder can tell, a crash."""


def train(
    folder: Path | fpfl.RunFolder | None,
    *,
    noise_seed: int | None = 5,
    stop_after: int | None = None,
    seen: list[fpfl.RoundEvent] | None = None,
    model: torch.nn.Module | None = None,
    data: fpfl.FederatedDataset | None = None,
    **others: Any,
) -> fpfl.Run:
    def watch(event: fpfl.RoundEvent) -> None:
        if seen is not None:
            seen.append(event)
        if event.row["round"] == stop_after:
            raise StopError

    given = settings(noise_seed, rounds=ROUNDS) | others
    return fpfl.train(
        model or fpfl.mlp(5, (4,), seed=0),
        data or make_population(),
        folder=folder,
        callbacks=[watch],
        **given,
    )


def begun(folder: Path, rounds: int = 5, every: int = 3, **others: Any) -> Path:
    """A run that was cut off after some rounds."""
    with pytest.raises(StopError):
        train(fpfl.RunFolder(folder, checkpoint_every=every), stop_after=rounds, **others)
    return folder


def go_on(folder: Path, **others: Any) -> fpfl.Run:
    where = {k: others.pop(k) for k in ("moved", "ledger") if k in others}
    return train(fpfl.RunFolder(folder, resume=True, checkpoint_every=3, **where), **others)


def parameters(run: fpfl.Run) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())


def kinds(folder: Path) -> list[str]:
    return [r["kind"] for r in RunLedger.look(folder / "ledger.jsonl").chain.records]


# --- what is there ------------------------------------------------------------------------------


def test_a_folder_changes_nothing_about_the_run(tmp_path: Path) -> None:
    assert parameters(train(tmp_path / "run")) == parameters(train(None))


def test_a_finished_run_has_everything_and_no_pickle(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    folder = tmp_path / "run"
    names = {file.name for file in folder.iterdir()}
    assert {"run.json", "schema.json", "environment.json", "ledger.jsonl", "model.safetensors",
            "history.json", "result.json", "privacy.txt"} <= names  # fmt: skip
    assert all(file.read_bytes()[:2] != b"\x80\x04" for file in folder.iterdir())
    assert kinds(folder) == ["open", "place", *["charge"] * ROUNDS, "finish"]
    assert json.loads((folder / "history.json").read_text()) == run.history
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0] or environment
    for name in ("ledger.jsonl", *(n for n in names if n.startswith("cohorts"))):
        assert (folder / name).stat().st_mode & 0o077 == 0, f"{name} is for its owner alone"


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"optimizer": lambda w: torch.optim.Adam(w, lr=0.05)},
        {"optimizer": lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9)},
        {"selection": "average"},
        {"selection": "last", "samples_per_user": 2},
        {"privacy": None, "clip": 1.0},
        {"privacy": None, "constraint": None, "noise_seed": None},
        {"privacy": fpfl.Privacy(noise_multiplier=1.0, convention="replace-one")},
        {"privacy": fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(1.0, counts=2.0))},
        {"method": fpfl.OneGradient()},
        {"method": fpfl.OneGradient(decay=0.5), "local": fpfl.FederatedAveraging(2, 0.1)},
        {"method": fpfl.OneGradient(), "privacy": ADAPTS},
        {"privacy": fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(0.1, adapts=FAST)),
         "optimizer": lambda w: torch.optim.Adam(w, lr=0.05)},
        {"privacy": None, "clip": fpfl.Clipping(0.1, adapts=FAST)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [2, 3, 7])
def test_a_seeded_run_resumes_bit_for_bit(tmp_path: Path, others: dict[str, Any], cut: int) -> None:
    """Before the first checkpoint, at one, between two; Adam's moments, means, windows and all."""
    whole = train(None, **others)
    folder = begun(tmp_path / "run", rounds=cut, **others)
    resumed = go_on(folder, **others)
    assert parameters(resumed) == parameters(whole)
    assert resumed.history == whole.history
    assert resumed.selected == whole.selected


def test_a_run_from_before_there_were_two_forms_goes_on(tmp_path: Path) -> None:
    """Its layout does not say which form of v it has: there was the paper's alone."""
    folder = begun(tmp_path / "run", noise_seed=None)
    about = json.loads((folder / "run.json").read_text())
    del about["settings"]["layout"]["form"], about["settings"]["local"]
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"other totals.*the method"):
        go_on(folder, noise_seed=None, method=fpfl.OneGradient())
    assert len(go_on(folder, noise_seed=None).history) == ROUNDS


def test_a_lazy_population_resumes_bit_for_bit(tmp_path: Path) -> None:
    make_population().save(tmp_path / "people")
    data = fpfl.FederatedDataset.open(tmp_path / "people")
    folder = begun(tmp_path / "run", data=data)
    assert parameters(go_on(folder, data=data)) == parameters(train(None, data=data))


def test_dropout_resumes_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    folder = begun(tmp_path / "run", model=model)
    assert parameters(go_on(folder, model=model)) == parameters(train(None, model=model))


def test_a_real_run_replays_what_it_released(tmp_path: Path) -> None:
    """The totals that were logged are used again; only rounds after them are drawn."""
    before: list[fpfl.RoundEvent] = []
    after: list[fpfl.RoundEvent] = []
    folder = begun(tmp_path / "run", noise_seed=None, seen=before)
    go_on(folder, noise_seed=None, seen=after)
    # From the checkpoint on: rounds 4 and 5 again, with the very same totals.
    assert [e.row["round"] for e in after] == list(range(4, ROUNDS + 1))
    for old, new in zip(before[3:], after, strict=False):
        assert torch.equal(old.v, new.v)
        assert torch.equal(old.w, new.w)
    assert RunLedger.look(folder / "ledger.jsonl").spent == ROUNDS


def test_a_real_run_goes_on_with_the_bound_that_it_had(tmp_path: Path) -> None:
    """In its state, and again from the totals that were logged since."""
    how: dict[str, Any] = {"noise_seed": None, "method": fpfl.OneGradient(), "privacy": ADAPTS}
    before: list[fpfl.RoundEvent] = []
    folder = begun(tmp_path / "run", seen=before, **how)
    state = read_past(folder, False).state
    assert ADAPTS.clipping.grid is not None
    grid, u = ADAPTS.clipping.grid, 0.0
    for event in before[: state.round]:
        u = grid.moved(u, event.row["clipped_fraction"])
    assert state.round == 3
    assert state.log_bound == u != 0.0
    after: list[fpfl.RoundEvent] = []
    run = go_on(folder, seen=after, **how)
    assert [e.row for e in after[:2]] == [e.row for e in before[3:5]]
    for event in before[3:]:
        u = grid.moved(u, event.row["clipped_fraction"])
    assert run.history[5]["clip_bound"] == grid.at(grid.level(u))
    assert len({row["clip_bound"] for row in run.history}) > 2


@pytest.mark.parametrize(
    "changed",
    [
        {"clip": fpfl.Clipping(0.1, counts=2.0, adapts=fpfl.AdaptiveBound(0.5, rate=1.0))},
        {"clip": fpfl.Clipping(0.2, counts=2.0, adapts=FAST)},
        {"clip": fpfl.Clipping(0.1, counts=2.0, clipped_share=0.01)},
        {"cohort": 7},
    ],
)
def test_what_moved_the_bound_is_not_changed_between_checkpoints(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Rounds since the last one are gone through again: they had the bounds that they had."""
    private = replace(ADAPTS, budget=100.0)
    how: dict[str, Any] = {"noise_seed": None, "method": fpfl.OneGradient(), "privacy": private}
    folder = begun(tmp_path / "run", **how)
    other = dict(changed)
    if "clip" in other:
        other["privacy"] = replace(private, clip=other.pop("clip"))
    with pytest.raises(ValueError, match=r"with another .*clip bound that adapts"):
        go_on(folder, **how | other)
    go_on(folder, **how)  # as it was
    # At the end there is a checkpoint, and what is new holds from there on.
    go_on(folder, **how | other | {"rounds": ROUNDS + 2})


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole = train(tmp_path / "run")
    events: list[fpfl.RoundEvent] = []
    again = go_on(tmp_path / "run", seen=events)
    assert parameters(again) == parameters(whole)
    assert RunLedger.look(tmp_path / "run" / "ledger.jsonl").spent == ROUNDS


# --- what it refuses ----------------------------------------------------------------------------


def other_data() -> fpfl.FederatedDataset:
    data = make_population()
    data.features[0, 0] += 1e-3
    return data


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"data": "other"}, "data"),
        ({"learning_rate": 0.2}, "settings"),
        ({"rounds": 2 * ROUNDS}, "settings"),
        ({"seed": 2}, "settings"),
        ({"noise_seed": 6}, "settings"),
        ({"model": torch.nn.Linear(5, 1)}, "model"),
    ],
)
def test_a_seeded_run_refuses_to_go_on_with_anything_else(
    tmp_path: Path, others: dict[str, Any], what: str
) -> None:
    folder = begun(tmp_path / "run")
    if others.get("data") == "other":
        others = {"data": other_data()}
    before = contents(folder)
    with pytest.raises(ValueError, match=f"begun with other .*{what}"):
        go_on(folder, **others)
    assert contents(folder) == before


def test_a_seeded_run_refuses_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path / "run")
    monkeypatch.setattr("fpfl.runs.resume.code_fingerprint", lambda *_: "of a later version")
    with pytest.raises(ValueError, match="begun with other code"):
        go_on(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", noise_seed=None)
    ledger = RunLedger.open(folder / "ledger.jsonl")
    with pytest.raises(BusyError, match="ledger"):
        go_on(folder, noise_seed=None)
    ledger.close()
    go_on(folder, noise_seed=None)


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    before = contents(folder)
    with pytest.raises(ValueError, match="not empty"):
        train(folder)
    assert contents(folder) == before
    with pytest.raises(ValueError, match="no run that was begun"):
        go_on(tmp_path / "elsewhere")


def test_a_copied_folder_is_noticed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", noise_seed=None)
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(CopiedRunError, match="moved"):
        go_on(tmp_path / "copy", noise_seed=None)
    # Renamed on the same disk it is the same folder.
    folder.rename(tmp_path / "renamed")
    go_on(tmp_path / "renamed", noise_seed=None)
    go_on(tmp_path / "copy", noise_seed=None, moved=True)


@pytest.mark.parametrize("moved", [False, True])
def test_a_ledger_that_was_cut_to_its_first_line_is_refused(tmp_path: Path, moved: bool) -> None:
    folder = begun(tmp_path / "run", noise_seed=None)
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ChainError, match="lines were taken out of it"):
        go_on(folder, noise_seed=None, moved=moved)


def test_a_copy_is_not_evaluated_beside_the_original(tmp_path: Path) -> None:
    train(tmp_path / "run", noise_seed=None)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(CopiedRunError):
        RunLedger.of_finished(tmp_path / "copy" / "ledger.jsonl")
    # Restored in place: the same folder, another file.
    content = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    (tmp_path / "other").write_bytes(content)
    (tmp_path / "other").replace(tmp_path / "run" / "ledger.jsonl")
    with pytest.raises(CopiedRunError):
        go_on(tmp_path / "run", noise_seed=None)


@pytest.mark.parametrize("which", ["own", "population"])
def test_a_crash_between_two_ledgers_is_made_up_for(tmp_path: Path, which: str) -> None:
    """Their last lines may be lost one without the other; nothing had been released by then."""
    people = tmp_path / "people.jsonl"
    PopulationLedger.create(people, population=30, epsilon=90.0).close()
    with pytest.raises(StopError):
        train(fpfl.RunFolder(tmp_path / "run", ledger=people), noise_seed=None, stop_after=4)
    ledger = RunLedger.look(tmp_path / "run" / "ledger.jsonl")
    mechanism = ledger.mechanism
    assert mechanism is not None
    if which == "own":
        with PopulationLedger.open(people) as population:
            population.charge(ledger.run, mechanism, 5)
    else:
        with RunLedger.of_finished(tmp_path / "run" / "ledger.jsonl") as own:
            own.charge(5)
    run = go_on(tmp_path / "run", noise_seed=None)
    assert len(run.history) == ROUNDS - 1
    with PopulationLedger.open(people, write=False) as population:
        assert population.charged_rounds(ledger.run) == ROUNDS


def test_an_old_copy_is_noticed_by_the_population_ledger(tmp_path: Path) -> None:
    people = tmp_path / "people.jsonl"
    PopulationLedger.create(people, population=30, epsilon=50.0).close()
    with pytest.raises(StopError):
        train(fpfl.RunFolder(tmp_path / "run", ledger=people), noise_seed=None, stop_after=4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    go_on(tmp_path / "run", noise_seed=None)
    with pytest.raises(CopiedRunError, match="old copy"):
        go_on(tmp_path / "copy", noise_seed=None, moved=True)


def test_a_resumption_opens_its_folder_once(tmp_path: Path) -> None:
    """run.json is read once and the ledger verified once; so are the other files."""
    folder = begun(tmp_path / "run", noise_seed=None)
    size = (folder / "ledger.jsonl").stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        read, verified = counting(patch, folder)
        go_on(folder, noise_seed=None)
    assert sorted(read) == ["fingerprints.json", "run.json"]
    assert verified == [size]


def test_a_torn_line_is_ended_when_the_run_goes_on_and_not_before(tmp_path: Path) -> None:
    """Whoever opens a folder to look, or is refused, leaves it as it was."""
    folder = begun(tmp_path / "run", noise_seed=None)
    ledger = folder / "ledger.jsonl"
    with ledger.open("ab") as file:
        file.write(b'{"n":')
    before = ledger.read_bytes()
    with pytest.raises(ValueError, match="another learning_rate"):
        go_on(folder, noise_seed=None, learning_rate=0.7)
    assert ledger.read_bytes() == before
    go_on(folder, noise_seed=None)
    assert ledger.read_bytes().startswith(before + b"\n")
    assert "torn" in kinds(folder)


def test_a_ledger_that_grew_while_it_was_looked_at_is_read_on(tmp_path: Path) -> None:
    path = begun(tmp_path / "run", noise_seed=None) / "ledger.jsonl"
    looked = RunLedger.look(path)
    with RunLedger.open(path) as other:
        with pytest.raises(BusyError):
            looked.hold()
        other.charge(6)
    spent = looked.spent
    looked.hold()
    assert looked.spent == spent + 1
    looked.close()
    looked = RunLedger.look(path)
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    with pytest.raises(ChainError, match="was replaced"):
        looked.hold()


def test_evaluate_run_does_what_the_command_does(tmp_path: Path) -> None:
    """From Python: charged to both ledgers before it is released, once for a model."""
    run = train(tmp_path / "run", noise_seed=None)
    folder, people = tmp_path / "run", tmp_path / "heldout.jsonl"
    held_out = make_population(seed=1)
    PopulationLedger.create(people, population=30, epsilon=3.0).close()
    how = {"model": run.model, "constraint": fpfl.fnr_parity("sex"), "epsilon": 1.0, "bound": 2.0}
    blank = fpfl.mlp(5, (4,), seed=3)  # another model's weights: those of the folder are judged
    released = fpfl.evaluate_run(folder, held_out, **how | {"model": blank}, ledger=people)
    assert released.epsilon == pytest.approx(1.0)
    written = json.loads((folder / "evaluation-private.json").read_text())
    assert written["model"] == model_digest(folder)
    assert written["released"] == released.released
    assert kinds(folder)[-1] == "evaluation"
    with PopulationLedger.open(people, write=False) as ledger:
        (charged,) = ledger.by_run().values()
        assert charged["rounds"] == 1
    with pytest.raises(BudgetExhaustedError, match="evaluated privately already"):
        fpfl.evaluate_run(folder, held_out, **how)
    with pytest.raises(ValueError, match="is not finished"):
        fpfl.evaluate_run(begun(tmp_path / "cut"), held_out, **how)


# --- damage -------------------------------------------------------------------------------------


def cut_checkpoint(folder: Path) -> None:
    file = sorted(folder.glob("checkpoint-*"))[-1]
    file.write_bytes(file.read_bytes()[:-7])


def flipped_checkpoint(folder: Path) -> None:
    file = sorted(folder.glob("checkpoint-*"))[-1]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def edited_ledger(folder: Path) -> None:
    file = folder / "ledger.jsonl"
    file.write_text(file.read_text().replace('"round":2', '"round":9'))


def shortened_ledger(folder: Path) -> None:
    file = folder / "ledger.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def cut_out_of_totals(folder: Path) -> None:
    file = sorted(folder.glob("totals-*"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[:50] + content[58:])


def newer_run(folder: Path) -> None:
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"format": 2}))


def broken_run(folder: Path) -> None:
    (folder / "run.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut_checkpoint, DamagedError, "damaged.*Nothing was changed.*checkpoint before it"),
        (flipped_checkpoint, DamagedError, "digest"),
        (edited_ledger, ChainError, "ledger"),
        (shortened_ledger, ChainError, "no charge for it"),
        (cut_out_of_totals, DamagedError, "before its last record"),
        (newer_run, ValueError, "newer fpfl.*upgrade"),
        (broken_run, ValueError, "intact copy"),
    ],
)
@pytest.mark.parametrize("noise_seed", [5, None])
def test_damage_is_an_error_and_nothing_is_repaired(
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    noise_seed: int | None,
) -> None:
    folder = begun(tmp_path / "run", noise_seed=noise_seed)
    damage(folder)
    before = contents(folder)
    with pytest.raises(error, match=message):
        go_on(folder, noise_seed=noise_seed)
    assert contents(folder) == before


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """As the error says: move it away, and the totals logged since do the rest."""
    folder = begun(tmp_path / "run", rounds=8)
    cut_checkpoint(folder)
    with pytest.raises(DamagedError):
        go_on(folder)
    sorted(folder.glob("checkpoint-*"))[-1].unlink()
    assert parameters(go_on(folder)) == parameters(train(None))


def test_a_clock_set_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fpfl.store.lines as lines

    folder = begun(tmp_path / "run")
    before = contents(folder)

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(hours=2)

    monkeypatch.setattr(lines, "datetime", Earlier)
    with pytest.raises(ChainError, match="clock was set back"):
        go_on(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("after", [0, 300, 5_000, 20_000, 40_000])
@pytest.mark.parametrize("noise_seed", [5, None])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, noise_seed: int | None
) -> None:
    """Bytes are taken as long as there is room, the last write in part; then room is made."""
    room, real = after, os.write
    folder = tmp_path / "run"
    used: list[fpfl.RoundEvent] = []

    def write(file: int, content: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, bytes(content)[:room])
        room -= done
        return done

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(OSError, match=r"No space left|disk full"):
            train(fpfl.RunFolder(folder, checkpoint_every=3), noise_seed=noise_seed, seen=used)
    if (folder / "ledger.jsonl").exists():
        ledger = RunLedger.look(folder / "ledger.jsonl")
        assert {e.row["round"] for e in used} <= ledger.charged
        run = go_on(folder, noise_seed=noise_seed)
    else:
        run = train(fpfl.RunFolder(folder, checkpoint_every=3), noise_seed=noise_seed)
    if noise_seed is not None:
        assert parameters(run) == parameters(train(None))
    assert not list(folder.glob(".*.part"))


def test_a_folder_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only file system, as the system reports it (root may write to a read-only folder)."""
    folder = begun(tmp_path / "run", noise_seed=None)
    before, real = contents(folder), os.open

    def read_only(path: Any, flags: int, *mode: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        go_on(folder, noise_seed=None)
    with pytest.raises(StorageError, match=r"Read-only file system\. .*mend the folder"):
        train(tmp_path / "new")
    assert contents(folder) == before


# --- budgets ------------------------------------------------------------------------------------


def test_more_rounds_after_looking_go_through_the_filter(tmp_path: Path) -> None:
    private = fpfl.Privacy(noise_multiplier=2.0, budget=8.0)
    train(tmp_path / "run", noise_seed=None, privacy=private)
    run = go_on(tmp_path / "run", noise_seed=None, privacy=private, rounds=2 * ROUNDS)
    ledger = RunLedger.look(tmp_path / "run" / "ledger.jsonl")
    assert len(run.history) == ledger.spent == 2 * ROUNDS
    assert run.privacy is not None
    assert run.privacy.epsilon == 8.0
    assert run.privacy.delta == pytest.approx(2 / 300)
    assert "privacy filter, Rényi DP at order" in str(run.privacy)
    assert "fixed before the run" in str(run.privacy)
    # Whoever sees more is not promised more, and as the file has it.
    assert run.privacy.epsilon_server >= run.privacy.epsilon
    assert run.privacy.delta_server >= run.privacy.delta
    said = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert said["epsilon_server"] == run.privacy.epsilon_server
    assert [term["name"][:22] for term in said["delta_terms"]] == ["noise in whole numbers"]
    assert said["contributions"] == ledger.contributions == "alone"
    assert said["assumptions"] == list(run.privacy.assumptions)
    assert len(said["assumptions"]) == 1


def test_a_changed_run_stops_at_what_was_fixed_against_the_server(tmp_path: Path) -> None:
    """Smaller cohorts cost others less, and a server that knows them as much as before."""
    private = fpfl.Privacy(noise_multiplier=2.0, budget=8.0)
    train(tmp_path / "run", noise_seed=None, privacy=private)
    run = go_on(tmp_path / "run", noise_seed=None, privacy=private, rounds=10_000, cohort=1)
    assert "against a server that knows the cohorts" in str(run.stopped)
    ledger = RunLedger.look(tmp_path / "run" / "ledger.jsonl")
    assert ledger.server is not None
    assert ledger.spent == ledger.server.rounds < 10_000
    assert run.privacy is not None
    assert run.privacy.participations == ledger.server.rounds


def test_the_filter_stops_before_the_round_that_would_exceed_the_budget(tmp_path: Path) -> None:
    private = fpfl.Privacy(noise_multiplier=2.0, budget=6.0)
    train(tmp_path / "run", noise_seed=None, privacy=private)
    run = go_on(tmp_path / "run", noise_seed=None, privacy=private, rounds=10_000)
    assert run.stopped is not None
    assert "would exceed ε = 6" in run.stopped
    ledger = RunLedger.look(tmp_path / "run" / "ledger.jsonl")
    assert ledger.filter is not None
    assert ROUNDS < len(run.history) < 10_000
    assert ledger.filter.fits(ledger.charges)
    assert ledger.mechanism is not None
    assert not ledger.filter.fits({ledger.mechanism: ledger.spent + 1})


def test_what_costs_the_same_may_change_once_nothing_is_left_to_replay(tmp_path: Path) -> None:
    """Composition is adaptive, so a learning rate is not the accountant's business.

    But totals since a checkpoint belong to the models that they were measured at.
    """
    private = fpfl.Privacy(noise_multiplier=2.0, budget=20.0)
    how: dict[str, Any] = {"noise_seed": None, "privacy": private, "selection": "last"}
    with pytest.raises(ValueError, match="rounds since its last checkpoint"):
        go_on(begun(tmp_path / "cut", **how), learning_rate=0.01, **how)
    first = train(tmp_path / "run", **how)
    # With hardly any learning rate the model stays where it was.
    more = go_on(tmp_path / "run", learning_rate=1e-30, rounds=2 * ROUNDS, **how)
    assert parameters(more) == parameters(first)
    records = RunLedger.look(tmp_path / "run" / "ledger.jsonl").chain.records
    assert any("learning_rate: 0.1 -> 1e-30" in r.get("notes", []) for r in records)
    best = go_on(tmp_path / "run", **how | {"rounds": 2 * ROUNDS + 5, "selection": "best"})
    assert best.selected.startswith("best")


def test_fewer_rounds_do_not_make_a_smaller_epsilon(tmp_path: Path) -> None:
    """Stopping early is free, and chosen after looking: what was planned is what is stated."""
    folder = begun(tmp_path / "run", noise_seed=None)
    planned = train(None, noise_seed=None).privacy
    shorter = go_on(folder, noise_seed=None, rounds=8)
    assert planned is not None
    assert shorter.privacy is not None
    assert len(shorter.history) == 8
    assert shorter.privacy.epsilon == planned.epsilon
    assert shorter.privacy.epsilon_server == planned.epsilon_server
    with pytest.raises(ValueError, match="has released 8 rounds"):
        go_on(folder, noise_seed=None, rounds=7)


def test_what_epsilon_rests_on_cannot_be_changed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", noise_seed=None)
    other = fpfl.Privacy(noise_multiplier=1.0, clip=1.0, max_participations=30)
    with pytest.raises(ValueError, match="begun with max_participations=20"):
        go_on(folder, noise_seed=None, privacy=other)
    with pytest.raises(ValueError, match="private and cannot go on without"):
        go_on(folder, noise_seed=None, privacy=None)
    with pytest.raises(ValueError, match="cannot go on with a noise_seed"):
        go_on(folder, noise_seed=5)
    split = fpfl.Privacy(
        noise_multiplier=1.0, clip=fpfl.Clipping(1.0, counts=1.0), max_participations=20
    )
    with pytest.raises(ValueError, match="releases other totals"):
        go_on(folder, noise_seed=None, privacy=split)
    go_on(folder, noise_seed=None)


def test_a_filter_that_has_less_room_than_the_plan_is_refused(tmp_path: Path) -> None:
    """More rounds within the plan's own ε would end earlier: better told than done."""
    folder = begun(tmp_path / "run", noise_seed=None, privacy=fpfl.Privacy(noise_multiplier=1.0))
    with pytest.raises(ValueError, match=r"as planned there are 7: go on as planned"):
        go_on(folder, noise_seed=None, rounds=20, privacy=fpfl.Privacy(noise_multiplier=1.0))
    run = go_on(folder, noise_seed=None, privacy=fpfl.Privacy(noise_multiplier=1.0))
    assert len(run.history) == ROUNDS


def test_cohorts_that_a_seed_drew_stay_seeded(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", noise_seed=None, seed=1)
    run = go_on(folder, noise_seed=None, seed=None)
    assert run.privacy is not None
    assert run.privacy.seeded_cohorts


def test_digests_of_the_data_are_for_the_owner_alone(tmp_path: Path) -> None:
    """Whoever knows all users but one could try out that one's data against a digest."""
    folder = begun(tmp_path / "run", noise_seed=None)
    digests = json.loads((folder / "fingerprints.json").read_text())
    assert (folder / "fingerprints.json").stat().st_mode & 0o077 == 0
    others = [f for f in folder.iterdir() if f.name != "fingerprints.json"]
    assert not any(digests["data"].encode() in f.read_bytes() for f in others)


def test_a_ledger_is_never_begun_anew(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", noise_seed=None)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(FileExistsError):
        RunLedger.create(folder / "ledger.jsonl", run="x", terms=None, simulation=False)
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_a_real_private_run_does_not_say_that_a_group_is_empty(tmp_path: Path) -> None:
    data = make_population()
    data.attributes[:] = 0
    with pytest.raises(ValueError, match="no sample of"):
        train(None, data=data, noise_seed=5)
    assert train(None, data=data, noise_seed=None).history


def test_other_noise_is_filtered_and_another_epsilon_refused(tmp_path: Path) -> None:
    less = fpfl.Privacy(noise_multiplier=2.0, budget=9.0)
    folder = begun(tmp_path / "a", noise_seed=None, privacy=less)
    go_on(folder, noise_seed=None, privacy=fpfl.Privacy(noise_multiplier=4.0, budget=9.0))
    assert RunLedger.look(folder / "ledger.jsonl").filter is not None
    folder = begun(tmp_path / "b", noise_seed=None, privacy=fpfl.Privacy(epsilon=4.0))
    with pytest.raises(ValueError, match=r"begun with epsilon=4\.0"):
        go_on(folder, noise_seed=None, privacy=fpfl.Privacy(epsilon=5.0))
    sigma = RunLedger.look(folder / "ledger.jsonl").mechanism
    go_on(folder, noise_seed=None, privacy=fpfl.Privacy(epsilon=4.0))
    assert RunLedger.look(folder / "ledger.jsonl").mechanism == sigma


def test_a_budget_below_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planned rounds alone cost"):
        train(tmp_path / "run", privacy=fpfl.Privacy(noise_multiplier=1.0, budget=0.1))
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_population_budget_adds_up_runs_and_stops_the_last(tmp_path: Path) -> None:
    people = tmp_path / "people.jsonl"
    private = fpfl.Privacy(noise_multiplier=1.5)
    PopulationLedger.create(people, population=30, epsilon=3.0).close()
    done = []
    for n in range(4):
        folder = fpfl.RunFolder(tmp_path / f"run-{n}", ledger=people)
        run = train(folder, noise_seed=None, seed=n, privacy=private)
        done.append(len(run.history))
        if run.stopped:
            assert "population's budget is spent" in run.stopped
            break
    assert done[0] == ROUNDS
    assert done[-1] < ROUNDS, "the budget should be spent by now"
    with PopulationLedger.open(people, write=False) as ledger:
        assert sum(ledger.charges().values()) == sum(done)
        assert ledger.spent <= 3.0
    assert run.privacy is not None
    assert "population's ledger" in str(run.privacy)


# --- users --------------------------------------------------------------------------------------


def test_a_withdrawal_is_honoured_from_the_next_round_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fpfl.server.simulation import Simulation

    drawn: dict[int, set[int]] = {}
    rounds: list[int] = []
    real, compute = Simulation.release, CohortEngine.chunks

    def release(self: Simulation, round: int, *broadcast: Any) -> torch.Tensor:
        if round == 5:
            withdraw(tmp_path / "run", range(15))
        rounds.append(round)
        return real(self, round, *broadcast)

    def chunks(self: CohortEngine, users: np.ndarray, *how: Any) -> Any:
        if rounds:  # made-up users are computed before the first
            drawn[rounds[-1]] = set(users.tolist())
        return compute(self, users, *how)

    monkeypatch.setattr(CohortEngine, "chunks", chunks)
    monkeypatch.setattr(Simulation, "release", release)
    train(tmp_path / "run", noise_seed=None, cohort=20)
    assert all(drawn[round] & set(range(15)) for round in range(1, 5))
    assert not any(drawn[round] & set(range(15)) for round in range(5, ROUNDS + 1))
    records = RunLedger.look(tmp_path / "run" / "ledger.jsonl").chain.records
    noted = [r for r in records if r["kind"] == "withdrawal"]
    assert [(r["round"], r["users"]) for r in noted] == [(5, 15)]


def test_half_a_line_names_nobody(tmp_path: Path) -> None:
    file = tmp_path / "withdrawals.txt"
    file.write_text("3\n17\n12")
    assert read_withdrawals(file) == {3, 17}
    file.write_text("three\n")
    with pytest.raises(ValueError, match="one user's index on each line"):
        read_withdrawals(file)


def test_a_cap_holds_over_crashes(tmp_path: Path) -> None:
    """Participations are written down before a round is released, lost rounds included."""
    private = fpfl.Privacy(noise_multiplier=1.0, max_participations=2)
    others: dict[str, Any] = {"noise_seed": None, "seed": None, "privacy": private, "cohort": 20}
    folder = begun(tmp_path / "run", rounds=2, **others)
    with pytest.raises(StopError):
        go_on(folder, stop_after=4, **others)
    go_on(folder, **others)
    counts = read_past(folder, simulation=False).participations
    assert set(counts.values()) <= {1, 2}
    assert max(counts.values()) == 2


def test_history_and_progress_hold_released_numbers_only(tmp_path: Path) -> None:
    """Every row follows from the logged totals alone: replaying them gives the same rows."""
    folder = begun(tmp_path / "run", rounds=8, every=100, noise_seed=None)
    past = read_past(folder, simulation=False)
    seen: list[fpfl.RoundEvent] = []
    # Other data, same totals: had a row come from the data, it would differ.
    other = make_population(seed=7)
    with pytest.raises(StopError):
        go_on(folder, noise_seed=None, data=other, seen=seen, stop_after=8)
    assert len(past.totals) == 8
    for event in seen:
        assert torch.equal(event.v, past.totals[event.row["round"]])
