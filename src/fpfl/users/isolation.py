r"""Does a user's vector keep its bits in any company? Tried before a private run begins.

What a user sends is to be a function of that user alone. That is so by construction but for one
thing: a kernel, called with a fixed shape, must compute a row the same way wherever it stands and
whoever stands beside it. This is known of no kernel by contract, so it is tried: made-up users of
many sizes are computed on the run's device, with its model, shapes and precision, all together, in
parts and by themselves, and every bit must be the same. Where one is not, the run computes every
user by itself: slower, and right with any kernel that gives the same for the same call.

Models with layers whose products are torch's own (recurrent ones, attention) are not even tried:
their widths are not filled up (`fpfl.users.steady`), and bits were seen to depend on the company.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.totals import Weights
from fpfl.users import task
from fpfl.users.dispatch import made_up_batch
from fpfl.users.engine import UNITS, CohortEngine
from fpfl.users.flat import FlatModel
from fpfl.users.graphs import Recording, described
from fpfl.users.packing import Ints
from fpfl.users.passes import LayerPass, Objective, Pass
from fpfl.users.precision import THREADS, computing
from fpfl.users.steady import in_tiles, steady, tile_for

SAME_ROWS = 8
"""About so many rows are tried in all places of a tile."""

CELLS = (1, 3, 40)
"""Sizes of cells that are tried in all places of a call; they need no padding."""

SIZES = (1, 1, 2, 1, 3, 5, 2, 9, 1, 4, 14, 2, 1, 33, 6, 70)
"""Samples of the made-up users: few and many, next to each other."""

ALONE_TOO = (0, 5, 10, 13, 15)
"""Those who are computed by themselves, too."""

ALONE = "every user is computed alone in this run, which is slower"
REFUSED = (
    "on this device a user's numbers depend, in their last bits, on who else is computed with "
    f"them: {ALONE}"
)
UNKNOWN = (
    "the model has layers whose numbers may depend, in their last bits, on who else is computed "
    f"with a user (recurrent ones, attention, or parameters used by hand): {ALONE}"
)
"""What a run says whose fast way was refused."""


def checked(engine: CohortEngine) -> tuple[CohortEngine, str | None]:
    """The engine, or one that computes users alone where the test fails, and why."""
    if engine.alone:
        return engine, None
    if not engine.layered:
        return replace(engine, alone=True), UNKNOWN
    if not _tried(engine):
        return replace(engine, alone=True), REFUSED
    return engine, None


_FOUND: dict[tuple[Any, ...], bool] = {}
"""What was found in this process, for runs that call the same kernels with the same shapes."""


def _tried(engine: CohortEngine) -> bool:
    module, w = engine.model.module, engine.model.vector()
    if not described(module):
        return keeps_bits(engine)
    key = (
        str(module), engine.model.shapes, module.training, w.dtype, str(w.device),
        engine.data.schema, engine.data.input_dtype(w.dtype), repr(engine.constraint),
        engine.layout, engine.surrogate, engine.local, engine.precision, engine.threads,
        torch.get_num_threads(), engine.tile, engine.memory, engine.samples_per_user,
        engine.factoring,
    )  # fmt: skip
    if key not in _FOUND:
        _FOUND[key] = keeps_bits(engine)
    return _FOUND[key]


def keeps_bits(engine: CohortEngine) -> bool:
    """Whether made-up samples and users have the same numbers in any company, to the last bit."""
    return _rows_keep_bits(engine) and _users_keep_bits(engine)


def _rows_keep_bits(engine: CohortEngine) -> bool:
    """Whether a row of a tile has the same outputs and gradients in any place and company.

    As they come out of the layers, before anything is rounded: in a mixture of rows, in another
    order of it, among zeros, and with one row in all places. On a GPU with its recorded graphs and
    without.
    """
    way, w = engine.fresh_pass(), _elsewhere(engine.model.vector())
    dtype = engine.data.input_dtype(w.dtype)
    with computing(engine.precision, w.device, engine.threads):
        if isinstance(way, LayerPass):
            return _tiles_keep_bits(engine, way, w, dtype)
        return all(_units_alike(engine, way, w, dtype, size) for size in CELLS)


def _tiles_keep_bits(engine: CohortEngine, way: LayerPass, w: Tensor, dtype: torch.dtype) -> bool:
    tile = way.tile or 1
    batch = made_up_batch(engine.model, way.objective, (tile,), dtype).to(w.device)
    order = torch.randperm(tile, generator=torch.Generator().manual_seed(4)).to(w.device)
    plain = way.record(w, batch).kept()
    if not engine.stochastic:
        way.use_graphs(engine.memory)
    for _ in range(3):  # by itself, while a graph is recorded, and replayed
        if not _alike(way.record(w, batch).kept(), plain):
            return False
    if not _alike(way.record(w, batch.chosen(order)).kept(), plain.chosen(order)):
        return False
    some = tile // 3
    among_zeros = batch.part(slice(0, some), tile)
    if not _alike(way.record(w, among_zeros).first(some), plain.first(some)):
        return False
    for row in range(0, tile, max(1, tile // SAME_ROWS)):
        everywhere = torch.full_like(order, row)
        if not _alike(way.record(w, batch.chosen(everywhere)), plain.chosen(everywhere)):
            return False
    return True


def _alike(one: Recording, other: Recording) -> bool:
    """Whether all numbers are the same, to the last bit."""
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _units_alike(engine: CohortEngine, way: Pass, w: Tensor, dtype: torch.dtype, size: int) -> bool:
    """Whether the same cell has the same gradients in all places of a call."""
    batch = made_up_batch(engine.model, way.objective, (size,) * UNITS, dtype).to(w.device)
    first = torch.arange(size, device=w.device).repeat(UNITS)
    gradients, output = way(w, batch.chosen(first))
    output = output.reshape(UNITS, -1)
    return all(
        torch.equal(each.nan_to_num(), each[:1].expand_as(each).nan_to_num())
        for each in (gradients, output)
    )


def _users_keep_bits(engine: CohortEngine) -> bool:
    """Whether made-up users have the same whole numbers together, in parts and by themselves."""
    trial = replace(engine, data=_made_up(engine))
    users = np.arange(len(SIZES))
    some = np.random.default_rng(0).permutation(users)[: len(users) // 2]
    w = _elsewhere(engine.model.vector())
    together = _rows(trial, w, users)
    for who in (some, np.setdiff1d(users, some), *(users[k : k + 1] for k in ALONE_TOO)):
        norms, total = _rows(trial, w, who)
        if not all(torch.equal(norms[k], together[0][k]) for k in norms):
            return False
        rest = _rows(trial, w, np.setdiff1d(users, who))
        if not torch.equal(together[1] - rest[1], total):
            return False
    return True


def _elsewhere(w: Tensor) -> Tensor:
    """Parameters near these: a layer that starts from zero would hide all before it."""
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return w + 0.5 * w.std(unbiased=False) * noise.to(w)


def _rows(engine: CohortEngine, w: Tensor, users: Ints) -> tuple[dict[int, Tensor], Tensor]:
    """The users' norms, and the sum of their vectors in whole numbers."""
    norms: dict[int, Tensor] = {}
    names = [name for name in engine.layout.shapes if name != "clipped"]
    total = torch.zeros(engine.layout.size, dtype=torch.int64, device=w.device)
    weights = None
    if engine.form == "one-gradient":
        rates, groups = len(engine.layout.rates), len(engine.layout.groups)
        slopes = torch.linspace(-1.0, 1.0, rates * groups).reshape(rates, groups).to(w)
        weights = Weights(slopes, slopes.new_full((rates,), 0.3), 0.2, 3.0)
    for rows in engine.statistics(w, users, key=1, weights=weights):
        each = rows.norms(names, 2)
        norms |= dict(zip(rows.users.tolist(), each.unbind(), strict=True))
        # As clipping would have it: nobody's numbers are larger than the step of rounding allows.
        sums, _ = rows.whole(names, 2.0**30 / each.clamp(min=1.0))
        for name, block in sums.items():
            total[engine.layout.slices[name]] += block
    return norms, total


