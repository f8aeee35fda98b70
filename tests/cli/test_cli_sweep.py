"""``fpfl sweep``: a config with a [sweep] section, from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_population
from hypothesis import given
from hypothesis import strategies as st

import fpfl as library
from fpfl.config import load_config, load_sweep
from fpfl.config.sweeps import sweep_of

Command = Callable[..., tuple[int, str, str]]

BASE = """
[data]
folder = "people"

[model]
hidden = [4]

[training]
cohort = 30
rounds = 4

[constraint]
kind = "fnr_parity"
by = ["sex"]
tolerance = 0.1

[method]
kind = "one-gradient"
"""
PRIVATE = "[privacy]\nnoise_multiplier = 2.0\nclip = 1.0\n"
GRID = """
[sweep]
seeds = 2

[sweep.grid]
"training.learning_rate" = [0.1, 0.5]
method.damping = [1.0, 2.0]
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    people = make_population(users=120)
    columns = {
        "features": people.features.numpy(),
        "labels": people.labels.numpy(),
        "attributes": people.attributes.numpy(),
        "users": np.repeat(np.arange(people.population), people.sizes().numpy()),
    }
    np.savez(tmp_path / "people.npz", **columns)
    schema = 'attributes = { sex = ["Female", "Male"] }\nsamples_per_user = 3\npopulation = 120\n'

    def write(text: str) -> Path:
        path = tmp_path / "sweep.toml"
        train = f'train = "people.npz"\n[data.schema]\n{schema}'
        path.write_text(text.replace('folder = "people"', train), encoding="utf-8")
        return path

    return write


def test_a_grid_is_trained_and_chosen_from(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command
) -> None:
    code, out, err = fpfl("sweep", config(BASE + GRID), "--out", tmp_path / "out", "--jobs", 1)
    assert code == 0, err
    assert "|  | training.learning_rate | method.damping | runs | held-out accuracy |" in out
    assert out.count("**chosen**") == 1
    assert "A sweep is a simulation" in (tmp_path / "out" / "table.md").read_text()
    assert "Chosen of 4: " in out
    assert f"Saved in {tmp_path / 'out'}" in out
    assert "[8/8] run 7 (seed = 1, training.learning_rate = 0.5, method.damping = 2)" in err
    assert "A sweep is a simulation" in err
    code, out, _ = fpfl(
        "sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out", "--resume", "--json"
    )
    assert code == 0
    rows = json.loads(out)["rows"]
    assert len(rows) == 8
    people, _ = load_people(config(BASE + GRID)).split(0.25, seed=0)
    people = people.declared(90)
    alone = library.train(
        library.mlp(5, [4], seed=1), people, cohort=30, rounds=4, learning_rate=0.5, seed=1,
        constraint=library.fnr_parity("sex", tolerance=0.1), method=library.OneGradient(damping=1),
    )  # fmt: skip
    assert rows[5]["released_accuracy"] == pytest.approx(alone.history[-1]["accuracy"], abs=1e-4)


def load_people(path: Path) -> library.FederatedDataset:
    from fpfl.config import load_data

    return load_data(load_sweep(path).configs[0], path.parent)[0]


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["config.md", "howto/sweeps.md"])
def test_the_sweeps_of_the_documentation_train(page: str, tmp_path: Path, fpfl: Command) -> None:
    """Two rounds of each, one seed, at a noise that takes no calibration."""
    blocks = re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    (text,) = (block for block in blocks if "[data]" in block and "[sweep]" in block)
    for old, new in (("rounds = 250", "rounds = 2"), ("seeds = 3", "seeds = 1"),
                     ("epsilon = 2.0", "noise_multiplier = 1.0")):  # fmt: skip
        text = text.replace(old, new)
    (tmp_path / "s.toml").write_text(text, encoding="utf-8")
    code, out, err = fpfl("sweep", tmp_path / "s.toml", "--out", tmp_path / "out", "--jobs", 1)
    assert code == 0, err
    assert "Chosen of " in out


