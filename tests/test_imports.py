"""What may import what: torch and numpy alone at the top, one way between the rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fpfl

SOURCE = Path(__file__).parents[1] / "src" / "fpfl"

# An arrow of the design: this room may import those. `randomness` and `models` are leaves.
ALLOWED = {
    "randomness": set(),
    "summing": set(),
    "store": set(),
    "models": {"randomness"},
    "fairness": set(),
    "data": {"fairness", "randomness"},
    "methods": {"fairness"},
    "privacy": {"randomness", "store"},
    "users": {"data", "fairness", "randomness", "summing"},
    "thirdparty": {"privacy", "randomness", "summing"},
    "server": {
        "data", "fairness", "methods", "privacy", "randomness", "store", "thirdparty", "users",
    },
    "heldout": {"data", "fairness", "privacy", "thirdparty", "users"},
    "report": {
        "begun", "conducting", "data", "fairness", "folder", "heldout", "privacy", "run", "server",
        "store", "users",
    },
    "fingerprint": {"data"},
    "interrupting": {"server"},
    "folder": {"privacy", "store"},
    "begun": {"data", "fairness", "fingerprint", "folder", "privacy"},
    "conducting": {
        "arguments", "begun", "data", "fairness", "folder", "keeping", "methods", "privacy", "run",
        "server", "users",
    },
    "keeping": {"begun", "folder", "privacy", "server", "store"},
    "run": {"data", "fairness", "heldout", "privacy", "server", "store", "users"},
    "arguments": {
        "data", "fairness", "methods", "privacy", "server", "suggesting", "thirdparty", "users",
    },
    "training": {
        "arguments", "begun", "conducting", "data", "fairness", "fingerprint", "folder", "keeping",
        "methods", "privacy", "randomness", "run", "server", "thirdparty", "users",
    },
    "suggesting": {"data", "fairness", "methods", "privacy"},
    "exporting": {"data", "store", "users"},
    "planning": {"data", "fairness", "methods", "privacy", "suggesting"},
    "estimator_settings": {"data", "fairness", "methods", "privacy", "suggesting"},
    "estimator_data": {
        "arguments", "data", "fairness", "methods", "models", "privacy", "randomness", "suggesting",
        "training", "users",
    },
    "estimator_base": {
        "arguments", "data", "estimator_data", "estimator_settings", "fairness", "folder",
        "methods", "models", "privacy", "report", "run", "suggesting", "training", "users",
    },
    "estimator": {
        "data", "estimator_base", "estimator_data", "fairness", "methods", "models", "privacy",
        "training", "users",
    },
    "federation": {
        "arguments", "conducting", "data", "fairness", "folder", "keeping", "methods", "privacy",
        "randomness", "run", "server", "store", "thirdparty", "users",
    },
    "audit": {
        "data", "fairness", "methods", "models", "privacy", "server", "suggesting", "thirdparty",
        "training", "users",
    },
    "experiments": {
        "arguments", "data", "fairness", "folder", "methods", "models", "privacy", "report", "run",
        "server", "store", "suggesting", "training", "users",
    },
    "config_sections": {"data", "methods", "models", "privacy", "server", "suggesting", "users"},
    "config_data": {"config_sections", "data", "fairness", "fingerprint", "folder", "server"},
    "config": {
        "config_data", "config_sections", "data", "fairness", "folder", "methods", "models",
        "privacy", "run", "server", "suggesting", "training", "users",
    },
}  # fmt: skip


def rooms_imported(room: str) -> dict[str, set[str]]:
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else []
    files += sorted((SOURCE / room).glob("**/*.py"))
    assert files
    found = {}
    for file in files:
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name} has a relative import"
                assert node.module != "fpfl" or room == "cli", f"{file.name} imports the top"
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[file.name] = {name.split(".")[1] for name in names if name.startswith("fpfl.")} - {
            room
        }
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room: str) -> None:
    for file, rooms in rooms_imported(room).items():
        assert rooms <= ALLOWED[room], f"{room}/{file} imports {rooms - ALLOWED[room]}"


def test_import_fpfl_imports_torch_and_numpy_alone() -> None:
    """In a fresh interpreter, what all names of fpfl add to torch and numpy is fpfl itself."""
    code = (
        "import sys, torch, numpy, torch.func\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import fpfl\n"
        "names = [n for n in fpfl.__all__ if not n.startswith('FairPrivate')]  # an extra's\n"
        "found = [getattr(fpfl, name) for name in names]\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(n for n in after - before if n not in sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['fpfl']"


def test_a_node_without_work_needs_no_torch() -> None:
    """Four of a federation's five steps; and names stay what they are, whatever came first."""
    code = (
        "import sys, fpfl, fpfl.federation.node, fpfl.federation.flower.client\n"
        "assert 'torch' not in sys.modules\n"
        "import fpfl.training, fpfl.suggesting\n"
        "assert callable(fpfl.train) and callable(fpfl.suggest) and 'train' in dir(fpfl)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        _ = fpfl.tain


def test_the_tables_run_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """With every other dependency blocked and σ given, as on a bare machine with a GPU."""
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {{'dp_accounting', 'scipy', 'pydantic', 'typer', 'click', 'rich',
                                   'matplotlib', 'safetensors', 'fairlearn'}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import fpfl.experiments.__main__ as m, fpfl.experiments.runner as runner, dataclasses
load = runner.load_table
runner.load_table = lambda table: [dataclasses.replace(r, rounds=3) for r in load(table)]
sys.exit(m.main(['adult-federated', '--rows', 'shallow/FPFL/200/*', '--noise-multiplier', '1.0',
                 '--out', {str(tmp_path)!r}]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "results.json").exists()
    assert not (tmp_path / "partial.json").exists()
