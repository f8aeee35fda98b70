"""Populations on disk: NumPy files, read lazily, so that a population need not fit in memory.

A population folder has what a `FederatedDataset` has: ``features.npy``, ``labels.npy``,
``attributes.npy`` and ``offsets.npy``, which NumPy alone opens, and ``schema.json``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.data.writer import ARRAYS, FEATURES, VERSION, PopulationWriter

__all__ = ["PopulationWriter", "open_population", "save_population"]


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
