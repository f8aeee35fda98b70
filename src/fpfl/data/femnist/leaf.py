"""Writers' digits in the JSON files of LEAF's FEMNIST, read as streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
from numpy.typing import NDArray

from fpfl.data.femnist.source import CLASSES, SIDE, Part, Writer

LEAF_CLASSES = 62
"""Digits, capital letters and small letters; the digits come first."""

_ENDS = {("users", "end_array"), ("num_samples", "end_array"), ("user_data", "start_map")}


@dataclass
class LeafSource:
    """LEAF's folder: ``train/*.json`` and ``test/*.json``, each file with some of the users.

    Letters are left out, and who wrote nothing else with them. One user is in memory at a time.
    Files are read faster where ``users`` and ``num_samples`` come before ``user_data``, as LEAF
    writes them. Reading JSON is slow in any case: ``fpfl data femnist --convert`` makes a file
    that is not.

    Parameters
    ----------
    folder
        The folder that has ``train`` and ``test``.
    title
        What the data is called.
    """

    folder: Path
    title: str = "digits in LEAF's layout"
    _known: dict[Part, list[str]] = field(default_factory=dict, init=False, repr=False)

    def names(self) -> list[str]:
        """Everybody with a digit in either part, in lexicographic order.

        Reads what has not yet been read to its end: who has digits is seen there alone.
        """
        parts: tuple[Part, ...] = get_args(Part)
        for part in parts:
            if part not in self._known:
                for _ in self.read(part):
                    pass
        return sorted({name for part in parts for name in self._known[part]})

    def read(self, part: Part) -> Iterator[Writer]:
        """The writers of a part who have digits in it, one at a time, file by file."""
        folder, names = self.folder / part, []
        files = sorted(folder.glob("*.json"))
        if not files:
            raise ValueError(
                f"{folder} has no .json files; expected the files that LEAF writes there"
            )
        seen: dict[str, Path] = {}
        for path in files:
            for name, content in _users(path, seen):
                writer = _digits(f"{path}, user {name!r}", name, content)
                if len(writer.labels):
                    names.append(name)
                    yield writer
        self._known[part] = names


def _ijson() -> Any:
    try:
        import ijson
    except ImportError as error:
        raise ImportError(
            "LEAF's JSON files are read with ijson, which is not installed: "
            "pip install 'fpfl[femnist]'"
        ) from error
    return ijson


def _users(path: Path, seen: dict[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every user of a file with what is said of it, checked against the file's lists."""
    ijson = _ijson()
    with path.open("rb") as file:
        sizes = _listed(path, file)
        file.seek(0)
        found = ijson.kvitems(file, "user_data", use_float=True)
        missing, name = set(sizes), None
        while True:
            with _plainly(path, name):
                name, content = next(found, (None, None))
            if name is None:
                break
            where = f"{path}, user {name!r}"
            if name in seen:
                files = "this file" if seen[name] == path else f"{seen[name]} as well"
                raise ValueError(
                    f"{where}: the same user is in {files}; expected each user once in a part"
                )
            if name not in sizes:
                raise ValueError(f"{where}: it is in user_data and not in the list users")
            if not isinstance(content, dict) or not all(
                isinstance(content.get(key), list) for key in ("x", "y")
            ):
                raise ValueError(f"{where}: expected a list 'x' and a list 'y'")
            if len(content["y"]) != sizes[name]:
                raise ValueError(
                    f"{where}: there are {len(content['y'])} labels in y; num_samples has "
                    f"{sizes[name]}"
                )
            seen[name] = path
            missing.discard(name)
            yield name, content
            del content  # before the next one is made
    if missing:
        raise ValueError(
            f"{path}, user {min(missing)!r}: it is in the list users and not in user_data; so are "
            f"{len(missing)} of {len(sizes)} users"
        )


def _listed(path: Path, file: IO[bytes]) -> dict[str, int]:
    """The numbers of samples by user, from the lists ``users`` and ``num_samples``."""
    lists: dict[str, list[Any]] = {}
    data = False
    with _plainly(path):
        for prefix, event, value in _ijson().parse(file, use_float=True):
            if prefix in ("users", "num_samples") and event == "start_array":
                lists[prefix] = []
            elif prefix in ("users.item", "num_samples.item"):
                lists.get(prefix.removesuffix(".item"), []).append(value)
            elif prefix == "user_data" and event == "start_map":
                data = True
            if data and len(lists) == 2 and (prefix, event) in _ENDS:
                break  # the samples need not be gone through twice
    lacking = [key for key in ("users", "num_samples") if key not in lists]
    lacking += [] if data else ["user_data"]
    if lacking:
        raise ValueError(
            f"{path} lacks {', '.join(lacking)}; expected LEAF's JSON: an object with the lists "
            "'users' and 'num_samples' and the object 'user_data'"
        )
    users, sizes = lists["users"], lists["num_samples"]
    if not all(isinstance(user, str) for user in users):
        raise ValueError(f"{path}: the list users has values that are no strings")
    if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) != len(users):
        raise ValueError(
            f"{path}: expected a whole number in num_samples for each of the {len(users)} users; "
            f"there are {len(sizes)} values"
        )
    found: dict[str, int] = {}
    for user, size in zip(users, sizes, strict=True):
        if user in found:
            raise ValueError(f"{path}, user {user!r}: the list users has it twice")
        found[user] = size
    return found


@contextmanager
def _plainly(path: Path, last: str | None = None) -> Iterator[None]:
    after = "" if last is None else f" after user {last!r}"
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # ijson's backends each have kinds of their own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read as JSON{after} ({reason or type(error).__name__}); it may be "
            "cut short or damaged: make it again with LEAF"
        ) from error


def _digits(where: str, name: str, content: dict[str, Any]) -> Writer:
    """The digits among a user's samples; all samples are checked."""
    rows, labels = content["x"], content["y"]
    if len(rows) != len(labels):
        raise ValueError(
            f"{where}: there are {len(rows)} images in x and {len(labels)} labels in y; expected "
            "one for each image"
        )
    strange = [y for y in labels if type(y) is not int or not 0 <= y < LEAF_CLASSES]
    if strange:
        raise ValueError(
            f"{where}: y has {_short(strange[0])}; expected whole numbers from 0 to "
            f"{LEAF_CLASSES - 1}"
        )
    images = np.empty((len(rows), SIDE * SIDE), dtype=np.uint8)
    for number, row in enumerate(rows):
        images[number] = _image(f"{where}, image {number}", row)
    kept = np.array(labels, dtype=np.uint8)
    digits = kept < CLASSES
    return Writer(name, images[digits].reshape(-1, SIDE, SIDE), kept[digits])


def _image(where: str, row: Any) -> NDArray[np.uint8]:
    # NumPy would take true for 1, and "0.5" for 0.5.
    if not isinstance(row, list) or not set(map(type, row)) <= {float, int}:
        raise ValueError(f"{where}: expected a list of {SIDE * SIDE} numbers; got {_short(row)}")
    if len(row) != SIDE * SIDE:
        raise ValueError(f"{where}: there are {len(row)} values; expected {SIDE * SIDE}")
    values = np.array(row)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError(
            f"{where}: there are values outside 0 to 1; expected 1 for the paper, 0 for the "
            "stroke and what is between"
        )
    image: NDArray[np.uint8] = np.rint(values * 255).astype(np.uint8)
    return image


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
