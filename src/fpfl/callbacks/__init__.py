"""Callbacks: whoever watches a training. `fpfl.server.events` says when they are called.

A callback of the command line is a class in a file of this folder that registers itself;
``fpfl train --watch NAME=VALUE`` finds it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar


@dataclass(frozen=True)
class Named:
    """A callback by name: ``make(value)`` makes one, where it takes a value."""

    name: str
    about: str
    make: Callable[..., Any]
    takes_value: bool


REGISTER: dict[str, Named] = {}
"""All of them by name, once `named` was asked."""

T = TypeVar("T", bound=Callable[..., Any])


def register(name: str, about: str, *, takes_value: bool = False) -> Callable[[T], T]:
    """Make a callback known by name; see `Named`."""

    def registered(make: T) -> T:
        REGISTER[name] = Named(name, about, make, takes_value)
        return make

    return registered


def named(words: str) -> Any:
    """The callback that NAME or NAME=VALUE asks for."""
    for found in iter_modules(__path__):
        import_module(f"{__name__}.{found.name}")
    name, given, value = words.partition("=")
    if name not in REGISTER:
        known = ", ".join(f"{n} ({each.about})" for n, each in sorted(REGISTER.items()))
        raise ValueError(f"there is no callback {name!r}; there are: {known}")
    entry = REGISTER[name]
    if bool(given) != entry.takes_value:
        how = f"{name}=VALUE" if entry.takes_value else name
        raise ValueError(f"the callback is given as {how}, and it was {words!r}")
    return entry.make(value) if entry.takes_value else entry.make()
