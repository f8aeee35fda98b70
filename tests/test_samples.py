"""Samples of every version's formats: what was written then is read now, and goes on.

`tests/samples/README.md` says what they are. Where one of these tests fails, people who have such
files cannot read them, or cannot go on: mend the reader, not the sample.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch

import fpfl
from fpfl import cli
from fpfl.privacy.assumptions import BEFORE, BEFORE_EVALUATED
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import Mechanism
from fpfl.report.page import write_report
from fpfl.report.reading import read_run
from fpfl.runs.folder import OpenRun
from fpfl.runs.ledger import CopiedRunError, RunLedger
from fpfl.training.defaults import COUNTS_SHARE

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:DP noise dominates")

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
RUNS = sorted(path.parent for path in SAMPLES.glob("*/*/run"))
SOMEWHERE = "/somewhere"

Command = Callable[..., tuple[int, str, str]]

# How runs that were cut off end: the rounds that were charged, and those that are used. A round
# that was charged and lost is charged again, and so the last one is not released.
ENDS = {
    "averaged-cut": ([1, 2, 3, 4, 5, 6], 6),
    "capped-cut": ([1, 2, 3, 4, 5, 6], 6),
    "changed-cut": ([1, 2, 3, 4, 5, 6, 7, 8], 8),
    "federation": ([1, 2, 3, 4], 4),
    "numbers-cut": ([], 6),
    "plain-cut": ([1, 2, 3, 4, 5, 6], 5),
    "table-cut": ([1, 2, 3, 4, 4], 4),
}
SEEDED = ("seeded", "seeded-cut")

# Begun by versions in which one user's data could change what others send: read, not resumed.
NOT_ESTABLISHED = ("0.1.0",)

# Names of classes that are in checkpoints and in settings. All of them are in some sample.
CHECKPOINT = {"ServerState", "MethodState", "AveragedState", "Selection", "Candidate", "Counts"}
KINDS = {
    "method": {"MMDM", "OneGradient", "Tran", "Unconstrained"},
    "privacy": {"Privacy"},
    "clip": {"Clipping"},
    "layout": {"Layout"},
    "local": {"FederatedAveraging"},
    "optimizer": {"Adam", "SGD"},
    "sampling": {"PoissonSampling", "FixedSizeSampling", "federation"},
}


def named(path: Path) -> str:
    return "/".join(path.parts[-2:])


def each(name: str) -> pytest.MarkDecorator:
    """For the sample of a name in every version that has it."""
    found = [SAMPLES / version / name for version in VERSIONS]
    return pytest.mark.parametrize("sample", [p for p in found if p.exists()], ids=named)


def those(names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", [p for p in RUNS if p.name in names], ids=named)


def expected(sample: Path) -> dict[str, Any]:
    return json.loads((sample / "expected.json").read_text(encoding="utf-8"))


def written(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_alike(found: Any, wanted: Any, close: float = 1e-6, where: str = "") -> None:
    """All that was read once is read again; there may be more in a dictionary."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict), where
        assert wanted.keys() <= found.keys(), where
        for name, value in wanted.items():
            check_alike(found[name], value, close, f"{where}.{name}")
    elif isinstance(wanted, list):
        assert isinstance(found, list | tuple), where
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            check_alike(one, other, close, f"{where}[{number}]")
    elif isinstance(wanted, float):
        assert isinstance(found, int | float), where
        known = math.isclose(found, wanted, rel_tol=close, abs_tol=close)
        assert known or (math.isnan(found) and math.isnan(wanted)), f"{where}: {found}, {wanted}"
    else:
        assert type(found) is type(wanted), where
        assert found == wanted, where


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; its exit code, and what it wrote."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a sample, with what its run needs beside it and its paths set right."""

    def copy(sample: Path) -> Path:
        place = tmp_path / sample.name
        shutil.copytree(sample, place)
        shutil.copy(sample.parent / sampled.PEOPLE, place)
        for file in (place / "run" / "origin.json", place / "run" / "run.json"):
            if file.exists():
                text = file.read_text(encoding="utf-8")
                file.write_text(text.replace(SOMEWHERE, str(place)), encoding="utf-8")
        return place

    return copy


