"""Tables of one's own: what is written is read, and nothing is read from data in silence."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fpfl
from fpfl import cli
from fpfl.config import config_of, load_config, load_data, make_method
from fpfl.data import (
    AttributeColumn,
    CategoryColumn,
    FederatedDataset,
    Label,
    NumberColumn,
    TableSchema,
    read_table,
    read_table_schema,
    table_files,
)
from fpfl.data.drafting import draft_schema, draft_text
from fpfl.data.table_schema import declared_schema
from fpfl.heldout import plan_heldout
from fpfl.training.defaults import chosen_cohort, chosen_method

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")

# A comma, a quote and a line break are what a table's own syntax is made of.
JOBS = ("clerk", "cook, chef", 'the "boss"', "night\nwatch", "Köchin")
SCHEMA = TableSchema(
    label=Label("hired", ("no", "yes")),
    features=(
        NumberColumn("age", (16, 96), indicator=True),
        CategoryColumn("job", JOBS),
        NumberColumn("hours", (0, 40)),
    ),
    attributes=(
        AttributeColumn("sex", ("Female", "Male")),
        AttributeColumn("region", ("north", "south"), unknown=True),
    ),
    user="id",
    samples_per_user=2,
    missing=("?",),
)
NAMES = ["hours", "id", "note", "age", "job", "sex", "region", "hired"]
GOOD = ["20", "u1", "", "56", "clerk", "Male", "north", "yes"]

ROW = st.fixed_dictionaries(
    {
        "hours": st.floats(-10, 50).map(lambda x: round(x, 3)),
        "id": st.sampled_from(["9", "10", "-3", "007"]),
        # Python's own writer leaves a bare carriage return without quotes.
        "note": st.text(max_size=5).filter(lambda t: not set(t) & {"\0", "\r"}),
        "age": st.none() | st.integers(0, 120),
        "job": st.none() | st.sampled_from([*JOBS, "pilot"]),
        "sex": st.sampled_from(["Female", "Male"]),
        "region": st.none() | st.sampled_from(["north", "south"]),
        "hired": st.sampled_from(["no", "yes"]),
    }
)


def write_csv(path: Path, rows: list[list[Any]], names: list[str] = NAMES, **how: Any) -> Path:
    with path.open("w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        csv.writer(file, **how).writerows([names, *rows])
    return path


def plainly(rows: list[dict[str, Any]]) -> tuple[list[Any], ...]:
    """Features, labels, attributes and users of rows, straight from the page about them."""
    features, labels, attributes, users = [], [], [], []
    for row in rows:
        age = 0.0 if row["age"] is None else 6 * (min(max(row["age"], 16), 96) - 16) / 80 - 3
        hours = 6 * min(max(row["hours"], 0), 40) / 40 - 3
        job = [float(row["job"] == name) for name in JOBS]
        other = float(row["job"] == "pilot")
        features.append([age, float(row["age"] is None), *job, other, hours])
        labels.append(int(row["hired"] == "yes"))
        region = -1 if row["region"] is None else ["north", "south"].index(row["region"])
        attributes.append([["Female", "Male"].index(row["sex"]), region])
        users.append(row["id"])
    return features, labels, attributes, users


@given(
    rows=st.lists(ROW, min_size=1, max_size=12),
    separator=st.sampled_from([",", ";", "\t", "|"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    absent=st.sampled_from(["", "?", " ? "]),
    batch=st.sampled_from([1, 3, 1000]),
)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_written_is_read(
    rows, separator, encoding, ending, quoting, absent, batch, tmp_path: Path
) -> None:
    cells = [[absent if row[name] is None else row[name] for name in NAMES] for row in rows]
    path = write_csv(
        tmp_path / "people.csv",
        cells,
        encoding=encoding,
        delimiter=separator,
        lineterminator=ending,
        quoting=quoting,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_files, "BATCH", batch)
        found = read_table(path, SCHEMA)
    features, labels, attributes, users = plainly(rows)
    order = sorted(range(len(rows)), key=lambda i: (int(users[i]), users[i], i))
    torch.testing.assert_close(found.features, torch.tensor([features[i] for i in order]))
    assert found.labels.tolist() == [labels[i] for i in order]
    assert found.attributes.tolist() == [attributes[i] for i in order]
    ids = sorted(set(users), key=lambda text: (int(text), text))
    assert found.sizes().tolist() == [users.count(text) for text in ids]
    assert found.schema == SCHEMA.schema()
    assert len(found.schema.feature_names or ()) == found.features.shape[1]


def people(n: int = 240, seed: int = 0) -> list[list[str]]:
    """Rows with something to learn, some cells missing."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        age, sex = int(rng.integers(16, 97)), str(rng.choice(["Female", "Male"]))
        hired = age + 10 * (sex == "Male") + rng.normal(scale=5) > 60
        rows.append(
            [
                str(rng.integers(0, 41)),
                f"u{rng.integers(n // 3)}",
                f"note {rng.random()}",
                "" if rng.random() < 0.1 else str(age),
                str(rng.choice(["clerk", "Köchin", "pilot"])),
                sex,
                str(rng.choice(["north", "south", "?"])),
                "yes" if hired else "no",
            ]
        )
    return rows


