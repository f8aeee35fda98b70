"""What a plan promises, in words that one can read without knowing the method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.assumptions import (
    ALONE,
    BEFORE,
    BREACH,
    NOT_PRIVATE,
    SEES_SUMS,
    Aggregation,
    Beyond,
    DeltaTerm,
    against_the_curious,
    several,
    who_is_public,
    whole_numbers,
    whose_noise,
)
from fpfl.privacy.conventions.base import REGISTER
from fpfl.privacy.gaussian import gaussian_epsilon
from fpfl.privacy.renyi import shares_epsilon
from fpfl.store.typed import typed

if TYPE_CHECKING:
    from fpfl.privacy.filter import Mechanism, PrivacyFilter, ServerLimit
    from fpfl.privacy.plan import PrivacyPlan

NOT_COMPUTED = "ε not computed here: dp-accounting is not installed"
SEEDED_NOISE = "simulation: no guarantee against anyone who has the seed"

_NEIGHBOURS = {
    "zero-out": "with the user's data, or with nothing in its place",
    "add-remove": "with the user among all users, or without",
    "replace-one": "with the user's data, or with any other data in its place",
}
_FILTER = (
    "a privacy filter, Rényi DP at order {order}, fixed before the run (Feldman and Zrnic 2021)"
)

ADAPTS = (
    "The bound of the first block adapts: it follows the released fraction of clipped users, and "
    "its noise is in proportion to it in every round. The figures are those that it begins with."
)


@dataclass(frozen=True)
class BlockNoise:
    """A block of the statistics with the noise that it gets."""

    name: str
    bound: float
    share: float
    noise_stddev: float


@dataclass(frozen=True)
class PrivacyStatement:
    """A plan's promise, made by :meth:`PrivacyPlan.statement`.

    Every ε is None where dp-accounting is missing and it takes an accountant to know it; those of
    the real population are None where the run draws from the population that ε was computed for.

    Every δ is the whole one; ``delta_terms`` are those parts of it that no accountant gives.
    Whoever knows more cannot be promised more: no figure against the server is below the one
    against those who see only what is released. ``contributions`` is None for runs of versions
    in which one user's data could change what others send.
    """

    convention: str
    neighbours: str
    sampler: str
    accountant: str
    population: int
    real_population: int | None
    cohort: int
    rounds: int
    noise_multiplier: float
    blocks: tuple[BlockNoise, ...]
    sensitivity: int
    sensitivity_honest: int
    delta: float
    epsilon: float | None
    epsilon_honest: float | None
    epsilon_real: float | None
    participations: int
    participations_capped: bool
    delta_server: float
    epsilon_server: float
    participations_real: int | None
    epsilon_server_real: float | None
    seeded_noise: bool
    seeded_cohorts: bool
    filter_order: int | None = None
    filter_spent: float | None = None
    changes: int = 0
    population_ledger: str | None = None
    aggregation: Aggregation | None = None
    copies: int = 1
    delta_terms: tuple[DeltaTerm, ...] = ()
    population_declared: bool | None = None
    assumptions: tuple[str, ...] = ()
    contributions: str | None = None
    server_raised: bool = False
    measurement: float | None = None

    @classmethod
    def of(
        cls,
        plan: PrivacyPlan,
        blocks: tuple[BlockNoise, ...],
        *,
        seeded_noise: bool,
        seeded_cohorts: bool,
    ) -> PrivacyStatement:
        """Make the statement of ``plan``."""
        figures: tuple[float | None, float | None, float | None]
        try:
            figures = plan.epsilon, plan.epsilon_honest, plan.epsilon_real
        except MissingAccountantError:
            figures = None, None, None
        # Without amplification nothing is left to chance: all rounds count, or the cap.
        capped = plan.max_participations is not None or plan.terms.shares
        real = plan.real_population
        return cls(
            convention=plan.convention,
            neighbours=plan.neighbours,
            sampler=plan.terms.words,
            accountant=plan.terms.accountant,
            population=plan.population,
            real_population=None if real == plan.population else real,
            cohort=plan.cohort,
            rounds=plan.rounds,
            noise_multiplier=plan.noise_multiplier,
            blocks=blocks,
            sensitivity=plan.sensitivity,
            sensitivity_honest=plan.sensitivity_honest,
            delta=plan.delta,
            epsilon=figures[0],
            epsilon_honest=figures[1],
            epsilon_real=figures[2],
            participations=plan.participations,
            participations_capped=capped,
            # Without a cap there is also the chance δ that someone takes part more often.
            delta_server=plan.delta if capped else 2 * plan.delta,
            epsilon_server=plan.epsilon_server,
            participations_real=plan.participations_real,
            epsilon_server_real=plan.epsilon_server_real,
            seeded_noise=seeded_noise,
            seeded_cohorts=seeded_cohorts,
            copies=plan.copies,
            contributions=ALONE,
            measurement=plan.measurement,
        )._in_order()

    def filtered(
        self,
        limit: PrivacyFilter,
        server: ServerLimit,
        charges: Mapping[Mechanism, int],
        changes: int,
    ) -> PrivacyStatement:
        """The statement of a run whose rounds or noise were changed after looking.

        What holds is the filter's budget. It was changed on some of the ways that the run could
        have gone and kept to its plan on others: a set of outcomes is a part of the first kind and
        one of the second, each within its own (ε, δ), so together they are within 2δ.
        Against the server it is the filter on unamplified rounds, fixed before the run as well: no
        figure of rounds that were charged, which depends on what was seen. Without a cap all
        rounds count, so nothing is left to chance, and δ is the same.
        """
        times, against = server.participations, server.epsilon
        if REGISTER[self.convention].shares:
            # The filter counts rounds in full, or as secret coins have it: the server's figure.
            times, against = max(sum(charges.values()), self.participations), limit.epsilon
        return replace(
            self,
            accountant=_FILTER.format(order=limit.order),
            population=self.real_population or self.population,
            real_population=None,
            rounds=sum(charges.values()),
            convention="replace-one" if self.convention == "paper" else self.convention,
            delta=2 * limit.delta,
            epsilon=limit.epsilon,
            epsilon_honest=limit.epsilon,
            epsilon_real=None,
            participations=times,
            epsilon_server=against,
            delta_server=2 * limit.delta,
            participations_real=None,
            epsilon_server_real=None,
            filter_order=limit.order,
            filter_spent=limit.spent(charges),
            changes=changes,
        )._in_order()

    def of_run(self, run: Beyond) -> PrivacyStatement:
        """The statement with what a run adds to its plan: small terms of δ, K, assumptions.

        Terms: of noise in whole numbers, but not where it comes in shares, for `fpfl.privacy.
        shares` has them inside; and 2⁻⁴⁰ for every session of secure aggregation.
        """
        terms, server_terms = [], []
        more, more_server = 0.0, 0.0
        if run.numbers is not None and not REGISTER[self.convention].shares:
            known = [e for e in (self.epsilon_honest, self.epsilon_real) if e is not None]
            if known:
                more, value = whole_numbers(max(known), self.delta, run.numbers)
                terms.append(DeltaTerm(f"noise in whole numbers ({run.numbers:,} of them)", value))
            most = max(self.epsilon_server, self.epsilon_server_real or 0.0)
            more_server, value = whole_numbers(most, self.delta_server, run.numbers, part=1e-7)
            server_terms.append(DeltaTerm("noise in whole numbers", value))
        if self.aggregation is not None:
            releases = self.rounds + (self.measurement is not None)
            sessions = releases * self.aggregation.attempts
            what = f"secure aggregation, up to {sessions:,} sessions"
            terms.append(DeltaTerm(what, sessions * BREACH))
            server_terms.append(terms[-1])
        return replace(
            self,
            epsilon=_plus(self.epsilon, more),
            epsilon_honest=_plus(self.epsilon_honest, more),
            epsilon_real=_plus(self.epsilon_real, more),
            epsilon_server=self.epsilon_server + more_server,
            epsilon_server_real=_plus(self.epsilon_server_real, more_server),
            delta=self.delta + sum(term.value for term in terms),
            delta_server=self.delta_server + sum(term.value for term in server_terms),
            delta_terms=tuple(terms),
            population_declared=run.declared,
            assumptions=run.assumptions,
            contributions=run.contributions,
        )._in_order()

    def _in_order(self) -> PrivacyStatement:
        """With no figure against the server below the one against those who see less."""
        seen, real = self.epsilon_honest or 0.0, self.epsilon_real or 0.0
        server_real = self.epsilon_server_real
        raised = self.epsilon_server < seen or (server_real is not None and server_real < real)
        return replace(
            self,
            server_raised=self.server_raised or raised,
            epsilon_server=max(self.epsilon_server, seen),
            epsilon_server_real=None if server_real is None else max(server_real, real),
            delta_server=max(self.delta_server, self.delta),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, unrounded, in types that JSON knows."""
        values = asdict(self)
        for name in ("blocks", "delta_terms", "assumptions"):
            values[name] = list(values[name])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivacyStatement:
        """What :meth:`as_dict` wrote, by this version or an earlier one."""
        return typed(cls, values, "the privacy statement")

    def lines(self) -> list[str]:
        """Return the statement, one sentence or two a line."""
        return [
            *self._warnings(),
            "Unit of privacy: user (all samples of one user together). Adjacency: "
            f"{self.neighbours}. In words: {_NEIGHBOURS[self.neighbours]}.",
            *self._against_outsiders(),
            *self._against_server(),
            *self._how(),
            who_is_public(self.neighbours, self.population_declared),
            *self._changed(),
            *self._small_terms(),
            *(f"Assumed: {sentence}" for sentence in self.assumptions),
            "Not covered: whatever was read from the data before training (means for a "
            "normalisation, vocabularies, ranges) and evaluations without noise.",
            *self._beyond(),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _changed(self) -> list[str]:
        if self.filter_order is None:
            return []
        return [
            f"Settings that count were changed {self.changes} time{'s'[: self.changes > 1]} after "
            "totals had been released, so ε is the budget that was fixed before the run and kept "
            "by a privacy filter, not the price of a plan; δ is doubled. For orientation: what was "
            f"charged so far comes to {round_up(self.filter_spent or 0.0)} of it.",
        ]

    def _small_terms(self) -> list[str]:
        if not self.delta_terms:
            return []
        terms = "; ".join(f"{term.name}: {term.value:.2g}" for term in self.delta_terms)
        return [f"In δ, besides the accountant's: {terms}."]

    def _beyond(self) -> list[str]:
        if self.population_ledger is None:
            return [
                "This is the price of this run alone: every further run on the same users (another "
                "seed, a search for settings) adds to it.",
            ]
        return [
            "Other runs on the same users add to this price. The population's ledger adds them up:",
            *self.population_ledger.splitlines(),
        ]

    def _warnings(self) -> list[str]:
        lines = [] if self.contributions is not None else [BEFORE]
        if self.aggregation is not None and self.aggregation.injected:
            lines.append(NOT_PRIVATE)
        elif self.seeded_noise:
            lines.append(
                f"Seeded noise, {SEEDED_NOISE} (and can subtract the noise). All figures below are "
                "those of a run whose noise nobody knows."
            )
        if self.seeded_cohorts and self.aggregation is None:
            server = self.epsilon_server_real or self.epsilon_server
            lines.append(
                "Seeded cohorts: amplification by sampling does not hold against anyone who has "
                f"that seed. For them ε is the server's, {round_up(server)}."
            )
        return lines

    def _against_outsiders(self) -> list[str]:
        who = "Against those who see only what is released (models and noisy totals)"
        at = f"at δ = {self.delta:g}"
        lines = []
        if self.real_population is not None:
            lines.append(
                f"HYPOTHETICAL: the figures for {self.population:,} users are those of a "
                f"population that this run does not have. It draws from {self.real_population:,} "
                "users: only the figures marked REAL hold for them."
            )
        mark = "" if self.real_population is None else f" HYPOTHETICAL, {self.population:,} users:"
        if self.epsilon is None or self.epsilon_honest is None:
            lines.append(f"{who}:{mark} {NOT_COMPUTED} (δ = {self.delta:g}).")
            if self.real_population is not None:
                lines.append(f"{who}: REAL, {self.real_population:,} users: {NOT_COMPUTED}.")
            return lines
        if self.convention == "paper":
            lines.append(
                f"{who}:{mark} honest ε = {round_up(self.epsilon_honest)} {at}. In the paper's "
                f"convention, at face value, it reads ε = {round_up(self.epsilon)}: that takes one "
                "user's influence on a total for C, but replacing a user changes it by up to 2C. "
                "Rely on the honest figure."
            )
        else:
            lines.append(f"{who}:{mark} ε = {round_up(self.epsilon)} {at}.")
        holds = self.epsilon_honest
        if self.epsilon_real is not None:
            holds = self.epsilon_real
            lines.append(
                f"{who}: REAL, {self.real_population:,} users: ε = {round_up(holds)} {at}."
            )
        lines.append(
            f"In words: whatever they may conclude, one user's data makes it at most "
            f"{_times(holds)} times as likely, but for a chance of about δ."
        )
        return lines

    def _against_server(self) -> list[str]:
        if self.aggregation is not None and not self.aggregation.shares:
            return [SEES_SUMS]
        if self.convention == "coins":
            return against_the_curious(self.aggregation, self.neighbours)
        who = "Against a server that knows the cohorts (no amplification by sampling)"
        lines = []
        mark = "" if self.real_population is None else f" HYPOTHETICAL, {self.population:,} users:"
        lines.append(f"{who}:{mark} {self._server(self.participations, self.epsilon_server)}")
        if self.server_raised:
            lines.append(
                "(The bound for such a server alone came out below the figure for those who see "
                "less. It sees more, so theirs is given for it.)"
            )
        if self.participations_real is not None and self.epsilon_server_real is not None:
            real = self._server(self.participations_real, self.epsilon_server_real)
            lines.append(f"{who}: REAL, {self.real_population:,} users: {real}")
        if self.neighbours == "add-remove":
            lines.append(
                "Such a server knows who took part. Against it the user's data is protected, the "
                "fact of taking part is not."
            )
        return lines

    def _server(self, participations: int, epsilon: float) -> str:
        rounds = f"{participations} round{'' if participations == 1 else 's'}"
        figure = (
            f"ε = {round_up(epsilon)} at δ = {self.delta_server:g} for a user who takes part in"
        )
        if self.filter_order is not None and not self.participations_capped:
            return (
                f"{figure} {rounds}: all that the budget had room for, since the run was changed "
                "after looking and there is no cap (max_participations). That was fixed before the "
                "run, too."
            )
        if self.participations_capped:
            cap = "" if self.convention == "picked" else "That is a cap: "
            return f"{figure} {rounds}. {cap}{'n' if cap else 'N'}obody takes part more often."
        return (
            f"{figure} {rounds}. There is no cap: no user exceeds it but with probability "
            f"{self.delta_server / 2:g}, which adds to δ."
        )

    @property
    def _adapts(self) -> bool:
        """Whether the bound follows the number of clipped users: only then it is sent as ±1/2."""
        return any((block.name, block.bound) == ("clipped", 0.5) for block in self.blocks)

    def _how(self) -> list[str]:
        users = self.real_population or self.population
        bounds = {1: "C", 2: "2C"}
        sensitivity = f"{bounds[self.sensitivity]} (C: clip bound)"
        if self.sensitivity != self.sensitivity_honest:
            sensitivity += f" at face value, {bounds[self.sensitivity_honest]} honestly"
        noise = "; ".join(
            f"{block.name}: bound {block.bound:g}, noise {block.noise_stddev:.4g}"
            for block in self.blocks
        )
        return [
            f"Cohorts: {self.sampler}; {self.cohort:,} of {users:,} users per round"
            f"{' on average' if self.convention in ('poisson', 'coins') else ''}, "
            f"{self.rounds:,} rounds. "
            f"Accountant: {self.accountant}. Neighbours: {self.neighbours}.",
            f"One user changes a total by at most {sensitivity}. "
            f"{whose_noise(self.aggregation)} of {self.noise_multiplier:.4g} clip bounds (standard "
            f"deviation): {noise}.",
            *([ADAPTS] if self._adapts else []),
            *self._measured(),
            *several(self.copies),
        ]

    @property
    def epsilon_measurement(self) -> float:
        """ε at the plan's δ of the release before the first round, by itself; 0 without one."""
        if self.measurement is None:
            return 0.0
        chance = self.delta - sum(term.value for term in self.delta_terms)
        if REGISTER[self.convention].shares:
            return shares_epsilon(self.measurement, 1, chance)
        reach = float(self.sensitivity_honest)
        return gaussian_epsilon(self.measurement, 1, chance, sensitivity=reach)

    def _measured(self) -> list[str]:
        if self.measurement is None:
            return []
        picked = self.convention == "picked" and self.aggregation is not None
        who = "those whose nodes are picked take part" if picked else "everybody takes part"
        return [
            "Before the first round the inputs' columns were measured once, to scale them: "
            "histograms over public bins and counts of declared categories, in which "
            f"{who}, with noise of {self.measurement:.4g} bounds (standard deviation). "
            f"Every ε here has it in; alone it would be ε = {round_up(self.epsilon_measurement)}.",
        ]


def round_up(value: float) -> str:
    """Format ε with four digits, rounded up: a bound that is rounded down is no bound."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 3 - math.floor(math.log10(value))
    scale = 10.0**digits
    # A relative 1e-12 keeps a value like 2.0000000000000004 from becoming 2.001.
    up = math.ceil(value * scale * (1 - 1e-12)) / scale
    return f"{up:,.{max(digits, 0)}f}"


def _plus(epsilon: float | None, more: float) -> float | None:
    return None if epsilon is None else epsilon + more


def _times(epsilon: float) -> str:
    """Return e^ε, rounded up, as a power of ten where it is large."""
    if epsilon < 10:
        return f"{math.ceil(math.exp(epsilon) * 10) / 10:,.1f}"
    return f"10^{math.ceil(epsilon / math.log(10)):,}"
