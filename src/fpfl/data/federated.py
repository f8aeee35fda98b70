"""Federated datasets: samples ordered by user, with offsets.

Users without samples are users: they are in the population, can be sampled, and send zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fpfl.data.schema import Schema
from fpfl.randomness import stream


@dataclass(frozen=True)
class Cohort:
    """The samples of several users, padded to the largest: B users with up to S samples.

    ``features`` (B, S, ...), ``labels`` (B, S), ``attributes`` (B, S, A) and ``mask`` (B, S),
    which is True for real samples.
    """

    features: Tensor
    labels: Tensor
    attributes: Tensor
    mask: Tensor


@dataclass(frozen=True)
class FederatedDataset:
    """A population of users and their samples.

    Parameters
    ----------
    features
        Shape (n, ...), each sample of ``schema.shape``; finite.
    labels
        Shape (n,): class numbers, or reals within ``schema.label_range``.
    attributes
        Shape (n, number of declared attributes): codes, -1 where unknown.
    offsets
        Shape (K + 1,): user k has the samples ``offsets[k]:offsets[k + 1]``.
    schema
        The declared public schema.

    Notes
    -----
    The checks made here look at data. They are for simulations and for a user's own machine; a
    federation's client replaces bad data by a zero vector instead of raising.
    """

    features: Tensor
    labels: Tensor
    attributes: Tensor
    offsets: Tensor
    schema: Schema

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_samples(
        cls,
        features: ArrayLike | Tensor,
        labels: ArrayLike | Tensor,
        attributes: ArrayLike | Tensor | None,
        schema: Schema,
        users: ArrayLike | None = None,
    ) -> FederatedDataset:
        """Make a dataset from samples in any order.

        Parameters
        ----------
        features, labels, attributes
            One row a sample; ``attributes`` may be None where none are declared.
        schema
            The declared public schema. Where it declares a population larger than the number of
            users seen, the rest are users without samples. Declare it where you can: K counted
            from the data changes with who has some.
        users
            The user of every sample (numbers or names). Without it every sample is a user.
        """
        x = _tensor(features)
        y = _tensor(labels)
        y = y.to(torch.float32) if schema.classes is None else _whole(y)
        n = len(x)
        if attributes is None:
            attributes = np.zeros((n, 0), dtype=np.int64)
        a = _whole(_tensor(attributes))
        if a.ndim == 1:
            a = a.unsqueeze(-1)
        if users is None:
            sizes = np.ones(n, dtype=np.int64)
        else:
            ids = np.asarray(users)
            if ids.shape != (n,):
                raise ValueError(f"users has shape {ids.shape}; expected one for each of {n} rows")
            _, codes, sizes = np.unique(ids, return_inverse=True, return_counts=True)
            order = torch.from_numpy(np.argsort(codes, kind="stable"))
            if len(y) == n and len(a) == n:
                x, y, a = x[order], y[order], a[order]
        missing = (schema.population or 0) - len(sizes)
        if missing > 0:
            sizes = np.concatenate([sizes, np.zeros(missing, dtype=np.int64)])
        return cls(x, y, a, _offsets(sizes), schema)

    @property
    def population(self) -> int:
        """K: the number of users, those without samples among them."""
        return len(self.offsets) - 1

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.labels)

    def sizes(self) -> Tensor:
        """n^k: the number of samples of every user."""
        return self.offsets.diff()

    def partition(self, *, mean: float = 2.0, seed: int | None = None) -> FederatedDataset:
        """Deal the samples to users whose sizes are Poisson with the given mean (the paper's).

        There are K = round(n/mean) users and each sample goes to one of them at random, so the
        sizes are independent Poisson numbers given that they add up to n. Users who get nothing
        stay: K ≈ 16,280 on Adult only holds with them.
        """
        if not mean > 0:
            raise ValueError(f"mean is {mean}; it must be positive")
        users = max(1, round(len(self) / mean))
        rng = stream(seed, "partition")
        owner = rng.integers(0, users, size=len(self))
        # Shuffled first: the order of a user's samples should say nothing about the file's.
        order = rng.permutation(len(self))
        order = order[np.argsort(owner[order], kind="stable")]
        sizes = np.bincount(owner, minlength=users)
        return self._take(torch.from_numpy(order), sizes, samples_per_user=mean)

    def single_samples(self) -> FederatedDataset:
        """The same samples with every sample a user of its own (central training)."""
        ones = np.ones(len(self), dtype=np.int64)
        return self._take(torch.arange(len(self)), ones, samples_per_user=1.0)

    def subset(self, users: ArrayLike) -> FederatedDataset:
        """The given users (numbers from 0 to K − 1), in the given order."""
        chosen = torch.as_tensor(np.asarray(users, dtype=np.int64))
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.population:
            raise ValueError(f"users must be numbers from 0 to {self.population - 1}")
        pieces = [torch.arange(*self.offsets[k : k + 2].tolist()) for k in chosen.tolist()]
        order = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
        sizes = self.sizes().cpu()[chosen].numpy()
        return self._take(order, sizes, samples_per_user=self.schema.samples_per_user)

    def split(
        self, fraction: float, *, seed: int | None = None
    ) -> tuple[FederatedDataset, FederatedDataset]:
        """Split the users at random; the second part has the given fraction (held-out users)."""
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"fraction is {fraction}; it must be between 0 and 1")
        order = stream(seed, "partition").permutation(self.population)
        held = max(1, round(fraction * self.population))
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    def cohort(
        self,
        users: NDArray[np.int64],
        *,
        samples_per_user: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> Cohort:
        """Gather the given users' samples; of large users only a random part, where asked."""
        chosen = torch.from_numpy(users).to(self.offsets.device)
        starts = self.offsets[chosen]
        sizes = self.offsets[chosen + 1] - starts
        longest = int(sizes.max()) if len(sizes) else 0
        position = torch.arange(longest, device=starts.device)
        mask = position < sizes.unsqueeze(1)
        within = position.expand(len(chosen), longest)
        if samples_per_user is not None and longest > samples_per_user:
            if rng is None:
                raise ValueError("samples_per_user needs a random stream; none was given")
            keys = torch.from_numpy(rng.random(mask.shape)).to(mask.device)
            within = torch.where(mask, keys, 2.0).argsort(dim=1)[:, :samples_per_user]
            mask = mask.gather(1, within)
        # Padding repeats the user's own first sample: somebody else's could leak through a model
        # that makes NaN of it. (Users without samples have none; their rows are masked whole.)
        index = starts.unsqueeze(1) + torch.where(mask, within, 0)
        index = index.clamp(max=max(len(self) - 1, 0))
        return Cohort(self.features[index], self.labels[index], self.attributes[index], mask)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FederatedDataset:
        """The same dataset on another device, its real features (and labels) in another type."""
        x = self.features
        y = self.labels
        if dtype is not None and x.is_floating_point():
            x = x.to(dtype)
        if dtype is not None and y.is_floating_point():
            y = y.to(dtype)
        return replace(
            self,
            features=x.to(device),
            labels=y.to(device),
            attributes=self.attributes.to(device),
            offsets=self.offsets.to(device),
        )

    def _take(
        self, order: Tensor, sizes: NDArray[np.int64], *, samples_per_user: float | None
    ) -> FederatedDataset:
        return FederatedDataset(
            self.features[order],
            self.labels[order],
            self.attributes[order],
            _offsets(sizes),
            replace(self.schema, population=None, samples_per_user=samples_per_user),
        )


def _offsets(sizes: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _tensor(values: ArrayLike | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"values of type {array.dtype} were given; expected numbers (encode text columns as "
            "codes of the schema's values, or one-hot)"
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def _whole(values: Tensor) -> Tensor:
    if values.is_floating_point() and not bool((values == values.round()).all()):
        raise ValueError("labels and attribute codes must be whole numbers; fractions were given")
    return values.to(torch.int64)


def _check(data: FederatedDataset) -> None:
    schema, n = data.schema, len(data.features)
    if tuple(data.features.shape[1:]) != schema.shape:
        raise ValueError(
            f"features have shape {tuple(data.features.shape)}; the schema declares samples of "
            f"shape {schema.shape}"
        )
    if data.labels.shape != (n,):
        raise ValueError(
            f"labels have shape {tuple(data.labels.shape)}; expected ({n},), one for each sample"
        )
    if data.attributes.shape != (n, len(schema.attributes)):
        raise ValueError(
            f"attribute codes have shape {tuple(data.attributes.shape)}; expected "
            f"({n}, {len(schema.attributes)}): one row for each sample, one column for each "
            f"declared attribute {[a.name for a in schema.attributes]}"
        )
    offsets = data.offsets
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != n or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"offsets must rise from 0 to the number of samples {n} over at least one user"
        )
    if schema.population is not None and schema.population != data.population:
        raise ValueError(
            f"there are {data.population} users; the schema declares {schema.population}"
        )
    if data.features.is_floating_point():
        bad = ~data.features.isfinite().reshape(n, -1).all(dim=1)
        if bool(bad.any()):
            raise ValueError(
                f"{int(bad.sum())} samples have NaN or infinite features (the first is sample "
                f"{int(bad.nonzero()[0])}); fill or drop them first"
            )
    if schema.classes is not None:
        low, high, what = 0.0, float(schema.classes - 1), f"classes 0 to {schema.classes - 1}"
    else:
        assert schema.label_range is not None  # the schema checked it
        (low, high), what = schema.label_range, f"the range {schema.label_range}"
    if n and not bool(((data.labels >= low) & (data.labels <= high)).all()):
        raise ValueError(
            f"labels run from {float(data.labels.min()):g} to {float(data.labels.max()):g}; the "
            f"schema declares {what}"
        )
    for column, attribute in enumerate(schema.attributes):
        attribute.check_codes(data.attributes[:, column])
