"""Bad inputs by the thousand: whatever is read is either in order or refused in plain words.

Files are damaged in every way that a disk, an editor or a copy knows; numbers are any numbers.
``FUZZ_TIMES=50`` in the environment makes it fifty times as many. ``python -m fuzz`` goes on where
these stop, guided by the lines that an input reaches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, thorough
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fpfl
from fpfl.aggregation.clipping import DenseRows, clip, clip_rules, clipped_sum
from fpfl.callbacks.progress import accuracy_words, averaged_words, gap_words
from fpfl.config import Config, load_config, load_data, run_config
from fpfl.data import open_population
from fpfl.methods import MMDM, MethodState, OneGradient, ReweightingMethod, Tran, Unconstrained
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.privacy.settings import Clipping
from fpfl.runs.folder import OpenRun
from fpfl.runs.journal import read_past, read_withdrawals, withdraw
from fpfl.runs.ledger import RunLedger
from fpfl.server.loop import measured
from fpfl.server.loop import row as described
from fpfl.server.selection import Selection
from fpfl.store.chain import Chain, ChainError
from fpfl.users.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROOT = Path(__file__).parents[1]
ROUNDS = 6
# Thousands of small files: in memory, where the system has a folder for that.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def often(examples: int, here: int | None = None) -> Any:
    """So many examples; fewer of those that take long, but before a release."""
    examples = examples if here is None else thorough(here, examples)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    times = int(os.environ.get("FUZZ_TIMES", "1"))
    return settings(max_examples=times * examples, suppress_health_check=checks)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def no_pickle() -> Iterator[None]:
    """Nothing that is read may run code."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was about to be loaded")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(module, name, refuse)
        yield


# --- damage -------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The same file after an accident or two."""
    for _ in range(draw(st.integers(1, 2))):
        size = len(content)
        at = draw(st.integers(0, size))
        many = draw(st.integers(1, 64))
        how = draw(st.sampled_from(["cut", "flip", "byte", "insert", "delete", "double", "lines"]))
        if how == "cut":
            content = content[:at]
        elif how in ("flip", "byte") and size:
            at = min(at, size - 1)
            new = content[at] ^ 1 << draw(st.integers(0, 7))
            new = new if how == "flip" else draw(st.integers(0, 255))
            content = content[:at] + bytes([new]) + content[at + 1 :]
        elif how == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=20)) + content[at:]
        elif how == "delete":
            content = content[:at] + content[at + many :]
        elif how == "double":
            content = content[: at + many] + content[at:]
        elif how == "lines":
            lines = content.split(b"\n")
            one, two = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            lines[one], lines[two] = lines[two], lines[one]
            content = b"\n".join(lines)
    return content


class Files(dict[str, bytes | None]):
    """What is in a folder, by relative path; None is a folder. Prints short."""

    done = "as it was written"

    def __repr__(self) -> str:
        return f"<{len(self)} files, {self.done}>"


@st.composite
def folders(draw: st.DrawFn, files: Files) -> Files:
    """The same folder after an accident."""
    found = Files(files)
    name, other = (draw(st.sampled_from(sorted(files))) for _ in range(2))
    how = draw(st.sampled_from(["damage", "damage", "damage", "remove", "copy", "swap", "replace"]))
    if how == "damage":
        found[name] = draw(damaged(files[name] or b""))
    elif how == "remove":
        del found[name]
    elif how == "copy":
        path = Path(name)
        names = [
            f"{path.name}.bak",
            f"{path.stem} (2){path.suffix}",
            path.name.replace("0", "1", 1),
        ]
        other = str(path.with_name(draw(st.sampled_from([*names, Path(other).name]))))
        found[other] = files[name]
    elif how == "swap":
        found[name], found[other] = files[other], files[name]
    else:
        found[name] = draw(st.sampled_from([b"", None, b"\0" * 100, b"[]\n", b"{}\n", b"[" * 9999]))
    found.done = f"{how} {name} {other if how in ('copy', 'swap') else found.get(name, '')!r}"
    return found


def put(folder: Path, files: Files) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    return folder


