"""Make samples of today's formats in tests/samples/VERSION, for tests/test_samples.py to read.

    .venv/bin/python scripts/make_samples.py
    .venv/bin/python scripts/make_samples.py --out FOLDER    # elsewhere, to look at them

Runs and ledgers, populations, pickled estimators and exported models, each in a folder of its own
with ``expected.json``: what this version reads in it (by ``tests/sampled.py``). They stand for what
people have on their disks, so a version's samples are written once and never again: a folder that
is there is refused.

Noise and cohorts come from the operating system here, as in real runs. All data is made up, or the
Adult set that the package brings. Nothing of this machine is kept but versions of packages: where
a file has a folder, it is ``/somewhere`` in the sample.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fpfl
from fpfl.data.femnist.compact import write_compact
from fpfl.data.femnist.source import Part, Writer
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import Mechanism
from fpfl.runs.fingerprints import environment
from fpfl.runs.journal import Journal, withdraw
from fpfl.store.files import write_all

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "tests" / "samples"
sys.path.append(str(ROOT / "tests"))
sampled: Any = importlib.import_module("sampled")
LEDGER: str = sampled.LEDGER
USERS: int = sampled.USERS

SOMEWHERE = "/somewhere"
"""In the place of this machine's folders."""

PLATFORM = "Linux-x86_64"
"""In the place of this machine's kernel."""

LARGEST = 1_000_000
"""Bytes of all samples of a version."""

# --- people, all of them made up ------------------------------------------------------------------


def make_people(path: Path) -> None:
    """Users of about three samples each; the last has none."""
    rng = np.random.default_rng(0)
    users = np.sort(rng.integers(0, USERS - 1, 3 * USERS))
    sex = rng.integers(0, 2, len(users))
    # In steps of 1/64: short, and the same number in every precision.
    features = np.round(64 * (rng.normal(size=(len(users), 5)) + 0.5 * sex[:, None])) / 64
    numbers = np.clip(features.sum(axis=1) + rng.normal(size=len(users)), -5, 5)
    np.savez_compressed(
        path,
        features=features.astype(np.float32),
        labels=(numbers > 0).astype(np.int64),
        numbers=numbers.astype(np.float32),
        attributes=sex[:, None].astype(np.int64),
        users=users.astype(np.int64),
    )


TABLE_SCHEMA = """source = "declared"
user = "id"
samples_per_user = 3
population = 60
missing = ["?"]

[label]
column = "hired"
classes = ["no", "yes"]

[attributes]
sex = ["Female", "Male"]

[features]
age = [16, 96]
hours = { range = [0, 80], indicator = true }
job = ["clerk", "cook"]
"""


