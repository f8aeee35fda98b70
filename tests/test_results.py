"""The committed results against what the reproduction page claims of them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev

import pytest

from fpfl.experiments.markdown import with_epsilon
from fpfl.experiments.tables import KEY, load_table

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TWINS = {"FFL": "FL", "FFL+Clip": "FL+Clip", "FPFL": "PFL"}

Figures = dict[tuple[str, str, int | None], dict[str, float]]


def means(table: str) -> Figures:
    rows: dict[tuple[str, str, int | None], list[dict[str, float]]] = {}
    for run in json.loads((RESULTS / table / "results.json").read_text(encoding="utf-8")):
        rows.setdefault((run["model"], run["algorithm"], run["cohort"]), []).append(run)
    assert all(len(runs) == 5 for runs in rows.values())
    fields = ("accuracy", "fnr_gap", "train_gap")
    return {
        key: {f: mean(r[f] for r in runs) for f in fields}
        | {"fnr_gap_spread": stdev(r["fnr_gap"] for r in runs)}
        for key, runs in rows.items()
    }


@pytest.mark.parametrize("model", ["shallow", "deep"])
def test_central(model: str) -> None:
    figures = means("adult-central")
    sgd = figures[model, "SGD", None]
    assert sgd["accuracy"] >= 0.850
    assert sgd["fnr_gap"] >= 0.05
    for algorithm in ("BMDM", "MMDM"):
        fair = figures[model, algorithm, None]
        assert fair["accuracy"] >= 0.850
        assert fair["fnr_gap"] <= 0.025
        assert fair["train_gap"] <= 0.020
    # Tran et al.: far above BMDM, and no further from SGD than its own spread.
    tran = figures[model, "Tran", None]
    assert figures[model, "BMDM", None]["fnr_gap"] + 0.05 < tran["fnr_gap"]
    assert abs(tran["fnr_gap"] - sgd["fnr_gap"]) < tran["fnr_gap_spread"]


def test_federated() -> None:
    figures = means("adult-federated")
    rows = load_table("adult-federated")
    assert len(figures) == len(rows) == 24
    for row in rows:
        mine = figures[row.model, row.algorithm, row.cohort]
        assert mine["accuracy"] >= row.paper["accuracy"] - 0.015
        if row.algorithm in TWINS and (row.algorithm != "FPFL" or row.cohort == 1000):
            assert mine["fnr_gap"] <= row.paper["fnr_gap"] + 0.025
            twin = figures[row.model, TWINS[row.algorithm], row.cohort]
            assert mine["fnr_gap"] <= 0.5 * twin["fnr_gap"]
    for model in ("shallow", "deep"):
        plain, clipped = figures[model, "FL", 200], figures[model, "FL+Clip", 200]
        assert plain["train_gap"] < clipped["train_gap"]
        for cohort in (200, 1000):
            assert plain["train_gap"] < figures[model, "PFL", cohort]["train_gap"]


def missed(table: str) -> set[tuple[str, str, int | None]]:
    """The rows whose gap is more than 0.025 over the paper's."""
    paper = {(r.model, r.algorithm, r.cohort): r.paper for r in load_table("adult-federated")}
    return {
        key
        for key, mine in means(table).items()
        if key[1] in TWINS
        and (key[1] != "FPFL" or key[2] == 1000)
        and mine["fnr_gap"] > paper[key]["fnr_gap"] + 0.025
    }


def test_the_page_says_which_rows_do_not_come_otherwise() -> None:
    both = {("shallow", "FPFL", 1000), ("deep", "FPFL", 1000)}
    assert missed("adult-federated-paper") == both
    assert missed("adult-federated-single") == set()
    assert missed("adult-federated-250") == set()
    paper = {(r.model, r.algorithm, r.cohort): r.paper for r in load_table("adult-federated")}
    for key in both:
        mine = means("adult-federated-paper")[key]
        assert mine["accuracy"] < paper[key]["accuracy"] - 0.015