def taken(folder: Path) -> Files:
    """All files under a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return Files({str(path.relative_to(folder)): path.read_bytes() for path in found})


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def plain(error: Exception, *names: str) -> None:
    """One line, which says what it is about."""
    said = str(error)
    assert "\n" not in said
    assert said
    assert not names or any(name in said for name in names), f"{error!r} names none of {names}"


# --- configs ------------------------------------------------------------------------------------

TRAINING = {"cohort": 4, "rounds": 2, "seed": 1}
SCHEMA = {"classes": 2, "attributes": {"sex": ["F", "M"]}, "samples_per_user": 2.0}
VALID: list[dict[str, Any]] = [
    {
        "data": {"train": "table.npz", "test": "table.npz", "schema": SCHEMA},
        "model": {"hidden": [3]},
        "training": {**TRAINING, "optimizer": "adam", "clip": 1.0, "normaliser": "samples"},
        "constraint": {"kind": "fnr_parity", "by": ["sex"], "tolerance": 0.1},
        "method": {"kind": "tran", "rate": 0.1},
    },
    {
        "version": 1,
        "data": {"folder": "people", "test": "people"},
        "training": {**TRAINING, "sampling": "without-replacement", "selection": "average"},
        "constraint": {"kind": "equalized_odds", "by": [["sex"]]},
        "method": {"kind": "mmdm", "damping": 1.0, "tolerance": 0.1},
    },
    {
        "data": {"train": "table.npz", "schema": {**SCHEMA, "population": 9}},
        "training": {**TRAINING, "noise_seed": 3, "memory": 2**20, "selection_window": 2},
        "constraint": {"kind": "accuracy_parity"},
        "privacy": {
            "noise_multiplier": 1.0,
            "clip": {"bound": 1.0, "counts": 2.0, "clipped_share": 0.1},
            "neighbours": "add-remove",
            "max_participations": 2,
            "delta": 1e-3,
        },
    },
    {
        "data": {"train": "table.npz", "schema": SCHEMA},
        "training": TRAINING,
        "privacy": {
            "noise_multiplier": 1.0,
            "clip": {"bound": 1.0, "adapts": {"target": 0.2, "least": 0.1, "most": 9.0}},
        },
    },
    {
        "data": {"train": "real.npz", "schema": {"label_range": [0.0, 1.0]}},
        "training": {**TRAINING, "device": "cpu", "precision": "bf16"},
        "privacy": {"noise_multiplier": 2.0, "convention": "replace-one", "population": 50},
    },
    {
        "data": {"train": "table.npz", "schema": SCHEMA},
        "training": {**TRAINING, "suggested": True},
        "constraint": {"kind": "fnr_parity", "by": ["sex"]},
        "privacy": {"noise_multiplier": 1.0},
    },
    {
        "data": {"folder": "people"},
        "training": {**TRAINING, "local_steps": 2, "local_learning_rate": 0.1, "clip": 1.0},
        "constraint": {"kind": "equalized_odds", "by": ["sex"]},
        "method": {
            "kind": "one-gradient", "damping": 1.0, "rate": 0.2, "tolerance": "constraint",
            "memory": 0.5, "spread": "none", "low": 0.0, "high": 3.0, "surrogate": "rate",
        },
    },
]  # fmt: skip

# Nothing between what is small and what nobody has memory for: a test must not fill a machine.
WHOLE = st.sampled_from([0, 1, 2, 3, -1, 10**12, 2**63, 2**64, -(10**20), 10**30, 10**400])
REAL = st.sampled_from(
    [
        0.0,
        -0.0,
        0.5,
        1.0,
        -1.0,
        math.nan,
        math.inf,
        -math.inf,
        1e300,
        1e-300,
        5e-324,
        1e18,
        1e30,
        1e-30,
        1e-9,
        100.0,
        0.99,
    ]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = sorted({key for valid in VALID for part in valid.values() if isinstance(part, dict)
               for key in part})  # fmt: skip
WORDS = st.sampled_from(
    [
        *KEYS,
        "sex",
        "users",
        "cpu:7",
        "cuda",
        "meta",
        "mps",
        "table.npz",
        "people",
        "predictive_parity",
        "demographic_parity",
        "equal_error",
        "bmdm",
        "one-gradient",
        "none",
        "last",
        "best",
        "momentum",
        "paper",
        "poisson",
        "zero-out",
        "tf32",
    ]
)
RUBBISH = st.recursive(
    WHOLE | REAL | TEXT | WORDS | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXT, inner, max_size=3),
    max_leaves=6,
)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(value)]
    return json.dumps(value, ensure_ascii=False)


NEAR: list[tuple[tuple[str, ...], str, st.SearchStrategy[Any]]] = [
    *((("training",), key, WHOLE) for key in ("cohort", "rounds", "samples_per_user", "memory",
      "selection_window", "seed", "noise_seed", "checkpoint_every", "local_steps")),
    *((("training",), key, REAL) for key in ("learning_rate", "normaliser", "clip",
      "local_learning_rate")),
    (("training",), "suggested", st.booleans()),
    *((("training",), key, WORDS) for key in ("optimizer", "sampling", "selection", "precision",
      "device", "normaliser")),
    (("model",), "hidden", st.lists(WHOLE, max_size=3)),
    (("constraint",), "kind", WORDS),
    (("constraint",), "by", st.lists(st.lists(WORDS, max_size=2) | WORDS, max_size=2)),
    (("constraint",), "tolerance", REAL),
    (("method",), "kind", WORDS),
    *((("method",), key, REAL) for key in ("damping", "rate", "tolerance", "max_multiplier",
      "memory", "spread", "low", "high")),
    *((("method",), key, WORDS) for key in ("tolerance", "spread", "surrogate")),
    # Calibrating cohorts of a fixed size to a tiny ε takes its time.
    (("privacy",), "epsilon", REAL.filter(lambda e: not 0 < e < 0.5)),
    *((("privacy",), key, REAL) for key in ("noise_multiplier", "delta", "clip", "budget")),
    *((("privacy",), key, WHOLE) for key in ("population", "max_participations")),
    *((("privacy",), key, WORDS) for key in ("convention", "neighbours")),
    *((("privacy", "clip"), key, REAL) for key in ("bound", "counts", "selection",
      "counts_share", "selection_share", "clipped_share")),
    *((("privacy", "clip", "adapts"), key, REAL) for key in ("target", "rate", "share", "least",
      "most", "ratio", "reference")),
    *((("data", "schema"), key, WHOLE) for key in ("classes", "population")),
    (("data", "schema"), "samples_per_user", REAL),
    (("data", "schema"), "label_range", st.lists(REAL, min_size=2, max_size=2)),
    (("data", "schema"), "feature_ranges", st.lists(st.lists(REAL, min_size=2, max_size=2),
      min_size=2, max_size=2)),
    (("data", "schema"), "attributes", st.dictionaries(WORDS, st.lists(TEXT, max_size=3),
      max_size=2)),
    (("data", "schema"), "unknown", st.lists(WORDS, max_size=2)),
    *((("data",), key, WORDS | TEXT) for key in ("train", "test", "folder")),
]  # fmt: skip
"""Values of the kind that a key takes, and far out: these get past the first checks."""


@st.composite
def configs(draw: st.DrawFn) -> str:
    """A valid config with some of its values, keys and sections changed."""
    content = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(0, 3))):
        where, key, values = draw(st.sampled_from(NEAR))
        if draw(st.integers(0, 9)) == 0:
            values = RUBBISH
            key = draw(st.just(key) | WORDS | TEXT)
            where = draw(st.sampled_from([(), where]))
        place = content
        for name in where:
            inner = place.get(name)
            place = inner if isinstance(inner, dict) else place.setdefault(name, {})
            if not isinstance(place, dict):
                break
        else:
            place[key] = draw(values)
            if draw(st.integers(0, 9)) == 0:
                del place[key]
    return "".join(f"{as_toml(key)} = {as_toml(value)}\n" for key, value in content.items())


@pytest.fixture(scope="module")
def data_folder(scratch: Path) -> Path:
    """The files that the configs name."""
    folder = scratch / "data"
    folder.mkdir()
    data = make_population(users=9, mean=2.0, features=2)
    users = np.repeat(np.arange(9), data.sizes().numpy())
    columns = {"features": data.features.numpy(), "users": users}
    codes = data.attributes.numpy()
    np.savez(folder / "table.npz", labels=data.labels.numpy(), attributes=codes, **columns)
    np.savez(folder / "real.npz", labels=np.linspace(0, 1, len(users)), **columns)
    data.save(folder / "people")
    return folder


@often(250, here=80)
@given(text=configs())
def test_a_config_trains_or_is_refused(data_folder: Path, text: str) -> None:
    path = data_folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    try:
        config = load_config(path)
    except ValueError as error:
        return plain(error, "run.toml")
    assert isinstance(config, Config)
    rounds = min(config.training.rounds, 2)
    training = config.training.model_copy(update={"rounds": rounds})
    if config.data.name is not None:
        return None  # Adult is too large for this
    try:
        run, *_ = run_config(config.model_copy(update={"training": training}), folder=data_folder)
    except (ValueError, OSError, BudgetExhaustedError) as error:
        plain(error)
        return None
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    return None


@often(150)
@given(content=st.binary(max_size=60) | damaged("\n".join(
    f"{as_toml(k)} = {as_toml(v)}" for k, v in VALID[2].items()).encode()))  # fmt: skip
def test_any_bytes_as_a_config(scratch: Path, content: bytes) -> None:
    path = scratch / "any.toml"
    path.write_bytes(content)
    try:
        assert isinstance(load_config(path), Config)
    except ValueError as error:
        plain(error, "any.toml")


# --- run folders --------------------------------------------------------------------------------

PEOPLE = make_population()


class StopError(Exception):
    """Raised by a callback: as far as the folder can tell, a crash."""


def train(folder: fpfl.RunFolder | None, stop_after: int = 0, **others: Any) -> fpfl.Run:
    def watch(event: fpfl.RoundEvent) -> None:
        if event.row["round"] == stop_after:
            raise StopError

    given = {
        "cohort": 6,
        "rounds": ROUNDS,
        "constraint": fpfl.fnr_parity("sex", tolerance=0.02),
        "privacy": fpfl.Privacy(noise_multiplier=1.0, max_participations=3),
        "seed": 1,
        "noise_seed": 5,
        "selection_window": 2,
    } | others
    model = fpfl.mlp(5, (4,), seed=0)
    return fpfl.train(model, PEOPLE, folder=folder, callbacks=[watch], **given)


def parameters(run: fpfl.Run) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())


@pytest.fixture(scope="module")
def same_code() -> Iterator[None]:
    """The source does not change meanwhile, and need not be read a thousand times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fpfl.runs.resume.code_fingerprint", lambda *_: "this")
        yield


