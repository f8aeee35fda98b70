"""The attacks: one for every way in which a broken pipeline could give a user away.

All of them see what `fpfl.train` released and nothing else. They differ in where they put their
canaries: in gradients, in counts, in multipliers, in model selection, in the size of a cohort, or
in nothing at all but the company that others are in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fpfl.audit.setup import NOBODY, Attack, Scene, Seen, Setup, User, steps
from fpfl.privacy.settings import CLIPPED, COUNTS, GRADIENTS, SELECTION

Block = Literal["counts", "selection", "clipped"]
Others = Literal["aligned", "cancelling"]


@dataclass(frozen=True)
class GradientCanaries:
    """Many canaries in one run, each with a gradient in a coordinate of its own.

    Canary i has one sample, M times the unit vector e_i. The clipped gradient is then ±C e_i, or
    with the paper's method C times a unit vector in the coordinates i of ∇L and of its group's ∇F,
    where nobody else's is: all coins of a run can be guessed side by side, each from a total that
    the others are not in.

    With one gradient the canary's is ω M e_i, and ±C e_i when it is clipped, whatever the broadcast
    weight ω is. Where there are groups enough, each canary has one of its own, and as many samples
    as fill the bound of its counts: it is then in a number of the counts that nobody else is in,
    too, and the two log ratios add up. Users of another group, whom the model is right about, see
    to it that there is a gap, so that weights are broadcast.
    """

    name: str = "gradient canaries"
    learns: bool = False

    def coins(self, setup: Setup) -> int:
        """As many as there are canaries."""
        return setup.canaries

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: M e_i. Tails: −M e_i or nothing."""
        large, m = _large(setup), len(coins)
        groups = _own_groups(m, setup) if setup.one_gradient else np.tile(np.arange(m) % 2, (2, 1))
        times = math.ceil(setup.clipping.counts or 1.0) if setup.one_gradient else 1
        users = [
            User(times, i, large if heads else -large, group=int(groups[0 if heads else 1, i]))
            if heads or setup.replaced
            else NOBODY
            for i, heads in enumerate(coins.tolist())
        ]
        if setup.one_gradient:
            # The model stays where it is to the last bit: a logit of 0 is a miss. One parameter
            # more is for those it is right about.
            others = [User(place=m, value=1.0, group=0)] * max(1, m // 2)
            return Scene((*users, *others), m + 1, steps(0.0), last=1.0)
        # A simulation refuses a group without samples: two users whose gradient is 0.
        others = [User(group=0), User(group=1)] if setup.constraint else []
        return Scene((*users, *others), m, steps())

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The log ratio of what the canary's own coordinates show."""
        m = setup.canaries
        places = setup.places(m + 1 if setup.one_gradient else m)
        # The logit is 0: ∂ℓ/∂o = −1/2, and ∂f/∂o = −1/4 for the surrogate of the FNR.
        x = -seen.v[:, places["loss_gradient"]][:, :m]
        if setup.constraint and not setup.one_gradient:
            by_group = seen.v[:, places["F_gradient"]].reshape(len(x), setup.groups, m)
            own = by_group[:, np.arange(m) % 2, np.arange(m)]
            x = (2.0 * x - own) / math.sqrt(5.0)
        bound, noise = seen.bound_and_noise(GRADIENTS)
        heads = (bound * x - bound**2 / 2) / noise**2
        tails = (-bound * x - bound**2 / 2) / noise**2 if setup.replaced else np.zeros_like(heads)
        if _apart(setup):
            bound, noise = seen.bound_and_noise(COUNTS)
            missed = seen.v[:, places["F"]]
            of_heads, of_tails = _own_groups(m, setup)
            heads = heads + (bound * missed[:, of_heads] - bound**2 / 2) / noise**2
            if setup.replaced:
                tails = tails + (bound * missed[:, of_tails] - bound**2 / 2) / noise**2
        return seen.log_ratio(heads, tails)


@dataclass(frozen=True)
class HeavyUser:
    """One user who sends all it can to one block of counts, and is looked for in that block alone.

    With very many samples and no gradient for ``"counts"`` and ``"selection"``; with one sample and
    a large gradient for ``"clipped"``, the number of clipped users. Clipped, what it sends has the
    norm C_b. Left unclipped, it stands out of any noise; without noise, any count does. Where heads
    and tails part is learned: in a broken pipeline it is not where C_b would have it.
    """

    block: Block = "counts"
    samples: int = 5000
    learns: bool = True

    @property
    def name(self) -> str:
        """The block is part of it."""
        return f"heavy user, {self.block}"

    def coins(self, setup: Setup) -> int:
        """One: all users' counts are added up in the same numbers."""
        if self.block == COUNTS and setup.constraint is None:
            raise ValueError(
                "there are no fairness counts without a constraint; use constraint=True"
            )
        if self.block == CLIPPED and setup.clipping.counting_share is None:
            raise ValueError(
                "clipped users are not counted; use Clipping(clipped_share=...) or adapts=..."
            )
        return 1

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: misses in group a. Tails: other counts, as far away as can be, or nothing."""
        heads = User(self.samples)
        tails = {
            COUNTS: User(self.samples, group=1),
            SELECTION: User(self.samples, label=0),
            CLIPPED: User(label=0),
        }[self.block]
        if self.block == CLIPPED:
            heads = User(value=_large(setup))
        user = heads if coins[0] else tails if setup.replaced else NOBODY
        # Two others: a simulation refuses a group without samples.
        return Scene((user, User(group=0), User(group=1)), 1, steps())

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The log ratio of the block's own numbers."""
        places = setup.places(1)
        bound, noise = seen.bound_and_noise(self.block)
        if self.block == COUNTS:
            parts = [seen.v[:, places["F"]]]
            if setup.clipping.counts is None:
                # In the joint vector F and n' are equal, and share the bound.
                parts.append(seen.v[:, places["n"]])
            norm = math.sqrt(len(parts))
            x = sum(parts[1:], parts[0]) / norm - seen.q * min(norm, bound)  # less the others'
            heads, tails = x[:, :1], x[:, 1:2]
        elif self.block == SELECTION:
            # Of two classes: class 1 that is taken for class 0, and class 0 that is known.
            table = seen.v[:, places["table"]]
            heads, tails = table[:, 2:3], table[:, :1]
            heads = heads - seen.q * 2 * min(1.0, bound)
        elif setup.clipping.adapts is not None:
            # Who is not clipped, as the two others, sends −½; heads sends ½.
            heads = seen.v[:, places["clipped"]] + seen.q * 2 * bound
            tails = -heads
        else:
            heads, tails = seen.v[:, places["clipped"]], np.full((len(seen.v), 1), bound / 2)
        if not setup.replaced:
            tails = np.full_like(tails, bound / 2)  # nothing is sent: a ratio of 1
        return seen.log_ratio(
            (bound * heads - bound**2 / 2) / noise**2, (bound * tails - bound**2 / 2) / noise**2
        )


@dataclass(frozen=True)
class ShownMultipliers:
    """One user whom the model is wrong about, in a group that it is right about otherwise.

    The history shows the multipliers, and users get weights that follow from them. Functions of
    released counts can tell no more than those do; of counts as they were before the noise, they
    tell whether the user was there.
    """

    others: int = 20
    name: str = "shown multipliers"
    learns: bool = True

    def coins(self, setup: Setup) -> int:
        """One: all users of a group move the same multiplier."""
        if setup.constraint is None:
            raise ValueError("there are no multipliers without a constraint; use constraint=True")
        return 1

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: a miss in group 1. Tails: a hit there, or nothing."""
        user = User(value=-1.0, group=1)
        if not coins[0]:
            user = User(value=1.0, group=1) if setup.replaced else NOBODY
        right = [User(value=1.0, group=number % 2) for number in range(2 * self.others)]
        return Scene((user, *right), 1, steps(0.0), start=1.0)

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The last multiplier of the canary's group: below 0 where its rate is above the whole's.

        The paper's has no sign: it grows with any difference.
        """
        shown = seen.multipliers[-1, 1:2]
        return -shown if setup.one_gradient else shown


@dataclass(frozen=True)
class KeptModel:
    """One user whom every model is right or wrong about, against another with opposite wishes.

    The model has one parameter, which the noise makes positive or negative anew each round: right
    for the canary, or right for the other user. The sign of the model that was kept tells who
    decided. Selection from released totals can tell no more than they do.
    """

    samples: int = 50
    name: str = "kept model"
    learns: bool = False

    def coins(self, setup: Setup) -> int:
        """One: only one model is kept."""
        if setup.constraint:
            raise ValueError("this attack is on selection by accuracy; use constraint=False")
        return 1

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: the canary wants w > 0. Tails: it wants w < 0, like the other user, or nothing."""
        user = User(self.samples, value=1.0)
        if not coins[0]:
            user = User(self.samples, value=-1.0) if setup.replaced else NOBODY
        return Scene((user, User(value=-1.0)), 1, _forgetting, start=1.0)

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The sign of the kept model's parameter."""
        return np.sign(seen.kept)


@dataclass(frozen=True)
class CohortSize:
    """One user of two, in a pipeline that may divide by the number of those who took part.

    Nobody has a gradient, so a step of the model is noise alone: its spread over many parameters
    is the noise's, times whatever it was multiplied with.
    """

    width: int = 1000
    name: str = "cohort size"
    learns: bool = True

    def coins(self, setup: Setup) -> int:
        """One: a cohort has one size."""
        if setup.constraint or setup.replaced:
            raise ValueError(
                "replacing a user does not change the size of a cohort, and this attack goes "
                "without a constraint; use 'zero-out' or 'add-remove' neighbours, constraint=False"
            )
        return 1

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: the canary has a sample. Tails: it has none."""
        user = User() if coins[0] else NOBODY
        return Scene((user, User()), self.width, steps(1.0))

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The mean logarithm of the steps' spread."""
        moved = np.diff(np.concatenate([seen.start[None], seen.w]), axis=0)
        spread = np.sqrt(np.mean(moved**2, axis=1))
        return np.array([np.mean(np.log(spread))])


@dataclass(frozen=True)
class SilentUser:
    """One user with many samples and no gradient, looked for in what the *others* send.

    Its features are 0, and so is its gradient, exactly. Whatever part it has in the sum of
    gradients is through others: an allowance, a path or a padding that was chosen by the largest
    user of a chunk, or by all of a cohort.

    ``"aligned"``: very many others who send the same vector of the full length C, so that whatever
    scales all of them a little moves the sum a lot. ``"cancelling"``: fewer others, with samples
    whose gradients cancel to a thousandth in pairs, so that whatever changes the precision of a
    norm scales them a lot. The sum is seen along the others' direction. Models have many outputs:
    where gradients of few samples are small against the parameters, pipelines take short cuts.
    """

    others: Others = "aligned"
    number: int = 64000
    samples: int = 400
    width: int = 16
    learns: bool = True

    @property
    def name(self) -> str:
        """The others are part of it."""
        return f"silent user, {self.others} others"

    def coins(self, setup: Setup) -> int:
        """One: there is one company."""
        if setup.constraint:
            raise ValueError("this attack is on the sum of gradients alone; use constraint=False")
        return 1

    def scene(self, coins: NDArray[np.bool_], setup: Setup) -> Scene:
        """Heads: the silent user has many samples. Tails: one, or none."""
        user = User(self.samples) if coins[0] else User() if setup.replaced else NOBODY
        other = User(value=_large(setup))
        if self.others == "cancelling":
            other = User(2, value=_large(setup), turn=-0.999)
        others = (other,) * self.number
        return Scene((user, *others), self.width, steps(), outputs=self.width)

    def scores(self, seen: Seen, setup: Setup) -> NDArray[np.float64]:
        """The sum's length along the others' gradient."""
        places = setup.places(self.width**2)
        total = seen.v[:, places["loss_gradient"]].reshape(-1, self.width, self.width)
        # All logits are 0 and all labels 1: ∂ℓ/∂o = 1/k − 1[class 1], and the feature is the first.
        direction = np.full(self.width, 1.0 / self.width)
        direction[1] -= 1.0
        along: NDArray[np.float64] = total[:, :, 0] @ direction / np.linalg.norm(direction)
        return np.array([along.sum()])


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        GradientCanaries(),
        HeavyUser("counts"),
        HeavyUser("selection"),
        HeavyUser("clipped"),
        ShownMultipliers(),
        KeptModel(),
        CohortSize(),
        SilentUser("aligned"),
        SilentUser("cancelling", number=400, samples=100, width=8),
    )
}
"""The attacks by their names."""


def _large(setup: Setup) -> float:
    """M: so large that clipping leaves next to nothing of the joint vector's counts."""
    return 1e4 * max(1.0, setup.clipping.bound)


def _own_groups(canaries: int, setup: Setup) -> NDArray[np.int64]:
    """The groups of canaries' heads and tails (2, m), dealt out from 1 on: 0 is others'."""
    return (1 + np.arange(2 * canaries) % (setup.groups - 1)).reshape(2, canaries)


def _apart(setup: Setup) -> bool:
    """Whether counts show every canary on its own."""
    needed = setup.canaries * (2 if setup.replaced else 1)
    split = setup.clipping.counts is not None
    return setup.one_gradient and split and setup.groups > needed


def _forgetting(w: list[torch.Tensor]) -> torch.optim.Optimizer:
    """w ← w − (g + w) = −g: nothing is left of the model before."""
    return torch.optim.SGD(w, lr=1.0, weight_decay=1.0)
