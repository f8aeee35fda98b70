r"""From guessed coins to a lower bound of ε.

In each of R independent runs, every one of m canaries has a fair secret coin, which decides between
two neighbouring data. The auditor sees what a run released and guesses r of its coins: r is fixed
in advance, which ones is its own choice. Two tests of "(ε, δ)-private in every coin" follow, and
the bound is the better of the two, each at half the allowed chance of error. Let

    q = e^ε/(1 + e^ε).

**All runs as one** (Steinke, Nasr and Jagielski 2023, Theorem 5.2). Independent runs are one
mechanism with all their coins: n = Rm canaries, Rr guesses. No auditor does better than against
randomised response, but for the δs: the number of right guesses is stochastically dominated by

    W + X,    W ~ Binomial(Rr, q),    X ≥ 0 whole and independent of W,    E[X] ≤ 2nδ.

The worst X is 0 or some i, and it is i with probability 2nδ/i at most (Markov):

    P[at least v right] ≤ P[W ≥ v] + 2nδ · max_i P[v − i ≤ W < v]/i.

It needs no more than one run. Its weakness is the last term: a mechanism may fail everybody at
once.

**Run by run.** A mechanism may do so, but not in every run, for runs are independent. Let A be the
event that the auditor guesses heads for a canary, B that it guesses tails. By the definition
P[A | heads] ≤ e^ε P[A | tails] + δ and P[B | tails] ≤ e^ε P[B | heads] + δ, hence
P[right] ≤ e^ε P[wrong] + δ; added up over the run's canaries, with c right ones among r guesses,

    E[c/r] ≤ a := q + (m/r) δ (1 − q).

So whoever bets a share f of his money on c/r > a, run after run, has

    M = Π_j (1 − f + f c_j/(r a)),    E[M] ≤ 1,    P[M ≥ 1/p] ≤ p  (Markov):

1/M is a p-value, and so it is for a mean of several M, with other f and r. What is lost in δ is
only (m/r) δ here, so it works where the theorem above does not: at the δ of a small population.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST = 60.0
"""Bounds are looked for up to this ε: no number of canaries that fits a computer gives more."""

BETS = (0.3, 0.9)
"""The shares f that are bet, fixed in advance."""


@dataclass(frozen=True)
class Guesses:
    """In run j, ``correct[j]`` of ``guesses`` guesses on ``canaries`` coins were right."""

    canaries: int
    guesses: int
    correct: tuple[int, ...]

    def __post_init__(self) -> None:
        right = all(0 <= correct <= self.guesses for correct in self.correct)
        if not (right and self.correct and 1 <= self.guesses <= self.canaries):
            raise ValueError(
                f"{self.guesses} guesses on {self.canaries} canaries a run were given, of which "
                f"{self.correct} are right; expected 1 ≤ guesses ≤ canaries, 0 ≤ correct ≤ guesses "
                "and at least one run"
            )

    @property
    def runs(self) -> int:
        """R."""
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        """The share of all guesses that is right."""
        return sum(self.correct) / (self.runs * self.guesses)


@dataclass(frozen=True)
class Bound:
    """A lower bound of ε, and the guesses that gave it."""

    epsilon: float
    guesses: Guesses


def surest(
    coins: NDArray[np.bool_], scores: NDArray[np.float64], shares: Sequence[float]
) -> list[Guesses]:
    """Guess, in every run, the coins that the scores are surest of.

    Parameters
    ----------
    coins, scores
        Shape (R, m). A score is above 0 where the auditor believes in heads, the surer the larger,
        and below 0 for tails. 0 or NaN is no opinion: guessed last, alternately.
    shares
        Fixed in advance: r/m. Shares that come to the same r count once.
    """
    if coins.shape != scores.shape or coins.ndim != 2 or not coins.size:
        raise ValueError(
            f"coins of shape {coins.shape} and scores of shape {scores.shape} were given; expected "
            "(runs, canaries) for both, and at least one of each"
        )
    if not shares or not all(0.0 < share <= 1.0 for share in shares):
        raise ValueError(f"shares={tuple(shares)}; give at least one, each in (0, 1]")
    runs, canaries = coins.shape
    known = np.where(np.isnan(scores), 0.0, scores)
    either = (np.arange(canaries) + np.arange(runs)[:, None]) % 2 == 0
    right = np.where(known == 0.0, either, known > 0.0) == coins
    order = np.argsort(-np.abs(known), axis=1, kind="stable")
    right = np.take_along_axis(right, order, axis=1)
    return [
        Guesses(canaries, number, tuple(right[:, :number].sum(axis=1).tolist()))
        for number in sorted({max(1, round(share * canaries)) for share in shares})
    ]


def one_run_p_value(
    correct: int, guesses: int, epsilon: float, *, canaries: int, delta: float = 0.0
) -> float:
    """How likely at most an (ε, δ)-private mechanism lets so many guesses be right (the theorem).

    Parameters
    ----------
    correct, guesses, canaries
        v, and the numbers of guesses and of coins, of all runs together.
    epsilon, delta
        The hypothesis.
    """
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            f"{correct} of {guesses} guesses on {canaries} canaries are right; expected "
            "0 ≤ correct ≤ guesses ≤ canaries and at least one guess"
        )
    _check_hypothesis(epsilon, delta)
    if correct == 0:
        return 1.0
    mass = _binomial(guesses, epsilon)
    tail = float(mass[correct:].sum())
    # P[v − i ≤ W < v] for i = 1 ... v. A larger i adds no mass, so the maximum is among these.
    below = np.cumsum(mass[:correct][::-1])
    slope = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2.0 * canaries * delta * slope)


def run_by_run_p_value(
    guesses: Sequence[Guesses], epsilon: float, *, delta: float = 0.0, bets: Sequence[float] = BETS
) -> float:
    """1/M, M the mean of what betters with several r and f have at the end (see the module)."""
    _check_hypothesis(epsilon, delta)
    q = _right(epsilon)
    wealth = []
    for each in guesses:
        a = min(1.0, q + each.canaries / each.guesses * delta * (1.0 - q))
        gain = np.asarray(each.correct) / (each.guesses * a)
        wealth += [float(np.log1p(bet * (gain - 1.0)).sum()) for bet in bets]
    largest = max(wealth)
    mean = largest + math.log(math.fsum(math.exp(w - largest) for w in wealth) / len(wealth))
    return math.exp(min(0.0, -mean))


def lower_bound(guesses: Sequence[Guesses], *, delta: float, confidence: float = 0.95) -> Bound:
    """The largest ε (0 if there is none) that is refuted at δ with the given confidence.

    Parameters
    ----------
    guesses
        Of the same runs, with several r that were fixed in advance.
    delta
        δ of the claim.
    confidence
        How sure: a mechanism's true ε at δ is below the bound with probability 1 − confidence at
        most.

    Notes
    -----
    Half of 1 − confidence is for each test, and the theorem's is divided between the r
    (Bonferroni).

    Both tests refute everything below what they refute. M falls with ε, as a rises. For the
    theorem: P[W + X ≥ v] rises with ε for every X, so its largest value does too; the p-value is
    no less than that, so where it is small enough at some ε, all smaller ones are refuted as well,
    and it does not matter which of several crossings a bisection finds.
    """
    if not guesses:
        raise ValueError("no guesses were given; give at least one number of guesses")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; give a number between 0 and 1, e.g. 0.95")
    half = (1.0 - confidence) / 2.0
    bounds = [Bound(_by_theorem(each, delta, half / len(guesses)), each) for each in guesses]
    epsilon = _largest(lambda e: run_by_run_p_value(guesses, e, delta=delta) <= half)
    # The guesses to show: those whose better has most.
    leader = min(guesses, key=lambda each: run_by_run_p_value([each], epsilon, delta=delta))
    return max([*bounds, Bound(epsilon, leader)], key=lambda bound: bound.epsilon)


def _by_theorem(each: Guesses, delta: float, allowed: float) -> float:
    """The largest ε that the theorem refutes with a p-value of at most ``allowed``."""

    def refuted(epsilon: float) -> bool:
        p_value = one_run_p_value(
            sum(each.correct),
            each.runs * each.guesses,
            epsilon,
            canaries=each.runs * each.canaries,
            delta=delta,
        )
        return p_value <= allowed

    return _largest(refuted)


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest refuted ε, by bisection; 0 if 0 is not."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, LARGEST
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _right(epsilon: float) -> float:
    """q: how often a guess against randomised response is right."""
    return 1.0 / (1.0 + math.exp(-epsilon))


def _binomial(trials: int, epsilon: float) -> NDArray[np.float64]:
    """P[W = w] for w = 0 ... trials, W ~ Binomial(trials, q), by logarithms."""
    log_right = -math.log1p(math.exp(-epsilon))
    log_wrong = log_right - epsilon
    w = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    mass: NDArray[np.float64] = np.exp(log_choose + w * log_right + (trials - w) * log_wrong)
    return mass


def _check_hypothesis(epsilon: float, delta: float) -> None:
    if not (epsilon >= 0.0 and 0.0 <= delta <= 1.0):
        raise ValueError(f"epsilon={epsilon}, delta={delta}; expected ε ≥ 0 and δ in [0, 1]")
