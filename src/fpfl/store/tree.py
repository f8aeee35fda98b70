"""Nested state as plain JSON and a list of tensors, and back: nothing that could run code.

Known are tensors, numbers, strings, None, lists, tuples, dictionaries, and dataclasses of a given
list. Whatever else is refused when it is written, not when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

# A float that JSON has no word for.
_ODD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Write a value as JSON; its tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, float) and (value != value or value in _ODD.values()):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        # Fields that the class makes itself are not given back to it.
        content = {f.name: encode(getattr(value, f.name), tensors) for f in fields(value) if f.init}
        return {"class": type(value).__name__, "fields": content}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    raise ValueError(
        f"a checkpoint cannot hold a {type(value).__name__} ({value!r}); it knows tensors, "
        "numbers, strings, lists, dictionaries and the server's own classes"
    )


def decode(tree: Any, tensors: list[Tensor], classes: Mapping[str, type]) -> Any:
    """The value that `encode` wrote; ``classes`` are the dataclasses that may appear."""
    if isinstance(tree, list):
        return [decode(item, tensors, classes) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "float" in tree:
        return _ODD[tree["float"]]
    if "tuple" in tree:
        return tuple(decode(item, tensors, classes) for item in tree["tuple"])
    if "dict" in tree:
        pairs = tree["dict"]
        return {decode(k, tensors, classes): decode(v, tensors, classes) for k, v in pairs}
    content = {name: decode(item, tensors, classes) for name, item in tree["fields"].items()}
    return classes[tree["class"]](**content)
