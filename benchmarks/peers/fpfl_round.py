"""FPFL's round in plain torch, for frameworks that simulate users one after the other.

What a user computes (`Users.vector`), what the server does with the noisy sum (`Server`), and a
slow reference that shares no code with the former (`reference_sum`). Runs in the peers'
environments: without fpfl.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.peers.workload import Workload, read_workload

Vector = Literal["paper", "one"]
"""``one``: ∇L alone. ``paper``: [∇L, F_a, ∇F_a, n'_a for every group a]."""


def build_model(work: Workload) -> nn.Sequential:
    """The network that a workload names."""
    torch.manual_seed(0)
    if work.model == "mlp":
        inputs = work.features.shape[1]
        return nn.Sequential(nn.Linear(inputs, work.hidden), nn.ReLU(), nn.Linear(work.hidden, 1))
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(),
        nn.Conv2d(32, 64, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, work.hidden), nn.ReLU(), nn.Linear(work.hidden, work.classes),
    )  # fmt: skip


class Users:
    """The users of a workload: their samples and what they compute on them.

    ``exact``: in double precision, for checks. (In single precision one of the millions of units
    of a cohort now and then falls on the other side of its ReLU's kink.)
    """

    def __init__(self, path: Path | str, vector: Vector, *, exact: bool = False):
        self.work = read_workload(path)
        self.paper = vector == "paper"
        self.binary = self.work.classes == 2
        self.dtype = torch.float64 if exact else torch.float32
        features = torch.from_numpy(self.work.features)
        self.features = features.to(self.dtype) if features.is_floating_point() else features
        labels = torch.from_numpy(self.work.labels)
        self.labels = labels.to(self.dtype) if self.binary else labels
        groups = functional.one_hot(torch.from_numpy(self.work.groups), self.work.group_count)
        self.groups = groups.to(self.dtype)
        self.offsets = self.work.offsets.tolist()
        self.model = build_model(self.work).to(self.dtype)
        self.parameters = list(self.model.parameters())
        self.parameter_count = sum(p.numel() for p in self.parameters)
        self.zeros = torch.zeros(self.parameter_count, dtype=self.dtype)
        g, p = (self.work.group_count if self.paper else 0), self.parameter_count
        self.sizes = {"loss gradient": p, "F": g, "F gradients": g * p, "n": g}

    @property
    def size(self) -> int:
        """The length of v."""
        return sum(self.sizes.values())

    def samples(self, user: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and one-hot groups of a user."""
        part = slice(self.offsets[user], self.offsets[user + 1])
        return self.features[part], self.labels[part], self.groups[part]

    def vector(self, x: Tensor, y: Tensor, groups: Tensor) -> Tensor:
        """v of one user, with the model's current parameters: one forward pass for all of it.

        A group that the user has no samples of costs no backward pass.
        """
        if len(y) == 0:
            return torch.zeros(self.size, dtype=self.dtype)
        if x.dtype == torch.uint8:
            x = x.to(self.dtype) / 255
        output = self.model(x)
        if self.binary:
            output = output.squeeze(-1)
            loss = functional.binary_cross_entropy_with_logits(output, y, reduction="sum")
        else:
            loss = functional.cross_entropy(output, y, reduction="sum")
        if not self.paper:
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])
        # On Adult the false negative rate: d' are the samples with y = 1, f is an error. On the
        # images the accuracy: d' is everything, f is a hit.
        member = groups * y.unsqueeze(1) if self.binary else groups
        n = member.sum(dim=0)
        F, rows = n, [[self.zeros]] * self.work.group_count
        present = n.nonzero().flatten().tolist()
        if present:
            if self.binary:
                surrogate, f = 1 - output.sigmoid(), output.detach() <= 0
            else:
                surrogate = output.softmax(dim=1).gather(1, y.unsqueeze(1)).squeeze(1)
                f = output.detach().argmax(dim=1) == y
            F = f.to(self.dtype) @ member
            sums = surrogate @ member
            for a in present:
                parts = torch.autograd.grad(sums[a], self.parameters, retain_graph=True)
                rows[a] = [g.flatten() for g in parts]
        slopes = [g.flatten() for g in torch.autograd.grad(loss, self.parameters)]
        return torch.cat([*slopes, F, *(piece for row in rows for piece in row), n])


class Server:
    """The server of Algorithm 1: multipliers (MMDM) and the direction, from the noisy sum alone."""

    def __init__(
        self,
        users: Users,
        *,
        tolerance: float = 0.02,
        damping: float = 2.0,
        multiplier_rate: float = 0.01,
    ):
        work = users.work
        self.sizes = list(users.sizes.values())
        self.paper = users.paper
        self.tolerance, self.damping, self.rate = tolerance, damping, multiplier_rate
        self.samples = work.cohort * len(work.labels) / work.population
        # A count within two standard deviations of the noise says nothing.
        self.smallest = max(1.0, 2 * work.clip * work.noise_multiplier)
        self.multipliers = torch.zeros(work.group_count, dtype=users.dtype)

    def direction(self, v: Tensor) -> Tensor:
        """Update the multipliers, return the direction to descend."""
        loss_gradient, F, F_gradients, n = v.split(self.sizes)
        direction = loss_gradient / self.samples
        if not self.paper:
            return direction
        F_gradients = F_gradients.reshape(len(n), -1)
        known, whole = n >= self.smallest, n.sum().clamp(min=self.smallest)
        n = n.clamp(min=self.smallest)
        difference = (F.sum() / whole - F / n).clamp(-1, 1)
        violation = (difference.abs() - self.tolerance).clamp(min=0) * known
        self.multipliers += self.rate * violation
        strength = (self.multipliers + self.damping * violation) * (violation > 0)
        kappa = difference.sign() * strength
        return direction + (kappa.sum() / whole - kappa / n) @ F_gradients


def reference_sum(users: Users, cohort: Iterable[int]) -> Tensor:
    """Σ_k clip(v^k) without noise, sample by sample, in double precision."""
    model = copy.deepcopy(users.model).double()
    parameters = list(model.parameters())

    def gradient(value: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])

    work, total = users.work, torch.zeros(users.size, dtype=torch.float64)
    for k in cohort:
        slopes = torch.zeros(users.parameter_count, dtype=torch.float64)
        F_slopes = torch.zeros(work.group_count, users.parameter_count, dtype=torch.float64)
        F, n = torch.zeros(2, work.group_count, dtype=torch.float64)
        for i in range(work.offsets[k], work.offsets[k + 1]):
            x, y, a = torch.from_numpy(work.features[i : i + 1]), work.labels[i], work.groups[i]
            x = x.double() / 255 if x.dtype == torch.uint8 else x.double()

            def probability(x: Tensor = x, y: int = y) -> Tensor:
                output = model(x)[0]
                if work.classes > 2:
                    return output.softmax(dim=0)[y]
                return (output[0] if y == 1 else -output[0]).sigmoid()

            slopes += gradient(-probability().log())
            if not users.paper or (work.classes == 2 and y != 1):
                continue
            output, n[a] = model(x)[0], n[a] + 1
            hit = (output.argmax() == y) if work.classes > 2 else (output[0] > 0) == (y == 1)
            F[a] += float(hit) if work.classes > 2 else 1 - float(hit)
            F_slopes[a] += gradient(probability() if work.classes > 2 else 1 - probability())
        v = torch.cat([slopes, F, F_slopes.flatten(), n]) if users.paper else slopes
        norm = math.sqrt(float((v**2).sum()))
        total += v * min(1.0, work.clip / norm) if norm > 0 else 0 * v
    return total
