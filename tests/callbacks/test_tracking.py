"""TensorBoard and MLflow get what was released, all of it and nothing else."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import make_population
from killing import settings

import fpfl
from fpfl.callbacks.tracking import SEEDED, Names, plain_settings, scalars
from fpfl.server.loop import RoundEvent

pytestmark = pytest.mark.filterwarnings("ignore:the noise dominates")
ROUNDS = 6


class StopError(Exception):
    """As far as a run can tell, a crash."""


def train(*callbacks: Any, folder: Any = None, **others: Any) -> fpfl.Run:
    given = settings(5, rounds=ROUNDS) | {"seed": 1} | others
    data = given.pop("data", None) or make_population()
    return fpfl.train(
        fpfl.mlp(5, (4,), seed=0), data, folder=folder, callbacks=list(callbacks), **given
    )


def stop_after(round: int) -> Any:
    def stop(event: RoundEvent) -> None:
        if event.row["round"] == round:
            raise StopError("sample 17 has the label 3")

    return stop


def expected(run: fpfl.Run) -> dict[str, dict[int, float]]:
    """Every figure of a history by name and round, those that are known."""
    found: dict[str, dict[int, float]] = {}

    def put(name: str, t: int, value: float | None) -> None:
        if value is not None:
            found.setdefault(name, {})[t] = float(value)

    for row in run.history:
        t = row["round"]
        for name in ("accuracy", "gap", "gradient_norm", "fair"):
            put(name, t, row[name])
        for group in ("Female", "Male"):
            for ours, theirs in (("groups", "rate"), ("counts", "count")):
                put(f"{theirs}/FNR/sex_{group}", t, row[ours]["FNR"][f"sex={group}"])
            put(f"multiplier/FNR/sex_{group}", t, row["multipliers"]["FNR"][f"sex={group}"])
        put("overall/FNR", t, row["overall"]["FNR"])
        for name in ("balanced_accuracy", "f1", "collapsed"):
            put(name, t, row["balance"][name])
        for k, share in enumerate(row["balance"]["predicted"]):
            put(f"predicted/{k}", t, share)
    return found


# --- what is logged -----------------------------------------------------------------------------


def test_scalars_are_the_rows_and_epsilon() -> None:
    trainings: list[fpfl.Training] = []

    class Keep:
        def begin(self, training: fpfl.Training) -> None:
            trainings.append(training)

        def __call__(self, event: RoundEvent) -> None:
            pass

    run = train(Keep(), method=fpfl.OneGradient())
    row = run.history[-1]
    found = scalars(row, trainings[0])
    assert found.pop("epsilon_so_far") == run.privacy.epsilon  # type: ignore[union-attr]
    assert ("averaged_gap" in found) == (row["averaged_gap"] is not None)
    # Of tables the figures are logged, over a window: how often each class is predicted.
    window = row["balance"]
    numbers = [row["fair"], *(window[n] for n in ("balanced_accuracy", "f1", "collapsed"))]
    numbers += window["predicted"]
    own = ("round", "fair", "confusion", "balance")
    numbers += _numbers({k: v for k, v in row.items() if k not in own})
    assert sorted(found.values()) == sorted(float(n) for n in numbers if n is not None)


def _numbers(tree: Any) -> list[Any]:
    return [n for v in tree.values() for n in _numbers(v)] if isinstance(tree, dict) else [tree]


def test_what_is_not_known_is_left_out() -> None:
    row = {"round": 1, "accuracy": None, "gap": math.inf, "fair": True, "gradient_norm": 2.0}
    assert scalars(row) == {"gradient_norm": 2.0}


def test_names_are_safe_and_stay_apart() -> None:
    names = Names()
    found = [names[n] for n in ("rate/a=b", "rate/a_b", "rate/a:b", "rate/ä", "rate/a=b")]
    assert found == ["rate/a_b", "rate/a_b_2", "rate/a_b_3", "rate/_", "rate/a_b"]


def test_settings_are_flat_and_plain() -> None:
    given = {"cohort": 5, "privacy": {"epsilon": 2.0, "delta": None}, "rates": ["a", "b"]}
    assert plain_settings(given) == {"cohort": 5, "privacy.epsilon": 2.0, "rates": "a, b"}


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("torch.utils.tensorboard.writer", lambda: fpfl.TensorBoardCallback("logs")),
        ("mlflow", fpfl.MLflowCallback),
    ],
)
def test_a_missing_package_names_the_extra(module: str, make: Any, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'fpfl\[tracking\]'"):
        make()


# --- TensorBoard --------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed (pip install 'fpfl[tracking]')",
    )
    return reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def logged(folder: Path) -> dict[str, dict[int, float]]:
    found = events(folder)
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def words(folder: Path, tag: str) -> str:
    (event,) = events(folder).Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def tensorboard(folder: Path) -> fpfl.TensorBoardCallback:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed (pip install 'fpfl[tracking]')"
    )
    return fpfl.TensorBoardCallback(folder)


def test_tensorboard_has_every_released_figure(tmp_path: Path) -> None:
    run = train(tensorboard(tmp_path / "logs"))
    found = logged(tmp_path / "logs")
    epsilon = found.pop("epsilon_so_far")
    final = {name: found.pop(name) for name in list(found) if name.startswith("final/")}
    assert found.keys() == expected(run).keys()
    for name, values in expected(run).items():
        assert found[name] == pytest.approx(values, rel=1e-6)  # float32 there
    assert run.privacy is not None
    assert epsilon[ROUNDS] == pytest.approx(run.privacy.epsilon, rel=1e-6)
    assert final["final/epsilon_so_far"] == {ROUNDS: pytest.approx(run.privacy.epsilon, rel=1e-6)}
    said = words(tmp_path / "logs", "privacy")
    assert all(line in said for line in run.privacy.lines())
    assert all(note in said for note in run.warnings)
    assert SEEDED in words(tmp_path / "logs", "tags")
    settings = words(tmp_path / "logs", "settings").strip("`\n")
    assert json.loads(settings) == json.loads(json.dumps(run.settings))


def test_tensorboard_goes_on_where_a_run_does(tmp_path: Path) -> None:
    where = fpfl.RunFolder(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(StopError):
        train(tensorboard(tmp_path / "logs"), stop_after(5), folder=where)
    assert words(tmp_path / "logs", "failed") == "StopError"  # and not what it says
    again = fpfl.RunFolder(tmp_path / "run", resume=True)
    run = train(tensorboard(tmp_path / "logs"), folder=again)
    assert logged(tmp_path / "logs")["gradient_norm"] == pytest.approx(
        expected(run)["gradient_norm"], rel=1e-6
    )


def test_a_disk_that_fails_does_not_stop_training(tmp_path: Path, monkeypatch) -> None:
    callback = tensorboard(tmp_path / "logs")
    from torch.utils.tensorboard.writer import SummaryWriter

    def full(self, *args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with pytest.warns(fpfl.FpflWarning, match="No space left") as caught:
        run = train(callback)
    assert len(run.history) == ROUNDS
    assert len([w for w in caught if "No space" in str(w.message)]) == 1


# --- MLflow -------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch) -> str:
    """A store of files, which needs no server and no database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "mlflow", reason="mlflow-skinny is not installed (pip install 'fpfl[tracking]')"
        )
    return (tmp_path / "mlruns").as_uri()


