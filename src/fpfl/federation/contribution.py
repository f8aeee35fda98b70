r"""What a node sends for a round: its sampled users' whole numbers, added up, and its noise.

    Σ_{k sampled here} z^k + noise    (mod 2³²),    z^k = the encoded, clipped vector of user k

Every user has a coin of its own, which shows with probability exactly m/K and is told to nobody,
however many users there are. A node where nobody is sampled sends its noise alone, and looks the
same from outside. So does one whose files cannot be read at all: an error would say something about
the data, and it stays on the node. A sample that is not what was declared is its user's matter
alone: that user sends zero, and the others what they always do.

Round 0 is the measurement, where there is one: every user's histogram is in it, without coins
(`fpfl.federation.measurement`). What came of it is broadcast with the model from then on, and
inputs are scaled here as `fpfl.train` scales them.

The time that an answer takes is seen, too. A node where nobody is sampled computes somebody all the
same and throws it away, so that one with a single user always does the same work. On a node with
many the time still grows with how many are sampled: `Agreement.hold` keeps every answer back until
it is over for all.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.aggregation.clipping import DenseRows, clip
from fpfl.aggregation.encoding import in_ring, system_uniform
from fpfl.aggregation.noise import discrete_gaussian
from fpfl.data.checks import checked_by_user
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import Scaling, scaling_of
from fpfl.fairness.totals import Weights
from fpfl.federation.agreement import Agreement
from fpfl.numerics.randomness import RoundStreams, derived_seed, hashed
from fpfl.privacy.sampling import PoissonSampling
from fpfl.training.inputs import numbers_of, scaled, with_numbers
from fpfl.users.engine import CohortEngine

log = logging.getLogger("fpfl.federation")

Loader = Callable[[], FederatedDataset]

ROWS_BYTES = 2**24
"""Bytes of users' vectors, in double precision, that are written down at a time; one at least."""

ROUNDED = 2.0**-20
"""How far below the agreed least weight one may be by rounding."""


class Chance(Protocol):
    """Where a node's randomness comes from."""

    def sampled(self, users: int, agreement: Agreement, round: int) -> NDArray[np.int64]:
        """Which of the node's users take part, by their own coins."""
        ...

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers from [0, 1), for rounding."""
        ...

    def noise(self, size: int, bits: int, round: int) -> NDArray[np.int64]:
        """The node's share of noise, of deviation 2^bits."""
        ...


