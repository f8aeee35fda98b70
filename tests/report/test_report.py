"""The report: what is read, computed, compared and written; a browser looks at it elsewhere."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_population
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fpfl
from fpfl import Attribute, cli
from fpfl.aggregation.noise import SeededNoise
from fpfl.experiments import demo
from fpfl.heldout.result import IN_DOUBT
from fpfl.privacy.assumptions import Aggregation
from fpfl.privacy.conventions import Block
from fpfl.privacy.plan import PrivacyPlan
from fpfl.report import series
from fpfl.report.charts import axes, span_of, thinned
from fpfl.report.comparability import best_tradeoffs, compare, gap_verdict, same_gap, told_apart
from fpfl.report.comparison import BEATEN, BEST, COLLAPSED, NOT_BEATEN, standing
from fpfl.report.evaluations import Figure, read_evaluation
from fpfl.report.facts import run_facts
from fpfl.report.page import in_script, report_html
from fpfl.report.reading import NO_PRIVACY, RunRecord, read_run
from fpfl.report.runcharts import charts
from fpfl.report.sections import brief
from fpfl.report.words import banners, collapses, headline, marks
from fpfl.runs.folder import model_digest

SEX = Attribute("sex", ("Female", "Male"))
RACE = Attribute("race", ("A", "B", "C"))
MARK = {"on": "test set", "mark": "simulation only: measured without noise"}


def train(folder: Path | fpfl.RunFolder | None, **changed: Any) -> fpfl.Run:
    """A short training with six groups; replace-one, whose accountant is quick."""
    how: dict[str, Any] = {
        "cohort": 60,
        "rounds": 8,
        "constraint": fpfl.equalized_odds(("sex", "race"), tolerance=0.05),
        "privacy": fpfl.Privacy(noise_multiplier=1.0, clip=2.0, convention="replace-one"),
        "seed": 0,
        "noise_seed": 0,
        "folder": folder,
    } | changed
    if how["privacy"] is None:
        how["noise_seed"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the noise dominates so short a run
        return fpfl.train(fpfl.mlp(5, seed=0), PEOPLE, **how)


PEOPLE = make_population(users=300, attributes=(SEX, RACE))


def evaluate(run: fpfl.Run, folder: Path, constraint: fpfl.Constraint | None = None) -> None:
    found = fpfl.evaluate_model(
        run.model, PEOPLE, constraint=constraint or run.constraint, bootstrap=100
    )
    content = found.as_dict() | MARK | {"model": model_digest(folder)}
    (folder / "evaluation-test.json").write_text(json.dumps(content))


def make_runs(folder: Path) -> dict[str, Path]:
    """Folders of all kinds, by name."""
    full = train(folder / "full")
    evaluate(full, folder / "full")
    constraint = full.constraint
    assert constraint is not None
    released = fpfl.evaluate_privately(
        full.model, PEOPLE, constraint=constraint, epsilon=4.0, bound=3.0, noise=SeededNoise(0)
    )
    content = released.as_dict() | {"model": model_digest(folder / "full")}
    (folder / "full" / "evaluation-private.json").write_text(json.dumps(content))
    full.save(folder / "saved")
    plain = train(None, constraint=None, privacy=None)
    plain.save(folder / "plain")
    evaluate(plain, folder / "plain", full.constraint)

    def cut(event: fpfl.RoundEvent) -> None:
        if event.row["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fpfl.RunFolder(folder / "cut", checkpoint_every=3), callbacks=[cut])
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def record(runs: dict[str, Path]) -> RunRecord:
    return read_run(runs["full"])


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A saved run with its evaluations, to be damaged."""
    path = tmp_path / "copied"
    shutil.copytree(runs["saved"], path)
    for kind in ("test", "private"):
        shutil.copy(runs["full"] / f"evaluation-{kind}.json", path)
    return path


