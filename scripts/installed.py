"""Use an installed fpfl as a user would: run by the environment's own Python, in an empty folder.

``python installed.py VERSION [EXTRA ...]``. With no extra the package is alone, and whatever needs
one has to say so in a line. Prints what was done; an ``AssertionError`` says what did not hold.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

CONFIG = """
version = 1
[data]
name = "adult"
[training]
cohort = 200
rounds = 20
selection = "last"
[constraint]
kind = "fnr_parity"
by = ["sex"]
[privacy]
noise_multiplier = 2.0
clip = 2.0
budget = 2.0
"""

TRAINING = """
import os, signal, sys, fpfl
people = fpfl.load_adult("train").partition(mean=2, seed=0)
def stop(event):
    if sys.argv[1] == "die" and event.row["round"] == 12:
        os.kill(os.getpid(), signal.SIGKILL)
run = fpfl.train(
    fpfl.mlp(92, seed=0), people, cohort=200, rounds=20, selection="last", callbacks=[stop],
    constraint=fpfl.fnr_parity("sex"), privacy=fpfl.Privacy(noise_multiplier=1.0, clip=2.0),
    folder=fpfl.RunFolder("killed", resume=sys.argv[1] == "resume"))
assert len(run.history) == 20, len(run.history)
"""


def fpfl(*words: str) -> subprocess.CompletedProcess[str]:
    """The program that was installed beside this Python."""
    program = Path(sys.executable).parent / "fpfl"
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def works(*words: str) -> str:
    """A command that has to end well; what it printed."""
    done = fpfl(*words)
    assert done.returncode == 0, f"fpfl {' '.join(words)}: {done.returncode}\n{done.stderr}"
    return done.stdout


def refused(*words: str, by: str) -> None:
    """A command that has to end with exit code 2 and one line."""
    done = fpfl(*words)
    told = f"fpfl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 2, told
    assert re.fullmatch(rf"error: .*{by}.*\n", done.stderr), told


def command_line(version: str) -> None:
    """Version, help and usage errors."""
    assert works("--version").strip() == version
    for words in ((), ("data",), ("budget",), ("federation",)):
        done = fpfl(*words)
        assert (done.returncode, done.stderr) == (2, ""), f"fpfl {words}: {done}"
        assert "Commands" in done.stdout, done.stdout
    text = " ".join(works("export", "--help").split())
    for part in ("RUN is the folder of a finished run", "Replace files that are there"):
        assert part in text, text
    refused("nosuch", by="nosuch")
    refused("train", "--nosuch", by="--nosuch")
    refused("resume", by="[Mm]issing argument")
    refused("privacy", "--population", "x", "--cohort", "2", "--rounds", "3", by="--population")
    refused("privacy", "--cohort", "2", "--rounds", "3", by="[Mm]issing option '--population'")
    refused("resume", "nowhere", by="no run that was begun")
    print("version, help and usage errors")


def training() -> None:
    """A private training, on with it under its budget, and one that is killed and resumed."""
    Path("fair.toml").write_text(CONFIG, encoding="utf-8")
    said = works("train", "fair.toml", "--out", "run")
    assert "Saved in run" in said, said
    assert "ε = " in Path("run/privacy.txt").read_text(encoding="utf-8")
    works("resume", "run", "--rounds", "22")
    Path("training.py").write_text(TRAINING, encoding="utf-8")
    for what, status in (("die", -signal.SIGKILL), ("resume", 0)):
        done = subprocess.run(
            [sys.executable, "training.py", what], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, f"{what}: {done.returncode}\n{done.stderr}"
    print("twenty private rounds, more of them, a kill and a resumption")


def modules() -> None:
    """Import every module for which everything is there."""
    import fpfl as package

    names = [found.name for found in walk_packages(package.__path__, "fpfl.")]
    for name in names:
        if not name.endswith("__main__"):
            import_module(name)
    print(f"{len(names)} modules imported")


def estimator() -> None:
    """Fit, predict and score with both estimators."""
    import numpy as np

    from fpfl import FairPrivateClassifier

    rng = np.random.default_rng(0)
    x, sex = rng.normal(size=(400, 5)), rng.choice(["female", "male"], 400)
    y = np.where(x[:, 0] + 0.5 * (sex == "male") > 0, "yes", "no")
    model = FairPrivateClassifier(
        constraint="demographic_parity", rounds=20, epsilon=2.0, feature_range=(-5, 5)
    )
    model.fit(x, y, sensitive_features=sex)
    assert set(model.predict(x)) <= {"yes", "no"}
    print("the estimator")


def main(version: str, *extras: str) -> None:
    """Do all that this installation is for."""
    os.environ["COLUMNS"] = "120"
    if not extras:
        command_line(version)
        training()
        if find_spec("plotly") is None:
            refused("report", "run", "-o", "alone.html", by=r"fpfl\[report\]")
        refused("export", "run", "--format", "onnx", by=r"fpfl\[export\]")
        refused("federation", "keys", "keys", by=r"fpfl\[flower\]")
        return
    if "report" in extras:
        works("report", "run", "-o", "report.html")
        assert "plotly" in Path("report.html").read_text(encoding="utf-8")
        print("the report")
    if "export" in extras:
        works("export", "run", "-o", "exported")
        print("export to PyTorch, ONNX and a card")
    if "femnist" in extras:
        works("data", "femnist", "--show")
        print("digits")
    if "flower" in extras:
        command_line(version)  # with the typer that Flower allows
        works("federation", "keys", "keys", "--nodes", "3")
        works("federation", "init", "project", "--nodes", "3")
        modules()
    if "sklearn" in extras:
        estimator()


if __name__ == "__main__":
    main(*sys.argv[1:])
