"""The unfair digits: the paper's construction, what networks are shown of it, and its table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fpfl import evaluate_model, train
from fpfl.data.femnist import (
    GROUPS,
    BundledDigits,
    Writer,
    find_digits,
    unfair_digits,
    write_compact,
    write_unfair_digits,
)
from fpfl.data.femnist.source import Part
from fpfl.data.femnist.unfair import (
    FEATURES,
    _blurred,
    assigned,
    both_ways,
    drawn,
    group_sizes,
    oriented,
    standardised,
    writers_stream,
)
from fpfl.experiments import rows as measured
from fpfl.experiments import runner as kept
from fpfl.experiments.__main__ import main
from fpfl.experiments.markdown import with_epsilon
from fpfl.experiments.tables import Options, load_table, parsed_noise
from fpfl.training.models import cnn

STAND_IN = Path(__file__).parents[3] / "shared" / "data" / "nist-digits"
BLACK, BLUE, CHALK = range(3)


class MadeUp:
    """A source of random digits; ``absent`` writers have none in a part."""

    title = "made-up digits"

    def __init__(self, sizes: Sequence[int], absent: dict[str, Part] | None = None) -> None:
        self.sizes, self.absent = list(sizes), absent or {}

    def names(self) -> list[str]:
        return [f"w{k:03d}" for k in range(len(self.sizes))]

    def read(self, part: Part) -> Iterator[Writer]:
        for k, name in reversed(list(enumerate(self.names()))):  # files need not be sorted
            if self.absent.get(name) != part:
                rng = np.random.default_rng([k, part == "test"])
                pixels = rng.integers(0, 256, (self.sizes[k], 28, 28), dtype=np.uint8)
                yield Writer(name, pixels, rng.integers(0, 10, self.sizes[k], dtype=np.uint8))


def random_pixels(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 28, 28), dtype=np.uint8)


# The construction


def test_the_groups_of_the_real_file_are_the_papers() -> None:
    """By made-up names of the real file's form, in any order that they come in."""
    names = [f"f{k:04d}_{k % 43:02d}" for k in range(3383)]
    shuffled = [names[k] for k in np.random.default_rng(0).permutation(len(names))]
    group = assigned(shuffled)
    assert [list(group.values()).count(code) for code in range(3)] == [1522, 1522, 339]
    ordered = [group[name] for name in sorted(names)]
    assert ordered == sorted(ordered)
    assert group_sizes(3383) == (1522, 1522, 339)


@given(st.integers(0, 10_000))
def test_group_sizes_are_floors_of_45_percent(users: int) -> None:
    pens, blue, chalk = group_sizes(users)
    assert pens == blue == users * 45 // 100
    assert pens + blue + chalk == users


def test_lexicographic_is_not_numeric() -> None:
    names = [str(k) for k in range(100)]
    group = assigned(names)
    assert group["99"] == CHALK
    assert group["9"] == BLUE  # before "90"
    assert group["10"] == BLACK  # before "2"
    assert [name for name in sorted(names) if group[name] == CHALK] == sorted(names)[90:]


def test_the_seeded_order_has_the_same_sizes_and_other_people() -> None:
    names = [f"w{k}" for k in range(200)]
    by_name, one, again, two = (
        assigned(names, *how)
        for how in (("lexicographic",), ("seeded", 1), ("seeded", 1), ("seeded", 2))
    )
    assert one == again
    assert one != two != by_name != one
    for group in (by_name, one, two):
        assert sorted(group.values()) == [BLACK] * 90 + [BLUE] * 90 + [CHALK] * 20


def test_who_is_held_out_does_not_depend_on_who_has_chalk() -> None:
    """A split by the same seed: had it the same stream, all held-out users would have one pen."""
    data = unfair_digits(MadeUp([1] * 200), order="seeded", seed=0)
    _, held = data.split(0.2, seed=0)
    counts = np.bincount(held.attributes[:, 0].numpy(), minlength=3)
    # 40 of 200 without replacement, 20 with chalk: none with probability below 1%.
    assert counts.min() >= 1


def test_bad_orders_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the order is 'random'"):
        assigned(["a"], "random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another's name"):
        assigned(["a", "a"])
    with pytest.raises(ValueError, match="the seed is -1"):
        assigned(["a"], "seeded", -1)


