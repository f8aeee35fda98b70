"""Broken twins: the real pipeline with one mistake in it, which an audit has to find.

Each function makes its mistake through pytest's monkeypatch, in the place where somebody might
really make it, and leaves everything else as it is. The claimed ε stays what it was. An attack has
to refute it (`CASES`), or a check has to fail (`CHECKED`).

``python tests/audit/twins.py FILE`` audits all of them and writes what was found to a file, as
``fpfl audit --out FILE`` does for the pipeline itself.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fpfl.aggregation.sums
import fpfl.numerics.summing
import fpfl.training.session
from fpfl import AdaptiveBound, Clipping, FederatedAveraging, OneGradient, Privacy
from fpfl.aggregation.clipping import ClipRule
from fpfl.aggregation.noise import SeededNoise, SystemNoise
from fpfl.aggregation.sums import ThirdParty
from fpfl.audit import (
    ATTACKS,
    AuditSettings,
    CohortSize,
    HeavyUser,
    KeptModel,
    ShownMultipliers,
    SilentUser,
    audit,
    default_settings,
    run_check,
)
from fpfl.audit.table import CONFIDENCE, as_content, as_text, checks_as_text, level
from fpfl.experiments.runner import about_this_run
from fpfl.fairness.totals import Totals
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy.conventions import poisson
from fpfl.privacy.sampling import FixedSizeSampling, Participation, PoissonSampling
from fpfl.server.ranks import Ranks
from fpfl.server.selection import Selection
from fpfl.users.engine import CohortEngine
from fpfl.users.layout import Layout
from fpfl.users.rows import Gradients, UserRows

Twin = Callable[[pytest.MonkeyPatch], None]


def noise_halved(patch: pytest.MonkeyPatch) -> None:
    """Half of the noise that was accounted for."""
    noised = ThirdParty.noised

    def half(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        whole, exact = noised(self, total, *args, **how), in_units(self, total)
        return exact + (whole - exact) / 2

    patch.setattr(ThirdParty, "noised", half)


def in_units(party: ThirdParty, total: Tensor) -> Tensor:
    """A sum in v's own units, without noise: clipped users' are whole steps."""
    return total if total.is_floating_point() else total * party._on(total.device, "step")


def without_a_second_look(patch: pytest.MonkeyPatch) -> None:
    """Rows that are longer than clipping left them are added all the same.

    Where norms are wrong, that they are looked at again in whole numbers would mend it.
    """
    patch.setattr(ClipRule, "most", math.inf)
    patch.setattr(fpfl.numerics.summing, "LARGEST", 2.0**52)


def sensitivity_of_zero_out(patch: pytest.MonkeyPatch) -> None:
    """Replace-one neighbours accounted for as if one user changed a total by C, not 2C."""
    for name in ("calibrate_poisson", "epsilon_poisson"):
        right = getattr(poisson, name)

        def wrong(noise: float, q: float, rounds: int, delta: float, *_: Any, right=right) -> Any:
            return right(noise, q, rounds, delta, "zero-out")

        patch.setattr(poisson, name, wrong)


def bound_times(name: str, factor: float) -> Twin:
    """A block is clipped to another bound than its noise was made for."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        rules = fpfl.aggregation.sums.clip_rules

        def other(*args: Any, **how: Any) -> Any:
            return tuple(
                dataclasses.replace(rule, bound=factor * rule.bound) if rule.name == name else rule
                for rule in rules(*args, **how)
            )

        patch.setattr(fpfl.aggregation.sums, "clip_rules", other)

    return broken


def counts_scaled_by_one_block(patch: pytest.MonkeyPatch) -> None:
    """Counts are scaled by C_s over the block called n, which holds n' − F and not n'."""
    norms = UserRows.norms

    def of_one(self: UserRows, names: Any, order: int) -> Tensor:
        return norms(self, [n for n in names if n != "F"] if order == 1 else names, order)

    patch.setattr(UserRows, "norms", of_one)
    without_a_second_look(patch)


