"""The choice of a cohort, and what a plan says: in words, as numbers, as arguments to go on with.

All of it is a function of the public numbers that were given: nothing is trained or read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fpfl.planning.errors import heldout_users
from fpfl.planning.question import Question, Setting, Share
from fpfl.privacy.conventions import PrivacyWarning
from fpfl.privacy.statement import round_up
from fpfl.training.defaults import ROUNDS, chosen_cohort


@dataclass(frozen=True)
class Lever:
    """A change to what was asked for, and the worst figure that the chosen setting would have."""

    what: str
    score: float


def levers(question: Question, chosen: Setting) -> tuple[Lever, ...]:
    """Changes of what was asked for, each by itself, that leave a better worst figure."""
    m, T = chosen.cohort, chosen.rounds
    ways = {
        f"twice the ε, {2 * question.epsilon:g}": replace(question, epsilon=2 * question.epsilon)
    }
    if question.tolerance < 0.5:
        twice = 2.0 * question.tolerance
        ways[f"twice the tolerance, {twice:g}"] = replace(question, tolerance=twice)
    if question.parameters >= 4:
        fewer = question.parameters // 4
        ways[f"a model of a quarter of the parameters, {fewer:,}"] = replace(
            question, parameters=fewer
        )
    merged = _merged(question)
    if merged is not None:
        ways["merging the two smallest groups of an attribute"] = merged
    ways["twice the users in the population"] = replace(
        question, population=2 * question.population
    )
    found = [Lever(what, asked.setting(m, T).score) for what, asked in ways.items()]
    helping = [lever for lever in found if lever.score < 0.99 * chosen.score]
    return tuple(sorted(helping, key=lambda lever: lever.score))


def _merged(question: Question) -> Question | None:
    """The question with the two smallest groups of the attribute with the most of them as one."""
    name = max(question.groups, key=lambda each: len(question.groups[each]))
    values = dict(question.groups[name])
    if len(values) < 3:
        return None
    pairs = {v: s if isinstance(s, tuple) else (s, None) for v, s in values.items()}
    one, other = sorted(pairs, key=lambda v: pairs[v][0])[:2]
    (a, base_a), (b, base_b) = pairs[one], pairs[other]
    share: Share = a + b
    if base_a is not None and base_b is not None:
        share = (a + b, (a * base_a + b * base_b) / (a + b))
    kept = {v: s for v, s in values.items() if v not in (one, other)}
    return replace(question, groups={**question.groups, name: {**kept, f"{one} or {other}": share}})


ENOUGH = 1.1
"""Where no setting will do: the smallest cohort whose worst figure is so near to the least."""

_NAMES = {
    "gradient": "the noise on the gradient is longer than a gradient can be",
    "step": "noise leaves less than a fifth of a step",
    "gap": "the gap's error is too large for the tolerance",
}


@dataclass(frozen=True)
class TrainingPlan:
    """What `plan_training` finds.

    Parameters
    ----------
    question
        What it was made from.
    settings
        Everything that was looked at: cohorts of the same T, in order.
    chosen
        The recommended one, by the rule of every door (`fpfl.training.defaults`).
    given
        The cohort that was asked about, where one was.
    fewer_rounds
        The chosen cohort with fewer rounds.
    levers
        What would help, best first; empty where the chosen setting will do.
    heldout
        How many held-out users it takes to tell α from the error of sampling them.
    delta
        δ.
    """

    question: Question
    settings: tuple[Setting, ...] = field(repr=False)
    chosen: Setting
    given: Setting | None
    fewer_rounds: Setting | None
    levers: tuple[Lever, ...]
    heldout: int
    delta: float

    @property
    def least(self) -> Setting:
        """The smallest cohort that will do; where none will, the smallest near the best."""
        return _least(self.settings)

    @property
    def reason(self) -> str:
        """Why the chosen setting was chosen."""
        rule = (
            "a tenth of the users, but no fewer than 100 and no more than 5,000, as training takes "
            "it by default"
        )
        if self.chosen.good:
            return (
                f"{rule}. At it the gradient stands out of its noise, a fifth of a step or more is "
                "left, and the run tells α from the noise of its counts"
            )
        return f"{rule}. At it, {_because(self.chosen)}"

    def arguments(self) -> dict[str, Any]:
        """What ``fpfl.suggest`` takes of it, beside a schema and a constraint."""
        q, s = self.question, self.chosen
        return {
            "population": q.population,
            "cohort": s.cohort,
            "rounds": s.rounds,
            "epsilon": q.epsilon,
            "delta": self.delta,
        }

    def lines(self) -> list[str]:
        """The plan in words, one point a line."""
        return [*self._recommended(), *self._told(), *self._beyond()]

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""

        def plain(setting: Setting | None) -> dict[str, Any] | None:
            if setting is None:
                return None
            told = {"one round": setting.worst.one_round, "averaged": setting.worst.averaged}
            more = {"figures": setting.figures, "good": setting.good, "uploads": setting.uploads}
            errors = told | {"run": setting.worst.run}
            return (
                asdict(setting) | more | {"told": {n: setting.told(e) for n, e in errors.items()}}
            )

        return {
            "question": asdict(self.question),
            "delta": self.delta,
            "chosen": plain(self.chosen),
            "reason": self.reason,
            "least": plain(self.least),
            "given": plain(self.given),
            "fewer_rounds": plain(self.fewer_rounds),
            "settings": [plain(setting) for setting in self.settings],
            "levers": [asdict(lever) for lever in self.levers],
            "heldout_users": self.heldout,
            "words": self.lines(),
        }

    def _recommended(self) -> list[str]:
        s, q = self.chosen, self.question
        lines = [
            f"Take m = {s.cohort:,}, T = {s.rounds:,}, C = {s.clipping.bound:g}, "
            f"C_s = {s.clipping.counts:g}, learning rate {s.learning_rate:.3g}: {self.reason}.",
            f"Noise: s = {s.gradient_noise:.3g} on each of {q.parameters:,} numbers of the summed "
            f"gradient, which makes {s.gradient_length:.3g} in length on its mean against at most "
            f"C = {s.clipping.bound:g}; {s.count_noise:.3g} on each count; "
            f"{s.accuracy_error:.3f} in one round's released accuracy.",
        ]
        lines.append(self._others())
        if self.fewer_rounds is not None:
            f = self.fewer_rounds
            words = "will do as well" if f.good else f"will not do: {_because(f)}"
            lines.append(f"T = {f.rounds:,} at the same cohort {words}.")
        if self.given is not None and self.given != s:
            words = "will do" if self.given.good else f"will not do: {_because(self.given)}"
            lines.append(f"The cohort asked about, m = {self.given.cohort:,}, {words}.")
        return lines

    def _others(self) -> str:
        """What other cohorts would do."""
        least, chosen = self.least, self.chosen
        if not least.good:
            return (
                f"No cohort will do; the smallest that comes within {100 * (ENOUGH - 1):.0f}% of "
                f"the best is m = {least.cohort:,}, where {_because(least)}."
            )
        if least.cohort == chosen.cohort:
            return "No smaller cohort that was looked at will do."
        return f"The smallest cohort that will do, of those looked at, is m = {least.cohort:,}."

    def _told(self) -> list[str]:
        s, worst = self.chosen, self.chosen.worst
        alpha = f"α = {s.tolerance:g}"
        return [
            f"Can {alpha} be told from noise? The least sure is {worst.group} ({worst.rate}), "
            f"about {worst.count:,.0f} counted in a round: from one round "
            f"{s.told(worst.one_round)} (standard error {worst.one_round:.3g}), from the averaged "
            f"counts that the method goes by {s.told(worst.averaged)} ({worst.averaged:.3g}), from "
            f"the second half of the run {s.told(worst.run)} ({worst.run:.3g}). Yes: two standard "
            "errors fit in α; barely: one does. The last is about how near training can bring "
            "groups to each other.",
            f"To judge the finished model at 95%, hold out about {self.heldout:,} users: with "
            "groups alike, their sampling error alone then fits in α. Noise on their counts "
            "(fpfl evaluate) takes more.",
        ]

    def _beyond(self) -> list[str]:
        s, q = self.chosen, self.question
        lines = [
            f"ε = {q.epsilon:g} (δ = {self.delta:.3g}) is against those who see what is released. "
            f"Against a server that knows the cohorts it is {round_up(s.epsilon_server)} "
            f"(δ = {s.delta_server:.3g}) for a user in {s.participations:,} rounds. Users send "
            f"{s.uploads:,} vectors in all.",
        ]
        if self.levers:
            ways = "; ".join(f"{lever.what} ({lever.score:.2g})" for lever in self.levers)
            lines.append(
                f"What would help, with the worst figure that is left (now {s.score:.2g}, at most "
                f"1 will do), best first: {ways}."
            )
        lines.append(
            "All of it follows from the shares, rates and sizes that were given: they must be "
            "public guesses. Read from the data, they are a release that no ε here covers."
        )
        return lines


def _because(setting: Setting) -> str:
    return " and ".join(
        f"{_NAMES[name]} ({value:.2g} times)"
        for name, value in setting.figures.items()
        if value > 1.0 + 1e-9
    )


CANDIDATES, BISECTIONS = 5, 1
LEAST_COHORT = 50
FEWER_ROUNDS = 250


def plan_training(
    *,
    population: int,
    groups: Mapping[str, Mapping[str, Share]],
    parameters: int,
    epsilon: float,
    samples_per_user: float = 1.0,
    delta: float | None = None,
    constraint: str = "fnr_parity",
    tolerance: float = 0.02,
    base_rate: float | None = None,
    rate: float | None = None,
    cohort: int | None = None,
    rounds: int = ROUNDS,
) -> TrainingPlan:
    """The noise to expect in a training with `OneGradient`, and which settings to take.

    Parameters
    ----------
    population, groups, parameters, epsilon, samples_per_user, delta, constraint, tolerance, \