class Elements(HTMLParser):
    """The elements of a page, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page_of(*folders: Path) -> str:
    return report_html([read_run(folder) for folder in folders], "/* plotly */")


# Reading


@pytest.mark.parametrize("name", ["full", "saved"])
def test_a_finished_run_is_read_as_it_was_written(name: str, runs: dict[str, Path]) -> None:
    record = read_run(runs[name])
    result = json.loads((runs[name] / "result.json").read_text())
    assert record.finished
    assert record.history == json.loads((runs[name] / "history.json").read_text())
    assert record.privacy == result["privacy"]
    assert record.epsilon == result["privacy"]["epsilon"]
    assert record.settings == result["settings"]
    assert "\n".join(record.statement) == (runs[name] / "privacy.txt").read_text().strip()
    assert record.rates == ("FNR", "FPR")
    assert len(record.groups) == 6
    assert record.parameters == 71
    assert record.notes == ()
    assert (record.begun is not None) == (name == "full")
    assert set(record.evaluations) == ({"test", "private"} if name == "full" else set())


def test_an_evaluation_of_another_model_is_left_out(copied: Path) -> None:
    assert set(read_run(copied).evaluations) == {"private", "test"}
    change(copied / "evaluation-private.json", "model", value="0" * 64)
    record = read_run(copied)
    assert set(record.evaluations) == {"test"}
    (note,) = record.notes
    assert "evaluation-private.json" in note
    assert "another model than the run has now" in note
    page = page_of(copied)
    assert "Held-out users, released with noise" not in page
    assert note in "".join(Elements(page).words)


@pytest.mark.parametrize("lacking", ["key", "model"])
def test_an_evaluation_of_nobody_knows_which_model_is_noted(lacking: str, copied: Path) -> None:
    if lacking == "key":
        change(copied / "evaluation-test.json", "model", value=None)
    else:
        (copied / "model.safetensors").unlink()
    record = read_run(copied)
    assert set(record.evaluations) == {"private", "test"}
    (note,) = record.notes
    assert "not known which model" in note
    assert ("private" in note) == (lacking == "model")


def test_a_run_that_was_cut_off_promises_what_it_would_have_promised(
    runs: dict[str, Path],
) -> None:
    cut, whole = read_run(runs["cut"]), read_run(runs["full"])
    assert not cut.finished
    assert cut.history == whole.history[:6]  # the last checkpoint; round 7 is not in one
    assert cut.charged == 7
    assert cut.privacy == whole.privacy
    assert cut.statement == whole.statement
    text = page_of(runs["cut"])
    for words in ("has not ended", "6 rounds up to the last checkpoint", "7 of 8 planned rounds"):
        assert words in text


def test_a_run_without_privacy_says_so(runs: dict[str, Path]) -> None:
    record = read_run(runs["plain"])
    assert record.privacy is None
    assert record.epsilon is None
    assert record.statement == (NO_PRIVACY,)
    assert "No privacy guarantee" in headline(record)
    assert [b.title for b in banners(record)] == ["No privacy"]
    assert record.rates == ()
    assert "trained without a constraint" in page_of(runs["plain"])


def test_files_that_are_missing_are_named(copied: Path) -> None:
    for name in ("history.json", "privacy.txt"):
        (copied / name).unlink()
        assert f"{name} is missing" in page_of(copied)
    assert read_run(copied).history == []


def change(path: Path, *keys: Any, value: Any) -> None:
    """Put something else into a JSON file."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "keys", "value"),
    [
        ("result.json", ["settings"], None),
        ("result.json", ["settings", "rounds"], "many"),
        ("result.json", ["settings", "layout", "groups"], [1]),
        ("result.json", ["privacy", "epsilon"], "2"),
        ("result.json", ["privacy", "blocks", 0, "noise_stddev"], None),
        ("history.json", [2, "accuracy"], "high"),
        ("history.json", [2, "round"], 2),
        ("history.json", [2, "groups", "FNR", "sex=Male & race=A"], True),
        ("history.json", [2, "counts"], []),
        ("evaluation-test.json", ["gaps", "constraint", "value"], "small"),
        ("evaluation-test.json", ["users"], None),
        ("evaluation-private.json", ["rates", "FNR"], {}),
        ("evaluation-private.json", ["mechanism"], None),
    ],
)
def test_damage_is_named_with_its_file(copied: Path, file: str, keys: list, value: Any) -> None:
    read_run(copied)
    change(copied / file, *keys, value=value)
    with pytest.raises(ValueError, match=rf"(?s){file} .*put an intact copy in its place"):
        read_run(copied)


