"""A small federation for tests: a made-up population dealt to nodes, and a courier in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import fpfl
from fpfl.aggregation.clipping import steps_of
from fpfl.aggregation.encoding import in_ring
from fpfl.aggregation.sums import ThirdParty
from fpfl.data.federated import FederatedDataset
from fpfl.federation.agreement import Agreement
from fpfl.federation.contribution import Chance, Contribution, SystemChance, TestChance
from fpfl.federation.node import answered
from fpfl.federation.secagg import Authority, Refused, Trust
from fpfl.numerics.randomness import RoundStreams
from fpfl.server.ranks import Ranks
from fpfl.server.simulation import Simulation
from fpfl.training.run import Run
from fpfl.training.session import conduct

CONSTRAINT = fpfl.fnr_parity("sex", tolerance=0.02)


def keep_engines(monkeypatch: Any) -> None:
    """Make an engine once for the same samples: anew for every message it is to no other effect.

    By the samples, not by the dataset: a node makes one around them for each round.
    """
    engine, made = Agreement.engine, {}

    def once(self: Agreement, data: FederatedDataset) -> Any:
        key = id(data.features)
        if key not in made:
            made[key] = data.features, engine(self, data)  # kept, so that the number stays theirs
        return made[key][1]

    monkeypatch.setattr(Agreement, "engine", once)


@lru_cache
def people(users: int = 60, samples: int = 4, seed: int = 0) -> FederatedDataset:
    """Users with a few samples each; some have none."""
    rng = np.random.default_rng(seed)
    owner = np.sort(rng.integers(0, users, users * samples))
    attribute = rng.integers(0, 2, len(owner))
    features = rng.normal(size=(len(owner), 5)) + attribute[:, None] * 0.5
    labels = (features[:, 0] + 0.5 * rng.normal(size=len(owner)) > 0).astype(int)
    return FederatedDataset.from_samples(
        features.astype(np.float32),
        labels,
        schema=fpfl.Schema(
            shape=(5,),
            classes=2,
            attributes=(fpfl.Attribute("sex", ("a", "b")),),
            population=users,
            samples_per_user=float(samples),
        ),
        attributes=attribute[:, None],
        users=owner,
    )


def network() -> torch.nn.Module:
    return fpfl.mlp(5, (4,), seed=1)


def agreement(users: int = 60, nodes: int = 5, **changes: Any) -> Agreement:
    data = people(users)
    given: dict[str, Any] = {
        "model": network,
        "schema": data.schema,
        "population": users,
        "cohort": users // 3,
        "rounds": 3,
        "nodes": nodes,
        "constraint": CONSTRAINT,
        "method": fpfl.OneGradient(),
        "privacy": fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="coins"),
        "learning_rate": 0.2,
    }
    return Agreement(**given | changes)


def dealt(agreed: Agreement) -> list[FederatedDataset]:
    """The population, in even parts."""
    return _dealt(agreed.population, agreed.nodes)


@lru_cache
def _dealt(users: int, nodes: int) -> list[FederatedDataset]:
    data = people(users)
    return [data.subset(part) for part in np.array_split(np.arange(users), nodes)]


def parts(agreed: Agreement) -> list[np.ndarray]:
    return np.array_split(np.arange(agreed.population), agreed.nodes)


def nobody() -> FederatedDataset:
    """A user without samples."""
    data = people()
    none = torch.zeros(0, dtype=torch.int64)
    return FederatedDataset(
        data.features[none], data.labels[none], data.attributes[none], torch.tensor([0, 0]),
        replace(data.schema, population=None),
    )  # fmt: skip


@dataclass
class Memory:
    """A courier to nodes in this process. ``fault`` may change, drop or repeat what comes back."""

    agreed: Agreement
    authority: Authority = field(default_factory=Authority.make)
    data: list[Callable[[], FederatedDataset]] | None = None
    fault: Callable[[str, int, dict[str, Any]], list[dict[str, Any]]] | None = None
    gone: set[int] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    seen: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = dealt(self.agreed)
        self.loads = self.data or [lambda part=part: part for part in own]
        numbers = range(self.agreed.nodes)
        self.identities = [self.authority.enrol(f"node-{i}", i + 1) for i in numbers]
        self.states = [b""] * self.agreed.nodes
        self.firsts = [int(part[0]) for part in parts(self.agreed)]

    @property
    def key(self) -> Trust:
        return self.identities[0].authority

    def nodes(self, enough: int, timeout: float) -> list[int]:
        return [i for i in range(self.agreed.nodes) if i not in self.gone]

    def exchange(
        self, requests: Mapping[int, dict[str, Any]], timeout: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for node, request in requests.items():
            if node in self.gone:
                continue
            try:
                self.states[node], answer = answered(
                    dict(request), self.states[node], self.identities[node], self._maker(node)
                )
            except Refused as error:
                self.refused.append(str(error))
                continue
            step = str(request["step"])
            self.seen.append((step, node, answer))
            for each in [answer] if self.fault is None else self.fault(step, node, answer):
                yield node, each

    def _maker(self, node: int) -> Callable[[], Contribution]:
        seed = self.agreed.test_seed
        chance: Chance = SystemChance()
        if seed is not None:
            chance = TestChance(seed, node, self.firsts[node])
        return lambda: Contribution(self.agreed, self.loads[node], chance)


class InjectedShares(ThirdParty):
    """The simulation's third party, with the very noise that test nodes add in shares."""

    agreed: Agreement

    def noised(self, total: torch.Tensor, round: int) -> torch.Tensor:
        seed, bits = self.agreed.test_seed, self.agreed.bits
        assert seed is not None
        assert bits is not None
        size = self.agreed.encoding.size
        shares = [TestChance(seed, i, 0).noise(size, bits, round) for i in range(self.agreed.nodes)]
        users = total * steps_of(self.rules, self.size, total.device)
        _, encoding = self.agreed.at(self.level)
        return users + encoding.decoded(in_ring(np.sum(shares, axis=0)), round)

    def at(self, level: int | None) -> ThirdParty:
        other = super().at(level)
        object.__setattr__(other, "agreed", self.agreed)
        return other


