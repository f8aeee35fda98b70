"""A model that always says "no" where 11% are "yes": named collapsed wherever a run is shown."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import fpfl
from fpfl.report.reading import read_run
from fpfl.report.words import collapses, marks

SEX = fpfl.Attribute("sex", ("Female", "Male"))


def unbalanced(useful: bool, users: int = 3000) -> fpfl.FederatedDataset:
    """11% of people are "yes"; a feature tells who, where it is useful."""
    rng = np.random.default_rng(0)
    y = (rng.random(users) < 0.11).astype(np.int64)
    x = rng.normal(size=(users, 3)).clip(-3, 3)
    if useful:
        x[:, 0] = np.where(y == 1, 2.0, -2.0) + 0.3 * x[:, 0]
    return fpfl.FederatedDataset.from_samples(
        x.astype(np.float32),
        y,
        rng.integers(0, 2, (users, 1)),
        schema=fpfl.Schema(
            (3,), attributes=(SEX,), samples_per_user=1.0, class_names=("no", "yes"),
            population=users,
        ),
    )  # fmt: skip


def train(useful: bool, private: bool, where: Path | None = None) -> tuple[fpfl.Run, str]:
    torch.manual_seed(0)
    shown = io.StringIO()
    bar = fpfl.Progress(where=Console(file=shown, width=200))
    privacy = fpfl.Privacy(noise_multiplier=0.5, clip=1.0) if private else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fpfl.train(
            nn.Linear(3, 1), unbalanced(useful), cohort=1500, rounds=48, learning_rate=0.5,
            privacy=privacy, seed=None if private else 1, folder=where, callbacks=[bar],
        )  # fmt: skip
    return run, shown.getvalue()


@pytest.mark.parametrize("private", [False, True])
def test_a_constant_model_is_named_in_bar_verdict_report_and_card(
    private: bool, tmp_path: Path
) -> None:
    run, shown = train(False, private, tmp_path / "run")
    row = run.history[-1]
    assert row["accuracy"] == pytest.approx(0.89, abs=0.05)
    assert row["balance"]["collapsed"] is True
    said = "the model predicts 'no' for"
    assert "COLLAPSED: predicts 'no' for" in shown
    assert run.collapse is not None
    assert run.collapse.startswith("Collapsed while training: by the totals released in round")
    assert said in run.collapse
    assert str(run).count(said) == 1
    assert any(said in note for note in run.warnings)
    record = read_run(tmp_path / "run")
    assert any(b.title == "Collapsed while training" and said in b.text for b in collapses(record))
    assert "COLLAPSED" in marks(record)
    assert "Collapsed while training" in fpfl.model_card(tmp_path / "run")
    pytest.importorskip("plotly", reason="a report takes plotly")
    page = fpfl.write_report(tmp_path / "run", tmp_path / "report.html").read_text("utf-8")
    assert "Collapsed while training" in page
    # With noise from the system: 0.500 without.
    assert re.search(r"balanced accuracy 0\.(4[5-9]|5[0-5])", page)


@pytest.mark.parametrize("private", [False, True])
def test_a_useful_model_is_not(private: bool, tmp_path: Path) -> None:
    run, shown = train(True, private, tmp_path / "run")
    assert run.history[-1]["balance"]["collapsed"] is False
    assert run.collapse is not None
    assert run.collapse.startswith("Not collapsed while training")
    assert run.collapse in str(run)
    assert not any("ollapsed" in note for note in run.warnings)
    assert "COLLAPSED" not in shown.splitlines()[-1]
    assert collapses(read_run(tmp_path / "run")) == []
    assert "Not collapsed while training" in fpfl.model_card(tmp_path / "run")


def test_what_rows_say_of_balance_follows_from_their_tables() -> None:
    run, _ = train(True, True)
    row = run.history[-1]
    W = row["balance"]["rounds"]
    table = sum(np.array(each["confusion"]) for each in run.history[-W:])
    right = min(np.trace(table) / table.sum(), 1.0)  # noise may leave more than all
    assert row["balance"]["accuracy"] == pytest.approx(right)
    recalls = np.diagonal(table) / table.sum(axis=1)
    assert row["balance"]["balanced_accuracy"] == pytest.approx(recalls.clip(0, 1).mean())
    assert row["accuracy"] == pytest.approx(
        np.trace(np.array(row["confusion"])) / np.sum(row["confusion"]), rel=1e-5
    )


def test_a_regression_has_no_table() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    data = fpfl.FederatedDataset.from_samples(
        x, x[:, 0].clip(-1, 1), rng.integers(0, 2, (60, 1)),
        schema=fpfl.Schema((2,), classes=None, label_range=(-1.0, 1.0), attributes=(SEX,)),
    )  # fmt: skip
    run = fpfl.train(nn.Linear(2, 1), data, cohort=30, rounds=3, seed=0)
    assert run.collapse is None
    assert not {"confusion", "balance"} & run.history[-1].keys()
