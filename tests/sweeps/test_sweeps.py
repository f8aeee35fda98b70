"""Sweeps: each run is the single run, who is held out, what is said, folders and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_population, some

import fpfl
from fpfl.fairness.constraints import Constraint
from fpfl.runs.fingerprints import weights_fingerprint
from fpfl.sweeps import processes
from fpfl.sweeps.asked import SIMULATION, asked, populations
from fpfl.sweeps.batch import Job, trained
from fpfl.sweeps.processes import shares
from fpfl.sweeps.sweep import Sweep

PEOPLE = make_population(users=120)
PARITY = fpfl.fnr_parity("sex", tolerance=0.1)
COMMON: dict[str, Any] = {
    "cohort": 30,
    "rounds": 4,
    "constraint": PARITY,
    "method": fpfl.OneGradient(),
}
PRIVATE = fpfl.Privacy(noise_multiplier=1.0, clip=1.0)
RUNS = fpfl.grid(learning_rate=[0.1, 0.5], seed=range(2))


def model(seed: int) -> torch.nn.Module:
    return fpfl.mlp(5, (4,), seed=seed)


def weights(run: fpfl.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def made(runs: Sequence[dict[str, Any]] = RUNS, **how: Any) -> Sweep:
    return fpfl.sweep(model, PEOPLE, runs, **COMMON | how)


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    capsys.readouterr()


# --- what is trained --------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", [None, PRIVATE], ids=["plain", "private"])
def test_each_run_is_the_single_run_with_its_seeds(privacy: fpfl.Privacy | None) -> None:
    training, others = PEOPLE.split(0.25, seed=0)
    for found in made(privacy=privacy):
        alone = fpfl.train(
            model(found.settings["seed"]),
            training,
            **COMMON | found.settings,
            privacy=privacy,
            noise_seed=found.settings["seed"] if privacy else None,
        )
        torch.testing.assert_close(weights(found.run), weights(alone), rtol=1e-4, atol=1e-5)
        assert found.held_out is not None
        assert found.held_out.accuracy == pytest.approx(alone.evaluate(others).accuracy)
        assert found.note == SIMULATION


def test_the_table_has_what_differs_and_what_was_found() -> None:
    sweep = made(fpfl.grid(learning_rate=[0.1, 0.5], rounds=3, seed=[0]))
    assert (len(sweep), sweep.finished, sweep.table()) == (2, 0, [])
    table = sweep.finish().table()
    assert table.settings == ("learning_rate",), "rounds are the same in all"
    assert [row["learning_rate"] for row in table] == [0.1, 0.5]
    for row, found in zip(table, sweep, strict=True):
        assert found.held_out is not None
        gap = found.held_out.gaps["constraint"]
        assert (row["accuracy"], row["gap"]) == (found.held_out.accuracy, gap.value)
        assert (row["gap_low"], row["gap_high"], row["rounds_run"]) == (gap.low, gap.high, 3)
        assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert "| run | learning_rate | seed |" in table.markdown()
    assert SIMULATION.capitalize() in table.markdown()
    assert sweep.chosen() == fpfl.choose(table)


def test_a_table_shows_what_accuracy_hides_where_classes_are_unbalanced() -> None:
    assert "balanced accuracy" not in made().finish().table().markdown()
    labels = (PEOPLE.features[:, 0] > 1.2).long()  # one in nine
    rare = fpfl.FederatedDataset(
        PEOPLE.features, labels, PEOPLE.attributes, PEOPLE.offsets, PEOPLE.schema
    )
    table = fpfl.sweep(model, rare, RUNS, **COMMON | {"learning_rate": 0.01}).finish().table()
    for row in table:
        assert row["unbalanced"]
        assert row["base_rate"] < 0.25
        assert row["balanced_accuracy_low"] <= row["balanced_accuracy"]
        assert json.loads(json.dumps(row, allow_nan=False)) == row
    text = table.markdown()
    assert "| held-out accuracy | balanced accuracy | collapsed | gap |" in text
    assert ("yes: the model" in text) == any(row["collapsed"] for row in table)
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_nobody_held_out_is_among_those_trained_on() -> None:
    parts = populations(PEOPLE, 0.25)["data"]
    assert parts.held_out is not None
    assert parts.training.population + parts.held_out.population == PEOPLE.population
    assert len(parts.training) + len(parts.held_out) == len(PEOPLE)
    rows = {tuple(row) for row in parts.training.features.tolist()}
    assert rows.isdisjoint(tuple(row) for row in parts.held_out.features.tolist())


def test_who_is_declared_stays_declared() -> None:
    parts = populations(PEOPLE.declared(120), 0.25)["data"]
    assert (parts.training.schema.population, parts.training.K) == (90, 90)


def test_folds_and_models_by_name() -> None:
    first, second = PEOPLE.split(0.5, seed=1)
    runs = fpfl.grid(data=["a", "b"], model=["small", "large"])
    many = {"small": fpfl.mlp(5, (2,), seed=0), "large": lambda seed: fpfl.mlp(5, (8,), seed=seed)}
    sweep = fpfl.sweep(many, {"a": (first, second), "b": (second, first)}, runs, **COMMON)
    found = sorted(sweep, key=lambda run: run.number)
    sizes = [sum(p.numel() for p in each.run.model.parameters()) for each in found]
    assert sizes == [15, 57, 15, 57]
    samples = [each.held_out.samples for each in found if each.held_out is not None]
    assert samples == [len(second), len(second), len(first), len(first)]
    folds = sweep.chosen(over=("seed", "data"))
    assert len(folds.settings) == 2
    assert all(len(each.runs) == 2 for each in folds.settings)


def test_held_out_users_may_be_given_or_nobody() -> None:
    training, others = PEOPLE.split(0.25, seed=3)
    (found,) = fpfl.sweep(model, training, [{}], held_out=others, **COMMON)
    assert found.held_out is not None
    assert found.held_out.samples == len(others)
    sweep = fpfl.sweep(model, training, [{}], held_out=None, **COMMON).finish()
    assert sweep.choice is None
    assert sweep.table()[0]["accuracy"] is None
    assert sweep.table()[0]["released_accuracy"] is not None


def test_a_method_of_its_own_and_no_privacy_are_runs_too() -> None:
    runs = [{"privacy": None}, {"method": fpfl.MMDM(damping=1.0)}, {"privacy.clip": 0.5}]
    table = made(runs, privacy=PRIVATE).finish().table()
    assert [row["epsilon"] is None for row in table] == [True, False, False]
    assert [row["simulated"] for row in table] == [False, True, True]
    assert table[1]["method"]["kind"] == "MMDM"
    assert "MMDM(" in table.markdown()


# --- noise and seeds --------------------------------------------------------------------------


def test_the_noise_of_a_sweep_is_seeded_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = list(made([{"seed": 3}, {"seed": 3, "noise_seed": 5}], privacy=PRIVATE))
    assert all("no guarantee" in str(each.run.privacy).lower() for each in found)
    assert not torch.equal(weights(found[0].run), weights(found[1].run))
    said = capsys.readouterr().err
    assert SIMULATION.capitalize() in said
    assert "protect nobody from anyone who has the seeds" in said


def test_unseeded_noise_needs_a_ledger() -> None:
    with pytest.raises(ValueError, match=r"simulate=False was given without a ledger.*add"):
        made(privacy=PRIVATE, simulate=False)
    made(simulate=False)  # nothing is private


# --- refused before anything is trained -------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"runs": []}, "runs is empty"),
        ({"runs": {"seed": [1]}}, "runs is a dict; give a list of dicts"),
        ({"runs": [3]}, "run 0 is 3; give a dict"),
        ({"runs": [{"learning_rate": 0.1}, {"learning_rate": -1.0}]}, r"run 1 .*must be positive"),
        ({"runs": [{"cohort": 10**6}]}, r"run 0 .*cohort"),
        ({"runs": [{"seed": "one"}]}, "seed is 'one'"),
        ({"runs": [{"model": "large"}]}, "model is 'large'; expected one of data"),
        ({"cohort": None}, "cohort must be given"),
        ({"held_out": 1.5}, "held_out is 1.5; give a share"),
        ({"jobs": 0}, "jobs is 0"),
        ({"resume": True}, "name it: folder="),
        ({"callbacks": []}, "takes no 'callbacks': it belongs to one training"),
        ({"cohrt": 3}, "takes no 'cohrt'"),
        ({"memory": 0}, "memory is 0"),
    ],
)
def test_bad_input_is_refused(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        fpfl.sweep(model, PEOPLE, **{"runs": RUNS} | COMMON | how)


def test_models_and_data_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="or a function from a seed"):
        fpfl.sweep(3, PEOPLE, RUNS, **COMMON)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returned a int"):
        fpfl.sweep(lambda seed: 3, PEOPLE, RUNS, **COMMON)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="data 'a' is a int"):
        fpfl.sweep(model, {"a": 3}, RUNS, **COMMON)
    with pytest.raises(ValueError, match="does not say which data; there are a, b"):
        fpfl.sweep(model, {"a": PEOPLE, "b": PEOPLE}, RUNS, **COMMON)


# --- the folder -------------------------------------------------------------------------------


def test_a_folder_has_all_of_it(tmp_path: Path) -> None:
    sweep = made(folder=tmp_path / "out", privacy=PRIVATE).finish()
    names = {path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    assert names == {"README.md", "about.json", "fingerprints.json", "picture.png",
                     "results.json", "runs", "sweep.json", "table.md"}  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["finished"], results["runs"], results["note"]) == (4, 4, SIMULATION)
    assert results["rows"] == list(sweep.table())
    assert fpfl.choose(results["rows"]) == sweep.chosen()
    assert "## Settings, the best first" in (tmp_path / "out" / "table.md").read_text()
    assert SIMULATION.capitalize() in (tmp_path / "out" / "README.md").read_text()
    (session,) = json.loads((tmp_path / "out" / "about.json").read_text())["sessions"]
    assert session["finished"] == 4
    assert session["wall_seconds"] is not None
    assert (tmp_path / "out" / "fingerprints.json").stat().st_mode & 0o077 == 0
    for place in (tmp_path / "out" / "runs").iterdir():
        assert json.loads((place / "row.json").read_text())["note"] == SIMULATION
        assert (place / "model.safetensors").exists()


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    first = {each.number: each for each in made(folder=tmp_path / "out", privacy=PRIVATE)}
    again = made(folder=tmp_path / "out", privacy=PRIVATE, resume=True)
    assert again.finished == 4
    for each in again:
        before = first[each.number]
        assert torch.equal(weights(each.run), weights(before.run))
        assert each.held_out == before.held_out
        assert each.run.history == before.run.history
        assert str(each.run.privacy) == str(before.run.privacy)
        assert each.row == before.row
    assert again.chosen() == fpfl.choose([each.row for each in first.values()])


def test_a_loop_that_is_left_is_gone_on_with(tmp_path: Path) -> None:
    sweep = made(folder=tmp_path / "out")
    for _ in sweep:
        break
    assert sweep.finished == 1
    assert json.loads((tmp_path / "out" / "results.json").read_text())["finished"] == 1
    (tmp_path / "out" / "runs" / ".0001.part").mkdir()  # as a kill leaves it
    again = made(folder=tmp_path / "out", resume=True)
    numbers: list[int] = []

    def counting(jobs: Sequence[Job], **how: Any) -> Iterator[Any]:
        numbers.append(len(jobs))
        return trained(jobs, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "trained", counting)
        assert len(list(again)) == 4
    assert numbers == [3], "what is finished is not trained again"
    assert again.table() == made().finish().table()
    assert not list((tmp_path / "out" / "runs").glob(".*"))
    sessions = json.loads((tmp_path / "out" / "about.json").read_text())["sessions"]
    assert [each["finished"] for each in sessions] == [1, 3]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"rounds": 5}, "run 0: rounds was 4 and is 5"),
        ({"runs": RUNS[:2]}, "runs were 4 and are 2"),
        ({"held_out": 0.5}, "held_out.share was 0.25 and is 0.5"),
        ({"constraint": fpfl.fnr_parity("sex")}, "constraint.tolerance was 0.1 and is 0.02"),
        ({"data": make_population(users=120, seed=1)}, "training users of 'data'"),
        ({"model": fpfl.mlp(5, (4,), seed=9)}, "the model 'data' of seed 0"),
    ],
)
def test_another_sweep_is_not_gone_on_with(how: dict[str, Any], what: str, tmp_path: Path) -> None:
    given = {"model": model, "data": PEOPLE, "runs": RUNS, "folder": tmp_path / "out"} | COMMON
    fpfl.sweep(**given)
    with pytest.raises(ValueError, match=what):
        fpfl.sweep(**given | how, resume=True)


class Halved:
    """A method of one's own, whose text is where it is in memory."""

    def __init__(self, by: float) -> None:
        self.by = by

    def update(self, state: Any, totals: Any, tolerance: float) -> Any:
        state, direction = fpfl.MMDM().update(state, totals, tolerance)
        return state, direction / self.by


