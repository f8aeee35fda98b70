"""Checkpoints: nested state in one safetensors file, which loads without running any code.

State is plain JSON and a list of tensors. Known are tensors, numbers, strings, None, lists, tuples,
dictionaries, and dataclasses of a given list. Whatever else is refused when it is written, not when
it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpfl.store.files import write_whole

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


FORMAT = 1


class DamagedError(ValueError):
    """A file of a run is not what was written."""


def save_checkpoint(path: Path, state: Any, text: str = "") -> None:
    """Write state (this module says what it may be) and a text, with their digest."""
    from safetensors.torch import save

    tensors: list[Tensor] = []
    tree = json.dumps(encode(state, tensors))
    plain = {str(i): t.detach().cpu().contiguous().clone() for i, t in enumerate(tensors)}
    about = {"format": str(FORMAT), "state": tree, "text": text}
    about["digest"] = _digest(tree + text, plain)
    write_whole(path, save(plain, about))


def load_checkpoint(path: Path, classes: Mapping[str, type]) -> tuple[Any, str]:
    """The state and the text of a checkpoint; one that is not whole is an error, not repaired."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise DamagedError(_damaged(path, str(error))) from error
    form = about.get("format", "")
    if not (form.isascii() and form.isdecimal() and len(form) < 9):
        raise DamagedError(_damaged(path, "it has no format of fpfl"))
    if int(form) > FORMAT:
        raise ValueError(
            f"{path} was written by a newer fpfl (format {form}; this one reads up to "
            f"{FORMAT}): upgrade fpfl to read it"
        )
    text = about.get("text", "")
    if about.get("digest") != _digest(about.get("state", "") + text, tensors):
        raise DamagedError(_damaged(path, "its content does not go with its digest"))
    try:
        ordered = [tensors[str(i)] for i in range(len(tensors))]
        return decode(json.loads(about["state"]), ordered, classes), text
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(_damaged(path, f"its state cannot be read ({error!r})")) from error


def _digest(tree: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> str:
    return (
        f"{path} is damaged: {why}. Nothing was changed. Put an intact copy in its place; or move "
        "it away, and the run resumes from the checkpoint before it and the totals logged since"
    )