def runs_by(
    table: str, *fields: str, seeds: int | None = 10
) -> dict[tuple[object, ...], list[dict]]:
    rows: dict[tuple[object, ...], list[dict]] = {}
    for run in json.loads((RESULTS / table / "results.json").read_text(encoding="utf-8")):
        rows.setdefault(tuple(run[field] for field in fields), []).append(run)
    assert seeds is None or all(len(runs) == seeds for runs in rows.values())
    return rows


ROBUST = {
    # cohort, ε: accuracy at least, test gap and training gap at most
    (200, "ε=2"): (0.852, 0.022, 0.008),
    (1000, "ε=2"): (0.852, 0.020, 0.005),
    (200, "ε=0.5"): (0.848, 0.028, 0.020),
}


@pytest.mark.parametrize("model", ["shallow", "deep"])
@pytest.mark.parametrize("place", ROBUST)
def test_one_gradient_is_fair_where_the_papers_method_drowns(model, place) -> None:
    rows = runs_by("adult-robust", "model", "cohort", "variant", "algorithm")
    found = {
        name: {f: mean(run[f] for run in rows[model, *place, name])
               for f in ("accuracy", "gap", "train_gap")}
        for name in ("PFL", "FPFL", "FPFL-1G")
    }  # fmt: skip
    accuracy, gap, train_gap = ROBUST[place]
    one = found["FPFL-1G"]
    assert one["accuracy"] >= accuracy
    assert one["gap"] <= gap
    assert one["train_gap"] <= train_gap
    assert one["train_gap"] < 0.25 * found["PFL"]["train_gap"]
    assert one["accuracy"] > found["FPFL"]["accuracy"] + 0.01
    # Not by making every group worse: the weakest is better off than with plain private learning.
    weakest = {
        name: mean(
            max(run["rates"]["train"]["FNR"][f"sex={sex}"] for sex in ("Female", "Male"))
            for run in rows[model, *place, name]
        )
        for name in ("PFL", "FPFL-1G")
    }
    assert weakest["FPFL-1G"] < weakest["PFL"]


def test_what_users_send_is_at_most_forty_percent() -> None:
    rows = runs_by("adult-robust", "model", "cohort", "variant", "algorithm")
    for key, found in rows.items():
        if key[-1] == "FPFL-1G":
            paper = rows[*key[:-1], "FPFL"][0]["numbers_sent"]
            assert found[0]["numbers_sent"] <= 0.4 * paper


HALVED = {
    "sex x race": ("FNR",),
    "sex x three races": ("FNR",),
    "equalised odds": ("FNR", "FPR"),
    "demographic parity": ("selection rate",),
    "regression": ("mean prediction",),
}


@pytest.mark.parametrize("model", ["shallow", "deep"])
@pytest.mark.parametrize("variant", HALVED)
def test_other_constraints_have_at_most_half_the_gap(model, variant) -> None:
    rows = runs_by("adult-ablation", "variant", "model", "algorithm")
    for rate in HALVED[variant]:
        plain, one = (
            mean(run["rates"]["train"][rate]["gap"] for run in rows[variant, model, name])
            for name in ("PFL", "FPFL-1G")
        )
        assert one <= 0.5 * plain


@pytest.mark.parametrize("model", ["shallow", "deep"])
def test_what_the_parts_are_for(model) -> None:
    """What the page says of the ablation."""
    rows = runs_by("adult-ablation", "variant", "model", "algorithm")
    gap, accuracy = (
        {key[0]: mean(run[field] for run in runs) for key, runs in rows.items()
         if key[1:] == (model, "FPFL-1G") and key[0] != "regression"}
        for field in ("train_gap", "train_accuracy")
    )  # fmt: skip
    without = {name.split(":")[0]: name for name in gap if name.startswith("without")}
    for part in ("without 1", "without 2", "without 4", "without 4c", "without 5"):
        assert gap[without[part]] > 1.3 * gap["whole"]
    assert gap[without["without 2"]] == max(gap[name] for name in without.values())
    assert accuracy[without["without 1"]] < accuracy["whole"]
    assert gap[without["without 3"]] < 1.5 * gap["whole"]  # does as well
    ends = accuracy["sex x three races, no end of multipliers"]
    assert ends < accuracy["sex x three races"] - 0.005