@dataclass(frozen=True)
class Weighted:
    """One with a tensor."""

    by: torch.Tensor

    def update(self, state: Any, totals: Any, tolerance: float) -> Any:
        return Halved(float(self.by.sum())).update(state, totals, tolerance)


@pytest.mark.parametrize("kind", [Halved, lambda by: Weighted(torch.tensor([by, 1.0]))])
def test_methods_of_ones_own_are_gone_on_with(kind: Callable[[float], Any], tmp_path: Path) -> None:
    """By what they are made of: another session has other objects."""
    given = {"model": model, "data": PEOPLE, "runs": RUNS, "folder": tmp_path / "out"} | COMMON
    fpfl.sweep(**given | {"method": kind(2.0)}).finish()
    again = fpfl.sweep(**given | {"method": kind(2.0)}, resume=True)
    assert again.finished == len(RUNS)
    with pytest.raises(ValueError, match=r"run 0: method.by.* was 2.0 and is 3.0"):
        fpfl.sweep(**given | {"method": kind(3.0)}, resume=True)


def test_folders_that_are_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no sweep to go on with"):
        made(folder=tmp_path / "none", resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; name a new folder"):
        made(folder=tmp_path / "other")
    made(folder=tmp_path / "out")
    with pytest.raises(ValueError, match=r"has a sweep already; go on with it \(resume=True"):
        made(folder=tmp_path / "out")
    loop = iter(made(folder=tmp_path / "out", resume=True))
    next(loop)
    with pytest.raises(ValueError, match="another process is working on the sweep"):
        made(folder=tmp_path / "out", resume=True).finish()


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(jobs: Sequence[Job], **how: Any) -> Iterator[Any]:
        for number, found in enumerate(trained(jobs, **how)):
            if number == 2:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(processes, "trained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(folder=tmp_path / "out").finish()
    said = capsys.readouterr().err
    assert "Interrupted: 2 of 4 runs are finished and kept in" in said
    assert "resume=True" in said
    assert made(folder=tmp_path / "out", resume=True).finish().finished == 4


SCRIPT = """
import sys, time
sys.path[:0] = {paths!r}
import test_sweeps as t

if __name__ == "__main__":
    resume = sys.argv[1] == "resume"
    sweep = t.fpfl.sweep(t.model, t.PEOPLE, t.MANY, **t.COMMON | {{"rounds": 40}},
                         folder={folder!r}, jobs={jobs}, resume=resume)
    for count, found in enumerate(sweep, start=1):
        print("finished", found.number, flush=True)
        if count == 3 and not resume:
            time.sleep(60)  # until it is ended: a fast machine would be through before
"""
MANY = [{"cohort": 10 + run, "seed": run % 3} for run in range(12)]
"""No two of a shape: they finish one after the other."""


def started(tmp_path: Path, jobs: int, word: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script.write_text(SCRIPT.format(paths=paths, folder=str(tmp_path / "out"), jobs=jobs))
    return subprocess.Popen(
        [sys.executable, str(script), word],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # Whoever runs the tests in the background may ignore Ctrl-C, and so would a child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    "how",
    some(["kill, 1", "interrupt, 2", "kill, 2", "interrupt, 1"], "kill, 1", "interrupt, 2"),
)
def test_a_sweep_that_is_ended_is_gone_on_with(how: str, tmp_path: Path) -> None:
    """Between or inside runs; what is finished is there and is not trained again."""
    end = signal.SIGKILL if how.startswith("kill") else signal.SIGINT
    jobs = int(how[-1])
    with started(tmp_path, jobs, "begin") as first:
        assert first.stdout is not None
        for _ in range(3):
            assert first.stdout.readline().startswith("finished")
        if end == signal.SIGKILL:
            first.kill()  # the parent alone: workers have to notice
        else:
            os.killpg(first.pid, end)  # as a terminal does it: all of them
        _, said = first.communicate(timeout=60)
    if end == signal.SIGINT:
        assert "Go on with it" in said
    assert_nobody_left(first.pid)
    kept = sorted(path.name for path in (tmp_path / "out" / "runs").glob("[0-9]*"))
    assert 3 <= len(kept) <= 12
    for name in kept:
        assert (tmp_path / "out" / "runs" / name / "row.json").exists()
    stamps = {name: (tmp_path / "out" / "runs" / name / "row.json").stat().st_mtime_ns
              for name in kept}  # fmt: skip
    with started(tmp_path, jobs, "resume") as second:
        out, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert out.count("finished") == 12
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["run"] for row in results["rows"]] == list(range(12))
    for name, stamp in stamps.items():
        assert (tmp_path / "out" / "runs" / name / "row.json").stat().st_mtime_ns == stamp


def assert_nobody_left(group: int) -> None:
    """No process of the sweep is there; workers notice after a round that nobody listens."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("worker processes outlived the sweep")


# --- several processes ------------------------------------------------------------------------


def test_several_processes_find_the_same() -> None:
    here, there = made().finish(), made(jobs=2).finish()
    for a, b in zip(here.table(), there.table(), strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-3)
        assert a["learning_rate"] == b["learning_rate"]
    assert all(isinstance(each.run.constraint, Constraint) for each in there)


def test_what_cannot_be_sent_is_refused_with_a_word() -> None:
    optimizer: Callable[..., Any] = lambda w: torch.optim.Adam(w, lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match=r"cannot be sent to worker processes.*jobs=1"):
        made(optimizer=optimizer, jobs=2).finish()
    assert made(RUNS[:1], optimizer=optimizer).finish().finished == 1


def test_an_error_in_a_worker_is_raised_here() -> None:
    """The model works in the process that made it alone: only the worker finds out."""
    sweep = fpfl.sweep(lambda seed: Fragile(), PEOPLE, RUNS, **COMMON, jobs=2)
    with pytest.raises(ValueError, match="broken on purpose"):
        sweep.finish()


class Fragile(torch.nn.Module):
    """Works in the process that made it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.process = torch.nn.Linear(5, 1), os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.process:
            raise RuntimeError("broken on purpose")
        y: torch.Tensor = self.inner(x)
        return y


def test_shares_keep_alike_runs_together_and_are_about_equal() -> None:
    people = populations(PEOPLE, 0.25)
    runs = fpfl.grid(cohort=[20, 40], learning_rate=[0.1, 0.2, 0.3], seed=range(4))
    every = asked(model, people, runs, COMMON)
    dealt = shares(every, 3)
    assert sorted(run.number for share in dealt for run in share) == list(range(24))
    loads = [sum(run.rounds * run.keywords["cohort"] for run in share) for share in dealt]
    assert max(loads) - min(loads) <= 2 * 4 * 40
    shapes = [{run.shape for run in share} for share in dealt]
    assert sum(map(len, shapes)) <= 4, "one share at most has both shapes"
    assert max(len(share) for share in shares(every, 3, most=5)) == 5
    assert shares(every[:2], 5) == [[every[0]], [every[1]]]


def test_a_model_with_other_weights_has_another_fingerprint() -> None:
    assert weights_fingerprint(model(0)) == weights_fingerprint(model(0))
    assert weights_fingerprint(model(0)) != weights_fingerprint(model(1))