@given(arrays(np.float32, (2, 28, 28), elements=st.floats(-2, 2, width=32)))
@settings(max_examples=20)
def test_the_blur_is_scipys(images: np.ndarray) -> None:
    from scipy.ndimage import gaussian_filter

    for deviation in (1.0, 2.0):
        expected = np.stack([gaussian_filter(image, deviation) for image in images])
        np.testing.assert_allclose(_blurred(images, deviation), expected, atol=2e-6)


def test_pens() -> None:
    pixels = random_pixels(4)
    rng = np.random.default_rng(0)
    black, blue = drawn(pixels, BLACK, rng), drawn(pixels, BLUE, rng)
    x = pixels.astype(np.float32) / 255
    for channel in range(3):
        np.testing.assert_array_equal(black[:, channel], x)
    np.testing.assert_array_equal(blue[:, 0], x)
    np.testing.assert_array_equal(blue[:, 1], x)
    assert (blue[:, 2] == 1).all()  # a stroke, x = 0, is pure blue


def test_chalk_is_the_papers_formula() -> None:
    from scipy.ndimage import gaussian_filter

    pixels = random_pixels(3)
    found = drawn(pixels, CHALK, np.random.default_rng(7))
    noise = np.random.default_rng(7).standard_normal((3, 28, 28), dtype=np.float32)
    for k in range(3):
        x = 1.0 - pixels[k] / 255  # strokes white, the board black
        x = gaussian_filter(x + gaussian_filter(noise[k].astype(float), 2.0), 1.0)
        for channel in range(3):
            np.testing.assert_allclose(found[k, channel], np.rot90(x), atol=1e-5)


def test_noise_belongs_to_the_writer_the_part_and_the_seed() -> None:
    def first(*key) -> float:
        return float(writers_stream(*key).standard_normal())

    assert first(0, "train", "a") == first(0, "train", "a")
    others = {first(0, "train", "b"), first(0, "test", "a"), first(1, "train", "a")}
    assert len(others | {first(0, "train", "a")}) == 4


# The population


def test_the_population_has_everybody_in_both_parts() -> None:
    source = MadeUp([3] * 20, absent={"w004": "test", "w007": "train"})
    training, testing = (unfair_digits(source, part) for part in ("train", "test"))
    assert training.population == testing.population == 20
    assert training.sizes().tolist() == [0 if k == 7 else 3 for k in range(20)]
    assert testing.sizes().tolist() == [0 if k == 4 else 3 for k in range(20)]
    assert training.attributes[:, 0].unique_consecutive().tolist() == [0, 1, 2]
    assert training.schema.attributes[0].values == GROUPS
    # User 5's samples are that writer's, whatever the order in the file.
    writer = next(w for w in source.read("train") if w.name == "w005")
    mine = training.subset([5])
    np.testing.assert_array_equal(mine.labels.numpy(), writer.labels)
    np.testing.assert_array_equal(mine.features[:, 0].numpy(), writer.pixels / np.float32(255))


@pytest.mark.parametrize("features", FEATURES)
def test_a_population_on_disk_is_the_same(tmp_path, features) -> None:
    source = MadeUp([2, 1, 3, 4, 2, 2, 1, 3, 2, 5], absent={"w002": "train"})
    held = unfair_digits(source, features=features, order="seeded", seed=3)
    lazy = write_unfair_digits(source, tmp_path / "p", features=features, order="seeded", seed=3)
    assert lazy.lazy
    assert lazy.population == held.population
    assert lazy.schema == held.schema
    order = [9, 8, 7, 6, 5, 4, 3, 1, 0, 2]  # as the source has them, those without samples last
    again = lazy.subset(np.argsort(order))
    for name in ("features", "labels", "attributes", "offsets"):
        assert torch.equal(getattr(again, name), getattr(held, name)), name


def test_unknown_features_are_refused() -> None:
    with pytest.raises(ValueError, match="the features are 'sift'"):
        unfair_digits(MadeUp([1]), features="sift")


@pytest.mark.skipif(not STAND_IN.exists(), reason="the stand-in ../shared/data is not here")
@pytest.mark.parametrize(
    ("order", "chalk"),
    [("lexicographic", 1_514), pytest.param("seeded", 6_202, marks=pytest.mark.release)],
)
def test_the_stand_in(order, chalk) -> None:
    source = find_digits(STAND_IN)
    assert source.title == "NIST digits, 836 writers"
    data = unfair_digits(source, order=order, features="oriented")
    assert (data.population, len(data)) == (836, 62_782)
    assert int((data.attributes == CHALK).sum()) == chalk


# What a network is shown


