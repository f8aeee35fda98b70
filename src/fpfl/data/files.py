"""Populations on disk: NumPy files, read lazily, so that a population need not fit in memory.

A population folder has what a `FederatedDataset` has: ``features.npy``, ``labels.npy``,
``attributes.npy`` and ``offsets.npy``, which NumPy alone opens, and ``schema.json``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from fpfl.data.federated import FederatedDataset, sample_columns
from fpfl.data.schema import Schema

__all__ = ["PopulationWriter", "open_population", "save_population"]

VERSION = 1
"""The version of the folder's layout, in ``schema.json``."""

ARRAYS = ("features", "labels", "attributes", "offsets")
"""The files, without ``.npy``."""

FEATURES = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
"""The types that features may have in a file."""

BLOCK = 4096
"""So many users of a dataset are checked and written at a time."""


class PopulationWriter:
    """Writes a population folder user by user, in bounded memory; use it in a ``with`` block.

    The folder has its name only once the block has ended well: a crash leaves no half-written
    population, at most a hidden folder ``.NAME.*.part`` beside it.

    Parameters
    ----------
    folder
        A new folder; one that exists is refused.
    schema
        The declared public schema. Where it declares a population, users who were not added are
        users without samples.
    features_dtype
        The features' type in the file, e.g. ``"uint8"`` for images (a model gets whole numbers as
        they are). Labels of a regression are float32, or float64 beside float64 features.
    """

    def __init__(
        self, folder: str | Path, schema: Schema, features_dtype: DTypeLike = np.float32
    ) -> None:
        try:
            name = np.dtype(features_dtype).name
        except TypeError:
            name = str(features_dtype)
        if name not in FEATURES:
            raise ValueError(f"the features' type is {name}; expected one of {list(FEATURES)}")
        reals = "float64" if name == "float64" else "float32"
        self.folder, self.schema = Path(folder), schema
        self._types = (name, reals if schema.classes is None else "int64", "int64", "int64")
        self._files: list[_GrowingFile] = []
        self._part: Path | None = None
        self._samples = 0

    def __enter__(self) -> PopulationWriter:
        _refuse_existing(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        part = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(4)}.part")
        part.mkdir()
        self._part = part
        shapes = (self.schema.shape, (), (len(self.schema.attributes),), ())
        with self._all_or_nothing():
            for name, kind, shape in zip(ARRAYS, self._types, shapes, strict=True):
                self._files.append(_GrowingFile(part / f"{name}.npy", kind, shape))
            self._files[-1].append(np.zeros(1, dtype=np.int64))
        return self

    @property
    def population(self) -> int:
        """How many users have been written so far."""
        if not self._files:
            raise ValueError(
                f"nothing can be written to {self.folder} now: use the writer in a `with` block, "
                "and start again after an error in writing"
            )
        return self._files[-1].rows - 1

    def add(
        self,
        features: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        attributes: ArrayLike | Tensor | None = None,
    ) -> None:
        """Append one user with its samples; empty lists make a user without samples.

        A user whose data is refused is not written, and the writer can go on. For millions of
        users it is faster to `extend` by datasets of some thousand.
        """
        user = self.population
        try:
            checked = self._checked(features, labels, attributes)
        except ValueError as error:
            raise ValueError(f"user {user}: {error}") from error
        self._append(checked)

    def extend(self, data: FederatedDataset) -> None:
        """Append all users of a dataset, in memory or lazy.

        An error half way, e.g. a full disk or a damaged file, ends the writing.
        """
        differ = self.schema.difference(data.schema)
        if differ:
            raise ValueError(
                f"the population being written and the dataset are not of the same kind: {differ}; "
                "give both the same schema"
            )
        with self._all_or_nothing():
            for first in range(0, data.population, BLOCK):
                offsets = data.offsets[first : first + BLOCK + 1]
                rows = slice(int(offsets[0]), int(offsets[-1]))
                columns = (data.features[rows], data.labels[rows], data.attributes[rows])
                self._append(self._checked(*columns, offsets - offsets[0]))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._discard()

    def _checked(
        self,
        features: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        attributes: ArrayLike | Tensor | None,
        offsets: Tensor | None = None,
    ) -> FederatedDataset:
        """Users as they will be in the files, checked as data in memory is; one without offsets."""
        schema = self.schema
        columns = sample_columns(features, labels, attributes, schema, exact=True)
        x, y, a = (values.detach().cpu() for values in columns)
        if len(x) == 0:  # empty lists have no shape
            x, a = x.reshape(0, *schema.shape), a.new_zeros(0, len(schema.attributes))
        offsets = torch.tensor([0, len(x)]) if offsets is None else offsets
        kinds = [getattr(torch, kind) for kind in self._types]
        stored = x.to(kinds[0])
        if not stored.is_floating_point() and not bool((stored == x).all()):
            raise ValueError(
                f"features have values that {self._types[0]}, the file's type, does not hold; "
                "give the writer another features_dtype"
            )
        public = replace(schema, population=None)
        return FederatedDataset(stored, y.to(kinds[1]), a, offsets, public)

    def _append(self, data: FederatedDataset) -> None:
        offsets = self._samples + data.offsets[1:]
        with self._all_or_nothing():
            columns = (data.features, data.labels, data.attributes, offsets)
            for file, values in zip(self._files, columns, strict=True):
                file.append(values.numpy())
        self._samples += len(data)

    def _finish(self) -> None:
        users = self.population
        missing = (self.schema.population or 0) - users
        if users == 0 and missing <= 0:
            raise ValueError(f"no user was added to {self.folder}; add at least one")
        for first in range(0, missing, 2**20):
            self._files[-1].append(np.full(min(2**20, missing - first), self._samples))
        for file in self._files:
            file.finish()
        assert self._part is not None  # there are files, so there is their folder
        content = {"format": "fpfl population", "version": VERSION, "schema": self.schema.as_dict()}
        text = json.dumps(content, indent=1, ensure_ascii=False, default=lambda v: v.item())
        (self._part / "schema.json").write_text(text + "\n", encoding="utf-8")
        _refuse_existing(self.folder)
        self._part.rename(self.folder)
        self._part = None

    def _discard(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
        if self._part is not None:
            shutil.rmtree(self._part, ignore_errors=True)
            self._part = None

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        # Files that are not equally long any more must not be finished, whoever catches the error.
        try:
            yield
        except BaseException:
            self._discard()
            raise


class _GrowingFile:
    """An .npy file that rows are appended to."""

    def __init__(self, path: Path, kind: str, shape: tuple[int, ...]) -> None:
        self.rows, self._kind, self._shape = 0, np.dtype(kind), shape
        self._file = path.open("xb")
        self._header()

    def append(self, rows: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, dtype=self._kind).data)
        self.rows += len(rows)

    def finish(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        # Closing writes what is buffered: where that fails, the file is thrown away anyway.
        with suppress(OSError):
            self._file.close()

    def _header(self) -> None:
        # NumPy leaves room for the first axis to grow: the header stays as long as it was.
        descr, shape = npy.dtype_to_descr(self._kind), (self.rows, *self._shape)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} is there already; name another folder, or remove it first")


