"""Counting: what every held-out user sends, read and computed some users at a time.

Nothing here raises or logs because of what the data is: a user with a sample that is broken (not
finite, not what the schema declares, or too much for the model) sends zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.data.federated import FederatedDataset
from fpfl.heldout.cells import Cells
from fpfl.users import task
from fpfl.users.company import Outputs
from fpfl.users.packing import Ints

_AT_ONCE = 2**16
"""Samples, or users, that are counted together; one user with more is by itself."""
_BATCH = 8192
"""Samples that are read and go through the model together."""


def user_counts(
    model: nn.Module, data: FederatedDataset, cells: Cells, bound: float
) -> Iterator[Tensor]:
    """Count the users' samples, (users, cells) at a time; users without samples are left out.

    A user's counts are scaled by min(1, B/n^k): nobody weighs more than B samples, and how the
    model does on them has no influence on the weight, so a rate is not bent by it.
    """
    outputs = Outputs(model, data.schema)
    for first, last in _chunks(data.offsets.numpy()):
        starts, sizes = data.rows(np.arange(first, last), strict=False)
        for some in _runs(starts, sizes):
            sizes_of_run = sizes[some]
            place = slice(int(starts[some][0]), int(starts[some][0] + sizes_of_run.sum()))
            yield _counted(outputs, data, place, torch.from_numpy(sizes_of_run), cells, bound)


def _runs(starts: Ints, sizes: Ints) -> Iterator[Ints]:
    """Users with samples whose samples stand one after the other, as their places.

    All of them are one run, but where a lazy population's offsets are damaged.
    """
    there = np.flatnonzero(sizes)
    ends = (starts + sizes)[there]
    breaks = np.flatnonzero(starts[there][1:] != ends[:-1]) + 1
    yield from (run for run in np.split(there, breaks) if len(run))


def _chunks(offsets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[tuple[int, int]]:
    """Cut the users into runs of few samples and few users."""
    first, users = 0, len(offsets) - 1
    while first < users:
        room = int(np.searchsorted(offsets, offsets[first] + _AT_ONCE, side="right")) - 1
        last = min(max(room, first + 1), first + _AT_ONCE, users)
        yield first, last
        first = last


def _counted(
    outputs: Outputs,
    data: FederatedDataset,
    place: slice,
    sizes: Tensor,
    cells: Cells,
    bound: float,
) -> Tensor:
    """The counts of users with the given numbers of samples, one after the other in ``place``."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    labels, attributes = data.labels[place].cpu(), data.attributes[place].cpu()
    kind = torch.float64 if data.schema.classes is None else torch.int64
    predicted, sound = _predicted(outputs, data, place, sizes)
    sound &= cells.valid(labels, attributes)
    # What is not sound may be any number, and is counted as nothing.
    predicted, labels = (values.masked_fill(~sound, 0).to(kind) for values in (predicted, labels))
    counts = cells.count(predicted, labels, attributes, owner)
    scale = (bound / sizes.double()).clamp(max=1.0)
    broken = torch.zeros(len(sizes), dtype=torch.bool)
    broken[owner[~sound]] = True
    return (counts * scale.unsqueeze(1)).masked_fill(broken.unsqueeze(1), 0.0)


def _predicted(
    outputs: Outputs, data: FederatedDataset, place: slice, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Hard predictions on samples, and which of them are of finite features and no NaN."""
    features = data.features[place]
    if not outputs.alone(data.input_dtype(outputs.dtype)):
        try:
            return _outputs(outputs, features, data)
        except Exception:  # whose sample it was must not be known: that user sends zero
            pass
    parts = [_or_nothing(outputs, part, data) for part in torch.split(features, sizes.tolist())]
    predicted, sound = zip(*parts, strict=True)
    return torch.cat(predicted), torch.cat(sound)


def _or_nothing(
    outputs: Outputs, features: Tensor, data: FederatedDataset
) -> tuple[Tensor, Tensor]:
    try:
        return _outputs(outputs, features, data)
    except Exception:
        return torch.zeros(len(features)), torch.zeros(len(features), dtype=torch.bool)


def _outputs(outputs: Outputs, features: Tensor, data: FederatedDataset) -> tuple[Tensor, Tensor]:
    dtype = data.input_dtype(outputs.dtype)
    predicted, sound = [], []
    pieces = torch.split(features, len(features) if outputs.alone(dtype) else _BATCH)
    for piece in pieces:
        # A copy in any case: a model that works in place must not write to a mapped file.
        inputs = piece.to(outputs.device, dtype, copy=True)
        finite = inputs.isfinite().flatten(1).all(dim=1)
        output = outputs(inputs)
        finite &= ~output.isnan().reshape(len(inputs), -1).any(dim=1)
        predicted.append(task.predictions(output, data.schema).cpu())
        sound.append(finite.cpu())
    return torch.cat(predicted), torch.cat(sound)
