"""The terms of a private run: what it may cost, fixed before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fpfl.privacy.filter import Mechanism


@dataclass(frozen=True)
class Terms:
    """What a private run may cost, fixed before it begins.

    ``budget`` is ε of the filter at ``delta`` and ``order``, in case settings are changed later;
    None where no accountant was there to compute it. ``cap`` is on participations.
    """

    mechanism: Mechanism
    rounds: int
    delta: float
    budget: float | None
    order: int | None
    cap: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "mechanism": self.mechanism.as_dict(),
            "rounds": self.rounds,
            "delta": self.delta,
            "budget": self.budget,
            "order": self.order,
            "cap": self.cap,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Terms:
        """The terms of plain values."""
        return cls(**content | {"mechanism": Mechanism.from_dict(content["mechanism"])})
