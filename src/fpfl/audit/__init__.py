"""Audits: attack the real pipeline with canary users, and bound its ε from below.

An accountant gives an upper bound of ε for the pipeline that was meant. An audit gives a lower
bound for the pipeline that there is. A claim below the lower bound is refuted; one above it has
withstood the attack. Beside the attacks there are checks, of what makes no guess surer: noise or
cohorts that depend on each other, numbers off the grid, a cap that is not applied.
"""

from fpfl.audit.attacks import (
    ATTACKS,
    CohortSize,
    GradientCanaries,
    HeavyUser,
    KeptModel,
    ShownMultipliers,
    SilentUser,
)
from fpfl.audit.audits import AuditResult, AuditSettings, audit
from fpfl.audit.checks import CHECKS, CheckResult, run_check
from fpfl.audit.setup import Attack, Scene, Seen, Setup, User
from fpfl.audit.statistics import (
    Bound,
    Guesses,
    lower_bound,
    one_run_p_value,
    run_by_run_p_value,
    surest,
)
from fpfl.audit.table import audit_table, default_settings, run_audit

__all__ = [
    "ATTACKS",
    "CHECKS",
    "Attack",
    "AuditResult",
    "AuditSettings",
    "Bound",
    "CheckResult",
    "CohortSize",
    "GradientCanaries",
    "Guesses",
    "HeavyUser",
    "KeptModel",
    "Scene",
    "Seen",
    "Setup",
    "ShownMultipliers",
    "SilentUser",
    "User",
    "audit",
    "audit_table",
    "default_settings",
    "lower_bound",
    "one_run_p_value",
    "run_audit",
    "run_by_run_p_value",
    "run_check",
    "surest",
]
