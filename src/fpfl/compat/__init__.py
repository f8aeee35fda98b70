"""Old names: where the modules of earlier versions are now, and what fields are called now.

Code, pickles and logs of 0.1.0 name modules that were moved. Importing one of them gives the module
that has its names now. `scripts/move_modules.py` works from the same table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

MOVED = {
    "fpfl.arguments": "fpfl.training.spec",
    "fpfl.audit.auditing": "fpfl.audit.audits",
    "fpfl.audit.scenes": "fpfl.audit.setup",
    "fpfl.begun": "fpfl.runs.resume",
    "fpfl.cli_ask": "fpfl.cli.table",
    "fpfl.cli_data": "fpfl.cli.data",
    "fpfl.cli_export": "fpfl.cli.export",
    "fpfl.cli_federation": "fpfl.cli.federation",
    "fpfl.cli_options": "fpfl.cli.options",
    "fpfl.cli_plan": "fpfl.cli.plan",
    "fpfl.cli_report": "fpfl.cli.export",
    "fpfl.cli_runs": "fpfl.cli.runs",
    "fpfl.cli_table": "fpfl.cli.table",
    "fpfl.cli_train": "fpfl.cli.train",
    "fpfl.conducting": "fpfl.training.session",
    "fpfl.config_data": "fpfl.config.data",
    "fpfl.config_sections": "fpfl.config.sections",
    "fpfl.data._checks": "fpfl.data.checks",
    "fpfl.data.femnist.bundled": "fpfl.data.femnist.finding",
    "fpfl.data.femnist.compacting": "fpfl.data.femnist.compact",
    "fpfl.data.femnist.features": "fpfl.data.femnist.unfair",
    "fpfl.data.femnist.population": "fpfl.data.femnist.unfair",
    "fpfl.data.merging": "fpfl.data.federated",
    "fpfl.data.scaling": "fpfl.data.schema",
    "fpfl.data.table_declared": "fpfl.data.table_schema",
    "fpfl.data.toml": "fpfl.data.table_schema",
    "fpfl.data.writer": "fpfl.data.files",
    "fpfl.estimator_base": "fpfl.estimator.base",
    "fpfl.estimator_data": "fpfl.estimator.data",
    "fpfl.estimator_settings": "fpfl.training.defaults",
    "fpfl.experiments.ablation": "fpfl.experiments.adult",
    "fpfl.experiments.accounts": "fpfl.experiments.markdown",
    "fpfl.experiments.kept": "fpfl.experiments.runner",
    "fpfl.experiments.options": "fpfl.experiments.tables",
    "fpfl.exporting.verifying": "fpfl.exporting.export",
    "fpfl.exporting.writing": "fpfl.exporting.export",
    "fpfl.fairness._checks": "fpfl.fairness.gaps",
    "fpfl.fairness.bootstrap": "fpfl.fairness.gaps",
    "fpfl.fairness.measure": "fpfl.fairness.gaps",
    "fpfl.fairness.weights": "fpfl.fairness.totals",
    "fpfl.federation.contributing": "fpfl.federation.contribution",
    "fpfl.federation.federating": "fpfl.federation.rounds",
    "fpfl.federation.flower.courier": "fpfl.federation.flower.server",
    "fpfl.federation.keys": "fpfl.federation.enrolment",
    "fpfl.federation.secagg.answers": "fpfl.federation.secagg.server",
    "fpfl.federation.secagg.recovery": "fpfl.federation.secagg.shamir",
    "fpfl.federation.secagg.reveal": "fpfl.federation.secagg.client",
    "fpfl.federation.secagg.roster": "fpfl.federation.secagg.server",
    "fpfl.fingerprint": "fpfl.runs.fingerprints",
    "fpfl.folder": "fpfl.runs.folder",
    "fpfl.heldout.cells": "fpfl.heldout.estimates",
    "fpfl.heldout.counting": "fpfl.heldout.plan",
    "fpfl.heldout.evaluate": "fpfl.heldout.evaluation",
    "fpfl.heldout.words": "fpfl.heldout.result",
    "fpfl.interrupting": "fpfl.callbacks.interrupt",
    "fpfl.keeping": "fpfl.runs.resume",
    "fpfl.models": "fpfl.training.models",
    "fpfl.planning.choosing": "fpfl.planning.plan",
    "fpfl.planning.figures": "fpfl.planning.question",
    "fpfl.planning.levers": "fpfl.planning.plan",
    "fpfl.planning.result": "fpfl.planning.plan",
    "fpfl.privacy._checks": "fpfl.numerics.checks",
    "fpfl.privacy.aggregation": "fpfl.privacy.assumptions",
    "fpfl.privacy.charges": "fpfl.privacy.budget",
    "fpfl.privacy.ledger": "fpfl.runs.ledger",
    "fpfl.privacy.population": "fpfl.privacy.budget",
    "fpfl.privacy.remarks": "fpfl.privacy.assumptions",
    "fpfl.privacy.rules": "fpfl.privacy.conventions",
    "fpfl.privacy.server": "fpfl.privacy.filter",
    "fpfl.privacy.shares": "fpfl.privacy.renyi",
    "fpfl.privacy.table": "fpfl.privacy.plan",
    "fpfl.privacy.terms": "fpfl.privacy.filter",
    "fpfl.randomness": "fpfl.numerics.randomness",
    "fpfl.report.comparing": "fpfl.report.comparability",
    "fpfl.report.described": "fpfl.report.facts",
    "fpfl.report.evaluated": "fpfl.report.evaluations",
    "fpfl.report.explaining": "fpfl.callbacks.explain",
    "fpfl.report.judging": "fpfl.report.comparability",
    "fpfl.report.markdown": "fpfl.report.card",
    "fpfl.report.noisecharts": "fpfl.report.runcharts",
    "fpfl.report.plots": "fpfl.experiments.demo",
    "fpfl.report.progress": "fpfl.callbacks.progress",
    "fpfl.report.released": "fpfl.callbacks.progress",
    "fpfl.report.shapes": "fpfl.report.evaluations",
    "fpfl.report.tables": "fpfl.report.sections",
    "fpfl.report.tracking": "fpfl.callbacks.tracking",
    "fpfl.report.uncompared": "fpfl.report.comparability",
    "fpfl.report.unfinished": "fpfl.report.reading",
    "fpfl.run": "fpfl.training.run",
    "fpfl.server.ahead": "fpfl.server.simulation",
    "fpfl.server.journal": "fpfl.runs.journal",
    "fpfl.server.round": "fpfl.server.loop",
    "fpfl.server.watching": "fpfl.server.events",
    "fpfl.server.withdrawals": "fpfl.runs.journal",
    "fpfl.store.locks": "fpfl.store.files",
    "fpfl.store.syncing": "fpfl.store.files",
    "fpfl.store.tree": "fpfl.store.checkpoints",
    "fpfl.suggesting": "fpfl.training.defaults",
    "fpfl.summing": "fpfl.numerics.summing",
    "fpfl.thirdparty": "fpfl.aggregation",
    "fpfl.thirdparty.clipping": "fpfl.aggregation.clipping",
    "fpfl.thirdparty.discrete": "fpfl.aggregation.noise",
    "fpfl.thirdparty.encoding": "fpfl.aggregation.encoding",
    "fpfl.thirdparty.noise": "fpfl.aggregation.noise",
    "fpfl.thirdparty.sums": "fpfl.aggregation.sums",
    "fpfl.users.choice": "fpfl.users.dispatch",
    "fpfl.users.convolutions": "fpfl.users.recorders.convolutions",
    "fpfl.users.company": "fpfl.users.isolation",
}
"""Modules of 0.1.0, and which one of today has their names."""

_METHOD = {"rate": "multiplier_lr"}
FIELDS = {
    "MMDM": _METHOD,
    "BMDM": _METHOD,
    "Tran": _METHOD,
    "OneGradient": _METHOD | {"memory": "decay", "standin": "surrogate"},
    "Rate": {"standin": "surrogate"},
}
"""Fields of 0.1.0 by class (or maker), and what they are called today."""

LATER = ("adapts", "measurement", "patience")
"""Fields that came after 0.1.0. Where they are not used, files and fingerprints are as before."""


class OldPaths(MetaPathFinder, Loader):
    """Finds moved modules; what it gives is the module of today itself, so classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old path, None for any other."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of today."""
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run again; the module keeps the spec that the import system took from it."""
        spec = module.__spec__
        assert spec is not None  # the one that `create_module` was given
        module.__spec__ = spec.loader_state


def install() -> None:
    """Have old paths found, before others look into a moved package's folder once more."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())