def save_population(data: FederatedDataset, folder: str | Path) -> Path:
    """Write a dataset to a new population folder, its features in the type they have."""
    kind = str(data.features.dtype).removeprefix("torch.")
    with PopulationWriter(folder, data.schema, kind) as writer:
        writer.extend(data)
    return Path(folder)


def open_population(folder: str | Path) -> FederatedDataset:
    """Open a population folder: a lazy dataset of any size, at once.

    Shapes and types are checked; the samples are read when they are used. The files must stay as
    they are as long as the dataset is in use, and its tensors must not be written to.
    """
    path = Path(folder)
    names = ("schema.json", *(f"{name}.npy" for name in ARRAYS))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} is no population folder: it lacks {', '.join(missing)}; "
            "FederatedDataset.save and fpfl.data.PopulationWriter write one"
        )
    schema = _read_schema(path / "schema.json")
    arrays = {name: _mapped(path / f"{name}.npy") for name in ARRAYS}
    offsets = arrays["offsets"]
    good = offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 1
    if not good or offsets[0] != 0 or offsets[-1] < 0:
        raise ValueError(
            f"{path / 'offsets.npy'} has {offsets.dtype} values of shape {offsets.shape}; expected "
            "int64 values that rise from 0 to the number of samples, one more than there are users"
        )
    n, users = int(offsets[-1]), len(offsets) - 1
    if schema.population is not None and schema.population > users:
        raise ValueError(
            f"{path / 'offsets.npy'} has {users} users; schema.json declares {schema.population}"
        )
    labels = ("float32", "float64") if schema.classes is None else ("int64",)
    expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "features": ((n, *schema.shape), FEATURES),
        "labels": ((n,), labels),
        "attributes": ((n, len(schema.attributes)), ("int64",)),
    }
    for name, (shape, kinds) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype.name not in kinds or not array.dtype.isnative:
            raise ValueError(
                f"{path / name}.npy has {array.dtype} values of shape {array.shape}; schema.json "
                f"and the {n} samples of offsets.npy go with {' or '.join(kinds)} values of shape "
                f"{shape}"
            )
    x, y, a, k = (_tensor(arrays[name]) for name in ARRAYS)
    return FederatedDataset(x, y, a, k, schema, lazy=True)


def _read_schema(path: Path) -> Schema:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']}, this fpfl reads {VERSION}")
        return Schema.from_dict(content["schema"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"{path} is not the schema of a population: {what}") from error


def _mapped(path: Path) -> np.memmap[Any, Any]:
    try:
        # Read-only: a private writable mapping may not be larger than the machine's memory.
        array = npy.open_memmap(path, mode="r")
    except Exception as error:  # there is no telling what a damaged header raises
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be mapped as a NumPy array ({reason}); it may be cut short or damaged: "
            "write the population again"
        ) from error
    size, used = path.stat().st_size, array.offset + array.nbytes
    if size != used or not array.flags.c_contiguous:
        raise ValueError(
            f"{path} has {size} bytes; its header goes with {used}, in C order: write the "
            "population again"
        )
    return array


def _tensor(array: NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        # Nobody writes to lazy data: whoever uses samples gathers, and so copies, them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
