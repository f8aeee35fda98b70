"""Exported files answer as the model does, for any batch; one that does not is never left."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SEX, make_population
from torch import nn

import fpfl
from fpfl import cli
from fpfl.data.schema import scale_by_ranges
from fpfl.exporting import export_onnx, export_torch
from fpfl.exporting.export import _onnx_answers, metadata
from fpfl.training.models import cnn
from fpfl.users import task

RANGES = ((0.0, 100.0), (-5.0, 5.0), None, (0.0, 1.0), (1e4, 1.5e6))
ABOUT = {"epsilon": 1.9999, "delta": 1e-5, "constraint": "FNR parity", "tolerance": 0.02,
         "verdict": "within"}  # fmt: skip
TABLE = fpfl.Schema(shape=(5,), attributes=(SEX,), samples_per_user=2.0)
NUMBER = fpfl.Schema(shape=(5,), classes=None, label_range=(10.0, 90.0))
IMAGE = fpfl.Schema(shape=(3, 28, 28), classes=10)
TEXT, CLASSES = fpfl.Schema(shape=(6,)), fpfl.Schema(shape=(6,), classes=3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.recurrent = nn.GRU(8, 12, batch_first=True)
        self.output = nn.Linear(12, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.recurrent(self.embedding(tokens))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.output = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layer(self.embedding(tokens)).mean(dim=1))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def network(outputs: int = 1) -> nn.Module:
    return fpfl.mlp(5, (8,), outputs, seed=1)


def expected(model: nn.Module, schema: fpfl.Schema, x: torch.Tensor) -> list[np.ndarray]:
    """Scores and predictions as fpfl's own evaluation makes them."""
    with torch.no_grad():
        output = task.flatten_output(model.eval()(x), schema)
    return [task.scores(output, schema).numpy(), task.predictions(output, schema).numpy()]


def onnx_session(path: Path):
    return pytest.importorskip("onnxruntime").InferenceSession(
        path.read_bytes(), providers=["CPUExecutionProvider"]
    )


def inputs(schema: fpfl.Schema, tokens: int | None, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + batch)
    if tokens is not None:
        return torch.randint(tokens, (batch, *schema.shape), generator=generator)
    return 2.0 * torch.randn(batch, *schema.shape, generator=generator)


CASES = {
    "number": (network, NUMBER, None),
    "image": (lambda: cnn(seed=0), IMAGE, None),
    "recurrent": (lambda: made(Recurrent), TEXT, 50),
    "transformer": (lambda: made(Transformer), CLASSES, 50),
}


