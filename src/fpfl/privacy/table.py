"""The same settings under every convention, side by side."""

from __future__ import annotations

import warnings
from typing import Any

from fpfl.privacy.plan import Block, Convention, PrivacyPlan, PrivacyWarning

COMPARED: tuple[Convention, ...] = ("paper", "replace-one", "poisson")
"""Those of one aggregator; noise that nodes add in shares is another setting."""


def compare_conventions(
    *,
    population: int,
    cohort: int,
    rounds: int,
    delta: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_participations: int | None = None,
) -> list[dict[str, Any]]:
    """What each convention makes of the same settings.

    Parameters
    ----------
    population, cohort, rounds : int
        K, m and T.
    delta : float, optional
        δ; by default 1 / (10 K).
    epsilon : float, optional
        ε to calibrate the noise of each convention for. Give this or ``noise_multiplier``.
    noise_multiplier : float, optional
        The same s/C for all conventions.
    max_participations : int, optional
        Cap for Poisson sampling; conventions with cohorts of a fixed size cannot have one and
        give the uncapped number.

    Returns
    -------
    list of dict
        One for each of ``paper``, ``replace-one`` and ``poisson``, with the keys ``convention``,
        ``noise_multiplier``, ``sensitivity``, ``epsilon``, ``epsilon_honest``,
        ``epsilon_server``, ``delta``, ``delta_server`` (with the chance δ that somebody takes part
        more often, where there is no cap) and ``participations``.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"give either epsilon or noise_multiplier, but got epsilon={epsilon!r} and "
            f"noise_multiplier={noise_multiplier!r}."
        )
    plans: list[PrivacyPlan] = []
    for convention in COMPARED:
        settings: dict[str, Any] = {
            "population": population,
            "cohort": cohort,
            "rounds": rounds,
            "delta": delta,
            "blocks": (Block("statistics", bound=1.0),),
            "convention": convention,
            "max_participations": max_participations if convention == "poisson" else None,
        }
        with warnings.catch_warnings():
            if plans:  # the first has said all that there is to say about δ
                warnings.simplefilter("ignore", PrivacyWarning)
            if noise_multiplier is not None:
                plans.append(PrivacyPlan(noise_multiplier=noise_multiplier, **settings))
            elif epsilon is not None:
                # The noise in sensitivities is cached: replace-one costs no second calibration.
                plans.append(PrivacyPlan.calibrate(epsilon=epsilon, **settings))
    return [
        {
            "convention": plan.convention,
            "noise_multiplier": plan.noise_multiplier,
            "sensitivity": plan.sensitivity,
            "epsilon": plan.epsilon,
            "epsilon_honest": plan.epsilon_honest,
            "epsilon_server": plan.epsilon_server,
            "delta": plan.delta,
            "delta_server": plan.delta * (1 if plan.max_participations is not None else 2),
            "participations": plan.participations,
        }
        for plan in plans
    ]
