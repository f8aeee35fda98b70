"""Fingerprints of data, settings and code.

A seeded simulation that is resumed draws the noise that it drew before. The same noise on other
data, or by other code, would reveal the difference, so it goes on only where all three agree.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fpfl.data.federated import FederatedDataset

_PIECES, _PIECE = 1024, 4096


def data_fingerprint(data: FederatedDataset) -> str:
    """A digest of a population: of every number in memory, of files of evenly spaced pieces.

    A population on disk may be larger than memory: a change between the pieces (1,024 of 4 KiB, the
    first and the last bytes among them) is not seen.
    """
    digest = hashlib.sha256(json.dumps(data.schema.as_dict(), sort_keys=True).encode())
    for tensor in (data.features, data.labels, data.attributes, data.offsets):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        content = _bytes(tensor)
        step = max(len(content) // _PIECES, _PIECE) if data.lazy else len(content)
        for start in range(0, len(content), max(step, 1)):
            digest.update(content[start : start + (_PIECE if data.lazy else step)])
        digest.update(content[-_PIECE:])
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """A digest of what a model computes apart from its trainable parameters.

    Its layers, its buffers and frozen parameters, and the source of layers that are not torch's.
    """
    digest = hashlib.sha256(repr(model).encode())
    for kind in sorted({type(m) for m in model.modules()}, key=lambda k: k.__qualname__):
        digest.update(kind.__qualname__.encode())
        if not kind.__module__.startswith("torch."):
            digest.update(_source(kind))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if name not in trained:
            digest.update(_bytes(value))
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """A digest of a model with all its parameters, the initial ones."""
    digest = hashlib.sha256(model_fingerprint(model).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    return digest.hexdigest()


def code_fingerprint(*others: Any) -> str:
    """A digest of fpfl's own source, of the packages that compute, and of given functions."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    for package in ("torch", "numpy"):
        digest.update(f"{package} {metadata.version(package)}".encode())
    for other in others:
        digest.update(_source(other))
    return digest.hexdigest()


def settings_fingerprint(settings: dict[str, Any]) -> str:
    """A digest of plain settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """The machine and the packages that a run is computed with."""
    packages = {}
    for package in ("fpfl", "torch", "numpy", "dp-accounting", "safetensors"):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "packages": packages,
    }


def _bytes(tensor: Tensor) -> memoryview:
    array = tensor.detach().cpu().contiguous()
    if not array.numel():
        return memoryview(b"")
    return array.flatten().view(torch.uint8).numpy().data


def _source(thing: Any) -> bytes:
    """The source of a class or function where it can be read, otherwise what names it."""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return code.co_code if code is not None else type(thing).__qualname__.encode()