def test_an_environment_of_another_kind_is_named(copied: Path) -> None:
    (copied / "environment.json").write_text('{"packages": true}')
    with pytest.raises(ValueError, match=r"environment\.json .*packages.*intact copy"):
        read_run(copied)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_named(copied: Path, content: bytes) -> None:
    (copied / "result.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"result\.json .*intact copy"):
        read_run(copied)


@pytest.mark.parametrize("name", ["ledger.jsonl", "checkpoint-00000006.safetensors", "run.json"])
def test_damage_of_a_run_that_was_cut_off_is_named(
    runs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "cut"
    shutil.copytree(runs["cut"], path)
    (path / name).write_bytes((path / name).read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"{name}.*(intact copy|backup)"):
        read_run(path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "neither result.json nor ledger.jsonl"),
        (tmp_path / "file", "is a file; name the folder of a run"),
        (tmp_path / "nothing", "is not there; name the folder of a run"),
    ):
        with pytest.raises(ValueError, match=words):
            read_run(path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_in_the_files_there_is_a_page_or_a_word(
    data: st.DataObject, runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("odd") / "run"
    shutil.copytree(runs["full"], folder)
    (folder / "ledger.jsonl").unlink()  # its chain is tested elsewhere
    file = folder / data.draw(
        st.sampled_from(
            ["result.json", "history.json", "evaluation-test.json", "evaluation-private.json",
             "schema.json", "environment.json"]
        )
    )  # fmt: skip
    content = json.loads(file.read_text())
    place, keys = content, []
    while isinstance(place, dict | list) and place and (not keys or data.draw(st.integers(0, 3))):
        keys.append(data.draw(st.sampled_from(list(place if isinstance(place, dict)
                                                   else range(len(place))))))  # fmt: skip
        place = place[keys[-1]]
    change(file, *keys, value=data.draw(JUNK))
    try:
        text = page_of(folder)
    except ValueError as error:
        text = f"{error} </html>"  # any other error is a bug
    assert "</html>" in text


# Figures


def test_means_are_those_of_the_totals(record: RunRecord) -> None:
    W = series.window(len(record.history))
    assert W == 5
    for lines in series.rate_lines(record):
        for group, mean in lines.means.items():
            for t, found in enumerate(mean):
                part = record.history[max(0, t + 1 - W) : t + 1]
                pairs = [
                    (row["groups"][lines.rate][group], row["counts"][lines.rate][group])
                    for row in part
                    if row["groups"][lines.rate][group] is not None
                ]
                F, n = sum(v * w for v, w in pairs), sum(w for _, w in pairs)
                assert found == (pytest.approx(F / n) if pairs else None)
    gaps = series.gap_of_means(series.rate_lines(record))
    assert len(gaps) == len(record.history)
    last = [
        abs(r.overall_mean[-1] - m[-1]) for r in series.rate_lines(record) for m in r.means.values()
    ]
    assert gaps[-1] == pytest.approx(max(last))


def test_a_running_mean_leaves_out_what_is_not_known() -> None:
    assert series.running_mean([1.0, None, 3.0, None], 2) == [1.0, 1.0, 3.0, 3.0]
    assert series.running_mean([None, None], 2) == [None, None]
    assert series.running_mean([1.0, 4.0], 2, [1.0, 2.0]) == [1.0, 3.0]
    assert series.running_mean([1.0, 4.0], 2, [1.0, -2.0]) == [1.0, 1.0]
    assert [series.window(T) for T in (1, 3, 30, 250, 9999)] == [1, 3, 5, 25, 50]


@pytest.mark.parametrize("method", [fpfl.MMDM(), fpfl.OneGradient()])
def test_the_noise_is_as_large_as_the_report_says(method: Any, tmp_path: Path) -> None:
    """The same cohorts and (nearly) the same model with and without noise: 480 counts."""
    how = {"method": method, "learning_rate": 1e-12, "rounds": 40, "selection": "last"}
    private = fpfl.Privacy(noise_multiplier=2.0, clip=2.0, convention="replace-one")
    noisy = train(None, privacy=private, **how)
    clean = train(None, privacy=None, clip=2.0, sampling="without-replacement", **how)
    record = read_run(noisy.save(tmp_path / "noisy"))

    def counts(run: fpfl.Run) -> np.ndarray:
        return np.array([list(line.values()) for row in run.history
                         for line in row["counts"].values()])  # fmt: skip

    told = {c.noise for c in series.count_noise(record)}
    assert len(told) == 1
    # The deviation of 480 numbers is within 3.2% of its limit, once: 15% leaves room.
    assert np.std(counts(noisy) - counts(clean)) == pytest.approx(told.pop(), rel=0.15)

    gradient = series.gradient_noise(record)
    assert gradient is not None
    squares = np.mean([row["gradient_norm"] ** 2 for row in noisy.history])
    signal = np.mean([row["gradient_norm"] ** 2 for row in clean.history])
    # p s² of 40 rounds has a relative error of √(2/(40·71)) = 2.7%, and a cross term beside it.
    assert len(set(gradient.noise)) == 1
    assert squares == pytest.approx(signal + gradient.noise[0] ** 2, rel=0.15)


@pytest.mark.parametrize("counts", [None, 2.0])
def test_the_noise_of_a_bound_that_adapts_is_said_round_by_round(
    counts: float | None, tmp_path: Path
) -> None:
    """Users' vectors are far below the bound, which shrinks: what is released is the noise."""
    adapts = fpfl.AdaptiveBound(0.99, rate=0.3, most=2e6, share=0.2)
    clip = fpfl.Clipping(1e6, counts=counts, adapts=adapts)
    method = fpfl.OneGradient() if counts else fpfl.MMDM()
    private = fpfl.Privacy(noise_multiplier=2.0, clip=clip, convention="replace-one")
    run = train(None, privacy=private, method=method, learning_rate=1e-12, rounds=30)
    record = read_run(run.save(tmp_path / "run"))
    gradient = series.gradient_noise(record)
    assert gradient is not None
    assert gradient.noise[-1] < 0.05 * gradient.noise[0]
    p = record.parameters
    for released, noise, row in zip(gradient.released, gradient.noise, run.history, strict=True):
        assert noise == pytest.approx(gradient.noise[0] * row["clip_bound"] / 1e6)
        # χ² of p numbers within 6 deviations. (The noise is seeded: it is always the same.)
        assert abs(released**2 / noise**2 - 1) < 6 * math.sqrt(2 / p)
    (told,) = {c.noise for c in series.count_noise(record)}
    factor = np.mean([row["clip_bound"] for row in run.history]) / 1e6 if counts is None else 1.0
    begun = series.noise_of(record, "counts", "joint")
    assert told == pytest.approx(begun * factor * (math.sqrt(2) if counts else 1.0))


def test_the_course_of_a_bound_is_drawn_and_said(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    clip = fpfl.Clipping(0.5, adapts=fpfl.AdaptiveBound(0.25, rate=1.0))
    private = fpfl.Privacy(noise_multiplier=1.0, clip=clip, convention="replace-one")
    run = train(None, privacy=private)
    folder = run.save(tmp_path / "run")
    record = read_run(folder)
    drawn = {chart.key: chart for chart in charts(record)[0]}
    bounds = [row["clip_bound"] for row in run.history]
    for key in ("bound", "gradient"):
        chart = drawn[key]
        text = json.dumps({"data": chart.data, "layout": chart.layout})
        for token in ("@ink", "@muted", "@limit", "@blue"):
            text = text.replace(token, "black")
        go.Figure(json.loads(text))
    assert drawn["bound"].data[0]["y"] == pytest.approx(bounds, rel=1e-4)
    assert "(aimed at: 0.25)" in drawn["bound"].reading
    assert "follows the clip bound" in drawn["gradient"].reading
    assert len(set(drawn["gradient"].data[-1]["y"])) > 2
    assert f"in the last round it was {bounds[-1]:.3g}" in fpfl.model_card(folder)
    assert "The clip bound" in report_html([record], "")
    fixed = read_run(train(None).save(tmp_path / "fixed"))
    assert "bound" not in {chart.key for chart in charts(fixed)[0]}


def planned(record: RunRecord, **changed: Any) -> RunRecord:
    """The record with another plan's statement."""
    how: dict[str, Any] = {
        "population": 2000, "cohort": 100, "rounds": 30, "noise_multiplier": 2.0,
        "blocks": [Block("joint", 1.0, 1.0)],
    } | changed  # fmt: skip
    said = PrivacyPlan(**how).statement(seeded_noise=False, seeded_cohorts=False)
    return replace(record, privacy=json.loads(json.dumps(said.as_dict())))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"convention": "paper"},
        {"convention": "replace-one"},
        {"convention": "coins", "noise_multiplier": 4.0},
        {"convention": "coins", "noise_multiplier": 4.0, "copies": 2},
        {"convention": "picked", "noise_multiplier": 9.0},
        {"max_participations": 4},
        {"population": 10_000, "real_population": 2000},
    ],
)
def test_epsilon_over_rounds_ends_at_the_runs_own(record: RunRecord, changed: dict) -> None:
    planned_record = planned(record, **changed)
    curve = series.epsilon_curve(planned_record)
    assert curve.why is None
    assert curve.rounds[0] == 1
    assert curve.rounds[-1] == 30
    assert curve.epsilon[-1] == pytest.approx(planned_record.epsilon, rel=1e-6)
    assert list(curve.epsilon) == sorted(curve.epsilon)
    said = planned_record.privacy
    assert said is not None
    # With secret coins the server is like everybody else; with a cap it may be.
    same = said["epsilon_server_real"] or said["epsilon_server"]
    assert bool(curve.server) == (not math.isclose(same, curve.epsilon[-1], rel_tol=1e-9))


def test_epsilon_is_not_drawn_where_it_is_no_plans(record: RunRecord, monkeypatch) -> None:
    private = dict(record.privacy or {})
    filtered = replace(record, privacy=private | {"filter_order": 8})
    assert "fixed before the run" in str(series.epsilon_curve(filtered).why)
    assert "no privacy guarantee" in str(series.epsilon_curve(replace(record, privacy=None)).why)
    trusted = vars(Aggregation(nodes=4, least=3, colluders=1, shares=False))
    assert series.epsilon_curve(record).server
    curve = series.epsilon_curve(replace(record, privacy=private | {"aggregation": trusted}))
    assert curve.epsilon
    assert not curve.server  # against which there is no guarantee
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    missing = replace(record, privacy=private | {"convention": "poisson", "neighbours": "zero-out"})
    assert "dp-accounting" in str(series.epsilon_curve(missing).why)


def test_every_chart_is_one_that_plotly_can_draw(record: RunRecord) -> None:
    go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    drawn, silent = charts(record)
    assert silent == []
    keys = [chart.key for chart in drawn]
    assert keys == ["accuracy", "gap", "rate-0", "rate-1", "multipliers-0", "multipliers-1",
                    "counts", "gradient", "epsilon"]  # fmt: skip
    for chart in drawn:
        text = json.dumps({"data": chart.data, "layout": chart.layout})
        for token in ("@ink", "@muted", "@limit", "@blue"):
            text = text.replace(token, "black")
        go.Figure(json.loads(text))  # refuses names and values that plotly does not know
        if chart.grouped:
            shown = {t["meta"]["group"] for t in chart.data if "group" in t.get("meta", {})}
            assert shown == set(record.groups)
        assert chart.label
        assert all(len(row) == len(chart.table.head) for row in chart.table.rows)
    accuracy, gap = drawn[0], drawn[1]
    assert accuracy.data[0]["y"] == pytest.approx([row["accuracy"] for row in record.history],
                                                  rel=1e-4)  # fmt: skip
    assert any(t["y"] == [0.05, 0.05] and "α = 0.05" in t["name"] for t in gap.data)


def test_long_histories_are_thinned_and_the_last_round_stays() -> None:
    assert thinned(5, 600) == [0, 1, 2, 3, 4]
    for count in (600, 601, 5000):
        places = thinned(count, 600)
        assert len(places) <= 600
        assert places[-1] == count - 1
    assert thinned(0) == []
    low, high = span_of([[9.0, 0.4, 0.6]], [-30.0, *[0.5] * 98, 40.0], 1) or (0, 0)
    assert -1 < low < 0.4
    assert 0.6 < high < 2


# Comparing

POINT = st.tuples(
    *[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 2, st.sampled_from([1.0, 2.0, math.inf])
)


def beats(one: tuple, other: tuple) -> bool:
    return one != other and one[0] >= other[0] and one[1] <= other[1] and one[2] <= other[2]


@given(st.lists(POINT, min_size=1, max_size=12))
def test_best_tradeoffs_beat_all_others_and_not_each_other(points: list[tuple]) -> None:
    best = best_tradeoffs(points)
    front = [p for p, good in zip(points, best, strict=True) if good]
    assert front
    assert not any(beats(one, other) for one in front for other in front)
    for point, good in zip(points, best, strict=True):
        assert good == (not any(beats(one, point) for one in front))


def test_the_three_directions() -> None:
    assert best_tradeoffs([(0.8, 0.1, 1.0), (0.9, 0.1, 1.0)]) == [False, True]
    assert best_tradeoffs([(0.8, 0.1, 1.0), (0.8, 0.2, 1.0)]) == [True, False]
    assert best_tradeoffs([(0.8, 0.1, 1.0), (0.8, 0.1, math.inf)]) == [True, False]
    assert best_tradeoffs([(0.9, 0.2, math.inf), (0.8, 0.1, 1.0)]) == [True, True]


def test_the_noise_that_was_found_for_an_epsilon_decides_no_star(record: RunRecord) -> None:
    """Two runs of the same ε end a little below it; the worse one is no best trade-off."""
    test = record.evaluations["test"]

    def run(name: str, epsilon: float, accuracy: float) -> RunRecord:
        privacy = dict(record.privacy or {}) | {"epsilon_honest": epsilon}
        judged = {"test": replace(test, score=replace(test.score, value=accuracy))}
        return replace(record, folder=Path(name), privacy=privacy, evaluations=judged)

    close = [run("better", 1.9998994, 0.8), run("worse", 1.9998982, 0.7)]
    ((pair,), _), ((other,), _) = compare(close), compare([close[0], run("less", 1.9, 0.7)])
    assert [entry.best for entry in pair.entries] == [True, False]
    assert [entry.best for entry in other.entries] == [True, True]


def test_more_is_better_of_what_regressions_release(record: RunRecord) -> None:
    """1 − squared error, as a round releases it; an error that was measured is the other way."""

    def run(name: str, score: float) -> RunRecord:
        rows = [row | {"accuracy": score} for row in record.history]
        schema = {"classes": None, "label_range": [0, 1]}
        return replace(
            record, folder=Path(name), history=rows, schema=schema, evaluations={}, notes=()
        )

    (released,), _ = compare([run("good", 0.95), run("bad", 0.55)])
    assert (released.source, released.score_name) == ("released", "1 − squared error")
    assert not released.lower
    assert [entry.best for entry in released.entries] == [True, False]

    test = replace(record.evaluations["test"], score_name="absolute error", lower=True)
    errors = [
        replace(record, folder=Path(str(e)), evaluations={"test": replace(test, score=Figure(e))})
        for e in (0.3, 0.1)
    ]
    (measured,), _ = compare(errors)
    assert [entry.best for entry in measured.entries] == [False, True]


def test_an_error_that_is_read_is_better_when_it_is_less(copied: Path) -> None:
    content = json.loads((copied / "evaluation-test.json").read_text())
    content |= {"accuracy": None, "error": 3.0, "error_interval": [2.0, 4.0]}
    assert read_evaluation(copied, "test", content).lower
    private = json.loads((copied / "evaluation-private.json").read_text())
    assert not read_evaluation(copied, "private", private).lower
    private["rates"]["absolute error"] = private["rates"][private["score"]]
    assert read_evaluation(copied, "private", private | {"score": "absolute error"}).lower


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(st.lists(NAMES, min_size=1, max_size=8, unique_by=tuple))
def test_names_are_told_apart(parts: list[list[str]]) -> None:
    names = told_apart([Path("/", *path) for path in parts])
    assert len(set(names)) == len(names)
    for name, path in zip(names, parts, strict=True):
        assert f"/{'/'.join(path)}".endswith(name)


def test_a_run_given_twice_is_refused(runs: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"given twice"):
        page_of(runs["full"], runs["full"])


def test_like_is_compared_with_like(runs: dict[str, Path], copied: Path) -> None:
    full, plain, cut = (read_run(runs[name]) for name in ("full", "plain", "cut"))
    (both,), silent = compare([full, plain])
    assert silent == []
    assert both.source == "test"
    assert not both.lower
    assert [e.epsilon for e in both.entries] == [full.epsilon, math.inf]
    assert both.entries[0].gap == full.evaluations["test"].gaps["constraint"].value

    # A run that was not evaluated is compared by what it released, and with such runs alone.
    found, silent = compare([full, plain, cut])
    assert [c.source for c in found] == ["test", "released"]
    assert [[e.index for e in c.entries] for c in found] == [[0, 1], [0, 2]]
    assert silent == []

    # Other people, another constraint: nothing in common.
    change(copied / "evaluation-test.json", "users", value=7)
    other = replace(read_run(copied), history=[])
    found, silent = compare([plain, other])
    assert found == []
    assert silent[0].startswith("Not compared: plain, copied.")

    test = plain.evaluations["test"]
    gaps = {name: gap for name, gap in test.gaps.items() if name != "constraint"}
    silenced = replace(plain, evaluations={"test": replace(test, gaps=gaps, verdict=None)})
    found, silent = compare([full, silenced])
    assert found == []  # the gaps by sex and by race are not those of sex and race together
    assert silent


def test_a_run_without_the_constraint_is_compared_by_the_same_gap(tmp_path: Path) -> None:
    parity = fpfl.fnr_parity("sex", tolerance=0.1)
    records = []
    people = make_population(users=100)
    for name, judged in (("judged", parity), ("not", None)):
        run = train(None, constraint=None, privacy=None)
        found = fpfl.evaluate_model(run.model, people, constraint=judged, bootstrap=50)
        path = run.save(tmp_path / name)
        (path / "evaluation-test.json").write_text(json.dumps(found.as_dict() | MARK))
        records.append(read_run(path))
    (comparison,), _ = compare(records)
    one, other = comparison.entries
    assert one.gap == other.gap
    assert (one.tolerance, other.tolerance) == (0.1, 0.1)
    assert one.verdict == other.verdict == records[0].evaluations["test"].verdict
    assert [one.trained, other.trained] == [False, False]
    words = "".join(Elements(page_of(*(r.folder for r in records))).words)
    assert "judged and not were not trained for this constraint" in words

    # With two tolerances there is none to judge it by.
    strict = replace(records[0], folder=Path("strict"))
    strict.evaluations["test"] = replace(records[0].evaluations["test"], tolerance=0.01)
    judged = replace(strict, evaluations=dict(strict.evaluations), folder=Path("judged"))
    judged.evaluations["test"] = replace(judged.evaluations["test"], tolerance=0.1)
    (mixed,), _ = compare([judged, strict, records[1]])
    assert [e.tolerance for e in mixed.entries] == [0.1, 0.01, None]
    assert mixed.entries[2].verdict == "not judged"


def test_a_run_with_more_groups_is_compared_by_some_of_them(runs: dict[str, Path]) -> None:
    """The task's gap is of sexes and races; the constraint is about sexes alone."""
    plain = read_run(runs["plain"])
    model, parity = fpfl.mlp(5, seed=0), fpfl.fnr_parity("sex", tolerance=0.1)
    found = [
        fpfl.evaluate_model(model, PEOPLE, constraint=constraint, bootstrap=100)
        for constraint in (parity, None)
    ]
    own, all_groups = (read_evaluation(Path("e"), "test", e.as_dict()) for e in found)
    asked = own.gaps["constraint"]
    gap = same_gap(all_groups, asked.measures)
    assert gap is not None
    assert gap.measures == asked.measures < all_groups.gaps["fnr"].measures
    assert gap.value.value == asked.value.value
    assert gap.value.low <= asked.value.low <= asked.value.high <= gap.value.high
    records = [replace(plain, folder=Path(str(i)), evaluations={"test": e})
               for i, e in enumerate((own, all_groups))]  # fmt: skip
    (comparison,), silent = compare(records)
    assert silent == []
    assert [e.gap.value for e in comparison.entries] == [asked.value.value] * 2
    assert same_gap(all_groups, asked.measures | {("FNR", "sex=Other")}) is None


@pytest.mark.parametrize(
    ("low", "high", "known", "verdict"),
    [
        (0.03, 0.09, True, "outside"),
        (0.03, 0.09, False, "outside"),
        (0.02, 0.09, True, "cannot tell"),
        (0.0, 0.02, True, "within"),
        (0.0, 0.02, False, "cannot tell"),
        (None, None, True, "cannot tell"),
    ],
)
def test_a_verdict_is_by_the_interval(
    record: RunRecord, low: float | None, high: float | None, known: bool, verdict: str
) -> None:
    gap = record.evaluations["test"].gaps["constraint"]
    first = replace(gap.rows[0], value=Figure(0.3 if known else None))
    rows = (first, *(replace(row, value=Figure(0.3)) for row in gap.rows[1:]))
    assert gap_verdict(replace(gap, value=Figure(0.02, low, high), rows=rows), 0.02) == verdict


def test_what_is_not_compared_has_a_cause_and_a_remedy(record: RunRecord) -> None:
    test = record.evaluations["test"]
    gaps = {name: gap for name, gap in test.gaps.items() if name != "constraint"}
    first = replace(test.gaps["constraint"].rows[0], group="others")
    other = replace(test.gaps["constraint"], rows=(first,))
    own = replace(record, history=[], evaluations={"test": test})
    assert test.samples is not None
    for changed, words in (
        ({"test": replace(test, samples=1971)},
         f"different held-out people: {test.samples:,} and 1,971 samples; give both runs the same "
         "--test file"),
        ({"test": replace(test, gaps=gaps)}, "not all of them are in the other's evaluation"),
        ({"test": replace(test, gaps={"constraint": other}, constraint="mine")},
         "different constraints: equalised odds is about FNR and FPR of 6 groups"),
        ({"private": record.evaluations["private"]}, "no evaluation of the same kind"),
        ({}, "the other none); evaluate both alike"),
        ({"test": replace(test, score_name="absolute error")}, "different tasks"),
    ):  # fmt: skip
        second = replace(own, folder=Path("second"), evaluations=changed)
        found, (names, why) = compare([own, second])
        assert found == []
        assert names == "Not compared: full, second."
        assert why.startswith("full and second: ")
        assert words in why
    free = replace(own, folder=Path("free"), evaluations={"test": replace(test, gaps=gaps)})
    _, (_, why) = compare([free, replace(free, folder=Path("too"))])
    assert "neither has a constraint" in why


def test_what_is_outside_is_no_best_tradeoff(record: RunRecord) -> None:
    test = record.evaluations["test"]

    def run(name: str, accuracy: float, verdict: str) -> RunRecord:
        judged = replace(test, score=Figure(accuracy), verdict=verdict)
        return replace(record, folder=Path(name), evaluations={"test": judged})

    runs = [run("good", 0.8, "outside"), run("bad", 0.7, "within")]
    (comparison,), _ = compare(runs)
    assert [(e.best, e.recommended) for e in comparison.entries] == [(True, False), (False, False)]
    assert [standing(e) for e in comparison.entries] == [NOT_BEATEN, BEATEN]
    words = "".join(Elements(report_html(runs, "")).words)
    assert "Best trade-offs: none." in words
    assert "Not dominated either, but outside α: good." in words
    assert "★" not in words
    (unsure,), _ = compare([run("good", 0.8, "cannot tell"), runs[1]])
    assert standing(unsure.entries[0]) == BEST


def constant(record: RunRecord, name: str) -> RunRecord:
    """A run whose kept model says the same of everybody."""
    labels = torch.zeros_like(PEOPLE.labels)
    found = fpfl.fairness.evaluate_predictions(
        labels, (torch.arange(len(labels)) % 9 == 0).long(), PEOPLE.attributes, (SEX, RACE),
        users=torch.repeat_interleave(torch.arange(PEOPLE.population), PEOPLE.sizes()),
        constraint=fpfl.equalized_odds(("sex", "race"), tolerance=0.05), bootstrap=50,
        class_names=("stays", "leaves"),
    )  # fmt: skip
    judged = read_evaluation(Path("e"), "test", found.as_dict())
    return replace(record, folder=Path(name), evaluations={"test": judged})


def test_where_classes_are_unbalanced_runs_are_ranked_by_balanced_accuracy(
    record: RunRecord,
) -> None:
    runs = [constant(record, "one"), constant(record, "two")]
    (comparison,), _ = compare(runs)
    assert comparison.score_name == "balanced accuracy"
    assert [e.score.value for e in comparison.entries] == [0.5, 0.5]
    words = "".join(Elements(report_html(runs, "")).words)
    assert "runs are ranked by balanced accuracy" in words
    # Where one of them does not say how frequent classes are, there is accuracy alone.
    old = replace(runs[1].evaluations["test"], metrics=None)
    (comparison,), _ = compare([runs[0], replace(runs[1], evaluations={"test": old})])
    assert comparison.score_name == "accuracy"


def test_a_collapsed_model_is_named_first_and_called_fair_nowhere(record: RunRecord) -> None:
    collapsed = constant(record, "silent")
    judged = collapsed.evaluations["test"]
    said = "the model predicts 'stays' for every sample: accuracy 0.888"
    assert judged.collapsed is not None
    assert judged.collapsed.startswith(said)
    assert [b.title for b in collapses(collapsed)] == ["Collapsed model"]
    assert "COLLAPSED" in marks(collapsed)
    page = "".join(Elements(report_html([collapsed], "")).words)
    assert page.index("Collapsed model") < page.index("balanced accuracy 0.500")
    assert page.count("✗ collapsed model") == 2  # beside the gap's tile, and beside the verdict
    assert "✓ within α" not in page
    assert "balanced accuracy 0.500" in page
    assert "of the predictions" in page

    # It has no gap, more accuracy, and is better than nobody.
    other = replace(record, evaluations={"test": replace(
        record.evaluations["test"], users=judged.users, samples=judged.samples
    )})  # fmt: skip
    (comparison,), _ = compare([collapsed, other])
    assert [e.best for e in comparison.entries] == [False, True]
    assert standing(comparison.entries[0]) == COLLAPSED
    assert comparison.entries[0].gap.value < comparison.entries[1].gap.value
    words = "".join(Elements(report_html([collapsed, other], "")).words)
    assert "Collapsed, and compared with no other: silent." in words
    assert "has no gap for nothing" in words


def test_an_evaluation_of_an_earlier_version_says_nothing_of_collapse(record: RunRecord) -> None:
    test = record.evaluations["test"]
    old = replace(record, evaluations={"test": replace(test, metrics=None, collapsed=None)})
    page = "".join(Elements(report_html([old], "")).words)
    assert "Balanced accuracy" not in page
    assert "of the predictions" not in page


def test_a_private_evaluation_shows_what_accuracy_does_not_say(record: RunRecord) -> None:
    private = record.evaluations["private"]
    assert private.metrics is not None
    alone = replace(record, evaluations={"private": private})
    page = "".join(Elements(report_html([alone], "")).words)
    assert "AUC" in page
    assert "of the predictions" in page
    doubtful = replace(private, collapsed=None, collapse_in_doubt=True)
    page = "".join(
        Elements(report_html([replace(record, evaluations={"private": doubtful})], "")).words
    )
    assert IN_DOUBT in page


def test_a_headline_names_the_rates_of_its_gap(record: RunRecord) -> None:
    test = record.evaluations["test"]
    value = test.gaps["constraint"].value.value
    judged = replace(record, evaluations={"test": test})
    assert f" · gap (FNR and FPR) {value:.3f} · " in brief(judged)
    gaps = {name: gap for name, gap in test.gaps.items() if name != "constraint"}
    free = replace(test, gaps=gaps, constraint=None, tolerance=None, verdict=None)
    alone = replace(record, evaluations={"test": free})
    assert "gap" not in brief(alone)
    page = report_html([alone], "")
    assert "<dt>Gap" not in page
    assert "<dt>Gap (FNR and FPR)</dt>" in report_html([judged], "")
    words = "".join(Elements(page).words)
    for name in ("eo", "demp"):
        rates = {"eo": "FNR and FPR", "demp": "selection rate"}[name]
        assert f"Gap ({rates}) {gaps[name].value.value:.3f}" in words


def test_a_comparison_says_what_was_compared(runs: dict[str, Path]) -> None:
    words = "".join(Elements(page_of(runs["full"], runs["plain"])).words)
    test = read_run(runs["full"]).evaluations["test"]
    people = f"{test.users:,} users with {test.samples:,} samples"
    assert f"2 runs, each measured on {people}. The gap is the largest" in words
    assert "difference to the whole in FNR and FPR of 6 groups (sex=Female & race=A, " in words


# The page


def test_the_tiles_say_that_released_noise_was_seeded(copied: Path) -> None:
    def tiles() -> str:
        return page_of(copied).split('<dl class="tiles">')[1].split("</dl>")[0]

    seeded = "released, ε = 4.000, seeded noise: a simulation"
    assert tiles().count(seeded) == 2  # of the accuracy, and of the gap
    assert seeded in run_facts(copied)["verdict_on"]
    change(copied / "evaluation-private.json", "seeded", value=False)
    assert "seeded" not in tiles()
    assert "released, ε = 4.000" in tiles()


def test_whatever_was_not_released_is_marked(runs: dict[str, Path], copied: Path) -> None:
    heading = '<h3>Test set <span class="badge sim">simulation only</span></h3>'
    assert heading in page_of(runs["full"])
    (copied / "evaluation-test.json").unlink()
    text = page_of(copied)
    assert heading not in text
    # What is left is the footer's explanation, and the private evaluation's own price.
    assert text.count('<span class="badge sim">') == 1
    assert "Held-out users, released with noise" in text
    assert "released, ε = 4.000, seeded noise: a simulation" in text


def test_the_page_names_the_worst_pair_and_the_verdict(runs: dict[str, Path]) -> None:
    content = json.loads((runs["full"] / "evaluation-test.json").read_text())
    pair = content["gaps"]["constraint"]["worst_pair"]
    words = "".join(Elements(page_of(runs["full"])).words)
    assert f"Furthest apart: {pair['larger']} and {pair['smaller']}, by" in words
    assert f"[{pair['low']:.3f}, {pair['high']:.3f}]".replace("-", "−") in words
    assert content["verdict_in_words"] in words
    for line in (runs["full"] / "privacy.txt").read_text().splitlines():
        assert line in words
    assert "Seeded noise: a simulation" in words


def test_banners_for_what_is_not_private(record: RunRecord) -> None:
    assert [b.title for b in banners(record)] == ["Seeded noise: a simulation"]
    assert marks(record) == ["seeded noise", "seeded cohorts"]
    private = dict(record.privacy or {})
    real = replace(record, privacy=private | {"seeded_noise": False})
    assert banners(real) == []
    assert marks(real) == ["seeded cohorts"]
    assert any(line.startswith("Seeded cohorts") for line in record.statement)
    assert marks(replace(real, privacy=(real.privacy or {}) | {"seeded_cohorts": False})) == []
    test = vars(Aggregation(nodes=4, least=3, colluders=1, shares=True, injected=True))
    injected = replace(record, privacy=private | {"aggregation": test})
    assert [b.title for b in banners(injected)] == ["NOT PRIVATE"]
    other = planned(record, population=10_000, real_population=2000)
    assert [b.title for b in banners(other)] == ["Hypothetical population"]
    assert str(round(other.epsilon or 0, 2))[:3] in headline(other)


EVIL = '</script><img src=x onerror=alert(1)>&"%{x}'


def test_what_is_in_a_folder_is_text_and_nothing_else(copied: Path, runs: dict[str, Path]) -> None:
    name = json.dumps("sex=Male & race=A")[1:-1]
    evil = json.dumps(EVIL)[1:-1]
    folder = copied.rename(copied.with_name("<script>alert(1)<"))
    for file in folder.glob("*.json"):
        file.write_text(file.read_text().replace(name, evil))
    change(folder / "result.json", "warnings", value=[EVIL])
    change(folder / "result.json", "settings", "constraint", value=EVIL)
    (folder / "privacy.txt").write_text(EVIL)
    assert EVIL in read_run(folder).groups
    for text in (page_of(folder), page_of(folder, runs["plain"])):
        found = Elements(text)
        assert len(found.named("script")) == 3
        assert found.named("img") == []
        assert not any("onerror" in attributes for _, attributes in found.found)
        words = "".join(found.words)
        assert EVIL in words
        assert "<script>alert(1)<" in words
    assert json.loads(in_script({"a": EVIL})) == {"a": EVIL}
    assert not set("<>&") & set(in_script({"a": EVIL}))


def test_titles_of_axes_are_text() -> None:
    """Plotly takes them for HTML; they were put there as they came from the folder."""
    shown = json.dumps(axes(EVIL, EVIL))
    assert "<" not in shown
    assert "%{" not in shown
    assert "&lt;img" in shown


def test_the_page_asks_the_network_for_nothing(runs: dict[str, Path]) -> None:
    found = Elements(page_of(runs["full"], runs["plain"]))
    assert found.named("link") == []
    assert all("src" not in attributes for _, attributes in found.found)
    assert all((a.get("href") or "#").startswith("#") for a in found.named("a"))
    policy = [m for m in found.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    allowed = str(policy[0]["content"])
    for words in ("default-src 'none'", "base-uri 'none'", "form-action 'none'"):
        assert words in allowed
    # A script that gets into the page by a name, whatever the way, does not run.
    scripts = allowed.split("script-src ")[1].split(";")[0]
    assert re.fullmatch(r"('sha256-[\w+/]{43}=' ?){2}", scripts)
    ids = [a["id"] for _, a in found.found if "id" in a]
    assert len(set(ids)) == len(ids)
    targets = {a.get("href") for a in found.named("a")}
    assert all(str(target)[1:] in ids for target in targets)


def test_no_privacy_sentence_is_the_runs_own() -> None:
    from fpfl.training.run import NO_PRIVACY as SAID

    assert NO_PRIVACY == SAID


# The command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", "report", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_the_command_writes_a_page(command, runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = tmp_path / "new" / "report.html"
    code, out, err = command(runs["full"], runs["plain"], "-o", page)
    assert (code, err) == (0, "")
    assert out.startswith(f"Report: {page} (")
    text = page.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1  # one copy, and it is there
    assert "2 runs compared" in text


def test_the_command_says_what_to_do(command, runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    for words, message in (
        ([tmp_path, "-o", tmp_path / "a.html"], "neither result.json nor ledger.jsonl"),
        ([runs["full"], "-o", tmp_path], "is a folder; name a file for the page"),
        ([runs["full"], "-o", tmp_path / "no" / "such" / "a.html"],
         f"there is no folder {tmp_path / 'no'}; make it first"),
        ([], "Missing argument"),
    ):  # fmt: skip
        code, _, err = command(*words)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1
    with pytest.raises(ValueError, match="no run was given"):
        fpfl.write_report([], tmp_path / "a.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_what_cannot_be_written_does_not_speak_of_a_file_that_was_not_there(
    there: bool, command, runs: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    page = tmp_path / ("x" * 247 + ".html")  # the name of the part beside it is too long
    if there:
        page.write_text("old")
    code, _, err = command(runs["full"], "-o", page)
    assert code != 0
    assert err.count("\n") == 1
    assert ("as it was before is still there" in err) == there
    assert ("Nothing was written" in err) != there
    assert page.exists() == there


def test_without_plotly_the_extra_is_named(command, runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, _, err = command(runs["full"], "-o", tmp_path / "a.html")
    assert code == 2
    assert "pip install 'fpfl[report]'" in err
    assert not (tmp_path / "a.html").exists()


def demo_runs(*_: object) -> list[demo.DemoRun]:
    """Two short trainings in the place of the demo's three."""
    found = []
    for name, constraint in (("FL", None), ("FPFL", demo.PARITY)):
        run = train(None, constraint=constraint, privacy=None, rounds=2)
        test = fpfl.evaluate_model(run.model, PEOPLE, constraint=demo.PARITY, bootstrap=50)
        curves = {"sex=Female": [(1, 0.5)], "sex=Male": [(1, 0.4)]}
        found.append(demo.DemoRun(name, "a short one", run, test, curves))
    return found


@pytest.mark.parametrize("there", [True, False])
def test_the_demo_names_its_report_or_the_extra(
    there: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    if there:
        pytest.importorskip("plotly", reason="plotly is not installed")
    else:
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr(demo, "run_demo", demo_runs)
    monkeypatch.setattr(sys, "argv", ["fpfl", "demo", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    page = tmp_path / "report.html"
    assert page.exists() == there
    if there:
        assert last == f"Report: {page}"
    else:
        assert "pip install 'fpfl[report]'" in last
    records = [read_run(path) for path in (tmp_path / "fl", tmp_path / "fpfl")]
    (comparison,), silent = compare(records)
    assert silent == []
    assert comparison.what == "FNR parity"
    content = json.loads((tmp_path / "fl" / "evaluation-test.json").read_text())
    assert content["mark"].startswith("simulation only")
