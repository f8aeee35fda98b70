"""When two models, methods or constraints do the same: what they are made of is compared.

Their text does not say it. A model may have an activation, a scale or a hook that it does not
print, and a tensor prints four digits. What cannot be looked into is alike to itself alone: the
price of a doubt is that a run is trained on its own.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, np.generic,
)  # fmt: skip
"""Values that their representation gives in full."""

_TRAINED = "trained"


def made_of(value: Any) -> Hashable:
    """What a value is made of: equal for two that do the same, but for trained parameters.

    It holds for as long as the values live, for some are known by being the same object.
    """
    return _Visit().of(value)


class _Visit:
    """One look at a value and what it is made of; what is met again is named by its number."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Hashable:
        if type(value) in _ATOMS or isinstance(value, np.generic):
            return type(value), repr(value)
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            return _itself(value)
        if type(value) in (tuple, torch.Size):
            return type(value), tuple(map(self.of, value))
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        # Kept, so that no other value gets its place in memory, and with it its name.
        self._seen[id(value)] = len(self._seen), value
        return self._inside(value)

    def _inside(self, value: Any) -> Hashable:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor | np.ndarray):
            return _numbers(value)
        if type(value) in (list, deque):
            return type(value), tuple(map(self.of, value))
        if isinstance(value, dict):
            items = tuple((self.of(name), self.of(each)) for name, each in value.items())
            return type(value), items, self.of(getattr(value, "__dict__", None))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType, self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return type(value), *map(self.of, (value.func, value.args, value.keywords))
        return self._object(value)

    def _module(self, module: nn.Module) -> Hashable:
        parameters = tuple(
            (name, self._parameter(each)) for name, each in module._parameters.items()
        )
        rest = {name: each for name, each in vars(module).items() if name != "_parameters"}
        return type(module), parameters, self.of(rest)

    def _parameter(self, parameter: nn.Parameter | None) -> Hashable:
        if parameter is None or not parameter.requires_grad:
            return self.of(parameter)
        known = id(parameter) in self._seen
        number, _ = self._seen.setdefault(id(parameter), (len(self._seen), parameter))
        return _TRAINED, known, number, tuple(parameter.shape), str(parameter.dtype)

    def _function(self, function: types.FunctionType) -> Hashable:
        cells = function.__closure__ or ()
        try:
            inside = tuple(self.of(cell.cell_contents) for cell in cells)
        except ValueError:  # a cell that is empty
            return _itself(function)
        given = map(self.of, (function.__defaults__, function.__kwdefaults__, vars(function)))
        return function.__code__, id(function.__globals__), inside, *given

    def _object(self, value: Any) -> Hashable:
        """Any other object, as ``pickle`` would take it apart."""
        try:
            taken = value.__reduce_ex__(4)
        except Exception:
            return _itself(value)
        if not isinstance(taken, tuple):
            return _itself(value)
        make, given, state, *rest = (*taken, None, None, None, None)[:5]
        items = [None if each is None else list(each) for each in rest]
        return type(value), *map(self.of, (make, given, state, *items))


def _itself(value: Any) -> Hashable:
    return "itself", id(value)


def _numbers(value: Tensor | np.ndarray[Any, Any]) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            return _itself(value)
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        about = (str(value.dtype), tuple(value.shape), str(value.device))
    elif value.dtype.hasobject:
        return _itself(value)
    else:
        plain, about = value, (value.dtype.str, value.shape, "")
    return type(value), about, hashlib.sha256(plain.tobytes()).hexdigest()
