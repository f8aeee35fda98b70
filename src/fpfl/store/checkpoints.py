"""Checkpoints: state in one safetensors file, which loads without running any code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpfl.store.files import write_whole
from fpfl.store.tree import decode, encode

FORMAT = 1


class DamagedError(ValueError):
    """A file of a run is not what was written."""


def save_checkpoint(path: Path, state: Any, text: str = "") -> None:
    """Write state (see `fpfl.store.tree` for what it may be) and a text, with their digest."""
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
