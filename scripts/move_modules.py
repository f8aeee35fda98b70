"""Write today's module names into code and pages that have those of 0.1.0.

``python scripts/move_modules.py PATH...`` rewrites imports, dotted names in strings and paths, by
the table that also serves old imports at run time (`fpfl.compat.MOVED`). ``--check`` only says what
would change. Names of several old modules are in one today, so ``from fpfl.old import name`` needs
no more than the new path.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fpfl.compat import MOVED

TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".sh"}
_OLD = sorted(MOVED, key=len, reverse=True)
_NAMES = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, _OLD))})(?![\w])")
_PATHS = re.compile(
    rf"\b({'|'.join(re.escape(old.replace('.', '/')) for old in _OLD)})(?=\.py\b|/)"
)


def moved(text: str) -> str:
    """A text with today's names."""
    text = _NAMES.sub(lambda found: MOVED[found[1]], text)
    return _PATHS.sub(lambda found: MOVED[found[1].replace("/", ".")].replace(".", "/"), text)


def main() -> int:
    """Rewrite the files that were named, and those in the folders that were."""
    parser = argparse.ArgumentParser(description="Today's module names in place of 0.1.0's.")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args()
    files = [f for path in given.paths for f in (path.rglob("*") if path.is_dir() else [path])]
    stale = 0
    for file in sorted(f for f in files if f.is_file() and f.suffix in TEXT):
        before = file.read_text(encoding="utf-8")
        after = moved(before)
        if after != before:
            stale += 1
            print(file)
            if not given.check:
                file.write_text(after, encoding="utf-8")
    return int(given.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
