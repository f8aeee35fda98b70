"""What would help where no setting will do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fpfl.planning.figures import Setting
from fpfl.planning.question import Question, Share


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
