r"""What a report draws over rounds, from a run's history: means that can be read, noise, and ε.

A single round's rates are noisy: few users, and the noise of privacy on top. Over a window of W
rounds the released totals add up,

    mean_t = Σ_u n'_u r_u / Σ_u n'_u,    u = t − W + 1, ..., t,

which is ΣF/Σn' of those rounds, for r = F/n'. These are functions of what was released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fpfl.privacy.accounting import MissingAccountantError
from fpfl.privacy.plan import PrivacyPlan
from fpfl.report.reading import RunRecord

Number = float | None
Line = list[Number]

LEAST_WINDOW, MOST_WINDOW = 5, 50
POINTS = 20
"""How many values of t the curve of ε has, about."""


def window(rounds: int) -> int:
    """W: a tenth of the rounds, from 5 to 50, and no more than there are."""
    return max(1, min(rounds, MOST_WINDOW, max(LEAST_WINDOW, rounds // 10)))


def running_mean(values: Sequence[Number], W: int, weights: Sequence[Number] | None = None) -> Line:
    """Means of the known values of the last W rounds; None where none is known.

    With weights, a round without a positive weight counts as not known.
    """
    weights = [1.0] * len(values) if weights is None else weights
    pairs = [
        (v, w) if v is not None and w is not None and w > 0 else (0.0, 0.0)
        for v, w in zip(values, weights, strict=True)
    ]
    found: Line = []
    for t in range(len(pairs)):
        part = pairs[max(0, t + 1 - W) : t + 1]
        total = math.fsum(w for _, w in part)
        found.append(math.fsum(v * w for v, w in part) / total if total > 0 else None)
    return found


@dataclass(frozen=True)
class RateLines:
    """A rate over rounds: of every group and of the whole, as released and as running means."""

    rate: str
    groups: dict[str, Line]
    means: dict[str, Line]
    overall: Line
    overall_mean: Line


def rate_lines(record: RunRecord) -> list[RateLines]:
    """Every constrained rate over the rounds."""
    W = window(len(record.history))
    lines = []
    for rate in record.rates:
        groups = {g: _cell(record, "groups", rate, g) for g in record.groups}
        counts = {g: _cell(record, "counts", rate, g) for g in record.groups}
        overall = [(row.get("overall") or {}).get(rate) for row in record.history]
        whole = None
        if (record.settings.get("layout") or {}).get("partition", True):
            # Only then do the groups' counts add up to the whole's.
            whole = [sum(n or 0.0 for n in at) for at in zip(*counts.values(), strict=True)]
        means = {g: running_mean(groups[g], W, counts[g]) for g in groups}
        lines.append(RateLines(rate, groups, means, overall, running_mean(overall, W, whole)))
    return lines


def gap_of_means(lines: Sequence[RateLines]) -> Line:
    """max |overall − group| of the running means in each round; None where one is not known."""
    found: Line = []
    for t in range(len(lines[0].overall) if lines else 0):
        cells = [(r.overall_mean[t], mean[t]) for r in lines for mean in r.means.values()]
        known = [abs(whole - own) for whole, own in cells if whole is not None and own is not None]
        found.append(max(known) if len(known) == len(cells) and known else None)
    return found


def multiplier_lines(record: RunRecord) -> dict[str, dict[str, Line]]:
    """λ over the rounds: ``{rate: {group: line}}``; nothing where the history has none."""
    if not any(row.get("multipliers") for row in record.history):
        return {}
    return {
        rate: {g: _cell(record, "multipliers", rate, g) for g in record.groups}
        for rate in record.rates
    }


def _cell(record: RunRecord, table: str, rate: str, group: str) -> Line:
    return [((row.get(table) or {}).get(rate) or {}).get(group) for row in record.history]


# Noise


def noise_of(record: RunRecord, *names: str) -> float | None:
    """The noise's standard deviation s of the first block that has one of the names."""
    blocks = {} if record.privacy is None else {b["name"]: b for b in record.privacy["blocks"]}
    found = [blocks[name]["noise_stddev"] for name in names if name in blocks]
    return float(found[0]) if found else None


def bound_factors(record: RunRecord) -> list[float]:
    """C_t/C₀ of every round: the noise of the gradients' block (or the joint one) follows it."""
    blocks = () if record.privacy is None else record.privacy["blocks"]
    start = next((b["bound"] for b in blocks if b["name"] in ("gradients", "joint")), None)
    bounds = [row.get("clip_bound") for row in record.history]
    return [bound / start if bound is not None and start else 1.0 for bound in bounds]