def todays(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a class (or maker) by the names that they have today."""
    names = FIELDS.get(name, {})
    twice = [old for old, new in names.items() if old in values and new in values]
    if twice:
        raise TypeError(f"{name} was given {twice[0]} and {names[twice[0]]}, its name today: one")
    return {names.get(key, key): value for key, value in values.items()}


def written(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a class by the names that files and fingerprints have: those of 0.1.0.

    Versions can read each other's, and resume or agree by comparing them.
    """
    names = {new: old for old, new in FIELDS.get(name, {}).items()}
    return {names.get(key, key): value for key, value in values.items()}


def as_before(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings without those that came after 0.1.0 and are not used."""
    return {name: value for name, value in pairs if name not in LATER or value is not None}


def formerly(made: T) -> T:
    """Let a dataclass, or a function that makes one, be given fields by their old names, too."""
    thing: Any = made
    name, is_class = thing.__name__, isinstance(made, type)
    make = thing.__init__ if is_class else thing

    @wraps(make)
    def called(*positional: Any, **given: Any) -> Any:
        return make(*positional, **todays(name, given))

    if not is_class:
        return called  # type: ignore[return-value]
    thing.__init__ = called
    # As pickles of 0.1.0 have them.
    thing.__setstate__ = lambda self, state: self.__dict__.update(todays(name, state))
    for old, new in FIELDS[name].items():
        setattr(thing, old, property(attrgetter(new)))
    return made
