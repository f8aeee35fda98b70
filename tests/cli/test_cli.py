"""The command line, as a user runs it: here and there in a process of its own, else in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fpfl import BMDM, MMDM, OneGradient, Tran
from fpfl.config import load_config, make_method, run_config
from fpfl.experiments import demo
from fpfl.methods import Method
from fpfl.training.defaults import ROUNDS

CONFIG = """
[data]
name = "adult"
mean_samples = 2

[training]
cohort = 200
rounds = 4
seed = 1
noise_seed = 1

[constraint]
kind = "fnr_parity"
by = ["sex"]

[privacy]
noise_multiplier = 1.0
clip = 2.0
"""


def in_a_process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fpfl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_privacy_gives_the_known_figures() -> None:
    """1.723 in `paper` with honest 5.19, twice that noise, 1.006; all within 1%."""
    out = in_a_process("privacy", "--population", "16280", "--cohort", "200", "--rounds", "1000",
                       "--epsilon", "2", "--delta", "5e-5", "--json")  # fmt: skip
    assert out.returncode == 0, out.stderr
    answers = {a["convention"]: a for a in json.loads(out.stdout)}
    paper, replace, poisson = (answers[c] for c in ("paper", "replace-one", "poisson"))
    assert paper["noise_multiplier"] == pytest.approx(1.723, rel=0.01)
    assert paper["epsilon_honest"] == pytest.approx(5.19, rel=0.01)
    assert replace["noise_multiplier"] == pytest.approx(2 * 1.723, rel=0.01)
    assert poisson["noise_multiplier"] == pytest.approx(1.006, rel=0.01)
    for answer in answers.values():
        assert {"convention", "noise_multiplier", "sensitivity", "epsilon", "epsilon_honest",
                "epsilon_server", "delta"} <= set(answer)  # fmt: skip
        assert answer["epsilon"] == pytest.approx(2.0, rel=0.01)
        assert answer["epsilon_server"] > answer["epsilon_honest"]
    assert "δ" in out.stderr or "delta" in out.stderr  # 5e-5 is above 1/(10 K): a warning


def test_train_saves_a_run(fpfl, tmp_path: Path) -> None:
    config = tmp_path / "fair.toml"
    config.write_text(CONFIG, encoding="utf-8")
    code, out, err = fpfl("train", config, "--out", tmp_path / "run")
    assert code == 0, err
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.safetensors", "history.json", "result.json", "privacy.txt", "config.toml",
            "evaluation-test.json"} <= files  # fmt: skip
    assert "simulation: no guarantee against anyone who has the seed" in out
    code, _, err = fpfl("train", config, "--out", tmp_path / "run")
    assert code == 2
    assert "not empty" in err


def test_train_on_a_file_of_ones_own(fpfl, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 200
    np.savez(
        tmp_path / "people.npz",
        features=rng.normal(size=(n, 3)),
        labels=rng.integers(0, 3, n),
        attributes=rng.integers(-1, 2, (n, 1)),
        users=rng.integers(0, 50, n),
    )
    (tmp_path / "own.toml").write_text(
        """