# --- runs -----------------------------------------------------------------------------------------


def test_samples_are_there() -> None:
    assert "0.1.0" in VERSIONS
    names = {path.name for path in RUNS if path.parent.name == "0.1.0"}
    assert names == {*ENDS, *SEEDED, "evaluated", "budgeted", "saved"}


@pytest.mark.parametrize("sample", RUNS, ids=named)
def test_a_run_is_read(sample: Path) -> None:
    """Its report's figures, its ledger, its checkpoint and its logs; nothing is written."""
    before = files(sample / "run")
    found, wanted = sampled.run_facts(sample / "run"), expected(sample)
    wanted.pop("people", None)
    if not wanted["finished"]:
        if wanted["ledger"]["changes"] and sample.parent.name in NOT_ESTABLISHED:
            # It was computed from the rounds that were charged, and came out below the outsiders'.
            assert wanted["privacy"].pop("epsilon_server") < wanted["epsilon"]
            assert found["privacy"]["epsilon_server"] >= found["epsilon"]
            assert wanted["privacy"].pop("participations") < found["privacy"]["participations"]
        # Computed from the plan when it is read: accountants may differ in the last digits.
        for name in ("epsilon", "privacy"):
            check_alike(found[name], wanted.pop(name), 1e-3, name)
    else:
        assert read_run(sample / "run").notes == ()  # nothing is missing, or of another model
    if wanted["finished"] and private_of_before(sample):
        assert found["statement"].pop(0) == BEFORE
        if "private" in found["evaluations"]:
            assert found["evaluations"]["private"]["statement"].pop(0) == BEFORE_EVALUATED
    check_alike(found, wanted)
    assert files(sample / "run") == before


