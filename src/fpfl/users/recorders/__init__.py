"""Recorders of layers: one file a kind of layer, found by looking into this folder."""

from importlib import import_module
from pkgutil import iter_modules

from fpfl.users.layers import REGISTER

for _found in iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")

__all__ = ["REGISTER"]