def test_mlflow_has_every_released_figure(store: str) -> None:
    callback = fpfl.MLflowCallback("adult", run_name="one", tracking_uri=store)
    sent = []
    client = callback._client
    real = client.log_batch
    client.log_batch = lambda *args, **kwargs: (sent.append(kwargs), real(*args, **kwargs))
    run = train(callback)
    assert sum("metrics" in batch for batch in sent) <= 2, "figures are sent together"
    found = client.get_run(callback.run_id)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "one"
    names = set(found.data.metrics)
    assert names == {*expected(run), "epsilon_so_far"}
    for name, values in expected(run).items():
        history = client.get_metric_history(callback.run_id, name)
        assert {m.step: m.value for m in history} == values
    assert found.data.tags["fpfl.noise"] == SEEDED
    assert found.data.params["cohort"] == "6"
    assert found.data.params["privacy.noise_multiplier"] == "1.0"
    assert run.privacy is not None
    folder = Path(found.info.artifact_uri.removeprefix("file://"))
    said = (folder / "privacy.txt").read_text(encoding="utf-8")
    assert all(line in said for line in run.privacy.lines())
    about = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert about["privacy"]["epsilon"] == run.privacy.epsilon
    assert about["warnings"] == list(run.warnings)
    assert fpfl.MLflowCallback("adult", tracking_uri=store)._experiment_id == (
        callback._experiment_id
    )


