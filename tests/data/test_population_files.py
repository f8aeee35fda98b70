"""Populations on disk: what is written comes back, lazily, and damage is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fpfl import FederatedDataset, Schema, evaluate_model, fnr_parity, mlp, train
from fpfl.config import load_config, run_config
from fpfl.data import PopulationWriter, open_population, save_population
from fpfl.data import files as writer
from fpfl.training.spec import check_data

FILES = ("features.npy", "labels.npy", "attributes.npy", "offsets.npy", "schema.json")


def same(one: FederatedDataset, two: FederatedDataset) -> bool:
    names = ("features", "labels", "attributes", "offsets")
    pairs = [(getattr(one, name), getattr(two, name)) for name in names]
    return one.schema == two.schema and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def write_by_hand(folder: Path, data: FederatedDataset, kind: str = "float32") -> None:
    """User by user, as somebody would who does not have them all at once."""
    with PopulationWriter(folder, data.schema, kind) as out:
        for k in range(data.population):
            one = data.subset([k])
            out.add(one.features, one.labels, one.attributes)


@st.composite
def populations(draw: st.DrawFn) -> FederatedDataset:
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    n = sum(sizes)
    shape = draw(st.sampled_from([(), (3,), (2, 3), (1, 2, 2)]))
    attributes = draw(st.sampled_from([(), (SEX,), (SEX, RACE)]))
    classes = draw(st.sampled_from([2, 5, None]))
    kind = draw(st.sampled_from(["float32", "float64", "uint8", "int64"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = [rng.integers(-1 if a.unknown else 0, len(a.values), n) for a in attributes]
    labels = rng.uniform(-2, 2, n) if classes is None else rng.integers(0, classes, n)
    reals = np.float64 if kind == "float64" else np.float32
    schema = Schema(
        shape,
        classes=classes,
        label_range=(-2.0, 2.0) if classes is None else None,
        attributes=attributes,
        population=draw(st.sampled_from([None, len(sizes)])),
        samples_per_user=draw(st.sampled_from([None, 1.5])),
        feature_names=("a", "β", "c") if shape == (3,) else None,
    )
    return FederatedDataset(
        torch.from_numpy(np.asarray(rng.uniform(0, 255, (n, *shape))).astype(kind)),
        torch.from_numpy(labels.astype(reals) if classes is None else labels),
        torch.from_numpy(np.array(codes, dtype=np.int64).reshape(len(attributes), n).T.copy()),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)),
        schema,
    )


@settings(max_examples=40)
@given(populations(), st.integers(1, 5))
def test_what_is_saved_comes_back(data: FederatedDataset, block: int) -> None:
    """At once, in small blocks and user by user; NumPy alone reads the files."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        back = FederatedDataset.open(data.save(folder / "once"))
        assert back.lazy
        assert same(back, data)
        patch.setattr(writer, "BLOCK", block)
        save_population(back, folder / "blocks")
        write_by_hand(folder / "users", data, str(data.features.dtype).removeprefix("torch."))
        for file in FILES:
            once = (folder / "once" / file).read_bytes()
            assert once == (folder / "blocks" / file).read_bytes()
            assert once == (folder / "users" / file).read_bytes()
        assert np.array_equal(np.load(folder / "once" / "features.npy"), data.features.numpy())
        assert sorted(os.listdir(folder)) == ["blocks", "once", "users"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_population(users=40, attributes=(SEX, RACE)).save(tmp_path / "people")


def test_lazy_data_is_read_user_by_user(folder: Path) -> None:
    data, lazy = make_population(users=40, attributes=(SEX, RACE)), open_population(folder)
    users = np.array([7, 3, 39, 0, 12])
    for one, two in zip(data.rows(users), lazy.rows(users), strict=True):
        assert np.array_equal(one, two)
    index = torch.tensor([5, 0, 5, len(data) - 1])
    for given_index in (index, index.numpy()):
        for one, two in zip(data.gather(given_index), lazy.gather(given_index), strict=True):
            assert torch.equal(one, two)
    lazy.gather(index)[0].add_(1)  # a copy: the file is not written to
    assert lazy.to("cpu", torch.float64) is lazy
    assert same(lazy.subset(users), data.subset(users))
    assert not lazy.subset(users).lazy
    alone = lazy.single_samples()
    assert alone.lazy
    assert same(alone, data.single_samples())
    for refused in (lambda: lazy.partition(), lambda: lazy.split(0.5)):
        with pytest.raises(ValueError, match=r"into memory.*PopulationWriter.*subset"):
            refused()
    with pytest.raises(ValueError, match=r"users run from -1 to 2; .* from 0 to 39"):
        lazy.rows(np.array([-1, 2]))


def test_users_who_were_not_added_have_no_samples(tmp_path: Path) -> None:
    with PopulationWriter(tmp_path / "people", Schema((2,), population=5)) as out:
        out.add([], [])
        out.add([[1, 2], [3, 4]], [0, 1])
        assert out.population == 2
    assert open_population(tmp_path / "people").sizes().tolist() == [0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (([[0, 1, 2]], [0], [[0]]), r"user 1: features have shape \(1, 3\); the schema"),
        (([[0, np.nan]], [0], [[0]]), "user 1: 1 samples have NaN"),
        (([[0, 1]], [2], [[0]]), "user 1: labels run from 2 to 2"),
        (([[0, 1]], [0, 1], [[0]]), "user 1: labels have shape"),
        (([[0, 1]], [0.5], [[0]]), "user 1: .*whole numbers"),
        (([[0, 1]], [0], [[5]]), "user 1: codes of attribute 'sex'"),
        (([[0, 1]], [0], None), "user 1: attribute codes have shape"),
        (([["a", "b"]], [0], [[0]]), "user 1: .*expected numbers"),
        ((3, [0], [[0]]), r"user 1: features have shape \(1,\)"),
    ],
)
def test_bad_users_are_refused_and_the_rest_is_kept(tmp_path: Path, user, message) -> None:
    schema = Schema((2,), attributes=(SEX,), population=2)
    with PopulationWriter(tmp_path / "people", schema) as out:
        out.add([[0, 1]], [0], [1])
        with pytest.raises(ValueError, match=message):
            out.add(*user)
        out.add([[2, 3]], [1], [0])
        out.add([], [])  # more than declared: nobody is told
    found = open_population(tmp_path / "people")
    assert found.features.tolist() == [[0, 1], [2, 3]]
    assert (found.K, found.population) == (2, 3)


