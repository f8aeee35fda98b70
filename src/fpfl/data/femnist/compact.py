"""One small file with all writers' digits: an ``.npz`` that NumPy alone opens.

``pixels`` is uint8 (n, 28, 28) with the paper at 255, ``label`` uint8 (n,), ``user`` int32 (n,),
the writer's number, and ``test`` bool (n,). ``name`` may have the writers' names by number, and
``title`` what the data is called. Within a part, a writer's rows follow each other.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fpfl.data.femnist.source import CLASSES, SIDE, Part, Source, Writer

BLOCK = 1024
"""So many images are unpacked at a time."""

_NEEDED = {"pixels": np.uint8, "label": np.uint8, "user": np.int32, "test": np.bool_}
_OPTIONAL = ("name", "title")


def check_title(path: Path, title: str) -> None:
    """Refuse a title that is not one line of text."""
    if not title.strip() or not title.isprintable():
        raise ValueError(f"{path}: the title is {title!r}; expected one line of text")


class CompactSource:
    """A compact file: `write_compact` and ``fpfl data femnist --convert`` write one.

    All but the images is read and checked at once; of the images, a block and a writer's own are in
    memory at a time. Without names in the file, writers have their numbers with leading zeros.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.title = f"digits of {self.path.name}"
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not a file; give the path of a compact .npz file")
        with _opened(self.path) as archive:
            keys = {name.removesuffix(".npy") for name in archive.namelist()}
            if not keys >= set(_NEEDED) or not keys <= {*_NEEDED, *_OPTIONAL}:
                raise ValueError(
                    f"{self.path} has the arrays {sorted(keys)}; expected {list(_NEEDED)}, and "
                    f"perhaps {list(_OPTIONAL)}"
                )
            with _member(self.path, archive, "pixels") as (_, kind, shape):
                self._expect("pixels", kind, shape, (shape[0] if shape else 0, SIDE, SIDE))
                n = shape[0]
            small = {key: self._array(archive, key) for key in sorted(keys - {"pixels"})}
        for key in ("label", "user", "test"):
            self._expect(key, small[key].dtype, small[key].shape, (n,))
        self._labels, self._users, self._test = small["label"], small["user"], small["test"]
        if n == 0:
            raise ValueError(f"{self.path} has no images; expected at least one")
        if self._test.view(np.uint8).max() > 1:
            raise ValueError(f"{self.path}: test has bytes other than 0 and 1; make the file again")
        self._names = self._named(small.get("name"))
        if "title" in small:
            self.title = self._titled(small["title"])
        self._check_rows()

    def names(self) -> list[str]:
        """Everybody with a digit in either part, in lexicographic order."""
        return sorted(self._names.values())

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers of a part who have digits in it, one at a time, in the file's own order."""
        labels, done = self._labels[self._test == (part == "test")], 0
        for number, pieces in groupby(self._pieces(part), key=itemgetter(0)):
            pixels = np.concatenate([piece for _, piece in pieces])
            first, done = done, done + len(pixels)
            yield Writer(self._names[number], pixels, labels[first:done].copy())

    def _pieces(self, part: Part) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """A part's images, cut where a block or a writer ends."""
        wanted = self._test == (part == "test")
        with (
            _opened(self.path) as archive,
            _member(self.path, archive, "pixels") as (file, _, shape),
        ):
            # To the last block, wanted or not: with it the zip file's checksum is seen to.
            for first in range(0, len(wanted), BLOCK):
                rows = slice(first, min(first + BLOCK, len(wanted)))
                size = (rows.stop - rows.start, *shape[1:])
                images = _values(self.path, file, np.dtype(np.uint8), size)[wanted[rows]]
                users = self._users[rows][wanted[rows]]
                for one, stop in _runs(users):
                    yield int(users[one]), images[one:stop]

    def _array(self, archive: zipfile.ZipFile, key: str) -> NDArray[Any]:
        with _member(self.path, archive, key) as (file, kind, shape):
            return _values(self.path, file, kind, shape)

    def _expect(
        self, key: str, kind: np.dtype[Any], shape: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        if kind != _NEEDED[key] or shape != expected:
            dtype = np.dtype(_NEEDED[key])
            raise ValueError(
                f"{self.path}: {key} has {kind} values of shape {shape}; expected {dtype} values "
                f"of shape {'(n, 28, 28)' if key == 'pixels' else expected}"
            )

    def _named(self, names: NDArray[Any] | None) -> dict[int, str]:
        """The names of those who have rows, by number."""
        numbers: list[int] = np.unique(self._users).tolist()
        if numbers[0] < 0:
            raise ValueError(f"{self.path}: user {numbers[0]} is below 0; expected whole numbers")
        if names is None:
            return {number: f"{number:0{len(str(numbers[-1]))}}" for number in numbers}
        if names.dtype.kind != "U" or names.ndim != 1:
            raise ValueError(
                f"{self.path}: name has {names.dtype} values of shape {names.shape}; expected text "
                "of shape (writers,)"
            )
        if numbers[-1] >= len(names):
            raise ValueError(
                f"{self.path}: user {numbers[-1]} has no name; there are {len(names)}, from 0 on"
            )
        texts = _texts(self.path, "name", names)
        found = {number: texts[number] for number in numbers}
        first: dict[str, int] = {}
        for number, name in found.items():
            if first.setdefault(name, number) != number:
                raise ValueError(
                    f"{self.path}: users {first[name]} and {number} have the same name {name!r}"
                )
        return found

    def _titled(self, title: NDArray[Any]) -> str:
        if title.dtype.kind != "U" or title.ndim != 0:
            raise ValueError(
                f"{self.path}: title has {title.dtype} values of shape {title.shape}; expected one "
                "text"
            )
        (text,) = _texts(self.path, "title", title.reshape(1))
        check_title(self.path, text)
        return text

    def _check_rows(self) -> None:
        wrong = np.flatnonzero(self._labels >= CLASSES)
        if len(wrong):
            name = self._names[int(self._users[wrong[0]])]
            raise ValueError(
                f"{self.path}, user {name!r}: a label is {self._labels[wrong[0]]}; expected digits "
                f"from 0 to {CLASSES - 1}"
            )
        for part, rows in (("train", ~self._test), ("test", self._test)):
            users = self._users[rows]
            seen: set[int] = set()
            for first, _ in _runs(users):
                number = int(users[first])
                if number in seen:
                    raise ValueError(
                        f"{self.path}, user {self._names[number]!r}: the {part} rows do not follow "
                        "each other; expected a file that is sorted by user"
                    )
                seen.add(number)


def _runs(values: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Where stretches of equal values begin and end."""
    cuts = np.flatnonzero(values[1:] != values[:-1]) + 1
    edges = [0, *cuts.tolist(), len(values)] if len(values) else []
    return pairwise(edges)


def _texts(path: Path, key: str, values: NDArray[Any]) -> list[str]:
    with _plainly(f"{path}: {key}"):  # any four bytes, and no character
        return [str(text) for text in values.tolist()]


@contextmanager
def _plainly(what: Path | str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # there is no telling what a damaged archive raises
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} cannot be read as an .npz file ({reason or type(error).__name__}); it may be "
            "cut short, damaged or of another kind: make it again"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with _plainly(path):
        archive = zipfile.ZipFile(path)
    with archive:
        yield archive


@contextmanager
def _member(
    path: Path, archive: zipfile.ZipFile, key: str
) -> Iterator[tuple[IO[bytes], np.dtype[Any], tuple[int, ...]]]:
    """An array of the file, read up to its values; its type and its shape."""
    with _plainly(path):
        file = archive.open(f"{key}.npy")
    with file:
        with _plainly(path):
            old = npy.read_magic(file) == (1, 0)
            read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
            shape, fortran, kind = read(file)
            there = archive.getinfo(f"{key}.npy").file_size - file.tell()
        # Before any memory is asked for: a damaged header may name any size. Objects are pickles.
        size = math.prod(shape) * kind.itemsize
        if kind.hasobject or there != size or (fortran and len(shape) > 1):
            raise ValueError(
                f"{path}: {key} has {there} bytes; its header ({kind}, shape {shape}) goes with "
                f"{size}, in C order and without objects: make the file again"
            )
        yield file, kind, shape


def _values(
    path: Path, file: IO[bytes], kind: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    with _plainly(path):  # fewer bytes than there should be have another shape
        content = file.read(math.prod(shape) * kind.itemsize)
        return np.frombuffer(content, dtype=kind).reshape(shape)


def write_compact(source: Source, path: str | Path) -> Path:
    """Write all writers' digits to a new compact file, in bounded memory.

    The training rows come first; writers are in the order in which the source gives them. The same
    source gives the same bytes. The file has its name only once it is whole.

    Parameters
    ----------
    source
        Where the digits come from.
    path
        A new file ending in ``.npz``; one that exists is refused.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"{path} does not end in .npz, by which a compact file is known; add it")
    _refuse_existing(path)
    check_title(path, source.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        with (part / "pixels").open("w+b") as images:
            arrays = _spooled(source, images)
            if not len(arrays["label"]):
                raise ValueError(f"{source.title} has no digits; there is nothing to write")
            with zipfile.ZipFile(part / "whole", "x") as archive:
                for key, values in arrays.items():
                    with _new_member(archive, key, values.dtype, values.shape) as file:
                        file.write(values.tobytes())
                shape = (len(arrays["label"]), SIDE, SIDE)
                images.seek(0)
                with _new_member(archive, "pixels", np.dtype(np.uint8), shape) as file:
                    shutil.copyfileobj(images, file, 2**20)
        with (part / "whole").open("rb") as written:
            os.fsync(written.fileno())
        _refuse_existing(path)
        (part / "whole").rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def _spooled(source: Source, images: IO[bytes]) -> dict[str, NDArray[Any]]:
    """All images one after the other in a file, and everything else as arrays."""
    numbers: dict[str, int] = {}
    labels, users, test = bytearray(), array("i"), bytearray()
    parts: tuple[Part, ...] = get_args(Part)
    for part in parts:
        for writer in source.read(part):
            number = numbers.setdefault(writer.name, len(numbers))
            images.write(np.ascontiguousarray(writer.pixels, dtype=np.uint8).data)
            labels += writer.labels.astype(np.uint8).tobytes()
            users.extend([number] * len(writer.labels))
            test += bytes([part == "test"]) * len(writer.labels)
    names = np.array(list(numbers), dtype=np.str_)
    lost = [name for name, kept in zip(numbers, names.tolist(), strict=True) if name != kept]
    if lost:  # NumPy drops zeros at the end of a text
        raise ValueError(f"user {lost[0]!r} ends in a zero character; give it another name")
    return {
        "title": np.array(source.title, dtype=np.str_),
        "name": names,
        "label": np.frombuffer(bytes(labels), dtype=np.uint8),
        "user": np.array(users, dtype=np.int32),
        "test": np.frombuffer(bytes(test), dtype=np.bool_),
    }


@contextmanager
def _new_member(
    archive: zipfile.ZipFile, key: str, kind: np.dtype[Any], shape: tuple[int, ...]
) -> Iterator[IO[bytes]]:
    """A new array of the file, its header written."""
    # No date and no system of its own: the same data are the same bytes.
    info = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
    info.file_size = math.prod(shape) * kind.itemsize + 4096  # tells zipfile what is large
    with archive.open(info, "w") as file:
        descr = npy.dtype_to_descr(kind)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, header)
        yield file


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path} is there already; name another file, or remove it first")
