"""Grids: every combination of some settings' values, and the names that settings have."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any

from fpfl.methods import Method
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.training.session import train
from fpfl.training.spec import chosen_method

OWN = ("model", "data", "seed")
"""What a run has besides keywords of `fpfl.train`: names of a model and of a population."""

BESIDES = ("folder", "ledger", "callbacks", "memory")
"""What belongs to one training alone, or to the whole sweep."""

NESTED = ("privacy", "method", "constraint", "local", "clip")
"""Settings that have settings of their own."""


def keywords() -> tuple[str, ...]:
    """The keywords of `fpfl.train` that a run of a sweep may have."""
    names = list(inspect.signature(train).parameters)[2:]
    return tuple(name for name in names if name not in BESIDES)


def grid(**values: Any) -> list[dict[str, Any]]:
    """Every combination of the given values: the runs of a sweep.

    Parameters
    ----------
    **values
        For each setting an iterable of its values; one value alone (a number, a word, an object)
        stands for itself. The last setting varies fastest. Settings are called as `fpfl.train`
        calls them: ``learning_rate``, ``cohort``, ``rounds``, ``seed``, ``clip``, ``method``,
        ``privacy`` and so on; ``model`` and ``data`` are names of what the sweep was given.
        What is inside another setting is called by both names with a dot, in Python with two
        underscores: ``privacy__epsilon`` is ``"privacy.epsilon"``. There are ``privacy.…``
        (``epsilon``, ``noise_multiplier``, ``delta``, ``clip``, ``clip.bound``, ``clip.counts``,
        ...), ``method.…`` (any field of the method: ``damping``, ``multiplier_lr``, ``tolerance``,
        ...), ``constraint.tolerance``, ``local.steps``, ``local.learning_rate`` and, without noise,
        ``clip.bound`` and its like.

    Returns
    -------
    list of dict
        One dict a run, by the settings' names.

    Examples
    --------
    >>> import fpfl
    >>> runs = fpfl.grid(learning_rate=[0.1, 0.3], privacy__epsilon=[1, 2], seed=range(3))
    >>> len(runs), runs[0]
    (12, {'learning_rate': 0.1, 'privacy.epsilon': 1, 'seed': 0})
    """
    axes: dict[str, list[Any]] = {}
    for given, found in values.items():
        name = setting_name(given)
        if name in axes:
            raise ValueError(f"{name} was given twice; give all its values once")
        many = isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping)
        axes[name] = [plain_number(each) for each in found] if many else [plain_number(found)]
        if not axes[name]:
            raise ValueError(f"{name} has no values; give at least one, or leave it out")
    return [dict(zip(axes, each, strict=True)) for each in product(*axes.values())]


def setting_name(given: str) -> str:
    """The name of a setting with a dot, as it is known; ValueError for one that is none."""
    if not isinstance(given, str):
        raise ValueError(f"a setting is called {given!r}; expected a name like 'privacy.epsilon'")
    name = given.replace("__", ".")
    top, _, rest = name.partition(".")
    known = (*OWN, *keywords())
    if rest and top in NESTED:
        return name
    if not rest and top in known:
        return name
    inside = [f"{outer}.{field.name}" for outer, kind in (("privacy", Privacy), ("clip", Clipping))
              for field in fields(kind)]  # fmt: skip
    inside += ["constraint.tolerance", "method.damping", "method.multiplier_lr", "local.steps"]
    near = [each for each in inside if each.endswith(f".{name}")]
    near += difflib.get_close_matches(name, [*known, *inside], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if top in BESIDES:
        hint = f" {top} is for the whole sweep: give fpfl.sweep(..., {top}=...)."
    raise ValueError(
        f"a run of a sweep has no setting {given!r}.{hint} There are {', '.join(known)}, and "
        f"settings inside {', '.join(NESTED)}, e.g. 'privacy.epsilon'"
    )


def plain_number(value: Any) -> Any:
    """A NumPy number as Python's own, which is what files hold; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def with_settings(common: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `fpfl.train` of one run: the common ones, with what the run sets otherwise.

    Whole settings come first, then what is inside them, the outer before the inner.
    """
    made = dict(common)
    for name in sorted(run, key=lambda each: each.count(".")):
        if name in ("model", "data"):
            continue
        top, *path = name.split(".")
        if not path:
            made[top] = run[name]
            continue
        if top == "method" and made.get("method") is None:
            made["method"] = _usual_method(made)
        made[top] = _changed(made.get(top), path, run[name], name, top)
    return made


def _usual_method(made: Mapping[str, Any]) -> Method | None:
    constraint = made.get("constraint")
    return None if constraint is None else chosen_method(None, constraint)


def _changed(whole: Any, path: list[str], value: Any, name: str, outer: str) -> Any:
    """A setting with one of its own settings changed."""
    inner, *deeper = path
    if outer.endswith("clip") and isinstance(whole, int | float):
        if path == ["bound"]:
            return value
        whole = Clipping(float(whole))
    if whole is None and outer == "privacy" and path in (["epsilon"], ["noise_multiplier"]):
        return Privacy(**{inner: value})
    if not is_dataclass(whole) or isinstance(whole, type):
        raise ValueError(
            f"{name} = {value!r} was given, and {outer} is {whole!r}, which has no {inner}; give "
            f"{outer}= for all runs (fpfl.sweep(..., {outer}=...)), or in the run itself"
        )
    known = [field.name for field in fields(whole) if field.init]
    if inner not in known:
        raise ValueError(
            f"{name} = {value!r} was given, and {type(whole).__name__} has no {inner!r}; it has "
            f"{', '.join(known)}"
        )
    if deeper:
        value = _changed(getattr(whole, inner), deeper, value, name, f"{outer}.{inner}")
    changes = {inner: value}
    other = {"epsilon": "noise_multiplier", "noise_multiplier": "epsilon"}.get(inner)
    if isinstance(whole, Privacy) and other is not None and value is not None:
        changes[other] = None  # one of the two, and this is the one that is asked for
    return replace(whole, **changes)
