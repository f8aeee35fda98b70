"""The terms of an agreement, as a site approves them and its ledger keeps them: plain values.

They follow from the agreement that the node's own code makes, and what can matter to the node's
users is in the agreement's fingerprint: who approves a fingerprint has approved these words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.federation.agreement import Agreement
    from fpfl.privacy.filter import Mechanism


def terms_of(agreement: Agreement) -> dict[str, Any]:
    """What a site has to know of an agreement, in types that JSON knows.

    ``mechanism`` is one opened sum as an accountant sees it. It is None where nothing bounds what a
    sum says about the node's users: without privacy, with a test generator's noise, or where the
    server, which sees the sums, is to add the noise.
    """
    from fpfl.privacy.filter import Mechanism

    plan, settings = agreement.plan, agreement.spec.settings
    bounded = plan is not None and agreement.aggregation.shares and agreement.test_seed is None
    mechanism = Mechanism.of(plan).as_dict() if plan is not None and bounded else None
    before = None if plan is None else Mechanism.measurement_of(plan)
    measures = {} if before is None else {"measurement": before.as_dict() if bounded else None}
    return {
        "population": agreement.population,
        "cohort": agreement.cohort,
        "rounds": agreement.rounds,
        "convention": None if agreement.privacy is None else agreement.privacy.convention,
        "epsilon": None if plan is None or not bounded else plan.epsilon,
        "delta": None if plan is None else plan.delta,
        "copies": agreement.privacy_copies,
        "clip": json.loads(json.dumps(settings["clip"], default=repr)),
        "model": agreement.model_hash,
        "parameters": agreement.layout.parameters,
        "constraint": settings["constraint"],
        "nodes": agreement.nodes,
        "least": agreement.aggregation.least,
        "colluders": agreement.aggregation.colluders,
        "hold": agreement.hold,
        "attempts": agreement.attempts,
        "seeded": agreement.test_seed is not None,
        "mechanism": mechanism,
        **measures,
    }


@dataclass(frozen=True)
class Kind:
    """Sums of one kind: a round's, or the measurement's, which is round 0.

    Parameters
    ----------
    rounds
        Which rounds they are of.
    sums
        How many of them may be opened. One each, where each one costs. Where nothing bounds what a
        sum says, its server does not count those of attempts that failed, either: as many as there
        can be attempts.
    terms
        One opened sum as an accountant sees it, as plain values; None: nothing bounds it.
    """

    rounds: range
    sums: int
    terms: dict[str, Any] | None

    @property
    def mechanism(self) -> Mechanism | None:
        """One opened sum as an accountant sees it; None: nothing bounds it."""
        from fpfl.privacy.filter import Mechanism

        return None if self.terms is None else Mechanism.from_dict(self.terms)


def kinds_of(terms: dict[str, Any]) -> tuple[Kind, ...]:
    """The kinds of sums of an agreement, by its terms; no kind may be opened for another."""
    once = 1 if terms["mechanism"] is not None else int(terms["attempts"])
    rounds = int(terms["rounds"])
    found = [Kind(range(1, rounds + 1), once * rounds, terms["mechanism"])]
    if "measurement" in terms:
        found.append(Kind(range(1), once, terms["measurement"]))
    return tuple(found)


def most_sums(terms: dict[str, Any]) -> int:
    """How many sums of an agreement may be opened, of all kinds together."""
    return sum(kind.sums for kind in kinds_of(terms))


def in_words(fingerprint: str, terms: dict[str, Any]) -> str:
    """The terms, for whoever is to approve them."""
    t = terms
    if t["seeded"]:
        privacy = "NOT PRIVATE: coins and noise come from a test generator"
    elif t["convention"] is None:
        privacy = "NOT PRIVATE: the server sees exact sums, and so does whoever sees the model"
    elif t["mechanism"] is None:
        privacy = (
            f"the server sees exact sums, and is trusted to add the noise ({t['convention']!r}): "
            "nothing is promised against it"
        )
    else:
        noise = t["mechanism"]["noise_multiplier"]
        privacy = (
            f"ε = {t['epsilon']:.4g} at δ = {t['delta']:.3g} for all sums together, the server "
            f"included (convention {t['convention']!r}, noise {noise:.4g} clip bounds, "
            f"{t['mechanism']['neighbours']} neighbours)"
        )
    measures = "measurement" in t
    many = f", and a person may be on {t['copies']} nodes" if t["copies"] > 1 else ""
    hold = f"{t['hold']:g} s at least" if t["hold"] else "not held back"
    return "\n".join(
        [
            f"Agreement {fingerprint}",
            f"  users      {t['population']:,} in all, {t['cohort']:,} in a round{many}",
            f"  rounds     {t['rounds']:,}: so many sums are opened, and no more",
            *(["  measured   the inputs' columns, in one sum before round 1"] if measures else []),
            f"  privacy    {privacy}",
            f"  clip       {_plain(t['clip'])}",
            f"  model      {t['parameters']:,} parameters, {t['model']}",
            f"  constraint {t['constraint'] or 'none'}",
            f"  nodes      {t['nodes']:,}; a sum needs {t['least']:,} of them, and up to "
            f"{t['colluders']:,} may tell the server all they know",
            f"  answers    {hold}",
        ]
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        said = (f"{name} {_plain(each)}" for name, each in value.items() if each is not None)
        return ", ".join(said)
    return "none" if value is None else str(value)
