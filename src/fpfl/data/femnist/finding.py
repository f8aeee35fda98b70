"""Finding writers' digits: at a path, in the cache folder, on the network, or without any file.

The last are scikit-learn's bundled 8 × 8 images, enlarged, with made-up writers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fpfl.data.femnist.compact import CompactSource
from fpfl.data.femnist.leaf import LeafSource
from fpfl.data.femnist.source import SIDE, Part, Source, Writer
from fpfl.data.femnist.tff import TffSource
from fpfl.numerics.randomness import stream

WRITERS = 150
"""Made-up writers: twelve digits each on average."""

TEST = 10
"""Every tenth of a writer's digits is for testing."""

MARGIN = 2
"""Pixels of paper around an enlarged digit."""


class BundledDigits:
    """scikit-learn's 1,797 digits (Alpaydin and Kaynak, 1998) as a population of made-up writers.

    For trying things out where no file is: nobody wrote these digits in this company, so that
    users differ by their pens alone. Results on them say nothing about FEMNIST.

    Parameters
    ----------
    seed
        Deals the digits to writers.
    """

    title = "scikit-learn's digits, enlarged, made-up writers"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def names(self) -> list[str]:
        """Everybody, in lexicographic order."""
        return [f"writer{k:03d}" for k in range(WRITERS)]

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers, one at a time, in order."""
        pixels, labels = self._digits
        for k, name in enumerate(self.names()):
            mine = np.arange(k, len(labels), WRITERS)
            testing = np.arange(len(mine)) % TEST == TEST - 1
            chosen = mine[testing if part == "test" else ~testing]
            if len(chosen):
                yield Writer(name, pixels[chosen], labels[chosen])

    @cached_property
    def _digits(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "the bundled digits are scikit-learn's, which is not installed: "
                "pip install 'fpfl[femnist]', or give a file with --data"
            ) from error
        images, labels = load_digits(return_X_y=True)
        order = stream(self.seed, "partition").permutation(len(labels))
        strokes = images.reshape(-1, 8, 8)[order] / 16
        enlarge = _interpolation(8, SIDE - 2 * MARGIN)
        large = np.zeros((len(labels), SIDE, SIDE))
        large[:, MARGIN:-MARGIN, MARGIN:-MARGIN] = enlarge @ strokes @ enlarge.T
        return np.round(255 * (1.0 - large)).astype(np.uint8), labels[order].astype(np.uint8)


def _interpolation(small: int, large: int) -> NDArray[np.float64]:
    """Linear interpolation of a line of pixels to a longer one, as a matrix."""
    place = ((np.arange(large) + 0.5) * small / large - 0.5).clip(0, small - 1)
    return np.clip(1.0 - np.abs(place[:, None] - np.arange(small)), 0.0, None)


URL = "https://storage.googleapis.com/tff-datasets-public/fed_emnist_digitsonly.tar.bz2"
SHA256 = "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b"
"""Of the archive at `URL`."""

SIZES = {
    "fed_emnist_digitsonly_train.h5": 108_270_697,
    "fed_emnist_digitsonly_test.h5": 34_813_048,
}
"""The archive's two files, in bytes."""

BUNDLED = "digits"
"""The name of the digits that need no file."""

TIMEOUT = 30.0
"""So many seconds a server may be silent."""


def named_digits(name: str | None) -> Source:
    """What ``--data`` names: ``digits`` (also by default), ``femnist``, or a path."""
    if name in (None, BUNDLED):
        return BundledDigits()
    return find_digits(None if name == "femnist" else name)


def find_digits(
    where: str | Path | None = None, *, cache: Path | None = None, download: bool = True
) -> Source:
    """Find writers' digits.

    Parameters
    ----------
    where
        A compact ``.npz``; a file of a pair ``*_train.h5`` and ``*_test.h5`` in TFF's layout; a
        folder with one such pair, or with LEAF's ``train`` and ``test``. Without it, FEMNIST's
        digits are looked for in the cache folder and then downloaded to it.
    cache
        The cache folder, whose sub-folder ``femnist`` is used: ``$FPFL_CACHE`` by default, or
        ``fpfl`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    download
        Whether the network may be used.
    """
    if where is not None:
        return _at(Path(where))
    folder = (_cache() if cache is None else Path(cache)) / "femnist"
    try:
        _check_sizes(folder)
        return _in_folder(folder)
    except ValueError as error:
        not_there = str(error)
    try:
        if not download:
            raise ValueError("it was not allowed (download=False)")
        _download(folder)
    except (OSError, ValueError, EOFError, HTTPException, tarfile.TarError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            "there are no FEMNIST digits here; three ways lead to them. (1) A path with --data: "
            "none was given; it may be a compact .npz, a pair *_train.h5 and *_test.h5 of TFF, or "
            f"LEAF's folder. (2) The cache folder: {not_there}; put "
            f"{' and '.join(SIZES)} there. (3) A machine with a network, from which those can be "
            f"copied: here the download of {URL} failed: {reason}"
        ) from error
    return _in_folder(folder)


