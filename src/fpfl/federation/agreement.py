"""What all parties of a federation have agreed on before anything is computed.

Server and nodes make it from the same function of the user's project, each on its own machine, and
nothing that matters is taken from messages: clip bounds, the scale of a node's numbers, its share
of the noise and the fewest survivors all follow from that code, and a node answers no session whose
fingerprint of the agreement is another. Which code that is, is another matter: Flower sends the
project of whoever starts a run to the nodes. They should know whom they take it from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpfl.aggregation.clipping import ClipRule, at_bound
from fpfl.aggregation.encoding import RESERVE, Encoding
from fpfl.aggregation.noise import SeededNoise, SystemNoise
from fpfl.aggregation.sums import ThirdParty
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import InputColumn
from fpfl.data.schema import Schema
from fpfl.data.table_schema import TableSchema
from fpfl.data.tables import input_columns
from fpfl.fairness.constraints import Constraint
from fpfl.federation.measurement import Measured
from fpfl.federation.secagg import GraphChoice, choose_graph
from fpfl.methods import Method
from fpfl.privacy.adaptive import BoundGrid
from fpfl.privacy.assumptions import Aggregation
from fpfl.privacy.conventions import SHARED
from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.server.loop import OptimizerFactory
from fpfl.server.selection import Rule
from fpfl.training.inputs import Inputs, too_many
from fpfl.training.spec import TrainingSpec, check_types, flat_model
from fpfl.users import isolation
from fpfl.users.engine import CohortEngine
from fpfl.users.layout import Layout
from fpfl.users.local import FederatedAveraging

MOST_BITS = 20
"""Bits of a share of noise: enough that rounding costs nothing, and no more."""

NODE_MEMORY = 2**27
"""Bytes that the gradients of a node's users may take at a time: users beyond them wait."""

