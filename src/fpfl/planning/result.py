"""What a plan says: in words, as numbers, and as arguments to go on with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fpfl.planning.figures import Setting
from fpfl.planning.levers import Lever
from fpfl.planning.question import Question
from fpfl.privacy.statement import round_up

ENOUGH = 1.1
"""Where no setting will do: the smallest cohort whose worst figure is so near to the least."""

_NAMES = {
    "gradient": "the noise on the gradient is longer than a gradient can be",
    "step": "the rule for the learning rate has to shorten steps because of noise",
    "gap": "the gap's error is too large for the tolerance",
}


@dataclass(frozen=True)
class TrainingPlan:
    """What `plan_training` finds.

    Parameters
    ----------
    question
        What it was made from.
    settings
        Everything that was looked at: cohorts of the same T, in order.
    chosen
        The recommended one; where none will do, the least bad.
    given
        The cohort that was asked about, where one was.
    fewer_rounds
        The chosen cohort with fewer rounds.
    levers
        What would help, best first; empty where the chosen setting will do.
    heldout
        How many held-out users it takes to tell α from the error of sampling them.
    delta
        δ.
    """

    question: Question
    settings: tuple[Setting, ...] = field(repr=False)
    chosen: Setting
    given: Setting | None
    fewer_rounds: Setting | None
    levers: tuple[Lever, ...]
    heldout: int
    delta: float

    @property
    def reason(self) -> str:
        """Why the chosen setting was chosen."""
        if self.chosen.good:
            return (
                "the smallest cohort at which the gradient stands out of its noise, steps need not "
                "be shortened, and the run tells α from the noise of its counts"
            )
        return (
            f"no cohort will do; this is the smallest that comes within {100 * (ENOUGH - 1):.0f}% "
            f"of the best. At it, {_because(self.chosen)}"
        )

    def arguments(self) -> dict[str, Any]:
        """What ``fpfl.suggest`` takes of it, beside a schema and a constraint."""
        q, s = self.question, self.chosen
        return {
            "population": q.population,
            "cohort": s.cohort,
            "rounds": s.rounds,
            "epsilon": q.epsilon,
            "delta": self.delta,
        }

    def lines(self) -> list[str]:
        """The plan in words, one point a line."""
        return [*self._recommended(), *self._told(), *self._beyond()]

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""

        def plain(setting: Setting | None) -> dict[str, Any] | None:
            if setting is None:
                return None
            told = {"one round": setting.worst.one_round, "averaged": setting.worst.averaged}
            more = {"figures": setting.figures, "good": setting.good, "uploads": setting.uploads}
            errors = told | {"run": setting.worst.run}
            return (
                asdict(setting) | more | {"told": {n: setting.told(e) for n, e in errors.items()}}
            )

        return {
            "question": asdict(self.question),
            "delta": self.delta,
            "chosen": plain(self.chosen),
            "reason": self.reason,
            "given": plain(self.given),
            "fewer_rounds": plain(self.fewer_rounds),
            "settings": [plain(setting) for setting in self.settings],
            "levers": [asdict(lever) for lever in self.levers],
            "heldout_users": self.heldout,
            "words": self.lines(),
        }

    def _recommended(self) -> list[str]:
        s, q = self.chosen, self.question
        verb = "Take" if s.good else "Least bad is"
        lines = [
            f"{verb} m = {s.cohort:,}, T = {s.rounds:,}, C = {s.clipping.bound:g}, "
            f"C_s = {s.clipping.counts:g}, learning rate {s.learning_rate:.3g}: {self.reason}.",
            f"Noise: s = {s.gradient_noise:.3g} on each of {q.parameters:,} numbers of the summed "
            f"gradient, which makes {s.gradient_length:.3g} in length on its mean against at most "
            f"C = {s.clipping.bound:g}; {s.count_noise:.3g} on each count; "
            f"{s.accuracy_error:.3f} in one round's released accuracy.",
        ]
        if self.fewer_rounds is not None:
            f = self.fewer_rounds
            words = "will do as well" if f.good else f"will not do: {_because(f)}"
            lines.append(f"T = {f.rounds:,} at the same cohort {words}.")
        if self.given is not None and self.given != s:
            words = "will do" if self.given.good else f"will not do: {_because(self.given)}"
            lines.append(f"The cohort asked about, m = {self.given.cohort:,}, {words}.")
        return lines

    def _told(self) -> list[str]:
        s, worst = self.chosen, self.chosen.worst
        alpha = f"α = {s.tolerance:g}"
        return [
            f"Can {alpha} be told from noise? The least sure is {worst.group} ({worst.rate}), "
            f"about {worst.count:,.0f} counted in a round: from one round "
            f"{s.told(worst.one_round)} (standard error {worst.one_round:.3g}), from the averaged "
            f"counts that the method goes by {s.told(worst.averaged)} ({worst.averaged:.3g}), from "
            f"the second half of the run {s.told(worst.run)} ({worst.run:.3g}). Yes: two standard "
            "errors fit in α; barely: one does. The last is about how near training can bring "
            "groups to each other.",
            f"To judge the finished model at 95%, hold out about {self.heldout:,} users: with "
            "groups alike, their sampling error alone then fits in α. Noise on their counts "
            "(fpfl evaluate) takes more.",
        ]

    def _beyond(self) -> list[str]:
        s, q = self.chosen, self.question
        lines = [
            f"ε = {q.epsilon:g} (δ = {self.delta:.3g}) is against those who see what is released. "
            f"Against a server that knows the cohorts it is {round_up(s.epsilon_server)} "
            f"(δ = {s.delta_server:.3g}) for a user in {s.participations:,} rounds. Users send "
            f"{s.uploads:,} vectors in all.",
        ]
        if self.levers:
            ways = "; ".join(f"{lever.what} ({lever.score:.2g})" for lever in self.levers)
            lines.append(
                f"What would help, with the worst figure that is left (now {s.score:.2g}, at most "
                f"1 will do), best first: {ways}."
            )
        lines.append(
            "All of it follows from the shares, rates and sizes that were given: they must be "
            "public guesses. Read from the data, they are a release that no ε here covers."
        )
        return lines


def _because(setting: Setting) -> str:
    return " and ".join(
        f"{_NAMES[name]} ({value:.2g} times)"
        for name, value in setting.figures.items()
        if value > 1.0 + 1e-9
    )
