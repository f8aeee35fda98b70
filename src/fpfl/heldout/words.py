"""What a private evaluation promises and means, in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fpfl.privacy.remarks import who_is_public, whole_numbers
from fpfl.privacy.statement import SEEDED_NOISE, round_up

if TYPE_CHECKING:
    from fpfl.heldout.plan import HeldoutPlan

_WORLDS = {
    "zero-out": "with this user's data, or with nothing in its place",
    "add-remove": "with this user among the held-out users, or without",
    "replace-one": "with this user's data, or with any other data in its place",
}


def statement(plan: HeldoutPlan, *, seeded: bool) -> list[str]:
    """What is protected, what it costs and what the figures mean, one point a line."""
    reach = "2C" if plan.sensitivity == 2 else "C"
    counts = math.prod(plan.cells.shape)
    lines = [
        "Protected: all samples of one held-out user together, not single samples. Compared are "
        f"two worlds: {_WORLDS[plan.neighbours]}.",
        f"Price: ε = {round_up(plan.epsilon)} at δ = {plan.delta:g}, for one release. Everyone "
        "takes part for certain, so nothing is amplified, and it holds against a server that knows "
        "who is held out, too. (One Gaussian mechanism, by its exact formula.)",
        f"Released: {counts:,} counts of {plan.population:,} users. One user changes them by "
        f"{reach} at most, C = {plan.clip:.4g} (ℓ2); each has Gaussian noise of "
        f"{plan.noise_stddev:.4g} (standard deviation). Every figure is computed from them; "
        "nothing else was looked at.",
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
