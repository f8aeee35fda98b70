"""``audit``: attack ``fpfl.train`` itself, and bound its ε from below."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.aggregation.clipping import clip_rules
from fpfl.audit.attacks import GradientCanaries
from fpfl.audit.setup import CONSTRAINT, Attack, Scene, Seen, Setup
from fpfl.audit.statistics import lower_bound, surest
from fpfl.methods import Method
from fpfl.privacy.conventions import checked_pair
from fpfl.privacy.settings import GRADIENTS, JOINT, Privacy
from fpfl.privacy.statement import PrivacyStatement
from fpfl.server.loop import RoundEvent
from fpfl.training import train
from fpfl.users.local import FederatedAveraging

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Which shares of a run's coins are guessed, fixed in advance (see `fpfl.audit.statistics`)."""

LEARNING = 4
"""One run in so many goes to learn a threshold, in attacks that need one."""


@dataclass(frozen=True)
class AuditSettings:
    """What to audit, and how hard.

    Parameters
    ----------
    privacy
        The privacy settings under audit. Without ``delta`` it is that of the audit's own
        population, 1/(10 K). Tails is the neighbour: other data in the canary's place, or none. A
        user without samples stands for an absent one too (add-remove): K is declared, and who is
        drawn does not depend on who has samples.
    attack
        Where to put canaries and how to guess their coins: see `fpfl.audit.attacks`.
    cohort_share
        q: the cohort's share of the population. (A cohort has at least one user.)
    rounds
        T.
    constraint
        Train with a fairness constraint: all of v, instead of plain training.
    method
        How the constraint is enforced; the paper's method when it is not given.
    local
        Local steps, without a constraint or with ``method=OneGradient()``.
    groups
        How many groups are declared. With one gradient, `GradientCanaries` gives every canary a
        group of its own where there are enough of them.
    canaries
        m, in each run, for attacks that can have many.
    runs
        R: independent runs, each with coins of its own.
    confidence
        Of the lower bound.
    """

    privacy: Privacy = field(default_factory=lambda: Privacy(epsilon=2.0))
    attack: Attack = field(default_factory=GradientCanaries)
    cohort_share: float = 0.5
    rounds: int = 10
    constraint: bool = False
    method: Method | None = None
    local: FederatedAveraging | None = None
    groups: int = 2
    canaries: int = 200
    runs: int = 200
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 < self.cohort_share <= 1.0:
            raise ValueError(f"cohort_share is {self.cohort_share}; give a share in (0, 1]")
        if self.canaries < 1:
            raise ValueError(f"canaries is {self.canaries}; give at least one")
        if self.groups < 2:
            raise ValueError(f"groups is {self.groups}; give at least two, to have a difference")
        least = 2 * LEARNING if self.attack.learns else 1
        if self.runs < least:
            raise ValueError(
                f"runs is {self.runs}; the attack {self.attack.name!r} takes {least} at least"
            )

    @property
    def setup(self) -> Setup:
        """What the attack needs to know."""
        neighbours = checked_pair(self.privacy.convention, self.privacy.neighbours)
        constraint = CONSTRAINT if self.constraint else None
        return Setup(self.privacy, neighbours, constraint, self.canaries, self.groups, self.method)


@dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes
    ----------
    claimed
        The ε that fpfl claims at ``delta``: the honest one, for the population that there is.
    face_value
        The ε by the convention's own words: another one for the paper's convention only.
    lower_bound
        The true ε at ``delta`` is at least this, with the given confidence.
    method, local_steps
        The method's name where one was asked for, and S.
    canaries, guesses, correct
        Coins of all runs, how many of them were guessed, how many rightly.
    """

    attack: str
    convention: str
    neighbours: str
    constraint: str | None
    method: str | None
    local_steps: int | None
    population: int
    cohort: int
    rounds: int
    noise_multiplier: float
    delta: float
    claimed: float
    face_value: float
    lower_bound: float
    confidence: float
    runs: int
    canaries: int
    guesses: int
    correct: int
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the claim is refuted."""
        return self.lower_bound > self.claimed

    @property
    def face_value_caught(self) -> bool:
        """Whether the ε at face value is refuted."""
        return self.lower_bound > self.face_value

    def as_dict(self) -> dict[str, Any]:
        """All of it in types that JSON knows."""
        return asdict(self) | {
            "caught": self.caught,
            "face_value_caught": self.face_value_caught,
        }