def test_standardised_images_have_mean_0_and_variance_1() -> None:
    seen = standardised(drawn(random_pixels(5), BLUE, np.random.default_rng(0)))
    np.testing.assert_allclose(seen.mean(axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(seen.std(axis=(1, 2, 3)), 1, atol=1e-2)


def smooth(n: int, seed: int) -> np.ndarray:
    images = np.random.default_rng(seed).random((n, 28, 28), dtype=np.float32)
    return np.repeat(_blurred(images, 2.0)[:, None], 3, axis=1)


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_oriented_gradients_do_not_tell_light_from_dark(seed: int) -> None:
    images = smooth(2, seed)
    np.testing.assert_allclose(oriented(images), oriented(0.3 - 2 * images), atol=2e-2)


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_oriented_gradients_turn_with_the_image(seed: int) -> None:
    """By 90°: cells turn, and orientations move by half of the bins."""
    images = smooth(2, seed)
    turned = oriented(np.rot90(images, axes=(2, 3)).copy())
    expected = np.roll(np.rot90(oriented(images), axes=(2, 3)), 4, axis=1)
    np.testing.assert_allclose(turned, expected, atol=1e-3)


def test_both_ways_are_the_image_and_the_turned_image() -> None:
    images = smooth(3, 0)
    turned = np.rot90(images, axes=(2, 3)).copy()
    expected = np.stack([oriented(each).reshape(3, -1) for each in (images, turned)], axis=1)
    np.testing.assert_allclose(both_ways(images), expected, atol=1e-3)


@pytest.mark.parametrize("features", FEATURES)
def test_an_empty_page_is_finite(features) -> None:
    seen = FEATURES[features](np.ones((1, 3, 28, 28), np.float32))
    assert np.isfinite(seen).all()


# The digits that need no file


def test_bundled_digits() -> None:
    source = BundledDigits()
    parts = {part: list(source.read(part)) for part in ("train", "test")}
    sizes = {part: sum(len(w.labels) for w in found) for part, found in parts.items()}
    assert sizes == {"train": 1647, "test": 150}
    assert len(source.names()) == 150
    assert "made-up" in source.title
    assert "FEMNIST" not in source.title
    for writer in parts["train"]:
        assert writer.pixels.shape == (len(writer.labels), 28, 28)
        assert (writer.pixels[:, 0] == 255).all()  # paper around the digit
        assert writer.pixels.min() < 64
    again = next(BundledDigits().read("train"))
    np.testing.assert_array_equal(again.pixels, parts["train"][0].pixels)
    other = next(BundledDigits(seed=1).read("train"))
    assert not np.array_equal(other.pixels, parts["train"][0].pixels)


def test_a_model_learns_the_bundled_digits() -> None:
    training, testing = (
        unfair_digits(BundledDigits(), part, features="oriented") for part in ("train", "test")
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(392, 10))
    run = train(model, training, cohort=50, rounds=60, learning_rate=0.02, seed=0)
    assert evaluate_model(run.model, testing, bootstrap=0).accuracy > 0.8


# The network and the table


def test_the_network_is_the_papers() -> None:
    model = cnn(seed=0)
    assert sum(p.numel() for p in model.parameters()) == 157_206
    assert model(torch.zeros(2, 3, 28, 28)).shape == (2, 10)
    same, other = cnn(seed=0), cnn(seed=1)
    assert torch.equal(model[0].weight, same[0].weight)
    assert not torch.equal(model[0].weight, other[0].weight)
    with pytest.raises(ValueError, match="initial is 'zero'"):
        cnn(initial="zero")  # type: ignore[arg-type]


def test_every_row_of_the_papers_table_is_there() -> None:
    rows = {row.name(0): row for row in load_table("femnist")}
    assert len(rows) == len(load_table("femnist"))
    paper = {name: row for name, row in rows.items() if row.paper}
    assert list(paper) == [
        "cnn/FL/100/3383", "cnn/FFL/100/3383", "cnn/FL+Clip/100/3383", "cnn/FFL+Clip/100/3383",
        "cnn/PFL/100/3383", "cnn/FPFL/100/3383",
        "cnn/PFL/2000/338300", "cnn/FPFL/2000/338300",
        "cnn/PFL/2000/3383000", "cnn/FPFL/2000/3383000",
    ]  # fmt: skip
    for row in paper.values():
        constrained = row.algorithm.startswith(("FFL", "FPFL"))
        assert (row.learning_rate, row.rounds, row.tolerance) == (0.1, 2000, 0.04)
        assert (row.method, row.damping) == (("mmdm", 20.0) if constrained else (None, 0.0))
        assert row.multiplier_rate == 0.05
        free = row.algorithm in ("FL", "FFL")
        assert row.clip == (None if free else 350.0 if constrained else 250.0)
        assert row.private == ("PFL" in row.algorithm)
    # δ = 2.5e-4 for K, and less in proportion for 100 K and 1,000 K.
    for row in paper.values():
        if row.private:
            assert (row.population or 0) * (row.delta or 0) == pytest.approx(3383 * 2.5e-4)
    # FPFL-1G beside every private row.
    for row in paper.values():
        if row.private:
            beside = [r for r in rows.values() if r.algorithm == "FPFL-1G"
                      and (r.cohort, r.population) == (row.cohort, row.population)]  # fmt: skip
            assert beside


def results_of(capsys, *arguments: str) -> list[dict]:
    assert main(["femnist", "--jobs", "1", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_private_row_says_what_is_real(capsys) -> None:
    """The bundled digits have 150 users: noise of 3,383, and of 338,300 with cohorts of 2,000."""
    rows = results_of(capsys, "--rows", "oriented/PFL tuned/*", "--scale", "0.003")
    assert [row["real_cohort"] for row in rows] == [100, 150, 150]
    for row in rows:
        assert row["data"].startswith("scikit-learn's digits")
        assert row["population"] == 150
        assert row["rounds"] == 6
        assert row["epsilon"] == pytest.approx(2.0, rel=1e-3)
        assert row["epsilon_real"] > 2 * row["epsilon"]
        assert set(row["rates"]["test"]["accuracy"]) == {
            "overall", "gap", "pen=black pen", "pen=blue pen", "pen=chalk",
        }  # fmt: skip
    # With everybody in every round, the noise over the number of users is the large cohort's.
    from fpfl.privacy.accounting import calibrate_poisson

    sigma = calibrate_poisson(2.0, 2000 / 338_300, 6, 2.5e-6, "zero-out")
    assert rows[1]["noise_multiplier"] / 150 == pytest.approx(sigma / 2000, rel=1e-3)


def test_the_noise_of_a_row_can_be_given(capsys) -> None:
    rows = results_of(
        capsys, "--rows", "oriented/PFL tuned/*", "--scale", "0.0005",
        "--noise-multiplier", "*/100/*=3.5", "--noise-multiplier", "0.5",
    )  # fmt: skip
    assert [row["noise_multiplier"] for row in rows] == [3.5, 0.0375, 0.0375]
    assert parsed_noise("2") == ("*", 2.0)
    both = Options(noise=(("*", 1.0), ("b*", 2.0)))
    assert both.noise_multiplier("bc") == 2.0
    assert both.noise_multiplier("c") == 1.0
    options = Options(noise=(parsed_noise("a=b*=1"),))
    assert options.noise_multiplier("a=bc") == 1.0
    assert options.noise_multiplier("c") is None
    for bad in ("x", "a=", "*=0", "nan", "-1"):
        with pytest.raises(ValueError, match="--noise-multiplier"):
            parsed_noise(bad)


def test_epsilon_is_worked_out_later_where_there_was_no_accountant(capsys) -> None:
    row = results_of(capsys, "--rows", "oriented/PFL tuned/100/*", "--scale", "0.001")[0]
    names = ("epsilon", "epsilon_honest", "epsilon_real")
    missing = row | dict.fromkeys(names)
    assert with_epsilon(missing) == row
    assert with_epsilon(missing | {"noise_multiplier": None})["epsilon"] is None


class CutOffError(Exception):
    """Stands for a power cut."""


def test_a_table_that_was_cut_off_is_gone_on_with(tmp_path, capsys, monkeypatch) -> None:
    arguments = ["--rows", "oriented/FPFL-1G/100/*", "--scale", "0.001", "--seeds", "2"]
    whole = results_of(capsys, *arguments)
    calls, inner = [], measured._result

    def cut(row, seed, *more):
        calls.append((row.variant, seed))
        if len(calls) == 3:
            raise CutOffError
        return inner(row, seed, *more)

    monkeypatch.setattr(measured, "_result", cut)
    out = tmp_path / "out"
    with pytest.raises(CutOffError):
        main(["femnist", "--jobs", "1", "--out", str(out), *arguments])
    assert len(kept.read_kept(out)) == 2
    assert json.loads((out / "about.json").read_text())["wall_seconds"] is None
    assert main(["femnist", "--out", str(out), *arguments]) == 2
    assert "--resume" in capsys.readouterr().err
    resumed = results_of(capsys, "--out", str(out), "--resume", *arguments)
    everything = {(variant, seed) for variant in ("loose", "strict") for seed in (0, 1)}
    assert set(calls[3:]) == everything - set(calls[:2])
    assert len(calls) == 5
    for one, other in zip(resumed, whole, strict=True):
        # Beside other runs a run is the same to rounding, which may move a sample or two.
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, str | int | None):
                assert value == other[name] or name == "together", name
        for name in ("accuracy", "gap", "train_accuracy", "train_gap"):
            assert one[name] == pytest.approx(other[name], abs=0.02), name
    assert not (out / "partial.json").exists()
    # Nothing is left to do, whatever the number of jobs; an ε that was not known then is now.
    finished = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps([r | {"epsilon_real": None} for r in finished]))
    assert main(["femnist", "--jobs", "2", "--out", str(out), "--resume", *arguments]) == 0
    assert len(calls) == 5
    assert json.loads((out / "results.json").read_text()) == finished
    capsys.readouterr()
    # Another row joins them; nothing is run twice, and all calls are named.
    more = results_of(capsys, "--out", str(out), "--resume", "--rows", "oriented/PFL*/100/*",
                      "--scale", "0.001")  # fmt: skip
    assert len(calls) == 6
    assert [r["algorithm"] for r in more] == ["PFL tuned"] + ["FPFL-1G"] * 4
    seconds = [about["wall_seconds"] for about in kept.read_about(out)]
    assert len(seconds) == 4
    assert seconds[3:] == [None]  # the first call was cut off
    assert "cut off" in (out / "table.md").read_text()
    # Runs of other settings are not mixed in.
    for other in (["--scale", "0.002"], ["--scale", "0.001", "--order", "seeded"]):
        assert main(["femnist", "--out", str(out), "--resume", *other]) == 2
        assert "with other settings" in capsys.readouterr().err
    assert main(["femnist", "--resume"]) == 2
    assert "--out" in capsys.readouterr().err
    (out / "results.json").write_text("[{}]")
    assert main(["femnist", "--out", str(out), "--resume", *arguments]) == 2
    assert "cannot be resumed" in capsys.readouterr().err


def test_what_a_run_is_one_of() -> None:
    row = load_table("femnist")[4]
    options = Options()
    key = kept.run_key(row, 0, options)
    elsewhere = dataclasses.replace(options, device="cuda", precision="tf32")
    assert kept.run_key(row, 0, elsewhere) == key
    changed = [
        kept.run_key(row, 1, options),
        kept.run_key(dataclasses.replace(row, clip=1.0), 0, options),
        kept.run_key(row, 0, dataclasses.replace(options, order="seeded")),
        kept.run_key(row, 0, dataclasses.replace(options, noise=(("*", 2.0),))),
        kept.run_key(row, 0, dataclasses.replace(options, convention="paper")),
    ]
    assert len({key, *changed}) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["femnist", "--data", "/nowhere/x.npz"], "/nowhere/x.npz"),
        (["femnist", "--order", "random"], "the order is 'random'"),
        (["femnist", "--scale", "2"], "the scale is 2"),
        (["femnist", "--precision", "fp8"], "the precision is 'fp8'"),
        (["femnist", "--noise-multiplier", "*/3/*=2"], "no row matches"),
        (["adult-central", "--data", "digits"], "Adult's tables bring their own data"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_the_table_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """From the compact file, with σ given, as on a bare machine with a GPU."""
    write_compact(MadeUp([5] * 30), tmp_path / "digits.npz")
    code = f"""
import sys
for name in ('dp_accounting', 'scipy', 'pydantic', 'typer', 'click', 'rich', 'matplotlib',
             'safetensors', 'fairlearn', 'h5py', 'ijson', 'sklearn'):
    sys.modules[name] = None  # whoever imports it finds it missing
from fpfl.experiments.__main__ import main
sys.exit(main(['femnist', '--data', {str(tmp_path / "digits.npz")!r}, '--rows', '*/FPFL*/100/*',
               '--scale', '0.001', '--noise-multiplier', '2.28', '--jobs', '1',
               '--out', {str(tmp_path / "out")!r}]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {r["algorithm"] for r in found} == {"FPFL", "FPFL-1G"}
    assert {r["epsilon_real"] for r in found} == {None}
    assert found[0]["data"].startswith("made-up digits")