CONVENTIONS = ("coins", "picked", "poisson")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The settings of a federation. Most are those of ``fpfl.train``.

    Parameters
    ----------
    model
        Makes the network. Only the server's initial parameters count.
    schema
        The declared public schema of everybody's data.
    population, cohort, rounds
        K users, of whom m take part in each of T rounds on average.
    nodes
        How many nodes are enrolled. One may hold a single user or many.
    privacy
        ``Privacy(epsilon=2, clip=..., convention="coins")``: every user's node tosses a secret
        coin, and nodes add the noise in shares. ``"picked"``: the server picks nodes, all of whose
        users take part; no amplification. ``"poisson"``: secret coins, but a trusted server adds
        the noise to sums that it sees. ``copies`` declares on how many nodes a person may be.
    clip
        Without privacy: a bound, which numbers in a ring cannot do without.
    least
        A sum is opened only with so many nodes' contributions in it; by default more than two
        thirds of all nodes (of those that are picked), and never fewer than secure aggregation's
        threshold, which is the same where all nodes are each other's neighbours.
    colluders
        So many of them may tell the server all they know: noise is calibrated to the others. By
        default a fifth of the same.
    attempts, timeout
        How often a round is tried, and how many seconds nodes have for each of its steps.
    hold
        Seconds that a node's vector takes at least: more than it ever needs, so that the time it
        takes does not tell how many of its users were sampled. Needless where every node has one
        user, or where the server picks.
    whole_inputs
        Whether features are whole numbers (codes, raw images) that the model takes as they are.
    measure, columns
        Whether a table's inputs are scaled, as ``fpfl.train`` does: what ``columns``, a
        `TableSchema` (or what ``fpfl.read_table`` made of one, ``data.columns``), declares is used,
        and what it does not is measured, in a first sum before the first round whose cost is in ε.
        The model is then one of scaled inputs, and the finished run's has the scaling before it.
    test_seed
        Seeds coins and noise, to compare a federation with a simulation: NOT PRIVATE.
    """

    model: Callable[[], nn.Module]
    schema: Schema
    population: int
    cohort: int
    rounds: int
    nodes: int
    constraint: Constraint | None = None
    method: Method | None = None
    privacy: Privacy | None = None
    clip: float | Clipping | None = None
    learning_rate: float = 0.1
    optimizer: OptimizerFactory | None = None
    normaliser: Literal["users", "samples"] | float = "users"
    samples_per_user: int | None = None
    local: FederatedAveraging | None = None
    selection: Rule | None = None
    selection_window: int = 1
    least: int | None = None
    colluders: int | None = None
    attempts: int = 5
    timeout: float = 120.0
    hold: float = 0.0
    whole_inputs: torch.dtype | None = None
    measure: bool = False
    columns: TableSchema | Sequence[InputColumn] | None = None
    test_seed: int | None = None
    aggregation: Aggregation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_types(self.constraint, self.method, self.privacy, self.optimizer, self.local)
        convention = self.privacy.convention if self.privacy else CONVENTIONS[0]
        if convention not in CONVENTIONS:
            raise ValueError(
                f"a federation cannot have the convention {convention!r}: its cohorts are drawn "
                f"by users or picked by the server. Choose one of {CONVENTIONS}"
            )
        if self.privacy is not None and self.privacy.max_participations is not None:
            raise ValueError(
                "max_participations is for simulations: in a federation nobody counts how often a "
                "user took part, and ε is for all rounds. Leave it out"
            )
        if self.privacy is None and self.clip is None:
            raise ValueError(
                "without privacy give clip=...: numbers that are added up in a ring need a bound"
            )
        if not 0.0 <= self.hold < self.timeout:
            raise ValueError(
                f"hold is {self.hold} and timeout {self.timeout}: answers must be held back for "
                "less than they are waited for"
            )
        for name, least in (("nodes", 3), ("attempts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        asked = self.asked
        if asked < 3:
            raise ValueError(
                f"of {self.nodes} nodes {asked} would be picked for a round, and a sum needs 3: "
                "raise the cohort"
            )
        enough = 2 * asked // 3 + 1 if self.least is None else self.least
        colluders = asked // 5 if self.colluders is None else self.colluders
        if not 0 <= colluders <= enough - 2 or enough > asked:
            raise ValueError(
                f"of {asked} nodes least={enough} must answer and colluders={colluders} may "
                "collude: at least two honest ones must be in every sum, and no more can be asked "
                "for than are there"
            )
        shares = self.privacy is not None and convention in SHARED
        parts = Aggregation(
            self.nodes, enough, colluders, shares, self.test_seed is not None, self.hold > 0.0,
            attempts=self.attempts,
        )  # fmt: skip
        object.__setattr__(self, "aggregation", parts)
        threshold = self.graph.threshold  # refuses what secure aggregation cannot do
        if enough < threshold:
            raise ValueError(
                f"of {asked} nodes least={enough} must answer, but secure aggregation opens no sum "
                f"of fewer than {threshold}: leave least out, or raise it to {threshold}"
            )
        _ = self.inputs, self.spec  # refuse what no training can have

    # --- what follows from it -----------------------------------------------------------------

    @property
    def asked(self) -> int:
        """How many nodes are asked in a round at most: all, or as many as the server picks.

        ⌊nodes · m/K⌋ are picked, where they are.
        """
        if self.privacy is not None and self.privacy.convention == "picked":
            return self.nodes * self.cohort // self.population
        return self.nodes

    @cached_property
    def graph(self) -> GraphChoice:
        """Neighbours and threshold of every session, however many nodes it finds there.

        With the number that a server says it asked, it could choose them: say a larger one and
        have few neighbours and a low threshold where all nodes and two thirds were agreed on.
        """
        nodes, parts = self.asked, self.aggregation
        # Beyond a third nothing is recovered where all are each other's neighbours.
        dropping = min(nodes - parts.least, nodes - (2 * nodes // 3 + 1))
        return choose_graph(nodes, parts.colluders, dropping, fewest=parts.least)

    @cached_property
    def inputs(self) -> Inputs | None:
        """What is settled about the inputs; None where they are used as they are."""
        if not self.measure or not self.columns:
            if self.measure or self.columns is not None:
                raise ValueError(
                    f"measure={self.measure} and columns={self.columns!r} were given; what is "
                    "measured are a table's columns: give both, measure=True and columns=the "
                    "TableSchema, or neither"
                )
            return None
        columns, shape = self.columns, self.schema.shape
        if isinstance(columns, TableSchema):
            columns = input_columns(columns)
        found = Inputs(tuple(columns), shape[0], "declared")
        if len(shape) != 1 or too_many(found.columns, self.schema) or self.whole_inputs is not None:
            raise ValueError(
                f"samples have the shape {shape} (whole_inputs={self.whole_inputs}), and the "
                f"columns {[column.name for column in found.columns]} are about other inputs: give "
                "the columns of the table that the features are from"
            )
        if not found.wanted:
            return found
        if self.privacy is None:
            raise ValueError(
                f"the columns {[column.name for column in found.wanted]} would be measured, and "
                "without privacy their histograms would be opened as they are: give privacy, or "
                "declare centre and scale, or shares, in the schema"
            )
        return replace(found, source="measured")

    @cached_property
    def measured(self) -> Measured | None:
        """The sum before the first round; None where nothing is measured."""
        if self.inputs is None or not self.inputs.measured:
            return None
        assert self.plan is not None
        # Whom the server picks: as many nodes as in a round, with as many users.
        picked = self.privacy is not None and self.privacy.convention == "picked"
        users = self.cohort if picked else self.population
        return Measured(self.inputs.wanted, self.plan, users)

    @cached_property
    def spec(self) -> TrainingSpec:
        """The training that was agreed on."""
        model = self.model()
        parameter = next(iter(model.parameters()), torch.zeros(()))
        return TrainingSpec.settle(
            flat_model(model, self.schema, self.whole_inputs or parameter.dtype),
            self.schema,
            population=self.population,
            cohort=self.cohort,
            rounds=self.rounds,
            constraint=self.constraint,
            method=self.method,
            privacy=self.privacy,
            clip=self.clip,
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            normaliser=self.normaliser,
            selection=self.selection,
            selection_window=self.selection_window,
            samples_per_user=self.samples_per_user,
            local=self.local,
            measurement=self.inputs is not None and self.inputs.measured,
        )

    @property
    def layout(self) -> Layout:
        """What is where in v."""
        return self.spec.layout

    @property
    def plan(self) -> PrivacyPlan | None:
        """The privacy plan, for the users that there are."""
        return self.spec.plan

    @cached_property
    def rules(self) -> tuple[ClipRule, ...]:
        """How v is clipped."""
        return self.spec.rules

    @property
    def grid(self) -> BoundGrid | None:
        """The clip bounds that a round may have; None where there is one for all."""
        return None if self.spec.clipping is None else self.spec.clipping.grid

    def at(self, level: int | None) -> tuple[tuple[ClipRule, ...], Encoding]:
        """How v is clipped in a round with this level of the bound, and becomes whole numbers.

        A step stands for a part of the bound: the whole numbers, and their noise, are the same
        whatever the bound is.
        """
        if level is None or self.grid is None:
            return self.rules, self.encoding
        rules = at_bound(self.rules, self.grid.at(level))
        return rules, replace(self.encoding, rules=rules)

    @property
    def bits(self) -> int | None:
        """A node's share of noise has a deviation of 2 to this power; None without shares."""
        return self._training[1]

    @property
    def encoding(self) -> Encoding:
        """How vectors become whole numbers."""
        return self._training[0]

    def encodings(self, round: int) -> tuple[Encoding, int | None]:
        """How vectors become whole numbers in a round, and the bits of its shares of noise.

        Round 0 is the measurement, where there is one, and nothing else is.
        """
        return self._training if round or self.measured is None else self._measurement

    @cached_property
    def _training(self) -> tuple[Encoding, int | None]:
        return self._encoded(self.plan, self.spec.blocks, self.rules, self.layout.size)

    @cached_property
    def _measurement(self) -> tuple[Encoding, int | None]:
        measured = self.measured
        assert measured is not None  # or there is no round 0
        release = measured.release
        return self._encoded(release, release.blocks, measured.rules, measured.size)

    def _encoded(
        self,
        plan: PrivacyPlan | None,
        blocks: tuple[Block, ...],
        rules: tuple[ClipRule, ...],
        size: int,
    ) -> tuple[Encoding, int | None]:
        """The encoding of vectors with this noise, and as many bits as fit into the ring.

        With everybody in one sum.
        """
        if not self.aggregation.shares:
            shares = {block.name: block.share for block in blocks}
            each = tuple(shares[rule.name] for rule in rules)
            encoding = Encoding.without_noise(rules, each, size, self._most)
            encoding.check_ring(self._most, self.nodes, None)
            return encoding, None
        assert plan is not None
        reasons = []
        for bits in range(MOST_BITS, 3, -1):
            try:
                encoding = Encoding.of(plan, rules, size, self.aggregation.adders, bits)
                encoding.check_ring(self._most, self.nodes, bits)
            except ValueError as error:
                reasons.append(str(error))
                continue
            return encoding, bits
        raise ValueError(
            f"a population of {self.population:,} (on up to {self.privacy_copies} nodes each) and "
            f"this noise do not fit into a ring of 2^32 together: {reasons[-1]}"
        )

    @cached_property
    def trusted_party(self) -> ThirdParty | None:
        """What adds the noise to a sum that the server sees; None where nodes do, or nobody."""
        if self.plan is None or self.aggregation.shares:
            return None
        # One user moves the decoded sum by Δ/S bounds: more than one, by rounding.
        if self.encoding.bound / self.encoding.scale > 1.0 + RESERVE / 2:
            raise ValueError(
                f"a ring of 2^32 is too coarse for a population of {self.population}: rounding "
                "would move a sum by more than the noise allows for. Have nodes add the noise "
                "(convention='coins')"
            )
        seeded = self.test_seed is not None
        source = SeededNoise(self.test_seed or 0) if seeded else SystemNoise()
        places, blocks = self.layout.slices, self.spec.blocks
        return ThirdParty(places, blocks, self.plan, source, room=RESERVE, grid=self.grid)

    @cached_property
    def noise_stddev(self) -> Tensor:
        """The deviation of the noise on every number of v, where all nodes contribute."""
        if self.trusted_party is not None:
            return self.trusted_party.noise_stddev
        if self.bits is not None:
            return self.encoding.noise_stddev(self.nodes, self.bits)
        return torch.zeros(self.layout.size, dtype=torch.float64)

    @property
    def terms(self) -> dict[str, Any]:
        """The federation's own settings, as plain values."""
        return {
            "sampling": "federation",
            "nodes": self.nodes,
            "least": self.aggregation.least,
            "colluders": self.aggregation.colluders,
            "held": self.aggregation.held,
            "seeded_cohorts": self.test_seed is not None,
            "seeded_noise": self.test_seed is not None,
            **({} if self.inputs is None else {"scaling": self.inputs.source}),
        }

    @cached_property
    def model_hash(self) -> str:
        """A hash of the network's structure.

        Of its layers as torch prints them, and its tensors' names, shapes and types; not of its
        numbers, nor of the code of layers of one's own.
        """
        model = self.model()
        tensors = [(name, [*t.shape], str(t.dtype)) for name, t in model.state_dict().items()]
        return hashlib.sha256(json.dumps([repr(model), tensors]).encode()).hexdigest()[:16]

    @cached_property
    def fingerprint(self) -> bytes:
        """What tells two agreements apart, without where they came from."""
        said: dict[str, Any] = {
            **self.spec.settings,
            **self.terms,
            "schema": self.schema.as_dict(),
            "scale": self.encoding.scale,
            "bits": self.bits,
            "hold": self.hold,
            "attempts": self.attempts,
            "model": self.model_hash,
            "test_seed": self.test_seed,
        }
        if self.inputs is not None:
            said["columns"] = [asdict(column) for column in self.inputs.columns]
        if self.measured is not None:
            encoding, bits = self.encodings(0)
            said["measured"] = [asdict(each) for each in self.measured.cells]
            said |= {"measured_scale": encoding.scale, "measured_bits": bits}
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).digest()[:16]

    def engine(self, data: FederatedDataset) -> CohortEngine:
        """What computes v^k on a node's data, tried on made-up users once in a process."""
        engine = self._engine(data)
        if "_alone" not in self.__dict__:
            self.__dict__["_alone"] = isolation.checked(engine)[0].alone
        return replace(engine, alone=True) if self.__dict__["_alone"] else engine

    def _engine(self, data: FederatedDataset) -> CohortEngine:
        w = self.spec.flat.vector()
        # Each user's vector is written down, and rounded on its own.
        data = data.to(w.device, w.dtype)
        return self.spec.engine(data, private=True, factoring=False, memory=NODE_MEMORY)

    @property
    def _most(self) -> int:
        """The most contributions that can be in one sum."""
        return self.population * self.privacy_copies

    @property
    def privacy_copies(self) -> int:
        """On how many nodes a person may be."""
        return self.privacy.copies if self.privacy else 1
