"""References: the same training without its constraint, as a run of its own.

What a constraint costs whom can be said beside such a run alone (`fpfl.fairness.against`). It is
private by itself, with cohorts and noise of its own, and both runs add up: a population's ledger is
charged by both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.privacy.statement import round_up
from fpfl.training.run import Run
from fpfl.training.session import train


def without_constraint(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `fpfl.train`, as the reference of a training with these has them.

    Seeds are others: two runs with the same secret cohorts would tell more than two runs with
    their own, which is what accountants add up; and the same noise could be taken off.
    """
    own = dict(settings) | {"constraint": None, "method": None}
    # The best of many cohorts is chance where there is nothing else to judge by.
    own["selection"] = settings.get("selection") or "average"
    for name in ("seed", "noise_seed"):
        if settings.get(name) is not None:
            own[name] = reference_seed(settings[name])
    return own


def reference_seed(seed: int) -> int:
    """The seed of a reference, which follows from that of its run."""
    return int.from_bytes(hashlib.sha256(f"fpfl reference {seed}".encode()).digest()[:4]) >> 1


def train_reference(model: nn.Module, data: FederatedDataset, **settings: Any) -> Run:
    """Train plain (private) federated learning beside a run under a constraint, to compare with.

    Parameters
    ----------
    model, data
        As `fpfl.train` had them.
    settings
        As `fpfl.train` had them, the constraint and its method included: they are left out here.
        A ``folder`` must be another one, e.g. ``FOLDER/reference``, where reports find it.

    Returns
    -------
    Run
        The reference; ``run.against(reference, data)`` says who is better and who is worse off.
    """
    if settings.get("constraint") is None:
        raise ValueError(
            "a reference is the same training without its constraint, and constraint is not given; "
            "give the settings of the run that it is for"
        )
    return train(model, data, **without_constraint(settings))


def together(statements: Sequence[Mapping[str, Any] | None]) -> str | None:
    """What a run and its reference cost together, in words; None without privacy.

    (Σε, Σδ): basic composition holds for any two runs. ``statements`` are those of both, as
    ``PrivacyStatement.as_dict()`` has them.
    """
    known = [said for said in statements if said is not None]
    if not known:
        return None
    names = ("epsilon_real" if said["real_population"] else "epsilon_honest" for said in known)
    costs = [said[name] for said, name in zip(known, names, strict=True)]
    delta = sum(said["delta"] for said in known)
    alone = "Two runs compose: this run and its reference were trained on the same users"
    if len(known) < len(statements) or any(cost is None for cost in costs):
        return f"{alone}, and what they cost together is not known."
    total = round_up(sum(cost for cost in costs if cost is not None))
    return (
        f"{alone}, and together cost ε = {total} at δ = {delta:g} at most "
        f"({' + '.join(round_up(cost) for cost in costs if cost is not None)}, added up; a "
        "population's ledger adds up more closely)."
    )