def same(one: FederatedDataset, other: FederatedDataset) -> None:
    for name in ("features", "labels", "attributes", "offsets"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.schema == other.schema


def test_csv_parquet_and_frame_are_the_same_people(tmp_path: Path, monkeypatch) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    path = write_csv(tmp_path / "people.csv", people())
    wanted = read_table(path, SCHEMA)
    frame = pandas.read_csv(path)
    frame["sex"] = frame["sex"].astype("category")
    assert frame["age"].dtype.kind == "f"  # with NaN for what is missing
    same(read_table(frame, SCHEMA), wanted)
    frame.to_parquet(tmp_path / "people.parquet")
    monkeypatch.setattr(table_files, "BATCH", 100)
    same(read_table(tmp_path / "people.parquet", SCHEMA), wanted)


def test_numbers_and_truth_values_are_met_however_they_are_written(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    frame = pandas.DataFrame(
        {
            "y": [0, 1, 1],
            "sex": [1.0, 2.0, None],
            "member": [True, False, None],
            "x": [1, 2, -99],
        }
    )
    schema = declared_schema(
        {
            "label": {"column": "y", "classes": [1, 0], "positive": 1},
            "attributes": {"sex": {"values": [1, 2], "unknown": True}},
            "features": {"member": [True, False], "x": [0, 4]},
            "missing": ["-99"],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv")  # with an index column that has no name
    (tmp_path / "lower.csv").write_text("y,sex,member,x\n0,1,true,1\n1,2,FALSE,2.0\n01,,,-99\n")
    for table in (frame, tmp_path / "t.parquet", tmp_path / "t.csv", tmp_path / "lower.csv"):
        found = read_table(table, schema)
        assert found.labels.tolist() == [0, 1, 1]
        assert found.attributes.flatten().tolist() == [0, 1, -1]
        assert found.features.tolist() == [[1, 0, 0, -1.5], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert found.population == 3
        assert found.schema.samples_per_user == 1


def test_a_row_without_a_label_goes_and_its_user_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,x,y\na,1,2.5\nb,1,\nc,3,20\n")
    schema = TableSchema(
        Label("y", range=(0, 10), missing="drop", outside="clamp"),
        (NumberColumn("x", (0, 4)),),
        user="id",
        population=5,
    )
    found = read_table(path, schema)
    assert found.sizes().tolist() == [1, 0, 1, 0, 0]
    assert found.labels.tolist() == [2.5, 10]
    with pytest.raises(ValueError, match="line 3, column 'y': the cell is empty"):
        read_table(path, replace(schema, label=Label("y", range=(0, 10), outside="clamp")))
    with pytest.raises(ValueError, match=r"line 4, column 'y': it says '20'.*\[0, 10\]; widen"):
        read_table(path, replace(schema, label=Label("y", range=(0, 10), missing="drop")))
    more = read_table(path, replace(schema, population=2))  # than declared: nobody is told
    assert (more.K, more.population) == (2, 3)


def test_users_have_their_numbers_whatever_the_order_of_rows(tmp_path: Path) -> None:
    rows = people(60)
    one = read_table(write_csv(tmp_path / "one.csv", rows), SCHEMA)
    other = read_table(write_csv(tmp_path / "other.csv", rows[::-1]), SCHEMA)
    assert torch.equal(one.sizes(), other.sizes())
    both = [sorted(part.subset([7]).features.tolist()) for part in (one, other)]
    assert both[0] == both[1]


def changed(**cells: str) -> list[str]:
    return [cells.get(name, cell) for name, cell in zip(NAMES, GOOD, strict=True)]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"age": "forty"}, r"line 3, column 'age': it says 'forty'; expected a number"),
        ({"age": "1_0"}, r"line 3, column 'age': it says '1_0'"),
        ({"hours": "inf"}, r"line 3, column 'hours': it says 'inf'"),
        ({"hours": "NaN"}, r"declare missing = \['NaN'\]"),
        ({"hours": "3,5"}, r"line 3, column 'hours': it says '3,5'"),
        ({"hired": "maybe"}, r"line 3, column 'hired': it says 'maybe'.*'no', 'yes'"),
        ({"hired": ""}, r"line 3, column 'hired': the cell is empty.*label.missing = 'drop'"),
        ({"sex": "male"}, r"line 3, column 'sex': it says 'male'.*'Female', 'Male'"),
        ({"sex": ""}, r"line 3, column 'sex': the cell is empty.*unknown = true"),
        ({"region": "west"}, r"line 3, column 'region': it says 'west'"),
        ({"id": ""}, r"line 3, column 'id': the cell is empty; expected an id"),
    ],
)
def test_bad_cells_are_named(cells: dict[str, str], words: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "people.csv", [GOOD, changed(**cells)])
    with pytest.raises(ValueError, match=words):
        read_table(path, SCHEMA)


LINE = ",".join(GOOD)
HEAD = ",".join(NAMES)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no header: it is empty"),
        (b"\n\n", "no header: its first line is empty"),
        (f"{HEAD}\n".encode(), "a header and no rows"),
        (f"{HEAD}\n\n\n".encode(), "a header and no rows"),
        (f"{HEAD}\n{LINE}\n{LINE},more\n".encode(), "line 3: it has 9 cells and the header has 8"),
        (f"{HEAD}\n\n{LINE}\nshort\n".encode(), "line 4: it has 1 cells"),
        (f'{HEAD}\n{LINE}\n"open'.encode(), "near line 3: unexpected end of data"),
        (f'{HEAD}\n"a"b,{LINE}\n'.encode(), "near line 2"),
        (f"{HEAD},age\n{LINE},3\n".encode(), "several columns called 'age'"),
        (f"{HEAD.replace('age', 'years')}\n{LINE}\n".encode(), "no column 'age'; it has 'hours'"),
        (f"{HEAD}\n{LINE}\xff".encode("latin-1"), "not a text file in UTF-8"),
        (b"PAR1 and nothing else", "cannot be read as a Parquet file|pip install"),
    ],
)
def test_bad_files_are_explained(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_bytes(content)
    with pytest.raises((ValueError, ImportError), match=words) as caught:
        read_table(path, SCHEMA)
    assert str(path) in str(caught.value)


def test_a_line_number_is_the_lines_first_one(tmp_path: Path) -> None:
    """Cells with line breaks and blank lines before it."""
    first = changed(job="night\nwatch", note="a\n\nb")
    path = write_csv(tmp_path / "people.csv", [first, [], changed(age="x")])
    with pytest.raises(ValueError, match="line 7, column 'age'"):
        read_table(path, SCHEMA)


def test_blank_lines_that_fill_a_batch_are_not_the_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(table_files, "BATCH", 2)
    path = write_csv(tmp_path / "people.csv", [GOOD, [], [], [], [], GOOD])
    assert len(read_table(path, SCHEMA)) == 2


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "people.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"fpfl\[parquet\]"):
        read_table(tmp_path / "people.parquet", SCHEMA)


def test_a_parquet_column_of_lists_is_refused(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    pandas.DataFrame({"y": [0, 1], "x": [[1], [2]]}).to_parquet(tmp_path / "t.parquet")
    schema = TableSchema(Label("y", (0, 1)), (NumberColumn("x", (0, 4)),))
    with pytest.raises(ValueError, match="column 'x': it holds values of type list"):
        read_table(tmp_path / "t.parquet", schema)


@given(
    head=st.sampled_from(["", f"{HEAD}\n", f"{HEAD}\r\n{LINE}\n", f"{HEAD}\n{LINE}\n{LINE[:-3]}"]),
    rest=st.binary(max_size=60)
    | st.text(alphabet=',;"\n\r\0 u1.0-', max_size=60).map(str.encode)
    | st.lists(st.sampled_from([*GOOD, "-", "nan", "1" * 5000, '"']), min_size=8, max_size=8).map(
        lambda cells: ",".join(cells).encode()
    ),
)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bytes_are_data_or_a_value_error(head: str, rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_bytes(head.encode() + rest)
    looks = (
        lambda: len(read_table(path, SCHEMA)),
        lambda: len(draft_schema(path, label="hired", user="id", groups=["sex"])[0].features),
    )
    for look in looks:
        with suppress(ValueError):  # and no other kind of error
            assert look() > 0


def test_codes_are_the_same_in_every_kind_of_table(tmp_path: Path) -> None:
    """A column of codes with an empty cell is one of floats in a data frame."""
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    (tmp_path / "t.csv").write_text("id,y,code,x\n1,0,1,1\n10,1,2,2\n9,1,,3\n9,0,3,1\n9,1,-9,1\n")
    frame = pandas.read_csv(tmp_path / "t.csv")
    frame["id"] = frame["id"].astype(float)
    assert frame["code"].dtype.kind == "f"
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "floats.csv", index=False)
    assert "10.0,1,2.0" in (tmp_path / "floats.csv").read_text()
    tables = (frame, *(tmp_path / name for name in ("t.csv", "t.parquet", "floats.csv")))
    wanted = [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0]]  # of users 1, 9, 9, 9, 10
    for codes in ((1, 2, 3), ("1", "2", "3"), ("1.0", "2.0", "3.0")):
        schema = TableSchema(
            Label("y", ("0", "1")),
            (NumberColumn("x", (0, 4)), CategoryColumn("code", codes)),
            user="id",
            missing=("-9",),
        )
        for table in tables:
            found = read_table(table, schema)
            assert found.sizes().tolist() == [1, 3, 1]
            assert found.features[:, 1:4].tolist() == wanted
            assert not found.features[:, 4].any()  # none is "(other)"
    for table in tables:
        drafted, _ = draft_schema(table, label="y", user="id")
        assert drafted.label.classes == (0, 1)
        assert CategoryColumn("code", (-9, 1, 2, 3)) in drafted.features
        for other in tables:
            assert not read_table(other, drafted).features[:, 4].any()


# Schemas

TEXT = st.text(min_size=1, max_size=6).map(str.strip).filter(bool)
VALUES = st.lists(TEXT, min_size=2, max_size=4, unique=True).map(tuple)
RANGE = st.tuples(st.floats(-1e6, 0), st.floats(0.5, 1e6))


@given(
    names=st.lists(TEXT, min_size=5, max_size=5, unique=True),
    classes=VALUES,
    values=VALUES,
    ends=RANGE,
    flag=st.booleans(),
    missing=st.lists(TEXT, max_size=2).map(tuple),
    shares=st.none() | st.lists(st.floats(0, 1), max_size=20),
)
@settings(max_examples=60)
def test_a_schema_is_read_as_it_was_written(
    names, classes, values, ends, flag, missing, shares
) -> None:
    label, number, category, attribute, user = names
    quantiles = None
    if shares is not None:
        inner = (min(max(ends[0] + p * (ends[1] - ends[0]), ends[0]), ends[1]) for p in shares)
        quantiles = (ends[0], *sorted(inner), ends[1])
    ranked = NumberColumn(f"{number}'", ends, flag, transform="quantile", quantiles=quantiles)
    schema = TableSchema(
        Label(label, None, ends, "drop", "clamp") if flag else Label(label, classes),
        (NumberColumn(number, ends, flag), ranked, CategoryColumn(category, values)),
        (AttributeColumn(attribute, values, flag),),
        user if flag else None,
        population=7 if flag else None,
        samples_per_user=2.5,
        missing=missing,
        separator="\t" if flag else None,
        source="data",
    )
    assert declared_schema(tomllib.loads(schema.toml())) == schema
    section = tomllib.loads(f"[data]\nx = 1\n{schema.toml('data.schema')}")["data"]["schema"]
    assert declared_schema(section) == schema


BASE = """
user = "id"
[label]
column = "hired"
classes = ["no", "yes"]
[attributes]
sex = ["Female", "Male"]
[features]
age = [16, 96]
"""


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[label]", "[lable]", r"unknown keys \['lable'\]"),
        ("column =", "colum =", r"\[label\] has the unknown keys \['colum'\]"),
        ('classes = ["no", "yes"]', "", "needs its classes"),
        ('classes = ["no", "yes"]', "range = [3, 3]", "expected low < high"),
        ('"yes"]', '"yes"]\nrange = [0, 1]', "give one of the two"),
        ('"yes"]', '"no"]', "each once"),
        ('["no", "yes"]', "[1, 1.0]", "each once"),
        ('["no", "yes"]', "[1, nan]", "the values are"),
        ("[16, 96]", f"[0, 1{'0' * 400}]", "the values are"),
        ('"yes"]', '"yes"]\npositive = "maybe"', "label.positive is 'maybe'"),
        ('"yes"]', '"yes"]\nmissing = "ignore"', "label.missing is 'ignore'"),
        ('["Female", "Male"]', '["Female"]', "'sex' has the values"),
        ('["Female", "Male"]', '"Female"', "expected a list"),
        ("[16, 96]", "[16, 96, 97]", r"expected \[low, high\]"),
        ("[16, 96]", "[96, 16]", "expected low < high"),
        ("[16, 96]", "{ range = [16, 96], values = ['a'] }", "unknown keys"),
        ("[16, 96]", "{ range = [16, 96], indicator = 1 }", "expected true or false"),
        ("age = [16, 96]", "", "no features are declared"),
        ("age = [16, 96]", "hired = [16, 96]", r"\['hired'\] are named for two things"),
        ("age = [16, 96]", "id = [16, 96]", r"\['id'\] are named for two things"),
        ('user = "id"', "user = 3", "user is 3; expected a text"),
        ('user = "id"', 'source = "me"', "source is 'me'"),
        ('user = "id"', 'separator = ":"', "separator is ':'"),
        ('user = "id"', "population = 1.5", "population is 1.5"),
        ('user = "id"', "samples_per_user = 0", "samples_per_user is 0"),
        ('user = "id"', 'missing = "?"', "expected a list of texts"),
        ('user = "id"', "user = ", "not a TOML file"),
    ],
)
def test_bad_schemas_are_explained(before: str, after: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "people.schema.toml"
    path.write_text(BASE, encoding="utf-8")
    read_table_schema(path)
    assert before in BASE
    path.write_text(BASE.replace(before, after), encoding="utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        read_table_schema(path)
    assert str(path) in str(caught.value)


def test_an_attribute_is_a_feature_only_where_it_is_listed(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "people.csv", [GOOD])
    schema = declared_schema(tomllib.loads(BASE))
    assert read_table(path, schema).schema.feature_names == ("age",)
    both = replace(schema, features=(*schema.features, CategoryColumn("sex", ("Female", "Male"))))
    assert read_table(path, both).features.tolist() == [[0, 0, 1, 0]]


# Drafts, configs and the command line


@pytest.fixture
def fpfl_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path):
    """Run a command in an empty folder; its exit code, and what it wrote."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_a_draft_reads_what_it_was_drafted_from(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "people.csv", people())
    drafted, left_out = draft_schema(path, label="hired", user="id", groups=["sex", "region"])
    assert drafted.source == "data"
    assert drafted.attributes[1] == AttributeColumn("region", ("north", "south"), unknown=True)
    features = {feature.name: feature for feature in drafted.features}
    assert set(features) == {"age", "hours", "job"}
    assert features["age"] == NumberColumn("age", (16, 96), indicator=True)
    assert features["job"] == CategoryColumn("job", ("Köchin", "clerk", "pilot"))
    assert "note" in left_out
    found = read_table(path, drafted)
    assert found.population == drafted.population
    assert len(found) == 240
    numbers, _ = draft_schema(path, label="age", groups=["sex"])
    assert numbers.label == Label("age", range=(16, 96), missing="drop")
    with pytest.raises(ValueError, match="'note' has more than 50 different values"):
        draft_schema(path, label="hired", groups=["note"])


def test_a_draft_leaves_ids_out_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 300
    columns = {
        "row": rng.permutation(n) + 1000,
        "caseId": rng.integers(0, 120, n),  # of whom some have two rows
        "person_id": rng.integers(0, 90, n),
        "clinic_id": rng.integers(0, 12, n),
        "visits": rng.integers(0, 200, n),
        "weight": rng.normal(70.0, 10.0, n),  # different in every row, and a measurement
        "paid": rng.integers(0, 120, n),
        "user_id": np.arange(n) // 2,
        "y": rng.integers(0, 2, n),
    }
    path = tmp_path / "people.csv"
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, r)) for r in rows)]) + "\n")
    drafted, left_out = draft_schema(path, label="y", user="user_id")
    # Of few values a column is one of codes, whatever it is called; "paid" only ends like "id".
    assert [f.name for f in drafted.features] == ["clinic_id", "visits", "weight", "paid"]
    assert set(left_out) == {"row", "caseId", "person_id"}
    text = draft_text("people.csv", drafted, left_out)
    assert "# 'row' is not used: it looks like an identifier, with a whole number of" in text
    assert "# 'person_id' is not used: its name and its many values are those of" in text
    assert drafted.user == "user_id"
    alone, left_out = draft_schema(path, label="y")
    assert "user_id" in left_out
    assert alone.user is None
    # A label or a group is what it was named to be.
    numbers, _ = draft_schema(path, label="row", user="user_id")
    assert numbers.label.range == (1000, 1299)


MERGED = """
source = "declared"
[label]
column = "readmitted"
classes = ["no", "yes"]
positive = "yes"
[label.merged]
no = ["NO", ">30"]
yes = ["<30"]
[features]
age = [0, 120]
"""


def test_classes_of_a_label_are_merged(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(MERGED)
    schema = read_table_schema(tmp_path / "a.toml")
    assert schema.label.merged == (("no", ("NO", ">30")), ("yes", ("<30",)))
    assert schema.label.cells == (("NO", ">30"), ("<30",))
    (tmp_path / "b.toml").write_text(schema.toml())
    assert read_table_schema(tmp_path / "b.toml") == schema
    assert schema.schema().class_names == ("no", "yes")
    table = tmp_path / "a.csv"
    table.write_text("age,readmitted\n30,NO\n40,>30\n50,<30\n60,NO\n")
    assert read_table(table, schema).labels.tolist() == [0, 0, 1, 0]
    table.write_text("age,readmitted\n30,NO\n40,yes\n")
    with pytest.raises(ValueError, match="one of the declared values 'NO', '>30', '<30'"):
        read_table(table, schema)
    # Numbers, and a class that stands for itself.
    (tmp_path / "a.toml").write_text(
        MERGED.replace('["no", "yes"]', "[0, 5]")
        .replace('positive = "yes"', "positive = 5")
        .replace('no = ["NO", ">30"]', "")
        .replace('yes = ["<30"]', "5 = [5, 6, 7]")
    )
    schema = read_table_schema(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text(schema.toml())
    assert read_table_schema(tmp_path / "b.toml") == schema
    table.write_text("age,readmitted\n30,0\n40,7\n50,5.0\n")
    assert read_table(table, schema).labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('yes = ["<30"]', 'maybe = ["<30"]', r"label.merged names \['maybe'\]"),
        ('yes = ["<30"]', 'yes = ["NO"]', "each once"),
        ('yes = ["<30"]', "yes = []", "a class without cells"),
        ('yes = ["<30"]', 'yes = "<30"', "expected a list"),
        ('classes = ["no", "yes"]\npositive = "yes"', "range = [0, 1]", "has a range"),
    ],
)
def test_wrong_merging_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in MERGED
    (tmp_path / "a.toml").write_text(MERGED.replace(old, new))
    with pytest.raises(ValueError, match=words):
        read_table_schema(tmp_path / "a.toml")


def test_a_draft_trains_without_privacy_and_is_refused_with_it(fpfl_command, tmp_path) -> None:
    write_csv(tmp_path / "people.csv", people())
    words = ("--data", "people.csv", "--label", "hired", "--user", "id", "--groups", "sex,region")
    code, _, err = fpfl_command("train", *words, "--epsilon", 2)
    assert code == 2
    assert "fpfl data draft people.csv --label hired --user id --groups sex,region" in err
    draft = ("data", "draft", *words[1:])
    assert fpfl_command(*draft)[0] == 0
    assert 'source = "data"' in (tmp_path / "people.schema.toml").read_text()
    assert "is there already" in fpfl_command(*draft)[2]

    code, _, err = fpfl_command("train", *words, "--epsilon", 2)
    assert code == 2
    assert "people.schema.toml was drafted from the data" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = fpfl_command("train", *words, "--rounds", 3, "--test", 0.25)
    assert code == 0
    assert "people.schema.toml was drafted from the data: check it" in out
    assert "WITHOUT privacy" in out
    assert "On the training population (simulation only" in out
    assert "On the test set (simulation only" in out
    assert f"fpfl report {Path('out/people')} -o report.html" in out
    # Nor in Python, where the schema goes with the people.
    schema = replace(read_table_schema(tmp_path / "people.schema.toml"), population=None)
    drafted, held = read_table("people.csv", schema).split(0.2, seed=0)
    how = {"cohort": 20, "rounds": 1, "privacy": fpfl.Privacy(noise_multiplier=1, clip=1.0)}
    with pytest.raises(ValueError, match="was drafted from the data"):
        fpfl.train(fpfl.mlp(drafted.schema.shape[0]), drafted, **how)
    drafted.save("drafted")
    with pytest.raises(ValueError, match="was drafted from the data"):
        fpfl.train(fpfl.mlp(drafted.schema.shape[0]), FederatedDataset.open("drafted"), **how)
    with pytest.raises(ValueError, match="was drafted from the data"):
        plan_heldout(held.schema, population=20, constraint=fpfl.equalized_odds("sex"), epsilon=2)
    # Its users may not be evaluated under ε with what was read from them, either.
    code, _, err = fpfl_command("evaluate", "out/people", "--epsilon", 2)
    assert code == 2
    assert "was drafted from the data" in err


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with its declared schema beside it."""
    path = write_csv(tmp_path / "people.csv", people())
    (tmp_path / "people.toml").write_text(replace(SCHEMA, population=90).toml(), encoding="utf-8")
    return path


def test_a_run_from_options_is_resumed_and_evaluated(fpfl_command, table: Path) -> None:
    words = ("train", "--data", "people.csv", "--groups", "sex+region", "--epsilon", 4)
    code, out, err = fpfl_command(*words, "--rounds", 3, "--test", 0.2, "--out", "run")
    assert code == 0, err
    assert "Schema: people.toml" in out
    assert "ε protects all rows of a user (one value of 'id')" in out
    run = table.parent / "run"
    config = load_config(run / "config.toml")
    assert config.training.suggested
    assert config.training.cohort == chosen_cohort(72)  # of the 90 that are declared, less 18
    assert config.constraint is not None
    assert config.constraint.by == [["sex", "region"]]
    assert config.privacy is not None
    assert config.privacy.epsilon == 4
    assert json.loads((run / "result.json").read_text())["privacy"]["population"] == 72
    plain = ("train", "--data", "people.csv", "--groups", "sex", "--rounds", 3, "--test", 0.2)
    assert fpfl_command(*plain, "--out", "plain")[0] == 0
    tested = json.loads((table.parent / "plain/evaluation-test.json").read_text())
    config = load_config(table.parent / "plain/config.toml")
    # Without noise the settings are the estimators' own for that.
    usual = chosen_method(fpfl.equalized_odds("sex"), SCHEMA.schema(), private=False, rounds=3)
    assert make_method(config) == usual
    assert usual.patience is None  # two rates
    # Another schema beside the table does not change a run that was begun.
    (table.parent / "people.toml").unlink()
    code, out, err = fpfl_command("evaluate", "run", "--epsilon", 4)
    assert code == 0, err
    assert "18 held-out users, evaluated under ε = 4" in out
    code, out, err = fpfl_command("resume", "plain", "--rounds", 5)
    assert code == 0, err
    assert len(json.loads((table.parent / "plain/history.json").read_text())) == 5
    again = json.loads((table.parent / "plain/evaluation-test.json").read_text())
    counts = [
        [found["samples"], *(d["count"] for d in found["gaps"]["eo"]["differences"])]
        for found in (tested, again)
    ]
    assert len(counts[0]) > 6
    assert counts[0] == counts[1]  # the same users are held out


@pytest.mark.parametrize("user", ["id", None])
def test_a_table_that_grew_is_not_split_anew(fpfl_command, tmp_path: Path, user) -> None:
    """Who is held out would be drawn again, and people who were trained on be among them."""
    rows = people()
    table = write_csv(tmp_path / "people.csv", rows)
    schema = replace(SCHEMA, user=user, population=400)
    (tmp_path / "people.toml").write_text(schema.toml(), encoding="utf-8")
    words = ("train", "--data", "people.csv", "--groups", "sex", "--epsilon", 4, "--rounds", 2)
    assert fpfl_command(*words, "--test", 0.2, "--out", "run")[0] == 0
    write_csv(table, [changed(id="u05"), *rows])
    for command in (("evaluate", "run", "--epsilon", 2), ("resume", "run", "--rounds", 3)):
        code, _, err = fpfl_command(*command)
        assert code == 2
        assert "people.csv (or its schema, or held_out) is not what run was begun with" in err
        assert err.count("\n") == 1
    assert len(json.loads((tmp_path / "run/history.json").read_text())) == 2
    write_csv(table, rows)
    code, _, err = fpfl_command("evaluate", "run", "--epsilon", 2)
    assert code == 0, err


def test_a_run_has_no_held_out_users_after_it_was_begun(fpfl_command, table: Path) -> None:
    config = table.parent / "config.toml"
    config.write_text(CONFIG, encoding="utf-8")
    assert fpfl_command("train", config, "--out", "run")[0] == 0
    config.write_text(CONFIG.replace("[training]", "held_out = 0.2\n[training]"), encoding="utf-8")
    code, _, err = fpfl_command("resume", "run", "--config", config, "--rounds", 3)
    assert code == 2
    assert "is not what run was begun with" in err


def test_a_schema_file_is_kept_as_it_was(fpfl_command, table: Path, monkeypatch) -> None:
    """Who edits it later changes neither the evaluation nor the export of a run."""
    config, run = table.parent / "config.toml", table.parent / "run"
    text = CONFIG.replace("[training]", "held_out = 0.2\n[training]")
    config.write_text(text + '[constraint]\nkind = "equalized_odds"\nby = ["sex"]\n')
    code, _, err = fpfl_command("train", config, "--out", "run")
    assert code == 0, err
    edited = SCHEMA.toml().replace("[16, 96]", "[0, 1000]")
    assert edited != SCHEMA.toml()
    (table.parent / "people.toml").write_text(edited, encoding="utf-8")
    ranges = []
    monkeypatch.setattr("fpfl.exporting.export_torch", lambda *_, **how: ranges.append(how))
    assert fpfl_command("export", "run", "--raw", "--format", "torch")[0] == 0
    assert [how["ranges"][0] for how in ranges] == [(16, 96)]
    assert (run / "config.toml").read_text() == config.read_text()
    code, out, err = fpfl_command("evaluate", "run", "--epsilon", 4)
    assert code == 0, err
    assert "18 held-out users" in out
    code, _, err = fpfl_command("resume", "run", "--rounds", 3)
    assert code == 0, err
    # A config that is given anew is read as it is now; of other people's features, here.
    code, _, err = fpfl_command("resume", "run", "--config", config, "--rounds", 4)
    assert (code, "is not what run was begun with" in err) == (2, True)


def test_test_people_are_not_those_trained_on(fpfl_command, table: Path) -> None:
    (table.parent / "same.csv").symlink_to(table)
    write_csv(table.parent / "some.csv", [changed(id="u1"), changed(id="new")])
    for test, words in (
        ("people.csv", "people.csv is the table that is trained on"),
        ("same.csv", "same.csv is the table that is trained on"),
        ("some.csv", "1 users of some.csv are in people.csv, too"),
    ):
        code, _, err = fpfl_command("train", "--data", "people.csv", "--test", test)
        assert code == 2
        assert words in err
    assert not (table.parent / "out").exists()


def test_k_is_that_of_the_people_who_are_trained_on(fpfl_command, table: Path) -> None:
    (table.parent / "people.toml").write_text(SCHEMA.toml(), encoding="utf-8")
    seen = len({row[1] for row in people()})
    code, out, err = fpfl_command(
        "train", "--data", "people.csv", "--epsilon", 3, "--rounds", 1, "--test", 0.5
    )
    assert code == 0, err
    assert f"K = {seen - round(seen / 2)} is the number of training users in the file" in out


def test_runs_share_a_ledger_and_hold_out_the_same_people(fpfl_command, table: Path) -> None:
    users = fpfl.read_table(table, table.with_suffix(".toml")).split(0.2, seed=0)[0].population
    budget = ("--population", users, "--epsilon", 3)
    assert fpfl_command("budget", "create", "people.jsonl", *budget)[0] == 0
    held_out = []
    for out in ("one", "two"):
        code, _, err = fpfl_command(
            "train", "--data", "people.csv", "--epsilon", 1, "--test", 0.2, "--rounds", 3,
            "--ledger", "people.jsonl", "--out", out,
        )  # fmt: skip
        assert code == 0, err
        evaluation = (table.parent / out / "evaluation-test.json").read_text(encoding="utf-8")
        held_out.append({n: json.loads(evaluation)[n] for n in ("users", "samples")})
    assert held_out[0] == held_out[1]
    with fpfl.PopulationLedger.open(table.parent / "people.jsonl", write=False) as ledger:
        assert len(ledger.by_run()) == 2


def test_no_groups_and_no_users_are_said_aloud(fpfl_command, table: Path) -> None:
    plain = replace(SCHEMA, user=None, attributes=())
    (table.parent / "rows.toml").write_text(plain.toml(), encoding="utf-8")
    code, out, err = fpfl_command(
        "train", "--data", "people.csv", "--schema", "rows.toml", "--epsilon", 3, "--rounds", 2,
        "--hidden", "4,3", "--seed", 1,
    )  # fmt: skip
    assert code == 0, err
    for words in ("every row is a user", "No --groups", "No --test", "K = 240 is the number"):
        assert words in out
    config = load_config(table.parent / "out/people/config.toml")
    assert config.model.hidden == [4, 3]
    assert config.training.selection == "average"
    assert config.constraint is None


def test_a_regression_from_options(fpfl_command, table: Path) -> None:
    label = Label("age", range=(16, 96), missing="drop")
    number = replace(SCHEMA, label=label, features=(SCHEMA.features[2],))
    (table.parent / "people.schema.toml").write_text(number.toml(), encoding="utf-8")
    code, _, err = fpfl_command(
        "train", "--data", "people.csv", "--label", "age", "--groups", "sex", "--rounds", 2
    )
    assert code == 0, err
    config = load_config(table.parent / "out/people/config.toml")
    assert config.constraint is not None
    assert config.constraint.kind == "equal_error"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label", "age"], "--label is 'age', and people.toml declares 'hired'"),
        (["--user", "age"], "--user is 'age', and people.toml declares 'id'"),
        (["--groups", "job"], "--groups names ['job'], and people.toml declares"),
        (["--constraint", "fnr_parity"], "give --groups, too"),
        (["--delta", "1e-5"], "--delta goes with --epsilon"),
        (["--ledger", "people.jsonl"], "--ledger goes with --epsilon"),
        (["--test", "1.5"], "--test is 1.5; expected a file, or a share"),
        (["--hidden", "ten"], "--hidden is 'ten'"),
        (["--groups", "sex", "--constraint", "fairness"], "constraint.kind is 'fairness'"),
        (["--cohort", "0"], "cohort"),
        (["--epsilon", "-1"], "epsilon"),
        (["people.toml"], "both people.toml and --data"),
    ],
)
def test_bad_options_are_one_line(fpfl_command, table, words: list[str], message: str) -> None:
    code, _, err = fpfl_command("train", "--data", "people.csv", *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (table.parent / "out").exists()


def test_options_without_a_table_and_nothing_at_all(fpfl_command) -> None:
    code, _, err = fpfl_command("train", "--epsilon", 2)
    assert (code, "--epsilon without --data" in err) == (2, True)
    code, _, err = fpfl_command("train")
    assert (code, "neither a config nor --data" in err) == (2, True)
    code, _, err = fpfl_command("train", "config.toml")
    assert (code, "--out" in err) == (2, True)
    code, _, err = fpfl_command("train", "--data", "nowhere.csv")
    assert (code, "nowhere.csv is no file" in err) == (2, True)


CONFIG = """
[data]
table = "people.csv"
schema_file = "people.toml"
[training]
cohort = 20
rounds = 2
"""


def test_a_config_names_a_table(table: Path) -> None:
    config = config_of(CONFIG, "here")
    data, test = load_data(config, table.parent)
    assert test is None
    assert data.population == 90
    held = config_of(CONFIG.replace("[training]", "held_out = 0.2\n[training]"), "here")
    parts = [load_data(held, table.parent, partition_seed=5) for _ in range(2)]
    for train, test in parts:
        assert (train.population, test.population) == (72, 18)
    same(parts[0][1], parts[1][1])
    others = [[*row[:1], f"other {row[1]}", *row[2:]] for row in people()]
    write_csv(table.parent / "others.csv", others)
    two = config_of(CONFIG.replace("[training]", 'test = "others.csv"\n[training]'), "here")
    assert load_data(two, table.parent)[1].population == len({row[1] for row in people()})
    inline = CONFIG.replace('schema_file = "people.toml"', SCHEMA.toml("data.schema"))
    assert load_data(config_of(inline, "here"), table.parent)[0].schema == SCHEMA.schema()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('schema_file = "people.toml"\n', "", "a table needs its declared schema"),
        ("[training]", "[data.schema]\n[training]", "there is no \\[label\\]"),
        ('schema_file = "people.toml"', "schema = 3", "schema is 3"),
        ("[training]", "held_out = 1.0\n[training]", "held_out"),
        ("[training]", 'held_out = 0.5\ntest = "x.csv"\n[training]', "not both"),
        ("[training]", 'columns = "x"\n[training]', "there is no key 'columns'"),
        ("[training]", "mean_samples = 3\n[training]", "do not apply to this source"),
        ('table = "people.csv"', 'folder = "people"', "do not apply to this source"),
        ('table = "people.csv"', 'table = "people.csv"\nname = "adult"', "give one of"),
    ],
)
def test_bad_configs_are_explained(before: str, after: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        config_of(CONFIG.replace(before, after), "here")
    assert "\n" not in str(caught.value)


def test_reading_looks_at_a_file_as_a_stream(tmp_path: Path, monkeypatch) -> None:
    """No more cells than a batch's are alive at a time, whatever the file's length."""
    monkeypatch.setattr(table_files, "BATCH", 10)
    path = write_csv(tmp_path / "people.csv", people(95))
    sizes = [rows.count for rows in table_files.table_rows(path, ["job"], ["age"])]
    assert sizes == [10] * 9 + [5]
    assert len(fpfl.read_table(path, SCHEMA)) == 95
