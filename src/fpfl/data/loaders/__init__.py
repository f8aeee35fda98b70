"""Data sets that configs know by name: ``[data] name = "adult"``.

One file of this folder a data set: a function that gives the people to train on and to test on,
with settings of its own as keyword arguments. It registers itself, and configs read the register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar, get_type_hints

Range = tuple[float, float]


@dataclass(frozen=True)
class Loader:
    """A data set by name.

    ``load(seed=..., **settings)`` gives (training, test); the seed is for dealing samples to
    made-up users. ``ranges(settings)`` are the public ranges that features were scaled by, by name.
    """

    name: str
    load: Callable[..., tuple[Any, Any]]
    ranges: Callable[[Mapping[str, Any]], Mapping[str, Range]]

    @property
    def settings(self) -> dict[str, Any]:
        """The types of its settings by name."""
        hints = get_type_hints(self.load)
        return {name: hints[name] for name in hints if name not in ("seed", "return")}


REGISTER: dict[str, Loader] = {}
"""All of them, by name."""

T = TypeVar("T", bound=Callable[..., tuple[Any, Any]])


def loader(
    name: str, ranges: Callable[[Mapping[str, Any]], Mapping[str, Range]] = lambda settings: {}
) -> Callable[[T], T]:
    """Make a data set known by name; see `Loader`."""

    def registered(load: T) -> T:
        REGISTER[name] = Loader(name, load, ranges)
        return load

    return registered


for _found in iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")