def begun(folder: Path, ledger: Path | None = None, **others: Any) -> None:
    """A run that was cut off twice, after its second checkpoint."""
    for resume, rounds in ((False, 3), (True, 5)):
        where = fpfl.RunFolder(folder, resume=resume, checkpoint_every=2, ledger=ledger)
        with pytest.raises(StopError):
            train(where, stop_after=rounds, **others)


@pytest.fixture(scope="module")
def seeded(scratch: Path, same_code: None) -> tuple[Files, bytes]:
    """A simulation's files, and the model that it comes to."""
    begun(scratch / "seeded" / "run")
    return taken(scratch / "seeded"), parameters(train(None))


REAL_RUN: dict[str, Any] = {"noise_seed": None, "seed": None}


@pytest.fixture(scope="module")
def real(scratch: Path, same_code: None) -> Files:
    """The files of a run with the system's randomness, beside them its population's ledger."""
    people = scratch / "real" / "people.jsonl"
    people.parent.mkdir()
    with PopulationLedger.create(people, population=PEOPLE.population, epsilon=90.0):
        begun(people.parent / "run", people, **REAL_RUN)
    with PopulationLedger.open(people) as ledger:
        ledger.withdraw([4])
    withdraw(people.parent / "run", [3, 17])
    return taken(people.parent)


