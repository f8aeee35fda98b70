"""Build the gallery: run the scripts of docs/gallery, and write what they say and draw as pages.

``python scripts/gallery.py [NAME ...]`` runs each script, cell by cell, and writes
``docs/gallery/NAME.md`` with its text, its code, what it printed and its pictures. Without a name:
all of them. A test compares the pages' code with the scripts'.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
sys.path.insert(0, str(ROOT / "src"))

_MARK = re.compile(r"^# %%(.*)$", re.M)


@dataclass(frozen=True)
class Cell:
    """A part of a script between two ``# %%`` lines: text, or code."""

    text: str
    code: bool


def names() -> list[str]:
    """The gallery's scripts."""
    return sorted(path.stem for path in GALLERY.glob("*.py"))


def cells(script: str) -> list[Cell]:
    """Take a script apart; the text of ``[markdown]`` cells comes without its comment signs."""
    parts = _MARK.split(script)
    if parts[0].strip():
        raise ValueError(f"a script begins with a line '# %%'; this one with {parts[0][:40]!r}")
    found = []
    for kind, body in zip(parts[1::2], parts[2::2], strict=True):
        if kind.strip() == "[markdown]":
            lines = (line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            found.append(Cell("\n".join(lines), code=False))
        else:
            found.append(Cell(body.strip(), code=True))
    return found


def code_of(page: str) -> list[str]:
    """The code of a page, block by block."""
    return [block.strip() for block in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)]


def build(name: str) -> Path:
    """Run one script and write its page and pictures."""
    path = GALLERY / f"{name}.py"
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder)
        page = _run(path, pictures)
        for picture in sorted(pictures.glob("*.png")):
            _compress(picture, GALLERY / "images" / picture.name)
    about = _about(time.process_time() - began)
    text = f"{page}\n---\n\n`python scripts/gallery.py {name}`, {about}\n"
    target = GALLERY / f"{name}.md"
    target.write_text(text, encoding="utf-8")
    return target


def _run(path: Path, pictures: Path) -> str:
    """Execute the cells, one after the other in one namespace, and write them down."""
    import matplotlib as mpl

    mpl.use("agg")
    os.environ["FPFL_PICTURES"] = str(pictures)
    os.environ.pop("FPFL_QUICK", None)
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    lines: list[str] = []
    drawn: set[str] = set()
    for cell in cells(path.read_text(encoding="utf-8")):
        if not cell.code:
            lines += [cell.text, ""]
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(cell.text, str(path), "exec"), space)
        lines += ["```python", cell.text, "```", ""]
        if out.getvalue().strip():
            lines += ["```text", out.getvalue().rstrip(), "```", ""]
        new = sorted({p.name for p in pictures.glob("*.png")} - drawn)
        drawn |= set(new)
        for picture in new:
            lines += [f"![{_described(pictures / picture)}](images/{picture})", ""]
    return "\n".join(lines)


def _described(path: Path) -> str:
    """What a picture says of itself, for those who do not see it."""
    from PIL import Image

    with Image.open(path) as picture:
        words = picture.info.get("Description")
    if not words:
        raise ValueError(
            f"{path.name} has no description; savefig(..., metadata={{'Description'}})"
        )
    return str(words)


def _compress(source: Path, target: Path) -> None:
    """Write a picture with a palette of colours: a quarter of the size, and hardly a difference."""
    from PIL import Image

    target.parent.mkdir(exist_ok=True)
    small = source.with_suffix(".palette")
    with Image.open(source) as picture:
        few = picture.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT)
        few.save(small, format="PNG", optimize=True)
    shutil.copyfile(small, target)


def _about(seconds: float) -> str:
    from fpfl.experiments.runner import about_this_run

    found = about_this_run("", seconds)
    return (
        f"{found['date']}, {found['hardware']}, seeds as in the code, {seconds:.0f} s of one core."
    )


def main() -> None:
    """Build the pages that are named, or all."""
    for name in sys.argv[1:] or names():
        print(build(name).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