@dataclass(frozen=True)
class SystemChance:
    """The operating system's randomness, and exact samplers on it."""

    def sampled(self, users: int, agreement: Agreement, round: int) -> NDArray[np.int64]:
        """See `Chance`. A whole number below K is below m with probability m/K, exactly."""
        m, K = agreement.cohort, agreement.population
        return np.array([k for k in range(users) if secrets.randbelow(K) < m], dtype=np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """See `Chance`."""
        return system_uniform(count)

    def noise(self, size: int, bits: int, round: int) -> NDArray[np.int64]:
        """See `Chance`."""
        return discrete_gaussian(size, os.urandom, bits)


@dataclass(frozen=True)
class TestChance:
    """Coins and noise from a seed, to compare with a simulation: NOT PRIVATE.

    The cohort is the one that ``fpfl.train`` draws with the same seed, of users numbered through
    all nodes: this node's begin with ``first``.
    """

    seed: int
    node: int
    first: int
    _rounding: np.random.Generator = field(init=False, repr=False, compare=False)

    __test__ = False  # not one of pytest's

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rounding", np.random.default_rng([self.seed, self.node]))

    def sampled(self, users: int, agreement: Agreement, round: int) -> NDArray[np.int64]:
        """See `Chance`."""
        sampling = PoissonSampling(agreement.population, agreement.cohort)
        drawn = sampling.draw(RoundStreams(self.seed, "cohorts").of(round)) - self.first
        return np.asarray(drawn[(drawn >= 0) & (drawn < users)])

    def uniform(self, count: int) -> NDArray[np.float64]:
        """See `Chance`."""
        return self._rounding.random(count)

    def noise(self, size: int, bits: int, round: int) -> NDArray[np.int64]:
        """See `Chance`; the same again for the same seed, node and round."""
        key = hashed(derived_seed(self.seed, "noise"), self.node, round)
        normal = np.random.default_rng(key).standard_normal(size)
        return np.asarray(np.round(normal * 2.0**bits), dtype=np.int64)


@dataclass(frozen=True)
class Contribution:
    """Makes a node's vectors.

    Parameters
    ----------
    agreement
        What was agreed.
    load
        Reads the node's users; called once, when it is needed.
    chance
        Where randomness comes from.
    overran
        Told of a round that took longer than `hold`, and how many seconds. It stays on the node.
    """

    agreement: Agreement
    load: Loader
    chance: Chance
    overran: Callable[[int, float], None] | None = None

    def vector(
        self,
        round: int,
        w: Tensor | None = None,
        weights: Weights | None = None,
        level: int | None = None,
        scaling: Scaling | None = None,
    ) -> NDArray[np.uint32]:
        """The node's whole numbers for a round at w, with its noise; round 0 has no w.

        ``level`` is that of the clip bound, where it adapts; ``scaling`` that of the inputs, where
        they are scaled.
        """
        begun = time.monotonic()
        encoding, bits = self.agreement.encodings(round)
        total, size = np.zeros(encoding.size, dtype=np.int64), encoding.size
        try:
            if round == 0:
                total += self._measured()
            else:
                assert w is not None  # of every round of training
                total += self._users(round, w, weights, level, scaling)
        except Exception:
            # Whatever it is: that data here is bad, or missing, is this node's to know.
            log.exception("round %d: the data of this node cannot be used; it sends zero", round)
        if bits is not None:
            total += self.chance.noise(size, bits, round)
        left = self.agreement.hold - (time.monotonic() - begun)
        if left > 0:
            time.sleep(left)
        elif self.agreement.hold:
            log.warning(
                "round %d: this took longer than the %g s that answers are held back for, and the "
                "server can see it: agree on more",
                round, self.agreement.hold,
            )  # fmt: skip
            if self.overran is not None:
                self.overran(round, self.agreement.hold - left)
        return in_ring(total)

    def _data(self) -> FederatedDataset:
        """The node's users, where they are what was agreed on."""
        with checked_by_user():  # one user's bad sample must not take the others away
            data = replace(self.load(), checked=False)
        _check(data, self.agreement)
        return data

    def _measured(self) -> NDArray[np.int64]:
        """Every user's histograms, each rounded on its own."""
        measured, (encoding, _) = self.agreement.measured, self.agreement.encodings(0)
        assert measured is not None  # or there is no round 0
        total = np.zeros(encoding.size, dtype=np.int64)
        at_once = max(1, ROWS_BYTES // (8 * measured.size))
        for rows in measured.vectors(self._data(), at_once):
            for whole in encoding.each(rows, 0, self.chance.uniform):
                total += whole.numpy()
        return total

    def _users(
        self,
        round: int,
        w: Tensor,
        weights: Weights | None,
        level: int | None,
        scaling: Scaling | None,
    ) -> NDArray[np.int64]:
        agreement, data = self.agreement, self._data()
        if scaling is not None:
            data = scaled(data, scaling)
        engine = agreement.engine(data)
        everybody = np.arange(data.population, dtype=np.int64)
        if not len(everybody):
            return np.zeros(agreement.encoding.size, dtype=np.int64)
        picked = agreement.privacy is not None and agreement.privacy.convention == "picked"
        users = everybody if picked else self.chance.sampled(data.population, agreement, round)
        total = np.zeros(agreement.encoding.size, dtype=np.int64)
        key = secrets.randbelow(2**63)  # for samples and dropout
        # Somebody is computed for the time it takes alone: nobody's data gets into the sum.
        chosen = users if len(users) else everybody[secrets.randbelow(len(everybody)) :][:1]
        try:
            found = self._summed(engine, round, w, chosen, key, weights, level)
            return total + found if len(users) else total
        except Exception:
            log.exception("round %d: not all users can be computed together", round)
        if len(users) <= 1:
            return total
        for user in users:
            try:
                total += self._summed(engine, round, w, np.array([user]), key, weights, level)
            except Exception:
                log.exception("round %d: the data of one user cannot be used; it sends zero", round)
        return total

    def _summed(
        self,
        engine: CohortEngine,
        round: int,
        w: Tensor,
        users: NDArray[np.int64],
        key: int,
        weights: Weights | None,
        level: int | None,
    ) -> NDArray[np.int64]:
        agreement = self.agreement
        rules, encoding = agreement.at(level)
        total = np.zeros(agreement.encoding.size, dtype=np.int64)
        at_once = max(1, ROWS_BYTES // (8 * encoding.size))
        for rows in engine.statistics(w, users, key, weights=weights):
            for begin in range(0, len(rows), at_once):
                some = rows.some(begin, begin + at_once)
                clipped = clip(DenseRows(some.dense(), agreement.layout.slices), rules)
                for whole in encoding.each(clipped, round, self.chance.uniform):
                    total += whole.numpy()
        return total


def _check(data: FederatedDataset, agreement: Agreement) -> None:
    """Refuse data that is not what the agreement's schema says; stays on the node."""
    mine, agreed = data.schema, agreement.schema
    names = ("shape", "classes", "label_range", "attributes")
    wrong = [name for name in names if getattr(mine, name) != getattr(agreed, name)]
    if wrong:
        raise ValueError(
            f"the data's schema has another {' and '.join(wrong)} than was agreed: "
            f"{[getattr(mine, name) for name in wrong]}"
        )
    inputs = agreement.inputs
    if inputs is not None and (data.lazy or data.columns not in ((), inputs.columns)):
        raise ValueError(
            "the data's inputs are to be scaled, and they are read from files or have other "
            "columns than were agreed on: read the table by the agreement's schema"
        )


def broadcast(
    round: int,
    w: Tensor,
    weights: Weights | None,
    level: int | None = None,
    scaling: Scaling | None = None,
) -> dict[str, bytes | float | int]:
    """What the server sends beside a round's shares: its number, the model, weights if there are.

    The clip bound's level, where it adapts, and the inputs' scaling, where they were measured. A
    hash of all of it is in every mask, so that nothing comes of sending other things to others.
    """
    said: dict[str, bytes | float | int] = {"round": round, "w": _bytes(w)}
    if scaling is not None:
        said["scaling"] = np.array(numbers_of(scaling), dtype="<f8").tobytes()
    if level is not None:
        said["level"] = level
    if weights is not None:
        said |= {
            "groups": _bytes(weights.groups),
            "overall": _bytes(weights.overall),
            "low": float(weights.low),
            "high": float(weights.high),
        }
    return said


def received(said: dict[str, object], agreement: Agreement) -> tuple[Tensor, Weights | None]:
    """The model and the weights of a broadcast; what was not agreed on is refused."""
    layout = agreement.layout
    like = agreement.spec.flat.vector()
    w = _tensor(said, "w", (layout.parameters,), like)
    if "groups" not in said:
        return w, None
    rates, groups = len(layout.rates), len(layout.groups)
    return w, Weights(
        _tensor(said, "groups", (rates, groups), like),
        _tensor(said, "overall", (rates,), like),
        *_range(said, agreement),
    )


def _range(said: Mapping[str, object], agreement: Agreement) -> tuple[float, float]:
    """The range of samples' weights; one that reaches beyond the agreed method's is refused."""
    method = agreement.spec.method
    least, most = getattr(method, "low", 0.0), getattr(method, "high", math.inf)
    low, high = said.get("low"), said.get("high")
    # Weights are computed in single precision: the least may be a rounding below the agreed one.
    if (
        isinstance(low, float)
        and isinstance(high, float)
        and max(0.0, least - ROUNDED) <= low <= 1.0 <= high <= most
        and math.isfinite(high)
    ):
        return low, high
    raise ValueError(
        f"the range of samples' weights is [{low!r}, {high!r}]; it must contain 1 and lie within "
        f"[{least:g}, {most:g}], which was agreed on"
    )


def received_round(said: Mapping[str, object], agreement: Agreement) -> int:
    """The round that a broadcast is of; what is no round of the agreement is refused.

    Round 0 is there where the agreement measures. Nothing but its number says what a round is of.
    """
    round, first = said.get("round"), int(agreement.measured is None)
    if type(round) is not int or not first <= round <= agreement.rounds:
        raise ValueError(
            f"a round must be a whole number from {first} to {agreement.rounds}, which were agreed "
            f"on, but got {round!r}"
        )
    return round


def received_scaling(said: Mapping[str, object], agreement: Agreement) -> Scaling | None:
    """The scaling of the inputs: that of the columns, with the numbers that were found out."""
    inputs, data = agreement.inputs, said.get("scaling")
    if inputs is None or not inputs.measured:
        if data is not None:
            raise ValueError("a scaling of the inputs came, and none is measured")
        return None if inputs is None else scaling_of(inputs.columns, inputs.size)
    plain = scaling_of(inputs.columns, inputs.size)
    count = len(numbers_of(plain))
    if not isinstance(data, bytes) or len(data) != 8 * count:
        raise ValueError(f"'scaling' must be {count} numbers of 8 bytes")
    try:
        return with_numbers(plain, np.frombuffer(data, dtype="<f8").tolist())
    except ValueError:
        raise ValueError(
            "'scaling' must have finite centres, positive widths and ascending knots"
        ) from None


def received_level(said: Mapping[str, object], agreement: Agreement) -> int | None:
    """The level of the clip bound; one that is not on the agreed grid is refused."""
    level, grid = said.get("level"), agreement.grid
    if grid is None:
        if level is None:
            return None
        raise ValueError(f"a level of the clip bound came, {level!r}, and the bound is fixed")
    grid.at(level)  # type: ignore[arg-type] # whatever it is
    assert isinstance(level, int)
    return level


def _bytes(numbers: Tensor) -> bytes:
    """Numbers as they are: 4 bytes each in single precision or less, else 8."""
    numbers = numbers.detach().cpu()
    if numbers.dtype == torch.float64:
        return numbers.numpy().astype("<f8").tobytes()
    return numbers.float().numpy().astype("<f4").tobytes()


def _tensor(said: dict[str, object], name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    data = said.get(name)
    count = int(np.prod(shape))
    kinds = {4 * count: "<f4", 8 * count: "<f8"}
    if not isinstance(data, bytes) or len(data) not in kinds:
        raise ValueError(f"{name!r} must be {count} numbers of 4 or 8 bytes")
    numbers = np.frombuffer(data, dtype=kinds[len(data)]).reshape(shape)
    return torch.from_numpy(numbers.copy()).to(like.dtype)
