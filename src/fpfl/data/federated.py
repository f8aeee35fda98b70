"""Federated datasets: samples ordered by user, with offsets.

Users without samples are users: they are in the population, can be sampled, and send zero. Values
of an attribute can be merged where groups would be too small for anything to be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fpfl.data.checks import check_shapes, check_values, refusing
from fpfl.data.inputs import InputColumn
from fpfl.data.prefetch import prefetch
from fpfl.data.schema import Attribute, Schema
from fpfl.numerics.randomness import stream

MOST_MISSING = 2**31
"""So many users without samples are rejected as a likely typo: 16 GiB of offsets."""

NO_CODE = -(2.0**31)
"""No schema declares so many classes or values."""


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
        Shape (K + 1,): user k has the samples ``offsets[k]:offsets[k + 1]``. Always on the CPU,
        where cohorts are drawn and looked up.
    schema
        The declared public schema.
    lazy
        The population stays where it is and is read user by user: the tensors are mapped files,
        which need not fit in memory and must not be written to. `open` makes such datasets.
    columns
        What is public about the table's columns that the features are from, by which training
        scales them (`fpfl.data.inputs`); none where features are used as they are.

    Notes
    -----
    The checks made here look at data, for whoever makes a dataset. A federation's node has them
    made user by user (`fpfl.data.checked_by_user`): there a bad sample is a zero vector of its user
    and nobody else's matter. Of lazy data, and of what is not ``checked``, shapes alone are looked
    at here.
    """

    features: Tensor
    labels: Tensor
    attributes: Tensor
    offsets: Tensor
    schema: Schema
    lazy: bool = field(default=False, kw_only=True)
    checked: bool = field(default=True, kw_only=True)
    columns: tuple[InputColumn, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", self.offsets.cpu())
        check_shapes(self)
        if self.lazy or not refusing():
            object.__setattr__(self, "checked", False)
        elif self.checked:
            check_values(self)

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
            users seen, the rest are users without samples; where there are more, all stay (`K`).
            Declare it where you can: K counted from the data changes with who has some, and
            ``add-remove`` neighbours need a declared one.
        users
            The user of every sample (numbers or names). Without it every sample is a user.
        """
        x, y, a = sample_columns(features, labels, attributes, schema)
        n = len(x)
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
        missing = _missing(schema, len(sizes))
        if missing > 0:
            sizes = np.concatenate([sizes, np.zeros(missing, dtype=np.int64)])
        return cls(x, y, a, _offsets(sizes), schema)

    @staticmethod
    def open(folder: str | Path) -> FederatedDataset:
        """Open a population folder, to be read lazily; see `fpfl.data.files`."""
        from fpfl.data.files import open_population

        return open_population(folder)

    def save(self, folder: str | Path) -> Path:
        """Write the population to a new folder of NumPy files; see `fpfl.data.files`."""
        from fpfl.data.files import save_population

        return save_population(self, folder)

    @property
    def population(self) -> int:
        """The number of users who are here, those without samples among them."""
        return len(self.offsets) - 1

    @property
    def K(self) -> int:
        """The number of users that ε is computed with: declared, or counted where it is not.

        With Poisson cohorts there may be more users here than K: each is drawn with probability
        m/K all the same, and nothing that is shown depends on how many they are.
        """
        return self.schema.population or self.population

    def declared(self, population: int) -> FederatedDataset:
        """The same users, of whom K is declared: a public number, which need not be exact.

        Where there are fewer, users without samples are added; where there are more, all stay.
        """
        schema = replace(self.schema, population=population)
        missing = _missing(schema, self.population)
        if missing == 0:
            return replace(self, schema=schema)
        offsets = torch.cat([self.offsets, self.offsets[-1:].expand(missing)])
        return replace(self, offsets=offsets, schema=schema)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.labels)

    def sizes(self) -> Tensor:
        """n^k: the number of samples of every user."""
        return self.offsets.diff()

    def rows(
        self, users: ArrayLike, *, strict: bool = True
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the given users' first samples, and how many samples they have.

        Takes time by the users asked for, whatever the population. A lazy population's user whose
        offsets are damaged is an error, or, where that is not ``strict``, has no samples.
        """
        chosen = np.asarray(users, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.population:
            raise ValueError(
                f"users run from {chosen.min()} to {chosen.max()}; users must be numbers from 0 "
                f"to {self.population - 1}"
            )
        offsets = self.offsets.numpy()
        starts = offsets[chosen].astype(np.int64, copy=False)
        stops = offsets[chosen + 1].astype(np.int64, copy=False)
        if self.lazy:  # nobody has looked at all of them
            bad = (starts < 0) | (starts > stops) | (stops > len(self))
            if not strict:
                starts, stops = np.where(bad, 0, starts), np.where(bad, 0, stops)
            elif bad.any():
                raise ValueError(
                    f"user {chosen[bad][0]} has the samples {starts[bad][0]}:{stops[bad][0]} of "
                    f"{len(self)}; offsets must rise from 0 to the number of samples. "
                    "offsets.npy is damaged: write the population again"
                )
        return starts, stops - starts

    def gather(self, index: Tensor | NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Copy features, labels and attributes of the samples with the given numbers.

        They are on the data's device and of its types. Of lazy data only these samples are read.
        """
        chosen = torch.as_tensor(index)
        if self.lazy:
            rows = chosen.cpu().numpy()
            for values in (self.features, self.labels, self.attributes):
                prefetch(values, rows)
        chosen = chosen.to(self.features.device)
        return (
            self.features.index_select(0, chosen),
            self.labels.index_select(0, chosen),
            self.attributes.index_select(0, chosen),
        )

    def partition(
        self, *, mean: float = 2.0, seed: int | None = None, population: int | None = None
    ) -> FederatedDataset:
        """Deal the samples to users whose sizes are Poisson with the given mean (the paper's).

        There are K = round(n/mean) users and each sample goes to one of them at random, so the
        sizes are independent Poisson numbers given that they add up to n. Users who get nothing
        stay: K ≈ 16,280 on Adult only holds with them. Lazy data cannot be dealt: that would take
        all of it into memory. K is so counted from the data; ``population`` declares it instead.
        """
        self._in_memory("partition", "deal the samples to users before they are written")
        if not mean > 0:
            raise ValueError(f"mean is {mean}; it must be positive")
        users = max(1, round(len(self) / mean)) if population is None else population
        if users < 1:
            raise ValueError(f"the population is {users}; it must be at least 1")
        rng = stream(seed, "partition")
        owner = rng.integers(0, users, size=len(self))
        # Shuffled first: the order of a user's samples should say nothing about the file's.
        order = rng.permutation(len(self))
        order = order[np.argsort(owner[order], kind="stable")]
        sizes = np.bincount(owner, minlength=users)
        dealt = self._take(torch.from_numpy(order), sizes, samples_per_user=mean)
        return dealt if population is None else dealt.declared(population)

    def single_samples(self) -> FederatedDataset:
        """The same samples with every sample a user of its own (central training).

        Lazy data stays so: only the n + 1 offsets are in memory.
        """
        if self.lazy:
            schema = replace(self.schema, population=None, samples_per_user=1.0)
            return replace(self, offsets=torch.arange(len(self) + 1), schema=schema)
        ones = np.ones(len(self), dtype=np.int64)
        return self._take(torch.arange(len(self)), ones, samples_per_user=1.0)

    def subset(self, users: ArrayLike) -> FederatedDataset:
        """The given users (numbers from 0 to K − 1), in the given order.

        Of lazy data only these users are read, and they are in memory then.
        """
        starts, sizes = self.rows(users)
        before = np.cumsum(sizes) - sizes
        order = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
        samples_per_user = self.schema.samples_per_user
        try:
            return self._take(torch.from_numpy(order), sizes, samples_per_user=samples_per_user)
        except ValueError as error:
            if not self.lazy:
                raise
            raise ValueError(  # nobody has looked at them before
                f"the population's files do not hold what its schema.json declares: {error}"
            ) from error

    def split(
        self, fraction: float, *, seed: int | None = None
    ) -> tuple[FederatedDataset, FederatedDataset]:
        """Split the users at random; the second part has the given fraction (held-out users).

        Lazy data cannot be split: its two parts would be all of it, in memory.
        """
        self._in_memory("split", "write training and held-out users to two folders")
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"fraction is {fraction}; it must be between 0 and 1")
        order = stream(seed, "partition").permutation(self.population)
        held = max(1, round(fraction * self.population))
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FederatedDataset:
        """The same dataset on another device, its real features (and labels) in another type.

        Features beyond that type's numbers become its largest.
        Offsets stay on the CPU. Lazy data stays where and as it is: whoever gathers some samples
        of it moves and converts those.
        """
        if self.lazy:
            return self
        x = self.features
        y = self.labels
        tensors = (x, y, self.attributes)
        there = all(each.device == torch.device(device) for each in tensors)
        if there and all(
            dtype in (None, each.dtype) for each in (x, y) if each.is_floating_point()
        ):
            return self
        if dtype is not None and x.is_floating_point():
            largest = torch.finfo(dtype).max
            # An error would be about one sample, and a cast would make it infinite.
            x = (x if torch.finfo(x.dtype).max <= largest else x.clamp(-largest, largest)).to(dtype)
        if dtype is not None and y.is_floating_point():
            y = y.to(dtype)
        return replace(
            self,
            features=x.to(device),
            labels=y.to(device),
            attributes=self.attributes.to(device),
        )

    def input_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a model with parameters of the given type gets the features.

        Real features take the model's type; whole numbers (codes, raw images) stay as they are.
        """
        return dtype if self.features.is_floating_point() else self.features.dtype

    def _take(
        self, order: Tensor, sizes: NDArray[np.int64], *, samples_per_user: float | None
    ) -> FederatedDataset:
        return FederatedDataset(
            *self.gather(order),
            _offsets(sizes),
            replace(self.schema, population=None, samples_per_user=samples_per_user),
            checked=self.checked or self.lazy,
            columns=self.columns,
        )

    def _in_memory(self, what: str, instead: str) -> None:
        if self.lazy:
            raise ValueError(
                f"{what} takes all samples into memory, and this population is read from disk; "
                f"{instead} (fpfl.data.PopulationWriter), or take some users into memory first: "
                "data.subset(users)"
            )


def sample_columns(
    features: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    attributes: ArrayLike | Tensor | None,
    schema: Schema,
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples as tensors of the types a dataset has; ``exact`` keeps float64 as it is."""
    x, y = _tensor(features, exact=exact), _tensor(labels, exact=exact)
    if schema.classes is not None:
        y = _whole(y)
    elif not exact:
        y = y.to(torch.float32)
    a = torch.zeros(len(x), 0) if attributes is None else _tensor(attributes)
    return x, y, _whole(a.unsqueeze(-1) if a.ndim == 1 else a)


def _missing(schema: Schema, users: int) -> int:
    """How many users without samples there are besides these, by what is declared."""
    missing = max(0, (schema.population or 0) - users)
    if missing > MOST_MISSING:
        raise ValueError(
            f"the schema declares a population of {schema.population}, far more than users have "
            "samples: too many without any for a dataset in memory. Correct the number"
        )
    return missing


def _offsets(sizes: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _tensor(values: ArrayLike | Tensor, *, exact: bool = False) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype == np.float64 and not exact:
        with np.errstate(over="ignore"):  # what becomes infinite is refused as that
            array = array.astype(np.float32)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(
            f"values of type {array.dtype} were given; expected numbers of up to 64 bits (encode "
            "text columns as codes of the schema's values, or one-hot)"
        )
    native = array.dtype.newbyteorder("=")  # torch knows no other
    return torch.from_numpy(np.ascontiguousarray(array, dtype=native))


def _whole(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64)
    whole = values == values.round()
    if refusing() and not bool(whole.all()):
        raise ValueError("labels and attribute codes must be whole numbers; fractions were given")
    # What stands for a fraction is no declared code either.
    return values.masked_fill(~whole, NO_CODE).clamp(NO_CODE, -NO_CODE).to(torch.int64)


def merge_values(
    data: FederatedDataset, attribute: str, into: Mapping[str, Sequence[str]]
) -> FederatedDataset:
    """The same samples with some values of an attribute taken together.

    Which values are too rare has to be public, a published census for example: whoever counts them
    in the users' data has released something.

    Parameters
    ----------
    data
        A population in memory.
    attribute
        The attribute's name.
    into
        For every new value, the old ones that become it; values that are not named stay.
    """
    column, old = _column(data, attribute)
    target = {value: value for value in old.values}
    named: list[str] = []
    for new, values in into.items():
        if isinstance(values, str):
            raise ValueError(f"{new!r} is made of {values!r}; give a list of values")
        twice = [value for value in values if value in named]
        if twice:
            raise ValueError(f"{twice} would become two values of {attribute!r}; name each once")
        named += values
        strange = [value for value in values if value not in target]
        if strange:
            raise ValueError(f"{attribute!r} has no value {strange}; it has {list(old.values)}")
        target |= dict.fromkeys(values, new)
    names = tuple(dict.fromkeys(target[value] for value in old.values))
    table = torch.tensor([names.index(target[value]) for value in old.values])
    codes = data.attributes.clone()
    # What is no code stays none: it is looked at where its user is computed.
    codes[codes[:, column] >= len(table), column] = int(NO_CODE)
    known = codes[:, column] >= 0
    codes[known, column] = table.to(codes.device)[codes[known, column]]
    merged = Attribute(attribute, names, old.unknown)
    attributes = tuple(merged if a.name == attribute else a for a in data.schema.attributes)
    return replace(data, attributes=codes, schema=replace(data.schema, attributes=attributes))


def _column(data: FederatedDataset, attribute: str) -> tuple[int, Attribute]:
    for column, each in enumerate(data.schema.attributes):
        if each.name == attribute:
            return column, each
    names = [each.name for each in data.schema.attributes]
    raise ValueError(f"there is no attribute {attribute!r}; the schema declares {names}")