def audit(setting: AuditSettings, report: Callable[[int, int], None] | None = None) -> AuditResult:
    """Attack `fpfl.train` with canaries and bound its ε from below.

    Coins, cohorts and noise come from the operating system's randomness: an audit cannot be
    repeated number by number, only within its confidence.

    Parameters
    ----------
    setting
        What to audit, and how hard.
    report
        Called with (runs done, runs in all) after each run.
    """
    began = time.perf_counter()
    setup, attack = setting.setup, setting.attack
    number = attack.coins(setup)
    rng = np.random.default_rng()
    coins = rng.integers(2, size=(setting.runs, number)).astype(np.bool_)
    scores = np.empty(coins.shape)
    for run in range(setting.runs):
        seen = released(attack.scene(coins[run], setup), setting)
        scores[run] = attack.scores(seen, setup)
        if report is not None:
            report(run + 1, setting.runs)
    if attack.learns:
        coins, scores = _with_threshold(coins, scores)
    statement = seen.statement
    shares = SHARES if number > 1 else (1.0,)
    bound = lower_bound(
        surest(coins, scores, shares), delta=statement.delta, confidence=setting.confidence
    )
    return AuditResult(
        attack=attack.name,
        convention=statement.convention,
        neighbours=statement.neighbours,
        constraint=setup.constraint.name if setup.constraint else None,
        method=type(setting.method).__name__ if setting.method else None,
        local_steps=setting.local.steps if setting.local else None,
        population=statement.real_population or statement.population,
        cohort=statement.cohort,
        rounds=statement.rounds,
        noise_multiplier=statement.noise_multiplier,
        delta=statement.delta,
        claimed=_claimed(statement),
        face_value=_known(statement.epsilon),
        lower_bound=bound.epsilon,
        confidence=setting.confidence,
        runs=bound.guesses.runs,
        canaries=bound.guesses.runs * bound.guesses.canaries,
        guesses=bound.guesses.runs * bound.guesses.guesses,
        correct=sum(bound.guesses.correct),
        seconds=round(time.perf_counter() - began, 1),
    )


def released(scene: Scene, setting: AuditSettings) -> Seen:
    """Train on a scene, and return all that was released."""
    data = scene.data(setting.setup.attributes)
    cohort = max(1, round(setting.cohort_share * data.population))
    model = scene.model()
    events: list[RoundEvent] = []
    with warnings.catch_warnings():
        # A δ for a small population, counts that noise dominates: the audit knows what it asks for.
        warnings.simplefilter("ignore")
        run = train(
            model,
            data,
            cohort=cohort,
            rounds=setting.rounds,
            constraint=setting.setup.constraint,
            method=setting.method,
            local=setting.local,
            privacy=setting.privacy,
            optimizer=scene.optimizer,
            callbacks=[events.append],
        )
    if run.privacy is None or len(events) < setting.rounds:
        raise ValueError(f"a run of the audit did not go through: {run.stopped}")
    places = setting.setup.places(scene.parameters, scene.classes)
    length = max(place.stop for place in places.values())
    if any(len(event.v) != length for event in events):
        raise ValueError(
            f"the totals have {len(events[0].v)} numbers, the audit knows of {length}: the layout "
            "of v has changed, and fpfl.audit.setup.Setup.places with it must"
        )
    return Seen(
        v=_by_the_first_bound(events, scene, setting),
        w=np.stack([_numbers(event.w) for event in events]),
        start=_numbers(next(model.parameters()).detach().reshape(-1)),
        kept=_numbers(next(run.model.parameters()).detach().reshape(-1)),
        statement=run.privacy,
        q=cohort / data.population,
        multipliers=np.stack([_multipliers(event) for event in events]),
    )


def _by_the_first_bound(
    events: list[RoundEvent], scene: Scene, setting: AuditSettings
) -> NDArray[np.float64]:
    """The totals, (rounds, size); what is clipped to a bound that adapts, times C₀/C_t.

    Both are public. Bound and noise are then those of the first round in all of them.
    """
    v, setup = np.stack([_numbers(event.v) for event in events]), setting.setup
    if setup.clipping.adapts is None:
        return v
    factors = np.array([setup.clipping.bound / event.row["clip_bound"] for event in events])
    blocks = setup.clipping.blocks(constrained=setup.constraint is not None, selection=True)
    for rule in clip_rules(blocks, setup.places(scene.parameters)):
        for place in rule.places if rule.name in (JOINT, GRADIENTS) else ():
            v[:, place] *= factors[:, None]
    return v


def _with_threshold(
    coins: NDArray[np.bool_], scores: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Learn from the first runs, whose coins are then known, where heads and tails part.

    The bound is computed from the other runs alone.
    """
    first = len(coins) // LEARNING
    heads, tails = scores[:first][coins[:first]], scores[:first][~coins[:first]]
    if not (len(heads) and len(tails)):
        return coins[first:], np.zeros_like(scores[first:])  # all coins fell alike: know nothing
    middle = (heads.mean() + tails.mean()) / 2
    direction = 1.0 if heads.mean() > tails.mean() else -1.0
    return coins[first:], direction * (scores[first:] - middle)


def _claimed(statement: PrivacyStatement) -> float:
    real = statement.epsilon_real
    return _known(statement.epsilon_honest if real is None else real)


def _known(epsilon: float | None) -> float:
    if epsilon is None:
        raise ValueError(
            "the claimed ε is not known here, since dp-accounting is not installed; an audit "
            "compares with it: pip install dp-accounting"
        )
    return epsilon


def _multipliers(event: RoundEvent) -> NDArray[np.float64]:
    """λ of a row of the history, rate by rate and group by group; none without a constraint."""
    by_rate = event.row.get("multipliers", {})
    return np.array([value for by_group in by_rate.values() for value in by_group.values()], float)


def _numbers(values: torch.Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = values.detach().cpu().double().numpy()
    return numbers