def resumed(folder: Path, **others: Any) -> fpfl.Run | None:
    """Go on with the run in a folder; None where that was refused, and nothing changed."""
    before = contents(folder)
    where = fpfl.RunFolder(folder, resume=True, checkpoint_every=2, moved=True)
    try:
        run = train(where, **others)
    except (ValueError, OSError) as error:
        plain(error, str(folder.parent), "population's ledger", "the run was begun")
        assert contents(folder) == before
        return None
    ledger = OpenRun(folder).ledger
    assert ledger.spent >= len(run.history), "a round was released that nobody was charged for"
    assert set(range(1, len(run.history) + 1)) <= ledger.charged
    assert ledger.finished
    return run


@often(200, here=50)
@given(data=st.data())
def test_a_damaged_simulation_is_refused_or_comes_to_the_same(
    scratch: Path, seeded: tuple[Files, bytes], data: st.DataObject
) -> None:
    files, model = seeded
    run = resumed(put(scratch / "seeded", data.draw(folders(files))) / "run")
    if run is not None:
        assert len(run.history) == ROUNDS
        assert parameters(run) == model


@often(120, here=40)
@given(data=st.data())
def test_a_damaged_run_is_refused_or_goes_on_with_its_charges(
    scratch: Path, real: Files, data: st.DataObject
) -> None:
    run = resumed(put(scratch / "real", data.draw(folders(real))) / "run", **REAL_RUN)
    if run is not None:
        assert 3 <= len(run.history) <= ROUNDS


@often(200)
@given(data=st.data())
def test_a_damaged_folder_is_read_or_refused(
    scratch: Path, real: Files, data: st.DataObject
) -> None:
    """What looks and does not write: all that stands in the folder comes through one of these."""
    folder = put(scratch / "real", data.draw(folders(real))) / "run"
    before = contents(folder)
    for read in (
        lambda: OpenRun(folder).manifest,
        lambda: OpenRun(folder).ledger.settings,
        lambda: read_past(folder, simulation=False, cap=3),
    ):
        try:
            read()
        except (ValueError, OSError) as error:
            plain(error, str(folder))
    assert contents(folder) == before


# --- ledgers ------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 10**30, 0.5, "x", "charge", "open", "torn"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