def test_by_default_there_is_a_process_for_each_core(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(
        "fpfl.sweeps.sweep.Sweep.finish", lambda self: asked.append(self._jobs) or self
    )
    fpfl("sweep", config(BASE + GRID), "--out", tmp_path / "out")
    assert asked == [3]


def test_a_ledger_is_charged_and_its_cost_is_said(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command
) -> None:
    fpfl("budget", "create", tmp_path / "people.jsonl", "--population", 90, "--epsilon", 20)
    text = BASE + PRIVATE + 'ledger = "people.jsonl"\n' + GRID
    code, out, err = fpfl("sweep", config(text), "--out", tmp_path / "out", "--jobs", 1)
    assert code == 0, err
    assert "8 runs, 32 rounds, will be charged to" in err
    assert library.tuning_cost(tmp_path / "people.jsonl").rounds == 32
    assert "Noise is seeded" not in out
    more = text.replace("rounds = 4", "rounds = 4000")
    code, _, err = fpfl("sweep", config(more), "--out", tmp_path / "more", "--jobs", 1)
    assert code == 2
    assert err.startswith("error: the sweep was not started and nothing was charged")
    assert err.count("\n") == 1


def test_train_and_sweep_send_each_other_their_files(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command
) -> None:
    code, _, err = fpfl("train", config(BASE + GRID), "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "has a [sweep] section, so it is many trainings: fpfl sweep" in err
    code, _, err = fpfl("sweep", config(BASE), "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no [sweep] section, so it is one training: fpfl train" in err
    code, _, err = fpfl("sweep", tmp_path / "none.toml", "--out", tmp_path / "out")
    assert (code, "there is no" in err) == (2, True)


def test_held_out_users_may_be_in_a_file(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command
) -> None:
    """For a population that is read from disk there is no other way: it cannot be split."""
    people, others = make_population(users=120).split(0.25, seed=0)
    people.save(tmp_path / "people")
    others.save(tmp_path / "others")
    path = tmp_path / "folder.toml"
    path.write_text(BASE + '[sweep]\nseeds = 2\nheld_out = "others"\n', encoding="utf-8")
    code, out, err = fpfl("sweep", path, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert [row["seed"] for row in json.loads(out)["rows"]] == [0, 1]
    found = json.loads((tmp_path / "out/runs/0000/evaluation-held-out.json").read_text())
    assert (found["samples"], found["on"]) == (len(others), "held-out users")
    path.write_text(BASE + "[sweep]\nseeds = 2\n", encoding="utf-8")
    code, _, err = fpfl("sweep", path, "--out", tmp_path / "more")
    assert (code, "to two folders" in err) == (2, True)


def test_the_help_names_the_section(fpfl: Command) -> None:
    """Square brackets would be taken for markup, and left out."""
    code, out, _ = fpfl("sweep", "--help")
    assert code == 0
    assert 'section "sweep"' in " ".join(out.split())


def test_ctrl_c_says_how_to_go_on(
    config: Callable[[str], Path], tmp_path: Path, fpfl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fpfl.sweeps import processes
    from fpfl.sweeps.batch import trained

    def interrupted(jobs, **how):
        for number, found in enumerate(trained(jobs, **how)):
            if number == 2:
                raise KeyboardInterrupt
            yield found

    path = config(BASE + GRID)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "trained", interrupted)
        code, _, err = fpfl("sweep", path, "--out", tmp_path / "out", "--jobs", 1)
    assert code == 130
    assert f"Go on with it: fpfl sweep {path} --out {tmp_path / 'out'} --resume" in err
    code, out, _ = fpfl("sweep", path, "--out", tmp_path / "out", "--resume", "--jobs", 1)
    assert code == 0
    assert out.count("| 2 | 0.") == 4, "both seeds of each setting"


# --- the section ------------------------------------------------------------------------------


def read(section: str, base: str = BASE):
    return sweep_of(base + section, "s.toml")


def test_runs_are_configs_with_keys_replaced() -> None:
    found = read(
        '[sweep]\n[[sweep.runs]]\nprivacy.epsilon = 1.0\n"privacy.clip.bound" = 2.0\n'
        "[[sweep.runs]]\ntraining.seed = 7\nmodel.hidden = [8]\n",
        BASE + PRIVATE,
    )
    first, second = found.configs
    assert first.privacy is not None
    assert (first.privacy.epsilon, first.privacy.noise_multiplier) == (1.0, None)
    assert first.privacy.clip.bound == 2.0  # type: ignore[union-attr]
    assert (second.training.seed, second.model.hidden) == (7, [8])
    assert found.settings[1]["privacy.clip.bound"] is None
    assert found.settings[0]["model.hidden"] == [4], "what it does not set is what the file says"
    assert found.held_out == 0.25


def test_seeds_count_from_the_files_own() -> None:
    found = read(
        "[sweep]\nseeds = 3\nheld_out = 0\n", BASE.replace("rounds = 4", "rounds = 4\nseed = 5")
    )
    assert [config.training.seed for config in found.configs] == [5, 6, 7]
    assert found.held_out is None


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("[sweep]\n", "sweep says nothing of its runs"),
        ("[sweep]\nseeds = 0\n", "sweep.seeds: "),
        ("[sweep]\nheldout = 0.2\n", "sweep.heldout: there is no such key"),
        ("[sweep.grid]\ntraining.learning_rate = 0.1\n", "learning_rate is 0.1; expected a list"),
        ("[sweep.grid]\ntraining.learning_rate = []\n", "expected a list of values"),
        (
            '[sweep.grid]\ntraining.learning_rat = [0.1]\n',
            r"run 0 of the sweep \(training.learning_rat = 0.1, .*there is no such key",
        ),
        (
            "[sweep.grid]\nmethod.damping = [1.0, 'x']\n",
            r"run 1 of the sweep \(method.damping = .x., .*damping is 'x'",
        ),
        ("[sweep.grid]\ndata.name = ['adult']\n", "data.name cannot differ between runs"),
        ("[sweep.grid]\ntraining.device = ['cpu']\n", "computed on one device"),
        ("[sweep.grid]\nprivacy.ledger = ['a']\n", "charged to one ledger"),
        ("[sweep]\nseeds = 2\n[sweep.grid]\ntraining.seed = [1]\n", "give one of the two"),
        ("[sweep]\nseeds = 1_000_000_000_000\n", "sweep has 1,000,000,000,000 runs"),
        ("[sweep]\nruns = []\n", "sweep.runs is empty"),
        ("[sweep]\ngrid = {}\nruns = [{}]\n", "both grid and runs"),
        (
            "[sweep.grid]\ntraining.learning_rate = " + str(list(range(1, 400)))
            + "\ntraining.rounds = " + str(list(range(1, 400))),
            "sweep has 159,201 runs",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_by_their_keys(section: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as error:
        read(section)
    assert "\n" not in str(error.value)


VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text("abc.\n' é", max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text("ab.é", min_size=1, max_size=4), inner, max_size=3),
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["training.learning_rate", "training.seed", "training", "privacy.clip", "privacy.epsilon",
     "privacy.clip.bound", "method.kind", "method.damping", "constraint.by", "model.hidden",
     "data.name", "sweep", "version", "", ".", "training..rounds"]
)  # fmt: skip


def toml(value: Any) -> str:
    """Any value of the above as TOML, in one line."""
    if isinstance(value, dict):
        inner = ", ".join(
            f"{json.dumps(n, ensure_ascii=True)} = {toml(v)}" for n, v in value.items()
        )
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)


@given(
    st.dictionaries(
        st.sampled_from(["held_out", "seeds", "tolerance", "grid", "runs", "x"]), VALUES
    ),
    st.dictionaries(KEYS, VALUES | st.lists(VALUES, max_size=3), max_size=3),
    st.booleans(),
)
def test_anything_in_the_section_is_read_or_refused_in_a_line(
    section: dict[str, Any], keys: dict[str, Any], grid: bool
) -> None:
    own = {"grid": keys} if grid else {"runs": [keys]}
    text = f"{BASE}{PRIVATE}[sweep]\n" + "".join(
        f"{name} = {toml(value)}\n" for name, value in (section | own).items()
    )
    said = refusal(text)
    assert said is None or (said.startswith("s.toml") and "\n" not in said)


def refusal(text: str) -> str | None:
    """What is said of a text that is refused, in the one way in which texts are."""
    try:
        found = sweep_of(text, "s.toml")
    except ValueError as error:
        return str(error)
    assert len(found.configs) == len(found.settings) >= 1
    return None


@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_a_line(data: st.DataObject) -> None:
    text = BASE + PRIVATE + GRID
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 30)))
    text = text[:start] + data.draw(st.text(max_size=3)) + text[stop:]
    assert (refusal(text) or "s.toml").startswith("s.toml")


def test_a_config_with_a_sweep_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(BASE + GRID, encoding="utf-8")
    with pytest.raises(ValueError, match="fpfl sweep"):
        load_config(path)
