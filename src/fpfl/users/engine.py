r"""The cohort engine: UserStatistics of Algorithm 1, for many users at once.

What each user computes on its own data. `fpfl.users.reference` has the same for one user, as the
paper writes it; this is the fast way.

Users of any size are packed side by side (`fpfl.users.packing`), in chunks that fit a memory
budget. One forward pass over a chunk serves all the gradients its users send
(`fpfl.users.passes`); counts use the outputs of the same pass. What comes out are the users'
vectors in a form that can be clipped and added without being written down (`fpfl.users.rows`).

What a user sends is a function of that user's samples, the broadcast and public constants, bit for
bit: shapes and ways are chosen by public numbers or by the user's own n_k, whoever else is in the
cohort, the chunk or the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.groups import Groups
from fpfl.fairness.rates import Rate
from fpfl.fairness.totals import Weights
from fpfl.numerics.summing import ByRun
from fpfl.users import task
from fpfl.users.dispatch import Costs, chosen_pass
from fpfl.users.dropout import keyed
from fpfl.users.factored import Factor, FactoredGradients
from fpfl.users.flat import FlatModel
from fpfl.users.inputs import Inputs, Seen
from fpfl.users.layers import LayerError
from fpfl.users.layout import Basis, Form, Layout, table_classes
from fpfl.users.local import FederatedAveraging, LocalPass
from fpfl.users.packing import Batch, Ints
from fpfl.users.passes import LayerPass, Objective, Pass, VmapPass
from fpfl.users.precision import THREADS, Precision, computing, repeatable_sums
from fpfl.users.reading import Chunk, Reader, Runs
from fpfl.users.rows import CellGradients, Gradients, UserRows
from fpfl.users.steady import SMALL_TILE, filled_rows, tile_for
from fpfl.users.weighting import Weighting

MEMORY_BUDGET = 512 * 2**20
"""Bytes that one chunk of users may take, by default."""

UNITS = 32
"""Cells that are computed together where a model needs ``vmap``."""


@dataclass(frozen=True)
class CohortEngine:
    """Computes v^k for the users of a cohort.

    Parameters
    ----------
    model
        The model as a function of w.
    data
        The population.
    constraint
        Its rates and groups decide what is in v; None for plain training.
    basis, selection, clipped, form
        See `Layout`.
    table
        Whether what model selection counts is the confusion table, where classes are few enough.
    surrogate
        With the form of one gradient: what stands in for a rate (`fpfl.methods`).
    local
        Local steps in place of one gradient at w.
    samples_per_user
        Use at most so many of a user's samples in a round, picked at random (the paper's "Batch
        size"); all of them when it is not given.
    memory
        Bytes that one chunk of users may take.
    precision
        See `Precision`.
    private
        Whether privacy is claimed: then nothing that is in the data raises, logs or decides how
        others are computed. A user whose samples cannot be computed sends zero.
    alone
        Compute every user by itself: slow, and right with kernels whose bits depend on the
        company a row is in (`fpfl.users.isolation`).
    expected
        About how many samples a cohort has, from public numbers: rows are computed in tiles of
        about so many.
    factoring
        Whether users with few samples may have their gradients kept as factors.
    """

    model: FlatModel
    data: FederatedDataset
    constraint: Constraint | None = None
    basis: Basis = "paper"
    selection: bool = True
    samples_per_user: int | None = None
    memory: int = MEMORY_BUDGET
    precision: Precision = "float32"
    clipped: bool = False
    form: Form = "paper"
    surrogate: Literal["loss", "rate"] = "loss"
    local: FederatedAveraging | None = None
    private: bool = False
    alone: bool = False
    expected: float = 0.0
    factoring: bool = True
    table: bool = True
    groups: Groups | None = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        constraint = self.constraint
        if self.surrogate not in ("loss", "rate"):
            raise ValueError(f"surrogate is {self.surrogate!r}; expected 'loss' or 'rate'")
        if self.local is not None and constraint is not None and self.form == "paper":
            raise ValueError(
                "the paper's form sends gradients at the broadcast model, so it has no local "
                "steps; use the form of one gradient (method=fpfl.OneGradient())"
            )
        groups = constraint.bind(self.data.schema.attributes) if constraint else None
        layout = make_layout(
            self.model.size,
            constraint,
            groups,
            basis=self.basis,
            selection=self.selection,
            clipped=self.clipped,
            form=self.form,
            classes=table_classes(self.data.schema.classes) if self.table else None,
        )
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "layout", layout)

    def statistics(
        self,
        w: Tensor,
        users: Ints,
        key: int = 0,
        share: tuple[int, int] = (0, 1),
        weights: Weights | None = None,
    ) -> Iterator[UserRows]:
        """Compute the vectors of the given users, chunk by chunk.

        Parameters
        ----------
        w
            The broadcast parameters.
        users
            The cohort. Users without samples send zero: they are left out, since what is yielded
            only gets added.
        key
            Seeds what is random on a device: the choice of samples, dropout.
        share
            (i, n): compute the i-th of n shares of the cohort, for n processes.
        weights
            What was broadcast beside w, for the form of one gradient; without it the gradient is
            the loss's.
        """
        return self.computed(w, self.chunks(users, key, share), weights)

    def chunks(
        self,
        users: Ints,
        key: int = 0,
        share: tuple[int, int] = (0, 1),
        runs: Runs | None = None,
    ) -> Iterator[Chunk]:
        """Read and pack the users, in chunks; nothing here depends on w.

        Of several runs the users are those of all their cohorts, and w and the weights have one
        more dimension, in front.
        """
        return self._reader.chunks(users, key, share, runs)

    def computed(
        self, w: Tensor, chunks: Iterator[Chunk], weights: Weights | None = None
    ) -> Iterator[UserRows]:
        """The vectors of the users of chunks."""
        begun: UserRows | None = None
        for chunk in chunks:
            for rows in self.compute(w, chunk, weights):
                joined = rows if begun is None else begun.joined(rows)
                begun = joined if chunk.unfinished else None
                if begun is None:
                    yield joined
                del rows, joined  # not kept while the next chunk is computed

    def compute(
        self, w: Tensor, chunk: Chunk, weights: Weights | None = None
    ) -> Iterator[UserRows]:
        """The vectors of a chunk's users."""
        try:
            computed = self._compute(w, chunk, weights)
        except LayerError:
            if self.private:
                yield from self._one_by_one(w, chunk, weights)
                return
            # The model does with real samples what it did not do with made-up ones.
            self._give_up_layers()
            computed = self._compute(w, chunk, weights)
        except Exception:
            # Whose sample it was must not be known. The others are what they would have been.
            if not self.private:
                raise
            yield from self._one_by_one(w, chunk, weights)
            return
        yield computed

    def _one_by_one(self, w: Tensor, chunk: Chunk, weights: Weights | None) -> Iterator[UserRows]:
        """The users of a chunk that cannot be computed together; who cannot at all sends zero."""
        if len(chunk.users) == 1:
            yield self._nothing(w, chunk)
            return
        lanes = chunk.batch.lanes
        for k in range(len(chunk.users)):
            one = chunk.members.some(slice(k, k + 1))
            for alone in self._reader.again(one, 0 if lanes is None else lanes.runs):
                try:
                    yield self._compute(w, alone, weights)
                except Exception:
                    yield self._nothing(w, alone)

    def _nothing(self, w: Tensor, chunk: Chunk) -> UserRows:
        """What a user sends who cannot be computed: no numbers, which clipping makes zero."""
        count = len(self._rates) if not self._whole else 0
        runs = _runs_of(chunk)
        gradients = w.new_zeros(1, 1 + count, self.model.size)
        member = chunk.member.new_zeros(1, chunk.member.shape[1])
        owner = torch.zeros(1, dtype=torch.int64, device=w.device)
        width = max((place.stop for place in self._columns.values()), default=0)
        return UserRows(
            self.layout,
            chunk.users,
            CellGradients(gradients + torch.nan, owner, member, 1, self.layout.partition, runs),
            w.new_full((1, width), torch.nan),
            self._columns,
            runs,
        )

    def _compute(self, w: Tensor, chunk: Chunk, weights: Weights | None) -> UserRows:
        if chunk.factored and not isinstance(self._pass, LayerPass):
            chunk = self._reader.repacked(chunk)  # read before layers were given up
        batch, member = chunk.batch, chunk.member
        if self._whole:  # before the precision is lowered: weights are exact
            weights = weights or Weights.nothing(member.shape[1], len(self._rates), w)
            if batch.lanes is not None and weights.overall.ndim == 2:
                weights = weights.of_rows(batch.lanes.of_cells[batch.cell])
            batch = self._weighting.weighted(batch, member, weights)
        self._make_ready(w, batch)
        with (
            computing(self.precision, w.device, self.threads),
            _seeded(self._seed(chunk), active=self._drawing),
        ):
            gradients, output = self._gradients(w, chunk, batch)
            if self.stochastic:
                # The counts are of the model that is released, which drops nothing out.
                output = self._outputs(w, chunk.batch)
        with (
            torch.no_grad(),
            repeatable_sums(w.device),
            computing("float32", w.device, self.threads),
        ):
            counts = self._counts(output.to(w.dtype), chunk)
        runs = _runs_of(chunk)
        rows = UserRows(self.layout, chunk.users, gradients, counts, self._columns, runs)
        if chunk.broken is None:
            return rows
        return replace(rows, counts=counts.masked_fill(chunk.broken.unsqueeze(1), torch.nan))

    def _seed(self, chunk: Chunk) -> int:
        """What torch's own dropout is drawn from, where a chunk is one user."""
        first = np.array([0])
        within = chunk.batch.samples[:1].cpu().numpy() - chunk.members.starts[:1]
        return int(chunk.members.hashed(first, within)[0])

    def _outputs(self, w: Tensor, batch: Batch) -> Tensor:
        """The rows' outputs with nothing dropped out."""
        if batch.lanes is None:
            return self._pass.outputs(w, batch.features)
        of_rows = batch.lanes.of_cells[batch.cell]
        output: Tensor | None = None
        for run in torch.unique(of_rows).tolist():
            rows = (of_rows == run).nonzero().squeeze(1)
            own = self._pass.outputs(w[run], batch.features[rows])
            if output is None:
                output = own.new_zeros(len(of_rows), *own.shape[1:])
            output[rows] = own
        assert output is not None  # a chunk has users
        return output

    def fresh_pass(self) -> Pass:
        """A pass of its own for who wants to try it; the engine's is left as it is."""
        return replace(self)._pass

    @property
    def tile(self) -> int | None:
        """How many rows are computed together; None for all of a user's."""
        apart = self.alone or (self.stochastic and not keyed(self.model.module))
        if apart:
            return None
        on_gpu = self.model.vector().is_cuda
        return tile_for(self.data.schema.shape, self.expected, gpu=on_gpu)

    @property
    def threads(self) -> int | None:
        """How many threads of a CPU may be used at most, where users are computed together."""
        if not self.private or self._alone:
            return None
        # Cells that `VmapPass` takes together have any number of rows, and bfloat16's steps are
        # twice as long: cut in two, a piece could end within a user.
        tiled = isinstance(self._pass, LayerPass) and self.precision == "float32"
        return THREADS if tiled else 1

    @cached_property
    def stochastic(self) -> bool:
        """Whether the model has active dropout."""
        return task.has_dropout(self.model.module)

    @property
    def layered(self) -> bool:
        """Whether all products with parameters are those of layers that are known here."""
        if self.local is None:
            return isinstance(self._pass, LayerPass)
        chosen = chosen_pass(self.model, self._pass.objective, self._input_dtype)
        return isinstance(chosen, LayerPass)

    @cached_property
    def _drawing(self) -> bool:
        """Whether torch draws masks itself: where layers have dropout inside, say."""
        return self.stochastic and not (
            isinstance(self._pass, LayerPass) and self._pass.dropout is not None
        )

    @cached_property
    def _alone(self) -> bool:
        """Whether every user is computed by itself: its own masks are drawn for it alone."""
        return self.alone or self._drawing

    @property
    def _rates(self) -> tuple[Rate, ...]:
        return self.constraint.rates if self.constraint else ()

    @property
    def _whole(self) -> bool:
        """Whether users are not cut into the cells of groups."""
        return self.form == "one-gradient"

    @cached_property
    def _pass(self) -> Pass:
        rates = self._rates
        if self._whole:
            rates = tuple(rates[r] for r in self._weighting.own)
        objective = Objective(self.data.schema, rates, together=self._whole)
        dtype = self._input_dtype
        # Where torch draws masks itself, every user is by itself, and in one go.
        units = None if self.alone or self.stochastic else UNITS
        if self.local is not None:
            return LocalPass(self.model, objective, self.local, dtype, units)
        return chosen_pass(self.model, objective, dtype, self.tile, units)

    @cached_property
    def _weighting(self) -> Weighting:
        losses = self.surrogate == "loss"
        return Weighting.of(self._rates, self.data.schema, self.model.vector(), losses=losses)

    def _make_ready(self, w: Tensor, batch: Batch) -> None:
        """Check the pass once more before its first use on real samples, and give it graphs."""
        if "_ready" in self.__dict__:
            return
        if batch.lanes is not None:
            w, batch = w[0], replace(batch, lanes=None)
        way = self._pass
        if isinstance(way, LayerPass) and self.private:
            if not self.stochastic:
                way.use_graphs(self.memory)
        elif isinstance(way, LayerPass):
            with computing("float32", w.device):  # rounding is not what is looked for
                in_order = way.in_order(w, batch)
            if not in_order:
                raise LayerError("the model mixes the order of samples")
            if not self.stochastic:
                way.use_graphs(self.memory)
        self.__dict__["_ready"] = True

    def _give_up_layers(self) -> None:
        """Go on with the pass that serves any model."""
        units = None if self._alone else UNITS
        self.__dict__["_pass"] = VmapPass(self.model, self._pass.objective, units)
        self.__dict__["_ready"] = True
        for name in ("costs", "_reader", "_drawing", "_alone"):
            self.__dict__.pop(name, None)

    @cached_property
    def costs(self) -> Costs:
        """What a row, a user and a bucket cost with this model on its device."""
        return Costs.of(self.model, self._pass, self._input_dtype)

    @property
    def _input_dtype(self) -> torch.dtype:
        return self.data.input_dtype(self.model.vector().dtype)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(
            self.data,
            self.groups,
            self._rates,
            self.model.vector(),
            self.costs,
            self.memory,
            self.samples_per_user,
            self._pass.steps,
            seeded=self.stochastic,
            factoring=self.factoring and isinstance(self._pass, LayerPass),
            whole=self._whole,
            pieces=self.local is None,
            alone=self._alone,
            looking=self.private,
            tile=self._pass.tile if isinstance(self._pass, LayerPass) else None,
        )

    def _gradients(self, w: Tensor, chunk: Chunk, batch: Batch) -> tuple[Gradients, Tensor]:
        """The gradients of a chunk's users, for its batch with or without weights."""
        member = chunk.member[:, :0] if self._whole else chunk.member
        way = self._pass
        if chunk.factored and isinstance(way, LayerPass):
            before = batch.features._version
            factors, seeds, output = way.factors(w, batch)
            sizes, size, lanes = batch.packing.sizes, self.model.size, batch.lanes
            if lanes is None:
                return FactoredGradients(factors, seeds, member, sizes, size), output
            rows, seen = lanes.samples, None
            if batch.features._version == before:  # a model may work on its inputs in place
                seen = self._seen(factors, batch, rows)
            return FactoredGradients(
                factors, seeds[:, rows], member[rows], sizes, size, rows, _runs_of(chunk), seen
            ), output
        gradients, output = way(w, batch)
        member = member[: len(chunk.owner)]  # without groups where users are whole
        return CellGradients(
            gradients, chunk.owner, member, len(chunk.users), self.layout.partition, _runs_of(chunk)
        ), output

    def _seen(self, factors: Sequence[Factor], batch: Batch, rows: Tensor) -> Seen | None:
        """What is known of the samples that the first layer has seen as they are."""
        if self._inputs is None:
            return None
        for factor in factors:
            x = factor.x
            if x is not None and x.data_ptr() == batch.features.data_ptr():
                return self._inputs.seen(x, batch.samples[rows])
        return None

    @cached_property
    def _inputs(self) -> Inputs | None:
        known = self.data.checked and not self.data.lazy
        dtype = self.model.vector().dtype
        return Inputs.of(self.data, dtype, self.memory / 2) if known else None

    def _counts(self, output: Tensor, chunk: Chunk) -> Tensor:
        """The blocks of v that count: sums over samples of cells, then of users and groups."""
        schema, batch = self.data.schema, chunk.batch
        predicted = task.predictions(output, schema)
        rates = self._rates
        r, split = len(rates), self.basis == "split"
        # A multiple of so many: the last few numbers of a call go through other instructions.
        room = -(-len(predicted) // SMALL_TILE) * SMALL_TILE
        asked = filled_rows(predicted, room), filled_rows(batch.labels, room)
        values = [
            rate.evaluate(*asked)[: len(predicted)].to(output.dtype) * condition
            for rate, condition in zip(rates, batch.conditions, strict=True)
        ]
        values += [c - f if split else c for f, c in zip(values, batch.conditions, strict=True)]
        counted = []
        if self.selection and self.layout.classes is not None:
            table = task.confusion(predicted, batch.labels, self.layout.classes)
            counted = list((table.to(output.dtype) * batch.real.unsqueeze(1)).unbind(1))
        elif self.selection:
            right = task.performance(output, batch.labels, schema).to(output.dtype) * batch.real
            counted = [right, batch.real - right]
        # Without rates and counts there are no columns, and still a row for each sample.
        rows = (
            torch.stack([*values, *counted], dim=1)
            if values or counted
            else (output.new_zeros(len(batch.real), 0))
        )
        if chunk.whole:  # cells are users: samples have the groups
            cells = _added(self._spread(rows, chunk.member, r), batch.cell, len(chunk.users))
        else:
            cells = _added(rows, batch.cell, len(chunk.owner))
            cells = self._spread(cells, chunk.member, r)
        if batch.packing.one_cell_each:
            return cells
        return _added(cells, chunk.owner, len(chunk.users))

    def _spread(self, values: Tensor, member: Tensor, rates: int) -> Tensor:
        """Columns [F_r, n'_r, selection's] of cells or samples as the columns of v's counts."""
        if not rates:
            return values
        by_group = (values[:, : 2 * rates].unsqueeze(2) * member.unsqueeze(1)).flatten(1)
        blocks = [by_group]
        if not self.layout.partition:
            blocks.append(values[:, : 2 * rates])
        if self.selection:
            blocks.append(values[:, 2 * rates :])
        return torch.cat(blocks, dim=1)

    @cached_property
    def _columns(self) -> dict[str, slice]:
        """Where the counts of v stand in the matrix of counts."""
        columns: dict[str, slice] = {}
        start = 0
        for name in ("F", "n", "overall_F", "overall_n", "hits", "misses", "table"):
            if name in self.layout.shapes:
                stop = start + torch.Size(self.layout.shapes[name]).numel()
                columns[name] = slice(start, stop)
                start = stop
        return columns


def _runs_of(chunk: Chunk) -> ByRun | None:
    """The users' runs, where there are several."""
    lanes = chunk.batch.lanes
    return None if lanes is None else lanes.of_users


def _added(rows: Tensor, owner: Tensor, owners: int) -> Tensor:
    return rows.new_zeros(owners, rows.shape[1]).index_add_(0, owner, rows)


@contextmanager
def _seeded(seed: int, *, active: bool) -> Iterator[None]:
    with torch.random.fork_rng(enabled=active):
        if active:
            torch.manual_seed(seed)
        yield


def make_layout(
    parameters: int,
    constraint: Constraint | None,
    groups: Groups | None,
    *,
    basis: Basis = "paper",
    selection: bool = True,
    clipped: bool = False,
    form: Form = "paper",
    classes: int | None = None,
) -> Layout:
    """The layout that a model, a constraint and a way of counting give."""
    if constraint is None or groups is None:
        return Layout(
            parameters, basis=basis, selection=selection, clipped=clipped, classes=classes
        )
    return Layout(
        parameters,
        rates=tuple(rate.name for rate in constraint.rates),
        groups=groups.names,
        partition=groups.partition,
        basis=basis,
        selection=selection,
        clipped=clipped,
        form=form,
        classes=classes,
    )


def predict(
    model: Callable[[Tensor], Tensor], features: Tensor, schema: Schema, batch: int = 8192
) -> Tensor:
    """Hard predictions on samples, in batches."""
    with torch.no_grad():
        found = [
            task.predictions(task.flatten_output(model(piece), schema), schema)
            for piece in torch.split(features, batch)
        ]
    return torch.cat(found)


def outputs(
    model: Callable[[Tensor], Tensor], features: Tensor, schema: Schema, batch: int = 8192
) -> Tensor:
    """A model's outputs on samples, in batches: (n,), or (n, classes) with several classes."""
    with torch.no_grad():
        pieces = torch.split(features, batch)
        return torch.cat([task.flatten_output(model(piece), schema) for piece in pieces])
