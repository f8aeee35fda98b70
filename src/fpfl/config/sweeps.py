"""A sweep written down as TOML: a config, and under ``[sweep]`` what its runs have otherwise.

Every run is a config of its own, with some keys replaced, and is checked as one: a mistake is named
by its key, and by the run that has it.
"""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from fpfl.config.files import checked_version, one_line
from fpfl.config.sections import (
    Config,
    ConstraintConfig,
    MethodConfig,
    Number,
    Whole,
    _Section,
)

_COMMON = {
    "data": "all runs of a sweep are on one population; write a config for each",
    "sweep": "a sweep has no sweeps",
    "version": "it belongs to the file",
    "training.device": "all runs are computed on one device",
    "training.memory": "it is for all runs together",
    "training.checkpoint_every": "runs of a sweep have no checkpoints",
    "privacy.ledger": "all runs of a sweep are charged to one ledger",
}
"""Keys that all runs have in common, and why."""

MOST_RUNS = 100_000
"""More are refused as a likely typo, before any of them is made."""


class SweepConfig(_Section):
    """What the runs of a sweep have otherwise than the rest of the file.

    ``held_out`` is the share of users to choose by (0: nobody), or a file of others, ``seeds``
    how many seeds each setting has, ``tolerance`` the α to choose by (the constraint's own, where
    it is left out). ``grid`` has for each key of the config a list of values, ``runs`` for each run
    a table of keys.
    """

    held_out: Annotated[Number, Field(ge=0.0, lt=1.0)] | Path = 0.25
    seeds: Annotated[Whole, Field(ge=1)] | None = None
    tolerance: Annotated[Number, Field(ge=0.0, lt=1.0)] | None = None
    grid: dict[str, Any] | None = None
    runs: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class SweepFile:
    """A sweep as a file says it.

    Parameters
    ----------
    sweep
        The ``[sweep]`` section.
    configs
        For every run its whole config.
    settings
        For every run what it has otherwise, by the keys' names.
    constraint
        The file's own ``[constraint]``, which held-out users' gaps are judged by.
    seed
        Of the partition and of who is held out: the file's own.
    """

    sweep: SweepConfig
    configs: tuple[Config, ...]
    settings: tuple[dict[str, Any], ...]
    constraint: ConstraintConfig | None
    seed: int

    @property
    def held_out(self) -> float | Path | None:
        """The share of users that is held out, or where others are; None for nobody."""
        return self.sweep.held_out or None


def load_sweep(path: str | Path) -> SweepFile:
    """Read a sweep; a ValueError of one line says what is wrong with it, and where."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"there is no {path}; docs/config.md says how to write a sweep") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return sweep_of(text, path)


def sweep_of(text: str, where: str | Path) -> SweepFile:
    """The sweep of a text; ``where`` says in errors whose it is."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not a TOML file: {error}") from error
    checked_version(content, where)
    if "sweep" not in content:
        raise ValueError(
            f"{where} has no [sweep] section, so it is one training: fpfl train {where} --out RUN. "
            "For a sweep add e.g. [sweep.grid] with training.learning_rate = [0.1, 0.3]"
        )
    base = {name: value for name, value in content.items() if name != "sweep"}
    try:
        section = SweepConfig.model_validate(content["sweep"])
    except ValidationError as error:
        raise ValueError(f"{where}: {one_line(error, 'sweep')}") from error
    training = base.get("training")
    given = training.get("seed") if isinstance(training, dict) else None
    seed = given if isinstance(given, int) else 0
    settings = [*_settings(section, seed, where)]
    configs = [
        _config(base, own, f"{where}, run {number} of the sweep")
        for number, own in enumerate(settings)
    ]
    if any(config.training.reference for config in configs):
        raise ValueError(
            f"{where}: training.reference = true is for one training, and a sweep has many; leave "
            "it out, or put a run without a constraint into the sweep"
        )
    names = dict.fromkeys(name for own in settings for name in own)
    full = [
        {name: own.get(name, _in_effect(config, name)) for name in names}
        for config, own in zip(configs, settings, strict=True)
    ]
    return SweepFile(section, tuple(configs), tuple(full), _constraint(base), seed)


def _constraint(base: Mapping[str, Any]) -> ConstraintConfig | None:
    """The file's own; None where it is whole only with what runs add to it."""
    try:
        return ConstraintConfig.model_validate(base["constraint"])
    except (KeyError, ValidationError):
        return None


def _in_effect(config: Config, name: str) -> Any:
    """A key's value in a run that does not set it."""
    value: Any = config
    for part in name.split("."):
        value = value.settings if isinstance(value, MethodConfig) and part != "kind" else value
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.model_dump() if isinstance(value, BaseModel) else value


def _settings(section: SweepConfig, seed: int, where: str | Path) -> Iterator[dict[str, Any]]:
    if (section.grid is None) == (section.runs is None) and section.grid is not None:
        raise ValueError(f"{where}: sweep has both grid and runs; give one of them")
    if section.grid is None and section.runs is None and section.seeds is None:
        raise ValueError(
            f"{where}: sweep says nothing of its runs; give [sweep.grid] with lists of values, "
            "[[sweep.runs]], or seeds"
        )
    runs = [dict[str, Any]()]
    if section.grid is not None:
        axes = dict(_flat(section.grid))
        for name, values in axes.items():
            if not isinstance(values, list) or not values:
                raise ValueError(
                    f"{where}: sweep.grid: {name} is {values!r}; expected a list of values"
                )
        many = math.prod(len(values) for values in axes.values())
        _check_number(many * (section.seeds or 1), where)
        runs = [dict(zip(axes, each, strict=True)) for each in product(*axes.values())]
    elif section.runs is not None:
        runs = [dict(_flat(run)) for run in section.runs]
        if not runs:
            raise ValueError(f"{where}: sweep.runs is empty; give at least one [[sweep.runs]]")
    _check_number(len(runs) * (section.seeds or 1), where)
    seeded = any("training.seed" in run for run in runs)
    if seeded and section.seeds is not None:
        raise ValueError(
            f"{where}: sweep has seeds = {section.seeds}, and its runs have training.seed of their "
            "own; give one of the two"
        )
    for run in runs:
        for name in run:
            _check_own(name, where)
        for each in range(section.seeds or 1):
            yield run if seeded else run | {"training.seed": seed + each}


def _check_number(many: int, where: str | Path) -> None:
    if many > MOST_RUNS:
        raise ValueError(
            f"{where}: sweep has {many:,} runs, and may have {MOST_RUNS:,}; give fewer values or "
            "seeds"
        )


def _check_own(name: str, where: str | Path) -> None:
    for common, why in _COMMON.items():
        if name == common or name.startswith(f"{common}."):
            raise ValueError(f"{where}: sweep: {name} cannot differ between runs: {why}")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, whether they were quoted or not."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _config(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Config:
    content = copy.deepcopy(dict(base))
    for name, value in own.items():
        _put(content, name.split("."), value)
    said = ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in own.items())
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{where} ({said}): {one_line(error)}") from error


_EITHER = {"epsilon": "noise_multiplier", "noise_multiplier": "epsilon"}


def _put(content: dict[str, Any], path: list[str], value: Any) -> None:
    *outer, last = path
    for name in outer:
        inner = content.get(name)
        if not isinstance(inner, dict):
            # A clip bound alone is the bound of the section that takes its place.
            inner = {"bound": inner} if name == "clip" and isinstance(inner, int | float) else {}
            content[name] = inner
        content = inner
    if path[0] == "privacy" and last in _EITHER:
        content.pop(_EITHER[last], None)
    content[last] = value
