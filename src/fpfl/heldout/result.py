"""What a private evaluation gives: figures with intervals, a verdict, what they cost and mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fpfl.fairness.collapse import clearly_collapsed, collapse_in_words
from fpfl.fairness.evaluation import Difference, GapEstimate, Verdict
from fpfl.fairness.metrics import ClassMetrics
from fpfl.heldout.scores import BINS, DEARER, SHARE, bin_ends
from fpfl.privacy.assumptions import who_is_public, whole_numbers
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.statement import SEEDED_NOISE, round_up
from fpfl.store.typed import plain, typed

if TYPE_CHECKING:
    from fpfl.heldout.plan import HeldoutPlan

_WORLDS = {
    "zero-out": "with this user's data, or with nothing in its place",
    "add-remove": "with this user among the held-out users, or without",
    "replace-one": "with this user's data, or with any other data in its place",
}


IN_DOUBT = (
    "Whether the model has collapsed (hardly ever predicts a class, or is no better than chance) "
    "these figures cannot tell: their intervals are too wide."
)


def statement(plan: HeldoutPlan, *, seeded: bool) -> list[str]:
    """What is protected, what it costs and what the figures mean, one point a line."""
    reach = "2C" if plan.sensitivity == 2 else "C"
    counts = plan.size
    lines = [
        "Unit of privacy: held-out user (all samples of one together). Adjacency: "
        f"{plan.neighbours}. In words: {_WORLDS[plan.neighbours]}.",
        f"Price: ε = {round_up(plan.epsilon)} at δ = {plan.delta:g}, for one release. Everyone "
        "takes part for certain, so nothing is amplified, and it holds against a server that knows "
        "who is held out, too. (One Gaussian mechanism, by its exact formula.)",
        f"Released: {counts:,} counts of {plan.population:,} users. One user changes them by "
        f"{reach} at most, C = {plan.clip:.4g} (ℓ2); each has Gaussian noise of "
        f"{plan.noise_stddev:.4g} (standard deviation). Every figure is computed from them; "
        "nothing else was looked at.",
        *_of_scores(plan),
        who_is_public(plan.neighbours, None),
        f"To δ adds noise in whole numbers: {whole_numbers(plan.epsilon, 1.0, counts)[1]:.2g}.",
        "Held-out users must be other people than the training users: whoever is both pays both "
        "prices, which add up. So does every further evaluation of the same users, of whatever "
        "model.",
        f"Estimated: the rates of users like these, each weighing {plan.bound:g} samples at most. "
        "The samples of a user with more count for less, all alike; if nobody has more, these are "
        "the plain rates.",
        f"Intervals, at {100 * plan.confidence:.4g}%: they allow for the noise and for these users "
        "being a sample of all, whose own samples may all be alike. Those of differences hold all "
        "at once.",
    ]
    if seeded:
        lines.insert(0, f"Seeded noise, {SEEDED_NOISE}.")
    return lines


def _of_scores(plan: HeldoutPlan) -> list[str]:
    if plan.scores_stddev is None:
        return []
    return [
        f"Among them, for the AUC: samples of either class in {BINS} public bins of the score, "
        f"counted in units of {plan.scores:.3g}, so that they have {100 * SHARE:g}% of the budget "
        f"(1/σ²); the noise on each is {plan.scores_stddev:.4g} samples. The other counts have "
        f"{100 * DEARER:.1f}% more noise for it, and the gap's interval is wider by as much at "
        "most. The order of scores inside a bin is not known; the AUC's interval allows for any.",
    ]


def repeated(costs: Sequence[tuple[float, float]]) -> str:
    """That a run was evaluated before, and what (ε, δ) of all its evaluations come to.

    (Σε, Σδ) for whoever was held out in each (basic composition).
    """
    epsilon, delta = (math.fsum(column) for column in zip(*costs, strict=True))
    return (
        f"Further release: this is evaluation number {len(costs)} of this run, which was resumed "
        "and has another model since the one before. For users who were held out in all of them "
        f"they cost ε = {round_up(epsilon)} at δ = {delta:g} together (added up)."
    )


@dataclass(frozen=True)
class RateEstimate:
    """A rate of the whole or of a group, in [low, high], and the released n' behind it.

    ``value`` is NaN where noise dominates n'; the interval is wide there, not wrong.
    """

    value: float
    low: float
    high: float
    count: float

    def __str__(self) -> str:
        value = "not known" if math.isnan(self.value) else f"{self.value:.3f}"
        return f"{value} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class PrivateEvaluation:
    """What was released about held-out users, and what follows from it: nothing else was looked at.

    Parameters
    ----------
    released
        The noisy counts, ``{group: {kind: count}}``. They may be negative.
    rates
        ``{rate: {"overall": estimate, group: estimate, ...}}``; each interval by itself contains
        the rate with probability ``confidence``.
    gap
        The constraint's, with every difference D_a = overall − value. Their intervals hold all at
        once with probability ``confidence``. With several attributes, the overall value of a
        difference is that of the groups of its own.
    verdict
        "within" if all intervals lie within the tolerance and no group is unknown, "outside" if
        one lies beyond it, else "cannot tell".
    advice
        What intervals of ± α would take, if it cannot be told. For orientation: it takes the
        released figures for the true ones.
    score
        Which of the rates says how good the model is.
    constraint, tolerance, confidence
        As asked for.
    bound
        B: how many samples one user weighs at most.
    mechanism, epsilon, delta, noise_stddev
        What was charged for it: how many users took part, the noise multiplier s/C and which
        neighbours; ε at δ of that; s.
    seeded
        Whether the noise came from a seed (a simulation).
    lines
        The statement.
    contributions
        What its ε rests on; None in files of versions that did not keep it (up to 0.1.0).
    metrics
        Balanced accuracy, F1, AUC and the shares of two classes, each interval by itself; None for
        other tasks, and in files of versions that did not have them.
    scores, scores_stddev
        The noisy counts that the AUC follows from: 32 of class 0 and 32 of class 1, by the
        predicted probability of class 1 (`fpfl.heldout.scores`), and the noise on each; None where
        scores were not counted.
    """

    released: dict[str, dict[str, float]]
    rates: dict[str, dict[str, RateEstimate]]
    gap: GapEstimate
    verdict: Verdict
    advice: str | None
    score: str
    constraint: str
    tolerance: float
    confidence: float
    bound: float
    mechanism: Mechanism
    epsilon: float
    delta: float
    noise_stddev: float
    seeded: bool
    lines: tuple[str, ...] = field(repr=False)
    contributions: str | None = None
    metrics: ClassMetrics | None = None
    scores: list[list[float]] | None = field(default=None, repr=False)
    scores_stddev: float | None = None

    @property
    def population(self) -> int:
        """K: how many users were held out."""
        return self.mechanism.population

    @property
    def neighbours(self) -> str:
        """Which populations count as neighbours."""
        return self.mechanism.neighbours

    @property
    def noise_multiplier(self) -> float:
        """σ = s/C."""
        return self.mechanism.noise_multiplier

    @property
    def worst_group(self) -> str | None:
        """The group that is furthest from the whole; None where no difference is known."""
        return self.gap.worst_group

    @property
    def collapsed(self) -> str | None:
        """How the model has collapsed, in words, where the intervals leave no doubt; else None."""
        if not clearly_collapsed(self.metrics):
            return None
        return collapse_in_words(self.metrics, self.rates[self.score]["overall"].value)

    @property
    def collapse_in_doubt(self) -> bool:
        """Whether the figures cannot tell if the model has collapsed."""
        return self.metrics is not None and clearly_collapsed(self.metrics) is None

    @property
    def verdict_in_words(self) -> str:
        """The verdict as a sentence with its reason.

        That of a collapsed model says so first: its groups are treated alike for nothing.
        """
        words, collapsed = self._judged, self.collapsed
        if collapsed is None:
            return words
        return f"collapsed, so that its gap says nothing: {collapsed} (the gap by itself: {words})"

    @property
    def _judged(self) -> str:
        alpha, ends = f"α = {self.tolerance:g}", f"[{self.gap.low:.3f}, {self.gap.high:.3f}]"
        silent = ", ".join(self.gap.unknown_groups)
        if self.verdict != "cannot tell":
            words = f"{self.verdict} {alpha} at {100 * self.confidence:.4g}%"
        elif self.gap.high > self.tolerance:
            words = f"cannot tell: {alpha} lies in the gap's interval {ends}"
        else:
            words = f"cannot tell: the interval {ends} is within {alpha}, but not all is known"
        words += f" (not known, the noise being too large for them: {silent})" if silent else ""
        return f"{words}. {self.advice}" if self.advice else words

    def statement(self) -> list[str]:
        """What is protected, what it cost and what the figures mean, one point a line."""
        return list(self.lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it: NaN becomes None."""
        record = asdict(self) | {
            "gap": self.gap.as_dict(),
            "verdict_in_words": self.verdict_in_words,
            "statement": self.statement(),
            "collapsed": self.collapsed,
            "collapse_in_doubt": self.collapse_in_doubt,
            "score_bins": None if self.scores is None else bin_ends(),
        }
        del record["lines"]
        found: dict[str, Any] = plain(record)
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivateEvaluation:
        """What `as_dict` wrote."""
        said = {"lines": values.get("statement")} if isinstance(values, dict) else {}
        return typed(cls, values | said, "the evaluation", nan=True)

    def __str__(self) -> str:
        overall = self.rates[self.score]["overall"]
        lines = [
            f"{self.population:,} held-out users, evaluated under "
            f"ε = {round_up(self.epsilon)}, δ = {self.delta:.3g} ({self.neighbours})",
            f"intervals at {100 * self.confidence:.4g}%, for sampling and noise "
            f"(standard deviation {self.noise_stddev:.3g} a count)",
            f"{self.score} {overall}",
            *self._balance(),
            "",
            *_table([(*_HEAD, self.score, "n'"), *map(self._row, self.gap.differences)]),
            "",
            f"{self.gap}",
            f"{self.constraint}: {self.verdict_in_words}",
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _balance(self) -> list[str]:
        lines = [] if self.metrics is None else self.metrics.lines()
        if self.collapsed is not None:
            lines.append(f"COLLAPSED: {self.collapsed}")
        return [*lines, IN_DOUBT] if self.collapse_in_doubt else lines

    def _row(self, d: Difference) -> tuple[str, ...]:
        estimate, score = self.rates[d.rate][d.group], self.rates[self.score][d.group]
        difference = "-" if math.isnan(d.difference) else f"{d.difference:+.3f}"
        ends = f"[{d.low:+.3f}, {d.high:+.3f}]"
        return (
            d.group,
            d.rate,
            str(estimate),
            difference,
            ends,
            str(score),
            f"{estimate.count:,.0f}",
        )


_HEAD = ("group", "rate", "value", "overall - value", "interval")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)) for row in rows]
