"""What is measured: the two workloads as fpfl sees them, and the ways to compute a round on them.

Needs torch, numpy and fpfl alone, so that it runs where nothing else is installed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fpfl import (
    Attribute,
    Constraint,
    FederatedDataset,
    Privacy,
    Schema,
    accuracy_parity,
    fnr_parity,
    load_adult,
    mlp,
    train,
)
from fpfl.privacy import PoissonSampling
from fpfl.training import models
from fpfl.users.precision import Precision, computing

Kind = Literal["adult", "cnn"]
Vector = Literal["one", "paper"]
COHORT = {"adult": 200, "cnn": 20}


def cnn() -> nn.Module:
    """The paper's convolutional network: 157,206 parameters."""
    return models.cnn(initial="torch", seed=0)


def images(sizes: np.ndarray, device: str = "cpu") -> FederatedDataset:
    """Made-up images of users in one of three groups: 45%, 45%, 10%."""
    rng = np.random.default_rng(0)
    n, users = int(sizes.sum()), len(sizes)
    generator = torch.Generator(device).manual_seed(0)
    group = np.repeat(rng.choice(3, size=users, p=(0.45, 0.45, 0.1)), sizes)
    schema = Schema(
        (3, 28, 28), classes=10, attributes=(Attribute("pen", ("black", "blue", "chalk")),)
    )
    return FederatedDataset(
        torch.rand(n, 3, 28, 28, generator=generator, device=device),
        torch.from_numpy(rng.integers(0, 10, n)).to(device),
        torch.from_numpy(group).unsqueeze(1).to(device),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        schema,
    )


def workload(kind: Kind) -> tuple[FederatedDataset, nn.Module]:
    """Population and network: Adult's users (two samples each on average), or 1,000 × 20 images."""
    if kind == "adult":
        data = load_adult().partition(mean=2, seed=0)
        return data, mlp(data.schema.shape[0], seed=0)
    return images(np.full(1000, 20)), cnn()


def constraint(kind: Kind, vector: Vector) -> Constraint | None:
    """What the paper's vector is for; None for one gradient."""
    if vector == "one":
        return None
    return fnr_parity("sex") if kind == "adult" else accuracy_parity("pen")


def cohorts(data: FederatedDataset, cohort: int, count: int) -> list[Tensor]:
    """The samples of random cohorts, for those who do not sample users themselves."""
    sampler, rng = PoissonSampling(data.population, cohort), np.random.default_rng(0)
    found = []
    for _ in range(count):
        starts, sizes = data.rows(sampler.draw(rng))
        found.append(
            torch.cat([torch.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
        )
    return found


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The summed loss."""
    output = model(x)
    if output.shape[-1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(
            output.squeeze(-1), y.to(output.dtype), reduction="sum"
        )
    return nn.functional.cross_entropy(output, y, reduction="sum")


def plain_batch(
    model: nn.Module, data: FederatedDataset, precision: Precision = "float32"
) -> Callable[[Tensor], None]:
    """The floor: forward and backward on the cohort's samples as one batch, no users at all."""
    parameters, device = list(model.parameters()), data.features.device

    def run(samples: Tensor) -> None:
        x, y = data.features.index_select(0, samples), data.labels.index_select(0, samples)
        with computing(precision, device):
            loss = loss_of(model, x, y)
            torch.autograd.grad(loss, parameters)

    return run


def loop_over_users(
    model: nn.Module, data: FederatedDataset, vector: Vector, kind: Kind
) -> Callable[[np.ndarray], None]:
    """What simulators do: one user after the other, its gradients clipped and added."""
    parameters = list(model.parameters())
    wanted = constraint(kind, vector)
    groups = wanted.bind(data.schema.attributes) if wanted else None

    def gradient(value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    def run(users: np.ndarray) -> None:
        total = 0.0
        for k in users.tolist():
            part = slice(*data.offsets[k : k + 2].tolist())
            x, y = data.features[part], data.labels[part]
            if not len(y):
                continue
            output = model(x)
            flat = output.squeeze(-1) if output.shape[-1] == 1 else output
            if kind == "adult":
                loss = nn.functional.binary_cross_entropy_with_logits(
                    flat, y.float(), reduction="sum"
                )
            else:
                loss = nn.functional.cross_entropy(flat, y, reduction="sum")
            rows = [gradient(loss)]
            if wanted is not None and groups is not None:
                (rate,) = wanted.rates
                positive = flat.sigmoid()
                soft = (
                    torch.stack([1 - positive, positive], -1)
                    if kind == "adult"
                    else flat.softmax(-1)
                )
                member = groups.membership(data.attributes[part]) & rate.condition(y).unsqueeze(1)
                estimate, hard = rate.surrogate(soft, y), soft.detach().argmax(dim=-1)
                for g in range(member.shape[1]):
                    chosen = member[:, g]
                    if bool(chosen.any()):
                        rows.append(gradient(estimate[chosen].sum()))
                rows.append(rate.evaluate(hard, y) @ member.float())
                rows.append(member.sum(dim=0).float())
            v = torch.cat(rows)
            total = total + torch.nn.functional.pad(
                v * min(1.0, 1.0 / float(v.norm())), (0, 4 * len(rows[0]) + 8 - len(v))
            )

    return run


class Enough(Exception):  # noqa: N818 - not an error
    """The time is up."""


def fpfl_rounds(
    model: nn.Module, data: FederatedDataset, kind: Kind, vector: Vector, seconds: float
) -> float:
    """Rounds a second of a private training with ``fpfl.train``, after the first rounds."""
    times: list[float] = []

    def tick(_: object) -> None:
        times.append(time.perf_counter())
        if len(times) > 5 and times[-1] - times[4] > seconds:
            raise Enough

    with contextlib.suppress(Enough):
        private_training(model, data, kind, vector, COHORT[kind], 10**6, tick)
    return (len(times) - 5) / (times[-1] - times[4])


def private_training(
    model: nn.Module,
    data: FederatedDataset,
    kind: Kind,
    vector: Vector,
    cohort: int,
    rounds: int,
    callback: Callable[[object], None],
) -> None:
    """A training as a user would start it; what it learns is not the point."""
    train(
        model, data, cohort=cohort, rounds=rounds, constraint=constraint(kind, vector),
        privacy=Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-6), learning_rate=1e-3,
        seed=0, noise_seed=0, selection="last", callbacks=[callback],
    )  # fmt: skip
