"""Writing the compact file; `fpfl.data.femnist.compact` says what it has and reads it."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fpfl.data.femnist.compact import check_title
from fpfl.data.femnist.source import SIDE, Part, Source


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
