"""Bad inputs by the thousand: whatever is read is either in order or refused in plain words.

Files are damaged in every way that a disk, an editor or a copy knows; numbers are any numbers.
``python -m fuzz`` goes on where these stop, guided by the lines that an input reaches.
"""

from __future__ import annotations

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
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fpfl
from fpfl.config import Config, load_config, load_data, run_config
from fpfl.data import open_population
from fpfl.folder import finished, look, read_about
from fpfl.methods import MMDM, MethodState, Tran, Unconstrained
from fpfl.privacy.rules import BudgetExhaustedError
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.ledger import RunLedger
from fpfl.privacy.population import PopulationLedger
from fpfl.privacy.settings import Clipping
from fpfl.server.journal import read_past
from fpfl.server.round import describe
from fpfl.server.selection import Selection
from fpfl.server.withdrawals import withdraw
from fpfl.thirdparty.clipping import DenseRows, clip, clip_rules, clipped_sum
from fpfl.users.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROOT = Path(__file__).parents[1]
ROUNDS = 6
# Thousands of small files: in memory, where the system has a folder for that.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def often(examples: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


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


@st.composite
def folders(draw: st.DrawFn, files: dict[str, bytes]) -> dict[str, bytes | None]:
    """The same folder after an accident; None stands for a folder in the place of a file."""
    found: dict[str, bytes | None] = dict(files)
    name, other = (draw(st.sampled_from(sorted(files))) for _ in range(2))
    how = draw(st.sampled_from(["damage", "damage", "damage", "remove", "copy", "swap", "replace"]))
    if how == "damage":
        found[name] = draw(damaged(files[name]))
    elif how == "remove":
        del found[name]
    elif how == "copy":
        stem, dot, kind = name.partition(".")
        names = [f"{name}.bak", f"{stem} (2){dot}{kind}", name.replace("0", "1", 1), other]
        found[draw(st.sampled_from(names))] = files[name]
    elif how == "swap":
        found[name], found[other] = files[other], files[name]
    else:
        found[name] = draw(st.sampled_from([b"", None, b"\0" * 100, b"[]\n", b"{}\n", b"[" * 9999]))
    return found


def put(folder: Path, files: dict[str, bytes | None]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder


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
    assert any(name in said for name in names), f"{error!r} names none of {names}"


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
        "data": {"train": "real.npz", "schema": {"label_range": [0.0, 1.0]}},
        "training": {**TRAINING, "device": "cpu", "precision": "bf16"},
        "privacy": {"noise_multiplier": 2.0, "convention": "replace-one", "population": 50},
    },
]  # fmt: skip

# Nothing between what is small and what nobody has memory for: a test must not fill a machine.
WHOLE = st.sampled_from([0, 1, 2, 3, -1, 10**12, 2**63, 2**64, -(10**20), 10**30, 10**400])
REAL = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, 5e-324, 1e18, 1e30, 1e-30,
     1e-9, 100.0, 0.99]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = sorted({key for valid in VALID for part in valid.values() if isinstance(part, dict)
               for key in part})  # fmt: skip
WORDS = st.sampled_from([*KEYS, "sex", "users", "cpu:7", "cuda", "meta", "mps", "table.npz", "people",
                         "predictive_parity", "demographic_parity", "equal_error", "bmdm", "last",
                         "best", "momentum", "paper", "poisson", "zero-out", "tf32"])
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
      "selection_window", "seed", "noise_seed", "checkpoint_every")),
    *((("training",), key, REAL) for key in ("learning_rate", "normaliser", "clip")),
    *((("training",), key, WORDS) for key in ("optimizer", "sampling", "selection", "precision",
      "device", "normaliser")),
    (("model",), "hidden", st.lists(WHOLE, max_size=3)),
    (("constraint",), "kind", WORDS),
    (("constraint",), "by", st.lists(st.lists(WORDS, max_size=2) | WORDS, max_size=2)),
    (("constraint",), "tolerance", REAL),
    (("method",), "kind", WORDS),
    *((("method",), key, REAL) for key in ("damping", "rate", "tolerance", "max_multiplier")),
    *((("privacy",), key, REAL) for key in ("epsilon", "noise_multiplier", "delta", "clip",
      "budget")),
    *((("privacy",), key, WHOLE) for key in ("population", "max_participations")),
    *((("privacy",), key, WORDS) for key in ("convention", "neighbours")),
    *((("privacy", "clip"), key, REAL) for key in ("bound", "counts", "selection",
      "counts_share", "selection_share", "clipped_share")),
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


@often(250)
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
        assert str(error)
        assert "\n" not in str(error)
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
