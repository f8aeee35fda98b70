r"""From a user's clipped vector to whole numbers that a ring can add up, and back.

    u = x_b √ρ_b/C_b in every block b,                 so that ‖u‖ ≤ 1
    z = round(S · H D_t u)                             in ℤ^D, ‖z‖ ≤ Δ(S, D)
    Σ_k z^k + Σ_j noise_j  (mod 2³²)                   what the ring adds up
    v_b = C_b/(√ρ_b S) · D_t Hᵀ (that sum)_b           decoded, the sum of all x plus noise

H is the Walsh-Hadamard matrix over √D, with u padded by zeros to the next power of two; D_t are
random signs, public and new in every round. Rotated, a vector's weight is spread over all its
numbers whatever it was, so that no single number comes near the end of the ring.

Rounding goes up or down at random so that it is right on average, and is done again until the norm
is at most Δ: `fpfl.privacy.renyi` has the formula, and what that costs. Every user is rounded on
its own, also where a node has many: what one of them changes is then ‖z^k‖, whoever else is there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpfl.aggregation.clipping import ClipRule
from fpfl.numerics.randomness import hashed
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.renyi import rounded_norm, scale_for

RING = 2**32
"""Sums are modulo this."""

RESERVE = 2.0**-10
"""Room for rounding in norms, scales and the rotation, as a part of a row's bound."""

SHARE_BITS = 10
"""The standard deviation of one node's share of noise is 2 to this power, in steps."""

TAILS = 40.0
"""Deviations of the noise that must fit into the ring beside the data: beyond them lies 10⁻³⁴⁸."""

_TRIES = 1000
"""Roundings that are tried; each succeeds with probability 0.39 at least."""

Uniform = Callable[[int], NDArray[np.float64]]
"""Draws so many numbers from [0, 1)."""


def system_uniform(count: int) -> NDArray[np.float64]:
    """From the operating system's randomness: multiples of 2⁻⁵³."""
    words = np.frombuffer(os.urandom(8 * count), dtype="<u8")
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