def make_table(path: Path) -> None:
    """A table of users with three rows each."""
    rng = np.random.default_rng(1)
    lines = ["id,age,hours,job,sex,hired"]
    for user in range(USERS):
        sex = ("Female", "Male")[int(rng.integers(2))]
        for _ in range(3):
            age, hours = int(rng.integers(16, 97)), int(rng.integers(0, 81))
            job = ("clerk", "cook", "pilot")[int(rng.integers(3))]
            hired = "yes" if hours + int(rng.integers(0, 40)) > 50 else "no"
            shown = "?" if rng.random() < 0.1 else hours
            lines.append(f"u{user:02},{age},{shown},{job},{sex},{hired}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


class Scribbles:
    """Three writers' digits, drawn at random."""

    title = "scribbles"

    def names(self) -> list[str]:
        """Who they are."""
        return ["ada", "ben", "cleo"]

    def read(self, part: Part) -> Iterator[Writer]:
        """Two digits each to train on; the first has none to test on."""
        rng = np.random.default_rng(2 if part == "train" else 3)
        for number, name in enumerate(self.names()):
            if part == "test" and number == 0:
                continue
            pixels = np.full((2, 28, 28), 255, dtype=np.uint8)
            pixels[:, 8:20, 12:16] = rng.integers(0, 200, (2, 12, 4))
            yield Writer(name, pixels, np.array([number, 9 - number], dtype=np.uint8))


# --- runs that are begun on the command line ------------------------------------------------------

ADULT = """version = 1
[data]
name = "adult"
[model]
hidden = [2]
"""
EVALUATED = f"""{ADULT}[training]
cohort = 400
rounds = 4
selection_window = 2
[constraint]
kind = "fnr_parity"
by = ["sex"]
[privacy]
noise_multiplier = 2.0
clip = {{ bound = 2.0, clipped_share = 0.05 }}
"""
BUDGETED = f"""{ADULT}[training]
cohort = 200
rounds = 3
checkpoint_every = 2
[constraint]
kind = "demographic_parity"
by = ["sex"]
[method]
kind = "one-gradient"
[privacy]
noise_multiplier = 2.0
clip = {{ bound = 2.0, counts = 2.0 }}
budget = 2.0
ledger = "{LEDGER}"
"""
CAPPED = f"""{ADULT}[training]
cohort = 60
rounds = 6
checkpoint_every = 2
optimizer = "adam"
selection = "best"
selection_window = 2
[constraint]
kind = "fnr_parity"
by = ["sex"]
[method]
kind = "mmdm"
damping = 1.0
[privacy]
noise_multiplier = 2.0
clip = 2.0
max_participations = 3
"""
TABLE = """version = 1
[data]
table = "people.csv"
schema_file = "people.schema.toml"
held_out = 0.2
[model]
hidden = [3]
[training]
cohort = 16
rounds = 5
checkpoint_every = 2
[constraint]
kind = "accuracy_parity"
by = ["sex"]
[method]
kind = "tran"
[privacy]
epsilon = 4.0
clip = 1.0
"""
CHANGED = """version = 1
[data]
train = "people.npz"
[data.schema]
attributes = { sex = ["Female", "Male"] }
samples_per_user = 3.0
population = 60
[model]
hidden = [3]
[training]
suggested = true
cohort = 20
rounds = 3
checkpoint_every = 2
[constraint]
kind = "fnr_parity"
by = ["sex"]
[privacy]
noise_multiplier = 2.0
budget = 20.0
"""


def make_runs(out: Path) -> None:
    """All runs, each in the folder ``run`` of its sample."""
    people = out / sampled.PEOPLE
    make_people(people)

    place = new(out / "evaluated", config=EVALUATED)
    fpfl_command(place, "train", "config.toml", "--out", "run", "--simulation")
    fpfl_command(place, "evaluate", "run", "--epsilon", "1", "--bound", "2")
    fpfl_command(place, "export", "run", "-o", str(new(out / "exported")), "--name", "A sample")

    place = new(out / "budgeted", config=BUDGETED)
    usual = ["--cohort", "200", "--noise-multiplier", "2", "--name", "clinic"]
    fpfl_command(place, "budget", "create", LEDGER, "--population", "16280", "--epsilon", "2",
                 *usual)  # fmt: skip
    fpfl_command(place, "withdraw", LEDGER, "5")
    fpfl_command(place, "train", "config.toml", "--out", "run")
    fpfl_command(place, "withdraw", "run", "7", "11")

    place = new(out / "capped-cut", config=CAPPED)
    fpfl_command(place, "train", "config.toml", "--out", "run", cut=("log", 5))

    place = new(out / "table-cut", config=TABLE)
    make_table(place / "people.csv")
    (place / "people.schema.toml").write_text(TABLE_SCHEMA, encoding="utf-8")
    fpfl_command(place, "train", "config.toml", "--out", "run", cut=("charge", 4))
    # What counts is what the run keeps of it.
    (place / "people.schema.toml").unlink()

    place = new(out / "changed-cut", config=CHANGED)
    shutil.copy(people, place)
    fpfl_command(place, "train", "config.toml", "--out", "run")
    fpfl_command(place, "resume", "run", "--rounds", "8", cut=("log", 7))
    (place / sampled.PEOPLE).unlink()

    for name, cut in (
        ("plain-cut", ("charge", 6)),
        ("averaged-cut", ("log", 5)),
        ("numbers-cut", ("log", 5)),
        ("seeded", None),
        ("seeded-cut", ("log", 5)),
        ("saved", None),
    ):
        place = new(out / name)
        if name == "averaged-cut":
            with PopulationLedger.create(
                place / LEDGER, population=USERS, epsilon=30.0, name="sixty"
            ) as ledger:
                ledger.withdraw([3])
        child(place, cut, train=name)

    child(new(out / "federation"), ("log", 3), federate=True)
    for config in out.glob("*/config.toml"):  # a run has its own copy
        config.unlink()


def new(folder: Path, **files: str) -> Path:
    """A new folder for a sample."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder


def fpfl_command(place: Path, *words: str, cut: tuple[str, int] | None = None) -> None:
    """Run a command in a folder; killed where ``cut`` says."""
    child(place, cut, words=list(words))


def child(place: Path, cut: tuple[str, int] | None, **what: Any) -> None:
    """Do something in a process of its own, which is killed after it has charged or logged."""
    order = json.dumps({"cut": cut, **what})
    done = subprocess.run(
        [sys.executable, __file__, "--child", order],
        cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != (-signal.SIGKILL if cut else 0):
        raise RuntimeError(f"{order} in {place.name} ended with {done.returncode}: {done.stderr}")


def do(order: dict[str, Any]) -> None:
    """What a child is told to do, in the folder that it was started in."""
    nobodys_machine()
    if order["cut"]:
        deadly(*order["cut"])
    warnings.simplefilter("ignore")
    here = Path()
    if "words" in order:
        from fpfl import cli

        sys.argv = ["fpfl", *order["words"]]
        cli.main()
    elif "federate" in order:
        sampled.federated(Path(".."), here / "run")
    else:
        name = order["train"]
        model, people, settings = sampled.python_run(name, Path(".."))
        if name == "saved":
            fpfl.train(model, people, **settings).save(here / "run")
            return
        ledger = Path(LEDGER) if Path(LEDGER).exists() else None
        if name == "averaged-cut":  # after the second round, by somebody else
            settings["callbacks"] = [withdrawing]
        where = fpfl.RunFolder(here / "run", ledger=ledger, checkpoint_every=2)
        fpfl.train(model, people, folder=where, **settings)


def withdrawing(event: fpfl.RoundEvent) -> None:
    """Users leave while the run goes on."""
    if event.row["round"] == 2:
        withdraw(Path("run"), [7, 11])


def deadly(name: str, round: int) -> None:
    """Have the journal kill this process once it has charged, or logged, a round."""
    real: Callable[..., None] = getattr(Journal, name)

    def call(self: Journal, now: int, *others: Any) -> None:
        real(self, now, *others)
        if now == round:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Journal, name, call)


def nobodys_machine() -> None:
    """Leave out of environments and exported files what tells of this machine."""
    platform.platform = lambda *_, **__: PLATFORM
    writing: Any = importlib.import_module("fpfl.exporting.export")
    real = writing._program

    def program(*given: Any) -> Any:
        # torch.export notes for every operation in which file of this machine it was called.
        made = real(*given)
        for node in made.graph.nodes:
            if "stack_trace" in node.meta:
                node.meta["stack_trace"] = anonymous(node.meta["stack_trace"])
        return made

    writing._program = program


def anonymous(text: str) -> str:
    """A text without this machine's folders."""
    for folder in (sys.prefix, str(ROOT)):
        text = text.replace(folder, SOMEWHERE)
    return text


def anonymise(out: Path) -> None:
    """Put ``/somewhere`` in the two places where a run's folder has a path of this machine.

    Neither is part of a fingerprint or of a ledger's chain. A test puts its own folder there, as
    somebody would who has moved a run together with what it needs.
    """
    for file in out.glob("*/run/origin.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        values["folder"] = SOMEWHERE
        file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for file in out.glob("*/run/run.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["population_ledger"] is not None:
            values["population_ledger"] = f"{SOMEWHERE}/{LEDGER}"
            file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


# --- everything else ------------------------------------------------------------------------------


def make_others(out: Path) -> None:
    """A population's ledger, populations, estimators, and what a federation has in files."""
    make_ledger(new(out / "ledger") / LEDGER)
    write_compact(Scribbles(), new(out / "writers") / "writers.npz")
    sampled.load_people(out).save(new(out / "population") / "people")
    make_estimators(new(out / "estimators"))
    make_keys(new(out / "throwaway-keys"))
    agreement = sampled.agreed()
    text, fingerprint = sampled.agreement_text(agreement), agreement.fingerprint.hex()
    if sampled.agreement_digest(text) != fingerprint:
        raise ValueError("agreement_text is not what an agreement's fingerprint is a digest of")
    write_json(
        out / "federation" / "agreement.json", {"agreement": text, "fingerprint": fingerprint}
    )


def make_ledger(path: Path) -> None:
    """Charges of two runs and an evaluation, withdrawals, and a line that a crash tore."""
    mechanism = Mechanism("poisson", 500, 50, 2.0, "zero-out")
    with PopulationLedger.create(
        path, population=500, epsilon=3.0, mechanism=mechanism, name="clinic"
    ) as ledger:
        for round in range(1, 4):
            ledger.charge("spring", mechanism, round)
        ledger.withdraw([9, 4])
    with path.open("ab") as file:
        write_all(file.fileno(), b'{"n":5,"time":"20')
    with PopulationLedger.open(path) as ledger:
        ledger.charge("autumn", mechanism, 1)
        everybody = Mechanism("all", 500, 500, 20.0, "zero-out")
        ledger.charge("autumn", everybody, None, "evaluation")
        ledger.withdraw([77])


def make_estimators(place: Path) -> None:
    """A classifier and a regressor, fitted with privacy and a constraint; one without either."""
    rng = np.random.default_rng(4)
    X = np.round(rng.normal(size=(80, 3)), 2)
    sex = np.where(rng.random(80) < 0.5, "Female", "Male")
    y = np.where(X.sum(axis=1) > 0, "yes", "no")
    kinds: dict[str, Any] = {
        "classifier": fpfl.FairPrivateClassifier(
            constraint="equalized_odds", tolerance=0.1, epsilon=8.0, rounds=4, hidden=(3,),
            feature_range=(-3.0, 3.0),
        ),
        "regressor": fpfl.FairPrivateRegressor(
            constraint="equal_error", epsilon=8.0, label_range=(-6.0, 6.0), rounds=4, hidden=(3,),
            feature_range=(-3.0, 3.0),
        ),
        "plain": fpfl.FairPrivateClassifier(rounds=4, hidden=(3,), random_state=0),
    }  # fmt: skip
    for name, estimator in kinds.items():
        labels = X.sum(axis=1) if name == "regressor" else y
        groups = None if name == "plain" else sex
        estimator.fit(X, labels, sensitive_features=groups)
        (place / f"{name}.pickle").write_bytes(pickle.dumps(estimator, protocol=4))
    write_json(place / "rows.json", X[:10].tolist())


def make_keys(place: Path) -> None:
    """What fpfl federation keeps of nodes that there are not: nothing that is secret."""
    from fpfl.federation import enrolment as keys

    with tempfile.TemporaryDirectory() as folder:
        offline, node = Path(folder) / "keys", Path(folder) / "hospital"
        keys.make_keys(offline, 3)
        request = keys.make_request(node)
        asked = keys.read_request(request)
        keys.certify(offline, request, asked.fingerprint, index=6)
        keys.revoke(offline, ["node-2"])
        for file in (node / keys.CREDENTIAL, offline / keys.AUTHORITY, offline / keys.REGISTER,
                     offline / keys.REVOKED):  # fmt: skip
            shutil.copy(file, place)


# --- what is expected, and checks ---------------------------------------------------------------


def expect(out: Path) -> None:
    """Write down beside every sample what is read in it now."""
    for run in sorted(out.glob("*/run")):
        found = sampled.run_facts(run)
        if (run.parent / LEDGER).exists():
            found["people"] = sampled.population_ledger_facts(run.parent / LEDGER)
        write_json(run.parent / "expected.json", found)
    rows = json.loads((out / "estimators" / "rows.json").read_text())
    estimators = {
        path.stem: sampled.estimator_facts(pickle.loads(path.read_bytes()), rows)
        for path in sorted((out / "estimators").glob("*.pickle"))
    }
    exported = out / "exported"
    others: dict[str, Any] = {
        "ledger": sampled.population_ledger_facts(out / "ledger" / LEDGER),
        "writers": sampled.writers_facts(out / "writers" / "writers.npz"),
        "population": sampled.population_facts(
            fpfl.FederatedDataset.open(out / "population" / "people")
        ),
        "throwaway-keys": sampled.keys_facts(out / "throwaway-keys"),
        "estimators": estimators,
        "exported": {
            "torch": sampled.torch_facts(exported / "model.pt2"),
            "onnx": sampled.onnx_facts(exported / "model.onnx"),
        },
    }
    for name, found in others.items():
        write_json(out / name / "expected.json", found)


def write_json(path: Path, values: Any) -> None:
    """A file that a person can read, and compare."""
    path.write_text(f"{json.dumps(values, ensure_ascii=False)}\n", encoding="utf-8")


def check(out: Path) -> None:
    """Refuse samples that are large, or that tell of this machine."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > LARGEST:
        raise ValueError(f"the samples take {size:,} bytes; {LARGEST:,} are allowed")
    contents = [(path, path.read_bytes()) for path in files]
    for path in files:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [(path / name, archive.read(name)) for name in archive.namelist()]
    here = (str(ROOT), sys.prefix, str(out.parent), str(Path.home()), platform.release())
    secrets = [each for each in (*here, "PRIVATE KEY") if len(each) > 4]
    for path, content in contents:
        told = [each for each in secrets if each.encode() in content]
        if told:
            raise ValueError(f"{path.relative_to(out)} holds {told[0]!r}; leave it out of a sample")


def main() -> None:
    """Make the samples of this version, all or none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=SAMPLES / fpfl.__version__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        do(json.loads(asked.child))
        return
    if asked.out.exists():
        sys.exit(f"{asked.out} is there already; samples of a version are written once")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    nobodys_machine()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        made = new(Path(folder) / "samples")
        make_runs(made)
        make_others(made)
        anonymise(made)
        expect(made)
        write_json(made / "made.json", environment() | {"version": fpfl.__version__})
        check(made)
        shutil.copytree(made, asked.out)
    size = sum(path.stat().st_size for path in asked.out.rglob("*") if path.is_file())
    print(f"{asked.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
