"""The table of audits that ``fpfl audit`` shows: all conventions, all attacks, all checks.

A whole audit of a sound pipeline raises an alarm with probability 1 − confidence at most: each of
its rows, attacks and checks, has an equal part of that (Bonferroni).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fpfl.audit.attacks import (
    ATTACKS,
    CohortSize,
    HeavyUser,
    KeptModel,
    ShownMultipliers,
)
from fpfl.audit.audits import AuditResult, AuditSettings, audit
from fpfl.audit.checks import CHECKS, CheckResult, run_check
from fpfl.methods import OneGradient
from fpfl.privacy.adaptive import AdaptiveBound
from fpfl.privacy.conventions.base import REGISTER
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.users.local import FederatedAveraging

Report = Callable[[str, AuditResult | CheckResult], None]

CONFIDENCE = 0.999
"""A sound pipeline passes a whole audit with this probability at least."""

FIXED_SHARE = 0.9
"""The cohort's share in audits of cohorts of a fixed size. Their accountant (Rényi DP) is tight
only near the whole population: at half of it, it asks for twice the noise that it takes, and an
audit finds a third of the claim at most."""


def default_settings(
    *,
    epsilon: float = 2.0,
    convention: str = "all",
    canaries: int = 200,
    runs: int = 300,
    rounds: int = 10,
    confidence: float = CONFIDENCE,
) -> dict[str, AuditSettings]:
    """The audits of the table, by what each of them is about.

    Parameters
    ----------
    epsilon
        ε to calibrate to, by each convention's own words.
    convention
        One of the conventions, or ``"all"``.
    canaries, runs, rounds
        As in `AuditSettings`. δ is 1/(10 K), where K is ``canaries`` or, in attacks with one
        canary a run, the users of their scene.
    confidence
        Of the whole audit, all rows and checks together.
    """
    known = tuple(REGISTER)
    if convention not in ("all", *known):
        raise ValueError(f"convention is {convention!r}; expected 'all' or one of {known}")
    delta = 1 / (10 * canaries)
    poisson = AuditSettings(
        Privacy(epsilon=epsilon, delta=delta),
        cohort_share=0.5,
        rounds=rounds,
        canaries=canaries,
        runs=runs,
    )

    def other(
        setting: AuditSettings, clip: Clipping | None = None, **privacy: Any
    ) -> AuditSettings:
        changed = replace(setting.privacy, **privacy | ({"clip": clip} if clip else {}))
        return replace(setting, privacy=changed)

    fixed = replace(poisson, cohort_share=FIXED_SHARE)
    paper = other(fixed, convention="paper")
    # One canary a run, and everybody takes part: there is nothing else to blur it. The block that
    # is attacked has most of the budget, or little could be seen in it.
    alone = replace(other(poisson, delta=None), cohort_share=1.0, rounds=1)
    counts = other(alone, Clipping(1.0, counts=2.0, counts_share=0.9))
    clipped = other(alone, Clipping(1.0, counts=2.0, counts_share=0.01, clipped_share=0.9))
    selection = other(alone, Clipping(1.0, counts_share=0.01, selection_share=0.9))
    split = Clipping(1.0, counts=2.0, clipped_share=0.05)
    # The bound moves by factors of 2 to 4 a round: all canaries are clipped, and few are aimed at.
    adapts = AdaptiveBound(0.1, rate=2.0)
    counted = AdaptiveBound(0.5, share=0.9)
    # FPFL-1G with the split that `fpfl.suggest` makes; a group for each canary, so that its counts
    # can be seen as well as its gradient.
    single = replace(
        other(poisson, Clipping(1.25, counts=1.0, counts_share=0.25, selection_share=0.05)),
        constraint=True,
        method=OneGradient(),
        groups=1 + canaries,
    )
    single_counts = replace(
        other(alone, Clipping(1.25, counts=1.0, counts_share=0.9)),
        constraint=True,
        method=OneGradient(),
    )
    rows = {
        "Poisson cohorts": poisson,
        "Poisson cohorts, users replaced": other(poisson, neighbours="replace-one"),
        "Poisson cohorts, with a cap": other(poisson, max_participations=max(1, rounds // 3)),
        "fixed cohorts": other(fixed, convention="replace-one"),
        "fixed cohorts as in the paper": paper,
        "the paper's method": replace(paper, constraint=True),
        "the method, Poisson cohorts": replace(poisson, constraint=True),
        "the method, counts on their own": replace(other(poisson, split), constraint=True),
        "FPFL-1G, Poisson cohorts": single,
        "FPFL-1G, users replaced": replace(
            other(single, neighbours="replace-one"), groups=1 + 2 * canaries
        ),
        "FPFL-1G, local steps": replace(single, local=FederatedAveraging(3, 0.1)),
        "FPFL-1G, fairness counts": replace(single_counts, attack=HeavyUser("counts")),
        "FPFL-1G, multipliers": replace(single_counts, attack=ShownMultipliers()),
        "fairness counts": replace(counts, attack=HeavyUser("counts"), constraint=True),
        "number of clipped users": replace(clipped, attack=HeavyUser("clipped")),
        "a bound that adapts": other(poisson, Clipping(1.0, adapts=adapts)),
        "FPFL-1G, a bound that adapts": replace(
            single,
            privacy=replace(single.privacy, clip=replace(single.privacy.clipping, adapts=adapts)),
        ),
        "number of clipped users, a bound that adapts": replace(
            other(alone, Clipping(1.0, counts=2.0, counts_share=0.01, adapts=counted)),
            attack=HeavyUser("clipped"),
        ),
        "selection's counts": replace(selection, attack=HeavyUser("selection")),
        "selection of a model": replace(selection, attack=KeptModel(), rounds=8),
        "size of a cohort": replace(alone, attack=CohortSize()),
        "counts in the joint norm": replace(
            other(alone, Clipping(1.0, selection_share=0.01)),
            attack=HeavyUser("counts"),
            constraint=True,
        ),
        "company, many others": replace(alone, attack=ATTACKS["silent user, aligned others"]),
        "company, others who cancel": replace(
            alone, attack=ATTACKS["silent user, cancelling others"]
        ),
    }
    kept = {
        title: row for title, row in rows.items() if convention in ("all", row.privacy.convention)
    }
    each = 1.0 - level(confidence, len(kept))
    return {title: replace(row, confidence=each) for title, row in kept.items()}


def level(confidence: float, rows: int) -> float:
    """The chance of a false alarm that each of so many audits, and each check, may have."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; give a number between 0 and 1, e.g. 0.999")
    return (1.0 - confidence) / (rows + len(CHECKS))


