"""The targets: bytes go in, and what comes out is a value or an error of the documented kind.

A target has a scratch folder, which `Target.seeds` fills with valid files and gives back as the
first inputs; nothing binary is committed. Any exception that leaves `Target.run` is a finding, and
so is an error whose message has several lines or does not say which file it is about.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fpfl import Attribute, FederatedDataset, Schema
from fpfl.aggregation.clipping import DenseRows, clip, clip_rules, clipped_sum
from fpfl.config import Config, load_config, load_data
from fpfl.data.femnist.compact import CompactSource
from fpfl.data.femnist.leaf import LeafSource
from fpfl.data.femnist.source import Part, Source
from fpfl.data.femnist.tff import TffSource
from fpfl.data.files import open_population
from fpfl.fairness.totals import Weights
from fpfl.methods import MMDM, Method, OneGradient, ReweightingMethod, Tran, Unconstrained
from fpfl.privacy.filter import Mechanism, Terms
from fpfl.privacy.sampling import Participation
from fpfl.privacy.settings import Clipping
from fpfl.runs.journal import read_withdrawals, withdraw
from fpfl.runs.ledger import RunLedger
from fpfl.server.loop import Server, ServerSettings, begin, serve
from fpfl.server.state import CLASSES
from fpfl.store import checkpoints
from fpfl.store.chain import Chain
from fpfl.store.checkpoints import load_checkpoint, save_checkpoint
from fpfl.store.lines import parsed
from fpfl.store.roundlog import RoundLog, read_rounds
from fpfl.users.layout import Layout

REFUSALS = (ValueError, OSError)
"""What a reader may raise: `ChainError`, `DamagedError` and `StorageError` are among these."""


@dataclass(frozen=True)
class Target:
    """``seeds`` yields valid inputs, ``run`` takes any."""

    seeds: Callable[[Path], Iterator[bytes]]
    run: Callable[[Path, bytes], None]


class FindingError(Exception):
    """An error of the right kind, in the wrong words."""


@contextmanager
def refusing(*about: Path) -> Iterator[None]:
    """Let errors of the documented kind pass, where they are one line that names a file."""
    try:
        yield
    except REFUSALS as error:
        said = str(error)
        if "\n" in said or not any(path.name in said for path in about):
            raise FindingError(f"not one line that names a file: {error!r}") from error


# --- configs ------------------------------------------------------------------------------------

CONFIG = """
version = 1
[data]
train = "people.npz"
test = "others.npz"
[data.schema]
classes = 2
attributes = { sex = ["Female", "Male"], race = ["A", "B"] }
unknown = ["race"]
samples_per_user = 3.0
population = 12
feature_ranges = [[0.0, 1.0], [-1.5, 2e3]]
[model]
hidden = [4, 3]
[training]
cohort = 5
rounds = 2
learning_rate = 0.1
optimizer = "adam"
normaliser = "samples"
clip = 1.0
seed = 1
[constraint]
kind = "equalized_odds"
by = ["sex", ["sex", "race"]]
[method]
kind = "tran"
[privacy]
noise_multiplier = 1.0
clip = { bound = 1.0, counts = 2.0 }
max_participations = 3
ledger = "people.jsonl"
"""


ONE_GRADIENT = """
[data]
name = "adult"
[training]
suggested = true
cohort = 200
local_steps = 2
local_learning_rate = 0.1
[constraint]
kind = "fnr_parity"
[method]
kind = "one-gradient"
tolerance = "constraint"
memory = 0.5
spread = "none"
low = 0.0
high = 3.0
surrogate = "rate"
[privacy]
epsilon = 2.0
"""


def config_seeds(folder: Path) -> Iterator[bytes]:
    yield CONFIG.encode()
    yield b'[data]\nname = "adult"\nusers = "single"\n[training]\ncohort = 1\nrounds = 1\n'
    yield b'[data]\nfolder = "x"\n[training]\ncohort = 1\nrounds = 1\nclip = { bound = inf }\n'
    yield ONE_GRADIENT.encode()


def config(folder: Path, data: bytes) -> None:
    path = folder / "run.toml"
    path.write_bytes(data)
    with refusing(path):
        assert isinstance(load_config(path), Config)


# --- chains -------------------------------------------------------------------------------------


def chain_seeds(folder: Path) -> Iterator[bytes]:
    mechanism = Mechanism("poisson", 30, 6, 1.0, "zero-out")
    terms = Terms(mechanism, 9, 1e-3, 8.0, 12)
    path = folder / "seed.jsonl"
    with RunLedger.create(path, run="a", terms=terms, simulation=False) as ledger:
        for round in (1, 2, 3):
            ledger.charge(round)
        ledger.withdrawal(3, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    RunLedger.open(path).close()
    for content in (whole, path.read_bytes(), whole[:-9], whole[:-1]):
        yield b"\0" + content
        yield b"\1" + content


def chain(folder: Path, data: bytes) -> None:
    path = folder / "chain.jsonl"
    content = linked(data[1:]) if data[:1] == b"\1" else data[1:]
    path.write_bytes(content)
    for write in (False, True):
        with refusing(path), Chain.open(path, write=write) as opened:
            assert opened.records[0]["kind"] == "open"
        written = path.read_bytes()
        assert written.startswith(content), "what was there was changed"
        assert write or written == content, "looking changed the file"


def linked(content: bytes) -> bytes:
    """The same lines with numbers, times and hashes that fit: edits are not seen by these."""
    lines: list[bytes] = []
    for line in content.split(b"\n"):
        record = parsed(line)
        if record is not None:
            before = hashlib.sha256(lines[-1]).hexdigest() if lines else "0" * 64
            own = {"n": len(lines), "time": "2026-01-31T12:00:00.000000Z", "previous": before}
            line = json.dumps(record | own).encode()
        lines.append(line)
    return b"\n".join(lines)


# --- logs of rounds -----------------------------------------------------------------------------


def roundlog_seeds(folder: Path) -> Iterator[bytes]:
    log = RoundLog(folder / "seed.bin")
    log.append(1, np.arange(3, dtype=np.float32))
    log.append(2, np.zeros(0, dtype=np.int64))
    log.append(3, np.arange(2, dtype=np.float64))
    log.close()
    content = (folder / "seed.bin").read_bytes()
    yield content
    yield content[:-5]


def roundlog(folder: Path, data: bytes) -> None:
    path = folder / "totals.bin"
    path.write_bytes(data)
    with refusing(path):
        records, torn = read_rounds(path)
        assert torn or sum(40 + v.nbytes for _, v in records) == len(data)


# --- checkpoints --------------------------------------------------------------------------------


def checkpoint_seeds(folder: Path) -> Iterator[bytes]:
    path = folder / "seed.safetensors"
    for method in (MMDM(), OneGradient()):
        state = begin(torch.arange(4.0), server(LAYOUTS[0], method))
        save_checkpoint(path, state, "[]")
        content = path.read_bytes()
        yield b"\0" + content
        (length,) = struct.unpack("<Q", content[:8])
        tree = json.loads(content[8 : 8 + length])["__metadata__"]["state"]
        yield b"\1" + tree.encode()


def checkpoint(folder: Path, data: bytes) -> None:
    path = folder / "checkpoint.safetensors"
    content = data[1:]
    if data[:1] == b"\1":  # a state of any shape, with a digest that fits
        tensors = {str(number): torch.zeros(number) for number in range(3)}
        state = content.decode(errors="replace")
        digest = checkpoints._digest(f"{state}[]", tensors)
        content = save(tensors, {"format": "1", "state": state, "text": "[]", "digest": digest})
    path.write_bytes(content)
    with refusing(path):
        load_checkpoint(path, CLASSES)


# --- populations --------------------------------------------------------------------------------

NPY = ("features", "labels", "attributes", "offsets")


def people(folder: Path) -> Path:
    """A small valid population folder."""
    where = folder / "people"
    if not where.exists():
        sex = Attribute("sex", ("Female", "Male"), unknown=True)
        schema = Schema((2,), attributes=(sex,), samples_per_user=2.0)
        x = np.arange(10, dtype=np.float32).reshape(5, 2)
        data = FederatedDataset.from_samples(
            x, [0, 1, 1, 0, 1], [0, 1, -1, 0, 1], schema, users=[0, 0, 2, 2, 1]
        )
        data.save(where)
    return where


def population_seeds(folder: Path) -> Iterator[bytes]:
    for number, name in enumerate(NPY):
        yield bytes([number]) + (people(folder) / f"{name}.npy").read_bytes()


def population(folder: Path, data: bytes) -> None:
    path = people(folder)
    name = f"{NPY[data[0] % len(NPY)] if data else 'features'}.npy"
    whole = (path / name).read_bytes()
    (path / name).write_bytes(data[1:])
    try:
        with refusing(path, path / "offsets.npy", path / "schema.json"):
            touch(open_population(path))
    finally:
        (path / name).write_bytes(whole)


def touch(data: FederatedDataset) -> None:
    """Read all samples of a lazy dataset; as data in memory, they are checked then."""
    assert data.population <= 10**6, "no file here is as large as that"
    data.subset(np.arange(data.population))


def schema_seeds(folder: Path) -> Iterator[bytes]:
    content = json.loads((people(folder) / "schema.json").read_text())
    yield json.dumps(content).encode()
    content["schema"] |= {"classes": None, "label_range": [0.0, 1.0], "feature_names": ["a", "b"]}
    content["schema"] |= {"feature_ranges": [[0, 1], [0, 2]], "population": 3}
    yield json.dumps(content).encode()


def schema(folder: Path, data: bytes) -> None:
    path = people(folder)
    whole = (path / "schema.json").read_bytes()
    (path / "schema.json").write_bytes(data)
    try:
        with refusing(path, path / "schema.json"):
            opened = open_population(path)
            json.dumps(opened.schema.as_dict(), allow_nan=False)
            touch(opened)
    finally:
        (path / "schema.json").write_bytes(whole)


# --- tables -------------------------------------------------------------------------------------

TABLE = Config.model_validate(
    {
        "data": {
            "train": "table.npz",
            "schema": {"classes": 2, "attributes": {"sex": ["F", "M"]}, "unknown": ["sex"]},
        },
        "training": {"cohort": 1, "rounds": 1},
    }
)
COLUMNS: dict[str, np.ndarray[Any, Any]] = {
    "features": np.arange(8, dtype=np.float32).reshape(4, 2),
    "labels": np.array([0, 1, 1, 0]),
    "attributes": np.array([[0], [1], [-1], [0]]),
    "users": np.array([0, 0, 2, 1]),
}


def npz_seeds(folder: Path) -> Iterator[bytes]:
    for write in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        write(buffer, **COLUMNS)
        yield b"\xff" + buffer.getvalue()
    for number, column in enumerate(COLUMNS.values()):
        buffer = io.BytesIO()
        np.save(buffer, column)
        yield bytes([number]) + buffer.getvalue()


def npz(folder: Path, data: bytes) -> None:
    path = folder / "table.npz"
    if data[:1] < b"\x80":  # one of the columns, in a zip archive that is in order
        names = list(COLUMNS)
        with zipfile.ZipFile(path, "w") as archive:
            for number, (name, column) in enumerate(COLUMNS.items()):
                buffer = io.BytesIO()
                np.save(buffer, column)
                chosen = data[:1] and data[0] % len(names) == number
                archive.writestr(f"{name}.npy", data[1:] if chosen else buffer.getvalue())
    else:
        path.write_bytes(data[1:])
    with refusing(path):
        read, _ = load_data(TABLE, folder)
        read.subset(np.arange(read.population))


# --- handwritten digits -------------------------------------------------------------------------

DIGITS: dict[str, np.ndarray[Any, Any]] = {
    "label": np.array([3, 7], dtype=np.uint8),
    "user": np.array([1, 0], dtype=np.int32),
    "test": np.array([False, True]),
    "name": np.array(["anna", "bo"]),
    "title": np.array("made-up digits"),
    "pixels": np.arange(2 * 784).reshape(2, 28, 28).astype(np.uint8),
}


def read_all(source: Source) -> None:
    """Go through a file as a training does; what comes must be digits."""
    names = set(source.names())
    parts: tuple[Part, ...] = ("train", "test")
    for part in parts:
        for writer in source.read(part):
            n = len(writer.labels)
            assert writer.name in names
            assert n > 0
            assert writer.pixels.shape == (n, 28, 28)
            assert writer.pixels.dtype == writer.labels.dtype == np.uint8
            assert writer.labels.max() < 10


def compact_seeds(folder: Path) -> Iterator[bytes]:
    for drop in ((), ("name", "title")):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{k: v for k, v in DIGITS.items() if k not in drop})
        yield b"\xff" + buffer.getvalue()
    for number, column in enumerate(DIGITS.values()):
        buffer = io.BytesIO()
        np.save(buffer, column)
        yield bytes([number]) + buffer.getvalue()


def compact(folder: Path, data: bytes) -> None:
    path = folder / "digits.npz"
    if data[:1] < b"\x80":  # one of the arrays, in a zip archive that is in order
        with zipfile.ZipFile(path, "w") as archive:
            for number, (name, column) in enumerate(DIGITS.items()):
                buffer = io.BytesIO()
                np.save(buffer, column)
                chosen = data[:1] and data[0] % len(DIGITS) == number
                archive.writestr(f"{name}.npy", data[1:] if chosen else buffer.getvalue())
    else:
        path.write_bytes(data[1:])
    with refusing(path):
        read_all(CompactSource(path))


LEAF_HEAD = '{"users": ["anna"], "num_samples": [2], "user_data": '


def leaf_seeds(folder: Path) -> Iterator[bytes]:
    one = {"x": [[1] * 783 + [0.5], [0] * 784], "y": [3, 61]}
    data = json.dumps({"anna": one}, separators=(",", ":"))
    yield f"{LEAF_HEAD}{data}}}".encode()
    yield f'{{"user_data":{data},"num_samples":[2],"users":["anna"]}}'.encode()
    yield f'{LEAF_HEAD}{{"anna": {{"x": [[], []], "y": [11, 12]}}}}}}'.encode()
    yield b'{"users": [], "num_samples": [], "user_data": {}}'


def leaf(folder: Path, data: bytes) -> None:
    path = folder / "train" / "some.json"
    for part in ("train", "test"):
        (folder / part).mkdir(exist_ok=True)
    path.write_bytes(data)
    other = folder / "test" / "other.json"
    other.write_text('{"users": [], "num_samples": [], "user_data": {}}')
    with refusing(path):
        read_all(LeafSource(folder))


def tff_seeds(folder: Path) -> Iterator[bytes]:
    import h5py

    path = folder / "seed.h5"
    images = np.ones((1, 28, 28), dtype=np.float32)
    for names, packed in ((("anna", "bo"), "gzip"), (("anna",), None)):
        with h5py.File(path, "w", libver="latest") as file:
            for name in names:
                group = file.create_group(f"examples/{name}")
                group.create_dataset("pixels", data=images, compression=packed)
                group["label"] = np.array([3], dtype=np.int32)
        yield path.read_bytes()


def tff(folder: Path, data: bytes) -> None:
    path = folder / "digits.h5"
    path.write_bytes(data)
    with refusing(path):
        read_all(TffSource(path, path, "made-up digits"))


# --- withdrawals --------------------------------------------------------------------------------


def withdrawals_seeds(folder: Path) -> Iterator[bytes]:
    withdraw(folder, [3, 17, 0])
    content = (folder / "withdrawals.txt").read_bytes()
    yield content
    yield content[:-1]


def withdrawals(folder: Path, data: bytes) -> None:
    path = folder / "withdrawals.txt"
    path.write_bytes(data)
    with refusing(path):
        users = read_withdrawals(path)
        assert all(user >= 0 for user in users)
        named = {int(digits) for digits in re.findall(rb"\d{1,18}", data)}
        assert len(users) <= len(named) + data.count(b"\n")
        counter = Participation()
        counter.withdraw(users)
        counter.admit(np.arange(5))


# --- statistics ---------------------------------------------------------------------------------

GROUPS = ("sex=Female", "sex=Male")
LAYOUTS = (
    Layout(4, ("FNR",), GROUPS, basis="paper"),
    Layout(2, ("FNR", "FPR"), GROUPS, partition=False, basis="split"),
    Layout(3, clipped=True),
)
METHODS: tuple[Method, ...] = (
    MMDM(),
    Tran(),
    OneGradient(),
    OneGradient(damping=0.0, multiplier_lr=50.0, tolerance=None, decay=0.0, spread=None, high=2.0),
)


def server(layout: Layout, method: Method, **others: Any) -> ServerSettings:
    return ServerSettings(
        layout=layout,
        method=method,
        optimizer=lambda w: torch.optim.SGD(w, lr=0.1),
        rounds=4,
        normaliser=3.0,
        tolerance=0.02,
        **others,
    )


def numbers_seeds(folder: Path) -> Iterator[bytes]:
    usual = np.array([0.0, 1.0, -1.0, 3.0, 1e-3, math.inf, math.nan, 1e-40, 3e38, -0.0, 2.0, 7.0])
    for choice in range(12):  # every layout with every method
        yield bytes([choice]) + np.resize(usual, 60).astype("<f4").tobytes()
        yield bytes([choice]) + np.resize(usual[:5], 60).astype("<f4").tobytes()


def floats(data: bytes, width: int) -> Tensor:
    """Rows of float32 numbers; what is left over is dropped."""
    rows = len(data) // (4 * width)
    found = np.frombuffer(data[: rows * 4 * width], dtype="<f4").reshape(rows, width)
    return torch.from_numpy(found.copy())


class Released:
    """A federation that has released what it will."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def release(self, round: int, w: Tensor, weights: Weights | None) -> Tensor:
        if weights is not None:
            assert bool(weights.groups.isfinite().all() and weights.overall.isfinite().all())
            assert bool((weights.groups.abs() <= (weights.high - 1.0) * (1 + 1e-4)).all())
        return self.vectors[(round - 1) % len(self.vectors)].clone()


