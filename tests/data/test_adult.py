import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fpfl.data
from fpfl.data import load_adult

ROOT = Path(__file__).resolve().parents[2]
NPZ = Path(fpfl.data.__file__).with_name("adult.npz")
RAW = ROOT.parent / "shared" / "data" / "adult"

# Counted in the raw files: rows and rows with >50K.
COUNTS = {
    ("train", "Female"): (10_771, 1_179),
    ("train", "Male"): (21_790, 6_662),
    ("test", "Female"): (5_421, 590),
    ("test", "Male"): (10_860, 3_256),
}
RACE_COUNTS = {"train": (27_816, 1_039, 311, 271, 3_124), "test": (13_946, 480, 159, 135, 1_561)}


@pytest.mark.parametrize(("split", "sex"), list(COUNTS))
def test_counts_by_sex_are_those_of_the_raw_files(split: Any, sex: str) -> None:
    data = load_adult(split)
    assert data.population == len(data) == (32_561 if split == "train" else 16_281)
    code = data.schema.attributes[0].values.index(sex)
    labels = data.labels[data.attributes[:, 0] == code]
    assert (len(labels), int(labels.sum())) == COUNTS[split, sex]


@pytest.mark.parametrize("split", ["train", "test"])
def test_race_is_offered_beside_sex(split: Any) -> None:
    both = load_adult(split, attributes=("race", "sex"))
    assert [attribute.name for attribute in both.schema.attributes] == ["race", "sex"]
    assert tuple(both.attributes[:, 0].bincount().tolist()) == RACE_COUNTS[split]
    assert both.attributes[:, 1].equal(load_adult(split).attributes[:, 0])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("normalise", ["paper", "ranges"])
def test_features(split: Any, normalise: Any) -> None:
    data = load_adult(split, normalise=normalise)
    x = data.features.numpy()
    names = data.schema.feature_names
    assert names is not None
    assert x.dtype == np.float32
    assert x.shape[1:] == data.schema.shape == (len(names),) == (92,)
    assert np.isfinite(x).all()
    assert set(np.unique(x[:, 6:])) == {0.0, 1.0}
    assert (x[:, 6:].sum(axis=1) == 7).all()
    sex = x[:, [names.index("sex=Female"), names.index("sex=Male")]].argmax(axis=1)
    assert (sex == data.attributes[:, 0].numpy()).all()


def test_paper_normalisation_is_by_the_training_rows() -> None:
    train = load_adult("train", normalise="paper").features[:, :6].double().numpy()
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.var(axis=0), 1, atol=1e-6)
    test = load_adult("test", normalise="paper").features[:, :6].double().numpy()
    assert (abs(test.mean(axis=0)) > 1e-4).any()
    assert load_adult(normalise="paper").schema.feature_ranges is None


def test_ranges_are_declared_and_scale_to_three_either_way() -> None:
    with np.load(NPZ, allow_pickle=False) as file:
        age = file["age"][:32_561]
    data = load_adult(normalise="ranges")
    assert data.schema.feature_ranges is not None
    assert data.schema.feature_ranges[0] == (17, 90)
    np.testing.assert_allclose(data.features[:, 0], 6 * (age - 17.0) / 73 - 3, atol=1e-6)
    for split in ("train", "test"):
        x = load_adult(split, normalise="ranges").features
        assert x.min() == -3
        assert x.max() == 3
        assert x[:, 6:].unique().tolist() == [0, 1]


def test_values_outside_a_range_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fpfl.data.adult.RANGES, "age", (30, 40))
    x = load_adult(normalise="ranges").features[:, 0]
    assert x.min() == -3
    assert x.max() == 3


def test_education_says_what_education_num_says() -> None:
    with np.load(NPZ, allow_pickle=False) as file:
        assert (file["education"] + 1 == file["education-num"]).all()
        assert len(file["education.values"]) == 16


@pytest.mark.parametrize(
    "wrong", [{"split": "valid"}, {"normalise": "max"}, {"attributes": ("sex", "age")}]
)
def test_what_is_not_offered_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|choose among"):
        load_adult(**wrong)


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "make_adult.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not RAW.is_dir(), reason="the raw Adult files are not in ../shared/data/adult")
def test_script_rebuilds_the_file(tmp_path: Path) -> None:
    out = tmp_path / "adult.npz"
    done = make("--raw", RAW, "--out", out)
    assert done.returncode == 0, done.stderr
    with np.load(out, allow_pickle=False) as made, np.load(NPZ, allow_pickle=False) as kept:
        assert made.files == kept.files
        for name in kept.files:
            np.testing.assert_array_equal(made[name], kept[name], strict=True)
    # Another implementation of zlib compresses the same content to other bytes.
    if "ng" not in zlib.ZLIB_RUNTIME_VERSION:
        assert out.read_bytes() == NPZ.read_bytes()


def test_script_refuses_files_that_are_not_the_originals(tmp_path: Path) -> None:
    for name in ("adult.data", "adult.test"):
        (tmp_path / name).write_text("39, State-gov\n")
    done = make("--raw", tmp_path, "--out", tmp_path / "adult.npz")
    assert done.returncode != 0
    assert "sha256" in done.stderr
    assert not (tmp_path / "adult.npz").exists()