@dataclass(frozen=True)
class BoundCourse:
    """A clip bound that adapts: C_t of every round, the fractions clipped, and τ."""

    bounds: list[float]
    clipped: Line
    target: float | None


def bound_course(record: RunRecord) -> BoundCourse | None:
    """How the clip bound went; None where it is fixed, or before the first round."""
    bounds = [row.get("clip_bound") for row in record.history]
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) != len(bounds):
        return None
    adapts = (record.settings.get("clip") or {}).get("adapts")
    target = adapts.get("target") if isinstance(adapts, dict) else None
    clipped = [row.get("clipped_fraction") for row in record.history]
    return BoundCourse(known, clipped, target if isinstance(target, int | float) else None)


ACTING = 0.1
"""Multipliers act, for a window of early rounds, from this part of their largest |λ| on."""


@dataclass(frozen=True)
class EarlyAndLast:
    """A released rate over an early window and over the last, with the deviation of its noise.

    None where no round of a window says anything, or where there is no noise.
    """

    rate: str
    group: str
    early: float | None
    early_noise: float | None
    last: float | None
    last_noise: float | None


@dataclass(frozen=True)
class Windows:
    """Every group's rates early and last; which rounds these are (first, last)."""

    early: tuple[int, int]
    last: tuple[int, int]
    rows: tuple[EarlyAndLast, ...]


def windows(record: RunRecord) -> Windows | None:
    r"""Each group's rates before the multipliers acted and in the end, by released counts alone.

    The early window is up to W rounds long and ends before the first round after which some |λ| is
    a tenth of the run's largest, or has the first rounds with a known rate where that is at once.
    Over a window a rate is R = ΣF/Σn' of the rounds where it is known; with noise of deviation s_t
    on F and n' (or on F and n' − F, where counts are split) its own is, to first order,

        √(Σ s_t² (1 + R²))/Σn',   or   √(Σ s_t² (R² + (1 − R)²))/Σn'.

    None without a constraint, or where the run is too short for two windows.
    """
    history = record.history
    W = window(len(history))
    known = [
        t for t, row in enumerate(history)
        if any(r is not None for own in (row.get("groups") or {}).values() for r in own.values())
    ]  # fmt: skip
    if not known or len(history) - known[0] < 2 * min(W, LEAST_WINDOW):
        return None
    first = known[0]
    size = [
        max((abs(x) for own in (row.get("multipliers") or {}).values() for x in own.values()
             if x is not None), default=0.0)
        for row in history
    ]  # fmt: skip
    most = max(size)
    # A row's λ acts in the round after it.
    acting = next((t + 1 for t, s in enumerate(size) if most > 0 and s >= ACTING * most), W)
    end = min(max(acting, first + LEAST_WINDOW), len(history) - min(W, LEAST_WINDOW))
    early = range(max(first, end - W), end)
    last = range(max(end, len(history) - W), len(history))
    noise = _count_deviations(record)
    split = (record.settings.get("layout") or {}).get("basis") == "split"
    rows = []
    for rate in record.rates:
        for group in record.groups:
            values, counts = (_cell(record, name, rate, group) for name in ("groups", "counts"))
            found = [_over(values, counts, noise, part, split=split) for part in (early, last)]
            rows.append(EarlyAndLast(rate, group, *found[0], *found[1]))
    ends = [(int(history[part[0]]["round"]), int(history[part[-1]]["round"]))
            for part in (early, last)]  # fmt: skip
    return Windows(ends[0], ends[1], tuple(rows))


def _over(
    values: Line, counts: Line, noise: Sequence[float] | None, part: range, *, split: bool
) -> tuple[Number, Number]:
    """R of some rounds, and the deviation of its noise."""
    cells = [(values[t], counts[t], t) for t in part]
    known = [(r, n, t) for r, n, t in cells if r is not None and n is not None and n > 0]
    total = math.fsum(n for _, n, _ in known)
    if not total > 0:
        return None, None
    R = math.fsum(r * n for r, n, _ in known) / total
    if noise is None:
        return R, None
    s2 = math.fsum(noise[t] ** 2 for *_, t in known)
    return R, math.sqrt(s2 * (R**2 + ((1.0 - R) ** 2 if split else 1.0))) / total


def _count_deviations(record: RunRecord) -> list[float] | None:
    """s_t of the counts in every round; None without noise."""
    s = noise_of(record, "counts", "joint")
    if s is None:
        return None
    if noise_of(record, "counts") is not None:
        return [s] * len(record.history)
    return [s * factor for factor in bound_factors(record)]