@pytest.mark.parametrize("model", ["shallow", "deep"])
def test_without_weighing_down_the_weakest_group_gains(model) -> None:
    """What the page says of weights that only go up."""
    robust = runs_by("adult-robust", "cohort", "variant", "model", "algorithm")
    ablation = runs_by("adult-ablation", "variant", "model", "algorithm")
    found = {key[0]: runs for key, runs in runs_by("adult-lift", "variant", "model").items()
             if key[1] == model}  # fmt: skip
    for variant, runs in found.items():
        plain = robust.get((200, variant, model, "PFL")) or ablation[variant, model, "PFL"]
        if "FNR" not in runs[0]["rates"]["train"]:
            continue
        lifted, before = (
            mean(
                max(v for g, v in run["rates"]["train"]["FNR"].items() if "=" in g) for run in some
            )
            for some in (runs, plain)
        )
        assert lifted < before
    gaps = [mean(run["train_gap"] for run in some)
            for some in (found["sex x race"], ablation["sex x race", model, "PFL"])]  # fmt: skip
    assert gaps[0] < 0.5 * gaps[1]


Digits = dict[tuple[object, ...], dict[str, float]]


def digits(table: str) -> Digits:
    """Means of the unfair digits' rows; chalk's accuracy beside them."""
    found = {}
    for key, runs in runs_by(table, *KEY, seeds=None).items():
        fields = ("accuracy", "gap", "train_accuracy", "train_gap")
        found[key] = {field: mean(run[field] for run in runs) for field in fields}
        for where in ("test", "train"):
            chalk = [run["rates"][where]["accuracy"]["pen=chalk"] for run in runs]
            found[key][f"{where}_chalk"] = mean(chalk)
        found[key]["seeds"] = len(runs)
    return found


def test_digits_without_noise() -> None:
    rows = {key[1]: row for key, row in digits("femnist").items() if key[0] == "cnn"}
    for fair, plain in (("FFL", "FL"), ("FFL+Clip", "FL+Clip")):
        assert rows[fair]["train_gap"] <= 0.5 * rows[plain]["train_gap"]
        assert rows[fair]["accuracy"] >= rows[plain]["accuracy"] - 0.02
        assert rows[fair]["seeds"] == 2
    assert rows["FL"]["train_gap"] < rows["FL+Clip"]["train_gap"] < rows["PFL"]["train_gap"]
    assert rows["FPFL"]["accuracy"] < 0.15  # chance, as in the paper


def test_digits_with_noise() -> None:
    rows = digits("femnist")
    plain, loose, fair = (
        rows["oriented", algorithm, 100, 3383, variant]
        for algorithm, variant in (("PFL tuned", ""), ("FPFL-1G", "loose"), ("FPFL-1G", "strict"))
    )
    assert {row["seeds"] for row in (plain, loose, fair)} == {5}
    assert plain["accuracy"] >= 0.945
    assert max(plain["gap"], plain["train_gap"]) <= 0.20
    assert loose["accuracy"] >= 0.92
    assert max(loose["gap"], loose["train_gap"]) <= 0.08
    assert fair["accuracy"] >= 0.90
    assert max(fair["gap"], fair["train_gap"]) <= 0.05
    for row in (loose, fair):
        for where in ("test_chalk", "train_chalk"):
            assert row[where] > plain[where] + 0.03
            assert row[where] >= 0.85
    # The paper's network does not come so far, as the page says.
    assert rows["cnn-standardised", "PFL tuned", 100, 3383, ""]["accuracy"] < 0.93
    assert rows["cnn-standardised", "FPFL-1G", 100, 3383, "loose"]["gap"] > 0.11


