r"""Which pass a model gets, and what rows and users cost with it.

Costs are rough on purpose: only speed and memory depend on them. They are read off the model and
the schema, never off data.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpfl.users.factored import WIDEST, WIDEST_INPUT
from fpfl.users.flat import FlatModel
from fpfl.users.graphs import described
from fpfl.users.layers import LayerError, Recorder
from fpfl.users.packing import Batch, Cells, pack
from fpfl.users.passes import LayerPass, Objective, Pass, VmapPass, known_layers

TOLERANCE = 1e-3
"""How far the two passes may differ on made-up samples, against a parameter's gradient: far above
rounding, far below any mistake about what a layer does."""
FACTORED = (12, 64)
"""Users with up to so many samples are factored wherever they can be, since two ways in one cohort
cost more than either; those with more than the other number have their gradients written down."""
ROUNDING = 1e-6
"""Gradients below this part of the largest are zero that was rounded."""
TILE = 8
"""Rows that are computed together here: the made-up samples are more, and fill no second tile."""
REMEMBERED = 64
"""So many models' answers are kept in a process."""


def chosen_pass(
    model: FlatModel,
    objective: Objective,
    dtype: torch.dtype,
    tile: int | None = None,
    units: int | None = None,
) -> Pass:
    """The pass over layers where it is known to be right for this model, ``vmap`` otherwise.

    Knowing the layers is not enough: a model may use a layer's weight without calling it, or mix
    the order of samples in between. So both passes are run on made-up samples, and must agree; the
    engine looks at the order once more on the first real ones, where no privacy is claimed.
    """
    recorders = known_layers(model.module)
    if not _agreed(model, objective, recorders, dtype, tile):
        return VmapPass(model, objective, units)
    return LayerPass(model, objective, recorders, tile)


_FOUND: dict[tuple[Any, ...], bool] = {}


def _agreed(
    model: FlatModel,
    objective: Objective,
    recorders: dict[str, type[Recorder]],
    dtype: torch.dtype,
    tile: int | None,
) -> bool:
    """`agree`, asked once in a process for models that are the same by what they say.

    What these do does not go by the number of rows, so they are tried with few.
    """
    if not described(model.module):
        return agree(model, objective, recorders, dtype, tile)
    real = model.vector().dtype
    key = (str(model.module), model.names, model.shapes, real, objective, dtype)
    if key not in _FOUND:
        if len(_FOUND) >= REMEMBERED:
            _FOUND.clear()
        _FOUND[key] = agree(model, objective, recorders, dtype, TILE)
    return _FOUND[key]


def agree(
    model: FlatModel,
    objective: Objective,
    recorders: dict[str, type[Recorder]],
    dtype: torch.dtype,
    tile: int | None = None,
) -> bool:
    """Whether both passes give the same gradients for users of one, three and seven samples.

    Not at the initial parameters alone, where a layer that starts from zero hides all before it;
    and parameter by parameter, so that a large gradient does not hide a small one. Raises a
    ValueError for a model that not even `VmapPass` can do.
    """
    module = copy.deepcopy(model.module).cpu().eval()  # without dropout, whose masks would differ
    local = FlatModel.of(module)
    if local.names != model.names:
        return False
    batch = made_up_batch(local, objective, (1, 3, 7), dtype)
    reference, layers = VmapPass(local, objective), LayerPass(local, objective, recorders, tile)
    generator = torch.Generator().manual_seed(1)
    for spread in (0.0, 0.3, 1.0):
        w = local.vector()
        for place in local.places.values():
            # By the parameter's own scale: a deep network would overflow with a larger one.
            scale = float(w[place].square().mean().sqrt()) or 0.1
            noise = torch.randn(w[place].shape, generator=generator).to(w)
            w[place] += spread * scale * noise
        try:
            wanted, _ = reference(w, batch)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                "the model cannot be computed for several users at once (torch.func.vmap): "
                f"{_advice(local.module, reason)}. ({reason})"
            ) from error
        if not recorders:
            return False
        try:
            given, _ = layers(w, batch)
            if not layers.in_order(w, batch):
                return False
        except LayerError:
            return False
        least = ROUNDING * float(wanted.abs().max())
        for place in local.places.values():
            off = float((given - wanted)[:, :, place].abs().max())
            if not off <= TOLERANCE * float(wanted[:, :, place].abs().max()) + least:
                return False
    return True


def _advice(module: nn.Module, reason: str) -> str:
    """What to do about a model that vmap cannot do."""
    if "nested" in reason and any(isinstance(m, nn.TransformerEncoder) for m in module.modules()):
        return "construct nn.TransformerEncoder with enable_nested_tensor=False"
    packed = ".item()" in reason or "_pack_padded" in reason
    if packed and any(isinstance(m, nn.RNNBase) for m in module.modules()):
        return (
            "sequences cannot be packed (pack_padded_sequence), and .item() cannot be called; let "
            "the layer read the padding, and take its state at the last word: "
            "states[torch.arange(len(tokens)), last]"
        )
    return (
        "use layers that vmap knows, without custom autograd functions, checkpointing, boolean "
        "indexing or .item() in its forward"
    )


