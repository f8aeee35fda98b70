"""What may import what: torch and numpy alone at the top, one way between the rooms."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fpfl
from fpfl import compat

SOURCE = Path(__file__).parents[1] / "src" / "fpfl"

# An arrow of the design: this room imports those, and no others. Whoever is imported stands above.
ROOMS = {
    "compat": set(),
    "numerics": set(),
    "store": set(),
    "fairness": {"compat", "store"},
    "data": {"fairness", "numerics"},
    "methods": {"compat", "fairness"},
    "privacy": {"numerics", "store"},
    "users": {"data", "fairness", "numerics"},
    "aggregation": {"numerics", "privacy"},
    "server": {
        "aggregation",
        "data",
        "fairness",
        "methods",
        "numerics",
        "privacy",
        "store",
        "users",
    },
    "runs": {"data", "fairness", "privacy", "server", "store"},
    "measurement": {"aggregation", "data", "privacy", "runs", "store"},
    "training": {
        "compat",
        "aggregation",
        "data",
        "fairness",
        "measurement",
        "methods",
        "numerics",
        "privacy",
        "runs",
        "server",
        "store",
        "users",
    },
    "heldout": {"runs", "store", "aggregation", "data", "fairness", "privacy", "users"},
    "planning": {"data", "fairness", "methods", "privacy", "training"},
    "exporting": {"data", "store", "users"},
    "callbacks": {"fairness", "privacy", "server", "training", "users"},
    "report": {
        "methods",
        "data",
        "fairness",
        "heldout",
        "privacy",
        "runs",
        "server",
        "store",
        "training",
        "users",
    },
    "sweeps": {
        "aggregation",
        "callbacks",
        "compat",
        "data",
        "fairness",
        "methods",
        "numerics",
        "privacy",
        "runs",
        "server",
        "store",
        "training",
        "users",
    },
    "federation": {
        "aggregation",
        "data",
        "fairness",
        "measurement",
        "methods",
        "numerics",
        "privacy",
        "runs",
        "server",
        "store",
        "training",
        "users",
    },
    "audit": {
        "aggregation",
        "data",
        "fairness",
        "methods",
        "privacy",
        "server",
        "training",
        "users",
    },
    "config": {
        "compat",
        "data",
        "fairness",
        "methods",
        "privacy",
        "runs",
        "server",
        "training",
        "users",
    },
    "estimator": {
        "callbacks",
        "data",
        "fairness",
        "methods",
        "numerics",
        "privacy",
        "sweeps",
        "training",
        "users",
    },
    "experiments": {
        "data",
        "estimator",
        "fairness",
        "methods",
        "privacy",
        "report",
        "runs",
        "server",
        "store",
        "sweeps",
        "training",
        "users",
    },
    "cli": {
        "audit",
        "callbacks",
        "config",
        "data",
        "estimator",
        "experiments",
        "exporting",
        "federation",
        "heldout",
        "measurement",
        "planning",
        "privacy",
        "report",
        "runs",
        "server",
        "store",
        "sweeps",
        "training",
    },
}


def rooms_imported(room: str) -> set[str]:
    """What the files of a room import of other rooms."""
    names = set()
    for file in sorted((SOURCE / room).glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name} has a relative import"
                assert node.module != "fpfl" or room == "cli", f"{file.name} imports the top"
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("fpfl.")} - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    above = list(ROOMS)[: list(ROOMS).index(room)]
    assert ROOMS[room] <= set(above), f"{room} imports what stands below it"
    assert rooms_imported(room) == ROOMS[room]


def test_the_hall_is_empty() -> None:
    """No module at the root: whatever there is has a room."""
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py"}
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("old", compat.MOVED)
def test_old_paths_lead_to_what_is_there_now(old: str) -> None:
    found = importlib.import_module(old)
    assert found is importlib.import_module(compat.MOVED[old])
    assert found.__spec__ is not None
    assert found.__spec__.name == found.__name__ == compat.MOVED[old]


def test_an_old_path_is_found_by_pickle() -> None:
    """Protocol 0 by hand, as an old file has it: the name of a module and of a class in it."""
    assert pickle.loads(b"cfpfl.run\nRun\n.") is fpfl.Run
    assert pickle.loads(b"cfpfl.thirdparty.clipping\nClipRule\n.").__module__ == (
        "fpfl.aggregation.clipping"
    )


def test_import_fpfl_imports_torch_and_numpy_alone() -> None:
    """In a fresh interpreter, what all names of fpfl add to torch and numpy is fpfl itself."""
    code = (
        "import sys, torch, numpy, torch.func\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import fpfl\n"
        "names = [n for n in fpfl.__all__ if not n.startswith('Fair')]  # an extra's\n"
        "found = [getattr(fpfl, name) for name in names]\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(n for n in after - before if n not in sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['fpfl']"


def test_a_node_without_work_needs_no_torch() -> None:
    """Three of a federation's four steps; and names stay what they are, whatever came first."""
    code = (
        "import sys, fpfl, fpfl.federation.node, fpfl.federation.flower.client\n"
        "assert 'torch' not in sys.modules\n"
        "import fpfl.training, fpfl.training.defaults\n"
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