def _check_sizes(folder: Path) -> None:
    """Refuse files of the archive that are not whole: a copy may have been cut short."""
    for name, size in SIZES.items():
        path = folder / name
        if path.exists() and path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; expected {size}")


def _cache() -> Path:
    if os.environ.get("FPFL_CACHE"):
        return Path(os.environ["FPFL_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fpfl"


def _at(where: Path) -> Source:
    if where.is_dir():
        return _in_folder(where)
    if not where.exists():
        raise ValueError(
            f"{where} is not there; expected a compact .npz, an .h5 file of TFF, or a folder with "
            "TFF's or LEAF's files"
        )
    if where.suffix == ".npz":
        return CompactSource(where)
    for end in ("_train.h5", "_test.h5"):
        if where.name.endswith(end):
            stem = where.name.removesuffix(end)
            return _pair(where.parent, stem, where.name)
    raise ValueError(
        f"{where} is no file of digits by its name; expected one that ends in .npz, _train.h5 or "
        "_test.h5"
    )


def _in_folder(folder: Path) -> Source:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    ends = ("_train.h5", "_test.h5")
    train, test = ({p.name.removesuffix(e) for p in folder.glob(f"*{e}")} for e in ends)
    pairs = sorted(train & test)
    leaf = all(any((folder / part).glob("*.json")) for part in ("train", "test"))
    if len(pairs) + leaf > 1:
        found = [*(f"{stem}_*.h5" for stem in pairs), *(["train/*.json"] if leaf else [])]
        raise ValueError(
            f"{folder} has more than one set of digits ({', '.join(found)}); name one of the .h5 "
            "files, or move the others"
        )
    if leaf:
        return LeafSource(folder)
    if pairs:
        return _pair(folder, pairs[0], folder.resolve().name)
    halves = "".join(f"; {stem}_*.h5 is half a pair" for stem in sorted(train | test))
    raise ValueError(
        f"{folder} has no pair *_train.h5 and *_test.h5, nor .json files in train and in "
        f"test{halves}"
    )


def _pair(folder: Path, stem: str, called: str) -> TffSource:
    train, test = paths = (folder / f"{stem}_train.h5", folder / f"{stem}_test.h5")
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{path} is not there; training and test files go together: put it beside the other"
            )
    title = f"digits of {called}"
    if all(SIZES.get(path.name) == path.stat().st_size for path in paths):
        title = "FEMNIST digits (TFF)"
    elif stem == "fed_nist_digits":  # other data, never to be called FEMNIST
        title = "NIST digits, 836 writers"
    return TffSource(train, test, title)


def _download(folder: Path) -> None:
    """Put the archive's two files into a folder; nothing else stays there, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".download-", dir=folder))
    try:
        _fetch(part / "archive")
        _unpack(part / "archive", part)
        for name in SIZES:
            (part / name).replace(folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetch(path: Path) -> None:
    digest, size, most = hashlib.sha256(), 0, sum(SIZES.values()) + 2**20
    with urllib.request.urlopen(URL, timeout=TIMEOUT) as answer, path.open("xb") as file:
        while block := answer.read(2**20):
            size += len(block)
            if size > most:  # what is packed is not larger than its content
                raise ValueError(f"it has more than {most} bytes; expected the archive")
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"the {size} bytes that came have the sha256 {digest.hexdigest()}; expected {SHA256} "
            "(the download was cut short, or the file is another)"
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Take the two files out of an archive, by their names and sizes, and nothing else."""
    with tarfile.open(archive, "r:bz2") as tar:
        for member in tar:
            name = Path(member.name).name
            content = tar.extractfile(member) if name in SIZES and member.isfile() else None
            if content is not None:
                with content, (folder / name).open("xb") as file:
                    shutil.copyfileobj(content, file, 2**20)
    for name, size in SIZES.items():
        path = folder / name
        there = path.stat().st_size if path.exists() else 0
        if there != size:
            raise ValueError(f"{name} in the archive has {there} bytes; expected {size}")