@pytest.mark.parametrize("case", CASES)
def test_a_torch_file_answers_as_the_model_does(case: str, tmp_path: Path) -> None:
    make, schema, tokens = CASES[case]
    model = make().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = export_torch(model, schema, tmp_path / "model.pt2", tokens=tokens)
    assert model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    opened = torch.export.load(path).module()
    for batch in (1, 2, 33):
        x = inputs(schema, tokens, batch)
        for found, wanted in zip(opened(x), expected(model, schema, x), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert [item.name for item in tmp_path.iterdir()] == ["model.pt2"]


def test_an_onnx_file_answers_as_the_model_does(tmp_path: Path) -> None:
    """Text; the table's below is another."""
    pytest.importorskip("onnxscript", reason="it is not installed: pip install 'fpfl[export]'")
    make, schema, tokens = CASES["recurrent"]
    model = make()
    session = onnx_session(export_onnx(model, schema, tmp_path / "model.onnx", tokens=tokens))
    for batch in (1, 2, 33):
        x = inputs(schema, tokens, batch)
        found = session.run(["scores", "predictions"], {"features": x.numpy()})
        for one, other in zip(found, expected(model, schema, x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table's model that scales raw columns itself, in both formats."""
    pytest.importorskip("onnxscript", reason="it is not installed: pip install 'fpfl[export]'")
    folder = tmp_path_factory.mktemp("raw")
    for write, name in ((export_torch, "model.pt2"), (export_onnx, "model.onnx")):
        write(network(), TABLE, folder / name, ranges=RANGES, about=ABOUT)
    return folder


def test_raw_columns_are_scaled_as_the_training_data_was(raw: Path) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(40, 5)) * [60.0, 5.0, 1.0, 0.7, 1e6] + [50.0, 0.0, 0.0, 0.5, 7e5]
    x = x.astype(np.float32)  # about a third lies outside of its range
    scaled = x.copy()
    for column in (0, 1, 3, 4):
        scaled[:, [column]] = scale_by_ranges(x[:, [column]], [RANGES[column]])
    assert (np.abs(scaled[:, [0, 1, 3, 4]]) == 3.0).mean() > 0.1
    wanted = expected(network(), TABLE, torch.from_numpy(scaled))
    by_onnx = onnx_session(raw / "model.onnx").run(None, {"features": x})
    by_torch = torch.export.load(raw / "model.pt2").module()(torch.from_numpy(x))
    for found in (by_onnx, [each.detach().numpy() for each in by_torch]):
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found[1], wanted[1])


def test_files_say_what_they_are(raw: Path) -> None:
    extra = {"fpfl.json": ""}
    torch.export.load(raw / "model.pt2", extra_files=extra)
    told = json.loads(extra["fpfl.json"])
    session = onnx_session(raw / "model.onnx")
    written = session.get_modelmeta().custom_metadata_map
    read = {key.removeprefix("fpfl."): value for key, value in written.items()}
    for name, value in told.items():
        assert read[name] == (value if isinstance(value, str) else json.dumps(value))
    assert set(read) == set(told)
    assert {name: told[name] for name in ABOUT} == ABOUT
    assert fpfl.Schema.from_dict(told["schema"]) == TABLE
    assert told["fpfl_version"] == fpfl.__version__
    assert told["ranges"] == [None if each is None else list(each) for each in RANGES]
    assert [i.shape for i in session.get_inputs()] == [["batch", 5]]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("scores", ["batch", 2]),
        ("predictions", ["batch"]),
    ]


def test_what_is_not_a_number_has_no_class(raw: Path) -> None:
    """NaN compares as false, which must not make it the first class."""
    x = inputs(TABLE, None, 2)
    x[0, 1] = math.nan
    by_onnx = onnx_session(raw / "model.onnx").run(None, {"features": x.numpy()})
    by_torch = torch.export.load(raw / "model.pt2").module()(x)
    for scores, predictions in (by_onnx, [each.detach().numpy() for each in by_torch]):
        assert np.isnan(scores[0]).all()
        assert predictions[0] == -1
        assert predictions[1] in (0, 1)


def test_a_file_says_which_class_is_which() -> None:
    named = replace(TABLE, class_names=("no", "yes"))
    told = metadata(named, None, None, None)
    assert (told["class_names"], told["positive"]) == (("no", "yes"), "yes")
    assert told["schema"]["class_names"] == ("no", "yes")
    three = metadata(replace(CLASSES, class_names=("a", "b", "c")), None, None, None)
    assert (three["class_names"], three["positive"]) == (("a", "b", "c"), None)
    assert metadata(NUMBER, None, None, None)["class_names"] is None


