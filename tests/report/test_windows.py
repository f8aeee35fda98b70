"""Each group's rate beside the run's own earlier windows, by released counts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_population

import fpfl
from fpfl.report.card import model_card
from fpfl.report.facts import record_of
from fpfl.report.reading import RunRecord
from fpfl.report.series import Windows, windows

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("windows") / "run"
    fpfl.train(
        fpfl.mlp(5, seed=0), make_population(users=300), cohort=150, rounds=30, seed=1,
        constraint=fpfl.fnr_parity(), method=fpfl.OneGradient(), noise_seed=2, folder=folder,
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(3.0, counts=1.0)),
    )  # fmt: skip
    return record_of(folder)


def made(record: RunRecord, F: np.ndarray, n: np.ndarray, acting: int) -> Windows:
    """The windows of a history with given counts (T,) of one group."""
    history = [
        {
            "round": t + 1,
            "groups": {"FNR": {"a": F[t] / n[t]}},
            "counts": {"FNR": {"a": n[t]}},
            "multipliers": {"FNR": {"a": 1.0 if t + 1 >= acting else 0.01}},
        }
        for t in range(len(F))
    ]
    layout = record.settings["layout"] | {"rates": ["FNR"], "groups": ["a"]}
    found = windows(replace(record, history=history, settings=record.settings | {"layout": layout}))
    assert found is not None
    return found


def test_the_early_window_ends_before_the_multipliers_act(record: RunRecord) -> None:
    n = np.full(100, 50.0)
    F = np.concatenate([np.full(40, 20.0), np.full(60, 10.0)])
    found = made(record, F, n, acting=30)
    # λ after round 30 is in the weights of round 31.
    assert (found.early, found.last) == ((21, 30), (91, 100))
    assert (found.rows[0].early, found.rows[0].last) == (pytest.approx(0.4), pytest.approx(0.2))
    assert made(record, F, n, acting=1).early == (1, 5)


def test_the_standard_error_is_that_of_the_noise(record: RunRecord) -> None:
    s = next(b["noise_stddev"] for b in record.privacy["blocks"] if b["name"] == "counts")
    split = record.settings["layout"]["basis"] == "split"
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        noise = s * rng.normal(size=(2, 100))
        F = 400.0 + noise[0]
        n = 1000.0 + noise[1] + (noise[0] if split else 0.0)
        found.append(made(record, F, n, acting=30).rows[0])
    assert np.std([row.last for row in found]) == pytest.approx(found[0].last_noise, rel=0.15)
    assert np.mean([row.last for row in found]) == pytest.approx(0.4, abs=1e-3)


def test_report_and_card_have_them(record: RunRecord, tmp_path: Path) -> None:
    found = windows(record)
    assert found is not None
    assert {row.group for row in found.rows} == {"sex=Female", "sex=Male"}
    assert all(row.last_noise > 0 for row in found.rows)
    (a, b), (c, d) = found.early, found.last
    said = (
        f"released rates in rounds {a} to {b}, before the multipliers acted much, and in rounds {c}"
    )
    page = fpfl.write_report(record.folder, tmp_path / "r.html").read_text(encoding="utf-8")
    shown = f"{found.rows[0].last:.3f} ± {found.rows[0].last_noise:.3f}"
    for text in (page, model_card(record)):
        assert said in text
        assert shown in text
    assert d == 30


def test_short_and_unconstrained_runs_have_none(record: RunRecord) -> None:
    assert windows(replace(record, history=record.history[:4])) is None
    assert windows(replace(record, history=[{"round": 1}] * 30)) is None