def audit_table(
    settings: Mapping[str, AuditSettings], report: Report | None = None
) -> dict[str, AuditResult]:
    """Run the audits one after the other; ``report`` is called with each that is done."""
    results = {}
    for title, setting in settings.items():
        results[title] = audit(setting)
        if report is not None:
            report(title, results[title])
    return results


def check_table(each: float, report: Report | None = None) -> dict[str, CheckResult]:
    """Run the checks, each at the given level; ``report`` is called with each that is done."""
    results = {}
    for name in CHECKS:
        results[name] = run_check(name, each)
        if report is not None:
            report(name, results[name])
    return results


def run_audit(
    settings: Mapping[str, AuditSettings],
    *,
    confidence: float = CONFIDENCE,
    about: Callable[[float], Mapping[str, Any]] | None = None,
    out: Path | None = None,
    report: Report | None = None,
) -> tuple[str, dict[str, Any]]:
    """Audit, check, and return the table as text and as plain values.

    Parameters
    ----------
    settings
        What `default_settings` gave, or audits of your own.
    confidence
        Of the whole audit: decides the checks' level. Audits have their own, and those of
        `default_settings` leave the checks' share.
    about
        Called with the seconds it took, for what a reader needs to place the figures (command,
        date, machine): goes into the file.
    out
        A file to write the plain values to, as JSON.
    report
        As for `audit_table`.
    """
    began = time.perf_counter()
    checks = check_table(level(confidence, len(settings)), report)
    results = audit_table(settings, report)
    told = about(time.perf_counter() - began) if about else {}
    content = as_content(results, dict(told) | {"confidence": confidence}, out, checks)
    return f"{as_text(results)}\n\n{checks_as_text(checks)}", content


def as_content(
    results: Mapping[str, AuditResult],
    about: Mapping[str, Any],
    out: Path | None = None,
    checks: Mapping[str, CheckResult] | None = None,
) -> dict[str, Any]:
    """The table as plain values, which are also written to a file where one is given."""
    content = {
        "about": dict(about) | {"seeds": "none: coins, cohorts and noise are the system's"},
        "audits": {title: result.as_dict() for title, result in results.items()},
        "checks": {title: result.as_dict() for title, result in (checks or {}).items()},
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def as_text(results: Mapping[str, AuditResult]) -> str:
    """The table for a terminal."""
    rows = [("audit", "attack", "δ", "claimed ε", "found ε ≥", "right guesses", "s", "verdict")]
    for title, result in results.items():
        rows.append(
            (
                title,
                result.attack,
                f"{result.delta:.1g}",
                f"{result.claimed:.2f}",
                f"{result.lower_bound:.2f}",
                f"{result.correct} of {result.guesses}",
                f"{result.seconds:.0f}",
                verdict(result),
            )
        )
    lines = _aligned(rows)
    levels = {f"{100 * result.confidence:.7g} %" for result in results.values()}
    lines += [
        "",
        f"Each bound holds with a confidence of {' or '.join(sorted(levels))}, by itself. A claim "
        "below it is refuted; one above it has",
        "withstood this attack, which is no proof.",
    ]
    return "\n".join(lines)


def checks_as_text(checks: Mapping[str, CheckResult]) -> str:
    """The checks for a terminal."""
    rows = [("check", "found", "p", "level", "verdict")]
    rows += [
        (title, each.found, f"{each.p_value:.2g}", f"{each.level:.2g}",
         "FAILED" if each.failed else "holds")
        for title, each in checks.items()
    ]  # fmt: skip
    lines = _aligned(rows)
    lines += ["", "A check fails where its p-value is at or below its level."]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def verdict(result: AuditResult) -> str:
    """What an audit says about its claim, in a few words."""
    said = "REFUTED" if result.caught else "stands"
    if result.face_value != result.claimed:
        face = "refuted" if result.face_value_caught else "not refuted"
        said += f"; at face value, ε = {result.face_value:.2f}: {face}"
    return said