def test_without_onnxruntime_onnx_itself_runs_the_file(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, x = (raw / "model.onnx").read_bytes(), inputs(TABLE, None, 4)
    wanted = _onnx_answers(content)(x)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for one, other in zip(_onnx_answers(content)(x), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# What goes wrong


def changed(module: nn.Module, by: float) -> nn.Module:
    with torch.no_grad():
        list(module.parameters())[-1].add_(by)
    return module


@pytest.mark.parametrize("there", [False, True], ids=["new", "overwritten"])
def test_a_file_that_disagrees_is_never_left(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = torch.export.export, tmp_path / "model.pt2"
    if there:
        path.write_bytes(b"as it was")
    monkeypatch.setattr(
        torch.export, "export", lambda module, *a, **k: real(changed(module, 0.01), *a, **k)
    )
    with pytest.raises(ValueError, match="does not answer as the model does"):
        export_torch(network(), TABLE, path, overwrite=there)
    assert [item.read_bytes() for item in tmp_path.iterdir()] == ([b"as it was"] if there else [])


def test_an_onnx_file_that_disagrees_is_never_left(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter hands out another network's file, in place of this one's."""
    onnx = pytest.importorskip("onnx")

    class Program:
        model_proto = onnx.load(raw / "model.onnx")

    del Program.model_proto.metadata_props[:]
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **k: Program)
    with pytest.raises(ValueError, match="does not answer as the model does"):
        export_onnx(fpfl.mlp(5, (8,), seed=2), TABLE, tmp_path / "model.onnx", ranges=RANGES)
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right scores with the classes the wrong way round are a wrong file."""
    real = task.predictions
    monkeypatch.setattr(fpfl.exporting.predictor.task, "predictions", lambda o, s: 1 - real(o, s))
    exported = fpfl.Predictor(network(), TABLE)(inputs(TABLE, None, 6))
    monkeypatch.undo()
    wanted = tuple(expected(network(), TABLE, inputs(TABLE, None, 6)))
    agree = fpfl.exporting.export._agree
    assert agree(wanted, wanted, TABLE)
    assert not agree(wanted, tuple(each.detach().numpy() for each in exported), TABLE)
    # At a tie either class will do, and nowhere else.
    scores = np.array([[0.5, 0.5], [0.4, 0.6]])
    assert agree((scores, np.array([0, 1])), (scores, np.array([1, 1])), TABLE)
    assert not agree((scores, np.array([0, 1])), (scores, np.array([0, 0])), TABLE)


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_extra_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'fpfl\[export\]'"):
        export_onnx(network(), TABLE, tmp_path / "model.onnx")


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(ValueError, match="give tokens="):
        export_torch(made(Recurrent), TEXT, path)
    with pytest.raises(ValueError, match=r"must end in \.pt2"):
        export_torch(network(), TABLE, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="4 ranges were given"):
        export_torch(network(), TABLE, path, ranges=RANGES[:4])
    with pytest.raises(ValueError, match="low < high"):
        export_torch(network(), TABLE, path, ranges=[(1.0, 0.0)] * 5)
    path.write_bytes(b"something")
    with pytest.raises(ValueError, match="there already"):
        export_torch(network(), TABLE, path)
    with pytest.raises(OSError, match="cannot be written"):
        export_torch(network(), TABLE, path / "model.pt2")  # its folder is a file
    assert path.read_bytes() == b"something"


# The command

CONFIG = """
[data]
train = "people.npz"
[data.schema]
attributes = {sex = ["Female", "Male"]}
samples_per_user = 3
feature_ranges = [[-4, 4], [-4, 4], [-4, 4], [-4, 4], [-4, 4]]
[training]
cohort = 10
rounds = 3
seed = 0
[constraint]
kind = "fnr_parity"
by = ["sex"]
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_a_run_is_exported_from_its_folder(command, tmp_path: Path) -> None:
    people = make_population()
    users = np.repeat(np.arange(people.population), people.sizes().numpy())
    np.savez(tmp_path / "people.npz", features=people.features.numpy(), users=users,
             labels=people.labels.numpy(), attributes=people.attributes.numpy())  # fmt: skip
    (tmp_path / "fair.toml").write_text(CONFIG, encoding="utf-8")
    run, out = tmp_path / "run", tmp_path / "out"
    code, _, err = command("train", tmp_path / "fair.toml", "--out", run)
    assert code == 0, err
    parts = ("--format", "card", "--format", "torch")
    code, said, err = command("export", run, "-o", out, "--raw", *parts)
    assert code == 0, err
    names = ["MODEL_CARD.md", "model.pt2"]
    assert sorted(item.name for item in out.iterdir()) == names
    assert all(str(out / name) in said for name in names)

    from safetensors.torch import load_file

    model = fpfl.mlp(5, seed=9)
    model.load_state_dict(load_file(run / "model.safetensors"))
    scaled = scale_by_ranges(people.features.numpy(), [(-4.0, 4.0)] * 5).astype(np.float32)
    wanted = expected(model, people.schema, torch.from_numpy(scaled))
    found = torch.export.load(out / "model.pt2").module()(people.features)
    np.testing.assert_allclose(found[0].detach().numpy(), wanted[0], rtol=1e-4, atol=1e-5)

    code, _, err = command("export", run, "-o", out, *parts)
    assert code == 2
    assert "are there already" in err
    (out / "MODEL_CARD.md").write_text("old", encoding="utf-8")
    code, _, err = command(
        "export", run, "-o", out, "--format", "card", "--force", "--name", "Anna"
    )
    assert code == 0, err
    assert "# Model card: Anna" in (out / "MODEL_CARD.md").read_text(encoding="utf-8")

    (run / "model.safetensors").write_bytes(b"damaged")
    code, _, err = command("export", run, "-o", tmp_path / "new", "--format", "torch")
    assert code == 2
    assert "does not hold the weights" in err


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_a_run_from_python_is_exported_from_python(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = make_population()
    run = fpfl.train(network(), people, cohort=10, rounds=2, seed=0)
    folder, out = run.save(tmp_path / "run"), tmp_path / "out"
    code, _, err = command("export", folder, "-o", out, "--format", "torch")
    assert code == 2
    assert "fpfl.export_onnx(run.model, people.schema" in err
    assert command("export", folder, "-o", out, "--format", "card")[0] == 0
    path = export_torch(run.model, people.schema, out / "m.pt2", about=fpfl.run_facts(run))
    extra = {"fpfl.json": ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra["fpfl.json"])["marks"] == ["no privacy"]
    code, _, err = command("export", folder, "-o", out, "--format", "tensorflow")
    assert code == 2
    assert "expected torch, onnx, card or all" in err
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = command("export", folder, "-o", tmp_path / "new")
    assert code == 2
    assert "pip install 'fpfl[export]'" in err
    assert not (tmp_path / "new").exists()
    assert command("export", tmp_path, "-o", out)[0] == 2


TABLE_CONFIG = """
[data]
table = "people.csv"
[data.schema]
[data.schema.label]
column = "y"
classes = ["no", "yes"]
[data.schema.attributes]
sex = ["F", "M"]
[data.schema.features]
age = { range = [0, 100], indicator = true }
job = { values = ["clerk", "cook"] }
hours = { range = [0, 1] }
[training]
cohort = 2
rounds = 1
"""


def test_raw_ranges_are_those_that_a_config_scaled_by(tmp_path: Path) -> None:
    """Not a schema's: there a 0/1 column has the range (0, 1) too, and is not scaled."""
    from fpfl.cli.export import _raw_ranges
    from fpfl.config import load_config, load_data

    (tmp_path / "fair.toml").write_text(TABLE_CONFIG, encoding="utf-8")
    (tmp_path / "people.csv").write_text(
        "y,sex,age,job,hours\nyes,F,20,cook,0.5\nno,M,130,clerk,0.25\n", encoding="utf-8"
    )
    (tmp_path / "origin.json").write_text(
        json.dumps({"folder": str(tmp_path), "partition_seed": 0}), encoding="utf-8"
    )
    config = load_config(tmp_path / "fair.toml")
    people, _ = load_data(config, tmp_path, 0)
    ranges = _raw_ranges(tmp_path, config, people.schema)
    assert ranges == [(0.0, 100.0), None, None, None, None, (0.0, 1.0)]
    raw = torch.tensor([[20, 0, 0, 1, 0, 0.5], [130, 0, 1, 0, 0, 0.25]])
    scaled = fpfl.Predictor(nn.Linear(6, 1), people.schema, ranges)._scaled(raw)
    torch.testing.assert_close(scaled, people.features)

    (tmp_path / "fair.toml").write_text(
        '[data]\nname = "adult"\n[training]\ncohort = 2\nrounds = 1\n', encoding="utf-8"
    )
    adult = fpfl.load_adult("test")
    ranges = _raw_ranges(tmp_path, load_config(tmp_path / "fair.toml"), adult.schema)
    scaled_columns = (adult.features < 0).any(dim=0) | (adult.features > 1).any(dim=0)
    assert [each is not None for each in ranges] == scaled_columns.tolist()
