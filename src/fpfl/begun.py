"""What a run is begun with: settings and fingerprints, its budget, and what it may promise."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.fingerprint import (
    code_fingerprint,
    environment,
    model_fingerprint,
    settings_fingerprint,
)
from fpfl.folder import RunFolder, look, read_about
from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.aggregation import Aggregation
from fpfl.privacy.filter import Mechanism, good_order
from fpfl.privacy.ledger import RunLedger
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.remarks import ALONE, KERNELS, Beyond
from fpfl.privacy.settings import Privacy
from fpfl.privacy.statement import PrivacyStatement, round_up
from fpfl.privacy.terms import Terms


@dataclass(frozen=True)
class Begun:
    """What a run is, apart from where it is written.

    ``settings`` are plain values; ``fingerprints`` are of data, settings and code. ``strict``:
    the run is computed from seeds alone, so it resumes only where all fingerprints agree.
    ``budget`` is fixed when a run begins; None for one that goes on.
    """

    settings: dict[str, Any]
    fingerprints: dict[str, str]
    schema: dict[str, Any]
    environment: dict[str, Any]
    plan: PrivacyPlan | None
    budget: float | None
    simulation: bool
    strict: bool

    @property
    def cap(self) -> int | None:
        """How often one user may take part, where that is limited."""
        return None if self.plan is None else self.plan.max_participations

    @property
    def terms(self) -> Terms | None:
        """What the run may cost, fixed before it begins; None without privacy."""
        if self.plan is None:
            return None
        budget, mechanism = self.budget, Mechanism.of(self.plan)
        return Terms(
            mechanism=mechanism,
            rounds=self.plan.rounds,
            delta=self.plan.delta,
            budget=budget,
            order=None if budget is None else good_order(budget, self.plan.delta, mechanism),
            cap=self.cap,
        )

    def differing(self, fingerprints: dict[str, str]) -> list[str]:
        """Which of the fingerprints are not those of this beginning."""
        return [name for name, mine in self.fingerprints.items() if fingerprints.get(name) != mine]


def begun_with(
    folder: RunFolder,
    settings: dict[str, Any],
    seeds: tuple[Any, ...],
    model: nn.Module,
    data: str,
    schema: Schema,
    constraint: Constraint | None,
    optimizer: Any,
    plan: PrivacyPlan | None,
    privacy: Privacy | None,
) -> Begun:
    """What a training is begun with.

    ``seeds`` are its seeds and whatever else moves its bits, ``data`` is a fingerprint.
    """
    seed, noise_seed, *_ = seeds
    functions = [f for r in constraint.rates for f in (r.condition, r.true)] if constraint else []
    about = environment()
    bits = {"seeds": repr(seeds), "threads": about["threads"], "gpu": about["gpu"]}
    settings = json.loads(json.dumps(settings))  # as they are read from a file again
    return Begun(
        settings=settings,
        fingerprints={
            "data": data,
            "settings": settings_fingerprint(settings | bits),
            "model": model_fingerprint(model),
            "code": code_fingerprint(*functions, *([optimizer] if optimizer else [])),
        },
        schema=schema.as_dict(),
        environment=about,
        plan=plan,
        budget=_budget(plan, privacy, folder.resume),
        simulation=noise_seed is not None,
        strict=noise_seed is not None if plan is not None else seed is not None,
    )


def _budget(plan: PrivacyPlan | None, privacy: Privacy | None, resumed: bool) -> float | None:
    """ε that a new run may cost in the end: as given, or what the plan costs honestly."""
    if plan is None or privacy is None or resumed:
        return None
    try:
        planned = plan.epsilon_honest if plan.epsilon_real is None else plan.epsilon_real
    except MissingAccountantError:
        return privacy.budget
    if privacy.budget is None:
        return planned or None  # ε = 0 has room for nothing
    if privacy.budget < planned * (1 - 1e-9):
        raise ValueError(
            f"the budget is ε = {privacy.budget:g}, and the planned rounds alone cost "
            f"{round_up(planned)}: raise the budget, or plan less"
        )
    return privacy.budget


def noise_kept(folder: RunFolder, privacy: Privacy) -> Privacy:
    """The privacy settings of a run that goes on: with the noise multiplier that it has had.

    ε was turned into noise when the run began; another T must not change that behind one's back.
    """
    if not folder.resume:
        return privacy
    about = read_about(folder.path)
    ledger = look(folder.path)
    before = (ledger.settings or about["settings"])["privacy"] or {}
    if ledger.mechanism is None or privacy.epsilon is None:
        return privacy
    if before.get("epsilon") != privacy.epsilon:
        raise ValueError(
            f"the run was begun with epsilon={before.get('epsilon')} and cannot go on with "
            f"epsilon={privacy.epsilon}: that was spent as planned. Give noise_multiplier for "
            "other noise; the budget that was fixed at the beginning stays"
        )
    return replace(privacy, epsilon=None, noise_multiplier=ledger.mechanism.noise_multiplier)


def statement(
    plan: PrivacyPlan | None,
    ledger: RunLedger | None,
    seeded_noise: bool,
    seeded_cohorts: bool,
    aggregation: Aggregation | None = None,
    *,
    size: int,
    declared: bool | None,
) -> PrivacyStatement | None:
    """What a run promises: as planned, or what the filter of changed settings kept to.

    ``size`` is that of v, ``declared`` says whether K was.
    """
    if plan is None:
        return None
    limit = None if ledger is None else ledger.filter
    if ledger is not None and limit is None:
        # Whoever stops before T has chosen so after looking: ε is that of all T rounds.
        plan = plan.with_rounds(ledger.planned)
    said = plan.statement(seeded_noise=seeded_noise, seeded_cohorts=seeded_cohorts)
    said = replace(said, aggregation=aggregation)
    rounds = plan.rounds
    if ledger is not None and limit is not None and ledger.server is not None:
        said = said.filtered(limit, ledger.server, ledger.charges, len(ledger.changes))
        rounds = max(ledger.server.rounds, ledger.spent)
    said = said.of_run(
        Beyond(
            numbers=rounds * size,
            declared=declared,
            contributions=ALONE if ledger is None else ledger.contributions,
            assumptions=(KERNELS,) if aggregation is None else (),
        )
    )
    if ledger is not None and ledger.population is not None:
        said = replace(said, population_ledger=ledger.population.summary())
    return said