def test_values_must_fit_the_type_of_the_file(tmp_path: Path) -> None:
    with PopulationWriter(tmp_path / "people", Schema((2,)), "uint8") as out:
        out.add([[0, 255.0]], [0])
        for bad in ([[0, 256]], [[0.5, 1]], [[-1, 0]], [[np.nan, 0]]):
            with pytest.raises(ValueError, match=r"uint8.* does not hold; .*features_dtype"):
                out.add(bad, [0])
    assert open_population(tmp_path / "people").features.dtype == torch.uint8
    with PopulationWriter(tmp_path / "half", Schema((1,)), np.float16) as out:
        with pytest.raises(ValueError, match="infinite"):
            out.add([[1e6]], [0])
        out.add([[1.0]], [0])
    for kind in ("complex64", "bfloat16"):
        with pytest.raises(ValueError, match=f"type is {kind}; expected one of"):
            PopulationWriter(tmp_path / "other", Schema((2,)), kind)


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    data, target = make_population(users=10), tmp_path / "people"

    def write(schema: Schema, *parts: FederatedDataset | BaseException) -> None:
        with PopulationWriter(target, schema) as out:
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
                out.extend(part)

    with pytest.raises(KeyboardInterrupt):
        write(data.schema, data, KeyboardInterrupt())
    with pytest.raises(ValueError, match="no user was added"):
        write(data.schema)
    with pytest.raises(ValueError, match="not of the same kind: one declares shape"):
        write(Schema((2,)), data)
    with pytest.raises(ValueError, match="use the writer in a `with` block"):
        PopulationWriter(target, data.schema).add([], [])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_writing_whoever_catches_it(tmp_path: Path, monkeypatch) -> None:
    data, append = make_population(users=10), writer._GrowingFile.append

    def full(file: writer._GrowingFile, rows: np.ndarray) -> None:
        if rows.ndim == 1:
            raise OSError("no space left on device")
        append(file, rows)

    def write() -> None:
        with PopulationWriter(tmp_path / "people", data.schema) as out:
            monkeypatch.setattr(writer._GrowingFile, "append", full)
            with pytest.raises(OSError, match="no space"):
                out.extend(data)
            monkeypatch.undo()

    with pytest.raises(ValueError, match="start again after an error"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    data, target = make_population(users=10), tmp_path / "deep" / "people"
    data.save(target)
    with pytest.raises(ValueError, match="there already"):
        data.save(target)
    assert same(open_population(target), data)


@pytest.mark.parametrize("file", FILES)
def test_missing_and_cut_files_are_named(folder: Path, file: str) -> None:
    path = folder / file
    content = path.read_bytes()
    for size in (0, 5, 70, len(content) // 2, len(content) - 3):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=file):
            open_population(folder)
    if path.suffix == ".npy":
        path.write_bytes(content + b"more")
        with pytest.raises(ValueError, match=file):
            open_population(folder)
    path.unlink()
    with pytest.raises(ValueError, match=f"no population folder: it lacks {file}"):
        open_population(folder)
    with pytest.raises(ValueError, match="no population folder"):
        open_population(folder / "nowhere")


@settings(max_examples=60)
@given(st.sampled_from(FILES[:4]), st.lists(st.tuples(st.integers(0, 127), st.binary(min_size=1,
       max_size=3)), min_size=1, max_size=3))  # fmt: skip
@pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")
def test_a_damaged_header_is_named_or_harmless(file: str, changes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_population(users=5).save(Path(name) / "people")
        content = bytearray((folder / file).read_bytes())
        for place, value in changes:
            content[place : place + len(value)] = value
        (folder / file).write_bytes(content)
        message = None
        try:
            lazy = open_population(folder)
            lazy.subset(np.arange(lazy.population))
        except ValueError as error:
            message = str(error)
        # The samples that offsets.npy counts are those of features.npy.
        assert message is None or file in message or "features.npy" in message


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        ("labels.npy", np.zeros(3, dtype=np.int64), r"shape \(3,\); .* samples of offsets.npy"),
        ("labels.npy", "float", "labels.npy has float32 values.*int64"),
        ("features.npy", "complex", "features.npy has complex64 values"),
        ("features.npy", "swapped", "features.npy has >f4 values"),
        ("features.npy", "columns", "features.npy .*in C order"),
        ("attributes.npy", "wide", "attributes.npy has int64 values of shape"),
        ("offsets.npy", np.array([0]), "offsets.npy"),
        ("offsets.npy", np.array([1, 2]), "offsets.npy"),
        ("offsets.npy", np.array([0, -2]), "offsets.npy"),
        ("offsets.npy", np.array([0.0, 2.0]), "offsets.npy has float64 values"),
        ("features.npy", np.array([None, {}], dtype=object), "features.npy .*Python objects"),
    ],
)
def test_files_that_do_not_go_together_are_named(folder: Path, file: str, array, message) -> None:
    if isinstance(array, str):
        old = np.load(folder / file)
        array = {
            "float": lambda: old.astype(np.float32),
            "complex": lambda: old.astype(np.complex64),
            "swapped": lambda: old.astype(">f4"),
            "columns": lambda: np.asfortranarray(old),
            "wide": lambda: np.repeat(old, 2, axis=1),
        }[array]()
    np.save(folder / file, array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        open_population(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "its version is 2, this fpfl reads 1"),
        (lambda c: c.pop("version"), "it lacks 'version'"),
        (lambda c: c.pop("schema"), "it lacks 'schema'"),
        (lambda c: c["schema"].update(colour="red"), "colour"),
        (lambda c: c["schema"].update(classes="two"), "schema.json"),
        (lambda c: c["schema"].update(classes=1), "2 or more"),
        (lambda c: c["schema"].update(attributes=[{"name": "sex"}]), "values"),
        (lambda c: c["schema"].update(attributes=["sex"]), "schema.json"),
        (lambda c: c["schema"].update(shape=[6]), "features.npy"),
        (lambda c: c["schema"].update(population=41), "has 40 users; .* declares 41"),
    ],
)
def test_bad_schemas_are_named(folder: Path, change, message) -> None:
    content = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "schema.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        open_population(folder)