@st.composite
def relinked(draw: st.DrawFn, content: bytes) -> bytes:
    """The same ledger with records changed by somebody who makes all hashes fit again."""
    records = [json.loads(line) for line in content.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(records[-3:] + records[:1]))
        key = draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and draw(st.booleans()):
            place = place[key] or {"": 0}
            key = draw(st.sampled_from(sorted(place)))
        if draw(st.integers(0, 3)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(JSON)
    lines: list[bytes] = []
    for number, record in enumerate(draw(st.permutations(records) | st.just(records))):
        before = hashlib.sha256(lines[-1]).hexdigest() if lines else "0" * 64
        own = {"n": number, "time": "2026-01-31T12:00:00.000000Z", "previous": before}
        lines.append(json.dumps(record | own).encode())
    return b"\n".join(lines) + b"\n"


@often(120)
@given(data=st.data())
def test_a_forged_ledger_is_read_or_refused(
    scratch: Path, real: Files, data: st.DataObject
) -> None:
    content = data.draw(relinked(real["run/ledger.jsonl"] or b""))
    folder = put(scratch / "real", Files(real) | {"run/ledger.jsonl": content}) / "run"
    try:
        ledger = OpenRun(folder).ledger
        assert ledger.spent >= 0
        assert ledger.finished in (True, False)
    except (ValueError, OSError) as error:
        plain(error, "ledger.jsonl")
    resumed(folder, **REAL_RUN)


@often(300)
@given(data=st.data())
def test_a_forged_population_ledger_is_read_or_refused(
    scratch: Path, real: Files, data: st.DataObject
) -> None:
    content = real["people.jsonl"] or b""
    path = scratch / "forged.jsonl"
    path.write_bytes(data.draw(relinked(content) | damaged(content)))
    before = path.read_bytes()
    for write in (False, True):
        try:
            with PopulationLedger.open(path, write=write) as ledger:
                told = ledger.as_dict()
                assert told["charges"] >= 0
                assert ledger.summary()
                assert len(ledger.withdrawn()) == told["withdrawn"]
        except (ValueError, OSError) as error:
            plain(error, "forged.jsonl", "mechanism")
        assert path.read_bytes().startswith(before), "something that was written is gone"
        assert write or path.read_bytes() == before


# --- data files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def population(scratch: Path) -> Files:
    return taken(make_population(users=8, mean=2.0, attributes=(SEX, RACE)).save(scratch / "pop"))


@often(400)
@given(data=st.data())
def test_a_damaged_population_is_sound_or_refused(
    scratch: Path, population: Files, data: st.DataObject
) -> None:
    folder = put(scratch / "pop", data.draw(folders(population)))
    try:
        opened = open_population(folder)
        # All samples, copied into memory: there every value is checked.
        everyone = opened.subset(np.arange(opened.population))
        assert len(everyone) <= len(opened)
        json.dumps(opened.schema.as_dict(), allow_nan=False)
    except (ValueError, OSError) as error:
        plain(error)


@often(300)
@given(change=st.data())
def test_any_schema_is_sound_or_refused(
    scratch: Path, population: Files, change: st.DataObject
) -> None:
    content = json.loads(population["schema.json"] or b"")
    for _ in range(change.draw(st.integers(1, 2))):
        place = content if change.draw(st.integers(0, 4)) == 0 else content["schema"]
        if not isinstance(place, dict):
            break
        key = change.draw(st.sampled_from(sorted(place) or ["x"]))
        odd = st.sampled_from([5.0, [5.0], [5], [-5], [True], 2.5, True, 1e400, -1e400, "12345"])
        ranges = st.lists(st.lists(REAL, max_size=3), max_size=6)
        place[key] = change.draw(odd | JSON | RUBBISH | ranges)
    files = Files(population) | {"schema.json": json.dumps(content).encode()}
    folder = put(scratch / "pop", Files(files))
    try:
        opened = open_population(folder)
        assert all(type(size) is int for size in opened.schema.shape)
        json.dumps(opened.schema.as_dict(), allow_nan=False)
        opened.subset(np.arange(opened.population))
    except ValueError as error:
        plain(error, "schema.json", "features.npy", "offsets.npy", "labels.npy", "attributes.npy")


TABLE = {
    "features": np.arange(8, dtype=np.float32).reshape(4, 2),
    "labels": np.array([0, 1, 1, 0]),
    "attributes": np.array([[0], [1], [1], [0]]),
    "users": np.array(["b", "b", "c", "a"]),
}


def as_npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def loaded(folder: Path, **others: Any) -> fpfl.FederatedDataset:
    schema = {"attributes": {"sex": ["F", "M"]}} | others
    data = {"train": "table.npz", "schema": schema}
    config = Config.model_validate({"data": data, "training": {"cohort": 1, "rounds": 1}})
    return load_data(config, folder)[0]


@often(400)
@given(data=st.data(), packed=st.booleans())
def test_a_damaged_table_is_sound_or_refused(
    scratch: Path, data: st.DataObject, packed: bool
) -> None:
    """The archive as a whole, and each array in an archive that is in order."""
    path = scratch / "table.npz"
    chosen = data.draw(st.sampled_from([None, *TABLE]))
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, array in TABLE.items():
            content = as_npy(array)
            content = data.draw(damaged(content)) if name == chosen else content
            archive.writestr(f"{name}.npy", content)
    if chosen is None:
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        table = loaded(scratch)
    except ValueError as error:
        return plain(error, "table.npz")
    assert bool(table.features.isfinite().all())
    assert table.population <= len(table)
    return None


def claiming(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> bytes:
    """An .npy file whose header promises more than there is."""
    buffer = io.BytesIO()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + array.tobytes()


@pytest.mark.parametrize("rows", [10**9, 10**12, 10**15, 2**62, 2**64])
def test_a_header_is_not_believed(scratch: Path, population: Files, rows: int) -> None:
    """Nobody takes memory for samples that are not there."""
    lying = claiming(np.zeros((2, 5), dtype=np.float32), (rows, 5))
    folder = put(scratch / "pop", Files(Files(population) | {"features.npy": lying}))
    with pytest.raises(ValueError, match=r"features.npy"):
        open_population(folder)
    with zipfile.ZipFile(scratch / "table.npz", "w") as archive:
        for name, array in TABLE.items():
            content = as_npy(array)
            lying = claiming(array, (rows, *array.shape[1:]))
            archive.writestr(f"{name}.npy", lying if name == "features" else content)
    with pytest.raises(ValueError, match=r"table\.npz cannot be read"):
        loaded(scratch)


# --- statistics ---------------------------------------------------------------------------------

ODD = [0.0, -0.0, 1.0, -1.0, 0.3, 1e-40, -1e-45, 1e-30, 3e38, -3e38, 1e20, math.inf, -math.inf,
       math.nan]  # fmt: skip
NUMBERS = st.sampled_from(ODD) | st.floats(-4, 4, width=32) | st.floats(width=32)
GROUPS = ("sex=Female", "sex=Male")
LAYOUTS = [
    Layout(3, ("FNR",), GROUPS),
    Layout(2, ("FNR", "FPR"), GROUPS, partition=False, basis="split"),
    Layout(3, ("FNR",), GROUPS, basis="split", clipped=True),
    Layout(4, selection=False),
    Layout(2),
]


@st.composite
def vectors(draw: st.DrawFn, most: int = 4) -> tuple[Layout, torch.Tensor]:
    layout = draw(st.sampled_from(LAYOUTS))
    rows = draw(st.integers(1, most))
    flat = draw(st.lists(NUMBERS, min_size=rows * layout.size, max_size=rows * layout.size))
    return layout, torch.tensor(flat, dtype=torch.float32).reshape(rows, layout.size)


@often(300)
@given(
    drawn=vectors(),
    bounds=st.tuples(*[st.sampled_from([1e-6, 0.5, 1.0, 30.0, 1e6])] * 3),
    counts=st.booleans(),
    adapts=st.booleans(),
)
def test_any_users_vectors_are_clipped(
    drawn: tuple[Layout, torch.Tensor], bounds: tuple[float, ...], counts: bool, adapts: bool
) -> None:
    layout, rows = drawn
    adapts = adapts and layout.clipped
    clipping = Clipping(
        bounds[0],
        counts=bounds[1] if counts else None,
        selection=bounds[2],
        clipped_share=0.1 if layout.clipped and not adapts else None,
        adapts=AdaptiveBound(0.3, share=0.1) if adapts else None,
    )
    blocks = clipping.blocks(constrained=bool(layout.rates), selection=layout.selection)
    rules = clip_rules(blocks, layout.slices)
    sent = clip(DenseRows(rows, layout.slices), rules)
    assert bool(sent.isfinite().all())
    for rule in rules:
        block = torch.cat([sent[:, place] for place in rule.places], dim=1).double()
        norms = torch.linalg.vector_norm(block, rule.order, dim=1)
        assert bool((norms <= rule.bound * (1 + 1e-4)).all())
    # The users' own numbers: whether somebody was clipped is not among them.
    own = layout.slices["clipped"].start if layout.clipped else layout.size
    bad = ~rows[:, :own].isfinite().all(dim=1)
    assert not bool(sent[bad].any()), "somebody's rubbish was not zeroed"
    together = clipped_sum(DenseRows(rows, layout.slices), rules)
    alone = [clipped_sum(DenseRows(row[None], layout.slices), rules) for row in rows]
    scale = max(bounds) * len(rows)
    # Whatever the others send, one's own part of the sum stays what it is.
    assert torch.allclose(together, torch.stack(alone).sum(dim=0), rtol=1e-4, atol=1e-6 * scale)
    assert torch.allclose(torch.stack(alone), sent.double(), rtol=1e-4, atol=1e-6 * scale)


METHODS = [
    MMDM(),
    MMDM(damping=0.0, tolerance=0.0),
    Tran(),
    Unconstrained(),
    OneGradient(),
    OneGradient(tolerance=None, decay=0.0, spread=None),
    OneGradient(damping=0.0, multiplier_lr=50.0, surrogate="rate", ratchet=True),
    OneGradient(damping=1e6, multiplier_lr=1e6, low=1.0, high=1.0),
]


def broadcast(method: OneGradient, state: MethodState, normaliser: float, alpha: float) -> None:
    """What goes to every user: numbers, and for no group more than its samples can give."""
    weights = method.weights(state, normaliser, alpha)
    assert bool(weights.groups.isfinite().all() and weights.overall.isfinite().all())
    assert bool((weights.groups.abs() <= (method.high - 1.0) * (1 + 1e-4)).all())
    assert bool(state.multipliers.isfinite().all())


@often(600, here=200)
@given(
    drawn=vectors(5),
    method=st.sampled_from(METHODS),
    rule=st.sampled_from(["best", "last", "average"]),
    window=st.integers(1, 3),
    smallest=st.sampled_from([1.0, 0.5, 50.0]),
    noise=st.sampled_from([0.0, 0.5, 1e6]),
)
def test_any_totals_go_through_the_server(
    drawn: tuple[Layout, torch.Tensor],
    method: Any,
    rule: Any,
    window: int,
    smallest: float,
    noise: float,
) -> None:
    """Totals, the method, the history's row, selection: nothing raises, whatever was released."""
    layout, released = drawn
    if not layout.rates:
        method = Unconstrained()
    groups = len(layout.rates), len(layout.groups)
    state = MethodState.zeros(*groups)
    if isinstance(method, ReweightingMethod):
        layout = replace(layout, form="one-gradient")  # the beginning of a longer vector
        state = method.begin(*groups, torch.device("cpu"))
        broadcast(method, state, 3.0, 0.02)
    selection = Selection(rule, len(released), 0.02, window)
    w = torch.ones(layout.parameters)
    for t, v in enumerate(released, start=1):
        totals = layout.totals(v[: layout.size], 3.0, smallest, noise)
        state, direction = method.update(state, totals, 0.02)
        assert direction.shape == w.shape
        if isinstance(method, ReweightingMethod):
            broadcast(method, state, 3.0, 0.02)
        else:
            assert bool((state.multipliers >= 0).all()), "a multiplier is negative or no number"
        row = described(t, shown_of(totals, state, layout), layout)
        json.dumps(row, allow_nan=False)
        for shown in (accuracy_words, gap_words, averaged_words):
            shown(row)
        after = w - 0.1 * direction
        after = after if bool(after.isfinite().all()) else w
        selection = selection.observe(t, w, totals, after)
        w = after
    chosen, how = selection.choose(w, len(released))
    assert how
    assert bool(chosen.isfinite().all()), "the model that was chosen is not finite"


def test_a_round_of_rubbish_is_forgotten() -> None:
    """Averages of counts outlive a round: what is no count must not stay in them."""
    layout, method = replace(LAYOUTS[2], form="one-gradient"), OneGradient()
    usual = layout.totals(torch.full((layout.size,), 20.0), 3.0)
    for odd in (math.nan, math.inf, -math.inf, 3e38):
        state = method.begin(1, 2, torch.device("cpu"))
        for totals in (usual, layout.totals(torch.full((layout.size,), odd), 3.0), usual):
            state, _ = method.update(state, totals, 0.02)
        assert bool(state.differences().isfinite().all())
        assert state.n[0].tolist() == pytest.approx([40 * 0.0975, 40 * 0.0975, 80 * 0.0975])


# --- what was found, one by one -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x = " + "[" * 5000, "is not a TOML file"),
        ("x = " + "9" * 5000, "is not a TOML file"),
        ('"a\\nb" = 1\n[data]\n[training]\n', r"'a\\nb': there is no such key"),
        ("".join(f"k{n} = 1\n" for n in range(99)), "and 96 more"),
        ("learning_rate = inf", "training.learning_rate: Input should be a finite number"),
        ("learning_rate = 1e300", "out of range"),
        (f"memory = {10**400}", "training.memory: .*less than or equal"),
        ('device = "meta"', "training.device"),
        ('clip = "x"', r"training\.clip: Input should be a valid number"),
        ("[privacy]\nnoise_multiplier = 1e-9", "greater than or equal to 0.001"),
    ],
)
def test_configs_that_were_not_refused_well(scratch: Path, text: str, match: str) -> None:
    path = scratch / "bad.toml"
    text = text if "\n" in text or text.startswith("x") else f"[training]\n{text}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=match) as caught:
        load_config(path)
    plain(caught.value, "bad.toml")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": {"hidden": [10**6, 10**6]}}, "has 1000005000001 parameters"),
        ({"data": {"train": "table.npz", "schema": {**SCHEMA, "population": 10**12}}}, "too many"),
        ({"data": {"train": "table.npz", "schema": {**SCHEMA, "classes": 10**12}}}, "parameters"),
    ],
)
def test_what_nobody_has_memory_for(data_folder: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_config(Config.model_validate(VALID[0] | changes), folder=data_folder)


def test_odd_arrays_in_a_table(scratch: Path) -> None:
    path = scratch / "table.npz"
    np.savez(path, **TABLE | {"features": TABLE["features"].astype(">f4"), "more": np.zeros(9)})
    assert loaded(scratch).features.tolist()[0] == [6.0, 7.0]  # of user "a"
    np.savez(path, **TABLE | {"features": TABLE["features"].astype(np.longdouble)})
    with pytest.raises(ValueError, match=r"table.npz: values of type .* up to 64 bits"):
        loaded(scratch)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", as_npy(TABLE["features"]))
        archive.writestr("labels", "0 1 1 0")
    with pytest.raises(ValueError, match=r"lacks the arrays \['labels'\]; it has \["):
        loaded(scratch)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (5.0,)},
        {"shape": (-5,)},
        {"shape": (True,)},
        {"classes": 2.5},
        {"classes": None, "label_range": ("a", "b")},
        {"classes": None, "label_range": (0.0, math.inf)},
        {"classes": None, "label_range": (0.0, 1.0, 2.0)},
        {"population": 3.0},
        {"samples_per_user": 10**400},
        {"feature_names": "ab"},
        {"feature_ranges": ((0, 1), (0, "1"))},
        {"attributes": (fpfl.Attribute("sex", "FM"),)},  # type: ignore[arg-type]
        {"attributes": ("sex",)},
    ],
)
def test_a_schema_of_the_wrong_types(wrong: dict[str, Any]) -> None:
    (name,) = {*wrong} - {"classes"} or {"classes"}
    with pytest.raises(ValueError, match=f"^{name} is .*; expected"):
        fpfl.Schema(**{"shape": (2,)} | wrong)