def test_digits_in_large_cohorts() -> None:
    """Half of PFL's gap for 0.02 of accuracy was asked for; a wide clip bound has a quarter."""
    rows = digits("femnist-large")
    for population in (338_300, 3_383_000):
        plain, fair, papers, fpfl, lift, tuned, half = (
            rows[model, algorithm, 2000, population, variant]
            for model, algorithm, variant in (
                ("oriented", "PFL tuned", ""), ("oriented", "FPFL-1G", ""),
                ("cnn", "PFL", ""), ("cnn", "FPFL", ""), ("cnn", "FPFL-1G", "lift"),
                ("cnn", "PFL tuned", ""), ("cnn", "FPFL-1G", "half-lift"))
        )  # fmt: skip
        for gap in ("gap", "train_gap"):
            assert fair[gap] <= 0.5 * plain[gap]
            assert fair[gap] <= 0.35 * papers[gap]
            assert half[gap] <= 0.25 * min(papers[gap], tuned[gap])
        best = max(papers["accuracy"], tuned["accuracy"])
        assert half["accuracy"] > best - 0.02
        assert plain["accuracy"] - 0.03 < fair["accuracy"] < plain["accuracy"] - 0.02
        assert fpfl["gap"] == pytest.approx(0.5 * papers["gap"], rel=0.02)
        assert papers["accuracy"] - 0.03 < fpfl["accuracy"] < papers["accuracy"] - 0.02
        assert 0.5 * papers["gap"] < lift["gap"] <= 0.61 * papers["gap"]
        assert lift["accuracy"] > papers["accuracy"] + 0.01


@pytest.mark.parametrize("table", ["femnist", "femnist-alone", "femnist-large"])
def test_private_digits_say_what_is_real(table) -> None:
    for run in json.loads((RESULTS / table / "results.json").read_text(encoding="utf-8")):
        if run["noise_multiplier"] is not None:
            assert run["epsilon"] == pytest.approx(2.0, abs=1e-3)
            assert run["epsilon_real"] > 5 * run["epsilon"]
            names = ("epsilon", "epsilon_honest", "epsilon_real")
            again = with_epsilon(run | dict.fromkeys(names))
            assert all(again[name] == pytest.approx(run[name], rel=1e-6) for name in names)


def test_the_estimator_beside_fairlearns_reduction() -> None:
    """No worse in accuracy and gap, without privacy, with the same learner and with its usual one.

    No worse: the paired 95% interval over test rows and seeds does not lie on the wrong side of
    0, and the mean difference is no more than 0.005 of accuracy or 0.015 of gap. (590 women of the
    test split have the positive label: the gap of a model that has none comes out as 0.02.)
    """
    found = json.loads((RESULTS / "estimator" / "results.json").read_text(encoding="utf-8"))
    assert found["about"]["alpha"] == 0.02
    constraints = {"equalized_odds", "demographic_parity", "fnr_parity"}
    pairs = {(row["constraint"], row["peer"]) for row in found["compared"]}
    assert pairs == {(c, p) for c in constraints for p in ("logistic regression", "network")}
    for row in found["compared"]:
        assert row["accuracy"]["high"] >= 0.0, row
        assert row["accuracy"]["value"] >= -0.005, row
        assert row["gap"]["low"] <= 0.0, row
        assert row["gap"]["value"] <= 0.015, row
        assert row["seconds"]["ours"] > 0
        assert row["seconds"]["peer"] > 0
    ours = [row for row in found["rows"] if row["who"] == "FairPrivateClassifier"]
    for name in constraints:
        fair, plain = (
            [row for row in ours if (row["constraint"], row["measured"]) == (given, name)]
            for given in (name, None)
        )
        assert max(row["train"]["gap"] for row in fair) <= 0.025
        test = [mean(row["test"]["gap"] for row in some) for some in (fair, plain)]
        assert test[0] < 0.6 * test[1]
