"""Writers' digits in the HDF5 files of TensorFlow Federated (``fed_emnist_digitsonly_*.h5``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.data.femnist.source import CLASSES, SIDE, Part, Writer


@dataclass
class TffSource:
    """A pair of files: ``examples/<writer>/pixels`` and ``examples/<writer>/label`` in each.

    A file is open while it is read; one writer is in memory at a time.

    Parameters
    ----------
    train
        The file of the training part.
    test
        The file of the test part.
    title
        What the data is called.
    """

    train: Path
    test: Path
    title: str

    def names(self) -> list[str]:
        """Everybody with a digit in either file, in lexicographic order."""
        found: set[str] = set()
        for path in (self.train, self.test):
            with _examples(path) as examples:
                found |= {name for name in _keys(path, examples) if _datasets(path, examples, name)}
        return sorted(found)

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers of a file who have digits in it, one at a time, by their names' bytes."""
        path = self.train if part == "train" else self.test
        with _examples(path) as examples:
            for name in _keys(path, examples):
                datasets = _datasets(path, examples, name)
                if datasets is not None:
                    yield _writer(path, name, *datasets)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "TFF's .h5 files are read with h5py, which is not installed: "
            "pip install 'fpfl[femnist]'"
        ) from error
    return h5py


@contextmanager
def _examples(path: Path) -> Iterator[Any]:
    """The group of all writers, while the file is open."""
    h5py = _h5py()
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the path of an HDF5 file as TFF writes it")
    with _plainly(str(path)):
        file = h5py.File(path, "r")
    with file:
        with _plainly(str(path)):
            examples = file.get("examples")
        if not isinstance(examples, h5py.Group):
            raise ValueError(
                f"{path} has no group 'examples', which TFF's files have their writers in; "
                "give one of those files"
            )
        yield examples


@contextmanager
def _plainly(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # h5py has many kinds, and damage may raise any of them
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} cannot be read as HDF5 ({reason or type(error).__name__}); the file may be "
            "cut short, damaged or of another kind: get it again"
        ) from error


def _keys(path: Path, examples: Any) -> list[str]:
    with _plainly(str(path)):
        return list(examples)


def _datasets(path: Path, examples: Any, name: str) -> tuple[Any, Any] | None:
    """A writer's pixels and labels, not yet read; None for somebody without digits."""
    h5py, where = _h5py(), f"{path}, writer {name!r}"
    with _plainly(where):
        group = examples.get(name)
        inside: Any = group if isinstance(group, h5py.Group) else {}
        pixels, label = inside.get("pixels"), inside.get("label")
    for key, dataset in (("pixels", pixels), ("label", label)):
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError(f"{where}: there is no dataset {key!r}; expected 'pixels' and 'label'")
    with _plainly(where):
        types, shapes = (pixels.dtype, label.dtype), (pixels.shape, label.shape)
    n = shapes[0][0] if shapes[0] else 0
    if types[0] != np.float32 or shapes[0] != (n, SIDE, SIDE):
        raise ValueError(
            f"{where}: pixels has {types[0]} values of shape {shapes[0]}; expected float32 values "
            f"of shape (n, {SIDE}, {SIDE})"
        )
    if types[1] != np.int32 or shapes[1] is None or len(shapes[1]) != 1:
        raise ValueError(
            f"{where}: label has {types[1]} values of shape {shapes[1]}; expected int32 values of "
            "shape (n,)"
        )
    if shapes[1] != (n,):
        raise ValueError(
            f"{where}: there are {n} images in pixels and {shapes[1][0]} numbers in label; "
            "expected one for each image"
        )
    return (pixels, label) if n else None


def _writer(path: Path, name: str, pixels: Any, label: Any) -> Writer:
    where = f"{path}, writer {name!r}"
    with _plainly(where):
        images: NDArray[np.float32] = pixels[...]
        labels: NDArray[np.int32] = label[...]
    if not bool(((images >= 0) & (images <= 1)).all()):  # nor is NaN
        raise ValueError(
            f"{where}: pixels has values outside [0, 1] or NaN; expected 1 for the paper and 0 for "
            "the stroke"
        )
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise ValueError(
            f"{where}: labels run from {labels.min()} to {labels.max()}; expected digits from 0 to "
            f"{CLASSES - 1} (TFF's file of digits alone is fed_emnist_digitsonly)"
        )
    return Writer(name, np.rint(images * 255).astype(np.uint8), labels.astype(np.uint8))
