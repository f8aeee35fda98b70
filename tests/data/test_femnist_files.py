"""Writers' digits in three formats: what is written comes back, damage is named, memory small."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import socketserver
import subprocess
import sys
import tarfile
import tempfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fpfl import cli
from fpfl.cli import data as cli_data
from fpfl.data.femnist import compact, finding
from fpfl.data.femnist.compact import CompactSource, write_compact
from fpfl.data.femnist.finding import find_digits
from fpfl.data.femnist.leaf import LeafSource
from fpfl.data.femnist.source import Part, Source, Writer
from fpfl.data.femnist.tff import TffSource

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'fpfl[femnist]'")
pytest.importorskip("ijson", reason="ijson is not installed: pip install 'fpfl[femnist]'")

PARTS: tuple[Part, ...] = ("train", "test")
SHARED = Path(__file__).parents[3] / "shared"
STANDIN = SHARED / "data" / "nist-digits"
TOOL = SHARED / "tools" / "make_digits_population.py"


class Made:
    """Writers in memory: for each part, in some order."""

    def __init__(self, parts: dict[Part, list[Writer]], title: str = "made-up digits") -> None:
        self.title, self.parts = title, parts

    def names(self) -> list[str]:
        return sorted({w.name for part in PARTS for w in self.read(part)})

    def read(self, part: Part) -> Iterator[Writer]:
        return (w for w in self.parts[part] if len(w.labels))


def writer(name: str, n: int, seed: int = 0) -> Writer:
    rng = np.random.default_rng([seed, *name.encode()])
    pixels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    return Writer(name, pixels, rng.integers(0, 10, n, dtype=np.uint8))


def people(sizes: dict[str, tuple[int, int]], seed: int = 0) -> Made:
    return Made(
        {
            part: [writer(k, v[i], seed + i) for k, v in sizes.items()]
            for i, part in enumerate(PARTS)
        }
    )


FEW = people({"anna": (3, 1), "bo": (2, 2), "cleo": (4, 1)})

NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="/\0"),
    min_size=1,
    max_size=6,
).filter(lambda name: name.strip("."))


@st.composite
def sources(draw: st.DrawFn) -> Made:
    sizes = draw(
        st.dictionaries(NAMES, st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5)
    )
    sizes[draw(NAMES)] = (2, 1)
    return people(sizes, draw(st.integers(0, 9)))


often = settings(max_examples=25)


def same(one: Source, two: Source, *, ordered: bool = True) -> None:
    assert one.names() == two.names()
    for part in PARTS:
        a, b = list(one.read(part)), list(two.read(part))
        if not ordered:
            a, b = (sorted(writers, key=lambda w: w.name) for writers in (a, b))
        assert [w.name for w in a] == [w.name for w in b]
        for x, y in zip(a, b, strict=True):
            for left, right in ((x.pixels, y.pixels), (x.labels, y.labels)):
                assert left.dtype == right.dtype == np.uint8
                assert np.array_equal(left, right)


# --- TFF ----------------------------------------------------------------------------------------


def write_tff(folder: Path, source: Made, stem: str = "digits") -> TffSource:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {part: folder / f"{stem}_{part}.h5" for part in PARTS}
    for part, path in paths.items():
        with h5py.File(path, "w") as file:
            file.create_group("examples")
            for w in source.parts[part]:
                group = file.create_group(f"examples/{w.name}")
                group["pixels"] = w.pixels.astype(np.float32) / np.float32(255)
                group["label"] = w.labels.astype(np.int32)
    return TffSource(paths["train"], paths["test"], source.title)


@often
@given(sources())
def test_tff_files_come_back(source: Made) -> None:
    with tempfile.TemporaryDirectory() as name:
        same(write_tff(Path(name), source), source, ordered=False)


def replaced(key: str, values: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        group = file["examples/bo"]
        del group[key]
        if values is not None:
            group[key] = values

    return change


def dropped(file: Any) -> None:
    del file["examples"]


def an_array(file: Any) -> None:
    del file["examples/bo"]
    file["examples/bo"] = np.zeros(3)


IMAGES = np.ones((2, 28, 28), dtype=np.float32)
BAD_TFF: list[tuple[Callable[[Any], None], str]] = [
    (dropped, "has no group 'examples'"),
    (replaced("pixels", None), "'bo': there is no dataset 'pixels'"),
    (replaced("label", None), "'bo': there is no dataset 'label'"),
    (an_array, "'bo': there is no dataset 'pixels'"),
    (replaced("pixels", IMAGES.astype(np.float64)), "'bo': pixels has float64 values"),
    (replaced("pixels", IMAGES[:, :27]), r"'bo': pixels has float32 .* \(2, 27, 28\); expected"),
    (replaced("pixels", np.float32(1)), r"'bo': pixels has float32 values of shape \(\)"),
    (replaced("pixels", h5py.Empty("f")), "'bo': pixels has float32 values of shape None"),
    (replaced("pixels", IMAGES * np.float32(1.01)), r"'bo': pixels has values outside \[0, 1\]"),
    (replaced("pixels", IMAGES * np.float32(-0.1)), r"'bo': pixels has values outside \[0, 1\]"),
    (replaced("pixels", IMAGES * np.float32(np.nan)), r"'bo': pixels has values .* or NaN"),
    (replaced("label", np.array([0.0, 1.0])), "'bo': label has float64 values"),
    (replaced("label", np.zeros((2, 1), dtype=np.int32)), r"'bo': label has int32 .* \(2, 1\)"),
    (replaced("label", h5py.Empty("i4")), "'bo': label has int32 values of shape None"),
    (replaced("label", np.zeros(3, dtype=np.int32)), "'bo': there are 2 images in .* 3 numbers"),
    (replaced("label", np.array([0, 10], dtype=np.int32)), "'bo': labels run from 0 to 10"),
    (replaced("label", np.array([-1, 9], dtype=np.int32)), "'bo': labels run from -1 to 9"),
]


def exhaust(source: Source, *parts: Part) -> None:
    for part in parts or PARTS:
        for _ in source.read(part):
            pass


def refused(source: Callable[[], Source], match: str, *parts: Part) -> None:
    """Reading ends in one line."""
    with pytest.raises(ValueError, match=match) as caught:
        exhaust(source(), *parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", range(len(BAD_TFF)))
@pytest.mark.parametrize("part", PARTS)
def test_bad_tff_files_are_refused(tmp_path: Path, number: int, part: Part) -> None:
    change, match = BAD_TFF[number]
    source = write_tff(tmp_path, FEW)
    with h5py.File(tmp_path / f"digits_{part}.h5", "a") as file:
        change(file)
    refused(lambda: source, rf"digits_{part}\.h5.*{match}", part)


def test_names_of_a_bad_tff_file(tmp_path: Path) -> None:
    source = write_tff(tmp_path, FEW)
    with h5py.File(source.test, "a") as file:
        del file["examples/cleo/label"]
    with pytest.raises(ValueError, match=r"digits_test\.h5, writer 'cleo': .* 'label'"):
        source.names()


def test_damaged_tff_files_are_refused(tmp_path: Path) -> None:
    source = write_tff(tmp_path, FEW)
    whole = source.train.read_bytes()
    for content in (whole[: len(whole) // 2], b"no HDF5 at all", b"", whole[:100]):
        source.train.write_bytes(content)
        refused(lambda: source, r"digits_train\.h5 cannot be read as HDF5 \(.*get it again")
    source.train.unlink()
    refused(lambda: source, r"digits_train\.h5 is not a file")
    with h5py.File(source.test, "r+") as file:  # packed images that are not in order
        del file["examples/bo/pixels"]
        images = FEW.parts["test"][1].pixels / np.float32(255)
        options = {"chunks": (2, 28, 28), "compression": "gzip", "shuffle": False}
        data = file.create_dataset("examples/bo/pixels", data=images, **options)
        info = data.id.get_chunk_info(0)
    content = bytearray(source.test.read_bytes())
    content[info.byte_offset : info.byte_offset + info.size] = b"\xff" * info.size
    source.test.write_bytes(content)
    refused(lambda: source, r"digits_test\.h5, writer 'bo' cannot be read as HDF5", "test")


# --- LEAF ---------------------------------------------------------------------------------------

Content = dict[str, Any]


def leaf_content(writers: list[Writer]) -> Content:
    """A file's content; everybody has letters besides."""
    data = {}
    for w in writers:
        x = (w.pixels.reshape(-1, 784) / 255).tolist() + [[0.5] * 784 for _ in range(2)]
        y = [*w.labels.tolist(), 10, 61]
        data[w.name] = {"x": x, "y": y}
    sizes = [len(v["y"]) for v in data.values()]
    return {"users": list(data), "num_samples": sizes, "user_data": data}


