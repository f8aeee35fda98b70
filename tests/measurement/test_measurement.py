"""Measurements: what one user can change, what the noise is, what is paid, what figures are worth.

Statistical tests have fixed seeds where the noise may be seeded; limits are for false alarms of
10⁻⁶ or less for each test.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_population, thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fpfl
from fpfl.aggregation import SeededNoise, SystemNoise
from fpfl.aggregation.noise import GRID_BITS
from fpfl.data import (
    AttributeColumn,
    CategoryColumn,
    FederatedDataset,
    Label,
    NumberColumn,
    TableSchema,
    read_table_schema,
)
from fpfl.data.table_schema import MeasuredAt, declared_schema
from fpfl.measurement import (
    CategoryCells,
    Measurement,
    NumberCells,
    filled,
    measure,
    measured,
    people_of_dataset,
    people_of_table,
    plan_measurement,
)
from fpfl.measurement import people as people_module
from fpfl.measurement.cells import NOWHERE
from fpfl.measurement.counting import STEP_BITS, CodedRows, whole_sum
from fpfl.measurement.intervals import (
    distribution,
    normal_quantile,
    quantile,
    quantile_interval,
    ratio_interval,
)
from fpfl.privacy import gaussian_epsilon
from fpfl.privacy.accounting import epsilon_poisson
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.conventions import BudgetExhaustedError
from fpfl.runs.ledger import RunLedger

AGE = NumberCells("age", 0.0, 100.0, bins=8, missing=True)
INCOME = NumberCells("income", -10.0, 1e6, bins=6, threshold=100.0)
JOB = CategoryCells("job", ("clerk", "cook"), other=True)
COLUMNS = (AGE, INCOME, JOB)

SCHEMA = TableSchema(
    label=Label("hired", ("no", "yes")),
    features=(
        NumberColumn("age", (16, 96), indicator=True),
        CategoryColumn("job", ("clerk", "cook")),
        NumberColumn("income", (0, 1e5)),
    ),
    attributes=(AttributeColumn("sex", ("Female", "Male")),),
    user="id",
    samples_per_user=2,
)
HEADER = ["id", "age", "job", "income", "sex", "hired"]


@dataclass(frozen=True)
class Silence:
    """No noise: to see what is counted."""

    seeded: bool = True

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)


def write(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def people_file(path: Path, users: int = 400, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = [
        (
            f"u{user}",
            "" if rng.random() < 0.1 else f"{rng.normal(50, 10):.2f}",
            ("clerk", "cook", "alien")[rng.choice(3, p=(0.6, 0.3, 0.1))],
            0 if rng.random() < 0.8 else f"{rng.exponential(8000):.2f}",
            ("Female", "Male")[rng.integers(2)],
            ("no", "yes")[rng.integers(2)],
        )
        for user in range(users)
        for _ in range(rng.integers(1, 4))
    ]
    return write(path, rows)


# --- cells --------------------------------------------------------------------------------------


def test_linear_bins_have_their_left_edge_and_clip_to_their_ends() -> None:
    values = np.array([-1e300, 0.0, 12.4999, 12.5, 99.0, 100.0, 1e300, math.nan, math.inf])
    assert AGE.codes(values).tolist() == [0, 0, 0, 1, 7, 7, 7, 8, NOWHERE]
    assert replace(AGE, missing=False).codes(np.array([math.nan])).tolist() == [NOWHERE]


def test_symlog_bins_are_linear_near_zero_and_logarithmic_beyond() -> None:
    cells = NumberCells("x", -1e4, 1e6, bins=640, threshold=10.0)
    edges = cells.edges
    assert edges[0] == -1e4
    assert edges[-1] == 1e6
    assert (np.diff(edges) > 0).all()
    far = edges[edges > 1000]
    assert np.ptp(np.diff(np.log(far))) < 0.02
    near = np.diff(edges[np.abs(edges) < 3])
    assert near.max() < 1.4 * near.min()
    middles = (edges[:-1] + edges[1:]) / 2
    assert cells.codes(middles).tolist() == list(range(640))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"low": 3.0, "high": 3.0}, "low < high"),
        ({"high": math.inf}, "low < high"),
        ({"bins": 1}, "expected 2 to"),
        ({"threshold": 0.0}, "must be positive"),
        ({"low": 1e16, "high": 1e16 + 8, "bins": 64}, "narrower than"),
    ],
)
def test_cells_refuse_what_cannot_be_counted(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(AGE, **change)  # type: ignore[arg-type]


# --- what one user can change -------------------------------------------------------------------

VALUES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-20, 120),
    st.sampled_from([0.0, 12.5, 100.0, -0.0, 5e-324]),
)
ROWS = st.tuples(VALUES, VALUES, st.integers(-1, 2))
USERS = st.lists(st.lists(ROWS, max_size=7), min_size=1, max_size=8)


def coded(users: list[list[Any]], first: int = 0) -> CodedRows:
    rows = [row for user in users for row in user]
    owner = np.repeat(np.arange(first, first + len(users)), [len(user) for user in users])
    age, income, job = (np.array([row[i] for row in rows], dtype=np.float64) for i in range(3))
    codes = (AGE.codes(age), INCOME.codes(income), job.astype(np.int64))
    return CodedRows(codes, owner.astype(np.int64))


def one_by_one(users: list[list[Any]]) -> list[list[int]]:
    """Each user's vector in Python's own whole numbers, as the module's formula has it."""
    found = []
    for user in users:
        vector: list[int] = []
        part = coded([user])
        for column, codes in zip(COLUMNS, part.codes, strict=True):
            counts = [codes.tolist().count(cell) for cell in range(column.size)]
            vector += [(count * 2**STEP_BITS) // max(1, len(user)) for count in counts]
        found.append(vector)
    return found


@given(USERS, st.randoms(use_true_random=False))
@settings(max_examples=thorough(150, 2000))
def test_the_sum_is_that_of_vectors_that_are_each_users_own(
    users: list[list[Any]], random: Any
) -> None:
    """Bad values, empty users, any order of rows, any chunks: bit for bit, and bounded by √d."""
    own = one_by_one(users)
    total = whole_sum([coded(users)], COLUMNS)
    assert total.tolist() == [sum(each) for each in zip(*own, strict=True)]
    left_out = random.randrange(len(users))
    others = [user if k != left_out else [] for k, user in enumerate(users)]
    assert (total - whole_sum([coded(others)], COLUMNS)).tolist() == own[left_out]
    assert (whole_sum([coded(users)], COLUMNS, {left_out}) + own[left_out] == total).all()
    # In Python's whole numbers: no rounding anywhere.
    for vector in own:
        assert sum(z * z for z in vector) <= len(COLUMNS) * 4**STEP_BITS
        assert min(vector) >= 0
    cut = random.randrange(len(users) + 1)
    parts = [coded(users[:cut]), coded(users[cut:], first=cut)]
    assert (whole_sum(parts, COLUMNS) == total).all()
    whole = coded(users)
    order = np.array(random.sample(range(len(whole.owner)), len(whole.owner)), dtype=np.int64)
    shuffled = CodedRows(tuple(codes[order] for codes in whole.codes), whole.owner[order])
    assert (whole_sum([shuffled], COLUMNS) == total).all()


def test_a_user_with_very_many_rows_weighs_one() -> None:
    rows = [(50.0, 0.0, 0)] * 100_000 + [(math.nan, math.inf, -1)] * 7
    vector = whole_sum([coded([rows])], COLUMNS)
    assert vector.max() == (100_000 << STEP_BITS) // 100_007
    assert sum(int(z) ** 2 for z in vector) <= len(COLUMNS) * 4**STEP_BITS


CELLS = st.one_of(
    st.sampled_from(["", "nan", "inf", "-1e400", "forty", "40", "1_000", "16", "96.0", "٣", "0x1"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=6),
)
TABLE_ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", ""]), CELLS, CELLS, CELLS, CELLS, CELLS), max_size=12
)


@given(TABLE_ROWS)
@settings(max_examples=thorough(60, 600))
def test_no_cell_of_a_table_is_an_error_or_another_users_matter(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("cells")
    columns = ["age", "job", "income", "sex", "hired"]

    def total(kept: list[tuple[str, ...]]) -> np.ndarray[Any, Any]:
        path = write(folder / "people.csv", kept)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = people_of_table(path, SCHEMA, columns, 16, ["income"])
            return whole_sum(found.chunks(), found.columns)

    whole = total(rows)
    for user in ("a", "b", "c", ""):
        own = total([row for row in rows if row[0] == user])
        others = total([row for row in rows if row[0] != user])
        assert (whole - others == own).all()
        assert sum(int(z) ** 2 for z in own) <= len(columns) * 4**STEP_BITS


def test_a_line_that_is_no_row_is_nobodys(tmp_path: Path) -> None:
    path = people_file(tmp_path / "people.csv", users=5)
    before = people_of_table(path, SCHEMA, None, 8, [])
    with path.open("a", encoding="utf-8") as file:
        file.write('u1,3\nu2,40,clerk,0,Female,no,too many\n"u3,never closed\n')
    after = people_of_table(path, SCHEMA, None, 8, [])
    assert (
        whole_sum(before.chunks(), before.columns) == whole_sum(after.chunks(), after.columns)
    ).all()


def test_a_dataset_is_counted_in_any_chunks_and_bad_users_stay_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_population(users=60)
    features = data.features.clone()
    features[3], features[7, 2] = math.nan, math.inf
    labels = data.labels.clone()
    labels[5] = 17
    bad = FederatedDataset(
        features, labels, data.attributes, data.offsets, data.schema, checked=False
    )
    columns = {f"feature {i}": (-3.0, 3.0) for i in range(5)} | {"sex": (0, 1), "label": (0, 1)}
    found = people_of_dataset(bad, columns, 16, [])
    whole = whole_sum(found.chunks(), found.columns)
    monkeypatch.setattr(people_module, "_AT_ONCE", 5)
    monkeypatch.setattr(people_module, "_USERS", 3)
    assert (whole_sum(found.chunks(), found.columns) == whole).all()
    clean = people_of_dataset(data, columns, 16, [])
    changed = {int((data.offsets > sample).nonzero()[0]) - 1 for sample in (3, 5, 7)}
    without = whole_sum(found.chunks(), found.columns, changed)
    assert (whole_sum(clean.chunks(), clean.columns, changed) == without).all()
    assert (whole != whole_sum(clean.chunks(), clean.columns)).any()


def test_who_withdrew_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", [["a", 20, "clerk", 1, "", ""], ["b", 90, "cook", 1, "", ""]])
    file = tmp_path / "people.jsonl"
    with PopulationLedger.create(file, population=2, epsilon=200, delta=0.05) as ledger:
        ledger.withdraw([1])
    found = measure(
        path, SCHEMA, columns=["job"], epsilon=20, delta=0.05, ledger=file, noise=Silence()
    )
    assert found.categories("job").counts == pytest.approx(
        {"clerk": 1.0, "cook": 0.0, "(other)": 0.0}, abs=1e-6
    )


# --- the noise, and what it costs ---------------------------------------------------------------


def planned(**changes: Any) -> Any:
    given: dict[str, Any] = {"population": 1000, "epsilon": 0.5, "delta": 1e-5}
    return plan_measurement(COLUMNS, **given | changes)


@pytest.mark.parametrize("neighbours", ["zero-out", "add-remove", "replace-one"])
def test_one_release_costs_what_the_accountant_says(neighbours: Any) -> None:
    plan = planned(neighbours=neighbours, declared=True)
    reach = 2.0 if neighbours == "replace-one" else 1.0
    sigma = plan.noise_multiplier
    assert plan.epsilon == gaussian_epsilon(sigma, 1, 1e-5, sensitivity=reach)
    assert plan.epsilon == pytest.approx(epsilon_poisson(sigma, 1.0, 1, 1e-5, neighbours))
    assert plan.epsilon <= 0.5
    assert plan.epsilon == pytest.approx(0.5, rel=1e-6)
    assert plan.mechanism.cohort == plan.mechanism.population == 1000
    assert plan.mechanism.noise_multiplier == sigma
    # The noise covers √d and the rounding to its grid, for every sum of so many users.
    g = plan.noise_stddev * 2.0**-GRID_BITS
    C = math.sqrt(len(COLUMNS))
    assert (C + g * math.sqrt(plan.size)) / plan.noise_stddev <= 1 / sigma
    given = planned(epsilon=None, noise_multiplier=sigma, neighbours=neighbours, declared=True)
    assert given.epsilon == plan.epsilon


@given(st.integers(0, 2**40), st.integers(0, 2**30))
@settings(max_examples=200)
def test_a_user_moves_the_released_numbers_by_no_more_than_the_noise_covers(
    others: int, own: int
) -> None:
    """Rounding to the noise's grid included; every column's own cell at its largest."""
    plan = planned()
    without = np.full(plan.size, others, dtype=np.int64)
    moved = without.copy()
    moved[[0, AGE.size, AGE.size + INCOME.size]] += own
    difference = plan.release(moved, Silence()) - plan.release(without, Silence())
    assert np.linalg.norm(difference) <= plan.noise_stddev / plan.noise_multiplier


@pytest.mark.parametrize("source", [SystemNoise(), SeededNoise(3)])
def test_the_noise_is_gaussian_on_its_grid(source: Any) -> None:
    """Moments of 160,000 numbers within 5.5 standard errors: a false alarm of 4e-8 for each."""
    cells = [NumberCells(f"x{i}", 0.0, 1.0, bins=4000) for i in range(40)]
    plan = plan_measurement(cells, population=10, noise_multiplier=2.0, delta=1e-3)
    v = plan.release(np.zeros(plan.size, dtype=np.int64), source)
    z = v / plan.noise_stddev
    steps = z * 2.0**GRID_BITS
    assert np.abs(steps - steps.round()).max() < 1e-4
    n = len(z)
    assert abs(z.mean()) < 5.5 / math.sqrt(n)
    assert abs((z**2).mean() - 1) < 5.5 * math.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < 5.5 * math.sqrt(96 / n)
    assert abs((z[1:] * z[:-1]).mean()) < 5.5 / math.sqrt(n)
    assert plan.noise_stddev == pytest.approx(2.0 * math.sqrt(40), rel=1e-3)
    if not source.seeded:
        again = plan.release(np.zeros(plan.size, dtype=np.int64), source)
        assert (again != v).mean() > 0.999


# Claims of ε are claims of μ = Δ/s here. What an attacker sees of a user along the vector that it
# knows is N(μ', 1) with the user and N(0, 1) without; the twins make μ' larger than they claim.

TRIALS = 4000
LIMIT = 5.5 * math.sqrt(2 / TRIALS)
"""Of a difference of two means, 5.5 standard errors: a false alarm of 4e-8."""


def seen(plan: Any, vector: np.ndarray[Any, Any], seed: int) -> float:
    """μ' by the attack: with the user and without, TRIALS times each."""
    direction = vector / np.linalg.norm(vector)
    others = np.arange(plan.size, dtype=np.int64) * 2**STEP_BITS * 7
    worlds = []
    for world, total in enumerate((others, others + vector)):
        found = [
            float(direction @ plan.release(total, SeededNoise(seed + 2 * t + world)))
            for t in range(TRIALS)
        ]
        worlds.append(np.mean(found))
    return float(worlds[1] - worlds[0]) / plan.noise_stddev


def heavy_user() -> list[Any]:
    return [(50.0, 10.0, 1)] * 50


def test_an_attack_finds_no_more_than_is_claimed() -> None:
    plan = planned(epsilon=None, noise_multiplier=0.5)
    vector = whole_sum([coded([heavy_user()])], COLUMNS)
    claimed = 1 / plan.noise_multiplier
    found = seen(plan, vector, seed=10**6)
    assert found <= claimed + LIMIT
    assert found >= claimed - LIMIT, "the attack is as strong as it can be"


@pytest.mark.parametrize("twin", ["rows weigh 1 each", "columns left out of C", "noise halved"])
def test_broken_twins_are_found_out(twin: str) -> None:
    plan = planned(epsilon=None, noise_multiplier=0.5)
    claimed = 1 / plan.noise_multiplier
    vector = whole_sum([coded([heavy_user()])], COLUMNS)
    if twin == "rows weigh 1 each":
        vector = vector * len(heavy_user())
    elif twin == "columns left out of C":
        broken = plan_measurement(COLUMNS[:1], population=1000, noise_multiplier=0.5, delta=1e-5)
        plan.__dict__["noise_stddev"] = broken.noise_stddev
    else:
        plan.__dict__["noise_stddev"] = plan.noise_stddev / 2
    assert seen(plan, vector, seed=2 * 10**6) > claimed + LIMIT


# --- figures ------------------------------------------------------------------------------------


def misses_allowed(trials: int, chance: float) -> int:
    """So many misses are exceeded with a probability of 10⁻⁶ at most (a normal bound and more)."""
    return math.ceil(trials * chance + 5 * math.sqrt(trials * chance) + 5)


@pytest.mark.parametrize("threshold", [None, 1.0])
@pytest.mark.parametrize("q", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("stddev", [2.0, 60.0])
def test_quantiles_are_in_their_intervals_as_often_as_is_said(
    q: float, stddev: float, threshold: float | None
) -> None:
    """The true quantile's bin is lost with probability 5% at most; 1,000 releases."""
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.normal(3, 1, 3000), np.zeros(1500), rng.exponential(9, 500)])
    cells = NumberCells("x", -5.0, 50.0, bins=40, threshold=threshold)
    edges = cells.edges
    true = np.bincount(cells.codes(values), minlength=40).astype(float)
    below = np.concatenate([[0.0], np.cumsum(true)]) / len(values)
    place = int(np.searchsorted(below, q)) - 1
    z = normal_quantile(0.95)
    misses = 0
    off = []
    for _ in range(1000):
        noisy = true + rng.normal(0, stddev, 40)
        low, high = quantile_interval(noisy, edges, q, stddev, z)
        misses += not (low <= edges[place] and edges[place + 1] <= high)
        point = quantile(noisy, edges, q)
        there = below[np.searchsorted(edges, [point], side="right")[0] - 1 :][:2]
        off.append(max(0.0, there[0] - q, q - there[-1]))
    assert misses <= misses_allowed(1000, 0.05)
    if stddev == 2.0:
        # An estimate's rank is wrong by no more than the worst of all edges: Lévy's inequality.
        worst = NormalDist().inv_cdf(1 - 1e-9 / 8) * stddev * math.sqrt(40)
        assert max(off) <= worst / (len(values) - worst)


@pytest.mark.parametrize("edge", [4, 20, 36])
@pytest.mark.parametrize("side", [-1, 1])
def test_intervals_of_quantiles_are_no_wider_than_they_must_be(edge: int, side: int) -> None:
    """A quantile just beside an edge: its bin is lost for being a little beyond, 2.5% of times.

    Within five standard deviations of 2,000 releases: a false alarm of 6e-7. Bins with little in
    them hardly ever hide a loss.
    """
    true = np.full(40, 125.0)
    q = edge / 40 + side * 1e-9
    place = edge if side > 0 else edge - 1
    rng = np.random.default_rng(100 * edge + side)
    lost = 0
    for _ in range(2000):
        noisy = true + rng.normal(0, 3.0, 40)
        low, high = quantile_interval(noisy, np.arange(41.0), q, 3.0, normal_quantile(0.95))
        lost += not (low <= place and place + 1 <= high)
    assert abs(lost - 50) < 5 * math.sqrt(2000 * 0.025 * 0.975)


def test_means_and_shares_are_in_their_intervals_as_often_as_is_said() -> None:
    rng = np.random.default_rng(6)
    true = rng.uniform(0, 40, 30)
    values = np.linspace(1000.0, 1030.0, 30)
    mean = float(values @ true / true.sum())
    misses = 0
    for _ in range(2000):
        found = ratio_interval(true + rng.normal(0, 20.0, 30), values, 20.0, normal_quantile(0.9))
        misses += found is not None and not found[0] <= mean <= found[1]
    assert 2000 * 0.1 - 5 * math.sqrt(180) < misses <= misses_allowed(2000, 0.1)


def test_where_noise_dominates_nothing_is_said_to_be_known() -> None:
    assert ratio_interval(np.array([1.0, -3.0]), np.array([0.0, 1.0]), 5.0, 1.96) is None
    assert distribution(np.array([-3.0, 1.0])).tolist() == [0.0, 0.5, 1.0]
    plan = plan_measurement([AGE], population=20, noise_multiplier=100.0)
    released = plan.release(np.zeros(plan.size, dtype=np.int64), SeededNoise(1))
    found = Measurement.of(plan, released, seeded=True, charged=None)
    age = found.number("age")
    assert math.isnan(age.median.value)
    assert (age.median.low, age.median.high) == (0.0, 100.0)
    assert math.isnan(age.mean.value)
    assert math.isnan(age.spread)
    assert "not known" in str(found)


@given(st.lists(st.floats(-50, 200), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_the_estimated_distribution_is_monotone_and_no_worse(noisy: list[float], q: float) -> None:
    """Its largest error is no larger than that of the cumulative sums that it is made of."""
    h = np.array(noisy)
    shares = distribution(h)
    assert (np.diff(shares) >= 0).all()
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    edges = np.linspace(0.0, 1.0, len(h) + 1)
    assert 0.0 <= quantile(h, edges, q) <= 1.0
    if h.sum() > 1.0:
        rough = np.concatenate([[0.0], np.cumsum(h)]) / h.sum()
        true = np.linspace(0.0, 1.0, len(h) + 1) ** 2
        assert np.abs(shares - true).max() <= np.abs(rough - true).max() + 1e-12


def test_figures_without_noise_are_those_of_the_people(tmp_path: Path) -> None:
    path = people_file(tmp_path / "people.csv")
    found = measure(
        path, SCHEMA, columns=["age", "job", "sex", "hired"], bins=400, epsilon=1, noise=Silence()
    )
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    weight = {user: 1 / sum(row["id"] == user for row in rows) for user in {r["id"] for r in rows}}
    ages = [(float(row["age"]), weight[row["id"]]) for row in rows if row["age"]]
    total = sum(w for _, w in ages)
    mean = sum(x * w for x, w in ages) / total
    age = found.number("age")
    assert age.mean.value == pytest.approx(mean, abs=0.2)
    assert age.missing is not None
    assert age.missing.value == pytest.approx(1 - total / 400, abs=1e-3)
    ages.sort()
    reached = np.cumsum([w for _, w in ages]) / total
    for q, quartile in zip((0.25, 0.5, 0.75), age.quartiles, strict=True):
        assert quartile.value == pytest.approx(ages[int(np.searchsorted(reached, q))][0], abs=0.3)
    clerks = sum(weight[row["id"]] for row in rows if row["job"] == "clerk") / 400
    assert found.categories("job").shares["clerk"].value == pytest.approx(clerks, abs=1e-3)
    assert list(found.categories("sex").counts) == ["Female", "Male"]
    assert sum(found.categories("hired").counts.values()) == pytest.approx(400, abs=1e-2)


def test_a_spread_is_never_zero() -> None:
    cells = NumberCells("x", 0.0, 100.0, bins=50)
    plan = plan_measurement([cells], population=1000, noise_multiplier=1.0)

    def spread(values: list[float]) -> float:
        total = np.bincount(cells.codes(np.array(values)), minlength=50) << STEP_BITS
        found = Measurement.of(plan, plan.release(total, Silence()), seeded=True, charged=None)
        return found.number("x").spread

    assert spread([0.0] * 1000) == pytest.approx(2.0), "a bin"
    assert spread([0.0] * 900 + [60.0] * 100) == pytest.approx(61 / 3.29, rel=0.03), "its tail"
    normal = np.random.default_rng(0).normal(50, 12, 1000).tolist()
    assert spread(normal) == pytest.approx(12, rel=0.1)


def test_a_spread_is_not_taken_from_tails_that_noise_covers() -> None:
    """All users in a bin of a wide range: noise in the other 63 bins is not a tail of theirs."""
    cells = NumberCells("x", 0.0, 64.0, bins=64)
    plan = plan_measurement([cells], population=600, noise_multiplier=3.5)
    total = np.bincount([20], weights=[600], minlength=64).astype(np.int64) << STEP_BITS

    def spread(seed: int) -> float:
        found = Measurement.of(
            plan, plan.release(total, SeededNoise(seed)), seeded=True, charged=None
        )
        return found.number("x").spread

    assert [spread(seed) for seed in range(400)] == [1.0] * 400


# --- charges ------------------------------------------------------------------------------------


def ledger_of(path: Path, epsilon: float, population: int = 400) -> Path:
    PopulationLedger.create(path, population=population, epsilon=epsilon).close()
    return path


def charges(path: Path) -> int:
    with PopulationLedger.open(path, write=False) as ledger:
        return sum(ledger.charges().values())


def test_it_is_charged_before_it_is_released_and_refused_without_a_budget(tmp_path: Path) -> None:
    path, out = people_file(tmp_path / "people.csv"), tmp_path / "measured.json"
    file = ledger_of(tmp_path / "people.jsonl", epsilon=0.5)
    order: list[int] = []

    @dataclass(frozen=True)
    class Watching(Silence):
        def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
            order.append(charges(file))
            return super().integers(size, round, device=device)

    found = measure(path, SCHEMA, epsilon=0.2, ledger=file, out=out, noise=Watching())
    assert order == [1]
    assert found.charged is not None
    with PopulationLedger.open(file, write=False) as ledger:
        assert ledger.charges() == {found.mechanism: 1}
        assert list(ledger.by_run()) == [found.charged]
    assert Measurement.read(out) == found
    with pytest.raises(ValueError, match="there already"):
        measure(path, SCHEMA, epsilon=0.2, ledger=file, out=out)
    with pytest.raises(BudgetExhaustedError, match="one more measurement"):
        measure(path, SCHEMA, epsilon=3, ledger=file, out=tmp_path / "two.json")
    assert charges(file) == 1
    assert not (tmp_path / "two.json").exists()
    other = ledger_of(tmp_path / "others.jsonl", epsilon=5, population=90)
    with pytest.raises(ValueError, match="about 90 users"):
        measure(path, SCHEMA, epsilon=0.2, ledger=other)


KILLED = """
import os, signal, sys
import fpfl
from dataclasses import dataclass

@dataclass
class Kill:
    seeded = False
    def integers(self, size, round, *, device):
        os.kill(os.getpid(), signal.SIGKILL)

fpfl.measure(sys.argv[1], sys.argv[2], epsilon=0.2, ledger=sys.argv[3], out=sys.argv[4],
             noise=Kill())
"""


def test_a_kill_between_charge_and_release_costs_and_releases_nothing(tmp_path: Path) -> None:
    path, out = people_file(tmp_path / "people.csv"), tmp_path / "measured.json"
    schema = tmp_path / "people.toml"
    schema.write_text(SCHEMA.toml(), encoding="utf-8")
    file = ledger_of(tmp_path / "people.jsonl", epsilon=5)
    words = [sys.executable, "-c", KILLED, *map(str, (path, schema, file, out))]
    done = subprocess.run(words, capture_output=True, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert charges(file) == 1
    assert not out.exists()
    measure(path, schema, epsilon=0.2, ledger=file, out=out, noise=SeededNoise(0))
    assert charges(file) == 2, "what is released has a charge of its own"


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_a_finished_run_is_charged_once(tmp_path: Path) -> None:
    data = make_population(users=60)
    run = tmp_path / "run"
    fpfl.train(
        fpfl.mlp(5, seed=0),
        data,
        privacy=fpfl.Privacy(epsilon=2, delta=1e-3),
        cohort=20,
        rounds=2,
        seed=0,
        noise_seed=0,
        folder=run,
    )
    columns = {"feature 0": (-3.0, 3.0)}
    asked: dict[str, Any] = {"columns": columns, "delta": 1e-3, "run": run}
    with pytest.raises(ValueError, match="the run is about 60 users"):
        measure(data.declared(61), epsilon=1, **asked)
    found = measure(data, epsilon=1, noise=SeededNoise(0), **asked)
    assert Measurement.read(run / "measured.json") == found
    (run / "measured.json").unlink()
    with pytest.raises(BudgetExhaustedError, match="charged a measurement already"):
        measure(data, epsilon=1, **asked)
    assert not (run / "measured.json").exists()
    assert fpfl.measure is measure


def test_a_run_that_is_open_charges_its_population_too_or_nobody(tmp_path: Path) -> None:
    """As a training would call it: a plan of a given σ, in a run that has begun."""
    data = make_population(users=60).declared(60)
    people = people_of_dataset(data, ["sex"], 16, [])
    for epsilon, refused in ((5.0, False), (0.05, True)):
        file = ledger_of(tmp_path / f"{epsilon}.jsonl", epsilon=epsilon, population=60)
        plan = plan_measurement(people.columns, population=60, noise_multiplier=3.0)
        own = tmp_path / f"run-{epsilon}.jsonl"
        with (
            PopulationLedger.open(file) as theirs,
            RunLedger.create(own, run="r", terms=None, simulation=False, population=theirs) as run,
        ):
            if refused:
                with pytest.raises(BudgetExhaustedError, match="one more measurement"):
                    measured(plan, people, SeededNoise(0), run=run)
            else:
                found = measured(plan, people, SeededNoise(0), run=run)
                assert found.mechanism.noise_multiplier == 3.0
                assert theirs.charges() == {plan.mechanism: 1}
        kinds = [record["kind"] for record in RunLedger.look(own).chain.records]
        assert kinds.count("measurement") == (not refused)
        assert charges(file) == (not refused)


# --- asking, and what comes of it ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"columns": ["name"]}, "partition selection"),
        ({"columns": []}, "at least one"),
        ({"columns": ["age", "age"]}, "each once"),
        ({"columns": "age"}, "lists of names"),
        ({"symlog": ["wage"]}, "which are not measured"),
        ({"columns": {"job": (0.0, 1.0)}}, "no range or symlog"),
        ({"epsilon": None}, "exactly one of them"),
        ({"noise_multiplier": 3.0}, "exactly one of them"),
        ({"epsilon": -1.0}, "expected 0 < ε"),
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"neighbours": "add-remove"}, "Declare K"),
        ({"out": "nowhere/here.json"}, "no folder"),
        ({"schema": None}, "needs its declared schema"),
        ({"schema": replace(SCHEMA, source="data")}, "drafted from the data"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_costs(
    tmp_path: Path, asked: dict[str, Any], words: str
) -> None:
    path = people_file(tmp_path / "people.csv", users=4)
    file = ledger_of(tmp_path / "people.jsonl", epsilon=5)
    given: dict[str, Any] = {"epsilon": 0.2, "ledger": file, "schema": SCHEMA}
    with pytest.raises(ValueError, match=words):
        measure(path, **given | asked)
    assert charges(file) == 0


def test_a_dataset_takes_ranges_that_somebody_declared() -> None:
    data = make_population(users=300)
    with pytest.raises(ValueError, match="has no declared range"):
        measure(data, epsilon=1)
    with pytest.raises(ValueError, match="there is no column 'race'"):
        measure(data, columns=["race"], epsilon=1)
    with pytest.raises(ValueError, match="has a schema of its own"):
        measure(data, SCHEMA, epsilon=1)
    ranges = replace(data.schema, feature_ranges=((0.0, 1.0),) * 5)
    found = measure(replace(data, schema=ranges), epsilon=20, noise=SeededNoise(0))
    assert [each.name for each in found.columns] == [f"feature {i}" for i in range(5)]
    assert found.number("feature 0").median.value == pytest.approx(
        float(data.features[:, 0].median()), abs=0.3
    )
    shares = measure(data, columns=["sex", "label"], epsilon=20, noise=SeededNoise(0))
    assert set(shares.categories("sex").shares) == {"Female", "Male"}
    assert set(shares.categories("label").shares) == {"0", "1"}
    declared = measure(
        data.declared(300), columns=["sex"], epsilon=1, neighbours="add-remove", noise=Silence()
    )
    assert "declared number" in " ".join(declared.statement())


def test_a_measurement_fills_what_nobody_declared(tmp_path: Path) -> None:
    path = people_file(tmp_path / "people.csv", users=3000)
    given = tuple(
        replace(each, centre=1.0, scale=9.0) if each.name == "income" else each
        for each in SCHEMA.features
    )
    schema = replace(SCHEMA, features=given)
    found = measure(path, schema, epsilon=2, noise=SeededNoise(2))
    assert [each.name for each in found.columns] == ["age", "job"], "what is declared is free"
    whole = filled(schema, found)
    age, job, income = whole.features
    assert isinstance(age, NumberColumn)
    assert isinstance(job, CategoryColumn)
    assert age.measured
    assert age.centre == pytest.approx(50, abs=2)
    assert age.scale == pytest.approx(10, abs=2)
    assert job.shares == pytest.approx((0.6, 0.3), abs=0.05)
    assert income == given[2]
    assert whole.measured == MeasuredAt(found.epsilon, found.delta, "zero-out", seeded=True)
    again = tmp_path / "measured.toml"
    again.write_text(whole.toml(), encoding="utf-8")
    assert read_table_schema(again) == whole
    in_a_config = tomllib.loads(whole.toml("data.schema"))["data"]["schema"]
    assert declared_schema(in_a_config) == whole
    assert whole.schema() == schema.schema()
    with pytest.raises(ValueError, match="of a measurement already"):
        filled(whole, found)
    with pytest.raises(ValueError, match="costs nothing"):
        measure(path, whole, epsilon=2)
    # Declared after all: nothing is left to fill.
    full = replace(whole, measured=None, features=tuple(_declared(f) for f in whole.features))
    assert filled(full, found) == full


def test_a_measurement_fills_quantiles_where_a_column_becomes_ranks(tmp_path: Path) -> None:
    path = people_file(tmp_path / "people.csv", users=3000)
    ranked = NumberColumn("income", (0, 1e5), transform="quantile")
    schema = replace(SCHEMA, features=(ranked,))
    found = measure(path, schema, epsilon=2, noise=SeededNoise(2))
    cells = found.number("income").cells
    assert cells.threshold == 100.0, "the bins that training takes"
    whole = filled(schema, found)
    (income,) = whole.features
    assert isinstance(income, NumberColumn)
    assert income.measured
    assert income.centre is None
    assert income.quantiles is not None
    assert declared_schema(tomllib.loads(whole.toml())) == whole
    exact = np.quantile(fpfl.read_table(path, schema).features.numpy(), [0.25, 0.5, 0.75])
    values = (np.array(income.quantiles)[[8, 16, 24]] - 5e4) * 6 / 1e5
    edges = (np.sort(cells.edges) - 5e4) * 6 / 1e5
    assert np.abs(np.searchsorted(edges, values) - np.searchsorted(edges, exact)).max() <= 1
    with pytest.raises(ValueError, match="costs nothing"):
        measure(path, whole, epsilon=2)
    # Noise, and a single bin: nothing is said, and nothing is marked as measured.
    drowned = measure(path, schema, epsilon=1e-3, noise=SeededNoise(2))
    assert filled(schema, drowned) == schema
    wide = {"income": (0.0, 1e9)}
    alone = measure(path, schema, epsilon=50, bins=2, columns=wide, noise=Silence())
    assert filled(schema, alone).features == schema.features


def _declared(feature: Any) -> Any:
    return replace(feature, measured=False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("age = { range = [0, 9], centre = 3 }", "both or neither"),
        ("age = { range = [0, 9], centre = 30, scale = 1 }", "a centre in its range"),
        ("age = { range = [0, 9], centre = 3, scale = 0 }", "positive"),
        ("age = { range = [0, 9], centre = 'x', scale = 1 }", "expected a number"),
        ("age = { range = [0, 9], source = 'measured' }", "no figures"),
        ("age = { range = [0, 9], centre = 3, scale = 1, source = 'measured' }", r"\[measured\]"),
        ("age = { range = [0, 9], centre = 3, scale = 1, source = 'guess' }", "'measured'"),
        ("job = { values = ['a', 'b'], shares = [0.5] }", "one for each"),
        ("job = { values = ['a', 'b'], shares = [0.9, 0.9] }", "add up to 1"),
        ("job = { values = ['a', 'b'], shares = 'x' }", "a number for each"),
        ("age = [0, 9]\n[measured]\nepsilon = 1", "needs epsilon and delta"),
        ("age = [0, 9]\n[measured]\nepsilon = -1\ndelta = 0.1", "a positive ε"),
    ],
)
def test_figures_in_a_schema_are_checked(line: str, words: str) -> None:
    text = f"[label]\ncolumn = 'y'\nclasses = [0, 1]\n[features]\n{line}\n"
    with pytest.raises(ValueError, match=words):
        declared_schema(tomllib.loads(text))


def test_a_measurement_is_read_back(tmp_path: Path) -> None:
    path = people_file(tmp_path / "people.csv")
    found = measure(path, SCHEMA, epsilon=1, symlog={"income": 50.0}, noise=SeededNoise(0))
    assert Measurement.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    income = found.number("income")
    assert income.cells.threshold == 50.0
    content = found.as_dict()
    assert content["figures"]["income"]["0.5"]["value"] == income.median.value
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(content | {"columns": [{}]}), encoding="utf-8")
    with pytest.raises(ValueError, match="is not a measurement"):
        Measurement.read(broken)
    for name, wrong in (("released", [1.0]), ("noise_stddev", 0.0), ("confidence", 2.0)):
        columns = [content["columns"][0] | {name: wrong}]
        with pytest.raises(ValueError, match="expected"):
            Measurement.from_dict(content | {"columns": columns})
    with pytest.raises(KeyError, match="was not measured"):
        found["wage"]
    with pytest.raises(ValueError, match="has categories"):
        found.number("job")
    with pytest.raises(ValueError, match="has numbers"):
        found.categories("age")
    said = " ".join(found.statement())
    assert "Seeded noise" in said
    assert "C = √3" in said
    assert found.plot().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measure(
        people_file(tmp_path / "p.csv"), SCHEMA, epsilon=1, columns=["job"], noise=Silence()
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot()
