"""The gallery: its pages are what the scripts say, and the scripts run."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
LARGEST = 200_000  # bytes of a committed picture


@cache
def builder() -> ModuleType:
    """scripts/gallery.py."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "scripts" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gallery"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> str:
    return (GALLERY / f"{name}.py").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (GALLERY / f"{name}.md").read_text(encoding="utf-8")


def test_there_are_three() -> None:
    assert len(SCRIPTS) == 3


@pytest.mark.parametrize("name", SCRIPTS)
def test_pages_say_what_the_scripts_say(name: str) -> None:
    """Text and code, cell by cell; what was printed and drawn stands between."""
    cells = builder().cells(script(name))
    assert builder().code_of(page(name)) == [cell.text for cell in cells if cell.code]
    place = 0
    for cell in cells:
        found = page(name).find(cell.text, place)
        assert found >= 0, f"run scripts/gallery.py {name}; the page lacks: {cell.text[:60]}"
        place = found + len(cell.text)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scripts_run_and_draw_the_pages_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In quick mode: a few rounds, which show nothing but that every line runs."""
    mpl.use("agg")
    monkeypatch.setenv("FPFL_QUICK", "1")
    monkeypatch.setenv("FPFL_PICTURES", str(tmp_path))
    exec(compile(script(name), f"{name}.py", "exec"), {"__name__": "__main__"})
    drawn = {path.name for path in tmp_path.glob("*.png")}
    shown = dict(re.findall(r"!\[([^\]]+)\]\(images/([^)]+)\)", page(name)))
    assert drawn == set(shown.values())
    for words, picture in shown.items():
        with Image.open(tmp_path / picture) as new:
            assert new.info["Description"] == words


def test_pictures_are_small_and_shown() -> None:
    pictures = {path.name for path in (GALLERY / "images").glob("*")}
    shown = {name for s in SCRIPTS for name in re.findall(r"\(images/([^)]+)\)", page(s))}
    assert pictures == shown
    for name in pictures:
        path = GALLERY / "images" / name
        assert path.stat().st_size < LARGEST
        with Image.open(path) as picture:
            assert picture.mode == "P", f"{name} has no palette; run scripts/gallery.py"


def test_a_script_that_does_not_begin_with_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with a line"):
        builder().cells("import os\n# %%\n")