@dataclasses.dataclass(frozen=True)
class WeightedLate:
    """Gradients with users' factors in them, of whose norms clipping sees the one without."""

    gradients: Gradients
    factor: Tensor

    def norms(self, names: Any) -> Tensor:
        return self.gradients.norms(names) / self.factor

    def unrounded(self, names: Any) -> Tensor | None:
        return self.gradients.unrounded(names)

    def whole(self, names: Any, scale: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        return self.gradients.whole(names, scale)


def weighted_late(by_samples: bool) -> Twin:
    """A user's clipped gradient is multiplied by its samples' number, or by their mean weight."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        gradients = CohortEngine._gradients

        def late(self: CohortEngine, w: Tensor, chunk: Any, weighted: Any) -> tuple[Any, Tensor]:
            computed, output = gradients(self, w, chunk, weighted)
            batch, users = chunk.batch, len(chunk.users)
            omega, number = (
                torch.zeros(users).index_add_(0, batch.cell, each)
                for each in (weighted.real, batch.real)
            )
            return WeightedLate(computed, number if by_samples else omega / number), output

        patch.setattr(CohortEngine, "_gradients", late)
        without_a_second_look(patch)

    return broken


def multipliers_of_true_counts(patch: pytest.MonkeyPatch) -> None:
    """The multipliers, and with them the broadcast weights, come from counts before the noise."""
    noised, update = ThirdParty.noised, OneGradient.update
    true: dict[str, Tensor] = {}

    def remembered(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        exact = in_units(self, total)
        true.update({name: exact[self.places[name]].clone() for name in ("F", "n")})
        return noised(self, total, *args, **how)

    def peeking(self: OneGradient, state: Any, totals: Totals, tolerance: float) -> Any:
        F = true["F"].to(totals.F).reshape_as(totals.F)
        n = F + true["n"].to(totals.n).reshape_as(totals.n)
        known = {"F": F, "n": n, "overall_F": F.sum(dim=1), "overall_n": n.sum(dim=1)}
        return update(self, state, dataclasses.replace(totals, **known), tolerance)

    patch.setattr(ThirdParty, "noised", remembered)
    patch.setattr(OneGradient, "update", peeking)


def without_noise(*names: str) -> Twin:
    """Some parts of v are released as they are."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        noised = ThirdParty.noised

        def partly(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
            released = noised(self, total, *args, **how).clone()
            exact = in_units(self, total)
            for name in names:
                released[self.places[name]] = exact[self.places[name]].to(released.dtype)
            return released

        patch.setattr(ThirdParty, "noised", partly)

    return broken


def less_noise(name: str, factor: float) -> Twin:
    """A part of v has a part of its noise."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        noised = ThirdParty.noised

        def partly(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
            released = noised(self, total, *args, **how).clone()
            place, exact = self.places[name], in_units(self, total).to(released.dtype)
            released[place] = exact[place] + (released[place] - exact[place]) / factor
            return released

        patch.setattr(ThirdParty, "noised", partly)

    return broken


def noise_of_the_first_bound(patch: pytest.MonkeyPatch) -> None:
    """Users are clipped to a bound that has grown, and the noise is that of the first round."""
    at = ThirdParty.at

    def wrong(self: ThirdParty, level: int | None) -> ThirdParty:
        other = at(self, level)
        if other is not self:
            other.__dict__["noise_stddev"] = self.noise_stddev
            other._steps.clear()
        return other

    patch.setattr(ThirdParty, "at", wrong)


def clipped_to_more(factor: float) -> Twin:
    """Users are clipped to more than the level that the noise is of."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        right = fpfl.aggregation.sums.at_bound
        patch.setattr(
            fpfl.aggregation.sums, "at_bound", lambda rules, bound: right(rules, factor * bound)
        )

    return broken


def divided_by_the_cohort(patch: pytest.MonkeyPatch) -> None:
    """What is released is a mean over those who took part, times the public cohort."""
    took_part, noised = _counting(patch), ThirdParty.noised

    def divided(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        assert self.plan is not None
        return noised(self, total, *args, **how) * (self.plan.cohort / took_part[0])

    patch.setattr(ThirdParty, "noised", divided)


def step_divided_by_the_cohort(patch: pytest.MonkeyPatch) -> None:
    """The server divides the gradient by the number of those who took part."""
    took_part, totals = _counting(patch), Layout.totals

    def divided(self: Layout, v: Tensor, normaliser: float, *args: Any, **how: Any) -> Any:
        return totals(self, v, float(took_part[0]), *args, **how)

    patch.setattr(Layout, "totals", divided)


def _counting(patch: pytest.MonkeyPatch) -> list[int]:
    """Count who took part in the present round, and at least one."""
    add, took_part = ThirdParty.sum, [1]

    def counted(self: ThirdParty, chunks: Iterable[Any], *args: Any, **how: Any) -> Tensor:
        sizes: list[int] = []

        def counting() -> Iterator[Any]:
            for rows in chunks:
                sizes.append(len(rows))
                yield rows

        total = add(self, counting(), *args, **how)
        took_part[0] = max(1, sum(sizes))
        return total

    patch.setattr(ThirdParty, "sum", counted)
    return took_part


def selection_by_true_accuracy(patch: pytest.MonkeyPatch) -> None:
    """The kept model is chosen by right and wrong predictions as they were before the noise."""
    noised, observe = ThirdParty.noised, Selection.observe
    true: dict[str, Tensor] = {}

    def remembered(self: ThirdParty, total: Tensor, *args: Any, **how: Any) -> Tensor:
        table = total[self.places["table"]].clone()  # of two classes
        true.update({"hits": table[0] + table[3], "misses": table[1] + table[2]})
        return noised(self, total, *args, **how)

    def peeking(self: Selection, t: int, measured: Tensor, counts: Any, *rest: Any) -> Selection:
        return observe(self, t, measured, dataclasses.replace(counts, **true), *rest)

    patch.setattr(ThirdParty, "noised", remembered)
    patch.setattr(Selection, "observe", peeking)


def cohort_that_stays(patch: pytest.MonkeyPatch) -> None:
    """The first users of the population take part in every round: there is nothing to amplify."""

    def draw(self: PoissonSampling, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.arange(self.cohort)

    patch.setattr(PoissonSampling, "draw", draw)


def slices_of_a_shuffled_population(patch: pytest.MonkeyPatch) -> None:
    """Cohorts of a fixed size are cut from a shuffled population, one after the other."""
    left: list[int] = []

    def draw(self: FixedSizeSampling, rng: np.random.Generator) -> NDArray[np.int64]:
        if len(left) < self.cohort:
            left[:] = rng.permutation(self.population).tolist()
        drawn, left[: self.cohort] = np.sort(left[: self.cohort]), []
        return drawn

    patch.setattr(FixedSizeSampling, "draw", draw)


def counts_out_of_the_joint_norm(patch: pytest.MonkeyPatch) -> None:
    """The paper's joint vector is clipped by the norm of its gradients alone."""
    norms = UserRows.norms

    def of_gradients(self: UserRows, names: Any, order: int) -> Tensor:
        kept = [name for name in names if name.endswith("gradient")]
        return norms(self, kept or names, order)

    patch.setattr(UserRows, "norms", of_gradients)
    without_a_second_look(patch)


def company(factor: Callable[[NDArray[np.int64]], float]) -> Twin:
    """What everybody sends is scaled by something that follows from all of the cohort's n_k.

    It is the sum that is scaled: whose own vector is zero has no other part in it.
    """

    def broken(patch: pytest.MonkeyPatch) -> None:
        chunks, add, scale = CohortEngine.chunks, Ranks.sum, [1.0]

        def looking(self: CohortEngine, users: Any, *args: Any, **how: Any) -> Any:
            scale[0] = factor(self.data.rows(users)[1])
            return chunks(self, users, *args, **how)

        def scaled(self: Ranks, total: Tensor) -> Tensor:
            every = add(self, total)
            return (every.double() * scale[0]).to(every.dtype)

        patch.setattr(CohortEngine, "chunks", looking)
        patch.setattr(Ranks, "sum", scaled)

    return broken


# As it was in 0.1.0: norms were taken for √(1 + 12 ε n) times as long, ε the precision of float32
# and n the largest n_k of a chunk; and whether such an allowance was made hung on Σ n_k².
norms_by_the_largest = company(lambda sizes: (1.0 + 12 * 2.0**-23 * int(sizes.max())) ** -0.5)
path_by_the_cohort = company(lambda sizes: 1.0 if (sizes**2).sum() > 2 * len(sizes) else 0.4)


def noise_by(draw: Callable[[Callable[..., Tensor], int, int], Tensor]) -> Twin:
    """Noise drawn in another way, given the right one, how many numbers and the round."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        right = SystemNoise.integers

        def other(self: SystemNoise, size: int, round: int, *, device: torch.device) -> Tensor:
            def new(number: int) -> Tensor:
                return right(self, number, round, device=device)

            return draw(new, size, round).to(device)

        patch.setattr(SystemNoise, "integers", other)

    return broken


def one_noise_for_all_rounds(patch: pytest.MonkeyPatch) -> None:
    """The first round's noise is kept, and added in every other round of the run."""
    first: list[Tensor] = []

    def kept(new: Callable[..., Tensor], size: int, round: int) -> Tensor:
        if round == 1:
            first[:] = [new(size)]
        return first[0].clone()

    noise_by(kept)(patch)


noise_of_a_constant_seed = noise_by(
    lambda new, size, round: SeededNoise(0).integers(size, round, device=torch.device("cpu"))
)
one_noise_for_all_numbers = noise_by(lambda new, size, round: new(1).repeat(size))
noise_in_floats = noise_by(
    lambda new, size, round: torch.randn(size, dtype=torch.float64) * 2.0**24
)


def cohorts_of_a_constant_seed(patch: pytest.MonkeyPatch) -> None:
    """Every run draws the same cohorts, round by round."""
    patch.setattr(
        fpfl.training.session, "RoundStreams", lambda seed, purpose: RoundStreams(0, purpose)
    )


def cap_not_applied(patch: pytest.MonkeyPatch) -> None:
    """Whoever is drawn takes part, however often already."""
    patch.setattr(Participation, "admit", lambda self, users: users)


def more_than_q(patch: pytest.MonkeyPatch) -> None:
    """Users take part with probability 1.5 q."""

    def draw(self: PoissonSampling, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.flatnonzero(rng.random(self.population) < 1.5 * self.probability)

    patch.setattr(PoissonSampling, "draw", draw)


def poisson_in_name(patch: pytest.MonkeyPatch) -> None:
    """Cohorts of a fixed size, accounted for as Poisson's."""

    def draw(self: PoissonSampling, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.sort(rng.choice(self.population, self.cohort, replace=False))

    patch.setattr(PoissonSampling, "draw", draw)


LEVEL = level(CONFIDENCE, len(default_settings()))
"""Of each row of a whole audit: what is caught here is caught there."""

WHOLE = AuditSettings(
    Privacy(epsilon=1.0, delta=9e-3),
    cohort_share=1.0,
    rounds=1,
    canaries=100,
    runs=200,
    confidence=1.0 - LEVEL,
)
ALONE = replace(WHOLE, runs=80)
COMPANY = replace(ALONE, privacy=Privacy(epsilon=1.0))
BLOCKS = Privacy(epsilon=1.0, delta=9e-3, clip=Clipping(1.0, counts=2.0, clipped_share=0.05))
# Everybody is clipped, and nearly nobody should be: the bound grows by a factor of 2 to 4 a round.
GROWING = replace(
    WHOLE,
    privacy=Privacy(
        epsilon=1.0,
        delta=9e-3,
        clip=Clipping(1.0, adapts=AdaptiveBound(0.05, rate=2.0, share=0.05)),
    ),
    rounds=10,
)
# FPFL-1G, with canaries who are all in the group that is served badly: from the second round on
# their weight is about 3 or more.
SINGLE = AuditSettings(
    Privacy(epsilon=1.0, delta=6e-3, clip=Clipping(1.25, counts=1.0, counts_share=0.25)),
    cohort_share=1.0,
    rounds=5,
    canaries=100,
    runs=80,
    constraint=True,
    method=OneGradient(),
    confidence=1.0 - LEVEL,
)
LOCAL = replace(SINGLE, rounds=1, local=FederatedAveraging(3, 0.05))
SINGLE_COUNTS = replace(SINGLE, rounds=1, canaries=1)

CASES = {
    "noise halved": (noise_halved, WHOLE),
    "sensitivity 2C taken for C": (
        sensitivity_of_zero_out,
        replace(WHOLE, privacy=Privacy(epsilon=1.0, delta=9e-3, neighbours="replace-one")),
    ),
    "always the same cohort": (
        cohort_that_stays,
        AuditSettings(
            Privacy(epsilon=1.0, delta=4.5e-3, neighbours="replace-one"),
            cohort_share=0.05,
            rounds=20,
            canaries=200,
            runs=200,
            confidence=1.0 - LEVEL,
        ),
    ),
    "fairness counts not clipped": (
        bound_times("counts", 1e9),
        replace(ALONE, privacy=BLOCKS, attack=HeavyUser("counts"), constraint=True),
    ),
    "selection's counts without noise": (
        without_noise("table"),
        replace(ALONE, attack=HeavyUser("selection")),
    ),
    "number of clipped users without noise": (
        without_noise("clipped"),
        replace(ALONE, privacy=BLOCKS, attack=HeavyUser("clipped")),
    ),
    "a bound that adapts: noise of the first round's": (
        noise_of_the_first_bound,
        replace(GROWING, runs=80),
    ),
    "a bound that adapts: clipped to more than the noise is of": (
        clipped_to_more(10.0),
        replace(GROWING, runs=80),
    ),
    "a bound that adapts: a hundredth of the noise on who is clipped": (
        less_noise("clipped", 100.0),
        replace(
            ALONE,
            privacy=Privacy(
                epsilon=1.0,
                delta=9e-3,
                clip=Clipping(1.0, counts=2.0, adapts=AdaptiveBound(0.5, share=0.5)),
            ),
            attack=HeavyUser("clipped"),
        ),
    ),
    "totals divided by the true size of the cohort": (
        divided_by_the_cohort,
        replace(ALONE, attack=CohortSize()),
    ),
    "steps divided by the true size of the cohort": (
        step_divided_by_the_cohort,
        replace(ALONE, attack=CohortSize()),
    ),
    # All eight models have one sign in 1 of 128 runs: only then the kept one tells nothing.
    "model selected by true accuracy": (
        selection_by_true_accuracy,
        replace(ALONE, attack=KeptModel(), rounds=8),
    ),
    "FPFL-1G: weights applied after clipping": (weighted_late(by_samples=False), SINGLE),
    "FPFL-1G: counts without noise": (
        without_noise("F", "n"),
        replace(SINGLE_COUNTS, attack=HeavyUser("counts")),
    ),
    "FPFL-1G: counts scaled by C_s/Σ(n' − F)": (
        counts_scaled_by_one_block,
        replace(SINGLE_COUNTS, attack=HeavyUser("counts")),
    ),
    "FPFL-1G: multipliers from counts before the noise": (
        multipliers_of_true_counts,
        replace(SINGLE_COUNTS, attack=ShownMultipliers()),
    ),
    "local steps: model difference not clipped": (bound_times("gradients", 1e9), LOCAL),
    "local steps: clipped before the division by S η": (
        # ‖S η u‖ ≤ C, and u is sent.
        bound_times("gradients", 1 / (3 * 0.05)),
        LOCAL,
    ),
    # As many samples as fill the bound of counts.
    "local steps: weighted by n_k after clipping": (
        weighted_late(by_samples=True),
        replace(LOCAL, privacy=replace(SINGLE.privacy, clip=Clipping(1.25, counts=5.0))),
    ),
    "counts left out of the joint norm": (
        counts_out_of_the_joint_norm,
        replace(ALONE, attack=HeavyUser("counts"), constraint=True),
    ),
    "norms depend on the company": (
        norms_by_the_largest,
        # At ε = 1 there is twice the noise: it takes a heavier user, who moves the sum by 41 C.
        replace(COMPANY, attack=SilentUser("aligned", samples=900)),
    ),
    "path chosen by the cohort": (
        path_by_the_cohort,
        replace(COMPANY, attack=ATTACKS["silent user, aligned others"]),
    ),
}

GRID, ENOUGH = "released numbers on the grid", "as much noise as promised"
PROPORTION = "noise in proportion to a bound that adapts"
NEW_NOISE, OWN_NOISE = "noise new in each round and run", "noise of each number its own"
POISSON, NEW_COHORTS = "Poisson cohorts by q", "cohorts new in each round and run"
FIXED = "fixed cohorts by their size"
CAP, SAME = "the cap on participations", "others send the same in any company"

CHECKED: dict[str, tuple[Twin, str]] = {
    "one round's noise in all rounds": (one_noise_for_all_rounds, NEW_NOISE),
    "noise from a constant seed": (noise_of_a_constant_seed, NEW_NOISE),
    "one noise for all numbers": (one_noise_for_all_numbers, OWN_NOISE),
    "noise in floats, off the grid": (noise_in_floats, GRID),
    "counts without noise": (without_noise("F", "n"), ENOUGH),
    "a bound that adapts: noise of the first round's": (noise_of_the_first_bound, PROPORTION),
    "cohorts from a constant seed": (cohorts_of_a_constant_seed, NEW_COHORTS),
    "always the same cohort": (cohort_that_stays, NEW_COHORTS),
    "cohorts drawn with 1.5 q": (more_than_q, POISSON),
    "Poisson cohorts of a fixed size": (poisson_in_name, POISSON),
    "slices of a shuffled population": (slices_of_a_shuffled_population, FIXED),
    "cap not applied": (cap_not_applied, CAP),
    "norms depend on the company": (norms_by_the_largest, SAME),
    "path chosen by the cohort": (path_by_the_cohort, SAME),
}
"""Twins, and the check that each of them must fail."""


def main() -> None:
    """Audit the twins, and write down what was found."""
    results, began = {}, time.perf_counter()
    for title, (twin, setting) in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            twin(patch)
            results[title] = audit(setting)
    checks = {}
    for title, (twin, check) in CHECKED.items():
        with pytest.MonkeyPatch.context() as patch:
            twin(patch)
            checks[title] = run_check(check, LEVEL)
    out = Path(sys.argv[1])
    about = about_this_run(f"python tests/audit/twins.py {out}", time.perf_counter() - began)
    as_content(results, about, out, checks)
    print(as_text(results), checks_as_text(checks), sep="\n\n")


if __name__ == "__main__":
    main()