def simulated(agreed: Agreement, data: FederatedDataset) -> Run:
    """The same by the simulation: its cohorts, its server, its engine; the noise is injected."""
    assert agreed.plan is not None
    party = InjectedShares(agreed.layout.slices, agreed.plan.blocks, agreed.plan, grid=agreed.grid)
    object.__setattr__(party, "agreed", agreed)
    seed = agreed.test_seed
    simulation = Simulation(
        agreed.engine(data),
        party,
        agreed.plan.sampling,
        RoundStreams(seed, "cohorts"),
        RoundStreams(seed, "samples"),
        agreed.rounds,
    )
    return conduct(
        agreed.spec,
        agreed,
        agreed.spec.flat.vector(),
        lambda kept: simulation,
        more=agreed.terms,
        aggregation=agreed.aggregation,
        where=None,
        data="",
        seeds=(seed, seed),
        ranks=Ranks(),
    )


def with_seed(agreed: Agreement, seed: int) -> Agreement:
    return replace(agreed, test_seed=seed)


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


# --- for Flower's apps, which find things by name -------------------------------------------------

CURRENT: list[Agreement] = []


def current() -> Agreement:
    return CURRENT[-1]


def load(node: Mapping[str, Any]) -> FederatedDataset:
    return dealt(current())[int(node["partition-id"])]


def contributed(agreed: Agreement, node: int, round: int, w: torch.Tensor, weights: Any) -> Any:
    """What a test node sends, before it is masked."""
    assert agreed.test_seed is not None
    part, first = dealt(agreed)[node], int(parts(agreed)[node][0])
    chance = TestChance(agreed.test_seed, node, first)
    return Contribution(agreed, lambda: part, chance).vector(round, w, weights)


def load_default(node: Mapping[str, Any]) -> FederatedDataset:
    """For a process of its own, where nothing is current."""
    return dealt(agreement())[int(node["partition-id"])]
