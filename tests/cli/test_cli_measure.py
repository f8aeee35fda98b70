"""``fpfl measure``, as a user would type it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import make_population

from fpfl.data import read_table_schema

SCHEMA = """\
source = "declared"
user = "id"
samples_per_user = 2
[label]
column = "hired"
classes = ["no", "yes"]
[features]
age = [16, 96]
job = ["clerk", "cook"]
income = { range = [0, 100000], centre = 1000, scale = 5000 }
"""


@pytest.fixture
def people(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        f"{user},{rng.normal(50, 10):.1f},{rng.choice(['clerk', 'cook'])},{rng.exponential()},no"
        for user in rng.integers(0, 600, 1000)
    ]
    path = tmp_path / "people.csv"
    path.write_text("id,age,job,income,hired\n" + "\n".join(rows) + "\n", encoding="utf-8")
    path.with_suffix(".schema.toml").write_text(SCHEMA, encoding="utf-8")
    return path


def test_a_schema_is_filled_and_paid_for_once(fpfl, people: Path, tmp_path: Path) -> None:
    ledger, out, picture = (tmp_path / n for n in ("people.jsonl", "measured.json", "seen.png"))
    K = len({line.split(",")[0] for line in people.read_text().splitlines()[1:]})
    assert fpfl("budget", "create", ledger, "--population", K, "--epsilon", 2)[0] == 0
    asked = ("measure", "--data", people, "--epsilon", 1, "--ledger", ledger)
    filled = tmp_path / "measured.toml"
    files = ("--out", out, "--write-schema", filled, "--plot", picture)
    code, said, err = fpfl(*asked, *files)
    assert (code, err) == (0, "")
    assert f"{K} users, measured under ε = 1.0000" in said
    assert "Charged as 'measurement-" in said
    assert "Adjacency: zero-out" in said
    schema = read_table_schema(filled)
    age, job, income = schema.features
    assert age.measured
    assert job.measured
    assert age.centre == pytest.approx(50, abs=8)
    assert (income.centre, income.scale, income.measured) == (1000, 5000, False)
    assert tomllib.loads(filled.read_text())["measured"]["epsilon"] == pytest.approx(1)
    assert json.loads(out.read_text())["epsilon"] == schema.measured.epsilon
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = ledger.read_bytes()
    for more, words in (
        (("--out", out), "there already"),
        (("--write-schema", filled), "there already"),
        (("--columns", "wage"), "partition selection"),
        (("--symlog", "income"), "not measured"),
        (("--symlog", "age=x"), "is no number"),
        (("--columns", "income", "--epsilon", 5), "one more measurement"),
        (("--plot", tmp_path / "no" / "a.png"), "no folder"),
        (("--run", tmp_path), "ledger"),
    ):
        code, _, err = fpfl(*asked, *more)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
    assert ledger.read_bytes() == before, "what is refused costs nothing"
    code, _, err = fpfl(*asked, "--schema", filled)
    assert code == 2
    assert "costs nothing" in err
    code, said, _ = fpfl(
        "measure", "--data", people, "--noise-multiplier", 2, "--columns", "age,income,hired",
        "--symlog", "income=10", "--bins", 32, "--neighbours", "replace-one", "--json",
    )  # fmt: skip
    assert code == 0
    content = json.loads(said)
    assert content["mechanism"]["neighbours"] == "replace-one"
    assert content["columns"][1]["cells"]["threshold"] == 10.0
    assert len(content["columns"][0]["released"]) == 32
    assert content["seeded"] is False


def test_a_draft_is_refused(fpfl, people: Path) -> None:
    schema = people.with_suffix(".schema.toml")
    schema.write_text(SCHEMA.replace('"declared"', '"data"', 1), encoding="utf-8")
    code, _, err = fpfl("measure", "--data", people, "--epsilon", 1)
    assert code == 2
    assert "drafted from the data" in err


def test_a_population_folder_has_a_schema_of_its_own(fpfl, tmp_path: Path) -> None:
    folder = make_population(users=200).save(tmp_path / "people")
    code, said, err = fpfl("measure", "--data", folder, "--epsilon", 1, "--columns", "sex,label")
    assert code == 0, err
    assert "Female" in said
    code, _, err = fpfl("measure", "--data", folder, "--epsilon", 1, "--write-schema", "a.toml")
    assert code == 2
    assert "go with a table" in err