[data]
train = "people.npz"
[data.schema]
classes = 3
attributes = { region = ["north", "south"] }
unknown = ["region"]
[training]
cohort = 20
rounds = 3
[constraint]
kind = "accuracy_parity"
""",
        encoding="utf-8",
    )
    code, out, err = fpfl("train", tmp_path / "own.toml", "--out", tmp_path / "run")
    assert code == 0, err
    assert "no privacy guarantee" in out


def test_the_demo_runs_and_draws(fpfl, tmp_path: Path, monkeypatch) -> None:
    """The headline command, with one round: table, statements, picture, figures."""
    monkeypatch.setattr(demo, "ROUNDS", 1)
    code, printed, err = fpfl("demo", "--out", tmp_path)
    assert code == 0, err
    assert "Privacy of PFL:" in printed
    assert "Privacy of FPFL:" in printed  # it counts groups, too
    assert "no guarantee against anyone who has the seed" in printed
    assert (tmp_path / "fnr.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["algorithm"] for run in figures] == ["FL", "PFL", "FPFL"]
    assert "FL: federated learning; balanced accuracy 0." in printed
    # One round is not enough: models that tell nothing apart are named.
    assert printed.count("COLLAPSED: the model") == sum(bool(run["collapsed"]) for run in figures)
    assert any(run["collapsed"] for run in figures)
    assert "In words: of 100 women who earn more than 50,000 dollars FL overlooks" in printed
    assert (tmp_path / "fpfl" / "model.safetensors").exists()


def test_privacy_prints_a_table_for_people(fpfl) -> None:
    code, out, err = fpfl("privacy", "--population", 1000, "--cohort", 10, "--rounds", 5,
                          "--noise-multiplier", 1)  # fmt: skip
    assert code == 0, err
    for word in ("paper", "replace-one", "poisson", "honest", "server"):
        assert word in out


def test_reproduce_prints_json_and_nothing_else() -> None:
    out = in_a_process(
        "reproduce", "adult-central", "--rows", "shallow/SGD/*", "--set", "rounds=3", "--json"
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)[0]["algorithm"] == "SGD"


def test_a_private_population_is_evaluated_only_when_asked(fpfl, tmp_path: Path) -> None:
    config = tmp_path / "fair.toml"
    config.write_text(CONFIG, encoding="utf-8")
    assert fpfl("train", config, "--out", tmp_path / "run")[0] == 0
    assert not (tmp_path / "run" / "evaluation-training.json").exists()
    assert fpfl("train", config, "--out", tmp_path / "other", "--simulation")[0] == 0
    content = json.loads((tmp_path / "other" / "evaluation-training.json").read_text())
    assert content["mark"].startswith("simulation only")


def test_divergence_saves_the_last_good_model_and_exits_with_1(fpfl, tmp_path: Path) -> None:
    config = tmp_path / "wild.toml"
    text = CONFIG.split("[constraint]")[0].replace(
        "rounds = 4", "rounds = 40\nlearning_rate = 1e30"
    )
    config.write_text(text.replace("noise_seed = 1", 'selection = "last"'), encoding="utf-8")
    code, _, err = fpfl("train", config, "--out", tmp_path / "run")
    assert code == 1
    assert "diverged in round" in err
    assert (tmp_path / "run" / "model.safetensors").exists()


# numpy's own, of an archive that was cut short.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_files_that_are_no_npz_are_refused(fpfl, tmp_path: Path) -> None:
    np.save(tmp_path / "bare.npy", np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut short")
    for name in ("bare.npy", "cut.npz", "missing.npz"):
        config = tmp_path / "own.toml"
        config.write_text(
            f'[data]\ntrain = "{name}"\n[data.schema]\nclasses = 2\n'
            "[training]\ncohort = 2\nrounds = 2\n",
            encoding="utf-8",
        )
        code, _, err = fpfl("train", config, "--out", tmp_path / "run")
        assert code == 2
        assert name in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds = 4", "rounds = 4\nround = 5"), "training.round: there is no such key"),
        (("cohort = 200", "cohort = 20000"), "between 1 and the population 16280"),
        (("cohort = 200", 'cohort = "many"'), "training.cohort"),
        (('kind = "fnr_parity"', 'kind = "predictive_parity"'), "cannot be enforced"),
        (('kind = "fnr_parity"', 'kind = "justice"'), "expected one of"),
        (('by = ["sex"]', 'by = ["age"]'), "no attribute 'age'"),
        (("noise_multiplier = 1.0", "epsilon = -2"), "epsilon"),
        (("noise_multiplier = 1.0", "noise_multiplier = 1.0\ndelta = 0.1"), "δ|delta"),
        (("noise_multiplier = 1.0", ""), "exactly one"),
        (('name = "adult"\nmean_samples = 2', 'train = "missing.npz"'), "schema"),
        (("[data]", "[data"), "not a TOML file"),
        (('name = "adult"', 'name = "adult"\ntest = "x.npz"'), "do not apply"),
    ],
)
def test_bad_configs_end_with_one_line(fpfl, tmp_path: Path, change, message) -> None:
    assert change[0] in CONFIG
    config = tmp_path / "bad.toml"
    config.write_text(CONFIG.replace(*change), encoding="utf-8")
    code, out, err = fpfl("train", config, "--out", tmp_path / "run")
    assert code == 2, out
    lines = [line for line in err.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["privacy", "--population", "10", "--cohort", "20", "--rounds", "1", "--epsilon", "1"],
        ["privacy", "--population", "10", "--cohort", "2", "--rounds", "1"],
        ["privacy", "--population", "ten"],
        ["train", "nowhere.toml", "--out", "never"],
        ["nonsense"],
        ["reproduce", "nonsense"],
    ],
)
def test_bad_arguments_end_with_one_line(
    fpfl, arguments: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = fpfl(*arguments)
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_a_mistake_ends_a_process_with_one_line(tmp_path: Path) -> None:
    """What nobody caught in this process would be a traceback in its own."""
    out = in_a_process("train", "nowhere.toml", "--out", "never", cwd=tmp_path)
    assert out.returncode == 2
    assert out.stdout == ""
    assert re.fullmatch(r"error: .*nowhere\.toml.*\n", out.stderr)


# --- which settings go together -----------------------------------------------------------------


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    text = CONFIG
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "changed.toml"
    path.write_text(text, encoding="utf-8")
    return path


def method(text: str) -> tuple[str, str]:
    return "[privacy]", f"[method]\n{text}\n[privacy]"


def training(text: str) -> tuple[str, str]:
    return "rounds = 4", f"rounds = 4\n{text}"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("", MMDM()),
        ('kind = "mmdm"\nrate = 0.1\ndamping = 1', MMDM(multiplier_lr=0.1, damping=1.0)),
        ('kind = "mmdm"\ntolerance = 0.1', MMDM(tolerance=0.1)),
        ('kind = "bmdm"', BMDM()),
        ('kind = "bmdm"\nrate = 0.1', BMDM(multiplier_lr=0.1)),
        ('kind = "tran"\nmax_multiplier = 1', Tran(max_multiplier=1.0)),
        ('kind = "one-gradient"', OneGradient()),
        ('kind = "one-gradient"\ntolerance = "constraint"\nspread = "none"',
         OneGradient(tolerance=None, spread=None)),
        ('kind = "one-gradient"\ndamping = 1\nrate = 0.3\ntolerance = 0.01\nmemory = 0.5\n'
         'spread = 0.1\nlow = 0\nhigh = 3\nstandin = "rate"',
         OneGradient(1.0, 0.3, 0.01, 0.5, 0.1, 0.0, 3.0, "rate")),
    ],
)  # fmt: skip
def test_a_method_has_its_own_defaults(tmp_path: Path, text: str, made: Method) -> None:
    assert make_method(load_config(written(tmp_path, method(text)))) == made


def test_what_is_left_out_is_left_to_train(tmp_path: Path) -> None:
    assert load_config(written(tmp_path)).training.selection is None
    suggested = written(
        tmp_path, ("rounds = 4", "suggested = true"), ("clip = 2.0", "max_participations = 9")
    )
    assert load_config(suggested).training.rounds == ROUNDS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([method('kind = "tran"\ndamping = 2.0')],
         "method: damping is no setting of kind = 'tran', which has multiplier_lr, max_multiplier"),
        ([method('memory = 0.5\nlow = 0')],
         "method: low, memory are no setting of kind = 'mmdm', which has damping, multiplier_lr"),
        ([method('kind = "one-gradient"\nmax_multiplier = 1')], "max_multiplier is no setting of"),
        ([method('kind = "one-gradient"\nratchets = true')], "ratchets is no setting of"),
        ([method('kind = "one_gradient"')],
         "kind is 'one_gradient'; expected one of mmdm, bmdm, one-gradient, tran"),
        ([method('kind = "one-gradient"\nspread = "all"')], "method: spread is 'all': .*'none'"),
        ([training("local_steps = 4")], "training: local_steps = 4 needs the step size"),
        ([training("local_steps = 0")], "training.local_steps: .*greater than or equal to 1"),
        ([training("local_learning_rate = 0.1")], "and local_steps is 1; raise local_steps"),
        ([training("local_steps = 4\nlocal_learning_rate = 0.1")],
         "local_steps = 4 does not go with method.kind = 'mmdm'.* use kind = 'one-gradient'"),
        ([training('suggested = "yes"')], "training.suggested: Input should be a valid boolean"),
        ([training("suggested = true"), ('[constraint]\nkind = "fnr_parity"\nby = ["sex"]', "")],
         "suggested = true is for training under a constraint, .* add a .constraint. section"),
        ([training("suggested = true"), ("[privacy]\nnoise_multiplier = 1.0\nclip = 2.0", "")],
         "suggested = true chooses settings by the noise, .* add a .privacy. section"),
        ([training("suggested = true"), method('kind = "mmdm"')],
         "suggested = true is for method.kind = 'one-gradient', and it is 'mmdm'; leave"),
        ([training("suggested = true")], "privacy.clip has none; leave clip out"),
        ([training('suggested = true\noptimizer = "adam"')], "it is 'adam'; give learning_rate"),
        ([training("suggested = true\nnormaliser = 7.0")], "training.normaliser = 'users', and it"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(written(tmp_path, *changes))
    assert str(caught.value).startswith(str(tmp_path / "changed.toml"))
    assert "\n" not in str(caught.value)


DOCS = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
OWN_DATA = (Path(__file__).parents[2] / "docs/howto/own-data.md").read_text(encoding="utf-8")
CONFIGS = re.findall(r"```toml\n(.*?)```", DOCS, re.S)
WHOLE = [text for text in CONFIGS if "[training]" in text and "[sweep]" not in text]


@pytest.mark.parametrize("number", range(len(WHOLE)))
@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_the_configs_of_the_documentation_train(tmp_path: Path, number: int) -> None:
    """Two rounds of each, on the documented table where one is named."""
    assert len(WHOLE) >= 2
    schema = re.findall(r"```toml\n(.*?)```", OWN_DATA, re.S)[0]
    (tmp_path / "people.schema.toml").write_text(schema, encoding="utf-8")
    jobs, rows = ("clerk", "cook", "pilot"), range(1500)
    cells = [
        f"{i % 500},{('no', 'yes')[i % 2]},{('Female', 'Male')[i // 2 % 2]},"
        f"{('north', 'south')[i // 4 % 2]},{20 + i % 60},{i % 50},{jobs[i % 3]}"
        for i in rows
    ]
    table = "\n".join(["id,hired,sex,region,age,hours,job", *cells])
    (tmp_path / "people.csv").write_text(table, encoding="utf-8")
    path = tmp_path / "documented.toml"
    path.write_text(WHOLE[number], encoding="utf-8")
    config = load_config(path)
    short = config.training.model_copy(update={"rounds": 2})
    run, *_ = run_config(config.model_copy(update={"training": short}), folder=tmp_path)
    assert len(run.history) == 2