def test_a_ledger_says_what_a_result_does_not(copied) -> None:
    """A finished run of 0.1.0 stays one, whatever is written into its result."""
    run = copied(SAMPLES / "0.1.0" / "evaluated") / "run"
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    result["privacy"]["contributions"] = "alone"
    (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
    assert BEFORE in read_run(run).statement


def private_of_before(sample: Path) -> bool:
    return sample.parent.name in NOT_ESTABLISHED and expected(sample)["epsilon"] is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_reports_are_written(command: Command, tmp_path: Path, version: str) -> None:
    pytest.importorskip("plotly", reason="a report takes plotly")
    runs = [path / "run" for path in RUNS if path.parent.name == version]
    for run in runs:
        code, _, err = command("report", run, "-o", tmp_path / "one.html")
        assert code == 0, err
        record, page = read_run(run), (tmp_path / "one.html").read_text(encoding="utf-8")
        assert not record.statement or record.statement[0].split(":")[0] in page
    assert command("report", *runs, "-o", tmp_path / "all.html")[0] == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_every_class_that_files_name_is_in_a_sample(version: str) -> None:
    """What is named in no sample could be renamed without a test that fails."""
    runs = [path / "run" for path in RUNS if path.parent.name == version]
    classes, kinds = set(), {name: set() for name in KINDS}
    for run in runs:
        for path in run.glob("checkpoint-*.safetensors"):
            head = path.read_bytes()[8:].split(b'"}', 1)[0].decode()
            classes |= set(re.findall(r'\\"class\\": \\"(\w+)\\"', head))
        for file in ("run.json", "result.json"):
            settings = written(run, file)["settings"] if (run / file).exists() else {}
            for name in kinds:
                value = settings.get(name)
                kinds[name] |= {value["kind"] if isinstance(value, dict) else value} - {None}
    assert classes == CHECKPOINT
    assert kinds == KINDS


@those(ENDS)
def test_a_run_that_was_cut_off_goes_on(
    sample: Path, copied: Callable[[Path], Path], command: Command, tmp_path: Path
) -> None:
    """To its end, at the price that was planned, and with the settings that it was begun with."""
    if sample.name == "federation":
        pytest.importorskip("cryptography", reason="a federation takes cryptography")
    place, wanted = copied(sample), expected(sample)
    run = place / "run"
    if private_of_before(sample):
        check_refused(place, command)
        return
    charges, rounds = ENDS[sample.name]
    stopped = rounds < wanted["rounds"]

    go_on(place, command, moved=False)
    assert read_run(run).finished is False
    go_on(place, command, moved=True)

    ledger, record = OpenRun(run).ledger, read_run(run)
    assert ledger.finished
    assert [r["round"] for r in ledger.chain.records if r["kind"] == "charge"] == charges
    assert ledger.spent == len(charges) == (wanted["ledger"]["planned"] if charges else 0)
    assert resumption(ledger)["round"] == wanted["kept"]["next"]
    lost = ["charged and its totals are not there"] if stopped else []
    check_notes(resumption(ledger)["notes"], lost)

    assert record.finished
    assert [row["round"] for row in record.history] == list(range(1, rounds + 1))
    check_alike(record.history[: len(wanted["history"])], wanted["history"])
    # Rows of then and of now have the same columns: a chart goes through all of them.
    assert len({frozenset(row) for row in record.history}) == 1
    assert (record.stopped is None) is not stopped
    assert (run / "result.json").exists()
    assert written(run, "result.json")["settings"]["method"] == wanted["settings"]["method"]
    assert written(run, "result.json")["settings"]["clip"] == wanted["settings"]["clip"]
    if wanted["epsilon"] is None:
        assert record.privacy is None
        assert record.statement == ("This run gives no privacy guarantee.",)
    else:
        # What was promised at the beginning; accountants may differ in the last digits.
        assert record.epsilon == pytest.approx(wanted["epsilon"], rel=1e-3)
        assert record.privacy["delta"] == pytest.approx(wanted["privacy"]["delta"])
        assert any("ε =" in line for line in record.statement)
    if "people" in wanted:
        people = sampled.population_ledger_facts(place / sampled.LEDGER)
        assert people["charges"] == len(charges)
        assert people["who withdrew"] == wanted["people"]["who withdrew"]
    pytest.importorskip("plotly", reason="a report takes plotly")
    assert write_report(run, tmp_path / "report.html").exists()


def check_refused(place: Path, command: Command) -> None:
    """A private run whose ε is not established does not go on, and stays as it is."""
    name, run = place.name, place / "run"
    before = files(run)
    what = "begun by fpfl 0.1.0 or before.*start a new run"
    if name == "federation":
        with pytest.raises(ValueError, match=what):
            sampled.federated(place, run)
    elif (run / "config.toml").exists():
        code, _, err = command("resume", run, "--moved")
        assert code == 2
        assert re.search(what, " ".join(err.split()))
    else:
        model, people, settings = sampled.python_run(name, place)
        ledger = place / sampled.LEDGER
        where = fpfl.RunFolder(
            run, resume=True, moved=True, ledger=ledger if ledger.exists() else None
        )
        with pytest.raises(ValueError, match=what):
            fpfl.train(model, people, folder=where, **settings)
    assert files(run) == before
    assert any(BEFORE in line for line in read_run(run).statement)


def go_on(place: Path, command: Command, *, moved: bool) -> None:
    """Resume a copy; as long as nobody says that it was moved, that is refused."""
    name, run = place.name, place / "run"
    if name == "federation":
        if moved:
            # federate() has no word for it; this notes the new place as RunFolder(moved=True) does.
            RunLedger.of_finished(run / "ledger.jsonl", moved=True).close()
            sampled.federated(place, run)
            return
        with pytest.raises(CopiedRunError, match="moved=True"):
            sampled.federated(place, run)
    elif (run / "config.toml").exists():
        code, _, err = command("resume", run, *["--moved"] * moved)
        assert code == (0 if moved else 2), err
        assert moved or "--moved" in err
    else:
        model, people, settings = sampled.python_run(name, place)
        ledger = place / sampled.LEDGER
        where = fpfl.RunFolder(
            run, resume=True, moved=moved, ledger=ledger if ledger.exists() else None
        )
        if moved:
            fpfl.train(model, people, folder=where, **settings)
            return
        with pytest.raises(CopiedRunError, match="moved=True"):
            fpfl.train(model, people, folder=where, **settings)


def resumption(ledger: RunLedger) -> dict[str, Any]:
    """What is noted where a run went on last."""
    *_, last = (record for record in ledger.chain.records if record["kind"] == "resume")
    return last


def check_notes(notes: list[str], lost: list[str]) -> None:
    """A resumption's notes: the code is another by now, and nothing else has changed.

    A setting that is called otherwise now, or a class, would be noted as a change; and so would
    data that is read in another way.
    """
    changes = [note for note in notes if note != "code differ from the beginning"]
    assert len(changes) == len(lost), changes
    for note, what in zip(changes, lost, strict=True):
        assert what in note


@each("budgeted")
def test_a_budget_has_room_for_more_rounds(
    sample: Path, copied: Callable[[Path], Path], command: Command
) -> None:
    """Under the filter that was fixed at the beginning; the population's ledger is charged."""
    place, wanted = copied(sample), expected(sample)
    run, people = place / "run", place / sampled.LEDGER
    check_alike(sampled.population_ledger_facts(people), wanted["people"])
    code, out, err = command("budget", "show", people)
    assert code == 0, err
    assert "'clinic' (16,280 users): ε = 2" in out
    assert "Users who withdrew: 1." in out
    code, out, _ = command("resume", run)
    assert "is finished; nothing is left to do" in out
    if private_of_before(sample):
        assert "what these runs cost is not established" in command("budget", "show", people)[1]
        code, _, err = command("resume", run, "--rounds", 5, "--moved")
        assert code == 2
        assert "begun by fpfl 0.1.0 or before" in " ".join(err.split())
        return

    code, out, err = command("resume", run, "--rounds", 5, "--moved")
    assert code == 0, err
    assert "privacy filter" in out
    ledger, record = OpenRun(run).ledger, read_run(run)
    assert ledger.finished
    assert [row["round"] for row in record.history] == [1, 2, 3, 4, 5]
    assert (ledger.planned, ledger.spent, len(ledger.changes)) == (5, 5, 1)
    terms = wanted["ledger"]["terms"]
    assert (ledger.filter.epsilon, ledger.filter.order) == (terms[2], terms[3])
    assert record.epsilon == 2.0
    check_notes(resumption(ledger)["notes"], ["rounds: 3 -> 5"])
    # The two who left the run and the one who left the population.
    withdrawn = [r["users"] for r in ledger.chain.records if r["kind"] == "withdrawal"]
    assert withdrawn[-1] == 3
    code, out, err = command("budget", "show", people, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["charges"] == 5
    assert list(shown["runs"]) == [ledger.run]
    assert shown["share"] > wanted["people"]["share"]


@those(SEEDED)
def test_a_seeded_run_goes_on_by_the_same_code_alone(
    sample: Path, copied: Callable[[Path], Path], tmp_path: Path
) -> None:
    """What has changed is named, and the run is left as it is."""
    place = copied(sample)
    run = place / "run"
    model, people, settings = sampled.python_run(sample.name, place)
    fpfl.train(model, people, folder=tmp_path / "anew", **settings)
    old, now = OpenRun(run).fingerprints, OpenRun(tmp_path / "anew").fingerprints
    assert old.keys() == now.keys() == {"data", "settings", "model", "code"}
    changed = [name for name in now if now[name] != old[name]]
    # Threads and the GPU are among the settings here; people and model are what they were.
    assert not {"data", "model"} & set(changed)
    before = files(run)
    where = fpfl.RunFolder(run, resume=True, moved=True)
    if not changed:
        assert len(fpfl.train(model, people, folder=where, **settings).history) == 6
        return
    # The new run has the confusion table; the one that goes on keeps the layout that it has.
    others = [name for name in changed if name != "settings"]
    what = f"seeded run in .* was begun with other (settings and )?{' and '.join(others)}: "
    if private_of_before(sample):
        what = "begun by fpfl 0.1.0 or before"
    with pytest.raises(ValueError, match=what):
        fpfl.train(model, people, folder=where, **settings)
    assert files(run) == before


@each("evaluated")
def test_a_model_that_was_judged_is_not_judged_again(
    sample: Path, copied: Callable[[Path], Path], command: Command
) -> None:
    """Nor after its run has ended once more, with the model that it had."""
    run = copied(sample) / "run"
    again = ("evaluate", run, "--epsilon", 1, "--bound", 2, "--moved")
    code, _, err = command(*again)
    assert code == 2
    assert "evaluated privately already (ε = 1 at" in err
    before = files(run)
    code, _, err = command("resume", run, "--config", run / "config.toml", "--moved")
    if private_of_before(sample):
        assert code == 2
        assert files(run) == before
        return
    assert code == 0, err
    assert [record["kind"] for record in OpenRun(run).ledger.chain.records][-2:] == [
        "resume",
        "finish",
    ]
    for name in ("model.safetensors", "history.json"):
        assert (run / name).read_bytes() == before[name]
    code, _, err = command(*again)
    assert code == 2
    assert "evaluated privately already (ε = 1 at" in err
    assert read_run(run).evaluations.keys() == {"private", "test", "training"}


@each("evaluated")
def test_a_finished_run_is_exported(sample: Path, command: Command, tmp_path: Path) -> None:
    run = sample / "run"
    code, _, err = command("export", run, "-o", tmp_path / "out", "--format", "torch",
                           "--format", "card")  # fmt: skip
    assert code == 0, err
    # The network is built from the config; its answers are those of the export of that time.
    wanted = expected(sample.parent / "exported")["torch"]
    found = sampled.torch_facts(tmp_path / "out" / "model.pt2")
    check_alike(found["scores"], wanted["scores"], 1e-5)
    names = ("epsilon", "delta", "constraint", "tolerance", "verdict")
    check_alike(found["about"], {n: v for n, v in wanted["about"].items() if n in names})
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text(encoding="utf-8")
    for words in expected(sample)["statement"][:2]:
        assert words in card
    made = written(sample.parent, "made.json")["packages"]
    assert f"computed with fpfl {made['fpfl']}, torch {made['torch']}." in card


# --- ledgers and populations ----------------------------------------------------------------------


@each("ledger")
def test_a_population_s_ledger_is_read_and_charged(sample: Path, tmp_path: Path) -> None:
    path, wanted = tmp_path / sampled.LEDGER, expected(sample)
    shutil.copy(sample / sampled.LEDGER, path)
    check_alike(sampled.population_ledger_facts(path), wanted)
    with PopulationLedger.open(path) as ledger:
        assert ledger.charged_rounds("spring") == 3
        ledger.charge("winter", Mechanism("poisson", 500, 50, 2.0, "zero-out"), 1)
        ledger.withdraw([5])
    found = sampled.population_ledger_facts(path)
    assert found["charges"] == wanted["charges"] + 1
    assert found["torn"] == wanted["torn"] == 1
    assert found["who withdrew"] == sorted([*wanted["who withdrew"], 5])
    assert found["share"] > wanted["share"]


@each("population")
def test_a_population_folder_is_read(sample: Path) -> None:
    people = fpfl.FederatedDataset.open(sample / "people")
    check_alike(sampled.population_facts(people), expected(sample))
    same = sampled.load_people(sample.parent)
    assert torch.equal(people.features, same.features)
    assert torch.equal(people.offsets, same.offsets)


@each("writers")
def test_a_compact_file_is_read(sample: Path) -> None:
    check_alike(sampled.writers_facts(sample / "writers.npz"), expected(sample))


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["classifier", "regressor", "plain"])
@each("estimators")
def test_a_pickled_estimator_answers(sample: Path, name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the estimators take scikit-learn")
    wanted = expected(sample)[name]
    estimator = pickle.loads((sample / f"{name}.pickle").read_bytes())
    found = sampled.estimator_facts(estimator, json.loads((sample / "rows.json").read_text()))
    check_alike(json.loads(json.dumps(found)), wanted, 1e-5)
    record = read_run(estimator.run_.save(tmp_path / "saved"))
    assert record.epsilon == pytest.approx(wanted["epsilon"])
    assert str(estimator.privacy_ or "").count("ε =") == (2 if wanted["epsilon"] else 0)


@each("exported")
def test_an_exported_model_answers(sample: Path) -> None:
    made = written(sample.parent, "made.json")["packages"]
    if release("torch") < numbers(made["torch"]):
        pytest.skip("torch reads .pt2 files of its own version and of those before it")
    check_alike(sampled.torch_facts(sample / "model.pt2"), expected(sample)["torch"], 1e-5)


@each("exported")
def test_an_exported_onnx_model_answers(sample: Path) -> None:
    pytest.importorskip("onnxruntime", reason="it is what runs the file")
    check_alike(sampled.onnx_facts(sample / "model.onnx"), expected(sample)["onnx"], 1e-5)


def release(package: str) -> tuple[int, ...]:
    return numbers(importlib.metadata.version(package))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# --- federations ----------------------------------------------------------------------------------


@each("federation")
def test_an_agreement_has_the_fingerprint_that_it_had(sample: Path) -> None:
    """Nodes and servers of two versions work together only where they agree on it."""
    pytest.importorskip("cryptography", reason="a federation takes cryptography")
    wanted = written(sample, "agreement.json")
    assert sampled.agreement_digest(wanted["agreement"]) == wanted["fingerprint"]
    agreement = sampled.agreed()
    now = sampled.agreement_text(agreement)
    # Of two classes other totals are released: then hits and misses, now the confusion table. So
    # nodes of then and of now must not work together. And clip=1.0 leaves the shares to the rules,
    # which give counts 0.20 now and gave them 0.25. Nothing else has changed.
    assert agreement.fingerprint.hex() != wanted["fingerprint"]
    assert now["layout"].pop("classes") == 2
    assert now["clip"]["counts_share"] == COUNTS_SHARE == 0.20
    now["clip"]["counts_share"] = 0.25
    assert now == wanted["agreement"]
    assert sampled.agreement_digest(now) == wanted["fingerprint"]


@each("throwaway-keys")
def test_keys_of_the_first_version_are_refused_in_words(sample: Path, tmp_path: Path) -> None:
    """They had no dates and could not be revoked; 0.1 reads them."""
    pytest.importorskip("cryptography", reason="a federation takes cryptography")
    from fpfl.federation import enrolment as keys
    from fpfl.federation.secagg import Identity, Invalid, Trust

    content = (sample / keys.IDENTITY).read_bytes()
    with pytest.raises(Invalid, match=r"fpfl 0\.1.*fpfl federation request"):
        Identity.from_bytes(content)
    with pytest.raises(Invalid, match=r"fpfl 0\.1.*fpfl federation keys"):
        Trust.from_pem((sample / keys.AUTHORITY).read_bytes())
    (tmp_path / keys.SIGNING).write_bytes(content[-32:])
    with pytest.raises(Invalid, match=r"fpfl 0\.1.*fpfl federation request"):
        keys.accept(tmp_path, sample / keys.CREDENTIAL, "")
    (tmp_path / keys.REQUEST).write_bytes(content[-32:])
    with pytest.raises(Invalid, match=r"fpfl 0\.1.*fpfl federation request"):
        keys.read_request(tmp_path / keys.REQUEST)
    for name in (keys.SECRET, keys.AUTHORITY):
        (tmp_path / name).write_bytes(content[-32:])
    with pytest.raises(Invalid, match=r"fpfl 0\.1.*fpfl federation keys"):
        keys.revoke(tmp_path)