base_rate, rate
        Public numbers: see `fpfl.planning.question.Question`.
    cohort
        A cohort to look at beside others.
    rounds
        T.
    """
    question = Question(
        population=population,
        groups=groups,
        parameters=parameters,
        epsilon=epsilon,
        samples_per_user=samples_per_user,
        delta=delta,
        constraint=constraint,
        tolerance=tolerance,
        base_rate=base_rate,
        rate=rate,
    )
    if cohort is not None and not 1 <= cohort <= population:
        raise ValueError(f"cohort is {cohort}; expected 1 to the population, {population}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    found = {} if cohort is None else {cohort: question.setting(cohort, rounds)}
    with warnings.catch_warnings():
        # Of a δ that was given the first setting has said what there is to say.
        warnings.simplefilter("ignore" if found else "default", PrivacyWarning)
        for m in sorted({*_candidates(population), chosen_cohort(population)}):
            found.setdefault(m, question.setting(m, rounds))
            warnings.simplefilter("ignore", PrivacyWarning)
        for _ in range(BISECTIONS):
            between = _between(found.values())
            if between is None:
                break
            found[between] = question.setting(between, rounds)
        settings = tuple(found[m] for m in sorted(found))
        chosen = found[chosen_cohort(population)]
        fewer = question.setting(chosen.cohort, FEWER_ROUNDS) if rounds > FEWER_ROUNDS else None
        helping = () if chosen.good else levers(question, chosen)
    return TrainingPlan(
        question=question,
        settings=settings,
        chosen=chosen,
        given=None if cohort is None else found[cohort],
        fewer_rounds=fewer,
        levers=helping,
        heldout=heldout_users(
            question.counted,
            samples=question.samples_per_user,
            relevant=question.relevant,
            tolerance=tolerance,
            rate=rate,
        ),
        delta=chosen.delta_server / 2.0,
    )


def _candidates(population: int) -> list[int]:
    """Cohorts of two digits from 50 to everybody, evenly spaced in their logarithm."""
    low = min(LEAST_COHORT, population)
    steps = [k / (CANDIDATES - 1) for k in range(CANDIDATES)]
    sizes = {_two_digits(low * (population / low) ** step) for step in steps}
    return sorted({size for size in sizes if size < 0.9 * population} | {population})


def _between(settings: Iterable[Setting]) -> int | None:
    """A cohort between the largest that will not do and the smallest that will."""
    good = [s.cohort for s in settings if s.good]
    bad = [s.cohort for s in settings if not s.good and s.cohort < min(good, default=0)]
    if not good or not bad:
        return None
    middle = _two_digits(math.sqrt(min(good) * max(bad)))
    return middle if max(bad) < middle < min(good) else None


def _two_digits(number: float) -> int:
    scale = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return max(1, int(round(number / scale) * scale))


def _least(settings: tuple[Setting, ...]) -> Setting:
    good = [s for s in settings if s.good]
    least = min(s.score for s in settings)
    return min(good or [s for s in settings if s.score <= ENOUGH * least], key=lambda s: s.cohort)