def made_up_batch(
    model: FlatModel, objective: Objective, sizes: tuple[int, ...], dtype: torch.dtype
) -> Batch:
    """Samples that look like the schema's, of users with the given sizes.

    Some features are zero, some large, and two samples are alike, as it is with real ones.
    """
    schema, n = objective.schema, sum(sizes)
    real = model.vector().dtype
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        features = torch.randn(n, *schema.shape, generator=generator)
        features = features * (torch.rand(features.shape, generator=generator) < 0.7)
        features = features * 4.0 ** torch.randn((n, *[1] * len(schema.shape)), generator=generator)
        features[-1] = features[0]
        features = features.to(dtype)
    else:
        features = _indices(model, (n, *schema.shape), dtype, generator)
    if schema.classes is None:
        low, high = schema.label_range or (0.0, 1.0)
        labels = low + (high - low) * torch.rand(n, generator=generator, dtype=real)
    else:
        labels = torch.randint(0, schema.classes, (n,), generator=generator)
    counts = np.array(sizes)
    packing = pack(Cells.of_users(np.cumsum(counts) - counts, counts), steps=8)
    samples, _, cell = packing.places(torch.device("cpu"))
    conditions = [rate.condition(labels).to(real) for rate in objective.rates]
    return Batch(
        packing,
        samples,
        features,
        labels,
        torch.ones(n, dtype=real),
        torch.stack(conditions) if conditions else torch.zeros(0, n, dtype=real),
        cell,
    )


def _indices(
    model: FlatModel, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Whole numbers that the model takes: as many kinds as its tables have, or few, or zero."""
    if model.vector().device.type == "cpu":  # an index out of range would end a GPU's process
        tables = [m.num_embeddings for m in model.module.modules() if isinstance(m, nn.Embedding)]
        for kinds in (min(tables, default=2), 2):
            values = torch.randint(0, kinds, shape, generator=generator).to(dtype)
            try:
                with torch.no_grad(), torch.random.fork_rng():
                    model(model.vector(), values)
            except (IndexError, RuntimeError, ValueError):
                continue  # a column has fewer kinds than that
            return values
    return torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True)
class Costs:
    """What things cost with a model on its device.

    Parameters
    ----------
    row_bytes, cell_bytes
        Memory of a row, and of a cell whose gradients are written down.
    pair_bytes
        Memory of a pair of samples where gradients are factored.
    few
        Users with up to so many samples had better not have their gradients written down; 0 where
        the model does not allow that.
    """

    row_bytes: float
    cell_bytes: float
    pair_bytes: float
    few: int

    @classmethod
    def of(cls, model: FlatModel, way: Pass, dtype: torch.dtype) -> Costs:
        """Try the model on made-up samples and count."""
        objective, device = way.objective, model.vector().device
        w = model.vector().requires_grad_()
        row, two = (made_up_batch(model, objective, (n,), dtype).to(device) for n in (1, 2))
        with _Saved() as one, torch.random.fork_rng():
            model(w, row.features)
        with _Saved() as both, torch.random.fork_rng():
            model(w, two.features)
        few, widest = 0, 0
        row_bytes = way.row_bytes(w.detach(), row, both.bytes - one.bytes)
        if isinstance(way, LayerPass) and way.factorable(way.record(w.detach(), row)):
            factors, _, _ = way.factors(w.detach(), row)
            widths = [
                factor.g.shape[2] + (0 if factor.x is None else factor.x.shape[1])
                for factor in factors
            ]
            widest = max(widths)
            # Products of whole numbers must stay below 2⁵³ on both sides.
            inputs = [factor.x.shape[1] for factor in factors if factor.x is not None]
            widest_gradient = max(factor.g.shape[2] for factor in factors)
            if widest_gradient <= WIDEST and max(inputs, default=0) < WIDEST_INPUT:
                few = _few(sum(widths), objective.count * model.size)
        return cls(
            row_bytes=row_bytes,
            # Its gradients; and added up by user, or without those that are not finite.
            cell_bytes=way.copies * objective.count * w.nbytes,
            # Both sides in double precision, of the widest layer.
            pair_bytes=16.0 * widest,
            few=few,
        )


def _few(widths: int, numbers: int) -> int:
    """The largest n_k for which gradients are better kept as factors.

    n_k²/2 pairs of (in + out) numbers, read and written in double precision, against writing a
    user's (1 + R) p gradients, reading them for the norm and reading them for the sum. By a user's
    own size, and nobody else's: the two ways do not round alike.
    """
    least, most = FACTORED
    return min(most, max(least, math.isqrt(6 * numbers // (4 * widths))))


class _Saved:
    """Counts the bytes that autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._count, lambda t: t)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
