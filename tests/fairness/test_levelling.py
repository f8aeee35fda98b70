"""No levelling down in silence: when and how far strong groups were weighed down, in words."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import make_population

import fpfl
from fpfl.fairness.groups import groups_by
from fpfl.fairness.levelling import weighed_down
from fpfl.fairness.totals import Totals
from fpfl.report.card import model_card

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore::UserWarning")

SAID = {"constraint": "FNR parity", "layout": {"rates": ["FNR"], "partition": True}}


def of(method: dict, weights: list[float | None], **layout) -> str | None:
    history = [{"round": t, "least_weight": w} for t, w in enumerate(weights, 1)]
    return weighed_down(history, SAID | {"layout": SAID["layout"] | layout, "method": method})


PATIENT = {"kind": "OneGradient", "low": 0.05, "patience": 3, "surrogate": "loss"}


def test_a_row_is_about_the_round_after_it() -> None:
    said = of(PATIENT, [1.0, 1.0, 0.9, 0.32, 1.0])
    assert "weighed 0.32 at the least, in round 5; below 1 from round 4 on, in 2 of 5" in said
    # The last row's weights were never used.
    assert of(PATIENT, [1.0, 1.0, 0.9]).startswith("Nobody was weighed down")
    assert "0.9980" in of(PATIENT, [0.998, 0.9995, 1.0])


def test_no_more_is_said_than_is_known() -> None:
    impatient = PATIENT | {"patience": None}
    assert "less than 1 from the start, 0.05 at the least" in of(impatient, [None, None])
    assert "is not known" in of({"kind": "MMDM", "damping": 2.0}, [None, None])
    assert "is not known" in of(PATIENT | {"surrogate": "rate"}, [1.0, 0.5, 1.0])
    assert "errors alone" in of(PATIENT, [1.0, 0.5, 1.0], rates=["selection rate"])
    others = "who is in several, or in none, may have weighed less"
    assert others in of(PATIENT, [0.5, 0.5], partition=False)
    assert others in of(PATIENT, [1.0, 1.0], partition=False)
    weighed = SAID | {"method": PATIENT, "class_weights": [1.0, 0.25]}
    for least in (1.0, 0.5):
        rows = [{"round": t, "least_weight": least} for t in (1, 2)]
        assert "class's declared weight" in weighed_down(rows, weighed)
    assert weighed_down([{"round": 1}], {"constraint": None}) is None


THREE = tuple(fpfl.Attribute(name, ("a", "b")) for name in "rst")
LACKING = (fpfl.Attribute("r", ("a", "b"), unknown=True),)


@pytest.mark.parametrize(
    ("attributes", "n", "rates"),
    [
        # The strong are 40 of 100 by each of three attributes, and outside; the weak are within.
        (THREE, [40.0, 60.0] * 3, [0.28, 0.348] * 3),
        # The strong are those of whom the group is not known, 10 of 100.
        (LACKING, [45.0, 45.0], [0.42, 0.42]),
    ],
)
@pytest.mark.parametrize("tolerance", [0.03])
def test_nobody_is_said_where_it_is_true_alone(
    attributes: tuple[fpfl.Attribute, ...], n: list[float], rates: list[float], tolerance: float
) -> None:
    """Replayed by hand: of every sample that there can be, the weight in every round."""
    groups, method = groups_by(attributes), fpfl.OneGradient(tolerance=None, patience=1)
    state = method.begin(1, len(groups), torch.device("cpu"))
    counts, none = torch.tensor([n]), torch.zeros(1)
    overall = 0.378 if len(attributes) == 1 else 0.3208
    rows, weights = [], []
    codes = [range(-1 if each.unknown else 0, 2) for each in attributes]
    member = groups.membership(torch.tensor([*product(*codes)])).float()
    for t in range(1, 31):
        now = method.weights(state, 100.0, tolerance)
        b = now.of_samples(torch.ones(1, len(member)), member)[0]
        weights.append(float((1.0 + b).clamp(float(now.low), now.high).min()))
        totals = Totals(
            F=counts * torch.tensor([rates]), n=counts,
            overall_F=none + 100.0 * overall, overall_n=none + 100.0,
            loss_gradient=none, normaliser=100.0, F_gradient=none, overall_F_gradient=none,
        )  # fmt: skip
        state, _ = method.update(state, totals, tolerance)
        rows.append({"round": t, "least_weight": float(state.figures()["least_weight"])})
    assert min(weights) < 0.95
    assert {row["least_weight"] for row in rows} == {1.0}
    layout = {"rates": ["FNR"], "partition": groups.partition}
    said = weighed_down(rows, SAID | {"method": PATIENT, "layout": layout})
    assert not said.startswith("Nobody")
    assert "in none, may have weighed less" in said


@pytest.mark.parametrize("patience", [0, 10_000, None])
def test_run_report_and_card_say_it(tmp_path: Path, patience: int | None) -> None:
    people, folder = make_population(users=60), tmp_path / "run"
    run = fpfl.train(
        fpfl.mlp(5, seed=0), people, cohort=40, rounds=8, seed=1, folder=folder,
        constraint=fpfl.fnr_parity(tolerance=0.0), learning_rate=0.5,
        method=fpfl.OneGradient(patience=patience, spread=None),
    )  # fmt: skip
    weights = [row["least_weight"] for row in run.history]
    words = weighed_down(run.history, run.settings)
    if patience is None:
        assert weights == [None] * 8
        assert "from the start" in words
    elif patience == 0:
        assert min(weights[:-1]) < 1.0
        assert words.startswith("Strong groups were weighed down")
    else:
        assert weights == [1.0] * 8
        assert words.startswith("Nobody was weighed down")
    assert words in str(run)
    assert words.split("(")[0] in model_card(folder)
    page = fpfl.write_report(folder, tmp_path / "report.html").read_text(encoding="utf-8")
    assert words.replace("'", "&#x27;") in page
    assert json.loads((folder / "history.json").read_text())[0]["least_weight"] == weights[0]
    assert not torch.is_tensor(weights[0])
