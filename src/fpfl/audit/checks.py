r"""Named checks: what is wrong with a pipeline without making any guess surer.

Attacks score by the noise that was meant to be there, so a dependence makes them less sure and not
alarmed: noise used twice, cohorts from a constant seed, a cap that is not applied. A check runs
`fpfl.train` where the sum is known, so that what is released shows the noise itself, or the cohorts
themselves, and tests that these are what the accountant took them for.

Each check gives a p-value: if the pipeline is sound, it is at most α with probability at most α,
for every α. A check that has several things to look at adds up their chances (Bonferroni: p is the
smallest, times their number). What cannot happen at all in a sound pipeline has p = 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.aggregation.clipping import ClipRule, clip_rules
from fpfl.aggregation.noise import GRID_BITS
from fpfl.aggregation.sums import grid_stddev
from fpfl.audit.attacks import SilentUser
from fpfl.audit.audits import AuditSettings, released
from fpfl.audit.setup import NOBODY, Scene, Seen, User, steps
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.privacy.settings import Clipping, Privacy

Finding = tuple[float, str]
"""A p-value, and what it is the p-value of."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes
    ----------
    p_value
        How likely at most a sound pipeline looks like this.
    level
        A check fails with a p-value of no more than this.
    found
        In words, the figure that is furthest from what it should be.
    """

    name: str
    p_value: float
    level: float
    found: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the pipeline is not what the accountant took it for."""
        return self.p_value <= self.level

    def as_dict(self) -> dict[str, Any]:
        """All of it in types that JSON knows."""
        return asdict(self) | {"failed": self.failed}


def run_check(name: str, level: float) -> CheckResult:
    """Run one of `CHECKS`."""
    if name not in CHECKS:
        raise ValueError(f"there is no check {name!r}; expected one of {list(CHECKS)}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}; give a number between 0 and 1, e.g. 1e-5")
    began = time.perf_counter()
    p_value, found = CHECKS[name]()
    return CheckResult(name, p_value, level, found, round(time.perf_counter() - began, 1))


# --- The noise ----------------------------------------------------------------------------------

NOISE_RUNS = 5
_NOISE = AuditSettings(
    Privacy(epsilon=2.0, clip=Clipping(1.0, counts=2.0, clipped_share=0.05)),
    rounds=5,
    constraint=True,
)
_WIDTH = 500
# Without users the fraction is about a half: this bound grows by a factor of about 2.5 a round.
_ADAPTING = replace(
    _NOISE,
    privacy=Privacy(
        epsilon=2.0,
        clip=Clipping(1.0, counts=2.0, adapts=AdaptiveBound(0.05, rate=3.0, share=0.05)),
    ),
)


def _empty_runs(setting: AuditSettings = _NOISE) -> list[Seen]:
    """Runs on users without samples: their sum is 0, and what is released is the noise.

    In double precision, so that nothing is rounded off it.
    """
    scene = Scene((NOBODY,) * 10, _WIDTH, steps(0.0), dtype=torch.float64)
    return [released(scene, setting) for _ in range(NOISE_RUNS)]


def on_the_grid() -> Finding:
    """All released numbers are whole multiples of their block's public step."""
    users = (NOBODY, User(group=0), User(group=1))
    seen = released(Scene(users, _WIDTH, steps(0.0), dtype=torch.float64), _NOISE)
    worst = 0.0
    for rule in _rules():
        _, noise = seen.bound_and_noise(rule.name)
        step = grid_stddev(noise, rule.bound, rule.size) * 2.0**-GRID_BITS
        for place in rule.places:
            multiples = seen.v[:, place] / step
            worst = max(worst, float(np.abs(multiples - np.round(multiples)).max()))
    # Some 2²⁵ steps in double precision are right to 2⁻²⁷ of one.
    return float(worst < 2.0**-20), f"numbers are {worst:.2g} steps off the grid at most"


def enough_noise() -> Finding:
    """In every block the noise has the standard deviation that the statement names, or more.

    Σ (x/s)² of N numbers is χ²(N) where they are N(0, s²), and larger with more noise.
    """
    return _as_promised(_empty_runs())


