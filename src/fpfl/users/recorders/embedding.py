"""Embeddings: rows of a table, looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpfl.users import steady
from fpfl.users.layers import Call, Recorder, put
from fpfl.users.packing import Bucket
from fpfl.users.precision import repeatable_sums


class EmbeddingRecorder(Recorder):
    """``nn.Embedding`` with dense gradients."""

    kinds = (nn.Embedding,)

    @classmethod
    def knows(cls, layer: Any) -> bool:
        return type(layer) in cls.kinds and not (
            layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
        )

    def output(self, call: Call, x: Tensor) -> Tensor:
        return steady.looked_up(x, self.layer.weight)

    def input_gradient(self, call: Call, g: Tensor) -> None:
        return None

    def inputs(self, call: Call) -> Tensor:
        return call.x

    def write(
        self, call: Call, seeds: list[Tensor], bucket: Bucket, out: Tensor, *, add: bool
    ) -> None:
        layer = self.layer
        ids = call.x[bucket.rows].reshape(bucket.units, -1)
        # A token that there is not has made NaN of its user's output already.
        ids = ids.clamp(0, layer.num_embeddings - 1)
        unit = torch.arange(bucket.units, device=ids.device).unsqueeze(1)
        place = (ids + unit * layer.num_embeddings).reshape(-1)
        for m, seed in enumerate(seeds):
            rows = seed[bucket.rows].reshape(-1, layer.embedding_dim)
            if layer.padding_idx is not None:
                rows = rows * (ids.reshape(-1, 1) != layer.padding_idx)
            total = rows.new_zeros(bucket.units * layer.num_embeddings, layer.embedding_dim)
            with repeatable_sums(rows.device):
                total.index_add_(0, place, rows)
            put(out[:, m, self.places["weight"]], total.reshape(bucket.units, -1), add)
