"""What an attack is made of: a population with secret coins in it, and all that a run released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import Attribute, Schema
from fpfl.fairness.constraints import Constraint, fnr_parity
from fpfl.methods import Method, ReweightingMethod, Unconstrained
from fpfl.privacy.settings import JOINT, Clipping, Privacy
from fpfl.privacy.statement import PrivacyStatement
from fpfl.server.loop import OptimizerFactory
from fpfl.training.spec import chosen_clipping, layout_of

CONSTRAINT = fnr_parity("group", tolerance=0.02)


@dataclass(frozen=True)
class Setup:
    """What an attack needs to know of the audit's settings."""

    privacy: Privacy
    neighbours: str
    constraint: Constraint | None
    canaries: int
    groups: int = 2
    method: Method | None = None

    @property
    def replaced(self) -> bool:
        """Whether tails is other data in the user's place, and not nothing."""
        return self.neighbours == "replace-one"

    @property
    def one_gradient(self) -> bool:
        """Whether users send one gradient, of an objective with broadcast weights."""
        return isinstance(self.method, ReweightingMethod)

    @property
    def clipping(self) -> Clipping:
        """The clip bounds that training will have; here groups partition the samples."""
        method = self.method or Unconstrained()
        found = chosen_clipping(self.privacy, None, method, None, Schema((1,)))
        assert found is not None  # there is privacy
        return found

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """What the schema declares: groups, where there is a constraint."""
        if not self.constraint:
            return ()
        return (Attribute("group", tuple(f"g{number}" for number in range(self.groups))),)

    def places(self, parameters: int, classes: int = 2) -> dict[str, slice]:
        """Where the parts of v stand, for a model with so many parameters and classes."""
        schema = Schema((1,), attributes=self.attributes, classes=classes)
        method = self.method or Unconstrained()
        return layout_of(parameters, schema, self.constraint, method, self.clipping).slices


@dataclass(frozen=True)
class User:
    """A user's samples: the same one ``times`` times over, or none at all.

    Features are 0 but for ``value`` in one place. The gradient is along that coordinate; where the
    value is 0 there is none, the logit is 0 and the prediction is class 0. Every second sample has
    ``turn`` times the value: with −0.999, a thousandth is left of the gradients of each two.
    """

    times: int = 1
    place: int = 0
    value: float = 0.0
    label: int = 1
    group: int = 0
    turn: float = 1.0


NOBODY = User(times=0)


@dataclass(frozen=True)
class Scene:
    """A population in which the coins have fallen, and how to train on it.

    With one output there are two classes, otherwise as many as outputs.
    """

    users: tuple[User, ...]
    features: int
    optimizer: OptimizerFactory
    start: float = 0.0
    last: float | None = None
    outputs: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return self.features * self.outputs

    @property
    def classes(self) -> int:
        """How many it tells apart."""
        return max(2, self.outputs)

    def model(self) -> nn.Module:
        """A linear model without a bias, its weights at ``start``; the last one at ``last``."""
        model = nn.Linear(self.features, self.outputs, bias=False, dtype=self.dtype)
        nn.init.constant_(model.weight, self.start)
        if self.last is not None:
            nn.init.constant_(model.weight[:, -1:], self.last)
        return model

    def data(self, attributes: tuple[Attribute, ...]) -> FederatedDataset:
        """The population."""
        sizes = torch.tensor([user.times for user in self.users])
        owner = torch.repeat_interleave(torch.arange(len(self.users)), sizes)
        column = {
            name: torch.tensor([getattr(user, name) for user in self.users])[owner]
            for name in ("place", "value", "label", "group", "turn")
        }
        first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        rows = torch.arange(len(owner))
        turned = torch.where((rows - first) % 2 == 1, column["turn"], 1.0)
        features = torch.zeros(len(owner), self.features, dtype=self.dtype)
        features[rows, column["place"]] = (column["value"] * turned).to(self.dtype)
        return FederatedDataset(
            features,
            column["label"],
            column["group"].unsqueeze(1)[:, : len(attributes)],
            torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            Schema(shape=(self.features,), attributes=attributes, classes=self.classes),
        )


@dataclass(frozen=True)
class Seen:
    """All that a run released: totals v_t, models w_t, the model it kept, and its promise.

    ``start`` is w_0, which is public, like the cohort's expected share q of the population.
    ``multipliers`` are the history's λ_t, one row for each round; none without a constraint. Where
    a clip bound adapts, what is clipped to it is in v in units of the first round's.
    """

    v: NDArray[np.float64]
    w: NDArray[np.float64]
    start: NDArray[np.float64]
    kept: NDArray[np.float64]
    statement: PrivacyStatement
    q: float
    multipliers: NDArray[np.float64]

    def bound_and_noise(self, part: str) -> tuple[float, float]:
        """C_b and s_b of the block that gradients, counts or selection are in, as promised."""
        blocks = {block.name: block for block in self.statement.blocks}
        block = blocks[part if part in blocks else JOINT]
        return block.bound, block.noise_stddev

    def log_ratio(
        self, heads: NDArray[np.float64], tails: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        r"""log P[released | heads]/P[released | tails], for coins along the second axis.

        Each round the user takes part with probability q, and then the total moves by u. With
        y = (⟨x, u⟩ − ‖u‖²/2)/s², where x is the total without the others' part, that is

            Σ_t log(1 − q + q e^{y_t}) − log(1 − q + q e^{y'_t}),

        y for the u of heads, y' for that of tails (0 where tails sends nothing). It is exact for
        Poisson cohorts, with a cap on participations too: then the first term is the logarithm of
        the mean of exp(Σ y_t) over the rounds that the user may have taken part in. For cohorts of
        a fixed size it leaves out that others fill the places.
        """
        cap = self.statement.participations if self.statement.participations_capped else None
        return _sampled(heads, self.q, cap) - _sampled(tails, self.q, cap)


class Attack(Protocol):
    """How to put canaries into a population, and how to guess their coins."""

    @property
    def name(self) -> str:
        """How it is called in tables."""
        ...

    @property
    def learns(self) -> bool:
        """Whether scores have no zero of their own: the first runs then tell where it is."""
        ...

    def coins(self, setup: Setup) -> int:
        """m: how many coins are in one run; refuse settings that it cannot attack."""
        ...

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """The population of these coins."""
        ...

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """How sure one may be of heads, for every coin: see `fpfl.audit.statistics.surest`."""
        ...


def steps(rate: float = 1e-20) -> OptimizerFactory:
    """Plain SGD; by default with so small a learning rate that the model stays where it is."""

    def make(w: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(w, lr=rate)

    return make


def _sampled(y: NDArray[np.float64], q: float, cap: int | None) -> NDArray[np.float64]:
    """The log of the mean of exp(Σ y_t) over who takes part when, without overflow."""
    with np.errstate(divide="ignore"):  # q = 1: nobody stays away
        absent, present = np.log1p(-q), np.log(q)
    if cap is None:
        ratio: NDArray[np.float64] = np.logaddexp(absent, present + y).sum(axis=0)
        return ratio
    # By how often the user has taken part so far: 0, 1, ..., cap.
    paths = np.full((cap + 1, *y.shape[1:]), -np.inf)
    paths[0] = 0.0
    for now in y:
        # Who has reached the cap stays away for sure.
        stays = np.concatenate([paths[:-1] + absent, paths[-1:]])
        stays[1:] = np.logaddexp(stays[1:], paths[:-1] + present + now)
        paths = stays
    total: NDArray[np.float64] = np.logaddexp.reduce(paths, axis=0)
    return total