def rounds(folder: Path, data: bytes) -> None:
    """Released totals of any numbers through four rounds of the server."""
    choice = data[0] if data else 0
    layout, method = LAYOUTS[choice % 3], METHODS[choice // 3 % 4]
    if not layout.rates:
        method = Unconstrained()
    if isinstance(method, ReweightingMethod):
        layout = replace(layout, form="one-gradient")
    vectors = floats(data[1:], layout.size)
    if not len(vectors):
        return
    rule = ("best", "last", "average")[choice // 12 % 3]
    settings = server(
        layout,
        method,
        selection=rule,
        selection_window=1 + choice // 36 % 3,
        count_noise=choice // 108 * 0.5,
    )
    running = Server(torch.ones(layout.parameters), settings, None)
    outcome = running.outcome(serve(Released(vectors), running))
    assert bool(outcome.w.isfinite().all()), "the model that is kept is not finite"
    json.dumps(outcome.history, allow_nan=False)
    for row in outcome.history:
        known = [x for line in row.get("multipliers", {}).values() for x in line.values()]
        assert None not in known, "a multiplier is no number"


def clipping(folder: Path, data: bytes) -> None:
    """Users' rows of any numbers: bounds hold, rubbish counts as zero, and stays its sender's."""
    choice = data[0] if data else 0
    layout = LAYOUTS[choice % 3]
    counts = 2.0 if choice // 3 % 2 else None
    sizes = Clipping(1.5, counts=counts, clipped_share=0.1 if layout.clipped else None)
    rules = clip_rules(sizes.blocks(constrained=bool(layout.rates), selection=True), layout.slices)
    rows = floats(data[1:], layout.size)
    if not len(rows):
        return
    clipped = clip(DenseRows(rows, layout.slices), rules)
    assert bool(clipped.isfinite().all())
    for rule in rules:
        block = torch.cat([clipped[:, place] for place in rule.places], dim=1).double()
        norms = torch.linalg.vector_norm(block, rule.order, dim=1)
        assert bool((norms <= rule.bound * (1 + 1e-4)).all()), (rule.name, norms)
    # The last number of a layout that counts clipped users is not the users' own.
    bad = ~rows[:, : layout.size - layout.clipped].isfinite().all(dim=1)
    assert not bool(clipped[bad].any()), "rubbish was not zeroed"
    total = clipped_sum(DenseRows(rows, layout.slices), rules)
    assert torch.allclose(total, clipped.double().sum(dim=0), rtol=1e-4, atol=1e-4)
    # Each alone sends what it sends in company.
    for row, sent in zip(rows, clipped, strict=True):
        alone = clipped_sum(DenseRows(row.unsqueeze(0), layout.slices), rules)
        assert torch.allclose(alone, sent.double(), rtol=1e-5, atol=1e-6)


TARGETS = {
    "config": Target(config_seeds, config),
    "chain": Target(chain_seeds, chain),
    "roundlog": Target(roundlog_seeds, roundlog),
    "checkpoint": Target(checkpoint_seeds, checkpoint),
    "population": Target(population_seeds, population),
    "schema": Target(schema_seeds, schema),
    "npz": Target(npz_seeds, npz),
    "compact": Target(compact_seeds, compact),
    "leaf": Target(leaf_seeds, leaf),
    "tff": Target(tff_seeds, tff),
    "withdrawals": Target(withdrawals_seeds, withdrawals),
    "clipping": Target(numbers_seeds, clipping),
    "round": Target(numbers_seeds, rounds),
}
for _name, _module in (("leaf", "ijson"), ("tff", "h5py")):
    if find_spec(_module) is None:  # of an extra, which a check need not have installed
        del TARGETS[_name]