LEAFS = ("users", "num_samples", "user_data")
ORDERS = (LEAFS, LEAFS[::-1], ("users", "user_data", "num_samples"))
"""Of a file's keys: as LEAF has them, and two others."""


def write_leaf(
    folder: Path, source: Made, *, keys: tuple[str, ...] = LEAFS, files: int = 2
) -> LeafSource:
    for part in PARTS:
        (folder / part).mkdir(parents=True)
        writers = source.parts[part]
        for number in range(files):
            some = writers[number * len(writers) // files : (number + 1) * len(writers) // files]
            content = leaf_content(some)
            ordered = {key: content[key] for key in keys}
            (folder / part / f"all_data_{number}.json").write_text(json.dumps(ordered))
    return LeafSource(folder, title=source.title)


@settings(parent=often, max_examples=10)
@given(sources(), st.sampled_from(ORDERS))
def test_leaf_files_come_back(source: Made, keys: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as name:
        back = write_leaf(Path(name), source, keys=keys)
        same(back, source)
        same(back, source)  # by now names are known


def leaf_with(
    folder: Path, change: Callable[[Content], object], part: Part = "train"
) -> LeafSource:
    source = write_leaf(folder, FEW, files=1)
    content = copy.deepcopy(leaf_content(FEW.parts[part]))
    change(content)
    (folder / part / "all_data_0.json").write_text(json.dumps(content))
    return source


def bo(key: str, change: Callable[[Any], object]) -> Callable[[Content], object]:
    return lambda content: change(content["user_data"]["bo"][key])


BAD_LEAF: list[tuple[Callable[[Content], object], str]] = [
    (lambda c: c.pop("users"), "lacks users"),
    (lambda c: c.pop("num_samples"), "lacks num_samples"),
    (lambda c: c.pop("user_data"), "lacks user_data"),
    (lambda c: c.update(user_data=[]), "lacks user_data"),
    (lambda c: c.update(users={"item": 3}), "lacks users"),
    (lambda c: c["users"].__setitem__(1, 7), "users has values that are no strings"),
    (lambda c: c["num_samples"].append(1), "each of the 3 users; there are 4"),
    (lambda c: c["num_samples"].__setitem__(0, 5.0), "expected a whole number in num_samples"),
    (lambda c: c["num_samples"].__setitem__(0, True), "expected a whole number in num_samples"),
    (lambda c: (c["users"].append("bo"), c["num_samples"].append(4)), "'bo': the list users has"),
    (lambda c: (c["users"].append("x"), c["num_samples"].append(4)), "'x': .* not in user_data"),
    (lambda c: c["num_samples"].__setitem__(1, 9), "'bo': there are 4 labels .* has 9"),
    (lambda c: c["user_data"].update(zoe=c["user_data"]["bo"]), "'zoe': .* not in the list users"),
    (lambda c: c["user_data"].update(bo=[]), "'bo': expected a list 'x' and a list 'y'"),
    (lambda c: c["user_data"]["bo"].pop("x"), "'bo': expected a list 'x'"),
    (lambda c: c["user_data"]["bo"].update(y=3), "'bo': expected a list 'x' and a list 'y'"),
    (bo("x", lambda x: x.pop()), "'bo': there are 3 images in x and 4 labels"),
    (bo("y", lambda y: y.__setitem__(0, 62)), "'bo': y has 62; expected whole .* to 61"),
    (bo("y", lambda y: y.__setitem__(0, -1)), "'bo': y has -1"),
    (bo("y", lambda y: y.__setitem__(0, 1.0)), r"'bo': y has 1\.0"),
    (bo("y", lambda y: y.__setitem__(0, True)), "'bo': y has True"),
    (bo("x", lambda x: x[1].pop()), "'bo', image 1: there are 783 values; expected 784"),
    (bo("x", lambda x: x.__setitem__(1, 0.5)), r"'bo', image 1: expected a list .* got 0\.5"),
    (bo("x", lambda x: x[1].__setitem__(5, "0.5")), "'bo', image 1: expected a list of 784"),
    (bo("x", lambda x: x[1].__setitem__(5, True)), "'bo', image 1: expected a list of 784"),
    (bo("x", lambda x: x[1].__setitem__(5, None)), "'bo', image 1: expected a list of 784"),
    (bo("x", lambda x: x[1].__setitem__(5, 1.01)), "'bo', image 1: there are values outside"),
    (bo("x", lambda x: x[1].__setitem__(5, -0.01)), "'bo', image 1: there are values outside"),
    (bo("x", lambda x: x[3].__setitem__(5, 255)), "'bo', image 3: .* outside"),  # a letter's
]


@pytest.mark.parametrize("number", range(len(BAD_LEAF)))
def test_bad_leaf_files_are_refused(tmp_path: Path, number: int) -> None:
    change, match = BAD_LEAF[number]
    source = leaf_with(tmp_path, change)
    refused(lambda: source, rf"train/all_data_0\.json.*{match}")
    with pytest.raises(ValueError, match=match):
        source.names()


def test_damaged_leaf_files_are_refused(tmp_path: Path) -> None:
    source = write_leaf(tmp_path, FEW, files=1)
    path = tmp_path / "test" / "all_data_0.json"
    whole = path.read_text()
    for content, match in (
        (whole[:-1], r"after user 'cleo'"),
        (whole[: whole.index('"bo": {') + 90], "after user 'anna'"),
        (whole[:20], ""),
        ("", ""),
        (whole + "x", ""),
        (whole.replace("0.5", "NaN", 1), ""),
        (whole.replace('"x"', '"x', 1), ""),
    ):
        path.write_text(content)
        refused(lambda: source, rf"test/all_data_0\.json cannot be read as JSON.*{match}")
    path.write_bytes(whole.encode().replace(b'"bo": {', b'"b\xff": {'))
    refused(lambda: source, r"test/all_data_0\.json cannot be read as JSON")
    path.write_text("[]")
    refused(lambda: source, r"test/all_data_0\.json lacks users, num_samples, user_data")
    path.unlink()
    refused(lambda: source, r"test has no \.json files")


def test_a_leaf_user_comes_once_in_a_part(tmp_path: Path) -> None:
    source = write_leaf(tmp_path, FEW, files=1)
    path = tmp_path / "train" / "all_data_0.json"
    again = path.with_name("more.json")
    again.write_text(json.dumps(leaf_content(FEW.parts["train"][1:2])))
    refused(lambda: source, r"more\.json, user 'bo': .* in .*all_data_0\.json as well")
    again.unlink()
    path.write_text(path.read_text().replace('"cleo": {', '"bo": {'))
    refused(lambda: source, r"all_data_0\.json, user 'bo': the same user is in this file")


# --- the compact file ---------------------------------------------------------------------------


@often
@given(sources(), st.integers(1, 7))
def test_compact_files_come_back(source: Made, block: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "BLOCK", block)
        path = write_compact(source, Path(name) / "made.npz")
        back = CompactSource(path)
        same(back, source)
        assert back.title == source.title
        again = write_compact(back, Path(name) / "again.npz")
        assert again.read_bytes() == path.read_bytes()
        assert sorted(os.listdir(name)) == ["again.npz", "made.npz"]
        with np.load(path, allow_pickle=False) as file:  # NumPy alone opens it
            arrays = {key: file[key] for key in file.files}
        n = len(arrays["label"])
        assert arrays["pixels"].shape == (n, 28, 28)
        kinds = {key: str(arrays[key].dtype) for key in ("pixels", "label", "user", "test")}
        assert kinds == {"pixels": "uint8", "label": "uint8", "user": "int32", "test": "bool"}


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_compact(FEW, tmp_path / "one.npz")
    os.utime(one, (0, 0))
    two = write_compact(write_tff(tmp_path / "tff", FEW), tmp_path / "deep" / "two.npz")
    assert one.read_bytes() == two.read_bytes()
    for info in zipfile.ZipFile(one).infolist():
        assert info.date_time == (1980, 1, 1, 0, 0, 0)
        assert info.compress_type == zipfile.ZIP_DEFLATED


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "there.npz"
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"there\.npz is there already; name another"):
        write_compact(FEW, path)

    class Slow(Made):
        def read(self, part: Part) -> Iterator[Writer]:
            (tmp_path / "late.npz").write_bytes(b"precious")
            return super().read(part)

    with pytest.raises(ValueError, match=r"late\.npz is there already"):
        write_compact(Slow(FEW.parts), tmp_path / "late.npz")
    found = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert found == {"there.npz": b"precious", "late.npz": b"precious"}


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    class Broken(Made):
        def read(self, part: Part) -> Iterator[Writer]:
            yield from super().read(part)
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        write_compact(Broken(FEW.parts), tmp_path / "a.npz")
    with pytest.raises(ValueError, match="made-up digits has no digits"):
        write_compact(people({"anna": (0, 0)}), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"'bo\\x00' ends in a zero character"):
        write_compact(people({"anna": (1, 1), "bo\0": (1, 0)}), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.h5 does not end in \.npz"):
        write_compact(FEW, tmp_path / "a.h5")
    with pytest.raises(ValueError, match=r"a\.npz: the title is 'a.nb'; expected one line"):
        write_compact(Made(FEW.parts, "a\nb"), tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def arrays_of(source: Made) -> dict[str, np.ndarray[Any, Any]]:
    with tempfile.TemporaryDirectory() as name:
        path = write_compact(source, Path(name) / "x.npz")
        return dict(np.load(io.BytesIO(path.read_bytes())))


GOOD = arrays_of(FEW)  # rows: anna 3, bo 2, cleo 4 in train; 1, 2, 1 in test


def but(key: str, values: Any) -> dict[str, Any]:
    return {k: v for k, v in {**GOOD, key: values}.items() if v is not None}


def at(key: str, row: int, value: Any) -> dict[str, Any]:
    changed = GOOD[key].copy()
    changed[row] = value
    return but(key, changed)


BAD_COMPACT: list[tuple[dict[str, Any], str]] = [
    (but("label", None), r"has the arrays .*; expected \['pixels', 'label'"),
    (but("more", np.zeros(3)), r"has the arrays .*'more'"),
    (but("pixels", GOOD["pixels"].astype(np.int16)), "pixels has int16 values"),
    (but("pixels", GOOD["pixels"][:, :, :27]), r"pixels has .* \(13, 28, 27\); expected .* 28, 28"),
    (but("pixels", np.uint8(3)), r"pixels has uint8 values of shape \(\)"),
    (but("pixels", np.asfortranarray(GOOD["pixels"])), "pixels has .* in C order"),
    (but("label", GOOD["label"].astype(np.int64)), "label has int64 values"),
    (but("label", GOOD["label"][:-1]), r"label has uint8 values of shape \(12,\); .* \(13,\)"),
    (but("user", GOOD["user"].astype(np.int64)), "user has int64 values"),
    (but("user", GOOD["user"][:-1]), r"user has int32 values of shape \(12,\)"),
    (but("test", GOOD["test"].astype(np.uint8)), "test has uint8 values"),
    (but("test", GOOD["test"][:, None]), r"test has bool values of shape \(13, 1\)"),
    (but("test", (GOOD["test"] * np.uint8(2)).view(np.bool_)), "test has bytes other than"),
    ({k: v[:0] if v.ndim else v for k, v in GOOD.items()}, "has no images"),
    (but("name", np.arange(3)), r"name has int64 values of shape \(3,\); expected text"),
    (but("name", np.array([["a"], ["b"], ["c"]])), r"name has <U1 .* \(3, 1\)"),
    (but("name", np.array(["a", "b"])), "user 2 has no name; there are 2"),
    (but("name", np.array(["a", "b", "a"])), "users 0 and 2 have the same name 'a'"),
    (but("name", np.frombuffer(b"\xff" * 12, "<U1")), "name cannot be read"),
    (but("title", np.array(["t"])), r"title has <U1 values of shape \(1,\); expected one"),
    (but("title", np.array(3)), "title has int64 values"),
    (but("title", np.array("two\nlines")), "the title is 'two.nlines'; expected one line"),
    (but("title", np.array(" ")), "the title is ' '"),
    (at("user", 0, -1), "user -1 is below 0"),
    (at("label", 3, 10), "user 'bo': a label is 10; expected digits from 0 to 9"),
    (at("user", 8, 1), "user 'bo': the train rows do not follow each other"),
    (at("user", 12, 0), "user 'anna': the test rows do not follow each other"),
]


@pytest.mark.parametrize("number", range(len(BAD_COMPACT)))
def test_bad_compact_files_are_refused(tmp_path: Path, number: int) -> None:
    arrays, match = BAD_COMPACT[number]
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    refused(lambda: CompactSource(path), rf"bad\.npz.*{match}")


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os._exit, (3,))

    path = tmp_path / "bad.npz"
    for key in ("pixels", "user", "name", "title"):
        np.savez(path, **but(key, np.array([Trap()] * 13, dtype=object)), allow_pickle=True)
        refused(lambda: CompactSource(path), rf"bad\.npz: {key} has .* without objects")


def test_damaged_compact_files_are_refused(tmp_path: Path) -> None:
    path = write_compact(FEW, tmp_path / "whole.npz")
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"no zip at all"):
        path.write_bytes(content)
        refused(lambda: CompactSource(path), r"whole\.npz cannot be read as an \.npz file")
    # A flipped bit in the last image of the file, which training rows do not need.
    np.savez(path, **GOOD)
    content = bytearray(path.read_bytes())
    at = content.index(GOOD["pixels"][-1].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    refused(lambda: CompactSource(path), r"whole\.npz cannot be read .*CRC", "train")
    path.unlink()
    refused(lambda: CompactSource(path), r"whole\.npz is not a file")


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    for key, header in (("label", "'|u1'"), ("pixels", "'|u1'"), ("name", "'<U9'")):
        shape = "(99999999999999, 28, 28)" if key == "pixels" else "(99999999999999,)"
        text = f"{{'descr': {header}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, values in GOOD.items():
                buffer = io.BytesIO()
                np.save(buffer, values)
                lie = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
                archive.writestr(f"{name}.npy", lie if name == key else buffer.getvalue())
        refused(lambda: CompactSource(path), rf"large\.npz: {key} has 0 bytes; its header")


def test_a_file_without_names(tmp_path: Path) -> None:
    path = tmp_path / "bare.npz"
    arrays = {k: v for k, v in GOOD.items() if k not in ("name", "title")}
    arrays["user"] = np.array([3, 101, 20], dtype=np.int32)[arrays["user"]]
    np.savez_compressed(path, **arrays)
    source = CompactSource(path)
    assert source.names() == ["003", "020", "101"]
    assert [w.name for w in source.read("train")] == ["003", "101", "020"]
    assert source.title == "digits of bare.npz"


def test_train_and_test_rows_may_alternate(tmp_path: Path, monkeypatch: Any) -> None:
    """As the tool packs them: by user, and the parts in turn within."""
    order = np.lexsort((GOOD["test"], GOOD["user"]))
    path = tmp_path / "turns.npz"
    np.savez(path, **{k: v if k in ("name", "title") else v[order] for k, v in GOOD.items()})
    for block in (1, 2, 5, 1000):
        monkeypatch.setattr(compact, "BLOCK", block)
        same(CompactSource(path), FEW)


# --- memory -------------------------------------------------------------------------------------


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Many:
    """So many writers that they are made when they are asked for."""

    title = "many"

    def __init__(self, users: int, each: int) -> None:
        self.users, self.each = users, each

    def names(self) -> list[str]:
        return [f"{user:05}" for user in range(self.users)]

    def read(self, part: Part) -> Iterator[Writer]:
        return (
            writer(name, self.each) for name in self.names() if part == "train" or name < "00003"
        )

    @property
    def parts(self) -> dict[Part, Iterator[Writer]]:
        return {part: self.read(part) for part in PARTS}


def test_reading_takes_one_writers_memory(tmp_path: Path, monkeypatch: Any) -> None:
    tff = write_tff(tmp_path / "tff", Many(300, 20))  # type: ignore[arg-type]
    size = tff.train.stat().st_size
    assert peak(lambda: (exhaust(tff), tff.names())) < size / 20
    path = tmp_path / "many.npz"
    assert peak(lambda: write_compact(Many(1000, 20), path)) < path.stat().st_size / 3
    monkeypatch.setattr(compact, "BLOCK", 128)
    assert peak(lambda: exhaust(CompactSource(path))) < path.stat().st_size / 10


@pytest.mark.parametrize("keys", ORDERS[:2])
def test_reading_leaf_takes_one_writers_memory(tmp_path: Path, keys: tuple[str, ...]) -> None:
    peaks = []
    for users in (30, 90):
        content = leaf_content([writer(f"{user:05}", 1) for user in range(users)])
        for part in PARTS:
            path = tmp_path / str(users) / part / "a.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({key: content[key] for key in keys}))
        peaks.append(peak(partial(exhaust, LeafSource(path.parents[1]))))
    assert peaks[1] < 1.2 * peaks[0]  # with three times as many users
    assert peaks[1] < path.stat().st_size / 2


# --- finding ------------------------------------------------------------------------------------


def test_digits_are_found_by_path(tmp_path: Path, monkeypatch: Any) -> None:
    write_tff(tmp_path / "tff", FEW, "some")
    write_leaf(tmp_path / "leaf", FEW)
    npz = write_compact(FEW, tmp_path / "few.npz")
    for where, kind, title in (
        (npz, CompactSource, "made-up digits"),
        (str(tmp_path / "tff"), TffSource, "digits of tff"),
        (tmp_path / "tff" / "some_train.h5", TffSource, "digits of some_train.h5"),
        (tmp_path / "tff" / "some_test.h5", TffSource, "digits of some_test.h5"),
        (tmp_path / "leaf", LeafSource, "digits in LEAF's layout"),
    ):
        source = find_digits(where)
        assert isinstance(source, kind)
        assert source.title == title
        same(source, FEW)
    monkeypatch.chdir(tmp_path / "tff")
    assert find_digits(".").title == "digits of tff"


def test_only_the_known_files_are_femnist(tmp_path: Path, monkeypatch: Any) -> None:
    source = write_tff(tmp_path / "x", FEW, "fed_emnist_digitsonly")
    assert find_digits(tmp_path / "x").title == "digits of x"
    assert find_digits(source.test).title == "digits of fed_emnist_digitsonly_test.h5"
    sizes = {path.name: path.stat().st_size for path in (source.train, source.test)}
    monkeypatch.setattr(finding, "SIZES", sizes)
    assert find_digits(tmp_path / "x").title == "FEMNIST digits (TFF)"
    monkeypatch.setitem(sizes, source.test.name, 3)
    assert find_digits(tmp_path / "x").title == "digits of x"
    write_tff(tmp_path / "y", FEW, "fed_nist_digits")
    assert find_digits(tmp_path / "y").title == "NIST digits, 836 writers"


def test_what_is_not_found_by_path(tmp_path: Path) -> None:
    tff = write_tff(tmp_path / "tff", FEW, "some")
    with pytest.raises(ValueError, match="nowhere is not there"):
        find_digits(tmp_path / "nowhere")
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"a\.txt is no file of digits by its name"):
        find_digits(tmp_path / "a.txt")
    write_tff(tmp_path / "tff", FEW, "more")
    with pytest.raises(ValueError, match=r"more than one set .*more_\*\.h5, some_\*\.h5"):
        find_digits(tmp_path / "tff")
    (tmp_path / "tff" / "more_test.h5").unlink()
    assert find_digits(tmp_path / "tff").names() == FEW.names()
    write_leaf(tmp_path / "tff" / "leaf", FEW)
    for part in PARTS:
        (tmp_path / "tff" / "leaf" / part).rename(tmp_path / "tff" / part)
    with pytest.raises(ValueError, match=r"more than one set .*train/\*\.json"):
        find_digits(tmp_path / "tff")
    tff.test.unlink()
    with pytest.raises(ValueError, match=r"some_test\.h5 is not there; .* go together"):
        find_digits(tff.train)
    (tmp_path / "half").mkdir()
    tff.train.rename(tmp_path / "half" / "some_train.h5")
    with pytest.raises(ValueError, match=r"half has no pair .*some_\*\.h5 is half a pair"):
        find_digits(tmp_path / "half")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    tff, leaf = write_tff(tmp_path / "tff", FEW), write_leaf(tmp_path / "leaf", FEW)
    for name, source in (("h5py", tff), ("ijson", leaf)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=rf"{name}.*pip install 'fpfl\[femnist\]'"):
            list(source.read("train"))


@pytest.fixture
def served(monkeypatch: Any) -> Iterator[dict[str, Any]]:
    """A server on this machine: ``send`` is what it sends, ``promise`` how much it says it will."""
    answer: dict[str, Any] = {"send": b"", "promise": None, "wait": threading.Event()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer.get("silent"):
                answer["wait"].wait(10)
                return
            if answer.get("rubbish"):
                self.wfile.write(b"rubbish\r\n\r\n")
                return
            self.send_response(200)
            self.send_header("Content-Length", str(answer["promise"] or len(answer["send"])))
            self.end_headers()
            self.wfile.write(answer["send"])

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # who asked has gone
                super().handle()

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/digits.tar.bz2"
        monkeypatch.setattr(finding, "URL", url)
        yield answer
        answer["wait"].set()
        server.shutdown()
        thread.join()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: Any) -> bytes:
    """An archive as TFF's, of few writers, with what does not belong there; now it is the known."""
    source = write_tff(tmp_path / "origin", FEW, "fed_emnist_digitsonly")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as tar:
        tar.add(source.train, source.train.name)
        tar.add(source.train, "../outside.h5")
        tar.add(source.test, source.test.name)
    content = buffer.getvalue()
    sizes = {path.name: path.stat().st_size for path in (source.train, source.test)}
    monkeypatch.setattr(finding, "SIZES", sizes)
    monkeypatch.setattr(finding, "SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_a_download_is_kept(tmp_path: Path, served: dict[str, Any], archive: bytes) -> None:
    served["send"] = archive
    source = find_digits(cache=tmp_path / "cache")
    assert source.title == "FEMNIST digits (TFF)"
    same(source, FEW)
    served["send"] = b"no more"
    same(find_digits(cache=tmp_path / "cache"), FEW)
    same(find_digits(cache=tmp_path / "cache", download=False), FEW)
    there = {str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*")}
    assert there == {"femnist", *(f"femnist/{name}" for name in finding.SIZES)}


def test_a_cached_file_that_is_cut_short_is_not_used(
    tmp_path: Path, served: dict[str, Any], archive: bytes
) -> None:
    served["send"] = archive
    find_digits(cache=tmp_path)
    path = tmp_path / "femnist" / "fed_emnist_digitsonly_train.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    wrong = f"{path} has {len(whole) - 1} bytes; expected {len(whole)}"
    with pytest.raises(ValueError, match=re.escape(wrong)):
        find_digits(cache=tmp_path, download=False)
    same(find_digits(cache=tmp_path), FEW)  # fetched again
    assert path.read_bytes() == whole


def nothing(tmp_path: Path, reason: str) -> None:
    cache = tmp_path / "cache"
    ways = (
        r"\(1\) A path with --data: none was given.*"
        rf"\(2\) The cache folder: {re.escape(str(cache / 'femnist'))} .*"
        rf"\(3\) A machine with a network.*failed: .*(?:{reason})"
    )
    with pytest.raises(ValueError, match=ways) as caught:
        find_digits(cache=cache)
    assert "\n" not in str(caught.value)
    assert not list((cache / "femnist").iterdir())


def test_downloads_that_fail(
    tmp_path: Path, served: dict[str, Any], archive: bytes, monkeypatch: Any
) -> None:
    served["send"] = archive[:-1] + bytes([archive[-1] ^ 1])
    nothing(tmp_path, rf"the {len(archive)} bytes that came have the sha256 .* expected")
    served.update(send=archive[: len(archive) // 2], promise=len(archive))
    nothing(tmp_path, "cut short|IncompleteRead")
    served.update(send=b"x" * (2**20 + sum(finding.SIZES.values()) + 1), promise=None)
    nothing(tmp_path, "it has more than")
    served.update(send=archive)
    for name in finding.SIZES:
        with monkeypatch.context() as patch:
            patch.setitem(finding.SIZES, name, 17)
            nothing(tmp_path, rf"{name} in the archive has \d+ bytes; expected 17")
    with monkeypatch.context() as patch:
        patch.setattr(finding, "SHA256", hashlib.sha256(archive[: len(archive) // 2]).hexdigest())
        served.update(send=archive[: len(archive) // 2])
        nothing(tmp_path, "not a bzip2 file|Compressed file ended|unexpected end of data")
        served.update(rubbish=True)
        nothing(tmp_path, "rubbish")
        patch.setattr(finding, "TIMEOUT", 0.2)
        served.update(silent=True)
        nothing(tmp_path, "timed out")


def test_no_network(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(finding, "URL", (tmp_path / "no.tar.bz2").as_uri())
    nothing(tmp_path, "no such file|No such file")
    ways = r"\(2\) The cache folder: \S+other/femnist is not a folder.*\(3\).*it was not allowed"
    with pytest.raises(ValueError, match=ways):
        find_digits(cache=tmp_path / "other", download=False)
    assert not (tmp_path / "other").exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: Any) -> None:
    for name, folder in (
        ("HOME", tmp_path / ".cache" / "fpfl"),
        ("XDG_CACHE_HOME", tmp_path / "fpfl"),
        ("FPFL_CACHE", tmp_path),
    ):
        for other in ("XDG_CACHE_HOME", "FPFL_CACHE"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        with pytest.raises(ValueError, match=re.escape(f"The cache folder: {folder / 'femnist'} ")):
            find_digits(download=False)
    monkeypatch.setenv("FPFL_CACHE", str(tmp_path))
    write_tff(tmp_path / "femnist", FEW, "some")
    same(find_digits(download=False), FEW)


# --- the stand-in -------------------------------------------------------------------------------


@pytest.mark.skipif(not STANDIN.is_dir() or not TOOL.is_file(), reason="../shared is not here")
def test_the_stand_in(tmp_path: Path) -> None:
    """836 real writers: read, converted, and the same as what the tool packs."""
    source = find_digits(STANDIN)
    assert source.title == "NIST digits, 836 writers"
    path = write_compact(source, tmp_path / "nist.npz")
    back = CompactSource(path)
    assert back.title == source.title
    assert back.names() == source.names()
    assert len(back.names()) == 836
    counts = {part: sum(len(w.labels) for w in back.read(part)) for part in PARTS}
    assert counts == {"train": 62_782, "test": 7_218}
    tool = tmp_path / "tool.npz"
    subprocess.run([sys.executable, TOOL, tool, "--pack"], check=True, capture_output=True)
    packed = CompactSource(tool)
    assert packed.title == "digits of tool.npz"
    for part in PARTS:
        for one, two in zip(back.read(part), packed.read(part), strict=True):
            assert np.array_equal(one.pixels, two.pixels)
            assert np.array_equal(one.labels, two.labels)


# --- the command line ---------------------------------------------------------------------------


def femnist(*arguments: object) -> str:
    words = ["data", "femnist", *(str(argument) for argument in arguments)]
    done = CliRunner().invoke(cli.app, cli_data.show_alone(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_says_what_there_is(tmp_path: Path) -> None:
    source = people({f"{user:02}": (2, 1) for user in range(20)})
    write_tff(tmp_path / "few", source)
    said = femnist("--data", tmp_path / "few", "--convert", tmp_path / "few.npz")
    assert "digits of few\n20 writers, 40 train samples, 20 test samples" in said
    for row in (r"black pen\W+9\W+18\W+9\b", r"chalk\W+2\W+4\W+2\b", r"all\W+20\W+40\W+20\b"):
        assert re.search(row, said)
    same(CompactSource(tmp_path / "few.npz"), source)
    said = femnist("--data", tmp_path / "few.npz", "--order", "seeded", "--seed", 5)
    assert "digits of few\n" in said  # the title went with the data
    assert "seeded, seed 5" in said


def test_the_command_draws_samples(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_compact(people({f"{user:02}": (9, 1) for user in range(30)}), tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    femnist("--data", path, "--show", tmp_path / "new" / "my.png")
    femnist("--data", path, "--show", "--seed", "0")
    first = (tmp_path / "out" / "femnist.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "new" / "my.png").read_bytes()
    femnist("--show", "--data", path, "--show")
    few = write_compact(FEW, tmp_path / "few.npz")  # not every group has every digit
    femnist("--data", few, "--show", tmp_path / "few.png")
    assert (tmp_path / "few.png").exists()


def test_the_command_needs_no_files(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    said = femnist()
    assert re.search(r"[\d,]+ writers, [\d,]+ train samples, [\d,]+ test samples", said)
    assert "FEMNIST" not in said


def test_the_command_refuses_in_one_line(fpfl, tmp_path: Path) -> None:
    npz = write_compact(FEW, tmp_path / "few.npz")
    for arguments, match in (
        (("--data", npz, "--convert", npz), r"few\.npz is there already"),
        (("--data", npz, "--order", "any"), "--order is 'any'; expected lexicographic or"),
    ):
        code, _, err = fpfl("data", "femnist", *arguments)
        assert code == 2
        assert re.fullmatch(rf"error: .*{match}.*\n", err)