def enough_for_the_bound() -> Finding:
    """The same where the clip bound adapts: in every round, in proportion to C_t."""
    return _as_promised(_empty_runs(_ADAPTING))


def _as_promised(runs: list[Seen]) -> Finding:
    findings = []
    for name, numbers in _by_block(runs).items():
        _, noise = runs[0].bound_and_noise(name)
        squares = float(np.square(numbers / noise).sum())
        said = f"{name}: {math.sqrt(squares / numbers.size):.3f} of the promised noise"
        findings.append((chi_square_below(squares, numbers.size), said))
    return least_likely(findings)


def new_noise() -> Finding:
    """The noise of no two rounds or runs is alike, in the same or the opposite direction.

    All (run, round) vectors are compared with each other: see `alike`.
    """
    vectors = [vector for run in _empty_runs() for vector in _standard(run)]
    return least_likely(
        (alike(a, b), f"a correlation of {cosine(a, b):.3f} between two rounds or runs")
        for i, a in enumerate(vectors)
        for b in vectors[:i]
    )


def noise_of_its_own() -> Finding:
    """The noise of no coordinate follows from another's a fixed distance l before it.

    For each l the numbers are cut into pieces of 2 l. Those in the first half of a piece are
    compared with those l later, in the second: two vectors without a number in common.
    """
    matrix = np.concatenate([_standard(run) for run in _empty_runs()])

    def halves(lag: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        whole = matrix.shape[1] - matrix.shape[1] % (2 * lag)
        cut = matrix[:, :whole].reshape(len(matrix), -1, 2, lag)
        return cut[:, :, 0].ravel(), cut[:, :, 1].ravel()

    findings = []
    for lag in range(1, matrix.shape[1] // 2 + 1):
        one, other = halves(lag)
        said = f"a correlation of {cosine(one, other):.3f} between numbers {lag} apart"
        findings.append((alike(one, other), said))
    return least_likely(findings)


def _rules() -> tuple[ClipRule, ...]:
    """The blocks of the noise's runs, and where they stand."""
    setup = _NOISE.setup
    blocks = setup.clipping.blocks(constrained=True, selection=True)
    return clip_rules(blocks, setup.places(_WIDTH))


def _by_block(runs: list[Seen]) -> dict[str, NDArray[np.float64]]:
    return {
        rule.name: np.concatenate(
            [run.v[:, place].ravel() for run in runs for place in rule.places]
        )
        for rule in _rules()
    }


def _standard(run: Seen) -> NDArray[np.float64]:
    """A run's noise in units of each block's standard deviation: one row for each round."""
    scaled = run.v.copy()
    for rule in _rules():
        for place in rule.places:
            scaled[:, place] /= run.bound_and_noise(rule.name)[1]
    return scaled


# --- The cohorts --------------------------------------------------------------------------------

COHORT_RUNS, USERS, ROUNDS, SHARE, CAP = 5, 200, 10, 0.3, 3
_COHORTS = AuditSettings(
    Privacy(noise_multiplier=1e-3), cohort_share=SHARE, rounds=ROUNDS, canaries=USERS
)


def _cohorts(setting: AuditSettings) -> NDArray[np.bool_]:
    """Who took part: (rounds, users), from what was released.

    Each user has a coordinate of the gradient for itself, and there is next to no noise: a number
    is 0 or C, give or take C/1000.
    """
    users = tuple(User(place=i, value=1e4) for i in range(USERS))
    seen = released(Scene(users, USERS, steps()), setting)
    bound, _ = seen.bound_and_noise("gradients")
    sent: NDArray[np.bool_] = -seen.v[:, setting.setup.places(USERS)["loss_gradient"]] > bound / 2
    return sent


def poisson_cohorts() -> Finding:
    """Poisson cohorts: every user of every round with probability q, and nothing else.

    Three numbers are binomial, exactly: all participations together, one user's, and the rounds
    whose cohort has just q K users (a cohort of a fixed size always has).
    """
    drawn = np.concatenate([_cohorts(_COHORTS) for _ in range(COHORT_RUNS)])
    rounds, q = len(drawn), SHARE
    expected = round(q * USERS)
    total, exact = int(drawn.sum()), int((drawn.sum(axis=1) == expected).sum())
    mass = float(np.exp(_log_binomial(USERS, q))[expected])
    users = [
        (binomial_two_sided(each, rounds, q), f"a user took part in {each} of {rounds} rounds")
        for each in drawn.sum(axis=0).tolist()
    ]
    return least_likely(
        [
            (
                binomial_two_sided(total, drawn.size, q),
                f"{total / drawn.size:.3f} of all users took part, q is {q:g}",
            ),
            (
                binomial_two_sided(exact, rounds, mass),
                f"{exact} of {rounds} cohorts had {expected} users",
            ),
            (least_likely(users)),
        ]
    )


def fixed_cohorts() -> Finding:
    """Cohorts of a fixed size have that size, and no cohort tells another one.

    Every user is in T of them for Binomial(T, q); of one cohort's m users, a hypergeometric number
    is in any other round's or run's (none, where they are slices of a shuffled population).
    """
    privacy = replace(_COHORTS.privacy, convention="replace-one")
    setting = replace(_COHORTS, privacy=privacy)
    drawn = np.concatenate([_cohorts(setting) for _ in range(COHORT_RUNS)])
    rounds, expected = len(drawn), round(SHARE * USERS)
    sizes = drawn.sum(axis=1)
    return least_likely(
        [
            (
                float(bool((sizes == expected).all())),
                f"cohorts had {sizes.min()} to {sizes.max()} of {expected} users",
            ),
            *(
                (
                    binomial_two_sided(each, rounds, SHARE),
                    f"a user took part in {each} of {rounds} rounds",
                )
                for each in drawn.sum(axis=0).tolist()
            ),
            least_likely(
                (
                    hypergeometric_two_sided(int((a & b).sum()), USERS, int(a.sum()), int(b.sum())),
                    f"two cohorts of {a.sum()} and {b.sum()} users share {(a & b).sum()}",
                )
                for i, a in enumerate(drawn)
                for b in drawn[:i]
            ),
        ]
    )


def new_cohorts() -> Finding:
    """No cohort tells another one: of a cohort's users, each is in the other with probability q.

    Of |A| users in one Poisson cohort, Binomial(|A|, q) are in any other round's or run's.
    """
    drawn = np.concatenate([_cohorts(_COHORTS) for _ in range(COHORT_RUNS)])
    return least_likely(
        (
            binomial_two_sided(int((a & b).sum()), int(a.sum()), SHARE),
            f"two cohorts of {a.sum()} and {b.sum()} users share {(a & b).sum()}",
        )
        for i, a in enumerate(drawn)
        for b in drawn[:i]
    )


def capped() -> Finding:
    """Nobody takes part more often than the cap allows; and up to it as often as without one.

    Of T rounds a user is drawn for Binomial(T, q), so that the number of users who reach the cap is
    binomial as well.
    """
    privacy = replace(_COHORTS.privacy, max_participations=CAP)
    times = np.stack(
        [_cohorts(replace(_COHORTS, privacy=privacy)).sum(axis=0) for _ in range(COHORT_RUNS)]
    )
    most, reached = int(times.max()), int((times >= CAP).sum())
    if most > CAP:
        return 0.0, f"a user took part {most} times, the cap is {CAP}"
    chance = float(np.exp(_log_binomial(ROUNDS, SHARE))[CAP:].sum())
    return (
        binomial_two_sided(reached, times.size, chance),
        f"{reached} of {times.size} users reached the cap of {CAP}, nobody exceeded it",
    )


# --- The company --------------------------------------------------------------------------------

_QUIET = AuditSettings(Privacy(noise_multiplier=1e-3), cohort_share=1.0, rounds=1)
_COMPANY = (
    SilentUser("aligned", number=1000, samples=100),
    SilentUser("cancelling", number=200, samples=100, width=8),
)


def any_company() -> Finding:
    """Others' gradients add up to the same, whether a user without a gradient is there or not.

    With next to no noise, of standard deviation s: the square of the two sums' difference over 2 s²
    is χ². (A little is left for what the noise's grid and the released numbers' precision add.)
    """
    findings = []
    for attack in _COMPANY:
        there, away = (
            released(attack.scene(np.array([coin]), _QUIET.setup), _QUIET) for coin in (True, False)
        )
        place = _QUIET.setup.places(attack.width**2)["loss_gradient"]
        moved = (there.v - away.v)[0, place]
        bound, noise = there.bound_and_noise("gradients")
        squares = float(np.square(moved).sum()) / (2 * (1.05 * noise) ** 2)
        said = f"a user without a gradient moved the {attack.others} others' sum by "
        findings.append(
            (
                chi_square_above(squares, moved.size),
                f"{said}{np.linalg.norm(moved) / bound:.3g} bounds, noise included",
            )
        )
    return least_likely(findings)


CHECKS: dict[str, Callable[[], Finding]] = {
    "released numbers on the grid": on_the_grid,
    "as much noise as promised": enough_noise,
    "noise in proportion to a bound that adapts": enough_for_the_bound,
    "noise new in each round and run": new_noise,
    "noise of each number its own": noise_of_its_own,
    "Poisson cohorts by q": poisson_cohorts,
    "fixed cohorts by their size": fixed_cohorts,
    "cohorts new in each round and run": new_cohorts,
    "the cap on participations": capped,
    "others send the same in any company": any_company,
}
"""The checks by their names."""


# --- Their p-values -----------------------------------------------------------------------------


def least_likely(findings: Iterable[Finding]) -> Finding:
    """The smallest p-value times how many there are, with what it is about."""
    found = list(findings)
    p_value, said = min(found, key=lambda each: each[0])
    return min(1.0, len(found) * p_value), said


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """⟨a, b⟩/(‖a‖ ‖b‖)."""
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))


def alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    r"""A p-value of "a is Gaussian noise of one size in all D numbers, and independent of b".

    Then the direction of a is uniform on the sphere, whatever b is. A cap of the sphere in which
    the cosine is r or more has at most (1 − r²)^{(D−1)/2}/2 of its area (they are equal at r = 0,
    and the quotient falls with r), and there are two.
    """
    if not (a.any() and b.any()):
        return 0.0  # no noise at all
    r = min(1.0, abs(cosine(a, b)))
    return float((1.0 - r * r) ** ((a.size - 1) / 2))


def chi_square_below(squares: float, numbers: int) -> float:
    """P[χ²(N) ≤ squares]."""
    half = torch.tensor([numbers / 2, squares / 2], dtype=torch.float64)
    return float(torch.special.gammainc(half[0], half[1]))


def chi_square_above(squares: float, numbers: int) -> float:
    """P[χ²(N) ≥ squares]."""
    half = torch.tensor([numbers / 2, squares / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def binomial_two_sided(successes: int, trials: int, q: float) -> float:
    """Twice the smaller tail of Binomial(n, q) that begins at a number of successes; at most 1."""
    mass = np.exp(_log_binomial(trials, q))
    tails = float(mass[: successes + 1].sum()), float(mass[successes:].sum())
    return min(1.0, 2.0 * min(tails))


def hypergeometric_two_sided(shared: int, users: int, one: int, other: int) -> float:
    """The exact chance of an overlap as far out as this, both tails doubled.

    Of ``other`` users drawn from ``users``, so many are among ``one`` others that were drawn.
    """
    counts = np.arange(max(0, one + other - users), min(one, other) + 1)
    logs = np.array(
        [
            _log_choose(one, c) + _log_choose(users - one, other - c) - _log_choose(users, other)
            for c in counts.tolist()
        ]
    )
    mass = np.exp(logs)
    tails = mass[counts <= shared].sum(), mass[counts >= shared].sum()
    return float(min(1.0, 2.0 * min(tails)))


def _log_choose(of: int, some: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)


def _log_binomial(trials: int, q: float) -> NDArray[np.float64]:
    """log P[W = w] for w = 0 ... n, W ~ Binomial(n, q), 0 < q < 1."""
    w = np.arange(trials + 1)
    factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    choose = factorial[-1] - factorial - factorial[::-1]
    mass: NDArray[np.float64] = choose + w * math.log(q) + (trials - w) * math.log1p(-q)
    return mass
