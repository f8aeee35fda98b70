r"""What a search over settings has cost: fits that were charged to one population's ledger.

A filter adds up divergences, so what runs have used of a budget adds up and their ε do not. With u
the used part of the budget ρ, of Rényi order α at δ,

    ε(u) = uρ + log((α − 1)/α) − (log δ + log α)/(α − 1)

is the ε of one fit, of a search, or of all that was ever charged (`fpfl.privacy.renyi`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from fpfl.privacy.filter import PrivacyFilter
from fpfl.privacy.renyi import renyi_epsilon
from fpfl.privacy.statement import round_up


@dataclass(frozen=True)
class FitCost:
    """One run of a ledger: its charges, its ε alone by the filter, its part of the budget."""

    run: str
    rounds: int
    epsilon: float
    share: float


@dataclass(frozen=True)
class TuningCost:
    """What fits have cost together; ``print`` says it in words.

    Parameters
    ----------
    limit
        The budget, of which ε is what is promised.
    fits
        The runs, in the order of their first charge.
    share
        What they used of the budget; a torn line of the file counts, and belongs to no run.
    before
        What was used before them.
    chosen
        ε of the fit that is kept, by its own statement.
    """

    limit: PrivacyFilter
    fits: tuple[FitCost, ...]
    share: float
    before: float = 0.0
    chosen: float | None = None

    @classmethod
    def of(
        cls, values: dict[str, Any], since: TuningCost | None = None, chosen: float | None = None
    ) -> Self:
        """From ``PopulationLedger.as_dict()``, without the runs that ``since`` has."""
        old = 0.0 if since is None else since.before + since.share
        known = set() if since is None else {fit.run for fit in since.fits}
        fits = [
            FitCost(run, found["rounds"], found["epsilon"], found["share"])
            for run, found in values["runs"].items()
            if run not in known
        ]
        limit = PrivacyFilter(values["epsilon"], values["delta"], values["order"])
        return cls(limit, tuple(fits), max(0.0, values["share"] - old), old, chosen)

    @property
    def rounds(self) -> int:
        """Charges of all the fits."""
        return sum(fit.rounds for fit in self.fits)

    @property
    def epsilon(self) -> float:
        """ε of all the fits together, for orientation: what is promised is the budget."""
        return renyi_epsilon(self.share * self.limit.budget, self.limit.order, self.limit.delta)

    @property
    def left(self) -> float:
        """The part of the budget that nobody has used."""
        return max(0.0, 1.0 - self.before - self.share)

    @property
    def more(self) -> int:
        """How many more fits like the dearest one there is room for."""
        dearest = max((fit.share for fit in self.fits), default=0.0)
        return int(self.left / dearest) if dearest > 0 else 0

    def as_dict(self) -> dict[str, Any]:
        """All figures, in types that JSON knows."""
        return {
            "fits": len(self.fits),
            "rounds": self.rounds,
            "epsilon": self.epsilon,
            "chosen": self.chosen,
            "alone": [fit.epsilon for fit in self.fits],
            "share": self.share,
            "before": self.before,
            "left": self.left,
            "more": self.more,
            "budget": self.limit.epsilon,
            "delta": self.limit.delta,
            "order": self.limit.order,
        }

    def __str__(self) -> str:
        if not self.fits:
            return f"Nothing was charged: all of ε = {self.limit.epsilon:g} is left."
        what = f"{len(self.fits)} fits, {self.rounds:,} rounds: together"
        alone = "."
        if len(self.fits) > 1:
            ends = [round_up(pick(fit.epsilon for fit in self.fits)) for pick in (min, max)]
            span = " to ".join(dict.fromkeys(ends))
            alone = f"; one of them alone ε = {span} by the same filter."
        else:
            what = f"1 fit, {self.rounds:,} rounds: by the filter"
        lines = [f"{what} ε = {round_up(self.epsilon)} at δ = {self.limit.delta:g}{alone}"]
        if self.chosen is not None:
            lines.append(
                f"The fit that is kept, alone and by its own statement: ε = "
                f"{round_up(self.chosen)}. That holds if there had been no other fit."
            )
        earlier = f" after {self.before:.1%} that was used before" if self.before else ""
        lines += [
            f"It took {self.share:.1%} of the budget of ε = {self.limit.epsilon:g}{earlier}; "
            f"{self.left:.1%} is left, for {self.more:,} more like the dearest. What is promised "
            "is the budget, and nothing is refunded.",
            "Not in it: what was chosen by scores on rows that are not public.",
        ]
        return "\n".join(lines)
