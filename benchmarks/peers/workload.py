"""The workloads that fpfl and its peers are measured on, as files that need numpy alone to read.

"adult": the federated Adult of the paper and its shallow network, cohorts of 200. "cnn": made-up
images for the paper's convolutional network, which only have to cost what real ones would.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

Kind = Literal["adult", "cnn"]


@dataclass(frozen=True)
class Workload:
    """A population, its samples ordered by user, and what is done in a round.

    User k has the samples ``offsets[k]:offsets[k + 1]``; users may have none. ``features`` are
    float32, or uint8 from 0 to 255. ``model`` is "mlp" (one hidden layer of ``hidden`` units, one
    logit) or "cnn" (the paper's); ``groups`` has a code from 0 to ``group_count`` − 1 for every
    sample. The noise on the sum has the standard deviation clip × noise_multiplier.
    """

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    offsets: np.ndarray
    model: str
    hidden: int
    classes: int
    group_count: int
    cohort: int
    clip: float
    noise_multiplier: float

    @property
    def population(self) -> int:
        """K."""
        return len(self.offsets) - 1


def write_workload(path: Path | str, kind: Kind) -> None:
    """Write a workload; needs fpfl."""
    workload = {"adult": _adult, "cnn": _cnn}[kind]()
    np.savez(path, **{field.name: getattr(workload, field.name) for field in fields(workload)})


def read_workload(path: Path | str) -> Workload:
    """Read a workload; does not need fpfl."""
    with np.load(path) as stored:
        return Workload(**{name: v if v.ndim else v.item() for name, v in stored.items()})


def _adult() -> Workload:
    from fpfl import load_adult

    data = load_adult().partition(mean=2, seed=0)
    sex = [attribute.name for attribute in data.schema.attributes].index("sex")
    return Workload(
        features=data.features.numpy(),
        labels=data.labels.numpy(),
        groups=data.attributes[:, sex].numpy(),
        offsets=data.offsets.numpy(),
        model="mlp",
        hidden=10,
        classes=2,
        group_count=len(data.schema.attributes[sex].values),
        cohort=200,
        clip=1.0,
        noise_multiplier=1.0,
    )


def _cnn(users: int = 1000, samples: int = 20) -> Workload:
    rng = np.random.default_rng(0)
    n = users * samples
    group_of_user = rng.choice(3, size=users, p=(0.45, 0.45, 0.1))
    return Workload(
        features=rng.integers(0, 256, (n, 3, 28, 28), dtype=np.uint8),
        labels=rng.integers(0, 10, n),
        groups=np.repeat(group_of_user, samples),
        offsets=np.arange(0, n + 1, samples),
        model="cnn",
        hidden=100,
        classes=10,
        group_count=3,
        cohort=20,
        clip=1.0,
        noise_multiplier=1.0,
    )
