"""Several processes for one simulation, through ``torch.distributed``.

Every process draws the same cohorts and computes its share of them; one all-reduce a round adds
the shares up, the first process adds the noise, and every process takes the same step with what it
released. ``torchrun`` starts the processes; `join` makes them a group.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes of a simulation: this is number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The processes that are in a group now: just this one where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Whether this process is the one that adds noise, prints and saves."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up all processes' values."""
        if self.size > 1:
            values = values.contiguous()
            dist.all_reduce(values)
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """The first process's values."""
        if self.size > 1:
            values = values.clone()
            dist.broadcast(values, 0)
        return values

    def numbers_from_first(self, numbers: list[int]) -> list[int]:
        """The first process's whole numbers, of which all processes know how many they are."""
        there: list[int] = self.from_first(torch.tensor(numbers, device=_device())).tolist()
        return there

    def agreed_seed(self, seed: int | None) -> int | None:
        """A seed that all processes share, from the system's randomness where none is given.

        It is not kept: cohorts drawn from it are as secret as those of one process.
        """
        if self.size == 1 or seed is not None:
            return seed
        return int(self.from_first(torch.tensor(secrets.randbits(62), device=_device())))

    def check_same(self, things: dict[str, bytes]) -> None:
        """Refuse to go on with processes that were started with different things."""
        if self.size == 1:
            return
        digests = [hashlib.sha256(content).digest()[:7] for content in things.values()]
        mine = torch.tensor([int.from_bytes(d, "big") for d in digests], device=_device())
        differ = mine != self.from_first(mine)
        for name, different in zip(things, differ.tolist(), strict=True):
            if different:
                raise ValueError(
                    f"process {self.rank} has other {name} than the first: all processes of a "
                    "training need the same data and settings (partition with a seed), the same "
                    "torch, kind of processor and number of threads"
                )


def _device() -> str:
    """Where a group's small messages live: its GPUs, or the CPU."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def join(device: str) -> tuple[Ranks, str]:
    """Join the processes that ``torchrun`` started, if it did.

    Returns the processes, and the device that this one should compute on: with GPUs each process
    takes the one of its number.
    """
    if "LOCAL_RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks.current(), device
    if device.startswith("cuda"):
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"process {local} of this machine has no GPU ({gpus} found); start at most that "
                "many processes, or use device = 'cpu'"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks.current(), device
