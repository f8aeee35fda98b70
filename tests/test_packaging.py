"""What is imported is declared, and a release has been checked."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fpfl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
RESULTS = ROOT / "docs" / "results" / "release" / "release-check.json"
OURS = {"fpfl", "benchmarks", "fuzz", "my_first_federation"} | {
    path.stem for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")
}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


NEEDED = names(PROJECT["dependencies"])
ANY = NEEDED.union(*(names(each) for name, each in EXTRAS.items() if name != "all"))


def imported(file: Path) -> set[str]:
    """Top-level names of other people's modules that a file imports, by name or by string."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    tops = {name.split(".")[0] for name in found}
    return tops - set(sys.stdlib_module_names) - OURS


def undeclared(folder: str, declared: set[str]) -> dict[str, set[str]]:
    known = packages_distributions()
    wrong = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(file):
            distributions = {canonicalize_name(each) for each in known.get(name, [name])}
            if not distributions & declared:
                wrong.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return wrong


@pytest.mark.parametrize("folder", ["src", "scripts", "tests", "fuzz"])
def test_every_package_that_is_imported_is_declared(folder: str) -> None:
    assert not undeclared(folder, ANY)


def test_an_import_that_nothing_declares_is_noticed() -> None:
    assert "typer" in undeclared("src", ANY - {"typer"})
    assert "dp_accounting" in undeclared("src", ANY - {"dp-accounting"})


def test_the_command_line_knows_typer_by_its_public_names_alone() -> None:
    """Since 0.26 it has a copy of click, under names of its own."""
    for file in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names if a.name.startswith(("click", "typer."))}
            elif isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(("click", "typer")), file


@pytest.mark.parametrize("name", ["constraints.txt", "newest.txt", "newest-flower.txt"])
def test_a_set_of_versions_names_all_that_is_needed_and_fits_the_bounds(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins: dict[str, list[Version]] = {}
    for each in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (pin,) = each.specifier
        pins.setdefault(canonicalize_name(each.name), []).append(Version(pin.version))
    wanted = list(PROJECT["dependencies"])
    if name == "constraints.txt":
        wanted += [each for extra, named in EXTRAS.items() if extra != "all" for each in named]
    else:
        extras = ("sklearn", "report", "femnist", "parquet", "tracking", "export")
        for extra in (*extras, "flower") if "flower" in name else extras:
            wanted += EXTRAS[extra]
    for each in map(Requirement, wanted):
        versions = pins[canonicalize_name(each.name)]
        assert all(each.specifier.contains(v, prereleases=True) for v in versions), each


def test_classifiers_say_what_was_run() -> None:
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    runs = {(row["set"], row["python"]) for row in checked()["steps"]["installs"]["said"]}
    assert said
    assert {("lowest", python) for python in said} <= runs
    assert {("newest", python) for python in said} <= runs


# --- releases -----------------------------------------------------------------------------------


def checked() -> dict:
    if os.environ.get("FPFL_RELEASE"):
        pytest.skip("make release-check is under way: its results are not written yet")
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def releases() -> list[Version]:
    """The versions in the CHANGELOG that have a date, the last first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return [Version(v) for v in re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", text, re.M)]


def test_the_last_release_was_checked_and_held() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from release_check import STEPS
    finally:
        sys.path.pop(0)
    found = checked()
    assert found["steps"].keys() == STEPS.keys()
    assert not [name for name, row in found["steps"].items() if not row["held"]]
    assert all(row["held"] for row in found["steps"]["installs"]["said"])
    assert not any(row["caught"] for row in found["steps"]["audit"]["said"].values())
    for row in found["steps"].values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert Version(row["version"]) >= releases()[0]
    assert Version(fpfl.__version__) >= releases()[0]


def test_the_commits_that_were_checked_are_in_the_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    for commit in {row["commit"] for row in checked()["steps"].values()}:
        git = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(git, check=False).returncode == 0
