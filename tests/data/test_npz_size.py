"""An archive of a few kilobytes that unpacks to more than there is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fpfl.config.data import _load_file
from fpfl.config.sections import SchemaConfig


def test_an_archive_that_unpacks_to_more_than_the_memory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, features=np.zeros((1000, 1000)), labels=np.zeros(1000, dtype=int))
    assert path.stat().st_size < 20_000
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}  # a machine of 4 MB
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="give a population folder"):
        _load_file(path, SchemaConfig(), None)
