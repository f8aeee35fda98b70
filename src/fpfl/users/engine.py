r"""The cohort engine: what each user computes on its own data, for many users at once.

One forward pass per user serves all the gradients it sends: the sums
[L, F_{r,a}, F_r] of a user are one vector-valued function of w, and ``jacrev`` under ``vmap``
gives its rows for a whole chunk of padded users. Counts use the outputs of the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from fpfl.data.federated import Cohort, FederatedDataset
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.groups import Groups
from fpfl.fairness.rates import Rate
from fpfl.users import task
from fpfl.users.layout import Basis, Layout, Statistics

MEMORY_BUDGET = 512 * 2**20
"""Bytes that one chunk of users may take, by default."""


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat vector of its trainable parameters."""

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> FlatModel:
        """See a module so; the module itself is left alone."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return cls(module, tuple(n for n, _ in named), tuple(p.shape for _, p in named))

    @property
    def size(self) -> int:
        """p."""
        return sum(shape.numel() for shape in self.shapes)

    def vector(self) -> Tensor:
        """The module's current parameters as w."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Take w apart into named parameters."""
        pieces = torch.split(w, [shape.numel() for shape in self.shapes])
        return {
            name: piece.reshape(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def __call__(self, w: Tensor, inputs: Tensor) -> Tensor:
        """The module's output with parameters w."""
        output: Tensor = functional_call(self.module, self.parameters(w), (inputs,))
        return output


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
    basis, selection
        See `Layout`.
    samples_per_user
        Use at most so many of a user's samples in a round, picked at random (the paper's "Batch
        size"); all of them when it is not given.
    memory
        Bytes that one chunk of users may take.
    """

    model: FlatModel
    data: FederatedDataset
    constraint: Constraint | None = None
    basis: Basis = "paper"
    selection: bool = True
    samples_per_user: int | None = None
    memory: int = MEMORY_BUDGET
    groups: Groups | None = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        constraint = self.constraint
        groups = constraint.bind(self.data.schema.attributes) if constraint else None
        layout = make_layout(
            self.model.size, constraint, groups, basis=self.basis, selection=self.selection
        )
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "layout", layout)

    def statistics(
        self, w: Tensor, users: NDArray[np.int64], rng: np.random.Generator | None = None
    ) -> Iterator[Tensor]:
        """Yield v^k of the given users, chunk by chunk, as rows of (chunk, size) tensors.

        Users without samples send zero: they are left out, since what is yielded only gets added.
        """
        sizes = self.data.offsets[users + 1] - self.data.offsets[users]
        order = sizes.argsort(stable=True).cpu().numpy()
        sizes_sorted = sizes.cpu().numpy()[order]
        users = users[order][sizes_sorted > 0]
        sizes_sorted = sizes_sorted[sizes_sorted > 0]
        if self.samples_per_user is not None:
            sizes_sorted = np.minimum(sizes_sorted, self.samples_per_user)
        for start, stop in _chunks(sizes_sorted, self._bytes_per_user, self.memory):
            cohort = self.data.cohort(
                users[start:stop], samples_per_user=self.samples_per_user, rng=rng
            )
            seed = int(rng.integers(2**63)) if rng is not None and self.stochastic else None
            yield self.layout.flatten(self.compute(w, cohort, seed))

    @cached_property
    def stochastic(self) -> bool:
        """Whether the model has active dropout."""
        return task.has_dropout(self.model.module)

    def compute(self, w: Tensor, cohort: Cohort, seed: int | None = None) -> Statistics:
        """The statistics of every user of a padded cohort; ``seed`` is for dropout."""
        schema, mask = self.data.schema, cohort.mask
        rates = self.constraint.rates if self.constraint else ()
        member, conditions = _weights(cohort, rates, self.groups, w.dtype)
        sums = _user_sums(self.model, schema, rates, whole=not self.layout.partition)
        jacobian = vmap(
            jacrev(sums, has_aux=True), in_dims=(None, 0, 0, 0, 0, 0), randomness="different"
        )
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            gradients, output = jacobian(
                w, cohort.features, cohort.labels, mask.to(w.dtype), member, conditions
            )
        # The counts are of the model that is released, which drops nothing out.
        output = self._evaluated(w, cohort) if self.stochastic else output.detach()
        users, p = len(mask), self.model.size
        r, g = len(rates), member.shape[-1]
        F_gradient = gradients[:, 1 : 1 + r * g].reshape(users, r, g, p)
        counted = member.unsqueeze(1) * conditions.unsqueeze(-1)  # (B, R, S, G)
        predicted = task.predictions(output, schema)
        f = [rate.evaluate(predicted, cohort.labels).to(w.dtype) for rate in rates]
        f_all = torch.stack(f, dim=1) if f else mask.new_zeros((users, 0, mask.shape[1]))
        right = task.performance(output, cohort.labels, schema).to(w.dtype) * mask
        return Statistics(
            loss_gradient=gradients[:, 0],
            F=(counted * f_all.unsqueeze(-1)).sum(dim=2),
            n=counted.sum(dim=2),
            F_gradient=F_gradient,
            overall_F=(conditions * f_all).sum(dim=2),
            overall_n=conditions.sum(dim=2),
            overall_F_gradient=gradients[:, 1 + r * g :].reshape(users, -1, p),
            hits=right.sum(dim=1),
            misses=(mask.to(w.dtype) - right).sum(dim=1),
        )

    def _evaluated(self, w: Tensor, cohort: Cohort) -> Tensor:
        """The outputs in evaluation mode, of shape (B, S, ...)."""
        module, samples = self.model.module, cohort.features.flatten(0, 1)
        module.eval()
        try:
            with torch.no_grad():
                output = task.flatten_output(self.model(w, samples), self.data.schema)
        finally:
            module.train()
        return output.reshape(*cohort.mask.shape, *output.shape[1:])

    def _bytes_per_user(self, samples: int) -> int:
        """A rough, generous size: Jacobian and v twice over, inputs and activations per sample."""
        features = torch.Size(self.data.schema.shape).numel()
        rows = self.layout.size + self.model.size
        return 4 * (3 * rows + 8 * samples * (features + 64) * (1 + len(self.layout.groups)))


def make_layout(
    parameters: int,
    constraint: Constraint | None,
    groups: Groups | None,
    *,
    basis: Basis = "paper",
    selection: bool = True,
) -> Layout:
    """The layout that a model, a constraint and a way of counting give."""
    if constraint is None or groups is None:
        return Layout(parameters, basis=basis, selection=selection)
    return Layout(
        parameters,
        rates=tuple(rate.name for rate in constraint.rates),
        groups=groups.names,
        partition=groups.partition,
        basis=basis,
        selection=selection,
    )


def predict(
    model: Callable[[Tensor], Tensor], features: Tensor, schema: Schema, batch: int = 8192
) -> Tensor:
    """Hard predictions on samples, in batches."""
    with torch.no_grad():
        outputs = [
            task.predictions(task.flatten_output(model(piece), schema), schema)
            for piece in torch.split(features, batch)
        ]
    return torch.cat(outputs)


def _weights(
    cohort: Cohort, rates: tuple[Rate, ...], groups: Groups | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Membership (B, S, G) and conditions (B, R, S) as numbers; conditions are 0 for padding."""
    mask = cohort.mask
    if groups is None:
        return mask.new_zeros((*mask.shape, 0), dtype=dtype), mask.new_zeros(
            (len(mask), 0, mask.shape[1]), dtype=dtype
        )
    member = groups.membership(cohort.attributes).to(dtype)
    conditions = torch.stack([rate.condition(cohort.labels) & mask for rate in rates], dim=1)
    return member, conditions.to(dtype)


def _user_sums(
    model: FlatModel, schema: Schema, rates: tuple[Rate, ...], *, whole: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """One user's [L, F_{r,a}, F_r] with the stand-ins, as a function of w, and its outputs."""

    def sums(
        w: Tensor, x: Tensor, y: Tensor, mask: Tensor, member: Tensor, conditions: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = task.flatten_output(model(w, x), schema)
        parts = [(task.loss(output, y, schema) * mask).sum().unsqueeze(0)]
        if rates:
            soft = task.scores(output, schema)
            estimates = torch.stack([rate.standin(soft, y) for rate in rates]) * conditions
            parts.append((estimates @ member).reshape(-1))
            if whole:
                parts.append(estimates.sum(dim=-1))
        return torch.cat(parts), output

    return sums


def _chunks(
    sizes: NDArray[np.int64], cost: Callable[[int], int], memory: int
) -> Iterator[tuple[int, int]]:
    """Cut users, sorted by size, into runs whose padded cost stays within the memory budget."""
    start = 0
    while start < len(sizes):
        stop = len(sizes)
        # The last user of a run is its largest: shrink until the padded run fits.
        while stop - start > 1 and (stop - start) * cost(int(sizes[stop - 1])) > memory:
            stop = start + max(1, min(stop - start - 1, memory // cost(int(sizes[stop - 1]))))
        yield start, stop
        start = stop