@dataclass(frozen=True)
class Encoding:
    """How vectors become whole numbers.

    Parameters
    ----------
    rules
        The clip rules of v's blocks.
    shares
        ρ_b of each of them, in the same order.
    numbers
        The length of v.
    scale
        S, in steps.
    """

    rules: tuple[ClipRule, ...]
    shares: tuple[float, ...]
    numbers: int
    scale: float

    @classmethod
    def of(
        cls,
        plan: PrivacyPlan,
        rules: tuple[ClipRule, ...],
        numbers: int,
        adders: int,
        bits: int = SHARE_BITS,
    ) -> Encoding:
        """The encoding with the plan's noise, where at least ``adders`` nodes add a share."""
        by_name = {block.name: block.share for block in plan.blocks}
        shares = tuple(by_name[rule.name] for rule in rules)
        # Clipping and rotating round a little, too: the reserve is of the noise.
        noise = plan.noise_multiplier * (1.0 + RESERVE)
        scale = scale_for(noise, padded(numbers), 2.0**bits, adders, plan.copies)
        return cls(rules, shares, numbers, scale)

    @classmethod
    def without_noise(
        cls, rules: tuple[ClipRule, ...], shares: tuple[float, ...], numbers: int, most: int
    ) -> Encoding:
        """As fine as the ring allows for ``most`` users, where the server adds the noise."""
        size = padded(numbers)
        scale = RING / 4 / most - math.sqrt(size)
        if scale < 1.0:
            raise ValueError(f"the ring of {RING} numbers is too small for {most} users")
        return cls(rules, shares, numbers, scale)

    @property
    def size(self) -> int:
        """D."""
        return padded(self.numbers)

    @property
    def bound(self) -> float:
        """Δ: the largest norm of one user's whole numbers."""
        return rounded_norm(self.scale, self.size)

    @property
    def reach(self) -> float:
        """2³¹/S: so many clip bounds somebody who lies can move a sum by, in any direction.

        Rotated, u k is up to S k in a number of the ring, whose half is 2³¹. Where it is spread
        over all D numbers, as a single number of v is, it can be √D times as many.
        """
        return RING / 2 / self.scale

    def check_ring(self, users: int, nodes: int, bits: int | None) -> None:
        """Refuse what could overflow: the largest sum of so many users and their nodes' noise."""
        noise = 0.0 if bits is None else TAILS * math.sqrt(nodes) * 2.0**bits
        if users * self.bound + noise >= RING / 2:
            raise ValueError(
                f"the sum of {users} users' numbers, each up to {self.bound:.4g}, and {nodes} "
                "nodes' noise does not fit into a ring of 2^32"
            )

    @cached_property
    def units(self) -> Tensor:
        """√ρ_b/C_b for every number of v."""
        units = torch.zeros(self.numbers, dtype=torch.float64)
        for rule, share in zip(self.rules, self.shares, strict=True):
            for place in rule.places:
                units[place] = math.sqrt(share) / rule.bound
        return units

    def encoded(self, rows: Tensor, round: int, uniform: Uniform = system_uniform) -> Tensor:
        """The whole numbers (int64) of clipped rows, one user each, of shape (users, D).

        A row that cannot be rounded within its norm, because it was not clipped, becomes zero.
        """
        whole = torch.zeros(len(rows), self.size, dtype=torch.int64)
        for k, row in enumerate(self.each(rows, round, uniform)):
            whole[k] = row
        return whole

    def each(self, rows: Tensor, round: int, uniform: Uniform = system_uniform) -> Iterator[Tensor]:
        """The same, row by row: no more than one is there at a time.

        What a row becomes goes by its own numbers and by what ``uniform`` draws for it.
        """
        signs = self.signs(round)
        for row in rows:
            units = torch.zeros(self.size, dtype=torch.float64)
            units[: self.numbers] = row.double().cpu() * self.units
            rotated = hadamard(units.mul_(signs)).mul_(self.scale)
            # A clipped row may be longer than its bound by rounding. That is taken off, so that it
            # can be rounded at all; what was not clipped is left as it is, and becomes zero.
            norm = float(rotated.norm())
            if self.scale < norm <= self.scale * (1.0 + RESERVE):
                rotated.mul_(self.scale / norm)
            yield self._rounded(rotated, uniform)

    def _rounded(self, numbers: Tensor, uniform: Uniform) -> Tensor:
        if not bool(numbers.isfinite().all()):
            return torch.zeros(self.size, dtype=torch.int64)
        below = numbers.floor()
        part = numbers - below
        for _ in range(_TRIES):
            up = torch.from_numpy(uniform(self.size)) < part
            whole = below + up
            if float(whole.square().sum()) <= self.bound**2:
                return whole.long()
        return torch.zeros(self.size, dtype=torch.int64)

    def decoded(self, total: NDArray[np.uint32], round: int) -> Tensor:
        """The sum of vectors in v's own units, from the sum of whole numbers in the ring."""
        signed = total.astype(np.uint32).view(np.int32).astype(np.float64)
        units = hadamard(torch.from_numpy(signed)) * self.signs(round) / self.scale
        return units[: self.numbers] / self.units

    def noise_stddev(self, adders: int, bits: int) -> Tensor:
        """The standard deviation of noise in so many shares, for every number of v."""
        return math.sqrt(adders) * 2.0**bits / (self.scale * self.units)

    def rounding_bound(self, users: int) -> float:
        """How far rounding can move the decoded sum of so many users, as a norm in units of u.

        ‖Σ_k (z^k/S − H D_t u^k)‖ ≤ users · √D/S, since every number moves by less than one step.
        """
        return users * math.sqrt(self.size) / self.scale

    def signs(self, round: int) -> Tensor:
        """The diagonal of D_t: ±1, public, new in every round."""
        bits = hashed(round, np.arange(self.size, dtype=np.int64)) & 1
        return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))


def padded(numbers: int) -> int:
    """The next power of two."""
    return 1 << max(0, numbers - 1).bit_length()


def hadamard(rows: Tensor) -> Tensor:
    """H of the last dimension, whose size is a power of two; H is its own inverse."""
    size = rows.shape[-1]
    narrow = 1 << (size.bit_length() - 1) // 2
    # Neighbours are added up in the transposed rows, where they are far apart: long runs of numbers
    # are added to long runs. Which numbers are added, and in which order, stays the same.
    wide = rows.reshape(*rows.shape[:-1], size // narrow, narrow)
    out = _butterflies(wide.transpose(-1, -2).clone(memory_format=torch.contiguous_format))
    out = _butterflies(out.transpose(-1, -2).contiguous())
    return out.div_(math.sqrt(size)).reshape(rows.shape)


def _butterflies(rows: Tensor) -> Tensor:
    """√n H of the last dimension but one, in place."""
    size, columns = rows.shape[-2:]
    width = 1
    while width < size:
        pairs = rows.view(*rows.shape[:-2], size // (2 * width), 2, width * columns)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        less = left - right
        left += right
        right.copy_(less)
        width *= 2
    return rows


def in_ring(numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Whole numbers modulo 2³²."""
    return (numbers & (RING - 1)).astype(np.uint32)