def _made_up(engine: CohortEngine) -> FederatedDataset:
    """Samples that look like the schema's; nothing of the data."""
    schema, model = engine.data.schema, engine.model
    dtype = engine.data.input_dtype(model.vector().dtype)
    batch = made_up_batch(model, Objective(schema), SIZES, dtype)
    generator = torch.Generator().manual_seed(1)
    codes = [
        torch.randint(0, len(attribute.values), (sum(SIZES),), generator=generator)
        for attribute in schema.attributes
    ]
    attributes = torch.stack(codes, dim=1) if codes else torch.zeros(sum(SIZES), 0).long()
    labels = batch.labels
    if schema.classes is None and schema.label_range is not None:
        labels = labels.clamp(*schema.label_range)
    offsets = torch.tensor([0, *np.cumsum(SIZES)])
    plain = replace(schema, population=None)
    data = FederatedDataset(batch.features, labels, attributes, offsets, plain)
    return data.to(model.vector().device)


class Outputs:
    """A finished model's outputs on samples, a row's bits being its own.

    Parameters
    ----------
    model
        The model, in evaluation mode.
    schema
        What its samples look like.
    """

    def __init__(self, model: nn.Module, schema: Schema) -> None:
        self.module, self.schema = steady(model).eval(), schema
        parameter = next(model.parameters(), torch.zeros(()))
        self.device, self.dtype = parameter.device, parameter.dtype
        self._keeps: dict[torch.dtype, bool] = {}

    def alone(self, dtype: torch.dtype) -> bool:
        """Whether samples of different users must not be computed together."""
        if dtype not in self._keeps:
            with computing("float32", self.device, THREADS):
                self._keeps[dtype] = self._keeps_bits(dtype)
        return not self._keeps[dtype]

    def __call__(self, features: Tensor) -> Tensor:
        """The outputs of samples: of any users, or of one where they must be ``alone``."""
        tile = len(features) if self.alone(features.dtype) else tile_for(self.schema.shape)
        threads = None if self.alone(features.dtype) else THREADS
        with torch.no_grad(), computing("float32", self.device, threads):
            return in_tiles(self._call, features, tile)

    def _call(self, rows: Tensor) -> Tensor:
        return task.flatten_output(self.module(rows), self.schema)

    def _keeps_bits(self, dtype: torch.dtype) -> bool:
        """Whether made-up samples have the same outputs in any place and company."""
        tile = tile_for(self.schema.shape)
        flat = FlatModel.of(self.module)
        sizes = (2 * tile,)
        rows = made_up_batch(flat, Objective(self.schema), sizes, dtype).features.to(self.device)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        order = order.to(self.device)
        with torch.no_grad():
            plain = in_tiles(self._call, rows, tile)
            mixed = in_tiles(self._call, rows[order], tile)
            few = in_tiles(self._call, rows[order[:3]], tile)
            everywhere = [
                (in_tiles(self._call, rows[k].expand(tile, *rows.shape[1:]), tile), plain[k])
                for k in range(0, len(rows), max(1, len(rows) // SAME_ROWS))
            ]
        pairs = [(plain[order], mixed), (few, mixed[:3])]
        pairs += [(found, one.expand_as(found)) for found, one in everywhere]
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
