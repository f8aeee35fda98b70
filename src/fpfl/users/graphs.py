"""CUDA graphs: a forward and backward pass that the GPU repeats without being told each step.

Telling takes the CPU longer than a small cohort takes the GPU. Graphs
have fixed shapes: the rows of a batch are padded to the next size of a coarse grid (6% apart), and
a size that comes a second time is recorded. Padding has zero weight, and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fpfl.users.layers import Call, LayerError
from fpfl.users.packing import Batch


@dataclass(frozen=True)
class Recording:
    """What a pass over a batch left: outputs, calls of every layer, and the samples' weights.

    ``weights`` (1 + R, N) belong to models with one output, whose one backward pass serves the
    loss and all rates; None where each has a pass of its own.
    """

    output: Tensor
    weights: Tensor | None
    calls: list[list[Call]]

    @staticmethod
    def joined(parts: list[Recording]) -> Recording:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        weights = [part.weights for part in parts if part.weights is not None]
        return Recording(
            torch.cat([part.output for part in parts]),
            torch.cat(weights, dim=1) if weights else None,
            [_joined(layer) for layer in zip(*(part.calls for part in parts), strict=True)],
        )

    def kept(self) -> Recording:
        """A copy, which stays when a graph is replayed."""
        return self._mapped(Tensor.clone)

    def first(self, rows: int) -> Recording:
        """The same of the first rows alone."""
        return self._mapped(lambda each: each[:rows])

    def chosen(self, rows: Tensor) -> Recording:
        """The same of some rows, in their order."""
        return self._mapped(lambda each: each[rows])

    def tensors(self) -> list[Tensor]:
        """All of its numbers."""
        found = [self.output] if self.weights is None else [self.output, self.weights]
        for call in (call for calls in self.calls for call in calls):
            found += [call.x, *call.g, *([] if call.seen is None else [call.seen])]
        return found

    def _mapped(self, of: Callable[[Tensor], Tensor]) -> Recording:
        """The same with a function of rows applied to all of its numbers."""
        return Recording(
            of(self.output),
            None if self.weights is None else of(self.weights.T).T,
            [
                [
                    Call(
                        of(call.x),
                        [of(g) for g in call.g],
                        None if call.seen is None else of(call.seen),
                    )
                    for call in calls
                ]
                for calls in self.calls
            ],
        )


def _joined(layer: tuple[list[Call], ...]) -> list[Call]:
    """The calls of one layer, from tiles that all made the same ones."""
    if len({tuple(len(call.g) for call in calls) for calls in layer}) > 1:
        raise LayerError("a layer is not called equally often for all samples")
    return [
        Call(
            torch.cat([call.x for call in same]),
            [torch.cat(g) for g in zip(*(call.g for call in same), strict=True)],
            _joined_seen([call.seen for call in same]),
        )
        for same in zip(*layer, strict=True)
    ]


def _joined_seen(seen: list[Tensor | None]) -> Tensor | None:
    there = [each for each in seen if each is not None]
    return torch.cat(there) if there else None


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    recording: Recording


@dataclass
class Graphs:
    """Replays of ``record`` for batches whose number of rows has come before.

    Parameters
    ----------
    record
        Computes a batch, from tensors on the GPU alone.
    memory
        Bytes that recorded graphs may keep.
    """

    record: Callable[[Batch], Recording]
    memory: int
    _seen: set[int] = field(default_factory=set)
    _graphs: dict[int, _Captured] = field(default_factory=dict)
    _used: int = 0
    _pool: Any = None
    refused: str | None = None

    def __call__(self, batch: Batch) -> Recording:
        """Compute a batch."""
        rows = len(batch.features)
        size = padded_rows(rows)
        found = self._graphs.get(size)
        if found is None:
            if self.refused is not None or size not in self._seen or self._used >= self.memory:
                self._seen.add(size)
                return self.record(batch)
            found = self._capture(batch, size)
            if found is None:
                return self.record(batch)
        static = found.batch
        for name in ("features", "labels", "real"):
            getattr(static, name)[:rows].copy_(getattr(batch, name))
        static.conditions[:, :rows].copy_(batch.conditions)
        static.real[rows:].zero_()
        static.conditions[:, rows:].zero_()
        found.graph.replay()
        return found.recording.first(rows)

    def _capture(self, batch: Batch, size: int) -> _Captured | None:
        before = torch.cuda.memory_allocated()
        static = replace(
            batch,
            features=batch.features.new_zeros(size, *batch.features.shape[1:]),
            labels=batch.labels.new_zeros(size),
            real=batch.real.new_zeros(size),
            conditions=batch.conditions.new_zeros(len(batch.conditions), size),
        )
        graph = torch.cuda.CUDAGraph()
        try:
            # Libraries set themselves up in the first calls, which a graph must not hold.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.record(static)
            torch.cuda.current_stream().wait_stream(side)
            # One pool for all sizes, since they are replayed one after the other: what one only
            # passes through may lie where another's recording lies. So a recording is good until
            # the next batch is computed, and whoever needs it longer copies it.
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                recording = self.record(static)
        except RuntimeError as error:  # something in the model that a graph cannot hold
            self.refused = str(error)
            return None
        self._used += torch.cuda.memory_allocated() - before
        self._graphs[size] = _Captured(graph, static, recording)
        return self._graphs[size]


def padded_rows(rows: int) -> int:
    """The next size of the grid: sixteen steps from one power of two to the next."""
    step = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // step) * step


def repeatable(module: nn.Module) -> bool:
    """Whether a module does the same every time: torch's own layers and sequences of them.

    Somebody else's ``forward`` or hook may toss a coin of Python's, which a graph would never toss
    again.
    """
    return all(
        type(each).__module__.startswith("torch.nn.modules")
        and "forward" not in vars(each)
        and not each._forward_hooks
        and not each._forward_pre_hooks
        and not each._backward_hooks
        and not each._backward_pre_hooks
        for each in module.modules()
    )


def described(module: nn.Module) -> bool:
    """Whether a module's text says all that it does, so that two with the same text are alike.

    Layers that are made of layers (attention, say) keep some of their settings to themselves.
    """
    composed = (each for each in module.modules() if any(True for _ in each.children()))
    return repeatable(module) and all(type(each) is nn.Sequential for each in composed)
