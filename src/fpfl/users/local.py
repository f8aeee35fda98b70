r"""Local steps: federated averaging in place of one gradient at the broadcast model.

A user with n_k samples takes S steps on its own objective from the broadcast model, and sends the
model difference, weighted by n_k as in federated averaging:

    w_0 = w,    w_{s+1} = w_s − η G(w_s)/n_k,    u^k = n_k/(S η) (w − w_S) = mean_s G(w_s),

G being the gradient of the user's summed objective. The divisor S η is public, and makes u^k a
gradient's size, so that a clip bound and a learning rate mean the same for any S; one step is the
gradient itself. Clipping bounds u^k, whatever went on before: no step of a user has to be private.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpfl.users.dispatch import agree
from fpfl.users.flat import FlatModel
from fpfl.users.packing import Batch
from fpfl.users.passes import Objective, VmapPass
from fpfl.users.steady import filled_rows


@dataclass(frozen=True)
class FederatedAveraging:
    """Local steps.

    Parameters
    ----------
    steps
        S, each over all of the user's samples.
    learning_rate
        η of a local step.
    """

    steps: int
    learning_rate: float

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"the number of local steps is {self.steps!r}; give 1 or more")
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(
                f"the learning rate of local steps is {self.learning_rate}; it must be positive"
            )


class LocalPass(VmapPass):
    """Every user takes its own steps: ``vmap`` over models as well as samples."""

    def __init__(
        self,
        model: FlatModel,
        objective: Objective,
        local: FederatedAveraging,
        dtype: torch.dtype,
        units: int | None = None,
    ) -> None:
        super().__init__(model, objective, units)
        agree(model, objective, {}, dtype)  # says what is wrong with a model that vmap cannot do
        self.local = local

    @property
    def copies(self) -> int:
        """See `Pass`: own parameters before and after a step, a gradient, its step, their sum."""
        return 6

    def __call__(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Pass`: mean_s G(w_s), and the outputs at the broadcast model."""
        updates: list[Tensor] = []
        outputs: list[Tensor] = []
        sizes = torch.from_numpy(batch.packing.sizes).to(w.device, w.dtype)
        for part, bucket, cells in self.parts(batch):
            real = cells.stop - cells.start
            own = self.of_cells(w, batch, bucket, cells)
            gradient, output = self.bucket(own, part, bucket)
            outputs.append(output[: real * bucket.size])
            own_sizes = filled_rows(sizes[cells], bucket.units).clamp(min=1.0)
            total = gradient
            for _ in range(self.local.steps - 1):
                step = self.local.learning_rate / own_sizes.unsqueeze(1)
                own = own - step * gradient[:, 0]
                gradient, _ = self.bucket(own, part, bucket)
                total = total + gradient
            updates.append((total / self.local.steps)[:real])
        update = torch.cat(updates)
        # Steps that ran away send nothing; the counts, at the broadcast model, still count.
        away = ~update.isfinite().all(dim=2, keepdim=True)
        return update.masked_fill(away, 0.0), torch.cat(outputs)