@dataclass(frozen=True)
class CountNoise:
    """A released count n'_a: its mean over the rounds, its noise, and noise over mean."""

    rate: str
    group: str
    mean: float | None
    noise: float

    @property
    def ratio(self) -> float | None:
        """s/mean n'_a; None where the mean is not positive, where noise dominates altogether."""
        return self.noise / self.mean if self.mean is not None and self.mean > 0 else None


def count_noise(record: RunRecord) -> list[CountNoise]:
    """How noisy every count of a round is.

    The noise on n'_a is the block's s, or √2·s where a count is released in two parts, F and
    n' − F (a block of its own).
    """
    s = noise_of(record, "counts", "joint")
    if s is None:
        return []
    if noise_of(record, "counts") is None:
        s *= math.fsum(bound_factors(record)) / max(1, len(record.history))
    split = (record.settings.get("layout") or {}).get("basis") == "split"
    noise = s * math.sqrt(2.0) if split else s
    found = []
    for rate in record.rates:
        for group in record.groups:
            known = [n for n in _cell(record, "counts", rate, group) if n is not None]
            mean = math.fsum(known) / len(known) if known else None
            found.append(CountNoise(rate, group, mean, noise))
    return found


@dataclass(frozen=True)
class GradientNoise:
    """The summed gradient over rounds: its released norm, the noise in it, and what is left.

    ``noise`` is s√p in every round: the same in all, unless the clip bound adapts.
    """

    released: Line
    noise: list[float]
    signal: Line


def gradient_noise(record: RunRecord) -> GradientNoise | None:
    """Noise against signal in the gradient's sum; None where there is no noise or no norm.

    The noise on p parameters has a norm of about s√p, and is independent of the signal: the
    released sum's squared norm is on average ‖signal‖² + p s². So the signal is estimated by

        √max(0, ‖released‖² − p s²).
    """
    s = noise_of(record, "gradients", "joint")
    norms = [row.get("gradient_norm") for row in record.history]
    p = record.parameters
    if s is None or p is None or not any(norm is not None for norm in norms):
        return None
    noise = [s * math.sqrt(p) * factor for factor in bound_factors(record)]
    return GradientNoise(
        norms,
        noise,
        [
            None if norm is None else math.sqrt(max(0.0, norm**2 - own**2))
            for norm, own in zip(norms, noise, strict=True)
        ],
    )


# ε


@dataclass(frozen=True)
class EpsilonCurve:
    """ε of the plan cut off after t rounds; ``why`` says why there is none."""

    rounds: tuple[int, ...] = ()
    epsilon: tuple[float, ...] = ()
    server: tuple[float, ...] = ()
    why: str | None = None


def epsilon_curve(record: RunRecord) -> EpsilonCurve:
    """ε against the number of rounds, by the run's own accountant.

    For the users that the run has, and with the true sensitivity. The server's is left out where
    it is the same, or where there is no guarantee against the server.
    """
    said = record.privacy
    if said is None:
        return EpsilonCurve(why="The run gives no privacy guarantee, so there is no ε to draw.")
    if said.get("filter_order") is not None:
        return EpsilonCurve(
            why="Settings were changed after totals had been released. What holds then is the "
            "budget that was fixed before the run, whatever the number of rounds."
        )
    try:
        plan = PrivacyPlan.from_dict(said)
        ts = _some_rounds(plan.rounds)
        plans = [plan.with_rounds(t) for t in ts]
        epsilon = [p.epsilon_honest if p.epsilon_real is None else p.epsilon_real for p in plans]
        server = [
            p.epsilon_server if p.epsilon_server_real is None else p.epsilon_server_real
            for p in plans
        ]
    except MissingAccountantError as error:
        return EpsilonCurve(why=f"ε over rounds is not drawn: {error}")
    except (ValueError, TypeError) as error:
        return EpsilonCurve(
            why=f"ε over rounds is not drawn: the plan cannot be made again from result.json "
            f"({error})"
        )
    trusted = said.get("aggregation") is not None and not said["aggregation"].get("shares")
    if trusted or server == epsilon:
        server = []
    return EpsilonCurve(tuple(ts), tuple(epsilon), tuple(server))


def _some_rounds(T: int) -> list[int]:
    """About twenty numbers of rounds from 1 to T, T among them."""
    return sorted({1, *(max(1, round(T * i / POINTS)) for i in range(1, POINTS + 1))})