def test_a_run_that_fails_is_marked(store: str) -> None:
    callback = fpfl.MLflowCallback("adult", tracking_uri=store)
    with pytest.raises(StopError):
        train(callback, stop_after(3))
    found = callback._client.get_run(callback.run_id)
    assert found.info.status == "FAILED"
    assert len(callback._client.get_metric_history(callback.run_id, "gradient_norm")) == 3
    assert "label 3" not in str(found.to_dictionary())


@pytest.mark.parametrize("back", [True, False], ids=["comes-back", "stays-away"])
def test_a_server_that_is_lost_does_not_stop_training(store: str, back: bool, monkeypatch) -> None:
    callback = fpfl.MLflowCallback("adult", tracking_uri=store)
    client = callback._client
    real, calls = client.log_batch, []

    def lost(*args: Any, **kwargs: Any) -> None:
        if "metrics" in kwargs:
            calls.append(len(kwargs["metrics"]))
            if len(calls) == 1 or not back:
                raise ConnectionError("gone")
        real(*args, **kwargs)

    client.log_batch = lost
    monkeypatch.setattr("fpfl.callbacks.tracking._BATCH", 20)
    with pytest.warns(fpfl.FpflWarning, match="gone") as caught:
        run = train(callback)
    assert len(run.history) == ROUNDS
    assert len([w for w in caught if "gone" in str(w.message)]) == 1
    # It is not asked again before the end; then it gets all that is missing.
    if back:
        history = client.get_metric_history(callback.run_id, "gradient_norm")
        assert {m.step: m.value for m in history} == expected(run)["gradient_norm"]
        assert client.get_run(callback.run_id).info.status == "FINISHED"
        assert sum(calls[1:]) == sum(map(len, expected(run).values())) + ROUNDS
    else:
        assert len(calls) == 2


def test_a_server_that_is_not_there_stops_before_anything_is_spent(store: str) -> None:
    with pytest.raises(ValueError, match=r"nonsense:.*Check the tracking URI"):
        fpfl.MLflowCallback("adult", tracking_uri="nonsense://nowhere")


# --- the command line ---------------------------------------------------------------------------


def test_the_command_line_watches(tmp_path: Path, store: str, monkeypatch, capsys) -> None:
    from fpfl import cli
    from fpfl.callbacks import progress

    tensorboard(tmp_path / "logs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    config = tmp_path / "fair.toml"
    config.write_text(
        '[data]\nname = "adult"\nmean_samples = 2\n[training]\ncohort = 200\nrounds = 4\nseed = 1\n'
        'noise_seed = 1\n[constraint]\nkind = "fnr_parity"\nby = ["sex"]\n[privacy]\n'
        "noise_multiplier = 1.0\nclip = 2.0\n",
        encoding="utf-8",
    )
    out = tmp_path / "run"
    words = ["train", config, "--out", out, "-v", "--tensorboard", tmp_path / "logs",
             "--mlflow", "adult"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
    progress.console.cache_clear()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    progress.console.cache_clear()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "How noisy each total is" in said.err
    assert "training: round 4 of 4" in said.err
    history = json.loads((out / "history.json").read_text())
    norms = {row["round"]: row["gradient_norm"] for row in history}
    assert logged(tmp_path / "logs")["gradient_norm"] == pytest.approx(norms, rel=1e-6)
    callback = fpfl.MLflowCallback("adult", tracking_uri=store)
    (found,) = callback._client.search_runs([callback._experiment_id])
    metrics = callback._client.get_metric_history(found.info.run_id, "gradient_norm")
    assert {m.step: m.value for m in metrics} == norms


def test_callbacks_are_found_by_name(tmp_path: Path) -> None:
    from fpfl.callbacks import named

    assert type(named("explain")).__name__ == "Explain"
    assert type(named(f"tensorboard={tmp_path}")).__name__ == "TensorBoardCallback"
    for words, message in (("tensorboard", "NAME|tensorboard=VALUE"), ("explain=1", "given as"),
                           ("nobody", "there are: explain .*tensorboard")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            named(words)
