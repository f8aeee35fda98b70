"""Folders that are there with all their files or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fpfl.store.files import StorageError, write_folder

FILES = {"a.json": b"1", "b.bin": b"\x00" * 9}


def test_all_files_are_there_and_what_a_crash_left_is_not(tmp_path: Path) -> None:
    (tmp_path / ".run.part").mkdir()
    (tmp_path / ".run.part" / "old").write_bytes(b"")
    write_folder(tmp_path / "run", FILES)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("what", ["fsync", "replace"])
def test_a_failing_disk_leaves_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, what, fail)
    with pytest.raises(StorageError, match=r"Nothing was written; free space"):
        write_folder(tmp_path / "run", FILES)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", FILES)
    with pytest.raises(StorageError):
        write_folder(tmp_path / "run", {"c": b""})
    assert {p.name for p in (tmp_path / "run").iterdir()} == set(FILES)
