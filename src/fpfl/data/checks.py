"""What a federated dataset refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpfl.data.federated import FederatedDataset

_LOCK = Lock()
_asked = 0


@contextmanager
def checked_by_user() -> Iterator[None]:
    """Make datasets in here whatever values they hold: who computes looks at them user by user.

    On a machine with several users an error about one of them would take the others' data away
    with it, and change what they send. It holds for the whole process, since whoever reads may do
    so in threads.
    """
    global _asked
    with _LOCK:
        _asked += 1
    try:
        yield
    finally:
        with _LOCK:
            _asked -= 1


def refusing() -> bool:
    """Whether a value that is not what was declared is an error."""
    return not _asked


def check_shapes(data: FederatedDataset) -> None:
    """Refuse arrays that do not go together; of lazy data nothing but shapes is looked at."""
    schema, n = data.schema, len(data.features)
    if tuple(data.features.shape[1:]) != schema.shape:
        raise ValueError(
            f"features have shape {tuple(data.features.shape)}; the schema declares samples of "
            f"shape {schema.shape}"
        )
    if data.labels.shape != (n,):
        raise ValueError(
            f"labels have shape {tuple(data.labels.shape)}; expected ({n},), one for each sample"
        )
    if data.attributes.shape != (n, len(schema.attributes)):
        raise ValueError(
            f"attribute codes have shape {tuple(data.attributes.shape)}; expected "
            f"({n}, {len(schema.attributes)}): one row for each sample, one column for each "
            f"declared attribute {[a.name for a in schema.attributes]}"
        )
    offsets = data.offsets
    good = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == n
    if not good or (not data.lazy and bool((offsets.diff() < 0).any())):
        raise ValueError(
            f"offsets must rise from 0 to the number of samples {n} over at least one user"
        )
    if schema.population is not None and schema.population > data.population:
        raise ValueError(
            f"there are {data.population} users; the schema declares {schema.population}: those "
            "without samples are users, too (FederatedDataset.from_samples adds them)"
        )


def check_values(data: FederatedDataset) -> None:
    """Refuse values that the schema does not declare: all samples are read."""
    schema, n = data.schema, len(data.features)
    if n and data.features.is_floating_point():
        bad = ~data.features.isfinite().reshape(n, -1).all(dim=1)
        if bool(bad.any()):
            raise ValueError(
                f"{int(bad.sum())} samples have NaN or infinite features (the first is sample "
                f"{int(bad.nonzero()[0])}); fill or drop them first"
            )
    if schema.classes is not None:
        low, high, what = 0.0, float(schema.classes - 1), f"classes 0 to {schema.classes - 1}"
    else:
        assert schema.label_range is not None  # the schema checked it
        (low, high), what = schema.label_range, f"the range {schema.label_range}"
    if n and not bool(((data.labels >= low) & (data.labels <= high)).all()):
        raise ValueError(
            f"labels run from {float(data.labels.min()):g} to {float(data.labels.max()):g}; the "
            f"schema declares {what}"
        )
    for column, attribute in enumerate(schema.attributes):
        attribute.check_codes(data.attributes[:, column])
