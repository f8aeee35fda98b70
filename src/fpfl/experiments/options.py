"""What may be varied for a whole table; for single rows, nothing but σ."""

from __future__ import annotations

from dataclasses import dataclass

from fpfl.data.femnist.unfair import Order
from fpfl.experiments.tables import matches
from fpfl.privacy.plan import Convention
from fpfl.users.precision import Precision


@dataclass(frozen=True)
class Options:
    """What may be varied for a whole table.

    Parameters
    ----------
    convention
        Sampler, sensitivity and accountant.
    noise
        (pattern, σ) pairs that replace calibration, where dp-accounting is not installed: the first
        pattern that a row's name matches counts, and ``"*"`` after all others. σ is that of the
        row's full cohort: where there are fewer users than that, it shrinks with their number.
    overrides
        ``key=value`` settings of all rows, for the alternatives in docs/reproduction.md.
    data, order
        For the table femnist: whose digits, and in which order they are dealt to pens.
    scale
        Every row has so much of its rounds.
    device, precision
        Where and how to compute.
    """

    convention: Convention = "poisson"
    noise: tuple[tuple[str, float], ...] = ()
    overrides: tuple[str, ...] = ()
    data: str | None = None
    order: Order = "lexicographic"
    scale: float = 1.0
    device: str = "cpu"
    precision: Precision = "float32"

    def noise_multiplier(self, name: str) -> float | None:
        """σ that was given for a row; None where it is to be calibrated."""
        for pattern, sigma in sorted(self.noise, key=lambda pair: pair[0] == "*"):
            if matches(name, pattern):
                return sigma
        return None


def parsed_noise(given: str) -> tuple[str, float]:
    """``"2.28"`` is for all rows, ``"*/100/3383*=2.28"`` for those that match."""
    pattern, _, number = given.rpartition("=")
    try:
        sigma = float(number)
    except ValueError as error:
        raise ValueError(
            f"--noise-multiplier {given!r}: expected a number, or PATTERN=NUMBER"
        ) from error
    if not 0.0 < sigma < float("inf"):
        raise ValueError(f"--noise-multiplier {given!r}: σ must be positive")
    return pattern or "*", sigma