def test_offsets_that_fall_are_noticed_where_they_are_read(folder: Path) -> None:
    offsets = np.load(folder / "offsets.npy")
    offsets[3], offsets[20] = offsets[-1] + 1, 0
    np.save(folder / "offsets.npy", offsets)
    lazy = open_population(folder)
    lazy.rows(np.arange(8, 15))
    for user in (2, 3, 19):
        with pytest.raises(ValueError, match=rf"user {user} has the samples .*offsets.npy"):
            lazy.rows(np.array([user]))
    with pytest.raises(ValueError, match="offsets must rise"):
        lazy.save(folder.parent / "copy")


def test_opening_reads_nothing(tmp_path: Path) -> None:
    """Ten million users with 164 GB, more than most machines have: files with a hole inside."""
    n, shape = 10**7, (128, 128)
    small = make_population(users=2).save(tmp_path / "small")
    with PopulationWriter(tmp_path / "people", Schema(shape), "uint8") as out:
        out.add(np.ones((1, *shape)), [1])
    for name, width, row in (("features", "|u1", shape), ("labels", "<i8", ()),
                             ("attributes", "<i8", (0,)), ("offsets", "<i8", ())):  # fmt: skip
        rows = n + (name == "offsets")
        with (tmp_path / "people" / f"{name}.npy").open("r+b") as file:
            header = {"descr": width, "fortran_order": False, "shape": (rows, *row)}
            np.lib.format.write_array_header_1_0(file, header)
            start, bytes_ = file.tell(), int(np.dtype(width).itemsize * np.prod((rows, *row)))
            file.truncate(start + bytes_)
            if name == "offsets":
                file.seek(start + bytes_ - 16)
                file.write(np.array([n - 1, n]).tobytes())
    code = f"""
import resource, numpy as np
from fpfl import FederatedDataset
FederatedDataset.open({str(small)!r}).gather(np.array([0]))  # so that all is imported
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = FederatedDataset.open({str(tmp_path / "people")!r})
starts, sizes = data.rows(np.array([data.population - 1]))
features, labels, attributes = data.gather(starts)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(data.population, sizes[0], tuple(features.shape), after - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stderr == ""
    assert out.stdout.startswith("10000000 1 (1, 128, 128) ")
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(out.stdout.split()[-1]) * unit < 32 * 2**20  # the offsets alone are 80 MB
    (tmp_path / "people" / "features.npy").unlink()  # no tool should copy its holes


def test_evaluation_reads_batches(folder: Path) -> None:
    """Of whatever type the file has, and with a model that works in place."""
    data, lazy = make_population(users=40, attributes=(SEX, RACE)), open_population(folder)
    model = nn.Sequential(nn.ReLU(inplace=True), mlp(5, seed=0))
    for network in (model, model.double()):
        copy = data.subset(np.arange(40))
        one = evaluate_model(network, copy, constraint=fnr_parity("sex"), bootstrap=20)
        two = evaluate_model(network, lazy, constraint=fnr_parity("sex"), bootstrap=20)
        assert one.as_dict() == two.as_dict()
    assert torch.equal(lazy.features, data.features)


def test_a_group_may_be_empty_for_all_that_is_known(tmp_path: Path) -> None:
    """To know better all of the population would have to be read."""
    data = make_population(users=20)
    data = replace(data, attributes=torch.zeros_like(data.attributes))
    lazy = open_population(data.save(tmp_path / "people"))
    constraint = fnr_parity("sex")
    with pytest.raises(ValueError, match="no sample of"):
        check_data(data, constraint)
    check_data(lazy, constraint)
    with pytest.raises(ValueError, match="no attribute 'age'"):
        fnr_parity("age").bind(lazy.schema.attributes)


def test_a_config_names_a_folder(tmp_path: Path) -> None:
    data = make_population(users=40)
    data.save(tmp_path / "people")
    data.subset(range(10)).save(tmp_path / "held_out")
    make_population(users=5, features=3).save(tmp_path / "others")
    config = tmp_path / "own.toml"
    text = '[data]\nfolder = "people"\ntest = "held_out"\n[training]\ncohort = 10\nrounds = 2\n'
    config.write_text(text, encoding="utf-8")
    run, people, test = run_config(load_config(config), folder=tmp_path)
    assert people.lazy
    assert test is not None
    assert (len(run.history), people.population, test.population) == (2, 40, 10)
    assert run.evaluate(test, bootstrap=0).users == int((test.sizes() > 0).sum())
    for change, message in (
        (('"held_out"', '"others"'), "not of the same kind: .*shape"),
        (('"people"', '"nobody"'), "nobody is no population folder"),
        (("[training]", "[data.schema]\nclasses = 2\n[training]"), "do not apply"),
        (("folder", 'name = "adult"\nfolder'), "give one of"),
    ):
        config.write_text(text.replace(*change), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            run_config(load_config(config), folder=tmp_path)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_training_from_disk_gives_the_same_model(tmp_path: Path, kind: str) -> None:
    """With a file of the model's type, and of another."""
    data = make_population(users=60)
    write_by_hand(tmp_path / "people", data, kind)
    models = [
        train(
            mlp(5, seed=0), population, cohort=20, rounds=5, seed=0, clip=1.0,
            constraint=fnr_parity("sex"), samples_per_user=4, selection="last",
        ).model
        for population in (data, open_population(tmp_path / "people"))
    ]  # fmt: skip
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, two)


def test_samples_that_are_not_what_the_schema_says_name_its_file(tmp_path: Path) -> None:
    """A schema that was changed afterwards, found by fuzzing: −1 is not declared any more."""
    data = make_population(attributes=(RACE,))
    folder = data.save(tmp_path / "people")
    content = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
    content["schema"]["attributes"][0]["unknown"] = False
    (folder / "schema.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"schema\.json declares: codes of attribute 'race'"):
        FederatedDataset.open(folder).subset(np.arange(data.population))