def test_a_schema_without_end(scratch: Path, population: Files) -> None:
    folder = put(scratch / "pop", Files(Files(population) | {"schema.json": b"[" * 10**5}))
    with pytest.raises(ValueError, match=r"schema\.json is not the schema"):
        open_population(folder)


@pytest.mark.parametrize("line", ["-1", "1_0", "٣", "+2", "1.0", "1\x0b2", "9" * 19, "\ufeff3"])
def test_withdrawals_are_plain_numbers(scratch: Path, line: str) -> None:
    path = scratch / "withdrawals.txt"
    path.write_text(f"4\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"withdrawals\.txt, line 2 is .*plain digits"):
        read_withdrawals(path)
    path.write_bytes(b"4\n\xff\n")
    with pytest.raises(ValueError, match=r"withdrawals\.txt, line 2"):
        read_withdrawals(path)


def test_a_withdrawal_after_a_torn_one_names_nobody_else(scratch: Path) -> None:
    """Half of user 12's line and user 5's were user 15's."""
    path = scratch / "withdrawals.txt"
    path.write_bytes(b"3\n1")
    withdraw(scratch, [5])
    assert read_withdrawals(path) == {3, 5}


def changed(files: Files, **others: bytes | None) -> Files:
    """The same files of a run, some of them replaced (by the beginning of their names)."""
    found = Files(files)
    for start, content in others.items():
        (name,) = (name for name in files if name.startswith(f"run/{start.replace('_', '-')}"))
        found[name] = content
    return found


def refused(scratch: Path, files: Files, match: str, **others: Any) -> None:
    """The run does not go on, and nothing on the disk has changed."""
    folder = put(scratch / "real", files) / "run"
    before = contents(folder)
    with pytest.raises(ValueError, match=match):
        train(fpfl.RunFolder(folder, resume=True, moved=True), **REAL_RUN | others)
    assert contents(folder) == before


def test_logs_that_say_something_else(scratch: Path, real: Files) -> None:
    name = "run/totals-0002-00000005.bin"
    totals = bytearray(real[name] or b"")
    totals[4] = 4  # the round, which no digest covers
    refused(scratch, Files(real) | {name: bytes(totals)}, "round 4.*in the place of round 5")
    name = "run/cohorts-0001-00000001.bin"
    cohorts = (real[name] or b"").replace(b"<i8\0", b"<f8\0")
    refused(scratch, Files(real) | {name: cohorts}, "float64 numbers, in the place of round 1")
    kept = Files({n: content for n, content in real.items() if n != name})
    refused(scratch, kept, "does not say who took part in round 1, and .* capped at 3")
    refused(scratch, changed(real, checkpoint_00000002=None), "is not a file")


def test_other_files_of_the_same_kind_are_left_alone(scratch: Path, real: Files) -> None:
    copies = Files(real)
    for name, content in real.items():
        copies[f"{name}.bak"] = copies[f"{name}-2"] = content
    folder = put(scratch / "real", copies) / "run"
    assert resumed(folder, **REAL_RUN) is not None
    assert (folder / "totals-0001-00000003.bin.bak").exists()


def test_a_round_that_was_drawn_twice_counts_once(scratch: Path, same_code: None) -> None:
    """A simulation draws a lost round again: with a cap, counting it twice changed the cohorts."""
    others: dict[str, Any] = {
        "privacy": fpfl.Privacy(noise_multiplier=1.0, max_participations=2),
        "cohort": 15,
    }
    folder = scratch / "twice"

    def lose(rounds: int, resume: bool) -> None:
        where = fpfl.RunFolder(folder, resume=resume)
        with pytest.raises(StopError):
            train(where, stop_after=rounds, **others)
        totals = sorted(folder.glob("totals-*"))[-1]
        totals.write_bytes(totals.read_bytes()[:-1])  # charged and drawn, and then lost

    lose(2, resume=False)
    lose(4, resume=True)
    run = train(fpfl.RunFolder(folder, resume=True), **others)
    assert parameters(run) == parameters(train(None, **others))


def test_what_is_refused_before_a_byte_is_written(scratch: Path, real: Files) -> None:
    refused(scratch, changed(real, withdrawals=b"3\nx\n"), "withdrawals.txt, line 2")
    refused(scratch, changed(real, withdrawals=b"30\n"), "names user 30; indices run from 0 to 29")
    ledger = real["run/ledger.jsonl"] or b""
    first = ledger.index(b'"kind":"charge"')
    refused(scratch, changed(real, ledger=ledger[: first + 20]), "no charge for it")
    about = json.loads(real["run/run.json"] or b"")
    for wrong, match in (
        ({"run": "another"}, "two different runs"),
        ({"format": 1e400}, "format is inf; expected a whole number"),
        ({"settings": []}, "settings is \\[\\]; expected a mapping"),
        ({"settings": {"population": 30}}, "settings has no 'privacy'"),
        ({"population_ledger": 5}, "population_ledger is 5; expected text"),
    ):
        content = json.dumps(about | wrong).encode()
        refused(scratch, changed(real, **{"run.json": content}), match)
    refused(scratch, changed(real, **{"run.json": b"[" * 10**5}), "intact copy")


def test_what_a_run_cannot_go_on_with(scratch: Path, real: Files) -> None:
    for others, match in (
        ({"privacy": None}, "cannot go on without privacy"),
        ({"noise_seed": 5}, "cannot go on with a noise_seed"),
        ({"constraint": None}, "multipliers of shape|other totals"),
        (
            {"optimizer": lambda w: torch.optim.Adam(w)},
            "Adam cannot go on with|another .*optimizer",
        ),
    ):
        refused(scratch, real, match, **others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fpfl, "mlp", lambda *_, **__: torch.nn.Linear(5, 1))
        refused(scratch, real, "parameters of shape|other totals")


def test_a_state_without_end(scratch: Path) -> None:
    """Even with a digest that fits."""
    from safetensors.torch import save

    from fpfl.store import checkpoints

    path = scratch / "checkpoint.safetensors"
    for about, match in (
        ({"format": "1", "state": "[" * 10**5}, "its state cannot be read"),
        ({"format": "1", "state": '{"class": "Selection", "fields": 3}'}, "cannot be read"),
        ({"format": "9" * 5000, "state": "1"}, "no format of fpfl"),
        ({"format": "２", "state": "1"}, "no format of fpfl"),
    ):
        digest = checkpoints._digest(about["state"], {})
        path.write_bytes(save({}, {**about, "digest": digest}))
        with pytest.raises(checkpoints.DamagedError, match=match):
            checkpoints.load_checkpoint(path, {"Selection": Selection})


def shown_of(totals, state, layout):
    """What a round measured, as plain numbers."""
    return {k: v.tolist() for k, v in measured(totals, state, layout, 0.02).items()}


def test_released_infinities_are_nothing_in_the_history() -> None:
    layout = LAYOUTS[2]
    totals = layout.totals(torch.full((layout.size,), math.inf), 3.0)
    row = described(1, shown_of(totals, MethodState.zeros(1, 2), layout), layout)
    json.dumps(row, allow_nan=False)


def test_a_ledger_of_somebody_else(scratch: Path, real: Files) -> None:
    path = scratch / "other.jsonl"
    path.write_bytes(real["people.jsonl"] or b"")
    with pytest.raises(ChainError, match=r"other\.jsonl"):
        RunLedger.look(path)


def test_a_charge_for_nothing(scratch: Path) -> None:
    path = scratch / "nothing.jsonl"
    path.unlink(missing_ok=True)
    with Chain.create(path, holds="population ledger", name="", population=9, epsilon=9.0,
                      delta=1e-3, neighbours="zero-out", order=3) as chain:  # fmt: skip
        chain.append("charge", run="a", mechanism=None)
    with pytest.raises(ChainError, match=r"nothing\.jsonl, line 2"):
        PopulationLedger.open(path)


# --- coverage-guided ----------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed (it has wheels for Linux on x86-64, Python 3.11 to 3.13)",
)
def test_the_fuzzer_finds_nothing_at_once() -> None:
    runs = f"-runs={thorough(200, 800)}"
    command = [sys.executable, "-m", "fuzz", "all", runs, "-seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
